"""A verdict on a launch: as data, as JSON's objects, and as text for a terminal."""

from dataclasses import dataclass

from launcher.effective import Value
from launcher.launch import Launch
from launcher.probe import Failed
from launcher.refusal import fill, render

SCHEMA, SCHEMA_VERSION = "fp4kv.judge", 1


@dataclass(frozen=True)
class Verdict:
    """What was found, in table order.

    ``status``: works (``results`` name the files), untested or fails. ``allowed``: untested
    combinations that --allow let through. ``values``: asked beside effective.
    """

    status: str
    refusals: tuple
    allowed: tuple
    warnings: tuple
    values: tuple
    results: tuple
    launch: Launch

    @property
    def machine(self):
        return self.launch.machine

    @property
    def flags(self):
        return self.launch.flags

    @property
    def accepted(self):
        return not self.refusals

    def as_dict(self):
        """The verdict as plain data; the meaning of a key changes only with SCHEMA_VERSION."""
        gpu, patch = self.machine.gpu, self.machine.patch
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "accepted": self.accepted,
            "status": self.status,
            "results": list(self.results),
            "refusals": [found.as_dict() for found in self.refusals],
            "allowed": [found.as_dict() for found in self.allowed],
            "warnings": list(self.warnings),
            "values": [vars(value) for value in self.values],
            "machine": {
                "gpu": {"failed": gpu.reason}
                if isinstance(gpu, Failed)
                else {"name": gpu.name, "capability": gpu.sm, "memory_bytes": gpu.memory_bytes},
                "versions": self.machine.versions,
                "patch": {"failed": patch.reason} if isinstance(patch, Failed) else patch.as_dict(),
                "switches": list(self.machine.switches),
            },
        }


def render_verdict(verdict):
    """The verdict as text for a terminal: what is effective, what is refused, and the outcome."""
    lines = [*_values(verdict), ""]
    lines += [fill(f"warning: {text}", " " * 9) for text in verdict.warnings]
    lines += [fill(f"allowed[{r.id}] {r.name}: {r.says}", "    ") for r in verdict.allowed]
    if verdict.warnings or verdict.allowed:
        lines.append("")
    if verdict.refusals:
        lines += [render(verdict.refusals, wrapped=True), ""]
        names = ", ".join(r.id for r in verdict.refusals)
        lines.append(fill(f"refused: {names} ({verdict.status})", "  "))
    else:
        proof = f" ({', '.join(verdict.results)})" if verdict.results else ""
        lines.append(fill(f"accepted: {verdict.status}{proof}", "  "))
    return "\n".join(lines)


def _values(verdict):
    """Asked beside effective, a line each."""
    rows = [Value("", "asked", "effective"), *verdict.values]
    width, asked = (max(len(row[i]) for row in map(_cells, rows)) for i in (0, 1))
    asked = min(asked, 34)
    lines = []
    for name, left, right in map(_cells, rows):
        gap = " " * (width + 2 + asked + 2)
        lines.append(fill(f"{name:<{width}}  {left:<{asked}}  {right}".rstrip(), gap))
    return lines


def _cells(value):
    return value.what, value.asked, value.effective + (f" ({value.why})" if value.why else "")
