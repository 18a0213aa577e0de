"""What each patch does, in a patched copy of the installed SGLang beside an unpatched one.

The unpatched copy is the control: it shows that the fault is there and that the test can see it.
"""

import json
import os
import subprocess
import sys

import patch_trees
import pytest
from launcher import patchset

SCENARIOS = "prefix_valid_commit input_embeddings scale_loss retraction scheduler_ready".split()


def run_scenarios(tree):
    """All scenarios in one process (importing SGLang takes most of the time)."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(patch_trees.REPOSITORY)]),
        "SGLANG_PLUGINS": "none",  # the patches alone, without our plugin's hooks
        "TRITON_INTERPRET": "1",
    }
    environment.pop("SGLANG_PLATFORM", None)
    script = patch_trees.REPOSITORY / "tests/patch_scenarios.py"
    ended = subprocess.run(
        [sys.executable, str(script), *SCENARIOS], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    results = json.loads(ended.stdout.splitlines()[-1])
    assert results.pop("sglang") == str(tree / "sglang"), "another SGLang was imported"
    return results


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return run_scenarios(patch_trees.importable_tree(tmp_path_factory.mktemp("stock")))


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    tree = patch_trees.importable_tree(tmp_path_factory.mktemp("patched"))
    assert patchset.apply_patches(tree).state == "applied"
    return run_scenarios(tree)


def test_prefix_valid_commit_to_fp4_is_refused(patched):
    found = patched["prefix_valid_commit"]
    for name in ("commit_fp4", "build_fp4", "build_fp4_no_writer"):
        assert found[name]["raised"] == "NotImplementedError", name
        assert "has no writer of its own" in found[name]["text"]
        assert "float4_e2m1fn_x2" in found[name]["text"]
        assert "--speculative-draft-kv-cache-dtype fp8_e4m3" in found[name]["text"]
    assert found["commit_fp8"] == ["bytes"]
    assert found["build_fp4_own_writer"] == "built"
    assert found["build_fp8"] == "built"


def test_control_stock_dies_in_a_copy_after_it_was_built(stock):
    found = stock["prefix_valid_commit"]
    assert found["build_fp4"] == "built"
    assert "copy_" in found["commit_fp4"]["text"] and "Float4" in found["commit_fp4"]["text"]
    assert found["commit_fp8"] == ["bytes"]


def test_input_embeddings_keep_the_model_dtype(patched):
    for dtype, handed in patched["input_embeddings"].items():
        assert handed == {"dtype": dtype, "equal": True}


def test_control_stock_hands_every_model_bf16(stock):
    found = stock["input_embeddings"]
    assert {handed["dtype"] for handed in found.values()} == {"torch.bfloat16"}
    assert found["torch.float16"]["equal"] is False
    assert found["torch.bfloat16"]["equal"] is True


MOVERS = {
    "hicache": ["--enable-hierarchical-cache"],
    "lmcache": ["--enable-lmcache"],
    "flexkv": ["--enable-flexkv"],
    "flexkv_backend": ["--radix-cache-backend flexkv"],
    "linker": ["--enable-unified-cache-external-linker"],
    "pd_prefill": ["--disaggregation-mode prefill"],
    "pd_decode": ["--disaggregation-mode decode"],
    "pd_role_switch": ["--enable-pd-role-switch"],
    "several": ["--enable-flexkv", "--disaggregation-mode decode"],
}


@pytest.mark.parametrize("kind", ["nvfp4", "fp4_mx_block16", "fp4_draft"])
def test_fp4_scale_loss_is_refused(patched, kind):
    found = patched["scale_loss"][kind]
    assert found.pop("nothing") == "resolved"
    assert set(found) == set(MOVERS)
    for name, flags in MOVERS.items():
        assert found[name]["raised"] == "ValueError", name
        assert "is moved there without its block scales" in found[name]["text"]
        assert f"cannot be used with {', '.join(flags)}: " in found[name]["text"]


def test_the_hierarchical_cache_of_packed_nvfp4_takes_the_scales_along(patched):
    found = patched["scale_loss"]["host"]
    assert found["nvfp4"] == "resolved"
    assert "cannot be used with --enable-hierarchical-cache: " in found["nvfp4_to_storage"]["text"]


def test_scale_loss_is_not_refused_for_fp8(patched):
    assert set(patched["scale_loss"]["fp8"].values()) == {"resolved"}


def test_control_stock_resolves_fp4_with_everything_that_loses_scales(stock):
    for kind, found in stock["scale_loss"].items():
        assert set(found.values()) == {"resolved"}, kind


def test_retraction_copy_carries_scales(patched):
    found = dict(patched["retraction"])
    refused = found.pop("without_scales")
    assert refused["raised"] == "ValueError"
    assert "carries no block scales for 2 slots" in refused["text"]
    for name, buffers in found.items():
        assert all(buffers.values()), (name, buffers)
    assert set(found["mha"]) == {"k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"}
    assert set(found["mla"]) == {"kv_buffer", "kv_scale_buffer"}
    assert "native_v_scale_buffer" in found["native"]
    assert set(found["mha_fp8"]) == {"k_buffer", "v_buffer"}


def test_control_stock_leaves_scales_behind(stock):
    for name in ("mha", "mha_fp4_class", "mla", "native"):
        kept = stock["retraction"][name]
        for buffer, same in kept.items():
            assert same is ("scale" not in buffer), (name, buffer)


def test_scheduler_is_not_ready_without_an_active_plugin(patched):
    found = patched["scheduler_ready"]
    assert found["passing"] == "ready" and found["asked_once"]
    assert found["failing"] == {"raised": "RuntimeError", "text": "the pool is not ours"}
    assert found["absent"]["raised"] == "ModuleNotFoundError"
    assert "sglang_fp4kv.proof" in found["absent"]["text"]
    assert found["fp8"] == "ready"


def test_control_stock_is_ready_whatever_our_plugin_did(stock):
    found = stock["scheduler_ready"]
    assert not found.pop("asked_once")
    assert set(found.values()) == {"ready"}
