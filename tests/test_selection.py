"""_selection.py without a GPU: its Gluon functions' own code on numpy arrays."""

import types

import numpy as np
import pytest
import torch
from test_sparse_nvfp4 import make_case

from sglang_fp4kv.kernels import _selection as selection
from sglang_fp4kv.kernels.select_rows import select_rows


class Values(np.ndarray):
    """Integers that a Gluon function may convert: none here is beyond int32."""

    def to(self, dtype):
        return self


class Pointer:
    """A place in an array; load and store take arrays of them."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, n):
        return Pointer(self.array, self.at + n)


def load(pointer, mask, other):
    mask = np.broadcast_to(mask, np.shape(pointer.at))
    found = np.full(np.shape(pointer.at), other, np.int64)
    found[mask] = pointer.array[pointer.at[mask]]  # an IndexError where a masked load would be wild
    return found.view(Values)


def store(pointer, value):
    pointer.array[pointer.at] = value


NUMPY = types.SimpleNamespace(
    load=load,
    store=store,
    maximum=max,
    where=lambda *args: np.where(*args).view(Values),
    int32=None,
)


def in_numpy(function):
    code = function.fn
    return types.FunctionType(code.__code__, code.__globals__ | {"gl": NUMPY})


@pytest.mark.parametrize("selections", [1, 3, 64, 512])
@pytest.mark.parametrize("entries", [1, 31, 32, 33, 2048, 5000])
@pytest.mark.parametrize("budget", [1, 7, 1056])
@pytest.mark.parametrize("fewest", [1, 2, 4])
def test_every_tile_is_shared_out_once(selections, entries, budget, fewest):
    tile = 32
    share = in_numpy(selection.share_selections)
    tiles = -(-entries // tile)
    # plan_attention's bound: never more shares than tiles
    budget = min(budget, selections * tiles)
    sched = np.full(2 * selections, -1)
    seen = np.zeros((selections, tiles), int)
    parts = {}
    for work in range(budget + selections):
        mine, begin, end, alone = share(
            Pointer(sched), selections, entries, budget, work, True, tile, fewest
        )
        if mine < selections:
            assert 0 <= begin < end <= tiles
            seen[mine, begin:end] += 1
            parts.setdefault(mine, []).append(work)
            assert alone == (end - begin == tiles)
    assert (seen == 1).all()
    first, count = sched.reshape(-1, 2).T
    for mine, works in parts.items():
        assert works == list(range(first[mine], first[mine] + count[mine]))
    untouched = np.full(2 * selections, -1)
    share(Pointer(untouched), selections, entries, budget, 0, False, tile, fewest)
    assert (untouched == -1).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("listed", [True, False])
def test_rows_are_those_of_the_lists(device, groups, listed):
    """Against the kernel that writes lists, which other tests hold to the reference; junk among them."""
    case = make_case(device, 16, 4, 1, (50, 60), groups, q_per_req=3)
    lengths, indices = (x.cpu().numpy() for x in case.lists())
    indices[[3, 70]] = -2, 400
    num_slots, entries = case.pool.k_codes.shape[0], case.selected.shape[2]
    g = torch.Generator().manual_seed(1)
    junk = torch.randint(-9, num_slots + 9, case.selected.shape, generator=g)
    flat = torch.where(torch.rand(junk.shape, generator=g) < 0.5, junk, case.selected).flatten(0, 1)
    rows = torch.full(flat.shape, 99, dtype=torch.int32, device=device)
    indptr = torch.zeros(len(flat) + 1, dtype=torch.int32, device=device)
    lists = tuple(torch.from_numpy(x).to(device) for x in (lengths, indices)) if listed else None
    select_rows(
        flat.to(device), lists, rows.view(-1), indptr, first_token=0, groups=groups, q_per_req=3,
        num_slots=num_slots,
    )  # fmt: skip
    assert indptr.tolist() == [i * entries for i in range(len(flat) + 1)]
    positions_of, rows_of = in_numpy(selection.load_positions), in_numpy(selection.rows_of)
    n = np.arange(64).view(Values)
    for i, want in enumerate(rows.cpu().numpy()):
        request = i // groups // 3
        start, end = lengths[request : request + 2]
        length = end - start if listed else num_slots
        positions = positions_of(Pointer(flat[i].numpy()), n, entries, length)
        got = rows_of(positions, Pointer(indices, start), num_slots, i % groups, groups, listed)
        assert np.array_equal(got[:entries], want) and (got[entries:] == -1).all()
    assert (rows >= 0).any() and (rows < 0).any()
