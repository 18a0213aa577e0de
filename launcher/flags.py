"""SGLang's own command line, parsed without importing SGLang.

The table beside this file is exported from the pinned release (launcher/flags_export.py).
"""

import argparse
import difflib
import json
import re
from decimal import Decimal
from pathlib import Path

TABLE = Path(__file__).with_name("sglang_flags.json")

# SGLang's parser refuses these by their spelling; the rules say why and what to do instead.
_JUDGED_CHOICES = {"--speculative-draft-kv-cache-dtype": ["nvfp4", "fp4_mx_block16"]}


_MULTIPLIERS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def human_int(text):
    """Numbers as human_readable_int in srt/utils/common.py @ 0.5.23 takes them: 4096, 25.6k, 4Ki."""
    found = re.fullmatch(r"\s*([+-]?\d+)(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T|)\s*", text, re.ASCII)
    if not found or (found[2] and not re.fullmatch("[kMGT]", found[3])):
        raise ValueError(text)
    number = Decimal(found[1] + found[2]) if found[2] else int(found[1])
    return int(number * _MULTIPLIERS[found[3]])


_TYPES = {"int": int, "float": float, "human_int": human_int}


class UsageError(Exception):
    """A flag, value or path that cannot be meant; its text is one sentence that names it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def load_table():
    """The exported table: {"sglang": release, "options": [...]}."""
    return json.loads(TABLE.read_text())


def _add(parser, option):
    names = option["names"]
    kwargs = {"default": option.get("default")}
    if "dest" in option:
        kwargs["dest"] = option["dest"]
    if option["kind"] == "optional_bool":
        # argparse derives --no-x from --x itself.
        names = [n for n in names if not n.startswith("--no-")]
        kwargs["action"] = argparse.BooleanOptionalAction
    elif option["kind"] == "switch":
        kwargs["action"] = "store_true"
    else:
        kwargs["nargs"] = option.get("nargs")
        kwargs["choices"] = option.get("choices") and [
            *option["choices"],
            *_JUDGED_CHOICES.get(names[0], ()),
        ]
        kwargs["type"] = _TYPES.get(option.get("type"), str)
        kwargs["required"] = option.get("required", False)
    parser.add_argument(*names, **kwargs)


def parse(argv):
    """SGLang's flags as a namespace with SGLang's field names and defaults.

    Raises: UsageError for an unknown flag (with the nearest spelling), a value outside the
    choices, a missing value or a missing --model-path.
    """
    if "--" in argv:
        raise UsageError("'--' is written once, before SGLang's flags")
    if "--help" in argv or "-h" in argv:
        raise UsageError("SGLang's own help is `python -m sglang.launch_server --help`")
    parser = _Parser(prog="fp4kv serve --", add_help=False)
    names = []
    for option in load_table()["options"]:
        names.extend(option["names"])
        _add(parser, option)
    known, rest = parser.parse_known_args(argv)
    if known.config is not None:
        raise UsageError("--config is not read here; write its flags on the command line")
    if rest:
        flag = rest[0].split("=", 1)[0]
        near = difflib.get_close_matches(flag, names, n=1)
        raise UsageError(
            f"unknown flag {flag!r}" + (f"; nearest is {near[0]}" if near else "")
            if flag.startswith("-")
            else f"unexpected argument {flag!r}"
        )
    return known
