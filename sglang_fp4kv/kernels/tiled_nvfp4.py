"""Split-KV attention over a packed pool as plain Triton: every head dim, dtype and the interpreter.

A request's keys are its listed slots followed, for verify, by the slots of its own block; both are
walked as one axis. The tiles of all requests are shared out on the device, in proportion to their
lengths, over a fixed number of programs, so one launch shape serves any lengths and a captured
graph stays right when they change. A second kernel merges what was split.
"""

import math

import torch
import triton
import triton.language as tl

from sglang_fp4kv.kernels._call import AttentionBuffers, AttentionCall
from sglang_fp4kv.kernels._plan import (
    AttentionPlan,
    DeviceLimits,
    code_placement,
    half_width,
    pow2,
)
from sglang_fp4kv.kernels._tile import (
    FOLD,
    cap_scores,
    decode_packed,
    half_scores,
    load_packed,
    load_query,
    softmax_step,
    store_halves,
)
from sglang_fp4kv.kernels.merge_nvfp4 import merge_nvfp4


@triton.jit
def _tile_range(prefix, Q, HAS_BLOCK: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of a request, position of its first query row, its first tile and tile count."""
    total = prefix
    first_pos = prefix - Q
    if HAS_BLOCK:
        total = prefix + Q
        first_pos = prefix
    first_tile = first_pos * 0
    if WINDOW > 0:
        first_tile = tl.maximum(first_pos - WINDOW, 0) // BLOCK_N
    tiles = tl.maximum((total + BLOCK_N - 1) // BLOCK_N - first_tile, 0)
    return total, first_pos, first_tile, tiles


@triton.jit(do_not_specialize=["batch", "budget"])
def _attention_nvfp4_kernel(
    q_ptr,
    k_codes_ptr,
    k_scales_ptr,
    v_codes_ptr,
    v_scales_ptr,
    out_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    block_slots_ptr,
    mask_ptr,
    mask_indptr_ptr,
    window_offsets_ptr,
    part_acc_ptr,  # [W, Q * Hq, D] fp32: even half, odd half
    part_stat_ptr,  # [W, Q * Hq, 2] fp32: maximum (log2), sum
    sched_ptr,  # [B, 2] int32: first work item, number of splits
    batch,
    budget,
    num_q_heads,
    qk_scale,
    v_scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_kc_slot,
    stride_kc_head,
    stride_ks_slot,
    stride_ks_head,
    stride_vc_slot,
    stride_vc_head,
    stride_vs_slot,
    stride_vs_head,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    USE_MASK: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    EMULATE: tl.constexpr,
):
    work = tl.program_id(0)
    kv_head = tl.program_id(1)
    row_block = tl.program_id(2)

    # Share out the tiles of all requests: splits of about the same length, one or more a request.
    b = tl.arange(0, BLOCK_B)
    b_in = b < batch
    b_start = tl.load(kv_indptr_ptr + b, mask=b_in, other=0)
    b_len = (tl.load(kv_indptr_ptr + b + 1, mask=b_in, other=0) - b_start).to(tl.int32)
    _, _, _, b_tiles = _tile_range(b_len, Q, HAS_BLOCK, WINDOW, BLOCK_N)
    b_tiles = tl.where(b_in, b_tiles, 0)
    per_split = tl.maximum((tl.sum(b_tiles, 0) + budget - 1) // budget, MIN_TILES)
    b_splits = tl.maximum((b_tiles + (per_split - 1) // 2) // per_split, 1)
    b_splits = tl.where(b_tiles > 0, b_splits, 0)
    b_end = tl.cumsum(b_splits, 0)
    b_first = b_end - b_splits
    if (kv_head == 0) & (row_block == 0):
        if work < batch:
            mine = b == work
            tl.store(sched_ptr + 2 * work, tl.sum(tl.where(mine, b_first, 0), 0))
            tl.store(sched_ptr + 2 * work + 1, tl.sum(tl.where(mine, b_splits, 0), 0))
    req = tl.sum((b_end <= work).to(tl.int32), 0)
    if req >= batch:
        return
    mine = b == req
    split = work - tl.sum(tl.where(mine, b_first, 0), 0)
    splits = tl.sum(tl.where(mine, b_splits, 0), 0)

    kv_start = tl.load(kv_indptr_ptr + req).to(tl.int64)
    prefix = (tl.load(kv_indptr_ptr + req + 1) - kv_start).to(tl.int32)
    total, first_pos, first_tile, tiles = _tile_range(prefix, Q, HAS_BLOCK, WINDOW, BLOCK_N)
    begin = first_tile + split * tiles // splits
    end = first_tile + (split + 1) * tiles // splits

    # Query rows of this KV head: token of the block major, head of the group minor.
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = row < Q * GROUP
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    q_row = req.to(tl.int64) * Q + token
    q_even, q_odd, q_scale = load_query(
        q_ptr, q_row * stride_qt + head * stride_qh, row_in, D, HALF, DTYPE
    )
    row_scale = q_scale * qk_scale
    pos = first_pos + token

    kv_indices_ptr += kv_start
    block_slots_ptr += req * Q
    k_codes_ptr += kv_head.to(tl.int64) * stride_kc_head
    k_scales_ptr += kv_head.to(tl.int64) * stride_ks_head
    v_codes_ptr += kv_head.to(tl.int64) * stride_vc_head
    v_scales_ptr += kv_head.to(tl.int64) * stride_vs_head
    if USE_MASK:
        mask_offset = 0
        if HAS_OFFSETS:
            mask_offset = tl.load(window_offsets_ptr + req).to(tl.int32)
        mask_ptr += tl.load(mask_indptr_ptr + req).to(tl.int64) + mask_offset
        mask_row = token * (total + mask_offset)

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc_even = tl.zeros((BLOCK_M, HALF), tl.float32)
    acc_odd = tl.zeros((BLOCK_M, HALF), tl.float32)
    for tile in range(begin, end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        slots = tl.load(kv_indices_ptr + n, mask=n < prefix, other=-1).to(tl.int64)
        if HAS_BLOCK:
            own = tl.load(
                block_slots_ptr + (n - prefix), mask=(n >= prefix) & (n < total), other=-1
            )
            slots = tl.where(n < prefix, slots, own.to(tl.int64))
        valid = slots >= 0
        codes, scales = load_packed(
            k_codes_ptr, k_scales_ptr, slots, valid, stride_kc_slot, stride_ks_slot, D, HALF
        )
        k_even, k_odd = decode_packed(codes, scales, DTYPE, ASM)
        s = half_scores(q_even, q_odd, k_even, k_odd)
        s = cap_scores(s * row_scale[:, None], LOGIT_CAP)

        visible = valid[None, :] & row_in[:, None]
        back = pos[:, None] - n[None, :]
        if USE_MASK:
            allowed = tl.load(
                mask_ptr + mask_row[:, None] + n[None, :],
                mask=visible & (n >= prefix)[None, :],
                other=0,
            )
            visible = visible & ((n < prefix)[None, :] | (allowed != 0))
        elif CAUSAL:
            visible = visible & (back >= 0)
        if WINDOW > 0:
            visible = visible & (back <= WINDOW)
            if not CAUSAL:
                visible = visible & (back >= -WINDOW)
        s = tl.where(visible, s, float("-inf"))

        p, alpha, m, l = softmax_step(s, m, l, DTYPE)
        codes, scales = load_packed(
            v_codes_ptr, v_scales_ptr, slots, valid, stride_vc_slot, stride_vs_slot, D, HALF
        )
        v_even, v_odd = decode_packed(codes, scales, DTYPE, ASM)
        acc_even = tl.dot(p, v_even, acc_even * alpha[:, None], input_precision="ieee")
        acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None], input_precision="ieee")

    if splits == 1:
        inv = v_scale / tl.where(l > 0, l, 1.0)
        store_halves(
            out_ptr,
            q_row * stride_ot + head * stride_oh,
            row_in,
            acc_even * inv[:, None],
            acc_odd * inv[:, None],
            D,
            EMULATE,
        )
    else:
        part = (work.to(tl.int64) * Q + token) * num_q_heads + head
        c = tl.arange(0, HALF)
        part_mask = row_in[:, None] & (c < D // 2)[None, :]
        part_acc = part_acc_ptr + part[:, None] * D + c[None, :]
        tl.store(part_acc, acc_even, part_mask)
        tl.store(part_acc + D // 2, acc_odd, part_mask)
        tl.store(part_stat_ptr + 2 * part, m, row_in)
        tl.store(part_stat_ptr + 2 * part + 1, l, row_in)


def launch_tiled(
    call: AttentionCall, plan: AttentionPlan, buffers: AttentionBuffers, limits: DeviceLimits
) -> None:
    """Start the kernel and its merge; the call was checked by attention_nvfp4."""
    qk_scale = call.sm_scale * call.k_global_scale * FOLD
    if call.logit_cap == 0:
        qk_scale *= math.log2(math.e)
    q, out = call.q, call.out
    _attention_nvfp4_kernel[(plan.work_items, call.num_kv_heads, plan.row_blocks)](
        q,
        *call.sides,
        out,
        *call.lists,
        buffers.acc,
        buffers.stat,
        buffers.sched,
        call.batch,
        plan.budget,
        q.shape[1],
        qk_scale,
        call.v_global_scale * FOLD,
        *q.stride()[:2],
        *out.stride()[:2],
        *(stride for side in call.sides for stride in side.stride()[:2]),
        Q=call.q_per_req,
        GROUP=call.group,
        D=q.shape[2],
        HALF=half_width(q.shape[2]),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_B=max(16, pow2(call.batch)),
        MIN_TILES=plan.min_tiles,
        **call.visibility,
        DTYPE=tl.float32 if q.dtype == torch.float32 else tl.float16,
        ASM=code_placement(limits, plan.block_m),
        EMULATE=limits.interpreter,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    merge_nvfp4(out, buffers, call.q_per_req, call.v_global_scale * FOLD, limits)
