"""How far the margin of the two best tokens moves when a prompt is cut elsewhere, by KV format.

    python tests/bench/prefill_cut_study.py MODEL_DIR PROMPTS.json [--tokens 48] [--out FILE]

Prefill reads its own chunk of a prompt in BF16 and everything before the chunk from the cache, packed. So
the same prompt in one chunk, in two or four, or all but its last token from the prefix cache reads other values
of K and V: that is quantization, not a fault. Here each prompt is read in those ways on a CPU and
the same answer is fed after it; reported is by how much the log-probability margin of the two best tokens
moves at each of the answer's steps. BF16 rounds nothing; what moves there is the order of sums.
"""

import itertools
import json
from collections import defaultdict

import torch
from near_tie_study import FORMATS, begin, cache_of


def cut_cache(form):
    """A cache in ``form`` whose reader sees its own chunk as it was computed while ``exact`` is set."""

    class CutCache(cache_of(form)):
        exact = False

        def update(self, k, v, *args, **kwargs):
            keys, values = super().update(k, v, *args, **kwargs)
            if not self.exact:
                return keys, values
            before = keys.shape[-2] - k.shape[-2]
            return (
                torch.cat((keys[..., :before, :], k), dim=-2),
                torch.cat((values[..., :before, :], v), dim=-2),
            )

    return CutCache()


def cuts(length):
    """Where a prompt is cut, by the way it is read."""
    return {
        "two chunks": (length // 2,),
        "four chunks": (length // 4, length // 2, 3 * length // 4),
        "from the prefix cache": (length - 1,),
    }


def margins(model, form, prompt, answer, ends=()):
    """The margins before each token of ``answer``, with ``prompt`` read in chunks that end at ``ends`` and its own end.

    The last token alone is read as a decode step reads it, out of the cache.
    """
    cache = cut_cache(form)
    for first, end in itertools.pairwise((0, *ends, len(prompt))):
        cache.exact = end - first > 1
        out = model(torch.tensor([prompt[first:end]]), past_key_values=cache, use_cache=True)
    cache.exact = False
    rest = model(torch.tensor([answer[:-1]]), past_key_values=cache, use_cache=True)
    logits = torch.cat((out.logits[0, -1:], rest.logits[0])).float()
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1]


def quantiles(moves):
    moves = torch.cat(moves)
    found = {f"p{q}": float(moves.quantile(q / 100)) for q in (50, 90, 99)}
    return {**found, "max": float(moves.max()), "steps": len(moves)}


def main():
    args, model, loaded = begin(__doc__)
    prompts = [prompt["input_ids"] for prompt in loaded]
    result = {"model": args.model.name, "tokens": args.tokens, "margin_moves": {}}
    with torch.inference_mode():
        answers = []
        for prompt in prompts:
            out = model.generate(torch.tensor([prompt]), max_new_tokens=args.tokens, do_sample=False)
            answers.append(out[0, len(prompt) :].tolist())
        for form in FORMATS:
            moves = defaultdict(list)
            for prompt, answer in zip(prompts, answers, strict=True):
                whole = margins(model, form, prompt, answer)
                for name, ends in cuts(len(prompt)).items():
                    moves[name].append((margins(model, form, prompt, answer, ends) - whole).abs())
            result["margin_moves"][form] = {name: quantiles(found) for name, found in moves.items()}
            print(form, result["margin_moves"][form], flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
