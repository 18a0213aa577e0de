"""The canary: fixed prompts that a server answers before it may answer anybody else's.

Each prompt is answered greedily, twice, and the answer is then judged by two prefill passes of the
same server, so that nothing depends on what the model is able to do:

- over the pool: the prompt comes from the prefix cache and the answer's tokens are fed at once. What
  verify (decode, without a drafter) chose by its reading of the pool has to be what prefill's reader
  makes of the same pool, up to a near-tie (launcher/equality.py).
- without the pool: prompt and answer are computed in one pass, which reads K and V as computed, before
  they were quantized. A reader or a writer that is wrong everywhere alike shows here.

Standard library only, but for what launcher/client.py needs.
"""

import os
import random
import threading
import time
from dataclasses import dataclass, field
from statistics import mean

from launcher import client
from launcher.equality import compare

NEW_TOKENS = 16
# What a token may cost on average, in natural log units, by the pass that reads no pool. On the shipped
# pair right readers cost 0.006, and those of tests/e2e/test_startup.py that take wrong scales 1.5 to 4.
# On SmolLM2-135M NVFP4's mean divergence from BF16 KV is 0.107.
REGRET_LIMIT = 0.5
# A user's --preferred-sampling-params would otherwise make a greedy answer something else.
_PLAIN = {
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_p": 0.0,
    "min_new_tokens": 0, "top_k": -1, "top_p": 1.0, "stop": None, "stop_token_ids": None,
}  # fmt: skip

CODE = "4-7-1-9"
_BEFORE_CODE = "The code is"
_CODE_QUESTION = "What is the code?"
_FILLERS = (
    "The baker walks in the garden every morning.",
    "The gray cat sleeps by the window all day.",
    "The teacher reads in the library after lunch.",
    "There are 52 letters near the river.",
    "The farmer works behind the house before sunset.",
)
_QUESTIONS = {"chat": "Hello, I am Nadia.", "arithmetic": "What is 17 x 23?"}
# Trained models are sure of what they were trained on; on this their best tokens lie close together.
_NOISE = (
    "seven zebra quartz, 81 ;; flint (moss) == orbit? never; 5 0 2 kite / plum violin. ash! 93 under "
    "tin: glow, sand & drum 7 fern"
)


@dataclass(frozen=True)
class Prompt:
    """Token ids; ``code``: the tokens that follow where the model recalls the planted code."""

    name: str
    text: str
    tokens: list
    code: tuple = ()


@dataclass(frozen=True)
class Outcome:
    """``failures``: evidence, one text each; empty when the canary passed. ``summary``: one line."""

    failures: tuple
    summary: str


@dataclass(frozen=True)
class Canary:
    """What to ask and how to judge it.

    url, access: the server, and ``headers`` and ``verify`` for its requests.
    drafted: whether a drafter is on. bound: the largest gap of a near-tie.
    haystack: sentences around the planted code. room: tokens a request may have.
    page_size: tokens; the prefix cache keeps whole pages. None: it is off.
    snapshot_tokens: the prefix cache of a model with recurrent states keeps the last multiple of these in a prompt;
    None where it keeps none within a prompt, 0 for a model without such states.
    ranks: data-parallel replicas, each of which is asked everything.
    cancelled: set by whoever wants no further question asked.
    """

    url: str
    access: dict
    drafted: bool
    bound: float
    haystack: int
    room: int
    page_size: int | None
    snapshot_tokens: int | None = 0
    ranks: int = 1
    cancelled: threading.Event = field(default_factory=threading.Event)

    def run(self, seconds):
        """Asks and judges everything; returns the Outcome.

        Raises: client.ServerError or OSError when an answer fails, is not there in ``seconds`` or is not
        wanted any more.
        """
        deadline = time.monotonic() + seconds
        prompts = [p for p in self.prompts(deadline) if len(p.tokens) + NEW_TOKENS < self.room]
        if not prompts:
            return Outcome((f"no prompt of the canary fits into {self.room} tokens",), "")
        trials = [
            self._try(prompt, rank if self.ranks > 1 else None, deadline)
            for rank in range(self.ranks)
            for prompt in prompts
        ]
        costs = [cost for trial in trials for cost in trial.fresh.regrets]
        failures = [text for trial in trials for text in trial.failures(self)]
        if mean(costs) >= REGRET_LIMIT:
            worst = max(trials, key=lambda trial: mean(trial.fresh.regrets))
            failures.append(
                worst.evidence(
                    f"the answers cost {mean(costs):.2f} a token (limit {REGRET_LIMIT}) by the "
                    "same model's log-probabilities without the pool; the costliest",
                    worst.fresh,
                )
            )
        return Outcome(tuple(failures), _summary(self, trials, mean(costs)))

    def keeps(self, length):
        """Whether the prefix cache has something of a prompt of ``length`` tokens when it is asked again.

        The last token is always computed, so a snapshot at the very end does not help.
        """
        if not self.page_size or self.snapshot_tokens is None:
            return False
        if self.snapshot_tokens:
            return length > self.snapshot_tokens and length % self.snapshot_tokens > 0
        return length > self.page_size

    def _options(self, deadline):
        if self.cancelled.is_set():
            raise InterruptedError("the canary was cancelled")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for the canary is over")
        return {**self.access, "timeout_s": left}

    def prompts(self, deadline):
        """The prompts in the server's own tokens, made-up ids where it has no tokenizer."""

        def tokens(**what):
            return client.tokenize(self.url, **what, **self._options(deadline))

        def chat(text):
            try:
                return tokens(messages=[{"role": "user", "content": text}])
            except client.ServerError:  # no chat template
                return tokens(prompt=f"{text}\n")

        half = [_FILLERS[i % len(_FILLERS)] for i in range(self.haystack // 2)]
        planted = " ".join([*half, f"{_BEFORE_CODE} {CODE}.", *half]) + f"\n\n{_CODE_QUESTION}"
        try:
            plain = tokens(prompt=_NOISE)
            before = tokens(prompt=_BEFORE_CODE, add_special_tokens=False)
            answer = tokens(prompt=f"{_BEFORE_CODE} {CODE}", add_special_tokens=False)
        except client.ServerError:  # --skip-tokenizer-init
            return _made_up_prompts()
        same = len(os.path.commonprefix([before, answer]))
        found = [Prompt(name, text, chat(text)) for name, text in _QUESTIONS.items()]
        found.append(Prompt("noise", _NOISE, plain))
        context = [*chat(planted), *answer[:same]]
        found.append(Prompt("planted code", planted, context, tuple(answer[same:])))
        return found

    def _try(self, prompt, rank, deadline):
        def ask():
            return client.generate(
                self.url, prompt.tokens, NEW_TOKENS, dp_rank=rank, **_PLAIN, **self._options(deadline)
            )

        def score(tokens, cached):
            return client.score(
                self.url, prompt.tokens, tokens,
                cached=cached, dp_rank=rank, **self._options(deadline),
            )  # fmt: skip

        first, again = ask(), ask()
        recall = None
        if prompt.code and first.tokens[: len(prompt.code)] != prompt.code:
            recall = score(prompt.code, False)
        pooled, fresh = score(first.tokens, True), score(first.tokens, False)
        return Trial(prompt, rank, first, again, pooled, fresh, recall)


@dataclass(frozen=True)
class Trial:
    """One prompt's answers and what prefill makes of the first of them.

    ``pooled``: over the pool; ``fresh``: without it; ``recall``: the planted code's tokens without
    the pool, None where there is none or the answer has it.
    """

    prompt: Prompt
    rank: int | None
    first: client.Generation
    again: client.Generation
    pooled: client.Score
    fresh: client.Score
    recall: client.Score | None

    def failures(self, canary):
        who = "verify" if canary.drafted else "decode"
        far = [i for i, regret in enumerate(self.pooled.regrets) if regret >= canary.bound]
        if far:
            # Of a prompt of which nothing is kept, prefill computes all anew.
            parted = "read the same pool differently" if self.pooled.cached_tokens else "part"
            yield self.evidence(
                f"{who} and prefill {parted} from token {far[0]} on "
                f"(gap {self.pooled.regrets[far[0]]:.2f}, a near-tie is below {canary.bound:g})",
                self.pooled,
            )
        repeat = compare(self.first.tokens, self.again.tokens, self.pooled.gaps, canary.bound)
        if not repeat.passed:
            yield self.evidence(f"the repeated prompt is answered otherwise: {repeat}", self.pooled)
        if canary.keeps(len(self.prompt.tokens)) and not self.again.cached_tokens:
            yield self.evidence("the repeated prompt does not hit the prefix cache", self.pooled)
        if self.fresh.cached_tokens:
            yield self.evidence(
                f"the pass without the pool took {self.fresh.cached_tokens} tokens from it", self.fresh
            )
        if self.recall and self.able(canary.bound):
            yield self.evidence(
                f"the planted code {list(self.prompt.code)} is lost, which the same model gives without "
                f"the pool (smallest gap {min(self.recall.gaps):.2f})",
                self.fresh,
            )

    def able(self, bound):
        """Whether the model gives the planted code without the pool, and surely."""
        return not any(self.recall.regrets) and min(self.recall.gaps) >= bound

    def evidence(self, what, score):
        """``what``, the prompt, both sides' tokens and where they part, as text."""
        replica = "" if self.rank is None else f" on replica {self.rank}"
        text = self.prompt.text if len(self.prompt.text) <= 160 else f"...{self.prompt.text[-157:]}"
        part = next((i for i, r in enumerate(score.regrets) if r > 0), None)
        lines = [
            f"{self.prompt.name}{replica}: {what}",
            f"  prompt:    {len(self.prompt.tokens)} tokens: {text!r}",
            f"  answer:    {list(self.first.tokens)} {self.first.text!r}",
            f"  again:     {list(self.again.tokens)} ({self.again.cached_tokens} cached)",
            f"  reference: {list(score.best)} ({score.cached_tokens} cached)",
        ]
        if part is not None:
            regrets = ", ".join(f"{regret:.2f}" for regret in score.regrets)
            lines.append(f"  part at:   token {part}; gap at each token: {regrets}")
        return "\n".join(lines)


def _made_up_prompts():
    """Prompts of low token ids, which every vocabulary has; the code is what followed the same pair."""
    seeded = random.Random(11)
    ids = [seeded.randrange(32, 128) for _ in range(96)]
    pair, code = [130, 131], [40, 71, 55, 90]
    planted = [*ids[:48], *pair, *code, *ids[48:], *pair]
    return [
        Prompt("made-up tokens", "", ids[:40]),
        Prompt("planted tokens", "", planted, tuple(code)),
    ]


def _summary(canary, trials, cost):
    answers = [trial.first for trial in trials]
    tokens = sum(len(answer.tokens) for answer in answers)
    over_pool = sum(len(trial.first.tokens) for trial in trials if trial.pooled.cached_tokens)
    ties = sum(regret > 0 for trial in trials for regret in trial.pooled.regrets)
    parts = [
        f"{len(trials)} prompts, {tokens} tokens equal to prefill's"
        + (" over the same pool" if over_pool == tokens else f", {over_pool} of them over the same pool")
        + (f" ({ties} near-ties)" if ties else ""),
        f"{cost:.3f} a token against a pass without the pool",
    ]
    hits = sum(trial.again.cached_tokens > 0 for trial in trials)
    parts.append(f"{hits} repeated from the cache" if canary.page_size else "no prefix cache")
    planted = [trial for trial in trials if trial.prompt.code]
    if planted:
        recalled = all(trial.recall is None for trial in planted)
        parts.append("planted code recalled" if recalled else "planted code beyond the model")
    lengths = [answer.accept_length for answer in answers if answer.accept_length is not None]
    if canary.drafted and lengths:
        parts.append(f"accept length {mean(lengths):.2f}")
    return "; ".join(parts)
