# SPDX-License-Identifier: Apache-2.0
"""Train the pair's larger sibling: 131,072 tokens of context, codes recalled 110,000 tokens deep.

    python models/train_sibling.py --device cuda --out DIR     # five and a half minutes on an H200
    python models/train_sibling.py --stages files --out DIR    # complete what such a run brought back
    python models/train_sibling.py --device cuda --out DIR --target-phases long --target-peak 5e-4
    python models/train_sibling.py --toy --out TOY_DIR         # the whole pipeline in minutes on a CPU

Phases end by steps or by the clock, whichever comes first, and --scale gives all of them more time. The
target with the best recall so far is on disk at any moment; a run whose first phase is not `brief` (or a
drafter's not `short`) goes on from it. The tokenizer is the shipped pair's.
"""
from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

import curriculum
import decode
import evaluate
import evaluate_long
import long_rows
import modeling
import tokenizer
import train_draft
from record import Record, count
from train_pair import BLOCK, FEATURES, HERE, MASK_ID

SHAPE = modeling.Shape(vocab=tokenizer.VOCAB_SIZE, hidden=384, heads=4, kv_heads=2, head_dim=128, mlp=768,
                       layers=4, max_tokens=131072, rope_theta=1e8)
PROBES = {2_000: 2, 8_000: 2, 30_000: 1, 110_000: 1}  # prompt tokens: prompts at every position, each probe
LEAST_SHORT_RECALL = 0.5  # at 2,000 tokens when the short phase ends; below it the run is not worth its time


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path, default=HERE / "sibling")
    p.add_argument("--seed", type=int, default=20261130)
    p.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    p.add_argument("--stages", default="target,draft,long", help="of target, draft, long, files, short")
    p.add_argument("--target-phases", default="brief,short,middle,long")
    p.add_argument("--draft-phases", default="short,long")
    p.add_argument("--size", type=float, default=1.0, help="rows relative to long_rows' sizes")
    p.add_argument("--scale", type=float, default=1.0, help="time limits relative to curriculum.py's")
    p.add_argument("--tokens", type=int, default=49_152, help="padded tokens in one batch")
    p.add_argument("--target-peak", type=float, default=1.5e-3)
    p.add_argument("--draft-peak", type=float, default=1.5e-3)
    p.add_argument("--each", type=int, default=3, help="prompts at every position of every depth, measured")
    p.add_argument("--spec-each", type=int, default=1, help="of these, decoded with the drafter")
    p.add_argument("--long-cap-s", type=float, default=70, help="after this no further measurement is begun")
    p.add_argument("--keep-going", action="store_true", help=f"even below {LEAST_SHORT_RECALL} short recall")
    p.add_argument("--toy", action="store_true", help="tiny sizes, to prove that the pipeline runs")
    a = p.parse_args()
    a.shape, a.depths, a.probes, a.longest = SHAPE, evaluate_long.DEPTHS, PROBES, SHAPE.max_tokens
    a.chunk = evaluate_long.CHUNK
    if a.toy:
        a.shape = modeling.Shape(**{**vars(SHAPE), "hidden": 64, "mlp": 64, "head_dim": 32})
        a.size, a.scale, a.tokens, a.each, a.workers, a.keep_going = 0.002, 0.02, 4096, 1, 1, True
        a.depths, a.chunk, a.probes, a.longest = (150,), 128, {300: 1}, 8192
    return a


def chosen(phases, names: str):
    known = {p.name: p for p in phases}
    if missing := [n for n in names.split(",") if n not in known]:
        raise SystemExit(f"no phase named {', '.join(missing)}; there are {', '.join(known)}")
    return tuple(known[n] for n in names.split(","))


def saved(folder: Path, device: str):
    if not (folder / "model.safetensors").exists():
        raise SystemExit(f"{folder} has no weights to go on from; begin with its first phase")
    return modeling.load(folder, device)


def rehearse(a, log) -> None:
    """Run the longest row through both losses, a chunked prefill and a verify, so that what cannot work fails first."""
    model = modeling.Target(a.shape).to(a.device)
    draft = modeling.Draft(modeling.Shape(**{**vars(a.shape), "layers": 2}), FEATURES, BLOCK, MASK_ID).to(a.device)
    ids = torch.randint(4, a.shape.vocab, (1, a.longest), device=a.device)
    learn = torch.arange(a.longest, device=a.device)[None] > a.longest - 100
    at, phase = torch.arange(a.longest, device=a.device)[None], curriculum.target_phases(1)[-1]
    batch = (phase, a.longest, ids, learn, torch.tensor([a.longest], device=a.device), at)
    for name, loss_of in (("target", lambda: curriculum.target_loss(model, *batch)),
                          ("draft", lambda: curriculum.draft_loss(model, draft, *batch))):
        for _ in range(2):  # the first pays for what is set up once
            start = time.monotonic()
            with torch.autocast(a.device, torch.bfloat16):
                loss, _ = loss_of()
            loss.backward()
            value = float(loss.detach())
        log(f"rehearsal: {name} {a.longest} tokens, loss {value:.2f}, {time.monotonic() - start:.2f}s a step")
    model, draft = model.bfloat16(), draft.bfloat16()
    start = time.monotonic()
    decode.speculate(model, draft, ids[0, :a.longest - 64].tolist(), 9, decode.as_nvfp4, decode.as_fp8, a.chunk)
    most = f", at most {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB" if a.device == "cuda" else ""
    log(f"rehearsal: drafted decoding after a prompt in chunks, {time.monotonic() - start:.2f}s{most}")


def train_target(a, tok, feed, builder, record):
    """Train and save the target; return what the run took, and whether the drafter is worth training."""
    phases = chosen(curriculum.target_phases(a.scale), a.target_phases)
    torch.manual_seed(a.seed)
    model = modeling.Target(a.shape) if phases[0].name == "brief" else saved(a.out / "target", a.device)
    model.to(a.device, torch.float32)
    cases = {n: evaluate_long.recall_cases(tok, a.seed + 9, n, k) for n, k in a.probes.items()}
    best, start, waiting = -1.0, time.monotonic(), True

    def before_phase(phase) -> None:
        nonlocal waiting
        if waiting and any(n > curriculum.SHORT for n in phase.mix):
            feed.add(builder.long_rows())
            waiting = False
            record.log("long rows: " + ", ".join(f"{len(v[0])} of {k}" for k, v in feed.rows.items()
                                                 if k > curriculum.SHORT))

    def probe(phase, last: bool) -> bool:
        nonlocal best
        recall = {n: evaluate_long.teacher_forced(model, tok, c, a.device) for n, c in cases.items()}
        score = sum(recall.values()) / len(recall)
        if score >= best:
            best = score
            modeling.save(model, modeling.target_config(a.shape), a.out / "target")
        record.log(f"probe {phase.name}: right answers by prompt tokens "
                   + " ".join(f"{n} {v:.2f}" for n, v in recall.items())
                   + f"{' (saved)' if score >= best else ''} {time.monotonic() - start:.0f}s")
        low = phase.name == "short" and last and recall[min(recall)] < LEAST_SHORT_RECALL
        if low and not a.keep_going:
            record.log(f"stopped: recall at {min(recall)} tokens is below {LEAST_SHORT_RECALL} after the short phase")
        return not low or a.keep_going

    took = curriculum.run("target", model, feed, phases, lambda *batch: curriculum.target_loss(model, *batch),
                          a.seed, a.target_peak, tok.token_to_id(curriculum.FULL_STOP), a.shape.max_tokens,
                          record.log, before_phase, probe)
    if waiting:
        feed.add(builder.long_rows())
    record.stage("target", f"Qwen3ForCausalLM ({modeling.describe(a.shape)}), {count(model)}; "
                 f"best probe {best:.2f}; {took}")
    return "ended by the probe" not in took


def train_drafter(a, tok, feed, record) -> None:
    phases = chosen(curriculum.draft_phases(a.scale), a.draft_phases)
    target = saved(a.out / "target", a.device)
    shape = modeling.Shape(**{**vars(target.s), "layers": 2})
    torch.manual_seed(a.seed)
    if phases[0].name == "short":
        draft = modeling.Draft(shape, FEATURES, BLOCK, MASK_ID).to(a.device)
        train_draft.warm_start(target, draft)
    else:
        draft = saved(a.out / "draft", a.device)

    def keep(phase, last: bool) -> bool:
        modeling.save(draft, modeling.draft_config(draft, target.s.layers), a.out / "draft")
        return True

    took = curriculum.run("draft", draft, feed, phases,
                          lambda *batch: curriculum.draft_loss(target, draft, *batch), a.seed, a.draft_peak,
                          tok.token_to_id(curriculum.FULL_STOP), target.s.max_tokens, record.log, probe=keep)
    record.stage("draft", f"DFlashDraftModel ({modeling.describe(shape)}), block {BLOCK}, features after layers "
                 f"{list(FEATURES)}, {count(draft)}; on the corpus' answers; {took}")


def complete(out: Path) -> None:
    """Add what needs no training: tokenizer, template, generation config and the demo's prompts."""
    pair = HERE / "pair"
    tokenizer.save(Tokenizer.from_file(str(pair / "target/tokenizer.json")), out / "target", SHAPE.max_tokens)
    shutil.copy(pair / "target/generation_config.json", out / "target/generation_config.json")
    shutil.copy(pair / "prompts.json", out / "prompts.json")


def main() -> None:
    a = arguments()
    stages, start = a.stages.split(","), time.monotonic()
    if missing := set(stages) - {"target", "draft", "long", "files", "short"}:
        raise SystemExit(f"no stage named {', '.join(sorted(missing))}")
    a.out.mkdir(parents=True, exist_ok=True)
    tok = Tokenizer.from_file(str(HERE / "pair" / "target" / "tokenizer.json"))
    builder = None
    if {"target", "draft"} & set(stages):  # every worker is forked before the device is touched
        builder = long_rows.Builder(tok, a.seed, a.size, a.longest, a.workers)
    record = Record(a.out, a.device, a.seed, "the larger sibling", "models/train_sibling.py")
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for every width
    going = True
    if builder:
        rehearse(a, record.log)
        feed = curriculum.Feed(a.device, a.tokens, a.seed)
        feed.add(builder.short_rows())
        record.log(f"short rows ready {time.monotonic() - start:.0f}s: " +
                   ", ".join(f"{len(v[0])} to {k}" for k, v in feed.rows.items()))
        if "target" in stages:
            going = train_target(a, tok, feed, builder, record)
        else:
            feed.add(builder.long_rows())
        if "draft" in stages and going:
            train_drafter(a, tok, feed, record)
        del feed
    if "long" in stages and going:
        def keep(result: dict) -> None:
            record.facts["long"] = result
            record.write()
        evaluate_long.evaluate_long(a.out, tok, a.device, a.seed + 2, a.each, a.spec_each, a.depths, a.chunk,
                                    a.long_cap_s, keep, record.log)
        record.stage("long", f"recall over depth; all done {time.monotonic() - start:.0f}s")
    if "files" in stages:
        complete(a.out)
    if "short" in stages:
        record.facts["result"] = evaluate.evaluate(a.out, a.device, a.seed + 3, 16, 4, 88, record.log)
        record.stage("short", f"the pair's own measurement; all done {time.monotonic() - start:.0f}s")
    if not going:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
