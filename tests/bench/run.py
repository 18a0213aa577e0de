"""`make bench`: every benchmark and its baselines on this machine's GPU, in one JSON.

    python tests/bench/run.py                                          all rows, all baselines
    python tests/bench/run.py --only "verify 1x65536" --baselines none

What the rows compile is compiled first, by one process a row and all of them at once, and its time is
reported apart. Exit codes: 0 done, 1 a row of ours failed or there is no GPU, 2 bad usage.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from attention_baselines import BASELINES, FLASHINFER  # noqa: E402
from bench_attention import SHAPES, compile_shape, run_shape  # noqa: E402
from timing import copy_bandwidth, failure, told  # noqa: E402

from launcher.demo import commit, gpu_name  # noqa: E402
from launcher.probe import installed_versions  # noqa: E402

RESULTS = ROOT / "tests" / "bench" / "results"
COMPILE_SECONDS = 300  # of one process
OPS = ("attention", "store", "sparse")


def result_file(gpu: str) -> Path:
    """Where a run on this GPU is filed: h200_bench.json for an NVIDIA H200."""
    return RESULTS / f"{gpu.removeprefix('NVIDIA ').split()[0].lower()}_bench.json"


def compile_jobs(shapes, names) -> list[tuple[str, list[str]]]:
    """(shape, baselines) of the processes that fill the compilers' caches.

    FlashInfer compiles by head dim and dtype alone, so it is asked for once each.
    """
    triton_names = [name for name in names if name not in FLASHINFER]
    smallest = {}
    for shape in sorted(shapes, key=lambda s: s.requests * s.context):
        smallest.setdefault(shape.head_dim, shape)
    libraries = [
        (str(shape), [name]) for shape in smallest.values() for name in names if name in FLASHINFER
    ]
    return libraries + [(str(shape), triton_names) for shape in shapes]


def compile_all(shapes, names) -> dict:
    """Run the compile jobs at once; a failed one is told here and again by its row."""
    begun = time.monotonic()

    def run(job):
        shape, baselines = job
        argv = [sys.executable, __file__, "--compile-only", "--only", shape, "--baselines"]
        argv.append(",".join(baselines) or "none")
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{shape} {baselines}: not compiled within {COMPILE_SECONDS} s"
        return done.returncode and f"{shape} {baselines}: {told(done.stderr.strip(), 300)}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = [line for line in pool.map(run, compile_jobs(shapes, names)) if line]
    for line in failed:
        print(f"compiling failed: {line}", file=sys.stderr)
    return {"seconds": round(time.monotonic() - begun, 1), "failed": failed}


def attention_rows(args, copy_speed):
    for shape in args.shapes:
        try:
            yield run_shape(shape, args.names, args.seconds, copy_speed)
        except Exception as error:  # the other rows are still worth their time
            yield {
                "op": "attention",
                "shape": str(shape),
                "error": failure(error, 600),
            }
        torch.cuda.empty_cache()


def store_rows(args, copy_speed):
    import bench_store

    yield from bench_store.rows(args.seconds)


def sparse_rows(args, copy_speed):
    import bench_sparse

    yield from bench_sparse.rows(args.seconds)


def measure(args, report) -> bool:
    """Fill report["rows"], writing the file after every row; True when ours ran in all of them."""
    rows_of = {"attention": attention_rows, "store": store_rows, "sparse": sparse_rows}
    for op in args.ops:
        for row in rows_of[op](args, report["copy_bytes_per_second"]):
            report["rows"].append({"op": op, **row})
            args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
            print(json.dumps(report["rows"][-1], default=str), flush=True)
    return not any("error" in row for row in report["rows"])


def parse(argv):
    parser = argparse.ArgumentParser(prog="tests/bench/run.py", description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(OPS), help="attention, store, sparse, or several with commas")
    parser.add_argument("--only", default="", help="attention shapes whose name contains this")
    parser.add_argument("--baselines", default="all", help="all, none, or names with commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of an entry")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--compile-only", action="store_true", help="call everything once, untimed")
    args = parser.parse_args(argv)
    args.ops = args.ops.split(",")
    args.names = {"all": list(BASELINES), "none": []}.get(args.baselines, args.baselines.split(","))
    args.shapes = [s for s in SHAPES if args.only in str(s)]
    unknown = sorted({*args.names} - {*BASELINES} | {*args.ops} - {*OPS})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if not args.shapes:
        parser.error(f"no shape has {args.only!r} in its name")
    if args.only:
        args.ops = [op for op in args.ops if op == "attention"]
    return args


def main(argv=None) -> int:
    args = parse(argv)
    gpu = gpu_name()
    if gpu is None:
        print("make bench: needs an NVIDIA GPU that CUDA can use", file=sys.stderr)
        return 1
    if args.compile_only:
        for shape in args.shapes:
            compile_shape(shape, args.names)
        return 0
    args.out = args.out or result_file(gpu)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    many = "attention" in args.ops and len(args.shapes) > 1
    asked = sys.argv[1:] if argv is None else argv
    report = {
        # Folders of this machine are left out.
        "command": ["python", "tests/bench/run.py", *(word.rpartition("/")[2] for word in asked)],
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": installed_versions(),
        "gpu": gpu,
        "compiled": compile_all(args.shapes, args.names) if many else None,
        "copy_bytes_per_second": copy_bandwidth(),
        "rows": [],
    }
    complete = measure(args, report)
    report["seconds"] = round(time.monotonic() - begun, 1)
    args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"{len(report['rows'])} rows in {report['seconds']} s: {args.out}", file=sys.stderr)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
