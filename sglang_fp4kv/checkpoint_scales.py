"""KV scales as a checkpoint's safetensors files hold them, before anything is loaded.

Read here rather than off the loaded model, because SGLang 0.5.23 covers up what is wrong with them
(BaseKVCacheMethod in srt/layers/quantization/kv_cache.py): two that are not above zero become 1.0, and K's
stands in for one of V that is not. Standard library only; headers and single values, never a weight.
"""

import json
import math
import re
import struct
from pathlib import Path

KEY = re.compile(
    r"layers\.(?P<layer>\d+)\..*?(?:(?P<side>[kv])_scale|(?P<proj>[kv])_proj\.output_scale|kv_scale)$"
)
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors format
_INDEX = "model.safetensors.index.json"


def read_header(stream):
    """(tensors by name, where their data begins) of an open safetensors file.

    Raises: ValueError or struct.error where it is none.
    """
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > _LARGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def scales_in(stream, header, begin):
    """(layer, side, value) of every KV scale of one file; a value is None where its dtype is not a plain float.

    One ``kv_scale`` stands for both sides.
    """
    for name, entry in header.items():
        match = KEY.search(name)
        if match:
            value = _scalar(stream, begin, entry)
            for side in match["side"] or match["proj"] or "kv":
                yield int(match["layer"]), side, value


def _scalar(stream, begin, entry):
    first, last = entry["data_offsets"]
    stream.seek(begin + first)
    raw = stream.read(last - first)
    if entry["dtype"] == "BF16" and len(raw) == 2:
        return struct.unpack("<f", b"\0\0" + raw)[0]
    kind = {"F64": "<d", "F32": "<f", "F16": "<e"}.get(entry["dtype"])
    return struct.unpack(kind, raw)[0] if kind and len(raw) == struct.calcsize(kind) else None


def read_scales(model_path):
    """Layer id -> {"k": values, "v": values} in the folder ``model_path``: lists, for another part of the model
    (a draft head) may number its layers from 0 as well.

    Empty for a folder that is not here or holds no safetensors. Files that an index names and that are not here
    give layers without values.
    """
    folder = Path(model_path)
    index = folder / _INDEX
    found = {}
    if index.is_file():
        named = json.loads(index.read_text("utf-8"))["weight_map"]
        matches = {name: KEY.search(name) for name in named}
        for match in filter(None, matches.values()):
            found.setdefault(int(match["layer"]), {})
        files = sorted({folder / named[name] for name, match in matches.items() if match})
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        if file.is_file():
            with open(file, "rb") as stream:
                for layer, side, value in scales_in(stream, *read_header(stream)):
                    found.setdefault(layer, {}).setdefault(side, []).append(value)
    return found


def check_scales(model_path):
    """Called while SGLang resolves its arguments, before weights are loaded.

    Raises: ValueError naming every KV scale in the folder ``model_path`` that is zero, negative, NaN or infinite,
    with its layer.
    """
    bad = [
        f"{side}_scale {value} of layer {layer}"
        for layer, sides in sorted(read_scales(model_path).items())
        for side, values in sorted(sides.items())
        for value in values
        if value is not None and not (math.isfinite(value) and value > 0)
    ]
    if bad:
        raise ValueError(
            f"the checkpoint {model_path} holds KV scales that are not finite and above zero: {', '.join(bad)}"
        )
