"""Wrong answers: each fault makes the checks fail that name it, on a server that answers everything else."""

import json

import pytest
from fake_server import FakeServer

from launcher.checks import runner
from launcher.checks.options import Options

CONTROL = {"kv_cache_dtype": "fp8_e4m3"}
UNDRAFTED = {"speculative_algorithm": None, "chunked_prefill_size": 8192}
WRONG = "It is a river."


def run(tmp_path, target, *only, **options):
    """The verdict's checks; the folder must give them again."""
    settings = {"suite": "pair", "depths": (300, 900), "prompts": 2, "floors": (("", 5.0),), **options}
    verdict = runner.run(Options(url=target.url, only=only, **settings), tmp_path / "run")
    again, stored = runner.rescore(tmp_path / "run")
    assert json.loads(json.dumps(again)) == stored
    assert verdict["exit_code"] == (
        0 if all(c["status"] == "pass" for c in verdict["checks"].values()) else 3
    )
    return verdict["checks"]


def failing(checks):
    return {id for id, check in checks.items() if check["status"] == "fail"}


def question(body):
    return body["messages"][0]["content"]


def test_wrong_answers_fail_and_the_answer_is_shown(tmp_path):
    with FakeServer(answer=lambda n, body, text: WRONG) as target:
        checks = run(tmp_path, target, "arithmetic", "tool-call", "recall")
    assert failing(checks) == {"arithmetic", "tool-call", "recall"}
    assert "17x23: expected '391', answered 'It is a river.'" in checks["arithmetic"]["summary"]
    assert "no tool call: 'It is a river.'" in checks["tool-call"]["summary"]


def test_a_code_lost_at_depth_alone(tmp_path):
    def lost(n, body, text):
        return "The code is 0-0-0-0-0." if len(question(body)) > 2_000 else text

    with FakeServer(answer=lost) as target:
        checks = run(tmp_path, target, "recall")
    bad = [item["name"] for item in checks["recall"]["items"] if item["status"] == "fail"]
    assert bad == ["900@0.1", "900@0.5", "900@0.9"]


def test_what_the_control_cannot_do_either_does_not_count(tmp_path):
    def hard(n, body, text):
        return WRONG if "12 x 12" in question(body) else text

    with FakeServer(answer=hard) as target, FakeServer(answer=hard, info=CONTROL) as control:
        checks = run(tmp_path, target, "arithmetic", control=control.url)
    assert checks["arithmetic"]["status"] == "pass"
    assert "1 of 2 right, 1 beyond this model (the control is wrong too)" in checks["arithmetic"]["summary"]


def test_a_model_that_can_nothing_shows_nothing(tmp_path):
    def wrong(*_):
        return WRONG

    with FakeServer(answer=wrong) as target, FakeServer(answer=wrong, info=CONTROL) as control:
        checks = run(tmp_path, target, "arithmetic", "agreement", control=control.url)
    assert {check["status"] for check in checks.values()} == {"not run"}


@pytest.mark.parametrize(("margin", "status"), [(0.3, "pass"), (2.5, "fail")])
def test_drafted_tokens_that_part(tmp_path, margin, status):
    with (
        FakeServer(answer=lambda n, body, text: text[:-1] + "?") as target,
        FakeServer(info=UNDRAFTED, margin=margin) as undrafted,
    ):
        checks = run(tmp_path, target, "drafted-equality", undrafted=undrafted.url)
    assert checks["drafted-equality"]["status"] == status
    assert ("10 part at a near-tie" in checks["drafted-equality"]["summary"]) == (status == "pass")


def test_an_undrafted_run_on_file_stands_in_for_the_server(tmp_path):
    with FakeServer(info=UNDRAFTED) as undrafted:
        first = run(tmp_path / "a", undrafted, "drafted-equality")
    assert first["drafted-equality"]["status"] == "not run"
    folder = str(tmp_path / "a" / "run")
    with FakeServer() as target:
        checks = run(tmp_path / "b", target, "drafted-equality", undrafted=folder)
    assert checks["drafted-equality"]["summary"].startswith("10 of 10 equal")
    with FakeServer(answer=lambda n, body, text: text[:-1]) as target:
        assert failing(run(tmp_path / "c", target, "drafted-equality", undrafted=folder))
    with (
        FakeServer() as target,
        pytest.raises(runner.UsageError, match=r"asked other prompts \(seed None, not 5\)"),
    ):
        run(tmp_path / "d", target, undrafted=folder, seed=5)
    with FakeServer() as target:
        run(tmp_path / "e", target, "arithmetic")
        with pytest.raises(runner.UsageError, match="its server ran the drafter 'DFLASH'"):
            run(tmp_path / "f", target, undrafted=str(tmp_path / "e" / "run"))


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({}, "the server given as --undrafted runs the drafter DFLASH"),
        (
            {**UNDRAFTED, "kv_cache_dtype": "bf16"},
            "the undrafted server keeps K and V in bf16, the target in nvfp4",
        ),
    ],
)
def test_a_server_that_is_no_undrafted_twin_is_not_compared(tmp_path, info, says):
    with FakeServer() as target, FakeServer(info=info) as other:
        checks = run(tmp_path, target, "drafted-equality", undrafted=other.url)
    assert (checks["drafted-equality"]["status"], checks["drafted-equality"]["summary"]) == ("not run", says)


def nth(step, change=lambda text: text + " Indeed."):
    """Answers with another text at the given asking of a prompt under one salt."""
    counts = {}

    def answer(n, body, text):
        key = body["cache_salt"], question(body)
        counts[key] = counts.get(key, 0) + 1
        return change(text) if counts[key] == step else text

    return answer


def test_a_cached_answer_must_repeat_outright_whatever_the_margin(tmp_path):
    with FakeServer(answer=nth(3), margin=0.01) as target:
        checks = run(tmp_path, target, "prefix-cache")
    assert failing(checks) and "where only equal will do" in checks["prefix-cache"]["summary"]


@pytest.mark.parametrize(("margin", "failed"), [(0.2, False), (8.0, True)])
def test_beside_ngram_a_cached_answer_may_part_at_a_near_tie(tmp_path, margin, failed):
    """Its verify steps begin elsewhere the second time."""
    answer = nth(3, lambda text: "It was" + text[5:])
    with FakeServer(answer=answer, margin=margin, info={"speculative_algorithm": "NGRAM"}) as target:
        checks = run(tmp_path, target, "prefix-cache")
    assert bool(failing(checks)) is failed


@pytest.mark.parametrize(("margin", "failed"), [(0.2, False), (8.0, True)])
def test_the_first_answer_may_differ_within_its_bound(tmp_path, margin, failed):
    seen = set()

    def other_first(n, body, text):
        key = body["cache_salt"], question(body)
        first = key not in seen
        seen.add(key)
        return "It was" + text[5:] if first else text

    with FakeServer(answer=other_first, margin=margin) as target:
        checks = run(tmp_path, target, "prefix-cache")
    assert bool(failing(checks)) is failed
    # A margin read through the cache that the compared answers wrote would be as broken as they are.
    probed = {body["cache_salt"] for body in target.probed}
    assert probed and not probed & {body["cache_salt"] for body in target.asked}


def accepting(length, last):
    """Accept lengths of ``length`` twice for each prompt, then ``last``."""
    counts = {}

    def meta(n, body, meta):
        counts[question(body)] = counts.get(question(body), 0) + 1
        meta["spec_accept_length"] = length if counts[question(body)] < 3 else last

    return meta


@pytest.mark.parametrize(
    ("drafter", "last", "failed"), [("DFLASH", 4.0, True), ("NGRAM", 4.0, False), ("NGRAM", 7.0, False), ("NGRAM", 1.0, True)]
)
def test_an_accept_length_that_changes_with_the_same_answer(tmp_path, drafter, last, failed):
    """NGRAM's drafts are what it has answered before; one that no longer drafts is found all the same."""
    with FakeServer(meta=accepting(5.5, last), info={"speculative_algorithm": drafter}) as target:
        checks = run(tmp_path, target, "prefix-cache")
    assert bool(failing(checks)) is failed
    assert (f"accept length 5.500, then {last:.3f}" in checks["prefix-cache"]["summary"]) is failed


def test_nothing_from_the_cache_is_no_pass(tmp_path):
    with FakeServer(meta=lambda n, body, meta: meta.update(cached_tokens=0)) as target:
        checks = run(tmp_path, target, "prefix-cache", "prefix-cut")
    assert {check["status"] for check in checks.values()} == {"not run"}
    with FakeServer(info={"disable_radix_cache": True}) as target:
        checks = run(tmp_path / "off", target, "prefix-cache", "prefix-cut")
    assert "--disable-radix-cache" in checks["prefix-cache"]["summary"]


def test_every_second_request_corrupt(tmp_path):
    def corrupt(n, body, text):
        return text if n % 2 else "The weather is fine."

    with FakeServer(answer=corrupt) as target, FakeServer(info=CONTROL) as control:
        checks = run(tmp_path, target, control=control.url, answers=60)
    assert {"arithmetic", "prefix-cache", "batch-identical", "batch-mixed", "agreement"} <= failing(checks)
    assert "the loss is no chance" in checks["agreement"]["summary"]


def test_equal_totals_with_changed_answers(tmp_path):
    """20 of 60 wrong on each side, none of them the same."""
    order = []

    def wrong(rest):
        def answer(n, body, text):
            if question(body) not in order:
                order.append(question(body))
            return WRONG if order.index(question(body)) % 3 == rest else text

        return answer

    with FakeServer(answer=wrong(0)) as target, FakeServer(answer=wrong(1), info=CONTROL) as control:
        checks = run(tmp_path, target, "agreement", control=control.url, answers=60, prompts=None)
    found = checks["agreement"]
    assert found["status"] == "fail" and found["numbers"]["lost"] == found["numbers"]["gained"] == 20
    assert found["numbers"]["p_value"] == 1.0 and "whatever the totals say" in found["summary"]


@pytest.mark.parametrize("loop", ["ha " * 30, "!" * 40, "", "The sky is blue and " * 6])
def test_degenerate_output_with_http_200(tmp_path, loop):
    with FakeServer(
        answer=lambda n, body, text: loop if "Hello" in question(body) or n == 2 else text
    ) as target:
        checks = run(tmp_path, target, "arithmetic", "degenerate-output")
    assert "degenerate-output" in failing(checks)


def test_an_accept_length_below_its_floor(tmp_path):
    def meta(n, body, meta):
        meta["spec_accept_length"] = 2.0 if "python" in question(body).lower() else 5.5
        if len(question(body)) > 2_000:
            meta["spec_accept_length"] = 3.0

    with FakeServer(meta=meta) as target:
        checks = run(tmp_path, target, "recall", "accept-length")
    assert failing(checks) == {"accept-length"}
    assert "code: accept length 2.00, below the floor of 5" in checks["accept-length"]["summary"]
    assert "FALLS over depth: 5.50 at 300 tokens, 3.00 at 900" in checks["accept-length"]["summary"]


def test_without_a_floor_or_a_drafter_accept_length_is_not_judged(tmp_path):
    with FakeServer() as target:
        checks = run(tmp_path, target, "accept-length", floors=(("code", 3.0),))
    assert (
        checks["accept-length"]["status"] == "not run"
        and "no floor stated" in checks["accept-length"]["summary"]
    )
    with FakeServer(info=UNDRAFTED) as target:
        checks = run(tmp_path / "plain", target, "accept-length")
    assert checks["accept-length"]["summary"] == "the server has no drafter"


def test_answers_that_change_after_the_soak(tmp_path):
    soaked = []

    def answer(n, body, text):
        if body.get("logit_bias"):
            soaked.append(n)
        return WRONG if soaked and not body.get("logit_bias") else text

    with FakeServer(answer=answer) as target:
        checks = run(tmp_path, target, "soak")
    assert failing(checks) == {"soak"} and "17x23 after 0.6: different at token" in checks["soak"]["summary"]


@pytest.mark.parametrize("drafter", ["DFLASH", "NGRAM"])
def test_an_accept_length_that_is_reported_once_is_no_pass(tmp_path, drafter):
    with FakeServer(meta=accepting(5.5, None), info={"speculative_algorithm": drafter}) as target:
        checks = run(tmp_path, target, "prefix-cache")
    assert checks["prefix-cache"]["status"] == "not run"
    assert "an accept length for one of two equal answers" in checks["prefix-cache"]["summary"]


@pytest.mark.parametrize(
    ("drafter", "last", "failed"), [("DFLASH", 4.0, True), ("NGRAM", 4.0, False), ("NGRAM", 1.0, True)]
)
def test_an_accept_length_that_falls_after_the_soak(tmp_path, drafter, last, failed):
    """What NGRAM drafts from is what was asked last, the soak's prompts too."""
    soaked = []

    def answer(n, body, text):
        if body.get("logit_bias"):
            soaked.append(n)
        return text

    def meta(n, body, meta):
        meta["spec_accept_length"] = last if soaked else 5.5

    with FakeServer(answer=answer, meta=meta, info={"speculative_algorithm": drafter}) as target:
        checks = run(tmp_path, target, "soak")
    assert bool(failing(checks)) is failed
    assert (f"accept length 5.50 before, {last:.2f} after" in checks["soak"]["summary"]) is failed


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"hold_s": 0.0}, "usage 0.6: the pool was filled to 0.00 only"),
        (
            {"meta": lambda n, body, meta: meta.update(num_retractions=0)},
            "retraction: no request was retracted",
        ),
        (
            {"info": {"max_total_num_tokens": 100_000}},
            "are 0.32 of the pool's 100,000 tokens; start the server with",
        ),
        ({"stop_token": None}, "does not say which token ends an answer"),
        ({"loads": False}, "does not report its pool's usage at /v1/loads"),
        ({"info": {"max_running_requests": None}}, "does not say how many tokens its pool holds"),
    ],
)
def test_a_soak_that_soaks_nothing_is_not_run(tmp_path, server, says):
    with FakeServer(**server) as target:
        checks = run(tmp_path, target, "soak")
    assert checks["soak"]["status"] == "not run" and says in checks["soak"]["summary"]


def test_a_retracted_answer_that_differs_from_the_same_asked_alone(tmp_path):
    held = {}

    def answer(n, body, text):
        held[question(body)] = held.get(question(body), 0) + 1
        return text + " Yes." if body.get("logit_bias") and held[question(body)] == 1 else text

    with FakeServer(answer=answer) as target:
        checks = run(tmp_path, target, "soak")
    assert failing(checks) == {"soak"} and "retracted: different at token" in checks["soak"]["summary"]
