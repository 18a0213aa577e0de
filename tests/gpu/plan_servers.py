"""Plans beside servers on a GPU: max_total_num_tokens, bytes per token and states, to the token.

usage: python -m tests.gpu.plan_servers OUT.json --logs FOLDER

Starts together, each on a fixed budget: the shipped pair with BF16 and NVFP4 KV, alone and drafted, and a small
hybrid (three recurrent layers to one, random weights) in BF16 and FP8, alone and drafted. Then, alone on the GPU, the
drafted NVFP4 pair on what --mem-fraction-static leaves. Exit code 3 when a plan differs from its server.
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.client import fp4kv_report, server_info
from launcher.demo import PAIR, Progress
from launcher.flags import parse
from launcher.modelfacts import read_facts
from launcher.plan_rows import Budget, make_plan
from launcher.process import ServerProcess, free_port
from launcher.serve import launch_command
from tests.e2e.server import plugin_path
from tests.e2e.tiny_models import build_draft, build_hybrid
from tests.gpu.origin import arguments, origin, without_folders

START_SECONDS = 400
FIXED_BUDGET = 5_000_000_033
COMMON = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.1",
          "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")  # fmt: skip
# KV, drafted, flags. Page sizes that do not divide what is left.
PAIR_CASES = (
    ("bf16", False, ("--page-size", "64")),
    ("bf16", True, ()),
    ("nvfp4", False, ("--page-size", "64")),
    ("nvfp4", True, ("--page-size", "16")),
    ("nvfp4", True, ("--page-size", "16", "--speculative-draft-kv-cache-dtype", "bf16")),
)
HYBRID_CASES = (
    ("bf16", False, ()),
    ("fp8_e4m3", False, ("--page-size", "64")),
    ("bf16", True, ()),
    ("bf16", True, ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")),
)


@dataclass(frozen=True)
class Case:
    """One server. ``budget``: bytes it has for states, K and V; None for what the GPU leaves."""

    name: str
    target: Path
    draft: Path | None
    kv: str
    flags: list
    budget: int | None


def cases(folder):
    """The servers with a fixed budget, and the one without."""
    target = build_hybrid(
        folder / "target", head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64
    )
    draft = build_draft(folder / "draft", target)
    pair = (PAIR / "target", PAIR / "draft")
    fixed = [_case("pair", *pair, *asked) for asked in PAIR_CASES]
    fixed += [_case("hybrid", target, draft, *asked) for asked in HYBRID_CASES]
    return fixed, [replace(fixed[3], name=f"{fixed[3].name}, alone on the GPU", budget=None)]


def _case(kind, target, draft, kv, drafted, flags):
    name = " ".join([kind, kv, *(["drafted"] if drafted else []), *flags])
    flags = [*COMMON, "--kv-cache-dtype", kv, *flags]
    if drafted:
        flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    return Case(name, target, draft if drafted else None, kv, flags, FIXED_BUDGET)


def start(case, logs):
    port, env = free_port(), dict(os.environ)
    if case.budget:
        env["PYTHONPATH"] = plugin_path(env)
        env["FP4KV_KV_BUDGET_BYTES"] = str(case.budget)
    argv, env = launch_command(
        ["--model-path", str(case.target), *case.flags, "--port", str(port)], environ=env
    )
    return ServerProcess(argv, env, logs / f"{case.name.replace(' ', '-')}.log", port).start()


def compare(case, report):
    """The plan's row for a server's report, and what differs between them."""
    held = report["budget"]
    memory = Budget(pools=case.budget) if case.budget else Budget(kv=held["available_bytes"])
    facts = [folder and read_facts(str(folder), "MODEL") for folder in (case.target, case.draft)]
    flags = parse(["--model-path", str(case.target), *case.flags])
    plan = make_plan(*facts, flags, memory, {}, None)
    inherited = "fp8_e4m3" if case.kv == "nvfp4" else case.kv
    drafter = (flags.speculative_draft_kv_cache_dtype or inherited) if case.draft else None
    asked = (case.kv, drafter, None)
    (row,) = (row for row in plan.rows if (row.kv, row.drafter, row.workspace) == asked)
    figures = {
        "max_total_num_tokens": (row.tokens, report["max_total_num_tokens"]),
        "bytes_per_token": (row.bytes_per_token, held["bytes_per_token"]),
        "page_size": (plan.page_size, held["page_size"]),
    }
    if case.budget:
        figures["state_bytes"] = (row.state_bytes or 0, case.budget - held["available_bytes"])
    if case.draft:
        figures["drafter_bytes"] = (row.drafter_bytes, report["draft"]["bytes_per_token"])
    return asdict(row), {what: pair for what, pair in figures.items() if pair[0] != pair[1]}


def ask(together, logs, progress):
    """What is found of servers that run at the same time, by name."""
    found, running = {}, []
    try:
        for case in together:
            running.append(start(case, logs))
        with ThreadPoolExecutor(len(running)) as pool:
            waits = list(pool.map(lambda s: s.wait_ready(START_SECONDS, path="/server_info"), running))
        for case, server, seconds in zip(together, running, waits, strict=True):
            report = fp4kv_report(server_info(server.url))
            row, differ = compare(case, report)
            found[case.name] = {
                "flags": without_folders(case.flags), "budget": case.budget, "report": report, "plan": row, "differ": differ,
            }  # fmt: skip
            progress(f"{case.name}: ready after {seconds:.0f} s, {differ or 'equal'}")
    finally:
        with ThreadPoolExecutor(max(1, len(running))) as pool:
            list(pool.map(lambda server: server.stop(grace=2), running))
    return found


def main():
    args = arguments(__doc__)
    progress, found = Progress(), {}
    with tempfile.TemporaryDirectory() as scratch:
        for together in cases(Path(scratch)):
            found |= ask(together, args.logs, progress)
            wrong = write(args.out, found)
    print(f"failed: {wrong}" if wrong else "OK")
    return 3 if wrong else 0


def write(out, found):
    """Write what was found so far; return the names of servers that differ from their plans."""
    wrong = [name for name, entry in found.items() if entry["differ"]]
    content = {
        **origin("tests.gpu.plan_servers"),
        "failed": wrong,
        "servers": found,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
