"""Rules about capacity; each shows its arithmetic. A rule does not fire where a number is unknown."""

from launcher.launch import gib, memory


def _asked(launch):
    names = ("context_length", "max_running_requests", "max_total_tokens", "mem_fraction_static")
    return launch.asked("kv_cache_dtype", *names) + f" for {launch.target.path}"


def _cells(held):
    draft = f" + drafter {held.draft_cell:,}" if held.draft_cell else ""
    return f"target {held.target_cell:,}{draft}"


def one_request_does_not_fit(launch):
    held, context, limit = memory(launch), launch.context, launch.flags.max_total_tokens
    if launch.target is None or context is None:
        return None
    room = min((n for n in (limit, held.tokens) if n is not None), default=None)
    if room is None or context <= room:
        return None
    if room == limit:
        sum_text = f"--max-total-tokens {limit:,} < {context:,}"
    else:
        sum_text = (
            f"{context:,} tokens x ({_cells(held)} bytes) = {gib(context * held.cell)} > "
            f"{held.budget_text()}, which holds {room:,} tokens"
        )
    return {"asked": _asked(launch), "context": context, "room": room, "sum": sum_text}


def pools_exceed_the_budget(launch):
    held, tokens = memory(launch), launch.flags.max_total_tokens
    if launch.target is None or held.budget is None:
        return None
    if held.budget <= 0:
        sum_text = held.budget_text()
    elif tokens is None or held.cell is None or tokens * held.cell <= held.budget:
        return None
    else:
        sum_text = (
            f"{tokens:,} tokens x ({_cells(held)} bytes) = {gib(tokens * held.cell)} > "
            f"{held.budget_text()}"
        )
    return {"asked": _asked(launch), "sum": sum_text}


def mx_decoded_layer_does_not_fit(launch):
    held = memory(launch)
    if launch.target is None or held.fraction is None or held.tokens is None:
        return None
    tokens = min(n for n in (launch.flags.max_total_tokens, held.tokens) if n is not None)
    parts = {
        "weights": held.weights,
        "target pool": tokens * held.target_cell,
        "drafter pool": tokens * held.draft_cell,
        "one decoded layer": tokens * held.layer_cell,
    }
    if sum(parts.values()) <= held.total:
        return None
    terms = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return {
        "asked": _asked(launch),
        "sum": f"{tokens:,} tokens: {terms} = {gib(sum(parts.values()))} > {gib(held.total)}",
    }
