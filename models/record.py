# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves beside its weights: training.json, and TRAINING.md made from it."""
from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path

import torch

import evaluate
import evaluate_long


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def count(model: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,} parameters"


def report(out: Path, facts: dict, name: str, script: str) -> str:
    """Return TRAINING.md: what was run where, what it reached, and the hashes of the weights."""
    lines = [f"# How {name} was trained", "",
             f"Written by {script} from training.json. "
             "Each stage names the run it came from.", ""]
    for i, run in enumerate(facts["runs"]):
        lines += [f"Run {i}: `{run['command']}`", f"seed {run['seed']}, {run['hardware']}", ""]
    lines += [*facts.get("notes", []), "", "| stage | run | what |", "|---|---|---|"]
    lines += [f"| {k} | {v['run']} | {v['what']} |" for k, v in facts["stages"].items()]
    lines += ["", "## Weights", ""]
    for part in ("target", "draft"):
        f = out / part / "model.safetensors"
        if f.exists():
            lines.append(f"- `{part}/model.safetensors` {f.stat().st_size:,} bytes, sha256 {sha256(f)}")
    if "long" in facts:
        lines += _long(facts["long"])
    result = facts.get("result")
    if result:
        lines += ["", "## Measured", "",
                  "bf16 weights in plain torch; `nvfp4` and `fp8` round K and V through such a pool. Accept "
                  "length is completion tokens over verify steps, as SGLang reports it; equal counts answers "
                  "whose tokens match undrafted greedy decoding. Gap is the log-probability distance of the "
                  "two best tokens.", "",
                  "| kind | right bf16 | right fp8 | right nvfp4 | accept bf16 | accept nvfp4 + fp8 draft "
                  "| equal bf16 | equal nvfp4 | gap p5 | gap p50 |", "|" + "---|" * 10]
        for k, acc in result["accept"].items():
            right = " | ".join(f"{result['accuracy'][p][k]:.2f}" for p in evaluate.POOLS)
            b, q, g = acc["bf16"], acc["nvfp4+fp8"], result["gap"][k]
            lines.append(f"| {k} | {right} | {b['accept']} | {q['accept']} | {b['equal']} | {q['equal']} "
                         f"| {g['p5']} | {g['p50']} |")
        lines += ["", f"Right: {result['each']} prompts a kind; accept, equal and gap: {result['spec_each']} "
                  f"of them; up to {result['max_new']} new tokens; seed {result['seed']}.", "",
                  "| demo prompt | tokens in | tokens out | verify steps | accept | smallest gap | answer |",
                  "|" + "---|" * 7]
        lines += [f"| {d['name']} | {d['prompt_tokens']} | {d['tokens']} | {d['steps']} | {d['accept']} | "
                  f"{d['min_gap']} | `{json.dumps(d['text'], ensure_ascii=False)}` |" for d in result["demo"]]
    for k, v in facts["stages"].items():
        lines += ["", f"## Log: {k}", "", "```", *v["log"], "```"]
    return "\n".join([*lines, ""])


def _long(result: dict) -> list[str]:
    """Return the table of evaluate_long.evaluate_long's result."""
    places = list(map(str, evaluate_long.POSITIONS))
    lines = ["", "## Recall over depth", "",
             f"A code planted {', '.join(places)} of the way into the prompt; prompts go in in chunks of "
             f"{result['chunk']:,} tokens that read the earlier ones from the pool. Share of {result['each']} "
             f"prompts each; accept and equal as below, {result['spec_each']} prompts a position.", "",
             "| depth | " + " | ".join(f"{p} at {x}" for p in evaluate.POOLS for x in places)
             + " | accept bf16 | accept nvfp4 + fp8 draft | equal bf16 | equal nvfp4 |",
             "|" + "---|" * (5 + len(evaluate.POOLS) * len(places))]
    for depth, pools in sorted(result["recall"].items(), key=lambda x: int(x[0])):
        cells = [f"{pools[p][x]:.2f}" if p in pools else "not run" for p in evaluate.POOLS for x in places]
        accept = result["accept"].get(depth, {})
        for key in ("accept", "equal"):
            cells += [str(accept[p][key]) if p in accept else "not run" for p in ("bf16", "nvfp4+fp8")]
        lines.append(f"| {int(depth):,} | " + " | ".join(cells) + " |")
    return lines


class Record:
    """training.json: the runs, the stages with their logs, the last measurements; TRAINING.md beside it."""

    def __init__(self, out: Path, device: str, seed: int, name: str, script: str):
        self.out, self.file, self.name, self.script = out, out / "training.json", name, script
        self.facts = json.loads(self.file.read_text()) if self.file.exists() else {"runs": [], "stages": {}}
        chip = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
        # Folders of this machine are left out.
        words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
        self.facts["runs"].append({"command": " ".join(["python", *words]), "seed": seed,
                                   "hardware": f"{chip}, torch {torch.__version__}"})
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)

    def stage(self, name: str, what: str) -> None:
        """Close a stage: its log lines move to it and both files are written."""
        self.facts["stages"][name] = {"run": len(self.facts["runs"]) - 1, "what": what, "log": self.lines}
        self.lines = []
        used = sorted({s["run"] for s in self.facts["stages"].values()} | {len(self.facts["runs"]) - 1})
        self.facts["runs"] = [self.facts["runs"][i] for i in used]  # runs that nothing rests on are dropped
        for s in self.facts["stages"].values():
            s["run"] = used.index(s["run"])
        self.write()

    def write(self) -> None:
        self.file.write_text(json.dumps(self.facts, indent=1, ensure_ascii=False) + "\n")
        (self.out / "TRAINING.md").write_text(report(self.out, self.facts, self.name, self.script))
