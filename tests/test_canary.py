"""The canary's judgement on a stand-in server: a small fixed function in place of a model."""

import http.server
import json
import os
import threading

import pytest

from launcher.canary import NEW_TOKENS, Canary
from launcher.client import ServerError, score, tokenize

GAP = 6.0  # between the stand-in's best token and every other
CODE_AT = ["The", "code", "is"]


class Model:
    """Answers /tokenize and /generate. ``flaws``: what it gets wrong.

    The "right" function stands for attention without the pool, "wrong" for a misread one.
    """

    def __init__(self, flaws):
        self.flaws = set(flaws)
        self.words = {}
        self.cache = []
        self.asked = []

    def ids(self, text):
        return [self.words.setdefault(word, 200 + len(self.words)) for word in text.split()]

    def next(self, ids, wrong=False):
        if ids[-3:] == self.ids(" ".join(CODE_AT)) and "unable" not in self.flaws:
            return self.ids("4-7-1-9")[0] + (wrong and 1)
        return (sum(ids[-3:]) * 7 + len(ids)) % 97 + 1 + wrong

    def tokenize(self, body):
        if "no tokenizer" in self.flaws or ("messages" in body and "no template" in self.flaws):
            return None
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        return {"tokens": self.ids(text)}

    def generate(self, body):
        self.asked.append(body)
        ids, key = body["input_ids"], body.get("extra_key")
        limit = body.get("logprob_start_len", len(ids) - 1)
        hit = 0
        if "no cache" not in self.flaws and (key is None or "cached reference" in self.flaws):
            matches = [len(os.path.commonprefix([kept, ids])) for kept in self.cache]
            hit = min(max(matches, default=0), limit)
        meta = {"prompt_tokens": len(ids), "cached_tokens": hit}
        if body.get("return_logprob"):
            pool = key is None
            meta |= self.score(ids, limit, wrong=pool and "all readers" in self.flaws)
            return {"output_ids": [1], "text": "", "meta_info": meta}
        answer = list(ids)
        wrong = bool(self.flaws & {"verify", "all readers"}) or (
            "second answer" in self.flaws and hit > 0
        )
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            answer.append(self.next(answer, wrong))
        if key is None:
            self.cache.append(answer)
        meta["spec_accept_length"] = 3.0
        return {"output_ids": answer[len(ids) :], "text": "text", "meta_info": meta}

    def score(self, ids, start, wrong):
        gap = 0.4 if "unsure" in self.flaws else GAP
        own, top = [(None, ids[start], None)], [None]
        for i in range(start + 1, len(ids)):
            best = self.next(ids[:i], wrong)
            own.append((-0.1 if ids[i] == best else -0.1 - gap, ids[i], None))
            top.append([(-0.1, best, None), (-0.1 - gap, best + 1, None)])
        return {"input_token_logprobs": own, "input_top_logprobs": top}


@pytest.fixture
def model():
    """Starts a stand-in with the given flaws and returns it with its address."""
    servers = []

    def start(*flaws):
        served = Model(flaws)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer = {"/tokenize": served.tokenize, "/generate": served.generate}[self.path](body)
                self.send_response(200 if answer else 400)
                self.end_headers()
                self.wfile.write(json.dumps(answer or {}).encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        served.url = f"http://127.0.0.1:{server.server_port}"
        return served

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def canary(served, **changes):
    values = {
        "url": served.url, "access": {"headers": {}, "verify": True}, "drafted": True, "bound": 2.0,
        "haystack": 6, "room": 4096, "page_size": 1,
    }  # fmt: skip
    return Canary(**{**values, **changes})


@pytest.mark.parametrize(
    ("page", "snapshots", "length", "kept"),
    [
        (16, 0, 17, True), (16, 0, 16, False), (None, 0, 99, False), (None, 64, 99, False),
        (1, 64, 64, False), (1, 64, 65, True), (1, 64, 128, False), (1, 64, 129, True), (1, None, 99, False),
    ],
)  # fmt: skip
def test_what_the_prefix_cache_has_of_a_repeated_prompt(model, page, snapshots, length, kept):
    assert canary(model(), page_size=page, snapshot_tokens=snapshots).keeps(length) is kept


def test_a_right_server_passes(model):
    outcome = canary(model()).run(60)
    assert outcome.failures == ()
    assert outcome.summary == (
        f"4 prompts, {4 * NEW_TOKENS} tokens equal to prefill's over the same pool; 0.000 a token "
        "against a pass without the pool; 4 repeated from the cache; planted code recalled; accept "
        "length 3.00"
    )


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ("verify", "verify and prefill read the same pool differently from token 0 on (gap 6.00, a near"),
        ("all readers", "the answers cost 6.00 a token (limit 0.5)"),
        ("second answer", "the repeated prompt is answered otherwise: different at token 0 (gap 6.000)"),
        ("no cache", "the repeated prompt does not hit the prefix cache"),
        ("cached reference", "the pass without the pool took"),
    ],
)
def test_each_flaw_is_found_and_shown(model, flaw, says):
    text = "\n".join(canary(model(flaw)).run(60).failures)
    assert says in text
    for part in ("prompt:    ", "answer:    [", "again:     [", "reference: ["):
        assert part in text
    others = {
        "verify": "repeated", "all readers": "verify and prefill", "second answer": "costliest",
        "no cache": "answered otherwise", "cached reference": "verify and prefill",
    }  # fmt: skip
    assert others[flaw] not in text


def test_both_sides_tokens_and_the_gaps_are_shown_where_they_part(model):
    served = model("verify")
    text = canary(served).run(60).failures[0]
    first = served.asked[0]["input_ids"]
    right = served.next(first)
    assert f"answer:    [{right + 1}, " in text and f"reference: [{right}, " in text
    assert "part at:   token 0; gap at each token: 6.00, " in text


def test_a_lost_code_fails_only_a_model_that_can_recall_it(model):
    text = "\n".join(canary(model("all readers")).run(60).failures)
    assert "the planted code" in text and "which the same model gives without the pool" in text
    outcome = canary(model("unable")).run(60)
    assert outcome.failures == () and "planted code beyond the model" in outcome.summary


def test_near_ties_pass_and_are_counted(model):
    outcome = canary(model("verify", "unsure")).run(60)
    assert f"({4 * NEW_TOKENS} near-ties)" in outcome.summary and outcome.failures == ()
    assert canary(model("verify", "unsure"), bound=0.3).run(60).failures


def test_without_a_drafter_the_other_reader_is_decode(model):
    text = canary(model("verify"), drafted=False).run(60).failures[0]
    assert "decode and prefill read the same pool differently" in text
    assert "accept length" not in canary(model(), drafted=False).run(60).summary


def test_a_cache_that_is_off_or_keeps_larger_pages_need_not_be_hit(model):
    off = canary(model("no cache"), page_size=None).run(60)
    assert off.failures == () and "no prefix cache" in off.summary
    assert canary(model("no cache"), page_size=4096).run(60).failures == ()


def test_a_pass_that_found_nothing_in_the_pool_is_not_said_to_have_read_it(model):
    """A model with recurrent states keeps nothing of a short prompt."""
    summary = canary(model("no cache"), page_size=None).run(60).summary
    assert summary.startswith(f"4 prompts, {4 * NEW_TOKENS} tokens equal to prefill's, 0 of them over the same pool;")
    text = canary(model("no cache", "verify"), page_size=None).run(60).failures[0]
    assert "verify and prefill part from token 0 on (gap 6.00, " in text


@pytest.mark.parametrize("flaw", ["no tokenizer", "no template"])
def test_no_tokenizer_or_template_is_needed(model, flaw):
    outcome = canary(model(flaw)).run(60)
    assert outcome.failures == ()
    assert outcome.summary.startswith("2 prompts" if flaw == "no tokenizer" else "4 prompts")


def test_every_replica_is_asked(model):
    served = model("verify")
    text = "\n".join(canary(served, ranks=2).run(60).failures)
    assert "chat on replica 1: verify" in text
    assert {body["routed_dp_rank"] for body in served.asked} == {0, 1}
    assert canary(model()).run(60).failures == ()


def test_prompts_that_do_not_fit_are_left_out(model):
    outcome = canary(model(), room=40).run(60)
    assert outcome.failures == () and "planted" not in outcome.summary
    assert canary(model(), room=10).run(60).failures == ("no prompt of the canary fits into 10 tokens",)


def test_time_that_is_over_is_an_error(model):
    with pytest.raises(TimeoutError, match="the time for the canary is over"):
        canary(model()).run(0)


def test_a_cancelled_canary_asks_nothing_more(model):
    served, cancelled = model(), threading.Event()
    asked = served.generate

    def last(body):
        cancelled.set()
        return asked(body)

    served.generate = last
    with pytest.raises(InterruptedError, match="the canary was cancelled"):
        canary(served, cancelled=cancelled).run(60)
    assert len(served.asked) == 1


def test_the_vocabularys_last_id_is_judged_though_sglang_shows_it_as_0(model, monkeypatch):
    answer = {
        "input_token_logprobs": [(None, 2, None), (-3.1, 0, None)],
        "input_top_logprobs": [None, [(-0.1, 7, None), (-2.1, 8, None)]],
    }
    served = model()
    monkeypatch.setattr(Model, "score", lambda *_, **__: answer)
    assert score(served.url, [1, 2], [511], cached=True).regrets == pytest.approx((3.0,))
    answer["input_token_logprobs"][1] = (-3.1, 5, None)
    with pytest.raises(ServerError, match="the log-probabilities are other tokens'"):
        score(served.url, [1, 2], [511], cached=True)


def test_answers_that_are_none_are_errors(model, monkeypatch):
    served = model()
    nothing = {"input_token_logprobs": [], "input_top_logprobs": []}
    monkeypatch.setattr(Model, "score", lambda *_, **__: nothing)
    with pytest.raises(ServerError, match="left out log-probabilities"):
        score(served.url, [1, 2], [3], cached=True)
    monkeypatch.setattr(Model, "tokenize", lambda *_: {"tokens": "many"})
    with pytest.raises(ServerError, match="returned no tokens"):
        tokenize(served.url, prompt="x")
