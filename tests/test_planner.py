"""Capacity arithmetic: the published figures, GPUs, states and pages of tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fp4kv.planner import (
    Attention, GatedDelta, PlanError, plan_states, plan_tokens, rank_heads, slots_per_request,
)  # fmt: skip

RESULTS = Path(__file__).parent / "bench" / "results"
# Report 1's model (64 layers, one in four with K and V) and report 2's layer, both public.
LAYER = Attention(1, 2, 256, 256)
SIXTEEN = Attention(16, 2, 256, 256)


def test_bytes_per_token_and_layer():
    assert [LAYER.bytes_per_token(kv) for kv in ("bf16", "fp8_e4m3", "nvfp4")] == [2048, 1024, 576]


def test_sixteen_layers():
    fp8, nvfp4 = SIXTEEN.bytes_per_token("fp8_e4m3"), SIXTEEN.bytes_per_token("nvfp4")
    with_workspace = nvfp4 + SIXTEEN.layer_bytes("fp8_e4m3")
    assert (fp8, nvfp4, with_workspace) == (16384, 9216, 10240)
    assert (round(fp8 / nvfp4, 2), round(fp8 / with_workspace, 2)) == (1.78, 1.60)


@pytest.mark.parametrize(
    ("budget", "cell", "reported", "within"),
    [
        (47_300_000_000, 16_384, 2_887_228, 1e-4),
        (8_500_000_000, 36_166, 235_074, 1e-3),
        (8_500_000_000, 22_014, 386_194, 1e-3),
        (20_270_000_000, 10_240, 1_979_584, 1e-4),
    ],
)
def test_reported_tokens(budget, cell, reported, within):
    assert abs(plan_tokens(budget, cell) / reported - 1) < within


def test_reported_requests():
    assert [round(plan_tokens(8_500_000_000, cell) / 98_304, 2) for cell in (36_166, 22_014)] == [2.39, 3.93]


def test_k_and_v_of_different_width():
    assert Attention(3, 2, 192, 128).bytes_per_token("bf16") == 2 * 3 * (192 + 128) * 2
    assert Attention(3, 2, 192, 128).bytes_per_token("nvfp4") == 3 * 2 * (108 + 72)


@pytest.mark.parametrize(
    ("heads", "tp", "kept"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 4, 1), (2, 16, 1), (1, 8, 1), (6, 3, 2)]
)
def test_heads_are_split_then_copied(heads, tp, kept):
    assert rank_heads(heads, tp) == kept


@pytest.mark.parametrize(("heads", "tp"), [(6, 4), (4, 6), (3, 2)])
def test_heads_that_cannot_be_split_or_copied(heads, tp):
    with pytest.raises(ValueError, match=f"^{heads} KV heads cannot be split or copied evenly over {tp} GPUs$"):
        rank_heads(heads, tp)


@pytest.mark.parametrize(("heads", "tp"), [(0, 1), (4, 0), (-1, 2)])
def test_heads_and_gpus_must_be_positive(heads, tp):
    with pytest.raises(ValueError, match=f"must be positive, got {heads} and {tp}$"):
        rank_heads(heads, tp)


def result_reports():
    for name in ("h200_pair.json", "h200_smollm2.json"):
        for key, report in json.loads((RESULTS / name).read_text())["reports"].items():
            yield pytest.param(report, id=f"{name}: {key}")


@pytest.mark.parametrize("report", result_reports())
def test_the_h200s_servers(report):
    """Pools, budget and max_total_num_tokens of every server whose report is on file, to the token."""
    names = {"bfloat16": "bf16", "float4_e2m1fn_x2": "nvfp4", "float8_e4m3fn": "fp8_e4m3"}
    cells = []
    for pool in filter(None, (report["target"], report["draft"])):
        layers = Attention(pool["layers"], pool["kv_heads"], pool["head_dim"])
        cells.append(layers.bytes_per_token(names[pool["dtype"]]))
        assert cells[-1] == pool["bytes_per_token"]
        assert cells[-1] * pool["slots"] == pool["allocated_bytes"]
    budget = report["budget"]
    assert sum(cells) == budget["bytes_per_token"]
    asked = {"page_size": budget["page_size"]}
    assert plan_tokens(budget["available_bytes"], sum(cells), **asked) == budget["tokens"]
    limit = 32768  # --max-total-tokens of tests/gpu/serving.py
    assert plan_tokens(budget["available_bytes"], sum(cells), limit=limit, **asked) == report["max_total_num_tokens"]


@pytest.mark.parametrize(
    ("budget", "cell", "page", "limit", "tokens"),
    [
        (1000, 10, 1, None, 100), (1009, 10, 1, None, 100), (1000, 10, 16, None, 96), (1000, 10, 64, None, 64),
        (1000, 10, 1, 50, 50), (1000, 10, 16, 50, 48), (1000, 10, 16, 97, 96), (1000, 10, 1, 5000, 100),
    ],
)  # fmt: skip
def test_tokens_come_in_whole_pages(budget, cell, page, limit, tokens):
    assert plan_tokens(budget, cell, page_size=page, limit=limit) == tokens


@pytest.mark.parametrize(
    ("budget", "page", "limit", "message"),
    [
        (9, 1, None, "9 bytes hold no page of 1 tokens of 10 bytes"),
        (-5, 1, None, "-5 bytes hold no page"),
        (159, 16, None, "159 bytes hold no page of 16 tokens of 10 bytes"),
        (159, 16, 64, "159 bytes hold no page of 16 tokens of 10 bytes"),
        (1000, 16, 15, "a limit of 15 tokens is less than a page of 16"),
    ],
)
def test_nothing_fits(budget, page, limit, message):
    with pytest.raises(PlanError, match=message):
        plan_tokens(budget, 10, page_size=page, limit=limit)


@pytest.mark.parametrize(("cell", "page"), [(0, 1), (10, 0), (-1, 1)])
def test_bytes_and_pages_must_be_positive(cell, page):
    with pytest.raises(ValueError, match=f"must be positive, got {cell} and {page}"):
        plan_tokens(1000, cell, page_size=page)


def gated_delta(**changes):
    sizes = dict(layers=48, key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_kernel=4)
    return GatedDelta(**{**sizes, **changes})


def test_the_reported_state_page():
    """Report 2's state page of 3,207,168 bytes is one such layer's."""
    assert gated_delta().layer_bytes == 3_207_168
    assert gated_delta().slot_bytes == 48 * 3_207_168


def test_state_bytes_by_gpu_and_dtype():
    assert gated_delta(tp=2).layer_bytes * 2 == gated_delta().layer_bytes
    conv = 10240 * 3 * 2
    assert gated_delta(state_dtype="bfloat16").layer_bytes == conv + 48 * 128 * 128 * 2
    # 16 key heads over 32 GPUs: each keeps a copy of one, as SGLang extends the groups.
    assert gated_delta(value_heads=64, tp=32).layer_bytes == (2 + 2) * 128 * 3 * 2 + 2 * 128 * 128 * 4


def test_state_heads_that_do_not_split():
    with pytest.raises(ValueError, match="48 value heads cannot be split over 5 GPUs"):
        gated_delta(tp=5)


@pytest.mark.parametrize(
    ("strategy", "overlap", "radix", "slots"),
    [
        ("no_buffer", False, True, 3), ("extra_buffer", True, True, 5), ("extra_buffer", False, True, 4),
        ("extra_buffer_lazy", True, True, 4), ("extra_buffer", True, False, 1),
    ],
)  # fmt: skip
def test_slots_of_a_request(strategy, overlap, radix, slots):
    assert slots_per_request(strategy, overlap=overlap, radix_cache=radix) == slots


def test_states_take_their_share():
    """SGLang's default: 0.9 of what K and V get, one slot of it as padding."""
    split = plan_states(19_000, 100, per_request=5)
    assert (split.slots, split.pool_bytes, split.verify_bytes, split.left_bytes) == (89, 9_000, 0, 10_000)


def test_a_drafter_keeps_the_states_of_its_block():
    split = plan_states(10**9, 10**5, per_request=5, requests=48, draft_tokens=8)
    assert split.verify_bytes == 49 * 8 * 10**5
    assert split.pool_bytes + split.verify_bytes + split.left_bytes == 10**9
    plain = plan_states(10**9, 10**5, per_request=5)
    assert split.slots < plain.slots


def test_slots_that_are_asked_for():
    split = plan_states(10**6, 100, per_request=5, slots=9)
    assert (split.slots, split.left_bytes) == (9, 10**6 - 1000)
    split = plan_states(10**6, 100, per_request=1, radix_cache=False, requests=7)
    assert (split.slots, split.left_bytes) == (7, 10**6 - 800)


def test_states_that_leave_nothing():
    with pytest.raises(PlanError, match="150 bytes leave 0 slots for recurrent states of 100 bytes each; a request needs 5"):
        plan_states(150, 100, per_request=5)
    with pytest.raises(PlanError, match="leave 4 slots for recurrent states of 100 bytes each; a request needs 5"):
        plan_states(10**6, 100, per_request=5, slots=4)
    with pytest.raises(
        PlanError, match=r"recurrent states take 1,000 bytes \(9 \+ 1 slots of 100\) and leave nothing of 900 for K"
    ):
        plan_states(900, 100, per_request=5, slots=9)


def test_needs_the_standard_library_only():
    code = (
        "import sys, sglang_fp4kv.planner, sglang_fp4kv.pages; "
        "print([m for m in ('torch', 'triton', 'numpy', 'sglang') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
