"""The launch that the kit was asked for: a gated-delta hybrid on two ranks with a windowed DFlash2 draft.

Random weights put near-ties everywhere (tests/e2e/test_hybrid_serving.py), an oracle makes every fifth draft a wrong
one, and what it does not know the random draft gets wrong, so states are rolled back by every number of tokens on both
ranks. Within two ranks nothing may part.
"""

import pytest

from launcher.expected import differences
from launcher.judge import judge
from launcher.launch import memory
from launcher.probe import Failed, Machine
from tests.e2e.test_hybrid_serving import ALONE, CHUNK, FLAGS, drafter, examine, foretell, serve
from tests.e2e.tiny_models import build_dflash2, build_draft, build_hybrid

pytestmark = pytest.mark.e2e

WINDOW = 24
RANKS = ("--attention-backend", "triton", "--tp-size", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def models(scratch):
    target = build_hybrid(scratch / "target")
    return target, build_dflash2(scratch / "dflash2", build_draft(scratch / "draft", target), WINDOW)


@pytest.fixture(scope="module")
def undrafted(scratch, models):
    with serve(models[0], scratch / "undrafted.log", *RANKS) as server:
        return examine(server.url)


@pytest.fixture(scope="module")
def drafted(scratch, models, undrafted):
    flags, oracle = (*RANKS, *drafter(models[1])), foretell(scratch / "oracle.json", undrafted)
    with serve(models[0], scratch / "drafted.log", *flags, FP4KV_ORACLE=oracle) as server:
        return examine(server.url)


def test_the_drafter_changes_no_token(undrafted, drafted):
    assert (drafted.alone, drafted.strange) == (undrafted.alone, undrafted.strange)
    assert drafted.repeated == undrafted.repeated
    assert undrafted.cached == drafted.cached == [0, CHUNK, CHUNK]


def test_blocks_are_accepted_in_part_and_not_at_all(drafted):
    assert all(1.5 < drafted.accept_lengths[name] < 8 for name in ALONE), drafted.accept_lengths
    assert drafted.accept_lengths["strange"] < 1.5


def test_four_at_once_answer_as_alone_and_every_slot_comes_back(undrafted, drafted):
    for side in (undrafted, drafted):
        assert side.identical == [side.alone["short"]] * 4 and side.used_tokens == 0


@pytest.mark.parametrize("side", ["undrafted", "drafted"])
def test_every_rank_is_what_was_judged(request, models, side):
    flags = ["--model-path", str(models[0]), *FLAGS, *RANKS, *(drafter(models[1]) if side == "drafted" else ())]
    launch = judge(flags, machine=Machine(gpu=Failed("none"))).launch
    report = request.getfixturevalue(side).report
    assert differences(launch, [{"fp4kv": report}]) == []
    held = memory(launch)
    assert len(report["ranks"]) == 2
    for rank in report["ranks"]:
        assert (rank["target"]["kv_heads"], rank["target"]["bytes_per_token"]) == (1, held.target_cell)
        assert rank["states"]["layers"] == 6
        if side == "drafted":
            draft = rank["draft"]
            assert draft["modules"] == ["grouped convolution", "candidate selector"]
            assert draft["bytes_per_token"] == held.draft_cell
