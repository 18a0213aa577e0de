"""Rules about parts that were each tried, but not with one another. Each returns facts for its text, or None.

They are about this kit's readers, so about Triton; FP4-010 and its neighbours judge the other backends.
"""

from itertools import combinations

from sglang_fp4kv.served import TREE_DRAFTERS

RANKS, HOST_CACHE = "several ranks", "the hierarchical cache"
RECURRENT, WINDOWS = "recurrent layers", "windowed layers"
DRAFT, DRAFTER = "a DFlash2 or windowed draft", "another drafter than DFLASH"
# What shows a part: the real server on a CPU, and results of a GPU.
ON_A_CPU = {
    RANKS: "tests/e2e/test_nvfp4_parallel.py",
    HOST_CACHE: "tests/e2e/test_hierarchical_cache.py",
    RECURRENT: "tests/e2e/test_hybrid_serving.py",
    WINDOWS: "tests/e2e/test_windows.py",
    DRAFT: "tests/e2e/test_draft_serving.py",
    DRAFTER: "tests/e2e/test_drafters.py",
}
ON_A_GPU = {
    RANKS: "tests/bench/results/h200x2_pair.json",
    RECURRENT: "tests/bench/results/h200_hybrid.json",
    DRAFTER: "tests/bench/results/h200_drafters.json",
}
# Pairs that the real server has run together, all three parts at once, on a CPU.
_SPARKS = "tests/e2e/test_two_sparks.py"
TOGETHER_ON_A_CPU = {(RANKS, RECURRENT): _SPARKS, (RANKS, DRAFT): _SPARKS, (RECURRENT, DRAFT): _SPARKS}
# Pairs that rules of their own are about: FP4-098, FP4-100 and FP4-101.
_TOLD = ((HOST_CACHE, RECURRENT), (HOST_CACHE, DRAFTER), (RECURRENT, DRAFTER), (WINDOWS, DRAFTER))


def _other_drafter(launch):
    """Whether a served drafter other than DFLASH drafts; FP4-080 is about those that are not served."""
    return launch.on_triton and launch.drafter in TREE_DRAFTERS


def _recurrent(launch):
    return launch.target is not None and launch.target.gated_delta


def _windowed(launch):
    """Whether windowed layers lie in the one pool; FP4-039 is about pools of their own."""
    target, one_pool = launch.target, launch.flags.disable_hybrid_swa_memory
    return target is not None and target.sliding and (target.window_pool is None or one_pool)


def _changed_draft(launch):
    """Whether a DFLASH draft is more than the plain ones with full attention."""
    if launch.drafter != "DFLASH":
        return False
    if launch.flags.speculative_draft_window_size is not None:
        return True
    draft = launch.draft
    kinds = (draft.text.get("layer_types") if draft else None) or ()
    return "sliding_attention" in kinds or draft is not None and bool(draft.dflash.modules)


def parts(launch):
    """What ``launch`` asks for beyond one rank, full attention and a plain DFLASH draft, in this file's names."""
    asked = {
        RANKS: launch.flags.tp_size > 1,
        HOST_CACHE: launch.flags.enable_hierarchical_cache,
        RECURRENT: _recurrent(launch),
        WINDOWS: _windowed(launch),
        DRAFT: _changed_draft(launch),
        DRAFTER: _other_drafter(launch),
    }
    return [name for name, present in asked.items() if present and launch.on_triton]


def results(launch):
    """Paths of what shows the parts that ``launch`` asks for, alone or together; none where nothing does."""
    asked = parts(launch)
    if len(asked) == 1:
        shown, wanted = (ON_A_CPU if _on_cpu(launch) else ON_A_GPU), asked
    else:
        shown, wanted = (TOGETHER_ON_A_CPU if _on_cpu(launch) else {}), list(combinations(asked, 2))
    return tuple(dict.fromkeys(shown[name] for name in wanted)) if shown.keys() >= set(wanted) else ()


def _on_cpu(launch):
    return launch.flags.device == "cpu"


def parts_tried_apart(launch):
    tried = (*_TOLD, *TOGETHER_ON_A_CPU)
    pairs = [pair for pair in combinations(parts(launch), 2) if pair not in tried]
    if not pairs:
        return None
    names = ("kv_cache_dtype", "speculative_algorithm", "tp_size", "enable_hierarchical_cache")
    target = f" for {launch.target.path}" if launch.target is not None else ""
    return {"asked": launch.asked(*names) + target, "pairs": "; ".join(" with ".join(pair) for pair in pairs)}


def shown_on_a_cpu_alone(launch):
    """FP4-095 says the same of the hierarchical cache."""
    asked = parts(launch)
    found = {part: ON_A_CPU[part] for part in asked if part not in ON_A_GPU and part != HOST_CACHE}
    together = [pair for pair in combinations(asked, 2) if pair in TOGETHER_ON_A_CPU]
    found |= {" with ".join(pair): TOGETHER_ON_A_CPU[pair] for pair in together}
    if not found or _on_cpu(launch):
        return None
    names = ("kv_cache_dtype", "speculative_algorithm", "speculative_draft_window_size")
    of = [launch.draft if part == DRAFT else launch.target for part in asked]
    paths = " and ".join(dict.fromkeys(facts.path for facts in of if facts is not None))
    return {
        "asked": launch.asked(*names) + (f" for {paths}" if paths else ""),
        "parts": " and ".join(found),
        "tests": " and ".join(dict.fromkeys(found.values())),
    }


def _drafts_for(launch):
    asked = launch.asked("kv_cache_dtype", "speculative_algorithm")
    return {"asked": f"{asked} for {launch.target.path}", "drafter": launch.drafter, "path": launch.target.path}


def drafter_of_recurrent_layers(launch):
    return _drafts_for(launch) if _other_drafter(launch) and _recurrent(launch) else None


def drafter_of_windows(launch):
    return _drafts_for(launch) if _other_drafter(launch) and _windowed(launch) else None
