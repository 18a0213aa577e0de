"""One request with what came back, as it is kept on file; everything else is read out of that."""

from dataclasses import dataclass, fields
from functools import cached_property

# What can go wrong with a request. Each is reported under this name and never counts as an answer.
GONE = "server gone"
TIMEOUT = "timeout"
CONTEXT = "context too short"
REFUSED = "refused"
FAILED = "server error"
MALFORMED = "no answer"
_PROMPT_IDS = "prompt_token_ids"


@dataclass(frozen=True)
class Exchange:
    """A request to ``server`` for ``item`` of ``check``.

    ``step``: which asking of the item ("first", "alone", ...). ``http``: status code, None where nothing
    came back. ``response``: the JSON object that did. ``problem``: one of the kinds above, ``message``
    with it. ``began_s``: since the run began.
    """

    check: str
    item: str
    server: str
    step: str
    endpoint: str
    request: dict
    http: int | None
    response: dict | None
    problem: str | None
    message: str | None
    began_s: float
    seconds: float

    @cached_property
    def _choice(self):
        return self.response["choices"][0] if self.problem is None else {}

    @property
    def _meta(self):
        return self._choice.get("meta_info") or {}

    @property
    def _usage(self):
        return (self.response or {}).get("usage") or {}

    @property
    def answered(self):
        return self.problem is None

    @property
    def cut(self):
        """Ended by max_tokens; what the answer would have become is unknown."""
        return self._choice.get("finish_reason") == "length"

    @property
    def text(self):
        message = self._choice.get("message") or {}
        return message.get("content") or self._choice.get("text") or ""

    @property
    def reasoning(self):
        return (self._choice.get("message") or {}).get("reasoning_content") or ""

    @property
    def tool_calls(self):
        return (self._choice.get("message") or {}).get("tool_calls") or []

    @property
    def tokens(self):
        """Output token ids as a tuple; None where the server returned none."""
        ids = self._choice.get("response_token_ids")
        return None if ids is None else tuple(ids)

    @property
    def stop_token(self):
        """The id of the token that ended the answer, None where it is unknown or something else did."""
        matched = self._choice.get("matched_stop")
        return matched if isinstance(matched, int) else None

    @property
    def prompt_ids(self):
        """Only before the exchange is kept on file."""
        return self._choice.get(_PROMPT_IDS)

    @property
    def prompt_tokens(self):
        return self._usage.get("prompt_tokens")

    @property
    def completion_tokens(self):
        return self._usage.get("completion_tokens")

    @property
    def cached_tokens(self):
        """Prompt tokens from the prefix cache; None where the server does not report them."""
        if "cached_tokens" in self._meta:
            return self._meta["cached_tokens"]
        details = self._usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens")

    @property
    def accept_length(self):
        """Tokens a verify step yielded on average; None without a drafter."""
        return self._meta.get("spec_accept_length")

    @property
    def retractions(self):
        return self._meta.get("num_retractions")

    @cached_property
    def gaps(self):
        """Margins of the two best tokens at each output token, natural log; None where not asked for."""
        logprobs = self._choice.get("logprobs")
        if not logprobs:
            return None
        if "content" in logprobs:
            tops = [token.get("top_logprobs") or [] for token in logprobs["content"] or []]
            pairs = [[best["logprob"] for best in top] for top in tops]
        else:  # of /v1/completions, where two tokens of one spelling are one entry
            pairs = [list((best or {}).values()) for best in logprobs.get("top_logprobs") or []]
        return tuple(_gap(pair) for pair in pairs)

    def on_file(self):
        """The exchange as plain data, without the prompt's token ids: the prompt is in the request."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.prompt_ids is not None:
            choice = {k: v for k, v in self._choice.items() if k != _PROMPT_IDS}
            record["response"] = {**self.response, "choices": [choice]}
        return record


def _gap(logprobs):
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else None
