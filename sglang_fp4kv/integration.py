"""Registers the kit with SGLang 0.5.23; the one place that does so.

SGLang calls :func:`activate` in each of its processes (entry point group ``sglang.srt.plugins``).
It logs and swallows a plugin that fails, so :mod:`sglang_fp4kv.proof` checks the result in the
scheduler process, where a patch calls it.
"""

import logging

from sglang_fp4kv.draft_writes import APPEND_FUSED, INIT_HELPER
from sglang_fp4kv.marlin import FUSION, SUMS, fuse_unless_marlin, sum_in_order
from sglang_fp4kv.seams import check_release, check_seams

logger = logging.getLogger(__name__)

POOL_CLASS = (
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
)
POOL_SIZES = (
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes"
)
POOL_CELL = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__"
INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state"
    ".SchedulerInternalStateController.get_internal_state"
)
POST_CAPTURE = "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned"
HOST_POOL_CLASS = "sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls"
VERIFY_PROBS = "sglang.srt.speculative.dflash_utils.build_speculative_verify_target_probs"
VERIFY_REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
EVERY_REQUEST = "sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin.validate_dllm_request"
VERIFY_DRAWN = "sglang.kernels.ops.speculative.dspark.dspark_accept._accept_sampling_core"
HOOKED = (
    POOL_CLASS, POOL_SIZES, POOL_CELL, HOST_POOL_CLASS, INTERNAL_STATE, POST_CAPTURE, INIT_HELPER, APPEND_FUSED,
    VERIFY_PROBS, VERIFY_REQUEST, VERIFY_DRAWN, EVERY_REQUEST, FUSION, SUMS,
)  # fmt: skip

_active = False


def inactive_parts():
    """What of :func:`activate` did not take effect in this process; empty when all of it did.

    SGLang applies the registered hooks after the plugins ran and logs those that fail.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if not _active:
        return ["the plugin"]
    return [target for target in HOOKED if target not in HookRegistry._patched]


def activate():
    """Registers recipe, resolution steps, pools, backend and the report.

    Raises: RuntimeError when the installed SGLang is not the pinned release.
    """
    global _active
    if _active:
        return
    check_release()

    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import KV_CACHE_QUANT_REGISTRY
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_fp4kv import draft_sizing, draft_writes, proof, readiness, resolution, verify_sampling
    from sglang_fp4kv.recipe import PackedNVFP4Method

    KV_CACHE_QUANT_REGISTRY["nvfp4"] = PackedNVFP4Method
    register_resolution_hook("handle_nvfp4_prefill_kv_dequant_dtype")(
        resolution.resolve_prefill_dequant
    )
    register_resolution_hook("handle_kv4_compatibility")(resolution.resolve_kv4)
    HookRegistry.register(POOL_CLASS, _pool_class, HookType.AROUND)
    HookRegistry.register(POOL_SIZES, proof.record_budget, HookType.AROUND)
    HookRegistry.register(POOL_CELL, draft_sizing.price_draft, HookType.AROUND)
    HookRegistry.register(INTERNAL_STATE, proof.add_report, HookType.AFTER)
    HookRegistry.register(POST_CAPTURE, resolution.plan_post_capture_sizing, HookType.AROUND)
    HookRegistry.register(INIT_HELPER, draft_writes.note_why_not_fused, HookType.AROUND)
    HookRegistry.register(APPEND_FUSED, draft_writes.note_failed_write, HookType.AROUND)
    HookRegistry.register(HOST_POOL_CLASS, _host_pool_class, HookType.AROUND)
    HookRegistry.register(VERIFY_PROBS, verify_sampling.target_probs, HookType.AROUND)
    HookRegistry.register(VERIFY_DRAWN, verify_sampling.accept_with_min_p, HookType.AROUND)
    HookRegistry.register(VERIFY_REQUEST, verify_sampling.refuse_penalties, HookType.AROUND)
    HookRegistry.register(EVERY_REQUEST, verify_sampling.refuse_inexact, HookType.AROUND)
    HookRegistry.register(FUSION, fuse_unless_marlin, HookType.AROUND)
    HookRegistry.register(SUMS, sum_in_order, HookType.AROUND)
    if readiness.wanted():
        HookRegistry.register(readiness.HTTP_SERVER, readiness.hold_back, HookType.AROUND)
    _wrap_triton_backend()
    _active = True
    logger.info("fp4kv: active (NVFP4 KV for the Triton backend, FP8 or BF16 KV for its drafter)")


def _pool_class(original, configurator, *, kind, default):
    """Our pools for a server whose target KV is NVFP4 on Triton, SGLang's choice elsewhere.

    Raises: RuntimeError when a seam is not as it was read; ValueError for another pool layout.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_fp4kv.draft_pool import DraftTokenToKVPool
    from sglang_fp4kv.pool import NVFP4TokenToKVPool
    from sglang_fp4kv.resolution import uses_packed_read

    if kind != "mha" or not uses_packed_read(resolved_view(configurator.server_args)):
        return original(configurator, kind=kind, default=default)
    check_seams()
    if default is not MHATokenToKVPool:
        raise ValueError(f"NVFP4 KV cannot be built as a {default.__name__}")
    return DraftTokenToKVPool if configurator.is_draft_worker else NVFP4TokenToKVPool


def _host_pool_class(original, buffer_info):
    """Our host pool for a packed NVFP4 pool under the hierarchical cache, SGLang's choice elsewhere."""
    from sglang_fp4kv.host_pool import NVFP4TokenToKVPoolHost, is_packed

    return NVFP4TokenToKVPoolHost if is_packed(buffer_info) else original(buffer_info)


def _wrap_triton_backend():
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    stock = ATTENTION_BACKENDS["triton"]

    @register_attention_backend("triton")
    def create_triton_backend(runner):
        from sglang_fp4kv.pool import find_packed_pool

        pool = runner.token_to_kv_pool
        if find_packed_pool(pool) is None:
            return stock(runner)
        from sglang_fp4kv.attention import TritonAttnBackend
        from sglang_fp4kv.recurrent import decode_as_verify

        if getattr(pool, "mamba_pool", None) is not None:
            decode_as_verify()
        return TritonAttnBackend(runner)
