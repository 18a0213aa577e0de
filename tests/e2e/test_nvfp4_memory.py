"""NVFP4 KV with the drafter where slots are scarce, paged, shared or given back.

One undrafted server with page size 1 and one drafted with page size 16, both with prefill in chunks
of 64 tokens and a pool so small that requests are retracted. SGLang's own accounting of the pool is
checked after every batch (SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY), and a server whose slots do
not add up dies.

Prefill keeps its own chunk in BF16 while cached keys are packed, so an answer depends on where the
prompt was cut. Only answers whose prompts are cut alike are compared; the trained prompts, whose
answers no such difference changes, stand in for the rest.
"""

import json
import random
from dataclasses import dataclass

import pytest
import requests

from launcher.client import generate
from launcher.demo import PAIR, load_prompts
from tests.e2e.server import embedded_server, empty_cache, plugin_path

pytestmark = pytest.mark.e2e

POOL_TOKENS = 256
PAGE = 16
CHUNK = 64
FLAGS = (
    "--kv-cache-dtype", "nvfp4", "--max-total-tokens", str(POOL_TOKENS),
    "--chunked-prefill-size", str(CHUNK),
    # Admit what fits now, whatever it may grow to: the pool then fills up while decoding.
    "--schedule-conservativeness", "0.01",
)  # fmt: skip
DRAFTED = (
    "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "draft"),
    "--page-size", str(PAGE),
)  # fmt: skip
NEW_TOKENS = 16
# Page sizes 1 and 16 cache the same 48 tokens of this prompt, and 64 with its answer.
CACHED_PROMPT = 3 * PAGE + 1


@dataclass(frozen=True)
class Answers:
    """What one server said. ``alone`` by prompt name; ``retractions`` of the crowd's requests."""

    alone: dict
    identical: list
    mixed: list
    repeated: tuple
    extended: tuple
    cached: list
    trained: list
    crowd: list
    retractions: list
    after_abort: tuple
    used_tokens: int
    accept_lengths: list


def unsure_prompt(seed, length):
    """Random tokens, on which the model's two best tokens often tie (test_nvfp4_serving.py)."""
    seeded = random.Random(seed)
    return [seeded.randrange(16, 700) for _ in range(length)]


UNSURE = {
    "one token": unsure_prompt(1, 1),
    "short": unsure_prompt(2, 12),
    "a page and one": unsure_prompt(3, PAGE + 1),
    "a chunk": unsure_prompt(4, CHUNK),
    "two chunks and a rest": unsure_prompt(5, 2 * CHUNK + 8),
}
# Together they fit in one chunk, so that each prompt is prefilled whole.
MIXED = ("one token", "a page and one", "short")


@pytest.fixture(scope="module")
def trained():
    return load_prompts(PAIR / "prompts.json", PAIR / "target")


def serve(scratch, name, *flags, **env):
    path = plugin_path()
    env = {"PYTHONPATH": path, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **env}
    return embedded_server(PAIR / "target", *flags, log=scratch / f"{name}.log", env=env)


def ask(url, prompt, count=NEW_TOKENS):
    return generate(url, prompt, count, ignore_eos=True)


def ask_together(url, prompts, counts, *, ignore_eos):
    """The answers to all prompts, sent in one request so that their order is fixed."""
    body = {
        "input_ids": prompts,
        "sampling_params": [
            {"temperature": 0, "max_new_tokens": n, "ignore_eos": ignore_eos} for n in counts
        ],
    }
    response = requests.post(f"{url}/generate", json=body, timeout=600)
    response.raise_for_status()
    return response.json()


def tokens_of(answers):
    return [tuple(a["output_ids"]) for a in answers]


def abort_after_first_tokens(url, prompt):
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True},
        "stream": True,
    }
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as response:
        lines = filter(None, response.iter_lines())
        assert [next(lines) for _ in range(3)]


def used_tokens(url):
    loads = requests.get(f"{url}/v1/loads", timeout=60).json()["loads"]
    return loads[0]["num_used_tokens"]


def examine(url, trained):
    alone, accept_lengths = {}, []
    for name, prompt in UNSURE.items():
        empty_cache(url)
        answer = ask(url, prompt)
        alone[name] = answer.tokens
        accept_lengths.append(answer.accept_length)

    empty_cache(url)
    counts = [NEW_TOKENS] * 4
    identical = ask_together(url, [UNSURE["short"]] * 4, counts, ignore_eos=True)
    empty_cache(url)
    mixed = ask_together(url, [UNSURE[n] for n in MIXED], counts[: len(MIXED)], ignore_eos=True)

    empty_cache(url)
    prompt = unsure_prompt(6, CACHED_PROMPT)
    first, repeated = ask(url, prompt), ask(url, prompt)
    extended = ask(url, prompt + list(first.tokens) + unsure_prompt(7, 4))

    own = []
    for p in trained:
        empty_cache(url)
        own.append(generate(url, p["input_ids"], p["max_new_tokens"]).tokens)
    empty_cache(url)
    crowd = ask_together(
        url,
        [p["input_ids"] for p in trained],
        [p["max_new_tokens"] for p in trained],
        ignore_eos=False,
    )
    abort_after_first_tokens(url, UNSURE["short"])
    empty_cache(url)
    after_abort = ask(url, UNSURE["short"]).tokens
    empty_cache(url)
    return Answers(
        alone=alone,
        identical=tokens_of(identical),
        mixed=tokens_of(mixed),
        repeated=repeated.tokens,
        extended=extended.tokens,
        cached=[repeated.cached_tokens, extended.cached_tokens],
        trained=own,
        crowd=tokens_of(crowd),
        retractions=[a["meta_info"]["num_retractions"] for a in crowd],
        after_abort=after_abort,
        used_tokens=used_tokens(url),
        accept_lengths=accept_lengths,
    )


@pytest.fixture(scope="module")
def undrafted(scratch, trained):
    with serve(scratch, "undrafted", *FLAGS) as server:
        return examine(server.url, trained)


def misled(tokens):
    """``tokens`` with every fifth replaced, so that an oracle's blocks are accepted in part."""
    return [3 if i % 5 == 4 else token for i, token in enumerate(tokens)]


@pytest.fixture(scope="module")
def drafted(scratch, trained, undrafted):
    oracle = scratch / "oracle.json"
    oracle.write_text(
        json.dumps(
            [
                {"prompt": UNSURE[name], "output": misled(tokens)}
                for name, tokens in undrafted.alone.items()
            ]
        )
    )
    with serve(scratch, "drafted", *FLAGS, *DRAFTED, FP4KV_ORACLE=str(oracle)) as server:
        return examine(server.url, trained)


@pytest.fixture(params=["undrafted", "drafted"])
def either(request):
    return request.getfixturevalue(request.param)


def test_pages_and_chunks_change_no_answer(undrafted, drafted):
    assert drafted.alone == undrafted.alone


def test_blocks_are_accepted_in_part(drafted):
    lengths = drafted.accept_lengths
    assert all(1.5 < length < 8 for length in lengths), lengths


def test_requests_that_run_together_answer_as_alone(either):
    assert either.identical == [either.alone["short"]] * 4
    assert either.mixed == [either.alone[name] for name in MIXED]


def test_cached_prefixes_give_both_servers_the_same_answer(undrafted, drafted):
    assert undrafted.cached == drafted.cached == [3 * PAGE, 4 * PAGE]
    assert drafted.repeated == undrafted.repeated
    assert drafted.extended == undrafted.extended


def test_retracted_requests_answer_as_alone(either):
    assert sum(either.retractions) > 0
    assert either.crowd == either.trained


def test_trained_answers_are_the_same_in_pages(undrafted, drafted):
    assert drafted.trained == undrafted.trained


def test_an_aborted_request_leaves_no_trace(either):
    assert either.after_abort == either.alone["short"]


def test_every_slot_comes_back(either):
    assert either.used_tokens == 0
