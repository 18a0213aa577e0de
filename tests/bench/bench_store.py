"""Time the NVFP4 writer beside SGLang's BF16 store of the same tokens.

    python tests/bench/bench_store.py --out store.json
    python tests/bench/bench_store.py --only 4x256 --tokens 1,16384 --blocks-per-program 256 --warps 8

Baselines, in the same run: `sglang_bf16` is store_cache as MHATokenToKVPool calls it (K and V in one
launch), `indexed_copy` is pool[slots] = k and v, SGLang's way where store_cache cannot be built. What was
written is checked before anything is timed, ours against codec.encode. Exit codes: 0 done, 1 a
check failed or there is no GPU, 2 bad usage.
"""

import argparse
import json
import math
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from timing import DEVICE, ROTATE_BYTES, copy_bandwidth, failure, timed  # noqa: E402

from launcher.demo import commit, gpu_name  # noqa: E402
from launcher.probe import installed_versions  # noqa: E402
from sglang_fp4kv import codec  # noqa: E402
from sglang_fp4kv.kernels import store_nvfp4 as writer  # noqa: E402

TOKENS = (1, 2, 8, 64, 512, 2048, 8192, 16384)
SHAPES = ((4, 256), (8, 128), (8, 64))  # KV heads, head dim
GOAL_RATIO = 1.3
SCALES = {"k_global_scale": 0.5, "v_global_scale": 0.0625}
FEWEST_COPIES, MOST_COPIES = 4, 64  # calls of a graph
POISON = 0xA5
HOST_CALLS = 2000


class Inputs:
    """K, V and slots of several calls, over disjoint slots; slot 0, which SGLang skips, is free."""

    def __init__(self, heads: int, head_dim: int, tokens: int):
        g = torch.Generator(DEVICE).manual_seed(tokens)
        moved = 8 * tokens * heads * head_dim  # K and V, read and written in BF16
        self.copies = min(MOST_COPIES, max(FEWEST_COPIES, math.ceil(ROTATE_BYTES / moved)))
        self.shape = heads, head_dim
        self.num_slots = self.copies * tokens + 1
        order = torch.randperm(self.num_slots - 1, generator=g, device=DEVICE) + 1
        self.slots = order.view(self.copies, tokens)
        self.k, self.v = (
            torch.randn(
                self.copies, tokens, heads, head_dim, generator=g, device=DEVICE
            ).bfloat16()
            for _ in "kv"
        )


def ours(x: Inputs):
    heads, head_dim = x.shape
    pool = {
        f"{side}_{name}": torch.full(
            (x.num_slots, heads, width), POISON, dtype=torch.uint8, device=DEVICE
        )
        for name, width in (("codes", head_dim // 2), ("scales", head_dim // 16))
        for side in "kv"
    }

    def call(i):
        writer.store_nvfp4(x.k[i], x.v[i], x.slots[i], **pool, **SCALES)

    def check():
        for side in "kv":
            for i in range(x.copies):
                want = codec.encode(getattr(x, side)[i], SCALES[f"{side}_global_scale"])
                for name, rows in zip(("codes", "scales"), want, strict=True):
                    if not torch.equal(pool[f"{side}_{name}"][x.slots[i]], rows):
                        raise AssertionError(f"{side}_{name} of call {i} differ from codec.encode")
        for name, part in pool.items():
            if not (part[0] == POISON).all():
                raise AssertionError(f"{name}: slot 0 was written")

    return call, check


def _bf16_pools(x: Inputs):
    pools = [torch.zeros(x.num_slots, *x.shape, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]

    def check():
        for pool, side in zip(pools, (x.k, x.v), strict=True):
            if not torch.equal(pool[x.slots.flatten()], side.flatten(0, 1)):
                raise AssertionError("the pool does not hold what was written")

    return *pools, check


def sglang_bf16(x: Inputs):
    """As _set_kv_buffer_impl, srt/mem_cache/memory_pool.py @ 0.5.23."""
    from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache, store_cache

    k_pool, v_pool, check = _bf16_pools(x)
    width = math.prod(x.shape)
    row_bytes = width * k_pool.element_size()
    if not can_use_store_cache(row_bytes, row_bytes):
        raise RuntimeError("store_cache cannot be built here; SGLang warns why")

    def call(i):
        store_cache(
            x.k[i].view(-1, width),
            x.v[i].view(-1, width),
            k_pool.view(-1, width),
            v_pool.view(-1, width),
            x.slots[i],
            row_bytes=row_bytes,
            v_row_bytes=row_bytes,
            size_limit=x.num_slots,
        )

    return call, check


def indexed_copy(x: Inputs):
    k_pool, v_pool, check = _bf16_pools(x)

    def call(i):
        k_pool[x.slots[i]] = x.k[i]
        v_pool[x.slots[i]] = x.v[i]

    return call, check


BASELINES = {"sglang_bf16": sglang_bf16, "indexed_copy": indexed_copy}


def host_us(call) -> float:
    """Microseconds of the CPU to start one call, outside a graph, the GPU's queue kept short."""
    total = 0.0
    for _ in range(HOST_CALLS // 100):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(100):
            call(0)
        total += time.perf_counter() - begun
    torch.cuda.synchronize()
    return round(total / HOST_CALLS * 1e6, 2)


def measure(make, x: Inputs, seconds: float) -> dict:
    call, check = make(x)
    for i in range(x.copies):
        call(i)
    torch.cuda.synchronize()
    check()
    entry = timed(call, x.copies, seconds)
    check()  # what the graph wrote
    if x.slots.shape[1] == 1:
        entry["host_us"] = host_us(call)
    return entry


def run_row(heads: int, head_dim: int, tokens: int, seconds: float) -> dict:
    x = Inputs(heads, head_dim, tokens)
    elements = 2 * tokens * heads * head_dim
    row = {
        "shape": f"{heads}x{head_dim}",
        "tokens": tokens,
        "rotated": x.copies,
        "bytes": {"ours": elements * 2 + elements * 9 // 16, "sglang_bf16": elements * 4},
        "goal_ratio": GOAL_RATIO,
        "ratio": None,
        "met": None,
        "baselines": {},
    }
    try:
        row["ours"] = measure(ours, x, seconds)
    except Exception as error:  # the other rows are still worth their time
        row["error"] = failure(error, 600)
        return row
    for name, make in BASELINES.items():
        try:
            row["baselines"][name] = measure(make, x, seconds)
        except Exception as error:  # a baseline that cannot run is a result too
            row["baselines"][name] = {"error": failure(error)}
        torch.cuda.empty_cache()
    baseline = row["baselines"]["sglang_bf16"].get("p50_us")
    if baseline:
        row["ratio"] = round(row["ours"]["p50_us"] / baseline, 3)
        row["met"] = row["ratio"] <= GOAL_RATIO
    return row


def rows(seconds: float, shapes=SHAPES, tokens=TOKENS):
    """One dict a (shape, number of tokens); one with "error" where a check of ours failed."""
    for heads, head_dim in shapes:
        for count in tokens:
            yield run_row(heads, head_dim, count, seconds)


def table_line(row: dict, copy_speed: float) -> str:
    if "error" in row:
        return f"{row['shape']:>6} {row['tokens']:>6}  {row['error']}"
    p50 = [row["ours"], *(row["baselines"][name] for name in BASELINES)]
    cells = " ".join(f"{entry.get('p50_us', 'error'):>13}" for entry in p50)
    floors = " ".join(
        f"{row['bytes'][name] / copy_speed * 1e6:>11.2f}" for name in ("ours", "sglang_bf16")
    )
    met = {True: "met", False: "MISSED", None: "no baseline"}[row["met"]]
    return f"{row['shape']:>6} {row['tokens']:>6} {cells} {floors} {row['ratio'] or '-':>7} {met}"


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one shape, such as 4x256")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers with commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of an entry")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--blocks-per-program", type=int, default=writer.BLOCKS_PER_PROGRAM)
    parser.add_argument("--warps", type=int, default=writer.NUM_WARPS)
    args = parser.parse_args(argv)
    args.shapes = [s for s in SHAPES if args.only in (None, f"{s[0]}x{s[1]}")]
    try:
        args.tokens = [int(count) for count in args.tokens.split(",")]
    except ValueError:
        parser.error(f"--tokens takes numbers with commas, got {args.tokens!r}")
    if not args.shapes or min(args.tokens) < 1:
        parser.error(f"no shape {args.only!r}, or a number of tokens below 1")
    return args


def main(argv=None) -> int:
    args = parse(argv)
    gpu = gpu_name()
    if gpu is None:
        print("bench_store: needs an NVIDIA GPU that CUDA can use", file=sys.stderr)
        return 1
    writer.BLOCKS_PER_PROGRAM, writer.NUM_WARPS = args.blocks_per_program, args.warps
    copy_speed = copy_bandwidth()
    asked = sys.argv[1:] if argv is None else argv
    report = {
        # Folders of this machine are left out.
        "command": ["python", "tests/bench/bench_store.py", *(w.rpartition("/")[2] for w in asked)],
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": installed_versions(),
        "gpu": gpu,
        "copy_bytes_per_second": copy_speed,
        "blocks_per_program": args.blocks_per_program,
        "warps": args.warps,
        "rows": [],
    }
    print(f"{gpu}, copy {copy_speed / 1e12:.2f} TB/s; microseconds, p50; floor: bytes at that speed")
    print(" shape tokens          ours   sglang_bf16  indexed_copy  floor ours  floor bf16   ratio")
    for row in rows(args.seconds, args.shapes, args.tokens):
        report["rows"].append({"op": "store", **row})
        print(table_line(row, copy_speed), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any("error" in row for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
