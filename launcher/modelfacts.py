"""What a launch needs to know about a model: its config.json, and its weights' headers if local."""

import json
import os
import re
import reprlib
import stat
from dataclasses import dataclass, field
from pathlib import Path

from launcher.checkpoint import QUANTIZED, Checkpoint, read_checkpoint
from launcher.draft_facts import DraftFacts, read_draft_facts
from launcher.flags import UsageError
from launcher.model_kinds import (
    ATTENTION_KINDS, GATED_DELTA, INDEXED, LOOPED, MTP_KEYS, MTP_NAMES, RECURRENT, SHARED, WINDOWED, base_type,
    pool_of_its_own, sinks, traits, unreadable_figures,
)  # fmt: skip
from sglang_fp4kv.checkpoint_scales import checkpoint_folder
from sglang_fp4kv.model_classes import never_windowed
from sglang_fp4kv.served import GATED_DELTA_TYPES

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


_LARGEST = 1 << 31


@dataclass(frozen=True)
class ModelFacts:
    """Attention geometry of a target or a draft; None where the config does not say.

    ``attention_layers``: ids of the layers that keep K and V for every token. ``passes``: times that
    each runs. ``traits``: what SGLang keeps otherwise, and ``unread``: figures that are not in the file
    (launcher/model_kinds.py). ``dtype``: of the weights as the config names it. ``folder``: with the
    weights. ``snapshot``: the hub commit the folder is a snapshot of. ``quantization``: of the weights as
    config.json names it, "unnamed" where it names none. ``quant_algo``: ModelOpt's name of it, also from a file of
    its own. ``dflash``: what it asks for as a DFlash draft. ``text``: the language model's part of config.json as it stands there.
    """

    path: str
    num_layers: int | None
    head_dim: int | None
    v_head_dim: int | None
    block_size: int | None = None
    target_layer_ids: tuple | None = None
    kv_heads: int | None = None
    q_heads: int | None = None
    attention_layers: tuple | range | None = None
    passes: int = 1
    traits: tuple = ()
    unread: dict = field(default_factory=dict)
    mla: bool = False
    sinks: bool = False
    causal_or_windowed: bool = False  # a draft that trtllm_mha serves
    dtype: str | None = None
    model_type: str = ""
    max_positions: int | None = None
    quantization: str | None = None
    quant_algo: str | None = None
    folder: str | None = None
    checkpoint: Checkpoint = Checkpoint()
    architectures: tuple = ()
    dflash: DraftFacts | None = None
    text: dict = field(default_factory=dict, repr=False)

    def trait(self, kind):
        """The first Trait of that kind; None where there is none."""
        return next((trait for trait in self.traits if trait.kind == kind), None)

    @property
    def recurrent(self):
        return self.trait(RECURRENT) is not None

    @property
    def gated_delta(self):
        """Whether the recurrent layers are gated-delta ones and the file says all of them.

        SGLang takes which layers keep K and V from full_attention_interval alone; layer_types may say no other.
        """
        if base_type(self.model_type) not in GATED_DELTA_TYPES or not self.attention_layers:
            return False
        interval = self.text.get("full_attention_interval")
        if not all(type(number) is int for number in (interval, *map(self.text.get, GATED_DELTA.values()))):
            return False
        if interval < 1 or self.num_layers is None:
            return False
        return list(self.attention_layers) == list(range(interval - 1, self.num_layers, interval))

    @property
    def quantized(self):
        """Whether config.json, ModelOpt's file or the tensors' names say that the weights are quantized."""
        return self.quantization is not None or self.quant_algo is not None or QUANTIZED in self.checkpoint.weights

    @property
    def mtp_head(self):
        """Whether the checkpoint says that it has a module of its own that drafts (MTP)."""
        layers = [self.text.get(key) for key in MTP_KEYS]
        return any(type(n) is int and n > 0 for n in layers) or any(name in MTP_NAMES for name in self.architectures)

    @property
    def sliding(self):
        """Whether layers have a window that SGLang's class keeps to."""
        return self.trait(WINDOWED) is not None and not never_windowed(self.architectures)

    @property
    def window_pool(self):
        """The Trait that gives windowed layers a pool of their own; None where one pool serves all layers."""
        own = (t for t in self.traits if t.kind == WINDOWED and pool_of_its_own(t, self.architectures))
        return next(own, None)

    @property
    def snapshot(self):
        folder = Path(self.folder).resolve() if self.folder else ""
        found = re.search(r"/snapshots/([0-9a-f]{40})$", str(folder))
        return found and found.group(1)

    def half_precision(self, asked):
        """Whether SGLang runs this model in float16 for ``--dtype asked``."""
        if asked == "auto":  # _get_and_verify_dtype in srt/configs/model_config.py @ 0.5.23
            if self.dtype in (None, "float32", "float"):
                return not self.model_type.startswith("gemma")
            asked = self.dtype
        return asked in ("half", "float16")


def _in_its_own_file(folder):
    """What ModelOpt's older layout says of the weights' quantization; {} without such a file."""
    try:
        content = json.loads((Path(folder) / "hf_quant_config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _quant_algo(quantization):
    """ModelOpt's name of how the weights are quantized; None where nothing says."""
    inner = quantization.get("quantization")
    named = quantization.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, dict) else None)
    return None if named is None else str(named)


def locate(path, flag):
    """The local folder or file ``path``; None for what SGLang fetches: a hub id or a URL.

    Raises: UsageError for a path that is not there.
    """
    if not path.strip():
        raise UsageError(f"{flag} {path!r}: a folder or a hub id is needed")
    try:
        os.stat(path)
        return Path(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag} {reprlib.repr(path)}: it cannot be opened ({why})") from None
    if "://" in path:
        return None
    if not _HUB_ID.fullmatch(path) or Path(path).parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no such folder (a hub id is written owner/name)")
    return None


def _config_path(path, flag, revision, cache):
    place = locate(path, flag)
    if place is None:
        return None if "://" in path else _cached_config(path, flag, revision, cache)
    if not stat.S_ISDIR(place.stat().st_mode):
        raise UsageError(f"{flag} {path}: a folder is needed, this is a file")
    if not os.path.isfile(place / "config.json"):
        raise UsageError(f"{flag} {path}: the folder has no config.json")
    return place / "config.json"


def _cached_config(hub_id, flag, revision, cache):
    """Where SGLang reads it, which is the usual cache whatever --download-dir says; else beside the weights."""
    from huggingface_hub import try_to_load_from_cache

    try:
        for place in (None, cache):
            cached = try_to_load_from_cache(hub_id, "config.json", cache_dir=place, revision=revision)
            if isinstance(cached, str):
                return Path(cached)
    except ValueError as error:
        message = f"{flag} {hub_id}: there is no such folder, and it is no hub id ({error})"
        raise UsageError(message) from None
    return None


def _object(value, what, path):
    """``value`` where it is a JSON object, {} for null."""
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"{path}: {what} must be a JSON object, got {reprlib.repr(value)}")
    return value or {}


def _number(value, what, path):
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
        raise UsageError(f"{path}: {what} must be a positive integer, got {reprlib.repr(value)}")
    return value


def _layers(text, count, found):
    """Ids of the layers that keep K and V for every token; None where nothing tells."""
    if any(trait.kind == INDEXED for trait in found):
        return None
    kinds, interval = text.get("layer_types"), text.get("full_attention_interval")
    if isinstance(kinds, list) and kinds:
        return tuple(i for i, kind in enumerate(kinds) if kind in ATTENTION_KINDS)
    if type(interval) is int and interval > 0 and count:
        return range(interval - 1, count, interval)
    recurrent = any(trait.kind == RECURRENT for trait in found)
    return None if recurrent or count is None else range(count)


def read_facts(path, flag, revision=None, cache=None):
    """Facts of the model folder ``path``, or of a hub id's ``revision`` (None: main) with its weights in ``cache``
    (None: the usual one); None for a hub id that is not on this machine.

    Raises: UsageError when the folder, its config.json or a value in it cannot be used.
    """
    file = _config_path(path, flag, revision, cache)
    if file is None:
        return None
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: it cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {path}: config.json is not JSON ({error})") from None
    if config is None:
        raise UsageError(f"{file}: it holds null and no configuration")
    config = _object(config, "the whole file", file)
    text = _object(config.get("text_config"), "text_config", file) or config
    dflash = _object(config.get("dflash_config"), "dflash_config", file)
    heads = _number(text.get("num_attention_heads"), "num_attention_heads", file)
    hidden = _number(text.get("hidden_size"), "hidden_size", file)
    head_dim = _number(text.get("head_dim"), "head_dim", file)
    model_type = str(text.get("model_type") or "")
    unread = unreadable_figures(text, model_type)
    if head_dim is None and heads and hidden and "head_dim" not in unread:
        quotient = f"hidden_size // num_attention_heads ({hidden} // {heads})"
        head_dim = _number(hidden // heads, quotient, file)
    layer_ids = dflash.get("target_layer_ids", config.get("target_layer_ids"))
    if layer_ids is not None and (
        not isinstance(layer_ids, list)
        or not layer_ids
        or not all(type(i) is int and i >= 0 for i in layer_ids)
    ):
        raise UsageError(f"{file}: target_layer_ids must be a list of layer ids, got {layer_ids!r}")
    # SGLang captures in layer order and each layer once; the drafter would get other features.
    if layer_ids is not None and layer_ids != sorted(set(layer_ids)):
        raise UsageError(f"{file}: target_layer_ids must ascend without repeats, got {layer_ids!r}")
    layers = _number(text.get("num_hidden_layers"), "num_hidden_layers", file)
    kinds = text.get("layer_types")
    named = [c.get(k) for c in (config, text) for k in ("quantization_config", "compression_config")]
    quantization = next((value for value in named if isinstance(value, dict)), None)
    folder = checkpoint_folder(path, revision, cache) or file.parent
    dtype = next((c[k] for c in (config, text) for k in ("dtype", "torch_dtype") if c.get(k)), None)
    names = config.get("architectures")
    architectures = tuple(map(str, names if isinstance(names, list) else [names] if names else ()))
    found = traits(text, model_type, architectures)
    loops = [_number(trait.value, trait.key, file) for trait in found if trait.kind in (LOOPED, SHARED)]
    kv_heads = _number(text.get("num_key_value_heads"), "num_key_value_heads", file) or heads
    return ModelFacts(
        path=str(path),
        num_layers=layers,
        head_dim=head_dim,
        v_head_dim=_number(text.get("v_head_dim"), "v_head_dim", file) or head_dim,
        block_size=_number(
            dflash.get("block_size", config.get("block_size")), "block_size", file
        ),
        target_layer_ids=None if layer_ids is None else tuple(layer_ids),
        kv_heads=None if "num_key_value_heads" in unread else kv_heads,
        q_heads=heads,
        attention_layers=_layers(text, layers, found),
        passes=max(loops, default=1),
        traits=found,
        unread=unread,
        mla=bool(text.get("kv_lora_rank")) or any("DeepseekV4" in a for a in architectures),
        sinks=sinks(text, architectures),
        causal_or_windowed=text.get("is_causal") is True
        or (
            isinstance(kinds, list)
            and len(kinds) == layers
            and all(kind == "sliding_attention" for kind in kinds)
        ),
        dtype=dtype if isinstance(dtype, str) else None,
        model_type=model_type,
        max_positions=_number(text.get("max_position_embeddings"), "max_position_embeddings", file),
        quantization=None if quantization is None else str(quantization.get("quant_method") or "unnamed"),
        quant_algo=_quant_algo(quantization or {}) or _quant_algo(_in_its_own_file(folder)),
        folder=str(folder),
        checkpoint=read_checkpoint(folder),
        architectures=architectures,
        dflash=read_draft_facts(config, text, architectures, file),
        text=text,
    )
