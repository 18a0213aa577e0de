"""store_nvfp4 against codec.encode, byte for byte, in the interpreter or on a GPU."""

import math

import pytest
import torch

from sglang_fp4kv import codec
from sglang_fp4kv.kernels import store_nvfp4 as module
from sglang_fp4kv.kernels.store_nvfp4 import store_nvfp4

pytestmark = pytest.mark.interpreter

K_SCALE, V_SCALE = 0.5, 0.0625
POISON = 0xA5


def make_pool(slots, heads, head_dim, device):
    def poisoned(width):
        return torch.full((slots, heads, width), POISON, dtype=torch.uint8, device=device)

    return {
        "k_codes": poisoned(head_dim // 2),
        "v_codes": poisoned(head_dim // 2),
        "k_scales": poisoned(head_dim // 16),
        "v_scales": poisoned(head_dim // 16),
    }


def make_kv(tokens, heads, head_dim, dtype, device, seed=0):
    """K and V with blocks of every size, and with NaN, Inf and zero blocks among them."""
    generator = torch.Generator().manual_seed(seed)
    pair = []
    for _ in range(2):
        x = torch.randn(tokens, heads, head_dim // 16, 16, generator=generator)
        exponent = torch.randint(-14, 15, x.shape[:-1] + (1,), generator=generator)
        x = (x * torch.exp2(exponent.float())).flatten(2)
        flat = x.view(-1)
        if tokens:
            flat[::97] = math.nan
            flat[5::131] = math.inf
            flat[9::157] = -math.inf
            x[tokens // 2, heads // 2] = 0
        pair.append(x.to(dtype).to(device))
    return pair


def expect(pool, k, v, slots, k_scale=K_SCALE, v_scale=V_SCALE):
    """The pool after the store, by codec.encode and indexing; distinct slots only."""
    want = {name: x.clone() for name, x in pool.items()}
    keep = (slots >= 0) & (slots < pool["k_codes"].shape[0])
    for side, x, scale in (("k", k, k_scale), ("v", v, v_scale)):
        codes, scales = codec.encode(x.cpu(), scale)
        want[f"{side}_codes"][slots[keep]] = codes.to(x.device)[keep]
        want[f"{side}_scales"][slots[keep]] = scales.to(x.device)[keep]
    return want


def assert_same(pool, want):
    for name, x in pool.items():
        assert torch.equal(x.view(torch.uint8), want[name]), name


def check(k, v, slots, num_slots, k_scale=K_SCALE, v_scale=V_SCALE):
    pool = make_pool(num_slots, k.shape[1], k.shape[2], k.device)
    want = expect(pool, k, v, slots, k_scale, v_scale)
    before = [x.cpu().view(torch.uint8).clone() for x in (k.contiguous(), v.contiguous())]
    store_nvfp4(k, v, slots, **pool, k_global_scale=k_scale, v_global_scale=v_scale)
    assert_same(pool, want)
    for x, old in zip((k, v), before):
        assert torch.equal(x.cpu().contiguous().view(torch.uint8), old)


def random_slots(tokens, num_slots, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_slots, generator=generator)[:tokens].to(device)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_store_nvfp4_matches_codec(heads, head_dim, device):
    k, v = make_kv(13, heads, head_dim, torch.bfloat16, device)
    slots = random_slots(13, 29, device)
    slots[3], slots[7] = -1, -5
    check(k, v, slots, 29)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0**-4), (0.0371, 0.1), (2.0**-20, 2.0**20)])
def test_dtypes_and_global_scales(dtype, scales, device):
    k, v = make_kv(17, 3, 80, dtype, device)
    check(k, v, random_slots(17, 20, device), 20, *scales)


def test_every_bf16_value(device):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    k = x.view(256, 1, 256).to(device)
    v = k.clone()
    v[..., ::16] = 168.0
    check(k, v, torch.arange(256, device=device), 256)


@pytest.mark.parametrize("tokens", [1, 2, 31, 257])
def test_odd_token_counts_over_several_programs(tokens, device, monkeypatch):
    monkeypatch.setattr(module, "BLOCKS_PER_PROGRAM", 128)
    k, v = make_kv(tokens, 1, 80, torch.bfloat16, device)
    check(k, v, random_slots(tokens, 300, device), 300)


def test_empty_batch_and_all_skipped_change_nothing(device):
    for slots in ([], [-1, -1, -9], [4, 1 << 40, -1]):
        slots = torch.tensor(slots, dtype=torch.int64, device=device)
        k, v = make_kv(len(slots), 2, 32, torch.bfloat16, device)
        pool = make_pool(4, 2, 32, device)
        store_nvfp4(k, v, slots, **pool, k_global_scale=1.0, v_global_scale=1.0)
        assert all((x == POISON).all() for x in pool.values())


def test_last_slot_and_reuse(device):
    pool = make_pool(6, 2, 64, device)
    for seed in range(3):
        k, v = make_kv(2, 2, 64, torch.float16, device, seed)
        slots = torch.tensor([5, 0], device=device)
        want = expect(pool, k, v, slots)
        store_nvfp4(k, v, slots, **pool, k_global_scale=K_SCALE, v_global_scale=V_SCALE)
        assert_same(pool, want)
    assert all((x[1:5] == POISON).all() for x in pool.values())


def test_qkv_packed_and_other_strided_views(device):
    k, v = make_kv(9, 2, 96, torch.bfloat16, device)
    qkv = torch.randn(9, (4 + 2 + 2) * 96, device=device).to(torch.bfloat16)
    qkv[:, 4 * 96 : 6 * 96] = k.flatten(1)
    qkv[:, 6 * 96 :] = v.flatten(1)
    slots = random_slots(9, 11, device)
    _, packed_k, packed_v = qkv.split([4 * 96, 2 * 96, 2 * 96], -1)
    check(packed_k.view(9, 2, 96), packed_v.view(9, 2, 96), slots, 11)
    assert not packed_k.is_contiguous()
    # heads outermost, an odd row pitch, and every other token
    heads_first = k.transpose(0, 1).contiguous().transpose(0, 1)
    pitched = torch.zeros(9, 2, 99, dtype=v.dtype, device=device)
    pitched[..., 1:97] = v
    check(heads_first, pitched[..., 1:97], slots, 11)
    check(k[::2], v[::2], torch.stack((slots, slots), 1)[::2, 0], 11)


def test_e4m3_scale_views_and_sliced_pools(device):
    k, v = make_kv(5, 2, 64, torch.bfloat16, device)
    slots = random_slots(5, 7, device)
    whole = make_pool(3 * 7, 2, 64, device)
    pool = {name: x[7:14] for name, x in whole.items()}
    want = expect(pool, k, v, slots)
    views = {
        name: x.view(torch.float8_e4m3fn) if "scales" in name else x for name, x in pool.items()
    }
    store_nvfp4(k, v, slots, **views, k_global_scale=K_SCALE, v_global_scale=V_SCALE)
    assert_same(pool, want)
    for x in whole.values():
        assert (x[:7] == POISON).all() and (x[14:] == POISON).all()


def test_slots_with_a_pitch(device):
    """One buffer that holds all layers: the slot stride is wider than a slot."""
    k, v = make_kv(4, 2, 32, torch.bfloat16, device)
    slots = torch.tensor([3, 0, -1, 2], device=device)
    wide = {name: x.unflatten(1, (2, 2)) for name, x in make_pool(5, 4, 32, device).items()}
    pool = {name: x[:, 1] for name, x in wide.items()}
    want = expect(pool, k, v, slots)
    store_nvfp4(k, v, slots, **pool, k_global_scale=K_SCALE, v_global_scale=V_SCALE)
    assert_same(pool, want)
    assert all((x[:, 0] == POISON).all() for x in wide.values())


def good_arguments(device):
    k, v = make_kv(3, 2, 32, torch.bfloat16, device)
    slots = torch.arange(3, device=device)
    pool = make_pool(4, 2, 32, device)
    return {"k": k, "v": v, "slots": slots, **pool, "k_global_scale": 1.0, "v_global_scale": 1.0}


def meta(x):
    return torch.empty_like(x, device="meta")


BAD_ARGUMENTS = [
    ("k", lambda x: x[0], r"k must be \[T, H, D\], got \(2, 32\)"),
    ("v", lambda x: x.double(), "v must be float32, .* got torch.float64"),
    ("k", lambda x: x.repeat(1, 1, 2)[..., ::2], "k must be contiguous along head_dim, got stride 2"),
    ("v", lambda x: x[:, :1], r"one shape, got \(3, 2, 32\) and \(3, 1, 32\)"),
    ("v", lambda x: x.half(), "one dtype, got torch.bfloat16 and torch.float16"),
    ("slots", lambda x: x[:2], r"slots must be \[3\], got \(2,\)"),
    ("slots", lambda x: x.int(), "slots must be int64, got torch.int32"),
    ("k_codes", lambda x: x.view(torch.int8), "k_codes must be uint8, got torch.int8"),
    ("v_scales", lambda x: x.half(), "v_scales must be uint8 or float8_e4m3fn, got torch.float16"),
    ("v_codes", lambda x: x[:, :, :8], r"v_codes must be \[S, 2, 16\] with S = 4, got \(4, 2, 8\)"),
    ("k_codes", lambda x: x[0, 0, 0], r"k_codes must be \[S, 2, 16\] with S = 0, got \(\)"),
    ("k_scales", lambda x: x[:3], r"k_scales must be \[S, 2, 2\] with S = 4, got \(3, 2, 2\)"),
    ("k_codes", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "k_codes must be contiguous within a slot"),
    ("k_global_scale", lambda x: 0.0, "global scale must be finite and > 0.*got 0.0"),
    ("v_global_scale", lambda x: math.nan, "global scale must be finite and > 0.*got nan"),
    ("slots", meta, "slots is on meta, k is on"),
    ("v_codes", meta, "v_codes is on meta, k is on"),
]


@pytest.mark.parametrize("name, change, message", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(name, change, message, device):
    arguments = good_arguments(device)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        store_nvfp4(**arguments)


def test_bad_combinations_are_refused(device):
    arguments = good_arguments(device)
    arguments["k"], arguments["v"] = (arguments[side][..., :24] for side in "kv")
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        store_nvfp4(**arguments)
    arguments = good_arguments(device)
    arguments |= {"v_codes": arguments["v_codes"][:3], "v_scales": arguments["v_scales"][:3]}
    with pytest.raises(ValueError, match=r"one shape, got \(4, 2, 16\) and \(3, 2, 16\)"):
        store_nvfp4(**arguments)
    arguments = good_arguments(device)
    odd = torch.zeros(4 * 32 + 1, dtype=torch.uint8, device=device)[1:].view(4, 2, 16)
    with pytest.raises(ValueError, match="k_codes slots must begin at multiples of 4 bytes"):
        store_nvfp4(**arguments | {"k_codes": odd})


@pytest.mark.gpu
def test_captured_in_a_cuda_graph_and_allocates_nothing():
    device = torch.device("cuda")
    k, v = make_kv(64, 8, 128, torch.bfloat16, device)
    slots = random_slots(64, 100, device)
    pool = make_pool(100, 8, 128, device)
    run = lambda: store_nvfp4(k, v, slots, **pool, k_global_scale=K_SCALE, v_global_scale=V_SCALE)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.max_memory_allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    new_k, new_v = make_kv(64, 8, 128, torch.bfloat16, device, seed=1)
    k.copy_(new_k), v.copy_(new_v), slots.copy_(random_slots(64, 100, device, seed=1))
    want = expect(pool, k, v, slots)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(pool, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, head_dim", [(4, 256), (8, 128), (8, 64), (5, 80)])
def test_the_plain_twin_writes_the_same_bytes(heads, head_dim, dtype, monkeypatch):
    device = torch.device("cuda")
    if not module.use_assembly(device, dtype):
        pytest.skip("no assembly before sm_90")
    k, v = make_kv(333, heads, head_dim, dtype, device)
    slots = random_slots(333, 400, device)
    for scales in ((0.5, 0.0625), (0.0371, 1 / 3)):
        pools = []
        for assembly in (True, False):
            monkeypatch.setattr(module, "use_assembly", lambda *_, on=assembly: on)
            pools.append(make_pool(400, heads, head_dim, device))
            store_nvfp4(k, v, slots, **pools[-1], k_global_scale=scales[0], v_global_scale=scales[1])
        assert_same(*pools)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 64, 2048])
def test_a_store_sees_what_the_kernel_before_it_wrote(tokens):
    """Programmatic dependent launch: the writer starts early and has to wait for its inputs."""
    device = torch.device("cuda")
    first, second = (make_kv(tokens, 4, 256, torch.bfloat16, device, seed) for seed in (0, 1))
    k, v = (torch.zeros_like(x) for x in first)
    slots = random_slots(tokens, tokens + 3, device)
    pools = [make_pool(tokens + 3, 4, 256, device) for _ in range(2)]
    wants = [expect(pool, *kv, slots) for pool, kv in zip(pools, (first, second))]
    graph = torch.cuda.CUDAGraph()
    scales = {"k_global_scale": K_SCALE, "v_global_scale": V_SCALE}
    store_nvfp4(k, v, slots, **pools[0], **scales)
    with torch.cuda.graph(graph):
        for pool, source in zip(pools, (first, second)):
            k.copy_(source[0]), v.copy_(source[1])
            store_nvfp4(k, v, slots, **pool, **scales)
    for _ in range(20):
        for pool in pools:
            for x in pool.values():
                x.fill_(POISON)
        graph.replay()
        for pool, want in zip(pools, wants):
            assert_same(pool, want)
