"""Rules about whatever moves, shares or lays out KV in another way. Each returns facts, or None."""

from launcher.model_kinds import RECURRENT
from sglang_fp4kv.formats import BLOCK_SIZE, scale_bytes
from sglang_fp4kv.planner import rank_heads
from sglang_fp4kv.served import HOST_IO_BACKENDS, HOST_KERNEL_ROW_BYTES, HOST_LAYOUTS


def _on(launch, *names):
    asked = launch.asked(*names)
    return {"asked": f"{launch.asked('kv_cache_dtype')} {asked}"} if asked else None


def unified_memory(launch):
    return _on(launch, "enable_unified_memory", "enable_page_major_kv_layout")


def hierarchical_cache(launch):
    """That of FP4 KV which this kit does not read: its host pool has no scales."""
    ours = launch.kv_dtype == "nvfp4" and launch.on_triton
    return None if ours else _on(launch, "enable_hierarchical_cache")


def _carried(launch):
    """Whether the host pool is ours (sglang_fp4kv/host_pool.py)."""
    return launch.flags.enable_hierarchical_cache and hierarchical_cache(launch) is None


def hierarchical_cache_way(launch):
    if not _carried(launch):
        return None
    backends = ("direct",) if launch.on_cpu else HOST_IO_BACKENDS
    wrong = {
        "hicache_storage_backend": launch.flags.hicache_storage_backend is not None,
        "hicache_mem_layout": launch.flags.hicache_mem_layout not in HOST_LAYOUTS,
        "hicache_io_backend": launch.flags.hicache_io_backend not in backends,
    }
    names = [name for name, bad in wrong.items() if bad]
    return _on(launch, "enable_hierarchical_cache", *names) if names else None


def hierarchical_cache_without_radix_cache(launch):
    alone = launch.flags.disable_radix_cache and launch.flags.enable_hierarchical_cache
    return _on(launch, "enable_hierarchical_cache", "disable_radix_cache") if alone else None


def hierarchical_cache_rows(launch):
    target = launch.target
    if not _carried(launch) or launch.on_cpu or launch.flags.hicache_io_backend != "kernel":
        return None
    if target is None or not target.head_dim or not target.kv_heads or target.head_dim % BLOCK_SIZE:
        return None
    try:
        heads = rank_heads(target.kv_heads, max(1, launch.flags.tp_size))
    except ValueError:  # SGLang stops at such heads by itself
        return None
    row = heads * scale_bytes(target.head_dim)
    if row % HOST_KERNEL_ROW_BYTES == 0:
        return None
    asked = _on(launch, "enable_hierarchical_cache", "hicache_io_backend")["asked"]
    return {
        "asked": f"{asked} for {target.path}",
        "row": row,
        "multiple": HOST_KERNEL_ROW_BYTES,
    }


def hierarchical_cache_companions(launch):
    if not _carried(launch):
        return None
    recurrent = launch.target is not None and launch.target.trait(RECURRENT) is not None
    beside = [f"with {launch.drafter}"] if launch.drafter not in (None, "DFLASH") else []
    beside += ["on a model with recurrent layers"] if recurrent else []
    if not beside:
        return None
    asked = _on(launch, "enable_hierarchical_cache", "speculative_algorithm")
    return asked | {"beside": " ".join(beside)}


def lmcache(launch):
    return _on(launch, "enable_lmcache")


def flexkv(launch):
    named = launch.flags.radix_cache_backend == "flexkv"
    return _on(launch, "enable_flexkv", *(["radix_cache_backend"] if named else []))


def external_linker(launch):
    return _on(launch, "enable_unified_cache_external_linker")


def pd_disaggregation(launch):
    split = launch.flags.disaggregation_mode != "null"
    return _on(launch, "enable_pd_role_switch", *(["disaggregation_mode"] if split else []))


def decode_context_parallel(launch):
    return _on(launch, "dcp_size") if launch.flags.dcp_size > 1 else None


def kv_sharding(launch):
    return _on(launch, "enable_kv_cache_sharding")


def hisparse(launch):
    return _on(launch, "enable_hisparse")
