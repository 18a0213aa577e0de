"""Gated-delta hybrids on a GPU: drafted against undrafted, prefix cache, chunks, pools and plans.

usage: python -m tests.gpu.hybrid OUT.json --logs FOLDER [--moe | --two-gpus]

A Qwen3.5 text model with random weights (8 layers, of which two keep K and V; hidden size 512, 8 query and 2 KV
heads of 256, recurrent heads of 128) is served ten times at once with CUDA graphs: BF16, FP8 and NVFP4 KV, alone
and with an oracle drafter; NVFP4 with a random drafter and eager; NVFP4 with states in BF16, alone and with the
oracle. Random weights put near-ties everywhere, and BF16 and FP8 KV, stock SGLang, are the controls: SGLang decodes them
by another kernel than it verifies by, so their drafted answers part by its rounding and few of the oracle's tokens are
accepted; NVFP4 decodes by verify's kernel. What a control does is written down and decides nothing. Exit code 3 when a
pool, a state or a plan of an NVFP4 server is not as asked, its drafts are not accepted, or an answer of its parts above
a near-tie.

--moe: a Qwen3.5-MoE of these sizes with 64 experts, 8 a token, and a shared one, in SGLang's fused MoE kernel, by the
four servers with NVFP4 KV and states in FP32. Beside them `fp4kv serve` starts one with the random drafter, which has
to pass its proof and canary.

--two-gpus: NVFP4 KV on two ranks, beside one GPU's, eager, and with a windowed DFlash2 draft, an oracle's tokens or its
own: tests/e2e/test_two_sparks.py on GPUs.
"""

import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests

from launcher.client import fp4kv_report, generate, server_info
from launcher.demo import Progress
from launcher.equality import NEAR_TIE_BOUNDS, compare
from launcher.process import ServerFailed, ServerProcess, free_port
from launcher.serve import launch_command
from tests.e2e.server import plugin_path
from tests.e2e.tiny_models import build_dflash2, build_draft, build_hybrid
from tests.gpu.origin import arguments, origin
from tests.gpu.plan_servers import Case
from tests.gpu.plan_servers import compare as compare_plan
from tests.gpu.serving import NCCL

START_SECONDS = 400
BUDGET = 3_000_000_019
SIZES = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "vocab_size": 4096, "eos_token_id": 4095,
}  # fmt: skip
EXPERTS = {
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
CHUNK = 512
LENGTHS = (5, 60, 130, 400, 700, 1500)  # the last two in two and three chunks
NEW_TOKENS = 64
COMMON = (
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.3",
    "--max-running-requests", "8", "--chunked-prefill-size", str(CHUNK), "--cuda-graph-max-bs-decode", "8",
)  # fmt: skip
NO_GRAPHS = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
BF16_STATES = ("--mamba-ssm-dtype", "bfloat16")


@dataclass(frozen=True)
class Server:
    """``drafter``: None, "oracle" or "random". ``reference``: the server whose answers its own are held to.
    ``target``: which of its run's targets it serves."""

    kv: str
    drafter: str | None = None
    flags: tuple = ()
    reference: str | None = None
    target: str = "bf16"


SERVERS = {
    "bf16": Server("bf16"),
    "bf16 oracle": Server("bf16", "oracle", reference="bf16"),
    "fp8": Server("fp8_e4m3"),
    "fp8 oracle": Server("fp8_e4m3", "oracle", reference="fp8"),
    "nvfp4": Server("nvfp4"),
    "nvfp4 eager": Server("nvfp4", flags=NO_GRAPHS, reference="nvfp4"),
    "nvfp4 oracle": Server("nvfp4", "oracle", reference="nvfp4"),
    "nvfp4 random": Server("nvfp4", "random", reference="nvfp4"),
    "nvfp4 bf16 states": Server("nvfp4", flags=BF16_STATES),
    "nvfp4 bf16 states oracle": Server("nvfp4", "oracle", BF16_STATES, "nvfp4 bf16 states"),
}
WITH_EXPERTS = {name: SERVERS[name] for name in ("nvfp4", "nvfp4 eager", "nvfp4 oracle", "nvfp4 random")}
HELD = "fp4kv serve"
TWO = ("--tp-size", "2", *NCCL)
ON_TWO = {
    "nvfp4 one GPU": Server("nvfp4"),
    "nvfp4": Server("nvfp4", flags=TWO, reference="nvfp4 one GPU"),
    "nvfp4 eager": Server("nvfp4", flags=(*TWO, *NO_GRAPHS), reference="nvfp4"),
    "nvfp4 oracle": Server("nvfp4", "oracle", TWO, "nvfp4"),
    "nvfp4 random": Server("nvfp4", "random", TWO, "nvfp4"),
}
WINDOW = 128


def prompts():
    seeded = random.Random(13)
    return [[seeded.randrange(16, 4000) for _ in range(length)] for length in LENGTHS]


@dataclass(frozen=True)
class Answers:
    """``alone``: a Generation for each prompt. ``again``, ``third``: the longest once more and once more, from the
    cache. ``together``: tokens of four identical requests sent at once."""

    alone: list
    again: object
    third: object
    together: list


def ask(url, drafted):
    def one(prompt):
        return generate(url, prompt, NEW_TOKENS, ignore_eos=True, top_two=not drafted)

    asked = prompts()
    alone = [one(prompt) for prompt in asked]
    again, third = one(asked[-1]), one(asked[-1])
    body = {
        "input_ids": [asked[1]] * 4,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    response = requests.post(f"{url}/generate", json=body, timeout=300)
    response.raise_for_status()
    return Answers(alone, again, third, [tuple(a["output_ids"]) for a in response.json()])


class Run:
    """``servers`` by name, each after its reference, and folders of their ``targets``. ``dflash2``: whether the
    draft is one, with windows.

    They are started together and asked one after the other.
    """

    def __init__(self, scratch, logs, servers, targets, dflash2=False):
        self.scratch, self.logs, self.progress = scratch, logs, Progress()
        self.servers, self.targets = servers, targets
        self.draft = build_draft(scratch / "draft", targets["bf16"])
        if dflash2:
            self.draft = build_dflash2(scratch / "dflash2", self.draft, WINDOW)
        self.answers, self.reports = {}, {}

    def case(self, name):
        server = self.servers[name]
        flags = [*COMMON, "--kv-cache-dtype", server.kv, *server.flags]
        if server.drafter:
            flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(self.draft)]
        draft = self.draft if server.drafter else None
        return Case(name, self.targets[server.target], draft, server.kv, flags, BUDGET)

    def oracle(self, name):
        return self.scratch / f"recorded-{name.replace(' ', '-')}.json"

    def environment(self):
        env = {**os.environ, "FP4KV_KV_BUDGET_BYTES": str(BUDGET)}
        # Servers on one GPU and on two start side by side.
        env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        return {**env, "PYTHONPATH": plugin_path(env)}

    def start(self, name):
        case, server, env = self.case(name), self.servers[name], self.environment()
        if server.drafter == "oracle":
            env["FP4KV_ORACLE"] = str(self.oracle(server.reference))
        port = free_port()
        argv, env = launch_command(
            ["--model-path", str(case.target), *case.flags, "--port", str(port)], environ=env
        )
        return ServerProcess(argv, env, self.logs / f"{name.replace(' ', '-')}.log", port).start()

    def go(self):
        running = {}
        try:
            for name in self.servers:
                running[name] = self.start(name)
            with ThreadPoolExecutor(len(running)) as pool:
                waits = pool.map(lambda s: s.wait_ready(START_SECONDS, path="/health"), running.values())
                for name, seconds in zip(running, waits, strict=True):
                    self.progress(f"{name} ready after {seconds:.0f} s")
            for name, server in self.servers.items():
                self.answers[name] = ask(running[name].url, server.drafter is not None)
                self.reports[name] = fp4kv_report(server_info(running[name].url))
                self.progress(f"{name} asked")
                if server.drafter is None:
                    self.record(name)
        finally:
            with ThreadPoolExecutor(max(1, len(running))) as pool:
                list(pool.map(lambda server: server.stop(grace=2), running.values()))

    def go_held(self, name):
        """What `fp4kv serve` says until the server ``name`` serves or has ended, and what is wrong with that."""
        case, port, log = self.case(name), free_port(), self.logs / "fp4kv-serve.log"
        argv = [sys.executable, "-m", "launcher.cli", "serve", "--", "--model-path", str(case.target)]
        argv += [*case.flags, "--port", str(port)]
        wrong = []
        with ServerProcess(argv, self.environment(), log, port) as server:
            try:
                server.wait_ready(START_SECONDS, path="/health")
            except ServerFailed as error:
                wrong.append(f"not served: {error}")
        said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(HELD)]
        if not any("canary passed: " in line for line in said):
            wrong.append("the canary has not passed")
        return {"kv": self.servers[name].kv, "comparisons": {"said": said}, "wrong": wrong}

    def record(self, name):
        answers = self.answers[name].alone
        content = [
            {"prompt": prompt, "output": list(answer.tokens)}
            for prompt, answer in zip(prompts(), answers, strict=True)
        ]
        self.oracle(name).write_text(json.dumps(content))


def held_to(run, name, number, tokens, reference=None):
    """``tokens`` beside what ``reference`` (the server itself where it is None) made of prompt ``number`` alone.

    A drafted run brings no margins, so these are its undrafted reference's; after a parting they are not its own.
    """
    server = run.servers[name]
    sure = name if reference is None and server.drafter is None else server.reference or name
    margins = run.answers[sure].alone[number].gaps
    theirs = run.answers[reference or name].alone[number].tokens
    return compare(theirs, tokens, margins, NEAR_TIE_BOUNDS[server.kv])


def findings(run, name):
    """Comparisons of one server, and what is wrong with it as texts."""
    server, answers, report = run.servers[name], run.answers[name], run.reports[name]
    row, differ = compare_plan(run.case(name), report)
    wrong = [f"plan: {what} {pair}" for what, pair in differ.items()]
    states, asked = report["states"], "bfloat16" if BF16_STATES[0] in server.flags else "float32"
    if states["dtype"] != asked or states["layers"] != 6:
        wrong.append(f"states: {states['layers']} layers in {states['dtype']}, asked 6 in {asked}")
    if answers.again.tokens != answers.third.tokens:
        wrong.append("the second and the third answer from the cache differ")
    if not answers.again.cached_tokens:
        wrong.append("a repeated prompt does not hit the cache")
    found = {"again / third": answers.again.tokens == answers.third.tokens}
    compared = {
        "alone / repeated": [held_to(run, name, -1, answers.again.tokens)],
        "alone / four at once": [held_to(run, name, 1, tokens) for tokens in answers.together],
    }
    if server.reference:
        compared[f"{server.reference} / {name}"] = [
            held_to(run, name, i, answer.tokens, server.reference) for i, answer in enumerate(answers.alone)
        ]
    for what, results in compared.items():
        found[what] = {
            "counts": {v: sum(r.verdict == v for r in results) for v in ("equal", "near-tie", "different")},
            "parted": [vars(r) for r in results if r.position is not None],
        }
        wrong += [f"{what}: {r}" for r in results if not r.passed]
    lengths = [a.accept_length for a in answers.alone]
    if server.drafter:
        found["accept_lengths"] = lengths
    if server.drafter == "oracle" and max(lengths) < 2:
        wrong.append(f"the oracle's blocks are not accepted: {lengths}")
    cached = [answers.again.cached_tokens, answers.third.cached_tokens]
    return {
        "kv": server.kv,
        "comparisons": found,
        "cached_tokens": cached,
        "report": report,
        "plan": row,
        "wrong": wrong,
    }


def verdicts(found):
    """Names of the NVFP4 servers with something wrong, which decide, and of the controls."""
    wrong = [name for name, entry in found.items() if entry["wrong"]]
    failed = [name for name in wrong if found[name]["kv"] == "nvfp4"]
    return failed, [name for name in wrong if name not in failed]


def finish(out, module, begun, found, **more):
    """Writes and prints what ``module`` found of each server; its exit code."""
    failed, controls = verdicts(found)
    for name, entry in found.items():
        print(name, json.dumps(entry["comparisons"]), *entry["wrong"], sep="\n  ")
    content = {
        **origin(module),
        "seconds": round(time.monotonic() - begun, 1),
        "sizes": SIZES,
        **more,
        "near_tie_bounds": NEAR_TIE_BOUNDS,
        "failed": failed,
        "controls_that_part": controls,
        "servers": found,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"controls that part (not judged): {controls}")
    print(f"failed: {failed}" if failed else "OK")
    return 3 if failed else 0


def main():
    args, begun = arguments(__doc__, "--moe", "--two-gpus"), time.monotonic()
    sizes, servers = (SIZES | EXPERTS, WITH_EXPERTS) if args.moe else (SIZES, ON_TWO if args.two_gpus else SERVERS)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as beside:
        target = build_hybrid(Path(scratch, "target"), **sizes)
        run = Run(Path(scratch), args.logs, servers, {"bf16": target}, dflash2=args.two_gpus)
        held = beside.submit(run.go_held, "nvfp4 random") if args.moe else None
        run.go()
        found = {name: findings(run, name) for name in servers}
        if held:
            found[HELD] = held.result()
    return finish(args.out, "tests.gpu.hybrid", begun, found, sizes=sizes)


if __name__ == "__main__":
    sys.exit(main())
