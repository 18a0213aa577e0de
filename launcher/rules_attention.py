"""Rules about backends, GPU, KV dtypes and execution modes. Each returns facts for its text, or None."""

from launcher.launch import FP4
from launcher.probe import ENTRY_VARIABLES
from sglang_fp4kv.served import BACKEND

BLACKWELL = ((10, 0), (10, 3), (12, 0), (12, 1))
PROVEN_CAPABILITY = (9, 0)  # the GPU of tests/bench/results/h200_pair.json and h200x2_pair.json
PROVEN_TP = (1, 2)  # tensor-parallel sizes of these two, on one host
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def _facts(launch, *names, **facts):
    prefill, decode = (backend or "SGLang's default" for backend in launch.backends)
    return {"asked": launch.asked(*names), "prefill": prefill, "decode": decode, **facts}


def _drafted_block(launch):
    return launch.drafter is not None and launch.drafter != "NGRAM"


def backend_is_not_triton(launch):
    told = (nvfp4_drafted_on_flashinfer, nvfp4_drafted_on_trtllm, sglang_refuses_the_backend)
    if BACKEND in launch.backends or any(rule(launch) for rule in told):
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS)


def sglang_refuses_the_backend(launch):
    if BACKEND in launch.backends or nvfp4_drafted_on_flashinfer(launch) or nvfp4_drafted_on_trtllm(launch):
        return None
    prefill, on_sm120 = launch.backends[0], launch.gpu is not None and launch.gpu.capability[0] == 12
    served = prefill in (None, "flashinfer") or (prefill == "trtllm_mha" and not on_sm120)
    if served and launch.flags.decode_attention_backend in (None, "trtllm_mha"):
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS)


def nvfp4_drafted_on_flashinfer(launch):
    drafted = _drafted_block(launch) and BACKEND not in launch.backends
    if not drafted or launch.effective_backends[0] != "flashinfer":
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS, "speculative_algorithm", drafter=launch.drafter)


def nvfp4_drafted_on_trtllm(launch):
    drafted = launch.drafter in ("DFLASH", "DSPARK") and BACKEND not in launch.backends
    if not drafted or launch.effective_backends[0] != "trtllm_mha":
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS, "speculative_algorithm", drafter=launch.drafter)


def prefill_and_decode_differ(launch):
    if BACKEND not in launch.backends or launch.on_triton:
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS)


def stock_nvfp4_needs_blackwell(launch):
    if launch.gpu is None or BACKEND in launch.backends or launch.gpu.capability in BLACKWELL:
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS, sm=launch.gpu.sm)


def dequant_dtype_has_no_meaning(launch):
    asked = launch.flags.prefill_kv_cache_dequant_dtype
    if asked == "auto" or (launch.kv_dtype == "nvfp4" and BACKEND not in launch.backends):
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS, "prefill_kv_cache_dequant_dtype", dtype=asked)


def scales_file_is_not_read(launch):
    if launch.flags.quantization_param_path is None:
        return None
    return _facts(launch, "kv_cache_dtype", "quantization_param_path")


def deterministic(launch):
    if not launch.flags.enable_deterministic_inference:
        return None
    return _facts(launch, "kv_cache_dtype", "enable_deterministic_inference")


def mixed_chunk(launch):
    if not launch.flags.enable_mixed_chunk:
        return None
    return _facts(launch, "kv_cache_dtype", "enable_mixed_chunk")


def diffusion_model(launch):
    if launch.flags.dllm_algorithm is None:
        return None
    return _facts(launch, "kv_cache_dtype", "dllm_algorithm")


def hnd_layout(launch):
    return _switch(launch, "SGLANG_USE_HND_KVCACHE")


def post_capture_sizing(launch):
    return _switch(launch, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")


def _switch(launch, name):
    if name not in launch.machine.switches:
        return None
    return {"asked": f"{launch.asked('kv_cache_dtype')} with {name}=1 in the environment"}


def requests_come_before_the_proof(launch):
    set_to = " and ".join(name for name in ENTRY_VARIABLES if name in launch.machine.switches)
    flags = launch.asked("grpc_port", "grpc_mode", "smg_grpc_mode", "encoder_only", "use_ray")
    if not (flags or set_to):
        return None
    asked = " ".join([launch.asked("kv_cache_dtype"), flags]).rstrip()
    return {"asked": f"{asked} with {set_to} in the environment" if set_to else asked}


def weights_come_in_requests(launch):
    name = "checkpoint_engine_wait_weights_before_ready"
    return _facts(launch, "kv_cache_dtype", name) if getattr(launch.flags, name) else None


def gpu_is_untested(launch):
    if launch.gpu is None or not launch.on_triton or launch.gpu.capability == PROVEN_CAPABILITY:
        return None
    return _facts(launch, "kv_cache_dtype", *_BACKENDS, sm=launch.gpu.sm, gpu=launch.gpu.name)


def parallel_is_untested(launch):
    names = [n for n in ("pp_size", "dp_size", "attn_cp_size", "nnodes") if getattr(launch.flags, n) > 1]
    # Ranks on a CPU are what tests/e2e/test_nvfp4_parallel.py runs.
    if launch.flags.tp_size not in PROVEN_TP and not launch.on_cpu:
        names.insert(0, "tp_size")
    return _facts(launch, "kv_cache_dtype", *names) if names else None


def mx_writer_copies_bf16(launch):
    if launch.drafter not in ("DFLASH", "DSPARK") or launch.draft_dtype not in FP4:
        return None
    return _facts(
        launch, "kv_cache_dtype", "speculative_algorithm", "speculative_draft_kv_cache_dtype",
        drafter=launch.drafter,
    )  # fmt: skip


def mx_is_untested(launch):
    return _facts(launch, "kv_cache_dtype", *_BACKENDS, "speculative_algorithm")
