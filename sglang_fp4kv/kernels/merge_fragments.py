"""Merge the splits that decode_fragments and verify_fragments left, and undo their column order."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_fp4kv.kernels._plan import cdiv
from sglang_fp4kv.kernels._tile import round_to

_ROWS = 8
# Columns of a program and splits it merges at a time, every step a trip to memory: few requests have
# many splits and need many programs; many requests fill the device with fewer, larger ones.
_FEW, _DEEP, _MANY = (16, 16), (16, 64), (64, 4)
_MANY_PROGRAMS = 4096
_DEEP_SPLITS = 128  # of a request; decode's one request has 264


def _shape(programs: int, splits: int) -> tuple[int, int]:
    """Columns and splits for ``programs`` of 16 columns and about ``splits`` a request."""
    if programs > _MANY_PROGRAMS:
        return _MANY
    return _DEEP if splits > _DEEP_SPLITS else _FEW


@triton.jit
def _merge_fragments_kernel(
    out_ptr,
    part_acc_ptr,  # [items, D, N] fp32
    part_stat_ptr,  # [items, 2, N] fp32
    sched_ptr,
    v_scale,
    num_kv_heads,
    row_blocks,
    stride_ot,
    stride_oh,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    LANE_BYTES: tl.constexpr,
    STEP_BYTES: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    req = tl.program_id(0)
    kv_head = tl.program_id(1)
    parts: tl.constexpr = D // COLUMNS
    rows_at = tl.program_id(2) // parts
    row_block = rows_at // (N // 8)
    n = rows_at % (N // 8) * 8 + tl.arange(0, 8)
    position = tl.program_id(2) % parts * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(sched_ptr + 2 * req)
    splits = tl.load(sched_ptr + 2 * req + 1)
    if splits == 1:  # its reader wrote out
        return

    m = tl.full((8,), float("-inf"), tl.float32)
    l = tl.zeros((8,), tl.float32)
    acc = tl.zeros((COLUMNS, 8), tl.float32)
    for start in range(0, splits, SPLITS):
        s = start + tl.arange(0, SPLITS)
        there = s < splits
        item = ((first + s).to(tl.int64) * row_blocks + row_block) * num_kv_heads + kv_head
        stat = part_stat_ptr + item[:, None] * (2 * N) + n[None, :]
        part_m = tl.load(stat, mask=there[:, None], other=float("-inf"))
        part_l = tl.load(stat + N, mask=there[:, None], other=0.0)
        part = part_acc_ptr + item[:, None, None] * (D * N)
        part += position[None, :, None] * N + n[None, None, :]
        part = tl.load(part, mask=there[:, None, None], other=0.0)
        m_new = tl.maximum(m, tl.max(part_m, 0))
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - top)
        weight = tl.exp2(part_m - top[None, :])
        acc = acc * alpha[None, :] + tl.sum(part * weight[:, None, :], 0)
        l = l * alpha + tl.sum(part_l * weight, 0)
        m = m_new
    acc = acc * (v_scale / tl.where(l > 0, l, 1.0))[None, :]

    # Rows of the operand: lane g of 8, byte of the half word, then what a register or warp adds.
    at = position % (D // 2)
    step = at // 16
    byte = at % 8 * LANE_BYTES + step % STEPS * STEP_BYTES + step // STEPS * 2 + at // 8 % 2
    column = 2 * byte + position // (D // 2)
    row = row_block * N + n
    offsets = (req.to(tl.int64) * Q + row // GROUP) * stride_ot
    offsets += (kv_head * GROUP + row % GROUP) * stride_oh
    acc = round_to(acc, out_ptr.dtype.element_ty, EMULATE)
    mask = (row < Q * GROUP)[None, :]
    tl.store(out_ptr + offsets[None, :] + column[:, None], acc, mask=mask)


@dataclass(frozen=True)
class FragmentOrder:
    """Where the rows of a kernel's V operand lie in a row of V.

    A row's lane (0 to 7) and byte of the half word, then every 16 rows a step; after ``steps`` of
    them the lanes' second half words begin.
    """

    lane_bytes: int
    step_bytes: int
    steps: int


def decode_order(head_dim: int) -> FragmentOrder:
    """decode_fragments: a lane has consecutive words, 16 operand rows are one half word of each."""
    return FragmentOrder(head_dim // 16, 2, head_dim // 32)


def verify_order(head_dim: int, warps: int) -> FragmentOrder:
    """verify_fragments: a warp has consecutive columns, a lane a half word of them or a word."""
    if head_dim == 64 * warps:
        return FragmentOrder(4, 32, warps)
    return FragmentOrder(2, 16, warps)


def merge_fragments(
    out: torch.Tensor,
    part_acc: torch.Tensor,
    part_stat: torch.Tensor,
    sched: torch.Tensor,
    q_per_req: int,
    num_kv_heads: int,
    rows_padded: int,
    row_blocks: int,
    budget: int,
    order: FragmentOrder,
    v_scale: float,
    emulate: bool = False,
) -> None:
    """Combine the splits of every query row by their maxima and sums.

    Rows of requests without a key become 0; rows of requests of one split are left alone, their
    reader wrote them.

    Sizes: R query rows, Hq query heads, H KV heads, D head dim, N rows_padded, I work items
      out        [R, Hq, D]                    bf16 | fp16   out
      part_acc   [I * row_blocks * H * D * N]  fp32          sums of weight times V, columns in order
      part_stat  [I * row_blocks * H * 2 * N]  fp32          maxima (log2), sums of weights
      sched      [R // q_per_req * 2]          int32         first item and splits of a request
    budget: work items a KV head that the requests share; only a hint at the number of splits
    Numerics: fp32; a row without a visible key becomes 0
    Runs on: as attention_nvfp4; CUDA-graph safe yes; allocates no
    Reference: softmax over the whole row
    """
    rows, num_q_heads, head_dim = out.shape
    requests = rows // q_per_req
    row_groups = rows_padded // _ROWS * row_blocks
    few = requests * num_kv_heads * row_groups * cdiv(head_dim, _FEW[0])
    columns, splits = _shape(few, budget // requests)
    blocks = cdiv(head_dim, columns) * row_groups
    _merge_fragments_kernel[(requests, num_kv_heads, blocks)](
        out,
        part_acc,
        part_stat,
        sched,
        v_scale,
        num_kv_heads,
        row_blocks,
        *out.stride()[:2],
        Q=q_per_req,
        GROUP=num_q_heads // num_kv_heads,
        D=head_dim,
        N=rows_padded,
        LANE_BYTES=order.lane_bytes,
        STEP_BYTES=order.step_bytes,
        STEPS=order.steps,
        COLUMNS=columns,
        SPLITS=splits,
        EMULATE=emulate,
        num_warps=4,
    )
