"""The planner beside SGLang 0.5.23's own functions: states, tokens, heads, workspace and windows."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import model_kinds, plan_model
from launcher.flags import parse
from launcher.launch import DRAFT_SEATS
from launcher.modelfacts import read_facts
from launcher.plan_rows import Budget, make_plan
from sglang_fp4kv.planner import (
    STATE_RATIO, Attention, GatedDelta, PlanError, plan_states, plan_tokens, rank_heads, slots_per_request,
)  # fmt: skip

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 8, "full_attention_interval": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def configurator():
    """SGLang's module with its published settings replaced by plain namespaces."""
    from sglang.srt.mem_cache import kv_cache_configurator

    return kv_cache_configurator


class Settings:
    """What SGLang's configurator reads of its published settings, and what it writes back."""

    def __init__(self, patch, module, **asked):
        self.schedule = SimpleNamespace(
            mamba_full_memory_ratio=STATE_RATIO, max_mamba_cache_size=None, max_running_requests=None,
            disable_overlap_schedule=False,
        )  # fmt: skip
        self.memory = SimpleNamespace(disable_radix_cache=False)
        self.spec = SimpleNamespace(speculative_num_draft_tokens=None)
        self.mamba = SimpleNamespace(
            enable_mamba_extra_buffer=True, enable_mamba_extra_buffer_lazy=False, enable_linear_replayssm_spec=False
        )
        for part in (self.schedule, self.memory, self.spec, self.mamba):
            for name in set(vars(part)) & set(asked):
                setattr(part, name, asked.pop(name))
        assert not asked
        patch.setattr(module, "get_schedule", lambda: self.schedule)
        patch.setattr(module, "get_memory", lambda: self.memory)
        patch.setattr(module, "get_spec", lambda: self.spec)
        patch.setattr(module, "get_exec", lambda: SimpleNamespace(mamba=self.mamba))
        patch.setattr(module, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
        patch.setattr(module, "get_context", lambda: self)

    def override(self, _source, **values):
        vars(self.schedule).update(values)


def sglang_split(module, settings, budget, slot_bytes, draft_tokens):
    """(slots, bytes left for K and V) by SGLang's _handle_max_mamba_cache."""
    kvc = SimpleNamespace(
        mambaish_config=SimpleNamespace(
            mamba2_cache_params=SimpleNamespace(layers=[0], mamba_cache_per_req=slot_bytes)
        ),
        pp_size=1, attn_dp_size=1, hybrid_gdn_config=object(), hybrid_kda_config=None,
        extra_mamba_cache_bytes_per_req=0, fused_entry_bytes=lambda _: None,
        spec_algorithm=SimpleNamespace(is_none=lambda: not draft_tokens),
    )  # fmt: skip
    kvc._calculate_mamba_ratio = lambda: module.KVCacheConfigurator._calculate_mamba_ratio(kvc)
    rest = module.KVCacheConfigurator._handle_max_mamba_cache(kvc, budget / (1 << 30))
    return settings.schedule.max_mamba_cache_size, int(rest * (1 << 30))


@given(
    budget=st.integers(1, 1 << 38), slot_bytes=st.integers(1, 1 << 31), ratio=st.floats(0.01, 4.0),
    slots=st.none() | st.integers(1, 4096), requests=st.integers(1, 512), radix_cache=st.booleans(),
    draft_tokens=st.sampled_from([0, 0, 1, 8, 16]), asked=st.booleans(),
)  # fmt: skip
def test_states_are_split_as_sglang_does(
    configurator, budget, slot_bytes, ratio, slots, requests, radix_cache, draft_tokens, asked
):
    requests = requests if draft_tokens or asked else None
    with pytest.MonkeyPatch.context() as patch:
        settings = Settings(
            patch, configurator, mamba_full_memory_ratio=ratio, max_mamba_cache_size=slots,
            max_running_requests=requests, disable_radix_cache=not radix_cache,
            speculative_num_draft_tokens=draft_tokens or None, enable_mamba_extra_buffer=radix_cache,
        )  # fmt: skip
        per_request = slots_per_request(radix_cache=radix_cache)
        try:
            theirs = sglang_split(configurator, settings, budget, slot_bytes, draft_tokens)
        except RuntimeError as error:
            assert "Not enough GPU memory for hybrid" in str(error)
            theirs = None
    try:
        ours = plan_states(
            budget, slot_bytes, per_request=per_request, ratio=ratio, slots=slots, requests=requests,
            radix_cache=radix_cache, draft_tokens=draft_tokens,
        )  # fmt: skip
    except PlanError:
        # SGLang stops there as well: at the split, at an empty pool, or where no request has its slots.
        assert theirs is None or theirs[1] <= 0 or theirs[0] // per_request == 0
        return
    assert theirs == (ours.slots, ours.left_bytes)


STRATEGIES = [
    case
    for case in itertools.product(("no_buffer", "extra_buffer", "extra_buffer_lazy"), (True, False), (True, False))
    if case != ("extra_buffer_lazy", False, True)  # SGLang stops there
]


@pytest.mark.parametrize(("strategy", "overlap", "radix"), STRATEGIES)
def test_slots_of_a_request_are_sglangs(configurator, monkeypatch, strategy, overlap, radix):
    Settings(
        monkeypatch, configurator, disable_radix_cache=not radix, disable_overlap_schedule=not overlap,
        enable_mamba_extra_buffer=radix and strategy != "no_buffer",
        enable_mamba_extra_buffer_lazy=radix and strategy == "extra_buffer_lazy",
    )  # fmt: skip
    theirs = configurator.KVCacheConfigurator._calculate_mamba_ratio(SimpleNamespace())
    assert slots_per_request(strategy, overlap=overlap, radix_cache=radix) == theirs


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("key_heads", [1, 2, 4, 16])
def test_state_bytes_are_sglangs(monkeypatch, tp, dtype, key_heads):
    from sglang.srt.configs import qwen3_next as qwen

    monkeypatch.setattr(qwen, "linear_attn_tp_size", lambda: tp)
    monkeypatch.setattr(qwen, "_is_cpu", False)
    keys = {**HYBRID, "linear_num_key_heads": key_heads} | ({"mamba_ssm_dtype": dtype} if dtype else {})
    params = qwen.Qwen3NextConfig(**keys).mamba2_cache_params
    ours = GatedDelta(len(params.layers), key_heads, 8, 32, 64, 4, tp=tp, state_dtype=dtype or "float32")
    assert ours.slot_bytes == params.mamba_cache_per_req
    assert ours.layers == 6


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20), st.sampled_from([1, 16, 64]))
def test_tokens_are_sglangs(budget, cell, page):
    from sglang.srt.model_executor import pool_configurator as pool

    sizing = SimpleNamespace(_fixed_overhead_bytes=0, _cell_size=cell, _zero_kv_max_tokens=None)
    try:
        theirs = pool.DefaultPoolConfigurator.calculate_pool_sizes(sizing, budget, page).max_total_num_tokens
    except RuntimeError:  # no memory
        with pytest.raises(PlanError):
            plan_tokens(budget, cell, page_size=page)
        return
    assert plan_tokens(budget, cell, page_size=page) == theirs


@pytest.mark.parametrize(("heads", "tp"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 4), (12, 4)])
def test_heads_of_a_gpu_are_sglangs(heads, tp):
    from sglang.srt.configs.model_config import ModelConfig

    config = SimpleNamespace(get_total_num_kv_heads=lambda: heads, is_draft_model=False)
    assert rank_heads(heads, tp) == ModelConfig.get_num_kv_heads(config, tp)


@pytest.mark.parametrize(("heads", "head_dim", "layers"), [(2, 256, 16), (8, 128, 36), (3, 64, 30)])
def test_the_workspace_is_sglangs(heads, head_dim, layers):
    """What SGLang's own NVFP4 recipe adds for a decoded FP8 layer."""
    import torch
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod

    class Stock(NVFP4KVCacheMethod):
        def dequant_workspace_dtype(self):
            return torch.float8_e4m3fn

        def needs_linear_scale_buffer(self):
            return True

        def needs_native_fp4_scales(self):
            return False

    ours = Attention(layers, heads, head_dim)
    theirs = Stock(layers, "cpu").compute_cell_size(heads, head_dim, layers, 1)
    assert ours.bytes_per_token("nvfp4") + ours.layer_bytes("fp8_e4m3") == theirs


def test_draft_bytes_and_windows_are_sglangs(tmp_path):
    import torch
    from sglang.srt.speculative import dflash_utils as utils

    config = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 512, "block_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = plan_model.drafter(read_facts(str(tmp_path), "--draft"), 2, parse(["--model-path", "m"]))
    model = SimpleNamespace(get_num_kv_heads=lambda tp: max(1, 2 // tp), head_dim=64, v_head_dim=64)
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp8_e4m3", torch.float8_e4m3fn)):
        theirs = utils.dflash_draft_cell_size_per_token(
            draft_model_config=model, draft_num_layers=4, draft_kv_cache_dtype=torch_dtype, tp_size=2
        )
        assert draft.attention.bytes_per_token(dtype) == theirs
    # SGLang counts the token itself apart from those it looks back at.
    assert draft.windows == (512, 512, 512, 0)
    assert utils.get_dflash_attention_sliding_window_size(config) == 512 - 1


def test_a_drafted_hybrid_plan_is_sglangs(configurator, tmp_path, monkeypatch):
    """A whole plan with --memory against SGLang's split and division."""
    target, draft = tmp_path / "t", tmp_path / "d"
    for folder, config in (
        (target, HYBRID),
        (draft, {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 512}))
    flags = parse(["--model-path", str(target), "--page-size", "16"])
    facts = [read_facts(str(folder), "MODEL") for folder in (target, draft)]
    plan = make_plan(*facts, flags, Budget(pools=1_500_000_001), {}, None)
    for row in plan.rows:
        drafted = row.drafter is not None
        settings = Settings(
            monkeypatch, configurator, max_running_requests=DRAFT_SEATS if drafted else None,
            speculative_num_draft_tokens=16 if drafted else None,
        )  # fmt: skip
        slots, left = sglang_split(configurator, settings, 1_500_000_001, plan.states["slot_bytes"], 16 * drafted)
        assert (row.state_slots, row.tokens) == (slots, left // row.bytes_per_token // 16 * 16)
    assert len(plan.rows) == 8


@pytest.mark.parametrize("kind", [*model_kinds.OWN_FIGURES, *model_kinds.OWN_KV_HEADS, "llama", "cohere", "olmo2", "phi3"])
def test_figures_that_a_class_adds(kind):
    """What transformers, and SGLang with it, takes where config.json leaves a key out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind if kind in CONFIG_MAPPING else f"{kind}_text"]
    made = getattr(made, "sub_configs", {}).get("text_config", made)
    sizes = [{"hidden_size": heads * 48, "num_attention_heads": heads, "num_hidden_layers": 4} for heads in (24, 48)]
    heads, dims = zip(
        *[(getattr(c, "num_key_value_heads", None), getattr(c, "head_dim", None)) for c in (made(**s) for s in sizes)]
    )
    assert (heads[0] == heads[1] is not None) == (kind in model_kinds.OWN_FIGURES + model_kinds.OWN_KV_HEADS)
    assert (dims[0] not in (None, 48)) == (kind in model_kinds.OWN_FIGURES)


PUBLISHED = {
    "Qwen3.5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text", "num_hidden_layers": 62, "num_attention_heads": 24, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_size": 5120, "full_attention_interval": 4, "linear_num_key_heads": 16,
            "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "bfloat16", "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    },
    "Qwen3-Next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    "Mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": None,
    },
    "Qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "hidden_size": 3584, "sliding_window": 131072, "use_sliding_window": False,
    },
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
        "num_nextn_predict_layers": 1,
    },
    "Llama without KV heads": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_size": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_sglangs(tmp_path, monkeypatch, name, tp):
    """A config.json as SGLang's ModelConfig reads it, through transformers' classes."""
    from sglang.srt.configs import qwen3_next
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig

    monkeypatch.setattr(qwen3_next, "linear_attn_tp_size", lambda: tp)
    monkeypatch.setattr(qwen3_next, "_is_cpu", False)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    theirs = ModelConfig(str(tmp_path))
    assert not theirs.is_hybrid_swa
    hybrid = mambaish_config(theirs)
    layers = len(hybrid.full_attention_layer_ids) if hybrid else theirs.num_attention_layers
    cell = 2 * theirs.get_num_kv_heads(tp) * (theirs.head_dim + theirs.v_head_dim) * layers
    flags = parse(["--model-path", str(tmp_path), "--tp-size", str(tp)])
    plan = make_plan(read_facts(str(tmp_path), "MODEL"), None, flags, Budget(), {}, None)
    assert plan.rows[0].kv == "bf16" and plan.rows[0].bytes_per_token == cell
    assert (plan.states and plan.states["slot_bytes"]) == (hybrid and hybrid.mamba2_cache_params.mamba_cache_per_req)
