"""Global scales read from models and checkpoints."""

import json
import struct
from types import SimpleNamespace

import pytest
import torch
from launches import cached, scale, scales, write_safetensors

from sglang_fp4kv.checkpoint_scales import check_scales, checkpoint_folder, read_scales
from sglang_fp4kv.formats import DEFAULT_K_GLOBAL_SCALE, DEFAULT_V_GLOBAL_SCALE
from sglang_fp4kv.scales import promised_scales, read_global_scales, scale_value


def layer(layer_id, k=None, v=None):
    return SimpleNamespace(layer_id=layer_id, k_scale=k, v_scale=v)


def write_header(folder, names):
    header = json.dumps(
        {n: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]} for n in names}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


@pytest.mark.parametrize(
    "raw",
    [
        0.25,
        torch.tensor(0.25),
        torch.tensor([0.25]),
        torch.nn.Parameter(torch.tensor(0.25), requires_grad=False),
    ],
)
def test_every_form_of_a_scale_is_the_same_number(raw):
    assert scale_value(raw, 0, "k") == 0.25


@pytest.mark.parametrize("raw", [None, 1.0, torch.tensor(1.0)])
def test_one_alone_is_how_sglang_says_absent(raw):
    assert scale_value(raw, 0, "k") is None


@pytest.mark.parametrize("raw", [0.0, -1.0, float("nan"), float("inf")])
def test_an_unusable_scale_is_refused_with_its_value(raw):
    with pytest.raises(ValueError, match=f"layer 3: v_scale must be finite and above zero, got {raw}"):
        scale_value(raw, 3, "v")


def test_a_scale_per_head_is_refused():
    with pytest.raises(ValueError, match="layer 0: k_scale has 2 elements"):
        scale_value(torch.ones(2), 0, "k")


def test_without_scales_each_side_has_its_default():
    scales = read_global_scales([layer(0), layer(5)])
    assert scales.source == "default"
    assert scales.k == {0: DEFAULT_K_GLOBAL_SCALE, 5: DEFAULT_K_GLOBAL_SCALE}
    assert scales.v == {0: DEFAULT_V_GLOBAL_SCALE, 5: DEFAULT_V_GLOBAL_SCALE}


def test_a_checkpoint_scale_is_taken_as_it_is():
    scales = read_global_scales([layer(0, 0.01, 0.02), layer(1, 0.03, 0.04)])
    assert (scales.source, scales.k, scales.v) == ("checkpoint", {0: 0.01, 1: 0.03}, {0: 0.02, 1: 0.04})


def test_one_side_alone_is_refused():
    with pytest.raises(ValueError, match=r"K or V alone on layers \[0\]"):
        read_global_scales([layer(0, 0.5, None)])


def test_scales_on_some_layers_only_are_refused():
    with pytest.raises(ValueError, match=r"missing on layers \[1\]"):
        read_global_scales([layer(0, 0.5, 0.5), layer(1)])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.7.self_attn.k_proj.k_scale",
        "model.layers.7.self_attn.v_scale",
        "model.layers.7.self_attn.attn.k_scale",
        "model.layers.7.self_attn.kv_scale",
        "language_model.model.layers.7.self_attn.k_proj.output_scale",
        "model.language_model.layers.7.self_attn.k_proj.k_scale",  # Qwen3.5, and Gemma 3 as transformers writes it
        "language_model.model.layers.7.self_attn.v_proj.v_scale",  # Gemma 3 as it was published
        "model.decoder.layers.7.self_attn.k_scale",
        "transformer.encoder.layers.7.self_attention.k_scale",
        "layers.7.self_attn.k_scale",
    ],
)
def test_scale_names_of_checkpoints_are_known(tmp_path, name):
    write_header(tmp_path, [name, "model.layers.7.self_attn.k_proj.weight_scale", "lm_head.weight"])
    assert set(read_scales(tmp_path)) == {7}


FOREIGN = [
    "vision_tower.encoder.layers.7.self_attn.k_proj.k_scale",
    "model.vision_tower.vision_model.encoder.layers.7.self_attn.k_proj.k_scale",
    "model.visual.layers.7.attn.k_scale",
    "audio_tower.layers.7.self_attn.k_scale",
    "mtp.layers.7.self_attn.k_scale",
    "model.mtp.layers.7.self_attn.kv_scale",
    "model.encoder.layers.7.self_attn.k_scale",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_scales_of_another_module_are_not_the_targets(tmp_path, name):
    write_header(tmp_path, [name, name.replace("k_", "v_")])
    assert read_scales(tmp_path) == {}
    assert read_global_scales([layer(7)], tmp_path).source == "default"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "model.safetensors"}}))
    assert read_scales(tmp_path) == {}


def test_a_draft_heads_scales_do_not_blur_the_targets(tmp_path):
    head = {f"mtp.layers.0.self_attn.attn.{side}_scale": scale(2.0) for side in "kv"}
    write_safetensors(tmp_path / "a.safetensors", scales([0.5, 0.25]) | head)
    found = read_global_scales([layer(0), layer(1)], tmp_path)
    assert (found.source, found.k, found.v) == ("checkpoint", {0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.25})


def test_an_index_is_read_before_the_files(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.layers.2.self_attn.k_scale": "a.safetensors"}})
    )
    assert read_scales(tmp_path) == {2: {}}


def stored(folder, **by_name):
    """Files with these KV scales by layer and side: ``_3_k`` is layer 3's k_scale."""
    names = {name: f"model.layers.{name[1:-2]}.self_attn.{name[-1]}_proj.{name[-1]}_scale" for name in by_name}
    write_safetensors(folder / "a.safetensors", {names[name]: scale(value) for name, value in by_name.items()})


def test_scales_that_a_class_of_sglang_drops_are_taken_from_the_files(tmp_path):
    stored(tmp_path, _0_k=0.5, _0_v=1.5, _3_k=1.0, _3_v=0.75)
    found = read_global_scales([layer(0), layer(3)], tmp_path)
    assert (found.source, found.k, found.v) == ("checkpoint", {0: 0.5, 3: 1.0}, {0: 1.5, 3: 0.75})


@pytest.mark.parametrize("loaded", [None, 1.0])
def test_one_is_a_scale_where_the_files_say_so(tmp_path, loaded):
    """ModelOpt's for FP8 KV: the largest of 1.0 and what calibration found."""
    stored(tmp_path, _0_k=1.0, _0_v=1.0, _1_k=2.0, _1_v=1.0)
    found = read_global_scales([layer(0, loaded, loaded), layer(1, 2.0, loaded)], tmp_path)
    assert (found.source, found.k, found.v) == ("checkpoint", {0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.0})


def test_an_unusable_scale_of_the_files_is_refused(tmp_path):
    stored(tmp_path, _0_k=0.5, _0_v=0.0)
    with pytest.raises(ValueError, match="layer 0: v_scale must be finite and above zero, got 0.0"):
        read_global_scales([layer(0)], tmp_path)


def test_a_layer_that_the_files_leave_out_is_refused(tmp_path):
    stored(tmp_path, _0_k=0.5, _0_v=0.5)
    with pytest.raises(ValueError, match=r"some attention layers only; missing on layers \[1\]"):
        read_global_scales([layer(0), layer(1)], tmp_path)


def test_a_side_that_the_files_leave_out_is_refused(tmp_path):
    stored(tmp_path, _0_k=0.5)
    with pytest.raises(ValueError, match=r"K or V alone on layers \[0\]"):
        read_global_scales([layer(0)], tmp_path)


def test_scales_that_are_neither_loaded_nor_clear_stop_the_launch(tmp_path):
    """Of layer 0 there are two that differ, and layer 1's file is not here."""
    index = {f"model.layers.{i}.self_attn.{side}_scale": f"{i}.safetensors" for i in (0, 1) for side in "kv"}
    index |= {f"model.layers.0.self_attn.attn.{side}_scale": "0.safetensors" for side in "kv"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    values = {"self_attn": 0.5, "self_attn.attn": 2.0}
    tensors = {f"model.layers.0.{p}.{s}_scale": scale(value) for p, value in values.items() for s in "kv"}
    write_safetensors(tmp_path / "0.safetensors", tensors)
    with pytest.raises(ValueError, match=r"has KV scales for layers \[0, 1\], but they did not arrive"):
        read_global_scales([layer(0), layer(1)], tmp_path)
    with pytest.raises(ValueError, match=r"has KV scales for layers \[1\], but they did not arrive"):
        read_global_scales([layer(0, 0.5, 0.5), layer(1)], tmp_path)


def test_the_files_of_a_hub_id_are_those_of_its_snapshot(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = cached(tmp_path, commit, main=True)
    for revision in (None, "main", commit):
        assert checkpoint_folder("org/name", revision, str(tmp_path)) == str(snapshot)
    assert checkpoint_folder("org/name", "other", str(tmp_path)) is None
    assert checkpoint_folder("org/other", None, str(tmp_path)) is None


def test_weights_without_a_config_beside_them_are_found(tmp_path, monkeypatch):
    """--download-dir gets the safetensors alone, or only their index where the usual cache has the weights."""
    usual, asked = tmp_path / "usual", tmp_path / "asked"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(usual))
    home = cached(usual, "a" * 40, main=True)
    assert checkpoint_folder("org/name", None, str(asked)) == checkpoint_folder("org/name") == str(home)
    (home / "config.json").write_text("{}")
    there = cached(asked, "a" * 40, main=True)
    assert checkpoint_folder("org/name", None, str(asked)) == str(there)
    stored(home, _0_k=0.5, _0_v=0.25)
    assert checkpoint_folder("org/name", None, str(asked)) == str(home)
    stored(there, _0_k=2.0, _0_v=4.0)
    found = read_global_scales([layer(0)], checkpoint_folder("org/name", None, str(asked)))
    assert (found.source, found.k, found.v) == ("checkpoint", {0: 2.0}, {0: 4.0})


def quantized(**config):
    """A model in whose tree a module has this quantization config."""
    model = torch.nn.Sequential(torch.nn.Module())
    model[0].quant_config = SimpleNamespace(**config)
    return model


PROMISES = [
    ({"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo FP8"),
    ({"kv_cache_scheme": {"num_bits": 8, "dynamic": False}}, "kv_cache_scheme {'num_bits': 8, 'dynamic': False}"),
    ({"kv_cache_scheme": {"num_bits": 8, "dynamic": True}}, None),
    ({"kv_cache_quant_algo": None, "kv_cache_scheme": None}, None),
    ({}, None),
]


@pytest.mark.parametrize(("config", "promise"), PROMISES)
def test_a_quantization_config_promises_kv_scales(config, promise):
    assert promised_scales(quantized(**config)) == promise
    assert promised_scales(torch.nn.Module()) is None


def test_promised_scales_that_nothing_here_holds_stop_the_launch(tmp_path):
    promise = "kv_cache_quant_algo FP8"
    for folder, where in ((None, "on this machine"), (str(tmp_path), f"in {tmp_path}")):
        with pytest.raises(ValueError, match=rf"promises KV scales \({promise}\), but none .* no safetensors are {where}"):
            read_global_scales([layer(0, 1.0, 1.0)], folder, promise)
        assert read_global_scales([layer(0)], folder).source == "default"
        assert read_global_scales([layer(0, 0.5, 0.5)], folder, promise).source == "checkpoint"
    write_header(tmp_path, ["lm_head.weight"])  # all of the checkpoint can be seen to hold none
    assert read_global_scales([layer(0)], tmp_path, promise).source == "default"


@pytest.mark.parametrize("path", [None, "s3://bucket/model"])
def test_a_model_without_files_here_has_no_folder(path):
    assert checkpoint_folder(path) is None


def test_a_folder_is_itself(tmp_path):
    assert checkpoint_folder(str(tmp_path)) == str(tmp_path)


def test_weight_scales_are_not_kv_scales(tmp_path):
    write_header(tmp_path, ["model.layers.0.mlp.up_proj.weight_scale"])
    assert read_scales(tmp_path) == {}


def test_a_folder_that_is_not_here_has_no_scales(tmp_path):
    assert read_scales(tmp_path / "org" / "name") == {}


def test_values_are_read_by_layer_and_side(tmp_path):
    tensors = {
        "model.layers.0.self_attn.attn.k_scale": scale(0.5),
        "model.layers.1.self_attn.kv_scale": scale(0.25),
        "model.layers.0.self_attn.k_proj.k_scale": scale(2.0),
    }
    write_safetensors(tmp_path / "a.safetensors", tensors)
    assert read_scales(tmp_path) == {0: {"k": [0.5, 2.0]}, 1: {"k": [0.25], "v": [0.25]}}


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf")])
def test_an_unusable_scale_is_named_before_weights_are_loaded(tmp_path, bad):
    write_safetensors(tmp_path / "a.safetensors", scales([0.5, bad]))
    with pytest.raises(ValueError, match=rf"not one number, finite and above zero: k_scale {bad} of layer 1, v_scale {bad} of"):
        check_scales(tmp_path)
    write_safetensors(tmp_path / "a.safetensors", scales([0.5, 0.25]))
    check_scales(tmp_path)


def loaded_by_sglang(k, v):
    """An attention layer after SGLang loaded these scales; None: the checkpoint has none."""
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

    made = torch.nn.Module()
    made.layer_id = 0
    method = BaseKVCacheMethod(None)
    method.create_weights(made)
    for side, value in (("k", k), ("v", v)):
        if value is not None:
            getattr(made, f"{side}_scale").data.fill_(value)
    method.process_weights_after_loading(made)
    return made


@pytest.mark.parametrize("v", [0.0, -0.5, float("nan")])
def test_a_scale_that_sglang_replaces_by_the_other_sides_is_noticed(tmp_path, v):
    """Nothing is left of it on the loaded layer, whose V would be written and read with K's."""
    write_safetensors(
        tmp_path / "a.safetensors",
        {"layers.0.self_attn.k_scale": scale(0.5), "layers.0.self_attn.v_scale": scale(v)},
    )
    made = loaded_by_sglang(0.5, v)
    assert float(made.v_scale) == 0.5
    with pytest.raises(ValueError, match=f"v_scale of layer 0 is 0.5 and not {v}"):
        read_global_scales([made], tmp_path)


def test_scales_that_arrive_as_they_are_stored(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"layers.0.self_attn.kv_scale": scale(0.3)})
    found = read_global_scales([loaded_by_sglang(0.3, None)], tmp_path)
    assert found.source == "checkpoint" and found.k == found.v == {0: pytest.approx(0.3)}


def test_a_side_that_the_checkpoint_lacks_is_refused(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"layers.0.self_attn.k_scale": scale(0.5)})
    with pytest.raises(ValueError, match=r"K or V alone on layers \[0\]"):
        read_global_scales([loaded_by_sglang(0.5, None)], tmp_path)
