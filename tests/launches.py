"""Launches for the rules' tests: folders with small configs, flags and a faked machine."""

import json
import struct
from dataclasses import replace
from pathlib import Path

from launcher.flags import parse
from launcher.launch import Launch
from launcher.modelfacts import read_facts
from launcher.patchset import PatchState
from launcher.probe import Failed, Gpu, Machine, parse_gpu

TARGET = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "dtype": "bfloat16", "max_position_embeddings": 4096,
}  # fmt: skip
DRAFT = {
    **TARGET, "num_hidden_layers": 1, "block_size": 8, "dflash_config": {"target_layer_ids": [0, 2]},
}  # fmt: skip
HYBRID = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 8, "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
WINDOWED = {
    "architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 512,
}  # fmt: skip
NVFP4 = ["--kv-cache-dtype", "nvfp4", "--attention-backend", "triton"]
MX = ["--kv-cache-dtype", "fp4_mx_block16", "--attention-backend", "triton"]
DFLASH = ["--speculative-algorithm", "DFLASH"]
H200 = Gpu("NVIDIA H200", (9, 0), 139 << 30)
NO_GPU = Failed("no NVML here")


def patch_state(state="applied", release="0.5.23"):
    return PatchState(state, Path("/site"), "0.5.23", release, {"python/sglang/a.py": state})


def machine(gpu=H200, patch="applied", release="0.5.23", switches=()):
    gpu = parse_gpu(gpu) if isinstance(gpu, str) else gpu
    return Machine(gpu, patch_state(patch, release), {"sglang": release}, switches)


def write_safetensors(path, tensors):
    """``tensors``: name -> (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    raw = b"".join(raw for _, _, raw in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw)


def scale(value):
    return "F32", [1], struct.pack("<f", value)


def scales(values, layers=None):
    """One k_scale and one v_scale a layer (of ``layers``, or from the first), named as checkpoints name them."""
    return {
        f"model.layers.{layer}.self_attn.attn.{side}_scale": scale(value)
        for layer, value in zip(layers or range(len(values)), values, strict=True)
        for side in "kv"
    }


def cached(cache, commit, *, main=False):
    """The folder of that commit of the hub id org/name in ``cache``, which ``main`` names from now on."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return snapshot


def folder(path, config, tensors=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for old in path.glob("*.safetensors"):
        old.unlink()
    if tensors is not None:
        write_safetensors(path / "model.safetensors", tensors)
    return str(path)


def argv(tmp_path, flags, *, target=None, draft=None, tensors=None, draft_tensors=None):
    """The two folders' flags and ``flags``; the draft's only where something drafts."""
    t = folder(tmp_path / "t", {**TARGET, **(target or {})}, tensors)
    words = ["--model-path", t, *flags]
    d = folder(tmp_path / "d", {**DRAFT, **(draft or {})}, draft_tensors)
    drafts = parse(words).speculative_algorithm not in (None, "NGRAM")
    return [*words, *(["--speculative-draft-model-path", d] if drafts else [])]


def launch(tmp_path, flags, *, on=None, weights=None, named=None, **folders):
    """A Launch; ``weights``: bytes of (target, draft) in place of files."""
    words = argv(tmp_path, flags, **folders)
    parsed = parse(words)
    target = read_facts(parsed.model_path, "--model-path")
    draft = parsed.speculative_draft_model_path
    draft = draft and read_facts(draft, "--speculative-draft-model-path")
    if weights is not None:
        target = _weighing(target, weights[0])
        draft = draft and _weighing(draft, weights[1])
    return Launch(parsed, target, draft, on or machine(), **(named or {}))


def _weighing(facts, size):
    return replace(facts, checkpoint=replace(facts.checkpoint, weights_bytes=size))
