"""The plan itself: one row for each way to keep K and V, and what the plan does not know."""

import math
from dataclasses import asdict, dataclass

from launcher.flags import UsageError
from launcher.launch import DRAFT_SEATS
from launcher.plan_model import drafter, request_slots, target_attention, target_states
from sglang_fp4kv.pages import GRANULARITY, StateGroup, TokenGroup, check_tokens, plan_pages
from sglang_fp4kv.planner import STATE_RATIO, PlanError, plan_states, plan_tokens

JSON_VERSION = 1
WORKSPACE = "fp8_e4m3"
FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
_MEASURED = ("weights", "graphs", "activations")
# (KV of the target, KV of the drafter); a drafter inherits where it is not set apart.
_DRAFTED = (("bf16", "bf16"), ("fp8_e4m3", "fp8_e4m3"), ("nvfp4", "fp8_e4m3"), ("nvfp4", "bf16"))


@dataclass(frozen=True)
class Budget:
    """Bytes of one GPU, None where not given: ``kv`` for K and V alone, ``pools`` with recurrent states, ``gpu``
    before weights; ``weights``, ``graphs`` and ``activations`` as they were measured."""

    kv: int | None = None
    pools: int | None = None
    gpu: int | None = None
    fraction: float | None = None
    weights: int | None = None
    graphs: int | None = None
    activations: int | None = None


@dataclass(frozen=True)
class Row:
    """One way to keep K and V. Bytes are of one token on one GPU; ``tokens`` and what follows are None where no
    memory was given. ``layer_bytes``: of the target in one layer, None where ``measured``. ``problem``: why nothing
    fits; tokens and requests are then 0."""

    kv: str
    drafter: str | None
    workspace: str | None
    layer_bytes: int | None
    target_bytes: int
    drafter_bytes: int
    workspace_bytes: int
    bytes_per_token: int
    measured: bool
    times_fp8: float
    tokens: int | None = None
    requests: float | None = None
    state_slots: int | None = None
    state_bytes: int | None = None
    state_requests: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Plan:
    """What `fp4kv plan` prints and what its JSON holds; ``version`` changes with the keys' meaning."""

    version: int
    model: str
    draft: str | None
    tp: int
    page_size: int
    context: int | None
    target: dict
    drafter: dict | None
    states: dict | None
    memory: dict
    rows: tuple
    pages: tuple
    unknown: tuple
    notes: tuple


def make_plan(facts, draft, flags, budget, measured, page_tokens):
    """The Plan for a target's and a draft's facts under SGLang's ``flags``.

    ``measured``: KV format -> bytes per token. Raises: UsageError; PlanError when no row fits.
    """
    tp, page_size = flags.tp_size, flags.page_size or 1
    context = flags.context_length or facts.max_positions
    attention = target_attention(facts, tp)
    states = target_states(facts, tp, flags.mamba_ssm_dtype)
    drafts = drafter(draft, tp, flags) if draft else None
    if page_tokens is not None and states is None:
        raise UsageError(
            f"--page-tokens {page_tokens}: the model has no recurrent states to share pages with"
        )
    kinds = [(kv, None, None) for kv in FORMATS] + [("nvfp4", None, WORKSPACE)]
    kinds += [(*kind, None) for kind in _DRAFTED] if drafts else []
    fp8, rows = {}, []
    for kv, drafted, workspace in kinds:
        parts = {
            "target_bytes": measured.get(kv) or attention.bytes_per_token(kv),
            "drafter_bytes": drafts.attention.bytes_per_token(drafted) if drafted else 0,
            "workspace_bytes": attention.layer_bytes(workspace) if workspace else 0,
        }
        cell = sum(parts.values())
        if kv == "fp8_e4m3":
            fp8[drafted is not None] = cell
        rows.append(
            {
                "kv": kv, "drafter": drafted, "workspace": workspace, **parts, "bytes_per_token": cell,
                "layer_bytes": None if kv in measured else attention.layer_bytes(kv),
                "measured": kv in measured,
            }
        )  # fmt: skip
    rows = tuple(
        Row(
            times_fp8=fp8[row["drafter"] is not None] / row["bytes_per_token"],
            **row,
            **_fill_or_say(row, facts, draft, drafts, states, flags, budget, context),
        )
        for row in rows
    )
    if all(row.problem for row in rows):
        raise PlanError(min(rows, key=lambda row: row.bytes_per_token).problem)
    return Plan(
        version=JSON_VERSION,
        model=facts.path,
        draft=draft and draft.path,
        tp=tp,
        page_size=page_size,
        context=context,
        target=_layers(attention, facts),
        drafter=_drafter(drafts, draft, context),
        states=states
        and {
            "layers": states.layers,
            "dtype": states.state_dtype,
            "layer_bytes": states.layer_bytes,
            "slot_bytes": states.slot_bytes,
            "slots_per_request": request_slots(flags),
        },
        memory=asdict(budget),
        rows=rows,
        pages=_pages(attention, states, page_size, page_tokens),
        unknown=tuple(name for name in _MEASURED if getattr(budget, name) is None),
        notes=tuple(_notes(facts, drafts, states, flags, budget, context)),
    )


def _layers(attention, facts):
    return {
        "layers": attention.layers,
        "kv_heads": facts.kv_heads,
        "kv_heads_per_gpu": attention.kv_heads,
        "head_dim": attention.head_dim,
        "v_head_dim": attention.v_head_dim,
    }


def _drafter(drafts, draft, context):
    if drafts is None:
        return None
    found = _layers(drafts.attention, draft) | {
        "draft_tokens": drafts.draft_tokens,
        "windows": list(drafts.windows),
    }
    if drafts.windowed and context:
        for dtype in ("fp8_e4m3", "bf16"):
            kept, read = drafts.request_bytes(context, dtype)
            found[f"request_bytes_{dtype}"] = {"kept": kept, "read": read}
    return found


def _weights(budget, facts, draft, drafted):
    """Bytes of weights on one GPU: measured, else by the files' headers, else None."""
    if budget.weights is not None:
        return budget.weights
    sizes = [f.checkpoint.weights_bytes for f in (facts, draft if drafted else None) if f]
    return None if None in sizes else sum(sizes)


def _fill_or_say(row, facts, draft, drafts, states, flags, budget, context):
    """_fill, or why this row holds nothing: another format may still fit."""
    try:
        return _fill(row, facts, draft, drafts, states, flags, budget, context)
    except PlanError as error:
        return {"tokens": 0, "requests": 0.0 if context else None, "problem": str(error)}


def _fill(row, facts, draft, drafts, states, flags, budget, context):
    """Tokens and requests of a row; {} where no memory was given."""
    drafted = row["drafter"] is not None
    room = budget.pools
    if budget.gpu is not None:
        weights = _weights(budget, facts, draft, drafted)
        if budget.weights is None and weights is not None:
            weights //= flags.tp_size
        room = int(budget.gpu * (budget.fraction or 1.0)) - (weights or 0)
        if room <= 0:
            raise PlanError(
                f"weights of {weights:,} bytes leave nothing of {budget.gpu:,} x {budget.fraction or 1:g}"
            )
    found, kv = {}, budget.kv
    if kv is None and room is None:
        return found
    if kv is None:
        kv = room
        if states is not None and not row["measured"]:
            per_request = request_slots(flags)
            split = plan_states(
                room,
                states.slot_bytes,
                per_request=per_request,
                ratio=flags.mamba_full_memory_ratio or STATE_RATIO,
                slots=flags.max_mamba_cache_size,
                requests=flags.max_running_requests or (DRAFT_SEATS if drafted else None),
                radix_cache=not flags.disable_radix_cache,
                draft_tokens=drafts.draft_tokens if drafted else 0,
            )
            kv = split.left_bytes
            found = {
                "state_slots": split.slots,
                "state_bytes": split.pool_bytes + split.verify_bytes,
                "state_requests": split.slots // per_request,
            }
    tokens = plan_tokens(
        kv, row["bytes_per_token"], page_size=flags.page_size or 1, limit=flags.max_total_tokens
    )
    return found | {"tokens": tokens, "requests": tokens / context if context else None}


def _pages(attention, states, page_size, page_tokens):
    """Pages that hold a layer's state or a layer's K and V, by KV format; () without states."""
    if states is None:
        return ()
    found = []
    for kv in FORMATS:
        token_bytes = attention.layer_bytes(kv)
        group = TokenGroup("attention", token_bytes, math.lcm(GRANULARITY, page_size))
        shared = plan_pages([StateGroup("state", states.layer_bytes), group])
        if page_tokens is not None:
            try:
                check_tokens(page_tokens, token_bytes, states.layer_bytes, group.granularity)
            except PlanError as error:
                raise PlanError(f"{kv}: {error}") from None
        found.append(
            {
                "kv": kv, "token_bytes": token_bytes, "state_bytes": states.layer_bytes,
                "tokens": shared.tokens("attention"), "page_bytes": shared.page_bytes,
            }
        )  # fmt: skip
    return tuple(found)


def _notes(facts, drafts, states, flags, budget, context):
    """Sentences on what the figures take for granted."""
    tp = flags.tp_size
    if facts.kv_heads < tp:
        yield (
            f"{facts.kv_heads} KV heads on {tp} GPUs: each GPU keeps 1, so a token's bytes stay the same "
            f"beyond {facts.kv_heads} GPUs"
        )
    yield from _memory_notes(facts, flags, budget)
    if states is not None and budget.kv is not None:
        yield f"--kv-memory is for K and V alone: states of {states.slot_bytes:,} bytes a slot come on top"
    if facts.sliding:
        yield "windowed layers of the target read their window only, but SGLang 0.5.23 keeps every token of every layer"
    if drafts is not None and drafts.windowed:
        kept, read = drafts.request_bytes(context, "fp8_e4m3") if context else (None, None)
        text = (
            f"{len(drafts.windowed)} of {len(drafts.windows)} drafter layers read the last "
            f"{max(drafts.windowed):,} tokens, but SGLang 0.5.23 keeps every token of every layer"
        )
        if context:
            text += f": {kept:,} bytes in FP8 for a request of {context:,} tokens, of which {read:,} are ever read"
        yield text


def _memory_notes(facts, flags, budget):
    if budget.kv is None and budget.pools is None and budget.gpu is None:
        yield "no memory was given (--kv-memory, --memory or --gpu-memory), so no tokens are counted"
        return
    if budget.gpu is None:
        yield "weights, CUDA graphs and activations are not counted: the memory given is what they leave"
        return
    yield (
        "--gpu-memory is counted whole: SGLang divides what is free before weights load, which is less by the CUDA "
        "context and by other processes"
    )
    if budget.weights is None:
        known = facts.checkpoint.weights_bytes
        if known is None:
            yield "weights are not known (--weights) and not counted, so the tokens are at most these"
        else:
            yield (
                f"weights are not measured: {known:,} bytes by the target's file headers, and the draft's in drafted "
                f"rows, divided by {flags.tp_size}"
            )
    if budget.fraction is None:
        yield "without --mem-fraction-static SGLang chooses it; 1 is counted, so the tokens are at most these"
        return
    left = budget.gpu - int(budget.gpu * budget.fraction)
    missing = [name for name in ("graphs", "activations") if getattr(budget, name) is None]
    if missing:
        yield f"{' and '.join(missing)} are not known; {left:,} bytes are left for them"
        return
    needed = budget.graphs + budget.activations
    if needed > left:
        raise PlanError(f"graphs and activations take {needed:,} bytes, and {left:,} are left for them")
    yield f"graphs and activations take {needed:,} of the {left:,} bytes left for them"
