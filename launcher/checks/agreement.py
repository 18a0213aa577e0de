"""A fixed set of answers beside a control server's: paired counts, intervals, and McNemar's test."""

from launcher.checks import bounds
from launcher.checks.ability import judge_prompt, suite_of
from launcher.checks.options import MIN_ANSWERS
from launcher.checks.result import FAIL, NOT_RUN, PASS, Item, Result, settle
from launcher.checks.session import CONTROL, TARGET, NotRun
from launcher.checks.statistics import mcnemar, wilson

AGREEMENT = "agreement"


def ask_agreement(session):
    if not session.has(CONTROL):
        raise NotRun("no --control given")
    for prompt in session.suite.agreement(session.options.answers):
        for server in (TARGET, CONTROL):
            session.ask(prompt, server=server)


def score_agreement(recording):
    pairs, items = [], []
    for prompt in suite_of(recording).agreement(recording.run["options"]["answers"]):
        asked = [recording.one(AGREEMENT, prompt.id, server) for server in (TARGET, CONTROL)]
        if None in asked:
            continue
        judged = [judge_prompt(exchange, prompt) for exchange in asked]
        unanswered = [item for item in judged if item.status not in (PASS, FAIL)]
        if unanswered:
            items.append(Item(prompt.id, unanswered[0].status, unanswered[0].detail))
            continue
        ours, theirs = (item.status == PASS for item in judged)
        pairs.append((ours, theirs, asked[0].text == asked[1].text))
        if ours != theirs:
            worse = judged[0].detail if theirs else f"the control: {judged[1].detail}"
            items.append(Item(prompt.id, PASS, f"{'lost' if theirs else 'gained'}: {worse}"))
    if not pairs:
        return settle(AGREEMENT, items, "no pair of answers")
    return _judge(pairs, items)


def count(pairs):
    """The paired counts, intervals and test as plain data; ``pairs``: (ours right, control right, same text)."""
    total = len(pairs)
    lost = sum(theirs and not ours for ours, theirs, _ in pairs)
    gained = sum(ours and not theirs for ours, theirs, _ in pairs)
    both = sum(ours and theirs for ours, theirs, _ in pairs)
    found = {
        "pairs": total, "both_right": both, "lost": lost, "gained": gained,
        "both_wrong": total - both - lost - gained, "p_value": mcnemar(lost, gained),
        "same_text": sum(same for *_, same in pairs),
    }  # fmt: skip
    for name, successes in (
        ("target_right", both + gained), ("control_right", both + lost),
        ("unchanged", total - lost - gained), ("changed", lost + gained), ("same_text", found["same_text"]),
    ):  # fmt: skip
        found[name] = successes
        found[f"{name}_interval"] = wilson(successes, total)
    return found


def _judge(pairs, items):
    found = count(pairs)
    total = found["pairs"]
    low, high = found["unchanged_interval"]
    summary = (
        f"{found['target_right']} and {found['control_right']} of {total} right, both {found['both_right']},"
        f" lost {found['lost']}, gained {found['gained']}; {found['unchanged']} of {total} unchanged"
        f" ({low:.2f} to {high:.2f}), McNemar p {found['p_value']:.3g}"
    )
    if total < MIN_ANSWERS:
        summary += f"; fewer than the {MIN_ANSWERS} that the check is meant for"
    problem = None
    if found["p_value"] < bounds.MCNEMAR_P and found["lost"] > found["gained"]:
        problem = FAIL, f"{summary}; the loss is no chance"
    elif found["changed_interval"][0] > bounds.CHANGED_SHARE:
        problem = FAIL, f"{summary}; too many changed, whatever the totals say"
    elif found["control_right"] < bounds.CONTROL_RIGHT * total:
        problem = NOT_RUN, f"{summary}; the control is right too seldom to show a loss"
    unanswered = [item for item in items if item.status != PASS]
    if problem and (problem[0] == FAIL or not unanswered):
        return Result(AGREEMENT, *problem, tuple(items), found)
    if unanswered:
        return settle(AGREEMENT, items, summary, found)
    return Result(AGREEMENT, PASS, summary, tuple(items), found)
