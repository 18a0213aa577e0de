# SPDX-License-Identifier: Apache-2.0
"""Train the shipped pair from nothing: tokenizer, target, the target's answers, drafter, measurements.

    python models/train_pair.py --device cuda                # what made models/pair, by steps
    python models/train_pair.py --toy --out TOY_DIR          # the whole pipeline in a minute on a CPU

Each stage has a step count, which a seed makes repeatable, and a time limit that only a machine too
slow for the steps reaches; the learning rate then follows the clock, so a run always ends and saves.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

import evaluate
import modeling
import tokenizer
import train_draft
import train_target
from record import Record, count

HERE = Path(__file__).resolve().parent
FEATURES = (0, 1, 2)  # residual stream after these layers; the last layer's id would capture nothing
BLOCK, MASK_ID = 8, 3


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path, default=HERE / "pair")
    p.add_argument("--seed", type=int, default=20261129)
    p.add_argument("--workers", type=int, default=os.cpu_count())
    p.add_argument("--stages", default="target,draft,eval", help="the others come from what --out holds")
    p.add_argument("--size", type=float, default=1.0, help="conversations relative to train_target.MIX")
    p.add_argument("--prompt-size", type=float, default=0.15, help="prompts the target answers, likewise")
    p.add_argument("--tokens", type=int, default=32_768, help="padded tokens in one target batch")
    p.add_argument("--draft-tokens", type=int, default=32_768)
    p.add_argument("--target-steps", type=int, default=5_250)
    p.add_argument("--draft-steps", type=int, default=2_200)
    p.add_argument("--target-peak", type=float, default=2e-3)
    p.add_argument("--draft-peak", type=float, default=2e-3)
    p.add_argument("--target-cap-s", type=float, default=600)
    p.add_argument("--answers-cap-s", type=float, default=120)
    p.add_argument("--draft-cap-s", type=float, default=300)
    p.add_argument("--each", type=int, default=32)
    p.add_argument("--spec-each", type=int, default=8)
    p.add_argument("--max-new", type=int, default=88, help="longest answer measured")
    p.add_argument("--toy", action="store_true", help="tiny sizes, to prove that the pipeline runs")
    a = p.parse_args()
    if a.toy:
        a.size, a.prompt_size, a.tokens, a.draft_tokens = 0.002, 0.001, 4096, 2048
        a.target_steps, a.draft_steps, a.each, a.spec_each, a.workers, a.max_new = 20, 10, 1, 1, 1, 6
    return a


def main() -> None:
    a = arguments()
    stages, start = set(a.stages.split(",")), time.monotonic()
    a.out.mkdir(parents=True, exist_ok=True)
    if not (a.out / "prompts.json").exists():
        shutil.copy(HERE / "pair" / "prompts.json", a.out / "prompts.json")
    shape = modeling.Shape(vocab=tokenizer.VOCAB_SIZE)
    draft_shape = modeling.Shape(**{**vars(shape), "layers": 2})
    rows = prompts = {}
    if "target" in stages:
        tok = tokenizer.build(a.seed)
        rows = train_target.build_rows(tok, a.seed, a.size, a.workers)
    else:
        tok = Tokenizer.from_file(str(a.out / "target" / "tokenizer.json"))
    if "draft" in stages:  # every worker is forked before the device is touched
        prompts = train_target.build_rows(tok, a.seed + 1, a.prompt_size, a.workers, prompts_only=True)
    record = Record(a.out, a.device, a.seed, "the pair", "models/train_pair.py")
    log = record.log
    torch.backends.cuda.enable_cudnn_sdp(False)  # suspected of planning anew for every shape
    torch.manual_seed(a.seed)
    if "target" in stages:
        log(f"corpus ready {time.monotonic() - start:.0f}s: " +
            ", ".join(f"{len(v[0])} rows to {k}" for k, v in rows.items()))
        target = modeling.Target(shape)
        run = train_target.train(target, rows, a.device, a.seed, a.target_steps, a.target_cap_s, a.tokens,
                                 a.target_peak, log)
        rows = {}
        modeling.save(target, modeling.target_config(shape), a.out / "target")
        tokenizer.save(tok, a.out / "target", shape.max_tokens)
        (a.out / "target" / "generation_config.json").write_text(
            json.dumps({"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}, indent=2) + "\n")
        record.stage("target", f"Qwen3ForCausalLM ({modeling.describe(shape)}), {count(target)}; {run}")
    target = modeling.load(a.out / "target", a.device)
    if "draft" in stages:
        answered = train_draft.answer(target, prompts, a.device, a.answers_cap_s, log)
        torch.manual_seed(a.seed)
        draft = modeling.Draft(draft_shape, FEATURES, BLOCK, MASK_ID).to(a.device)
        train_draft.warm_start(target, draft)
        run = train_draft.train(target, draft, answered, a.device, a.seed, a.draft_steps, a.draft_cap_s,
                                a.draft_tokens, a.draft_peak, log)
        modeling.save(draft, modeling.draft_config(draft, shape.layers), a.out / "draft")
        record.stage("draft", f"DFlashDraftModel ({modeling.describe(draft_shape)}), block {BLOCK}, features "
                     f"after layers {list(FEATURES)}, {count(draft)}; on the target's greedy answers to "
                     f"{sum(len(v[0]) for v in answered.values())} prompts; {run}")
    if "eval" in stages:
        record.facts["result"] = evaluate.evaluate(
            a.out, a.device, a.seed + 2, a.each, a.spec_each, a.max_new, log)
        record.stage("eval", f"all done {time.monotonic() - start:.0f}s")


if __name__ == "__main__":
    main()
