"""Answers that must not depend on how they were computed: drafter, prefix cache, batch, chunks."""

from launcher.checks import bounds, same
from launcher.checks.ability import suite_of
from launcher.checks.result import FAIL, NOT_RUN, PASS, Item, settle
from launcher.checks.session import CONTROL, ONE_CHUNK, TARGET, UNDRAFTED, NotRun
from launcher.checks.suite import WORKLOADS

DRAFTED, CACHE, IDENTICAL, MIXED = "drafted-equality", "prefix-cache", "batch-identical", "batch-mixed"
CUT_BY_CACHE, CHUNKED = "prefix-cut", "chunked-prefill"
AT_ONCE = 4
_LONG_TOKENS = 2_000  # of a long text where depth is not the point


def long_tokens(session, most=None):
    """Tokens of a long prompt: what is usual, capped by the smallest depth asked and the context."""
    limits = [_LONG_TOKENS, min(session.options.depths), session.room()]
    return int(0.96 * min(limits if most is None else [*limits, most]))


def planned(recording, check):
    """The recall prompts that a check noted as its plan, by id."""
    plan = recording.event(check, "plan")
    suite = suite_of(recording)
    return [suite.recall(*entry) for entry in plan["prompts"]] if plan else []


def _note_plan(session, plan):
    session.recording.note(session.check, "plan", prompts=plan)
    return [session.suite.recall(*entry) for entry in plan]


def drafted_prompts(suite):
    return [prompt for workload in WORKLOADS for prompt in suite.workload(workload)[:2]]


def ask_drafted(session):
    """The target's answers in any case: an undrafted run's are what a later run is compared with."""
    target = session.facts()
    # A drafted answer is asked for as a user would; the undrafted one brings its margins along.
    margins = {"logprobs": True, "top_logprobs": 2}
    for prompt in drafted_prompts(session.suite):
        session.ask(prompt, **(margins if target.drafter == "" else {}))
    if target.drafter == "":
        raise NotRun("the target has no drafter; its answers are on file for --undrafted of another run")
    if not session.recording.facts.get(UNDRAFTED):
        raise NotRun("no --undrafted given")
    undrafted = session.facts(UNDRAFTED)
    if undrafted.drafter:
        raise NotRun(f"the server given as --undrafted runs the drafter {undrafted.drafter}")
    if target.kv_format != undrafted.kv_format:
        raise NotRun(
            f"the undrafted server keeps K and V in {undrafted.kv_dtype}, the target in {target.kv_dtype}"
        )
    if session.has(UNDRAFTED):
        for prompt in drafted_prompts(session.suite):
            session.ask(prompt, server=UNDRAFTED, **margins)


def score_drafted(recording):
    items = []
    for prompt in drafted_prompts(suite_of(recording)):
        drafted = recording.one(DRAFTED, prompt.id)
        undrafted = recording.one(DRAFTED, prompt.id, UNDRAFTED)
        if drafted is not None or undrafted is not None:
            items.append(same.judge(recording, undrafted, drafted, prompt.id))
    return settle(DRAFTED, items, same.counts(items))


def ask_cache(session):
    if session.facts().prefix_cache is False:
        raise NotRun("the server runs without a prefix cache (--disable-radix-cache)")
    plan = _note_plan(
        session, [[f"text-{n}", session.sentences(long_tokens(session) / n), 0.5] for n in (1, 4)]
    )
    for server in session.each((TARGET, CONTROL)):
        for prompt in (*plan, *session.suite.prompts("arithmetic")[:2]):
            asked = [session.ask(prompt, server=server, step=step) for step in ("first", "second", "third")]
            same.ask_margin(session, asked[0], asked[1])
            if session.facts(server).learns:
                same.ask_margin(session, asked[1], asked[2])


def _accepts_otherwise(before, after, learns):
    """``learns``: a drafter that drafts from what it has answered may accept more, and somewhat less."""
    if learns and None not in (before, after):
        return after < bounds.LEARNING_ACCEPT_SHARE * before
    return before != after


def _cache_items(recording, server):
    """(repeats, firsts): Items of the second with the third answer, and of the first with the second."""
    repeats, firsts = [], []
    learns = server in recording.facts and recording.facts[server].learns
    for prompt in (*planned(recording, CACHE), *suite_of(recording).prompts("arithmetic")[:2]):
        first, second, third = (
            recording.one(CACHE, prompt.id, server, step) for step in ("first", "second", "third")
        )
        if first is None:
            continue
        repeat = same.judge(recording, second, third, f"{prompt.id} again", outright=not learns)
        lengths = second and second.accept_length, third and third.accept_length
        if repeat.status == PASS and lengths.count(None) == 1:
            repeat = Item(repeat.name, NOT_RUN, "the server reports an accept length for one of two equal answers")
        elif repeat.status == PASS and _accepts_otherwise(*lengths, learns):
            repeat = Item(repeat.name, FAIL, "accept length {:.3f}, then {:.3f}".format(*lengths))
        if repeat.status == PASS and second.cached_tokens == 0:
            repeat = Item(repeat.name, NOT_RUN, "the second answer took nothing from the prefix cache")
        repeats.append(repeat)
        firsts.append(same.judge(recording, first, second, f"{prompt.id} uncached"))
    return repeats, firsts


def score_cache(recording):
    repeats, firsts = _cache_items(recording, TARGET)
    summary = f"again from the cache: {same.counts(repeats)}; uncached: {same.counts(firsts)}"
    _, beside = _cache_items(recording, CONTROL)
    if beside:
        summary += f" (control: {same.counts(beside)})"
    return settle(CACHE, (*repeats, *firsts), summary)


def _ask_alone(session, prompts):
    """Each prompt twice, so that what stands beside it is read from the cache as in the batch."""
    for prompt in prompts:
        session.ask(prompt, step="uncached")
        session.ask(prompt, step="alone")


def ask_identical(session):
    prompts = session.suite.prompts("arithmetic")[:1] + session.suite.workload("chat")[:1]
    _ask_alone(session, prompts)
    for prompt in prompts:
        together = session.ask_all(
            [{"prompt": prompt, "step": f"together {n}"} for n in range(1, AT_ONCE + 1)]
        )
        for exchange in together:
            same.ask_margin(session, session.recording.one(IDENTICAL, prompt.id, step="alone"), exchange)


def score_identical(recording):
    suite = suite_of(recording)
    items = []
    for prompt in suite.prompts("arithmetic")[:1] + suite.workload("chat")[:1]:
        alone = recording.one(IDENTICAL, prompt.id, step="alone")
        for n in range(1, AT_ONCE + 1):
            asked = recording.one(IDENTICAL, prompt.id, step=f"together {n}")
            if alone is not None or asked is not None:
                items.append(same.judge(recording, alone, asked, f"{prompt.id} {n}"))
    return settle(IDENTICAL, items, f"{AT_ONCE} at once: {same.counts(items)}")


def _short_of_mixed(suite):
    return suite.prompts("tool-call")[:1] + suite.workload("code")[:1] + suite.workload("chat")[1:2]


def ask_mixed(session):
    plan = [[f"long-{n}", session.sentences(long_tokens(session) / n), 0.3 * n] for n in (1, 2)]
    prompts = _note_plan(session, plan) + _short_of_mixed(session.suite)
    _ask_alone(session, prompts)
    together = session.ask_all([{"prompt": prompt, "step": "together"} for prompt in prompts])
    for prompt, exchange in zip(prompts, together, strict=True):
        same.ask_margin(session, session.recording.one(MIXED, prompt.id, step="alone"), exchange)


def score_mixed(recording):
    items = []
    for prompt in planned(recording, MIXED) + _short_of_mixed(suite_of(recording)):
        alone = recording.one(MIXED, prompt.id, step="alone")
        if alone is not None:
            together = recording.one(MIXED, prompt.id, step="together")
            items.append(same.judge(recording, alone, together, prompt.id))
    return settle(MIXED, items, f"{len(items)} long and short at once: {same.counts(items)}")


def ask_prefix_cut(session):
    if session.facts().prefix_cache is False:
        raise NotRun("the server runs without a prefix cache, so that it cannot cut a prompt there")
    chunk = session.facts().chunk_tokens
    tokens = long_tokens(session, chunk if chunk and chunk > 0 else None)
    prompts = _note_plan(session, [[f"cut-{n}", session.sentences(tokens / n), 0.2] for n in (1, 2)])
    for server in session.each((TARGET, CONTROL)):
        for prompt in prompts:
            whole = session.ask(prompt, server=server, step="one chunk", salt="whole")
            head = type(prompt)(prompt.id, prompt.user[: len(prompt.user) // 2], max_tokens=1)
            session.ask(head, server=server, step="head", salt="cut")
            cut = session.ask(prompt, server=server, step="two chunks", salt="cut")
            same.ask_margin(session, whole, cut)


def _cut_items(recording, server):
    items = []
    for prompt in planned(recording, CUT_BY_CACHE):
        whole = recording.one(CUT_BY_CACHE, prompt.id, server, "one chunk")
        cut = recording.one(CUT_BY_CACHE, prompt.id, server, "two chunks")
        if whole is None:
            continue
        item = same.judge(recording, whole, cut, prompt.id)
        if item.status == PASS and not cut.cached_tokens:
            item = Item(prompt.id, NOT_RUN, "nothing of the first half came from the prefix cache")
        items.append(item)
    return items


def score_prefix_cut(recording):
    items, beside = _cut_items(recording, TARGET), _cut_items(recording, CONTROL)
    summary = f"cut in the middle by the prefix cache: {same.counts(items)}"
    if beside:
        summary += f" (control: {same.counts(beside)})"
    return settle(CUT_BY_CACHE, items, summary)


def _one_chunk_server(session, tokens):
    """The server given that reads ``tokens`` in one chunk and keeps K and V like the target, else None."""
    for name in session.each((ONE_CHUNK, UNDRAFTED, CONTROL)):
        facts = session.facts(name)
        fits = facts.chunk_tokens is not None and (facts.chunk_tokens <= 0 or facts.chunk_tokens >= tokens)
        if fits and facts.kv_format == session.facts().kv_format:
            return name
    return None


def ask_chunked(session):
    chunk = session.facts().chunk_tokens
    if chunk is None:
        raise NotRun("the server does not say its chunk size")
    if chunk <= 0:
        raise NotRun("the server prefills without chunks (--chunked-prefill-size -1)")
    tokens = int(1.5 * chunk)
    if tokens > session.room():
        raise NotRun(f"context too short for a prompt longer than a chunk of {chunk:,} tokens")
    reference = _one_chunk_server(session, 2 * chunk)
    if reference is None:
        raise NotRun(
            f"no server given reads {tokens:,} tokens in one chunk with this KV format; name one with --one-chunk"
        )
    session.recording.note(CHUNKED, "reference", server=reference)
    sentences = session.sentences(tokens)
    for prompt in _note_plan(session, [[f"chunks-{n}", sentences, 0.1 * n] for n in (1, 2)]):
        whole = session.ask(prompt, server=reference, step="one chunk")
        same.ask_margin(session, whole, session.ask(prompt, step="chunks"))


def score_chunked(recording):
    reference = recording.event(CHUNKED, "reference")
    items = []
    for prompt in planned(recording, CHUNKED):
        whole = recording.one(CHUNKED, prompt.id, reference["server"], "one chunk")
        cut = recording.one(CHUNKED, prompt.id, TARGET, "chunks")
        if whole is not None:
            items.append(same.judge(recording, whole, cut, prompt.id))
            chunk = recording.facts[TARGET].chunk_tokens
            if items[-1].status == PASS and cut.prompt_tokens <= chunk:
                items[-1] = Item(
                    prompt.id, NOT_RUN, f"{cut.prompt_tokens} tokens fit into a chunk of {chunk}"
                )
    return settle(CHUNKED, items, f"longer than a chunk against one chunk: {same.counts(items)}")
