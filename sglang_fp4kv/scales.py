"""Global scales of the K and V caches, read from the loaded model and its checkpoint.

A checkpoint calibrated for a quantized KV cache carries one ``k_scale`` and one ``v_scale`` a
layer. That value is the global scale of this format on every architecture; a checkpoint without
them gets the format's default, a power of two per side (see :mod:`sglang_fp4kv.formats`).
"""

import math
import os
from dataclasses import dataclass

from sglang_fp4kv.checkpoint_scales import read_scales
from sglang_fp4kv.formats import DEFAULT_K_GLOBAL_SCALE, DEFAULT_V_GLOBAL_SCALE

# SGLang 0.5.23 sets an attention layer's scale to exactly 1.0 when the checkpoint has none
# (srt/layers/quantization/kv_cache.py), and leaves None where no quantization config applies.
_ABSENT = 1.0

@dataclass(frozen=True)
class GlobalScales:
    """Global scales by model layer id; ``source`` is "checkpoint" or "default"."""

    k: dict
    v: dict
    source: str


def scale_value(raw, layer_id, side):
    """A layer's scale as a float, or None where the checkpoint gave none.

    Accepts None, a float, a 0-d or one-element tensor or parameter on any device.

    Raises: ValueError when the value is zero, negative, NaN or infinite, or has several elements
    (the message names layer, side and value).
    """
    if raw is None:
        return None
    if hasattr(raw, "numel"):
        if raw.numel() != 1:
            raise ValueError(
                f"layer {layer_id}: {side}_scale has {raw.numel()} elements, one per layer is needed"
            )
        raw = raw.item()
    value = float(raw)
    if not math.isfinite(value) or value <= 0.0:
        raise ValueError(
            f"layer {layer_id}: {side}_scale must be finite and above zero, got {value}"
        )
    return None if value == _ABSENT else value


def other_than_the_checkpoint(k, v, promised):
    """Texts naming the loaded scales that are none of the checkpoint's for their layer and side.

    ``k``, ``v``: loaded values by layer id, None where absent. ``promised``: of checkpoint_scales.read_scales.
    """
    for layer, sides in sorted(promised.items()):
        for side, loaded in (("k", k.get(layer)), ("v", v.get(layer))):
            stored = [value for value in sides.get(side, ()) if value is not None]
            if stored and loaded is not None and not any(math.isclose(loaded, x, rel_tol=1e-6) for x in stored):
                values = " or ".join(map(str, stored))
                yield f"{side}_scale of layer {layer} is {loaded} and not {values}"


def read_global_scales(attention_layers, model_path=None):
    """Global scales of every attention layer.

    Sizes: ``attention_layers`` is an iterable of objects with ``layer_id``, ``k_scale``, ``v_scale``
    (SGLang's RadixAttention); the results are dicts from layer id to float, unitless.

    Raises: ValueError when a scale is not usable, when one side of a layer is missing, when the
    checkpoint names scales for a layer that the loaded model shows none for, or holds other ones.
    """
    k, v = {}, {}
    for layer in attention_layers:
        k[layer.layer_id] = scale_value(layer.k_scale, layer.layer_id, "k")
        v[layer.layer_id] = scale_value(layer.v_scale, layer.layer_id, "v")

    stored = read_scales(os.fspath(model_path)) if model_path else {}
    promised = {layer: sides for layer, sides in stored.items() if layer in k}
    # SGLang would fill in the side that the checkpoint lacks from the other.
    one_sided = sorted(i for i in k if (k[i] is None) != (v[i] is None) or len(promised.get(i, ())) == 1)
    if one_sided:
        raise ValueError(f"there are KV scales for K or V alone on layers {one_sided}")
    lost = sorted(i for i in promised if k[i] is None)
    if lost:
        raise ValueError(
            f"the checkpoint {model_path} has KV scales for layers {lost}, but none arrived on the "
            "loaded model's attention layers; serving would decode with the wrong scale"
        )
    changed = list(other_than_the_checkpoint(k, v, promised))
    if changed:
        raise ValueError(f"the loaded model has other KV scales than {model_path}: {'; '.join(changed)}")
    present = [i for i in k if k[i] is not None]
    if present and len(present) != len(k):
        raise ValueError(
            "KV scales are loaded for some attention layers only; missing on layers "
            f"{sorted(set(k) - set(present))}"
        )
    if present:
        return GlobalScales(k, v, "checkpoint")
    return GlobalScales(
        dict.fromkeys(k, DEFAULT_K_GLOBAL_SCALE), dict.fromkeys(v, DEFAULT_V_GLOBAL_SCALE), "default"
    )
