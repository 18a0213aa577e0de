"""The README's compatibility tables: they are the judge's, and their `works` are on file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import compat_features
from launcher.compat import BACKENDS, DRAFTERS, KV_DTYPES, MEASURED_ON, block, main, verdict
from launcher.readme_block import README
from launcher.rules import RULES

ROOT = Path(__file__).parent.parent
SM = {"NVIDIA H200": "sm_90"}


def test_the_readmes_table_is_not_stale():
    done = subprocess.run(
        [sys.executable, "-m", "launcher.compat", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_stale_table_is_found_and_rewritten(tmp_path, capsys):
    copy = tmp_path / "README.md"
    text = README.read_text()
    stale = text.replace(block(), "| nvfp4 | all works |")
    assert stale != text
    copy.write_text(stale)
    assert main(["--check", "--readme", str(copy)]) == 1
    assert capsys.readouterr().err == "compat: the README's tables are stale: run python -m launcher.compat\n"
    assert copy.read_text() == stale
    assert main(["--readme", str(copy)]) == 0
    assert copy.read_text() == text


@pytest.mark.parametrize("times", [0, 2])
def test_markers_that_are_not_there_once_are_named(tmp_path, capsys, times):
    copy = tmp_path / "README.md"
    copy.write_text("a\n<!-- compat:begin -->\n\n<!-- compat:end -->\n" * times)
    assert main(["--readme", str(copy)]) == 1
    assert "compat: the compat block's markers must be in the README once each" in capsys.readouterr().err


def _rows(kv, drafter):
    """Names of the reports, in a result file, of the servers that show ``kv`` beside ``drafter``."""
    if drafter in (None, "DFLASH"):
        return [f"{kv} {drafter is not None} graph"]
    name = "nextn" if drafter == "EAGLE" else drafter.lower()  # SGLang turns NEXTN into EAGLE
    return [f"{name}-{shape}, {mode}" for shape in ("chain", "tree") for mode in ("graph", "eager")]


def test_what_works_has_a_run_on_file_that_did():
    """Of the KV dtype, drafted or not, on Triton and on the GPU that the table is about."""
    works = 0
    for kv in KV_DTYPES:
        for drafter in DRAFTERS:
            for backend in BACKENDS:
                found = verdict(kv, drafter, backend, MEASURED_ON)
                assert bool(found.results) == (found.status == "works")
                for file in found.results:
                    works += 1
                    run = json.loads((ROOT / file).read_text())
                    assert (SM[run["gpu"]], run["failed"], backend) == (MEASURED_ON, [], "triton")
                    reports = [run["reports"][name] for name in _rows(kv, drafter)]
                    assert all(r["target"]["backend"].endswith(".TritonAttnBackend") for r in reports)
                    assert all((r["draft"] is not None) == (drafter not in (None, "NGRAM")) for r in reports)
    assert works


def test_every_refusal_in_the_table_is_a_launch_rule():
    ids = {word.strip(",") for word in block().split() if word.startswith("FP4-")}
    assert ids and ids <= set(RULES)


@pytest.mark.parametrize("row", compat_features.ROWS, ids=lambda row: row.name)
def test_a_feature_works_where_a_run_is_on_file(row):
    on_cpu, *on_gpus = (compat_features.verdict(row, place) for place in compat_features.PLACES)
    assert all(name.startswith("tests/e2e/") for name in on_cpu.results)
    for found in (on_cpu, *on_gpus):
        assert bool(found.results) == (found.status == "works") and all((ROOT / name).is_file() for name in found.results)
    for found in on_gpus:
        runs = [json.loads((ROOT / name).read_text()) for name in found.results]
        for run in runs:
            wrong = [run[key] for key in ("failed", "broken", "unfinished") if key in run]
            assert run["gpu"] == "NVIDIA H200" and wrong and not any(wrong)
            reports = (run.get("reports") or {k: entry.get("report") for k, entry in run["servers"].items()}).values()
            assert any(report and report["target"]["dtype"] == "float4_e2m1fn_x2" for report in reports)


def test_each_feature_is_shown_by_its_own_files():
    shown = {
        row.name: {Path(name).name for place in compat_features.PLACES for name in compat_features.verdict(row, place).results}
        for row in compat_features.ROWS
    }
    assert {name: files for name, files in shown.items() if files} == {
        "full attention": {"test_nvfp4_serving.py", "h200_pair.json", "h200_smollm2.json"},
        "full attention, a DFlash2 draft with windows": {"test_draft_serving.py", "h200_dflash2.json"},
        "full attention, a window by `--speculative-draft-window-size`": {"test_draft_serving.py"},
        "gated-delta hybrid (Qwen3.5)": {"test_hybrid_serving.py", "h200_hybrid.json"},
        "gated-delta hybrid, DFLASH": {"test_hybrid_serving.py", "h200_hybrid.json"},
        "gated-delta hybrid, a DFlash2 draft": {"test_hybrid_serving.py"},
        "gated-delta hybrid with a vision tower (Qwen3_5ForConditionalGeneration), text, DFLASH": {"test_hybrid_serving.py"},
        "gated-delta hybrid with experts (Qwen3.5-MoE), DFLASH": {"test_hybrid_moe.py", "h200_hybrid_moe.json"},
        "windowed layers in one pool (Gemma 3)": {"test_windows.py", "h200_windows.json"},
        "NVFP4 weights, full attention, DFLASH": {"test_nvfp4_weights.py"},
        "NVFP4 weights, gated-delta hybrid, DFLASH": {"h200_weights.json"},
        "hierarchical cache with write_back and pages of 64, DFLASH": {"test_hierarchical_cache.py", "h200_host_cache.json"},
        "two ranks, DFLASH": {"test_nvfp4_parallel.py", "h200x2_pair.json"},
        "two ranks, gated-delta hybrid, a DFlash2 draft": {"test_two_sparks.py"},
    }


def test_no_feature_is_said_to_work_on_blackwell():
    assert {compat_features.verdict(row, "sm_121").status for row in compat_features.ROWS} == {"untested", "fails"}
