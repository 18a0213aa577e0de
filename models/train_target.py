# SPDX-License-Identifier: Apache-2.0
"""Train the target on the corpus: corpus shards, length buckets, the training loop."""
from __future__ import annotations

import math
import multiprocessing
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F

import corpus
import tokenizer

LIMITS = (96, 160, 256, 448, 768, 1280, 2304, 4096)  # padded lengths; longer rows are dropped
# (conversations at --size 1, characters of filler from, to)
MIX = ((240_000, 0, 0), (24_000, 200, 2_400), (12_000, 2_000, 7_800), (2_000, 7_000, 14_500))
PROMPT_MIX = ((240_000, 0, 0), (16_000, 200, 2_400), (4_000, 2_000, 7_800), (700, 7_000, 14_500))
LOG_EVERY = 250
_TOKENIZER = None


def _start(text: str) -> None:
    global _TOKENIZER
    from tokenizers import Tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _TOKENIZER = Tokenizer.from_str(text)


def _shard(job):
    """Return (ids int16, learn bool, lengths) of one shard; with prompts_only the rows are prompts."""
    seed, count, lo, hi, prompts_only = job
    r = random.Random(seed)
    rows = [corpus.conversation(r, r.randint(lo, hi)) for _ in range(count)]
    if prompts_only:
        rows = [(m[:r.choice([i for i, t in enumerate(m) if t["role"] == "assistant"])], tools)
                for m, tools in rows]
        texts = [tokenizer.render(m, t) for m, t in rows]
        pieces = [(e.ids, [False] * len(e.ids))
                  for e in _TOKENIZER.encode_batch(texts, add_special_tokens=False)]
    else:
        pieces = tokenizer.encode_pieces(_TOKENIZER, rows)
    pieces = [p for p in pieces if len(p[0]) <= LIMITS[-1]]
    return (np.concatenate([np.array(i, np.int16) for i, _ in pieces]),
            np.concatenate([np.array(x, bool) for _, x in pieces]),
            np.array([len(i) for i, _ in pieces], np.int64))


def jobs(seed: int, size: float, prompts_only: bool = False) -> list[tuple]:
    """Return _shard's arguments for a corpus of this size, long shards first so that none ends late."""
    out, each = [], 500
    for kind, (count, lo, hi) in enumerate(PROMPT_MIX if prompts_only else MIX):
        left, i = math.ceil(count * size), 0
        while left > 0:
            n = min(each, left)
            out.append((f"{seed}/{prompts_only}/{kind}/{i}", n, lo, hi, prompts_only))
            left, i = left - n, i + 1
    return sorted(out, key=lambda j: -j[3])


def build_rows(tok, seed: int, size: float, workers: int, prompts_only: bool = False) -> dict:
    """Return `pad`'s rows; the same seed and size give the same ones for any number of workers."""
    todo, text = jobs(seed, size, prompts_only), tok.to_str()
    if workers > 1:
        with multiprocessing.get_context("fork").Pool(workers, _start, (text,)) as pool:
            return pad(pool.map(_shard, todo, chunksize=1))
    _start(text)
    return pad([_shard(j) for j in todo])


def pad(shards: list[tuple]) -> dict:
    """Return {limit: (ids [n, limit] int16, learn [n, limit] bool, lengths [n])} on the CPU."""
    ids = np.concatenate([s[0] for s in shards])
    learn = np.concatenate([s[1] for s in shards])
    lengths = np.concatenate([s[2] for s in shards])
    start = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    out, below = {}, 0
    for limit in LIMITS:
        pick = np.flatnonzero((lengths > below) & (lengths <= limit))
        below = limit
        if not len(pick):
            continue
        column = np.arange(limit)[None]
        valid = column < lengths[pick, None]
        at = np.where(valid, start[pick, None] + column, 0)
        out[limit] = tuple(torch.from_numpy(x) for x in (
            np.where(valid, ids[at], 0).astype(np.int16), learn[at] & valid, lengths[pick]))
    return out


def batches(rows: dict, tokens: int, seed: int, longest: int):
    """Yield (limit, row numbers) for one epoch over rows up to `longest`, shuffled by seed."""
    g = torch.Generator().manual_seed(seed)
    todo = []
    for limit, (ids, _, _) in rows.items():
        if limit <= longest:
            n = max(1, tokens // limit)
            todo += [(limit, part) for part in torch.randperm(len(ids), generator=g).split(n)]
    for i in torch.randperm(len(todo), generator=g).tolist():
        yield todo[i]


def progress(step: int, steps: int, start: float, cap_s: float) -> float:
    """Return how far a run is, by steps or, on a machine too slow for them, by its time limit."""
    return max(step / steps, (time.monotonic() - start) / cap_s)


def rate(done: float, step: int, peak: float, warmup: int) -> float:
    return peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def optimizer(model, device: str):
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05},
                              {"params": rest, "weight_decay": 0.0}],
                             betas=(0.9, 0.95), fused=device == "cuda")


def train(model, rows: dict, device: str, seed: int, steps: int, cap_s: float, tokens: int, peak: float,
          log=print) -> dict:
    """Train the target; return {steps, seconds, loss, tokens, capped}.

    Numerics: fp32 weights and optimizer, bf16 autocast and a bf16 residual stream
    Runs on: CUDA or CPU; deterministic up to the device's own kernels unless `cap_s` ends it
    """
    model.to(device, torch.float32).train()
    opt, start, step, seen = optimizer(model, device), time.monotonic(), 0, 0
    rows = {k: tuple(x.to(device) for x in v) for k, v in rows.items()}
    history, done, epoch = [], 0.0, 0
    while done < 1:
        longest = 448 if done < 0.12 else LIMITS[-1]  # short rows first: copying is learned there
        for limit, part in batches(rows, tokens, seed * 1000 + epoch, longest):
            done = progress(step, steps, start, cap_s)
            if done >= 1 or (longest == 448 and done >= 0.12):
                break
            for group in opt.param_groups:
                group["lr"] = rate(done, step, peak, 200)
            ids, learn, lengths = (x[part.to(device)] for x in rows[limit])
            ids = ids.long()
            inside = torch.arange(1, limit, device=device)[None] < lengths[:, None]
            weight = torch.where(learn[:, 1:], 1.0, 0.03) * inside
            with torch.autocast(device, torch.bfloat16):
                h, _ = model.full(ids[:, :-1])
                logits = model.logits(h)
            per = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
            loss = (per * weight.flatten()).sum() / weight.sum()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step, seen = step + 1, seen + ids.numel()
            if step % LOG_EVERY == 0 or step == 1:
                answers = (per.detach() * learn[:, 1:].flatten()).sum() / learn[:, 1:].sum()
                value = float(loss.detach())
                history.append((step, value, float(answers)))
                log(f"target step {step} loss {value:.4f} answers {float(answers):.4f} "
                    f"len {limit} {time.monotonic() - start:.0f}s")
        epoch += 1
    return {"steps": step, "seconds": round(time.monotonic() - start, 1), "tokens": seen,
            "ended by the clock": step < steps, "last answer loss": history[-1][2]}
