"""Checkpoints with NVFP4 weights as ModelOpt writes them, made of the small models on disk, each with a twin in BF16.

Global scales of the weights are powers of two, so that every decoded weight is a BF16 number: the twin holds exactly
what the packed weights mean.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_fp4kv import codec
from sglang_fp4kv.formats import BLOCK_SIZE, E2M1_MAX, E4M3_MAX

# Projections that SGLang multiplies as one, so that they share a global scale.
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), ("linear_attn.out_proj",),
)  # fmt: skip
LEFT_OUT = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d")
INPUT_SCALE = 1.0  # of activations, which are not quantized by Marlin, nor on a CPU


@dataclass(frozen=True)
class Pair:
    packed: Path
    twin: Path


def kv_scales(layers) -> dict[int, tuple[float, float]]:
    """Another k_scale and v_scale for each of these layer ids; the first k_scale is 1.0, the least that ModelOpt
    writes where KV is calibrated for FP8."""
    return {layer: (1.0 + 0.25 * i, 0.125 + 0.0625 * i) for i, layer in enumerate(layers)}


def pack_weights(
    source: Path, folder: Path, scales: dict[int, tuple[float, float]], older: bool = False
) -> Pair:
    """``source`` with packed weights and these KV scales, and the same with decoded weights, both under ``folder``.

    ``older``: the quantization in a file of its own, hf_quant_config.json, in place of config.json.
    """
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    packed, twin = dict(tensors), dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        for group in FUSED:
            names = [f"model.layers.{layer}.{name}" for name in group]
            weights = {name: tensors[f"{name}.weight"] for name in names if f"{name}.weight" in tensors}
            for name, entries in _pack(weights).items():
                twin[f"{name}.weight"] = codec.decode(*entries, torch.bfloat16)
                codes, block_scales, global_scale = entries
                packed[f"{name}.weight"] = codes
                packed[f"{name}.weight_scale"] = block_scales.view(torch.float8_e4m3fn)
                packed[f"{name}.weight_scale_2"] = torch.tensor(global_scale)
                packed[f"{name}.input_scale"] = torch.tensor(INPUT_SCALE)
    for layer, pair in scales.items():
        for side, value in zip("kv", pair, strict=True):
            name = f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"
            packed[name] = twin[name] = torch.tensor(value)
    left_out = tuple(f"{name}.weight" for name in LEFT_OUT)
    excluded = [name.removesuffix(".weight") for name in tensors if name.endswith(left_out)]
    result = Pair(folder / "packed", folder / "twin")
    for place, content in ((result.packed, packed), (result.twin, twin)):
        shutil.copytree(source, place)
        save_file(content, place / "model.safetensors", metadata={"format": "pt"})
    _describe(result.packed, config, ["lm_head", *excluded], older)
    return result


def _pack(weights: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Codes, block scales and the global scale, one for all, of weights that are multiplied as one."""
    if not weights:
        return {}
    largest = max(float(weight.abs().max()) for weight in weights.values())
    global_scale = 2.0 ** math.ceil(math.log2(largest / (E2M1_MAX * E4M3_MAX)))
    return {name: (*codec.encode(weight, global_scale), global_scale) for name, weight in weights.items()}


def _describe(folder: Path, config: dict, excluded: list[str], older: bool) -> None:
    if older:
        algorithms = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": BLOCK_SIZE}
        content = {"producer": {"name": "modelopt"}, "quantization": {**algorithms, "exclude_modules": excluded}}
        (folder / "hf_quant_config.json").write_text(json.dumps(content, indent=1))
        return
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "group_size": BLOCK_SIZE,
        "ignore": excluded,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
