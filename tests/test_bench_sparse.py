"""bench_sparse as far as it goes without a GPU: its inputs, both of its readers, its verdict."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import bench_attention  # noqa: E402
import bench_sparse  # noqa: E402
import readme_table  # noqa: E402
import run  # noqa: E402
from bench_attention import Shape  # noqa: E402

SMALL = Shape(2, 100, 1, "decode", 6, 2, 64)


@pytest.mark.interpreter
def test_what_is_timed_is_checked(device, monkeypatch):
    for module in (bench_attention, bench_sparse):
        monkeypatch.setattr(module, "DEVICE", device.type)
        monkeypatch.setattr(module, "ROTATE_BYTES", 40_000)
    x = bench_sparse.SparseInputs(SMALL, entries=40)
    assert x.turns > 1 and x.selected.shape == (x.turns, 2, 2, 40)
    assert x.selected_bytes * 100 == x.kv_bytes * 40
    call, over_lists = bench_sparse.ours(x), bench_sparse.over_lists(x)
    for turn in (0, x.turns - 1):
        out = call(turn).clone()
        assert max(bench_sparse.check(x, out, turn)) <= 2
        assert torch.equal(over_lists(turn), out)
        with pytest.raises(AssertionError):
            bench_sparse.check(x, out, turn ^ 1)


@pytest.mark.parametrize("ours_us, met", [(10.0, True), (20.1, False)])
def test_the_goal_is_half_of_the_dense_bandwidth(ours_us, met):
    with_bandwidth = bench_sparse.with_bandwidth
    row = {
        "ours": with_bandwidth({"p50_us": ours_us}, 100),
        "dense": with_bandwidth({"p50_us": 100.0}, 1000),
        "dense_selected": with_bandwidth({"p50_us": 5.0}, 100),
    }
    assert row["dense"]["bytes_per_second"] == 10**7
    verdict = bench_sparse.judged(row)
    assert verdict["met"] is met
    assert verdict["share_of_dense"] == pytest.approx(10 / ours_us, abs=1e-3)
    assert verdict["share_of_dense_selected"] == pytest.approx(5 / ours_us, abs=1e-3)


def test_a_failed_row_is_told(monkeypatch):
    def one(shape, *_):
        if shape.requests == 8:
            raise AssertionError("wrong result")
        return {"shape": str(shape)}

    monkeypatch.setattr(bench_sparse, "run_shape", one)
    rows = list(bench_sparse.rows(0.1))
    assert len(rows) == len(bench_sparse.SHAPES)
    assert [row["error"] for row in rows if "error" in row] == ["AssertionError: wrong result"]


def test_the_readme_table():
    speed = bench_sparse.with_bandwidth
    row = {
        "requests": 8,
        "ours": speed({"p50_us": 12.5}, 18_874_368),
        "dense": speed({"p50_us": 227.0}, 603_979_776),
        "dense_selected": speed({"p50_us": 11.0}, 18_874_368),
    }
    row |= bench_sparse.judged(row)
    result = {
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "sglang": "0.5.23", "flashinfer-python": "0.7.2"},
        "gpu": "NVIDIA H200",
        "date": "2026-01-02",
        "rows": [row, {"shape": "2048 of x", "error": "AssertionError: wrong"}],
    }
    text = "\n".join(readme_table.sparse_block(result))
    assert "| 8 | **12.5 (1.51)** | 227 (2.66) | 11.0 (1.72) | 0.57 | 0.88 | met |" in text
    assert "Failed: 2048 of x: AssertionError: wrong" in text and "h200_sparse.json" in text


def test_ops_of_a_run():
    assert run.parse([]).ops == ["attention", "store", "sparse"]
    assert run.parse(["--ops", "sparse"]).ops == ["sparse"]
    assert run.parse(["--only", "verify 1x65536"]).ops == ["attention"]


def test_without_a_gpu_nothing_is_measured(tmp_path):
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "tests/bench/bench_sparse.py", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 1 and not out.exists()
    assert done.stderr.strip() == "bench_sparse: needs an NVIDIA GPU that CUDA can use"
