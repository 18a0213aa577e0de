"""What a launch needs to know about a model, read from its config.json alone."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from launcher.flags import UsageError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelFacts:
    """Attention geometry of a target or a draft; None where the config does not say."""

    path: str
    num_layers: int | None
    head_dim: int | None
    v_head_dim: int | None
    block_size: int | None = None
    target_layer_ids: tuple | None = None


def _config_path(path, flag):
    folder = Path(path)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UsageError(f"{flag} {path}: the folder has no config.json")
        return file
    if folder.exists():
        raise UsageError(f"{flag} {path}: a folder is needed, this is a file")
    if not _HUB_ID.fullmatch(path) or folder.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no such folder")
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached) if isinstance(cached, str) else None


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
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{flag} {path}: config.json is not JSON ({error})") from None
    text = config.get("text_config") or config
    dflash = config.get("dflash_config") or {}
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    head_dim = _number(text.get("head_dim"), "head_dim", file)
    if head_dim is None and heads and hidden:
        head_dim = hidden // heads
    layer_ids = dflash.get("target_layer_ids", config.get("target_layer_ids"))
    if layer_ids is not None and (
        not isinstance(layer_ids, list)
        or not layer_ids
        or not all(type(i) is int and i >= 0 for i in layer_ids)
    ):
        raise UsageError(f"{file}: target_layer_ids must be a list of layer ids, got {layer_ids!r}")
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
