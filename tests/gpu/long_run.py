"""Minutes of mixed traffic on a full NVFP4 pool with the drafter: no slot lost, no answer changed, memory flat.

usage: python -m tests.gpu.long_run MODEL DRAFT OUT.json --logs DIR [--minutes 10] [--suite pair] [--embedded]
           [--requests 16] [--pool 12288] [--long N] [--context 4096] [--chunk 1024] [--sample 100] [--page-size N]

Short, long and prefix-shared prompts, tool calls, streams that are written on past their end, and streams
that are dropped run beside each other, half as many again as the server runs at once, in a pool that they
outgrow; how often one was retracted is reported. SGLang counts every slot after every batch and ends itself where
they do not add up. Then an evenly spread sample of the answers is asked for again, one at a time and from
an empty prefix cache. On a GPU the server runs under CUDA graphs, and says so.

Writes OUT.json. Exit codes: 0; 3 when a verdict is "fail"; 1 when the server did not start or was lost.
"""

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import requests

from launcher.checks.bounds import cut_bound
from launcher.checks.server import Server, ServerGone
from launcher.checks.suite import SUITES, Suite
from launcher.client import ServerError, fp4kv_report, generate, score, server_info
from launcher.demo import Progress
from launcher.equality import compare
from launcher.process import ServerFailed, ServerProcess, free_port
from launcher.serve import launch_command
from tests.gpu.long_traffic import KINDS, RequestFailed, Traffic
from tests.gpu.memory_samples import Memory, growth
from tests.gpu.origin import origin

START_SECONDS = 400
_IDLE_SECONDS = 120
# Of the pool's tokens. Below 1, because every drafted request holds some for its next step beside what it uses.
FULL = 0.85
KV = "nvfp4"


def server_flags(args):
    flags = [
        "--model-path", str(args.model), "--kv-cache-dtype", KV, "--attention-backend", "triton",
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(args.draft),
        "--max-running-requests", str(args.requests), "--max-total-tokens", str(args.pool),
        "--context-length", str(args.context), "--chunked-prefill-size", str(args.chunk),
        "--page-size", str(args.page_size), "--sampling-backend", "pytorch",
        # Admit what fits now, whatever it may grow to: the pool then fills up while decoding.
        "--schedule-conservativeness", "0.01",
    ]  # fmt: skip
    return flags if args.embedded else [*flags, "--mem-fraction-static", "0.3"]


@dataclass
class Slots:
    """Tokens of the pool that are neither free nor cached while the server idles."""

    before: int
    after: int
    after_flush: int


@dataclass
class Found:
    """What a run saw. ``answers``: (Job, Answer) in the order they came; ``failures``: messages.
    ``parted``: (what, Comparison) of the sample. ``usage``: shares of the pool, sampled. ``graphs``: decode
    steps that SGLang logged as replayed from a CUDA graph, and as not."""

    asked: dict = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    answers: list = field(default_factory=list)
    failures: list = field(default_factory=list)
    parted: list = field(default_factory=list)
    usage: list = field(default_factory=list)
    slots: Slots | None = None
    graphs: tuple = (0, 0)


def loads(url):
    answer = requests.get(f"{url}/v1/loads", timeout=60)
    answer.raise_for_status()
    return answer.json()["loads"][0]


def idle_tokens(url):
    """Tokens in use once no request runs or waits, and the scheduler has said so twice."""
    end, last = time.monotonic() + _IDLE_SECONDS, None
    while time.monotonic() < end:
        found = loads(url)
        now = (found["num_running_reqs"], found["num_waiting_reqs"], found["num_used_tokens"])
        if now == last and now[:2] == (0, 0):
            return now[2]
        last = now
        time.sleep(0.2)
    raise ServerError(f"{url} is not idle after {_IDLE_SECONDS} s: {last}")


def graph_steps(log):
    """(replayed, eager) decode steps in SGLang's log, which names every fortieth."""
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if "Decode batch" in line and "cuda graph: " in line]
    replayed = sum("cuda graph: True" in line for line in lines)
    return replayed, len(lines) - replayed


def flush(url):
    """Empties the prefix cache, which SGLang refuses for a moment after an answer."""
    end = time.monotonic() + _IDLE_SECONDS
    while (answer := requests.post(f"{url}/flush_cache", timeout=60)).status_code != 200:
        if time.monotonic() > end:
            raise ServerError(f"{url}/flush_cache: HTTP {answer.status_code}: {answer.text[:300]}")
        time.sleep(0.2)


def run_traffic(traffic, memory, found, seconds, workers):
    """Asks from ``workers`` threads until ``seconds`` have passed, every kind ran and every answer is in."""
    end, lock, done = time.monotonic() + seconds, threading.Lock(), threading.Event()

    def work():
        while not traffic.server.gone and (time.monotonic() < end or not all(found.asked.values())):
            job = traffic.next_job()
            with lock:
                found.asked[job.kind] += 1
            try:
                answer, problem = traffic.ask(job), None
            except (RequestFailed, ServerError, ServerGone, requests.RequestException) as error:
                answer, problem = None, f"{job.kind} {job.prompt.id}: {error!r}"
            with lock:
                if problem:
                    found.failures.append(problem)
                if answer:
                    found.answers.append((job, answer))

    def watch():
        while not done.wait(0.5):
            memory.sample()
            found.usage.append(traffic.server.usage() or 0.0)

    with ThreadPoolExecutor(workers + 1) as pool:
        watching = pool.submit(watch)
        asking = [pool.submit(work) for _ in range(workers)]
        try:
            for worker in asking:
                worker.result()
        finally:
            done.set()
        watching.result()


def until_stop(tokens, stops):
    """``tokens`` up to and with the first that ends an answer: what a stream wrote on after it, only to hold
    slots, is no answer."""
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return tuple(tokens[: end + 1])


def spread(items, count):
    """At most ``count`` of ``items``, evenly over their order."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def replay(url, traffic, found, count, bound):
    """Asks a sample again alone. Where the two part, a prefill pass says how sure the model was there."""
    for job, answer in spread(found.answers, count):
        flush(url)
        prompt, candidate = list(answer.prompt_ids), until_stop(answer.tokens, traffic.stops)
        more = {"ignore_eos": True} if job.kind == "streamed" else {}
        alone = generate(url, prompt, len(answer.tokens) if more else job.prompt.max_tokens, **more)
        reference = until_stop(alone.tokens, traffic.stops)
        gaps = [float("inf")] * len(reference)
        if candidate != reference:
            gaps = score(url, prompt, reference, cached=False).gaps
        found.parted.append((f"{job.kind} {job.prompt.id}", compare(reference, candidate, gaps, bound)))


def judge(found, memory, embedded):
    """Name -> (passed, what was found)."""
    kinds = {kind: sum(job.kind == kind for job, _ in found.answers) for kind in KINDS}
    missing = [kind for kind in KINDS if not (found.asked if kind == "cancelled" else kinds)[kind]]
    wrong = [f"{what}: {c}" for what, c in found.parted if not c.passed]
    retractions = sum(answer.retractions for _, answer in found.answers)
    peak = max(found.usage, default=0.0)
    slots = found.slots
    verdicts = {
        "every request was answered": (not found.failures, found.failures[:5]),
        "every kind ran": (not missing, missing),
        "the pool was full": (peak >= FULL, f"peak {peak:.2f}, {retractions} retractions"),
        "every slot came back": (
            slots is not None and {slots.before, slots.after, slots.after_flush} == {0},
            slots and vars(slots),
        ),
        "no answer of the sample changed": (
            bool(found.parted) and not wrong,
            wrong[:5] or f"{len(found.parted)} asked again",
        ),
    }
    for what, samples in memory.series().items():
        more, allowed = growth(samples), memory.allowed(samples)
        verdicts[f"{what} stayed flat"] = (
            more is not None and more <= allowed,
            "too few samples" if more is None else f"grew by {more:,} of {allowed:,} bytes allowed",
        )
    if not embedded:
        replayed, eager = found.graphs
        verdicts["decode ran under CUDA graphs"] = (
            replayed > 9 * eager,
            f"{replayed} of {replayed + eager} logged steps",
        )
    return verdicts


def drive(args, server, found, progress):
    """The whole run on a ready server; returns (Memory, Traffic)."""
    url = server.url
    asked = Server("target", url, timeout_s=600)
    facts = asked.connect()
    workers = args.requests + args.requests // 2
    long_tokens = args.long or int(2 * args.pool / args.requests)
    long_tokens = min(long_tokens, facts.context_tokens - args.written - 64)
    traffic = Traffic(asked, Suite(args.suite), long_tokens=long_tokens, written=args.written)
    memory = Memory(server.pid, gpu=not args.embedded)
    memory.sample()  # where it cannot be measured the run ends here
    found.slots = Slots(idle_tokens(url), -1, -1)
    progress(f"{workers} at once, long prompts of {long_tokens} tokens, for {args.minutes:g} minutes")
    run_traffic(traffic, memory, found, 60 * args.minutes, workers)
    progress(f"asked {found.asked}, {len(found.failures)} failed")
    found.slots.after = idle_tokens(url)
    flush(url)
    found.slots.after_flush = idle_tokens(url)
    replay(url, traffic, found, args.sample, cut_bound(KV))
    progress(f"{len(found.parted)} asked again alone")
    return memory


def content(args, found, memory, verdicts, report, seconds):
    rights = {
        kind: [a.right for job, a in found.answers if job.kind == kind and a.right is not None] for kind in KINDS
    }
    return {
        **origin("tests.gpu.long_run", embedded=args.embedded),
        "flags": server_flags(args),
        "seconds": round(seconds, 1),
        "verdicts": {name: {"passed": ok, "found": what} for name, (ok, what) in verdicts.items()},
        "asked": found.asked,
        "failures": found.failures,
        "retractions": sum(answer.retractions for _, answer in found.answers),
        "tokens": sum(len(answer.tokens) for _, answer in found.answers),
        "right": {kind: [sum(of), len(of)] for kind, of in rights.items() if of},
        "usage": {"peak": max(found.usage, default=None), "mean": sum(found.usage) / max(1, len(found.usage))},
        "shared_from_cache": sum(a.cached_tokens > 0 for job, a in found.answers if job.kind == "shared"),
        "sample": {
            "asked": len(found.parted),
            "verdicts": {v: sum(c.verdict == v for _, c in found.parted) for v in ("equal", "near-tie", "different")},
            "parted": {what: vars(c) for what, c in found.parted if c.position is not None},
        },
        "graph_steps": found.graphs,
        "memory": memory.series(),
        "report": report,
    }


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--suite", choices=SUITES, default="pair")
    parser.add_argument("--requests", type=int, default=16, help="that the server runs at once")
    parser.add_argument("--pool", type=int, default=12288, help="tokens")
    parser.add_argument("--long", type=int, help="tokens of a long prompt; twice a request's share of the pool")
    parser.add_argument("--context", type=int, default=4096, help="tokens")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prefill")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--written", type=int, default=256, help="tokens of a stream")
    parser.add_argument("--sample", type=int, default=100, help="answers that are asked for again alone")
    parser.add_argument("--embedded", action="store_true", help="run the server on the CPU")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    progress, found = Progress(), Found()
    port = free_port()
    argv, env = launch_command([*server_flags(args), "--port", str(port)], embedded=args.embedded)
    env["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    try:
        with ServerProcess(argv, env, args.logs / "long-run.log", port) as server:
            progress(f"ready after {server.wait_ready(START_SECONDS):.0f} s")
            memory = drive(args, server, found, progress)
            report = fp4kv_report(server_info(server.url))
            found.graphs = graph_steps(server.log_path)
    except (ServerFailed, ServerGone, ServerError, requests.RequestException) as error:
        print(f"{error}\n" + "\n".join(found.failures[:5]), file=sys.stderr)
        return 1
    verdicts = judge(found, memory, args.embedded)
    for name, (ok, what) in verdicts.items():
        print(f"{'pass' if ok else 'FAIL'}  {name}: {what}")
    result = content(args, found, memory, verdicts, report, time.monotonic() - progress.begun)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(ok for ok, _ in verdicts.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
