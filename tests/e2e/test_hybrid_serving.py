"""NVFP4 KV on a gated-delta hybrid (Qwen3.5, random weights), with and without the drafter.

Random weights put near-ties everywhere, so that a wrong state or a wrong row of the pool changes tokens. Prompts
that the oracle knows are accepted in part, up to every fifth token; all others are drafted by the random draft,
nearly always wrongly. So states are rolled back by every number of tokens. A plain draft does so, and a DFlash2 draft with
windows. The class that Qwen3.5 is published in, with a vision tower, is to answer text as the text-only class does.
"""

import json
import random
from dataclasses import dataclass

import pytest

from launcher.client import fp4kv_report, generate, server_info
from launcher.flags import parse
from launcher.modelfacts import read_facts
from launcher.plan_rows import Budget, make_plan
from sglang_fp4kv import formats
from tests.e2e.server import embedded_server, empty_cache, plugin_path
from tests.e2e.test_nvfp4_memory import ask_together, misled, tokens_of, used_tokens
from tests.e2e.tiny_models import INTERVAL, build_dflash2, build_draft, build_hybrid, build_published_hybrid

pytestmark = pytest.mark.e2e

BUDGET_BYTES = 30_000_000
CHUNK = 64  # of the gated-delta kernels, of prefill here, and what the prefix cache keeps states at
FLAGS = (
    "--kv-cache-dtype", "nvfp4", "--max-total-tokens", "1000000", "--max-running-requests", "4",
    "--chunked-prefill-size", str(CHUNK),
)  # fmt: skip
NEW_TOKENS = 12
WINDOW = 24


def prompt(seed, length):
    seeded = random.Random(seed)
    return [seeded.randrange(16, 500) for _ in range(length)]


ALONE = {"one token": prompt(1, 1), "short": prompt(2, 12), "two chunks and a rest": prompt(3, 2 * CHUNK + 7)}
STRANGE = prompt(4, 9)  # not in the oracle's file
CACHED = prompt(5, CHUNK + 5)


@dataclass(frozen=True)
class Answers:
    alone: dict
    strange: tuple
    identical: list
    repeated: list
    cached: list
    report: dict
    used_tokens: int
    accept_lengths: dict


def examine(url):
    alone, lengths = {}, {}
    for name, tokens in {**ALONE, "strange": STRANGE}.items():
        answer = generate(url, tokens, NEW_TOKENS, ignore_eos=True)
        alone[name], lengths[name] = answer.tokens, answer.accept_length
    empty_cache(url)
    identical = ask_together(url, [ALONE["short"]] * 4, [NEW_TOKENS] * 4, ignore_eos=True)
    empty_cache(url)
    runs = [generate(url, CACHED, NEW_TOKENS, ignore_eos=True) for _ in range(3)]
    empty_cache(url)
    return Answers(
        strange=alone.pop("strange"),
        alone=alone,
        identical=tokens_of(identical),
        repeated=[run.tokens for run in runs],
        cached=[run.cached_tokens for run in runs],
        report=fp4kv_report(server_info(url)),
        used_tokens=used_tokens(url),
        accept_lengths=lengths,
    )


@pytest.fixture(scope="module")
def models(scratch):
    target = build_hybrid(scratch / "target")
    return target, build_draft(scratch / "draft", target)


def environment(**env):
    return {
        "PYTHONPATH": plugin_path(), "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "FP4KV_KV_BUDGET_BYTES": str(BUDGET_BYTES), **env,
    }  # fmt: skip


def serve(model, log, *flags, ready="/health", **env):
    return embedded_server(model, *FLAGS, *flags, log=log, env=environment(**env), ready=ready)


@pytest.fixture(scope="module")
def undrafted(scratch, models):
    with serve(models[0], scratch / "undrafted.log") as server:
        return examine(server.url)


def drafter(draft):
    return ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft))


def foretell(file, answers):
    """What an oracle is to draft, by FP4KV_ORACLE: ``answers``, misled, but for the strange prompt's."""
    known = [{"prompt": ALONE[name], "output": misled(tokens)} for name, tokens in answers.alone.items()]
    known.append({"prompt": CACHED, "output": misled(answers.repeated[-1])})
    file.write_text(json.dumps(known))
    return str(file)


@pytest.fixture(scope="module")
def oracle(scratch, undrafted):
    return foretell(scratch / "oracle.json", undrafted)


@pytest.fixture(scope="module")
def plain(scratch, models, oracle):
    with serve(models[0], scratch / "drafted.log", *drafter(models[1]), FP4KV_ORACLE=oracle) as server:
        return examine(server.url)


@pytest.fixture(scope="module")
def dflash2_draft(scratch, models):
    return build_dflash2(scratch / "dflash2", models[1], WINDOW)


@pytest.fixture(scope="module")
def dflash2(scratch, models, dflash2_draft, oracle):
    with serve(models[0], scratch / "dflash2.log", *drafter(dflash2_draft), FP4KV_ORACLE=oracle) as server:
        return examine(server.url)


@pytest.fixture(scope="module")
def published_model(scratch, models):
    return build_published_hybrid(scratch / "published", models[0])


@pytest.fixture(scope="module", params=["undrafted", "drafted"])
def published(request, scratch, models, published_model, oracle):
    flags = drafter(models[1]) if request.param == "drafted" else ()
    with serve(published_model, scratch / f"published-{request.param}.log", *flags, FP4KV_ORACLE=oracle) as server:
        return request.param, examine(server.url)


@pytest.fixture(params=["plain", "dflash2"])
def drafted(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["undrafted", "plain", "dflash2"])
def either(request):
    return request.getfixturevalue(request.param)


def test_the_drafter_changes_no_token(undrafted, drafted):
    assert drafted.alone == undrafted.alone
    assert drafted.strange == undrafted.strange


def test_blocks_are_accepted_in_part_and_not_at_all(drafted):
    assert all(1.5 < drafted.accept_lengths[name] < 8 for name in ALONE), drafted.accept_lengths
    assert drafted.accept_lengths["strange"] < 1.5


def test_requests_that_run_together_answer_as_alone(either):
    assert either.identical == [either.alone["short"]] * 4


def test_a_prompt_goes_on_from_the_state_that_was_kept(undrafted, drafted):
    """Prefill rounds the states it keeps to the model's dtype, so the first answer may differ from the others."""
    for side in (undrafted, drafted):
        assert side.cached == [0, CHUNK, CHUNK]
        assert side.repeated[1] == side.repeated[2]
    assert drafted.repeated == undrafted.repeated


def test_every_slot_comes_back(either):
    assert either.used_tokens == 0


def planned(target, draft):
    flags = parse(["--model-path", str(target), *FLAGS, *(drafter(draft) if draft else ())])
    facts = [read_facts(str(target), "MODEL"), read_facts(str(draft), "--draft") if draft else None]
    plan = make_plan(*facts, flags, Budget(pools=BUDGET_BYTES), {}, None)
    wanted = ("nvfp4", "fp8_e4m3" if draft else None)
    return plan, next(row for row in plan.rows if (row.kv, row.drafter) == wanted and not row.workspace)


def check_pools(report, target, draft):
    """The server's ``report`` beside the plan of the same flags, to the token. ``draft``: None without a drafter."""
    plan, row = planned(target, draft)
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    layers = config["num_hidden_layers"] // INTERVAL
    recurrent = config["num_hidden_layers"] - layers
    per_token = formats.bytes_per_token(config["head_dim"], config["num_key_value_heads"], layers)
    pool, states = report["target"], report["states"]
    assert pool["class"] == "sglang_fp4kv.pool.NVFP4TokenToKVPool"
    assert pool["backend"] == "sglang_fp4kv.attention.TritonAttnBackend"
    assert pool["layers"] == layers and pool["bytes_per_token"] == row.target_bytes == per_token
    assert pool["allocated_bytes"] == per_token * pool["slots"]
    assert report["max_total_num_tokens"] == row.tokens
    assert report["budget"]["bytes_per_token"] == row.bytes_per_token
    assert BUDGET_BYTES - report["budget"]["available_bytes"] == row.state_bytes
    assert states["slots"] == row.state_slots and states["slot_bytes"] == plan.states["slot_bytes"]
    assert (states["layers"], states["dtype"], states["snapshot_tokens"]) == (recurrent, "float32", CHUNK)


@pytest.mark.parametrize("side", ["undrafted", "plain", "dflash2"])
def test_pools_and_states_are_as_planned_to_the_token(request, models, dflash2_draft, side):
    draft = {"undrafted": None, "plain": models[1], "dflash2": dflash2_draft}[side]
    report = request.getfixturevalue(side).report
    check_pools(report, models[0], draft)
    if side == "dflash2":
        assert report["draft"]["modules"] == ["grouped convolution", "candidate selector"]


def test_the_published_class_answers_text_as_the_text_only_one(undrafted, published):
    side, answers = published
    assert (answers.alone, answers.strange) == (undrafted.alone, undrafted.strange)
    assert (answers.identical, answers.repeated) == (undrafted.identical, undrafted.repeated)
    assert answers.cached == undrafted.cached and answers.used_tokens == 0
    if side == "drafted":
        assert all(1.5 < answers.accept_lengths[name] < 8 for name in ALONE), answers.accept_lengths


def test_the_published_classes_pools_are_as_planned(models, published_model, published):
    side, answers = published
    check_pools(answers.report, published_model, models[1] if side == "drafted" else None)
