"""The NVFP4 pool and the drafter's pool as SGLang objects, without a server."""

from types import SimpleNamespace

import pytest
import torch

from sglang_fp4kv import codec, formats

pytestmark = pytest.mark.interpreter

LAYERS, HEADS, DIM, SIZE, PAGE = 3, 2, 64, 40, 8


@pytest.fixture(scope="module")
def recipe_class():
    from sglang_fp4kv.recipe import PackedNVFP4Method

    return PackedNVFP4Method


def packed_recipe(recipe_class, device, k_scales=None, v_scales=None):
    recipe = recipe_class(num_layers=LAYERS, device=device, page_size=PAGE)
    recipe.configure_attention_backends("triton", "triton")
    recipe.k_scales_float = k_scales or [0.5] * 16
    recipe.v_scales_float = v_scales or [0.0625] * 16
    return recipe


def build_pool(recipe, device, **changes):
    from sglang_fp4kv.pool import NVFP4TokenToKVPool

    options = {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": torch.float4_e2m1fn_x2,
        "head_num": HEADS,
        "head_dim": DIM,
        "layer_num": LAYERS,
        "device": str(device),
        "enable_memory_saver": False,
        "quant_method": recipe,
    }
    return NVFP4TokenToKVPool(**{**options, **changes})


@pytest.fixture
def pool(recipe_class, device):
    return build_pool(packed_recipe(recipe_class, device), device)


def rows(count, device, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(count, HEADS, DIM, generator=generator).to(device, dtype)
    v = torch.randn(count, HEADS, DIM, generator=generator).to(device, dtype)
    return k, v


def layer(layer_id):
    return SimpleNamespace(layer_id=layer_id, k_scale=None, v_scale=None)


def decoded(pool, layer_id, slots):
    p = pool.packed_layer(layer_id)
    return (
        codec.decode(p.k_codes[slots], p.k_scales[slots], p.k_global_scale),
        codec.decode(p.v_codes[slots], p.v_scales[slots], p.v_global_scale),
    )


def expected(x, scale):
    return codec.decode(*codec.encode(x, scale), scale)


def test_the_pool_costs_what_the_format_says(pool):
    per_token = formats.bytes_per_token(DIM, HEADS, LAYERS)
    assert pool.bytes_per_token == per_token == 2 * (DIM // 2 + DIM // 16) * HEADS * LAYERS
    assert sum(pool.get_kv_size_bytes()) == per_token * (SIZE + PAGE)
    assert pool.dq_k_buffer is None and pool.dq_v_buffer is None
    assert pool.quant_method.compute_cell_size(HEADS, DIM, LAYERS, 1) == per_token


def test_written_rows_decode_to_the_codec(pool, device):
    k, v = rows(5, device)
    slots = torch.tensor([3, 47, 0, -1, 9], device=device)
    before = (k.clone(), v.clone())
    pool.set_kv_buffer(layer(1), slots, k, v)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    live = torch.tensor([0, 1, 2, 4], device=device)
    got_k, got_v = decoded(pool, 1, slots[live])
    assert torch.equal(got_k, expected(k, 0.5)[live])
    assert torch.equal(got_v, expected(v, 0.0625)[live])
    assert not pool.k_buffer[0].any() and not pool.k_buffer[2].any()


def test_a_layer_scale_passed_by_the_backend_is_not_applied_again(pool, device):
    k, v = rows(2, device)
    slots = torch.tensor([1, 2], device=device)
    pool.set_kv_buffer(layer(0), slots, k, v, torch.tensor(0.5), torch.tensor(0.0625))
    assert torch.equal(decoded(pool, 0, slots)[0], expected(k, 0.5))


def test_a_composite_pool_maps_to_model_layers_before_choosing_a_scale(recipe_class, device):
    scales = [2.0**-i for i in range(16)]
    pool = build_pool(packed_recipe(recipe_class, device, scales, scales), device)
    pool.model_layer_ids = (3, 7, 11)
    k, v = rows(1, device)
    slots = torch.tensor([4], device=device)
    pool.set_kv_buffer(None, slots, k, v, layer_id_override=1)
    assert pool.packed_layer(1).k_global_scale == 2.0**-7
    assert torch.equal(decoded(pool, 1, slots)[0], expected(k, 2.0**-7))


def test_the_committed_prefix_alone_is_written(pool, device):
    k, v = rows(8, device)
    loc = torch.arange(10, 18, device=device).view(2, 4)
    pool.set_kv_buffer_prefix_valid(
        layer(0), loc, torch.tensor([3, 1], dtype=torch.int32, device=device), k, v
    )
    kept = [0, 1, 2, 4]
    assert torch.equal(decoded(pool, 0, loc.flatten()[kept])[0], expected(k, 0.5)[kept])
    dropped = loc.flatten()[[3, 5, 6, 7]]
    assert not pool.k_buffer[0][dropped].any() and not pool.v_scale_buffer[0][dropped].any()


def test_a_retracted_request_comes_back_to_other_slots_unchanged(pool, device):
    pool.cpu_offloading_chunk_size = 2
    k, v = rows(5, device)
    slots = torch.tensor([1, 5, 9, 13, 17], device=device)
    for i in range(LAYERS):
        pool.set_kv_buffer(layer(i), slots, k * (i + 1), v)
    before = [decoded(pool, i, slots) for i in range(LAYERS)]
    copy = pool.get_cpu_copy(slots)
    others = rows(5, device, seed=1)
    for i in range(LAYERS):
        pool.set_kv_buffer(layer(i), slots, *others)
    back = torch.tensor([40, 41, 1, 3, 2], device=device)
    pool.load_cpu_copy(copy, back)
    for i in range(LAYERS):
        got = decoded(pool, i, back)
        assert torch.equal(got[0], before[i][0]) and torch.equal(got[1], before[i][1])


def test_a_copy_of_another_length_is_refused(pool, device):
    copy = pool.get_cpu_copy(torch.tensor([1, 2], device=device))
    with pytest.raises(ValueError, match=r"holds \[2, 2, 2\] slots by layer, the pool wants 3"):
        pool.load_cpu_copy(copy, torch.tensor([1, 2, 3], device=device))


@pytest.mark.parametrize("native", [True, False])
def test_accepted_rows_move_over_each_other(recipe_class, device, native):
    """As after a tree verify: rows move to the front of their block, over each other, and one stays."""
    recipe = packed_recipe(recipe_class, device)
    pool = build_pool(recipe, device, enable_kv_cache_copy=True)  # as SGLang builds it with a drafter
    pool.use_native_move_kv_cache = native
    k, v = rows(8, device)
    for layer_id in range(LAYERS):
        pool.set_kv_buffer(layer(layer_id), torch.arange(20, 28, device=device), k, v)
    source, target = (torch.tensor(x, device=device) for x in ([20, 22, 23, 27], [20, 21, 22, 23]))
    pool.move_kv_cache(target, source)
    moved = source - 20
    for layer_id in range(LAYERS):
        got = decoded(pool, layer_id, target)
        assert torch.equal(got[0], expected(k[moved], 0.5)) and torch.equal(got[1], expected(v[moved], 0.0625))


@pytest.mark.parametrize("tiled", [False, True])
def test_moved_slots_take_their_scales_along(recipe_class, device, tiled):
    """Both ways that SGLang moves slots: by indexing, and by one kernel over all buffers."""
    pool = build_pool(packed_recipe(recipe_class, device), device, enable_kv_cache_copy=tiled)
    pool.use_native_move_kv_cache = not tiled
    source, target = (torch.tensor(slots, device=device) for slots in ([1, 2, 47], [20, 21, 9]))
    for i in range(LAYERS):
        pool.set_kv_buffer(layer(i), source, *rows(3, device, seed=i))
    wanted = [[side.clone() for side in sides] for sides in pool._layer_buffers()]
    for sides in wanted:
        for side in sides:
            assert side[source].any()
            side[target] = side[source]
    pool.move_kv_cache(target, source)
    for sides, held in zip(wanted, pool._layer_buffers(), strict=True):
        assert all(torch.equal(side, now) for side, now in zip(sides, held, strict=True))


def test_what_the_pool_cannot_hold_is_refused(recipe_class, device):
    recipe = packed_recipe(recipe_class, device)
    with pytest.raises(ValueError, match="multiple of 16, got 72"):
        build_pool(recipe, device, head_dim=72)
    with pytest.raises(ValueError, match="head_dim=64 and v_head_dim=32"):
        build_pool(recipe, device, v_head_dim=32)
    with pytest.raises(ValueError, match="nhd layout only, got 'page_major'"):
        build_pool(recipe, device, kv_cache_layout="page_major")
    with pytest.raises(ValueError, match="needs the packed NVFP4 recipe, got NoneType"):
        build_pool(None, device)
    stock = recipe_class(num_layers=LAYERS, device=device, page_size=PAGE, native_scale_layout=False)
    stock.configure_attention_backends("flashinfer", "trtllm_mha")
    with pytest.raises(ValueError, match="needs the packed NVFP4 recipe, got PackedNVFP4Method"):
        build_pool(stock, device)


def test_transfer_and_context_parallel_writes_are_refused(pool, device):
    with pytest.raises(ValueError, match="PD registers no scales"):
        pool.get_contiguous_buf_infos()
    k, v = rows(1, device)
    slots = torch.tensor([1], device=device)
    with pytest.raises(ValueError, match="decode context parallelism"):
        pool.set_kv_buffer(layer(0), slots, k, v, dcp_kv_mask=slots > 0)
    with pytest.raises(RuntimeError, match="go through NVFP4TokenToKVPool"):
        pool.quant_method.quantize_and_store()


def test_other_backends_keep_the_stock_recipe(recipe_class, device):
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod

    ours = recipe_class(num_layers=1, device=device, native_scale_layout=False)
    stock = NVFP4KVCacheMethod(num_layers=1, device=device, native_scale_layout=False)
    for recipe in (ours, stock):
        recipe.configure_attention_backends("flashinfer", "trtllm_mha")
    assert not ours.packed
    assert ours.compute_cell_size(2, 64, 4, 1) == stock.compute_cell_size(2, 64, 4, 1)
    shapes = [
        {n: [tuple(t.shape) for t in b] if isinstance(b, list) else getattr(b, "shape", b) for n, b in r.create_buffers(8, 2, 64, 1, "cpu").items()}
        for r in (ours, stock)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_the_drafters_pool_commits_the_prefix_like_the_stock_writer(device, dtype):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_fp4kv.draft_pool import DraftTokenToKVPool

    k, v = rows(8, device)
    loc = torch.arange(10, 18, device=device).view(2, 4)
    lens = torch.tensor([4, 2], dtype=torch.int32, device=device)
    pools = []
    for cls in (DraftTokenToKVPool, MHATokenToKVPool):
        pool = cls(
            SIZE, PAGE, dtype, head_num=HEADS, head_dim=DIM, layer_num=1, device=str(device),
            enable_memory_saver=False,
        )  # fmt: skip
        pool.set_kv_buffer_prefix_valid(layer(0), loc, lens, k.clone(), v.clone())
        pools.append(pool)
    ours, stock = pools
    assert torch.equal(ours.k_buffer[0], stock.k_buffer[0])
    assert torch.equal(ours.v_buffer[0], stock.v_buffer[0])
    assert ours.k_buffer[0].any()
    assert ours.bytes_per_token == HEADS * DIM * 2 * dtype.itemsize
    assert ours.bytes_per_token * (SIZE + PAGE) == sum(ours.get_kv_size_bytes())


def test_the_drafters_pool_is_never_fp4(recipe_class, device):
    from sglang_fp4kv.draft_pool import DraftTokenToKVPool

    options = {
        "head_num": HEADS, "head_dim": DIM, "layer_num": 1, "device": str(device),
        "enable_memory_saver": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="drafter's pool must be .* got torch.float4_e2m1fn_x2"):
        DraftTokenToKVPool(SIZE, PAGE, torch.float4_e2m1fn_x2, **options)
    with pytest.raises(ValueError, match="with recipe 'nvfp4'"):
        DraftTokenToKVPool(
            SIZE, PAGE, torch.bfloat16, quant_method=packed_recipe(recipe_class, device), **options
        )
