"""The wording of a refusal, apart from the values that a launch fills in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A refusal's wording; ``{fields}`` are filled in by :func:`refusal`."""

    name: str  # the bad combination, kebab case
    says: str  # one lower-case sentence, no full stop
    why: str  # the mechanism, not the symptom
    evidence: str
    help: str
