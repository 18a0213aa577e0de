"""Asks a running SGLang server over HTTP; needs no access to its machine."""

from dataclasses import dataclass

import requests


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


def _ask(method, url, **options):
    """The JSON object that ``url`` answers; proxies and .netrc of the environment are not used."""
    with requests.Session() as session:
        session.trust_env = False
        response = session.request(method, url, **options)
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


def fp4kv_report(info):
    """The scheduler's own report in a /server_info answer (see sglang_fp4kv.proof), or None."""
    states = info.get("internal_states") or [{}]
    return states[0].get("fp4kv")


def generate(url, prompt, max_new_tokens, *, top_two=False, timeout_s=600, **sampling):
    """A greedy continuation of ``prompt``, a text or a list of token ids.

    Raises: ServerError when the server refuses, or returns no token ids.
    """
    body = {
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
        "text" if isinstance(prompt, str) else "input_ids": prompt,
    }
    if top_two:
        body |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
    answer = _ask("POST", f"{url}/generate", json=body, timeout=timeout_s)
    if not answer.get("output_ids"):
        raise ServerError(f"{url}/generate returned no token ids: {str(answer)[:300]}")
    try:
        meta = answer["meta_info"]
        gaps = None
        if top_two:
            gaps = tuple(first[0] - second[0] for first, second in meta["output_top_logprobs"])
        return Generation(
            tokens=tuple(answer["output_ids"]),
            text=answer["text"],
            accept_length=meta.get("spec_accept_length"),
            gaps=gaps,
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(
            f"{url}/generate left out what was asked for ({error!r}): {str(answer)[:300]}"
        ) from None
