"""Prefill over a packed NVFP4 prefix: the current chunk's K and V come unquantized.

One program takes a block of query rows of one KV head (tokens x heads of the group), walks the
prefix tile by tile, decoding each in registers, and then the chunk itself.
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
    ExtendTile,
    cdiv,
    code_placement,
    device_limits,
    half_width,
    plan_extend,
)
from sglang_fp4kv.kernels._tile import (
    FOLD,
    TL_DTYPE,
    cap_scores,
    decode_packed,
    half_scores,
    load_packed,
    round_to,
    softmax_step,
)


@triton.jit
def _query_rows(qo_indptr_ptr, req, kv_head, row_block, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows of a block (token major, head of the group minor): first row of the request in q, its
    tokens, whether a row exists, and its token and query head.

    Read again in every phase of the kernel, and volatile: addresses that a later phase needs would
    otherwise be computed up front and held in registers over the loops.
    """
    chunk_start = tl.load(qo_indptr_ptr + req, volatile=True).to(tl.int64)
    chunk = (tl.load(qo_indptr_ptr + req + 1, volatile=True) - chunk_start).to(tl.int32)
    zero = (tl.load(qo_indptr_ptr + req, volatile=True) - chunk_start).to(tl.int32)
    row = row_block * BLOCK_M + zero + tl.arange(0, BLOCK_M)
    row = tl.minimum(row, chunk * GROUP)
    return chunk_start, chunk, row < chunk * GROUP, row // GROUP, kv_head * GROUP + row % GROUP


@triton.jit
def _load_rows(ptr, offsets, mask, D: tl.constexpr, HALF: tl.constexpr):
    """Load whole rows of unpacked values [N, 2*HALF], in 16-byte pieces."""
    d = tl.arange(0, 2 * HALF)
    row_mask = mask[:, None]
    if D != 2 * HALF:
        row_mask = row_mask & (d < D)[None, :]
    return tl.load(ptr + offsets[:, None] + d[None, :], row_mask, other=0.0)


@triton.jit
def _halves(x):
    """Even and odd columns of x [N, 2*HALF], where both of a pair are in one thread."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _fp16_query(q):
    """Halves of query rows in fp16, and what each row was divided by (a power of two)."""
    amax = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponent = amax.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 8), 252)
    up = ((260 - exponent) << 23).to(tl.float32, bitcast=True)  # amax * up is in [2^7, 2^8)
    down = ((exponent - 6) << 23).to(tl.float32, bitcast=True)
    even, odd = _halves((q.to(tl.float32) * up[:, None]).to(tl.float16))
    return even, odd, down


@triton.jit
def _prefix_step(
    start,
    prefix,
    pos,
    q_even,
    q_odd,
    row_scale,
    m,
    l,
    acc_even,
    acc_odd,
    kv_indices_ptr,  # of this request
    k_codes_ptr,  # these four of this KV head
    k_scales_ptr,
    v_codes_ptr,
    v_scales_ptr,
    stride_kc_slot,
    stride_ks_slot,
    stride_vc_slot,
    stride_vs_slot,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """One packed tile of the prefix. Not MASKED: every key is listed and visible to every row."""
    n = start + tl.arange(0, BLOCK_N)
    if MASKED:
        slots = tl.load(kv_indices_ptr + n, mask=n < prefix, other=-1).to(tl.int64)
    else:
        slots = tl.load(kv_indices_ptr + n).to(tl.int64)
    valid = slots >= 0
    codes, scales = load_packed(
        k_codes_ptr, k_scales_ptr, slots, valid, stride_kc_slot, stride_ks_slot, D, HALF
    )
    k_even, k_odd = decode_packed(codes, scales, DTYPE, ASM)
    s = half_scores(q_even, q_odd, k_even, k_odd)
    s = cap_scores(s * row_scale[:, None], LOGIT_CAP)
    if MASKED:
        visible = valid[None, :]
        if WINDOW > 0:
            visible = visible & (pos[:, None] - n[None, :] <= WINDOW)
        s = tl.where(visible, s, float("-inf"))
    else:
        s = tl.where(valid[None, :], s, float("-inf"))
    p, alpha, m, l = softmax_step(s, m, l, DTYPE)
    codes, scales = load_packed(
        v_codes_ptr, v_scales_ptr, slots, valid, stride_vc_slot, stride_vs_slot, D, HALF
    )
    v_even, v_odd = decode_packed(codes, scales, DTYPE, ASM)
    acc_even = tl.dot(p, v_even, acc_even * alpha[:, None], input_precision="ieee")
    acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None], input_precision="ieee")
    return m, l, acc_even, acc_odd


@triton.jit
def _extend_nvfp4_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    k_codes_ptr,
    k_scales_ptr,
    v_codes_ptr,
    v_scales_ptr,
    qo_indptr_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    mask_ptr,
    mask_indptr_ptr,
    window_offsets_ptr,
    prefix_qk_scale,
    prefix_v_scale,
    chunk_qk_scale,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
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
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_N: tl.constexpr,
    USE_MASK: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK_DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    EMULATE: tl.constexpr,
):
    req = tl.program_id(2)
    kv_head = tl.program_id(1)
    # The last rows of a chunk see the most keys: start them first.
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)

    chunk_start, chunk, row_in, token, head = _query_rows(
        qo_indptr_ptr, req, kv_head, row_block, GROUP, BLOCK_M
    )
    if row_block * BLOCK_M >= chunk * GROUP:
        return
    kv_start = tl.load(kv_indptr_ptr + req).to(tl.int64)
    prefix = (tl.load(kv_indptr_ptr + req + 1) - kv_start).to(tl.int32)
    pos = prefix + token
    first_token = row_block * BLOCK_M // GROUP
    last_token = tl.minimum(((row_block + 1) * BLOCK_M - 1) // GROUP, chunk - 1)
    q_offsets = (chunk_start + token) * stride_qt + head * stride_qh

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc_even = tl.zeros((BLOCK_M, HALF), tl.float32)
    acc_odd = tl.zeros((BLOCK_M, HALF), tl.float32)

    # The packed prefix, in halves. It comes first, because scaling the query rows to fp16 takes the
    # registers that the sums need later.
    if prefix > 0:
        q = _load_rows(q_ptr, q_offsets, row_in, D, HALF)
        if DTYPE == tl.float32:
            q_even, q_odd = _halves(q)
            q_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        else:
            q_even, q_odd, q_scale = _fp16_query(q)
        row_scale = q_scale * prefix_qk_scale
        kv_indices_ptr += kv_start
        k_codes_ptr += kv_head.to(tl.int64) * stride_kc_head
        k_scales_ptr += kv_head.to(tl.int64) * stride_ks_head
        v_codes_ptr += kv_head.to(tl.int64) * stride_vc_head
        v_scales_ptr += kv_head.to(tl.int64) * stride_vs_head
        begin = 0
        full = prefix // BLOCK_N * BLOCK_N
        if WINDOW > 0:
            begin = tl.maximum(prefix + first_token - WINDOW, 0) // BLOCK_N * BLOCK_N
            full = begin
        else:
            for start in range(0, full, BLOCK_N):
                m, l, acc_even, acc_odd = _prefix_step(
                    start,
                    prefix,
                    pos,
                    q_even,
                    q_odd,
                    row_scale,
                    m,
                    l,
                    acc_even,
                    acc_odd,
                    kv_indices_ptr,
                    k_codes_ptr,
                    k_scales_ptr,
                    v_codes_ptr,
                    v_scales_ptr,
                    stride_kc_slot,
                    stride_ks_slot,
                    stride_vc_slot,
                    stride_vs_slot,
                    D,
                    HALF,
                    BLOCK_N,
                    False,
                    WINDOW,
                    LOGIT_CAP,
                    DTYPE,
                    ASM,
                )
        for start in range(full, prefix, BLOCK_N):
            m, l, acc_even, acc_odd = _prefix_step(
                start,
                prefix,
                pos,
                q_even,
                q_odd,
                row_scale,
                m,
                l,
                acc_even,
                acc_odd,
                kv_indices_ptr,
                k_codes_ptr,
                k_scales_ptr,
                v_codes_ptr,
                v_scales_ptr,
                stride_kc_slot,
                stride_ks_slot,
                stride_vc_slot,
                stride_vs_slot,
                D,
                HALF,
                BLOCK_N,
                True,
                WINDOW,
                LOGIT_CAP,
                DTYPE,
                ASM,
            )
        acc_even *= prefix_v_scale
        acc_odd *= prefix_v_scale

    # The chunk itself: scores full width, sums still in halves.
    chunk_start, chunk, row_in, token, head = _query_rows(
        qo_indptr_ptr, req, kv_head, row_block, GROUP, BLOCK_M
    )
    q_offsets = (chunk_start + token) * stride_qt + head * stride_qh
    q = _load_rows(q_ptr, q_offsets, row_in, D, HALF).to(CHUNK_DTYPE)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_token - WINDOW, 0) // CHUNK_N * CHUNK_N
    k_ptr += (chunk_start + begin) * stride_kt + kv_head.to(tl.int64) * stride_kh
    v_ptr += (chunk_start + begin) * stride_vt + kv_head.to(tl.int64) * stride_vh
    end = chunk
    if USE_MASK:
        mask_offset = 0
        if HAS_OFFSETS:
            mask_offset = tl.load(window_offsets_ptr + req).to(tl.int32)
        mask_ptr += tl.load(mask_indptr_ptr + req).to(tl.int64) + mask_offset + prefix
        mask_row = token.to(tl.int64) * (prefix + chunk + mask_offset)
    elif CAUSAL:
        end = last_token + 1
    for start in range(begin, end, CHUNK_N):
        n = start + tl.arange(0, CHUNK_N)
        valid = n < end
        # One address a tile and small offsets: an address a row would be carried in registers.
        k = _load_rows(k_ptr, tl.arange(0, CHUNK_N) * stride_kt, valid, D, HALF).to(CHUNK_DTYPE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = cap_scores(s * chunk_qk_scale, LOGIT_CAP)
        visible = valid[None, :] & row_in[:, None]
        back = token[:, None] - n[None, :]
        if USE_MASK:
            allowed = tl.load(mask_ptr + mask_row[:, None] + n[None, :], mask=visible, other=0)
            visible = visible & (allowed != 0)
        elif CAUSAL:
            visible = visible & (back >= 0)
        if WINDOW > 0:
            visible = visible & (back <= WINDOW)
            if not CAUSAL:
                visible = visible & (back >= -WINDOW)
        s = tl.where(visible, s, float("-inf"))
        p, alpha, m, l = softmax_step(s, m, l, CHUNK_DTYPE)
        v = _load_rows(v_ptr, tl.arange(0, CHUNK_N) * stride_vt, valid, D, HALF)
        v_even, v_odd = _halves(v.to(CHUNK_DTYPE))
        acc_even = tl.dot(p, v_even, acc_even * alpha[:, None], input_precision="ieee")
        acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None], input_precision="ieee")
        k_ptr += CHUNK_N * stride_kt
        v_ptr += CHUNK_N * stride_vt

    chunk_start, chunk, row_in, token, head = _query_rows(
        qo_indptr_ptr, req, kv_head, row_block, GROUP, BLOCK_M
    )
    inv = (1.0 / tl.where(l > 0, l, 1.0))[:, None]
    # Rounded before they are joined, which takes half the registers.
    even = round_to(acc_even * inv, out_ptr.dtype.element_ty, EMULATE)
    odd = round_to(acc_odd * inv, out_ptr.dtype.element_ty, EMULATE)
    d = tl.arange(0, 2 * HALF)
    out_mask = row_in[:, None]
    if D != 2 * HALF:
        out_mask = out_mask & (d < D)[None, :]
    out_ptr += chunk_start * stride_ot
    offsets = token.to(tl.int64) * stride_ot + head * stride_oh
    tl.store(out_ptr + offsets[:, None] + d[None, :], tl.interleave(even, odd), out_mask)


def extend_nvfp4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_codes: torch.Tensor,
    k_scales: torch.Tensor,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    max_extend_len: int,
    k_global_scale: float,
    v_global_scale: float,
    sm_scale: float,
    logit_cap: float = 0.0,
    causal: bool = True,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    sliding_window_size: int = -1,
    window_kv_offsets: torch.Tensor | None = None,
    tile: ExtendTile | None = None,
) -> torch.Tensor:
    """Attend from the new tokens to a packed prefix and to themselves; out is overwritten.

    Sizes: T new tokens of B requests, Hq query heads, H KV heads, D head dim, S slots
      q, out             [T, Hq, D]      bf16 | fp16 | fp32   last dim contiguous
      k, v               [T, H, D]       like q               last dim contiguous
      k_codes, v_codes   [S, H, D//2]    uint8                low nibble = even element
      k_scales, v_scales [S, H, D//16]   uint8 | float8_e4m3  no sign bit, not NaN in listed slots
      qo_indptr          [B+1]           int32 | int64        rows of q, k, v
      kv_indptr          [>= B+1]        int32 | int64
      kv_indices         [>= kv_indptr[B]] int32 | int64      prefix slots; below 0 = not visible
      custom_mask        flat            bool | uint8         token j of request i at
        mask_indptr[i] + j * (off + prefix + new tokens), off = window_kv_offsets[i] or 0; entry
        off + n is key n. Read for the chunk alone, instead of causal: the prefix is always visible
        (SGLang's skip_prefix_custom_mask)
      sliding_window_size  keys more than this far back are hidden; 0 or less = no window. With a
        window kv_indices may list the last keys of the prefix only
    max_extend_len: at least the most new tokens of a request (rows above it are left unwritten)
    Numerics: fp32 scores, softmax and sums. Prefix: tiles decoded exactly to fp16, query rows
      scaled by a power of two to fp16, weights fp16; global scales in fp32 after the dots. Chunk:
      q's dtype. All fp32 for fp32 q. No visible key gives zeros. Slots not listed are never read
    Runs on: sm_80 (99 KiB of shared memory at D 256); CUDA-graph safe: yes; allocates: no
    Raises: ValueError for shapes, dtypes and strides that do not fit (the message names the value)
    Reference: tests/reference_attention.py over codec.decode, error at most twice BF16 attention's
    Source: mask layout and window of srt Triton backend @ sglang 0.5.23
    """
    check_rows("q", q)
    check_rows("k", k, like=q)
    check_rows("v", v, like=q)
    check_out(out, q)
    tokens, num_q_heads, head_dim = q.shape
    k_scales = check_pool_side("k", k_codes, k_scales, num_q_heads, head_dim)
    v_scales = check_pool_side("v", v_codes, v_scales, num_q_heads, head_dim)
    num_kv_heads = k_codes.shape[1]
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != (tokens, num_kv_heads):
            raise ValueError(
                f"{name} must be [{tokens}, {num_kv_heads}, {head_dim}], got {tuple(x.shape)}"
            )
    if v_codes.shape[1] != num_kv_heads:
        raise ValueError(f"v_codes must have {num_kv_heads} heads, got {v_codes.shape[1]}")
    check_index("qo_indptr", qo_indptr, at_least=1)
    batch = qo_indptr.numel() - 1
    check_index("kv_indptr", kv_indptr, at_least=batch + 1)
    check_index("kv_indices", kv_indices)
    custom_mask = check_mask(custom_mask, mask_indptr, window_kv_offsets, batch)
    k_global_scale = check_global_scale(k_global_scale)
    v_global_scale = check_global_scale(v_global_scale)
    if not logit_cap >= 0:
        raise ValueError(f"logit_cap must be 0 (none) or positive, got {logit_cap}")
    if max_extend_len < 0:
        raise ValueError(f"max_extend_len must not be negative, got {max_extend_len}")
    if batch == 0 or tokens == 0 or max_extend_len == 0:
        return out

    group = num_q_heads // num_kv_heads
    limits = device_limits(q.device)
    if tile is None:
        tile = plan_extend(head_dim, max_extend_len * group, limits)
    has_offsets = (
        custom_mask is not None and sliding_window_size > 0 and window_kv_offsets is not None
    )
    log2e = 1.0 if logit_cap > 0 else math.log2(math.e)
    emulate_bf16 = limits.interpreter and q.dtype == torch.bfloat16
    _extend_nvfp4_kernel[(cdiv(max_extend_len * group, tile.block_m), num_kv_heads, batch)](
        q,
        k,
        v,
        out,
        k_codes,
        k_scales,
        v_codes,
        v_scales,
        qo_indptr,
        kv_indptr,
        kv_indices,
        k_codes if custom_mask is None else custom_mask,
        kv_indptr if custom_mask is None else mask_indptr,
        window_kv_offsets if has_offsets else kv_indptr,
        sm_scale * k_global_scale * FOLD * log2e,
        v_global_scale * FOLD,
        sm_scale * log2e,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        *k_codes.stride()[:2],
        *k_scales.stride()[:2],
        *v_codes.stride()[:2],
        *v_scales.stride()[:2],
        GROUP=group,
        D=head_dim,
        HALF=half_width(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CHUNK_N=tile.chunk_n,
        USE_MASK=custom_mask is not None,
        HAS_OFFSETS=has_offsets,
        CAUSAL=causal,
        WINDOW=max(sliding_window_size, 0),
        LOGIT_CAP=float(logit_cap),
        DTYPE=tl.float32 if q.dtype == torch.float32 else tl.float16,
        CHUNK_DTYPE=tl.float32 if emulate_bf16 else TL_DTYPE[q.dtype],
        ASM=code_placement(limits, tile.block_m),
        EMULATE=limits.interpreter,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
