"""What every answer of the run shows: degenerate output, and accept length by workload and depth."""

from launcher.checks import bounds
from launcher.checks.ability import RECALL, by_depth, suite_of
from launcher.checks.options import from_json
from launcher.checks.result import FAIL, NOT_RUN, PASS, Item, settle
from launcher.checks.scoring import degenerate, not_an_answer
from launcher.checks.session import TARGET, NotRun
from launcher.checks.suite import WORKLOADS

DEGENERATE, ACCEPT = "degenerate-output", "accept-length"


def whole_answers(recording):
    """The target's answers that were to end by themselves: not a margin, not a text's head, no soak load."""
    return [
        e
        for e in recording.exchanges
        if e.server == TARGET and e.request.get("max_tokens") != 1 and not e.request.get("logit_bias")
    ]


def score_degenerate(recording):
    """A failed request is its own check's business; an answer with HTTP 200 is looked at in any case."""
    items = []
    for exchange in whole_answers(recording):
        if exchange.answered:
            problem = degenerate(exchange)
            name = f"{exchange.check} {exchange.item} {exchange.step}".rstrip()
            items.append(
                Item(name, FAIL, problem) if problem else not_an_answer(exchange, name) or Item(name, PASS)
            )
    bad = sum(item.status == FAIL for item in items)
    return settle(DEGENERATE, items, f"{bad} of {len(items)} answers degenerate")


def ask_accept(session):
    if session.facts().drafter == "":
        raise NotRun("the server has no drafter")
    for workload in WORKLOADS:
        for prompt in session.suite.workload(workload):
            session.ask(prompt, step=workload)


def mean_accept(exchanges):
    """Tokens over verify steps of several answers together, None where no accept length was reported."""
    measured = [e for e in exchanges if e.answered and e.accept_length and e.completion_tokens]
    if not measured:
        return None
    return sum(e.completion_tokens for e in measured) / sum(
        e.completion_tokens / e.accept_length for e in measured
    )


def score_accept(recording):
    options = from_json(recording.run["options"])
    items, lengths = [], {}
    for workload in WORKLOADS:
        asked = recording.find(ACCEPT, server=TARGET, step=workload)
        if asked:
            lengths[workload] = mean_accept(asked)
            items.append(_workload_item(options, workload, asked, lengths[workload]))
    shown = ", ".join(f"{w} {v:.2f}" for w, v in lengths.items() if v is not None)
    plan = recording.event(RECALL, "plan")
    suite = suite_of(recording)
    rows = by_depth(recording, [suite.recall(*entry) for entry in plan["prompts"]]) if plan else []
    fall = over_depth(rows)
    summary = "; ".join(part for part in (shown, fall["text"]) if part)
    return settle(ACCEPT, items, summary, {"workloads": lengths, "depths": rows, "fall": fall})


def _workload_item(options, workload, asked, length):
    failed = [item for item in map(not_an_answer, asked) if item is not None]
    floor = options.floor(workload)
    if length is not None and floor is not None and length < floor:
        return Item(workload, FAIL, f"accept length {length:.2f}, below the floor of {floor:g}")
    if failed:
        return Item(workload, failed[0].status, f"{failed[0].name}: {failed[0].detail}")
    if length is None:
        return Item(workload, NOT_RUN, "the server reports no accept length")
    if floor is None:
        return Item(
            workload, NOT_RUN, f"accept length {length:.2f}, and no floor stated (--profile or --floor)"
        )
    return Item(workload, PASS, f"accept length {length:.2f}, floor {floor:g}")


def over_depth(rows):
    """How the accept length moves from the shallowest to the deepest recall; a fall is said in words."""
    depths = {}
    for row in rows:
        if row["accept_length"]:
            depth = int(row["item"].partition("@")[0])
            depths.setdefault(depth, []).append(row["accept_length"])
    means = {depth: sum(found) / len(found) for depth, found in sorted(depths.items())}
    if len(means) < 2:
        return {"means": means, "fell": False, "text": ""}
    shallow, deep = (list(means.items())[i] for i in (0, -1))
    fell = deep[1] < bounds.DEPTH_FALL_SHARE * shallow[1]
    verb = "FALLS over depth" if fell else "over depth"
    text = f"{verb}: {shallow[1]:.2f} at {shallow[0]:,} tokens, {deep[1]:.2f} at {deep[0]:,}"
    return {"means": means, "fell": fell, "text": text}
