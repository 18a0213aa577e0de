"""What a target keeps beside K and V, and figures its file leaves out, as the rules judge them."""

import pytest

from launcher.launch import memory
from launcher.rules import judge
from launcher.expected import expected_values
from launches import DFLASH, DRAFT, HYBRID, NVFP4, TARGET, launch, scales

GOOD = [*NVFP4, *DFLASH, "--speculative-draft-kv-cache-dtype", "fp8_e4m3"]
CPU = [*NVFP4, "--device", "cpu"]

# Configs as these models' own are, as far as they tell kinds of layer; the whole verdict on each.
SPECIAL = {
    "MiniMax-M3": ({"architectures": ["MiniMaxM3SparseForCausalLM"], "sparse_attention_config": {"sparse_index_dim": 128}}, {"FP4-060": "sparse_attention_config {'sparse_index_dim': 128}"}),
    "MiniMax-M3, by name alone": ({"architectures": ["MiniMaxM3SparseForConditionalGeneration"]}, {"FP4-060": "architectures 'MiniMaxM3SparseForConditionalGeneration'"}),
    "QSA": ({"indexer_n_heads": 4, "layer_types": ["qwen_sparse_attention"] * 4}, {"FP4-060": "indexer_n_heads 4"}),
    "QSA, by its layers": ({"layer_types": ["full_attention"] * 3 + ["qwen_sparse_attention"]}, {"FP4-060": "layer_types 'qwen_sparse_attention'"}),
    "Qwen4-Exp": (
        {"model_type": "qwen4_exp_text", "indexer_n_heads": 4, "layer_types": ["linear_attention"] * 3 + ["indexed_attention"]},
        {"FP4-040": "layer_types 'linear_attention'", "FP4-060": "indexer_n_heads 4"},
    ),
    "MiMo-V2": (
        {"architectures": ["MiMoV2FlashForCausalLM"], "hybrid_layer_pattern": [0, 1, 1, 1], "v_head_dim": 32},
        {"FP4-015": "", "FP4-039": "hybrid_layer_pattern [0, 1, 1, 1]"},
    ),
    "Inkling": (
        {"architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_model", "local_layer_ids": [0, 2]},
        {"FP4-039": "local_layer_ids [0, 2]", "FP4-040": "model_type 'inkling_model'"},
    ),
    "Llama 4": (
        {"architectures": ["Llama4ForConditionalGeneration"], "attention_chunk_size": None},
        {"FP4-039": "architectures 'Llama4ForConditionalGeneration'"},
    ),
    "Ring-linear": ({"model_type": "bailing_moe_linear", "layer_group_size": 4}, {"FP4-040": "layer_group_size 4"}),
    "Ring-linear, by its class": ({"model_type": "bailing_hybrid"}, {"FP4-040": "model_type 'bailing_hybrid'"}),
    "MiniCPM-SALA": ({"model_type": "minicpm_sala", "mixer_types": ["minicpm4", "lightning"]}, {"FP4-040": "mixer_types ['minicpm4', 'lightning']"}),
    "MiniMax-Text-01": ({"attn_type_list": [0, 0, 0, 1]}, {"FP4-040": "attn_type_list [0, 0, 0, 1]"}),
    "Qwen3.5, nothing said": ({"model_type": "qwen3_5_text"}, {"FP4-040": "model_type 'qwen3_5'"}),
    "Nanbeige": ({"model_type": "nanbeige", "num_loops": 3}, {"FP4-061": "num_loops 3"}),
    "Nanbeige, nothing said": ({"model_type": "nanbeige"}, {"FP4-061": "num_loops 2"}),
    "IQuestLoopCoder": ({"loop_num": 2}, {"FP4-062": "loop_num 2"}),
    "IQuestLoopCoder, nothing said": ({"architectures": ["IQuestLoopCoderForCausalLM"]}, {"FP4-062": "loop_num 2"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_what_a_model_keeps_otherwise_is_refused_by_its_key_and_value(tmp_path, name):
    config, expected = SPECIAL[name]
    for flags in (NVFP4, GOOD):
        refusals = [r for r in judge(launch(tmp_path, flags, target=config)) if r.id != "FP4-119"]
        assert [r.id for r in refusals] == list(expected)
        for r in refusals:
            assert r.asked.endswith(f" with {expected[r.id]}" if expected[r.id] else "/t")
    for dtype in ("bf16", "fp8_e4m3"):
        assert judge(launch(tmp_path, ["--kv-cache-dtype", dtype, *DFLASH], target=config)) == []


def test_keys_of_other_kinds_that_say_nothing_pass(tmp_path):
    config = {
        "num_loops": 1, "loop_num": 1, "layer_group_size": 1, "attn_type_list": [1] * 4, "mixer_types": ["attn"],
        "hybrid_layer_pattern": None, "sparse_attention_config": {}, "indexer_n_heads": None, "local_layer_ids": [],
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert judge(launch(tmp_path, GOOD, target=config)) == []


def test_each_pass_of_a_looped_model_counts(tmp_path):
    once, twice = (memory(launch(tmp_path, NVFP4, target={"num_loops": n})).target_cell for n in (1, 2))
    assert (once, twice) == (576, 1152)


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize(
    ("config", "says", "cell"),
    [
        ({"model_type": "qwen3"}, "num_key_value_heads and head_dim", None),
        ({"model_type": "qwen3", "head_dim": 64}, "num_key_value_heads", None),
        ({"model_type": "mixtral"}, "num_key_value_heads", None),
        ({"model_type": "llama", "num_kv_heads": 2}, "num_key_value_heads", None),
        ({"model_type": "llama"}, None, True),
    ],
)
def test_figures_outside_of_the_file_are_refused(tmp_path, monkeypatch, side, config, says, cell):
    base = TARGET if side == "target" else DRAFT
    bare = {k: v for k, v in base.items() if k not in ("num_key_value_heads", "head_dim")}
    monkeypatch.setattr(f"launches.{side.upper()}", bare)
    found = launch(tmp_path, GOOD, **{side: config})
    held = memory(found)
    assert ((held.target_cell if side == "target" else held.draft_cell) is not None) == bool(cell)
    refusals = judge(found)
    assert [r.id for r in refusals] == (["FP4-063"] if says else [])
    path = f"{tmp_path}/{side[0]}"
    assert [r.says for r in refusals] == ([f"{says} of {path} cannot be read from its config.json"] if says else [])
    key = "num_kv_heads" if "num_kv_heads" in config else "model_type"
    assert all(r.asked.endswith(f" {path} with {key} {config[key]!r}") for r in refusals)
    assert all(("must be written down" in r.why) == (key == "model_type") for r in refusals)


# Hybrids that SGLang takes for gated-delta ones or not, beside HYBRID; where they fall, the key that says so.
OTHER_HYBRIDS = {
    "by name alone": ({"model_type": "qwen3_5_text", "layer_types": None, "linear_num_value_heads": None}, "full_attention_interval 4"),
    "without the interval": ({"full_attention_interval": None}, "layer_types 'linear_attention'"),
    "two lists of layers": ({"full_attention_interval": 2}, "layer_types 'linear_attention'"),
    "Kimi-Linear": ({"model_type": "kimi_linear"}, "layer_types 'linear_attention'"),
    "Jet-Nemotron": ({"model_type": "jet_nemotron"}, "layer_types 'linear_attention'"),
    "Nemotron-H": ({"model_type": "nemotron_h"}, "layer_types 'linear_attention'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("listed", [True, False])
def test_gated_delta_hybrids_are_accepted(tmp_path, kind, listed):
    config = {**HYBRID, "model_type": kind}
    if not listed:
        del config["layer_types"]
    for flags in ([], DFLASH, [*DFLASH, "--mamba-ssm-dtype", "float32"], ["--mamba-ssm-dtype", "bfloat16"]):
        assert judge(launch(tmp_path, [*CPU, *flags], target=config)) == []


@pytest.mark.parametrize("on", [CPU, NVFP4])
@pytest.mark.parametrize("flags", [[], DFLASH])
def test_gated_delta_layers_of_a_class_that_never_ran_are_untested(tmp_path, on, flags):
    (only,) = judge(launch(tmp_path, [*on, *flags], target={**HYBRID, "model_type": "qwen3_next"}))
    assert only.id == "FP4-115" and "of model type qwen3_next, and no result of a run of that class" in only.says


@pytest.mark.parametrize("name", OTHER_HYBRIDS)
def test_other_hybrids_are_refused_by_the_key_that_says_so(tmp_path, name):
    change, key = OTHER_HYBRIDS[name]
    (only,) = judge(launch(tmp_path, NVFP4, target={**HYBRID, **change}))
    assert only.id == "FP4-040" and only.asked.endswith(f" with {key}")


def test_a_hybrids_layers_are_counted_apart(tmp_path):
    """2 attention layers of 2 heads x 2 x (32 + 4) bytes; 6 states of 4 heads x 64 x 64 and 512 channels x 3."""
    case = launch(tmp_path, [*NVFP4, "--mamba-ssm-dtype", "bfloat16"], target=HYBRID)
    values = expected_values(case)
    assert values["target", "bytes_per_token"] == 2 * 144
    states = {key: value for (side, key), value in values.items() if side == "states"}
    assert states == {"layers": 6, "dtype": "bfloat16", "slot_bytes": 6 * (4 * 64 * 64 + 512 * 3) * 2}
    assert not [key for key in expected_values(launch(tmp_path, NVFP4)) if key[0] == "states"]


def test_kv_scales_are_wanted_of_a_hybrids_attention_layers_alone(tmp_path):
    assert judge(launch(tmp_path, CPU, target=HYBRID, tensors=scales([0.5, 0.5], [3, 7]))) == []
    (only,) = judge(launch(tmp_path, CPU, target=HYBRID, tensors=scales([0.5, 0.5], [0, 3])))
    assert only.id == "FP4-044" and "layers 7 (of 2)" in only.says


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--linear-attn-decode-backend", "cutedsl"], ["FP4-070"]),
        (["--linear-attn-verify-backend", "flashinfer"], ["FP4-070"]),
        (["--linear-attn-prefill-backend", "flashinfer"], []),
        (["--enable-int8-mamba-checkpoint"], ["FP4-071"]),
        (["--enable-linear-replayssm-spec"], ["FP4-071"]),
        (["--enable-mamba-cache-stochastic-rounding"], ["FP4-071"]),
        (["--mamba-radix-cache-strategy", "no_buffer"], ["FP4-071"]),
        (["--mamba-radix-cache-strategy", "extra_buffer"], []),
    ],
)
def test_other_kernels_and_states_are_untested_with_gated_delta_layers_only(tmp_path, flags, expected):
    assert [r.id for r in judge(launch(tmp_path, [*CPU, *flags], target=HYBRID))] == expected
    assert judge(launch(tmp_path, [*NVFP4, *flags])) == []


@pytest.mark.parametrize(
    ("sizes", "tp", "named"),
    [
        ({}, 2, None), ({}, 4, "2 linear key heads"),
        ({"linear_num_key_heads": 8, "linear_num_value_heads": 4}, 8, "4 linear value heads"),
    ],
)  # fmt: skip
def test_heads_of_linear_attention_are_split_evenly(tmp_path, sizes, tp, named):
    """Their states would be expected_values' too, which says nothing where they do not split."""
    flags = [*NVFP4, "--tp-size", str(tp), "--device", "cpu"]
    found = {r.id: r for r in judge(launch(tmp_path, flags, target={**HYBRID, "num_attention_heads": 8, **sizes}))}
    assert ("FP4-042" in found) == (named is not None)
    if named:
        assert found["FP4-042"].says == f"{named} cannot be divided evenly by tensor parallel {tp}"


def test_narrow_states_in_the_config_count_too(tmp_path):
    (only,) = judge(launch(tmp_path, [*CPU, *DFLASH], target={**HYBRID, "mamba_ssm_dtype": "bfloat16"}))
    assert only.id == "FP4-072"
    flags = [*CPU, *DFLASH, "--mamba-ssm-dtype", "float32"]
    assert judge(launch(tmp_path, flags, target={**HYBRID, "mamba_ssm_dtype": "bfloat16"})) == []
