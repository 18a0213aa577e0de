"""What a plan needs of a target and its draft: their layers as the planner counts them."""

import reprlib
from dataclasses import dataclass

from launcher.flags import UsageError
from launcher.model_kinds import GATED_DELTA, OTHER_HEADS
from sglang_fp4kv.formats import check_head_dim
from sglang_fp4kv.planner import Attention, GatedDelta, rank_heads, slots_per_request

_KINDS = ("full_attention", "attention", "linear_attention")
_STATE_DTYPES = ("float32", "bfloat16", "float16")
_DRAFT_TOKENS = 16  # SGLang's where neither flag nor checkpoint says


@dataclass(frozen=True)
class Drafter:
    """The draft's layers, and the tokens before its own that each windowed one reads (0: all)."""

    attention: Attention
    windows: tuple
    draft_tokens: int

    @property
    def windowed(self):
        return [window for window in self.windows if window]

    def request_bytes(self, context, dtype):
        """(bytes a request of ``context`` tokens takes, bytes its layers ever read)."""
        layer = self.attention.layer_bytes(dtype)
        read = sum(min(context, window) if window else context for window in self.windows)
        return context * self.attention.bytes_per_token(dtype), read * layer


def _config(facts):
    return f"{facts.folder}/config.json"


def _positive(facts, key, place=None):
    value = (facts.text if place is None else place).get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        found = "is missing" if value is None else f"must be a positive integer, got {reprlib.repr(value)}"
        raise UsageError(f"{_config(facts)}: {key} {found}")
    return value


def _refuse_other_pools(facts):
    """Raises: UsageError naming the key with which SGLang keeps something else than K and V of each layer."""
    if facts.mla:
        raise UsageError(
            f"{_config(facts)}: kv_lora_rank: MLA keeps no K and V by head, so it is not planned"
        )
    trait = next((trait for trait in facts.traits if not trait.counted), None)
    if trait is not None:
        raise UsageError(f"{_config(facts)}: {trait.key}: {trait.why}, which is not planned")


def _attention(facts, layers, tp):
    """``layers`` full-attention layers of the model on one of ``tp`` GPUs.

    Raises: UsageError naming the key that is missing or cannot be counted.
    """
    odd = [key for key in OTHER_HEADS if facts.text.get(key)]
    if odd:
        raise UsageError(
            f"{_config(facts)}: {odd[0]} names the KV heads in a way that is not planned; "
            "num_key_value_heads is"
        )
    if facts.unread:
        key, why = next(iter(facts.unread.items()))
        raise UsageError(f"{_config(facts)}: {key} is missing; {why}")
    if not facts.kv_heads:
        raise UsageError(f"{_config(facts)}: num_key_value_heads and num_attention_heads are missing")
    if not facts.head_dim:
        raise UsageError(f"{_config(facts)}: head_dim is missing, and so are the keys to derive it from")
    try:
        heads = rank_heads(facts.kv_heads, tp)
    except ValueError as error:
        raise UsageError(f"{_config(facts)}: num_key_value_heads: {error}") from None
    return Attention(layers, heads, facts.head_dim, facts.v_head_dim)


def target_attention(facts, tp):
    """The target's layers that keep K and V. Raises: UsageError naming the key in the way."""
    _refuse_other_pools(facts)
    count = facts.num_layers or _positive(facts, "num_hidden_layers")
    kinds, interval = facts.text.get("layer_types"), facts.text.get("full_attention_interval")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != count):
        got = len(kinds) if isinstance(kinds, list) else reprlib.repr(kinds)
        raise UsageError(f"{_config(facts)}: layer_types must list {count} layers, got {got}")
    window = facts.window_pool
    if window is not None:
        key = f"architectures {window.value}" if window.key == "architectures" else window.key
        raise UsageError(
            f"{_config(facts)}: {key}: such a target with windowed layers gets pools of two lengths in SGLang, "
            "which are not planned"
        )
    if facts.attention_layers is None:
        raise UsageError(
            f"{_config(facts)}: layer_types and full_attention_interval are missing, so nothing tells which "
            "layers keep K and V"
        )
    odd = [kind for kind in kinds or () if kind not in _KINDS]
    if odd and any(key in facts.text for key in GATED_DELTA.values()):
        raise UsageError(f"{_config(facts)}: layer_types: {odd[0]!r} is no kind of layer that is planned")
    layers = facts.attention_layers  # a range where the file has no list: its length costs nothing
    if kinds and type(interval) is int and layers != tuple(range(interval - 1, count, interval)):
        raise UsageError(
            f"{_config(facts)}: layer_types and full_attention_interval {interval} name other layers"
        )
    if not layers:
        raise UsageError(f"{_config(facts)}: layer_types names no layer that keeps K and V")
    attention = _attention(facts, len(layers), tp)
    try:
        check_head_dim(attention.head_dim)
        check_head_dim(attention.v_head_dim)
    except ValueError as error:
        raise UsageError(f"{_config(facts)}: {error} (NVFP4 has a scale for each 16)") from None
    return attention


def target_states(facts, tp, state_dtype=None):
    """The target's recurrent layers; None where it has none.

    ``state_dtype``: --mamba-ssm-dtype. Raises: UsageError naming the key in the way.
    """
    if not facts.recurrent:
        return None
    if not any(key in facts.text for key in GATED_DELTA.values()):
        raise UsageError(
            f"{_config(facts)}: linear_num_value_heads is missing: of recurrent layers only the gated delta "
            f"rule's states are planned (model_type {facts.model_type!r})"
        )
    sizes = {name: _positive(facts, key) for name, key in GATED_DELTA.items()}
    dtype = state_dtype or facts.text.get("mamba_ssm_dtype") or "float32"
    if dtype not in _STATE_DTYPES:
        raise UsageError(
            f"{_config(facts)}: mamba_ssm_dtype must be one of {', '.join(_STATE_DTYPES)}, got {dtype!r}"
        )
    layers = facts.num_layers - len(facts.attention_layers)
    try:
        states = GatedDelta(layers, tp=tp, state_dtype=dtype, **sizes)
    except ValueError as error:
        raise UsageError(f"{_config(facts)}: linear_num_value_heads: {error}") from None
    # SGLang's pool would copy them, its layers have none left (srt/models/qwen3_5.py @ 0.5.23).
    if sizes["key_heads"] % tp:
        raise UsageError(
            f"{_config(facts)}: linear_num_key_heads: {sizes['key_heads']} key heads cannot be split over {tp} GPUs"
        )
    return states


def request_slots(flags):
    """State slots for each running request under SGLang's flags, on a GPU."""
    strategy, overlap = flags.mamba_radix_cache_strategy, not flags.disable_overlap_schedule
    if strategy == "auto":
        paged = (flags.page_size or 1) > 1
        tracked = (overlap or paged) and flags.linear_attn_backend == "triton"
        strategy = "extra_buffer" if tracked else "no_buffer"
    return slots_per_request(strategy, radix_cache=not flags.disable_radix_cache, overlap=overlap)


def drafter(facts, tp, flags):
    """The Drafter of a draft's facts. Raises: UsageError naming the key in the way."""
    _refuse_other_pools(facts)
    count = facts.num_layers or _positive(facts, "num_hidden_layers")
    if facts.recurrent:
        raise UsageError(f"{_config(facts)}: a draft with recurrent layers is not planned")
    if facts.text.get("is_hybrid_swa"):
        raise UsageError(f"{_config(facts)}: is_hybrid_swa: a draft with pools of two lengths is not planned")
    kinds = facts.text.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        got = len(kinds) if isinstance(kinds, list) else reprlib.repr(kinds)
        raise UsageError(f"{_config(facts)}: layer_types must list {count} layers, got {got}")
    odd = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if odd:
        raise UsageError(f"{_config(facts)}: layer_types: {odd[0]} is no kind of layer a draft has")
    window = 0
    if "sliding_attention" in kinds:
        # Nemotron 3.5 drafts have theirs elsewhere (get_dflash_attention_sliding_window_size).
        place, key = facts.text, "sliding_window"
        if place.get(key) is None and (facts.text.get("dflash_config") or {}).get("swa_window_size") is not None:
            place, key = facts.text["dflash_config"], "swa_window_size"
        window = _positive(facts, key, place)
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    asked = flags.speculative_draft_window_size
    if asked is not None:
        windows = tuple(min(asked, own) if own else asked for own in windows)
    block, drafted = flags.speculative_dflash_block_size, flags.speculative_num_draft_tokens
    if None not in (block, drafted) and block != drafted:
        raise UsageError(f"--speculative-dflash-block-size {block}: --speculative-num-draft-tokens says {drafted}")
    tokens = block or drafted or facts.block_size or _DRAFT_TOKENS
    if asked is not None and asked < tokens:
        raise UsageError(f"--speculative-draft-window-size {asked}: a block of {tokens} tokens does not fit in it")
    return Drafter(_attention(facts, count, tp), windows, tokens)
