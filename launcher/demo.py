"""`make demo`: one pair of models behind the real SGLang server, three ways, side by side.

(a) BF16 KV without a drafter, (b) NVFP4 KV without, (c) NVFP4 KV with the DFlash drafter in its own
FP8 pool. Exit code 0 when every answer of (c) is that of (b), 3 when one differs or a launch is
refused, 2 for bad usage, 1 when a server failed.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path

from launcher.client import ServerError, fp4kv_report, generate, server_info
from launcher.demo_table import judge, not_as_asked, print_table
from launcher.equality import CPU_BOUND, NEAR_TIE_BOUNDS
from launcher.flags import UsageError
from launcher.probe import installed_versions
from launcher.process import ServerFailed, ServerProcess, free_port
from launcher.prompts import load_prompts
from launcher.refusal import Refused
from launcher.serve import COMMAND, judge_launch, launch_command

PAIR = Path(__file__).parent.parent / "models" / "pair"
START_SECONDS = 900
MAX_NEW_TOKENS = 32  # of a prompt that does not say

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


class Progress:
    """Timed lines on stderr."""

    def __init__(self):
        self.begun = time.monotonic()

    def __call__(self, text):
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", file=sys.stderr, flush=True)


def ask(name, flags, prompts, servers, *, embedded, logs, progress, top_two):
    """Starts one server, asks every prompt, stops it; returns (answers, the server's GET /server_info).

    The server is added to ``servers`` for whoever has to stop it from outside.
    """
    port = free_port()
    argv, env = launch_command([*flags, "--port", str(port)], embedded=embedded)
    last_shown = 0.0

    def starting(seconds, line):
        nonlocal last_shown
        if seconds - last_shown >= 10:
            last_shown = seconds
            progress(f"({name}) starting, {seconds:.0f} s: {line[:90]}")

    server = ServerProcess(argv, env, Path(logs) / f"{name}.log", port)
    servers.append(server)
    with server:
        progress(f"({name}) starting: {' '.join(argv[len(COMMAND) :])}")
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


def run_all(launches, prompts, *, embedded, logs, progress):
    """The three servers' answers and reports by name; the first failure stops all of them."""
    servers = []

    def one(name):
        return name, ask(
            name,
            launches[name],
            prompts,
            servers,
            embedded=embedded,
            logs=logs,
            progress=progress,
            top_two=name != "c",
        )

    # Two cores run two interpreters; on a GPU each server sizes its pool from what is free.
    with ThreadPoolExecutor(2 if embedded else 1) as pool:
        pending = [pool.submit(one, name) for name in launches]
        try:
            return dict(sorted(done.result() for done in as_completed(pending)))
        except BaseException:  # an interrupt too: leaving the block waits for the threads
            pool.shutdown(wait=False, cancel_futures=True)
            for server in servers:
                server.stop()
            raise


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


def judged_launches(args, gpu):
    """SGLang's flags of the three servers by name, each judged as `fp4kv serve` judges them.

    Raises: UsageError, Refused
    """
    extra = [*([] if gpu is None else GPU_FLAGS), *args.sglang_flags]
    launches = {}
    for name, (_, flags) in configurations(args.draft).items():
        launches[name] = ["--model-path", str(args.model), *flags, *extra]
        # On a GPU without a result on file this run is the one that makes it.
        judge_launch([*launches[name], "--port", str(free_port())], allow=("FP4-026",))
    return launches


def check_outputs(args):
    """Raises UsageError where the logs or the result could not be written, before minutes are spent."""
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UsageError(f"--json {args.json}: no file can be written there")
    if args.logs is not None:
        try:
            args.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--logs {args.logs}: no folder can be made there ({error.strerror})") from None


def main(argv=None):
    args = build_parser().parse_args(argv)
    progress = Progress()
    gpu = None if args.embedded else gpu_name()
    progress(f"running on {gpu or 'the embedded CPU platform (Triton interpreter)'}")
    bound = CPU_BOUND if gpu is None else NEAR_TIE_BOUNDS["nvfp4"]
    try:
        launches = judged_launches(args, gpu)
        prompts = load_prompts(args.prompts, args.model)
        for prompt in prompts:
            prompt.setdefault("max_new_tokens", MAX_NEW_TOKENS)
        check_outputs(args)
        with tempfile.TemporaryDirectory(prefix="fp4kv-demo-") as scratch:
            results = run_all(
                launches,
                prompts,
                embedded=gpu is None,
                logs=args.logs or scratch,
                progress=progress,
            )
    except UsageError as error:
        print(f"make demo: {error}", file=sys.stderr)
        return 2
    except Refused as error:
        print(error, file=sys.stderr)
        return 3
    except (ServerFailed, ServerError, OSError) as error:
        print(f"make demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make demo: interrupted; the servers are stopped", file=sys.stderr)
        return 130
    reports = {name: fp4kv_report(info) for name, (_, info) in results.items()}
    problems = not_as_asked(reports)
    if problems:
        print(f"make demo: not what was asked for: {'; '.join(problems)}", file=sys.stderr)
        return 1
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
