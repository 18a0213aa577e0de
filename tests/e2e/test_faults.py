"""Faults of the FP4 cache and of the drafter, switched on in the real server: `fp4kv check` finds each.

Each fault is asked the few checks that should find it, a sound server all of those, before and after.
`python -m tests.e2e.fault_matrix` asks every check with every fault; its result is in the README.
"""

import json
import re

import pytest

from launcher.checks import record, runner
from launcher.equality import NEAR_TIE_BOUNDS
from tests.bench.readme_table import FILES, RESULTS
from tests.e2e.fault_matrix import COLUMNS, NAMES, NOISE, failed
from tests.e2e.faults import (
    NOISE_TOKENS,
    faulty_server,
    options,
    undrafted_server,
    unsure_prompts,
)
from tests.e2e.plugin.fp4kv_faults import FAULTS

pytestmark = pytest.mark.e2e

# Checks that have to fail with the fault on.
FOUND_BY = {
    "stale-page-table": (NOISE,),
    "k-scales-for-v": (NOISE,),
    "previous-owners-scales": (NOISE,),
    "nibbles-swapped": (NOISE,),
    "block-in-bf16": (NOISE,),
    "committed-too-far": ("arithmetic", "recall"),
    "retraction-without-scales": ("batch-mixed",),
    "global-scale-twice": (NOISE,),
    "every-second-request": (NOISE,),
    "one-token-loop": ("degenerate-output",),
}
# What every failed item says.
PARTS = r"different at token \d+ \(margin \d"
SAYS = dict.fromkeys(FAULTS, PARTS) | {
    # An answer's first token is the prefill's, which verify has no part in.
    **dict.fromkeys(("stale-page-table", "k-scales-for-v"), r"different at token [1-9]\d* \(margin \d"),
    "committed-too-far": "expected '.+', answered '.+'",
    "one-token-loop": r"^one token \d+ times over",
}
ASKED_ALONG = {"degenerate-output": ("arithmetic",)}  # it judges the answers to others
ALL = {id for found_by in FOUND_BY.values() for id in found_by}


@pytest.fixture(scope="module")
def recorded(scratch):
    """What a server without the drafter answers to noise."""
    with undrafted_server(scratch) as server, unsure_prompts():
        runner.run(options(server, only=("drafted-equality",), max_tokens=NOISE_TOKENS), scratch / "undrafted")
    return scratch / "undrafted"


@pytest.fixture(scope="module")
def faulty(recorded, scratch):
    with faulty_server(scratch) as found:
        yield found


@pytest.fixture
def retracted(tmp_path):
    """The items of batch-mixed that were retracted, at once with others."""

    def retracted():
        together = record.load(tmp_path / "plain").find("batch-mixed", step="together")
        return {exchange.item for exchange in together if exchange.retractions}

    return retracted


@pytest.fixture
def ask(faulty, recorded, tmp_path):
    """``ask(fault, checks)``: each check's verdict with that fault on."""
    server, switch = faulty

    def ask(fault, asked):
        switch(fault)
        found = {}
        plain = tuple(also for id in asked if id != NOISE for also in (*ASKED_ALONG.get(id, ()), id))
        if plain:
            found |= runner.run(options(server, only=plain), tmp_path / "plain")["checks"]
        if NOISE in asked:
            more = {"only": ("drafted-equality",), "undrafted": str(recorded), "max_tokens": NOISE_TOKENS}
            with unsure_prompts():
                verdict = runner.run(options(server, **more), tmp_path / NOISE)
            found[NOISE] = verdict["checks"]["drafted-equality"]
        return found

    return ask


def test_a_sound_server_fails_no_check(ask):
    found = ask("", ALL)
    equal = {item["status"] for item in found.pop(NOISE)["items"]}
    assert equal <= {"pass", "cut"}  # cut: equal as far as the answers go, which max_tokens ends
    assert {id: check["summary"] for id, check in found.items() if check["status"] != "pass"} == {}


def test_a_sound_retraction_fails_no_check(ask, retracted):
    assert ask("retraction", ("batch-mixed",))["batch-mixed"]["status"] == "pass"
    assert retracted()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_checks(ask, retracted, fault):
    found = ask(fault, FOUND_BY[fault])
    for id in FOUND_BY[fault]:
        assert found[id]["status"] == "fail", found
        items = [item for item in found[id]["items"] if item["status"] == "fail"]
        assert [item for item in items if not re.search(SAYS[fault], item["detail"])] == []
        names = [item["name"] for item in items]
        if fault == "every-second-request":
            assert names == [item["name"] for item in found[id]["items"]][1::2]
        if fault == "retraction-without-scales":
            assert set(names) & retracted()
        if fault == "block-in-bf16":
            # A GPU sums in another order, and its bound hides this much.
            margins = [float(re.search(r"margin ([\d.]+)", item["detail"])[1]) for item in items]
            assert max(margins) < NEAR_TIE_BOUNDS["nvfp4"]


def test_no_fault_stays_behind(ask):
    assert {check["status"] for check in ask("", ("arithmetic", "recall")).values()} == {"pass"}


def test_the_matrix_on_file_says_the_same():
    rows = json.loads((RESULTS / FILES["faults"]).read_text())["rows"]
    assert [row["fault"] for row in rows] == list(NAMES)
    for row in rows:
        assert tuple(row["checks"]) == COLUMNS
        found_by = set(FOUND_BY.get(row["fault"], ()))
        assert found_by <= set(failed(row)) if found_by else failed(row) == []
