"""Refusals: what was asked, why it cannot be had, where that is written, and what would be accepted.

One table of texts, one renderer. Ids are never reused. FP4-001 to FP4-009 and FP4-016 are about the
patch series, the others about launches (launcher/rules.py).
"""

import textwrap
from dataclasses import asdict, dataclass

from launcher import texts_launch, texts_model, texts_patch, texts_together

COLUMNS = 100
_ALL = texts_patch.TEXTS | texts_launch.TEXTS | texts_model.TEXTS | texts_together.TEXTS
TEXTS = dict(sorted(_ALL.items()))


@dataclass(frozen=True)
class Refusal:
    id: str
    name: str
    says: str
    asked: str
    why: str
    evidence: str
    help: str

    def as_dict(self):
        return asdict(self)


class Refused(Exception):
    """Carries one or more refusals, in table order; its text is their rendering."""

    def __init__(self, *refusals):
        self.refusals = tuple(sorted(refusals, key=lambda refusal: refusal.id))
        super().__init__(render(self.refusals))


def refusal(id, *, asked, **facts):
    """The refusal ``id`` with its text filled in from ``facts``."""
    text = TEXTS[id]
    return Refusal(
        id=id,
        name=text.name,
        says=text.says.format(**facts),
        asked=asked,
        why=text.why.format(**facts),
        evidence=text.evidence.format(**facts),
        help=text.help.format(**facts),
    )


def render(refusals, *, wrapped=False):
    """The refusals as text, one block each, a blank line between blocks.

    ``wrapped``: lines of at most 100 columns; otherwise each part is one line, so that the commands
    and paths in it can be copied.
    """
    lay_out = fill if wrapped else lambda text, indent: text
    return "\n\n".join(
        "\n".join(
            [
                lay_out(f"refused[{r.id}] {r.name}: {r.says}", " " * 4),
                lay_out(f"  asked:    {r.asked}", " " * 12),
                lay_out(f"  why:      {r.why}", " " * 12),
                lay_out(f"  evidence: {r.evidence}", " " * 12),
                "",
                lay_out(f"help: {r.help}", " " * 6),
            ]
        )
        for r in refusals
    )


def fill(text, indent):
    """``text`` in lines of at most 100 columns; what has no space in it, a path, stays whole."""
    return textwrap.fill(
        text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
