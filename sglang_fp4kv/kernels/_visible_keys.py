"""Which tiles of keys a fragment kernel walks, which of their keys count, and what they weigh."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Weights are 2^(score - m + WEIGHT_BITS) in fp16, m an integer near the row's maximum score. m moves
# only when a score passes it by more than SLACK: then nothing is rescaled in nearly all tiles, and
# because m is an integer a weight rounds the same wherever a tile or a split begins.
WEIGHT_BITS = gl.constexpr(8.0)
SLACK = gl.constexpr(7.0)


@gluon.jit
def weight_offset(m):
    """What turns a score into a weight's exponent. Where no key was visible yet, any score passes."""
    return gl.where(m == float("-inf"), 1e30, WEIGHT_BITS - m)


@gluon.jit
def rescale(m, m_new):
    """Factor of what was accumulated under m."""
    return gl.where(m == float("-inf"), 0.0, gl.exp2(m - m_new))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _extent(prefix, Q: gl.constexpr, T: gl.constexpr, HAS_BLOCK: gl.constexpr, WINDOW: gl.constexpr):
    """Of requests: their keys, the position of the first query row, first tile in reach, tiles."""
    total = prefix
    first_pos = prefix - Q
    if HAS_BLOCK:
        total = prefix + Q
        first_pos = prefix
    first_tile = first_pos * 0
    if WINDOW > 0:
        first_tile = gl.maximum(first_pos - WINDOW, 0) // T
    return total, first_pos, first_tile, gl.maximum((total + T - 1) // T - first_tile, 0)


@gluon.jit
def share_tiles(
    kv_indptr_ptr,
    sched_ptr,
    batch,
    budget,
    work,
    writes,  # this program records what merge_fragments reads
    Q: gl.constexpr,
    T: gl.constexpr,
    MIN_TILES: gl.constexpr,
    BLOCK_B: gl.constexpr,
    HAS_BLOCK: gl.constexpr,
    WINDOW: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Share out the tiles of all requests over about ``budget`` work items, in proportion.

    Returns this item's request (batch or more: nothing to do), where its list starts, its prefix
    and total keys, the position of its first query row, the first and last tile of the item, and
    whether it is the request's only one.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    b = gl.arange(0, BLOCK_B, layout=L)
    b_in = b < batch
    start = gl.load(kv_indptr_ptr + b, mask=b_in, other=0)
    prefix = (gl.load(kv_indptr_ptr + b + 1, mask=b_in, other=0) - start).to(gl.int32)
    _, _, _, tiles = _extent(prefix, Q, T, HAS_BLOCK, WINDOW)
    tiles = gl.where(b_in, tiles, 0)
    per_split = gl.maximum((gl.sum(tiles, 0) + budget - 1) // budget, MIN_TILES)
    splits = gl.maximum((tiles + (per_split - 1) // 2) // per_split, 1)
    splits = gl.where(tiles > 0, splits, 0)
    ends = gl.associative_scan(splits, 0, _add)
    firsts = ends - splits
    if writes & (work < batch):
        gl.store(sched_ptr + 2 * work, gl.sum(gl.where(b == work, firsts, 0), 0))
        gl.store(sched_ptr + 2 * work + 1, gl.sum(gl.where(b == work, splits, 0), 0))
    req = gl.sum((ends <= work).to(gl.int32), 0)
    mine = b == req
    split = work - gl.sum(gl.where(mine, firsts, 0), 0)
    count = gl.maximum(gl.sum(gl.where(mine, splits, 0), 0), 1)
    # The request's own numbers once more, from its two loads: cheaper than sums over all.
    own = gl.minimum(req, batch - 1)
    my_start = gl.load(kv_indptr_ptr + own)
    my_prefix = (gl.load(kv_indptr_ptr + own + 1) - my_start).to(gl.int32)
    my_total, my_first_pos, my_first, my_tiles = _extent(my_prefix, Q, T, HAS_BLOCK, WINDOW)
    begin = my_first + split * my_tiles // count
    end = my_first + (split + 1) * my_tiles // count
    return req, my_start.to(gl.int64), my_prefix, my_total, my_first_pos, begin, end, count == 1


@gluon.jit
def load_slots(indices_ptr, block_ptr, n, prefix, limit, HAS_BLOCK: gl.constexpr):
    """Slots of keys n as int32, -1 from ``limit`` on: listed ones, then the draft block's own."""
    if HAS_BLOCK:
        listed = gl.load(indices_ptr + n, mask=n < gl.minimum(prefix, limit), other=-1)
        own = gl.load(block_ptr + (n - prefix), mask=(n >= prefix) & (n < limit), other=-1)
        return gl.where(n < prefix, listed.to(gl.int32), own.to(gl.int32))
    else:
        return gl.load(indices_ptr + n, mask=n < limit, other=-1).to(gl.int32)


@gluon.jit
def cap_scores(s, LOGIT_CAP: gl.constexpr):
    """Scaled scores to units of log2; without a cap they are in these units already."""
    if LOGIT_CAP > 0:
        LOG2E: gl.constexpr = 1.4426950408889634
        e = gl.exp2(s * (2.0 * LOG2E / LOGIT_CAP))
        s = (1.0 - 2.0 / (1.0 + e)) * (LOGIT_CAP * LOG2E)
    return s


@gluon.jit
def hide(
    s,  # [T, N] fp32 in an mma layout
    valid,  # [T] keys that are there
    n,  # [T] their positions
    row,  # [N] query rows, token major
    edge,  # whether a row may not see a key of this tile
    prefix,
    total,
    first_pos,
    mask_ptr,  # of this request, past the window's offset
    mask_offset,
    Q: gl.constexpr,
    GROUP: gl.constexpr,
    USE_MASK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Set the scores of keys a row must not see to -inf."""
    s = gl.where(valid[:, None], s, float("-inf"))
    if USE_MASK or CAUSAL or WINDOW > 0:
        if edge:
            token = row // GROUP
            back = (first_pos + token)[None, :] - n[:, None]
            if USE_MASK:
                wanted = ((n >= prefix) & valid)[:, None] & (row < Q * GROUP)[None, :]
                offset = token.to(gl.int64) * (total + mask_offset)
                allowed = gl.load(mask_ptr + offset[None, :] + n[:, None], mask=wanted, other=0)
                s = gl.where((n < prefix)[:, None] | (allowed != 0), s, float("-inf"))
            elif CAUSAL:
                s = gl.where(back >= 0, s, float("-inf"))
            if WINDOW > 0:
                s = gl.where(back <= WINDOW, s, float("-inf"))
                if not CAUSAL:
                    s = gl.where(back >= -WINDOW, s, float("-inf"))
    return s
