"""Read cases at the edges: heads, groups, dims, pages, lengths, and what is selected of them.

Every case goes through the sparse reader. Where all positions are selected the dense reader has to agree;
the same rows unpacked have to be the independent decoder's, to the bit.
"""

import math
from dataclasses import dataclass, replace

import independent_decoder
import numpy as np
import pytest
import torch
from test_sparse_nvfp4 import ORDER_BOUND, make_case, reader  # noqa: F401  both readers on a GPU

from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4
from sglang_fp4kv.kernels.unpack_nvfp4 import unpack_nvfp4

pytestmark = pytest.mark.interpreter

FILL = -1  # no position


def everything(length):
    return list(range(length))


@dataclass(frozen=True)
class Read:
    """select gives one KV head's positions; it may take the head's number as second argument."""

    select: object = everything
    lens: tuple = (40,)
    kv_heads: int = 2
    group: int = 2  # query heads of a KV head
    groups: int | None = None  # selections of a token; None: one a KV head
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16


def only(*positions):
    return lambda length: list(positions)


CASES = {
    # lengths
    "length 1": Read(lens=(1,)),
    "length 15": Read(lens=(15,)),
    "length 16": Read(lens=(16,)),
    "length 17": Read(lens=(17,)),
    "lengths 1, 15, 16, 17 together": Read(lens=(1, 15, 16, 17)),
    "lengths 31, 32, 33, around a tile": Read(lens=(31, 32, 33)),
    "lengths 127, 128, 129": Read(lens=(127, 128, 129), kv_heads=1),
    "length 0 among others": Read(lens=(5, 0, 17)),
    # one position
    "one selected, the first": Read(only(0)),
    "one selected, the last": Read(lambda n: [n - 1]),
    "one selected, the last of a page": Read(only(15)),
    "one selected, the first of the next page": Read(only(16)),
    "one selected, another in each head": Read(lambda n, head: [3 + 20 * head]),
    "one selected among fill": Read(only(FILL, FILL, 7, FILL)),
    # page edges
    "both sides of a page edge": Read(only(15, 16)),
    "both sides of every page edge": Read(lambda n: [p for e in range(16, n, 16) for p in (e - 1, e)], (100,)),
    "whole pages alone": Read(lambda n: everything(n)[16:48], (100,)),
    "every other page": Read(lambda n: [p for p in range(n) if p // 16 % 2], (150,)),
    "a last page of one token": Read(lens=(65,), page_size=64),
    # fragmentation
    "fragmented: single slots anywhere": Read(lens=(50, 30), page_size=1),
    "fragmented: pages of 4": Read(lens=(50, 30), page_size=4),
    "fragmented: every third position": Read(lambda n: everything(n)[::3], (90,), page_size=1),
    # order and number
    "all selected, backwards": Read(lambda n: everything(n)[::-1]),
    "all selected, other order in each head": Read(lambda n, head: everything(n)[head:] + everything(n)[:head]),
    "all selected twice": Read(lambda n: everything(n) * 2),
    "more entries than positions": Read(lambda n: everything(n) + [FILL] * 50, (17, 3)),
    "positions past the end": Read(lambda n: [n - 1, n, n + 1, 10**6], (17, 40)),
    "nothing selected": Read(only(FILL, FILL)),
    # heads and groups
    "one KV head": Read(kv_heads=1),
    "three KV heads": Read(lambda n, head: everything(n)[head::3], kv_heads=3, group=3),
    "eight KV heads, each its own": Read(lambda n, head: everything(n)[head::8], kv_heads=8),
    "four KV heads in two groups": Read(lambda n, head: everything(n)[head::2], kv_heads=4, groups=2),
    "four KV heads, one selection": Read(lambda n: everything(n)[::5], kv_heads=4, groups=1),
    "one query head a KV head": Read(group=1),
    "six query heads a KV head": Read(group=6),
    "eight query heads a KV head": Read(group=8),
    "16 query heads a KV head": Read(group=16),
    # dims and dtypes
    "head dim 16": Read(head_dim=16),
    "head dim 48": Read(head_dim=48),
    "head dim 80": Read(head_dim=80),
    "head dim 128": Read(head_dim=128),
    "head dim 256": Read(head_dim=256, group=6),
    "fp16": Read(dtype=torch.float16),
    "fp32": Read(dtype=torch.float32),
}  # fmt: skip


def case_of(read, device):
    case = make_case(
        device, read.head_dim, read.kv_heads, read.group, read.lens, read.groups, 1,
        page_size=read.page_size, dtype=read.dtype,
    )  # fmt: skip
    groups = case.selected.shape[1]
    by_head = read.select.__code__.co_argcount == 2
    lists = [
        [read.select(*((n, head) if by_head else (n,))) for head in range(groups)] for n in read.lens
    ]
    longest = max(len(chosen) for token in lists for chosen in token)
    case.selected = torch.tensor(
        [[chosen + [FILL] * (longest - len(chosen)) for chosen in token] for token in lists]
    )
    return case


def test_enough_cases():
    assert len(CASES) >= 27


@pytest.mark.parametrize("name", CASES)
def test_read(name, device):
    case = case_of(CASES[name], device)
    out = case.run()
    case.check(out)
    if CASES[name].select is everything or name.startswith("all selected,"):
        sparse, dense = (torch.empty(case.q.shape, device=device) for _ in range(2))
        case.run(out=sparse)
        read_densely(case, dense)
        assert ((sparse - dense).abs() <= allowance(case, dense)).all()


def read_densely(case, out):
    attention_nvfp4(
        case.q, *case.pool.sides, out, *case.lists(), q_per_req=1, sm_scale=case.sm_scale,
        **case.pool.scales,
    )  # fmt: skip


def allowance(case, dense):
    """How far two readers of every position may lie apart, [T, Hq, 1]: ORDER_BOUND, and flipped weights.

    Both round weights to fp16 on one grid (the largest score is rounded up to an integer, kernels/_tile.py). One that
    lies nearer to the middle of two fp16 values than its fp32 score is exact may become either of them, and its row
    moves by one such step: little among many tokens, more than ORDER_BOUND among few. A score counts as exact to four
    roundings of its sum. An H200 showed one: 3.1054e-5 in "length 0 among others", where a weight lies within 3e-7 of
    itself from the middle and its step is 3.106e-5 (test_the_weight_that_flipped_on_an_h200).
    """
    allowed = torch.full((*case.q.shape[:2], 1), ORDER_BOUND * dense.abs().max().item())
    if case.q.dtype != torch.float32:  # else weights stay in fp32
        for token, head, _, _, step in flippable(case):
            allowed[token, head] += step
    return allowed.to(dense.device)


def flippable(case, roundings=4):
    """(token, query head, position, distance, step) of each weight that may round to either fp16 neighbour.

    ``distance``: from their middle, as a share of the weight. ``step``: how far its row moves at most.
    """
    found = []
    kv_heads = case.pool.k_codes.shape[1]
    for token, slots in enumerate(case.slots):
        k, v = (side.cpu().double() for side in case.pool.decoded(slots.to(case.q.device)))
        for head, q in enumerate(case.q[token].cpu().double() if len(slots) else ()):
            kv = head * kv_heads // case.q.shape[1]
            products = k[:, kv] * q * case.sm_scale
            scores = products.sum(-1) * math.log2(math.e)
            weights = torch.exp2(scores - scores.max().ceil() + 14)
            spacing = torch.exp2(weights.log2().floor() - 10)  # fp16 has 11 significant bits
            distance = (weights / spacing % 1 - 0.5).abs() * spacing / weights
            rounded = weights.half().double()
            row = rounded @ v[:, kv] / rounded.sum()
            steps = spacing * (v[:, kv] - row).abs().amax(-1) / rounded.sum()
            # An error of a score is the same share of its weight; exp2 adds two of its own.
            exact_to = (roundings * products.abs().sum(-1) + 2) * 2.0**-23
            for at in (distance <= exact_to).nonzero().flatten().tolist():
                found.append((token, head, at, distance[at].item(), steps[at].item()))
    return found


def test_the_weight_that_flipped_on_an_h200(device):
    case = case_of(CASES["length 0 among others"], device)
    token, head, position, distance, step = min(flippable(case), key=lambda weight: weight[3])
    assert (token, head, position) == (2, 2, 12)
    assert distance < 2.0**-21 and step == pytest.approx(3.1054e-5, rel=1e-3)


@pytest.mark.parametrize("fault", ["dropped", "read from another request", "read from its neighbour's slot"])
def test_a_wrong_position_is_far_past_a_flipped_weight(fault, device):
    """Each position of the longest request in turn, the least of its weights included."""
    case = case_of(CASES["length 0 among others"], device)
    dense, sparse = (torch.empty(case.q.shape, device=device) for _ in range(2))
    read_densely(case, dense)
    allowed = allowance(case, dense)
    for position in range(len(case.slots[2])):
        selected, slots = case.selected.clone(), [s.clone() for s in case.slots]
        if fault == "dropped":
            selected[2, :, position] = FILL
        elif fault == "read from another request":
            slots[2][position] = slots[0][position % len(slots[0])]
        else:
            slots[2][position] = slots[2][position - 1]
        replace(case, slots=slots, selected=selected).run(out=sparse)
        past = ((sparse - dense).abs() / allowed)[2]
        assert past.max() > 100, (position, past.max())


@pytest.mark.parametrize("name", CASES)
def test_selected_rows_decode_as_the_independent_decoder_says(name, device):
    case = case_of(CASES[name], device)
    slots = torch.cat(
        [s[at[(at >= 0) & (at < len(s))]] for s, at in zip(case.slots, case.selected.flatten(1))]
    )
    shape = len(slots), *case.pool.k_codes.shape[1:2], case.q.shape[-1]
    got = [torch.full(shape, torch.nan, device=device) for _ in "kv"]
    unpack_nvfp4(*case.pool.sides, slots.to(device), *got)
    sides = [side.cpu().numpy()[slots.numpy()] for side in case.pool.sides]
    for ours, codes, scales in zip(got, sides[::2], sides[1::2], strict=True):
        want = independent_decoder.decode(codes, scales, 1.0)
        assert np.array_equal(ours.cpu().numpy(), want.astype(np.float32))
