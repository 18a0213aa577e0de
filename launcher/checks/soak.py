"""Fill the pool past 0.6, then past 0.95 of its tokens with retraction, and ask again."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

from launcher.checks import bounds, same
from launcher.checks.ability import suite_of
from launcher.checks.health import mean_accept
from launcher.checks.result import ERROR, FAIL, NOT_RUN, PASS, Item, settle
from launcher.checks.session import TARGET, NotRun

SOAK = "soak"
_SAMPLE_S = 0.2
# The first stage stays below the pool: this share of it, most of that in prompts.
_FILL, _PROMPTS = 0.8, 0.8
# The second outgrows it. The scheduler admits a request when its prompt and all that it may write fit beside
# 0.7 of what the running ones may still write (new_token_ratio, srt/managers/schedule_policy.py @ 0.5.23), so
# long answers to short prompts are admitted and do not fit when they are written: that is what makes it
# retract. With ignore_eos it would count all of every answer, and DFLASH does not heed min_tokens, so the
# token that ends an answer is biased away.
_ADMITTED, _SHORT = 0.7, 0.25
# Of the pool, one after another until a request was retracted: where the last one just does not fit, it is admitted
# when others have ended; with shorter answers it is, but slow prefills may then let the first end before it has grown.
_ROOM = (1.0, 0.95, 0.9)
_HELD_BESIDE = 20  # tokens of the pool that a running request holds for what is drafted next
_REQUESTS = 64  # of a stage, where the pool does not need more and the server runs so many
_MAX_ALONE = 2  # retracted answers that are asked for again alone


def probes(suite):
    """What is asked before and after."""
    return [*suite.prompts("arithmetic")[:2], *suite.workload("chat")[:1], *suite.workload("code")[:1]]


def plan_load(facts, room, usage, text_tokens, share=1.0):
    """(requests, filler sentences, answer tokens of each) that fill the pool past ``usage``.

    ``text_tokens``: of a sentence, and of a prompt beside its sentences. ``share``: of the pool, what the last
    stage's requests are admitted into.
    Raises: NotRun when the server's requests and context cannot fill its pool.
    """
    pool = facts.pool_tokens
    requests = min(facts.running_requests, max(_REQUESTS, math.ceil(1.5 * pool / room)))
    overfill = usage == max(bounds.SOAK_USAGE)
    prompt = (_SHORT if overfill else _FILL * _PROMPTS) * pool / requests
    sentence, beside = text_tokens
    sentences = max(1, round((prompt - beside) / sentence))
    prompt = beside + sentences * sentence
    if overfill:
        answer = (share * pool - requests * (prompt + _HELD_BESIDE)) / (1 + _ADMITTED * (requests - 1))
    else:
        answer = _FILL * pool / requests - prompt
    if prompt + answer > room:
        raise NotRun(
            f"{requests} requests of at most {room:,} tokens are {requests * room / pool:.2f} of"
            f" the pool's {pool:,} tokens; start the server with a smaller --max-total-tokens"
        )
    return requests, sentences, max(1, int(answer))


def ask_soak(session):
    facts = session.facts()
    if not facts.pool_tokens or not facts.running_requests:
        raise NotRun("the server does not say how many tokens its pool holds and how many requests it runs")
    if session.servers[TARGET].usage() is None:
        raise NotRun("the server does not report its pool's usage at /v1/loads")
    room = session.room()
    measured = session.text_tokens()
    plans = {}
    for usage in bounds.SOAK_USAGE:
        shares = _ROOM if usage == max(bounds.SOAK_USAGE) else (1.0,)
        plans[usage] = [plan_load(facts, room, usage, measured, share) for share in shares]
    for prompt in probes(session.suite):
        session.ask(prompt, step="uncached")
        session.ask(prompt, step="before")
    stops = {e.stop_token for e in session.recording.find(SOAK)} - {None}
    if not stops:
        raise NotRun("the server does not say which token ends an answer, so that none can be made long")
    for usage, tries in plans.items():
        for number, (requests, sentences, answer_tokens) in enumerate(tries):
            more = {"max_tokens": answer_tokens, "logit_bias": {str(token): -100 for token in sorted(stops)}}
            _fill(session, usage, f"load-{usage:g}-{number}", requests, sentences, more)
            if any(e.retractions for e in session.recording.find(SOAK, step=f"load {usage:g}")):
                break
        for prompt in probes(session.suite):
            after = session.ask(prompt, step=f"after {usage:g}")
            same.ask_margin(session, session.recording.one(SOAK, prompt.id, step="before"), after)
    _ask_retracted_alone(session)


def _fill(session, usage, name, requests, sentences, more):
    """One stage: all requests at once, with the pool's usage sampled until the last has its answer."""
    plan = [[f"{name}-{n}", sentences, 0.5] for n in range(requests)]
    session.recording.note(SOAK, "load", usage=usage, prompts=plan)
    peak, done = 0.0, threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, session.servers[TARGET].usage() or 0.0)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(sample)
        try:
            session.ask_all(
                [
                    {"prompt": session.suite.recall(*entry), "step": f"load {usage:g}", **more}
                    for entry in plan
                ]
            )
        finally:
            done.set()
            watching.result()
            session.recording.note(SOAK, "peak", usage=usage, reached=peak)


def _peaks(recording):
    """The most that was reached by each stage, of all its tries."""
    found = {}
    for event in recording.events_of(SOAK, "peak"):
        found[event["usage"]] = max(event["reached"], found.get(event["usage"], 0.0))
    return found


def _retracted(recording):
    return [e for e in recording.find(SOAK) if e.step.startswith("load ") and e.answered and e.retractions]


def _ask_retracted_alone(session):
    """Retracted answers again, alone: what was computed anew after the retraction has to be the same."""
    prompts = {}
    for event in session.recording.events_of(SOAK, "load"):
        prompts |= {entry[0]: session.suite.recall(*entry) for entry in event["prompts"]}
    for loaded in _retracted(session.recording)[:_MAX_ALONE]:
        more = {name: loaded.request[name] for name in ("max_tokens", "logit_bias")}
        alone = session.ask(prompts[loaded.item], step="alone", **more)
        same.ask_margin(session, alone, loaded)


def score_soak(recording):
    items = []
    for usage in bounds.SOAK_USAGE:
        items += _stage(recording, usage)
    for loaded in _retracted(recording)[:_MAX_ALONE]:
        alone = recording.one(SOAK, loaded.item, step="alone")
        if alone is not None:
            name = f"{loaded.item} retracted"
            items.append(same.judge(recording, alone, loaded, name, whole=False))
    peaks = {f"{usage:g}": reached for usage, reached in _peaks(recording).items()}
    retractions = sum(e.retractions for e in _retracted(recording))
    shown = ", ".join(f"{reached:.2f}" for reached in peaks.values())
    before = mean_accept(recording.find(SOAK, step="before"))
    numbers = {"peaks": peaks, "retractions": retractions, "accept_before": before}
    return settle(SOAK, items, f"pool filled to {shown}, {retractions} retractions", numbers)


def _stage(recording, usage):
    """The Items of one stage: was the pool filled, did every request get an answer, and the answers after."""
    peak = _peaks(recording).get(usage)
    if peak is None:
        return []
    loads = recording.find(SOAK, step=f"load {usage:g}")
    failed = [e for e in loads if not e.answered]
    items = [Item(e.item, ERROR, f"{e.problem}: {e.message}") for e in failed]
    name, reached = f"usage {usage:g}", f"reached {peak:.2f}"
    overfill, retracted = usage == max(bounds.SOAK_USAGE), any(e.retractions for e in loads)
    if peak > usage:
        items.append(Item(name, PASS, reached))
    elif overfill and retracted:
        # What running requests hold for their next step counts as free, and is much of a small pool.
        items.append(Item(name, PASS, f"{reached}, where the next step did not fit and a request was retracted"))
    else:
        items.append(Item(name, NOT_RUN, f"the pool was filled to {peak:.2f} only"))
    if overfill and not retracted:
        items.append(Item("retraction", NOT_RUN, "no request was retracted"))
    prompts = probes(suite_of(recording))
    for prompt in prompts:
        after = recording.one(SOAK, prompt.id, step=f"after {usage:g}")
        before = recording.one(SOAK, prompt.id, step="before")
        if after is not None:
            items.append(same.judge(recording, before, after, f"{prompt.id} after {usage:g}"))
    ratio = [mean_accept(recording.find(SOAK, step=step)) for step in ("before", f"after {usage:g}")]
    if None not in ratio:
        learns = recording.facts[TARGET].learns
        kept = ratio[1] >= (bounds.LEARNING_ACCEPT_SHARE if learns else bounds.SOAK_ACCEPT_SHARE) * ratio[0]
        detail = f"accept length {ratio[0]:.2f} before, {ratio[1]:.2f} after"
        items.append(Item(f"accept {usage:g}", PASS if kept else FAIL, detail))
    return items
