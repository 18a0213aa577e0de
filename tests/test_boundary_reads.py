"""Read cases at the edges: heads, groups, dims, pages, lengths, and what is selected of them.

Every case goes through the sparse reader. Where all positions are selected the dense reader has to agree;
the same rows unpacked have to be the independent decoder's, to the bit.
"""

from dataclasses import dataclass

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
        attention_nvfp4(
            case.q, *case.pool.sides, dense, *case.lists(), q_per_req=1, sm_scale=case.sm_scale,
            **case.pool.scales,
        )  # fmt: skip
        assert (sparse - dense).abs().max() <= ORDER_BOUND * dense.abs().max()


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
