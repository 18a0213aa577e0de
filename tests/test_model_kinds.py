"""The kinds of model beside SGLang 0.5.23's own lists of names and configuration classes."""

import ast
import inspect

import pytest

from launcher import model_kinds
from launcher.model_kinds import INDEXED, RECURRENT, WINDOWED, traits

# Whose class has states only where its layers say so.
_BY_LAYERS = {"granitemoehybrid", "minicpm_sala"}
# A Beam's schedule of layers is in its layer_types; a Laguna may have no window.
_BY_KEYS = {"BeamForCausalLM", "LagunaForCausalLM"}


def test_windowed_names_are_sglangs():
    from sglang.srt.configs import model_config

    source = inspect.getsource(model_config.is_hybrid_swa_model)
    (names,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Set)]
    theirs = {node.value for node in names.elts if isinstance(node, ast.Constant)}
    theirs |= {*model_config.SWA_SINK_ARCHS, *model_config.MIMO_V2_MODEL_ARCHS}
    assert theirs - _BY_KEYS == set(model_kinds.WINDOWED_NAMES)
    for name in theirs - _BY_KEYS:
        assert model_config.is_hybrid_swa_model([name]) and [t.kind for t in traits({}, "", (name,))] == [WINDOWED]


def test_names_with_sinks_are_sglangs():
    from sglang.srt.configs import model_config

    assert set(model_kinds.SINK_NAMES) == model_config.SWA_SINK_ARCHS


@pytest.mark.parametrize(
    ("names", "text", "found"),
    [
        (("GptOssForCausalLM",), {}, True),
        (("MiMoV2ForCausalLM",), {"add_swa_attention_sink_bias": True}, True),
        (("MiMoV2MTP",), {"add_full_attention_sink_bias": True}, True),
        (("MiMoV2ForCausalLM",), {"add_swa_attention_sink_bias": False}, False),
        (("LlamaForCausalLM",), {"add_swa_attention_sink_bias": True}, False),
        (("LlamaForCausalLM",), {"learnable_sink": True}, True),
        (("LlamaForCausalLM",), {}, False),
    ],
)
def test_sinks_are_found_as_sglang_finds_them(names, text, found):
    from types import SimpleNamespace

    from sglang.srt.configs.model_config import ModelConfig

    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=list(names)), hf_text_config=SimpleNamespace(**text)
    )
    assert model_kinds.sinks(text, names) == found == bool(ModelConfig._detect_attention_sinks(config))


@pytest.mark.parametrize(
    ("names", "text", "own_pool"),
    [
        (("Gemma3ForCausalLM",), {"sliding_window": 32, "layer_types": ["sliding_attention"]}, False),
        (("Gemma2ForCausalLM",), {"sliding_window": 32}, False),
        (("MistralForCausalLM",), {"sliding_window": 32}, False),
        (("BeamForCausalLM",), {"layer_types": ["sliding_attention"]}, True),
        (("BeamForCausalLM",), {"layer_types": ["full_attention"]}, False),
        (("Gemma4ForCausalLM",), {"layer_types": ["sliding_attention"]}, True),
        (("OtherForCausalLM",), {"is_hybrid_swa": True}, True),
        (("LagunaForCausalLM",), {"sliding_window": 0}, False),
    ],
)
def test_pools_of_their_own_are_sglangs(names, text, own_pool):
    from types import SimpleNamespace

    from sglang.srt.configs.model_config import is_hybrid_swa_model

    found = [t for t in traits(text, "", names) if model_kinds.pool_of_its_own(t, names)]
    assert bool(found) == own_pool == bool(is_hybrid_swa_model(list(names), SimpleNamespace(**text)))


def test_indexed_names_are_sglangs():
    from types import SimpleNamespace

    from sglang.srt.configs.model_config import is_minimax_sparse

    for name in (*model_kinds.INDEXED_NAMES, "MiniMaxM2ForCausalLM"):
        found = [t.kind for t in traits({}, "", (name,))]
        assert is_minimax_sparse(SimpleNamespace(architectures=[name])) == (found == [INDEXED])


def test_types_with_states_are_sglangs():
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.configs.linear_attn_model_registry import _LINEAR_ATTN_MODEL_REGISTRY as registry

    classes = {c for c in vars(hybrid_arch).values() if inspect.isclass(c) and c.__name__.endswith("Config")}
    classes |= {spec.config_class for spec in registry}
    size = 0
    while size < len(classes):  # what is derived from one of them has states as well
        size = len(classes)
        classes |= {below for above in classes for below in above.__subclasses__()}
    theirs = {model_kinds.base_type(c.model_type) for c in classes if c.__module__.startswith("sglang.")}
    known = set(model_kinds.RECURRENT_TYPES)
    assert theirs - _BY_LAYERS | {"glm5_next"} == known
    for kind in known:
        assert [t.kind for t in traits({}, f"{kind}_text", ())] == [RECURRENT]
