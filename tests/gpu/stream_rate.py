"""Decode speed as a client sees it: concurrent streams on one server, timed by their chunks."""

import json
import statistics
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit

# Tokens between two chunks: the first token comes at once, the last when the answer ends. Few chunks
# keep the detokenizer and this client out of what is measured.
CHUNK_TOKENS = 50


class StreamFailed(Exception):
    """A stream ended without an answer of the asked length; the message says what came."""


@dataclass(frozen=True)
class Stream:
    """One answer: when its first and last tokens came (seconds) and how many lie between them."""

    first_s: float
    last_s: float
    tokens: int  # after the first chunk
    accept_length: float | None
    cached_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.last_s - self.first_s)


def read_chunks(url: str, prompt: list[int], new_tokens: int, started: threading.Barrier, timeout_s: float):
    """Post one greedy request of exactly new_tokens; return (seconds, line) of every chunk."""
    body = json.dumps(
        {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
                "stream_interval": CHUNK_TOKENS,
            },
        }
    )
    connection = HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.connect()
        started.wait(timeout_s)
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise StreamFailed(f"{url}: HTTP {response.status}: {response.read(300)!r}")
        return [(time.perf_counter(), line) for line in response if line.startswith(b"data: {")]
    finally:
        connection.close()


def parse_stream(chunks: list[tuple[float, bytes]], new_tokens: int) -> Stream:
    """Raises: StreamFailed when the answer is short, an error, or came in one chunk."""
    answers = [(at, json.loads(line.removeprefix(b"data: "))) for at, line in chunks]
    if len(answers) < 2 or "meta_info" not in answers[-1][1]:
        raise StreamFailed(f"no stream of chunks but {str([a for _, a in answers])[:300]}")
    (first_s, first), (last_s, last) = answers[0], answers[-1]
    first, last = first["meta_info"], last["meta_info"]
    if last["completion_tokens"] != new_tokens:
        raise StreamFailed(f"{last['completion_tokens']} tokens came, {new_tokens} were asked for")
    return Stream(
        first_s=first_s,
        last_s=last_s,
        tokens=last["completion_tokens"] - first["completion_tokens"],
        accept_length=last.get("spec_accept_length"),
        cached_tokens=last["cached_tokens"],
    )


def run_streams(url: str, prompts: list[list[int]], new_tokens: int, timeout_s: float = 300) -> list[Stream]:
    """All prompts at once, one connection each.

    Raises: StreamFailed for the first stream that failed.
    """
    started = threading.Barrier(len(prompts))
    chunks, failures = [None] * len(prompts), []

    def run(index):
        try:
            chunks[index] = read_chunks(url, prompts[index], new_tokens, started, timeout_s)
        except Exception as error:
            started.abort()
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        real = [e for e in failures if not isinstance(e, threading.BrokenBarrierError)]
        raise StreamFailed(f"{url}: {(real or failures)[0]!r}")
    return [parse_stream(c, new_tokens) for c in chunks]


def summarize(rounds: list[list[Stream]]) -> dict:
    """Medians over rounds of the same streams.

    tokens_per_second: all streams together, from the first token of any to the last of any, so what
    a stream waits for the others counts. per_stream: the median stream's own rate.
    """
    overall = [
        sum(s.tokens for s in streams)
        / (max(s.last_s for s in streams) - min(s.first_s for s in streams))
        for streams in rounds
    ]
    every = [s for streams in rounds for s in streams]
    lengths = [s.accept_length for s in every if s.accept_length is not None]
    return {
        "tokens_per_second": round(statistics.median(overall), 1),
        "rounds_tokens_per_second": [round(rate, 1) for rate in overall],
        "per_stream_tokens_per_second": round(
            statistics.median(s.tokens_per_second for s in every), 1
        ),
        "accept_length": round(statistics.mean(lengths), 3) if lengths else None,
        "fewest_cached_tokens": min(s.cached_tokens for s in every),
    }
