"""Every check by its id, in the order they are asked."""

from collections.abc import Callable
from dataclasses import dataclass

from launcher.checks import ability, agreement, equal, health, soak


@dataclass(frozen=True)
class Check:
    """``ask(session)`` sends the requests; it raises NotRun where it cannot, ServerGone where one died.

    ``score(recording)`` judges what is on file and asks nothing; it returns a Result.
    """

    id: str
    title: str
    ask: Callable
    score: Callable


def _nothing(session):
    """For a check that looks at the answers of the others."""


CHECKS = {
    check.id: check
    for check in (
        Check(ability.ARITHMETIC, "17 x 23 and other products", ability.ask_arithmetic, ability.score_arithmetic),
        Check(ability.TOOL_CALL, "tool calls whose JSON must validate", ability.ask_tool_call, ability.score_tool_call),
        Check(ability.RECALL, "a planted code at depths and positions", ability.ask_recall, ability.score_recall),
        Check(equal.DRAFTED, "drafted against undrafted greedy tokens", equal.ask_drafted, equal.score_drafted),
        Check(equal.CACHE, "the same prompt three times", equal.ask_cache, equal.score_cache),
        Check(equal.IDENTICAL, "four identical requests at once", equal.ask_identical, equal.score_identical),
        Check(equal.MIXED, "long and short requests at once", equal.ask_mixed, equal.score_mixed),
        Check(equal.CUT_BY_CACHE, "a prompt cut by the prefix cache", equal.ask_prefix_cut, equal.score_prefix_cut),
        Check(equal.CHUNKED, "a prompt longer than a chunk", equal.ask_chunked, equal.score_chunked),
        Check(agreement.AGREEMENT, "paired answers beside a control server", agreement.ask_agreement, agreement.score_agreement),
        Check(health.ACCEPT, "accept length by workload and depth", health.ask_accept, health.score_accept),
        Check(soak.SOAK, "the pool filled and retracted, then asked again", soak.ask_soak, soak.score_soak),
        Check(health.DEGENERATE, "loops and marks in any answer", _nothing, health.score_degenerate),
    )
}  # fmt: skip
