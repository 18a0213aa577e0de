"""How ``--kv-cache-dtype nvfp4 --attention-backend triton`` resolves inside SGLang.

Two steps of SGLang 0.5.23's argument pipeline are wrapped (srt/arg_groups/resolution_hooks.py).
Every combination other than NVFP4 on Triton goes to the step that was there before.
"""

import functools
import logging

from sglang.srt.arg_groups.overrides import (
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
    use_mla_backend,
)
from sglang.srt.arg_groups.speculative_hook import _resolve_speculative_algorithm_alias
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.runtime_context import get_server_args

from sglang_fp4kv import formats
from sglang_fp4kv.checkpoint_scales import check_scales, checkpoint_folder
from sglang_fp4kv.model_classes import never_windowed
from sglang_fp4kv.served import (
    BACKEND,
    DRAFT_DTYPE_DEFAULT,
    DRAFT_DTYPES,
    DRAFTERS,
    DRAFTERS_WITHOUT_MODEL,
    GATED_DELTA_TYPES,
    HOST_IO_BACKENDS,
    HOST_LAYOUTS,
)

logger = logging.getLogger(__name__)


def uses_packed_read(cfg):
    """Whether ``cfg`` asks for NVFP4 KV read by Triton in every phase.

    Raises: ValueError when only one of prefill and decode is Triton.
    """
    if cfg.kv_cache_dtype != "nvfp4":
        return False
    prefill = cfg.prefill_attention_backend or cfg.attention_backend
    decode = cfg.decode_attention_backend or cfg.attention_backend
    if BACKEND not in (prefill, decode):
        return False
    if prefill != decode:
        raise ValueError(
            "NVFP4 KV on Triton needs one backend for prefill and decode, got "
            f"prefill {prefill!r} and decode {decode!r}; pass --attention-backend triton alone"
        )
    return True


@functools.cache
def serves_packed_kv():
    """Whether this process's server has packed NVFP4 KV; asked in forward passes, and settled before the first."""
    return uses_packed_read(resolved_view(get_server_args()))


def resolve_prefill_dequant(server_args, previous):
    """Step ``handle_nvfp4_prefill_kv_dequant_dtype``: Triton needs no dequantized workspace."""
    cfg = resolving_view(server_args)
    if not uses_packed_read(cfg):
        previous(server_args)
        return
    if cfg.prefill_kv_cache_dequant_dtype != "auto":
        raise ValueError(
            f"--prefill-kv-cache-dequant-dtype={cfg.prefill_kv_cache_dequant_dtype} has no meaning "
            "with NVFP4 KV on Triton, which reads packed bytes; remove the flag"
        )


def plan_post_capture_sizing(original, server_args):
    """Post-capture sizing never applies to a quantized pool, so its graph reserve must stay.

    SGLang builds a quantized pool before graph capture whatever was planned
    (_build_mha_kv_pool in srt/mem_cache/kv_cache_configurator.py @ 0.5.23); with the sizing planned,
    the default memory fraction leaves no room for the graphs.
    """
    cfg = resolving_view(server_args)
    backends = (cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend)
    if cfg.kv_cache_dtype == "nvfp4" and BACKEND in backends:
        return False
    return original(server_args)


def _drafter(cfg):
    """The drafter as SGLang will resolve it (later than these steps): EAGLE for NEXTN, FROZEN_KV_MTP for
    a draft that reads the target's own K and V."""
    if cfg.speculative_algorithm is None:
        return None
    return _resolve_speculative_algorithm_alias(
        cfg.speculative_algorithm.upper(),
        cfg.speculative_draft_model_path,
        trust_remote_code=cfg.trust_remote_code,
    )


def unproven(server_args):
    """Sentences naming what is asked for and not served together with packed NVFP4 KV."""
    cfg = resolving_view(server_args)
    if use_mla_backend(server_args):
        return ["an MLA model"]
    model = model_config_of(server_args)
    drafter = _drafter(cfg)
    head_dim, v_head_dim = model.head_dim, model.v_head_dim
    recurrent = mambaish_config(model)
    other_drafter = drafter not in (None, "DFLASH")
    asked = {
        "--enable-unified-memory": cfg.enable_unified_memory,
        "--enable-page-major-kv-layout": cfg.enable_page_major_kv_layout,
        f"PD disaggregation (--disaggregation-mode {cfg.disaggregation_mode})": (
            cfg.disaggregation_mode != "null"
        ),
        **_hierarchical_cache(cfg, drafter, recurrent),
        "--enable-lmcache": cfg.enable_lmcache,
        "--enable-flexkv": cfg.enable_flexkv or cfg.radix_cache_backend == "flexkv",
        "--enable-unified-cache-external-linker": cfg.enable_unified_cache_external_linker,
        "--enable-kv-cache-sharding": cfg.enable_kv_cache_sharding,
        "--enable-hisparse": cfg.enable_hisparse,
        f"--dcp-size {cfg.dcp_size}": cfg.dcp_size > 1,
        "--enable-deterministic-inference": cfg.enable_deterministic_inference,
        # A mixed batch sends decodes through prefill, which reads their own K and V in BF16.
        "--enable-mixed-chunk": cfg.enable_mixed_chunk,
        # SGLang reads it for fp8_e4m3 alone (load_kv_cache_scales in load_model_utils.py) and says nothing.
        f"--quantization-param-path {cfg.quantization_param_path}": cfg.quantization_param_path is not None,
        f"--speculative-algorithm {drafter}": drafter not in (None, *DRAFTERS),
        "--enable-multi-layer-eagle": cfg.enable_multi_layer_eagle,
        f"{drafter} on a {model.dtype} target": drafter not in (None, *DRAFTERS_WITHOUT_MODEL)
        and str(model.dtype) == "torch.float16",
        "a sliding-window KV pool": model.is_hybrid_swa,
        "attention sinks": model.has_attention_sinks,
        "recurrent layers other than gated-delta ones": recurrent is not None and not _gated_delta(model),
        f"{drafter} on a model with recurrent layers": other_drafter and recurrent is not None,
        f"{drafter} on a model with windowed layers": other_drafter and _windowed(model),
        f"head_dim {head_dim}, which is not a multiple of {formats.BLOCK_SIZE}": (
            head_dim % formats.BLOCK_SIZE != 0
        ),
        f"K and V of different width (head_dim {head_dim}, v_head_dim {v_head_dim})": (
            head_dim != v_head_dim
        ),
    }
    return [what for what, present in asked.items() if present]


def _gated_delta(model):
    """Whether the recurrent layers are the gated-delta ones that were tried; SGLang counts other kinds among them."""
    config = hybrid_gdn_config(model)
    return config is not None and config.model_type.removesuffix("_text") in GATED_DELTA_TYPES


def _windowed(model):
    """Whether layers have a window in the one pool, as the configuration class has them and SGLang's class keeps to."""
    if never_windowed(getattr(model.hf_config, "architectures", None) or ()):
        return False
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return "sliding_attention" in kinds
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)


def _hierarchical_cache(cfg, drafter, recurrent):
    """What the host pool of sglang_fp4kv.host_pool does not carry or was not proven with."""
    on = cfg.enable_hierarchical_cache
    layout, backend = cfg.hicache_mem_layout, cfg.hicache_io_backend
    return {
        f"--hicache-storage-backend {cfg.hicache_storage_backend}": on
        and cfg.hicache_storage_backend is not None,
        f"--hicache-mem-layout {layout}": on and layout not in HOST_LAYOUTS,
        f"--hicache-io-backend {backend}": on and backend not in HOST_IO_BACKENDS,
        f"--enable-hierarchical-cache with {drafter}": on and drafter not in (None, "DFLASH"),
        "--enable-hierarchical-cache on a model with recurrent layers": on and recurrent is not None,
    }


def resolve_kv4(server_args, previous):
    """Step ``handle_kv4_compatibility``: what packed NVFP4 KV serves, and the drafter's dtype.

    Raises: ValueError naming everything that is asked for and not served.
    """
    cfg = resolving_view(server_args)
    if not uses_packed_read(resolved_view(server_args)):
        previous(server_args)
        return
    refused = unproven(server_args)
    if refused:
        raise ValueError("NVFP4 KV on Triton does not serve " + "; nor ".join(refused))
    check_scales(checkpoint_folder(cfg.model_path, cfg.revision, cfg.download_dir))
    if _drafter(cfg) in (None, *DRAFTERS_WITHOUT_MODEL):
        return
    dtype = cfg.speculative_draft_kv_cache_dtype
    if dtype is None:
        declare_resolution(
            server_args,
            "fp4kv",
            speculative_draft_kv_cache_dtype=DRAFT_DTYPE_DEFAULT,
        )
        logger.info("fp4kv: the drafter's KV dtype was left out; it is %s", DRAFT_DTYPE_DEFAULT)
    elif dtype not in DRAFT_DTYPES:
        raise ValueError(
            f"--speculative-draft-kv-cache-dtype={dtype} next to NVFP4 KV must be one of "
            f"{', '.join(DRAFT_DTYPES)}"
        )
