"""Merge what a split attention call left: partial rows of every split into the output rows."""

import torch
import triton
import triton.language as tl

from sglang_fp4kv.kernels._call import AttentionBuffers
from sglang_fp4kv.kernels._plan import DeviceLimits, cdiv, half_width, pow2
from sglang_fp4kv.kernels._tile import store_halves

_SPLITS_AT_A_TIME = 16


@triton.jit
def _merge_nvfp4_kernel(
    out_ptr,
    part_acc_ptr,
    part_stat_ptr,
    sched_ptr,
    num_q_heads,
    v_scale,
    stride_ot,
    stride_oh,
    Q: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EMULATE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_in = head < num_q_heads
    req = row // Q
    first = tl.load(sched_ptr + 2 * req)
    splits = tl.load(sched_ptr + 2 * req + 1)
    if splits == 1:  # already written
        return

    c = tl.arange(0, HALF)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_H,), tl.float32)
    acc_even = tl.zeros((BLOCK_H, HALF), tl.float32)
    acc_odd = tl.zeros((BLOCK_H, HALF), tl.float32)
    for start in range(0, splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        part = (((first + s).to(tl.int64) * Q + row % Q) * num_q_heads)[:, None] + head[None, :]
        mask = (s < splits)[:, None] & head_in[None, :]
        part_m = tl.load(part_stat_ptr + 2 * part, mask=mask, other=float("-inf"))
        part_l = tl.load(part_stat_ptr + 2 * part + 1, mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(part_m, 0))
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - top)
        weight = tl.exp2(part_m - top[None, :])
        acc_mask = mask[:, :, None] & (c < D // 2)[None, None, :]
        part_acc = part_acc_ptr + part[:, :, None] * D + c[None, None, :]
        even = tl.load(part_acc, mask=acc_mask, other=0.0)
        odd = tl.load(part_acc + D // 2, mask=acc_mask, other=0.0)
        acc_even = acc_even * alpha[:, None] + tl.sum(even * weight[:, :, None], 0)
        acc_odd = acc_odd * alpha[:, None] + tl.sum(odd * weight[:, :, None], 0)
        l = l * alpha + tl.sum(part_l * weight, 0)
        m = m_new

    inv = v_scale / tl.where(l > 0, l, 1.0)
    store_halves(
        out_ptr,
        row.to(tl.int64) * stride_ot + head * stride_oh,
        head_in,
        acc_even * inv[:, None],
        acc_odd * inv[:, None],
        D,
        EMULATE,
    )


def merge_nvfp4(
    out: torch.Tensor,
    buffers: AttentionBuffers,
    q_per_req: int,
    v_scale: float,
    limits: DeviceLimits,
) -> None:
    """Combine the splits of every query row by their maxima and sums; changes out.

    Sizes: R query rows, Hq query heads, D head dim
      out  [R, Hq, D]  bf16 | fp16 | fp32   out; rows of a request that was not split stay as they are
      buffers          as the attention kernel of the same call filled them
    Numerics: fp32; a row without a visible key becomes 0
    Runs on: as attention_nvfp4; CUDA-graph safe yes; allocates no
    Reference: softmax over the whole row
    """
    rows, num_q_heads, head_dim = out.shape
    # The interpreter pays per program.
    block_h = pow2(num_q_heads) if limits.interpreter else 1
    _merge_nvfp4_kernel[(rows, cdiv(num_q_heads, block_h))](
        out,
        buffers.acc,
        buffers.stat,
        buffers.sched,
        num_q_heads,
        v_scale,
        *out.stride()[:2],
        Q=q_per_req,
        D=head_dim,
        HALF=half_width(head_dim),
        BLOCK_H=block_h,
        BLOCK_S=_SPLITS_AT_A_TIME,
        EMULATE=limits.interpreter,
        num_warps=2,
    )
