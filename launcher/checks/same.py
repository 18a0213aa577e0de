"""Are two answers the same, as DESIGN.md defines it: token by token, with the margin where they part?"""

import math

from launcher.checks import bounds
from launcher.checks.result import ERROR, FAIL, NOT_RUN, PASS, Item
from launcher.checks.scoring import not_an_answer
from launcher.equality import compare


def first_difference(a, b):
    """The first position at which two token sequences part, None where they are equal."""
    for position, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def ask_margin(session, reference, candidate):
    """Where the two part, asks the reference's server for its margin there; nothing where they do not."""
    if reference is None or candidate is None or reference.tokens is None or candidate.tokens is None:
        return
    position = first_difference(reference.tokens, candidate.tokens)
    if position is not None and position < len(reference.tokens):
        session.probe(reference, position)


def margin(recording, reference, position):
    """The reference's margin of its two best tokens at ``position``; None where it is not on file."""
    if reference.gaps is not None:
        return reference.gaps[position] if position < len(reference.gaps) else None
    step = f"margin {reference.step} {position}"
    asked = recording.one(reference.check, reference.item, reference.server, step)
    return asked.gaps[0] if asked is not None and asked.answered and asked.gaps else None


def same_cut(recording, a, b):
    """Did both read the same part of the prompt out of the pool? Only then is the bound that of a near-tie."""
    if a.retractions or b.retractions or None in (a.cached_tokens, b.cached_tokens, a.prompt_tokens):
        return False
    if a.cached_tokens != b.cached_tokens:
        return False
    chunks = {recording.facts[e.server].chunk_tokens for e in (a, b)}
    if len(chunks) == 1:
        return True
    fresh = a.prompt_tokens - a.cached_tokens
    return all(chunk is not None and (chunk <= 0 or fresh <= chunk) for chunk in chunks)


def kv_format(recording, server):
    """The server's KV format: what it says, else what the user said, else the strictest."""
    facts = recording.facts[server]
    return facts.kv_format or recording.run["options"]["kv"] or bounds.STRICTEST


def bound(recording, a, b):
    """The margin below which the two answers may part, and its name."""
    formats = {kv_format(recording, e.server) for e in (a, b)}
    if same_cut(recording, a, b):
        devices = [recording.facts[e.server].device for e in (a, b)]
        device = "cpu" if set(devices) == {"cpu"} else None
        return max(bounds.near_tie_bound(f, device) for f in formats), "near-tie"
    return max(bounds.cut_bound(f) for f in formats), "other chunks"


def judge(recording, reference, candidate, name, *, outright=False, whole=True):
    """The Item of two answers that must be the same.

    ``outright`` allows no near-tie. ``whole``: answers that are the same as far as max_tokens let them go
    are cut, not equal; where the limit is the check's own they are compared as far as that goes.
    """
    for exchange in (reference, candidate):
        if exchange is None:
            return Item(name, NOT_RUN, "not asked")
        trouble = not_an_answer(exchange, name)
        if trouble is not None and trouble.status == ERROR:
            return trouble
        if exchange.tokens is None:
            return Item(name, NOT_RUN, f"the {exchange.server} server returns no token ids")
    position = first_difference(reference.tokens, candidate.tokens)
    cut = whole and (not_an_answer(reference, name) or not_an_answer(candidate, name))
    if position is None:
        return cut or Item(name, PASS, f"equal, {len(reference.tokens)} tokens")
    if outright:
        return Item(name, FAIL, f"different at token {position}, where only equal will do")
    gap = margin(recording, reference, position)
    gaps = [math.inf] * len(reference.tokens)
    if position < len(gaps) and gap is not None:
        gaps[position] = gap
    limit, what = bound(recording, reference, candidate)
    found = compare(reference.tokens, candidate.tokens, gaps, limit)
    if found.passed:
        return cut or Item(name, PASS, f"near-tie at token {position} (margin {gap:.3f} below {limit:g}, {what})")
    known = "unknown" if gap is None else f"{gap:.3f}"
    return Item(name, FAIL, f"different at token {position} (margin {known}, bound {limit:g}, {what})")


def counts(items):
    """One line: how many equal, how many near-ties, of how many."""
    equal = sum(item.status == PASS and item.detail.startswith("equal") for item in items)
    ties = sum(item.status == PASS and item.detail.startswith("near-tie") for item in items)
    return f"{equal} of {len(items)} equal, {ties} part at a near-tie"
