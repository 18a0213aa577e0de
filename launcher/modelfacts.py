"""What a launch needs to know about a model, read from its config.json alone."""

import json
import os
import re
import reprlib
import stat
from dataclasses import dataclass
from pathlib import Path

from launcher.flags import UsageError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class ModelFacts:
    """Attention geometry of a target or a draft; None where the config does not say."""

    path: str
    num_layers: int | None
    head_dim: int | None
    v_head_dim: int | None
    block_size: int | None = None
    target_layer_ids: tuple | None = None


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


def _config_path(path, flag):
    place = locate(path, flag)
    if place is None:
        return None if "://" in path else _cached_config(path, flag)
    if not stat.S_ISDIR(place.stat().st_mode):
        raise UsageError(f"{flag} {path}: a folder is needed, this is a file")
    if not os.path.isfile(place / "config.json"):
        raise UsageError(f"{flag} {path}: the folder has no config.json")
    return place / "config.json"


def _cached_config(hub_id, flag):
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(hub_id, "config.json")
    except ValueError as error:
        message = f"{flag} {hub_id}: there is no such folder, and it is no hub id ({error})"
        raise UsageError(message) from None
    return Path(cached) if isinstance(cached, str) else None


def _object(value, what, path):
    """``value`` where it is a JSON object, {} for null."""
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"{path}: {what} must be a JSON object, got {reprlib.repr(value)}")
    return value or {}


def _number(value, what, path):
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{path}: {what} must be a positive integer, got {value!r}")
    return value


def read_facts(path, flag):
    """Facts of the model folder ``path``; None for a hub id that is not in the local cache.

    Raises: UsageError when the folder, its config.json or a value in it cannot be used.
    """
    file = _config_path(path, flag)
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
    if head_dim is None and heads and hidden:
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
    return ModelFacts(
        path=str(path),
        num_layers=_number(text.get("num_hidden_layers"), "num_hidden_layers", file),
        head_dim=head_dim,
        v_head_dim=_number(text.get("v_head_dim"), "v_head_dim", file) or head_dim,
        block_size=_number(
            dflash.get("block_size", config.get("block_size")), "block_size", file
        ),
        target_layer_ids=None if layer_ids is None else tuple(layer_ids),
    )
