"""What was asked for beside what SGLang 0.5.23 makes of it, so that nothing changes quietly."""

from dataclasses import dataclass

from launcher.launch import FP4, gib, memory
from launcher.rules_drafter import draft_backend
from sglang_fp4kv.served import BACKEND, DRAFTERS_WITHOUT_MODEL

_LEFT_OUT = "(left out)"
_CHOSEN = "chosen by SGLang"


@dataclass(frozen=True)
class Value:
    """One line: ``why`` says where the effective value comes from when it is not the asked one."""

    what: str
    asked: str
    effective: str
    why: str = ""


def _value(what, asked, effective=None, why=""):
    shown = _LEFT_OUT if asked is None else str(asked)
    effective = effective if effective is not None else asked
    return Value(what, shown, _CHOSEN if effective is None else str(effective), why)


def effective_values(launch):
    """The lines for ``launch``; a drafter's only where there is one."""
    prefill, decode = launch.backends
    real_prefill, real_decode = launch.effective_backends
    yield _value("KV dtype", launch.kv_dtype)
    yield _value("prefill backend", prefill, real_prefill)
    yield _value("decode backend", decode, real_decode)
    if launch.drafter is not None:
        yield from _drafter(launch)
    yield _value("tensor parallel", launch.flags.tp_size)
    context, asked = launch.context, launch.flags.context_length
    yield _value("context length", asked, context, "" if asked or not context else "from config.json")
    seats = launch.flags.max_running_requests
    why = "SGLang's default with a drafter" if seats is None and launch.seats else ""
    yield _value("seats", seats, launch.seats, why)
    if launch.kv_dtype in FP4:
        yield from _pools(launch)


def _drafter(launch):
    flags = launch.flags
    name = flags.speculative_algorithm
    yield _value("drafter", name, "EAGLE" if launch.drafter == "NEXTN" else launch.drafter)
    if launch.drafter in DRAFTERS_WITHOUT_MODEL:
        return
    asked = flags.speculative_draft_kv_cache_dtype
    why = ""
    if asked is None:
        ours = launch.kv_dtype == "nvfp4" and launch.on_triton
        why = "fp4kv: next to NVFP4" if ours else "inherited from the target"
    yield _value("drafter KV dtype", asked, launch.draft_dtype, why)
    if launch.drafter != "DFLASH":
        return
    backend, replacement = draft_backend(launch)
    asked = flags.speculative_draft_attention_backend
    why = "replaced by SGLang" if replacement else "as prefill" if asked is None and backend else ""
    yield _value("drafter backend", asked, replacement or backend, why)
    asked, block = launch.draft_tokens, launch.draft.block_size if launch.draft else None
    why = "the draft's block size" if asked is None and block else ""
    if launch.draft is not None and not block and asked is None:
        block, why = 16, "SGLang's fallback"
    yield _value("draft tokens", asked, asked or block, why)
    yield from _draft_window(launch)
    yield from _draft_writes(launch)
    tree = {"draft steps": flags.speculative_num_steps, "draft top-k": flags.speculative_eagle_topk}
    for what, asked in tree.items():
        if asked not in (None, 1):
            yield _value(what, asked, 1, "DFLASH has one")


def _draft_window(launch):
    """Where layers of the draft read a window: which, and what --speculative-draft-window-size adds."""
    asked, text = launch.flags.speculative_draft_window_size, launch.draft.text if launch.draft else {}
    own = None
    if "sliding_attention" in (text.get("layer_types") or ()):
        own = text.get("sliding_window") or (text.get("dflash_config") or {}).get("swa_window_size")
    sizes = [size for size in (asked, own) if size]
    if sizes:
        why = "layers of the draft" if own == min(sizes) != asked else "every token keeps its slot in the pool"
        yield _value("draft window", asked, min(sizes), why)
    if launch.flags.speculative_draft_sink_size:
        yield _value("draft sink", launch.flags.speculative_draft_sink_size, 0, "DFLASH has none")


def _draft_writes(launch):
    """Where K and V cannot get into the drafter's pool by SGLang's fused write, of all layers at once. The scheduler
    reports the way in use (sglang_fp4kv/draft_writes.py)."""
    why = launch.draft.dflash.per_layer if launch.draft is not None else None
    if launch.on_cpu:
        why = "a CPU has no fused kernel"
    if why is not None:
        yield Value("drafter writes", "", "layer by layer, which is slower", why)


def _pools(launch):
    held = memory(launch)
    if not launch.on_triton and launch.kv_dtype == "nvfp4" and BACKEND not in launch.backends:
        return  # SGLang's own recipe has a workspace that is not counted here
    if held.target_cell is None:
        yield Value("bytes per token", "", "unknown", "the config does not say enough")
        return
    draft = "" if not held.draft_cell else f" + drafter {held.draft_cell:,}"
    yield Value("bytes per token", "", f"target {held.target_cell:,}{draft}", "one GPU")
    limit = launch.flags.max_total_tokens
    if held.budget is None or held.budget <= 0:
        return
    yield Value("KV budget", "", gib(held.budget), held.budget_text().rpartition(" = ")[0])
    if held.tokens is not None:
        fits = min(n for n in (held.tokens, limit) if n is not None)
        full = f"{fits / launch.context:.2f} full requests" if launch.context else ""
        states = launch.target.recurrent  # theirs comes out of the budget first, as `fp4kv plan` counts it
        bound = "at most " if (held.fraction is None or states) and fits == held.tokens else ""
        yield _value("tokens", launch.flags.max_total_tokens, f"{bound}{fits:,}", full)
