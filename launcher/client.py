"""Asks a running SGLang server over HTTP; needs no access to its machine."""

import secrets
import warnings
from dataclasses import dataclass

import requests
from urllib3.exceptions import InsecureRequestWarning


class ServerError(Exception):
    """The server answered with an error or with something that is not an answer."""


@dataclass(frozen=True)
class Generation:
    """One greedy answer.

    ``tokens``: output token ids. ``accept_length``: tokens a verify step yielded on average, None
    without a drafter. ``gaps``: per output position the difference of the two largest
    log-probabilities (natural log), None where they were not asked for. ``cached_tokens``: prompt
    tokens taken from the prefix cache.
    """

    tokens: tuple
    text: str
    accept_length: float | None
    gaps: tuple | None
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Score:
    """What a prefill pass makes of tokens it was given; one entry a token.

    ``regrets``: the best token's log-probability minus the given one's, 0 where it is the best.
    ``best``: the best tokens' ids. ``gaps``: the difference of the two best log-probabilities.
    ``cached_tokens``: tokens that were not computed but read from the prefix cache.
    """

    regrets: tuple
    best: tuple
    gaps: tuple
    cached_tokens: int


def _send(method, url, **options):
    """The response; proxies and .netrc of the environment are not used."""
    with requests.Session() as session, warnings.catch_warnings():
        # verify=False is for a server on this machine, whose certificate names another host.
        warnings.simplefilter("ignore", InsecureRequestWarning)
        session.trust_env = False
        return session.request(method, url, **options)


def _ask(method, url, **options):
    """The JSON object that ``url`` answers."""
    response = _send(method, url, **options)
    if response.status_code != 200:
        raise ServerError(f"{url}: HTTP {response.status_code}: {response.text[:300]}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"{url}: no JSON object but {response.text[:300]!r}")
    return answer


def server_info(url, *, headers=None, timeout_s=60, verify=True):
    """The server's GET /server_info as a dict."""
    return _ask("GET", f"{url}/server_info", headers=headers, timeout=timeout_s, verify=verify)


def is_healthy(url):
    """Whether GET /health, which needs no key, is answered with 200 right now."""
    try:
        return _send("GET", f"{url}/health", timeout=5, verify=False).status_code == 200
    except requests.RequestException:
        return False


def fp4kv_report(info):
    """The scheduler's own report in a /server_info answer (see sglang_fp4kv.proof), or None."""
    states = info.get("internal_states") or [{}]
    return states[0].get("fp4kv")


def generate(
    url, prompt, max_new_tokens, *,
    top_two=False, timeout_s=600, headers=None, verify=True, dp_rank=None, **sampling,
):  # fmt: skip
    """A greedy continuation of ``prompt``, a text or a list of token ids.

    ``dp_rank``: the data-parallel replica that is to answer.
    Raises: ServerError when the server refuses, or returns no token ids.
    """
    body = {
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "routed_dp_rank": dp_rank,
    }
    if top_two:
        body |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
    answer = _ask(
        "POST", f"{url}/generate", json=body, timeout=timeout_s, headers=headers, verify=verify
    )
    if not answer.get("output_ids"):
        raise ServerError(f"{url}/generate returned no token ids: {str(answer)[:300]}")
    try:
        meta = answer["meta_info"]
        gaps = None
        if top_two:
            gaps = tuple(first[0] - second[0] for first, second in meta["output_top_logprobs"])
        return Generation(
            tokens=tuple(answer["output_ids"]),
            text=answer.get("text", ""),  # none with --skip-tokenizer-init
            accept_length=meta.get("spec_accept_length"),
            gaps=gaps,
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(
            f"{url}/generate left out what was asked for ({error!r}): {str(answer)[:300]}"
        ) from None


def score(
    url, context, tokens, *, cached, timeout_s=600, headers=None, verify=True, dp_rank=None
):
    """A prefill pass over ``context`` and ``tokens`` (ids, neither empty), as a Score of ``tokens``.

    ``cached``: whether ``context`` may be read from the prefix cache; otherwise all of it is computed
    in this pass.
    Raises: ServerError when the server refuses or leaves out a log-probability.
    """
    body = {
        "input_ids": [*context, *tokens],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
        # SGLang reads no further from the cache than to where log-probabilities are asked for,
        # and nothing that was kept under another key.
        "logprob_start_len": len(context) - 1,
        "extra_key": None if cached else secrets.token_hex(8),
        "routed_dp_rank": dp_rank,
    }
    answer = _ask(
        "POST", f"{url}/generate", json=body, timeout=timeout_s, headers=headers, verify=verify
    )
    try:
        meta = answer["meta_info"]
        given = meta["input_token_logprobs"][-len(tokens) :]
        best = meta["input_top_logprobs"][-len(tokens) :]
        # The vocabulary's last id is shown as 0, with its own log-probability
        # (srt/managers/scheduler_components/logprob_result_processor.py @ 0.5.23).
        if any(shown not in (token, 0) for token, (_, shown, _) in zip(tokens, given, strict=True)):
            raise ValueError("the log-probabilities are other tokens'")
        return Score(
            regrets=tuple(max(top[0][0] - own[0], 0.0) for top, own in zip(best, given, strict=True)),
            best=tuple(top[0][1] for top in best),
            gaps=tuple(top[0][0] - top[1][0] for top in best),
            cached_tokens=meta["cached_tokens"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(
            f"{url}/generate left out log-probabilities ({error!r}): {str(answer)[:300]}"
        ) from None


def tokenize(url, *, timeout_s=60, headers=None, verify=True, **what):
    """Token ids of ``prompt=`` a text or ``messages=`` a conversation, as the server makes them.

    Raises: ServerError when the server has no tokenizer, or no chat template for messages.
    """
    answer = _ask(
        "POST", f"{url}/tokenize", json=what, timeout=timeout_s, headers=headers, verify=verify
    )
    tokens = answer.get("tokens")
    if not (isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)):
        raise ServerError(f"{url}/tokenize returned no tokens: {str(answer)[:300]}")
    return tokens
