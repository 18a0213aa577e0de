"""Profiles: SGLang's flags for one machine, plus what this kit wants to know about it.

A profile is a YAML mapping (configs/*.yaml). Whatever cannot be meant is named with file and line.
"""

import difflib
import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.checks.suite import WORKLOADS
from launcher.flags import UsageError, parse

UNTESTED = "untested"
_STAND_IN = ["--model-path", "MODEL"]  # a profile may leave the model to whoever uses it


@dataclass(frozen=True)
class Profile:
    """One machine's launch; None where the file does not say."""

    name: str
    flags: list[str]  # SGLang's, as on its command line
    gpu: str  # the architecture, "sm_121"
    gpu_memory_gb: float  # of one GPU, in 2^30 bytes as SGLang counts
    gpus: int  # over all machines
    tp: int  # out of the flags
    result: str  # path of the result file that proves it, or "untested"
    draft_revision: str | None = None
    draft_sha256: str | None = None  # of the draft's safetensors files, in name order
    accept_length_floor: float | None = None
    accept_length_floors: dict | None = None  # by workload of `fp4kv check`; over the one for all
    note: str | None = None


class _Wrong(Exception):
    """What a value is not; :func:`load_profile` adds the file, the line and the key."""


def _scalar(node, *kinds):
    kind = node.tag.rpartition(":")[2] if isinstance(node, yaml.ScalarNode) else None
    return node.value if kind in kinds else None


def _text(node):
    value = _scalar(node, "str")
    if value is None or not value.strip():
        raise _Wrong("must be text")
    return value.strip()


def _pattern(pattern, what):
    def read(node):
        value = _scalar(node, "str")
        if value is None or not re.fullmatch(pattern, value, re.ASCII):
            raise _Wrong(f"must be {what}")
        return value

    return read


def _number(convert, least, what):
    def read(node):
        try:
            value = convert(_scalar(node, "int", "float") or "")
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise _Wrong(f"must be {what}")
        return value

    return read


def _floors(node):
    if not isinstance(node, yaml.MappingNode):
        raise _Wrong("must be a mapping of workloads to accept lengths")
    read = _number(float, 1, "a number of at least 1")
    floors = {}
    for key, value in node.value:
        if key.value not in WORKLOADS:
            raise _Wrong(f"has no workload {key.value!r}; there are {', '.join(WORKLOADS)}")
        try:
            floors[key.value] = read(value)
        except _Wrong as error:
            raise _Wrong(f"of {key.value} {error}") from None
    return floors


# Every key but flags and result, which need more than their own value.
_KEYS = {
    "name": _text,
    "gpu": _pattern(r"sm_\d{2,3}", "an architecture like sm_121"),
    "gpu_memory_gb": _number(float, 1, "a number of at least 1"),
    "gpus": _number(int, 1, "a whole number of at least 1"),
    "draft_revision": _text,
    "draft_sha256": _pattern(r"[0-9a-f]{64}", "64 hexadecimal digits, quoted where all are decimal"),
    "accept_length_floor": _number(float, 1, "a number of at least 1"),
    "accept_length_floors": _floors,
    "note": _text,
    "flags": None,
    "result": _text,
}
_REQUIRED = ("name", "flags", "gpu", "gpu_memory_gb", "gpus", "result")


def load_profile(path):
    """The profile in the YAML file ``path``; a result's path is read from the profile's folder.

    Raises: UsageError, with file and line, for a file that is not YAML, an unknown, repeated or
    missing key, a value of another kind, a flag or choice that SGLang does not know, and a result
    that is not on file.
    """
    root = _compose(path)
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}:1: a profile is a mapping of keys to values")
    values, nodes = {}, {}
    for key, node in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = key.value if isinstance(key, yaml.ScalarNode) else "?"
        if name not in _KEYS:
            raise UsageError(f"{where}: unknown key {name!r}{_hint(name)}")
        if name in nodes:
            raise UsageError(f"{where}: {name} is written twice")
        nodes[name] = node
        try:
            values[name] = _flags(path, node) if name == "flags" else _KEYS[name](node)
        except _Wrong as error:
            raise UsageError(f"{where}: {name} {error}") from None
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise UsageError(f"{path}:{root.start_mark.line + 1}: {missing[0]} is missing")
    values["result"] = _result(path, nodes["result"], values["result"])
    return Profile(**values, tp=_parsed(values["flags"]).tp_size)


def _hint(key):
    if key == "tp":
        return "; tensor parallelism is SGLang's --tp-size, under flags"
    near = difflib.get_close_matches(key, _KEYS, n=1)
    return f"; nearest is {near[0]}" if near else ""


def _compose(path):
    try:
        loader = yaml.SafeLoader(Path(path).read_bytes())
        node = loader.get_single_node()
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise UsageError(f"{path}:{line}: not YAML ({error.problem})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    if node is None:
        raise UsageError(f"{path}:1: the file is empty")
    return node


def _flags(path, node):
    """The flags as a list of words. One item is one flag with its values, so a mistake has a line."""
    if not isinstance(node, yaml.SequenceNode):
        raise _Wrong("must be a list, one flag with its values an item")
    found = []
    for item in node.value:
        where = f"{path}:{item.start_mark.line + 1}"
        text = _scalar(item, "str")
        if text is None or not text.startswith("--"):
            raise UsageError(f"{where}: an item of flags is text and starts with '--'")
        try:
            words = shlex.split(text)
            _parsed(words)
        except (UsageError, ValueError) as error:
            raise UsageError(f"{where}: {error}") from None
        found.extend(words)
    return found


def _parsed(words):
    return parse([*_STAND_IN, *words])


def _result(path, node, value):
    if value == UNTESTED:
        return value
    place = os.path.normpath(os.path.join(os.path.dirname(path), value))
    if not os.path.isfile(place):
        line = node.start_mark.line + 1
        raise UsageError(f"{path}:{line}: result {place} is not on file; write {UNTESTED!r} where there is none")
    return place
