"""`fp4kv explain [FP4-nnn]`: what a refusal means, at length and with an example.

The wording is launcher/refusal.py's; the fields that a refusal fills in stand here with values of
launcher/examples.py, and as <field> where that has none.
"""

import difflib
import json
import re
import sys

from launcher.examples import EXAMPLES
from launcher.refusal import TEXTS, fill
from launcher.rules import FAILS, RULES

JSON_VERSION = 1
_LABELS = {
    "what": "what", "why": "why", "evidence": "evidence", "status": "status", "example": "example",
    "help": "to do",
}  # fmt: skip


class _Filling(dict):
    """An example's values by field; a field without one is shown by its name."""

    def __getitem__(self, field):
        return _Value(self.get(field, f"<{field.replace('_', ' ')}>"))


class _Value(str):
    """Takes any format specification, since some fields are numbers when a refusal is made."""

    def __format__(self, _spec):
        return str(self)


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "explain",
        help="what a refusal means and what to do about it",
        description="Explains one refusal; lists all of them where no id is given.",
    )
    parser.add_argument("id", nargs="?", metavar="FP4-nnn")
    parser.add_argument("--json", action="store_true", help="the explanation as JSON")
    return parser


def explain(id):
    """The refusal ``id`` as plain data: id, name and the parts in the order they are shown."""
    text, filling = TEXTS[id], _Filling(EXAMPLES.get(id, {}))
    shown = (text.says, text.why, text.evidence, _status(id), "{asked}", text.help)
    parts = [part and part.format_map(filling) for part in shown]
    return {"id": id, "name": text.name, **dict(zip(_LABELS, parts, strict=True))}


def _status(id):
    """What a launch rule says about its combination; None for what is no launch rule."""
    rule = RULES.get(id)
    if rule is None:
        return None
    if rule.allowable:
        return f"{rule.status}: --allow {id} starts it all the same"
    return rule.status + ("" if rule.status == FAILS else ", and refused in the server too")


def nearest(asked):
    """The id closest to what was typed: by its number where there is one, else by spelling."""
    digits = re.search(r"(\d{1,6})\D*$", asked)
    if digits:
        return min(TEXTS, key=lambda id: abs(int(id[4:]) - int(digits[1])))
    names = {text.name: id for id, text in TEXTS.items()}
    return names[difflib.get_close_matches(asked, names, n=1, cutoff=0)[0]]


def render(explained):
    """One explanation as text for a terminal."""
    blocks = [f"{explained['id']} {explained['name']}"]
    for part, label in _LABELS.items():
        if explained[part] is None:
            continue
        blocks.append(fill(f"  {label + ':':<10}{explained[part]}", " " * 12))
    return "\n\n".join(blocks)


def run(args):
    """Prints to stdout, for a pager; exit code 0, or 2 for an id that is not in the table."""
    if args.id is None:
        chosen = sorted(TEXTS)
    elif args.id.upper() in TEXTS:
        chosen = [args.id.upper()]
    else:
        print(f"fp4kv explain: there is no {args.id}; nearest is {nearest(args.id)}", file=sys.stderr)
        return 2
    explained = [explain(id) for id in chosen]
    if args.json:
        print(json.dumps({"version": JSON_VERSION, "explained": explained}, indent=2))
    elif args.id is None:
        print("\n".join(f"{entry['id']}  {entry['name']}" for entry in explained))
    else:
        print(render(explained[0]))
    return 0
