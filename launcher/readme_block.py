"""Text in the README that a program writes, between <!-- name:begin --> and <!-- name:end -->."""

import argparse
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


class StaleReadme(Exception):
    """A block is missing, or differs from what it should be; the message says which."""


def markdown(header, rows):
    """Lines of a table; cells are strings."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def fill(readme, name, text):
    """``readme`` with ``text`` in the block of that name.

    Raises: StaleReadme when the block's markers are not there exactly once.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise StaleReadme(f"the {name} block's markers must be in the README once each")
    before, rest = readme.split(begin)
    return before + begin + text + end + rest.split(end)[1]


def parser(description, **options):
    """Options every writer of a block takes: --check and --readme."""
    made = argparse.ArgumentParser(description=description, **options)
    made.add_argument("--check", action="store_true", help="exit 1 when a block is stale, write nothing")
    made.add_argument("--readme", type=Path, default=README)
    return made


def update(who, args, filled, stale):
    """Write ``filled(old README)``, or with --check compare it; the exit code, 1 for a stale README."""
    old = args.readme.read_text()
    try:
        new = filled(old)
        if args.check and new != old:
            raise StaleReadme(stale)
    except StaleReadme as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 1
    if not args.check:
        args.readme.write_text(new)
    return 0
