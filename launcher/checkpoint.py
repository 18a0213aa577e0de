"""What a local checkpoint's safetensors files say by their headers: sizes and KV scales.

Only the headers and the few bytes of the scales are read, never a weight.
"""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from sglang_fp4kv.checkpoint_scales import read_header, scales_in, unusable
from sglang_fp4kv.served import CONV, SELECTOR

# Names of a DFlash2 draft's tensors, as srt/models/dflash.py @ 0.5.23 loads them.
_MODULES = {
    CONV: re.compile(r"layers\.\d+\.(?:attention|mlp)_conv\."),
    SELECTOR: re.compile(r"(?:model\.)?candidate_selector\."),
}
# Of weights as ModelOpt packs them: NVFP4 by its second scale, AWQ's by the scale of the input, a packed head. Fused
# experts have an underscore before it. QUANTIZED: by anybody, as far as names of tensors tell. OTHERWISE: not as NVFP4,
# which is also said of a first scale without a second.
NVFP4_WEIGHTS, INPUT_SCALED, PACKED_HEAD = "NVFP4 weights", "weights for a scaled input", "a packed head"
QUANTIZED, OTHERWISE = "quantized weights", "weights quantized otherwise"
_WEIGHTS = {
    NVFP4_WEIGHTS: re.compile(r"[._]weight_scale_2$"),
    INPUT_SCALED: re.compile(r"[._]pre_quant_scale$"),
    PACKED_HEAD: re.compile(r"(?:^|\.)lm_head\.weight_scale(?:_2)?$"),
    QUANTIZED: re.compile(r"[._](?:weight_scale(?:_inv|_2)?|weight_packed|qweight)$"),
    OTHERWISE: re.compile(r"[._](?:weight_scale_inv|weight_packed|qweight)$"),
}
_SCALE = re.compile(r"(.*[._]weight_scale)(_2)?$")


@dataclass(frozen=True)
class Checkpoint:
    """A folder's weights.

    ``weights_bytes``: what they take once loaded; FP32 counts half, since it is loaded in 16 bits at
    the least. ``kv_scales``: layer id -> {"k": values, "v": values} of the target's own layers, a value None
    where it is not one plain float. ``modules``: those of a DFlash2 draft that have tensors in it. ``weights``:
    which of NVFP4_WEIGHTS, INPUT_SCALED, PACKED_HEAD, QUANTIZED and OTHERWISE it holds. ``problem``: why the files
    could not be read, None where they could.
    """

    weights_bytes: int | None = None
    kv_scales: dict | None = None
    modules: frozenset = frozenset()
    weights: frozenset = frozenset()
    problem: str | None = None

    @property
    def bad_scales(self):
        """Texts naming every scale that the server cannot use, in layer order."""
        return list(unusable(self.kv_scales or {}))

    @property
    def clamped_v_scales(self):
        """Whether the v_scale of every layer is exactly 1.0."""
        scales = self.kv_scales or {}
        return bool(scales) and all(set(sides.get("v", ())) == {1.0} for sides in scales.values())

    def layers_without_scales(self, layers):
        """Of the layer ids ``layers``, those with no K or no V scale; empty where no layer has one."""
        if not self.kv_scales:
            return []
        return [layer for layer in layers if set(self.kv_scales.get(layer, ())) != {"k", "v"}]


def _files(folder):
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    # Some repositories carry the same weights again as consolidated*.safetensors.
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))


def _read(file, scales, modules, weights, pairs):
    loaded = 0
    with open(file, "rb") as stream:
        header, begin = read_header(stream)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            loaded += (last - first) // (2 if entry["dtype"] == "F32" else 1)
            modules.update(module for module, pattern in _MODULES.items() if pattern.search(name))
            weights.update(kind for kind, pattern in _WEIGHTS.items() if pattern.search(name))
            if scale := _SCALE.fullmatch(name):
                pairs.setdefault(scale[1], set()).add(scale[2])
        for layer, side, value in scales_in(stream, header, begin):
            scales.setdefault(layer, {}).setdefault(side, []).append(value)
    return loaded


def read_checkpoint(folder):
    """The Checkpoint in ``folder``; empty where it holds no safetensors, with the problem where they
    cannot be read."""
    try:
        files, scales, modules, weights, pairs = _files(Path(folder)), {}, set(), set(), {}
        if not files:
            return Checkpoint()
        loaded = sum(_read(file, scales, modules, weights, pairs) for file in files)
        if any("_2" not in found for found in pairs.values()):
            weights.add(OTHERWISE)
        return Checkpoint(loaded, scales, frozenset(modules), frozenset(weights))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        return Checkpoint(problem=f"{folder}: its safetensors cannot be read ({error})")


def weights_hash(folder):
    """sha256 of the folder's safetensors files in name order, in hexadecimal; None without any."""
    digest, files = hashlib.sha256(), sorted(Path(folder).glob("*.safetensors"))
    for file in files:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() if files else None
