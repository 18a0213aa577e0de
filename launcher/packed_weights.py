"""What multiplies NVFP4 weights, and which files show them beside NVFP4 KV."""

from launcher import rules_together as together
from launcher.checkpoint import INPUT_SCALED, NVFP4_WEIGHTS, OTHERWISE, PACKED_HEAD
from launcher.rules_attention import BLACKWELL

MARLIN = "marlin"
ON_A_CPU, ON_A_GPU = "tests/e2e/test_nvfp4_weights.py", "tests/bench/results/h200_weights.json"
_METHODS = (None, "modelopt", "modelopt_fp4")  # quant_method; ModelOpt's older layout has none in config.json
PLAIN = (None, "unquant")  # values of flags that name a quantization
_NOT_RUN = {INPUT_SCALED, OTHERWISE, PACKED_HEAD}  # kinds of weights beside them that no run had


def fp4_gemm(launch):
    """The value of --fp4-gemm-backend that ``launch`` comes to; None where SGLang chooses by a GPU that is unknown."""
    asked = launch.flags.fp4_gemm_runner_backend
    if asked != "auto" or launch.gpu is None:
        return asked if asked != "auto" else None
    return MARLIN if launch.gpu.capability < BLACKWELL[0] else asked


def packed_weights(launch):
    """Paths of what shows NVFP4 KV on ModelOpt's NVFP4 weights of linear layers, as ``launch`` has them.

    On a CPU a dense target, with or without a plain DFLASH draft, or a hybrid without a drafter, its states in BF16; by
    Marlin on a GPU a hybrid, with or without a plain draft, its states in FP32.
    """
    parts, drafted = together.parts(launch), launch.drafter is not None
    if not _packed_linears(launch) or launch.drafter not in (None, "DFLASH"):
        return ()
    if launch.on_cpu:
        states = parts == [together.RECURRENT] and launch.state_dtype == "bfloat16" and not drafted
        return (ON_A_CPU,) if states or not parts else ()
    states = parts == [together.RECURRENT] and launch.state_dtype == "float32"
    return (ON_A_GPU,) if states and fp4_gemm(launch) in (None, MARLIN) else ()


def _packed_linears(launch):
    """Whether it is NVFP4 KV and, as in the runs, a BF16 target without experts whose linear layers' NVFP4 weights in
    ModelOpt's layout are the launch's only quantized ones, its head left out."""
    flags, target, draft = launch.flags, launch.target, launch.draft
    if launch.kv_dtype != "nvfp4" or target is None or not together.class_has_run(launch):
        return False
    if flags.quantization not in (None, "modelopt_fp4") or flags.modelopt_quant is not None:
        return False
    if flags.speculative_draft_model_quantization not in PLAIN or (draft is not None and draft.quantized):
        return False
    if target.quantization not in _METHODS or target.quant_algo not in (None, "NVFP4"):
        return False
    if not launch.in_bf16:
        return False
    return NVFP4_WEIGHTS in target.checkpoint.weights and not _NOT_RUN & target.checkpoint.weights
