"""Layouts and steps of verify_fragments."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

from sglang_fp4kv.kernels._fragments import (
    codes_to_groups,
    decode_k,
    halves_to_groups,
    linear,
    log2,
    operands,
    query_down,
    query_exponent,
    query_up,
)
from sglang_fp4kv.kernels._visible_keys import rescale

V_TOKENS = 32  # multiplied at a time


def verify_layouts(head_dim: int, warps: int) -> dict:
    """Layouts (constexpr arguments): warps = head_dim/32 or head_dim/64, 16 keys a warp."""
    words = head_dim // 8
    tile, groups = 16 * warps, words // 2
    # K [T, words]: lanes 4g + c of warp w hold quarter c of rows 16w + g and 16w + g + 8
    k_reg = [[0, 1 << i] for i in range(log2(words // 4))] + [[8, 0]]
    k_lane = [[0, words // 4], [0, words // 2], [1, 0], [2, 0], [4, 0]]
    k_warp = [[16 << i, 0] for i in range(log2(warps))]
    # V [32, words, halves]: lanes 4g + c hold tokens 2c, 2c + 1, 8 + 2c, ... and of warp w's columns
    # half g % 2 of word 4w + g // 2, or with 64 columns a warp both halves of word 8w + g
    whole = head_dim == 64 * warps
    v_reg = [[1, 0, 0]] + [[0, 0, 1]] * whole
    v_reg += [[8 << i, 0, 0] for i in range(log2(V_TOKENS // 8))]
    of_lane = [[0, 1, 0], [0, 2, 0], [0, 4, 0]] if whole else [[0, 0, 1], [0, 1, 0], [0, 2, 0]]
    v_lane = [[2, 0, 0], [4, 0, 0], *of_lane]
    v_warp = [[0, (8 if whole else 4) << i, 0] for i in range(log2(warps))]
    pair_of = [[b[0] // 2, *b[1:]] for b in v_reg[1:]], [[b[0] // 2, *b[1:]] for b in v_lane], v_warp
    pairs = V_TOKENS // 2
    rows_a_line = max(1, 32 // words)  # of words in 128 bytes, all banks
    lane_words = 8 if whole else 4
    return {
        "MMA": gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8]),
        "K": linear(k_reg, k_lane, k_warp, (tile, words)),
        "KS": linear(k_reg, k_lane, k_warp, (tile, groups, 2), codes_to_groups),
        "V": linear(v_reg, v_lane, v_warp, (V_TOKENS, words, 2)),
        "VS": linear(v_reg, v_lane, v_warp, (V_TOKENS, groups, 4), halves_to_groups),
        "VP": linear(*pair_of, (pairs, words, 2)),
        "VPS": linear(*pair_of, (pairs, groups, 4), halves_to_groups),
        # Copies: 16 bytes of codes, 4 of scales a thread.
        "COPY": gl.BlockedLayout([1, 4], [128 // words, words // 4], [warps, 1], [1, 0]),
        "COPY_S": gl.BlockedLayout([1, 1], [128 // groups, groups // 4], [warps, 1], [1, 0]),
        "K_SHARED": gl.SwizzledSharedLayout(4, rows_a_line, 2, [1, 0]),
        "V_SHARED": gl.SwizzledSharedLayout(
            lane_words, 2 * rows_a_line, min(4, words // lane_words), [1, 0]
        ),
        "FLAT": gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    }


@constexpr_function
def q_layout(rows, codes, warps):
    """q [rows, codes] as the right operand's threads read it: a quarter of a row's codes each."""
    reg = [[0, 1 << i] for i in range((codes // 4).bit_length() - 1)]
    reg += [[8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    lane = [[0, codes // 4], [0, codes // 2], [1, 0], [2, 0], [4, 0]]
    warp = [[0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout(reg, lane, warp, [], [rows, codes])


@constexpr_function
def maxima_layout(rows, warps):
    """[warps, rows]: a thread has one warp's values of the rows whose scores it holds."""
    reg = [[0, 1]] + [[0, 8 << i] for i in range((rows // 8).bit_length() - 1)]
    log_warps = warps.bit_length() - 1
    lane = [[0, 2], [0, 4]] + [[1 << i, 0] if i < log_warps else [0, 0] for i in range(3)]
    return gl.DistributedLinearLayout(reg, lane, [[0, 0]] * log_warps, [], [warps, rows])


@constexpr_function
def all_layout(warps):
    log_warps = warps.bit_length() - 1
    reg = [[1 << i] for i in range(log_warps)]
    return gl.DistributedLinearLayout(reg, [[0]] * 5, [[0]] * log_warps, [], [warps])


@constexpr_function
def weights_layout(rows):
    return gl.SwizzledSharedLayout(8, max(1, 64 // rows), min(8, rows // 8), [1, 0])


@gluon.jit
def copy(
    words, scales, codes_ptr, scales_ptr, slots, slots_s, stride_codes, stride_scales, of_codes,
    of_scales, COPY: gl.constexpr, COPY_S: gl.constexpr,
):  # fmt: skip
    """Start copying a head's rows of ``slots``, at of_codes and of_scales; below 0 leaves zeros."""
    W: gl.constexpr = words.shape[1]
    w = gl.arange(0, W, layout=gl.SliceLayout(0, COPY))
    g = gl.arange(0, W // 8, layout=gl.SliceLayout(0, COPY_S))
    a = (slots.to(gl.int64) * stride_codes + of_codes)[:, None] + w[None, :]
    b = (slots_s.to(gl.int64) * stride_scales + of_scales)[:, None] + g[None, :]
    async_copy.async_copy_global_to_shared(words, codes_ptr + a, mask=(slots >= 0)[:, None])
    async_copy.async_copy_global_to_shared(scales, scales_ptr + b, mask=(slots_s >= 0)[:, None])
    async_copy.commit_group()


@constexpr_function
def staging_layout(rows, head_dim, slices, warps):
    """q [rows, head_dim]: a thread has a word's eight columns of every slice."""
    words = head_dim // (32 * slices)  # of a slice and quarter
    reg = [[0, 1], [0, 2], [0, 4]] + [[0, 8 * words << i] for i in range(slices.bit_length() - 1)]
    lane = [[0, 8 << i] for i in range(words.bit_length() - 1)]
    lane += [[0, head_dim // 4], [0, head_dim // 2]]
    row = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    lane, row = lane + row[: 5 - len(lane)], row[5 - len(lane) :]
    log_warps = warps.bit_length() - 1
    warp = (row + [[0, 0]] * log_warps)[:log_warps]
    return gl.DistributedLinearLayout(reg + row[log_warps:], lane, warp, [], [rows, head_dim])


@gluon.jit
def store_slices(x, out):
    """Write an operand's codes, word by word [N * words, 4, 1], to slices [SLICES, N, CODES]."""
    SLICES: gl.constexpr = out.shape[0]
    N: gl.constexpr = out.shape[1]
    CODES: gl.constexpr = out.shape[2]
    # row, quarter, slice, word of its, run, code of a pair; a thread's runs come first in memory
    x = gl.permute(gl.reshape(x, [N, 4, SLICES, CODES // 16, 2, 2]), [0, 1, 4, 3, 5, 2])
    _store_each(gl.reshape(x, [N, CODES, SLICES]), out, 0, 1)


@gluon.jit
def _store_each(x, out, at: gl.constexpr, step: gl.constexpr):
    N: gl.constexpr = x.shape[0]
    CODES: gl.constexpr = x.shape[1]
    OF: gl.constexpr = x.shape[2]
    if OF == 1:
        out.index(at).store(gl.reshape(x, [N, CODES]))
    else:
        a, b = gl.split(gl.reshape(x, [N, CODES, OF // 2, 2]))
        _store_each(a, out, at, 2 * step)
        _store_each(b, out, at + step, 2 * step)


@gluon.jit
def stage_query(
    q_ptr, first, second, row0, req, kv_head, stride_qt, stride_qh, Q: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """Write rows of q, scaled into fp16, to the slices of both operands; returns their scales.

    A slice holds the columns of some of each thread's words. Within a thread's quarter of it, the
    codes lie so that the two registers one mma takes are neighbours: run of k = 0..7 and of 8..15.
    """
    SLICES: gl.constexpr = first.shape[0]
    N: gl.constexpr = first.shape[1]
    CODES: gl.constexpr = first.shape[2]
    D: gl.constexpr = 2 * SLICES * CODES
    L: gl.constexpr = staging_layout(N, D, SLICES, WARPS)
    row = row0 + gl.arange(0, N, layout=gl.SliceLayout(1, L))
    offsets = (req.to(gl.int64) * Q + row // GROUP) * stride_qt
    offsets += (kv_head * GROUP + row % GROUP) * stride_qh
    row_in = (row < Q * GROUP)[:, None]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    x = gl.load(q_ptr + offsets[:, None] + d[None, :], mask=row_in, other=0.0).to(gl.float32)
    exponent = query_exponent(gl.max(gl.abs(x), 1))
    x = (x * query_up(exponent)[:, None]).to(gl.float16)
    a, b = operands(gl.reshape(x, [N * D // 8, 8, 1]), PLACE)
    store_slices(a, first)
    store_slices(b, second)
    return query_down(exponent)


@gluon.jit
def keep(x, WARPS: gl.constexpr):
    """Put a number of the program into shared memory: the loop is short of registers."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    place.store(gl.full([1], x, gl.int32, layout=ONE))
    return place


@gluon.jit
def kept(place, WARPS: gl.constexpr):
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def q_operand(q, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    N: gl.constexpr = q.shape[0]
    CODES: gl.constexpr = q.shape[1]
    x = q.load(q_layout(N, CODES, WARPS))
    x = gl.reshape(x, [N, 4, CODES // 16, 2, 2])  # row, quarter, word of a run, run, code
    x = gl.reshape(gl.permute(x, [3, 1, 2, 4, 0]), [CODES, N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def k_operand(x, LAYOUT: gl.constexpr):
    """Decoded words [T, W, 2, 2] of a slice as the left operand [T, 4W]."""
    T: gl.constexpr = x.shape[0]
    W: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [T, 4, 2, W // 2])  # row, quarter, run, codes
    x = gl.reshape(gl.permute(x, [0, 2, 1, 3]), [T, 4 * W])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def slice_words(x, at: gl.constexpr, of: gl.constexpr):
    """Part ``at`` of 1, 2 or 4 of every thread's words [T, W]; moves nothing."""
    T: gl.constexpr = x.shape[0]
    W: gl.constexpr = x.shape[1]
    if of == 1:
        return x
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [T, 4, 2, W // 8]), [0, 1, 3, 2]))
        if at < of // 2:
            return slice_words(gl.reshape(a, [T, W // 2]), at, of // 2)
        else:
            return slice_words(gl.reshape(b, [T, W // 2]), at - of // 2, of // 2)


@gluon.jit
def score(kw, kz, q0, q1, q0_2, q1_2, s, s_2, WARPS: gl.constexpr, MMA: gl.constexpr, PLACE: gl.constexpr):
    """Add a slice's products, K's words and scales [T, W] with q, to both row blocks' scores."""
    RUN: gl.constexpr = kw.shape[1] // 2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, RUN)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, RUN)
    k0, k1 = decode_k(kw, kz, PLACE)
    k0 = k_operand(k0, LEFT)
    k1 = k_operand(k1, LEFT)
    s = mma_v2(k0, q_operand(q0, WARPS, RIGHT), s)
    if s_2.shape[1] != s.shape[1]:
        s_2 = mma_v2(k0, q_operand(q0_2, WARPS, RIGHT), s_2)
    s = mma_v2(k1, q_operand(q1, WARPS, RIGHT), s)
    if s_2.shape[1] != s.shape[1]:
        s_2 = mma_v2(k1, q_operand(q1_2, WARPS, RIGHT), s_2)
    return s, s_2


@gluon.jit
def warp_max(s, WARPS: gl.constexpr):
    """Maximum over each warp's keys, [WARPS, N]."""
    N: gl.constexpr = s.shape[1]
    return gl.max(gl.max(gl.reshape(s, [WARPS, 2, 8, N]), 1), 1)


@gluon.jit
def tile_max(maxima, WARPS: gl.constexpr, N_OF: gl.constexpr):
    N: gl.constexpr = maxima.shape[1]
    tile_max = gl.max(maxima.load(maxima_layout(N, WARPS)), 0)
    return gl.convert_layout(tile_max, N_OF, assert_trivial=True)


@gluon.jit
def rows_max(x, WARPS: gl.constexpr):
    """Maximum over each warp's keys and all rows, [WARPS]."""
    N: gl.constexpr = x.shape[1]
    return gl.max(gl.max(gl.max(gl.reshape(x, [WARPS, 2, 8, N]), 1), 2), 1)


@gluon.jit
def thread_sums(weights, WARPS: gl.constexpr):
    """Sums of the weights, over each thread's own keys, [WARPS, 8, N]; the rest is summed last."""
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.reshape(weights.to(gl.float32), [WARPS, 2, 8, N]), 1)


@gluon.jit
def raise_maximum(m, maxima, sums, even, odd, WARPS: gl.constexpr, N_OF: gl.constexpr):
    """Move m, shared, up to the tile's maxima; sums and both accumulators as they are under it."""
    old = m.load(N_OF)
    new = gl.maximum(old, gl.ceil(tile_max(maxima, WARPS, N_OF)))
    alpha = rescale(old, new)
    OF_SUMS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    of_sums = gl.convert_layout(alpha, OF_SUMS, assert_trivial=True)
    m.store(new)
    return sums * of_sums[None, None, :], even * alpha[None, :], odd * alpha[None, :]


@gluon.jit
def pair(x, LAYOUT: gl.constexpr):
    """Tokens 2p and 2p + 1 of [V_TOKENS, W]."""
    N: gl.constexpr = x.shape[0]
    W: gl.constexpr = x.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(x, [N // 2, 2, W]), [0, 2, 1]))
    return (
        gl.convert_layout(a, LAYOUT, assert_trivial=True),
        gl.convert_layout(b, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def v_operand(x, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of V [P, W, half, byte, token] as the left operand [4W, 2P], rows in merge's order."""
    P: gl.constexpr = x.shape[0]
    W: gl.constexpr = x.shape[1]
    if W == 8 * WARPS:
        x = gl.reshape(x, [P, WARPS, 8, 2, 2, 2])  # p, warp, g, half, byte, token
        x = gl.permute(x, [3, 1, 4, 2, 0, 5])
    else:
        x = gl.reshape(x, [P, WARPS, 8, 2, 2])  # p, warp, g, byte, token
        x = gl.permute(x, [1, 3, 2, 0, 4])
    return gl.convert_layout(gl.reshape(x, [4 * W, 2 * P]), LAYOUT, assert_trivial=True)
