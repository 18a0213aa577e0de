"""Draft heads on disk in the layouts of published ones, for any target folder: one layer, random weights.

A random head is nearly never right, so what it drafts is rejected; an oracle (tests/e2e/plugin) puts the
right tokens in its place.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CAPTURED = [0, 1, 2]  # EAGLE3 reads the outputs of these target layers
_COPIED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "eos_token_id",
)  # fmt: skip


def _weights(config: dict, generator: torch.Generator, prefix: str, inputs: int) -> dict[str, torch.Tensor]:
    """One decoder layer whose attention reads `inputs` features, without its norms."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (q_size, inputs), "self_attn.k_proj": (kv_size, inputs),
        "self_attn.v_proj": (kv_size, inputs), "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    return {f"{prefix}{name}.weight": random_matrix(*shape, generator) for name, shape in shapes.items()}


def random_matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)


def _config(target: Path, layers: int, **own: object) -> dict:
    config = json.loads((target / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kept = {key: config[key] for key in _COPIED if key in config}
    return {
        **kept, "head_dim": head_dim, "num_hidden_layers": layers, "tie_word_embeddings": False,
        "dtype": "bfloat16", "rope_theta": 10000.0, **own,
    }  # fmt: skip


def _save(folder: Path, config: dict, tensors: dict, norms: dict[str, int]) -> Path:
    tensors |= {f"{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def build_eagle3(folder: Path, target: Path, seed: int = 2) -> Path:
    """An EAGLE3 head with a smaller vocabulary of its own: every other token of the target's."""
    config = _config(target, 1, architectures=["LlamaForCausalLMEagle3"], model_type="llama")
    config["draft_vocab_size"] = config["vocab_size"] // 2
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": CAPTURED, "use_aux_hidden_state": True,
    }  # fmt: skip
    generator, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    tensors = {
        "fc.weight": random_matrix(hidden, len(CAPTURED) * hidden, generator),
        "lm_head.weight": random_matrix(config["draft_vocab_size"], hidden, generator),
        "d2t": torch.arange(config["draft_vocab_size"]),  # what is added to a draft id: 0, 1, 2, ...
        **_weights(config, generator, "midlayer.", 2 * hidden),
    }
    norms = ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"]
    return _save(folder, config, tensors, dict.fromkeys(norms, hidden))


def build_mtp(folder: Path, target: Path, seed: int = 3) -> Path:
    """A multi-token-prediction module as MiMo's checkpoints carry it; embeddings and head are the target's."""
    config = _config(target, 1, architectures=["MiMoForCausalLM"], model_type="qwen2")
    config["num_nextn_predict_layers"] = 1
    generator, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    prefix = "model.mtp_layers.0."
    tensors = {f"{prefix}input_proj.weight": random_matrix(hidden, 2 * hidden, generator)}
    tensors |= _weights(config, generator, prefix, hidden)
    for side in ("q", "k", "v"):
        rows = len(tensors[f"{prefix}self_attn.{side}_proj.weight"])
        tensors[f"{prefix}self_attn.{side}_proj.bias"] = torch.zeros(rows, dtype=torch.bfloat16)
    names = "token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm"
    return _save(folder, config, tensors, {prefix + name: hidden for name in names})
