"""How far rounding noise moves the margin between the two best tokens, by KV format.

    python tests/bench/near_tie_study.py MODEL_DIR PROMPTS.json [--tokens 48] [--out FILE]

A verify pass multiplies with eight rows where decode has one, and a GPU's matrix products then add in
another order. That noise is one BF16 step in a few elements of a layer's output. Here it is put in
by hand on a CPU: the same tokens are fed one by one, once as they are and once with every linear
layer's sum taken in four parts, in FP32, before the one rounding to BF16. K and V go through a cache
in BF16, FP8 or NVFP4. Reported: by how much the log-probability margin of the two best tokens moves.
An FP4 code that flips moves a cached element by up to a third of its block's largest value, so the
same noise moves margins further.
"""

import argparse
import json
from pathlib import Path

import torch

from sglang_fp4kv import codec
from sglang_fp4kv.formats import DEFAULT_K_GLOBAL_SCALE, DEFAULT_V_GLOBAL_SCALE

PARTS = 4


def nvfp4(x, scale):
    return codec.decode(*codec.encode(x, scale), scale, x.dtype)


FORMATS = {
    "bf16": (lambda k: k, lambda v: v),
    "fp8_e4m3": (lambda k: k.to(torch.float8_e4m3fn).to(k.dtype),) * 2,
    "nvfp4": (
        lambda k: nvfp4(k, DEFAULT_K_GLOBAL_SCALE),
        lambda v: nvfp4(v, DEFAULT_V_GLOBAL_SCALE),
    ),
}


class NoisyLinear(torch.nn.Module):
    """A linear layer whose sum is taken in PARTS parts when ``noisy``, else in one."""

    noisy = False

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight.detach().float()
        assert linear.bias is None

    def forward(self, x):
        x32 = x.float()
        if not NoisyLinear.noisy:
            return (x32 @ self.weight.T).to(x.dtype)
        parts = zip(x32.chunk(PARTS, -1), self.weight.chunk(PARTS, -1))
        return sum(a @ w.T for a, w in parts).to(x.dtype)


def replace_linears(module):
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, NoisyLinear(child))
        else:
            replace_linears(child)


def margins(model, cache_class, tokens, start):
    """The margin of the two best tokens after each of tokens[start:], fed one by one."""
    cache, found = cache_class(), []
    out = model(torch.tensor([tokens[:start]]), past_key_values=cache, use_cache=True)
    for token in tokens[start:]:
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        best = out.logits[0, -1].float().topk(2).values
        found.append(float(best[0] - best[1]))
    return found


def cache_of(form):
    from transformers import DynamicCache

    to_k, to_v = FORMATS[form]

    class RoundedCache(DynamicCache):
        def update(self, k, v, *args, **kwargs):
            return super().update(to_k(k), to_v(v), *args, **kwargs)

    return RoundedCache


def begin(doc):
    """The command line of a study of margins, its model and its prompts."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from launcher.prompts import load_prompts

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    return args, model, load_prompts(args.prompts, args.model)


def main():
    args, model, prompts = begin(__doc__)
    result = {"model": args.model.name, "tokens": args.tokens, "parts": PARTS, "margin_moves": {}}
    with torch.inference_mode():
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt["input_ids"]])
            out = model.generate(ids, max_new_tokens=args.tokens, do_sample=False)
            answers.append((out[0].tolist(), ids.shape[1]))
        replace_linears(model)
        for form in FORMATS:
            moves = []
            for tokens, start in answers:
                runs = []
                for NoisyLinear.noisy in (False, True):
                    runs.append(margins(model, cache_of(form), tokens, start))
                moves += [abs(a - b) for a, b in zip(*runs)]
            moves = torch.tensor(moves)
            quantiles = {f"p{q}": float(moves.quantile(q / 100)) for q in (50, 90, 99)}
            result["margin_moves"][form] = {**quantiles, "max": float(moves.max()), "steps": len(moves)}
            print(form, result["margin_moves"][form], flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
