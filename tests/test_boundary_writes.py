"""Write cases at the edges: slots, pages, reuse, values, strides, dims.

A case is a list of steps on a PackedCache. After all of them the whole pool, every slot, has to be byte for
byte what tests/independent_decoder.py encodes, and reads have to be what it decodes.
"""

import math

import independent_decoder as independent
import numpy as np
import pytest
import torch

from sglang_fp4kv.paged import SKIP, PackedCache

pytestmark = pytest.mark.interpreter

BLOCKS, PAGE = 3, 16
LAST = BLOCKS * PAGE - 1
K_SCALE, V_SCALE = 0.5, 0.0625


def normal(tokens, heads=2, head_dim=64, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, head_dim, generator=g).to(dtype) for _ in "kv"]


def write(slots, **sizes):
    """One write of normal values. A write is K, V, slots, and which view of K and V is given."""
    return ("write", *normal(len(slots), **sizes), torch.tensor(slots, dtype=torch.int64))


def holding(*values, dtype=torch.bfloat16, elsewhere=0.0):
    """One write of two tokens whose blocks begin with the values, K and V alike."""
    x = torch.full((2, 2, 64), elsewhere, dtype=torch.float64).unflatten(2, (4, 16))
    x[..., : len(values)] = torch.tensor(values, dtype=torch.float64)
    x = x.flatten(2).to(dtype)
    return ("write", x, x.clone(), torch.tensor([4, LAST]))


def random_magnitudes(low, high, dtype=torch.bfloat16):
    """One write whose blocks have scales from 2^low to 2^high."""
    k, v = normal(8, dtype=torch.float32)
    power = torch.linspace(low, high, 8 * 2 * 4).round().view(8, 2, 4, 1)
    k, v = ((x.unflatten(2, (4, 16)) * torch.exp2(power)).flatten(2).to(dtype) for x in (k, v))
    return ("write", k, v, torch.arange(8) * 5)


def strided(view):
    """One write of views of a tensor [24, 4, 128], made where the cache is: moving would lose strides."""
    wide = normal(24, 4, 128)
    return ("write", *wide, torch.arange(len(view(wide[0]))) * 2, view)


def slot_views():
    """Slots as every second entry of a tensor."""
    k, v = normal(5)
    return ("write", k, v, torch.tensor([1, 9, 17, 9, 33, 9, 0, 9, LAST, 9])[::2])


def junk_in_skipped_rows():
    k, v = normal(4)
    k[0], v[2] = math.nan, math.inf
    return ("write", k, v, torch.tensor([SKIP, 3, SKIP, 4]))


def move(source, target):
    return ("copy", torch.tensor(source), torch.tensor(target))


def freed(slots):
    return ("free", torch.tensor(slots))


EVERY = list(range(LAST + 1))
TIES = [s * m for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) for s in (1, -1)]
FULL = 6 * 448.0  # largest magnitude without saturation, times the global scale
TINY = 2.0**-133  # the smallest BF16 subnormal

CASES = {
    # slots and pages
    "slot 0": [write([0])],
    "the last slot": [write([LAST])],
    "first and last": [write([0, LAST])],
    "the last of a page": [write([PAGE - 1])],
    "the first of a page": [write([PAGE])],
    "across a page edge": [write([PAGE - 1, PAGE])],
    "a whole page": [write(list(range(PAGE, 2 * PAGE)))],
    "a page and one": [write(list(range(PAGE + 1)))],
    "every slot": [write(EVERY)],
    "every slot, backwards": [write(EVERY[::-1])],
    "one slot of each page": [write([5, PAGE + 5, 2 * PAGE + 5])],
    "no token": [write([])],
    # reuse
    "a slot written twice": [write([7, 8]), write([8, 9], seed=1)],
    "a page written again": [write(list(range(PAGE))), write(list(range(PAGE)), seed=1)],
    "a slot freed and written": [write([7, 8]), freed([7]), write([7], seed=1)],
    "smaller values over larger": [holding(FULL), holding(2.0**-20)],
    "copied over a written one": [write([1, 2]), move([1], [2])],
    "rotated": [write([0, PAGE, LAST]), move([0, PAGE, LAST], [PAGE, LAST, 0])],
    # skipped
    "the first skipped": [write([SKIP, 3])],
    "the last skipped": [write([3, SKIP])],
    "every other skipped": [write([2, SKIP, 4, SKIP, 6, SKIP])],
    "all skipped": [write([SKIP, SKIP, SKIP])],
    "not finite where skipped": [junk_in_skipped_rows()],
    # values
    "saturated": [holding(FULL, -2 * FULL, 1e30, -1.0)],
    "the largest of BF16": [holding(3.3895e38, -3.3895e38)],
    "all magnitudes saturated": [holding(*[1e6] * 16)],
    "at the edge of saturation": [holding(FULL * K_SCALE), holding(FULL * V_SCALE)],
    "zeros": [holding(0.0)],
    "negative zeros": [holding(*[-0.0] * 16), holding(3.0, -0.0, 0.0)],
    "zeros over values": [write([4, LAST]), holding(0.0)],
    "one value in a block of zeros": [holding(1.0)],
    "subnormal BF16": [holding(TINY, -TINY, 100 * TINY)],
    "subnormal block scales": [random_magnitudes(-12, -5)],
    "blocks that vanish": [random_magnitudes(-30, -12)],
    "blocks from tiny to huge": [random_magnitudes(-20, 20)],
    "ties of elements": [holding(6 * K_SCALE, *(t * K_SCALE for t in TIES)),
                         holding(6 * V_SCALE, *(t * V_SCALE for t in TIES))],
    "ties of scales": [holding(6 * K_SCALE * (1 + 1 / 16)), holding(6 * V_SCALE * (1 + 3 / 16))],
    # strides
    "a slice of heads": [strided(lambda x: x[:, 1:3, :64])],
    "every other head": [strided(lambda x: x[:, ::2, :64])],
    "every third token": [strided(lambda x: x[::3, :2, 64:])],
    "one token repeated": [strided(lambda x: x[:1, :2, :64].expand(6, -1, -1))],
    "heads before tokens": [strided(lambda x: x[:, :2, :64].transpose(0, 1).contiguous().transpose(0, 1))],
    "strided slots": [slot_views()],
    # dims and dtypes
    "head dim 16": [write([0, 5, LAST], head_dim=16)],
    "head dim 80, three heads": [write([0, 5, LAST], heads=3, head_dim=80)],
    "head dim 128, eight heads": [write([0, 5, LAST], heads=8, head_dim=128)],
    "head dim 256, one head": [write([0, 5, LAST], heads=1, head_dim=256)],
    "fp16": [write([0, 5, LAST], dtype=torch.float16), random_magnitudes(-20, 10, torch.float16)],
    "fp32": [write([0, 5, LAST], dtype=torch.float32), random_magnitudes(-20, 20, torch.float32)],
}  # fmt: skip


def as_given(k, v, slots, view=lambda x: x, device="cpu"):
    return view(k.to(device)), view(v.to(device)), slots


def expected(steps, widths):
    """The four sides as numpy arrays [S, H, W], and the slots that hold a token."""
    sides = [np.zeros((LAST + 1, *width), np.uint8) for width in widths]
    held = set()
    for kind, *args in steps:
        if kind == "write":
            *sources, slots = as_given(*args)
            slots = slots.numpy()
            written = slots != SKIP
            for i, (x, scale) in enumerate(zip(sources, (K_SCALE, V_SCALE), strict=True)):
                x = x.double().numpy()[written]
                scales = independent.encode_scales(x, scale)
                sides[2 * i][slots[written]] = independent.encode_codes(x, scales, scale)
                sides[2 * i + 1][slots[written]] = scales
            held |= set(slots[written].tolist())
        elif kind == "copy":
            source, target = (x.numpy() for x in args)
            for side in sides:
                side[target] = side[source].copy()
            held |= set(target.tolist())
        else:
            held -= set(args[0].tolist())
    return sides, sorted(held)


def test_enough_cases():
    assert len(CASES) >= 28


@pytest.mark.parametrize("name", CASES)
def test_write(name, device):
    steps = CASES[name]
    sizes = as_given(*steps[0][1:])[0].shape[1:]
    cache = PackedCache(BLOCKS, PAGE, *sizes, device, K_SCALE, V_SCALE)
    for kind, *args in steps:
        args = as_given(*args, device=device) if kind == "write" else args
        getattr(cache, kind)(*args)
    want, held = expected(steps, [side.shape[1:] for side in cache.sides])
    for ours, theirs in zip(cache.sides, want, strict=True):
        np.testing.assert_array_equal(ours.cpu().numpy(), theirs)
    slots = torch.tensor(held, dtype=torch.int64)
    scales = K_SCALE, V_SCALE
    for i, ours in enumerate(cache.read(slots, torch.float32)):
        decoded = independent.decode(want[2 * i][held], want[2 * i + 1][held], scales[i])
        np.testing.assert_array_equal(ours.cpu().numpy(), decoded.astype(np.float32))
