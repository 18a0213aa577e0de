"""NVFP4 KV with and without the drafter on the real server: equal answers, true bytes, proof; sampling."""

import json
import random

import pytest
import requests

from launcher.client import ServerError, fp4kv_report, generate, server_info
from launcher.demo import PAIR, load_prompts
from launcher.equality import CPU_BOUND, compare
from sglang_fp4kv import formats
from tests.e2e.server import embedded_server, empty_cache, plugin_path
from tests.e2e.test_plan_serving import BUDGET as PLANNED_BYTES
from tests.e2e.test_plan_serving import check_tokens

pytestmark = pytest.mark.e2e

NVFP4 = ("--kv-cache-dtype", "nvfp4")
DRAFTED = (
    *NVFP4, "--speculative-algorithm", "DFLASH",
    "--speculative-draft-model-path", str(PAIR / "draft"),
)  # fmt: skip
BUDGET_BYTES = 20_000_000
BLOCK = 8
UNSURE_TOKENS = 24
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
PATTERN = r'\{"a":(true|false),"b":[12]\}'
DRAWS = 16
FILTERED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "min_p": 0.01}


def serve(tmp_path, name, *flags, **env):
    """A server of the shipped target with the test plugin; ``env`` steers the plugin."""
    path = plugin_path()
    return embedded_server(
        PAIR / "target", *flags, log=tmp_path / f"{name}.log", env={"PYTHONPATH": path, **env}
    )


def config(side):
    return json.loads((PAIR / side / "config.json").read_text())


def cell(side):
    c = config(side)
    return c["head_dim"], c["num_key_value_heads"], c["num_hidden_layers"]


@pytest.fixture(scope="module")
def prompts():
    return load_prompts(PAIR / "prompts.json", PAIR / "target")


def unsure_prompts():
    """Prompts of random tokens. The trained model is sure of its own tasks by 6 nats or more, so
    small errors cannot change its answers there; on these its two best tokens often tie."""
    seeded = random.Random(5)
    lengths = [seeded.choice([12, 30, 60]) for _ in range(8)]
    return [
        {"name": f"unsure {i}", "input_ids": [seeded.randrange(16, 700) for _ in range(length)]}
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def unsure():
    return unsure_prompts()


def ask_unsure(server, unsure, **options):
    return [
        generate(server.url, p["input_ids"], UNSURE_TOKENS, ignore_eos=True, **options)
        for p in unsure
    ]


def ask_json(server, prompts):
    """The likeliest answer that the schema allows, and one that is drawn from what the pattern allows.

    A schema allows white space without end, which a drawn answer may take.
    """
    prompt = prompts[0]["input_ids"]
    return [
        generate(server.url, prompt, 40, json_schema=SCHEMA),
        generate(server.url, prompt, 40, regex=PATTERN, temperature=1.0),
    ]


def draw(server, unsure):
    """DRAWS answers of three tokens to one prompt."""
    body = {
        "input_ids": unsure[0]["input_ids"],
        "sampling_params": {**FILTERED, "max_new_tokens": 3, "ignore_eos": True, "n": DRAWS},
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=600)
    response.raise_for_status()
    return [tuple(answer["output_ids"]) for answer in response.json()]


def ask_with_penalty(server, prompts):
    """What the server says to a repetition penalty: an answer, or the reason why there is none."""
    try:
        return generate(server.url, prompts[0]["input_ids"], 2, repetition_penalty=1.1).tokens
    except ServerError as error:
        return str(error)


@pytest.fixture(scope="module")
def undrafted(scratch, prompts, unsure):
    """The undrafted answers to both sets of prompts, and the report."""
    flags = (*NVFP4, "--max-total-tokens", "100000000")
    with serve(scratch, "undrafted", *flags, FP4KV_KV_BUDGET_BYTES=str(BUDGET_BYTES)) as server:
        answers = [
            generate(server.url, p["input_ids"], p["max_new_tokens"], top_two=True) for p in prompts
        ]
        torn = ask_unsure(server, unsure, top_two=True)
        sampled = ask_json(server, prompts), ask_with_penalty(server, prompts)
        return answers, fp4kv_report(server_info(server.url)), torn, sampled


@pytest.fixture(scope="module")
def drafted_server(scratch):
    """The drafted server, the file of its oracle, which drafts by itself until that is there, and the file
    that tells its readers how to misread."""
    oracle, told = scratch / "recorded.json", scratch / "told"
    env = {"FP4KV_ORACLE": str(oracle), "FP4KV_MISREAD": str(told), "FP4KV_KV_BUDGET_BYTES": str(BUDGET_BYTES)}
    with serve(scratch, "drafted", *DRAFTED, "--max-total-tokens", "100000000", **env) as server:
        yield server, oracle, told


@pytest.fixture(scope="module")
def drafted(drafted_server, prompts, unsure):
    server, *_ = drafted_server
    answers = [generate(server.url, p["input_ids"], p["max_new_tokens"]) for p in prompts]
    again = generate(server.url, prompts[0]["input_ids"], prompts[0]["max_new_tokens"])
    sampled = ask_json(server, prompts), ask_with_penalty(server, prompts), draw(server, unsure)
    return answers, again, fp4kv_report(server_info(server.url)), sampled


@pytest.fixture(scope="module")
def foretold(drafted_server, drafted, unsure, undrafted):
    """What the drafted server answers to the unsure prompts when an oracle drafts the undrafted answers: reading
    right, and reading the block in BF16. It comes after what the real drafter is asked."""
    server, oracle, told = drafted_server
    pairs = zip(unsure, undrafted[2], strict=True)
    oracle.write_text(json.dumps([{"prompt": p["input_ids"], "output": list(a.tokens)} for p, a in pairs]))
    answers = {}
    for how in ("right", "block-in-bf16"):
        told.write_text(how)
        empty_cache(server.url)
        answers[how] = ask_unsure(server, unsure)
    return answers


def differing(reference, candidates, prompts):
    return [
        p["name"]
        for p, a, b in zip(prompts, reference, candidates, strict=True)
        if not compare(a.tokens, b.tokens, a.gaps, CPU_BOUND).passed
    ]


def test_drafted_answers_are_the_undrafted_ones(undrafted, drafted, prompts):
    assert differing(undrafted[0], drafted[0], prompts) == []


def test_the_answers_are_right(undrafted, prompts):
    for prompt, answer in zip(prompts, undrafted[0], strict=True):
        assert prompt["expect"] in answer.text, prompt["name"]


def test_verify_accepts_real_drafts(drafted):
    lengths = [a.accept_length for a in drafted[0]]
    assert sum(lengths) / len(lengths) >= 2.5, lengths


def test_a_repeated_prompt_hits_the_cache_and_repeats_its_answer(drafted):
    answers, again, *_ = drafted
    assert again.cached_tokens > 0
    assert again.text == answers[0].text


def test_tokens_are_sized_from_true_bytes_without_a_drafter(undrafted):
    report = undrafted[1]
    per_token = formats.bytes_per_token(*cell("target"))
    assert report["target"]["bytes_per_token"] == per_token
    assert report["max_total_num_tokens"] == BUDGET_BYTES // per_token
    assert report["draft"] is None
    assert report["target"]["workspace_bytes"] == 0
    target = report["target"]
    assert target["allocated_bytes"] == per_token * target["slots"]


def test_tokens_are_sized_from_both_pools_with_a_drafter(drafted):
    report = drafted[2]
    head_dim, heads, layers = cell("draft")
    draft_bytes = 2 * head_dim * heads * layers  # FP8: one byte an element
    per_token = formats.bytes_per_token(*cell("target")) + draft_bytes
    assert report["draft"]["bytes_per_token"] == draft_bytes
    assert report["budget"]["bytes_per_token"] == per_token
    assert report["max_total_num_tokens"] == BUDGET_BYTES // per_token
    assert report["draft"]["allocated_bytes"] == draft_bytes * report["draft"]["slots"]


def test_the_scheduler_reports_our_parts(drafted):
    target, draft = drafted[2]["target"], drafted[2]["draft"]
    assert target["class"] == "sglang_fp4kv.pool.NVFP4TokenToKVPool"
    assert target["recipe"] == "sglang_fp4kv.recipe.PackedNVFP4Method"
    assert target["backend"] == "sglang_fp4kv.attention.TritonAttnBackend"
    assert target["global_scales"]["source"] == "default"
    assert draft["class"] == "sglang_fp4kv.draft_pool.DraftTokenToKVPool"
    assert draft["dtype"] == "float8_e4m3fn"


def test_constrained_answers_are_json_and_the_same_with_the_drafter(undrafted, drafted):
    (likeliest, drawn), _ = undrafted[3]
    (drafted_likeliest, drafted_drawn), *_ = drafted[3]
    assert drafted_likeliest.tokens == likeliest.tokens
    for answer in (likeliest, drawn, drafted_likeliest, drafted_drawn):
        value = json.loads(answer.text)
        assert set(value) == {"a", "b"} and type(value["a"]) is bool and value["b"] in (1, 2)


def test_verify_draws_where_a_request_samples(drafted):
    """Accepting greedily would give all answers that begin alike the same rest; how often each comes is
    tests/test_verify_sampling.py's."""
    draws = drafted[3][2]
    assert len(draws) == DRAWS
    assert len({d[0] for d in draws}) < len(set(draws))


def test_penalties_are_refused_with_the_drafter_alone(undrafted, drafted):
    assert isinstance(undrafted[3][1], tuple)
    reason = drafted[3][1]
    assert "HTTP 400" in reason and "repetition_penalty 1.1" in reason


def test_the_unsure_prompts_have_near_ties(undrafted):
    assert sum(min(a.gaps) < 0.1 for a in undrafted[2]) >= 4


def test_an_oracle_drafter_reaches_the_longest_accepts_and_changes_no_answer(foretold, unsure, undrafted):
    answers = foretold["right"]
    assert differing(undrafted[2], answers, unsure) == []
    # The first token comes from prefill; each of the 3 steps after it yields a whole block.
    assert [a.accept_length for a in answers] == [UNSURE_TOKENS / 3] * len(unsure)
    assert UNSURE_TOKENS / 3 == BLOCK


def test_reading_the_block_in_bf16_is_caught(foretold, unsure, undrafted):
    """The negative control: without the round trip through the pool the equality test fails."""
    assert differing(undrafted[2], foretold["block-in-bf16"], unsure) != []


def test_a_bf16_drafter_pool_may_be_asked_for(scratch, prompts, undrafted):
    """It is sized as planned, too."""
    flags = (*DRAFTED, "--speculative-draft-kv-cache-dtype", "bf16")
    budget = {"FP4KV_KV_BUDGET_BYTES": str(PLANNED_BYTES)}
    with serve(scratch, "bf16-draft", *flags, "--max-total-tokens", "1000000", **budget) as server:
        answer = generate(server.url, prompts[0]["input_ids"], prompts[0]["max_new_tokens"])
        report = fp4kv_report(server_info(server.url))
    assert answer.tokens == undrafted[0][0].tokens
    head_dim, heads, layers = cell("draft")
    draft = report["draft"]
    assert (draft["dtype"], draft["bytes_per_token"]) == ("bfloat16", 4 * head_dim * heads * layers)
    check_tokens(report, "nvfp4", "bf16", *flags)
