"""Time decode, verify and prefill over packed NVFP4 KV, beside what serves the same shapes today.

    python tests/bench/bench_attention.py                        all rows, all baselines found
    python tests/bench/bench_attention.py --only 1x65536 --baselines none

Every result is checked before it is timed: ours against fp32 attention over the decoded values
(tests/reference_attention.py), a baseline against ours. A timed call is one CUDA-graph replay over
rotated inputs (together larger than the L2), divided by their number; p20/p50/p80 over replays.
One JSON a run is written under tests/bench/results/.
"""

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from reference_attention import Pool, assert_close_enough, attend, visible_keys  # noqa: E402

from sglang_fp4kv import codec  # noqa: E402
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.extend_nvfp4 import extend_nvfp4  # noqa: E402

ROTATE_BYTES = 256 << 20
DEVICE = "cuda"
PAGE = 16  # slots are dealt in permuted pages; every reader sees them one by one


@dataclass(frozen=True)
class Shape:
    requests: int
    context: int  # prefix tokens of a request
    rows: int  # query tokens of a request
    kind: str  # decode | verify | prefill
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256

    def __str__(self):
        return (
            f"{self.kind} {self.requests}x{self.context} q={self.rows} "
            f"{self.heads}/{self.kv_heads}/{self.head_dim}"
        )


def _steps(requests, context, **kw):
    return (
        Shape(requests, context, 1, "decode", **kw),
        Shape(requests, context, 8, "verify", **kw),
    )


LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SHAPES = (
    *_steps(1, 65536),
    *_steps(8, 65536),
    *_steps(64, 8192),
    *_steps(1, 8192),
    *_steps(64, 8192, **LLAMA),
    *_steps(1, 65536, **LLAMA),
    Shape(1, 65536, 8192, "prefill"),
    Shape(1, 8192, 8192, "prefill"),
    Shape(1, 65536, 512, "prefill"),
)


class Inputs:
    """A packed pool and several sets of index lists over disjoint slots of it."""

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape = shape
        g = torch.Generator(DEVICE).manual_seed(seed)
        own = shape.rows if shape.kind == "verify" else 0
        self.tokens = shape.context + own
        side = shape.kv_heads * (shape.head_dim // 2 + shape.head_dim // 16)
        self.kv_bytes = 2 * side * self.tokens * shape.requests
        self.copies = max(1, math.ceil(ROTATE_BYTES / self.kv_bytes))
        pages = -(-self.tokens // PAGE)
        total = self.copies * shape.requests * pages
        order = torch.randperm(total, generator=g, device=DEVICE)
        slots = (order[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
        slots = slots.view(self.copies, shape.requests, pages * PAGE)[..., : self.tokens]
        self.prefix = slots[..., : shape.context].reshape(self.copies, -1).contiguous()
        self.block = slots[..., shape.context :].reshape(self.copies, -1).contiguous()
        self.all = slots.reshape(self.copies, -1).contiguous()

        def random_side():
            n = total * PAGE
            codes = torch.randint(
                0, 256, (n, shape.kv_heads, shape.head_dim // 2),
                dtype=torch.uint8, device=DEVICE, generator=g,
            )  # fmt: skip
            scales = torch.randint(
                0x30, 0x40, (n, shape.kv_heads, shape.head_dim // 16),
                dtype=torch.uint8, device=DEVICE, generator=g,
            )  # fmt: skip
            return codes, scales

        self.pool = Pool(*random_side(), *random_side(), k_global_scale=0.25, v_global_scale=0.125)
        rows = shape.requests * shape.rows
        self.q, self.k, self.v = (
            torch.randn(
                rows, heads, shape.head_dim, device=DEVICE, generator=g, dtype=torch.float32
            ).bfloat16()
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        step = torch.arange(shape.requests + 1, device=DEVICE, dtype=torch.int32)
        self.kv_indptr = step * shape.context
        self.all_indptr = step * self.tokens
        self.qo_indptr = step * shape.rows
        self.sm_scale = shape.head_dim**-0.5

    def plain(self, dtype: torch.dtype):
        """The pool decoded, as K and V [S, H, D]; fp8 values are rounded, bf16 exact."""
        pool, parts = self.pool, ([], [])
        for start in range(0, pool.k_codes.shape[0], 65536):
            rows = torch.arange(
                start, min(start + 65536, pool.k_codes.shape[0]), device=DEVICE
            )
            for side, out in zip(pool.decoded(rows), parts, strict=True):
                out.append(side.to(dtype))
        return torch.cat(parts[0]), torch.cat(parts[1])


def ours(x: Inputs):
    shape, out = x.shape, torch.empty_like(x.q)

    def call(i):
        if shape.kind == "prefill":
            extend_nvfp4(
                x.q, x.k, x.v, out, *x.pool.sides, x.qo_indptr, x.kv_indptr, x.prefix[i],
                max_extend_len=shape.rows, sm_scale=x.sm_scale, **x.pool.scales,
            )  # fmt: skip
        else:
            attention_nvfp4(
                x.q, *x.pool.sides, out, x.kv_indptr, x.prefix[i], q_per_req=shape.rows,
                block_slots=x.block[i] if shape.kind == "verify" else None,
                sm_scale=x.sm_scale, **x.pool.scales,
            )  # fmt: skip
        return out

    return call


def check(x: Inputs, out: torch.Tensor):
    """Ours against the reference: all rows of the first request, or 64 first and last rows."""
    shape = x.shape
    rows = torch.arange(shape.rows, device=DEVICE)
    if shape.rows > 128:
        rows = torch.cat((rows[:64], rows[-64:]))
    slots = x.all.view(x.copies, shape.requests, -1)[0, 0]
    k, v = x.pool.decoded(slots)
    first = shape.context if shape.kind != "decode" else shape.context - 1
    if shape.kind == "prefill":
        k = torch.cat((k, x.k[: shape.rows].float()))
        v = torch.cat((v, x.v[: shape.rows].float()))
    visible = visible_keys(shape.rows, k.shape[0], first, device=DEVICE)[rows]
    exact, low = (
        attend(x.q[rows], k, v, visible, x.sm_scale, low=dtype) for dtype in (None, torch.bfloat16)
    )
    return assert_close_enough(out[rows], exact, low, str(shape))


def sglang_triton(x: Inputs, dtype: torch.dtype):
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    shape, out = x.shape, torch.empty_like(x.q)
    k_pool, v_pool = x.plain(dtype)
    if shape.kind == "decode":
        splits = 16
        logits = torch.empty(
            shape.requests, shape.heads, splits, shape.head_dim, device=DEVICE, dtype=torch.float32
        )
        lse = torch.empty(shape.requests, shape.heads, splits, device=DEVICE, dtype=torch.float32)
        num = torch.full((shape.requests,), splits, device=DEVICE, dtype=torch.int32)

        def call(i):
            decode_attention_fwd(
                x.q, k_pool, v_pool, out, x.kv_indptr, x.prefix[i], logits, lse, num, splits,
                x.sm_scale, 1.0, 1.0,
            )  # fmt: skip
            return out

        return call

    own = [
        (k_pool[b].bfloat16(), v_pool[b].bfloat16()) if shape.kind == "verify" else (x.k, x.v)
        for b in x.block
    ]

    def call(i):
        extend_attention_fwd(
            x.q, *own[i], out, k_pool, v_pool, x.qo_indptr, x.kv_indptr, x.prefix[i],
            None, True, None, shape.rows, 1.0, 1.0, x.sm_scale,
        )  # fmt: skip
        return out

    return call


def flashinfer_paged(x: Inputs, dtype: torch.dtype):
    """dtype uint8: FlashInfer's own NVFP4 read of the same bytes."""
    import flashinfer

    shape = x.shape
    packed = dtype == torch.uint8
    pool = x.pool
    sides, extra = (pool.k_codes, pool.v_codes) if packed else x.plain(dtype), {}
    scales = pool.k_scales, pool.v_scales
    lists, lens = x.all, x.all_indptr
    if shape.kind == "prefill":  # one request; its chunk goes behind the pool, in its format
        own = torch.arange(x.k.shape[0], device=DEVICE) + pool.k_codes.shape[0]
        lists = torch.cat((x.prefix, own.expand(x.copies, -1)), 1)
        lens = x.kv_indptr + x.qo_indptr
        chunk = x.k, x.v
        if packed:
            encoded = [
                codec.encode(c, g)
                for c, g in zip(chunk, (pool.k_global_scale, pool.v_global_scale), strict=True)
            ]
            chunk = [c for c, _ in encoded]
            scales = [torch.cat((s, e)) for s, (_, e) in zip(scales, encoded, strict=True)]
        sides = [torch.cat((s, c.to(s.dtype))) for s, c in zip(sides, chunk, strict=True)]
    sides = tuple(s[:, None] for s in sides)
    if packed:
        extra = {
            "kv_cache_sf": tuple(s[:, None].view(torch.float8_e4m3fn) for s in scales),
            "k_scale": pool.k_global_scale,
            "v_scale": pool.v_global_scale,
        }
    last = torch.ones(shape.requests, dtype=torch.int32, device=DEVICE)
    wrappers = []
    for i in range(x.copies):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            x.qo_indptr, lens, lists[i].int(), last, shape.heads, shape.kv_heads,
            shape.head_dim, 1, causal=True, sm_scale=x.sm_scale, q_data_type=torch.bfloat16,
            kv_data_type=dtype,
        )  # fmt: skip
        wrappers.append(wrapper)
    out = torch.empty_like(x.q)

    def call(i):
        wrappers[i].run(x.q, sides, out=out, **extra)
        return out

    return call


BASELINES = {
    "sglang_triton_bf16": lambda x: sglang_triton(x, torch.bfloat16),
    "sglang_triton_fp8": lambda x: sglang_triton(x, torch.float8_e4m3fn),
    "flashinfer_bf16": lambda x: flashinfer_paged(x, torch.bfloat16),
    "flashinfer_fp8": lambda x: flashinfer_paged(x, torch.float8_e4m3fn),
    "flashinfer_nvfp4": lambda x: flashinfer_paged(x, torch.uint8),
}


def timed(call, copies: int, seconds: float) -> dict:
    """p20/p50/p80 in microseconds of one call."""
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    samples, started = [], time.monotonic()
    while len(samples) < 10 or (len(samples) < 200 and time.monotonic() - started < seconds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000 / copies)
    samples.sort()
    return {
        f"p{p}_us": round(samples[min(len(samples) * p // 100, len(samples) - 1)], 2)
        for p in (20, 50, 80)
    }


def copy_bandwidth() -> float:
    """Bytes read and written a second by a device-to-device copy."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / (timed(lambda _: b.copy_(a), 1, 0.5)["p50_us"] * 1e-6)


def run_shape(shape: Shape, baselines: list[str], seconds: float, copy_speed: float) -> dict:
    x = Inputs(shape)
    call = ours(x)
    result = call(0).clone()
    ratios = check(x, result)
    row = {
        "shape": str(shape),
        "kv_bytes": x.kv_bytes,
        "rotated": x.copies,
        "error_over_bf16_baseline": [round(r, 3) for r in ratios],
        "floor_us": round(x.kv_bytes / copy_speed * 1e6, 2),
        "ours": timed(call, x.copies, seconds),
    }
    row["ours"]["share_of_copy"] = round(
        x.kv_bytes / (row["ours"]["p50_us"] * 1e-6) / copy_speed, 4
    )
    if shape.kind == "prefill":
        seen = shape.context + (shape.rows + 1) / 2
        flops = 4 * shape.rows * shape.requests * seen * shape.heads * shape.head_dim
        row["ours"]["tflops"] = round(flops / row["ours"]["p50_us"] / 1e6, 1)
    for name in baselines:
        try:
            call = BASELINES[name](x)
            off = (call(0).float() - result.float()).norm() / result.float().norm()
            row[name] = timed(call, x.copies, seconds) | {"off_from_ours": round(off.item(), 5)}
        except Exception as error:  # a baseline that cannot run is a result too
            row[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        call = None
        torch.cuda.empty_cache()
    return row


def versions() -> dict:
    found = {"torch": torch.__version__}
    for name in ("triton", "sglang", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run shapes whose name contains this")
    parser.add_argument("--baselines", default="all", help="all, none, or names with commas")
    parser.add_argument("--seconds", type=float, default=0.5, help="timing per entry")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    names = {"all": list(BASELINES), "none": []}.get(args.baselines, args.baselines.split(","))
    unknown = set(names) - set(BASELINES)
    shapes = [s for s in SHAPES if args.only in str(s)]
    if unknown or not shapes:
        parser.error(f"unknown baselines {sorted(unknown)} or no shape has {args.only!r}")
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    copy_speed = copy_bandwidth()
    report = {
        "command": " ".join(sys.argv),
        "commit": commit or "unknown",
        "versions": versions(),
        "gpu": torch.cuda.get_device_name(),
        "copy_bytes_per_second": copy_speed,
        "rows": [],
    }
    stamp = time.strftime("%Y%m%d-%H%M%S")
    out = args.out or ROOT / "tests/bench/results" / f"attention-{stamp}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        report["rows"].append(run_shape(shape, names, args.seconds, copy_speed))
        print(json.dumps(report["rows"][-1]), flush=True)
        torch.cuda.empty_cache()
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(out, file=sys.stderr)


if __name__ == "__main__":
    main()
