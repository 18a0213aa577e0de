"""NVFP4 KV under --enable-hierarchical-cache: prefixes that went to host memory and came back.

One drafted server with pages of 16 tokens, whose pool holds three of the prompts; what is evicted is
written to the host then (write_back), and the host's pool holds some more. A prompt is asked three times: from
nothing, from the prefix cache on the device, and after it was evicted. The second and the third read the same
tokens out of the pool, so the same bytes give the same answer, on prompts whose two best tokens often tie, and the
same accept length, which is what the drafter's own K and V decide.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from launcher.client import fp4kv_report, server_info
from launcher.demo import PAIR, load_prompts
from sglang_fp4kv import formats
from tests.e2e.server import embedded_server
from tests.e2e.test_nvfp4_memory import empty_cache, unsure_prompt, used_tokens

pytestmark = pytest.mark.e2e

PLUGIN = Path(__file__).parent / "plugin"
PAGE, POOL = 16, 448
FLAGS = (
    "--kv-cache-dtype", "nvfp4", "--page-size", str(PAGE), "--max-total-tokens", str(POOL),
    "--enable-hierarchical-cache", "--hicache-ratio", "2.5", "--hicache-write-policy", "write_back",
    "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct",
    "--enable-cache-report", "--speculative-algorithm", "DFLASH",
    "--speculative-draft-model-path", str(PAIR / "draft"),
)  # fmt: skip
NEW_TOKENS = 12
UNSURE = [unsure_prompt(20 + seed, 6 * PAGE + 1) for seed in range(3)]


@dataclass(frozen=True)
class Answer:
    """``device``, ``host``: prompt tokens taken from the prefix cache there."""

    tokens: tuple
    accept_length: float
    device: int
    host: int


def ask(url, prompt):
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    answer = requests.post(f"{url}/generate", json=body, timeout=600)
    answer.raise_for_status()
    found, meta = answer.json(), answer.json()["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        tuple(found["output_ids"]),
        meta["spec_accept_length"],
        details.get("device", 0),
        details.get("host", 0),
    )


@dataclass(frozen=True)
class Seen:
    """Answers by prompt. ``broken``: (what was left on the host, answers by prompt)."""

    fresh: list
    from_device: list
    from_host: list
    broken: dict
    report: dict
    used_tokens: int


def press(url, seed, prompts=5):
    """Other prompts, which need the whole pool."""
    for number in range(prompts):
        ask(url, unsure_prompt(100 * seed + number, 5 * PAGE))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("hierarchical")
    told = scratch / "left-on-host"
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH")])),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "FP4KV_LEFT_ON_HOST": str(told),
    }
    trained = load_prompts(PAIR / "prompts.json", PAIR / "target")
    prompts = [*UNSURE, *(p["input_ids"] for p in trained if p["name"] in ("recall", "tool"))]
    with embedded_server(PAIR / "target", *FLAGS, log=scratch / "server.log", env=env) as server:
        url, fresh, from_device, from_host = server.url, [], [], []
        for prompt in prompts:
            fresh.append(ask(url, prompt))
            from_device.append(ask(url, prompt))
        press(url, 1)
        for prompt in prompts:
            from_host.append(ask(url, prompt))
        broken = {}
        for seed, left in enumerate(("scales", "draft"), 2):
            press(url, seed)
            told.write_text(left)
            broken[left] = [ask(url, prompt) for prompt in prompts]
            told.unlink()
        report = fp4kv_report(server_info(url))
        used = used_tokens(url)
        empty_cache(url)
        again = [ask(url, prompt) for prompt in prompts[:1]]
        assert [a.tokens for a in again] == [a.tokens for a in fresh[:1]]
    print(json.dumps({k: [vars(a) for a in v] for k, v in (("fresh", fresh), ("device", from_device), ("host", from_host), *broken.items())}, indent=1))
    return Seen(fresh, from_device, from_host, broken, report, used)


def test_what_came_back_answers_as_from_the_device(seen):
    assert [a.tokens for a in seen.from_host] == [a.tokens for a in seen.from_device]


def test_prefixes_came_from_where_they_are_said_to(seen):
    assert all(a.device == a.host == 0 for a in seen.fresh)
    assert all(a.device and not a.host for a in seen.from_device)
    assert [a.host for a in seen.from_host] == [a.device for a in seen.from_device]


def test_the_drafters_k_and_v_come_back(seen):
    assert [a.accept_length for a in seen.from_host] == [a.accept_length for a in seen.from_device]


def test_control_scales_left_on_the_host_change_answers(seen):
    assert [a.tokens for a in seen.broken["scales"]] != [a.tokens for a in seen.from_device]


def test_control_without_the_drafters_k_and_v_fewer_drafts_are_accepted(seen):
    broken, whole = seen.broken["draft"], seen.from_device
    assert [a.tokens for a in broken] == [a.tokens for a in whole]
    assert sum(a.accept_length for a in broken) < sum(a.accept_length for a in whole)


def test_the_server_reports_its_host_pools(seen):
    target, draft = (seen.report[side] for side in ("target", "draft"))
    host = seen.report["host"]
    assert host["kv"]["class"] == "sglang_fp4kv.host_pool.NVFP4TokenToKVPoolHost"
    assert host["kv"]["bytes_per_token"] == target["bytes_per_token"]
    assert target["bytes_per_token"] == formats.bytes_per_token(
        target["head_dim"], target["kv_heads"], target["layers"]
    )
    assert host["draft"]["bytes_per_token"] == draft["bytes_per_token"]
    assert host["kv"]["tokens"] == host["draft"]["tokens"] > POOL


def test_every_slot_comes_back(seen):
    assert seen.used_tokens == 0
