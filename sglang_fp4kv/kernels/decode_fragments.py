"""Decode of up to 8 query rows a KV head: one warp walks its keys alone, no shared memory.

A program is one warp: loads go from the pool to registers, the next keys' while the current ones
are used, and nothing waits for another warp. Its partial result goes to merge_fragments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sglang_fp4kv.kernels._fragments import (
    codes_to_groups,
    decode_k,
    decode_v,
    halves_to_groups,
    linear,
    log2,
    operands,
    query_down,
    query_exponent,
    query_up,
    spread_scales,
    store_rows,
    whole_rows,
)
from sglang_fp4kv.kernels._selection import load_positions, rows_of, share_selections
from sglang_fp4kv.kernels._visible_keys import (
    cap_scores,
    hide,
    load_slots,
    rescale,
    share_tiles,
    weight_offset,
)

ROWS_PADDED = 8


def decode_layouts(head_dim: int, tile: int) -> dict:
    """Layouts (constexpr arguments) of a tile of keys: head_dim 64, 128 or 256, tile 16, 32, ..."""
    words = head_dim // 8
    run = words // 8  # consecutive words of a thread
    # K [T, words]: lanes 4g + c hold rows g and g + 8, two runs of words each
    k_reg = [[0, 1 << i] for i in range(log2(run))] + [[8, 0], [0, 4 * run]]
    k_reg += [[16 << i, 0] for i in range(log2(tile // 16))]
    k_lane = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    # V [P, words, halves], P pairs of tokens: lanes hold pairs c, c + 4, ... and run g of the words
    pairs = tile // 2
    v_reg = [[0, 0, 1]] + [[0, 1 << i, 0] for i in range(log2(run))]
    v_reg += [[4 << i, 0, 0] for i in range(log2(pairs // 4))]
    v_lane = [[1, 0, 0], [2, 0, 0], [0, run, 0], [0, 2 * run, 0], [0, 4 * run, 0]]
    # q [head_dim, rows]: lanes 4g + c hold runs c and c + 4 of row g's words, as K's lanes do
    q_reg = [[1, 0], [2, 0], [4, 0], *([8 << i, 0] for i in range(log2(run))), [32 * run, 0]]
    q_lane = [[8 * run, 0], [16 * run, 0], [0, 1], [0, 2], [0, 4]]
    groups = words // 2
    return {
        "QUERY": linear(q_reg, q_lane, [], (head_dim, ROWS_PADDED)),
        "MMA": gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]),
        "K": linear(k_reg, k_lane, [], (tile, words)),
        "KS": linear(k_reg, k_lane, [], (tile, groups, 2), codes_to_groups),
        "V": linear(v_reg, v_lane, [], (pairs, words, 2)),
        "VS": linear(v_reg, v_lane, [], (pairs, groups, 4), halves_to_groups),
    }


@gluon.jit
def _load(
    codes_ptr, scales_ptr, slots, stride_codes, stride_scales,
    WORDS: gl.constexpr, SCALES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Words [N, W] and scale bytes [N, W/2] of rows. A slot below 0 reads slot 0 and scale 0."""
    w = gl.arange(0, W, layout=gl.SliceLayout(0, WORDS))
    words = gl.load(
        codes_ptr + (gl.maximum(slots, 0).to(gl.int64) * stride_codes)[:, None] + w[None, :]
    )
    S: gl.constexpr = gl.SliceLayout(2, SCALES)
    g = gl.arange(0, W // 2, layout=gl.SliceLayout(0, S))
    own = gl.convert_layout(slots, gl.SliceLayout(1, S), assert_trivial=True)
    scales = gl.load(
        scales_ptr + (own.to(gl.int64) * stride_scales)[:, None] + g[None, :],
        mask=(own >= 0)[:, None],
        other=0,
    )
    return words, scales


@gluon.jit
def _v_operand(x, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of V [P, W, half, byte, token] as the left operand [4W, 2P], rows in merge's order."""
    P: gl.constexpr = x.shape[0]
    x = gl.reshape(x, [P, 8, W // 8, 2, 2, 2])  # p, g, word of the run, half, byte, token
    x = gl.permute(x, [2, 3, 4, 1, 0, 5])
    return gl.convert_layout(gl.reshape(x, [4 * W, 2 * P]), LAYOUT, assert_trivial=True)


@gluon.jit
def _load_rows(
    indices_ptr, block_ptr, n, prefix, limit, length, num_slots, group,
    HAS_BLOCK: gl.constexpr, GROUPS: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    """Rows of the pool of keys n, -1 from ``limit`` on: a request's slots, or what is selected."""
    if GROUPS > 0:
        positions = load_positions(block_ptr, n, limit, length)
        return rows_of(positions, indices_ptr, num_slots, group, GROUPS, LISTED)
    else:
        return load_slots(indices_ptr, block_ptr, n, prefix, limit, HAS_BLOCK)


@gluon.jit(
    do_not_specialize=["batch", "budget", "first_token", "entries", "num_slots", "q_per_req"]
)
def _decode_fragments_kernel(
    q_ptr,
    k_codes_ptr,  # int32 words
    k_scales_ptr,
    v_codes_ptr,  # int32 words
    v_scales_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    block_slots_ptr,  # with GROUPS: what is selected
    mask_ptr,
    mask_indptr_ptr,
    window_offsets_ptr,
    part_acc_ptr,  # [items, D, 8] fp32
    part_stat_ptr,  # [items, 2, 8] fp32: maximum (log2), sum
    sched_ptr,  # [B, 2] int32: first work item, number of splits
    out_ptr,
    batch,
    budget,
    first_token,  # this and the next three: see _selection.Selection
    entries,
    num_slots,
    q_per_req,
    qk_scale,
    v_scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_kc_slot,  # words
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
    T: gl.constexpr,
    MIN_TILES: gl.constexpr,
    BLOCK_B: gl.constexpr,
    HAS_BLOCK: gl.constexpr,
    USE_MASK: gl.constexpr,
    HAS_OFFSETS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    LOGIT_CAP: gl.constexpr,
    GROUPS: gl.constexpr,
    LISTED: gl.constexpr,
    PLACE: gl.constexpr,
    MMA: gl.constexpr,
    K: gl.constexpr,
    KS: gl.constexpr,
    V: gl.constexpr,
    VS: gl.constexpr,
    QUERY: gl.constexpr,
):
    HALF: gl.constexpr = D // 2
    W: gl.constexpr = D // 8
    P: gl.constexpr = T // 2
    ROWS: gl.constexpr = Q * GROUP
    kv_head = gl.program_id(0)  # first, so that a token's heads are read together
    work = gl.program_id(1)
    length = num_slots  # with GROUPS: positions of the request
    group = 0
    if GROUPS > 0:
        req, begin, end, alone = share_selections(
            sched_ptr, batch, entries, budget, work, kv_head == 0, T, MIN_TILES
        )
        if req >= batch:
            return
        prefix = entries
        total = entries
        first_pos = entries - 1
        group = req % GROUPS
        block_slots_ptr += req.to(gl.int64) * entries
        if LISTED:
            kv_indptr_ptr += (first_token + req // GROUPS) // q_per_req
            kv_start = gl.load(kv_indptr_ptr).to(gl.int64)
            length = (gl.load(kv_indptr_ptr + 1).to(gl.int64) - kv_start).to(gl.int32)
            kv_indices_ptr += kv_start
    else:
        req, kv_start, prefix, total, first_pos, begin, end, alone = share_tiles(
            kv_indptr_ptr, sched_ptr, batch, budget, work, kv_head == 0,
            Q, T, MIN_TILES, BLOCK_B, HAS_BLOCK, WINDOW, 1,
        )  # fmt: skip
        if req >= batch:
            return
        kv_indices_ptr += kv_start
        block_slots_ptr += req * Q
    k_codes_ptr += kv_head.to(gl.int64) * stride_kc_head
    k_scales_ptr += kv_head.to(gl.int64) * stride_ks_head
    v_codes_ptr += kv_head.to(gl.int64) * stride_vc_head
    v_scales_ptr += kv_head.to(gl.int64) * stride_vs_head
    mask_offset = 0
    if USE_MASK:
        if HAS_OFFSETS:
            mask_offset = gl.load(window_offsets_ptr + req).to(gl.int32)
        mask_ptr += gl.load(mask_indptr_ptr + req).to(gl.int64) + mask_offset

    # q as the right operand: its rows follow the order in which K's words decode.
    K_LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, HALF // 8)
    K_RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, HALF // 8)
    V_LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    V_WORDS: gl.constexpr = gl.SliceLayout(2, V)  # both halves of a word hold it
    P_RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    N_OF: gl.constexpr = gl.SliceLayout(0, MMA)
    T_OF: gl.constexpr = gl.SliceLayout(1, MMA)
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, QUERY))
    column = gl.arange(0, D, layout=gl.SliceLayout(1, QUERY))
    q_offsets = (req.to(gl.int64) * Q + row // GROUP) * stride_qt
    q_offsets += (kv_head * GROUP + row % GROUP) * stride_qh
    x = gl.load(
        q_ptr + q_offsets[None, :] + column[:, None], mask=(row < ROWS)[None, :], other=0.0
    ).to(gl.float32)
    exponent = query_exponent(gl.max(gl.abs(x), 0))
    x = (x * query_up(exponent)[None, :]).to(gl.float16)
    q0, q1 = operands(gl.reshape(x, [W, 8, 8]), PLACE)
    q0 = gl.convert_layout(gl.reshape(q0, [HALF, 8]), K_RIGHT, assert_trivial=True)
    q1 = gl.convert_layout(gl.reshape(q1, [HALF, 8]), K_RIGHT, assert_trivial=True)
    row_scale = gl.convert_layout(query_down(exponent), N_OF) * qk_scale

    nk = gl.arange(0, T, layout=gl.SliceLayout(1, K))
    nv = 2 * gl.arange(0, P, layout=gl.SliceLayout(1, gl.SliceLayout(2, V)))
    nt = gl.arange(0, T, layout=T_OF)
    rows = gl.arange(0, 8, layout=N_OF)
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, V)))
    half = half.expand_dims(0).expand_dims(0).broadcast_to([P, W, 2])
    m = gl.full([8], float("-inf"), gl.float32, layout=N_OF)
    sums = gl.zeros([16, 8], gl.float32, layout=MMA)
    even = gl.zeros([HALF, 8], gl.float32, layout=MMA)
    odd = gl.zeros([HALF, 8], gl.float32, layout=MMA)
    ones = gl.full([16, T], 1.0, gl.float16, layout=V_LEFT)

    base = begin * T
    limit = gl.minimum(end * T, total)
    slots = _load_rows(
        kv_indices_ptr, block_slots_ptr, base + nk, prefix, limit, length, num_slots, group, HAS_BLOCK, GROUPS, LISTED,
    )  # fmt: skip
    kw, ks = _load(k_codes_ptr, k_scales_ptr, slots, stride_kc_slot, stride_ks_slot, K, KS, W)
    slots_a = _load_rows(
        kv_indices_ptr, block_slots_ptr, base + nv, prefix, limit, length, num_slots, group, HAS_BLOCK, GROUPS, LISTED,
    )  # fmt: skip
    slots_b = _load_rows(
        kv_indices_ptr, block_slots_ptr, base + nv + 1, prefix, limit, length, num_slots, group, HAS_BLOCK, GROUPS, LISTED,
    )  # fmt: skip
    ahead = _load_rows(
        kv_indices_ptr, block_slots_ptr, base + T + nk, prefix, limit, length, num_slots, group, HAS_BLOCK, GROUPS, LISTED,
    )  # fmt: skip
    if GROUPS > 0:  # a step earlier still: its list entry waits for it
        further = load_positions(block_slots_ptr, base + 2 * T + nk, limit, length)
    for tile in range(begin, end):
        va, sa = _load(
            v_codes_ptr, v_scales_ptr, slots_a, stride_vc_slot, stride_vs_slot, V_WORDS, VS, W
        )
        vb, sb = _load(
            v_codes_ptr, v_scales_ptr, slots_b, stride_vc_slot, stride_vs_slot, V_WORDS, VS, W
        )
        k0, k1 = decode_k(kw, spread_scales(ks, K, PLACE), PLACE)
        k0 = gl.convert_layout(gl.reshape(k0, [T, HALF]), K_LEFT, assert_trivial=True)
        k1 = gl.convert_layout(gl.reshape(k1, [T, HALF]), K_LEFT, assert_trivial=True)
        s = mma_v2(k0, q0, gl.zeros([T, 8], gl.float32, layout=MMA))
        s = mma_v2(k1, q1, s)
        valid = gl.convert_layout(slots, T_OF, assert_trivial=True) >= 0

        # What the next step needs is asked for before this step's V is decoded.
        slots = ahead
        kw, ks = _load(k_codes_ptr, k_scales_ptr, slots, stride_kc_slot, stride_ks_slot, K, KS, W)
        base += T
        slots_a = _load_rows(
            kv_indices_ptr, block_slots_ptr, base + nv, prefix, limit, length, num_slots, group, HAS_BLOCK, GROUPS, LISTED,
        )  # fmt: skip
        slots_b = _load_rows(
            kv_indices_ptr, block_slots_ptr, base + nv + 1, prefix, limit, length, num_slots, group, HAS_BLOCK, GROUPS, LISTED,
        )  # fmt: skip
        if GROUPS > 0:
            ahead = rows_of(further, kv_indices_ptr, num_slots, group, GROUPS, LISTED)
            further = load_positions(block_slots_ptr, base + 2 * T + nk, limit, length)
        else:
            ahead = load_slots(
                kv_indices_ptr, block_slots_ptr, base + T + nk, prefix, limit, HAS_BLOCK
            )

        edge = (tile + 1) * T > first_pos
        if WINDOW > 0:
            edge = edge | (tile * T < first_pos + Q - WINDOW)
        s = hide(
            cap_scores(s * row_scale[None, :], LOGIT_CAP), valid, tile * T + nt, rows, edge, prefix, total, first_pos, mask_ptr, mask_offset, Q, GROUP, USE_MASK, CAUSAL, WINDOW,
        )  # fmt: skip
        m_new = gl.maximum(m, gl.ceil(gl.max(s, 0)))
        alpha = rescale(m, m_new)[None, :]
        m = m_new
        weights = gl.exp2(s + weight_offset(m)[None, :]).to(gl.float16)
        weights = gl.convert_layout(weights, P_RIGHT)
        v0, v1 = decode_v(
            va.expand_dims(2).broadcast_to([P, W, 2]),
            vb.expand_dims(2).broadcast_to([P, W, 2]),
            spread_scales(sa, V, PLACE),
            spread_scales(sb, V, PLACE),
            half,
            PLACE,
        )
        sums = mma_v2(ones, weights, sums * alpha)
        even = mma_v2(_v_operand(v0, W, V_LEFT), weights, even * alpha)
        odd = mma_v2(_v_operand(v1, W, V_LEFT), weights, odd * alpha)

    all_weights = gl.max(sums, 0)
    if alone:  # nothing to merge
        inv = (v_scale / gl.where(all_weights > 0, all_weights, 1.0))[None, :]
        result = whole_rows(even * inv, odd * inv, D // 32, True)
        store_rows(out_ptr, result, 0, req, kv_head, stride_ot, stride_oh, Q, GROUP)
        return
    item = work.to(gl.int64) * gl.num_programs(0) + kv_head
    part_acc_ptr += item * (D * 8)
    part_stat_ptr += item * 16
    offsets = gl.arange(0, HALF, layout=T_OF)[:, None] * 8 + rows[None, :]
    gl.store(part_acc_ptr + offsets, even)
    gl.store(part_acc_ptr + HALF * 8 + offsets, odd)
    gl.store(part_stat_ptr + rows, m)
    gl.store(part_stat_ptr + 8 + rows, all_weights)
