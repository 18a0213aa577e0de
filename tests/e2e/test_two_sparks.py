"""The launch that the kit was asked for: a gated-delta hybrid on two ranks with a windowed DFlash2 draft.

Random weights put near-ties everywhere (tests/e2e/test_hybrid_serving.py), an oracle makes every fifth draft a wrong
one, and what it does not know the random draft gets wrong, so states are rolled back by every number of tokens on both
ranks. Within two ranks nothing may part.
"""

import json
from dataclasses import dataclass

import pytest

from launcher.client import generate, server_info
from launcher.expected import differences
from launcher.judge import judge
from launcher.launch import memory
from launcher.probe import Failed, Machine
from tests.e2e.server import embedded_server, empty_cache, plugin_path
from tests.e2e.test_hybrid_serving import ALONE, CACHED, CHUNK, NEW_TOKENS, STRANGE, drafter, misled
from tests.e2e.test_nvfp4_memory import ask_together, tokens_of, used_tokens
from tests.e2e.tiny_models import build_dflash2, build_draft, build_hybrid

pytestmark = pytest.mark.e2e

WINDOW = 24
FLAGS = (
    "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton", "--tp-size", "2", "--device", "cpu",
    "--max-total-tokens", "4096", "--max-running-requests", "4", "--chunked-prefill-size", str(CHUNK),
)  # fmt: skip


@dataclass(frozen=True)
class Answers:
    alone: dict
    repeated: list
    cached: list
    identical: list
    accept_lengths: dict
    states: list
    used_tokens: int


def examine(url):
    alone = {
        name: generate(url, tokens, NEW_TOKENS, ignore_eos=True) for name, tokens in {**ALONE, "strange": STRANGE}.items()
    }
    repeated = [generate(url, CACHED, NEW_TOKENS, ignore_eos=True) for _ in range(2)]
    empty_cache(url)
    identical = ask_together(url, [ALONE["short"]] * 4, [NEW_TOKENS] * 4, ignore_eos=True)
    empty_cache(url)
    return Answers(
        {name: answer.tokens for name, answer in alone.items()},
        [answer.tokens for answer in repeated],
        [answer.cached_tokens for answer in repeated],
        tokens_of(identical),
        {name: answer.accept_length for name, answer in alone.items()},
        server_info(url)["internal_states"],
        used_tokens(url),
    )


@pytest.fixture(scope="module")
def models(scratch):
    target = build_hybrid(scratch / "target")
    return target, build_dflash2(scratch / "dflash2", build_draft(scratch / "draft", target), WINDOW)


def serve(target, log, *flags, **env):
    env = {"PYTHONPATH": plugin_path(), "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **env}
    return embedded_server(target, *FLAGS, *flags, log=log, env=env, ready="/health")


@pytest.fixture(scope="module")
def undrafted(scratch, models):
    with serve(models[0], scratch / "undrafted.log") as server:
        return examine(server.url)


@pytest.fixture(scope="module")
def drafted(scratch, models, undrafted):
    oracle = scratch / "oracle.json"
    known = [{"prompt": ALONE[name], "output": misled(undrafted.alone[name])} for name in ALONE]
    known.append({"prompt": CACHED, "output": misled(undrafted.repeated[-1])})
    oracle.write_text(json.dumps(known))
    with serve(models[0], scratch / "drafted.log", *drafter(models[1]), FP4KV_ORACLE=str(oracle)) as server:
        return examine(server.url)


def test_the_drafter_changes_no_token(undrafted, drafted):
    assert drafted.alone == undrafted.alone
    assert drafted.repeated == undrafted.repeated
    assert undrafted.cached == drafted.cached == [0, CHUNK]


def test_blocks_are_accepted_in_part_and_not_at_all(drafted):
    assert all(1.5 < drafted.accept_lengths[name] < 8 for name in ALONE), drafted.accept_lengths
    assert drafted.accept_lengths["strange"] < 1.5


def test_four_at_once_answer_as_alone_and_every_slot_comes_back(undrafted, drafted):
    for side in (undrafted, drafted):
        assert side.identical == [side.alone["short"]] * 4 and side.used_tokens == 0


@pytest.mark.parametrize("side", ["undrafted", "drafted"])
def test_every_rank_is_what_was_judged(request, models, side):
    flags = ["--model-path", str(models[0]), *FLAGS, *(drafter(models[1]) if side == "drafted" else ())]
    launch = judge(flags, machine=Machine(gpu=Failed("none"))).launch
    states = request.getfixturevalue(side).states
    assert differences(launch, states) == []
    held = memory(launch)
    ranks = states[0]["fp4kv"]["ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        assert (rank["target"]["kv_heads"], rank["target"]["bytes_per_token"]) == (1, held.target_cell)
        assert rank["states"]["layers"] == 6
        if side == "drafted":
            draft = rank["draft"]
            assert draft["modules"] == ["grouped convolution", "candidate selector"]
            assert draft["bytes_per_token"] == held.draft_cell
