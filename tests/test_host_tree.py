"""SGLang's radix tree over an NVFP4 pool and a drafter's: evicted to the host, and loaded back when it is matched.

The tree, its host pools and the controller are SGLang's own, without a server or a model. What a prefix held
on the device has to be there again in other slots, codes, scales and the drafter's K and V alike.
"""

from array import array
from types import SimpleNamespace

import pytest
import torch

from test_host_pool import (  # noqa: F401  fixtures among them
    LAYERS,
    SLOTS,
    WAYS,
    allocated,
    buffers,
    copies,
    device_pool,
    fill,
    synchronize,
)

pytestmark = pytest.mark.interpreter

TOKENS = 128


@pytest.fixture
def tree(device, monkeypatch):
    """Makes the parts of a server with a hierarchical cache; see the returned namespace."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.kv_cache_builder import maybe_register_hicache_draft
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_context
    from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode, HiCacheDraftPlan

    from sglang_fp4kv.draft_pool import DraftTokenToKVPool
    from sglang_fp4kv.integration import _host_pool_class

    stock = mha.get_mha_host_pool_cls
    monkeypatch.setattr(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.get_mha_host_pool_cls",
        lambda info: _host_pool_class(stock, info),
    )
    made = []

    def make(page_size, backend, layout, policy):
        args = get_context().override_server_args(
            page_size=page_size, enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_size=0,
            hicache_io_backend=backend, hicache_mem_layout=layout, hicache_write_policy=policy,
        )  # fmt: skip
        server_args = args.install()
        pool = device_pool(device, page_size)
        draft = DraftTokenToKVPool(
            SLOTS, page_size, torch.float8_e4m3fn, head_num=1, head_dim=64, layer_num=1, device=str(device),
            enable_memory_saver=False,
        )  # fmt: skip
        paged = {"page_size": page_size} if page_size > 1 else {}
        allocator = (PagedTokenToKVPoolAllocator if paged else TokenToKVPoolAllocator)(
            size=SLOTS, dtype=pool.dtype, device=str(device), kvcache=pool, need_sort=False, **paged
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=2, max_context_len=SLOTS, device=str(device), enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
        )
        cache = UnifiedRadixCache(params)
        cache.init_hicache(server_args, params)
        plan = HiCacheDraftPlan(mode=HiCacheDraftMode.SIDECAR, device_pools=(draft,))
        maybe_register_hicache_draft(tree_cache=cache, draft_plan=plan)
        made.append((cache, args))
        return SimpleNamespace(cache=cache, pool=pool, draft=draft, allocator=allocator)

    yield make
    synchronize(device)
    for cache, args in reversed(made):
        cache.release_host_resources()
        args.restore()


def held(served, slots):
    """Every byte of ``slots`` in both pools."""
    draft = [side.view(torch.uint8) for side in (*served.draft.k_buffer, *served.draft.v_buffer)]
    return [side[slots].clone() for side in (*buffers(served.pool), *draft)]


def scramble(served, seed):
    fill(served.pool, seed)
    generator = torch.Generator().manual_seed(seed)
    for side in (*served.draft.k_buffer, *served.draft.v_buffer):
        raw = side.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def settle(cache, device):
    """Lets what was submitted finish, as the scheduler does between two batches.

    A look at the events submits what write_through has queued, so that its copy is done at a later one.
    """
    cache.check_hicache_events()
    synchronize(device)
    cache.check_hicache_events()
    assert not cache.ongoing_write_through


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("backend", "layout"), WAYS)
def test_a_prefix_is_evicted_to_the_host_and_loaded_back(tree, backend, layout, page_size, policy, device):
    if device.type == "cpu" and not WAYS[backend, layout]:
        pytest.skip("SGLang's copy kernels need a GPU")
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictParams,
        InitLoadBackParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey

    served = tree(page_size, backend, layout, policy)
    cache, allocator = served.cache, served.allocator
    scramble(served, seed=1)
    slots = allocator.alloc(TOKENS)
    wanted = held(served, slots)
    key = RadixKey(array("q", range(100, 100 + TOKENS)))
    cache.insert(InsertParams(key=key, value=slots))
    settle(cache, device)
    assert cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == TOKENS

    cache.evict(EvictParams(num_tokens=TOKENS))
    settle(cache, device)
    assert allocator.available_size() == SLOTS
    scramble(served, seed=2)
    others = allocator.alloc(64)  # so that the prefix comes back to other slots

    match = cache.match_prefix(MatchPrefixParams(key=key))
    assert (match.device_prefix_len, match.host_hit_length) == (0, TOKENS)
    request = SimpleNamespace(
        rid="r", last_node=match.last_device_node, swa_host_hit_length=0, mamba_host_hit_length=0, kv=ReqKvInfo()
    )
    loaded, node = cache.init_load_back(
        InitLoadBackParams(best_match_node=match.best_match_node, host_hit_length=TOKENS, req=request)
    )
    assert loaded == TOKENS
    cache.ready_to_load_host_cache()
    settle(cache, device)
    back = cache.tree_core.collect_full_device_indices(node, match.last_device_node)
    assert len(back) == TOKENS and not set(back.tolist()) & set(others.tolist())
    assert all(torch.equal(now, then) for now, then in zip(held(served, back), wanted, strict=True))
    assert len(wanted) == 4 * LAYERS + 2
