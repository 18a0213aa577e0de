"""Arithmetic, tool calls, and a planted code recalled: right or wrong, with the control's answer beside it."""

from launcher.checks import suite
from launcher.checks.options import from_json
from launcher.checks.result import ERROR, FAIL, NOT_RUN, PASS, Item, Result, settle
from launcher.checks.scoring import judge_text, judge_tool_call
from launcher.checks.session import CONTROL, TARGET

ARITHMETIC, TOOL_CALL, RECALL = "arithmetic", "tool-call", "recall"


def suite_of(recording):
    """The Suite that a run on file asked."""
    return suite.suite_of(from_json(recording.run["options"]))


def judge_prompt(exchange, prompt):
    """The Item of an answer to a prompt of the suite, by what it expects."""
    if isinstance(prompt.expect, dict):
        return judge_tool_call(exchange, prompt.tools, prompt.expect)
    return judge_text(exchange, prompt.expect)


def _asker(check):
    def ask(session):
        for prompt in session.suite.prompts(check):
            for server in session.each((TARGET, CONTROL)):
                session.ask(prompt, server=server)

    return ask


def _scorer(check):
    def score(recording):
        return judge_all(check, recording, suite_of(recording).prompts(check))

    return score


def judge_all(check, recording, prompts, numbers=None, note=""):
    """The Result over ``prompts``: all must be right but those that the control answers wrongly too."""
    items, right = [], 0
    for prompt in prompts:
        asked = recording.one(check, prompt.id)
        if asked is None:
            continue
        item = judge_prompt(asked, prompt)
        if item.status == FAIL:
            control = recording.one(check, prompt.id, CONTROL)
            if control is not None and judge_prompt(control, prompt).status == FAIL:
                item = Item(item.name, NOT_RUN, f"the control is wrong too; {item.detail}")
        right += item.status == PASS
        items.append(item)
    beyond = sum(item.status == NOT_RUN for item in items)
    summary = f"{right} of {len(items)} right"
    if beyond:
        summary += f", {beyond} beyond this model (the control is wrong too)"
    if right and beyond and right + beyond == len(items):
        # What the control cannot do either shows nothing; the rest decides.
        return Result(check, PASS, summary + note, tuple(items), numbers or {})
    return settle(check, items, summary + note, numbers)


def depths(options, room):
    """(asked depth, depth in tokens that fits) for each depth; those capped to the same length once."""
    found = {}
    for asked in options.depths:
        found.setdefault(min(asked, room), asked)
    return [(asked, fits) for fits, asked in found.items()]


def ask_recall(session):
    room = min(session.room(server) for server in session.each((TARGET, CONTROL)))
    plan = []
    for asked, fits in depths(session.options, room):
        # Sentences differ in length, so a text that must fit is aimed a little lower.
        sentences = session.sentences(fits if fits < room else 0.96 * fits)
        for position in session.options.positions:
            plan.append([f"{fits}@{position:g}", sentences, position])
    capped = [asked for asked in session.options.depths if asked > room]
    session.recording.note(RECALL, "plan", prompts=plan, capped=capped, room=room)
    for prompt in (session.suite.recall(*entry) for entry in plan):
        for server in session.each((TARGET, CONTROL)):
            session.ask(prompt, server=server)


def score_recall(recording):
    plan = recording.event(RECALL, "plan")
    if plan is None:
        return settle(RECALL, (), "")
    asked_of = suite_of(recording)
    prompts = [asked_of.recall(*entry) for entry in plan["prompts"]]
    note = ""
    if plan["capped"]:
        asked = ", ".join(f"{depth:,}" for depth in plan["capped"])
        facts = recording.facts[TARGET]
        limit = "pool" if facts.context_tokens == facts.pool_tokens else "context length"
        capped = f"capped at {plan['room']:,} by the server's {limit} of {facts.context_tokens:,}"
        note = f"; asked for {asked} tokens, {capped}"
    truncated = [_truncated(recording, prompt) for prompt in prompts]
    result = judge_all(RECALL, recording, prompts, {"depths": by_depth(recording, prompts)}, note)
    problems = [item for item in truncated if item is not None]
    if problems and result.status != FAIL:
        return settle(RECALL, problems, result.summary, result.numbers)
    return result


def _truncated(recording, prompt):
    """An Item where the server cut the prompt itself instead of refusing it."""
    asked = recording.one(RECALL, prompt.id)
    words = len(prompt.user.split())
    if asked is None or not asked.answered or asked.prompt_tokens is None or asked.prompt_tokens >= words:
        return None
    return Item(
        prompt.id, ERROR, f"the server read {asked.prompt_tokens} tokens of a prompt of {words} words"
    )


def by_depth(recording, prompts):
    """Prompt tokens, position, accept length and rightness of every recall, for the report."""
    rows = []
    for prompt in prompts:
        asked = recording.one(RECALL, prompt.id)
        if asked is None or not asked.answered:
            continue
        rows.append(
            {
                "item": prompt.id,
                "prompt_tokens": asked.prompt_tokens,
                "accept_length": asked.accept_length,
                "right": judge_prompt(asked, prompt).status == PASS,
            }
        )
    return rows


ask_arithmetic, score_arithmetic = _asker(ARITHMETIC), _scorer(ARITHMETIC)
ask_tool_call, score_tool_call = _asker(TOOL_CALL), _scorer(TOOL_CALL)
