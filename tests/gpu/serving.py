"""Drafted against undrafted, eager against CUDA graphs, NVFP4 against BF16, on a GPU.

usage: python -m tests.gpu.serving MODEL DRAFT PROMPTS.json OUT.json [--oracle] [--tokens N] [--tp N]

Starts eight servers at once: KV in BF16 and NVFP4, with and without the drafter, each eager and with
CUDA graphs. With --oracle the drafter proposes the undrafted run's own tokens, so that verify
accepts whole blocks also where no trained drafter exists. With --tp each of them is spread over N GPUs,
and two more, undrafted ones on one GPU, are what they are compared with. Exit code 3 when an eager and
a graph run differ, a drafted NVFP4 answer parts from the undrafted one above a near-tie, one on N GPUs
so from one GPU's, or a rank of an NVFP4 server reports something else than was judged.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.client import fp4kv_report, generate, server_info
from launcher.demo import GPU_FLAGS, Progress, load_prompts
from launcher.equality import NEAR_TIE_BOUNDS, compare
from launcher.expected import differences
from launcher.judge import judge
from launcher.probe import probe
from launcher.process import ServerProcess, free_port
from launcher.serve import launch_command
from tests.e2e.server import plugin_path
from tests.gpu.origin import origin

START_SECONDS = 400
_NO_GRAPHS = ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
GRAPHS = {"graph": [], "eager": _NO_GRAPHS}
COMMON = ["--attention-backend", "triton", *GPU_FLAGS]
ONE_GPU = "one GPU"
# NCCL alone: SGLang's other collectives want peers' memory or NVLink multicast, which a borrowed host may forbid.
NCCL = ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]


def servers(model, draft, tp=1):
    """Flags by (KV dtype, drafted, graph mode); with ``tp`` above 1 also those of (KV dtype, False, ONE_GPU)."""
    drafted = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    spread = ["--tp-size", str(tp), *NCCL] if tp > 1 else []
    plain = {
        (kv, False, ONE_GPU): ["--model-path", str(model), "--kv-cache-dtype", kv, *COMMON]
        for kv in ("bf16", "nvfp4")
    }
    return (plain if tp > 1 else {}) | {
        (kv, bool(extra), mode): [
            "--model-path", str(model), "--kv-cache-dtype", kv, *COMMON, *extra, *graph, *spread,
        ]  # fmt: skip
        for mode, graph in GRAPHS.items()
        for kv in ("bf16", "nvfp4")
        for extra in ([], drafted)
    }


class Run:
    """The servers, all started together and asked one after another."""

    def __init__(self, args, prompts, scratch):
        self.args, self.prompts, self.scratch = args, prompts, scratch
        self.progress = Progress()
        self.answers, self.reports, self.unproven = {}, {}, {}

    def oracle_file(self, kv):
        return self.scratch / f"recorded-{kv}.json"

    def start(self, key):
        kv, drafted, mode = key
        port = free_port()
        env = dict(os.environ)
        if self.args.oracle and drafted:
            env["PYTHONPATH"] = plugin_path(env)
            env["FP4KV_ORACLE"] = str(self.oracle_file(kv))
        # Servers on one GPU and on several start side by side.
        env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        argv, env = launch_command([*self.flags[key], "--port", str(port)], environ=env)
        log = self.scratch / f"{kv}-{'drafted' if drafted else 'plain'}-{mode}.log"
        return ServerProcess(argv, env, log, port).start()

    def ask(self, key, server):
        drafted = key[1]
        self.answers[key] = [
            generate(server.url, p["input_ids"], p["max_new_tokens"], top_two=not drafted)
            for p in self.prompts
        ]
        info = server_info(server.url)
        self.reports[key] = fp4kv_report(info)
        if key[0] == "nvfp4":
            launch = judge(self.flags[key], machine=probe()).launch
            self.unproven[key] = differences(launch, info["internal_states"])
        self.progress(f"{key} asked")

    def go(self):
        self.flags = servers(self.args.model, self.args.draft, self.args.tp)
        running = {}
        try:
            for key in self.flags:
                running[key] = self.start(key)
            with ThreadPoolExecutor(len(running)) as pool:
                waits = pool.map(lambda s: s.wait_ready(START_SECONDS, path="/health"), running.values())
                for key, seconds in zip(running, waits, strict=True):
                    self.progress(f"{key} ready after {seconds:.0f} s")
            plain = [k for k in running if not k[1]]
            for key in plain:
                self.ask(key, running[key])
            self.record()
            for key in running:
                if key not in plain:
                    self.ask(key, running[key])
        finally:
            with ThreadPoolExecutor(len(self.flags)) as pool:
                list(pool.map(lambda server: server.stop(grace=2), running.values()))

    def record(self):
        for kv in ("bf16", "nvfp4"):
            content = [
                {"prompt": p["input_ids"], "output": list(a.tokens)}
                for p, a in zip(self.prompts, self.answers[kv, False, "graph"], strict=True)
            ]
            self.oracle_file(kv).write_text(json.dumps(content))


def comparisons(run):
    """What is compared with what: name -> list of Comparison, by prompt."""
    pairs = {}
    for kv in ("bf16", "nvfp4"):
        for mode in GRAPHS:
            pairs[f"{kv} undrafted / drafted, {mode}"] = ((kv, False, mode), (kv, True, mode))
        for drafted in (False, True):
            name = f"{kv} {'drafted' if drafted else 'undrafted'}, graph / eager"
            pairs[name] = ((kv, drafted, "graph"), (kv, drafted, "eager"))
        if (kv, False, ONE_GPU) in run.answers:
            pairs[f"{kv} undrafted, one GPU / {run.args.tp}"] = ((kv, False, ONE_GPU), (kv, False, "graph"))
    pairs["bf16 / nvfp4 undrafted, graph"] = (("bf16", False, "graph"), ("nvfp4", False, "graph"))
    found = {}
    for name, (left, right) in pairs.items():
        # A drafted run brings no margins; its graph and eager runs must be equal anyway.
        found[name] = [
            compare(
                a.tokens,
                b.tokens,
                a.gaps or [float("inf")] * len(a.tokens),
                NEAR_TIE_BOUNDS[right[0]],
            )
            for a, b in zip(run.answers[left], run.answers[right], strict=True)
        ]
    return found


def failures(found, unproven):
    """Graph and eager runs must be equal outright; NVFP4 drafted, and on several GPUs, must pass at near-ties."""
    wrong = [f"{' '.join(map(str, key))}: {text}" for key, texts in unproven.items() for text in texts]
    for name, results in found.items():
        if "graph / eager" in name and any(r.verdict != "equal" for r in results):
            wrong.append(name)
        if name.startswith(("nvfp4 undrafted / drafted", "nvfp4 undrafted, one GPU")) and not all(r.passed for r in results):
            wrong.append(name)
    return wrong


def counts(results):
    return {v: sum(r.verdict == v for r in results) for v in ("equal", "near-tie", "different")}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--logs", type=Path, required=True)
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    prompts = load_prompts(args.prompts, args.model)
    for prompt in prompts:
        prompt.setdefault("max_new_tokens", args.tokens)
    return serve_and_compare("tests.gpu.serving", args, prompts)


def serve_and_compare(module, args, prompts):
    """Serves, asks, compares, and writes ``args.out`` for ``python -m module``; the exit code.

    ``args``: of this module's command line. ``prompts``: a name, "input_ids" and "max_new_tokens" each.
    """
    run = Run(args, prompts, args.logs)
    begun = time.monotonic()
    run.go()
    found = comparisons(run)
    wrong = failures(found, run.unproven)
    for name, results in found.items():
        print(f"{name:<40} {counts(results)}", *(str(r) for r in results if r.verdict != "equal"), sep="  ")
    lengths = {
        f"{kv} {mode}": [a.accept_length for a in run.answers[kv, True, mode]]
        for kv in ("bf16", "nvfp4")
        for mode in GRAPHS
    }
    for name, values in lengths.items():
        print(f"accept length {name}: mean {sum(values) / len(values):.2f}, min {min(values):.2f}")
    content = {
        **origin(module),
        "seconds": round(time.monotonic() - begun, 1),
        "near_tie_bounds": NEAR_TIE_BOUNDS,
        "failed": wrong,
        "comparisons": {
            name: {"counts": counts(results), "parted": [vars(r) for r in results if r.position is not None]}
            for name, results in found.items()
        },
        "accept_lengths": lengths,
        "answers": {
            p["name"]: {
                f"{kv} {'drafted' if drafted else 'undrafted'} {mode}": answers[i].text
                for (kv, drafted, mode), answers in run.answers.items()
                if mode == "graph"
            }
            for i, p in enumerate(prompts)
        },
        "reports": {" ".join(map(str, key)): report for key, report in run.reports.items()},
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"failed: {wrong}" if wrong else "OK")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
