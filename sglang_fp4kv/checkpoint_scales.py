"""KV scales as a checkpoint's safetensors files hold them, before anything is loaded.

Read here rather than off the loaded model, because SGLang 0.5.23 covers up what is wrong with them
(BaseKVCacheMethod in srt/layers/quantization/kv_cache.py): two that are not above zero become 1.0, and K's
stands in for one of V that is not. Standard library only; headers and single values, never a weight.
"""

import json
import math
import os
import re
import struct
from pathlib import Path

# What SGLang's classes call the parts around the target's own decoder layers. With anything else before it,
# "layers" are another module's: a vision or audio tower's, a draft head's (mtp), an encoder's (but for ChatGLM).
_OWN = (
    "model", "language_model", "text_model", "llm", "thinker", "backbone", "decoder", "transformer", r"transformer\.encoder",
)  # fmt: skip
KEY = re.compile(
    rf"(?:(?:{'|'.join(_OWN)})\.)*"
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
    """(layer, side, value) of every KV scale of the target's own layers in one file; a value is None where it is
    not one plain float.

    One ``kv_scale`` stands for both sides.
    """
    for name, entry in header.items():
        match = KEY.match(name)
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


def _snapshot(hub_id, revision, cache):
    """The folder in ``cache`` of that revision of ``hub_id`` (None: main), as SGLang finds it; None without one
    (_find_local_hf_snapshot_dir_unlocked in srt/model_loader/weight_utils.py @ 0.5.23)."""
    repository = Path(cache).expanduser() / "--".join(["models", *hub_id.split("/")])
    ref = repository / "refs" / (revision or "main")
    commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
    folder = repository / "snapshots" / (commit or "")
    return folder if commit and folder.is_dir() else None


def has_safetensors(folder):
    """Whether the folder (None: none) holds a safetensors file."""
    return folder is not None and any(Path(folder).glob("*.safetensors"))


def checkpoint_folder(model_path, revision=None, cache=None):
    """The folder with the weights of ``model_path``: itself, or of a hub id its snapshot in ``cache``
    (--download-dir), else in the usual cache. One with safetensors counts before one without: SGLang may put
    nothing but their index in ``cache``. None where there is none, as before a download or for streamed weights."""
    if not model_path or os.path.isdir(model_path):
        return model_path
    from huggingface_hub.constants import HF_HUB_CACHE

    found = [_snapshot(model_path, revision, place) for place in (cache, HF_HUB_CACHE) if place]
    found = [str(folder) for folder in found if folder is not None]
    return next(filter(has_safetensors, found), found[0] if found else None)


def read_scales(model_path):
    """Layer id -> {"k": values, "v": values} in the folder ``model_path``: lists, since several
    names may stand for one scale.

    Empty for a folder that is not here or holds no safetensors. Files that an index names and that are not here
    give layers without values.
    """
    folder = Path(model_path)
    index = folder / _INDEX
    found = {}
    if index.is_file():
        named = json.loads(index.read_text("utf-8"))["weight_map"]
        matches = {name: KEY.match(name) for name in named}
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


def unusable(scales):
    """Texts naming the KV scales that are zero, negative, NaN or infinite, in no form that is read here, or several
    that differ for one layer and side; in layer order. ``scales``: of read_scales."""
    for layer, sides in sorted(scales.items()):
        for side, values in sorted(sides.items()):
            known = list(dict.fromkeys(value for value in values if value is not None))
            bad = [value for value in known if not (math.isfinite(value) and value > 0)]
            yield from (f"{side}_scale {value} of layer {layer}" for value in bad)
            if None in values:
                yield f"{side}_scale of layer {layer} in a form that cannot be read (one F16, BF16, F32 or F64 can)"
            elif len(known) > 1 and not bad:
                yield f"{side}_scale {' and '.join(map(str, known))} of layer {layer}"


def check_scales(folder):
    """Called while SGLang resolves its arguments, before weights are loaded; ``folder``: None where none is here yet.

    Raises: ValueError naming every KV scale in it that cannot be used, with its layer.
    """
    bad = list(unusable(read_scales(folder))) if folder else []
    if bad:
        raise ValueError(
            f"the checkpoint {folder} holds KV scales that are not one number, finite and above zero: {', '.join(bad)}"
        )
