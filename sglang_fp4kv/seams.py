"""The places in SGLang 0.5.23 this kit leans on, checked by name and signature at start.

A seam is private unless SGLang documents it as an extension point, so a changed release must be
noticed before a pool is built, not after a wrong answer.
"""

import inspect
import pkgutil
from importlib.metadata import version

RELEASE = "0.5.23"

# Dotted path: parameter names in order. None: a class or value whose presence is enough.
SEAMS = {
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook": ("name",),
    "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned": ("server_args",),
    "sglang.srt.arg_groups.kv_cache_hook.handle_nvfp4_prefill_kv_dequant_dtype": ("server_args",),
    "sglang.srt.arg_groups.kv_cache_hook.handle_kv4_compatibility": ("server_args",),
    "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias": (
        "speculative_algorithm", "speculative_draft_model_path", "trust_remote_code", "kwargs",
    ),
    "sglang.srt.layers.attention.attention_registry.create_triton_backend": ("runner",),
    "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS": None,
    "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_extend": (
        "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks", "score_mod",
        "aux_tensors",
    ),
    "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_decode": (
        "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks", "score_mod",
        "aux_tensors",
    ),
    "sglang.srt.layers.attention.triton_backend.logit_capping_mod": (
        "logit_capping_method", "logit_cap",
    ),
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.KV_CACHE_QUANT_REGISTRY": None,
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.NVFP4KVCacheMethod.compute_cell_size":
        ("self", "head_num", "head_dim", "num_layers", "kv_size"),
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method.NVFP4KVCacheMethod.create_buffers":
        ("self", "size", "head_num", "head_dim", "layer_num", "device"),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class": (
        "self", "kind", "default",
    ),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer": (
        "self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale",
        "layer_id_override", "dcp_kv_mask",
    ),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer_prefix_valid": (
        "self", "layer", "loc_2d", "commit_lens", "cache_k", "cache_v", "k_scale", "v_scale",
        "layer_id_override",
    ),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_cpu_copy": (
        "self", "indices", "mamba_indices", "req_pool_index",
    ),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.load_cpu_copy": (
        "self", "kv_cache_cpu", "indices", "mamba_indices", "req_pool_index",
    ),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers": ("self",),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._mha_buffer_info": ("self",),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._mha_buffers": ("self",),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._mha_scale_buffers": ("self",),
    "sglang.srt.mem_cache.memory_pool.unwrap_write_loc": ("loc_info",),
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__": ("self", "kvc"),
    "sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls": ("buffer_info",),
    "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.backup_from_device_all_layer": (
        "self", "device_pool", "host_indices", "device_indices", "io_backend",
    ),
    "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer": (
        "self", "device_pool", "host_indices", "device_indices", "layer_id", "io_backend", "is_draft",
    ),
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool._transfer_full_attention_id": ("self", "layer_id"),
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool._wait_for_layer": ("self", "layer_id"),
    "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel.decode": (
        "self", "q", "k", "v", "a", "b", "A_log", "dt_bias", "ssm_states", "cache_indices", "query_start_loc",
        "kwargs",
    ),
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes": (
        "self", "available_bytes", "page_size",
    ),
    "sglang.srt.layers.quantization.fp4_utils.get_fp4_gemm_runner_backend": (),
    "sglang.srt.models.qwen3_5._maybe_enable_silu_fp4_quant_fusion": ("mlp",),
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.weight_update_runners": ("self",),
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    ".get_internal_state": ("self", "recv_req"),
    "sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy": ("attn_backend",),
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._init_fused_kv_helper": ("self",),
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_fused": (
        "self", "ctx_hidden", "ctx_positions", "ctx_cache_loc", "ctx_cache_loc_2d", "commit_lens",
    ),
    "sglang.srt.speculative.dflash_utils.validate_dflash_request": ("req", "enable_overlap"),
    "sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin.validate_dllm_request": ("self", "req"),
    "sglang.srt.speculative.dflash_utils.build_speculative_verify_target_probs": (
        "next_token_logits", "sampling_info", "draft_token_num", "bs", "max_top_k",
        "uniform_top_k_value", "use_sparse_topk",
    ),
    "sglang.kernels.ops.speculative.dspark.dspark_accept._accept_sampling_core": (
        "candidates", "target_logits", "draft_probs", "sampling_info", "draft_input", "gamma",
        "verify_num_draft_tokens", "cutoff_verify_lens", "block_verification",
    ),
}


def check_release(release=RELEASE):
    """Raises: RuntimeError when the installed SGLang is not ``release``."""
    installed = version("sglang")
    if installed != release:
        raise RuntimeError(f"fp4kv is made for sglang {release}, but {installed} is installed")


def check_seams(seams=SEAMS):
    """Compares every seam with the installed SGLang; imports the modules they are in.

    Raises: RuntimeError listing each seam that is missing or has other parameters.
    """
    problems = []
    for path, expected in seams.items():
        try:
            target = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            problems.append(f"{path}: {error}")
            continue
        if expected is None:
            continue
        found = tuple(inspect.signature(inspect.unwrap(target)).parameters)
        if found != expected:
            problems.append(f"{path}: parameters are {found}, {expected} expected")
    if problems:
        raise RuntimeError("SGLang does not have the seams fp4kv needs: " + "; ".join(problems))
