"""Rules about whatever moves, shares or lays out KV in another way. Each returns facts, or None."""


def _on(launch, *names):
    asked = launch.asked(*names)
    return {"asked": f"{launch.asked('kv_cache_dtype')} {asked}"} if asked else None


def unified_memory(launch):
    return _on(launch, "enable_unified_memory", "enable_page_major_kv_layout")


def hierarchical_cache(launch):
    return _on(launch, "enable_hierarchical_cache")


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
