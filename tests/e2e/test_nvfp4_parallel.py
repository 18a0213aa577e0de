"""NVFP4 KV on two tensor-parallel ranks of the real server: the same answers, true bytes, every rank proven.

The shipped pair has two KV heads, so each rank holds one. Ranks add their parts of a layer's output in BF16 (gloo),
one rank in FP32, so answers of different numbers of ranks may part at a near-tie. Within two ranks nothing may part.
"""

import json
import random
from dataclasses import dataclass

import pytest

from launcher.client import generate, server_info
from launcher.demo import PAIR, load_prompts
from launcher.equality import CPU_BOUND, NEAR_TIE_BOUNDS, compare
from launcher.expected import differences
from launcher.judge import judge
from launcher.launch import memory
from launcher.probe import Failed, Machine
from sglang_fp4kv.planner import plan_tokens
from tests.e2e.server import embedded_server, empty_cache, plugin_path

pytestmark = pytest.mark.e2e

TARGET = PAIR / "target"
NVFP4 = ("--kv-cache-dtype", "nvfp4", "--attention-backend", "triton", "--device", "cpu")
DFLASH = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "draft"))
BUDGET_BYTES = 3_000_000  # of one rank
TRAINED, NEW_TOKENS, CHUNK = 3, 16, 64
TORN = (12, 40, 25, 33)  # prompt tokens


@dataclass(frozen=True)
class Answers:
    """``trained``: to the pair's own tasks. ``torn``: to random tokens, where the two best often tie."""

    trained: list
    torn: list
    states: list


@pytest.fixture(scope="module")
def prompts():
    return load_prompts(PAIR / "prompts.json", PAIR / "target")[:TRAINED]


def torn_prompts(*more):
    seeded = random.Random(11)
    return [[seeded.randrange(16, 700) for _ in range(length)] for length in (*TORN, *more)]


def flags(tp, *more):
    chunks = ("--chunked-prefill-size", str(CHUNK))
    return (*NVFP4, *chunks, "--tp-size", str(tp), *more)


def serve(scratch, tp, *more, **env):
    path = plugin_path()
    env = {"PYTHONPATH": path, "FP4KV_KV_BUDGET_BYTES": str(BUDGET_BYTES), **env}
    log = scratch / f"{tp}-ranks{'-drafted' if more else ''}.log"
    return embedded_server(TARGET, *flags(tp, *more), "--max-total-tokens", "100000000", log=log, env=env)


def judged(tp, *more):
    flags_of_it = ["--model-path", str(TARGET), *flags(tp, *more)]
    return judge(flags_of_it, machine=Machine(gpu=Failed("none"))).launch


def ask_trained(server, prompts, **options):
    return [generate(server.url, p["input_ids"], p["max_new_tokens"], **options) for p in prompts]


def ask(server, prompts, **options):
    return Answers(
        ask_trained(server, prompts, **options),
        [generate(server.url, p, NEW_TOKENS, ignore_eos=True, **options) for p in torn_prompts()],
        server_info(server.url)["internal_states"],
    )


@pytest.fixture(scope="module")
def one(scratch, prompts):
    """One rank's answers, and what it says to a prompt of a chunk and a half: with its first chunk in the prefix
    cache, and without."""
    with serve(scratch, 1) as server:
        answers = ask(server, prompts, top_two=True)
        empty_cache(server.url)
        prompt = torn_prompts(CHUNK + CHUNK // 2)[-1]
        generate(server.url, prompt[:CHUNK], 1)
        cached = generate(server.url, prompt, NEW_TOKENS, top_two=True, ignore_eos=True)
        empty_cache(server.url)
        return answers, cached, generate(server.url, prompt, NEW_TOKENS, top_two=True, ignore_eos=True)


@pytest.fixture(scope="module")
def two(scratch, prompts):
    """The undrafted answers of two ranks, and what they answer with each other's KV heads."""
    swapped = scratch / "swapped"
    with serve(scratch, 2, FP4KV_OTHER_HEADS=str(swapped)) as server:
        answers = ask(server, prompts, top_two=True)
        empty_cache(server.url)
        swapped.touch()
        return answers, ask_trained(server, prompts[:2])


@pytest.fixture(scope="module")
def drafted(scratch, prompts, two):
    """With the drafter; for the torn prompts an oracle drafts what two ranks answered."""
    recorded = scratch / "recorded.json"
    pairs = zip(torn_prompts(), two[0].torn, strict=True)
    recorded.write_text(json.dumps([{"prompt": p, "output": list(a.tokens)} for p, a in pairs]))
    with serve(scratch, 2, *DFLASH, FP4KV_ORACLE=str(recorded)) as server:
        return ask(server, prompts)


def partings(reference, candidates, bound):
    """The comparisons that are not equal."""
    pairs = zip(reference.trained + reference.torn, candidates.trained + candidates.torn, strict=True)
    found = [compare(a.tokens, b.tokens, a.gaps, bound) for a, b in pairs]
    return [comparison for comparison in found if comparison.position is not None]


def test_a_cached_chunk_gives_the_answer_of_a_computed_one(one):
    _, cached, computed = one
    assert (cached.cached_tokens, computed.cached_tokens) == (CHUNK, 0)
    assert (cached.tokens, cached.gaps) == (computed.tokens, computed.gaps)


def test_two_ranks_answer_as_one(one, two, prompts):
    assert all(parting.passed for parting in partings(one[0], two[0], NEAR_TIE_BOUNDS["nvfp4"]))
    for prompt, answer in zip(prompts, two[0].trained, strict=True):
        assert prompt["expect"] in answer.text, prompt["name"]


def test_a_wrong_split_of_the_heads_is_caught(one, two):
    """The negative control: each rank with the other's KV heads."""
    for reference, answer in zip(one[0].trained, two[1], strict=False):
        bound = NEAR_TIE_BOUNDS["nvfp4"]
        assert not compare(reference.tokens, answer.tokens, reference.gaps, bound).passed


def test_the_drafter_changes_nothing_on_two_ranks(two, drafted):
    assert partings(two[0], drafted, CPU_BOUND) == []
    assert min(answer.accept_length for answer in drafted.torn) > 5
    assert sum(answer.accept_length for answer in drafted.trained) / TRAINED >= 2.5


@pytest.fixture(params=["undrafted", "drafted"])
def served(request, two, drafted):
    """(the judged launch, the server's states)"""
    if request.param == "undrafted":
        return judged(2), two[0].states
    return judged(2, *DFLASH), drafted.states


def test_every_rank_is_proven(served):
    launch, states = served
    assert differences(launch, states) == []
    assert len(states[0]["fp4kv"]["ranks"]) == launch.flags.tp_size
    found = differences(judged(1), states)
    assert "target bytes_per_token: judged 576, reported 288" in found


def test_every_rank_costs_what_was_planned(served):
    launch, states = served
    held = memory(launch)
    assert held.target_cell == 288  # one KV head of the pair's two
    tokens = plan_tokens(BUDGET_BYTES, held.cell)
    for rank in states[0]["fp4kv"]["ranks"]:
        assert rank["target"]["kv_heads"] == 1
        for pool, cell in ((rank["target"], held.target_cell), (rank["draft"], held.draft_cell)):
            if cell:
                assert pool["bytes_per_token"] == cell
                assert pool["allocated_bytes"] == cell * pool["slots"]
        assert rank["budget"]["bytes_per_token"] == held.cell
        assert rank["max_total_num_tokens"] == tokens
