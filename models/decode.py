# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding with a KV cache, and DFlash speculative decoding as SGLang 0.5.23 does it."""
from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

sys.path.insert(0, str(Path(__file__).parents[1]))  # the kit need not be installed to train

from modeling import Draft, Target, rotation, sdpa  # noqa: E402

from sglang_fp4kv import codec  # noqa: E402

EOS = 2


def as_fp8(x: Tensor) -> Tensor:
    """Round through an FP8 E4M3 pool with scale 1."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def as_nvfp4(x: Tensor) -> Tensor:
    """Round through an NVFP4 pool with global scale 1."""
    return codec.decode(*codec.encode(x, 1.0), 1.0, x.dtype)


class Cache:
    """K and V of every layer, written at absolute positions, read up to each query's position.

    `pool` rounds what is stored. A prefill attends to its own chunk's unrounded K and V, as SGLang's
    extend does, and to earlier chunks as stored; decode and verify read their own rows back from the pool.
    """

    def __init__(self, model: Target, rows: int, capacity: int, pool=None):
        s, w = model.s, model.model.embed_tokens.weight
        shape = (s.layers, rows, s.kv_heads, capacity, s.head_dim)
        self.k, self.v = w.new_zeros(shape), w.new_zeros(shape)
        self.rows = torch.arange(rows, device=w.device)[:, None]
        self.pool = pool or (lambda x: x)

    def attends(self, positions: Tensor, prefill: bool, read: int):
        mask = None if prefill else (
            torch.arange(read, device=positions.device)[None, None, None] <= positions[:, None, :, None])

        def make(layer: int):
            def attend(q, k, v):
                self.k[layer][self.rows, :, positions] = self.pool(k).transpose(1, 2)
                self.v[layer][self.rows, :, positions] = self.pool(v).transpose(1, 2)
                if prefill and read == k.shape[2]:
                    return sdpa(q, k, v, causal=True)
                if prefill:
                    before = read - k.shape[2]
                    k, v = (torch.cat((x[layer][:, :, :before], own), 2)
                            for x, own in ((self.k, k), (self.v, v)))
                    return sdpa(q, k, v, causal_lower_right(q.shape[2], read))
                return sdpa(q, self.k[layer][:, :, :read], self.v[layer][:, :, :read], mask)
            return attend
        return [make(i) for i in range(len(self.k))]


def prefill(model: Target, cache: Cache, ids: Tensor, features: tuple[int, ...] = (), chunk: int = 0):
    """Run ids [B, L] into an empty cache, `chunk` tokens at a time (0: all at once); as Target.forward."""
    parts = []
    for start in range(0, ids.shape[1], chunk or ids.shape[1]):
        part = ids[:, start:start + (chunk or ids.shape[1])]
        at = torch.arange(start, start + part.shape[1], device=ids.device)[None].expand(len(ids), -1)
        parts.append(model(part, at, cache.attends(at, True, start + part.shape[1]), features))
    hidden, taken = zip(*parts)
    return torch.cat(hidden, 1), torch.cat(taken, 1) if features else None


@torch.inference_mode()
def generate(model: Target, prompts: Tensor, lengths: Tensor, max_new: int, pool=None, chunk: int = 0) -> Tensor:
    """Decode greedily for right-padded prompts [B, L]; return [B, max_new], -1 after the end."""
    rows, width = prompts.shape
    cache = Cache(model, rows, width + max_new, pool)
    h, _ = prefill(model, cache, prompts, (), chunk)
    last = h[torch.arange(rows, device=h.device), lengths - 1]
    out = torch.full((rows, max_new), -1, dtype=torch.int64, device=prompts.device)
    alive = torch.ones(rows, dtype=torch.bool, device=prompts.device)
    for i in range(max_new):
        token = model.logits(last).argmax(-1)
        out[:, i] = torch.where(alive, token, -1)
        alive &= token != EOS
        if i % 8 == 7 and not alive.any():
            break
        at = (lengths + i)[:, None]
        h, _ = model(token[:, None], at, cache.attends(at, False, width + max_new))
        last = h[:, 0]
    return out


@torch.inference_mode()
def speculate(model: Target, draft: Draft, prompt: list[int], max_new: int, pool=None, draft_pool=None,
              chunk: int = 0):
    """Decode one prompt with the drafter; return (tokens, number of verify steps).

    As in srt/speculative/dflash_worker_v2.py: after a prefill of n tokens the first new token is
    the anchor at position n; the block is [anchor, mask x 7] at n..n+7; the drafter sees K/V of
    the committed positions 0..n-1, made from target features, and the whole block; the target
    verifies the block causally; the accepted prefix and one bonus token are kept, and the features
    of the anchor and of the accepted drafts are committed.
    """
    device, s = model.model.embed_tokens.weight.device, draft.s
    ids = torch.tensor([prompt], device=device)
    n, block = len(prompt), draft.block
    cache = Cache(model, 1, n + max_new + 2 * block, pool)
    draft_pool = draft_pool or (lambda x: x)
    context = [[] for _ in range(s.layers)]

    def commit(features: Tensor, start: int) -> None:
        hidden = draft.context(features)
        turn = rotation(torch.arange(start, start + features.shape[1], device=device)[None], s)
        for kv, layer in zip(context, draft.layers):
            k, v = (draft_pool(x) for x in layer.self_attn.kv(hidden, turn))
            kv[:] = [torch.cat((old, new), 2) for old, new in zip(kv, (k, v))] if kv else [k, v]

    h, features = prefill(model, cache, ids, draft.features, chunk)
    commit(features, 0)
    out, steps = [int(model.logits(h[0, -1]).argmax())], 0
    while out[-1] != EOS and len(out) < max_new:
        tokens = torch.full((1, block), draft.mask_id, device=device)
        tokens[0, 0] = out[-1]
        at = torch.arange(n, n + block, device=device)[None]
        attends = [lambda q, k, v, kv=kv: sdpa(q, torch.cat((kv[0], k), 2), torch.cat((kv[1], v), 2))
                   for kv in context]
        hidden = draft(model.embed(tokens), at, attends)
        tokens[0, 1:] = model.logits(hidden[0, 1:]).argmax(-1)
        h, features = model(tokens, at, cache.attends(at, False, n + block), draft.features)
        predicted = model.logits(h[0]).argmax(-1)
        accepted = int((tokens[0, 1:] == predicted[:-1]).long().cumprod(0).sum())
        new = tokens[0, 1:accepted + 1].tolist() + [int(predicted[accepted])]
        commit(features[:, :accepted + 1], n)
        n, steps = n + accepted + 1, steps + 1
        for token in new:
            if out[-1] != EOS and len(out) < max_new:
                out.append(token)
    return out, steps


def block_loss(model: Target, draft: Draft, ids: Tensor, learn: Tensor, anchors: Tensor,
               positions: Tensor | None = None):
    """Return (loss, expected accept length of the drawn blocks, share of first drafts that are right).

    Sizes: B rows, L tokens, N anchors a row
      ids        [B, L]       prompts and answers, right-padded
      learn      [B, L] bool  tokens of answers
      anchors    [B, N]       columns of answer tokens that an answer token follows; each opens one block
      positions  [B, L]       of the columns, where they are not 0, 1, ...; in answers in steps of 1
    Numerics: cross-entropy weighted exp(-(k-1)/4) over the k-th draft, hard labels
    """
    rows, width, n, block = *ids.shape, anchors.shape[1], draft.block
    with torch.no_grad():
        _, features = model.full(ids, draft.features, positions)
    hidden = draft.context(features)
    at = (anchors[:, :, None] + torch.arange(block, device=ids.device)).flatten(1)  # [B, N*block]
    tokens = torch.full_like(at, draft.mask_id)
    tokens[:, ::block] = ids.gather(1, anchors)
    owner = torch.arange(n, device=ids.device).repeat_interleave(block)
    seen = torch.arange(width, device=ids.device)[None, None] < anchors.repeat_interleave(block, 1)[:, :, None]
    own = (owner[:, None] == owner[None])[None].expand(rows, -1, -1)
    mask = torch.cat((seen, own), -1)[:, None]
    every = torch.arange(width, device=ids.device)[None].expand(rows, -1) if positions is None else positions
    turn = rotation(every, draft.s)
    block_at = (every.gather(1, anchors)[:, :, None] + torch.arange(block, device=ids.device)).flatten(1)

    def attend_with(layer):
        ck, cv = layer.self_attn.kv(hidden, turn)
        return lambda q, k, v: sdpa(q, torch.cat((ck, k), 2), torch.cat((cv, v), 2), mask)

    x = model.embed(tokens)
    x = draft(x, block_at, [attend_with(layer) for layer in draft.layers]).view(rows, n, block, -1)[:, :, 1:]
    logits = model.logits(x)
    goal_at = at.view(rows, n, block)[:, :, 1:]
    there = goal_at.clamp(max=width - 1).flatten(1)
    inside = learn.gather(1, there).view_as(goal_at) & (goal_at < width)
    inside = inside.long().cumprod(-1).bool()  # a block ends with its answer
    goal = ids.gather(1, there).view_as(goal_at)
    per = F.cross_entropy(logits.flatten(0, 2).float(), goal.flatten(), reduction="none").view_as(goal)
    decay = torch.exp(-torch.arange(block - 1, device=ids.device) / 4.0)
    weight = decay * inside
    right = (logits.argmax(-1) == goal) & inside
    accept = 1 + right.long().cumprod(-1).sum(-1).float().mean()
    first = right[..., 0].float().sum() / inside[..., 0].float().sum()
    return (per * weight).sum() / weight.sum(), accept, first
