"""Rules about parts that were each tried, but not with one another. Each returns facts for its text, or None.

They are about this kit's readers, so about Triton; FP4-010 and its neighbours judge the other backends.
"""

from itertools import combinations

from launcher.model_kinds import base_type
from launcher.rules_attention import PROVEN_TP
from sglang_fp4kv.served import DRAFTERS_WITH_MODEL, TREE_DRAFTERS

RANKS, HOST_CACHE = "several ranks", "the hierarchical cache"
RECURRENT, EXPERTS = "recurrent layers", "recurrent layers with experts"
OTHER_RECURRENT = "recurrent layers of another class"
WINDOWS, OTHER_WINDOWS = "windowed layers", "windowed layers of another class"
DRAFT, DRAFT_WINDOW = "a DFlash2 or windowed draft", "a draft window"
DRAFTER = "another drafter than DFLASH"
# What shows a part: the real server on a CPU, and results of a GPU.
ON_A_CPU = {
    RANKS: "tests/e2e/test_nvfp4_parallel.py",
    HOST_CACHE: "tests/e2e/test_hierarchical_cache.py",
    RECURRENT: "tests/e2e/test_hybrid_serving.py",
    EXPERTS: "tests/e2e/test_hybrid_moe.py",
    WINDOWS: "tests/e2e/test_windows.py",
    DRAFT: "tests/e2e/test_draft_serving.py",
    DRAFT_WINDOW: "tests/e2e/test_draft_serving.py",
    DRAFTER: "tests/e2e/test_drafters.py",
}
ON_A_GPU = {
    RANKS: "tests/bench/results/h200x2_pair.json",
    HOST_CACHE: "tests/bench/results/h200_host_cache.json",
    RECURRENT: "tests/bench/results/h200_hybrid.json",
    EXPERTS: "tests/bench/results/h200_hybrid_moe.json",
    WINDOWS: "tests/bench/results/h200_windows.json",
    DRAFT: "tests/bench/results/h200_dflash2.json",
    DRAFTER: "tests/bench/results/h200_drafters.json",
}
# Parts that one real server has had at once, on a CPU: its undrafted and its drafted run.
_SPARKS = "tests/e2e/test_two_sparks.py"
TOGETHER_ON_A_CPU = {
    (RECURRENT, DRAFT): ON_A_CPU[RECURRENT], (RANKS, RECURRENT): _SPARKS, (RANKS, RECURRENT, DRAFT): _SPARKS,
}  # fmt: skip
# Classes of SGLang that have run, by the kind of layers; of another one no result is claimed.
_RAN = {
    None: ("Qwen3ForCausalLM", "LlamaForCausalLM"), RECURRENT: ("Qwen3_5ForCausalLM",),
    EXPERTS: ("Qwen3_5MoeForCausalLM",), WINDOWS: ("Gemma3ForCausalLM",),
}  # fmt: skip
_PUBLISHED = "Qwen3_5ForConditionalGeneration"  # has answered text on a CPU, alone and with a plain draft
_SHARED_KEY = "num_kv_shared_layers"
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Model types (without _text) by the class of their recurrent layers; OTHER_RECURRENT is FP4-115's.
_CLASSES = {"qwen3_5": RECURRENT, "qwen3_5_moe": EXPERTS}
_ANY_RECURRENT = (RECURRENT, EXPERTS, OTHER_RECURRENT)
# Pairs that rules of their own are about: FP4-098, FP4-100 and FP4-101.
_TOLD = (
    (HOST_CACHE, DRAFTER), (WINDOWS, DRAFTER), (OTHER_WINDOWS, DRAFTER),
    *((HOST_CACHE, kind) for kind in _ANY_RECURRENT),
    *((kind, DRAFTER) for kind in _ANY_RECURRENT),
)  # fmt: skip


def _other_drafter(launch):
    """Whether a served drafter other than DFLASH drafts; FP4-080 is about those that are not served."""
    return launch.on_triton and launch.drafter in TREE_DRAFTERS


def _recurrent(launch):
    return launch.target is not None and launch.target.gated_delta


def _class(launch):
    """Which of _ANY_RECURRENT the target has; None without recurrent layers that are served."""
    return _CLASSES.get(base_type(launch.target.model_type), OTHER_RECURRENT) if _recurrent(launch) else None


def _windowed(launch):
    """Whether windowed layers lie in the one pool; FP4-039 is about pools of their own."""
    target, one_pool = launch.target, launch.flags.disable_hybrid_swa_memory
    return target is not None and target.sliding and (target.window_pool is None or one_pool)


def _window_class(launch):
    """WINDOWS or OTHER_WINDOWS, which layers that read another's K and V are; None without windows in the one pool."""
    if not _windowed(launch):
        return None
    known = any(name in _RAN[WINDOWS] for name in launch.target.architectures)
    return WINDOWS if known and not launch.target.text.get(_SHARED_KEY) else OTHER_WINDOWS


def _draft_window(launch):
    """Whether a drafter with a model is given a window by a flag; one in the draft's config is _changed_draft's."""
    return launch.drafter in DRAFTERS_WITH_MODEL and launch.flags.speculative_draft_window_size is not None


def _changed_draft(launch):
    """Whether a DFLASH draft is more than the plain ones with full attention."""
    if launch.drafter != "DFLASH":
        return False
    draft = launch.draft
    kinds = (draft.text.get("layer_types") if draft else None) or ()
    return "sliding_attention" in kinds or draft is not None and bool(draft.dflash.modules)


def parts(launch):
    """What ``launch`` asks for beyond one rank, full attention and a plain DFLASH draft, in this file's names."""
    kinds = (_class(launch), _window_class(launch))
    asked = {
        RANKS: launch.flags.tp_size > 1,
        HOST_CACHE: launch.flags.enable_hierarchical_cache,
        **{kind: kind in kinds for kind in (*_ANY_RECURRENT, WINDOWS, OTHER_WINDOWS)},
        DRAFT: _changed_draft(launch),
        DRAFT_WINDOW: _draft_window(launch),
        DRAFTER: _other_drafter(launch),
    }
    return [name for name, present in asked.items() if present and launch.on_triton]


def _unlike_the_host_caches_that_ran(launch):
    """Names of flags by which a hierarchical cache differs from those that have run; empty for one like them."""
    flags = launch.flags
    wrong = {
        "page_size": flags.page_size != 64,
        "hicache_write_policy": flags.hicache_write_policy != "write_back",
        "speculative_algorithm": launch.drafter != "DFLASH",
    }
    return [name for name, differs in wrong.items() if differs]


def _experts_differ(launch):
    """Whether experts run in another way than SGLang's own kernel on one rank, or beside states in BF16."""
    flags = launch.flags
    own = flags.moe_runner_backend in ("auto", "triton") and flags.moe_a2a_backend == "none"
    return not own or flags.ep_size > 1 or flags.enable_eplb or launch.state_dtype != "float32"


def class_has_run(launch):
    """Whether SGLang's class of the target is one of a run, and it has experts where that one has.

    A config that names no class is taken for one: SGLang does not load it.
    """
    target = launch.target
    if target is None:
        return True
    kinds = [kind for kind in parts(launch) if kind in _RAN]
    kind = kinds[0] if kinds else None
    experts = any(map(target.text.get, _EXPERT_KEYS))
    named = not target.architectures or any(name in _RAN[kind] for name in target.architectures)
    return named and (kind == EXPERTS or not experts)


def results(launch):
    """Paths of what shows the parts that ``launch`` asks for, alone or together; none where nothing does."""
    asked = tuple(parts(launch))
    if not class_has_run(launch):
        published = launch.on_cpu and asked == (RECURRENT,) and _PUBLISHED in launch.target.architectures
        return (ON_A_CPU[RECURRENT],) if published and launch.drafter in (None, "DFLASH") else ()
    if RANKS in asked and launch.flags.tp_size not in PROVEN_TP:
        return ()
    if HOST_CACHE in asked and _unlike_the_host_caches_that_ran(launch) or EXPERTS in asked and _experts_differ(launch):
        return ()
    if len(asked) == 1:
        shown = (ON_A_CPU if launch.on_cpu else ON_A_GPU).get(asked[0])
    else:
        shown = TOGETHER_ON_A_CPU.get(asked) if launch.on_cpu else None
    return () if shown is None else (shown,)


def _tried_together(asked):
    """The largest of TOGETHER_ON_A_CPU that ``asked`` has all parts of; () without one."""
    return max((some for some in TOGETHER_ON_A_CPU if set(some) <= set(asked)), key=len, default=())


def parts_tried_apart(launch):
    asked = parts(launch)
    tried = (*_TOLD, *combinations(_tried_together(asked), 2))
    pairs = [pair for pair in combinations(asked, 2) if pair not in tried]
    if not pairs:
        return None
    names = ("kv_cache_dtype", "speculative_algorithm", "tp_size", "enable_hierarchical_cache")
    target = f" for {launch.target.path}" if launch.target is not None else ""
    return {"asked": launch.asked(*names) + target, "pairs": "; ".join(" with ".join(pair) for pair in pairs)}


def shown_on_a_cpu_alone(launch):
    asked = parts(launch)
    alone = [part for part in asked if part in ON_A_CPU and part not in ON_A_GPU]
    found = {part: ON_A_CPU[part] for part in alone}
    if together := _tried_together(asked):
        found[" with ".join(together)] = TOGETHER_ON_A_CPU[together]
    if not found or launch.on_cpu:
        return None
    names = ("kv_cache_dtype", "speculative_algorithm", "speculative_draft_window_size")
    of = [launch.draft if part in (DRAFT, DRAFT_WINDOW) else launch.target for part in asked]
    paths = " and ".join(dict.fromkeys(facts.path for facts in of if facts is not None))
    return {
        "asked": launch.asked(*names) + (f" for {paths}" if paths else ""),
        "parts": " and ".join(found),
        "tests": " and ".join(dict.fromkeys(found.values())),
    }


def class_of_recurrent_layers_is_untested(launch):
    if OTHER_RECURRENT not in parts(launch):
        return None
    target = launch.target
    asked = f"{launch.asked('kv_cache_dtype')} for {target.path} with model_type {target.model_type!r}"
    return {"asked": asked, "path": target.path, "type": target.model_type}


def class_of_windowed_layers_is_untested(launch):
    """FP4-091 tells of those whose second pool is asked away."""
    target = launch.target
    if OTHER_WINDOWS not in parts(launch) or target.window_pool is not None:
        return None
    named, layers = ", ".join(target.architectures) or "no architecture", target.text.get(_SHARED_KEY)
    shared = f" and {_SHARED_KEY} {layers}" if layers else ""
    asked = f"{launch.asked('kv_cache_dtype')} for {target.path} with {named}{shared}"
    return {"asked": asked, "path": target.path}


def hierarchical_cache_differs(launch):
    """Of a launch on a GPU; on a CPU it only names no test."""
    if HOST_CACHE not in parts(launch) or launch.on_cpu:
        return None
    names = _unlike_the_host_caches_that_ran(launch)
    how = {
        "page_size": f"pages of {launch.flags.page_size or 1}", "hicache_write_policy": launch.flags.hicache_write_policy,
        "speculative_algorithm": f"{launch.drafter} as the drafter" if launch.drafter else "no drafter",
    }  # fmt: skip
    asked = launch.asked("kv_cache_dtype", "enable_hierarchical_cache", *names)
    return {"asked": asked, "how": " and ".join(how[name] for name in names)} if names else None


def _drafts_for(launch):
    asked = launch.asked("kv_cache_dtype", "speculative_algorithm")
    return {"asked": f"{asked} for {launch.target.path}", "drafter": launch.drafter, "path": launch.target.path}


def drafter_of_recurrent_layers(launch):
    return _drafts_for(launch) if _other_drafter(launch) and _recurrent(launch) else None


def drafter_of_windows(launch):
    return _drafts_for(launch) if _other_drafter(launch) and _windowed(launch) else None
