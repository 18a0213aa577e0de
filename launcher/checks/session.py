"""What a check asks through: servers by name, one prefix-cache namespace a check, everything recorded."""

import time
from concurrent.futures import ThreadPoolExecutor

from launcher.checks import exchange as kinds
from launcher.checks.server import CHAT, COMPLETIONS, ServerGone
from launcher.checks.suite import suite_of

TARGET, CONTROL, UNDRAFTED, ONE_CHUNK = "target", "control", "undrafted", "one-chunk"
_MEASURED = (2, 24)  # sentences of the two texts that a tokenizer is measured by
_RESERVE_TOKENS = 64  # of the context, for the chat template and what a tokenizer does otherwise


class NotRun(Exception):
    """The check cannot be asked here; the message says why. Never a pass."""


class Session:
    """``servers``: Server by name. ``salt``: names this run, so that no prompt is cached from another."""

    def __init__(self, options, servers, recording, salt, progress=None):
        self.options, self.servers, self.recording, self.salt = options, servers, recording, salt
        self.suite = suite_of(options)
        self.progress = progress or (lambda *_: None)
        self.began = time.monotonic()
        self.check = None
        self._asked = 0
        self._template = {"chat_template_kwargs": options.template} if options.template else {}
        self._text_tokens = None

    def begin(self, check):
        self.check, self._asked = check, 0
        self.progress(check, 0, "")

    def facts(self, server=TARGET):
        return self.recording.facts[server]

    def has(self, server):
        return server in self.servers

    def ask(self, prompt, *, server=TARGET, item=None, step="", salt="", **more):
        """Asks ``prompt`` in the chat endpoint; records and returns the Exchange.

        Raises: ServerGone
        """
        body = {
            **prompt.body(),
            "seed": self.suite.seed,
            "cache_salt": f"{self.salt}/{self.check}/{salt}",
            "return_token_ids": True,
            "return_meta_info": True,
            **self._template,
            **more,
        }
        return self._send(CHAT, body, server, item or prompt.id, step)

    def ask_all(self, calls):
        """Asks all of ``calls`` (keyword arguments of `ask`) at once; their Exchanges in order.

        Raises: ServerGone, once every other answer is in.
        """
        with ThreadPoolExecutor(max(1, len(calls))) as pool:
            pending = [pool.submit(self.ask, **call) for call in calls]
        return [done.result() for done in pending]

    def probe(self, exchange, position):
        """Asks the exchange's server for its two best tokens after ``position`` of its own output tokens.

        Recorded under the step "margin STEP POSITION", for `same.judge` to find. Nothing is asked where
        the exchange brought its margins along, or no token ids. The probe shares no cached prefix with
        what is compared: broken K and V there would make a wrong token look like a near-tie.
        """
        if exchange.gaps is not None or not exchange.prompt_ids or not self.has(exchange.server):
            return
        body = {
            "prompt": [*exchange.prompt_ids, *exchange.tokens[:position]],
            "max_tokens": 1,
            "logprobs": 2,
            "cache_salt": f"{self.salt}/{self.check}/margin {self._asked}",
        }
        if "logit_bias" in exchange.request:
            body["logit_bias"] = exchange.request["logit_bias"]
        step = f"margin {exchange.step} {position}"
        self._send(COMPLETIONS, body, exchange.server, exchange.item, step)

    def _send(self, endpoint, body, server, item, step):
        asked = self.servers[server].ask(
            endpoint, body, check=self.check, item=item, step=step, run_began=self.began
        )
        self.recording.add(asked)
        self._asked += 1
        self.progress(self.check, self._asked, f"{server} {item} {step}".rstrip())
        if asked.problem in (kinds.GONE, kinds.TIMEOUT):
            self.servers[server].confirm_gone(f"{server} stopped answering: {asked.message}")
        return asked

    def room(self, server=TARGET):
        """The longest prompt in tokens that leaves room for an answer.

        Raises: NotRun when the server does not say its context length, or it is too short for any.
        """
        context = self.facts(server).context_tokens
        if context is None:
            raise NotRun(f"the {server} server does not say its context length")
        room = context - self.suite.max_tokens - _RESERVE_TOKENS
        if room < 64:
            raise NotRun(
                f"context too short: {context} tokens, of which an answer takes {self.suite.max_tokens}"
            )
        return room

    def text_tokens(self):
        """(tokens of a filler sentence, tokens of a recall beside its filler) by the target's tokenizer.

        Measured once, by the usage of two requests for one token.
        Raises: NotRun when the server reports no usage.
        """
        if self._text_tokens is None:
            few, many = (self._recall_tokens(sentences) for sentences in _MEASURED)
            if many <= few:
                raise NotRun(f"the server reads {few} tokens of a short text and {many} of a longer one")
            sentence = (many - few) / (_MEASURED[1] - _MEASURED[0])
            self._text_tokens = sentence, few - _MEASURED[0] * sentence
        return self._text_tokens

    def _recall_tokens(self, sentences):
        """Prompt tokens of a recall with so many sentences. Both measured begin with the same ones."""
        prompt = self.suite.recall("measure", sentences, 0.0)
        body = {**prompt.body(), **self._template, "max_tokens": 1, "cache_salt": f"{self.salt}/measure"}
        asked = self._send(CHAT, body, TARGET, "measure", f"{sentences} sentences")
        if not asked.answered or not asked.prompt_tokens:
            problem = asked.message or "no usage reported"
            raise NotRun(f"the length of a text in tokens is unknown: {problem}")
        return asked.prompt_tokens

    def sentences(self, tokens):
        """How many filler sentences make a recall of about ``tokens`` tokens."""
        sentence, beside = self.text_tokens()
        return max(1, round((tokens - beside) / sentence))

    def each(self, servers):
        """The named servers of ``servers`` that this run has and that still answer."""
        return [s for s in servers if self.has(s) and (s == TARGET or not self.servers[s].gone)]


__all__ = ["CONTROL", "ONE_CHUNK", "TARGET", "UNDRAFTED", "NotRun", "ServerGone", "Session"]
