"""`make demo`: one pair of models behind the real SGLang server, three ways, side by side.

(a) BF16 KV without a drafter, (b) NVFP4 KV without, (c) NVFP4 KV with the DFlash drafter in its own
FP8 pool. Exit code 0 when every answer of (c) is that of (b), 3 when one differs, 1 when a server
failed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launcher.client import fp4kv_report, generate, server_info
from launcher.equality import CPU_BOUND, NEAR_TIE_BOUNDS, compare
from launcher.process import ServerFailed, ServerProcess, free_port
from launcher.serve import launch_command

PAIR = Path(__file__).parent.parent / "models" / "pair"
START_SECONDS = 900
PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "transformers")

# A small pool is enough, and greedy answers need no sampler; the default one is compiled at the first
# start on a GPU, for minutes.
GPU_FLAGS = [
    "--mem-fraction-static", "0.3", "--max-total-tokens", "32768", "--max-running-requests", "8",
    "--sampling-backend", "pytorch",
]  # fmt: skip
_TRITON = ["--attention-backend", "triton"]
_NVFP4 = [*_TRITON, "--kv-cache-dtype", "nvfp4"]


def configurations(draft):
    """Name, description and SGLang flags of the three servers."""
    drafted = [*_NVFP4, "--speculative-algorithm", "DFLASH"]
    drafted += ["--speculative-draft-model-path", str(draft)]
    return {
        "a": ("BF16 KV", [*_TRITON, "--kv-cache-dtype", "bf16"]),
        "b": ("NVFP4 KV", _NVFP4),
        "c": ("NVFP4 KV, DFLASH drafter", drafted),
    }


def gpu_name():
    """The first NVIDIA GPU's name, None where there is none that CUDA can use."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def load_prompts(file, model):
    """The prompts of ``file`` with their token ids under the model's own chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = json.loads(Path(file).read_text())
    for prompt in prompts:
        prompt["input_ids"] = tokenizer.apply_chat_template(
            prompt["messages"],
            tools=prompt.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
        )
    return prompts


class Progress:
    """Timed lines on stderr."""

    def __init__(self):
        self.begun = time.monotonic()

    def __call__(self, text):
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", file=sys.stderr, flush=True)


def ask(name, flags, prompts, *, embedded, logs, progress, top_two):
    """Starts one server, asks every prompt, stops it; returns (answers, the scheduler's report)."""
    port = free_port()
    argv, env = launch_command([*flags, "--port", str(port)], embedded=embedded)
    last_shown = 0.0

    def starting(seconds, line):
        nonlocal last_shown
        if seconds - last_shown >= 10:
            last_shown = seconds
            progress(f"({name}) starting, {seconds:.0f} s: {line[:90]}")

    server = ServerProcess(argv, env, Path(logs) / f"{name}.log", port)
    with server:
        progress(f"({name}) starting: {' '.join(argv[3:])}")
        seconds = server.wait_ready(START_SECONDS, starting)
        progress(f"({name}) ready after {seconds:.0f} s")
        answers = []
        for number, prompt in enumerate(prompts, 1):
            begun = time.monotonic()
            answer = generate(
                server.url, prompt["input_ids"], prompt["max_new_tokens"], top_two=top_two
            )
            answers.append(answer)
            took = time.monotonic() - begun
            progress(
                f"({name}) {number}/{len(prompts)} {prompt['name']}: {len(answer.tokens)} tokens"
                f" in {took:.1f} s"
            )
        return answers, server_info(server.url)


def run_all(model, draft, prompts, *, embedded, extra_flags, logs, progress):
    """The three servers' answers and reports by configuration name."""

    def one(item):
        name, (_, flags) = item
        flags = ["--model-path", str(model), *flags, *extra_flags]
        return name, ask(
            name,
            flags,
            prompts,
            embedded=embedded,
            logs=logs,
            progress=progress,
            top_two=name != "c",
        )

    # Two cores run two interpreters; on a GPU each server sizes its pool from what is free.
    with ThreadPoolExecutor(2 if embedded else 1) as pool:
        return dict(pool.map(one, configurations(draft).items()))


def judge(prompts, results, bound):
    """Rows of the table: each prompt's tokens three ways, and how (c) compares with (b)."""
    rows = []
    for index, prompt in enumerate(prompts):
        a, b, c = (results[name][0][index] for name in "abc")
        rows.append(
            {
                "prompt": prompt["name"],
                "prompt_tokens": b.prompt_tokens,
                "tokens": {"a": a.tokens, "b": b.tokens, "c": c.tokens},
                "text": {"a": a.text, "b": b.text, "c": c.text},
                "b_c": compare(b.tokens, c.tokens, b.gaps, bound),
                "a_b": compare(a.tokens, b.tokens, a.gaps, bound),
                "accept_length": c.accept_length,
            }
        )
    return rows


def print_table(rows, reports):
    """The table for a person: answers first, then the comparison, then the pools."""
    for row in rows:
        print(f"\n{row['prompt']} ({row['prompt_tokens']} prompt tokens)")
        for name in "abc":
            print(f"  ({name}) {row['text'][name]!r}")
            print(f"      {' '.join(map(str, row['tokens'][name]))}")
    print(f"\n{'prompt':<16}{'tokens':>7}  {'(b) and (c)':<32}{'accept length':>14}  (a) and (b)")
    for row in rows:
        length = row["accept_length"]
        print(
            f"{row['prompt']:<16}{len(row['tokens']['b']):>7}  {row['b_c']!s:<32}"
            f"{'-' if length is None else format(length, '.2f'):>14}  {row['a_b']!s}"
        )
    lengths = [row["accept_length"] for row in rows if row["accept_length"] is not None]
    if lengths:
        print(f"mean accept length {sum(lengths) / len(lengths):.2f}")
    print("\nKV bytes a token:")
    for name, report in reports.items():
        target, draft = report["target"], report["draft"]
        line = f"  ({name}) target {target['bytes_per_token']} ({target['dtype']}, {target['layers']} layers)"
        if draft:
            line += f", drafter {draft['bytes_per_token']} ({draft['dtype']}, {draft['layers']} layers)"
        print(f"{line}; {report['max_total_num_tokens']} tokens")


def installed_versions():
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit():
    """The repository's commit (FP4KV_COMMIT where git cannot tell), None outside a checkout."""
    if "FP4KV_COMMIT" in os.environ:
        return os.environ["FP4KV_COMMIT"]
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or None


def as_json(rows, reports, *, command, gpu, bound, seconds):
    """The run as a result file's content."""
    return {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {**installed_versions(), "python": platform.python_version()},
        "gpu": gpu,
        "seconds": round(seconds, 1),
        "near_tie_bound": bound,
        "rows": [
            {**row, "b_c": vars(row["b_c"]), "a_b": vars(row["a_b"])} for row in rows
        ],
        "reports": reports,
    }


def build_parser():
    parser = argparse.ArgumentParser(prog="python -m launcher.demo", description=__doc__)
    parser.add_argument("--model", type=Path, default=PAIR / "target")
    parser.add_argument("--draft", type=Path, default=PAIR / "draft")
    parser.add_argument("--prompts", type=Path, default=PAIR / "prompts.json")
    parser.add_argument("--embedded", action="store_true", help="use the CPU even with a GPU there")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the run as a result file")
    parser.add_argument(
        "sglang_flags", nargs="*", metavar="SGLANG_FLAGS", help="added to all three servers, after --"
    )
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    progress = Progress()
    gpu = None if args.embedded else gpu_name()
    progress(f"running on {gpu or 'the embedded CPU platform (Triton interpreter)'}")
    bound = CPU_BOUND if gpu is None else NEAR_TIE_BOUNDS["nvfp4"]
    prompts = load_prompts(args.prompts, args.model)
    with tempfile.TemporaryDirectory(prefix="fp4kv-demo-") as scratch:
        try:
            results = run_all(
                args.model,
                args.draft,
                prompts,
                embedded=gpu is None,
                extra_flags=[*([] if gpu is None else GPU_FLAGS), *args.sglang_flags],
                logs=args.logs or scratch,
                progress=progress,
            )
        except ServerFailed as error:
            print(f"make demo: {error}", file=sys.stderr)
            return 1
    reports = {name: fp4kv_report(info) for name, (_, info) in results.items()}
    rows = judge(prompts, results, bound)
    print_table(rows, reports)
    if args.json:
        command = ["python", "-m", "launcher.demo", *(sys.argv[1:] if argv is None else argv)]
        content = as_json(
            rows,
            reports,
            command=command,
            gpu=gpu,
            bound=bound,
            seconds=time.monotonic() - progress.begun,
        )
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    different = [row["prompt"] for row in rows if not row["b_c"].passed]
    ties = sum(row["b_c"].verdict == "near-tie" for row in rows)
    if different:
        print(f"\nFAILED: (b) and (c) differ on {', '.join(different)}")
        return 3
    print(f"\nOK: (c) answers as (b) on all {len(rows)} prompts ({ties} parted at a near-tie)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
