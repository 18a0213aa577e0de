"""The shipped target as a checkpoint that was calibrated for a quantized KV cache: its weights and KV scales."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from launcher.demo import PAIR

# By layer; none is a power of two, none is another's, and each is near what suits this model.
K_SCALES, V_SCALES = (0.31, 0.47, 0.53, 0.71), (0.043, 0.057, 0.069, 0.083)


def build_scaled_pair(folder: Path, k_scales=K_SCALES, v_scales=V_SCALES) -> Path:
    """Weights stay in BF16: a quantization config that leaves every linear layer out, but not the KV scales."""
    shutil.copytree(PAIR / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": ["self_attn", "mlp"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = load_file(folder / "model.safetensors")
    for side, scales in (("k", k_scales), ("v", v_scales)):
        for layer, scale in enumerate(scales):
            tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
