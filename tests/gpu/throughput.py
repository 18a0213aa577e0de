"""Decode tokens per second of whole servers: KV in BF16, FP8 and NVFP4, with and without the drafter.

usage: python -m tests.gpu.throughput MODEL OUT.json --logs DIR [--draft DIR] [--streams 1,4,8]

All servers are started at once and measured one after another; the others idle (--sleep-on-idle).
Prompts are random token ids of a fixed seed, another one for every stream, so nothing but their length
counts. A first round fills the prefix cache; in the measured rounds the prompt comes from there, so a
round is nearly all decode.

The drafter's quality must not decide, so every verify step accepts the same number of tokens: SGLang's
own knob for benchmarks, SGLANG_SIMULATE_ACC_LEN, with its draft model, verify pass and commit as in
earnest. The text is meaningless; answers are what tests/gpu/serving.py judges. Without --draft a
random DFlash draft of two layers and eight tokens a block is made for MODEL.

Exit codes: 0; 3 when NVFP4 is slower than FP8 in a row; 1 when a server on the Triton backend failed.
"""

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from launcher.client import ServerError, fp4kv_report, server_info
from launcher.demo import Progress, commit, gpu_name
from launcher.probe import installed_versions
from launcher.process import ServerFailed, ServerProcess, free_port
from launcher.serve import launch_command
from tests.e2e.tiny_models import build_draft
from tests.gpu.stream_rate import StreamFailed, run_streams, summarize

DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "nvfp4": "float4_e2m1fn_x2"}
START_SECONDS = 300  # the first start compiles attention kernels
SLACK = 0.02  # NVFP4 counts as slower when it is this share below FP8; rounds differ by about as much


def configurations(backends):
    """(backend, KV dtype, drafted) of every server."""
    return [
        (backend, kv, drafted)
        for backend in backends
        for kv in DTYPES
        for drafted in (False, True)
        if backend == "triton" or kv != "nvfp4"
    ]


def server_flags(args, config):
    backend, kv, drafted = config
    most = max(args.streams)
    flags = [
        "--model-path", str(args.model), "--kv-cache-dtype", kv, "--attention-backend", backend,
        "--mem-fraction-static", "0.8", "--max-running-requests", str(most),
        "--max-total-tokens", str((args.prompt_tokens + args.new_tokens + 256) * most + 4096),
        "--sampling-backend", "pytorch", "--sleep-on-idle",
    ]  # fmt: skip
    if drafted:
        flags += ["--speculative-algorithm", "DFLASH"]
        flags += ["--speculative-draft-model-path", str(args.draft)]
    return flags + args.sglang_flags


def server_env(args, config):
    if not config[2]:
        return dict(os.environ)
    return os.environ | {
        "SGLANG_SIMULATE_ACC_LEN": str(args.accept_length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }


def name_of(config):
    backend, kv, drafted = config
    return f"{kv}-{backend}-{'drafted' if drafted else 'plain'}"


def make_prompts(args):
    """Token ids of every stream; ids below 256 are left out, they may be special."""
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    generator = random.Random(0)
    return [
        [generator.randrange(256, vocab) for _ in range(args.prompt_tokens)]
        for _ in range(max(args.streams))
    ]


def start(args, config):
    port = free_port()
    argv, env = launch_command(
        [*server_flags(args, config), "--port", str(port)],
        embedded=args.embedded,
        environ=server_env(args, config),
    )
    return ServerProcess(argv, env, args.logs / f"{name_of(config)}.log", port).start()


def measure(args, config, server, prompts):
    """Rows of one server.

    Raises: ServerError when the scheduler does not hold K and V in the dtype that was asked for, or
    not of all streams at once.
    """
    report = fp4kv_report(server_info(server.url))
    found = report["target"]["dtype"]
    if found != DTYPES[config[1]]:
        raise ServerError(f"asked for {config[1]}, the pool is {found}")
    needed = max(args.streams) * (args.prompt_tokens + args.new_tokens)
    if report["max_total_num_tokens"] < needed:
        raise ServerError(f"the pool has {report['max_total_num_tokens']} tokens, {needed} are needed")
    backend, kv, drafted = config
    for streams in args.streams:
        chosen = prompts[:streams]
        run_streams(server.url, chosen, args.new_tokens)
        rounds = [run_streams(server.url, chosen, args.new_tokens) for _ in range(args.rounds)]
        yield {
            "kv": kv,
            "backend": backend,
            "drafted": drafted,
            "streams": streams,
            **summarize(rounds),
            "target_pool": report["target"]["dtype"],
            "draft_pool": report["draft"] and report["draft"]["dtype"],
        }


class Run:
    """All servers of a run, started together and measured one after another."""

    def __init__(self, args, save):
        self.args, self.save, self.progress = args, save, Progress()
        self.rows, self.failed, self.done = [], {}, []

    def go(self):
        prompts = make_prompts(self.args)
        running = {}
        try:
            for config in configurations(self.args.backends):
                running[config] = start(self.args, config)
            with ThreadPoolExecutor(len(running)) as pool:
                list(pool.map(self.wait, running, running.values()))
            for config, server in running.items():
                if config not in self.failed:
                    self.one(config, server, prompts)
                self.done.append(config)
                self.save(self)
        finally:
            with ThreadPoolExecutor(max(1, len(running))) as pool:
                list(pool.map(lambda server: server.stop(grace=2), running.values()))

    def wait(self, config, server):
        try:
            seconds = server.wait_ready(self.args.start_seconds, path="/health")
            self.progress(f"{name_of(config)} ready after {seconds:.0f} s")
        except ServerFailed as error:
            self.fail(config, error)
            server.stop(grace=2)

    def one(self, config, server, prompts):
        try:
            for row in measure(self.args, config, server, prompts):
                self.rows.append(row)
                self.progress(f"{name_of(config)} x{row['streams']}: {row['tokens_per_second']}")
        except (ServerError, StreamFailed, OSError) as error:
            self.fail(config, error)

    def fail(self, config, error):
        self.failed[config] = str(error)[-2000:]
        self.progress(f"{name_of(config)} FAILED: {str(error)[-300:]}")


def slower_rows(rows, slack=SLACK):
    """Where NVFP4 decodes slower than FP8: (drafted, streams, backend of the FP8 row, ratio)."""
    rate = {(r["kv"], r["backend"], r["drafted"], r["streams"]): r["tokens_per_second"] for r in rows}
    found = []
    for (kv, backend, drafted, streams), fp8 in rate.items():
        ours = rate.get(("nvfp4", "triton", drafted, streams))
        if kv == "fp8_e4m3" and ours is not None and ours < (1 - slack) * fp8:
            found.append((drafted, streams, backend, round(ours / fp8, 3)))
    return found


def table(rows):
    """Lines: one a (drafted, streams), a column a (KV dtype, backend), in tokens per second."""
    columns = list(dict.fromkeys((r["kv"], r["backend"]) for r in rows))
    rate = {
        (r["drafted"], r["streams"], r["kv"], r["backend"]): f"{r['tokens_per_second']:.0f}"
        for r in rows
    }
    lines = [f"{'tokens/s':<20}" + "".join(f"{f'{kv} {backend}':>22}" for kv, backend in columns)]
    for drafted, streams in dict.fromkeys((r["drafted"], r["streams"]) for r in rows):
        cells = [rate.get((drafted, streams, *column), "-") for column in columns]
        label = f"{'drafted' if drafted else 'undrafted'} x{streams}"
        lines.append(f"{label:<20}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.throughput", description=__doc__.splitlines()[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a DFlash draft; without it a random one")
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=7900)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--accept-length", type=int, default=5, help="tokens a verify step yields")
    parser.add_argument("--backends", default="triton,flashinfer", help="flashinfer: BF16 and FP8 only")
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS)
    parser.add_argument("--embedded", action="store_true", help="on the CPU platform, to try this out")
    parser.add_argument("--sglang-flags", default="", help="added to every server, in one word")
    args = parser.parse_args(argv)
    args.streams = [int(n) for n in args.streams.split(",")]
    args.backends = args.backends.split(",")
    args.sglang_flags = shlex.split(args.sglang_flags)
    return args


def write(args, asked, random_draft, begun, run):
    """The result file, as far as the run has come: a run that is cut off keeps its rows."""
    content = {
        # Folders of this machine are left out.
        "command": ["python", "-m", "tests.gpu.throughput", *(word.rpartition("/")[2] for word in asked)],
        "model": args.model.name,
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": installed_versions(),
        "gpu": gpu_name(),
        "seconds": round(time.monotonic() - begun, 1),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "forced_accept_length": args.accept_length,
        "random_draft": random_draft,
        "slack": SLACK,
        "rows": run.rows,
        "nvfp4_slower_than_fp8": [
            dict(zip(("drafted", "streams", "fp8_backend", "ratio"), row, strict=True))
            for row in slower_rows(run.rows)
        ],
        "failed_servers": {name_of(config): error for config, error in run.failed.items()},
        "complete": len(run.done) == len(configurations(args.backends)),
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")


def main(argv=None):
    args = parse(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    asked = sys.argv[1:] if argv is None else argv
    begun = time.monotonic()
    random_draft = args.draft is None
    with tempfile.TemporaryDirectory(prefix="fp4kv-throughput-") as scratch:
        args.draft = args.draft or build_draft(Path(scratch) / "draft", args.model)
        run = Run(args, lambda run: write(args, asked, random_draft, begun, run))
        run.go()
    slower = slower_rows(run.rows)
    print(*table(run.rows), sep="\n")
    for drafted, streams, backend, ratio in slower:
        print(f"slower than fp8 on {backend}: {'drafted' if drafted else 'undrafted'} x{streams}: {ratio}")
    if any(config[0] == "triton" for config in run.failed):
        print(f"failed: {', '.join(name_of(config) for config in run.failed)}")
        return 1
    return 3 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
