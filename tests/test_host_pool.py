"""NVFP4 in host memory: what the hierarchical cache writes back and loads again is the same bytes.

On a GPU every I/O backend and layout of SGLang's that can be served is copied with SGLang's own kernels;
on a CPU the ones that the embedded platform has.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_fp4kv import formats

pytestmark = pytest.mark.interpreter

LAYERS, HEADS, SLOTS, HOST_TOKENS = 3, 2, 256, 320
# I/O backend and layout, and whether a CPU has the copy.
WAYS = {
    ("direct", "layer_first"): True,
    ("direct", "page_first_direct"): True,
    ("kernel", "layer_first"): False,
    ("kernel", "page_first"): False,
}


@pytest.fixture(scope="module", autouse=True)
def copies(device):
    if device.type == "cpu":
        from sglang_fp4kv.embedded import host_transfers

        host_transfers.install()


@pytest.fixture(autouse=True)
def allocated(device, monkeypatch):
    """Every host pool with a buffer; its registration is given back at the end, also where a test failed.

    CUDA's registration outlives SGLang's mapping, and the next buffer at that address could not be registered.
    """
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    pools, allocate = [], HostKVCache._allocate_host_buffer

    def recorded(pool):
        pools.append(pool)
        allocate(pool)

    monkeypatch.setattr(HostKVCache, "_allocate_host_buffer", recorded)
    yield pools
    for pool in pools:
        HostKVCache.destroy(pool)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # fails here, not in the next test, where a call left its error unread
        torch.cuda.synchronize()


def device_pool(device, page_size, head_dim=128, heads=HEADS):
    from sglang_fp4kv.pool import NVFP4TokenToKVPool
    from sglang_fp4kv.recipe import PackedNVFP4Method

    recipe = PackedNVFP4Method(num_layers=LAYERS, device=device, page_size=page_size)
    recipe.configure_attention_backends("triton", "triton")
    return NVFP4TokenToKVPool(
        SLOTS, page_size, torch.float4_e2m1fn_x2, head_num=heads, head_dim=head_dim, layer_num=LAYERS,
        device=str(device), enable_memory_saver=False, quant_method=recipe,
    )  # fmt: skip


def host_pool(pool, layout, monkeypatch, io_backend="direct", **more):
    from sglang_fp4kv import host_pool as module

    monkeypatch.setattr(module, "get_memory", lambda: SimpleNamespace(hicache_io_backend=io_backend))
    info = pool.get_device_pool_infos()[0].buffer_info
    return module.NVFP4TokenToKVPoolHost(
        info, 2.0, 0, pool.page_size, layout, device_capacity_tokens=SLOTS, start_layer=0, end_layer=LAYERS,
        **{"host_token_capacity": HOST_TOKENS, **more},
    )  # fmt: skip


def buffers(pool):
    """Every byte of the pool's slots: K codes, K scales, V codes, V scales of each layer."""
    return [side for layer in pool._layer_buffers() for side in layer]


def fill(pool, seed):
    generator = torch.Generator().manual_seed(seed)
    for side in buffers(pool):
        side.copy_(torch.randint(0, 256, side.shape, generator=generator, dtype=torch.uint8))


def pages(count, page_size, slots, seed):
    """Slots of ``count`` whole pages in a random order, none of them the first page."""
    chosen = 1 + torch.randperm(slots // page_size - 1, generator=torch.Generator().manual_seed(seed))[:count]
    return (chosen[:, None] * page_size + torch.arange(page_size)).flatten()


def moved(host, backend, device, host_slots, device_slots, *, writing):
    """Indices where SGLang's controller puts them (HiCacheController.move_indices)."""
    if backend == "direct":
        return host_slots, device_slots
    stays = writing and host.can_use_write_back_jit
    return (host_slots if stays else host_slots.to(device)), device_slots.to(device)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def transfer_stream(device):
    """A stream of its own, as SGLang's L2TransferEngine has: CUDA takes no batch of copies in the default one."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()


def round_trip(pool, host, backend, device, host_slots, device_slots, back):
    """Writes ``device_slots`` back to the host, scrambles the device, loads them into ``back``."""
    indices = moved(host, backend, device, host_slots, device_slots, writing=True)
    synchronize(device)
    with transfer_stream(device):
        host.backup_from_device_all_layer(pool, *indices, backend)
    synchronize(device)
    fill(pool, seed=2)
    indices = moved(host, backend, device, host_slots, back, writing=False)
    synchronize(device)
    with transfer_stream(device):
        for layer in range(LAYERS):
            host.load_to_device_per_layer(pool, *indices, layer, backend)
    synchronize(device)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("backend", "layout"), WAYS)
def test_every_byte_comes_back(backend, layout, page_size, device, monkeypatch):
    if device.type == "cpu" and not WAYS[backend, layout]:
        pytest.skip("SGLang's copy kernels need a GPU")
    pool = device_pool(device, page_size)
    host = host_pool(pool, layout, monkeypatch, backend)
    count = 3 if page_size == 64 else 5
    fill(pool, seed=1)
    before = [side.clone() for side in buffers(pool)]
    device_slots = pages(count, page_size, SLOTS, seed=3)
    back = pages(count, page_size, SLOTS, seed=4)
    host_slots = pages(count, page_size, HOST_TOKENS, seed=5)
    round_trip(pool, host, backend, device, host_slots, device_slots, back)
    scrambled = device_pool(device, page_size)
    fill(scrambled, seed=2)
    for side, old, other in zip(buffers(pool), before, buffers(scrambled), strict=True):
        wanted = other.clone()
        wanted[back.to(device)] = old[device_slots.to(device)]
        assert torch.equal(side, wanted)


def test_a_token_takes_what_the_format_says(device, monkeypatch):
    pool = device_pool(device, 16)
    by_ratio = host_pool(pool, "layer_first", monkeypatch, host_token_capacity=None)
    assert by_ratio.size == by_ratio.scales.size == 2 * SLOTS + 16
    per_token = formats.bytes_per_token(128, HEADS, LAYERS)
    assert by_ratio.size_per_token == pool.bytes_per_token == per_token
    held = sum(p.kv_buffer.nbytes for p in (by_ratio, by_ratio.scales))
    assert held == per_token * by_ratio.size


def test_only_a_packed_pool_gets_our_host_pool(device):
    from sglang.srt.mem_cache.pool_host.mha import (
        MHATokenToKVPoolHost,
        get_mha_host_pool_cls,
    )

    from sglang_fp4kv.draft_pool import DraftTokenToKVPool
    from sglang_fp4kv.host_pool import NVFP4TokenToKVPoolHost
    from sglang_fp4kv.integration import _host_pool_class

    draft = DraftTokenToKVPool(
        SLOTS, 1, torch.float8_e4m3fn, head_num=HEADS, head_dim=128, layer_num=1, device=str(device),
        enable_memory_saver=False,
    )  # fmt: skip
    chosen = [
        _host_pool_class(get_mha_host_pool_cls, pool.get_device_pool_infos()[0].buffer_info)
        for pool in (device_pool(device, 1), draft)
    ]
    assert chosen == [NVFP4TokenToKVPoolHost, MHATokenToKVPoolHost]


def test_sglangs_own_host_pool_refuses_the_scales(device):
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    info = device_pool(device, 1).get_device_pool_infos()[0].buffer_info
    with pytest.raises(ValueError, match="do not support KV scale layout 'token'"):
        MHATokenToKVPoolHost(info, 2.0, 0, 1, "layer_first", device_capacity_tokens=SLOTS, start_layer=0, end_layer=3)


def test_both_buffers_are_given_back(device, monkeypatch, allocated):
    host = host_pool(device_pool(device, 16), "layer_first", monkeypatch)
    assert allocated == [host, host.scales]
    host.destroy()
    assert host.kv_buffer is None and host.scales.kv_buffer is None


def test_what_cannot_be_carried_is_refused(device, monkeypatch, allocated):
    from msgspec.structs import replace

    pool = device_pool(device, 16)
    with pytest.raises(ValueError, match="needs one of the layouts .* got 'page_head'"):
        host_pool(pool, "page_head", monkeypatch)
    info = pool.get_device_pool_infos()[0].buffer_info
    with pytest.raises(NotImplementedError, match="takes no draft layers"):
        host_pool(pool, "layer_first", monkeypatch, draft_buffer_infos=(info,))
    assert not allocated
    host = host_pool(pool, "layer_first", monkeypatch)
    pages_of_storage = (
        lambda: host.get_data_page(0),
        host.get_dummy_flat_data_page,
        lambda: host.set_from_flat_data_page(0, None),
        lambda: host.get_page_buffer_meta(None),
        lambda: host.get_split_heads_page_buffer_meta(None, 2),
    )
    for page in pages_of_storage:
        with pytest.raises(NotImplementedError, match="cannot go from the host to storage"):
            page()
    wrong = replace(info, scales=replace(info.scales, k=info.buffers.k))
    monkeypatch.setattr(pool, "_mha_buffer_info", lambda: wrong)
    with pytest.raises(ValueError, match=r"block scales of shape \(272, 2, 64\) do not belong to 2 heads of 8"):
        host_pool(pool, "layer_first", monkeypatch)
    monkeypatch.setattr(pool, "_mha_buffer_info", lambda: replace(info, scales=None))
    with pytest.raises(ValueError, match="needs codes with a scale a block, got torch.uint8 rows"):
        host_pool(pool, "layer_first", monkeypatch)


def test_scale_rows_that_the_kernels_cannot_copy_are_refused(device, monkeypatch):
    from sglang_fp4kv.host_pool import NVFP4TokenToKVPoolHost

    host_pool(device_pool(device, 1, head_dim=64, heads=1), "layer_first", monkeypatch)  # direct
    for kind, backend, refused in (("cuda", "kernel", True), ("cuda", "direct", False), ("cpu", "kernel", False)):
        held = SimpleNamespace(_transfer_device=torch.device(kind), head_num=1, _head_dim=64)
        monkeypatch.setattr("sglang_fp4kv.host_pool.get_memory", lambda b=backend: SimpleNamespace(hicache_io_backend=b))
        if refused:
            with pytest.raises(ValueError, match="take 4 bytes a layer, .* copies multiples of 8; use .* direct"):
                NVFP4TokenToKVPoolHost._check_scale_rows(held)
        else:
            NVFP4TokenToKVPoolHost._check_scale_rows(held)
