"""The README's table of models and features, as the judge decides.

Each row is a launch with NVFP4 KV on Triton, of a target and perhaps a draft of which nothing but what the judge reads is
written down: a config and, for packed weights, the name of one tensor.
"""

import json
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from launcher.judge import judge
from launcher.patchset import PatchState
from launcher.probe import Failed, Machine, parse_gpu
from launcher.readme_block import markdown
from launcher.rules import FAILS, RULES

PATCHED = PatchState("applied", Path(), "0.5.23", "0.5.23", {})
PLACES = ("a CPU", "sm_90", "sm_121")
_TARGET = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "dtype": "bfloat16", "max_position_embeddings": 4096,
}  # fmt: skip
_HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MOE = _HYBRID | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
_VISION = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": _TARGET | _HYBRID}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 512}
_GEMMA3 = _WINDOWED | {"architectures": ["Gemma3ForCausalLM"]}
_GPT_OSS = _WINDOWED | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
_DRAFT = {
    **_TARGET, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "block_size": 8,
    "dflash_config": {"target_layer_ids": [1, 4]},
}  # fmt: skip
_DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "block_size": None, "layer_types": ["sliding_attention"],
    "sliding_window": 512, "dflash_config": {
        "target_layer_ids": [1, 4], "block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 8, "selector_top_k": 4,
    },
}  # fmt: skip
_PACKED = "model.layers.0.mlp.up_proj.weight_scale_2"
_HICACHE = ("--enable-hierarchical-cache", "--hicache-io-backend", "direct")  # the way that a CPU has, too
_AS_SERVED = ("--page-size", "64", "--hicache-write-policy", "write_back")


@dataclass(frozen=True)
class Row:
    """``target``, ``draft``: keys beside those of a plain one. ``draft``: None for no DFLASH. ``packed``: NVFP4 weights."""

    name: str
    target: dict = field(default_factory=dict)
    draft: dict | None = None
    flags: tuple = ()
    packed: bool = False


ROWS = (
    Row("full attention", draft={}),
    Row("full attention, a DFlash2 draft with windows", draft=_DFLASH2),
    Row("full attention, a window by `--speculative-draft-window-size`", {}, {}, ("--speculative-draft-window-size", "512")),
    Row("gated-delta hybrid (Qwen3.5)", _HYBRID),
    Row("gated-delta hybrid, DFLASH", _HYBRID, {}),
    Row("gated-delta hybrid, a DFlash2 draft", _HYBRID, _DFLASH2),
    Row("gated-delta hybrid, NGRAM", _HYBRID, flags=("--speculative-algorithm", "NGRAM")),
    Row("gated-delta hybrid with experts (Qwen3.5-MoE), DFLASH", _MOE, {}),
    Row("gated-delta hybrid with a vision tower (Qwen3_5ForConditionalGeneration), text, DFLASH", _VISION, {}),
    Row("Qwen3-Next", _HYBRID | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}),
    Row("windowed layers in one pool (Gemma 3)", _GEMMA3),
    Row("windowed layers in one pool (Gemma 3), DFLASH", _GEMMA3, {}),
    Row("windowed layers in one pool, another class (Gemma 2)", _WINDOWED | {"architectures": ["Gemma2ForCausalLM"]}),
    Row("attention sinks and a window pool (gpt-oss)", _GPT_OSS),
    Row("MLA (DeepSeek)", {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}),
    Row("NVFP4 weights, full attention, DFLASH", {}, {}, packed=True),
    Row("NVFP4 weights, gated-delta hybrid, DFLASH", _HYBRID, {}, packed=True),
    Row("hierarchical cache with write_through and pages of 1 (SGLang's own), DFLASH", {}, {}, _HICACHE),
    Row("hierarchical cache with write_back and pages of 64, DFLASH", {}, {}, (*_HICACHE, *_AS_SERVED)),
    Row("the same, gated-delta hybrid, DFLASH", _HYBRID, {}, (*_HICACHE, *_AS_SERVED)),
    Row("two ranks, DFLASH", {}, {}, ("--tp-size", "2")),
    Row("four ranks, DFLASH", {}, {}, ("--tp-size", "4")),
    Row("two ranks, gated-delta hybrid, a DFlash2 draft", _HYBRID, _DFLASH2, ("--tp-size", "2")),
    Row("two ranks on two hosts, DFLASH", {}, {}, ("--tp-size", "2", "--nnodes", "2")),
    Row("PD disaggregation", flags=("--disaggregation-mode", "decode")),
)  # fmt: skip


def _write(folder, config, packed=False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if packed:
        header = json.dumps({_PACKED: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))
    return str(folder)


def verdict(row, place):
    """The judge's Verdict on ``row`` at ``place``, one of PLACES."""
    with tempfile.TemporaryDirectory() as scratch:
        target = _write(Path(scratch, "target"), _TARGET | row.target, row.packed)
        argv = ["--model-path", target, "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton", *row.flags]
        if row.draft is not None:
            draft = _write(Path(scratch, "draft"), _DRAFT | row.draft)
            argv += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft]
        on_cpu = place == PLACES[0]
        gpu = Failed("a CPU") if on_cpu else parse_gpu(place)
        return judge([*argv, *(["--device", "cpu"] if on_cpu else [])], machine=Machine(gpu, PATCHED))


def cell(found):
    """A Verdict's status and the ids of the rules that decide it."""
    ids = [r.id for r in found.refusals if found.status != FAILS or RULES[r.id].status == FAILS]
    return " ".join([found.status, ", ".join(ids)]).strip()


def table():
    """The table's lines: a row a launch, a column a place, and what shows those that work."""
    lines = []
    for row in ROWS:
        found = [verdict(row, place) for place in PLACES]
        files = dict.fromkeys(Path(name).name for verdict in found for name in verdict.results)
        lines.append([row.name, *map(cell, found), ", ".join(f"`{name}`" for name in files) or "-"])
    return markdown(["nvfp4 on triton", *PLACES, "shown by"], lines)
