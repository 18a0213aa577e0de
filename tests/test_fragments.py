"""What a CPU can check of the register-fragment readers: their assembly in tests/ptx_emulator.py
against the codec, their layouts and orders, and the merge of their partial results.
"""

import types

import numpy as np
import ptx_emulator
import pytest
import torch

from sglang_fp4kv import codec
from sglang_fp4kv.kernels import _fragments as fragments
from sglang_fp4kv.kernels import _verify_parts as verify
from sglang_fp4kv.kernels import decode_fragments as decode
from sglang_fp4kv.kernels import merge_fragments as merge_module
from sglang_fp4kv.kernels.merge_fragments import decode_order, merge_fragments, verify_order

PLACES = {"e4m3": fragments.E4M3, "e2m1": fragments.E2M1}
HEAD_DIMS = (64, 128, 256)


def some_words(turn):
    """Words [16 * 127] and their scale bytes: every code at every place under every scale."""
    code, scale = (x.ravel() for x in np.meshgrid(np.arange(16), np.arange(127)))
    steps = (1, 3, 5, 7, 9, 11, 13, 15)  # odd, so that no two places go together
    nibbles = [(step * (code + turn) + 2 * i + turn * scale) % 16 for i, step in enumerate(steps)]
    for nibble in nibbles:
        assert len(set(zip(nibble, scale, strict=True))) == 16 * 127
    return sum(x.astype(np.uint32) << np.uint32(4 * i) for i, x in enumerate(nibbles)), scale


def columns(words, scales):
    """codec.decode of each word's eight columns, [N, 8]."""
    block = torch.zeros(len(words), 8, dtype=torch.uint8)
    block[:, :4] = torch.from_numpy(words[:, None].view(np.uint8))
    scales = torch.from_numpy(scales[:, None].astype(np.uint8))
    return codec.decode(block, scales, 1.0)[:, :8].numpy()


def run_ptx(ptx, place, inputs):
    """Outputs [N, 8] times the fold of this placement."""
    out = ptx_emulator.run(ptx, {8 + i: x for i, x in enumerate(inputs)})
    bits = np.stack([out[i] for i in range(8)], 1)
    assert (bits < 1 << 16).all()
    return bits.astype(np.uint16).view(np.float16).astype(np.float32) * fragments.FOLDS[place]


def check_k(place, ptx):
    words, scales = some_words(0)
    want = columns(words, scales)
    got = run_ptx(ptx, place, (words, scales << 7))
    order = operand_columns(place).tolist()
    assert np.array_equal(got, want[:, order])
    assert order == ([*range(8)] if place == fragments.E2M1 else [0, 2, 4, 6, 1, 3, 5, 7])


def check_v(place, ptx):
    words, scales = some_words(0)
    words2, scales2 = some_words(1)
    scales2 = np.roll(scales2, 5 * 16)
    words2 = np.roll(words2, 5 * 16)
    want, want2 = columns(words, scales), columns(words2, scales2)
    for half in (0, 1):
        inputs = words, words2, scales << 7, scales2 << 7, np.full(len(words), half)
        got = run_ptx(ptx, place, inputs)
        byte = 2 * half
        for i, column in enumerate((2 * byte, 2 * byte + 2, 2 * byte + 1, 2 * byte + 3)):
            assert np.array_equal(got[:, 2 * i], want[:, column])
            assert np.array_equal(got[:, 2 * i + 1], want2[:, column])


CHECKS = {"k": (check_k, fragments.K_ASM), "v": (check_v, fragments.V_ASM)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("side", CHECKS)
def test_assembly_decodes_as_the_codec(side, place):
    check, table = CHECKS[side]
    check(PLACES[place], table[PLACES[place]])


@pytest.mark.parametrize(
    "side, place, right, wrong",
    [
        ("k", "e4m3", "and.b32 e, e, 0x1C1C1C1C", "and.b32 e, e, 0x1C1C1C18"),
        ("k", "e4m3", "and.b32 o, o, 0x1C1C1C1C", "and.b32 o, o, 0x3C1C1C1C"),
        ("k", "e4m3", "lop3.b32 o, x, 0x80808080", "lop3.b32 o, t, 0x80808080"),
        ("k", "e4m3", "e, 0xEA", "e, 0xF8"),
        ("k", "e4m3", "cvt.rn.f16x2.e4m3x2 r1, b", "cvt.rn.f16x2.e4m3x2 r1, a"),
        ("k", "e4m3", "mov.b32 {$2, $3}, r1", "mov.b32 {$3, $2}, r1"),
        ("k", "e2m1", "e2m1x2 r2, b2", "e2m1x2 r2, b1"),
        ("k", "e2m1", "{b0, b1, b2, b3}", "{b0, b1, b3, b2}"),
        ("k", "e2m1", "mul.rn.f16x2 r3, r3, s", "mul.rn.f16x2 r3, r2, s"),
        ("v", "e4m3", "{$10, $11}", "{$11, $10}"),
        ("v", "e4m3", "0x2222, 0x5140", "0x2222, 0x5410"),
        ("v", "e4m3", "0x2222, 0x5140", "0x1111, 0x5140"),
        ("v", "e4m3", "prmt.b32 x, $8, $9", "prmt.b32 x, $9, $8"),
        ("v", "e2m1", "{$10, $11}", "{$10, $10}"),
        ("v", "e2m1", "0x2222, 0x5410", "0x2222, 0x5140"),
        ("v", "e2m1", "0x0F0F0F0F, y, 0xE2", "0x0F0F0F0F, y, 0xEA"),
        ("v", "e2m1", "0x0F0F0F0F, $9, 0xE2", "0x0F0F0F0F, $9, 0xB8"),
        ("v", "e2m1", "0x0F0F0F0F, $9", "0x0F0F0F07, $9"),
    ],
)
def test_a_wrong_line_is_noticed(side, place, right, wrong):
    check, table = CHECKS[side]
    ptx = table[PLACES[place]]
    assert ptx.count(right) == 1
    with pytest.raises(AssertionError):
        check(PLACES[place], ptx.replace(right, wrong))


def held(layout):
    """Coordinates [warps, lanes, registers, dims] of a linear layout's elements."""
    parts = (layout.warp_bases, layout.lane_bases, layout.reg_bases)
    bits = [np.array(bases, int).reshape(-1, len(layout.shape)) for bases in parts]
    axes = np.ix_(*(np.arange(1 << len(bases)) for bases in bits))
    out = 0
    for bases, axis in zip(bits, axes, strict=True):
        for i, basis in enumerate(bases):
            out = out ^ ((axis >> i & 1)[..., None] * basis)
    return np.broadcast_to(out, (*(1 << len(b) for b in bits), len(layout.shape)))


def assert_each_once(layout, where):
    flat = np.ravel_multi_index(np.moveaxis(where, -1, 0), layout.shape)
    assert np.array_equal(np.sort(flat.ravel()), np.arange(np.prod(layout.shape)))


def thread_sets(where):
    """What each (warp, lane) holds."""
    return {
        (warp, lane): {tuple(map(int, x)) for x in where[warp, lane]}
        for warp in range(where.shape[0])
        for lane in range(where.shape[1])
    }


def assert_scales_follow_words(layouts, codes, scales, group):
    """A register's scale sits in the same register of the same thread, as a place in its group."""
    words, of_words = held(layouts[codes]), held(layouts[scales])
    assert np.array_equal(of_words, group(words))
    assert_each_once(layouts[scales], of_words)


def k_group(x):
    return np.stack((x[..., 0], x[..., 1] // 2, x[..., 1] % 2), -1)


def v_group(x):
    return np.stack((x[..., 0], x[..., 1] // 2, x[..., 1] % 2 * 2 + x[..., 2]), -1)


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_layouts(head_dim, tile):
    layouts = decode.decode_layouts(head_dim, tile)
    words = head_dim // 8
    run = words // 8
    k, v = held(layouts["K"]), held(layouts["V"])
    assert layouts["K"].shape == [tile, words] and layouts["V"].shape == [tile // 2, words, 2]
    assert_each_once(layouts["K"], k)
    assert_each_once(layouts["V"], v)
    for (_, lane), got in thread_sets(k).items():
        g, c = divmod(lane, 4)
        runs = [*range(c * run, (c + 1) * run), *range((4 + c) * run, (5 + c) * run)]
        assert got == {(row, word) for row in range(g, tile, 8) for word in runs}
    for (_, lane), got in thread_sets(v).items():
        g, c = divmod(lane, 4)
        assert got == {
            (pair, word, half)
            for pair in range(c, tile // 2, 4)
            for word in range(g * run, (g + 1) * run)
            for half in (0, 1)
        }
    assert_scales_follow_words(layouts, "K", "KS", k_group)
    assert_scales_follow_words(layouts, "V", "VS", v_group)


@pytest.mark.parametrize("columns_a_warp", [32, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_verify_layouts(head_dim, columns_a_warp):
    words, warps = head_dim // 8, head_dim // columns_a_warp
    layouts = verify.verify_layouts(head_dim, warps)
    tile, tokens = 16 * warps, verify.V_TOKENS
    k, v, pairs = (held(layouts[name]) for name in ("K", "V", "VP"))
    assert layouts["K"].shape == [tile, words] and layouts["V"].shape == [tokens, words, 2]
    for name, where in (("K", k), ("V", v), ("VP", pairs)):
        assert where.shape[:2] == (warps, 32)
        assert_each_once(layouts[name], where)
    for (warp, lane), got in thread_sets(k).items():
        g, c = divmod(lane, 4)
        rows = [16 * warp + g, 16 * warp + g + 8]
        quarter = range(c * words // 4, (c + 1) * words // 4)
        assert got == {(row, word) for row in rows for word in quarter}
    of_pairs = thread_sets(pairs)
    for (warp, lane), got in thread_sets(v).items():
        g, c = divmod(lane, 4)
        if columns_a_warp == 32:
            halves = [(4 * warp + g // 2, g % 2)]
        else:
            halves = [(8 * warp + g, 0), (8 * warp + g, 1)]
        own = [token for i in range(0, tokens, 8) for token in (i + 2 * c, i + 2 * c + 1)]
        assert got == {(token, *half) for token in own for half in halves}
        assert of_pairs[warp, lane] == {(token // 2, *half) for token in own for half in halves}
    assert_scales_follow_words(layouts, "K", "KS", k_group)
    assert_scales_follow_words(layouts, "V", "VS", v_group)
    assert_scales_follow_words(layouts, "VP", "VPS", v_group)


class Values(np.ndarray):
    """Numbers that a Gluon function may convert: they are exact in every dtype."""

    def to(self, dtype):
        return self


NUMPY = types.SimpleNamespace(
    reshape=np.reshape,
    permute=np.transpose,
    split=lambda x: (x[..., 0], x[..., 1]),
    convert_layout=lambda x, *_, **__: x,
    arange=lambda begin, end, layout: np.arange(begin, end).view(Values),
    load=lambda address, mask, other: address * mask,
    abs=np.abs,
    max=np.max,
    static_range=range,
    SliceLayout=lambda *_: None,
    BlockedLayout=lambda *_: None,
    int64=None,
    float32=None,
    float16=None,
)


def in_numpy(function, **names):
    """A Gluon function's own code on numpy arrays; names replace globals that it calls."""
    code = function.fn
    names = code.__globals__ | {"gl": NUMPY} | names
    names[code.__name__] = run = types.FunctionType(code.__code__, names)
    return run


def operand_columns(place):
    """Columns of a word in the order of decode_k: the first operand's four, the second's."""
    two = in_numpy(fragments.operands)(np.arange(8)[None, :, None], place)
    return np.concatenate([x[0, :, 0] for x in two])


class Shared(types.SimpleNamespace):
    """Shared memory [slices, rows, codes] that keeps what is stored."""

    def index(self, i):
        return types.SimpleNamespace(
            store=lambda x: self.stored.__setitem__(i, x),
            load=lambda layout: self.stored[i],
            shape=self.shape[1:],
        )


@pytest.mark.parametrize("place", fragments.FOLDS)
@pytest.mark.parametrize(
    "head_dim, slices", [(64, 1), (64, 2), (128, 2), (128, 4), (256, 4), (256, 8)]
)
def test_query_columns_meet_key_columns(head_dim, slices, place):
    """Every step of a score multiplies equal columns; the memory q is read from holds addresses."""
    rows, words, warps, row_stride = 16, head_dim // 8, head_dim // 32, 1000
    shape = slices, rows, head_dim // 2 // slices
    shared = [Shared(shape=shape, stored={}) for _ in range(2)]
    store_slices = in_numpy(verify.store_slices, _store_each=in_numpy(verify._store_each))
    stage_query = in_numpy(
        verify.stage_query,
        store_slices=store_slices,
        operands=in_numpy(fragments.operands),
        staging_layout=lambda *_: None,
        query_exponent=lambda amax: amax,
        query_up=np.ones_like,
        query_down=lambda exponent: exponent,
    )
    request = np.zeros((), int).view(Values)
    stage_query(0, *shared, 0, request, 0, 0, row_stride, 1, rows, warps, place)
    word_of = np.tile(np.arange(words), (16, 1))
    of_row = np.arange(rows) * row_stride
    assert sorted(shared[0].stored) == sorted(shared[1].stored) == list(range(slices))
    seen = []
    for u in range(slices):
        word = in_numpy(verify.slice_words)(word_of, u, slices)
        for second in (0, 1):
            code = operand_columns(place)[4 * second :][:4].reshape(2, 2)
            column = 8 * word[..., None, None] + code
            of_k = in_numpy(verify.k_operand)(column, None)
            of_q = in_numpy(verify.q_operand, q_layout=lambda *_: None)(
                shared[second].index(u), warps, None
            )
            assert (of_k == of_k[0]).all()
            assert np.array_equal(of_q, of_k[0][:, None] + of_row)
            seen.extend(of_k[0])
    assert sorted(seen) == list(range(head_dim))


ORDERS = {
    # The kernel's moves, what merge_fragments is told, and the argument of the moves: words, warps.
    "decode": (decode._v_operand, decode_order, lambda d: d // 8),
    "verify": (verify.v_operand, lambda d: verify_order(d, d // 32), lambda d: d // 32),
    "verify of 64 columns a warp": (
        verify.v_operand,
        lambda d: verify_order(d, d // 64),
        lambda d: d // 64,
    ),
}


def operand_bytes(kind, head_dim):
    """Byte of V's row that each row of the left operand holds: the kernel's own moves in numpy."""
    moves, _, width = ORDERS[kind]
    words, pairs = head_dim // 8, 4
    p, word, half, byte, token = np.meshgrid(
        *map(np.arange, (pairs, words, 2, 2, 2)), indexing="ij"
    )
    moves = in_numpy(moves)
    of_row, of_token = (
        moves(x, width(head_dim), None) for x in (4 * word + 2 * half + byte, 2 * p + token)
    )
    assert of_row.shape == (head_dim // 2, 2 * pairs)
    assert (of_row == of_row[:, :1]).all() and (of_token == np.arange(2 * pairs)).all()
    return of_row[:, 0]


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_operand_order(kind, head_dim):
    """FragmentOrder states the byte of every operand row; the two operands give all columns."""
    order = ORDERS[kind][1](head_dim)
    row = np.arange(head_dim // 2)
    halves, step = np.divmod(row // 16, order.steps)
    stated = row % 8 * order.lane_bytes + step * order.step_bytes + 2 * halves + row // 8 % 2
    assert np.array_equal(operand_bytes(kind, head_dim), stated)
    assert sorted([*(2 * stated), *(2 * stated + 1)]) == list(range(head_dim))


def merged(acc, top, total, v_scale):
    """Partial results [splits, D, rows], maxima and sums [splits, rows] to [rows, D]."""
    acc, top, total = (x.double() for x in (acc, top, total))
    highest = top.amax(0) if len(top) else top.sum(0)
    weight = torch.exp2(top - highest.nan_to_num(neginf=0.0))
    total = (total * weight).sum(0)
    return ((acc * weight[:, None]).sum(0) * (v_scale / total.where(total > 0, torch.ones(())))).T


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "dtype, cut",
    [
        (torch.bfloat16, merge_module._FEW),
        (torch.float16, merge_module._DEEP),
        (torch.bfloat16, merge_module._MANY),
    ],
)
@pytest.mark.parametrize(
    "kind, head_dim, rows_padded, row_blocks, q_per_req, group",
    [
        ("decode", 256, 8, 1, 1, 6),
        ("decode", 64, 8, 1, 2, 4),
        ("decode", 64, 8, 2, 2, 6),
        ("verify", 128, 24, 1, 4, 6),
        ("verify", 64, 24, 2, 8, 5),
        ("verify", 64, 48, 1, 8, 6),
        ("verify", 256, 48, 2, 11, 8),
        ("verify of 64 columns a warp", 64, 48, 1, 8, 6),
        ("verify of 64 columns a warp", 128, 24, 2, 6, 6),
    ],
)
def test_merge_matches_a_plain_one(
    device, kind, head_dim, rows_padded, row_blocks, q_per_req, group, dtype, cut,
    monkeypatch,
):  # fmt: skip
    """Requests of no, one, five and 40 splits in one call; rows that no split saw a key for.

    The request of one split is its reader's to write.
    """
    monkeypatch.setattr(merge_module, "_shape", lambda programs, splits: cut)
    heads, splits, v_scale = 2, (5, 0, 40, 1), 0.375
    items, rows = sum(splits), q_per_req * group
    assert (row_blocks - 1) * rows_padded < rows <= row_blocks * rows_padded
    g = torch.Generator().manual_seed(0)
    shape = (items, row_blocks, heads)
    top = torch.randint(-6, 7, (*shape, rows_padded), generator=g).float()
    total = torch.rand(*shape, rows_padded, generator=g) * 500 + 1
    acc = torch.randn(*shape, head_dim, rows_padded, generator=g) * total[..., None, :]
    blind = torch.rand(*shape, rows_padded, generator=g) < 0.3
    blind[..., 1] = True  # in every split
    top[blind], total[blind] = -torch.inf, 0.0
    acc[blind[..., None, :].expand_as(acc)] = 0.0
    column = torch.from_numpy(operand_bytes(kind, head_dim)) * 2
    column = torch.cat((column, column + 1))

    want = torch.empty(len(splits), heads, rows, head_dim, dtype=torch.float64)
    firsts = np.cumsum((0, *splits))
    for request, (first, count) in enumerate(zip(firsts[:-1], splits, strict=True)):
        own = slice(first, first + count)
        for head in range(heads):
            for block in range(row_blocks):
                at = own, block, head
                part = merged(acc[at], top[at], total[at], v_scale)
                begin, end = block * rows_padded, min(rows, (block + 1) * rows_padded)
                want[request, head, begin:end][:, column] = part[: end - begin]
    # a row is token * group + query head of the group
    want = want.view(len(splits), heads, q_per_req, group, head_dim).transpose(1, 2)
    want = want.reshape(len(splits) * q_per_req, heads * group, head_dim)

    wide = torch.full((len(want) + 1, heads * group, 2 * head_dim), 9.0, dtype=dtype, device=device)
    out = wide[: len(want), :, :head_dim]
    stat = torch.stack((top, total), 3)
    sched = torch.tensor(list(zip(firsts[:-1], splits, strict=True)), dtype=torch.int32)
    merge_fragments(
        out,
        acc.flatten().to(device),
        stat.flatten().to(device),
        sched.flatten().to(device),
        q_per_req,
        heads,
        rows_padded,
        row_blocks,
        11,
        ORDERS[kind][1](head_dim),
        v_scale,
        emulate=device.type == "cpu",
    )
    want[3 * q_per_req :] = 9.0
    step = torch.finfo(dtype).eps / 2  # rounded once
    torch.testing.assert_close(out.cpu().double(), want, rtol=1.01 * step, atol=1e-6)
    assert (out.view(len(splits), q_per_req, -1, head_dim)[1] == 0).all()
    assert (wide[len(want) :] == 9).all() and (wide[..., head_dim:] == 9).all()


def test_merge_is_shaped_by_how_much_there_is():
    assert merge_module._shape(64, 8) == merge_module._FEW
    assert merge_module._shape(384, 66) == merge_module._FEW
    assert merge_module._shape(64, 264) == merge_module._DEEP
    assert merge_module._shape(10**5, 1) == merge_module._MANY
