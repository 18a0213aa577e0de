"""A plan beside running servers: max_total_num_tokens, pools and states, to the token."""


import pytest

from launcher.client import fp4kv_report, server_info
from launcher.demo import PAIR
from launcher.flags import parse
from launcher.modelfacts import read_facts
from launcher.plan_rows import Budget, make_plan
from tests.e2e.server import embedded_server, plugin_path
from tests.e2e.tiny_models import build_draft, build_hybrid

pytestmark = pytest.mark.e2e

BUDGET = 7_654_321  # divides by no bytes of a token, and by no page
HYBRID_BUDGET = 98_765_433
DRAFTED = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "draft"))
# test_hybrid_serving.py has NVFP4 and the snapshots that overlapped scheduling brings.
HYBRID = ("--disable-overlap-schedule", "--kv-cache-dtype", "bf16")


def serve(folder, log, *flags, ready="/health_generate", **env):
    path = plugin_path()
    env = {"PYTHONPATH": path, "FP4KV_KV_BUDGET_BYTES": str(BUDGET), **env}
    return embedded_server(folder, "--max-total-tokens", "1000000", *flags, log=log, env=env, ready=ready)


def planned(folder, draft, *flags, **budget):
    """The plan's rows by (KV, drafter) for the flags a server was started with."""
    parsed = parse(["--model-path", str(folder), "--max-running-requests", "8", *flags])
    draft = draft and read_facts(str(draft), "--draft")
    plan = make_plan(read_facts(str(folder), "MODEL"), draft, parsed, Budget(**budget), {}, None)
    return plan, {(row.kv, row.drafter): row for row in plan.rows if not row.workspace}


def check_tokens(report, kv, drafter, *flags):
    """The pools of a server with ``flags`` and BUDGET bytes are as planned."""
    _, rows = planned(PAIR / "target", PAIR / "draft", *flags, kv=BUDGET)
    row = rows[kv, drafter]
    assert report["max_total_num_tokens"] == row.tokens
    assert report["budget"]["bytes_per_token"] == row.bytes_per_token
    assert report["target"]["bytes_per_token"] == row.target_bytes
    if drafter:
        assert report["draft"]["bytes_per_token"] == row.drafter_bytes
        slots, page = report["draft"]["slots"], report["budget"]["page_size"]
        assert slots == row.tokens + page
        assert report["draft"]["allocated_bytes"] == slots * row.drafter_bytes


@pytest.mark.parametrize(
    ("kv", "drafter", "flags"),
    [
        ("nvfp4", None, ("--page-size", "16")),
        ("nvfp4", "fp8_e4m3", (*DRAFTED, "--page-size", "16")),
        ("bf16", None, ("--page-size", "64", "--max-total-tokens", "3000")),
    ],
)
def test_tokens_of_a_server(tmp_path, kv, drafter, flags):
    """test_nvfp4_serving.py has a drafter's pool in BF16."""
    with serve(PAIR / "target", tmp_path / "log", "--kv-cache-dtype", kv, *flags) as server:
        report = fp4kv_report(server_info(server.url))
    check_tokens(report, kv, drafter, *flags)


@pytest.mark.parametrize("drafted", [False, True], ids=["alone", "drafted"])
def test_tokens_of_a_hybrid_server(tmp_path, drafted):
    """States and K and V of one budget, in BF16: SGLang's own pools."""
    target = build_hybrid(tmp_path / "target")
    draft = build_draft(tmp_path / "draft", target) if drafted else None
    flags = HYBRID
    if drafted:
        flags += ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft))
    budget = {"FP4KV_KV_BUDGET_BYTES": str(HYBRID_BUDGET)}
    with serve(target, tmp_path / "log", *flags, ready="/server_info", **budget) as server:
        report = fp4kv_report(server_info(server.url))
    plan, rows = planned(target, draft, *flags, pools=HYBRID_BUDGET)
    row = rows["bf16", "bf16" if drafted else None]
    assert report["target"]["class"].endswith("HybridLinearKVPool")
    assert report["budget"]["bytes_per_token"] == row.bytes_per_token
    assert HYBRID_BUDGET - report["budget"]["available_bytes"] == row.state_bytes
    assert report["max_total_num_tokens"] == row.tokens
    assert plan.states["layers"] == report["states"]["layers"] == 6 and row.state_slots > 0
