"""NVFP4 KV with drafters beside DFLASH, drafted against undrafted and eager against CUDA graphs, on a GPU.

usage: python -m tests.gpu.drafters OUT.json --logs FOLDER [--only NAME,...] [--tokens N] [--embedded]

Starts a server without a drafter and one for each row of ROWS, eager and with CUDA graphs, on the shipped
target. Prompts are asked twice: NGRAM drafts from what it has answered before. Heads are random; an oracle
gives them the undrafted run's tokens for every prompt but the last two. Exit code 3 when a drafted answer
parts from the undrafted one above a near-tie, eager and graph runs differ, a row accepts too little to have
shown anything, a draft's pool is not plain, or no accepted row of a tree moved.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.client import fp4kv_report, generate, server_info
from launcher.demo import PAIR, Progress, load_prompts
from launcher.equality import CPU_BOUND, NEAR_TIE_BOUNDS, compare
from launcher.expected import DRAFT_POOL, PACKED_POOL
from launcher.process import ServerProcess, free_port
from launcher.serve import launch_command
from tests.e2e.server import plugin_path
from tests.e2e.test_nvfp4_serving import unsure_prompts
from tests.e2e.tiny_heads import build_eagle3, build_mtp
from tests.gpu.origin import origin

START_SECONDS = 500
COMMON = [
    "--model-path", str(PAIR / "target"), "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton",
    "--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--max-running-requests", "8",
    "--sampling-backend", "pytorch", "--disable-radix-cache",
]  # fmt: skip
EAGER = ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
UNDRAFTED = "undrafted"


def _ngram(breadth, *flags):
    return ["--speculative-ngram-max-bfs-breadth", str(breadth), "--speculative-num-draft-tokens", "8", *flags]


def _steps(topk, tokens):
    return [
        "--speculative-num-steps", "3", "--speculative-eagle-topk", str(topk),
        "--speculative-num-draft-tokens", str(tokens),
    ]  # fmt: skip


# Name -> (algorithm, draft, flags, least mean accept length of the repeated prompts).
ROWS = {
    "ngram-tree": ("NGRAM", None, _ngram(4), 3.0),
    "ngram-chain": ("NGRAM", None, _ngram(1, "--page-size", "16"), 3.0),
    "eagle3-tree": ("EAGLE3", "eagle3", _steps(4, 8), 1.8),
    "eagle3-chain": ("EAGLE3", "eagle3", [*_steps(1, 4), "--speculative-draft-kv-cache-dtype", "bf16"], 2.2),
    "nextn-tree": ("NEXTN", "mtp", _steps(2, 6), 1.8),
    "nextn-chain": ("NEXTN", "mtp", _steps(1, 4), 2.2),
    "standalone-tree": ("STANDALONE", "target", _steps(4, 8), 3.0),
    "standalone-chain": ("STANDALONE", "target", _steps(1, 4), 3.0),
}


class Run:
    """Servers by (row, mode); by the same the answers to all prompts, asked twice, and how many rows moved.

    ``scratch``: a new folder for heads and for what servers and this script tell each other.
    """

    def __init__(self, args, prompts, scratch):
        self.args, self.prompts, self.scratch = args, prompts, scratch
        self.progress, self.answers, self.reports, self.moved = Progress(), {}, {}, {}
        self.drafts = {
            "eagle3": build_eagle3(scratch / "eagle3", PAIR / "target"),
            "mtp": build_mtp(scratch / "mtp", PAIR / "target"),
            "target": PAIR / "target",
        }
        names = [UNDRAFTED, *(name for name in ROWS if args.only is None or name in args.only.split(","))]
        modes = {"eager": EAGER} if args.embedded else {"graph": [], "eager": EAGER}
        self.flags = {(name, mode): [*self.row_flags(name), *more] for mode, more in modes.items() for name in names}

    def row_flags(self, name):
        if name == UNDRAFTED:
            return []
        algorithm, draft, flags, _ = ROWS[name]
        path = [] if draft is None else ["--speculative-draft-model-path", str(self.drafts[draft])]
        return ["--speculative-algorithm", algorithm, *path, *flags]

    def moves_file(self, key):
        return self.scratch / f"moves-{'-'.join(key)}"

    def start(self, key):
        env = dict(os.environ)
        env["PYTHONPATH"] = plugin_path(env)
        env["FP4KV_MOVES"] = str(self.moves_file(key))
        env["FP4KV_LIBRARY_PREFILL"] = "0"  # FlashInfer's prefill compiles for minutes, and is not asked here
        if key[0] != UNDRAFTED and not key[0].startswith(("ngram", "standalone")):
            env["FP4KV_ORACLE"] = str(self.scratch / "recorded.json")
        port = free_port()
        argv, env = launch_command(
            [*COMMON, *self.flags[key], "--port", str(port)], embedded=self.args.embedded, environ=env
        )
        return ServerProcess(argv, env, self.args.logs / f"{'-'.join(key)}.log", port).start()

    def ask(self, key, server):
        options = {"ignore_eos": True, "top_two": key[0] == UNDRAFTED}
        self.answers[key] = [
            generate(server.url, p, self.args.tokens, **options) for _ in range(2) for p in self.prompts
        ]
        self.reports[key] = fp4kv_report(server_info(server.url))
        file = self.moves_file(key)
        self.moved[key] = sum(map(int, file.read_text().split())) if file.exists() else 0
        self.progress(f"{key} asked")

    def record(self):
        key = next(key for key in self.flags if key[0] == UNDRAFTED)
        answers = zip(self.prompts[:-2], self.answers[key], strict=False)
        content = [{"prompt": p, "output": list(a.tokens)} for p, a in answers]
        (self.scratch / "recorded.json").write_text(json.dumps(content))

    def go(self):
        """On a GPU all servers at once; embedded one after another."""
        keys = list(self.flags)
        for batch in [[key] for key in keys] if self.args.embedded else [keys]:
            running = {}
            try:
                for key in batch:
                    running[key] = self.start(key)
                with ThreadPoolExecutor(len(running)) as pool:
                    list(pool.map(lambda s: s.wait_ready(START_SECONDS, path="/health"), running.values()))
                self.progress(f"{len(running)} ready")
                for key in sorted(batch, key=lambda key: key[0] != UNDRAFTED):
                    self.ask(key, running[key])
                    if key[0] == UNDRAFTED:
                        self.record()
            finally:
                with ThreadPoolExecutor(len(batch)) as pool:
                    list(pool.map(lambda server: server.stop(grace=2), running.values()))


def comparisons(run, bound):
    found = {}
    for name, mode in run.answers:
        plain = run.answers[UNDRAFTED, mode]
        if name != UNDRAFTED:
            pairs = zip(plain, run.answers[name, mode], strict=True)
            found[f"{name} / undrafted, {mode}"] = [compare(a.tokens, b.tokens, a.gaps, bound) for a, b in pairs]
        if mode == "graph":
            pairs = zip(run.answers[name, mode], run.answers[name, "eager"], strict=True)
            found[f"{name}, graph / eager"] = [
                compare(a.tokens, b.tokens, a.gaps or [float("inf")] * len(a.tokens), CPU_BOUND) for a, b in pairs
            ]
    return found


def failures(run, found, accepts):
    """A text each: what was not as it must be."""
    wrong = [name for name, results in found.items() if not all(r.passed for r in results)]
    for (name, mode), report in run.reports.items():
        where = f"{name}, {mode}"
        if report["target"]["class"] != PACKED_POOL:
            wrong.append(f"{where}: the target's pool is {report['target']['class']}")
        if name == UNDRAFTED:
            continue
        draft, least = report["draft"], ROWS[name][3]
        if (draft and draft["class"]) != (DRAFT_POOL if ROWS[name][1] else None):
            wrong.append(f"{where}: the draft's pool is {draft and draft['class']}")
        if accepts[where] < least:
            wrong.append(f"{where}: accept length {accepts[where]:.2f}, at least {least} wanted")
        if name == "eagle3-tree" and run.moved[name, mode] == 0:
            wrong.append(f"{where}: no accepted row moved")
    return wrong


def counts(results):
    return {v: sum(r.verdict == v for r in results) for v in ("equal", "near-tie", "different")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--only", help=f"some of {','.join(ROWS)}")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--embedded", action="store_true", help="on the CPU, to try this script")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    tasks = [p["input_ids"] for p in load_prompts(PAIR / "prompts.json", PAIR / "target")[:3]]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(args, [*tasks, *(p["input_ids"] for p in unsure_prompts()[:5])], Path(scratch))
        run.go()
    bound = CPU_BOUND if args.embedded else NEAR_TIE_BOUNDS["nvfp4"]
    found = comparisons(run, bound)
    repeated = {f"{n}, {mode}": a[len(a) // 2 :] for (n, mode), a in run.answers.items() if n != UNDRAFTED}
    accepts = {name: sum(a.accept_length for a in answers) / len(answers) for name, answers in repeated.items()}
    wrong = failures(run, found, accepts)
    for name, results in found.items():
        print(f"{name:<36} {counts(results)}", *(str(r) for r in results if r.verdict != "equal"), sep="  ")
    for name, mean in accepts.items():
        print(f"accept length {name}: {mean:.2f}")
    content = {
        **origin("tests.gpu.drafters"),
        "seconds": round(time.monotonic() - begun, 1),
        "near_tie_bound": bound,
        "failed": wrong,
        "comparisons": {
            name: {"counts": counts(results), "parted": [vars(r) for r in results if r.position is not None]}
            for name, results in found.items()
        },
        "accept_lengths": accepts,
        "moved_rows": {", ".join(key): moved for key, moved in run.moved.items()},
        "reports": {", ".join(key): report for key, report in run.reports.items()},
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"failed: {wrong}" if wrong else "OK")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
