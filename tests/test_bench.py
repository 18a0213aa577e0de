"""The benchmarks as far as they go without a GPU: their inputs, baselines' arguments, rows and tables."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import attention_baselines  # noqa: E402
import bench_attention  # noqa: E402
import readme_table  # noqa: E402
import run  # noqa: E402
from bench_attention import FASTEST, Shape  # noqa: E402

SMALL = (
    Shape(2, 100, 1, "decode", 6, 2, 64),
    Shape(2, 100, 4, "verify", 6, 2, 64),
    Shape(1, 50, 20, "prefill", 6, 2, 64),
)


@pytest.fixture
def on_device(device, monkeypatch):
    """Inputs on the test's device, several sets of slots of each."""
    for module in (bench_attention, attention_baselines):
        monkeypatch.setattr(module, "DEVICE", device.type)
    monkeypatch.setattr(bench_attention, "ROTATE_BYTES", 40_000)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_ours_is_checked_on_every_set_of_slots_and_its_plan_noted(shape, on_device):
    x = bench_attention.Inputs(shape)
    assert x.copies > 1
    call = bench_attention.ours(x)
    with bench_attention.noted_plans() as plans:
        out = call(0)
    assert plans or shape.kind == "prefill"  # a library may take a prefill
    ratios = bench_attention.check(x, out)
    assert max(ratios) <= 2
    with pytest.raises(AssertionError):
        bench_attention.check(x, call(1))  # other slots hold other values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_flashinfer_gets_what_it_takes(shape, dtype, on_device):
    """Arguments fit the installed signatures, lists cover every key, sides have the pool's width."""
    flashinfer = pytest.importorskip("flashinfer")
    x = bench_attention.Inputs(shape)
    tokens = shape.context + (0 if shape.kind == "decode" else shape.rows)
    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
    fakes = {name: mock.create_autospec(getattr(flashinfer, name)) for name in names}
    with mock.patch.multiple(flashinfer, **fakes):
        ways = attention_baselines.flashinfer_paged(x, dtype)
        assert set(ways) == ({"prefill", "decode"} if shape.kind == "decode" else {"prefill"})
        for way, call in ways.items():
            assert call(x.copies - 1).shape == x.q.shape
            wrapper = fakes[names[way == "decode"]].return_value
            indptr, slots = wrapper.plan.call_args.args[way == "prefill" :][:2]
            assert indptr.tolist() == [i * tokens for i in range(shape.requests + 1)]
            assert slots.dtype == torch.int32 and slots.numel() == shape.requests * tokens
            sides, scales = wrapper.run.call_args.args[1], wrapper.run.call_args.kwargs
            width = shape.head_dim // (2 if dtype == torch.uint8 else 1)
            for side in sides:
                assert side.dtype == dtype and side.shape[1:] == (1, shape.kv_heads, width)
                assert slots.max() < side.shape[0]
            assert ("kv_cache_sf" in scales) == (dtype == torch.uint8)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_sglang_computes_the_same(shape, on_device, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        sms = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: sms)
    x = bench_attention.Inputs(shape)
    (call,) = attention_baselines.sglang_triton(x, torch.bfloat16).values()
    bench_attention.check(x, call(0))


def test_goals():
    times = {"flashinfer_bf16": {"p50_us": 30.0}, "flashinfer_fp8": {"p50_us": 29.0}}
    times |= {"flashinfer_nvfp4": {"error": "no"}, "sglang_triton_bf16": {"p50_us": 1.0}}
    fastest = Shape(1, 8192, 1, "decode", goal_us=FASTEST)
    assert bench_attention.judged(fastest, 29.0, times) == {"goal_us": 29.0, "met": True}
    assert bench_attention.judged(fastest, 29.5, times)["met"] is False
    assert bench_attention.judged(fastest, 29.0, {}) == {"goal_us": None, "met": None}
    two = Shape(8, 65536, 1, "decode", goal_us=300, further_goal_us=250)
    assert bench_attention.judged(two, 260, {}) == {"goal_us": 300, "met": True, "further_met": False}
    assert bench_attention.judged(Shape(1, 1, 1, "decode"), 5, times) == {"goal_us": None, "met": None}


def test_a_baseline_that_cannot_run_is_a_result(monkeypatch):
    def broken(_):
        raise RuntimeError("no kernel")

    monkeypatch.setitem(bench_attention.BASELINES, "broken", broken)
    assert bench_attention.run_baseline(None, "broken", None, 0.1) == {"error": "RuntimeError: no kernel"}


def test_every_row_is_compiled_and_each_library_once():
    jobs = run.compile_jobs(run.SHAPES, list(run.BASELINES))
    asked = [(name, shape.rpartition("/")[2]) for shape, names in jobs for name in names]
    for name in run.FLASHINFER:
        assert asked.count((name, "256")) == asked.count((name, "128")) == 1
    assert {shape for shape, names in jobs if "sglang_triton_bf16" in names} == {str(s) for s in run.SHAPES}
    assert run.compile_jobs(SMALL, []) == [(str(shape), []) for shape in SMALL]


def test_a_shape_is_named_by_itself_alone():
    for shape in run.SHAPES:
        assert [s for s in run.SHAPES if str(shape) in str(s)] == [shape]


@pytest.mark.parametrize("arguments, message", [
    (["--only", "9x9"], "no shape has '9x9' in its name"),
    (["--baselines", "bf16,none"], "unknown: bf16, none"),
    (["--ops", "attention,prefill"], "unknown: prefill"),
])  # fmt: skip
def test_bad_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        run.parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_where_a_run_is_filed():
    assert run.result_file("NVIDIA H200").name == "h200_bench.json"
    assert run.result_file("NVIDIA RTX PRO 6000").name == "rtx_bench.json"


def test_a_failed_row_is_told_and_the_others_are_kept(monkeypatch, tmp_path, capsys):
    def one(shape, *_):
        if shape.requests == 8:
            raise AssertionError("wrong result")
        return {"op": "attention", "shape": str(shape)}

    monkeypatch.setattr(run, "run_shape", one)
    args = run.parse(["--only", "x65536 q=1 ", "--out", str(tmp_path / "out.json")])
    assert run.measure(args, {"copy_bytes_per_second": 1.0, "rows": []}) is False
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row.get("error") for row in rows] == [None, "AssertionError: wrong result"]


def entry(us):
    return {"p20_us": us - 1, "p50_us": us, "p80_us": us + 1}


ATTENTION_ROW = {
    "op": "attention", "shape": "decode 8x65536 q=1 24/4/256", "requests": 8, "context": 65536, "rows": 1,
    "kind": "decode", "heads": 24, "kv_heads": 4, "head_dim": 256, "goal_us": 300, "further_goal_us": 250,
    "met": True, "further_met": False, "ours": entry(281.4),
    "baselines": {"flashinfer_bf16": entry(513.2), "flashinfer_fp8": {"error": "x"}},
}  # fmt: skip
BENCH = {
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "sglang": "0.5.23", "flashinfer-python": "0.7.2"},
    "gpu": "NVIDIA H200",
    "date": "2026-01-02",
    "rows": [
        ATTENTION_ROW,
        ATTENTION_ROW | {"kind": "prefill", "requests": 1, "rows": 8192, "goal_us": 52_000,
                         "further_goal_us": None, "met": False, "ours": entry(60_000.0),
                         "run": {"commit": "abc1234"}},
        {"op": "attention", "shape": "verify 1x1", "error": "AssertionError: wrong"},
        {"op": "store", "shape": "4x256", "tokens": 1, "ratio": 1.25, "met": True, "goal_ratio": 1.3,
         "ours": entry(2.5), "baselines": {"sglang_bf16": entry(2.0)}, "run": {"commit": "abc1234"}},
        {"op": "store", "shape": "8x64", "tokens": 1, "ratio": None, "met": None, "goal_ratio": 1.3,
         "ours": entry(2.5), "baselines": {"sglang_bf16": {"error": "x"}}},
        {"op": "store", "shape": "8x64", "tokens": 2, "ratio": None, "met": None, "goal_ratio": 1.3,
         "baselines": {}, "error": "RuntimeError: bad"},
    ],
}  # fmt: skip
THROUGHPUT = BENCH | {
    "model": "smollm2", "prompt_tokens": 7900, "new_tokens": 200, "forced_accept_length": 5,
    "nvfp4_slower_than_fp8": [],
    "rows": [
        {"kv": kv, "backend": "triton", "drafted": drafted, "streams": 4, "tokens_per_second": 1234.5}
        for drafted in (False, True)
        for kv in ("fp8_e4m3", "nvfp4")
    ],
}  # fmt: skip
FAULT_MATRIX = BENCH | {
    "rows": [
        {"fault": "none", "checks": {"recall": {"status": "pass", "summary": "1 of 1 right"}, "soak": {"status": "cut"}}},
        {"fault": "loop", "checks": {"recall": {"status": "fail"}, "soak": {"status": "not run"}}},
    ]
}  # fmt: skip
CHECKS = BENCH | {
    "runs": {
        "nvfp4-drafted": {
            "checks": {
                "recall": {"status": "pass", "summary": "", "numbers": {"depths": [{"prompt_tokens": 3902}]}},
                "drafted-equality": {"status": "pass", "summary": "2 of 2 equal", "numbers": {}},
                "agreement": {"status": "fail", "summary": "",
                              "numbers": {"same_text": 60, "pairs": 64, "p_value": 0.0312}},
                "soak": {"status": "not run", "summary": "", "numbers": {}},
                "accept-length": {"status": "pass", "summary": "",
                                  "numbers": {"workloads": {"chat": 8.0, "code": 5.82}}},
            }
        },
        "bf16-undrafted": {"checks": {"drafted-equality": {"status": "skipped", "summary": "left out"}}},
    }
}  # fmt: skip
MARKED = "a\n" + "".join(f"<!-- {n}:begin -->\nold\n<!-- {n}:end -->\nb\n" for n in readme_table.FILES)


def fill(folder, **results):
    for name, content in results.items():
        (folder / readme_table.FILES[name].replace("*", "small")).write_text(json.dumps(content))
    readme = folder / "README.md"
    readme.write_text(MARKED)
    options = ["--readme", str(readme), "--results", str(folder)]
    assert readme_table.main([*options, "--check"]) == 1
    assert readme_table.main(options) == 0
    assert readme_table.main([*options, "--check"]) == 0
    return readme.read_text()


def test_tables_of_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_table, "RESULTS", readme_table.ROOT / "tests/bench/results")
    text = fill(tmp_path, bench=BENCH, throughput=THROUGHPUT, faults=FAULT_MATRIX, checks=CHECKS)
    assert (
        "| 8 x 65536, 1; 24/4/256 | 513 | error | - | - | - | **281** | 300, then 250 | met, missed |" in text
    )
    assert "| 1 x 65536, 8192; 24/4/256 | 0.51 | error | - | - | - | **60.0** | 52.0 | missed |" in text
    assert "| 1 | **2.50**, 2.00, 1.25 | **2.50**, error, - |" in text
    assert "| 2 | - | error |" in text
    assert "At most 1.3 times SGLang's store in 1 of 3 rows." in text
    assert "Of an earlier run (commit abc1234): 2 rows (prefill, writer)." in text
    assert "Failed: attention verify 1x1: AssertionError: wrong" in text
    assert "Failed: store 8x64: RuntimeError: bad" in text
    assert "NVIDIA H200, torch 2.11.0, Triton 3.6.0" in text
    assert "| 4 streams, drafter | 1234 | 1234 |" in text
    assert "NVFP4 is not slower than FP8 in any row." in text
    assert "| fault | recall | soak |\n| --- | --- | --- |\n| none |  | cut |\n| loop | **fails** | not run |" in text
    assert (
        "| small, NVFP4, drafter | 3 of 5 | agreement (fail), soak (not run) | 3,902 | 2 of 2 equal | 60 of 64, p 0.031"
        " | 5.8 to 8.0 |\n| small, BF16 | 0 of 0 | - | - | - | - | - |"
    ) in text
    assert text.startswith("a\n") and text.endswith("b\n") and "old" not in text


def test_without_a_result_the_block_says_so(tmp_path):
    text = fill(tmp_path)
    assert text.count("-->\nNot measured yet.\n<!--") == len(readme_table.FILES)


@pytest.mark.parametrize("name", readme_table.FILES)
def test_lost_markers_are_an_error(tmp_path, name, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(MARKED.replace(f"{name}:end", "gone"))
    assert readme_table.main(["--readme", str(readme)]) == 1
    assert f"the {name} block's markers must be in the README once each" in capsys.readouterr().err


def test_the_command_without_a_gpu_measures_nothing(tmp_path):
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "tests/bench/run.py", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 1 and not out.exists()
