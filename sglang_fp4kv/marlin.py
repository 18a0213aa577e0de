"""What SGLang 0.5.23 does around NVFP4 weights that does not go with Marlin's products.

Before Blackwell (sm_80 to sm_90) Marlin is what multiplies them, and what "auto" chooses.

A dense Qwen3.5 joins its MLP's activation function with the quantization of what follows it, whichever kernel
multiplies. Marlin's takes BF16: the first forward pass dies with "apply_fp4_marlin_linear() Expected a value of type
'Tensor' for argument 'input' but instead found type 'tuple'" (upstream's pull request 38365, closed).

Parts of narrow, deep products (N below 2048, K of 2048 and more) are added to the BF16 output by atomic adds, in
whatever order they come, so that the same tokens over the same cache can be answered otherwise. Marlin's other way
adds them in FP32, in one order; SGLang has no switch for it. SGLang asks the same function for FP8, GPTQ and AWQ
weights, which get the one order too; its kernel of experts decides for itself and keeps the atomic adds.
"""

FUSION = "sglang.srt.models.qwen3_5._maybe_enable_silu_fp4_quant_fusion"
SUMS = "sglang.srt.layers.quantization.marlin_utils_fp4.should_use_atomic_add_reduce"


def fuse_unless_marlin(original, mlp):
    """Hooked around FUSION, which marks ``mlp`` for the joint kernel where both its projections are NVFP4."""
    from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_runner_backend

    if not get_fp4_gemm_runner_backend().is_marlin():
        original(mlp)


def sum_in_order(original, *args, **kwargs):
    """Hooked around SUMS, whether atomic adds are used: not beside packed NVFP4 KV, elsewhere as SGLang chooses.

    SGLang's registry puts the hook wherever that function was imported.
    """
    from sglang_fp4kv.resolution import serves_packed_kv

    return False if serves_packed_kv() else original(*args, **kwargs)
