"""A running server asked over its OpenAI-compatible endpoints, and what it says about itself.

/v1/chat/completions and /v1/completions are all that the checks need: SGLang answers token ids, cached
tokens, accept length and retractions there on request (return_token_ids, return_meta_info). /server_info
and /v1/loads are read for facts (KV format, chunk size, pool usage); what they do not say stays None.
"""

import re
import time
from dataclasses import asdict, dataclass

import requests

from launcher.checks import exchange as kinds
from launcher.checks.bounds import KV_FORMATS
from launcher.checks.exchange import Exchange

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_FACTS_TIMEOUT_S = 60
_SECRET = re.compile(r"api_key|password|secret", re.IGNORECASE)


class ServerGone(Exception):
    """The server named ``server`` ("target", "control", ...) does not answer any more."""

    def __init__(self, server, message):
        super().__init__(message)
        self.server = server


@dataclass(frozen=True)
class Facts:
    """What a server says about itself; None where it does not say.

    ``kv_format``: "bf16", "fp8_e4m3" or "nvfp4". ``kv_dtype``: SGLang's own word. ``context_tokens``:
    prompt and answer together; no more than the pool holds. ``chunk_tokens``: of a prefill, -1 for no
    chunks. ``drafter``: the algorithm, "" for none.
    """

    url: str
    model: str | None = None
    version: str | None = None
    kv_dtype: str | None = None
    kv_format: str | None = None
    device: str | None = None
    context_tokens: int | None = None
    chunk_tokens: int | None = None
    pool_tokens: int | None = None
    running_requests: int | None = None
    drafter: str | None = None
    prefix_cache: bool | None = None

    @property
    def learns(self):
        """Whether the drafter drafts from what it has answered, so that the same prompt drafts otherwise next time."""
        return self.drafter == "NGRAM"


class Server:
    """``name``: what the run calls it. ``url``: without a path. ``timeout_s``: of one answer."""

    def __init__(self, name, url, *, model=None, api_key=None, timeout_s=600, clock=time.monotonic):
        self.name, self.url, self.timeout_s, self.clock = name, url.rstrip("/"), timeout_s, clock
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self.model, self.info, self.gone, self.facts = model, None, None, Facts(self.url)
        self._timeouts = 0  # in a row

    def _request(self, method, path, timeout_s, body=None):
        # Neither proxies nor .netrc of the environment.
        with requests.Session() as session:
            session.trust_env = False
            return session.request(
                method, self.url + path, json=body, headers=self.headers, timeout=timeout_s
            )

    def _get(self, path):
        """The JSON object at ``path``, None where the server has none."""
        try:
            answer = self._request("GET", path, _FACTS_TIMEOUT_S)
            found = answer.json() if answer.status_code == 200 else None
        except (requests.RequestException, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def connect(self):
        """Read the facts.

        Raises: ServerGone when nothing answers at the address.
        """
        try:
            self._request("GET", "/v1/models", _FACTS_TIMEOUT_S)
        except requests.RequestException as error:
            raise self._lost(f"{self.url} cannot be reached ({_short(error)})") from None
        models = (self._get("/v1/models") or {}).get("data") or [{}]
        info = self._get("/server_info")
        self.info = without_secrets(info)
        self.model = self.model or models[0].get("id")
        self.facts = facts(self.url, self.model, models[0], info or {})
        return self.facts

    def usage(self):
        """The share of the pool's tokens in use by running requests, None where it is not reported."""
        loads = (self._get("/v1/loads?include=core") or {}).get("loads")
        return max((load.get("token_usage", 0.0) for load in loads), default=None) if loads else None

    def ask(self, endpoint, body, *, check, item, step="", run_began=0.0):
        """One Exchange; a request that fails is one too, with its problem.

        Raises: ServerGone when the server was lost before.
        """
        if self.gone:
            raise ServerGone(self.name, self.gone)
        body = {"model": self.model or "default", "temperature": 0, **body}
        began = self.clock()
        http = response = None
        try:
            answer = self._request("POST", endpoint, self.timeout_s, body)
            http = answer.status_code
            response, problem, message = _read(answer, endpoint)
            self._timeouts = 0
        except requests.Timeout:
            problem, message = kinds.TIMEOUT, f"no answer within {self.timeout_s:g} s"
            self._timeouts += 1
        except requests.RequestException as error:
            problem, message = kinds.GONE, f"the connection broke ({_short(error)})"
        return Exchange(
            check, item, self.name, step, endpoint, body, http, response, problem, message,
            round(began - run_began, 3), round(self.clock() - began, 3),
        )  # fmt: skip

    def confirm_gone(self, message):
        """After a connection broke or timed out: raises ServerGone unless the server is still there.

        Two timeouts in a row are taken for a server that hangs; waiting on would take hours.
        """
        if self._timeouts >= 2:
            raise self._lost(f"{self.name} hangs: two answers in a row took more than {self.timeout_s:g} s")
        try:
            self._request("GET", "/health", 10)
        except requests.Timeout:
            pass  # busy, not gone
        except requests.RequestException:
            raise self._lost(message) from None

    def _lost(self, message):
        self.gone = message
        return ServerGone(self.name, message)


def without_secrets(info):
    """A /server_info answer without the values of its keys and passwords, wherever they stand in it."""
    secrets = set()

    def collect(value, name=""):
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, key)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)
        elif isinstance(value, str) and value and _SECRET.search(name):
            secrets.add(value)

    def redact(value):
        if isinstance(value, dict):
            return {key: redact(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [redact(inner) for inner in value]
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, "***")
        return value

    collect(info)
    return redact(info)


def facts(url, model, listed, info):
    """The Facts in a /v1/models entry and a /server_info answer."""
    kv_dtype = info.get("kv_cache_dtype")
    # A request longer than the pool is refused as one longer than the context is.
    limits = (listed.get("max_model_len") or info.get("context_length"), info.get("max_total_num_tokens"))
    drafter = info.get("speculative_algorithm") if info else None
    return Facts(
        url=url,
        model=model,
        version=info.get("version"),
        kv_dtype=kv_dtype,
        kv_format=KV_FORMATS.get(kv_dtype),
        device=info.get("device"),
        context_tokens=min((limit for limit in limits if limit), default=None),
        chunk_tokens=info.get("chunked_prefill_size"),
        pool_tokens=info.get("max_total_num_tokens"),
        running_requests=info.get("max_running_requests"),
        drafter=(drafter or "") if info else None,
        prefix_cache=(not info.get("disable_radix_cache")) if info else None,
    )


def facts_json(found):
    return asdict(found)


def _read(answer, endpoint):
    """(response, problem, message) of an HTTP answer."""
    try:
        response = answer.json()
    except ValueError:
        response = None
    if not isinstance(response, dict):
        response = None
    status = answer.status_code
    if status != 200:
        message = f"HTTP {status}: {_error_text(response) or answer.text[:300]}"
        if status == 400 and "context length" in message:
            return response, kinds.CONTEXT, message
        return response, kinds.REFUSED if 400 <= status < 500 else kinds.FAILED, message
    choices = (response or {}).get("choices")
    part = "message" if endpoint == CHAT else "text"
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict) and part in choices[0]):
        return response, kinds.MALFORMED, f"HTTP 200 without an answer: {answer.text[:300]}"
    return response, None, None


def _error_text(response):
    if response is None:
        return None
    error = response.get("error")
    return response.get("message") or (error.get("message") if isinstance(error, dict) else error)


def _short(error):
    """The innermost reason of a requests error, without the objects around it."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error)[:200]
