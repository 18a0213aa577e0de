"""Which files show that a launch works: results under tests/bench/results/, and tests of the real server on a CPU."""

from launcher import rules_together as together
from launcher.launch import FP4
from launcher.packed_weights import PLAIN, packed_weights
from launcher.rules_attention import PROVEN_TP

FOLDER = "tests/bench/results"
# By (target KV, drafted): one GPU, a dense target in BF16 with full attention, Triton, and a plain DFLASH draft.
RESULTS = {
    ("nvfp4", False): ("h200_pair.json", "h200_smollm2.json"),
    ("nvfp4", True): ("h200_pair.json", "h200_smollm2.json"),
    ("bf16", False): ("h200_pair.json", "h200_smollm2.json"),
    ("bf16", True): ("h200_pair.json", "h200_smollm2.json"),
}
# The same on the embedded platform, by KV.
ON_A_CPU = {"nvfp4": "tests/e2e/test_nvfp4_serving.py", "bf16": "tests/e2e/test_embedded_hf_equality.py"}
BF16_ON_RANKS = ("h200x2_pair.json",)  # NVFP4's are in launcher/rules_together.py
_SIZES = ("tp_size", "pp_size", "dp_size", "attn_cp_size", "dcp_size", "nnodes")


def results_for(launch):
    """Paths of what shows launches like ``launch`` to work; none where nothing does."""
    plain = launch.kv_dtype in FP4 or launch.gpu is None or launch.gpu.sm == "sm_90"
    if not launch.on_triton or not plain or not launch.in_bf16:
        return ()
    parts = together.parts(launch)
    if _quantized(launch):
        return packed_weights(launch)
    if launch.kv_dtype == "nvfp4" and parts:
        return together.results(launch)
    if launch.drafter not in (None, "DFLASH") or not together.class_has_run(launch):
        return ()
    dtype = "bf16" if launch.kv_dtype == "bfloat16" else launch.kv_dtype
    names = RESULTS.get((dtype, launch.drafter is not None), ())
    if parts or _spread(launch):
        names = BF16_ON_RANKS if dtype == "bf16" and _on_proven_ranks(launch, parts) else ()
    if names and launch.on_cpu:
        return (ON_A_CPU[dtype],)
    return tuple(f"{FOLDER}/{name}" for name in names)


def _spread(launch):
    return [name for name in _SIZES if getattr(launch.flags, name) > 1]


def _on_proven_ranks(launch, parts):
    alone = parts == [together.RANKS] and _spread(launch) == ["tp_size"]
    return alone and launch.flags.tp_size in PROVEN_TP and not launch.on_cpu


def _quantized(launch):
    """Whether weights of target or draft are quantized, in the checkpoint or by a flag."""
    flags = launch.flags
    asked = (flags.quantization, flags.speculative_draft_model_quantization, flags.modelopt_quant)
    stored = any(facts is not None and facts.quantized for _, facts in launch.models)
    return stored or any(value not in PLAIN for value in asked)
