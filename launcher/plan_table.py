"""A plan as text for a terminal."""

from launcher.refusal import fill


def label(row):
    """A row's name: the KV format, and what comes with it."""
    if row.workspace:
        return f"{row.kv} + one decoded {row.workspace} layer"
    return row.kv + (f", drafter {row.drafter}" if row.drafter else "")


def _number(value):
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _columns(plan):
    """(heading, value of a row) of every column that holds anything."""
    yield "KV", label
    yield "bytes/token/layer", lambda row: _number(row.layer_bytes)
    yield "target", lambda row: _number(row.target_bytes)
    if plan.draft:
        yield "drafter", lambda row: _number(row.drafter_bytes or None)
    yield "bytes/token", lambda row: _number(row.bytes_per_token) + (" measured" if row.measured else "")
    yield "x FP8", lambda row: _number(row.times_fp8)
    if any(row.tokens is not None for row in plan.rows):
        yield "tokens", lambda row: _number(row.tokens)
        if plan.context:
            yield f"requests of {plan.context:,}", lambda row: _number(row.requests)
    if any(row.state_slots is not None for row in plan.rows):
        yield "state slots", lambda row: _number(row.state_slots)
        yield "requests by states", lambda row: _number(row.state_requests)


def _table(headings, rows):
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for cells in (headings, *rows):
        yield "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()


def _model(name, part, what):
    heads = f"{part['kv_heads']} KV heads"
    if part["kv_heads_per_gpu"] != part["kv_heads"]:
        heads += f" ({part['kv_heads_per_gpu']} a GPU)"
    dims = f"head dim {part['head_dim']}"
    if part["v_head_dim"] != part["head_dim"]:
        dims += f" (V {part['v_head_dim']})"
    return f"{what} {name}: {part['layers']} layers with K and V, {heads}, {dims}"


def render_plan(plan):
    """The plan as lines: models, the table, pages where there are states, and what it takes for granted."""
    lines = [_model(plan.model, plan.target, "target")]
    if plan.states:
        lines.append(
            f"states: {plan.states['layers']} recurrent layers, {plan.states['layer_bytes']:,} bytes a layer, "
            f"{plan.states['slot_bytes']:,} a slot, {plan.states['slots_per_request']} slots a request"
        )
    if plan.drafter:
        lines.append(_model(plan.draft, plan.drafter, "drafter"))
    lines.append(f"one GPU of {plan.tp}, pages of {plan.page_size} tokens")
    columns = list(_columns(plan))
    headings = [heading for heading, _ in columns]
    lines += ["", *_table(headings, [[value(row) for _, value in columns] for row in plan.rows])]
    if plan.pages:
        lines += ["", "Pages that hold one layer's state or one layer's K and V:"]
        keys = ("kv", "token_bytes", "tokens", "page_bytes", "state_bytes")
        rows = [[page["kv"], *(_number(page[key]) for key in keys[1:])] for page in plan.pages]
        lines += _table(["KV", "bytes/token/layer", "tokens", "page bytes", "state bytes"], rows)
    if plan.unknown:
        lines += ["", f"Not known: {', '.join(plan.unknown)}."]
    problems = [f"{label(row)}: {row.problem}" for row in plan.rows if row.problem]
    lines += ["", *(fill(f"- {note}", "  ") for note in (*problems, *plan.notes))]
    return "\n".join(lines)
