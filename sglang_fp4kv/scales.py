"""Global scales of the K and V caches, read from the loaded model and its checkpoint.

A checkpoint calibrated for a quantized KV cache carries one ``k_scale`` and one ``v_scale`` a
layer. That value is the global scale of this format on every architecture; a checkpoint without
them gets the format's default, a power of two per side (see :mod:`sglang_fp4kv.formats`).

The files count beside the loaded model, for two reasons. Some of SGLang 0.5.23's classes drop the
scales while they load (Qwen3ForCausalLM gives its attention no quantization config). And SGLang says
"none" as 1.0, which is also what ModelOpt writes for FP8 KV wherever calibration asks for less
(get_kv_cache_scaling_factor in modelopt/torch/export/quant_utils.py).
"""

import math
import os
from dataclasses import dataclass

from sglang_fp4kv.checkpoint_scales import has_safetensors, read_scales
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


def _usable(value, layer_id, side):
    if not math.isfinite(value) or value <= 0.0:
        raise ValueError(f"layer {layer_id}: {side}_scale must be finite and above zero, got {value}")
    return value


def scale_value(raw, layer_id, side):
    """A loaded layer's scale as a float, or None where it says nothing: None, or exactly 1.0.

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
    value = _usable(float(raw), layer_id, side)
    return None if value == _ABSENT else value


def promised_scales(model):
    """What the quantization config of ``model`` says of KV scales in its checkpoint; None where it promises none."""
    for module in model.modules():
        config = getattr(module, "quant_config", None)
        for name in ("kv_cache_quant_algo", "kv_cache_scheme"):
            said = getattr(config, name, None)
            if said and not (isinstance(said, dict) and said.get("dynamic")):
                return f"{name} {said}"
    return None


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


def _take_from_files(loaded, side, promised):
    """Puts into ``loaded`` (layer id -> value or None) what the files alone say: one value, where all agree."""
    for layer, sides in promised.items():
        values = set(sides.get(side, ()))
        if loaded[layer] is None and len(values) == 1 and None not in values:
            loaded[layer] = _usable(*values, layer, side)


def read_global_scales(attention_layers, folder=None, promise=None):
    """Global scales of every attention layer, from the loaded model and from its files in ``folder``.

    Sizes: ``attention_layers`` is an iterable of objects with ``layer_id``, ``k_scale``, ``v_scale``
    (SGLang's RadixAttention); the results are dicts from layer id to float, unitless. ``promise``: of
    promised_scales.

    Raises: ValueError when a scale is not usable, when one side of a layer or a layer is missing, when the
    files name scales for a layer without saying what they are, or other ones than were loaded, and when there
    are no files to say where the scales went that were promised.
    """
    k, v = {}, {}
    for layer in attention_layers:
        k[layer.layer_id] = scale_value(layer.k_scale, layer.layer_id, "k")
        v[layer.layer_id] = scale_value(layer.v_scale, layer.layer_id, "v")

    stored = read_scales(os.fspath(folder)) if folder else {}
    promised = {layer: sides for layer, sides in stored.items() if layer in k}
    _take_from_files(k, "k", promised)
    _take_from_files(v, "v", promised)
    # SGLang would fill in the side that the checkpoint lacks from the other.
    one_sided = sorted(layer for layer, sides in promised.items() if len(sides) == 1)
    lost = sorted(i for i in promised if i not in one_sided and None in (k[i], v[i]))
    if lost:
        raise ValueError(
            f"the checkpoint {folder} has KV scales for layers {lost}, but they did not arrive on the loaded "
            "model's attention layers, and its files hold no single value that could stand for them"
        )
    one_sided += sorted(i for i in k if i not in one_sided and (k[i] is None) != (v[i] is None))
    if one_sided:
        raise ValueError(f"there are KV scales for K or V alone on layers {one_sided}")
    changed = list(other_than_the_checkpoint(k, v, promised))
    if changed:
        raise ValueError(f"the loaded model has other KV scales than {folder}: {'; '.join(changed)}")
    present = [i for i in k if k[i] is not None]
    if present and len(present) != len(k):
        raise ValueError(
            "there are KV scales for some attention layers only; missing on layers "
            f"{sorted(set(k) - set(present))}"
        )
    if present:
        return GlobalScales(k, v, "checkpoint")
    if promise and not has_safetensors(folder):
        raise ValueError(
            f"the checkpoint's configuration promises KV scales ({promise}), but none arrived on the loaded model, and "
            f"no safetensors are {f'in {folder}' if folder else 'on this machine'} to read them from"
        )
    return GlobalScales(
        dict.fromkeys(k, DEFAULT_K_GLOBAL_SCALE), dict.fromkeys(v, DEFAULT_V_GLOBAL_SCALE), "default"
    )
