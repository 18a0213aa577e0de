"""The requests of a long run: six kinds in a seeded order, asked as users ask, from many threads at once."""

import itertools
import json
import random
import threading
from dataclasses import dataclass

import requests

from launcher.checks.scoring import judge_text, judge_tool_call
from launcher.checks.server import CHAT
from launcher.client import tokenize

# Each deck holds them in another order, so that every kind keeps running beside every other.
DECK = ("short", "long", "long", "shared", "tool", "streamed", "cancelled", "cancelled")
KINDS = tuple(dict.fromkeys(DECK))
_TIMEOUT_S = 600
# Chunks after which a stream is dropped; 0 drops the connection before anything came.
_CANCEL_AFTER = (0, 1, 3)
_IMPATIENT_S = 0.3
_MEASURED = (2, 24)  # sentences of the two texts that a tokenizer is measured by


class RequestFailed(Exception):
    """A request that should have been answered was not; the message says what came."""


@dataclass(frozen=True)
class Job:
    """One request. ``cancel_after``: None where its answer is waited for."""

    kind: str
    prompt: object
    cancel_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """``tokens``: ids. ``right``: whether they hold what the suite expects, None where it expects nothing.
    ``retractions``: how often the scheduler took the request's slots away and gave it others."""

    tokens: tuple
    prompt_ids: tuple
    right: bool | None
    retractions: int
    cached_tokens: int


class Traffic:
    """``server``: a connected launcher.checks.server.Server. ``long_tokens``: of a long prompt.
    ``written``: tokens of a streamed answer, which is written on past its end to hold slots.

    Raises: ServerError when the server has no tokenizer or no chat template.
    """

    def __init__(self, server, suite, *, long_tokens, written, seed=0):
        self.server, self.suite, self.written = server, suite, written
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.sentences = self._sentences(long_tokens)
        self._shared = suite.text(self.sentences, "shared")
        self._short = [*suite.prompts("arithmetic"), *suite.workload("chat"), *suite.workload("code")]
        self._jobs = self._endless()
        self.stops = set()  # ids that ended an answer, as far as seen

    def _sentences(self, tokens):
        few, many = (
            len(tokenize(self.server.url, messages=self.suite.recall("measure", n, 0.0).body()["messages"]))
            for n in _MEASURED
        )
        sentence = (many - few) / (_MEASURED[1] - _MEASURED[0])
        return max(1, int((tokens - few) / sentence) + _MEASURED[0])

    def next_job(self):
        with self._lock:
            return next(self._jobs)

    def _endless(self):
        for number in itertools.count():
            deck = list(DECK)
            self._random.shuffle(deck)
            for place, kind in enumerate(deck):
                yield self._job(kind, f"{number}-{place}")

    def _job(self, kind, name):
        if kind == "short":
            return Job(kind, self._random.choice(self._short))
        if kind == "tool":
            return Job(kind, self._random.choice(self.suite.prompts("tool-call")))
        if kind == "shared":
            # The same text before every question, so that all but its end comes from the prefix cache.
            planted = self.suite.recall(f"shared-{name}", 1, 1.0)
            text = f"{' '.join(self._shared)} {planted.user}"
            return Job(kind, type(planted)(planted.id, text, planted.expect, (), planted.max_tokens))
        prompt = self.suite.recall(f"{kind}-{name}", self.sentences, self._random.random())
        return Job(kind, prompt, self._random.choice(_CANCEL_AFTER) if kind == "cancelled" else None)

    def ask(self, job):
        """The Answer, None to a job that was cancelled.

        Raises: RequestFailed, ServerGone
        """
        if job.cancel_after is not None:
            self._cancel(job)
            return None
        if job.kind == "streamed":
            return self._streamed(job)
        body = {**job.prompt.body(), "return_token_ids": True, "return_meta_info": True}
        asked = self.server.ask(CHAT, body, check="long-run", item=job.prompt.id, step=job.kind)
        if not asked.answered:
            raise RequestFailed(f"{job.kind} {job.prompt.id}: {asked.problem}: {asked.message}")
        self.stops |= {asked.stop_token} - {None}
        return Answer(
            tokens=asked.tokens,
            prompt_ids=tuple(asked.prompt_ids),
            right=self._right(asked, job.prompt),
            retractions=asked.retractions or 0,
            cached_tokens=asked.cached_tokens or 0,
        )

    @staticmethod
    def _right(exchange, prompt):
        if prompt.expect is None:
            return None
        if isinstance(prompt.expect, dict):
            return judge_tool_call(exchange, prompt.tools, prompt.expect).status == "pass"
        return judge_text(exchange, prompt.expect).status == "pass"

    def _stream_body(self, prompt):
        ids = tokenize(self.server.url, messages=prompt.body()["messages"])
        sampling = {"temperature": 0, "max_new_tokens": self.written, "ignore_eos": True}
        return {"input_ids": ids, "stream": True, "sampling_params": sampling}

    def _open(self, body, timeout_s):
        session = requests.Session()
        session.trust_env = False  # neither proxies nor .netrc of the environment
        return session.post(f"{self.server.url}/generate", json=body, stream=True, timeout=timeout_s)

    def _cancel(self, job):
        timeout_s = _TIMEOUT_S if job.cancel_after else _IMPATIENT_S
        try:
            with self._open(self._stream_body(job.prompt), timeout_s) as response:
                for _ in itertools.islice(response.iter_lines(), job.cancel_after):
                    pass
        except requests.Timeout:
            if job.cancel_after:
                raise RequestFailed(f"{job.kind} {job.prompt.id}: no chunk in {timeout_s} s") from None

    def _streamed(self, job):
        body = self._stream_body(job.prompt)
        with self._open(body, _TIMEOUT_S) as response:
            chunks = [line for line in response.iter_lines() if line.startswith(b"data: {")]
        last = json.loads(chunks[-1].removeprefix(b"data: ")) if chunks else {}
        meta = last.get("meta_info") or {}
        tokens = last.get("output_ids") or []
        if len(tokens) != self.written or meta.get("completion_tokens") != self.written:
            raise RequestFailed(
                f"{job.kind} {job.prompt.id}: {len(tokens)} of {self.written} tokens came: {str(last)[:300]}"
            )
        return Answer(
            tokens=tuple(tokens),
            prompt_ids=tuple(body["input_ids"]),
            right=None,
            retractions=meta.get("num_retractions") or 0,
            cached_tokens=meta["cached_tokens"],
        )
