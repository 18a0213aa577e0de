"""ModelOpt's NVFP4 weights on a CPU: decoded to the model's dtype once, when they are loaded.

SGLang 0.5.23 multiplies them in CUDA kernels alone (srt/layers/quantization/modelopt_quant.py). Activations stay as
they are, which is what Marlin, its way on sm_80 to sm_90, computes; Blackwell's kernels round them to FP4 too.
"""

import torch

from sglang_fp4kv import codec

_METHOD = "sglang.srt.layers.quantization.modelopt_quant.ModelOptFp4LinearMethod"
_PROCESS, _APPLY = f"{_METHOD}.process_weights_after_loading", f"{_METHOD}.apply"
TARGETS = (_PROCESS, _APPLY)


def install(registry, kind) -> None:
    """Registers the hooks with SGLang's HookRegistry; ``kind`` is its HookType."""
    registry.register(_PROCESS, decode_weight, kind.REPLACE)
    registry.register(_APPLY, multiply, kind.REPLACE)


def decode_weight(method, layer: torch.nn.Module) -> None:
    """Puts the decoded weight in the place of the packed one.

    Sizes: N output features of P fused projections, K input features
      layer.weight          [N, K//2]   uint8          becomes [N, K] in layer.params_dtype
      layer.weight_scale    [N, K//16]  float8_e4m3
      layer.weight_scale_2  [P]         fp32           SGLang takes the largest for all of them, and so does this
    Raises: ValueError for AWQ's weights, whose scale of the input is left out here.
    """
    if method.quant_config.is_awq:
        raise ValueError("NVFP4_AWQ weights are not decoded on the embedded platform")
    scale = float(layer.weight_scale_2.max())
    weight = codec.decode(layer.weight.data, layer.weight_scale.data, scale, layer.params_dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def multiply(method, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, layer.weight, bias)
