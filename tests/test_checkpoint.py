"""Sizes and KV scales from safetensors headers."""

import hashlib
import json
import math
import struct

import pytest

from launcher.checkpoint import (
    INPUT_SCALED, NVFP4_WEIGHTS, OTHERWISE, PACKED_HEAD, QUANTIZED, Checkpoint, read_checkpoint, weights_hash,
)  # fmt: skip
from launches import scale, scales, write_safetensors


def test_weights_count_as_loaded(tmp_path):
    tensors = {"a": ("BF16", [4], bytes(8)), "b": ("F32", [4], bytes(16)), "c": ("U8", [3], bytes(3))}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    write_safetensors(tmp_path / "consolidated.safetensors", tensors)
    assert read_checkpoint(tmp_path) == Checkpoint(8 + 8 + 3, {})


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale_2", {NVFP4_WEIGHTS, QUANTIZED}),
        ("model.layers.0.mlp.experts.gate_up_proj_weight_scale_2", {NVFP4_WEIGHTS, QUANTIZED}),
        ("model.layers.0.mlp.up_proj.weight_scale", {QUANTIZED, OTHERWISE}),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", {QUANTIZED, OTHERWISE}),
        ("model.layers.0.mlp.up_proj.qweight", {QUANTIZED, OTHERWISE}),
        ("model.layers.0.mlp.up_proj.weight", set()),
        ("model.layers.0.self_attn.attn.k_scale", set()),
        ("model.layers.0.mlp.experts.gate_up_proj_pre_quant_scale", {INPUT_SCALED}),
        ("model.layers.0.mlp.up_proj.pre_quant_scale", {INPUT_SCALED}),
        ("lm_head.weight_scale", {PACKED_HEAD, QUANTIZED, OTHERWISE}),
        ("lm_head.weight_scale_2", {NVFP4_WEIGHTS, PACKED_HEAD, QUANTIZED}),
        ("language_model.lm_head.weight_scale_2", {NVFP4_WEIGHTS, PACKED_HEAD, QUANTIZED}),
    ],
)
def test_packed_weights_are_known_by_their_scales(tmp_path, name, kinds):
    write_safetensors(tmp_path / "model.safetensors", {name: ("F32", [1], bytes(4))})
    assert read_checkpoint(tmp_path).weights == kinds


@pytest.mark.parametrize("first", ["1", "2"])
def test_a_second_scale_may_be_in_another_file(tmp_path, first):
    for file, name in ((first, "a.weight_scale"), ("3", "a.weight_scale_2")):
        write_safetensors(tmp_path / f"{file}.safetensors", {name: ("F32", [1], bytes(4))})
    assert read_checkpoint(tmp_path).weights == {NVFP4_WEIGHTS, QUANTIZED}


def test_an_index_names_the_files(tmp_path):
    for name in ("1", "2", "stray"):
        write_safetensors(tmp_path / f"{name}.safetensors", {name: ("BF16", [1], b"12")})
    index = {"weight_map": {"1": "1.safetensors", "2": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(tmp_path).weights_bytes == 4


@pytest.mark.parametrize(
    ("dtype", "raw", "value"),
    [
        ("F32", struct.pack("<f", 0.75), 0.75),
        ("F64", struct.pack("<d", 0.75), 0.75),
        ("F16", struct.pack("<e", 0.75), 0.75),
        ("BF16", struct.pack("<f", 0.75)[2:], 0.75),
        ("F8_E4M3", b"\0", None),
        ("F32", bytes(8), None),
    ],
)
def test_a_scale_is_read_in_its_dtype(tmp_path, dtype, raw, value):
    names = ("k_proj.output_scale", "attn.v_scale")
    tensors = {f"model.layers.3.self_attn.{name}": (dtype, [1], raw) for name in names}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    assert read_checkpoint(tmp_path).kv_scales == {3: {"k": [value], "v": [value]}}


def test_one_scale_may_stand_for_both_sides(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"model.layers.0.self_attn.kv_scale": scale(0.5)})
    assert read_checkpoint(tmp_path).kv_scales == {0: {"k": [0.5], "v": [0.5]}}


def test_bad_and_missing_scales(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", scales([0.5, 0.0, math.inf, 1.0]))
    found = read_checkpoint(tmp_path)
    assert found.bad_scales == [
        "k_scale 0.0 of layer 1", "v_scale 0.0 of layer 1", "k_scale inf of layer 2", "v_scale inf of layer 2",
    ]  # fmt: skip
    assert found.layers_without_scales((0, 3, 5)) == [5]
    assert Checkpoint().bad_scales == [] and Checkpoint().layers_without_scales((0,)) == []


@pytest.mark.parametrize("raw", [b"", b"1234", b"\xff" * 8, struct.pack("<Q", 2) + b"{", struct.pack("<Q", 2) + b"[]"])
def test_a_broken_file_is_a_problem_and_no_crash(tmp_path, raw):
    (tmp_path / "a.safetensors").write_bytes(raw)
    found = read_checkpoint(tmp_path)
    assert found.weights_bytes is None and "its safetensors cannot be read" in found.problem


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": {"a": "gone.safetensors"}}'])
def test_a_broken_index_is_a_problem_and_no_crash(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "its safetensors cannot be read" in read_checkpoint(tmp_path).problem


def test_nothing_to_read(tmp_path):
    assert read_checkpoint(tmp_path) == Checkpoint() and weights_hash(tmp_path) is None


def test_the_hash_is_over_all_files_in_name_order(tmp_path):
    (tmp_path / "b.safetensors").write_bytes(b"2")
    (tmp_path / "a.safetensors").write_bytes(b"1")
    assert weights_hash(tmp_path) == hashlib.sha256(b"12").hexdigest()
