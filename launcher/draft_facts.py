"""What a DFlash draft's config.json asks SGLang to build, read where SGLang 0.5.23 reads it.

Published drafts have two layouts. The older one keeps block_size, num_target_layers, target_layer_ids and
mask_token_id at the top of the file, the newer one in dflash_config, which wins; both are read alike. What makes a
draft a DFlash2 is read in dflash_config alone.

Source: parse_dflash_draft_config in srt/speculative/dflash_utils.py, srt/models/dflash.py @ 0.5.23
"""

import reprlib
from dataclasses import dataclass

from launcher.flags import UsageError
from sglang_fp4kv.served import CONV, SELECTOR

# The keys that size each module, in the order (what, of how many).
MODULE_KEYS = {
    CONV: ("conv_kernel_size", "conv_group_size"),
    SELECTOR: ("selector_rank", "selector_top_k"),
}
# Names (entries of architectures) whose class builds the selector.
SELECTING = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
# Names whose class is the plain backbone, with a convolution where the keys ask for one.
PLAIN = ("DFlashDraftModel",)
# Model types whose class in transformers has a window only with use_sliding_window, then one of its own by default.
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
_KINDS = ("full_attention", "sliding_attention")
_LARGEST = 1 << 31


@dataclass(frozen=True)
class DraftFacts:
    """``sizes``: the four keys that count, 0 where absent. ``misplaced``: those of them that stand at the top of the
    file, where nothing reads them. ``problems``: what SGLang stops at while it builds the model. ``other_head``: what
    says that this is neither plain DFlash nor DFlash2, None where it is one of them. ``per_layer``: why K and V are
    projected layer by layer on any device; None where nothing in the file says so."""

    sizes: dict
    misplaced: tuple = ()
    problems: tuple = ()
    other_head: str | None = None
    per_layer: str | None = None
    selects: bool = True

    @property
    def modules(self):
        """The modules that SGLang builds."""
        built = {name for name, keys in MODULE_KEYS.items() if all(self.sizes[key] for key in keys)}
        return frozenset(built if self.selects else built - {SELECTOR})


def read_draft_facts(config, text, architectures, file):
    """The DraftFacts of a config.json's object ``config`` whose language part is ``text``.

    Raises: UsageError for a size that is no number from 0.
    """
    nested = config.get("dflash_config") or {}
    sizes, misplaced = {}, []
    for key in (key for keys in MODULE_KEYS.values() for key in keys):
        sizes[key] = _size(nested.get(key), f"dflash_config.{key}", file)
        if key not in nested and _size(config.get(key), key, file):
            misplaced.append(key)
    selects = not architectures or any(name in SELECTING for name in architectures)
    return DraftFacts(
        sizes=sizes,
        misplaced=tuple(misplaced),
        problems=tuple(_problems(sizes, nested, text, architectures)),
        other_head=_other_head(nested, config, architectures),
        per_layer=_per_layer(config, text),
        selects=selects,
    )


def _size(value, what, file):
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise UsageError(f"{file}: {what} must be a number from 0, got {reprlib.repr(value)}")
    return value


def _problems(sizes, nested, text, architectures):
    for keys in MODULE_KEYS.values():
        first, second = (sizes[key] for key in keys)
        if bool(first) != bool(second):
            yield f"{keys[0]} {first} and {keys[1]} {second} are needed together"
    hidden, group = text.get("hidden_size"), sizes["conv_group_size"]
    if group and isinstance(hidden, int) and hidden % group:
        yield f"conv_group_size {group} does not divide hidden_size {hidden}"
    name = next((name for name in architectures if name in SELECTING), None)
    if name is not None and not sizes["selector_rank"]:
        yield f"architectures {name} needs dflash_config.selector_rank"
    yield from _layer_problems(nested, text)


def _layer_problems(nested, text):
    kinds, count = text.get("layer_types"), text.get("num_hidden_layers")
    if kinds is None:
        return
    if not isinstance(kinds, list):
        yield f"layer_types must be a list, got {reprlib.repr(kinds)}"
        return
    if isinstance(count, int) and len(kinds) < count:
        yield f"layer_types names {len(kinds)} layers of {count}"
    odd = next((kind for kind in kinds if kind not in _KINDS), None)
    if odd is not None:
        yield f"layer_types: {reprlib.repr(odd)} is no kind of layer that a draft has"
    if "sliding_attention" not in kinds or nested.get("swa_window_size"):
        return
    if text.get("model_type") in _SWITCHED:
        if not text.get("use_sliding_window"):
            yield (
                "layer_types asks for a window, and without use_sliding_window a "
                f"{text['model_type']} configuration drops it"
            )
    elif not text.get("sliding_window"):
        yield "layer_types asks for a window, and sliding_window is missing"


def _other_head(nested, config, architectures):
    projector = nested.get("projector_type", config.get("projector_type"))
    if projector is not None:
        return f"projector_type {reprlib.repr(projector)}"
    if nested.get("attention_sink_bias"):
        return "attention_sink_bias"
    known = (*PLAIN, *SELECTING)
    if architectures and not any(name in known for name in architectures):
        return f"architectures {architectures[0]}"
    return None


def _per_layer(config, text):
    """Of _init_fused_kv_helper's conditions (srt/speculative/dflash_worker_v2.py) those that a file tells."""
    if text.get("attention_bias"):
        return "attention_bias"
    if text.get("use_gemma_norm"):
        return "use_gemma_norm"
    if not text.get("rope_is_neox_style", text.get("is_neox_style", True)):
        return "a RoPE that is not NeoX-style"
    if config.get("quantization_config"):
        return "quantization_config"
    return None
