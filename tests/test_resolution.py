"""How NVFP4 with Triton resolves, with SGLang's argument record replaced by a plain one."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from launcher.rules_drafter import drafted_width
from launches import NVFP4, cached, launch, scales, write_safetensors

MODEL = {
    "head_dim": 64, "v_head_dim": 64, "dtype": "torch.bfloat16", "is_hybrid_swa": False,
    "has_attention_sinks": False, "hf_text_config": SimpleNamespace(), "hf_config": SimpleNamespace(architectures=None),
}  # fmt: skip
WINDOWS = {"hf_text_config": SimpleNamespace(layer_types=["sliding_attention", "full_attention"])}
ARGS = {
    "model_path": "org/name",
    "revision": None,
    "download_dir": None,
    "quantization_param_path": None,
    "kv_cache_dtype": "nvfp4",
    "attention_backend": "triton",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "prefill_kv_cache_dequant_dtype": "auto",
    "speculative_algorithm": None,
    "speculative_draft_kv_cache_dtype": None,
    "speculative_draft_model_path": None,
    "enable_multi_layer_eagle": False,
    "trust_remote_code": False,
    "enable_unified_memory": False,
    "enable_page_major_kv_layout": False,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
    "hicache_mem_layout": "page_first",
    "hicache_io_backend": "kernel",
    "enable_lmcache": False,
    "enable_flexkv": False,
    "radix_cache_backend": None,
    "enable_unified_cache_external_linker": False,
    "enable_kv_cache_sharding": False,
    "enable_hisparse": False,
    "dcp_size": 1,
    "enable_deterministic_inference": False,
    "enable_mixed_chunk": False,
}
HICACHE = {"enable_hierarchical_cache": True}


@pytest.fixture
def resolve(monkeypatch):
    """Runs both steps; returns (declared fields, names of the stock steps that ran)."""
    from sglang_fp4kv import resolution

    def run(model=None, mla=False, recurrent=False, gated_delta=None, **changes):
        args = SimpleNamespace(**{**ARGS, **changes})
        declared, stock = {}, []
        monkeypatch.setattr(resolution, "resolving_view", lambda a: a)
        monkeypatch.setattr(resolution, "resolved_view", lambda a: a)
        monkeypatch.setattr(resolution, "use_mla_backend", lambda a: mla)
        monkeypatch.setattr(resolution, "mambaish_config", lambda m: object() if recurrent else None)
        monkeypatch.setattr(resolution, "hybrid_gdn_config", lambda m: gated_delta and SimpleNamespace(model_type=gated_delta))
        config = SimpleNamespace(**{**MODEL, **(model or {})})
        monkeypatch.setattr(resolution, "model_config_of", lambda a: config)
        monkeypatch.setattr(
            resolution, "declare_resolution", lambda a, source, **fields: declared.update(fields)
        )
        resolution.resolve_prefill_dequant(args, lambda a: stock.append("prefill"))
        resolution.resolve_kv4(args, lambda a: stock.append("kv4"))
        return declared, stock

    return run


def test_nvfp4_on_triton_skips_the_stock_steps(resolve):
    assert resolve() == ({}, [])
    assert resolve(
        attention_backend=None, prefill_attention_backend="triton", decode_attention_backend="triton"
    ) == ({}, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        {"attention_backend": "flashinfer"},
        {"attention_backend": None},
        {"kv_cache_dtype": "fp4_mx_block16"},
    ],
)
def test_everything_else_goes_to_the_stock_steps(resolve, changes):
    assert resolve(**changes) == ({}, ["prefill", "kv4"])


def test_the_drafters_dtype_defaults_to_fp8_and_bf16_may_be_asked_for(resolve):
    assert resolve(speculative_algorithm="DFLASH")[0] == {
        "speculative_draft_kv_cache_dtype": "fp8_e4m3"
    }
    for dtype in ("fp8_e4m3", "bf16", "bfloat16"):
        asked = {"speculative_algorithm": "dflash", "speculative_draft_kv_cache_dtype": dtype}
        assert resolve(**asked) == ({}, [])


@pytest.mark.parametrize("drafter", ["EAGLE", "eagle3", "NEXTN", "STANDALONE"])
def test_every_draft_model_gets_a_plain_pool(resolve, drafter):
    assert resolve(speculative_algorithm=drafter)[0] == {"speculative_draft_kv_cache_dtype": "fp8_e4m3"}
    with pytest.raises(ValueError, match="draft-kv-cache-dtype=nvfp4 next to NVFP4 KV must be one"):
        resolve(speculative_algorithm=drafter, speculative_draft_kv_cache_dtype="nvfp4")


@pytest.mark.parametrize("drafter", ["EAGLE", "EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM", "Qwen3ForCausalLM"])
def test_the_judge_knows_the_width_that_sglang_chooses(monkeypatch, tmp_path, drafter, name):
    """A tree for some targets, where no flag says how to draft."""
    from sglang.srt.arg_groups import speculative_hook

    monkeypatch.setattr(speculative_hook, "resolving_view", lambda args: args)
    asked = SimpleNamespace(speculative_algorithm=drafter)
    _steps, chosen, _tokens = speculative_hook._auto_choose_speculative_params(asked, name)
    flags = [*NVFP4, "--speculative-algorithm", drafter]
    assert drafted_width(launch(tmp_path, flags, target={"architectures": [name]})) == chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ngram_has_no_pool_of_its_own(resolve, dtype):
    assert resolve({"dtype": str(dtype)}, speculative_algorithm="ngram") == ({}, [])


def test_a_draft_that_reads_the_targets_own_keys_is_refused(resolve, tmp_path):
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not serve --speculative-algorithm FROZEN_KV_MTP"):
        resolve(speculative_algorithm="NEXTN", speculative_draft_model_path=str(tmp_path))


def test_the_hierarchical_cache_is_served_alone_and_with_dflash(resolve):
    assert resolve(**HICACHE) == ({}, [])
    asked = {"speculative_algorithm": "DFLASH", "speculative_draft_kv_cache_dtype": "bf16"}
    assert resolve(**HICACHE, **asked) == ({}, [])


@pytest.mark.parametrize("dtype", ["auto", "fp8_e5m2", "nvfp4"])
def test_another_draft_dtype_is_refused(resolve, dtype):
    with pytest.raises(ValueError, match=f"draft-kv-cache-dtype={dtype} next to NVFP4 KV must be one"):
        resolve(speculative_algorithm="DFLASH", speculative_draft_kv_cache_dtype=dtype)


def test_one_backend_for_both_phases(resolve):
    with pytest.raises(ValueError, match="prefill 'flashinfer' and decode 'triton'"):
        resolve(prefill_attention_backend="flashinfer")


def test_a_dequant_dtype_has_no_meaning_here(resolve):
    with pytest.raises(ValueError, match="prefill-kv-cache-dequant-dtype=fp8_e4m3 has no meaning"):
        resolve(prefill_kv_cache_dequant_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout"),
        ({"disaggregation_mode": "prefill"}, "PD disaggregation"),
        (HICACHE | {"hicache_storage_backend": "file"}, "--hicache-storage-backend file"),
        (HICACHE | {"hicache_mem_layout": "page_head"}, "--hicache-mem-layout page_head"),
        (HICACHE | {"hicache_io_backend": "kernel_ascend"}, "--hicache-io-backend kernel_ascend"),
        (HICACHE | {"speculative_algorithm": "EAGLE3"}, "--enable-hierarchical-cache with EAGLE3"),
        (HICACHE | {"recurrent": True}, "--enable-hierarchical-cache on a model with recurrent layers"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"radix_cache_backend": "flexkv"}, "--enable-flexkv"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"dcp_size": 2}, "--dcp-size 2"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"quantization_param_path": "s.json"}, "--quantization-param-path s.json"),
        ({"speculative_algorithm": "dspark"}, "--speculative-algorithm DSPARK"),
        ({"speculative_algorithm": "FROZEN_KV_MTP"}, "--speculative-algorithm FROZEN_KV_MTP"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"mla": True}, "an MLA model"),
        ({"model": {"is_hybrid_swa": True}}, "a sliding-window KV pool"),
        ({"model": {"has_attention_sinks": True}}, "attention sinks"),
        ({"recurrent": True}, "recurrent layers other than gated-delta ones"),
        ({"recurrent": True, "gated_delta": "jet_nemotron"}, "recurrent layers other than gated-delta ones"),
        (
            {"recurrent": True, "gated_delta": "qwen3_5_text", "speculative_algorithm": "NEXTN"},
            "EAGLE on a model with recurrent layers",
        ),
        (
            {"recurrent": True, "gated_delta": "qwen3_next", "speculative_algorithm": "NGRAM"},
            "NGRAM on a model with recurrent layers",
        ),
        ({"model": WINDOWS, "speculative_algorithm": "EAGLE3"}, "EAGLE3 on a model with windowed layers"),
        ({"model": {"head_dim": 72, "v_head_dim": 72}}, "head_dim 72, which is not a multiple of 16"),
        ({"model": {"v_head_dim": 128}}, r"K and V of different width \(head_dim 64, v_head_dim 128\)"),
        (
            {"speculative_algorithm": "DFLASH", "model": {"dtype": "torch.float16"}},
            "DFLASH on a torch.float16 target",
        ),
        (
            {"speculative_algorithm": "NEXTN", "model": {"dtype": "torch.float16"}},
            "EAGLE on a torch.float16 target",
        ),
    ],
)
def test_what_is_not_proven_is_refused_by_name(resolve, changes, named):
    with pytest.raises(ValueError, match=f"does not serve {named}"):
        resolve(**changes)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_gated_delta_layers_are_served(resolve, kind):
    assert resolve(recurrent=True, gated_delta=kind) == resolve()
    asked = {"speculative_algorithm": "DFLASH"}
    assert resolve(recurrent=True, gated_delta=kind, **asked) == resolve(**asked)


@pytest.mark.parametrize(
    ("text", "windowed"),
    [
        (WINDOWS["hf_text_config"], True),
        (SimpleNamespace(layer_types=["full_attention"], sliding_window=512), False),
        (SimpleNamespace(sliding_window=512), True),
        (SimpleNamespace(sliding_window=512, use_sliding_window=False), False),
        (SimpleNamespace(sliding_window=None), False),
    ],
)
def test_windows_are_drafted_for_by_dflash_alone(resolve, text, windowed):
    model = {"hf_text_config": text}
    assert resolve(model) == resolve()
    assert resolve(model, speculative_algorithm="DFLASH") == resolve(speculative_algorithm="DFLASH")
    if not windowed:
        assert resolve(model, speculative_algorithm="NGRAM") == resolve()
        return
    with pytest.raises(ValueError, match="does not serve NGRAM on a model with windowed layers"):
        resolve(model, speculative_algorithm="NGRAM")


@pytest.mark.parametrize(("name", "refused"), [("MistralForCausalLM", False), ("Gemma2ForCausalLM", True)])
def test_windows_that_sglangs_class_does_not_keep_to_are_none(resolve, name, refused):
    model = {"hf_text_config": SimpleNamespace(sliding_window=512), "hf_config": SimpleNamespace(architectures=[name])}
    if not refused:
        assert resolve(model, speculative_algorithm="NGRAM") == resolve()
        return
    with pytest.raises(ValueError, match="does not serve NGRAM on a model with windowed layers"):
        resolve(model, speculative_algorithm="NGRAM")


def test_everything_that_is_refused_is_named_at_once(resolve):
    with pytest.raises(ValueError, match="--enable-lmcache; nor --dcp-size 4"):
        resolve(enable_lmcache=True, dcp_size=4)


@pytest.mark.parametrize(
    ("changes", "planned"),
    [
        ({}, False),
        ({"attention_backend": None, "decode_attention_backend": "triton"}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, True),
        ({"attention_backend": "flashinfer"}, True),
    ],
)
def test_the_graph_reserve_stays_for_a_packed_pool(monkeypatch, changes, planned):
    from sglang_fp4kv import resolution

    monkeypatch.setattr(resolution, "resolving_view", lambda a: a)
    args = SimpleNamespace(**{**ARGS, **changes})
    assert resolution.plan_post_capture_sizing(lambda a: True, args) is planned


def test_every_hook_is_applied_where_sglang_loads_its_plugins():
    """In a process of its own: SGLang's loader, and the modules that import a hooked name."""
    code = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_fp4kv.integration import inactive_parts
from sglang.srt.arg_groups import memory_hook, overrides
from sglang.srt.model_executor.model_runner_components import kv_pool_runtime
names = [m.post_capture_kv_sizing_planned for m in (overrides, memory_hook, kv_pool_runtime)]
print("PARTS", inactive_parts(), len(set(names)), hasattr(names[0], "__wrapped__"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PARTS [] 1 True" in done.stdout, done.stdout + done.stderr[-2000:]


def test_unusable_kv_scales_are_refused_before_weights_are_loaded(resolve, tmp_path):
    write_safetensors(tmp_path / "a.safetensors", scales([0.5, -1.0]))
    with pytest.raises(ValueError, match=r"k_scale -1\.0 of layer 1"):
        resolve(model_path=str(tmp_path))
    assert resolve(model_path=str(tmp_path), kv_cache_dtype="fp8_e4m3") == ({}, ["prefill", "kv4"])


def test_those_of_a_hub_id_too_where_they_are_here_already(resolve, tmp_path):
    snapshot = cached(tmp_path, "a" * 40, main=True)
    write_safetensors(snapshot / "a.safetensors", scales([0.5, -1.0]))
    with pytest.raises(ValueError, match=r"k_scale -1\.0 of layer 1"):
        resolve(download_dir=str(tmp_path))
    assert resolve(download_dir=str(tmp_path), revision="other") == ({}, [])
