"""Split-KV attention over a packed NVFP4 pool: decode and speculative verify in one kernel.

A request's keys are its listed slots followed, for verify, by the slots of its own block; both are
walked as one axis. The tiles of all requests are shared out on the device, in proportion to their
lengths, over a fixed number of programs, so one launch shape serves any lengths and a captured
graph stays right when they change. A second kernel merges what was split.
"""

import math

import torch
import triton
import triton.language as tl

from sglang_fp4kv.formats import check_global_scale
from sglang_fp4kv.kernels._check import (
    check_index,
    check_mask,
    check_out,
    check_pool_side,
    check_rows,
)
from sglang_fp4kv.kernels._plan import (
    AttentionPlan,
    code_placement,
    device_limits,
    half_width,
    plan_attention,
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
from sglang_fp4kv.kernels.merge_nvfp4 import (
    AttentionBuffers,
    attention_buffers,
    check_buffers,
    merge_nvfp4,
)


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


def attention_nvfp4(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scales: torch.Tensor,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    q_per_req: int,
    block_slots: torch.Tensor | None = None,
    k_global_scale: float,
    v_global_scale: float,
    sm_scale: float,
    logit_cap: float = 0.0,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    sliding_window_size: int = -1,
    window_kv_offsets: torch.Tensor | None = None,
    causal: bool = True,
    plan: AttentionPlan | None = None,
    buffers: AttentionBuffers | None = None,
) -> torch.Tensor:
    """Attend from q_per_req rows a request to its packed keys and values; out is overwritten.

    Decode: q_per_req 1, no block_slots, kv_indices list the current token too. Verify: kv_indices
    list the prefix, block_slots the slots the block's own K and V were just written to; row j sees
    the prefix and tokens 0..j of the block, or what custom_mask says. Without block_slots and with
    q_per_req > 1 the rows are the last q_per_req listed keys.

    Sizes: B requests, Q q_per_req, R = B * Q rows, Hq query heads, H KV heads, D head dim, S slots
      q, out             [R, Hq, D]      bf16 | fp16 | fp32   last dim contiguous
      k_codes, v_codes   [S, H, D//2]    uint8                low nibble = even element
      k_scales, v_scales [S, H, D//16]   uint8 | float8_e4m3  no sign bit, not NaN in listed slots
      kv_indptr          [>= B+1]        int32 | int64
      kv_indices         [>= kv_indptr[B]] int32 | int64      slots; below 0 = not visible
      block_slots        [R]             int32 | int64        slots; below 0 = not visible
      custom_mask        flat            bool | uint8         row j of request i at mask_indptr[i] +
        j * (off + prefix + Q), off = window_kv_offsets[i] or 0; entry off + n is key n. Read for
        the block alone: the prefix is always visible (SGLang's skip_prefix_custom_mask)
      sliding_window_size  keys more than this far back are hidden; 0 or less = no window. With a
        window kv_indices may list the last keys of the prefix only
    Numerics: fp32 scores, softmax and sums; tiles decoded exactly to fp16, query rows scaled by a
      power of two to fp16, weights fp16 (all three fp32 for fp32 q); both global scales and
      logit_cap in fp32 after the dots; partial results fp32; no visible key gives zeros. Slots not
      listed are never read
    Runs on: sm_80; CUDA-graph safe: yes; allocates partial results unless buffers are passed
    Raises: ValueError for shapes, dtypes and strides that do not fit (the message names the value)
    Reference: tests/reference_attention.py over codec.decode, error at most twice BF16 attention's
    Source: split-KV decoding (Flash-Decoding); mask layout of srt Triton backend @ sglang 0.5.23
    """
    check_rows("q", q)
    check_out(out, q)
    rows, num_q_heads, head_dim = q.shape
    k_scales = check_pool_side("k", k_codes, k_scales, num_q_heads, head_dim)
    v_scales = check_pool_side("v", v_codes, v_scales, num_q_heads, head_dim)
    num_kv_heads = k_codes.shape[1]
    if v_codes.shape[1] != num_kv_heads:
        raise ValueError(f"v_codes must have {num_kv_heads} heads, got {v_codes.shape[1]}")
    if q_per_req < 1 or rows % q_per_req:
        raise ValueError(f"q_per_req must divide the {rows} rows of q, got {q_per_req}")
    batch = rows // q_per_req
    check_index("kv_indptr", kv_indptr, at_least=batch + 1)
    check_index("kv_indices", kv_indices)
    if block_slots is not None:
        check_index("block_slots", block_slots, rows)
    if custom_mask is not None and block_slots is None:
        raise ValueError("custom_mask needs block_slots, got None")
    custom_mask = check_mask(custom_mask, mask_indptr, window_kv_offsets, batch)
    k_global_scale = check_global_scale(k_global_scale)
    v_global_scale = check_global_scale(v_global_scale)
    if not logit_cap >= 0:
        raise ValueError(f"logit_cap must be 0 (none) or positive, got {logit_cap}")
    if batch == 0:
        return out

    limits = device_limits(q.device)
    if plan is None:
        plan = plan_attention(
            batch,
            q_per_req,
            num_q_heads,
            num_kv_heads,
            head_dim,
            kv_indices.numel(),
            limits,
        )
    if plan.work_items < plan.budget + batch:
        raise ValueError(
            f"plan.work_items must be at least budget + batch = {plan.budget + batch}, "
            f"got {plan.work_items}"
        )
    if plan.block_m * plan.row_blocks < num_q_heads // num_kv_heads * q_per_req:
        raise ValueError(
            f"plan covers {plan.block_m * plan.row_blocks} query rows a KV head, "
            f"got {num_q_heads // num_kv_heads * q_per_req}"
        )
    if buffers is None:
        buffers = attention_buffers(
            plan.work_items, batch, q_per_req, num_q_heads, head_dim, q.device
        )
    else:
        check_buffers(buffers, plan.work_items * q_per_req * num_q_heads, batch, head_dim)

    has_offsets = (
        custom_mask is not None and sliding_window_size > 0 and window_kv_offsets is not None
    )
    qk_scale = sm_scale * k_global_scale * FOLD
    if logit_cap == 0:
        qk_scale *= math.log2(math.e)
    half = half_width(head_dim)
    _attention_nvfp4_kernel[(plan.work_items, num_kv_heads, plan.row_blocks)](
        q,
        k_codes,
        k_scales,
        v_codes,
        v_scales,
        out,
        kv_indptr,
        kv_indices,
        kv_indices if block_slots is None else block_slots,
        k_codes if custom_mask is None else custom_mask,
        kv_indptr if custom_mask is None else mask_indptr,
        window_kv_offsets if has_offsets else kv_indptr,
        buffers.acc,
        buffers.stat,
        buffers.sched,
        batch,
        plan.budget,
        num_q_heads,
        qk_scale,
        v_global_scale * FOLD,
        *q.stride()[:2],
        *out.stride()[:2],
        *k_codes.stride()[:2],
        *k_scales.stride()[:2],
        *v_codes.stride()[:2],
        *v_scales.stride()[:2],
        Q=q_per_req,
        GROUP=num_q_heads // num_kv_heads,
        D=head_dim,
        HALF=half,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_B=max(16, pow2(batch)),
        MIN_TILES=plan.min_tiles,
        HAS_BLOCK=block_slots is not None,
        USE_MASK=custom_mask is not None,
        HAS_OFFSETS=has_offsets,
        CAUSAL=causal,
        WINDOW=max(sliding_window_size, 0),
        LOGIT_CAP=float(logit_cap),
        DTYPE=tl.float32 if q.dtype == torch.float32 else tl.float16,
        ASM=code_placement(limits, plan.block_m),
        EMULATE=limits.interpreter,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    merge_nvfp4(out, buffers, q_per_req, v_global_scale * FOLD, limits)
    return out
