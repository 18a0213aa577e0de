"""A Qwen3.5-MoE (random weights) by `fp4kv serve` with NVFP4 KV and the drafter: judge, proof, canary, and its answers
beside an undrafted server's.

The canary's prompts are those that both servers are asked here. So the oracle knows their answers, and the drafter's
canary takes a few steps for each; every fifth token that it proposes is wrong.
"""

import json
import os
import shutil
import threading
import time
from dataclasses import dataclass

import pytest

from launcher.canary import NEW_TOKENS, Canary
from launcher.client import fp4kv_report, generate, server_info
from launcher.demo import PAIR
from launcher.equality import NEAR_TIE_BOUNDS, compare
from tests.e2e.server import START_TIMEOUT_S, empty_cache, serving
from tests.e2e.test_hybrid_serving import CHUNK, FLAGS, check_pools, drafter, environment, serve
from tests.e2e.test_nvfp4_memory import misled
from tests.e2e.tiny_models import EXPERTS, build_draft, build_hybrid

pytestmark = pytest.mark.e2e

LAYERS = 4  # three recurrent, one that keeps K and V
MASK_TOKEN = 3  # of the pair's tokenizer, by which the canary's longest prompt has three chunks and not ten
LONGEST = "planted code"


@dataclass(frozen=True)
class Answers:
    """A Generation for each prompt by name; of ``again``, the longest once more, from the cache."""

    alone: dict
    again: object
    report: dict


@pytest.fixture(scope="module")
def models(scratch):
    target = build_hybrid(
        scratch / "target", num_hidden_layers=LAYERS, vocab_size=768, eos_token_id=767, **EXPERTS
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(PAIR / "target" / name, target)
    return target, build_draft(scratch / "draft", target, mask_token=MASK_TOKEN)


def prompts(url):
    """The canary's prompts by name, as token ids."""
    canary = Canary(
        url=url, access={"headers": {}, "verify": True}, drafted=False,
        bound=NEAR_TIE_BOUNDS["nvfp4"], haystack=12, room=4096, page_size=1,
    )  # fmt: skip
    return {prompt.name: prompt.tokens for prompt in canary.prompts(time.monotonic() + START_TIMEOUT_S)}


def ask(url, asked, top_two):
    alone = {name: generate(url, tokens, NEW_TOKENS, top_two=top_two) for name, tokens in asked.items()}
    again = generate(url, asked[LONGEST], NEW_TOKENS, top_two=top_two)
    return Answers(alone, again, fp4kv_report(server_info(url)))


@pytest.fixture(scope="module")
def run(scratch, models):
    """What `fp4kv serve` said until it was ready, and both servers' Answers by side.

    They start at the same time, and the oracle's file is a pipe: the canary's first draft waits for the answers.
    """
    target, draft = models
    oracle = scratch / "oracle.json"
    os.mkfifo(oracle)
    flags = ["--model-path", str(target), *FLAGS, "--attention-backend", "triton", *drafter(draft)]
    env = environment(FP4KV_ORACLE=str(oracle))
    with (
        serving(flags, log=scratch / "drafted.log", env=env, watched=False) as drafted,
        serve(target, scratch / "undrafted.log") as undrafted,
    ):
        asked = prompts(undrafted.url)
        plain = ask(undrafted.url, asked, top_two=True)
        known = [{"prompt": asked[name], "output": misled(a.tokens)} for name, a in plain.alone.items()]
        threading.Thread(target=oracle.write_text, args=(json.dumps(known),), daemon=True).start()
        drafted.wait_for("fp4kv serve: proven: ")
        drafted.wait_for("fp4kv serve: ready after ")
        said = drafted.text()
        empty_cache(drafted.url)
        again = {name: asked[name] for name in ("noise", LONGEST)}
        return said, {"undrafted": plain, "drafted": ask(drafted.url, again, top_two=False)}


def test_fp4kv_serve_judges_and_proves_a_hybrid_and_asks_it_the_canary(run):
    said, _ = run
    assert "accepted: works (tests/e2e/test_hybrid_moe.py)" in said
    pools = "target float4_e2m1fn_x2 72 B/token in NVFP4TokenToKVPool; draft float8_e4m3fn 256 B/token"
    assert f"fp4kv serve: proven: {pools}" in said
    assert "states float32 of 3 layers in " in said
    _, _, canary = said.partition("fp4kv serve: canary passed: 4 prompts, ")
    assert canary.startswith("64 tokens equal to prefill's, 32 of them over the same pool")  # two are longer than CHUNK
    assert "2 repeated from the cache; planted code beyond the model; accept length " in canary


def test_experts_and_the_drafter_change_no_token(run):
    _, answers = run
    plain, drafted = answers["undrafted"], answers["drafted"]
    pairs = {name: (plain.alone[name], answer) for name, answer in drafted.alone.items()}
    for name, (one, other) in {**pairs, "from the cache": (plain.again, drafted.again)}.items():
        found = compare(one.tokens, other.tokens, one.gaps, NEAR_TIE_BOUNDS["nvfp4"])
        assert found.passed, f"{name}: {found}"
    assert all(2 < answer.accept_length < 8 for answer in drafted.alone.values())
    assert plain.again.cached_tokens == drafted.again.cached_tokens == 2 * CHUNK


@pytest.mark.parametrize("side", ["undrafted", "drafted"])
def test_pools_and_states_are_as_planned_to_the_token(run, models, side):
    _, answers = run
    target, draft = models
    check_pools(answers[side].report, target, draft if side == "drafted" else None)
