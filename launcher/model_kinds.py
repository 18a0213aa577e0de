"""Models whose KV is more than K and V of every token, once a layer, as their config.json tells.

Read in SGLang 0.5.23: srt/configs/model_config.py (is_hybrid_swa_model, is_minimax_sparse),
srt/configs/hybrid_arch.py, srt/layers/attention/qsa/config.py and
srt/model_executor/model_runner_components/layer_setup.py.
"""

from dataclasses import dataclass

INDEXED, WINDOWED, RECURRENT = "index keys", "windowed layers", "recurrent layers"
LOOPED, SHARED = "layers that run again", "layers that run again on K and V of the first pass"

# Kinds of layer in a config's layer_types that keep K and V for every token.
ATTENTION_KINDS = ("full_attention", "attention", "sliding_attention", "chunked_attention")
_WINDOWED_KINDS = ("sliding_attention", "chunked_attention")
_INDEXED_KINDS = ("qwen_sparse_attention", "indexed_attention")
# Fields that only configs with recurrent (linear-attention or state-space) layers carry.
_RECURRENT_KEYS = (
    "linear_num_value_heads", "linear_attn_config", "full_attention_interval", "mamba_d_state",
    "mamba_num_heads", "ssm_state_size", "hybrid_override_pattern", "layers_block_type",
)  # fmt: skip
# Model types whose configuration class makes SGLang build states whatever else config.json holds.
RECURRENT_TYPES = (
    "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "bailing_hybrid", "falcon_h1", "falcon_mamba",
    "gigachat3_5", "glm5_next", "inkling_mm_model", "inkling_model", "intern_s2_preview", "interns2_mobius",
    "jet_nemotron", "jet_vlm", "kimi_linear", "lfm2", "lfm2_moe", "lfm2_vl", "mamba", "mamba2", "nemotron_h",
    "nemotron_h_omni", "nemotron_h_puzzle", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "zaya",
)  # fmt: skip
# The keys that size gated-delta layers.
GATED_DELTA = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
# Names (entries of architectures) to which SGLang gives a pool of its own for windowed layers.
WINDOWED_NAMES = (
    "DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMDSpark", "DeepseekV4ForCausalLMNextN",
    "DiffusionGemmaForBlockDiffusion", "EmbeddingGemma2Model", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM",
    "IQuestQ1ForCausalLM", "IQuestQ1MTP", "InklingForConditionalGeneration", "InklingForConditionalGenerationMTP",
    "Llama4ForConditionalGeneration", "MellumForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2MTP",
    "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration", "Step3p5ForCausalLM", "Step3p5MTP",
    "Step3p7ForConditionalGeneration", "UnlimitedOCRForCausalLM",
)  # fmt: skip
# Of these, and of classes without such a pool, the names whose attention has sinks (SWA_SINK_ARCHS there).
SINK_NAMES = (
    "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "IQuestQ1ForCausalLM", "IQuestQ1MTP",
)
# Keys that give a model sinks, read for the names that begin so ("" = for every model).
_SINK_KEYS = {"add_swa_attention_sink_bias": "MiMoV2", "add_full_attention_sink_bias": "MiMoV2", "learnable_sink": ""}
INDEXED_NAMES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
# Kinds in mixer_types that are attention over every token (srt/configs/minicpm.py).
_ATTENTION_MIXERS = ("minicpm4", "minicpm", "standard", "attention", "attn")
# Passes of a class whose config.json does not say: srt/configs/nanbeige.py, srt/models/iquest_loopcoder.py.
_PASSES = 2

# Keys that name KV heads some other way (get_total_num_kv_heads, srt/configs/model_config.py).
OTHER_HEADS = (
    "n_head_kv", "num_kv_heads", "multi_query", "multi_query_group_num", "num_attention_groups",
    "attn_config", "block_configs", "num_key_value_heads_per_layer",
)  # fmt: skip
# Model types whose class in transformers has a figure of its own where config.json leaves out num_key_value_heads
# and head_dim, or the first alone.
OWN_FIGURES = (
    "cwm", "ernie4_5", "gemma", "gemma2", "gemma3", "glm", "glm4", "helium", "hy_v3", "laguna", "mellum",
    "minimax_m2", "ministral3", "mistral4", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "seed_oss",
    "solar_open",
)  # fmt: skip
OWN_KV_HEADS = (
    "dots1", "ernie4_5_moe", "exaone4", "exaone_moe", "glm4_moe", "ministral", "mistral", "mixtral", "phimoe",
    "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3_moe", "qwen3_vl_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip

# Keys that count the layers of a module inside a checkpoint that drafts (MTP), and a class whose config.json has none.
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
MTP_NAMES = ("Qwen3NextForCausalLM",)


@dataclass(frozen=True)
class Trait:
    """What ``key: value`` of a config.json says; ``why``: what SGLang then keeps, as half a sentence.

    ``counted``: the planner reads this key itself and says what it makes of it.
    """

    kind: str
    key: str
    value: object
    why: str
    counted: bool = False


def base_type(model_type):
    return model_type.removesuffix("_text")


def traits(text, model_type, architectures):
    """Every Trait of a model, indexed first; empty where each layer keeps K and V of every token once.

    ``text``: the language model's part of config.json. ``model_type``: that part's.
    """
    kinds = text.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    return (
        *_indexed(text, kinds, architectures),
        *_windowed(text, kinds, architectures),
        *_recurrent(text, kinds, base_type(model_type)),
        *_looped(text, base_type(model_type), architectures),
    )


def _indexed(text, kinds, architectures):
    why = "index keys lie beside K and V"
    if text.get("indexer_n_heads") is not None:
        yield Trait(INDEXED, "indexer_n_heads", text["indexer_n_heads"], why)
    if text.get("sparse_attention_config"):
        yield Trait(INDEXED, "sparse_attention_config", text["sparse_attention_config"], why)
    yield from (Trait(INDEXED, "architectures", name, why) for name in architectures if name in INDEXED_NAMES)
    kind = next((kind for kind in kinds if kind in _INDEXED_KINDS), None)
    if kind is not None:
        yield Trait(INDEXED, "layer_types", kind, why)


def _windowed(text, kinds, architectures):
    why = "windowed layers get pools of another length"
    for key in ("hybrid_layer_pattern", "local_layer_ids"):
        if text.get(key):
            yield Trait(WINDOWED, key, text[key], why)
    # With layer_types it is these that say which layers have the window.
    asked = {
        "attention_chunk_size": not kinds,
        "sliding_window": not kinds and text.get("use_sliding_window", True),
        "is_hybrid_swa": True,
    }
    for key, counts in asked.items():
        if counts and text.get(key):
            yield Trait(WINDOWED, key, text[key], why, True)
    kind = next((kind for kind in kinds if kind in _WINDOWED_KINDS), None)
    if kind is not None:
        yield Trait(WINDOWED, "layer_types", kind, why, True)
    for name in architectures:
        # A Laguna without a window has the ordinary pool.
        if name in WINDOWED_NAMES or (name == "LagunaForCausalLM" and text.get("sliding_window", 1)):
            yield Trait(WINDOWED, "architectures", name, why, True)


def _recurrent(text, kinds, kind):
    why = "some layers are recurrent"
    group, mixers, numbers = (text.get(key) for key in ("layer_group_size", "mixer_types", "attn_type_list"))
    if 1 in group if isinstance(group, list) else group not in (None, 0, 1):
        yield Trait(RECURRENT, "layer_group_size", group, why)
    if mixers and not (isinstance(mixers, list) and all(mixer in _ATTENTION_MIXERS for mixer in mixers)):
        yield Trait(RECURRENT, "mixer_types", mixers, "some layers may be recurrent")
    if isinstance(numbers, list) and 0 in numbers:
        yield Trait(RECURRENT, "attn_type_list", numbers, why)
    other = next((name for name in kinds if name not in (*ATTENTION_KINDS, *_INDEXED_KINDS)), None)
    if other is not None:
        yield Trait(RECURRENT, "layer_types", other, why, True)
    if not kinds and text.get("full_attention_interval") != 1:
        keys = [key for key in _RECURRENT_KEYS if text.get(key)]
        yield from (Trait(RECURRENT, key, text[key], why, True) for key in keys)
    if kind in RECURRENT_TYPES:
        yield Trait(RECURRENT, "model_type", kind, why, True)


def _looped(text, kind, architectures):
    why = "layers run more than once, with K and V for each pass"
    loops = text.get("num_loops", _PASSES if kind == "nanbeige" else None)
    if loops not in (None, 1):
        yield Trait(LOOPED, "num_loops", loops, why)
    loops = text.get("loop_num", _PASSES if "IQuestLoopCoderForCausalLM" in architectures else None)
    if loops not in (None, 1):
        yield Trait(SHARED, "loop_num", loops, why)


def pool_of_its_own(trait, architectures):
    """Whether ``trait``, WINDOWED, gives the windowed layers a second pool; otherwise SGLang masks in the one pool."""
    if trait.key == "layer_types":
        return trait.value == "chunked_attention" or "BeamForCausalLM" in architectures
    return trait.key != "sliding_window"


def sinks(text, architectures):
    """Whether the model's attention has sinks (_detect_attention_sinks in srt/configs/model_config.py)."""
    return any(name in SINK_NAMES for name in architectures) or any(
        bool(text.get(key)) and any(name.startswith(begin) for name in architectures)
        for key, begin in _SINK_KEYS.items()
    )


def unreadable_figures(text, model_type):
    """{key: why} of num_key_value_heads and head_dim where config.json does not hold what SGLang uses."""
    kind, missing = base_type(model_type), {}
    for key in ("num_key_value_heads", "head_dim"):
        of_its_own = kind in OWN_FIGURES or (key == "num_key_value_heads" and kind in OWN_KV_HEADS)
        if key not in text and of_its_own:
            own = f"model_type {model_type!r} has a figure of its own for it outside of this file"
            missing[key] = f"{own}, so it must be written down"
    odd = next((key for key in OTHER_HEADS if text.get(key)), None)
    if odd is not None:
        missing["num_key_value_heads"] = f"{odd} names the KV heads in a way that is not read here"
    return missing
