"""Selected positions inside decode_fragments: how selections are shared out, and what rows they name.

A selection is one query token's positions for one group of KV heads, at (token, group) in a tensor
[T, G, K]. A group's heads lie side by side in a slot, so a pool of G groups is read as rows slot * G + group.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class Selection:
    """The arguments of a launch over selections; a dense one is DENSE.

    first_token   query token that the launch's first selection belongs to
    entries       positions of a selection, K
    num_slots     slots of the pool
    q_per_req     query tokens of a request
    groups        selections of a token, G
    listed        whether positions go through a request's list; otherwise they are slots
    """

    first_token: int = 0
    entries: int = 0
    num_slots: int = 0
    q_per_req: int = 1
    groups: int = 0
    listed: bool = False


DENSE = Selection()


@gluon.jit
def share_selections(
    sched_ptr, selections, entries, budget, work, writes, T: gl.constexpr, MIN_TILES: gl.constexpr
):
    """share_tiles for selections of one length, one entry or more: no list has to be looked at.

    Returns this item's selection (``selections`` or more: nothing to do), its first and last tile, and
    whether it is the selection's only item.
    """
    tiles = (entries + T - 1) // T
    per_split = gl.maximum((selections * tiles + budget - 1) // budget, MIN_TILES)
    splits = gl.maximum((tiles + (per_split - 1) // 2) // per_split, 1)
    selection = work // splits
    split = work % splits
    if writes & (split == 0) & (selection < selections):
        gl.store(sched_ptr + 2 * selection, work)
        gl.store(sched_ptr + 2 * selection + 1, splits)
    return selection, split * tiles // splits, (split + 1) * tiles // splits, splits == 1


@gluon.jit
def load_positions(selected_ptr, n, limit, length):
    """Selected positions at n as int32; -1 for those that are outside ``length``, and from limit on."""
    at = gl.load(selected_ptr + n, mask=n < limit, other=-1)
    return gl.where((at >= 0) & (at < length), at, -1).to(gl.int32)


@gluon.jit
def rows_of(positions, indices_ptr, num_slots, group, GROUPS: gl.constexpr, LISTED: gl.constexpr):
    """Rows of the pool at these positions as int32; -1 where there is no position or no such slot."""
    slots = positions
    if LISTED:
        slots = gl.load(indices_ptr + positions, mask=positions >= 0, other=-1)
        slots = gl.where((slots >= 0) & (slots < num_slots), slots, -1).to(gl.int32)
    return gl.where(slots >= 0, slots * GROUPS + group, -1)
