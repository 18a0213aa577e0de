"""`fp4kv check` against a server that answers rightly, and one for each way it can fail. Never a pass."""

import json
import re

import pytest
from fake_server import FakeServer

from launcher import cli
from launcher.checks import record, runner
from launcher.checks.exchange import CONTEXT, MALFORMED, REFUSED
from launcher.checks.options import Options
from launcher.checks.registry import CHECKS
from launcher.flags import UsageError

CONTROL = {"kv_cache_dtype": "fp8_e4m3"}
UNDRAFTED = {"speculative_algorithm": None, "chunked_prefill_size": 8192}
SMALL = {"suite": "pair", "depths": (300, 900), "prompts": 2, "floors": (("", 5.0),)}


@pytest.fixture
def check(tmp_path):
    """Checks a fake server; returns the verdict's checks. The folder must give the same verdict again."""

    def start(server, *only, **options):
        folder = tmp_path / "run"
        verdict = runner.run(Options(url=server.url, only=only, **{**SMALL, **options}), folder)
        again, stored = runner.rescore(folder)
        assert json.loads(json.dumps(again)) == stored == json.loads(json.dumps(verdict))
        assert (verdict["exit_code"] == 0) == (verdict["verdict"] == "pass")
        assert (verdict["verdict"] == "pass") == all(
            c["status"] == "pass" for c in verdict["checks"].values()
        )
        return verdict["checks"]

    return start


def statuses(checks):
    return {id: check["status"] for id, check in checks.items()}


def test_a_sound_server_with_both_others_passes_every_check(check):
    with FakeServer() as target, FakeServer(info=CONTROL) as control, FakeServer(info=UNDRAFTED) as undrafted:
        checks = check(target, control=control.url, undrafted=undrafted.url, prompts=None)
    assert statuses(checks) == dict.fromkeys(CHECKS, "pass")
    assert checks["agreement"]["numbers"]["pairs"] == 64
    assert set(checks["accept-length"]["numbers"]["workloads"]) == {
        "chat",
        "code",
        "json",
        "non-english",
        "thinking",
    }
    assert checks["soak"]["numbers"]["retractions"] >= 1
    salts = {body["cache_salt"].split("/")[0] for body in target.asked}
    assert len(salts) == 1  # one namespace a run, so that nothing is cached from another
    assert {body["temperature"] for body in target.asked} == {0}


def test_template_arguments_are_those_of_every_request(tmp_path, capsys):
    with FakeServer() as target:
        argv = ["check", "--url", target.url, "--suite", "pair", "--only", "arithmetic", "--out", str(tmp_path / "r")]
        assert cli.main([*argv, "--chat-template-kwargs", '{"enable_thinking": false}']) == 0
    assert [body["chat_template_kwargs"] for body in target.asked] == [{"enable_thinking": False}] * 6


def test_what_needs_another_server_is_not_run_without_one(check):
    with FakeServer() as target:
        checks = check(target, "agreement", "drafted-equality", "chunked-prefill", "arithmetic")
    assert checks["arithmetic"]["status"] == "pass"
    assert checks["agreement"]["summary"] == "no --control given"
    assert checks["drafted-equality"]["summary"] == "no --undrafted given"
    assert "name one with --one-chunk" in checks["chunked-prefill"]["summary"]
    assert {checks[id]["status"] for id in ("agreement", "drafted-equality", "chunked-prefill")} == {
        "not run"
    }


@pytest.mark.parametrize("after", [0, 3, 40])
def test_a_server_that_dies_in_the_middle(check, after):
    with FakeServer(die_after=after) as target:
        checks = check(target)
    found = statuses(checks)
    assert "fail" not in found.values()
    assert found["soak"] == "error" and "target stopped answering" in checks["soak"]["summary"]
    assert found["arithmetic"] == ("pass" if after >= 2 else "error")
    if after == 3:
        assert found["tool-call"] == "error" and "until then: 1 of 2 right" in checks["tool-call"]["summary"]
    assert "pass" not in {
        found[id] for id in list(CHECKS)[list(CHECKS).index("batch-mixed") :] if id != "degenerate-output"
    }


def test_a_control_that_dies_spoils_its_checks_alone(check):
    with FakeServer() as target, FakeServer(info=CONTROL, die_after=2) as control:
        checks = check(target, "arithmetic", "agreement", "accept-length", control=control.url)
    assert statuses(checks) == {"arithmetic": "pass", "agreement": "error", "accept-length": "pass"}
    assert "control stopped answering" in checks["agreement"]["summary"]


def test_a_server_that_is_not_there(check):
    with FakeServer() as target:
        pass
    checks = check(target)
    assert set(statuses(checks).values()) == {"error"}
    assert "cannot be reached" in checks["arithmetic"]["summary"]


def test_a_control_that_is_not_there_is_no_control_that_was_not_given(check):
    with FakeServer() as gone:
        pass
    with FakeServer() as target:
        checks = check(target, "agreement", control=gone.url)
    assert checks["agreement"]["status"] == "error" and "cannot be reached" in checks["agreement"]["summary"]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ((401, {"error": {"message": "Unauthorized"}}), f"{REFUSED}: HTTP 401: Unauthorized"),
        ((404, {"detail": "Not Found"}), f"{REFUSED}: HTTP 404"),
        ((500, {"object": "error", "message": "boom"}), "server error: HTTP 500: boom"),
        ((200, {"error": "no"}), f"{MALFORMED}: HTTP 200 without an answer"),
        ((200, {"choices": []}), f"{MALFORMED}: HTTP 200 without an answer"),
    ],
)
def test_every_kind_of_refusal_is_reported_as_it_is(check, reply, kind):
    with FakeServer(answer=lambda *_: reply) as target:
        checks = check(target)
    assert "pass" not in statuses(checks).values() and "fail" not in statuses(checks).values()
    assert kind in checks["arithmetic"]["summary"] and checks["arithmetic"]["status"] == "error"


def test_an_answer_without_usage_is_still_judged(check):
    with FakeServer(answer=lambda *_: (200, {"choices": [{"message": {"content": "It is 391."}}], "usage": None})) as target:
        checks = check(target, "arithmetic", "recall", "prefix-cache")
    assert [item["status"] for item in checks["arithmetic"]["items"]] == ["pass", "fail"]
    assert checks["recall"]["summary"] == "the length of a text in tokens is unknown: no usage reported"
    assert checks["prefix-cache"]["status"] == "not run"


def test_a_context_too_short_for_anything(check):
    with FakeServer(context=100) as target:
        checks = check(target, "recall", "soak", "arithmetic")
    assert checks["recall"]["status"] == checks["soak"]["status"] == "not run"
    assert "context too short: 100 tokens" in checks["recall"]["summary"]
    assert checks["arithmetic"]["status"] == "error" and CONTEXT in checks["arithmetic"]["summary"]


def test_depths_are_capped_by_the_context_and_that_is_said(check):
    with FakeServer(context=1_000) as target:
        checks = check(target, "recall", depths=(300, 8_000, 60_000))
    assert checks["recall"]["status"] == "pass"
    assert (
        "asked for 8,000, 60,000 tokens, capped at 840 by the server's context length of 1,000"
        in checks["recall"]["summary"]
    )
    assert len(checks["recall"]["items"]) == 6


def test_a_chunk_longer_than_the_context_is_not_run(check):
    with FakeServer(info={"chunked_prefill_size": 8_192}) as target, FakeServer(info=UNDRAFTED) as undrafted:
        checks = check(target, "chunked-prefill", undrafted=undrafted.url)
    assert checks["chunked-prefill"]["status"] == "not run"
    assert (
        "context too short for a prompt longer than a chunk of 8,192" in checks["chunked-prefill"]["summary"]
    )


def test_answers_cut_by_max_tokens_pass_nowhere(check):
    with FakeServer(finish="length") as target, FakeServer(info=CONTROL) as control:
        checks = check(target, control=control.url)
    found = statuses(checks)
    assert {id for id, status in found.items() if status == "pass"} == set()
    assert {
        found[id]
        for id in ("arithmetic", "tool-call", "recall", "agreement", "prefix-cache", "accept-length")
    } == {"cut"}


def test_a_server_that_hangs_is_given_up(check):
    with FakeServer(delay_s=1.4) as target:
        checks = check(target, "arithmetic", "recall", timeout_s=1)
    assert checks["arithmetic"]["status"] == "error"
    assert "target hangs: two answers in a row took more than 1 s" in checks["arithmetic"]["summary"]
    assert len(target.asked) == 2


def test_a_server_that_says_nothing_about_itself(check):
    with FakeServer(info=None, ids=False, loads=False, meta=lambda n, body, meta: meta.clear()) as target:
        checks = check(target)
    found = statuses(checks)
    assert found["arithmetic"] == found["tool-call"] == found["recall"] == "pass"
    assert {
        found[id] for id in ("prefix-cache", "batch-mixed", "soak", "chunked-prefill", "accept-length")
    } == {"not run"}


@pytest.mark.parametrize("most", [150, 30])
def test_a_silent_truncation_of_the_prompt_is_seen(check, most):
    def short(n, body, text):
        tokens = min(most, len(body["messages"][0]["content"]) // 4)
        return 200, {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": tokens, "completion_tokens": 5},
        }

    with FakeServer(answer=short) as target:
        checks = check(target, "recall")
    if most == 30:
        assert checks["recall"]["summary"] == "the server reads 30 tokens of a short text and 30 of a longer one"
        return
    assert (
        checks["recall"]["status"] == "error"
        and "the server read 150 tokens of a prompt of" in checks["recall"]["summary"]
    )


def test_bad_usage_is_named_before_anything_is_asked(tmp_path, capsys):
    url = ["--url", "http://127.0.0.1:9"]
    for argv, says in (
        ([], "--url URL is needed, or --rescore FOLDER"),
        (["--url", "localhost:1"], "--url localhost:1: a URL like http://HOST:PORT is needed"),
        ([*url, "--control", "x"], "--control x: a URL"),
        ([*url, "--undrafted", "x"], "--undrafted x: neither a URL nor the folder of a run"),
        ([*url, "--suite", "x"], "--suite x: there are chat, pair"),
        ([*url, "--only", "recal"], "there is no check recal"),
        ([*url, "--depths", "8000,5"], "--depths 5: a depth is at least 64 tokens"),
        ([*url, "--positions", "2"], "--positions 2.0: from 0"),
        ([*url, "--answers", "0"], "--answers 0: at least 1"),
        ([*url, "--timeout", "inf"], "--timeout inf: at least 1"),
        ([*url, "--floor", "talk=3"], "--floor talk: the workloads are chat"),
        ([*url, "--floor", "0.5"], "--floor 0.5: an accept length is at least 1"),
        ([*url, "--profile", "configs/h200.yaml"], "it states no accept_length_floor"),
        (["--rescore", str(tmp_path / "none")], "no check is on file there"),
        ([*url, "--out", str(tmp_path)], f"--out {tmp_path}: the folder is not empty"),
    ):
        (tmp_path / "file").touch()
        assert cli.main(["check", *argv]) == 2
        assert says in capsys.readouterr().err


def test_a_value_that_is_no_number_is_argparses(capsys):
    for flag, value, kind in (("--depths", "8k", "list of numbers"), ("--chat-template-kwargs", "[1]", "JSON object")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["check", flag, value])
        assert f"invalid {kind} value: '{value}'" in capsys.readouterr().err
    assert re.search(
        "no check x", str(pytest.raises(UsageError, runner.selected, Options("http://a", skip=("x",))).value)
    )


def test_a_run_that_was_ended_passes_nothing_it_did_not_finish(tmp_path):
    with FakeServer() as target:
        runner.run(
            Options(url=target.url, only=("arithmetic", "tool-call", "recall"), **SMALL), tmp_path / "run"
        )
    file = tmp_path / "run" / record.EXCHANGES
    lines = file.read_text().splitlines(keepends=True)
    second = next(n for n, line in enumerate(lines) if '"tool-call"' in line)
    file.write_text("".join(lines[: second + 1]) + lines[second + 1][:50])
    verdict, _ = runner.rescore(tmp_path / "run")
    assert statuses(verdict["checks"]) == {"arithmetic": "pass", "tool-call": "error", "recall": "not run"}
    assert verdict["exit_code"] == 3
    file.write_text("".join([*lines[:2], "{}\n", *lines[2:]]))
    with pytest.raises(UsageError, match="exchanges.jsonl:3: not an exchange"):
        runner.rescore(tmp_path / "run")
