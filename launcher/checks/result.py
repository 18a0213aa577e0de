"""What a check found: a status, one line, and the items behind it."""

from dataclasses import asdict, dataclass, field

PASS, FAIL, NOT_RUN, ERROR, CUT, SKIPPED = "pass", "fail", "not run", "error", "cut", "skipped"
# Of several items the first of these that occurs is the check's status.
WORST_FIRST = (FAIL, ERROR, CUT, NOT_RUN, PASS)


@dataclass(frozen=True)
class Item:
    """One thing judged. ``status`` as a check's; ``detail`` says what was found."""

    name: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class Result:
    """One check's outcome.

    ``summary``: one line for the table. ``numbers``: what the report plots and --json carries, plain
    data. Only the status "pass" is a pass.
    """

    check: str
    status: str
    summary: str
    items: tuple = ()
    numbers: dict = field(default_factory=dict)

    def as_json(self):
        return {**asdict(self), "items": [asdict(item) for item in self.items]}


def settle(check, items, summary, numbers=None):
    """The Result of ``items``: the worst status among them; "not run" where there is none.

    ``summary`` is followed by the first two items that are not passes.
    """
    items = tuple(items)
    if not items:
        return Result(check, NOT_RUN, "nothing was asked", items, numbers or {})
    status = next(s for s in WORST_FIRST if any(item.status == s for item in items))
    bad = [item for item in items if item.status == status] if status != PASS else []
    shown = "; ".join(f"{item.name}: {item.detail}" for item in bad[:2])
    more = f"; {len(bad) - 2} more" if len(bad) > 2 else ""
    return Result(check, status, f"{summary}; {shown}{more}" if bad else summary, items, numbers or {})
