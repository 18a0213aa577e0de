"""Activations in front of NVFP4 weights: SGLang 0.5.23 quantizes them for a kernel that takes none.

A dense Qwen3.5 joins its MLP's activation function with the quantization of what follows it, whichever kernel
multiplies. Marlin's takes BF16: on sm_80 to sm_90, where it is what "auto" chooses, the first forward pass dies with
"apply_fp4_marlin_linear() Expected a value of type 'Tensor' for argument 'input' but instead found type 'tuple'"
(upstream's pull request 38365, closed).
"""

FUSION = "sglang.srt.models.qwen3_5._maybe_enable_silu_fp4_quant_fusion"


def fuse_unless_marlin(original, mlp):
    """Hooked around FUSION, which marks ``mlp`` for the joint kernel where both its projections are NVFP4."""
    from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_runner_backend

    if not get_fp4_gemm_runner_backend().is_marlin():
        original(mlp)
