"""Writes sglang_flags.json: the command line that the installed SGLang accepts.

usage: python -m launcher.flags_export        (imports sglang; a test compares file and parser)
"""

import argparse
import json
from importlib.metadata import version

from launcher.flags import TABLE

_TYPES = {"int": "int", "float": "float", "human_readable_int": "human_int"}  # by name


def describe(action):
    """One argparse action as plain data: names, whether it takes values, their type and choices."""
    entry = {"names": action.option_strings}
    if isinstance(action, argparse.BooleanOptionalAction):
        entry["kind"] = "optional_bool"
    elif action.nargs == 0:
        entry["kind"] = "switch"
    else:
        entry["kind"] = "value"
        if action.nargs is not None:
            entry["nargs"] = action.nargs
        kind = _TYPES.get(getattr(action.type, "__name__", None))
        if kind is not None:
            entry["type"] = kind
        if action.choices is not None:
            entry["choices"] = sorted(action.choices, key=str)  # one of them is a set upstream
    if action.dest != action.option_strings[-1].lstrip("-").replace("-", "_"):
        entry["dest"] = action.dest
    if action.required:
        entry["required"] = True
    if isinstance(action.default, (bool, int, float, str)) and action.default != argparse.SUPPRESS:
        entry["default"] = action.default
    return entry


def export():
    """The table for the installed SGLang: its release and every option in order."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = [describe(a) for a in parser._actions if a.option_strings and "--help" not in a.option_strings]
    return {"sglang": version("sglang"), "options": options}


def dump(table):
    """The table as text, one option a line."""
    lines = ",\n".join("  " + json.dumps(o) for o in table["options"])
    return f'{{"sglang": {json.dumps(table["sglang"])}, "options": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    TABLE.write_text(dump(export()))
