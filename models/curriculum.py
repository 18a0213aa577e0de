# SPDX-License-Identifier: Apache-2.0
"""One training loop for the sibling's target and drafter: phases of growing length, spread positions.

Two things make 110,000 tokens reachable in minutes. Short rows are given positions with gaps in them
(as in PoSE, arXiv 2309.10400), so that every rotation up to the context length is seen at the price of a
short row; and real long rows follow, few and full of questions, so that attention stays sharp over that
many keys.
"""
from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decode import block_loss
from train_target import LIMITS, optimizer, progress, rate

LOG_EVERY_S = 5.0
CUTS = 4
FULL_STOP = "."
BRIEF, SHORT = 448, LIMITS[-1]


@dataclass(frozen=True)
class Phase:
    """Up to `steps` steps, or `seconds` where those come first; `mix` is each length's share of steps.

    A length of 448 or 4096 stands for all rows up to it; any other for its own padded length.
    `spread` is the share of rows whose positions have gaps, `noise` what modeling.rough adds to K and V;
    an NVFP4 pool's error is about 0.045 by that measure.
    """
    name: str
    steps: int
    seconds: float
    mix: dict[int, float]
    spread: float
    noise: float = 0.0


def target_phases(scale: float) -> tuple[Phase, ...]:
    return (Phase("brief", 600, 12 * scale, {BRIEF: 1.0}, 0.0),
            Phase("short", 4500, 68 * scale, {SHORT: 1.0}, 0.5),
            Phase("middle", 1500, 45 * scale, {SHORT: 0.4, 8192: 0.25, 16384: 0.2, 32768: 0.15}, 0.5, 0.05),
            Phase("long", 1500, 75 * scale,
                  {SHORT: 0.5, 8192: 0.1, 16384: 0.1, 32768: 0.1, 65536: 0.11, 131072: 0.09}, 0.4, 0.05))


def draft_phases(scale: float) -> tuple[Phase, ...]:
    return (Phase("short", 2500, 34 * scale, {SHORT: 1.0}, 0.4),
            Phase("long", 1500, 36 * scale,
                  {SHORT: 0.5, 8192: 0.12, 16384: 0.12, 32768: 0.1, 65536: 0.08, 131072: 0.08}, 0.4))


class Feed:
    """Rows on the device, drawn by length, each length in shuffled rounds."""

    def __init__(self, device: str, tokens: int, seed: int):
        self.device, self.tokens = device, tokens
        self.rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.left: dict[int, list[Tensor]] = {}
        self.random = torch.Generator().manual_seed(seed)

    def add(self, rows: dict) -> None:
        for limit, arrays in rows.items():
            self.rows[limit] = tuple(x.to(self.device) for x in arrays)
            self.left[limit] = []

    def _pick(self, choices: dict[int, float]) -> int:
        names, weights = list(choices), torch.tensor(list(choices.values()), dtype=torch.float64)
        return names[int(torch.multinomial(weights, 1, generator=self.random))]

    def draw(self, mix: dict[int, float]) -> tuple[int, Tensor, Tensor, Tensor]:
        """Return (padded length, ids [n, limit] int64, learn bool, lengths) of about `tokens` tokens."""
        known = {k: v for k, v in mix.items() if k in (BRIEF, SHORT) or k in self.rows}
        limit = self._pick(known)
        if limit in (BRIEF, SHORT):  # as often as an epoch over all of them would bring each length
            limit = self._pick({k: len(v[0]) / max(1, self.tokens // k)
                                for k, v in self.rows.items() if k <= limit})
        n = max(1, self.tokens // limit)
        if not self.left[limit]:
            self.left[limit] = list(torch.randperm(len(self.rows[limit][0]), generator=self.random).split(n))
        part = self.left[limit].pop().to(self.device)
        ids, learn, lengths = (x[part] for x in self.rows[limit])
        return limit, ids.long(), learn, lengths


def spread_positions(ids: Tensor, learn: Tensor, full_stop: int, span: int, share: float) -> Tensor:
    """Return positions [B, T] below `span`, with up to CUTS gaps after sentences of `share` of the rows.

    Sizes: ids [B, T] int64, learn [B, T] bool; tokens of answers keep their neighbours
    Numerics: the sum of a row's gaps is (span - T) * u^2 for a uniform u, so that small ones are common
    """
    rows, width = ids.shape
    allowed = (ids == full_stop) & ~learn
    score, at = torch.where(allowed, torch.rand(rows, width, device=ids.device), 0.0).topk(min(CUTS, width), 1)
    parts = torch.rand_like(score) * (score > 0)
    parts = parts / parts.sum(1, keepdim=True).clamp(min=1e-6)
    total = max(0, span - width) * torch.rand(rows, 1, device=ids.device).square()
    total = total * (torch.rand(rows, 1, device=ids.device) < share)
    gaps = torch.zeros(rows, width + 1, dtype=torch.int64, device=ids.device)
    gaps.scatter_add_(1, at + 1, (parts * total).long())
    return torch.arange(width, device=ids.device) + gaps.cumsum(1)[:, :width]


def target_loss(model, phase: Phase, limit: int, ids: Tensor, learn: Tensor, lengths: Tensor, positions: Tensor):
    """Return (loss, {answers}): next-token loss; text that no answer rests on weighs little, less when long."""
    inside = torch.arange(1, limit, device=ids.device)[None] < lengths[:, None]
    weight = torch.where(learn[:, 1:], 1.0, min(0.03, 60 / limit)) * inside
    h, _ = model.full(ids[:, :-1], positions=positions[:, :-1], noise=phase.noise)
    per = F.cross_entropy(model.logits(h).flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    answers = (per.detach() * learn[:, 1:].flatten()).sum() / learn[:, 1:].sum()
    return (per * weight.flatten()).sum() / weight.sum(), {"answers": answers}


def draft_loss(target, draft, phase: Phase, limit: int, ids: Tensor, learn: Tensor, lengths: Tensor, positions: Tensor):
    """Return (loss, {accept, first}) of blocks opened at answer tokens drawn at random."""
    opens = learn.clone()
    opens[:, :-1] &= learn[:, 1:]
    opens[:, -1] = False
    anchors = torch.multinomial(opens.float(), 16 if limit <= SHORT else 64, replacement=True)
    loss, accept, first = block_loss(target, draft, ids, learn, anchors, positions)
    return loss, {"accept": accept, "first": first}


def run(name: str, model, feed: Feed, phases, loss_of, seed: int, peak: float, full_stop: int, span: int,
        log=print, before_phase=None, probe=None, probe_every_s: float = 20.0) -> dict:
    """Train `model` through `phases`; return what each took.

    loss_of(phase, limit, ids, learn, lengths, positions) gives (loss, values to log); before_phase(phase) may
    add rows; probe() runs every `probe_every_s` and at the end of each phase, and its False ends the run.
    Numerics: fp32 weights and optimizer, bf16 autocast; the rate is a cosine over all phases
    Runs on: CUDA or CPU; repeatable up to the device's own kernels when steps end every phase
    """
    device = feed.device
    model.to(device, torch.float32).train()
    opt, out, step, passed = optimizer(model, device), {}, 0, 0.0
    whole = sum(p.seconds for p in phases)
    torch.manual_seed(seed)
    for phase in phases:
        if before_phase:
            before_phase(phase)
        start = logged = probed = time.monotonic()
        done, inner, tokens, counts, going = 0.0, 0, 0, {}, True
        while done < 1 and going:
            for group in opt.param_groups:
                group["lr"] = rate((passed + min(done, 1.0) * phase.seconds) / whole, step, peak, 200)
            limit, ids, learn, lengths = feed.draw(phase.mix)
            positions = spread_positions(ids, learn, full_stop, span, phase.spread)
            with torch.autocast(device, torch.bfloat16):
                loss, values = loss_of(phase, limit, ids, learn, lengths, positions)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step, inner, tokens = step + 1, inner + 1, tokens + ids.numel()
            counts[limit] = counts.get(limit, 0) + 1
            done, now = progress(inner, phase.steps, start, phase.seconds), time.monotonic()
            if now - logged > LOG_EVERY_S or step == 1 or done >= 1:
                logged = now
                log(f"{name} {phase.name} step {step} loss {float(loss.detach()):.4f} "
                    + " ".join(f"{k} {float(v):.4f}" for k, v in values.items())
                    + f" len {limit} {tokens / (time.monotonic() - start):,.0f} tokens/s {now - start:.0f}s")
            if probe and (now - probed > probe_every_s or done >= 1):
                going = probe(phase, done >= 1)
                probed = time.monotonic()
        passed += phase.seconds
        out[phase.name] = {"steps": inner, "seconds": round(time.monotonic() - start, 1), "tokens": tokens,
                           "ended by the clock": inner < phase.steps,
                           "batches by length": dict(sorted(counts.items()))}
        if not going:
            out["ended by the probe"] = phase.name
            break
    return out
