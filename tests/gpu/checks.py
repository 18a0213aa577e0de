"""`fp4kv check` against KV in BF16, FP8 and NVFP4, with and without the drafter, with CUDA graphs.

usage: python -m tests.gpu.checks MODEL OUT_DIR [--draft DIR|NGRAM] [--suite pair|chat] [--depths 512,2048,3584]
           [--context N] [--floor N]

NGRAM in a draft's place drafts from what was asked and answered. All servers are started at once. The undrafted
BF16 server is the control of all others, and each KV format's undrafted server, which prefills in chunks of the
whole context, is the one that its drafted server is compared with. Writes OUT_DIR/checks.json (statuses, one line a check, versions) after each server, and a folder for
each run.
Exit codes: 0 when no check failed, 3 when one did, 1 when a server did not start. What the control fails by
itself is what the model cannot do; it is reported and not counted.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.checks import runner, table
from launcher.checks.options import Options
from launcher.demo import Progress
from launcher.flags import UsageError
from launcher.process import ServerFailed, ServerProcess, free_port
from launcher.serve import launch_command
from tests.gpu.origin import origin

FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
START_SECONDS = 400
REQUESTS = 8
CONTROL = ("bf16", False)
NGRAM = "NGRAM"
# A chain, whose drafts SGLang's own backend can verify in every KV format.
NGRAM_FLAGS = ("--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", "8")


def server_flags(args, kv, drafted):
    """SGLang's flags of one server. Eight requests can fill its pool, for the soak."""
    flags = [
        "--model-path", str(args.model), "--kv-cache-dtype", kv, "--attention-backend", "triton",
        "--mem-fraction-static", "0.3", "--max-running-requests", str(REQUESTS), "--sampling-backend", "pytorch",
        "--context-length", str(args.context), "--max-total-tokens", str(args.pool or 2 * args.context),
        "--chunked-prefill-size", str(args.chunk if drafted else -1),
    ]  # fmt: skip
    if drafted:
        flags += ["--speculative-algorithm", algorithm(args)]
        flags += NGRAM_FLAGS if args.draft == NGRAM else ("--speculative-draft-model-path", args.draft)
    return flags


def algorithm(args):
    return NGRAM if args.draft == NGRAM else "DFLASH"


def runs(draft):
    """(KV format, drafted) of every server, those that others are compared with first."""
    return [(kv, drafted) for drafted in ((False, True) if draft else (False,)) for kv in FORMATS]


def options(args, key, urls):
    """What is asked of one server. A check that its launch cannot have is left out by name."""
    kv, drafted = key
    skip = [*args.skip, *([] if drafted else ["drafted-equality", "accept-length", "chunked-prefill"])]
    if key == CONTROL:
        skip.append("agreement")
    return Options(
        url=urls[key],
        control=None if key == CONTROL else urls[CONTROL],
        undrafted=urls[kv, False] if drafted else None,
        suite=args.suite,
        depths=args.depths,
        skip=tuple(skip),
        floors=(("", args.floor),),
    )


def name_of(key):
    return f"{key[0]}-{'drafted' if key[1] else 'undrafted'}"


def start_all(args, progress):
    """Ready servers by (KV format, drafted); all are stopped again where one fails."""
    servers = {}
    try:
        for key in runs(args.draft):
            port = free_port()
            argv, env = launch_command([*server_flags(args, *key), "--port", str(port)])
            servers[key] = ServerProcess(argv, env, args.out / "logs" / f"{name_of(key)}.log", port).start()
        with ThreadPoolExecutor(len(servers)) as pool:
            waits = pool.map(lambda s: s.wait_ready(START_SECONDS, path="/health"), servers.values())
            for key, seconds in zip(servers, waits, strict=True):
                progress(f"{name_of(key)} ready after {seconds:.0f} s")
    except BaseException:
        stop_all(servers)
        raise
    return servers


def stop_all(servers):
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        list(pool.map(lambda server: server.stop(grace=2), servers.values()))


def summary(verdict):
    """A verdict without its items, for the results file."""
    checks = {
        id: {part: check[part] for part in ("status", "summary", "numbers")}
        for id, check in verdict["checks"].items()
    }
    return {"verdict": verdict["verdict"], "seconds": verdict["seconds"], "checks": checks}


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", help="the draft's folder, or NGRAM")
    parser.add_argument("--suite", default="pair")
    parser.add_argument(
        "--depths", type=lambda text: tuple(map(int, text.split(","))), default=(512, 2048, 3584)
    )
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=1024, help="of the drafted servers")
    parser.add_argument("--floor", type=float, default=3.0)
    parser.add_argument("--pool", type=int, help="tokens of each server's pool; twice --context where not given")
    parser.add_argument("--skip", type=lambda text: text.split(","), default=[], help="checks not to ask")
    return parser.parse_args(argv)


def write(args, found, seconds):
    content = {
        **origin("tests.gpu.checks"),
        "seconds": round(seconds, 1),
        "runs": found,
    }
    (args.out / "checks.json").write_text(json.dumps(content, indent=1) + "\n")


def main():
    args = arguments()
    progress = Progress()
    begun = time.monotonic()
    try:
        servers = start_all(args, progress)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    found = {}
    try:
        urls = {key: server.url for key, server in servers.items()}
        for key in servers:
            try:
                verdict = runner.run(options(args, key, urls), args.out / name_of(key), command=sys.argv)
            except UsageError as error:
                print(error, file=sys.stderr)
                return 2
            found[name_of(key)] = {"drafter": algorithm(args) if key[1] else None, **summary(verdict)}
            write(args, found, time.monotonic() - begun)
            progress(f"{name_of(key)} asked")
            print(f"\n{name_of(key)}\n{table.render(verdict)}", flush=True)
    finally:
        stop_all(servers)
    judged = [run["verdict"] for name, run in found.items() if name != name_of(CONTROL)]
    return 3 if "fail" in judged else 0


if __name__ == "__main__":
    sys.exit(main())
