"""DFlash drafts beside NVFP4 KV on the real server: DFlash2, windows, both config layouts, the fused write."""

import json

import pytest

from launcher.client import fp4kv_report, generate, server_info
from launcher.demo import PAIR, load_prompts
from launcher.equality import CPU_BOUND, compare
from launcher.flags import parse
from launcher.modelfacts import read_facts
from launcher.plan_rows import Budget, make_plan
from tests.e2e.server import embedded_server, plugin_path
from tests.e2e.tiny_models import build_dflash2, build_older_layout

pytestmark = pytest.mark.e2e

NVFP4 = ("--kv-cache-dtype", "nvfp4", "--max-total-tokens", "1000000")
BUDGET = 7_654_321  # divides by no bytes of a token
WINDOW, DRAFT_WINDOW = 24, 16


def serve(scratch, name, draft=None, *flags, **env):
    path = plugin_path()
    return embedded_server(
        PAIR / "target", *NVFP4, *drafted(draft), *flags,
        log=scratch / f"{name}.log",
        env={"PYTHONPATH": path, "FP4KV_KV_BUDGET_BYTES": str(BUDGET), **env},
    )  # fmt: skip


def drafted(draft):
    if draft is None:
        return ()
    return ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft))


def ask(server, prompts, **options):
    return [generate(server.url, p["input_ids"], p["max_new_tokens"], **options) for p in prompts]


def differing(reference, candidates, prompts):
    return [
        p["name"]
        for p, a, b in zip(prompts, reference, candidates, strict=True)
        if not compare(a.tokens, b.tokens, a.gaps, CPU_BOUND).passed
    ]


def check_pool(report, draft, *flags):
    """The pools' bytes and tokens are the plan's, with every token of every layer kept."""
    config = json.loads((draft / "config.json").read_text())
    cell = 2 * config["head_dim"] * config["num_key_value_heads"] * config["num_hidden_layers"]
    words = ["--model-path", str(PAIR / "target"), *drafted(draft), *flags]
    facts = read_facts(str(PAIR / "target"), "MODEL"), read_facts(str(draft), "--draft")
    plan = make_plan(*facts, parse(words), Budget(kv=BUDGET), {}, None)
    row = next(row for row in plan.rows if (row.kv, row.drafter) == ("nvfp4", "fp8_e4m3"))
    found = report["draft"]
    assert (found["dtype"], found["bytes_per_token"], row.drafter_bytes) == ("float8_e4m3fn", cell, cell)
    assert report["budget"]["bytes_per_token"] == row.bytes_per_token
    assert report["max_total_num_tokens"] == row.tokens
    assert found["allocated_bytes"] == cell * found["slots"]
    return plan


@pytest.fixture(scope="module")
def prompts():
    return load_prompts(PAIR / "prompts.json", PAIR / "target")


@pytest.fixture(scope="module")
def undrafted(scratch, prompts):
    with serve(scratch, "undrafted") as server:
        return ask(server, prompts, top_two=True)


def test_the_contexts_are_longer_than_the_windows(prompts, undrafted):
    lengths = [len(p["input_ids"]) for p in prompts]
    whole = [length + len(a.tokens) for length, a in zip(lengths, undrafted, strict=True)]
    assert sum(length > 2 * WINDOW for length in lengths) >= 2, lengths
    assert sum(length > WINDOW > DRAFT_WINDOW for length in whole) >= 6, whole


def test_a_dflash2_draft_with_windowed_layers(scratch, prompts, undrafted):
    draft = build_dflash2(scratch / "dflash2", PAIR / "draft", WINDOW)
    with serve(scratch, "dflash2", draft) as server:
        answers = ask(server, prompts)
        report = fp4kv_report(server_info(server.url))
    assert differing(undrafted, answers, prompts) == []
    lengths = [a.accept_length for a in answers]
    assert sum(lengths) / len(lengths) >= 2, lengths
    assert report["draft"]["model"] == "DFlash2DraftModel"
    assert report["draft"]["modules"] == ["grouped convolution", "candidate selector"]
    assert report["draft"]["kv_writes"] == "per layer"
    assert report["draft"]["why_per_layer"] == "the device has no fused kernel"
    plan = check_pool(report, draft)
    assert plan.drafter["windows"] == [WINDOW] * 2


def test_a_draft_window_and_the_fused_write(scratch, prompts, undrafted):
    """An older config layout without a block size, too; then the fused write fails while serving."""
    draft = build_older_layout(scratch / "older", PAIR / "draft")
    flags = ("--speculative-dflash-block-size", "8", "--speculative-draft-window-size", str(DRAFT_WINDOW))
    stop = scratch / "stop"
    with serve(scratch, "window", draft, *flags, FP4KV_FUSED_WRITES=str(stop)) as server:
        answers = ask(server, prompts)
        report = fp4kv_report(server_info(server.url))
        stop.write_text("")
        slow = ask(server, prompts[:2])
        changed = fp4kv_report(server_info(server.url))["draft"]
    assert differing(undrafted, answers, prompts) == []
    assert differing(undrafted[:2], slow, prompts[:2]) == []
    lengths = [a.accept_length for a in answers]
    assert sum(lengths) / len(lengths) >= 2, lengths
    assert (report["draft"]["kv_writes"], report["draft"]["why_per_layer"]) == ("fused", None)
    assert report["draft"]["modules"] == []
    assert changed["kv_writes"] == "per layer"
    assert changed["why_per_layer"] == "the fused write failed: RuntimeError: told to fail"
    plan = check_pool(report, draft, *flags)
    assert plan.drafter["windows"] == [DRAFT_WINDOW] * 2
