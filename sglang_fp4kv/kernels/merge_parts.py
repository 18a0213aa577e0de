"""Merge two attention results over disjoint keys by their log-sum-exp."""

import torch
import triton
import triton.language as tl

from sglang_fp4kv.kernels._check import check_rows
from sglang_fp4kv.kernels._plan import cdiv, device_limits, pow2
from sglang_fp4kv.kernels._tile import round_to

_ELEMENTS = 4096  # of a program: 16 bytes a thread and load at 4 warps, several in flight


@triton.jit(do_not_specialize=["rows"])
def _merge_parts_kernel(
    a_ptr,
    a_lse_ptr,
    b_ptr,
    b_lse_ptr,
    out_ptr,
    out_lse_ptr,
    rows,
    b_scale,
    stride_ot,
    stride_oh,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEEP_LSE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < rows
    a_lse = tl.load(a_lse_ptr + row, mask=live, other=float("-inf"))
    b_lse = tl.load(b_lse_ptr + row, mask=live, other=float("-inf"))
    top = tl.maximum(a_lse, b_lse)
    top = tl.where(top == float("-inf"), 0.0, top)
    a_weight = tl.exp2(a_lse - top)
    b_weight = tl.exp2(b_lse - top)
    total = a_weight + b_weight
    if KEEP_LSE:
        tl.store(out_lse_ptr + row, top + tl.log2(total), live)
    inv = 1.0 / tl.where(total == 0, 1.0, total)  # a NaN stays one
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    part = row[:, None] * D + d[None, :]
    a = tl.load(a_ptr + part, mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + part, mask, other=0.0).to(tl.float32)
    # A part without a key may hold anything.
    a = tl.where((a_weight == 0)[:, None], 0.0, a * (a_weight * inv)[:, None])
    b = tl.where((b_weight == 0)[:, None], 0.0, b * (b_weight * inv * b_scale)[:, None])
    out = out_ptr + ((row // HEADS) * stride_ot + (row % HEADS) * stride_oh)[:, None] + d[None, :]
    tl.store(out, round_to(a + b, out_ptr.dtype.element_ty, EMULATE), mask)


def merge_parts(
    a: torch.Tensor,
    a_lse: torch.Tensor,
    b: torch.Tensor,
    b_lse: torch.Tensor,
    b_scale: float,
    out: torch.Tensor,
    out_lse: torch.Tensor | None = None,
) -> None:
    """Combine attention a with attention b (times b_scale) over other keys; out, out_lse change.

    Sizes: T query tokens, Hq query heads, D head dim
      a, b         [T, Hq, D]  bf16 | fp16 | fp32   contiguous; each its own dtype
      a_lse, b_lse [T, Hq]     fp32                 contiguous, base 2; -inf = no key was seen
      out          [T, Hq, D]  bf16 | fp16 | fp32   last dim contiguous; may be a
      out_lse      [T, Hq]     fp32                 contiguous, not a_lse or b_lse; None = not wanted
    b_scale: what b has to be multiplied with, for instance V's global scale
    Numerics: fp32, rounded once; a row without any key gives zeros; a NaN log-sum-exp gives NaN
    Runs on: sm_80; CUDA-graph safe: yes; allocates: no
    Raises: ValueError for shapes, dtypes and strides that do not fit (the message names the value)
    Reference: softmax over the union of the keys
    """
    for name, x in (("a", a), ("b", b), ("out", out)):
        check_rows(name, x)
        if x.shape != a.shape:
            raise ValueError(f"{name} must be {tuple(a.shape)} like a, got {tuple(x.shape)}")
        if name != "out" and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
    tokens, heads, head_dim = a.shape
    for name, x in (("a_lse", a_lse), ("b_lse", b_lse), ("out_lse", out_lse)):
        if x is not None and (
            x.dtype != torch.float32 or x.shape != a.shape[:2] or not x.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous float32 [{tokens}, {heads}], "
                f"got {x.dtype} {tuple(x.shape)}"
            )
    if tokens == 0:
        return
    limits = device_limits(a.device)
    block_d = pow2(head_dim)
    block_r = max(1, (16 * _ELEMENTS if limits.interpreter else _ELEMENTS) // block_d)
    _merge_parts_kernel[(cdiv(tokens * heads, block_r),)](
        a,
        a_lse,
        b,
        b_lse,
        out,
        a_lse if out_lse is None else out_lse,
        tokens * heads,
        b_scale,
        *out.stride()[:2],
        HEADS=heads,
        D=head_dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        KEEP_LSE=out_lse is not None,
        EMULATE=limits.interpreter,
        num_warps=4,
    )
