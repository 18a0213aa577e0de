# SPDX-License-Identifier: Apache-2.0
"""The pair in plain torch: a Qwen3-shaped target and the DFlash drafter SGLang 0.5.23 loads.

Parameter names are the checkpoint's names, so a state dict is a checkpoint. The target must
equal transformers' Qwen3ForCausalLM; the drafter follows srt/models/dflash.py: context K/V are
projected from hidden_norm(fc(target features)) without input_layernorm, the block (anchor token,
then masks) sees the whole context and itself in both directions, and embeddings and the head are
the target's. A feature with id i is the residual stream after layer i.
"""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Shape:
    """Widths both models share; `layers` is the model's own."""
    vocab: int = 768
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 512
    layers: int = 4
    max_tokens: int = 4096
    rope_theta: float = 1e6
    eps: float = 1e-6


class RMSNorm(nn.Module):
    """Normalize the last dim; the sum and the weight are applied in fp32, rounded once."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotation(positions: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """Return fp32 (cos, sin), each [B, 1, T, D/2], of positions [B or 1, T]; made once for all layers."""
    half = s.head_dim // 2
    inv = s.rope_theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * inv
    return angle.cos(), angle.sin()


def rope(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, H, T, D] by `rotation`'s result, half-split (neox) layout."""
    half = x.shape[-1] // 2
    cos, sin = (t.to(x.dtype) for t in turn)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(s.head_dim, s.eps), RMSNorm(s.head_dim, s.eps)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.s.head_dim).transpose(1, 2)

    def kv(self, x: Tensor, turn) -> tuple[Tensor, Tensor]:
        """Return K (normed, rotated) and V of x [B, T, hidden], each [B, KV heads, T, D]."""
        k = self.k_norm(self._split(self.k_proj(x), self.s.kv_heads))
        return rope(k, turn), self._split(self.v_proj(x), self.s.kv_heads)

    def forward(self, x: Tensor, turn, attend) -> Tensor:
        q = rope(self.q_norm(self._split(self.q_proj(x), self.s.heads)), turn)
        k, v = self.kv(x, turn)
        out = attend(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1)
        return self.o_proj(out)


class MLP(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.mlp, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.mlp, bias=False)
        self.down_proj = nn.Linear(s.mlp, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(s.hidden, s.eps), Attention(s)
        self.post_attention_layernorm, self.mlp = RMSNorm(s.hidden, s.eps), MLP(s)

    def forward(self, x: Tensor, turn, attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def rough(x: Tensor, noise: float) -> Tensor:
    """Add Gaussian noise of `noise` times the largest magnitude of each 16: what a 4-bit pool does to x, cheaply."""
    blocks = x.unflatten(-1, (-1, 16))
    size = blocks.detach().abs().amax(-1, keepdim=True) * noise
    return (blocks + size * torch.randn_like(blocks)).flatten(-2)


def init_weights(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02 if "o_proj" not in name and "down_proj" not in name else 0.008)


class Target(nn.Module):
    """Qwen3ForCausalLM with tied embeddings."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.model.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.model.norm = RMSNorm(s.hidden, s.eps)
        init_weights(self)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)  # the residual stream is bf16 when serving, so also in training
        return x.to(torch.bfloat16) if torch.is_autocast_enabled(x.device.type) else x

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.model.embed_tokens.weight.to(h.dtype))

    def forward(self, ids: Tensor, positions: Tensor, attends, features: tuple[int, ...] = ()):
        """Return (last hidden after the norm, features concatenated or None).

        Sizes: B rows, T tokens, N layers
          ids        [B, T]   int64
          positions  [B or 1, T]
          attends    N callables (q, k, v) -> out; each owns its layer's cache
        """
        x, taken, turn = self.embed(ids), [], rotation(positions, self.s)
        for i, (layer, attend) in enumerate(zip(self.model.layers, attends)):
            x = layer(x, turn, attend)
            if i in features:
                taken.append(x)
        return self.model.norm(x), torch.cat(taken, -1) if taken else None

    def full(self, ids: Tensor, features: tuple[int, ...] = (), positions: Tensor | None = None,
             noise: float = 0.0):
        """Run causally over whole rows without a cache, at positions 0, 1, ... unless others are given.

        With `noise` K and V are roughened, so that training learns to do without their last digits.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]

        def attend(q, k, v):
            if noise:
                k, v = rough(k, noise), rough(v, noise)
            return sdpa(q, k, v, causal=True)
        attends = [attend] * self.s.layers
        return self(ids, positions, attends, features)


class Draft(nn.Module):
    """DFlashDraftModel: layers, norm, fc and hidden_norm; no embedding and no head of its own."""

    def __init__(self, s: Shape, features: tuple[int, ...], block: int, mask_id: int):
        super().__init__()
        self.s, self.features, self.block, self.mask_id = s, tuple(features), block, mask_id
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)
        self.fc = nn.Linear(len(features) * s.hidden, s.hidden, bias=False)
        self.hidden_norm = RMSNorm(s.hidden, s.eps)
        init_weights(self)

    def context(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def forward(self, x: Tensor, positions: Tensor, attends) -> Tensor:
        """Return final hidden states of blocks x [B, T, hidden] (embedded anchor and masks)."""
        turn = rotation(positions, self.s)
        for layer, attend in zip(self.layers, attends):
            x = layer(x, turn, attend)
        return self.norm(x)


def target_config(s: Shape) -> dict:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
            "head_dim": s.head_dim, "hidden_act": "silu", "hidden_size": s.hidden,
            "initializer_range": 0.02, "intermediate_size": s.mlp,
            "max_position_embeddings": s.max_tokens, "num_attention_heads": s.heads,
            "num_hidden_layers": s.layers, "num_key_value_heads": s.kv_heads,
            "rms_norm_eps": s.eps, "rope_scaling": None, "rope_theta": s.rope_theta,
            "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
            "dtype": "bfloat16", "use_cache": True, "vocab_size": s.vocab}


def draft_config(d: Draft, target_layers: int) -> dict:
    cfg = target_config(d.s)
    cfg.update(architectures=["DFlashDraftModel"], tie_word_embeddings=False, block_size=d.block,
               num_target_layers=target_layers,
               dflash_config={"mask_token_id": d.mask_id, "target_layer_ids": list(d.features)})
    return cfg


def save(model: nn.Module, config: dict, folder: Path) -> None:
    """Write config.json and model.safetensors in bf16 into `folder`."""
    from safetensors.torch import save_file
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    unfinished = folder / "model.safetensors.part"  # a run cut while it saves leaves the last whole file
    save_file(state, str(unfinished), metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")


def _shape(cfg: dict) -> Shape:
    names = {"vocab": "vocab_size", "hidden": "hidden_size", "heads": "num_attention_heads",
             "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp": "intermediate_size",
             "layers": "num_hidden_layers", "max_tokens": "max_position_embeddings",
             "rope_theta": "rope_theta", "eps": "rms_norm_eps"}
    assert set(names) == {f.name for f in fields(Shape)}
    return Shape(**{k: cfg[v] for k, v in names.items()})


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16):
    """Load a saved Target or Draft by its config, every weight present and none left over."""
    from safetensors.torch import load_file
    cfg = json.loads((Path(folder) / "config.json").read_text())
    s = _shape(cfg)
    if cfg["architectures"] == ["DFlashDraftModel"]:
        d = cfg["dflash_config"]
        model = Draft(s, tuple(d["target_layer_ids"]), cfg["block_size"], d["mask_token_id"])
    else:
        model = Target(s)
    model.load_state_dict(load_file(str(Path(folder) / "model.safetensors")), strict=True)
    return model.to(device, dtype).eval()


def describe(s: Shape) -> str:
    return ", ".join(f"{k} {v}" for k, v in asdict(s).items())
