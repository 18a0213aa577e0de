# SPDX-License-Identifier: Apache-2.0
"""Recall by depth and by pool, and the accept length there, of a saved pair with a long context.

    python models/evaluate_long.py --pair models/sibling --device cuda

Prompts go in in chunks of 8,192 tokens, as a server's do: a chunk reads the ones before it as the pool
stored them.
"""
from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

import corpus
import decode
import evaluate
import modeling

DEPTHS = (2_000, 8_000, 60_000, 110_000)
POSITIONS = (0.1, 0.5, 0.9)
CHUNK = 8192
MAX_NEW = 48


def recall_cases(tok, seed: int, tokens: int, each: int) -> list[tuple[float, list[int], str, str]]:
    """Return (position, prompt ids, the code, the whole answer) of `each` prompts at every position."""
    out = []
    for at in POSITIONS:
        r = random.Random(f"{seed}/depth/{tokens}/{at}")
        for _ in range(each):
            e = corpus.recall(r, int((tokens - 60) * evaluate.CHARS_PER_TOKEN), at)[0]
            out.append((at, evaluate.encode(tok, [{"role": "user", "content": e.user}], []), e.check, e.answer))
    return out


def same_width(cases: list, most: int) -> list[list]:
    """Return the cases in groups of at most `most` tokens, each right-padded to its own widest."""
    out: list[list] = []
    for case in cases:
        if not out or (len(out[-1]) + 1) * max(len(c[1]) for c in [*out[-1], case]) > most:
            out.append([])
        out[-1].append(case)
    return out


@torch.no_grad()
def teacher_forced(model, tok, cases: list, device: str) -> float:
    """Return the share of cases whose answer has the best logit at every token, in one pass each."""
    right = 0
    for _, prompt, _, answer in cases:
        goal = tok.encode(answer, add_special_tokens=False).ids + [decode.EOS]
        ids = torch.tensor([prompt + goal], device=device)
        with torch.autocast(device, torch.bfloat16):
            h, _ = model.full(ids[:, :-1])
            best = model.logits(h[0, len(prompt) - 1:]).argmax(-1)
        right += bool((best == ids[0, len(prompt):]).all())
    return right / len(cases)


def evaluate_long(pair: Path, tok, device: str, seed: int, each: int, spec_each: int, depths=DEPTHS,
                  chunk: int = CHUNK, cap_s: float = float("inf"), keep=lambda result: None, log=print) -> dict:
    """Return {recall: {depth: {pool: {position: share right}}}, accept: {depth: {pools: ...}}, ...}.

    `keep(result)` is called after every depth; past `cap_s` seconds no other measurement is begun, and
    what is missing is named under "left out".
    """
    target = modeling.load(pair / "target", device)
    draft = modeling.load(pair / "draft", device)
    start = time.monotonic()
    result = {"seed": seed, "each": each, "spec_each": spec_each, "chunk": chunk, "max_new": MAX_NEW,
              "recall": {}, "accept": {}, "left out": []}
    for depth in sorted(depths, reverse=True):  # the ones that matter most come first
        cases = recall_cases(tok, seed, depth, each)
        for name, pool in evaluate.POOLS.items():
            if time.monotonic() - start > cap_s:
                result["left out"].append(f"recall {depth} {name}")
                continue
            right = {at: 0 for at in POSITIONS}
            for group in same_width(cases, 4 * max(depths)):
                width = -(-max(len(c[1]) for c in group) // 256) * 256
                ids = torch.zeros(len(group), width, dtype=torch.int64)
                for row, case in enumerate(group):
                    ids[row, :len(case[1])] = torch.tensor(case[1])
                lengths = torch.tensor([len(c[1]) for c in group])
                new = decode.generate(target, ids.to(device), lengths.to(device), MAX_NEW, pool, chunk).tolist()
                for case, tokens in zip(group, new):
                    text = tok.decode([t for t in tokens if t >= 0], skip_special_tokens=True)
                    right[case[0]] += evaluate.is_right("recall", text, case[2])
                    if case[2] not in text:
                        log(f"wrong [{depth} {name} {case[0]}]: wanted {case[2]}, got {text[:90]!r}")
            result["recall"].setdefault(str(depth), {})[name] = {str(k): v / each for k, v in right.items()}
            log(f"recall {depth} tokens, {len(cases[0][1])} in the first prompt, {name}: "
                f"{json.dumps(result['recall'][str(depth)][name])} {time.monotonic() - start:.0f}s")
        chosen = [c for i, c in enumerate(cases) if i % each < spec_each]
        for name, pool, draft_pool in (("nvfp4+fp8", decode.as_nvfp4, decode.as_fp8), ("bf16", None, None)):
            if time.monotonic() - start > cap_s:
                result["left out"].append(f"accept {depth} {name}")
                continue
            tokens = steps = equal = 0
            for _, prompt, _, _ in chosen:
                ids, n = torch.tensor([prompt], device=device), torch.tensor([len(prompt)], device=device)
                alone = decode.generate(target, ids, n, MAX_NEW, pool, chunk)[0]
                new, took = decode.speculate(target, draft, prompt, MAX_NEW, pool, draft_pool, chunk)
                tokens, steps = tokens + len(new), steps + took
                equal += new == [t for t in alone.tolist() if t >= 0]
            result["accept"].setdefault(str(depth), {})[name] = {
                "accept": round(tokens / max(steps, 1), 2), "equal": f"{equal}/{len(chosen)}"}
            log(f"accept {depth} {name} {json.dumps(result['accept'][str(depth)][name])} "
                f"{time.monotonic() - start:.0f}s")
        keep(result)
    if result["left out"]:
        log(f"left out after {cap_s:.0f}s: {', '.join(result['left out'])}")
    return result


def main() -> None:
    here = Path(__file__).resolve().parent
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--pair", type=Path, default=here / "sibling")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=99)
    p.add_argument("--each", type=int, default=2, help="prompts at every position of every depth")
    p.add_argument("--spec-each", type=int, default=1, help="of these, decoded with the drafter")
    p.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="prompt tokens")
    a = p.parse_args()
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(a.pair / "target" / "tokenizer.json"))
    evaluate_long(a.pair, tok, a.device, a.seed, a.each, a.spec_each, tuple(map(int, a.depths.split(","))))


if __name__ == "__main__":
    main()
