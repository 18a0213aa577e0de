"""Writes sglang_fp4kv/sglang_classes.json: what the installed SGLang's model classes can do, as their sources say.

usage: python -m launcher.classes_export        (imports no model; a test compares file and sources)

"dflash" and "eagle3": the class, or one that it inherits from, has the method by which its layers' outputs are captured
for such a drafter; SGLang stops at start without it. "windows": its file, or one of those of SGLang's models that it
imports from, names a sliding window at all; the others read every token, whatever config.json says.
"""

import ast
import importlib.util
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path

from sglang_fp4kv.model_classes import CAPTURES, TABLE, WINDOWS

_MODELS = "sglang.srt.models"
_METHODS = {can: f"set_{can}_layers_to_capture" for can in CAPTURES.values()}


@cache
def _folder():
    return Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt", "models")


@cache
def _tree(file):
    return ast.parse(file.read_text("utf-8"))


@cache
def _imports(file):
    """Name -> (file, name there) of what ``file`` imports from other files of models."""
    found = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_MODELS}."):
            other = _folder() / (node.module.removeprefix(f"{_MODELS}.").replace(".", "/") + ".py")
            if other.is_file():
                found |= {alias.asname or alias.name: (other, alias.name) for alias in node.names}
    return found


@cache
def _classes(file):
    return {node.name: node for node in _tree(file).body if isinstance(node, ast.ClassDef)}


def _has(file, name, method):
    """Whether class ``name`` of ``file`` or one that it inherits from defines ``method``."""
    node = _classes(file).get(name)
    if node is None:
        there = _imports(file).get(name)
        return there is not None and _has(*there, method)
    if any(isinstance(part, ast.FunctionDef) and part.name == method for part in node.body):
        return True
    return any(_has(file, base.id, method) for base in node.bases if isinstance(base, ast.Name))


def _windows(file, seen=None):
    seen = set() if seen is None else seen
    seen.add(file)
    if "sliding_window" in file.read_text("utf-8"):
        return True
    return any(_windows(other, seen) for other, _ in _imports(file).values() if other not in seen)


def _entries(file):
    """Names in EntryClass, a name or a list of names."""
    for node in _tree(file).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets):
            named = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else [node.value]
            yield from (part.id for part in named if isinstance(part, ast.Name))


def export():
    """The table for the installed SGLang: its release, and what each class can do."""
    classes = {}
    for file in sorted(_folder().glob("*.py")):
        for name in _entries(file):
            can = [what for what, method in _METHODS.items() if _has(file, name, method)]
            classes[name] = [*can, *([WINDOWS] if _windows(file) else [])]
    return {"sglang": version("sglang"), "classes": dict(sorted(classes.items()))}


def dump(table):
    """The table as text, one class a line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(can)}" for name, can in table["classes"].items())
    return f'{{"sglang": {json.dumps(table["sglang"])}, "classes": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    TABLE.write_text(dump(export()))
