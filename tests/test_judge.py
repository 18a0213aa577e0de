"""`fp4kv judge`: the whole grid with faked probes, exit codes, text, JSON, and what it never imports."""

import itertools
import json
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import cli, judge, packed_weights, results
from launcher import rules_together as together
from launcher.flags import UsageError
from launcher.probe import Failed, Machine
from launcher.refusal import COLUMNS, TEXTS, refusal
from launches import (
    DFLASH, DRAFT, H200, HYBRID, MX, NO_GPU, NVFP4, TARGET, WINDOWED, argv, cached, folder, launch, machine,
    patch_state, scale, scales,
)  # fmt: skip

ROOT = Path(__file__).parent.parent
PAIR = ROOT / "models" / "pair"
FP8 = ["--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "flashinfer"]
DRAFT_FP8 = ["--speculative-draft-kv-cache-dtype", "fp8_e4m3"]
GIB = 1 << 30

BACKENDS = (None, "triton", "flashinfer", "trtllm_mha", "fa3")
DRAFTERS = (None, "DFLASH", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
KV_DTYPES = ("auto", "bf16", "fp8_e4m3", "nvfp4", "fp4_mx_block16")
DRAFT_DTYPES = (None, "fp8_e4m3", "bf16", "nvfp4")
GPUS = (NO_GPU, "sm_90", "sm_100", "sm_121")
PATCHES = ("applied", "pristine", "foreign")


def decide(tmp_path, flags, *, on=None, allow=(), profile=None, **folders):
    words = argv(tmp_path, flags, **folders)
    return judge.judge(words, machine=on or machine(), allow=allow, profile=profile)


def ids(verdict):
    return [r.id for r in verdict.refusals]


def test_the_whole_grid_ends_in_a_verdict(tmp_path):
    outcomes, fired = Counter(), set()
    grid = itertools.product(DRAFTERS, BACKENDS, KV_DTYPES, DRAFT_DTYPES)
    for drafter, backend, kv, draft in grid:
        flags = ["--kv-cache-dtype", kv]
        flags += ["--attention-backend", backend] if backend else []
        flags += ["--speculative-algorithm", drafter] if drafter else []
        flags += ["--speculative-draft-kv-cache-dtype", draft] if draft and drafter else []
        asked = launch(tmp_path, flags)
        for gpu, patch in itertools.product(GPUS, PATCHES):
            verdict = judge.decide(replace(asked, machine=machine(gpu, patch)))
            outcomes[verdict.accepted, verdict.status] += 1
            fired.update(ids(verdict))
            assert verdict.accepted is (not verdict.refusals)
            assert bool(verdict.results) is (verdict.status == "works")
            assert ids(verdict) == sorted(ids(verdict))
            plain_draft = draft != "nvfp4" or drafter is None
            if kv in ("auto", "bf16", "fp8_e4m3") and plain_draft:
                assert verdict.accepted
            if kv == "nvfp4" and verdict.accepted:
                assert (backend, patch) == ("triton", "applied") and gpu in (NO_GPU, "sm_90")
                assert drafter is None or draft in (None, "fp8_e4m3") or (drafter, draft) == ("EAGLE3", "bf16")
                assert verdict.status == "works"
            if kv == "fp4_mx_block16":
                assert not verdict.accepted
    assert sum(outcomes.values()) == 7 * 5 * 5 * 4 * 4 * 3
    assert set(outcomes) == {(True, "works"), (True, "untested"), (False, "fails"), (False, "untested")}
    assert fired >= {f"FP4-{n:03}" for n in (3, 10, 11, 16, 17, 18, 20, 26, 28, 29, 33)}


TRIES = {
    "213": (FP8 + DFLASH, {}, "untested", []),
    "214": (["--kv-cache-dtype", "nvfp4", "--attention-backend", "flashinfer", *DFLASH], {"on": machine("sm_121")}, "fails", ["FP4-017"]),
    "215": (["--kv-cache-dtype", "nvfp4", "--attention-backend", "trtllm_mha", *DFLASH], {"on": machine("sm_121")}, "fails", ["FP4-018"]),
    "217": ([*MX, *DFLASH], {}, "fails", ["FP4-028", "FP4-029"]),
    "218": (NVFP4, {}, "works", []),
    "218, no GPU here": (NVFP4, {"on": machine(NO_GPU)}, "works", []),
    "218, on a GB10": (NVFP4, {"on": machine("sm_121")}, "untested", ["FP4-026"]),
    "218, on a GB10, allowed": (NVFP4, {"on": machine("sm_121"), "allow": ["FP4-026"]}, "untested", []),
    "219": ([*NVFP4, *DFLASH, *DRAFT_FP8], {}, "works", []),
    "219, draft dtype left out": ([*NVFP4, *DFLASH], {}, "works", []),
    "219, unpatched": ([*NVFP4, *DFLASH, *DRAFT_FP8], {"on": machine(patch="pristine")}, "fails", ["FP4-016"]),
    "219, other release": ([*NVFP4, *DFLASH, *DRAFT_FP8], {"on": machine(release="0.5.22")}, "fails", ["FP4-002"]),
    "220": (FP8 + DFLASH, {"on": machine("sm_121")}, "untested", []),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIES)
def test_the_reports_tries_end_as_stated(tmp_path, name):
    flags, options, status, refused = TRIES[name]
    verdict = decide(tmp_path, flags, **options)
    assert (verdict.status, ids(verdict)) == (status, refused)


def test_a_draft_dtype_left_out_is_resolved_and_said_so(tmp_path):
    shown = {v.what: v for v in decide(tmp_path, [*NVFP4, *DFLASH]).values}
    value = shown["drafter KV dtype"]
    assert (value.asked, value.effective, value.why) == ("(left out)", "fp8_e4m3", "fp4kv: next to NVFP4")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("model-path", "d"), ("kv-cache-dtype", "bf16"), ("attention-backend", "fa3")],
)
def test_a_drafter_without_a_model_takes_no_flags_of_one(tmp_path, flag, value):
    flags = [*NVFP4, "--speculative-algorithm", "NGRAM"]
    assert "drafter KV dtype" not in [v.what for v in decide(tmp_path, flags).values]
    value = str(tmp_path / value) if flag == "model-path" else value
    with pytest.raises(UsageError, match=f"--speculative-draft-{flag} {value}: NGRAM drafts without a model"):
        decide(tmp_path, [*flags, f"--speculative-draft-{flag}", value])


def test_what_would_be_replaced_is_shown_beside_what_was_asked(tmp_path):
    flags = [*NVFP4, *DFLASH, "--speculative-draft-attention-backend", "flex_attention"]
    shown = {v.what: v for v in decide(tmp_path, flags).values}
    assert vars(shown["drafter backend"]) == {
        "what": "drafter backend", "asked": "flex_attention", "effective": "flashinfer",
        "why": "replaced by SGLang",
    }  # fmt: skip
    shown = {v.what: v for v in decide(tmp_path, [*NVFP4, *DFLASH], draft={"block_size": None}).values}
    assert (shown["draft tokens"].effective, shown["draft tokens"].why) == ("16", "SGLang's fallback")


def windowed(layers=1, window=2048, **dflash):
    return {"layer_types": ["sliding_attention"] * layers, "sliding_window": window, "dflash_config": dflash}


def test_windows_and_slow_writes_of_a_draft_are_shown(tmp_path):
    flags = [*NVFP4, *DFLASH]
    shown = {v.what: v for v in decide(tmp_path, flags).values}
    assert not {"draft window", "draft sink", "drafter writes"} & set(shown)
    shown = {v.what: v for v in decide(tmp_path, flags, draft=windowed()).values}
    value = shown["draft window"]
    assert (value.asked, value.effective, value.why) == ("(left out)", "2048", "layers of the draft")
    flags += ["--speculative-draft-window-size", "512", "--speculative-draft-sink-size", "4"]
    draft = windowed() | {"attention_bias": True}
    shown = {v.what: v for v in decide(tmp_path, flags, draft=draft).values}
    value = shown["draft window"]
    assert (value.asked, value.effective, value.why) == ("512", "512", "every token keeps its slot in the pool")
    assert (shown["draft sink"].effective, shown["draft sink"].why) == ("0", "DFLASH has none")
    assert (shown["drafter writes"].effective, shown["drafter writes"].why) == (
        "layer by layer, which is slower", "attention_bias",
    )  # fmt: skip
    shown = {v.what: v for v in decide(tmp_path, [*flags, "--device", "cpu"]).values}
    assert shown["drafter writes"].why == "a CPU has no fused kernel"


def test_what_a_cpu_alone_has_shown_names_its_test_there(tmp_path):
    """On a GPU it is untested, allowed or not."""
    part, flags, folders = together.DRAFT_WINDOW, [*DFLASH, "--speculative-draft-window-size", "512"], {}
    assert (ROOT / together.ON_A_CPU[part]).is_file()
    shown = decide(tmp_path, [*NVFP4, *flags, "--device", "cpu"], **folders)
    assert (shown.status, shown.results) == ("works", (together.ON_A_CPU[part],))
    for allow in ((), ("FP4-103",)):
        found = decide(tmp_path, [*NVFP4, *flags], allow=allow, **folders)
        assert (found.status, found.results, found.accepted) == ("untested", (), bool(allow))
        assert [r.id for r in found.refusals or found.allowed] == ["FP4-103"]


def test_tokens_beside_recurrent_states_are_a_bound(tmp_path):
    """The states come out of the same memory."""
    flags = [*NVFP4, "--mem-fraction-static", "0.5"]
    for target, bound in (({}, False), (HYBRID, True)):
        tensors = {"w": ("BF16", [1], b"12")}
        shown = {v.what: v.effective for v in decide(tmp_path, flags, target=target, tensors=tensors).values}
        assert shown["tokens"].startswith("at most ") == bound


ON_GPUS = [
    (together.RECURRENT, [*DFLASH], {"target": HYBRID}),
    (together.RECURRENT, [], {"target": HYBRID}),
    (together.EXPERTS, [*DFLASH], {"target": {**HYBRID, "model_type": "qwen3_5_moe_text"}}),
    (together.RANKS, ["--tp-size", "2"], {}),
    (together.DRAFT, [*DFLASH], {"draft": windowed()}),
    (together.DRAFT, [*DFLASH], {"draft": {"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 16}}}),
    (together.DRAFTER, ["--speculative-algorithm", "NGRAM"], {}),
    (together.WINDOWS, [], {"target": WINDOWED}),
    (together.HOST_CACHE, [
        *DFLASH, "--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--page-size", "64",
        "--hicache-write-policy", "write_back",
    ], {}),
]


@pytest.mark.parametrize(("part", "flags", "folders"), ON_GPUS)
def test_what_a_gpu_has_shown_names_its_result_there(tmp_path, part, flags, folders):
    for device, shown in (([], together.ON_A_GPU), (["--device", "cpu"], together.ON_A_CPU)):
        found = decide(tmp_path, [*NVFP4, *flags, *device], **folders)
        assert (found.status, found.results) == ("works", (shown[part],)) and (ROOT / shown[part]).is_file()


def test_no_test_of_a_cpu_is_named_on_a_gpu():
    assert all(name.startswith(results.FOLDER) for name in together.ON_A_GPU.values())
    assert packed_weights.ON_A_GPU.startswith(results.FOLDER)


BF16 = ["--kv-cache-dtype", "bf16", "--attention-backend", "triton"]
SCALED = {"model.layers.0.mlp.up_proj.weight_scale": ("F32", [1], b"1234")}
PACKED = {"model.layers.0.mlp.up_proj.weight_scale_2": ("F32", [1], b"1234")}
AWQ = {"model.layers.0.mlp.up_proj.pre_quant_scale": ("F32", [1], b"1234")}


@pytest.mark.parametrize("kv", [NVFP4, BF16])
@pytest.mark.parametrize(
    ("flags", "folders"),
    [
        ([], {"target": {"quantization_config": {"quant_method": "fp8"}}}),
        ([], {"target": {"quantization_config": {}}}),
        ([], {"target": {"compression_config": {"format": "int-quantized"}}}),
        ([], {"target": {"text_config": TARGET | {"quantization_config": {"quant_method": "awq"}}}}),
        ([], {"tensors": SCALED}),
        (["--quantization", "fp8"], {}),
        (DFLASH, {"draft_tensors": SCALED}),
        ([*DFLASH, "--speculative-draft-model-quantization", "fp8"], {}),
    ],
)
def test_quantized_weights_have_no_result(tmp_path, kv, flags, folders):
    """They are accepted all the same."""
    for device in ([], ["--device", "cpu"]):
        found = decide(tmp_path, [*kv, *flags, *device], **folders)
        assert (found.status, found.results, found.accepted) == ("untested", (), True)


@pytest.mark.parametrize("kv", [NVFP4, BF16])
def test_weights_that_are_said_to_be_plain_keep_their_results(tmp_path, kv):
    assert decide(tmp_path, [*kv, "--quantization", "unquant"], tensors={"w": ("BF16", [1], b"12")}).status == "works"
    found = decide(tmp_path, [*kv, "--quantization", "unquant"], tensors=SCALED)
    assert (found.status, found.accepted) == ("untested", True)


@pytest.mark.parametrize(
    ("flags", "folders", "shown"),
    [
        ([], {}, True),
        (DFLASH, {}, True),
        ([*DFLASH, "--speculative-draft-model-quantization", "unquant"], {}, True),
        (["--quantization", "modelopt_fp4"], {"target": {"quantization_config": {"quant_method": "modelopt"}}}, True),
        (["--mamba-ssm-dtype", "bfloat16"], {"target": HYBRID}, True),
        ([], {"target": HYBRID | {"mamba_ssm_dtype": "bfloat16"}}, True),
        ([], {"target": HYBRID}, False),
        (DFLASH, {"target": HYBRID}, False),
        ([], {"target": {**HYBRID, "model_type": "qwen3_5_moe_text"}}, False),
        ([], {"target": {"num_experts": 8}}, False),
        (["--tp-size", "2"], {}, False),
        (["--speculative-algorithm", "NGRAM"], {}, False),
        (["--quantization", "fp8"], {}, False),
        (DFLASH, {"draft_tensors": PACKED}, False),
        ([*DFLASH, "--speculative-draft-model-quantization", "modelopt_fp4"], {}, False),
    ],
)
def test_nvfp4_weights_on_a_cpu_name_their_test_where_it_ran(tmp_path, flags, folders, shown):
    found = decide(tmp_path, [*NVFP4, "--device", "cpu", *flags], tensors=PACKED, **folders)
    assert found.accepted and found.results == ((packed_weights.ON_A_CPU,) if shown else ())
    assert found.status == ("works" if shown else "untested")
    if "linear_num_key_heads" not in folders.get("target", {}):
        on_gpu = decide(tmp_path, [*NVFP4, *flags], tensors=PACKED, allow=["FP4-113"], **folders)
        assert (on_gpu.results, on_gpu.status, [r.id for r in on_gpu.allowed]) == ((), "untested", ["FP4-113"])


@pytest.mark.parametrize(
    ("flags", "folders", "shown"),
    [
        ([], {}, True),
        (DFLASH, {}, True),
        (["--fp4-gemm-backend", "marlin"], {}, True),
        ([*DFLASH, "--quantization", "modelopt_fp4"], {}, True),
        ([], {"tensors": PACKED | {"model.layers.1.mlp.up_proj.weight_scale": ("F32", [1], b"1234")}}, False),
        ([], {"tensors": PACKED | {"lm_head.weight_scale": ("F32", [1], b"1234")}}, False),
        ([], {"target": HYBRID | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}}, True),
        ([], {"target": HYBRID | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}}, False),
        ([], {"target": HYBRID | {"quantization_config": {"quant_method": "compressed-tensors"}}}, False),
        (["--mamba-ssm-dtype", "bfloat16"], {}, False),
        (["--dtype", "float16"], {}, False),
        ([], {"target": HYBRID | {"dtype": "float16"}}, False),
        ([], {"target": HYBRID | {"mamba_ssm_dtype": "bfloat16"}}, False),
        (DFLASH, {"draft_tensors": PACKED}, False),
        (DFLASH, {"draft": windowed()}, False),
        (["--tp-size", "2"], {}, False),
        ([], {"on": machine("sm_121")}, False),
        (["--fp4-gemm-backend", "flashinfer_cutlass"], {"on": machine(NO_GPU)}, False),
    ],
)
def test_nvfp4_weights_of_a_hybrid_name_their_result_on_a_gpu(tmp_path, flags, folders, shown):
    found = decide(tmp_path, [*NVFP4, *flags], **{"tensors": PACKED, "target": HYBRID, **folders})
    assert found.results == ((packed_weights.ON_A_GPU,) if shown else ())
    assert ("FP4-113" in ids(found)) is not shown and found.accepted is shown


def test_nvfp4_weights_for_a_scaled_input_name_no_test(tmp_path):
    found = decide(tmp_path, [*NVFP4, "--device", "cpu"], tensors=PACKED | AWQ)
    assert (ids(found), found.results) == (["FP4-111"], ())


@pytest.mark.parametrize(
    ("flags", "files"),
    [
        ([], ("h200_pair.json", "h200_smollm2.json")),
        (["--tp-size", "2"], ("h200x2_pair.json",)),
        ([*DFLASH, "--tp-size", "2"], ("h200x2_pair.json",)),
        (["--tp-size", "2", "--nnodes", "2"], ()),
        (["--tp-size", "2", "--device", "cpu"], ()),
        (["--tp-size", "2", "--dp-size", "2"], ()),
        (["--tp-size", "4"], ()),
        (["--pp-size", "2"], ()),
        (["--dp-size", "2"], ()),
        (["--enable-hierarchical-cache"], ()),
        (["--speculative-algorithm", "NGRAM", "--tp-size", "2"], ()),
    ],
)
def test_bf16_kv_names_what_ran_on_as_many_gpus(tmp_path, flags, files):
    found = decide(tmp_path, [*BF16, *flags])
    assert found.accepted and found.results == tuple(f"{results.FOLDER}/{name}" for name in files)
    assert found.status == ("works" if files else "untested")
    fp8 = decide(tmp_path, [*FP8, "--attention-backend", "triton", *flags])
    assert fp8.accepted and (fp8.status, fp8.results) == ("untested", ())


@pytest.mark.parametrize("target", [HYBRID, WINDOWED, {**HYBRID, "model_type": "qwen3_next"}])
def test_bf16_kv_of_another_kind_of_target_names_no_result(tmp_path, target):
    found = decide(tmp_path, BF16, target=target)
    assert (found.accepted, found.status, found.results) == (True, "untested", ())


def test_a_config_that_cannot_be_read_is_sglangs_business_with_plain_kv(tmp_path):
    words = argv(tmp_path, BF16)
    (tmp_path / "t" / "config.json").write_text("{")
    assert judge.judge(words, machine=machine()).accepted
    with pytest.raises(UsageError, match="config.json is not JSON"):
        judge.judge([*words, *NVFP4], machine=machine())


def test_a_class_that_never_ran_stays_untested_when_allowed(tmp_path):
    target = {**HYBRID, "model_type": "qwen3_next"}
    for device in ([], ["--device", "cpu"]):
        found = decide(tmp_path, [*NVFP4, *device], target=target, allow=["FP4-115"])
        assert (found.status, found.results, [r.id for r in found.allowed]) == ("untested", (), ["FP4-115"])


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE3", "STANDALONE", "EAGLE", "NEXTN", "nextn"])
def test_a_drafter_without_its_model_is_bad_usage(tmp_path, algorithm):
    words = argv(tmp_path, NVFP4)
    inside = algorithm.upper() in ("EAGLE", "NEXTN")
    why = f", and {tmp_path}/t names no MTP module of its own" if inside else ""
    flags = [*words, "--speculative-algorithm", algorithm]
    with pytest.raises(UsageError, match=f"{algorithm}: --speculative-draft-model-path is missing{why}$"):
        judge.judge(flags, machine=machine())
    folder(tmp_path / "t", TARGET | {"num_nextn_predict_layers": 0})
    with pytest.raises(UsageError, match="is missing"):
        judge.judge(flags, machine=machine())


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_a_module_inside_the_target_needs_no_draft(tmp_path, algorithm, key):
    words = argv(tmp_path, NVFP4, target={key: 1})
    assert judge.judge([*words, "--speculative-algorithm", algorithm], machine=machine()).accepted
    with pytest.raises(UsageError, match="EAGLE3: --speculative-draft-model-path is missing"):
        judge.judge([*words, "--speculative-algorithm", "EAGLE3"], machine=machine())


def test_a_module_inside_a_target_that_is_not_here_is_left_to_sglang(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--model-path", "nobody/no-such-model", *NVFP4, "--speculative-algorithm", "NEXTN"]
    assert judge.judge(words, machine=machine()).accepted


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE3"])
def test_the_target_is_no_draft_of_its_own(tmp_path, algorithm):
    words = argv(tmp_path, NVFP4)
    draft = ["--speculative-draft-model-path", str(tmp_path / "t")]
    with pytest.raises(UsageError, match=f"--speculative-draft-model-path {tmp_path}/t: that is the target itself"):
        judge.judge([*words, "--speculative-algorithm", algorithm, *draft], machine=machine())
    assert judge.judge([*words, "--speculative-algorithm", "STANDALONE", *draft], machine=machine()).accepted


def test_what_dflash_sets_to_one_is_shown(tmp_path):
    flags = [*NVFP4, *DFLASH, "--speculative-num-steps", "3", "--speculative-eagle-topk", "4"]
    shown = {v.what: (v.asked, v.effective) for v in decide(tmp_path, flags).values}
    assert (shown["draft steps"], shown["draft top-k"]) == (("3", "1"), ("4", "1"))


def test_every_result_is_on_file():
    for names in (*results.RESULTS.values(), results.BF16_ON_RANKS):
        assert names and all((ROOT / results.FOLDER / name).is_file() for name in names)
    assert all((ROOT / name).is_file() for name in (packed_weights.ON_A_CPU, packed_weights.ON_A_GPU))


def test_every_result_file_that_a_rule_cites_is_there():
    cited = [part for text in TEXTS.values() for part in text.evidence.replace(";", " ").split()]
    files = [part.rstrip(",") for part in cited if part.startswith(("tests/", "sglang_fp4kv/", "patches/"))]
    assert files and all((ROOT / file).exists() for file in files)


def test_every_sglang_file_that_a_rule_cites_is_there():
    import importlib.util

    sglang = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    words = [word for text in TEXTS.values() for word in text.evidence.replace(";", " ").split()]
    files = {word for word in words if word.startswith("srt/")}
    assert files and all((sglang / file).is_file() for file in files)


def test_untested_is_allowed_by_its_id_alone(tmp_path):
    flags = [*NVFP4, *DFLASH, "--tp-size", "4"]
    verdict = decide(tmp_path, flags, on=machine("sm_121"), allow=["FP4-026"])
    assert ids(verdict) == ["FP4-027"] and [r.id for r in verdict.allowed] == ["FP4-026"]
    verdict = decide(tmp_path, flags, on=machine("sm_121"), allow=["FP4-026", "FP4-027"])
    assert verdict.accepted and verdict.status == "untested" and verdict.results == ()
    verdict = decide(tmp_path, NVFP4, allow=["FP4-026"])
    assert "--allow FP4-026 allows nothing here" in verdict.warnings[0] and verdict.status == "works"


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("FP4-017", "--allow FP4-017: it fails, so it cannot be allowed; what can be: FP4-010, FP4-026"),
        ("FP4-080", "--allow FP4-080: it cannot be allowed: it is refused in the server too until"),
        ("FP4-001", "--allow FP4-001: it is no rule about launches"),
        ("all", "--allow all: it is no rule about launches"),
    ],
)
def test_what_cannot_be_allowed_is_bad_usage(tmp_path, id, message):
    with pytest.raises(UsageError, match=message):
        decide(tmp_path, NVFP4, allow=[id])


def test_a_patch_state_that_cannot_be_read_is_refused(tmp_path):
    broken = refusal("FP4-006", asked="a", problem="p", place="x")
    for failed, expected in (
        (Failed("r", (broken,)), "FP4-006"),
        (Failed("the patch state cannot be read (disk)"), "FP4-016"),
    ):
        assert ids(decide(tmp_path, NVFP4, on=Machine(H200, failed))) == [expected]
        assert decide(tmp_path, FP8, on=Machine(H200, failed)).accepted


def test_what_could_not_be_looked_at_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    warnings = " / ".join(decide(tmp_path, NVFP4, on=machine(NO_GPU)).warnings)
    assert "the GPU is unknown (no NVML here), so nothing was judged by it" in warnings
    assert "holds no safetensors to read: weights and KV scales are unknown" in warnings
    warnings = " / ".join(decide(tmp_path, NVFP4, on=machine("sm_90"), tensors={}).warnings)
    assert "the GPU's memory is unknown" in warnings
    assert "the checkpoint has no KV scales: 2^-1 for K and 2^-4 for V are used" in warnings
    flags = [*NVFP4, "--json-model-override-args", '{"head_dim": 128}']
    assert "--json-model-override-args was not applied" in decide(tmp_path, flags).warnings[0]
    flags = [*NVFP4, "--model-path", "nobody/no-such-model", "--device", "cpu"]
    warnings = " / ".join(decide(tmp_path, flags).warnings)
    assert "--model-path nobody/no-such-model is not on this machine" in warnings
    assert "--device cpu: Triton's interpreter runs the kernels" in warnings
    assert "no KV scales" not in " ".join(decide(tmp_path, NVFP4, tensors=scales([0.5] * 4)).warnings)


def test_a_hub_id_is_judged_by_the_snapshot_that_the_server_loads(tmp_path):
    for commit, value in (("a" * 40, 0.5), ("b" * 40, -1.0)):
        folder(cached(tmp_path, commit, main=value > 0), TARGET, scales([value] * 4))
    flags = ["--model-path", "org/name", *NVFP4, "--download-dir", str(tmp_path)]
    assert judge.judge(flags, machine=machine()).accepted
    (only,) = judge.judge([*flags, "--revision", "b" * 40], machine=machine()).refusals
    assert only.id == "FP4-043"
    drafted = [*flags, *DFLASH, "--speculative-draft-model-path", folder(tmp_path / "d", DRAFT)]
    assert judge.judge([*drafted, "--speculative-draft-model-revision", "b" * 40], machine=machine()).accepted


@pytest.mark.parametrize(("last", "told"), [(1.0, True), (1.5, False)])
def test_v_scales_that_are_modelopts_lower_bound_are_pointed_out(tmp_path, last, told):
    tensors = scales([1.0] * 4) | {"model.layers.3.self_attn.attn.v_scale": scale(last)}
    verdict = decide(tmp_path, NVFP4, tensors=tensors)
    assert verdict.accepted
    assert ("every v_scale is 1.0, ModelOpt's lower bound for FP8" in " ".join(verdict.warnings)) == told


class Profile:
    flags, gpu, gpu_memory_gb, tp, result = [], None, None, 1, "untested"
    draft_revision, draft_sha256 = "a" * 40, None


def test_a_draft_whose_revision_nothing_tells_is_a_warning(tmp_path):
    verdict = decide(tmp_path, [*NVFP4, *DFLASH], profile=Profile)
    assert verdict.accepted
    assert f"nothing here tells whether the draft is {'a' * 40}" in " ".join(verdict.warnings)


def test_another_draft_than_the_profiles_is_refused_for_any_kv_dtype(tmp_path):
    flags = [*DFLASH, "--speculative-draft-model-revision", "b" * 40]
    assert ids(decide(tmp_path, [*FP8, *flags], profile=Profile)) == ["FP4-037"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`fp4kv judge` on small models: (exit code, stdout, stderr)."""
    monkeypatch.setattr(judge, "probe", lambda gpu: Machine(gpu or H200, patch_state(), {"sglang": "0.5.23"}))
    monkeypatch.chdir(tmp_path)

    def call(*flags, ours=(), tensors=None):
        folder(tmp_path / "t", TARGET, tensors)
        folder(tmp_path / "d", DRAFT, tensors)
        words = ["--model-path", "t", *flags]
        words += ["--speculative-draft-model-path", "d"] if "DFLASH" in flags else []
        code = cli.main(["judge", *ours, "--", *words])
        return code, *capsys.readouterr()

    return call


def test_exit_codes_and_streams(run):
    code, out, err = run(*NVFP4)
    assert (code, out) == (0, "") and "accepted: works" in err
    code, out, err = run(*NVFP4, "--enable-lmcache")
    assert (code, out) == (3, "") and "refused: FP4-048 (fails)" in err
    code, out, err = run("--kv-cach-dtype", "nvfp4")
    assert (code, out) == (2, "") and "nearest is --kv-cache-dtype" in err
    code, out, err = run(*NVFP4, ours=["--json"])
    assert (code, err) == (0, "") and json.loads(out)["accepted"]


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (["--gpu", "h200"], "--gpu h200: a compute capability is needed"),
        (["--gpu-memory", "80"], "--gpu-memory belongs to --gpu, which is missing"),
        (["--allow", "FP4-017"], "--allow FP4-017: it fails"),
        (["--profile", "none.yaml"], "none.yaml: it cannot be read"),
    ],
)
def test_arguments_of_ours_that_cannot_be_meant(run, ours, message):
    code, _, err = run(*NVFP4, ours=ours)
    assert code == 2 and message in err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--mem-fraction-static", "nan"), ("--mem-fraction-static", "1.5"), ("--tp-size", "0"),
        ("--context-length", "0"), ("--max-total-tokens", "9" * 30), ("--max-running-requests", "-1"),
        ("--nnodes", "0"), ("--nnodes", "-2"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_meant_are_named(run, flag, value):
    code, _, err = run(*NVFP4, f"{flag}={value}")
    assert code == 2 and f"{flag} {value}: a number " in err


@pytest.mark.parametrize(("rank", "nodes"), [("-1", "1"), ("1", "1"), ("2", "2")])
def test_a_node_that_is_not_there_is_named(run, rank, nodes):
    code, _, err = run(*NVFP4, f"--node-rank={rank}", "--nnodes", nodes)
    assert code == 2
    assert f"--node-rank {rank}: with --nnodes {nodes} a number from 0 to {int(nodes) - 1} is needed" in err


@pytest.mark.parametrize("size", ["0", "-1", "inf", "nan", "x"])
def test_an_amount_of_memory_is_a_positive_number(run, size, capsys):
    with pytest.raises(SystemExit) as end:
        run(*NVFP4, ours=["--gpu", "sm_90", "--gpu-memory", size])
    assert end.value.code == 2 and "--gpu-memory" in capsys.readouterr().err


def test_hardware_elsewhere_is_stated(run):
    code, _, err = run(*NVFP4, ours=["--gpu", "sm_121", "--gpu-memory", "121", "--tp", "4"])
    assert code == 3 and "refused: FP4-026, FP4-027 (untested)" in err
    allow = ["--allow", "FP4-026", "--allow", "FP4-027"]
    code, _, err = run(*NVFP4, ours=["--gpu", "sm_121", "--tp", "4", *allow])
    assert code == 0 and "allowed[FP4-026] gpu-untested: " in err and "accepted: untested" in err


def test_a_profile_supplies_flags_and_hardware(run):
    Path("p.yaml").write_text(
        "name: n\ngpu: sm_120\ngpu_memory_gb: 31\ngpus: 1\nresult: untested\n"
        "flags:\n- --kv-cache-dtype nvfp4\n- --attention-backend triton\n"
    )
    code, _, err = run(ours=["--profile", "p.yaml"])
    assert code == 3 and "refused: FP4-026" in err
    code, _, err = run("--kv-cache-dtype", "bf16", ours=["--profile", "p.yaml"])
    assert code == 0  # the user's flags come last
    code, _, err = run(ours=["--profile", "p.yaml", "--gpu", "sm_90"])
    assert code == 0


GOLDEN_ACCEPTED = """\
                  asked       effective
KV dtype          nvfp4       nvfp4
prefill backend   triton      triton
decode backend    triton      triton
drafter           DFLASH      DFLASH
drafter KV dtype  (left out)  fp8_e4m3 (fp4kv: next to NVFP4)
drafter backend   (left out)  triton (as prefill)
draft tokens      (left out)  8 (the draft's block size)
tensor parallel   1           1
context length    (left out)  4096 (from config.json)
seats             8           8
bytes per token               target 576 + drafter 256 (one GPU)
KV budget                     69.50 GB (139.00 GB x 0.5 - weights 0.00 GB)
tokens            65536       65,536 (16.00 full requests)

warning: the checkpoint has no KV scales: 2^-1 for K and 2^-4 for V are used on every layer

accepted: works (tests/bench/results/h200_pair.json, tests/bench/results/h200_smollm2.json)
"""

GOLDEN_REFUSED = """\
                  asked       effective
KV dtype          nvfp4       nvfp4
prefill backend   flashinfer  flashinfer
decode backend    flashinfer  trtllm_mha
drafter           DFLASH      DFLASH
drafter KV dtype  (left out)  nvfp4 (inherited from the target)
drafter backend   (left out)  flashinfer (as prefill)
draft tokens      16          16
tensor parallel   1           1
context length    (left out)  4096 (from config.json)
seats             (left out)  48 (SGLang's default with a drafter)

warning: the checkpoint has no KV scales: 2^-1 for K and 2^-4 for V are used on every layer

refused[FP4-017] nvfp4-verify-on-flashinfer: NVFP4 KV with DFLASH is asked for with prefill on
    flashinfer and decode on flashinfer
  asked:    --kv-cache-dtype nvfp4 --attention-backend flashinfer --speculative-algorithm DFLASH
  why:      a drafted block is verified on the prefill backend, and FlashInfer has no FP4 verify: it
            reads an FP8 workspace that the host prepares for prefill and nobody refreshes for
            verify
  evidence: srt/arg_groups/kv_cache_hook.py @ sglang 0.5.23; public issues 36001 and 36010 of SGLang

help: --kv-cache-dtype nvfp4 --attention-backend triton

refused[FP4-030] draft-tokens-differ: 16 draft tokens are asked for, and the draft was trained on
    blocks of 8
  asked:    --speculative-num-draft-tokens 16
  why:      the drafter fills a whole block in one pass and was trained on that length; SGLang runs
            it on the length it is told
  evidence: _handle_dflash in srt/arg_groups/speculative_hook.py @ sglang 0.5.23; block_size in the
            draft's config.json

help: --speculative-num-draft-tokens 8, or leave it out

refused: FP4-017, FP4-030 (fails)
"""

TENSORS = {"w": ("BF16", [1], b"12")}


def test_an_accepted_launch_reads_as_written(run):
    flags = [*NVFP4, *DFLASH, "--mem-fraction-static", "0.5", "--max-running-requests", "8"]
    code, _, err = run(*flags, "--max-total-tokens", "65536", tensors=TENSORS)
    assert (code, err) == (0, GOLDEN_ACCEPTED)


def test_a_refused_launch_reads_as_written(run):
    flags = ["--kv-cache-dtype", "nvfp4", "--attention-backend", "flashinfer", *DFLASH]
    flags += ["--speculative-num-draft-tokens", "16"]
    ours = ["--gpu", "sm_121", "--gpu-memory", "121"]
    code, _, err = run(*flags, ours=ours, tensors=TENSORS)
    assert code == 3
    assert err == GOLDEN_REFUSED
    assert max(map(len, err.splitlines())) <= COLUMNS


def test_the_json_has_a_schema_and_a_version(run):
    flags = [*NVFP4, *DFLASH, "--enable-lmcache", "--tp-size", "4"]
    code, out, _ = run(*flags, ours=["--json", "--allow", "FP4-027"], tensors=TENSORS)
    found = json.loads(out)
    assert code == 3
    assert list(found) == [
        "schema", "version", "accepted", "status", "results", "refusals", "allowed", "warnings",
        "values", "machine",
    ]  # fmt: skip
    assert (found["schema"], found["version"]) == ("fp4kv.judge", 1)
    assert (found["accepted"], found["status"], found["results"]) == (False, "fails", [])
    assert [list(r) for r in found["refusals"] + found["allowed"]] == [
        ["id", "name", "says", "asked", "why", "evidence", "help"]
    ] * 2
    assert [r["id"] for r in found["refusals"]] == ["FP4-048"]
    assert [r["id"] for r in found["allowed"]] == ["FP4-027"]
    assert found["values"][4] == {
        "what": "drafter KV dtype", "asked": "(left out)", "effective": "fp8_e4m3",
        "why": "fp4kv: next to NVFP4",
    }  # fmt: skip
    assert found["machine"] == {
        "gpu": {"name": "NVIDIA H200", "capability": "sm_90", "memory_bytes": 139 * GIB},
        "versions": {"sglang": "0.5.23"},
        "patch": patch_state().as_dict(),
        "switches": [],
    }


def test_failed_probes_are_values_in_the_json(tmp_path):
    verdict = decide(tmp_path, NVFP4, on=Machine(Failed("no GPU"), Failed("no patches")))
    assert verdict.as_dict()["machine"]["gpu"] == {"failed": "no GPU"}
    assert verdict.as_dict()["machine"]["patch"] == {"failed": "no patches"}


def test_the_shipped_pair_is_accepted_where_it_is():
    flags = ["--model-path", str(PAIR / "target"), *NVFP4, *DFLASH]
    flags += ["--speculative-draft-model-path", str(PAIR / "draft")]
    assert judge.judge(flags, machine=machine()).status == "works"


def test_judging_imports_no_torch_and_takes_under_a_second():
    """Of a CPU's time, which a busy machine does not stretch."""
    code = (
        "import sys; from launcher.cli import main\n"
        f"code = main(['judge', '--profile', '{ROOT}/configs/pair.yaml'])\n"
        "sys.exit(code or 10 * sum(m in sys.modules for m in ('torch', 'sglang', 'triton')))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
