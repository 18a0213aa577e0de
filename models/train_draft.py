# SPDX-License-Identifier: Apache-2.0
"""Distil the drafter from the target's own greedy answers."""
from __future__ import annotations

import time

import torch

from decode import EOS, block_loss, generate
from train_target import batches, optimizer, progress, rate

MAX_NEW = 88
ANCHORS = 16


def answer(model, rows: dict, device: str, cap_s: float, log=print) -> dict:
    """Let the bf16 target answer prompt rows greedily; return rows of prompt + answer.

    Result: {limit: (ids [n, limit + MAX_NEW] int16, starts [n], lengths [n])}; answers that did
    not end within MAX_NEW tokens are kept, cut.
    """
    start, out = time.monotonic(), {}
    for i, (limit, (ids, _, lengths)) in enumerate(sorted(rows.items())):
        stop, parts = cap_s * (i + 1) / len(rows), []
        for part in torch.arange(len(ids)).split(max(1, (2**20 if device == "cuda" else 2**15) // limit)):
            if parts and time.monotonic() - start > stop:
                break
            prompt, n = ids[part].to(device).long(), lengths[part].to(device)
            new = generate(model, prompt, n, MAX_NEW)
            count = (new >= 0).sum(1)
            both = torch.zeros(len(part), limit + MAX_NEW, dtype=torch.int16, device=device)
            both[:, :limit] = prompt.to(torch.int16)
            at = n[:, None] + torch.arange(MAX_NEW, device=device)
            both.scatter_(1, at, torch.where(new >= 0, new, 0).to(torch.int16))
            parts.append((both.cpu(), n.cpu(), (n + count).cpu()))
        out[limit] = tuple(torch.cat(x) for x in zip(*parts))
        last = out[limit][0].gather(1, out[limit][2][:, None] - 1)
        ended = float((last == EOS).float().mean())
        log(f"answers len {limit} rows {len(out[limit][0])} mean tokens "
            f"{float((out[limit][2] - out[limit][1]).float().mean()):.1f} with an end {ended:.3f} "
            f"{time.monotonic() - start:.0f}s")
    return out


def warm_start(model, draft) -> None:
    """Copy the target's last layers and final norm into the drafter; features of the last id open fc.

    The head is the target's, so a drafter that starts anywhere else first has to find its basis.
    """
    last = len(model.model.layers) - len(draft.layers)
    for mine, theirs in zip(draft.layers, model.model.layers[last:]):
        mine.load_state_dict(theirs.state_dict())
    draft.norm.load_state_dict(model.model.norm.state_dict())
    draft.hidden_norm.load_state_dict(draft.layers[0].input_layernorm.state_dict())
    with torch.no_grad():
        width = draft.s.hidden
        draft.fc.weight[:, -width:] += torch.eye(width, device=draft.fc.weight.device)


def train(model, draft, rows: dict, device: str, seed: int, steps: int, cap_s: float, tokens: int,
          peak: float, log=print, every: int = 250) -> dict:
    """Train the drafter on answered rows; the target is frozen and in bf16.

    Numerics: fp32 drafter weights and optimizer, bf16 autocast; see decode.block_loss
    """
    draft.to(device, torch.float32).train()
    opt, start, step, done, epoch, history = optimizer(draft, device), time.monotonic(), 0, 0.0, 0, []
    rows = {k: tuple(x.to(device) for x in v) for k, v in rows.items()}
    torch.manual_seed(seed)
    while done < 1:
        for limit, part in batches(rows, tokens, seed * 1000 + 500 + epoch, max(rows)):
            done = progress(step, steps, start, cap_s)
            if done >= 1:
                break
            for group in opt.param_groups:
                group["lr"] = rate(done, step, peak, 200)
            ids, begin, lengths = (x[part.to(device)] for x in rows[limit])
            ids = ids.long()  # padded to the bucket: a fixed shape per bucket keeps attention plans cached
            column = torch.arange(ids.shape[1], device=device)[None]
            learn = (column >= begin[:, None]) & (column < lengths[:, None])
            span = (lengths - 1 - begin).clamp(min=1)[:, None]
            u = torch.rand(len(ids), ANCHORS).to(device)
            anchors = begin[:, None] + (u * span).long().clamp(max=span - 1)
            with torch.autocast(device, torch.bfloat16):
                loss, accept, first = block_loss(model, draft, ids, learn, anchors)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            opt.step()
            step += 1
            if step % every == 0 or step == 1:
                history.append((step, float(loss.detach()), float(accept)))
                log(f"draft step {step} loss {float(loss.detach()):.4f} accept {float(accept):.2f} "
                    f"first {float(first):.3f} len {limit} {time.monotonic() - start:.0f}s")
        epoch += 1
    return {"steps": step, "seconds": round(time.monotonic() - start, 1), "ended by the clock": step < steps,
            "last loss": history[-1][1], "last accept length": history[-1][2]}
