# SPDX-License-Identifier: Apache-2.0
"""Measure a saved pair: task accuracy, confidence, and accept length per kind of prompt.

    python models/evaluate.py --pair models/pair --device cpu --each 4

Accept length is SGLang's spec_accept_length: completion tokens over verify steps.
"""
from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

import corpus
import decode
import modeling
import tokenizer

POOLS = {"bf16": None, "fp8": decode.as_fp8, "nvfp4": decode.as_nvfp4}
RECALL_TOKENS = (128, 512, 1024, 2048, 3584)
CHARS_PER_TOKEN = 3.85


def cases(seed: int, each: int) -> list[tuple[str, list[int], str, str]]:
    """Return (kind, messages, tools, check) rows nobody trained on, except the closed tables."""
    out = []
    for kind, make in corpus.SHORT_KINDS.items():
        r = random.Random(f"{seed}/{kind}")
        for _ in range(each):
            e = make(r)
            out.append((kind, [{"role": "user", "content": e.user}], e.tools, e.check))
    for tokens in RECALL_TOKENS:
        r = random.Random(f"{seed}/recall/{tokens}")
        for i in range(each):
            e = corpus.recall(r, int((tokens - 40) * CHARS_PER_TOKEN), (i + 0.5) / each)[0]
            out.append((f"recall_{tokens}", [{"role": "user", "content": e.user}], [], e.check))
    return out


def encode(tok, messages: list[dict], tools: list[dict]) -> list[int]:
    return tok.encode(tokenizer.render(messages, tools), add_special_tokens=False).ids


def is_right(kind: str, text: str, check: str) -> bool:
    if kind == "tool":
        try:
            body = text.split("<tool_call>\n")[1].split("\n</tool_call>")[0]
            return json.loads(body) == json.loads(check)
        except (IndexError, ValueError):
            return False
    return check in text


def batched(model, prompts: list[list[int]], max_new: int, pool, device: str) -> list[list[int]]:
    """Decode many prompts greedily, longest together; return their new tokens in order."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: list[list[int]] = [[] for _ in prompts]
    while order:
        width = len(prompts[order[-1]])
        part = [order.pop() for _ in range(min(len(order), max(1, 131_072 // width)))]
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        for row, i in enumerate(part):
            ids[row, :len(prompts[i])] = torch.tensor(prompts[i])
        lengths = torch.tensor([len(prompts[i]) for i in part])
        new = decode.generate(model, ids.to(device), lengths.to(device), max_new, pool).cpu()
        for row, i in enumerate(part):
            out[i] = [t for t in new[row].tolist() if t >= 0]
    return out


@torch.inference_mode()
def gaps(model, prompt: list[int], answer: list[int], device: str) -> list[float]:
    """Return the log-probability gap between the two best tokens at every answer position."""
    ids = torch.tensor([prompt + answer], device=device)
    h, _ = model.full(ids[:, :-1])
    top = model.logits(h[0, len(prompt) - 1:]).float().topk(2, -1).values
    return (top[:, 0] - top[:, 1]).tolist()


def evaluate(pair: Path, device: str, seed: int, each: int, spec_each: int, max_new: int = 88,
             log=print) -> dict:
    """Return {accuracy, gap, accept, demo} of the pair saved under `pair`, run in bf16."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    target = modeling.load(pair / "target", device)
    draft = modeling.load(pair / "draft", device)
    rows = cases(seed, each)
    prompts = [encode(tok, m, t) for _, m, t, _ in rows]
    kinds = list(dict.fromkeys(k for k, *_ in rows))
    result = {"seed": seed, "each": each, "spec_each": spec_each, "max_new": max_new,
              "accuracy": {}, "gap": {}, "accept": {}, "demo": []}
    for name, pool in POOLS.items():
        answers = batched(target, prompts, max_new, pool, device)
        right = [is_right(k, tok.decode(a, skip_special_tokens=True), c)
                 for a, (k, _, _, c) in zip(answers, rows)]
        result["accuracy"][name] = {
            k: sum(x for x, row in zip(right, rows) if row[0] == k) / each for k in kinds}
        if name == "bf16":
            plain = answers
            wrong = [(row[0], tok.decode(a)) for x, a, row in zip(right, answers, rows) if not x]
            for kind, text in wrong[:8]:
                log(f"wrong [{kind}]: {text[:160]!r}")
    log("accuracy " + json.dumps(result["accuracy"]))
    for kind in kinds:
        index = [i for i, row in enumerate(rows) if row[0] == kind][:spec_each]
        values = sorted(g for i in index for g in gaps(target, prompts[i], plain[i], device))
        result["gap"][kind] = {"p5": round(values[len(values) // 20], 2),
                               "p50": round(values[len(values) // 2], 2)}
        entry = {}
        for name, pool, draft_pool in (("bf16", None, None), ("nvfp4+fp8", decode.as_nvfp4, decode.as_fp8)):
            tokens = steps = equal = 0
            for i in index:
                alone = decode.generate(target, torch.tensor([prompts[i]], device=device),
                                        torch.tensor([len(prompts[i])], device=device), max_new, pool)[0]
                new, n = decode.speculate(target, draft, prompts[i], max_new, pool, draft_pool)
                tokens, steps = tokens + len(new), steps + n
                equal += new == [t for t in alone.tolist() if t >= 0]
            entry[name] = {"accept": round(tokens / max(steps, 1), 2), "equal": f"{equal}/{len(index)}",
                           "per_step": round((tokens - len(index)) / max(steps, 1), 2)}
        result["accept"][kind] = entry
        log(f"accept {kind} {json.dumps(entry)} gap {result['gap'][kind]}")
    for p in json.loads((pair / "prompts.json").read_text()):
        ids = encode(tok, p["messages"], p.get("tools") or [])
        new, steps = decode.speculate(target, draft, ids, p["max_new_tokens"])
        result["demo"].append({
            "name": p["name"], "prompt_tokens": len(ids), "tokens": len(new), "steps": steps,
            "accept": round(len(new) / max(steps, 1), 2), "text": tok.decode(new, skip_special_tokens=True),
            "min_gap": round(min(gaps(target, ids, new, device)), 2)})
        log("demo " + json.dumps(result["demo"][-1], ensure_ascii=False))
    return result


def main() -> None:
    here = Path(__file__).resolve().parent
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--pair", type=Path, default=here / "pair")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=99)
    p.add_argument("--each", type=int, default=8, help="prompts of every kind for accuracy")
    p.add_argument("--spec-each", type=int, default=4, help="of these, decoded with the drafter")
    a = p.parse_args()
    evaluate(a.pair, a.device, a.seed, a.each, a.spec_each)


if __name__ == "__main__":
    main()
