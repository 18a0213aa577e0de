"""A server that answers the suite `pair` rightly over SGLang's OpenAI endpoints, or plays one fault.

One character is one output token, four characters of a prompt are one prompt token.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from launcher.checks.suite import Suite

SUITE = Suite("pair")
POOL = 4_000
REQUESTS = 4


def expected():
    """The right answer by question."""
    prompts = [*SUITE.prompts("arithmetic"), *SUITE.prompts("tool-call"), *SUITE.agreement(1000)]
    for name in ("chat", "code", "json", "non-english", "thinking"):
        prompts += SUITE.workload(name)
    return {prompt.user: prompt.expect for prompt in prompts}


EXPECTED = expected()


def right(user):
    """What a sound model answers."""
    if user in EXPECTED:
        expect = EXPECTED[user]
        if isinstance(expect, dict):
            return f"<tool_call>\n{json.dumps(expect)}\n</tool_call>"
        return f"It is {expect}."
    if "The code is " in user:
        return f"The code is {user.split('The code is ')[1].split('.')[0]}."
    return "A text."


class FakeServer:
    """A running server at ``url``.

    ``answer(n, body, text)``: the text in place of the right one, for the n-th chat request (from 1), or a
    (status, JSON) pair. ``info``: changes to /server_info; None for no such endpoint. ``margin``: of every
    token that is probed. ``meta(n, body, meta)`` changes meta_info in place. ``hold_s``: how long a request
    that writes on past its end waits for the others in the pool; 0 for not at all.
    """

    def __init__(self, *, answer=None, info=(), context=8_192, margin=9.0, meta=None, finish="stop",
                 die_after=None, loads=True, ids=True, hold_s=1.0, delay_s=0.0,
                 stop_token=2):  # fmt: skip
        self.answer, self.meta, self.margin, self.finish = answer, meta, margin, finish
        self.context, self.die_after, self.loads, self.ids = context, die_after, loads, ids
        self.hold_s, self.delay_s, self.stop_token = hold_s, delay_s, stop_token
        self.info = None if info is None else {
            "version": "0.5.23", "kv_cache_dtype": "nvfp4", "device": "cuda", "chunked_prefill_size": 400,
            "max_total_num_tokens": POOL, "max_running_requests": REQUESTS, "speculative_algorithm": "DFLASH",
            "disable_radix_cache": False, **dict(info),
        }  # fmt: skip
        self.asked, self.probed, self.seen = [], [], {}
        self.lock, self.full = threading.Lock(), threading.Condition()
        self.held = self.holding = self.left = self.most = 0
        self.seen_full = False
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.dead = False

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.die()

    def die(self):
        if not self.dead:
            self.dead = True
            threading.Thread(target=self._close, daemon=True).start()

    def _close(self):
        self.http.shutdown()
        self.http.server_close()

    def get(self, path):
        if path == "/v1/models":
            return 200, {"data": [{"id": "fake", "max_model_len": self.context}]}
        if path == "/server_info" and self.info is not None:
            return 200, self.info
        if path.startswith("/v1/loads") and self.loads:
            with self.full:
                self.seen_full = self.seen_full or self.holding == REQUESTS
                self.full.notify_all()
                return 200, {"loads": [{"token_usage": min(1.0, self.held / POOL)}]}
        return (200, {}) if path == "/health" else (404, {"detail": "Not Found"})

    def chat(self, body):
        user = body["messages"][0]["content"]
        with self.lock:
            self.asked.append(body)
            n = len(self.asked)
            if self.die_after is not None and n > self.die_after:
                return None
        tokens = len(user) // 4 + 10
        if tokens + body["max_tokens"] > self.context:
            limit = f"longer than the model's context length ({self.context} tokens)."
            return 400, {"object": "error", "message": f"The input ({tokens} tokens) is {limit}"}
        time.sleep(self.delay_s)
        text = right(user)
        if self.answer is not None:
            text = self.answer(n, body, text)
            if not isinstance(text, str):
                return text
        meta = {
            "cached_tokens": self._cached(body.get("cache_salt"), user), "spec_accept_length": 5.5,
            "num_retractions": self._hold(tokens + body["max_tokens"]) if self.hold_s and body.get("logit_bias") else 0,
        }  # fmt: skip
        if self.info is not None and self.info["speculative_algorithm"] is None:
            del meta["spec_accept_length"]
        if self.meta is not None:
            self.meta(n, body, meta)
        choice = {
            "message": {"content": text, "tool_calls": None},
            "finish_reason": "length" if body["max_tokens"] == 1 or body.get("logit_bias") else self.finish,
        }
        choice |= {"meta_info": meta, "matched_stop": self.stop_token}
        if self.ids:
            choice |= {
                "response_token_ids": [ord(c) for c in text],
                "prompt_token_ids": [ord(c) for c in user],
            }
        if body.get("logprobs"):
            pair = [{"logprob": -0.1}, {"logprob": -0.1 - self.margin}]
            choice["logprobs"] = {"content": [{"top_logprobs": pair} for _ in text]}
        usage = {"prompt_tokens": tokens, "completion_tokens": len(text)}
        return 200, {"choices": [choice], "usage": usage}

    def completion(self, body):
        self.probed.append(body)
        logprobs = {"top_logprobs": [{"a": -0.1, "b": -0.1 - self.margin}]}
        return 200, {"choices": [{"text": "a", "logprobs": logprobs, "finish_reason": "length"}], "usage": {}}

    def _cached(self, salt, user):
        """Whole prompts and their beginnings asked before under the same salt."""
        with self.lock:
            before = self.seen.setdefault(salt, [])
            shared = max((len(b) for b in before if user.startswith(b)), default=0)
            before.append(user)
        return shared // 4

    def _hold(self, tokens):
        """Keeps the tokens in the pool until its usage was read with all requests in it, or for hold_s where
        fewer come; 1 where the pool has been too small for all of them."""
        with self.full:
            self.held += tokens
            self.holding += 1
            self.most = max(self.most, self.held)
            if self.holding == REQUESTS:
                self.seen_full = False
            all_came = self.full.wait_for(lambda: self.holding == REQUESTS, self.hold_s)
            self.full.notify_all()
            if all_came:
                self.full.wait_for(lambda: self.seen_full, 10)
            retracted = int(self.most > POOL)
            self.held -= tokens
            self.left += 1
            if self.left == self.holding:
                self.left = self.holding = self.most = 0
        return retracted


class _Handler(BaseHTTPRequestHandler):
    def _send(self, found):
        if found is None:  # died while answering
            self.fake.die()
            self.close_connection = True
            self.connection.close()
            return
        status, content = found
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._send(self.fake.get(self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.authorization = self.headers.get("Authorization")
        self._send(self.fake.chat(body) if "chat" in self.path else self.fake.completion(body))

    def log_message(self, *_):
        pass
