"""Time decode, verify and prefill over packed NVFP4 KV, beside what serves the same shapes today.

Every result is checked before it is timed: ours against fp32 attention over the decoded values
(tests/reference_attention.py), a baseline against ours. run.py starts it and writes the JSON.
"""

import dataclasses
import math
from contextlib import contextmanager

import torch
from attention_baselines import BASELINES, FLASHINFER
from reference_attention import Pool, assert_close_enough, attend, visible_keys
from timing import DEVICE, ROTATE_BYTES, failure, timed

from sglang_fp4kv.kernels import decode_nvfp4
from sglang_fp4kv.kernels import extend_nvfp4 as prefill
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4
from sglang_fp4kv.kernels.extend_nvfp4 import extend_nvfp4
from sglang_fp4kv.prefill import PackedPrefill

PAGE = 16  # slots are dealt in permuted pages; every reader sees them one by one
FASTEST = "fastest"  # the goal: no slower than the fastest FlashInfer read of the same run


@dataclasses.dataclass(frozen=True)
class Shape:
    requests: int
    context: int  # prefix tokens of a request
    rows: int  # query tokens of a request
    kind: str  # decode | verify | prefill
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    goal_us: float | str | None = None
    further_goal_us: float | None = None

    def __str__(self):
        return (
            f"{self.kind} {self.requests}x{self.context} q={self.rows} "
            f"{self.heads}/{self.kv_heads}/{self.head_dim}"
        )


LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SHAPES = (
    Shape(1, 65536, 1, "decode", goal_us=60),
    Shape(1, 65536, 8, "verify", goal_us=80),
    Shape(8, 65536, 1, "decode", goal_us=300, further_goal_us=250),
    Shape(8, 65536, 8, "verify", goal_us=450),
    Shape(64, 8192, 1, "decode", goal_us=300),
    Shape(64, 8192, 8, "verify", goal_us=450),
    Shape(1, 8192, 1, "decode", goal_us=FASTEST),
    Shape(1, 8192, 8, "verify", goal_us=FASTEST),
    Shape(64, 8192, 1, "decode", **LLAMA, goal_us=340),
    Shape(1, 65536, 8, "verify", **LLAMA),
    Shape(1, 65536, 8192, "prefill", goal_us=52_000),
    Shape(1, 8192, 8192, "prefill", goal_us=9_500),
    Shape(1, 65536, 512, "prefill", goal_us=4_500),
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

        # FlashInfer applies a V scale other than 1 in a kernel of its own.
        self.pool = Pool(*random_side(), *random_side(), k_global_scale=0.25, v_global_scale=1.0)
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
        self.ones = torch.ones(shape.requests, dtype=torch.int32, device=DEVICE)

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
    shape, out, blocks = x.shape, torch.empty_like(x.q), None
    if shape.kind == "prefill":
        library = PackedPrefill(shape.heads, shape.kv_heads, shape.head_dim, x.q.dtype, DEVICE)
        blocks = library.plan([shape.context] * shape.requests, [shape.rows] * shape.requests)

    def call(i):
        if blocks is not None:
            library.run(
                blocks, x.q, x.k, x.v, out, *x.pool.sides, x.prefix[i], sm_scale=x.sm_scale,
                **x.pool.scales,
            )  # fmt: skip
        elif shape.kind == "prefill":
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


@contextmanager
def noted_plans():
    """Yields a list that receives the launch plan of every call made inside."""
    plans, places = [], ((decode_nvfp4, "plan_attention"), (prefill, "plan_extend"))
    originals = [getattr(module, name) for module, name in places]

    def noting(original):
        def plan(*args, **kwargs):
            plans.append(original(*args, **kwargs))
            return plans[-1]

        return plan

    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, noting(original))
    try:
        yield plans
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def run_shape(shape: Shape, names: list[str], seconds: float, copy_speed: float) -> dict:
    """One row of the result: ours and the named baselines, checked and timed."""
    x = Inputs(shape)
    call = ours(x)
    with noted_plans() as plans:
        result = call(0).clone()
    ratios = check(x, result)
    entry = timed(call, x.copies, seconds)
    entry["share_of_copy"] = round(x.kv_bytes / (entry["p50_us"] * 1e-6) / copy_speed, 4)
    if shape.kind == "prefill":
        entry["tflops"] = round(prefill_flops(shape) / entry["p50_us"] / 1e6, 1)
    entry["plan"] = [dataclasses.asdict(plan) for plan in plans]
    row = {
        "op": "attention",
        "shape": str(shape),
        **dataclasses.asdict(shape),
        "kv_bytes": x.kv_bytes,
        "floor_us": round(x.kv_bytes / copy_speed * 1e6, 2),
        "rotated": x.copies,
        "error_over_bf16_attention": [round(r, 3) for r in ratios],
        "ours": entry,
        "baselines": {name: run_baseline(x, name, result, seconds) for name in names},
    }
    return row | judged(shape, entry["p50_us"], row["baselines"])


def run_baseline(x: Inputs, name: str, result: torch.Tensor, seconds: float) -> dict:
    """The fastest way of a baseline; ``off_from_ours`` is the relative Frobenius distance."""
    found = []
    try:
        ways = BASELINES[name](x)
        for way, call in ways.items():
            off = (call(0).float() - result.float()).norm() / result.float().norm()
            times = timed(call, x.copies, seconds)
            found.append(times | {"off_from_ours": round(off.item(), 5), "way": way})
    except Exception as error:  # a baseline that cannot run is a result too
        return {"error": failure(error)}
    finally:
        ways = call = None
        torch.cuda.empty_cache()
    return min(found, key=lambda times: times["p50_us"])


def judged(shape: Shape, ours_us: float, baselines: dict) -> dict:
    """goal_us and met of a row; None where the shape has no goal or FlashInfer was not timed."""
    goal = shape.goal_us
    if goal == FASTEST:
        times = [t["p50_us"] for name, t in baselines.items() if name in FLASHINFER and "p50_us" in t]
        goal = min(times, default=None)
    verdict = {"goal_us": goal, "met": None if goal is None else ours_us <= goal}
    if shape.further_goal_us is not None:
        verdict["further_met"] = ours_us <= shape.further_goal_us
    return verdict


def prefill_flops(shape: Shape) -> float:
    seen = shape.context + (shape.rows + 1) / 2
    return 4 * shape.rows * shape.requests * seen * shape.heads * shape.head_dim


def compile_shape(shape: Shape, names: list[str]) -> None:
    """Make the calls of a row once, so that what they compile is in the caches.

    Ours is left out beside FlashInfer alone, which is compiled in a process of its own.
    """
    x = Inputs(shape)
    if not names or not FLASHINFER.keys() >= set(names):
        ours(x)(0)
    for name in names:
        for call in BASELINES[name](x).values():
            call(0)
    torch.cuda.synchronize()
