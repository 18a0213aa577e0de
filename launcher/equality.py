"""Are two greedy answers the same? Token by token, with the reference's margin where they part.

On a GPU decode and verify sum in another order, so two answers may part where the reference run's
two best tokens are nearly equal. That is a near-tie: reported and counted, not a failure. A gap
above the bound is a difference.
"""

from dataclasses import dataclass

# On the embedded CPU platform both passes run the same arithmetic; nothing may part there.
CPU_BOUND = 0.0
# By KV format: how far the rounding noise of a matrix product moves the margin of the two best tokens
# in 99 of 100 steps, rounded (tests/bench/results/near_tie_smollm2.json). FP4 multiplies the noise
# most: one step in a BF16 element of K may flip its code, a third of its block's largest value.
NEAR_TIE_BOUNDS = {"bf16": 0.5, "fp8_e4m3": 1.0, "nvfp4": 2.0}


@dataclass(frozen=True)
class Comparison:
    """``verdict``: "equal", "near-tie" or "different"; ``position`` and ``gap`` where they part."""

    verdict: str
    position: int | None = None
    gap: float | None = None

    @property
    def passed(self):
        return self.verdict != "different"

    def __str__(self):
        if self.position is None:
            return self.verdict
        return f"{self.verdict} at token {self.position} (gap {self.gap:.3f})"


def compare(reference, candidate, gaps, bound):
    """Compares two token sequences.

    ``gaps``: the reference run's difference of its two largest log-probabilities at each position.
    ``bound``: the largest gap that counts as a near-tie, in natural log units; 0 allows none.

    Raises: ValueError when ``gaps`` does not cover the reference.
    """
    if len(gaps) < len(reference):
        raise ValueError(f"{len(gaps)} gaps for {len(reference)} reference tokens")
    for position, (a, b) in enumerate(zip(reference, candidate)):
        if a != b:
            return _parted(position, gaps[position], bound)
    shorter = min(len(reference), len(candidate))
    if len(reference) == len(candidate):
        return Comparison("equal")
    if len(candidate) < len(reference):
        return _parted(shorter, gaps[shorter], bound)
    # The reference stopped first; no margin was recorded for what it did not emit.
    return Comparison("different", shorter, float("inf"))


def _parted(position, gap, bound):
    verdict = "near-tie" if gap < bound else "different"
    return Comparison(verdict, position, gap)
