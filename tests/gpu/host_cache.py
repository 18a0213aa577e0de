"""NVFP4 KV under --enable-hierarchical-cache: prefixes that went to host memory and came back answer the same.

usage: python -m tests.gpu.host_cache MODEL DRAFT OUT.json --logs DIR [--embedded]

A drafted server for each I/O backend and host layout (on a CPU the one that it has), in pages of 64 tokens; they start
side by side and are asked one after the other. The pool holds little more than the prompts; what is evicted is written
to the host then (write_back). A prompt is asked from nothing, from the prefix cache on the device, and after it was
evicted. The second and the third read the same tokens out of the pool, so the same bytes give the same answer, on
prompts whose two best tokens often tie, and the same accept length, which is what the drafter's own K and V decide.
Then twice more: with the drafter's K and V spoiled as they come back, and with the target's block scales left on the
host, the negative controls. (Left on the host, the drafter's rows cost the pair no accepted token; that their bytes
come back is what tests/test_host_tree.py shows.)

Writes OUT.json after each server, with those not asked yet under "unfinished" and those that broke under "broken".
Exit codes: 0; 3 when a verdict fails; 1 when a server did not start or broke.
"""

import argparse
import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import requests

from launcher.client import ServerError, fp4kv_report, server_info
from launcher.demo import PAIR, Progress, load_prompts
from launcher.process import ServerFailed, ServerProcess, free_port
from launcher.serve import launch_command
from tests.e2e.server import plugin_path
from tests.gpu.long_run import idle_tokens
from tests.gpu.origin import origin

START_SECONDS = 400
PAGE, POOL, NEW_TOKENS = 64, 448, 8
PRESSING = 4  # prompts of more than two pages each; the pool has seven
WAYS = (("kernel", "page_first"), ("kernel", "layer_first"), ("direct", "page_first_direct"), ("direct", "layer_first"))
CPU_WAYS = (("direct", "page_first_direct"),)


def server_flags(model, draft, backend, layout, embedded):
    flags = [
        "--model-path", str(model), "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton",
        "--page-size", str(PAGE), "--max-total-tokens", str(POOL), "--max-running-requests", "4",
        "--enable-hierarchical-cache", "--hicache-ratio", "5", "--hicache-write-policy", "write_back",
        "--hicache-io-backend", backend, "--hicache-mem-layout", layout, "--sampling-backend", "pytorch",
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft),
    ]  # fmt: skip
    return flags if embedded else [*flags, "--mem-fraction-static", "0.3"]


@dataclass(frozen=True)
class Answer:
    """``device``, ``host``: prompt tokens taken from the prefix cache there."""

    tokens: tuple
    accept_length: float
    device: int
    host: int


@dataclass
class Seen:
    """Answers by prompt. ``left``: those with something left on the host, by what it was."""

    fresh: list = field(default_factory=list)
    from_device: list = field(default_factory=list)
    from_host: list = field(default_factory=list)
    left: dict = field(default_factory=dict)
    used_tokens: int = -1
    report: dict | None = None


def unsure(seed, length):
    """Random tokens, on which the pair's two best tokens often tie (tests/e2e/test_nvfp4_serving.py)."""
    seeded = random.Random(f"host/{seed}")
    return [seeded.randrange(16, 700) for _ in range(length)]


def prompts(model):
    """Two that no drafter foresees, and one of the pair's own, most of whose drafts are accepted."""
    own = [p["input_ids"] for p in load_prompts(PAIR / "prompts.json", model) if p["name"] == "recall"]
    return [*(unsure(seed, PAGE + 33) for seed in range(2)), *own]


def ask(url, prompt, new_tokens=NEW_TOKENS):
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    answer = requests.post(f"{url}/generate", json=body, timeout=600)
    if answer.status_code != 200:
        raise ServerError(f"{url}/generate: HTTP {answer.status_code}: {answer.text[:300]}")
    found = answer.json()
    meta = found["meta_info"]
    where = meta.get("cached_tokens_details") or {}
    return Answer(
        tuple(found["output_ids"]), meta.get("spec_accept_length"), where.get("device", 0), where.get("host", 0)
    )


def press(url, seed):
    """Asks other prompts until nothing of those before is left on the device."""
    for number in range(PRESSING):
        ask(url, unsure(f"press/{seed}/{number}", 2 * PAGE + 16), new_tokens=1)


def examine(url, asked, told):
    """What one server answers. ``told``: the file that says what its plugin is to leave on the host."""
    seen = Seen()
    for prompt in asked:
        seen.fresh.append(ask(url, prompt))
        seen.from_device.append(ask(url, prompt))
    press(url, "whole")
    seen.from_host = [ask(url, prompt) for prompt in asked]
    for left in ("draft", "scales"):
        press(url, left)
        told.write_text(left)
        seen.left[left] = [ask(url, prompt) for prompt in asked]
        told.unlink()
    seen.used_tokens = idle_tokens(url)
    seen.report = fp4kv_report(server_info(url))
    return seen


def _tokens(answers):
    return [a.tokens for a in answers]


def _accepted(answers):
    return [a.accept_length for a in answers]


def judge(seen):
    """Name -> whether it holds."""
    host = seen.report.get("host") or {}
    return {
        "nothing was cached at first": all(a.device == a.host == 0 for a in seen.fresh),
        "then on the device": all(a.device and not a.host for a in seen.from_device),
        "then on the host": [a.host for a in seen.from_host] == [a.device for a in seen.from_device],
        "answers from the host are those from the device": _tokens(seen.from_host) == _tokens(seen.from_device),
        "so are accept lengths": _accepted(seen.from_host) == _accepted(seen.from_device),
        "control: without scales answers change": _tokens(seen.left["scales"]) != _tokens(seen.from_device),
        "control: with the drafter's K and V spoiled fewer drafts are accepted": (
            sum(_accepted(seen.left["draft"])) < sum(_accepted(seen.from_device))
        ),
        "and no other answers": _tokens(seen.left["draft"]) == _tokens(seen.from_device),
        "every slot came back": seen.used_tokens == 0,
        "host pools take the bytes of the device's": all(
            name in host and host[name]["bytes_per_token"] == seen.report[side]["bytes_per_token"]
            for name, side in (("kv", "target"), ("draft", "draft"))
        ),
    }


class Run:
    """One server a way, by its name, all started together."""

    def __init__(self, args, command_line):
        self.args, self.progress, self.running = args, Progress(), {}
        self.content = {
            **origin("tests.gpu.host_cache", command_line, embedded=args.embedded),
            "servers": {},
            "broken": {},
            "unfinished": [],
        }

    def told(self, way):
        return self.args.logs / f"{way.replace(' ', '-')}.left"

    def start(self, way):
        flags = server_flags(self.args.model, self.args.draft, *way.split(), self.args.embedded)
        environ = os.environ | {
            "PYTHONPATH": plugin_path(),
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "FP4KV_LEFT_ON_HOST": str(self.told(way)),
        }
        port = free_port()
        argv, env = launch_command([*flags, "--port", str(port)], embedded=self.args.embedded, environ=environ)
        self.running[way] = ServerProcess(argv, env, self.args.logs / f"{way.replace(' ', '-')}.log", port).start()

    def ask(self, way, ready):
        """``ready``: the future of its start."""
        server = self.running[way]
        try:
            self.progress(f"{way} ready after {ready.result():.0f} s")
            seen = examine(server.url, prompts(self.args.model), self.told(way))
        except (ServerFailed, ServerError, requests.RequestException) as error:
            self.content["broken"][way] = str(error)
            self.progress(f"{way} broke: {error}")
            return
        finally:
            server.stop()
        verdicts = judge(seen)
        self.content["servers"][way] = {"verdicts": verdicts, **asdict(seen)}
        self.progress(f"{way}: failed {[what for what, ok in verdicts.items() if not ok]}")

    def go(self, ways):
        self.content["unfinished"] = list(ways)
        with ThreadPoolExecutor(len(ways)) as pool:
            try:
                for way in ways:
                    self.start(way)
                ready = {way: pool.submit(self.running[way].wait_ready, START_SECONDS) for way in ways}
                for way in ways:
                    self.ask(way, ready[way])
                    self.content["unfinished"].remove(way)
                    self.args.out.write_text(json.dumps(self.content, indent=1) + "\n")
            finally:
                for server in self.running.values():
                    server.stop()

    def exit_code(self):
        if self.content["broken"]:
            return 1
        return 0 if all(all(found["verdicts"].values()) for found in self.content["servers"].values()) else 3


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--embedded", action="store_true", help="run the server on the CPU")
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    run = Run(args, argv)
    run.go([" ".join(way) for way in (CPU_WAYS if args.embedded else WAYS)])
    print("FAILED" if run.exit_code() else "OK")
    return run.exit_code()


if __name__ == "__main__":
    sys.exit(main())
