"""Verify, or decode of wide groups: up to 48 query rows a KV head in one program of a few warps.

A tile has 16 keys a warp. First every warp scores its own keys against all rows; then, with the
weights exchanged through shared memory, it multiplies all keys' weights by its own 32 or 64 columns
of V. So K and V are decoded once each. Packed bytes arrive by asynchronous copies: V's while K is
scored, the next K's while V is multiplied. Rows come in one or two blocks of N1 and N2, because
tensor sizes are powers of two and 6 heads times 8 tokens are 48.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sglang_fp4kv.kernels._fragments import decode_v, spread_scales, store_rows, whole_rows
from sglang_fp4kv.kernels._verify_parts import (
    all_layout,
    copy,
    keep,
    kept,
    pair,
    raise_maximum,
    rows_max,
    score,
    slice_words,
    stage_query,
    thread_sums,
    v_operand,
    warp_max,
    weights_layout,
)
from sglang_fp4kv.kernels._visible_keys import (
    SLACK,
    WEIGHT_BITS,
    cap_scores,
    hide,
    load_slots,
    share_tiles,
    weight_offset,
)


@gluon.jit(do_not_specialize=["batch", "budget"])
def _verify_fragments_kernel(
    q_ptr,
    k_codes_ptr,  # int32 words
    k_scales_ptr,  # int32 words
    v_codes_ptr,
    v_scales_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    block_slots_ptr,
    mask_ptr,
    mask_indptr_ptr,
    window_offsets_ptr,
    part_acc_ptr,  # [items, D, N1 + N2] fp32
    part_stat_ptr,  # [items, 2, N1 + N2] fp32: maximum (log2), sum
    sched_ptr,  # [B, 2] int32: first work item, number of splits
    out_ptr,
    batch,
    budget,
    qk_scale,
    v_scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_kc_slot,  # words, as all strides of the pool
    stride_kc_head,
    stride_ks_slot,
    stride_ks_head,
    stride_vc_slot,
    stride_vc_head,
    stride_vs_slot,
    stride_vs_head,
    Q: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    WARPS: gl.constexpr,
    MIN_TILES: gl.constexpr,
    BLOCK_B: gl.constexpr,
    HAS_BLOCK: gl.constexpr,
    USE_MASK: gl.constexpr,
    HAS_OFFSETS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    LOGIT_CAP: gl.constexpr,
    PLACE: gl.constexpr,
    MMA: gl.constexpr,
    K: gl.constexpr,
    KS: gl.constexpr,
    V: gl.constexpr,
    VS: gl.constexpr,
    VP: gl.constexpr,
    VPS: gl.constexpr,
    COPY: gl.constexpr,
    COPY_S: gl.constexpr,
    K_SHARED: gl.constexpr,
    V_SHARED: gl.constexpr,
    FLAT: gl.constexpr,
):
    T: gl.constexpr = 16 * WARPS
    W: gl.constexpr = D // 8
    HALF: gl.constexpr = D // 2
    SLICES: gl.constexpr = D // 64
    CODES: gl.constexpr = HALF // SLICES
    N: gl.constexpr = N1 + N2
    TV: gl.constexpr = V.shape[0]
    kv_head = gl.program_id(0)  # first, so that a token's heads are read together
    work = gl.program_id(1)
    row_block = gl.program_id(2)
    req, kv_start, prefix, total, first_pos, begin, end, alone = share_tiles(
        kv_indptr_ptr, sched_ptr, batch, budget, work, (kv_head == 0) & (row_block == 0),
        Q, T, MIN_TILES, BLOCK_B, HAS_BLOCK, WINDOW, WARPS,
    )  # fmt: skip
    if req >= batch:
        return
    kv_indices_ptr += kv_start
    block_slots_ptr += req * Q
    mask_offset = 0
    if USE_MASK:
        if HAS_OFFSETS:
            mask_offset = gl.load(window_offsets_ptr + req).to(gl.int32)
        mask_ptr += gl.load(mask_indptr_ptr + req).to(gl.int64) + mask_offset

    k_words = gl.allocate_shared_memory(gl.int32, [T, W], K_SHARED)
    v_words = gl.allocate_shared_memory(gl.int32, [T, W], V_SHARED)
    k_scale_words = gl.allocate_shared_memory(gl.int32, [T, W // 8], FLAT)
    v_scale_words = gl.allocate_shared_memory(gl.int32, [T, W // 8], FLAT)
    k_scale_bytes = k_scale_words._reinterpret(gl.uint8, [T, W // 2], FLAT)
    v_scale_bytes = v_scale_words._reinterpret(gl.uint8, [T, W // 2], FLAT)
    nc = gl.arange(0, T, layout=gl.SliceLayout(1, COPY))
    ns = gl.arange(0, T, layout=gl.SliceLayout(1, COPY_S))
    base = begin * T
    limit = gl.minimum(end * T, total)
    slots = load_slots(kv_indices_ptr, block_slots_ptr, base + nc, prefix, limit, HAS_BLOCK)
    slots_s = load_slots(kv_indices_ptr, block_slots_ptr, base + ns, prefix, limit, HAS_BLOCK)
    copy(
        k_words, k_scale_words, k_codes_ptr, k_scales_ptr, slots, slots_s,
        stride_kc_slot, stride_ks_slot, kv_head.to(gl.int64) * stride_kc_head,
        kv_head.to(gl.int64) * stride_ks_head, COPY, COPY_S,
    )  # fmt: skip

    N_OF: gl.constexpr = gl.SliceLayout(0, MMA)
    T_OF: gl.constexpr = gl.SliceLayout(1, MMA)
    Q_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1 if CODES >= 64 else 2, 2, [1, 0])
    q0 = gl.allocate_shared_memory(gl.float16, [SLICES, N1, CODES], Q_SHARED)
    q1 = gl.allocate_shared_memory(gl.float16, [SLICES, N1, CODES], Q_SHARED)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row0 = row_block * N
    prefix_kept = keep(prefix, WARPS)
    total_kept = keep(total, WARPS)
    first_pos_kept = keep(first_pos, WARPS)
    limit_kept = keep(limit, WARPS)
    owner_kept = keep(2 * req + alone.to(gl.int32), WARPS)
    down = stage_query(
        q_ptr, q0, q1, row0, req, kv_head, stride_qt, stride_qh, Q, GROUP, WARPS, PLACE
    )
    scales_shared = gl.allocate_shared_memory(gl.float32, [N1], LINE)
    scales_shared.store(down * qk_scale)
    rows = row0 + gl.arange(0, N1, layout=N_OF)
    weights_shared = gl.allocate_shared_memory(gl.float16, [T, N1], weights_layout(N1))
    maxima = gl.allocate_shared_memory(gl.float32, [WARPS, N1], FLAT)
    above = gl.allocate_shared_memory(gl.float32, [WARPS], LINE)
    ALL: gl.constexpr = all_layout(WARPS)
    m = gl.allocate_shared_memory(gl.float32, [N1], LINE)
    m.store(gl.full([N1], float("-inf"), gl.float32, layout=N_OF))
    sums = thread_sums(gl.zeros([T, N1], gl.float16, layout=MMA), WARPS)
    even = gl.zeros([HALF, N1], gl.float32, layout=MMA)
    odd = gl.zeros([HALF, N1], gl.float32, layout=MMA)
    if N2 > 0:
        q0_2 = gl.allocate_shared_memory(gl.float16, [SLICES, N2, CODES], Q_SHARED)
        q1_2 = gl.allocate_shared_memory(gl.float16, [SLICES, N2, CODES], Q_SHARED)
        down_2 = stage_query(
            q_ptr, q0_2, q1_2, row0 + N1, req, kv_head, stride_qt, stride_qh, Q, GROUP, WARPS,
            PLACE,
        )  # fmt: skip
        scales_shared_2 = gl.allocate_shared_memory(gl.float32, [N2], LINE)
        scales_shared_2.store(down_2 * qk_scale)
        rows_2 = row0 + N1 + gl.arange(0, N2, layout=N_OF)
        weights_shared_2 = gl.allocate_shared_memory(gl.float16, [T, N2], weights_layout(N2))
        maxima_2 = gl.allocate_shared_memory(gl.float32, [WARPS, N2], FLAT)
        m_2 = gl.allocate_shared_memory(gl.float32, [N2], LINE)
        m_2.store(gl.full([N2], float("-inf"), gl.float32, layout=N_OF))
        sums_2 = thread_sums(gl.zeros([T, N2], gl.float16, layout=MMA), WARPS)
        even_2 = gl.zeros([HALF, N2], gl.float32, layout=MMA)
        odd_2 = gl.zeros([HALF, N2], gl.float32, layout=MMA)
    else:
        q0_2 = q0
        q1_2 = q1

    V_LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    P_RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, VP)))
    half = half.expand_dims(0).expand_dims(0).broadcast_to([TV // 2, W, 2])
    nt = gl.arange(0, T, layout=T_OF)
    for tile in range(begin, end):
        async_copy.wait_group(0)
        prefix = kept(prefix_kept, WARPS)
        total = kept(total_kept, WARPS)
        first_pos = kept(first_pos_kept, WARPS)
        limit = kept(limit_kept, WARPS)
        kw = k_words.load(K)
        ks = k_scale_bytes.load(gl.SliceLayout(2, KS))
        # Every warp is past the last tile's V.
        copy(
            v_words, v_scale_words, v_codes_ptr, v_scales_ptr, slots, slots_s,
            stride_vc_slot, stride_vs_slot, kv_head.to(gl.int64) * stride_vc_head,
            kv_head.to(gl.int64) * stride_vs_head, COPY, COPY_S,
        )  # fmt: skip
        valid = load_slots(kv_indices_ptr, block_slots_ptr, base + nt, prefix, limit, HAS_BLOCK) >= 0
        base += T
        slots = load_slots(kv_indices_ptr, block_slots_ptr, base + nc, prefix, limit, HAS_BLOCK)
        slots_s = load_slots(kv_indices_ptr, block_slots_ptr, base + ns, prefix, limit, HAS_BLOCK)

        kz = spread_scales(ks, K, PLACE)
        s = gl.zeros([T, N1], gl.float32, layout=MMA)
        if N2 > 0:
            s_2 = gl.zeros([T, N2], gl.float32, layout=MMA)
        else:
            s_2 = s
        for u in gl.static_range(SLICES):
            s, s_2 = score(
                slice_words(kw, u, SLICES), slice_words(kz, u, SLICES), q0.index(u), q1.index(u),
                q0_2.index(u), q1_2.index(u), s, s_2, WARPS, MMA, PLACE,
            )  # fmt: skip

        n = tile * T + nt
        edge = (tile + 1) * T > first_pos
        if WINDOW > 0:
            edge = edge | (tile * T < first_pos + Q - WINDOW)
        s = hide(
            cap_scores(s * scales_shared.load(N_OF)[None, :], LOGIT_CAP), valid, n, rows, edge, prefix, total,
            first_pos, mask_ptr, mask_offset, Q, GROUP, USE_MASK, CAUSAL, WINDOW,
        )  # fmt: skip
        highest = rows_max(s + weight_offset(m.load(N_OF))[None, :], WARPS)
        if N2 > 0:
            s_2 = hide(
                cap_scores(s_2 * scales_shared_2.load(N_OF)[None, :], LOGIT_CAP), valid, n, rows_2, edge, prefix,
                total, first_pos, mask_ptr, mask_offset, Q, GROUP, USE_MASK, CAUSAL, WINDOW,
            )  # fmt: skip
            highest_2 = rows_max(s_2 + weight_offset(m_2.load(N_OF))[None, :], WARPS)
            highest = gl.maximum(
                highest, gl.convert_layout(highest_2, highest.type.layout, assert_trivial=True)
            )
        above.store(highest)
        if gl.max(above.load(ALL), 0) > WEIGHT_BITS + SLACK:
            maxima.store(warp_max(s, WARPS))
            if N2 > 0:
                maxima_2.store(warp_max(s_2, WARPS))
            sums, even, odd = raise_maximum(m, maxima, sums, even, odd, WARPS, N_OF)
            if N2 > 0:
                sums_2, even_2, odd_2 = raise_maximum(
                    m_2, maxima_2, sums_2, even_2, odd_2, WARPS, N_OF
                )
        # Every warp has read its K.
        copy(
            k_words, k_scale_words, k_codes_ptr, k_scales_ptr, slots, slots_s,
            stride_kc_slot, stride_ks_slot, kv_head.to(gl.int64) * stride_kc_head,
            kv_head.to(gl.int64) * stride_ks_head, COPY, COPY_S,
        )  # fmt: skip
        weights = gl.exp2(s + weight_offset(m.load(N_OF))[None, :]).to(gl.float16)
        weights_shared.store(weights)
        sums += thread_sums(weights, WARPS)
        if N2 > 0:
            weights_2 = gl.exp2(s_2 + weight_offset(m_2.load(N_OF))[None, :]).to(gl.float16)
            weights_shared_2.store(weights_2)
            sums_2 += thread_sums(weights_2, WARPS)

        async_copy.wait_group(1)
        for t in gl.static_range(T // TV):
            va, vb = pair(
                v_words.slice(t * TV, TV).load(gl.SliceLayout(2, V)), gl.SliceLayout(2, VP)
            )
            sa, sb = pair(
                v_scale_bytes.slice(t * TV, TV).load(gl.SliceLayout(2, VS)),
                gl.SliceLayout(2, VPS),
            )
            v0, v1 = decode_v(
                va.expand_dims(2).broadcast_to([TV // 2, W, 2]),
                vb.expand_dims(2).broadcast_to([TV // 2, W, 2]),
                spread_scales(sa, VP, PLACE),
                spread_scales(sb, VP, PLACE),
                half,
                PLACE,
            )
            v0 = v_operand(v0, WARPS, V_LEFT)
            v1 = v_operand(v1, WARPS, V_LEFT)
            p = weights_shared.slice(t * TV, TV).load(P_RIGHT)
            even = mma_v2(v0, p, even)
            odd = mma_v2(v1, p, odd)
            if N2 > 0:
                p_2 = weights_shared_2.slice(t * TV, TV).load(P_RIGHT)
                even_2 = mma_v2(v0, p_2, even_2)
                odd_2 = mma_v2(v1, p_2, odd_2)

    async_copy.wait_group(0)  # no copy may outlive the program
    all_weights = gl.convert_layout(gl.sum(gl.sum(sums, 0), 0), N_OF)
    if N2 > 0:
        all_weights_2 = gl.convert_layout(gl.sum(gl.sum(sums_2, 0), 0), N_OF)
    owner = kept(owner_kept, WARPS)
    if owner % 2 == 1:  # the request's only item: nothing to merge
        req = owner // 2
        inv = (v_scale / gl.where(all_weights > 0, all_weights, 1.0))[None, :]
        x = whole_rows(even * inv, odd * inv, WARPS, False)
        store_rows(out_ptr, x, row0, req, kv_head, stride_ot, stride_oh, Q, GROUP)
        if N2 > 0:
            inv_2 = (v_scale / gl.where(all_weights_2 > 0, all_weights_2, 1.0))[None, :]
            x_2 = whole_rows(even_2 * inv_2, odd_2 * inv_2, WARPS, False)
            store_rows(out_ptr, x_2, row0 + N1, req, kv_head, stride_ot, stride_oh, Q, GROUP)
        return
    item = (work.to(gl.int64) * gl.num_programs(2) + row_block) * gl.num_programs(0) + kv_head
    part_acc_ptr += item * (D * N)
    part_stat_ptr += item * (2 * N)
    position = gl.arange(0, HALF, layout=T_OF)[:, None] * N
    column = gl.arange(0, N1, layout=N_OF)
    gl.store(part_acc_ptr + position + column[None, :], even)
    gl.store(part_acc_ptr + HALF * N + position + column[None, :], odd)
    gl.store(part_stat_ptr + column, m.load(N_OF))
    gl.store(part_stat_ptr + N + column, all_weights)
    if N2 > 0:
        column_2 = N1 + gl.arange(0, N2, layout=N_OF)
        gl.store(part_acc_ptr + position + column_2[None, :], even_2)
        gl.store(part_acc_ptr + HALF * N + position + column_2[None, :], odd_2)
        gl.store(part_stat_ptr + column_2, m_2.load(N_OF))
        gl.store(part_stat_ptr + N + column_2, all_weights_2)
