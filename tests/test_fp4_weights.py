"""Checkpoints with NVFP4 weights: what the tests build, the embedded platform's way with them, and Marlin's."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from launches import NVFP4, machine
from safetensors.torch import load_file, save_file

from launcher.checkpoint import NVFP4_WEIGHTS, QUANTIZED, read_checkpoint
from launcher.flags import parse
from launcher.launch import Launch
from launcher.modelfacts import read_facts
from launcher.rules import judge
from sglang_fp4kv import resolution
from sglang_fp4kv.embedded import fp4_weights
from sglang_fp4kv.marlin import SUMS, fuse_unless_marlin, sum_in_order
from tests.e2e.fp4_weights import INPUT_SCALE, kv_scales, pack_weights
from tests.e2e.tiny_models import TINY_HYBRID, build_hybrid, build_target

LAYERS = (3, 7)  # of TINY_HYBRID, those that keep K and V


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    return pack_weights(build_hybrid(folder / "source"), folder, kv_scales(LAYERS))


@pytest.fixture(scope="module")
def tensors(pair):
    return load_file(pair.packed / "model.safetensors"), load_file(pair.twin / "model.safetensors")


def modules(tensors):
    return [name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")]


def test_a_packed_hybrid_has_modelopts_tensors(pair, tensors):
    packed, twin = tensors
    kinds = {name.split(".", 3)[3] for name in modules(packed)}
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    linear = {f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")}
    assert kinds == attention | linear | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for name in modules(packed):
        rows, columns = twin[f"{name}.weight"].shape
        weight, scale = packed[f"{name}.weight"], packed[f"{name}.weight_scale"]
        assert (weight.dtype, tuple(weight.shape)) == (torch.uint8, (rows, columns // 2))
        assert (scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (rows, columns // 16))
        assert packed[f"{name}.input_scale"] == INPUT_SCALE
    config = json.loads((pair.packed / "config.json").read_text())["quantization_config"]
    ignored = set(config["ignore"])
    whole = {name.removesuffix(".weight") for name in packed if name.endswith(".weight") and packed[name].dim() > 1}
    assert whole - set(modules(packed)) - {"model.embed_tokens"} == ignored
    assert "quantization_config" not in json.loads((pair.twin / "config.json").read_text())


def linear(packed, name, awq=False):
    method = SimpleNamespace(quant_config=SimpleNamespace(is_awq=awq))
    layer = torch.nn.Module()
    layer.params_dtype = torch.bfloat16
    for entry in ("weight", "weight_scale", "weight_scale_2"):
        value = packed[f"{name}.{entry}"]
        layer.register_parameter(entry, torch.nn.Parameter(value, requires_grad=False))
    return method, layer


def test_decoded_weights_are_the_twins(tensors):
    packed, twin = tensors
    for name in modules(packed):
        method, layer = linear(packed, name)
        fp4_weights.decode_weight(method, layer)
        assert torch.equal(layer.weight, twin[f"{name}.weight"]), name
    x = torch.randn(3, layer.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    bias = torch.ones(layer.weight.shape[0], dtype=torch.bfloat16)
    wanted = torch.nn.functional.linear(x, twin[f"{name}.weight"], bias)
    assert torch.equal(fp4_weights.multiply(method, layer, x, bias), wanted)


def test_the_twin_is_close_to_the_weights_it_was_made_of(pair, tensors):
    source = load_file(pair.packed.parent / "source" / "model.safetensors")
    for name in modules(tensors[0]):
        given, kept = (t[f"{name}.weight"].float() for t in (source, tensors[1]))
        assert 0 < (kept - given).norm() / given.norm() < 0.12, name


def test_awq_is_not_decoded(tensors):
    name = modules(tensors[0])[0]
    with pytest.raises(ValueError, match="NVFP4_AWQ weights are not decoded"):
        fp4_weights.decode_weight(*linear(tensors[0], name, awq=True))


@pytest.mark.parametrize("marlin", [True, False])
def test_activations_are_fused_for_other_kernels_alone(monkeypatch, marlin):
    from sglang.srt.layers.quantization import fp4_utils

    backend = fp4_utils.Fp4GemmRunnerBackend("marlin" if marlin else "flashinfer_cutlass")
    monkeypatch.setattr(fp4_utils, "FP4_GEMM_RUNNER_BACKEND", backend)
    fused = []
    fuse_unless_marlin(fused.append, "mlp")
    assert fused == ([] if marlin else ["mlp"])


@pytest.mark.parametrize("packed", [True, False])
def test_marlin_sums_in_one_order_beside_packed_kv(monkeypatch, packed):
    """SGLang's choice for what was seen to part: an output projection of 8 heads of 256 to a hidden size of 512."""
    module, name = SUMS.rsplit(".", 1)
    chosen = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(resolution, "serves_packed_kv", lambda: packed)
    shape = {"m": 1, "n": 512, "k": 2048, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    assert sum_in_order(chosen, **shape) is not packed
    assert sum_in_order(chosen, **shape | {"k": 1024}) is False


def judged(folder):
    flags = ["--model-path", str(folder), *NVFP4, "--device", "cpu"]
    return judge(Launch(parse(flags), read_facts(str(folder), "--model-path"), None, machine()))


def test_a_packed_hybrid_with_all_its_scales_is_accepted(pair):
    checkpoint = read_checkpoint(pair.packed)
    assert checkpoint.weights == {NVFP4_WEIGHTS, QUANTIZED}
    assert checkpoint.kv_scales == {
        i: {side: [value] for side, value in zip("kv", values, strict=True)} for i, values in kv_scales(LAYERS).items()
    }
    assert judged(pair.packed) == []


@pytest.mark.parametrize("lost", ["k", "v", "kv"])
def test_a_layer_without_its_kv_scale_is_refused_before_loading(pair, tmp_path, lost):
    kept = load_file(pair.packed / "model.safetensors")
    for side in lost:
        del kept[f"model.layers.7.self_attn.{side}_proj.{side}_scale"]
    (tmp_path / "config.json").write_text((pair.packed / "config.json").read_text())
    save_file(kept, tmp_path / "model.safetensors")
    (only,) = judged(tmp_path)
    assert only.id == "FP4-044" and "not for both K and V of layers 7 (of 2)" in only.says


def test_the_older_layout_names_them_in_a_file_of_its_own(tmp_path):
    packed = pack_weights(build_target(tmp_path / "source"), tmp_path, kv_scales(range(4)), older=True).packed
    assert "quantization_config" not in json.loads((packed / "config.json").read_text())
    content = json.loads((packed / "hf_quant_config.json").read_text())["quantization"]
    assert content == {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"],
    }  # fmt: skip
    assert judged(packed) == []


def test_the_gpu_run_holds_every_server_to_one_before_it(tmp_path, monkeypatch):
    from tests.gpu import weights

    monkeypatch.setattr(weights, "SIZES", TINY_HYBRID)
    run = weights.Run(tmp_path, tmp_path, weights.SERVERS, weights.build(tmp_path))
    seen = []
    for name, server in run.servers.items():
        assert server.reference is None or server.reference in seen
        assert server.drafter is None or run.servers[server.reference].drafter is None
        case = run.case(name)
        stored = read_checkpoint(case.target).kv_scales
        assert set(stored) == (set(weights.KV_SCALES) if server.kv == "nvfp4" else set())
        assert (NVFP4_WEIGHTS in read_checkpoint(case.target).weights) == name.startswith("packed")
        parse(["--model-path", str(case.target), *case.flags])
        seen.append(name)
