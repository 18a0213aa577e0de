"""Prefix commits against codec.encode (NVFP4) and against torch's own div_ and casts (plain)."""

import math

import pytest
import torch

from sglang_fp4kv import codec
from sglang_fp4kv.kernels import commit_prefix_plain as plain_module
from sglang_fp4kv.kernels import store_nvfp4 as store_module
from sglang_fp4kv.kernels.commit_prefix import commit_prefix_nvfp4, commit_prefix_plain
from test_store_nvfp4 import K_SCALE, POISON, V_SCALE, assert_same, make_kv, make_pool

pytestmark = pytest.mark.interpreter

E4M3 = torch.float8_e4m3fn
PAIRS = [
    (torch.bfloat16, E4M3),
    (torch.float16, E4M3),
    (torch.float32, E4M3),
    (E4M3, E4M3),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
]


def make_block(requests, rows, num_slots, device, seed=0):
    """loc_2d of distinct slots and commit_lens that include none, some and all rows."""
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randperm(num_slots, generator=generator)[: requests * rows]
    lens = torch.tensor([(3 * i) % (rows + 1) for i in range(requests)], dtype=torch.int32)
    if requests:
        lens[-1] = rows
    return loc.view(requests, rows).to(device), lens.to(device)


def committed(loc_2d, commit_lens, num_slots):
    """Row numbers that are written, in order, by plain Python."""
    rows = []
    for request, length in enumerate(commit_lens.tolist()):
        for row in range(min(length, loc_2d.shape[1])):
            if 0 <= int(loc_2d[request, row]) < num_slots:
                rows.append(request * loc_2d.shape[1] + row)
    return rows


def check_nvfp4(k, v, loc_2d, commit_lens, num_slots, k_scale=K_SCALE, v_scale=V_SCALE):
    pool = make_pool(num_slots, k.shape[1], k.shape[2], k.device)
    want = {name: x.clone() for name, x in pool.items()}
    rows = committed(loc_2d, commit_lens, num_slots)
    slots = loc_2d.reshape(-1)[rows].long()
    for side, x, scale in (("k", k, k_scale), ("v", v, v_scale)):
        codes, scales = codec.encode(x.cpu()[rows], scale)
        want[f"{side}_codes"][slots] = codes.to(x.device)
        want[f"{side}_scales"][slots] = scales.to(x.device)
    before = [x.contiguous().view(torch.uint8).clone() for x in (k, v)]
    commit_prefix_nvfp4(
        k, v, loc_2d, commit_lens, **pool, k_global_scale=k_scale, v_global_scale=v_scale
    )
    assert_same(pool, want)
    for x, old in zip((k, v), before):
        assert torch.equal(x.contiguous().view(torch.uint8), old)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_commit_prefix_nvfp4_matches_codec(heads, head_dim, device):
    k, v = make_kv(12, heads, head_dim, torch.bfloat16, device)
    loc, lens = make_block(3, 4, 17, device)
    loc[2, 1] = -1
    check_nvfp4(k, v, loc, lens, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nvfp4_dtypes_scales_and_index_dtypes(dtype, device):
    k, v = make_kv(21, 3, 80, dtype, device)
    loc, lens = make_block(3, 7, 25, device)
    check_nvfp4(k, v, loc.int(), lens.long(), 25, 0.0371, 2.0**-9)


def plain_pool(num_slots, heads, width, dtype, device):
    bytes_ = torch.full(
        (num_slots, heads, width * dtype.itemsize), POISON, dtype=torch.uint8, device=device
    )
    return bytes_.view(dtype)


def eager(x, scale, dtype):
    """What MHATokenToKVPool.set_kv_buffer does to K or V before it stores them."""
    if x.dtype == dtype:
        return x
    x = x.clone()
    if scale is not None:
        x.div_(scale)
    if dtype == E4M3:  # as SGLang's saturate_to_fp8_range; torch's own cast saturates from 2.14 on
        x.clamp_(-448, 448)
    return x.to(dtype)


def assert_same_but_for_nan_payload(got, want):
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    size = torch.uint8 if got.dtype.itemsize == 1 else torch.int16
    assert torch.equal(got.view(size)[~nan], want.view(size)[~nan])


def check_plain(k, v, loc_2d, commit_lens, num_slots, pool_dtype, k_scale=None, v_scale=None):
    pools, wants = [], []
    rows = committed(loc_2d, commit_lens, num_slots)
    slots = loc_2d.reshape(-1)[rows].long()
    for x, scale in ((k, k_scale), (v, v_scale)):
        pool = plain_pool(num_slots, x.shape[1], x.shape[2], pool_dtype, x.device)
        want = pool.clone()
        want.view(torch.uint8)[slots] = eager(x, scale, pool_dtype)[rows].contiguous().view(torch.uint8)
        pools.append(pool), wants.append(want)
    before = [x.contiguous().view(torch.uint8).clone() for x in (k, v)]
    commit_prefix_plain(k, v, loc_2d, commit_lens, *pools, k_scale, v_scale)
    for pool, want in zip(pools, wants):
        assert_same_but_for_nan_payload(pool, want)
    untouched = [i for i in range(num_slots) if i not in slots.tolist()]
    for pool in pools:
        assert (pool.view(torch.uint8)[untouched] == POISON).all()
    for x, old in zip((k, v), before):
        assert torch.equal(x.contiguous().view(torch.uint8), old)


@pytest.mark.parametrize("scale", [None, "number", "tensor"])
@pytest.mark.parametrize("source, pool", PAIRS)
def test_commit_prefix_plain_matches_eager(source, pool, scale, device):
    k, v = make_kv(10, 2, 80, torch.float32, device)
    k, v = k.to(source), v.to(source)
    loc, lens = make_block(2, 5, 13, device)
    loc[1, 3] = -1
    scales = [0.3, 7.0] if scale else [None, None]
    if scale == "tensor":
        scales = [torch.tensor(x, device=device) for x in scales]
    check_plain(k, v, loc, lens, 13, pool, *scales)


@pytest.mark.parametrize("scale", [None, 0.37, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_in_an_fp8_pool(dtype, scale, device):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    k = x.view(256, 1, 256).to(device)
    loc = torch.arange(256, device=device).view(4, 64)
    lens = torch.full((4,), 64, dtype=torch.int32, device=device)
    check_plain(k, k.flip(0).contiguous(), loc, lens, 256, E4M3, scale, scale)


def test_fp8_ties_and_saturation_from_fp32(device):
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middle = torch.cat(((codes[1:] + codes[:-1]) / 2, torch.tensor([464.0, 480.0, 1e9, math.inf])))
    up = torch.nextafter(middle, torch.tensor(math.inf))
    down = torch.nextafter(middle, torch.tensor(0.0))
    x = torch.stack((middle, up, down)).view(3, 1, -1).to(device)
    loc = torch.arange(3, device=device).view(1, 3)
    lens = torch.tensor([3], device=device)
    check_plain(x, -x, loc, lens, 3, E4M3)


@pytest.mark.parametrize("k_width, v_width", [(1, 1), (72, 40), (64, 128), (256, 16)])
def test_plain_widths(k_width, v_width, device):
    k = torch.randn(6, 5, k_width, device=device).bfloat16()
    v = torch.randn(6, 5, v_width, device=device).bfloat16()
    loc, lens = make_block(2, 3, 9, device)
    for pool in (E4M3, torch.bfloat16):
        check_plain(k, v, loc, lens, 9, pool, 0.9, None)


def test_lengths_beyond_the_block_and_below_zero(device):
    k, v = make_kv(9, 1, 32, torch.bfloat16, device)
    loc, _ = make_block(3, 3, 9, device)
    lens = torch.tensor([99, -2, 3], dtype=torch.int32, device=device)
    check_nvfp4(k, v, loc, lens, 9)
    check_plain(k, v, loc, lens, 9, E4M3)


def test_skipped_last_and_out_of_range_slots(device):
    k, v = make_kv(4, 2, 32, torch.bfloat16, device)
    loc = torch.tensor([[6, -1, 0, 7]], device=device)
    lens = torch.tensor([4], dtype=torch.int32, device=device)
    check_nvfp4(k, v, loc, lens, 7)
    check_plain(k, v, loc, lens, 7, E4M3)


@pytest.mark.parametrize("requests, rows", [(0, 4), (3, 0), (1, 1), (5, 16)])
def test_block_shapes_and_empty_batches(requests, rows, device, monkeypatch):
    monkeypatch.setattr(plain_module, "ELEMENTS_PER_PROGRAM", 256)
    k, v = make_kv(requests * rows, 2, 48, torch.float16, device)
    loc, lens = make_block(requests, rows, 90, device)
    check_nvfp4(k, v, loc, lens, 90)
    check_plain(k, v, loc, lens, 90, E4M3, 0.5, 0.25)


def test_strided_inputs(device):
    k, v = make_kv(8, 2, 64, torch.bfloat16, device)
    qkv = torch.cat((k, v), 1).flatten(1)
    k, v = (x.view(8, 2, 64) for x in qkv.split([128, 128], -1))
    loc, lens = make_block(2, 4, 11, device)
    wide_loc = torch.full((2, 9), -7, device=device)
    wide_loc[:, 1::2] = loc
    wide_lens = torch.stack((lens, lens * 0), 1)
    arguments = k, v, wide_loc[:, 1::2], wide_lens[:, 0], 11
    assert not any(x.is_contiguous() for x in arguments[:4])
    check_nvfp4(*arguments)
    check_plain(*arguments, E4M3)
    check_plain(*arguments, torch.bfloat16)


def good_arguments(kind, device):
    k, v = make_kv(6, 2, 32, torch.bfloat16, device)
    loc, lens = make_block(2, 3, 8, device)
    arguments = {"k": k, "v": v, "loc_2d": loc, "commit_lens": lens}
    if kind == "nvfp4":
        pool = make_pool(8, 2, 32, device)
        return {**arguments, **pool, "k_global_scale": 1.0, "v_global_scale": 1.0}
    pools = {f"{side}_pool": plain_pool(8, 2, 32, E4M3, device) for side in "kv"}
    return {**arguments, **pools, "k_scale": 1.0, "v_scale": None}


def meta(x):
    return torch.empty_like(x, device="meta")


BOTH = [
    ("k", lambda x: x[0], r"k must be \[T, H, D\], got \(2, 32\)"),
    ("v", lambda x: x.double(), "v must be float32, .* got torch.float64"),
    ("k", lambda x: x.repeat(1, 1, 2)[..., ::2], "k must be contiguous along head_dim, got stride 2"),
    ("loc_2d", lambda x: x[0], r"loc_2d must be \[B, N\], got \(3,\)"),
    ("loc_2d", lambda x: x[:1], r"one row per entry of loc_2d \(1, 3\), got 6 rows"),
    ("loc_2d", lambda x: x.short(), "loc_2d must be int32 or int64, got torch.int16"),
    ("commit_lens", lambda x: x[:1], r"commit_lens must be \[2\], got \(1,\)"),
    ("commit_lens", lambda x: x.float(), "commit_lens must be int32 or int64, got torch.float32"),
    ("commit_lens", meta, "commit_lens is on meta, k is on"),
]
NVFP4 = [
    ("v", lambda x: x[:, :1], r"one shape, got \(6, 2, 32\) and \(6, 1, 32\)"),
    ("k_codes", lambda x: x.view(torch.int8), "k_codes must be uint8, got torch.int8"),
    ("v_scales", lambda x: x[:, :, :1], r"v_scales must be \[S, 2, 2\] with S = 8, got \(8, 2, 1\)"),
    ("k_scales", meta, "k_scales is on meta, k is on"),
    ("k_global_scale", lambda x: math.inf, "global scale must be finite and > 0.*got inf"),
    ("v_global_scale", lambda x: -1.0, "global scale must be finite and > 0.*got -1.0"),
]
PLAIN = [
    ("v", lambda x: x[:5], r"same rows, heads and dtype, got \(6, 2, 32\)"),
    ("v", lambda x: x.half(), "same rows, heads and dtype, got .* torch.float16"),
    ("k_pool", lambda x: x.float(), "k_pool must be float8_e4m3fn, bfloat16 or float16, got torch.float32"),
    ("v_pool", lambda x: x[:, :1], r"v_pool must be \[S, 2, 32\], got \(8, 1, 32\)"),
    ("v_pool", lambda x: x[:7], r"one dtype and slot count, got .*\(8, 2, 32\) and .*\(7, 2, 32\)"),
    ("v_pool", lambda x: x.bfloat16(), "one dtype and slot count, got torch.float8_e4m3fn .*torch.bfloat16"),
    ("k_pool", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "k_pool must be contiguous along head_dim, got stride 2"),
    ("v_pool", meta, "v_pool is on meta, k is on"),
    ("k_scale", lambda x: 0.0, "k_scale must be finite and > 0, got 0.0"),
    ("v_scale", lambda x: math.nan, "v_scale must be finite and > 0, got nan"),
    ("v_scale", lambda x: torch.ones(2), r"v_scale must hold one float32, got torch.float32 \(2,\)"),
    ("k_scale", lambda x: torch.ones(1, device="meta"), "k_scale is on meta, k is on"),
]


@pytest.mark.parametrize(
    "kind, name, change, message",
    [("nvfp4", *case) for case in BOTH + NVFP4] + [("plain", *case) for case in BOTH + PLAIN],
)
def test_bad_arguments_are_refused(kind, name, change, message, device):
    arguments = good_arguments(kind, device)
    arguments[name] = change(arguments[name])
    function = commit_prefix_nvfp4 if kind == "nvfp4" else commit_prefix_plain
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_bad_combinations_are_refused(device):
    arguments = good_arguments("nvfp4", device)
    arguments |= {"v_codes": arguments["v_codes"][:3], "v_scales": arguments["v_scales"][:3]}
    with pytest.raises(ValueError, match="k_codes and v_codes must have one shape"):
        commit_prefix_nvfp4(**arguments)
    arguments = good_arguments("plain", device)
    arguments |= {"k_pool": plain_pool(8, 2, 32, torch.bfloat16, device)}
    arguments["k"] = arguments["k"].to(E4M3)
    with pytest.raises(ValueError, match="k is float8_e4m3fn, k_pool is torch.bfloat16"):
        commit_prefix_plain(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", [None, E4M3, torch.bfloat16])
def test_captured_in_a_cuda_graph(pool_dtype):
    device = torch.device("cuda")
    k, v = make_kv(64, 4, 128, torch.bfloat16, device)
    loc, lens = make_block(8, 8, 100, device)
    if pool_dtype is None:
        pool = make_pool(100, 4, 128, device)
        run = lambda: commit_prefix_nvfp4(
            k, v, loc, lens, **pool, k_global_scale=K_SCALE, v_global_scale=V_SCALE
        )
    else:
        pool = {side: plain_pool(100, 4, 128, pool_dtype, device) for side in "kv"}
        one = torch.ones((), device=device)
        run = lambda: commit_prefix_plain(k, v, loc, lens, pool["k"], pool["v"], one, one)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    lens.copy_(lens.flip(0))
    graph.replay()
    replayed = [x.view(torch.uint8).clone() for x in pool.values()]
    for x in pool.values():
        x.view(torch.uint8).fill_(POISON)
    lens.copy_(lens.flip(0))
    run()
    lens.copy_(lens.flip(0))
    run()
    for x, old in zip(pool.values(), replayed):
        assert torch.equal(x.view(torch.uint8), old)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, head_dim", [(4, 256), (8, 128), (5, 80)])
def test_the_plain_twin_commits_the_same_bytes(heads, head_dim, dtype, monkeypatch):
    device = torch.device("cuda")
    if not store_module.use_assembly(device, dtype):
        pytest.skip("no assembly before sm_90")
    k, v = make_kv(16 * 9, heads, head_dim, dtype, device)
    loc, lens = make_block(16, 9, 200, device)
    pools = []
    for assembly in (True, False):
        monkeypatch.setattr(store_module, "use_assembly", lambda *_, on=assembly: on)
        pools.append(make_pool(200, heads, head_dim, device))
        commit_prefix_nvfp4(
            k, v, loc, lens, **pools[-1], k_global_scale=0.0371, v_global_scale=V_SCALE
        )
    assert_same(*pools)
