"""What counts as right, as a valid tool call, as a loop, and as the same answer."""

import json
import re
from pathlib import Path

import pytest
from check_exchanges import exchange

from launcher.checks import bounds, same, scoring
from launcher.checks.agreement import _judge, count
from launcher.checks.health import mean_accept, over_depth
from launcher.checks.record import Recording
from launcher.checks.result import CUT, ERROR, FAIL, NOT_RUN, PASS, Item, settle
from launcher.checks.server import Facts
from launcher.checks.suite import SUITES, WORKLOADS, Suite

RESULTS = Path(__file__).parent / "bench" / "results"


@pytest.mark.parametrize(
    ("answer", "expect", "found"),
    [
        ("17 x 23 = 391.", "391", True),
        ("It is 1,391 in all", "1391", True),
        ("1391", "391", False),
        ("3910", "391", False),
        ("22 by 5", "391", False),
        ("-391", "391", False),
        ("The code is 4-7-1-9.", "4-7-1-9", True),
        ("The code is 4-7-1-9-2.", "4-7-1-9", False),
        ("das HAUS", "Haus", True),
        ("", "Haus", False),
    ],
)
def test_contains(answer, expect, found):
    assert scoring.contains(exchange(answer), expect) is found


def test_a_cut_answer_is_cut_whether_right_so_far_or_not():
    for text in ("17 x 23 = 391, and", "17 x"):
        item = scoring.judge_text(exchange(text, finish="length"), "391")
        assert item.status == CUT and "cut by max_tokens" in item.detail


def test_a_failed_request_is_an_error_with_its_kind():
    item = scoring.judge_text(exchange(problem="refused", message="HTTP 401: no key", http=401), "391")
    assert item == Item("one", ERROR, "refused: HTTP 401: no key")


TOOL = {"function": {"name": "set_timer", "parameters": {
    "type": "object", "properties": {"minutes": {"type": "integer"}, "city": {"type": "string"}}, "required": ["minutes"],
}}}  # fmt: skip
EXPECT = {"name": "set_timer", "arguments": {"minutes": 25, "city": "Oslo"}}


def call(arguments, name="set_timer"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call({"minutes": 25, "city": "Oslo, Norway"}), None),
        ("The timer is set.", "no tool call"),
        ("<tool_call>{'name': 1}</tool_call>", "not JSON with name and arguments"),
        ('<tool_call>{"name": "set_timer"}</tool_call>', "not JSON with name and arguments"),
        (call("{minutes"), "the arguments are not JSON"),
        (call({"minutes": "25"}), "do not validate: '25' is not of type 'integer'"),
        (call({"city": "Oslo"}), "do not validate: 'minutes' is a required property"),
        (call([25]), "do not validate"),
        (call({"minutes": 25}, "launch"), "called 'launch', which was not offered"),
        (call({"minutes": 250, "city": "Oslo"}), "minutes is 250, expected 25"),
        (call({"minutes": 25, "city": "Rome"}), "city is 'Rome', expected 'Oslo'"),
    ],
)
def test_tool_calls(text, problem):
    item = scoring.judge_tool_call(exchange(text), [TOOL], EXPECT)
    assert item.status == (PASS if problem is None else FAIL)
    assert problem is None or problem in item.detail


def test_a_tool_call_that_the_server_parsed():
    calls = [{"function": {"name": "set_timer", "arguments": '{"minutes": 25, "city": "Oslo"}'}}]
    assert scoring.judge_tool_call(exchange("", tool_calls=calls), [TOOL], EXPECT).status == PASS
    other = {"function": {"name": "other", "parameters": {}}}
    calls = [{"function": {"name": "other", "arguments": "{}"}}]
    found = scoring.judge_tool_call(exchange("", tool_calls=calls), [TOOL, other], EXPECT)
    assert found.detail == "called other, expected set_timer"


@pytest.mark.parametrize(
    ("text", "tokens", "problem"),
    [
        ("", (), "an empty answer"),
        (" \n", (1, 2), "an empty answer"),
        ("No!!!!!!!!!", None, "9 marks in a row"),
        ("x", [7] * 12, "one token 12 times over"),
        ("x", [1, 2, *[7] * 12, 3], "one token 12 times over"),
        ("x", [9, *([1, 2, 3, 4, 5, 6] * 4)], "a phrase of 6 tokens 4 times over"),
        ("x", [1, 2] * 12, "a phrase of 2 tokens 12 times over"),
        ("x", [7] * 11, None),
        ("x", [1, 2] * 11, None),
        ("x", [1, 2, 3, 4, 5, 6] * 3, None),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20", None, None),
        ("The code is 4-7-1-9. I repeat: the code is 4-7-1-9.", None, None),
        ("Wait... what?! Yes!!", None, None),
    ],
)
def test_degenerate(text, tokens, problem):
    found = scoring.degenerate(exchange(text, tokens=tokens))
    assert (found is None) if problem is None else (found and problem in found)


def test_words_stand_in_for_tokens_and_reasoning_counts():
    looped = exchange("", reasoning="and so on " * 8)
    looped.response["choices"][0]["response_token_ids"] = None
    assert "a phrase of 3 tokens 8 times" in scoring.degenerate(looped)


def recording(kv="nvfp4", device="cuda", **facts):
    names = ("target", "control", "undrafted")
    common = {"kv_format": kv, "device": device, "chunk_tokens": 512, **facts}
    return Recording({"options": {"kv": None}}, {name: Facts(name, **common) for name in names})


def pair(margin, *, kv="nvfp4", device="cuda", cached=(5, 5), **facts):
    """The Item of 'abcd' against 'abxd' with the reference's margin at the third token."""
    reference = exchange("abcd", top=[9.0, 9.0, margin, 9.0], cached_tokens=cached[0])
    candidate = exchange("abxd", cached_tokens=cached[1])
    return same.judge(recording(kv, device, **facts), reference, candidate, "it")


@pytest.mark.parametrize("kv", bounds.CUT_BOUNDS)
def test_a_parting_is_held_to_the_bound_of_its_format(kv):
    near, cut = bounds.near_tie_bound(kv, "cuda"), bounds.cut_bound(kv)
    assert pair(near - 0.01, kv=kv).status == PASS
    assert pair(near, kv=kv).status == FAIL
    assert pair(cut - 0.01, kv=kv, cached=(0, 5)).status == PASS
    assert pair(cut, kv=kv, cached=(0, 5)).status == FAIL
    assert near <= cut


def test_the_bounds_of_other_chunks_are_the_studys():
    study = json.loads((RESULTS / "prefill_cut_smollm2.json").read_text())["margin_moves"]
    for form, moves in study.items():
        moved = max(found["max"] for found in moves.values())
        assert bounds.cut_bound(form) == (moved * 4 // 1 + 1) / 4
    assert set(study) == set(bounds.CUT_BOUNDS)


def test_what_failed_for_a_fault_would_fail_by_a_wide_margin():
    """Not those that passed: their margins are not on file."""
    text = (RESULTS / "faults.json").read_text()
    margins = [float(m) for m in re.findall(r"margin ([0-9.]+), bound [0-9.]+, other chunks", text)]
    assert len(margins) > 50 and min(margins) > 6.3 > bounds.cut_bound("nvfp4") + 1


def test_on_a_cpu_nothing_may_part_that_reads_the_same():
    assert pair(0.01, device="cpu").status == FAIL
    assert pair(0.01, device="cpu", cached=(0, 5)).status == PASS


def test_a_server_that_does_not_say_its_format_is_held_to_the_strictest():
    assert pair(0.74, kv=None, cached=(0, 5)).status == PASS
    assert pair(0.75, kv=None, cached=(0, 5)).status == FAIL


def test_same_cut_needs_reported_and_equal_cuts():
    a, b = exchange("a", cached_tokens=5), exchange("b", cached_tokens=5)
    assert same.same_cut(recording(), a, b)
    assert not same.same_cut(recording(), a, exchange("b", cached_tokens=5, num_retractions=1))
    assert not same.same_cut(recording(), a, exchange("b"))
    other = exchange("b", server="undrafted", cached_tokens=5)
    mixed = recording()
    mixed.facts["undrafted"] = Facts("u", kv_format="nvfp4", chunk_tokens=-1)
    assert same.same_cut(mixed, a, other)  # 15 fresh tokens fit into both chunks
    long = exchange("a", cached_tokens=5, prompt_tokens=600)
    assert not same.same_cut(
        mixed, long, exchange("b", server="undrafted", cached_tokens=5, prompt_tokens=600)
    )


def test_same_answers_cut_at_the_limit_are_cut_and_missing_ids_not_judged():
    cut = exchange("ab", finish="length")
    assert same.judge(recording(), cut, cut, "it").status == CUT
    assert same.judge(recording(), cut, cut, "it", whole=False).status == PASS
    parted = exchange("ax", finish="length", cached_tokens=0)
    near = exchange("ab", finish="length", top=[9.0, 0.1], cached_tokens=0)
    assert same.judge(recording(), near, parted, "it").status == CUT
    assert same.judge(recording(), near, parted, "it", whole=False).status == PASS
    assert same.judge(recording(), None, cut, "it") == Item("it", NOT_RUN, "not asked")
    plain = exchange("ab")
    plain.response["choices"][0]["response_token_ids"] = None
    assert "returns no token ids" in same.judge(recording(), plain, exchange("ab"), "it").detail
    assert same.judge(recording(), exchange("ab"), exchange("abc"), "it").status == FAIL
    assert same.judge(recording(), exchange("ab"), exchange("ac"), "it", outright=True).status == FAIL
    unknown = same.judge(recording(), exchange("ab"), exchange("ac"), "it")
    assert unknown.status == FAIL and "margin unknown" in unknown.detail


def pairs(both=0, lost=0, gained=0, neither=0):
    kinds = [((True, True, True), both), ((False, True, False), lost), ((True, False, False), gained)]
    return [kind for kind, n in [*kinds, ((False, False, False), neither)] for _ in range(n)]


def test_agreement_counts():
    found = count(pairs(both=40, lost=5, gained=3, neither=12))
    assert [
        found[k] for k in ("pairs", "target_right", "control_right", "unchanged", "changed", "same_text")
    ] == [60, 43, 45, 52, 8, 40]
    assert found["p_value"] == pytest.approx(0.7265625)
    assert found["unchanged_interval"] == pytest.approx((0.7583, 0.9308), abs=1e-4)


@pytest.mark.parametrize(
    ("counts", "status", "says"),
    [
        ({"both": 60}, PASS, "60 of 60 unchanged"),
        ({"both": 35, "lost": 1, "gained": 1, "neither": 23}, PASS, "lost 1, gained 1"),
        ({"both": 30, "lost": 30}, FAIL, "the loss is no chance"),
        ({"both": 40, "lost": 10, "gained": 10}, FAIL, "too many changed, whatever the totals say"),
        ({"both": 10, "neither": 50}, NOT_RUN, "the control is right too seldom"),
        ({"both": 12}, PASS, "fewer than the 60"),
    ],
)
def test_agreement_verdicts(counts, status, says):
    result = _judge(pairs(**counts), [])
    assert result.status == status and says in result.summary


def test_an_unanswered_pair_keeps_agreement_from_passing():
    result = _judge(pairs(both=60), [Item("q1", ERROR, "timeout: no answer")])
    assert result.status == ERROR and "q1: timeout" in result.summary


def test_the_worst_item_decides():
    items = [Item(s, s) for s in (PASS, NOT_RUN, CUT, ERROR, FAIL)]
    for n in range(1, 6):
        assert settle("c", items[:n], "").status == items[n - 1].status
    assert settle("c", [], "").status == NOT_RUN


def test_accept_lengths():
    asked = [exchange("a" * 10, spec_accept_length=5.0), exchange("a" * 30, spec_accept_length=3.0)]
    assert mean_accept(asked) == pytest.approx(40 / 12)
    assert mean_accept([exchange("a")]) is None
    rows = [{"item": f"{d}@0.5", "accept_length": a} for d, a in ((500, 6.0), (500, 4.0), (9000, 3.9))]
    assert over_depth(rows)["text"] == "FALLS over depth: 5.00 at 500 tokens, 3.90 at 9,000"
    assert over_depth([*rows[:2], {"item": "9000@0.5", "accept_length": 4.0}])["fell"] is False


@pytest.mark.parametrize("name", SUITES)
def test_suites_hold_what_the_checks_ask(name):
    suite = Suite(name)
    assert len(suite.agreement(1000)) >= 60
    assert len({p.user for p in suite.agreement(1000)}) == len(suite.agreement(1000))
    assert [p.id for p in suite.agreement(8)] == [p.id for p in suite.agreement(1000)][
        :: len(suite.agreement(1000)) // 8
    ][:8]
    assert any(p.expect == "391" for p in suite.prompts("arithmetic"))
    assert all(len(suite.workload(w)) >= 4 for w in WORKLOADS)
    for p in suite.prompts("tool-call"):
        text = call(p.expect["arguments"], p.expect["name"])
        assert scoring.judge_tool_call(exchange(text), p.tools, p.expect).status == PASS
    early, late = suite.recall("x", 50, 0.0), suite.recall("x", 50, 1.0)
    assert early.expect == late.expect and early.user.index(early.expect) < 60
    assert late.user.index(late.expect) > 0.9 * len(late.user.rpartition("\n\n")[0])
    assert Suite(name, seed=7).recall("x", 50, 0.5).user != Suite(name, seed=8).recall("x", 50, 0.5).user
