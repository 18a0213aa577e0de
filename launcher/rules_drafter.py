"""Rules about the drafter and its pool. Each returns facts for its text, or None."""

from launcher.checkpoint import weights_hash
from launcher.draft_facts import MODULE_KEYS
from launcher.launch import FP4
from sglang_fp4kv.model_classes import CAPTURES, abilities
from sglang_fp4kv.served import DRAFT_DTYPE_DEFAULT, DRAFT_DTYPES, DRAFTERS, DRAFTERS_WITHOUT_MODEL, TREE_DRAFTERS

# DRAFT_ATTENTION_BACKEND_CHOICES in srt/arg_groups/choices.py @ 0.5.23.
_DRAFT_BACKENDS = ("flashinfer", "fa3", "fa4", "triton", "ascend", "trtllm_mha", "intel_xpu")
_TRTLLM_REPLACEMENT = {(10, 0): "fa4", (10, 3): "fa4"}
# Targets for which SGLang drafts a tree by itself (_auto_choose_speculative_params in
# srt/arg_groups/speculative_hook.py @ 0.5.23), by their first architecture, and its width.
_TREE_TARGETS = (("LlamaForCausalLM",), ("Grok1ForCausalLM",), ("Grok1VForCausalLM",))
_TREE_WIDTH = 4


def draft_pool_is_not_plain(launch):
    asked = launch.flags.speculative_draft_kv_cache_dtype
    allowed = DRAFT_DTYPES if launch.kv_dtype == "nvfp4" else ()
    if launch.drafter is None or asked in (None, *allowed):
        return None
    if launch.kv_dtype != "nvfp4" and asked not in FP4:
        return None
    asked_flags = launch.asked("kv_cache_dtype", "speculative_draft_kv_cache_dtype")
    return {"asked": asked_flags, "dtype": asked, "target": launch.kv_dtype}


def bf16_draft_pool_is_untested(launch):
    asked = launch.flags.speculative_draft_kv_cache_dtype
    if launch.drafter is None or asked not in DRAFT_DTYPES or asked == DRAFT_DTYPE_DEFAULT:
        return None
    if launch.drafter == "EAGLE3" and drafted_width(launch) == 1:  # a chain of it has run so on a GPU
        return None
    names = ("kv_cache_dtype", "speculative_algorithm", "speculative_eagle_topk", "speculative_draft_kv_cache_dtype")
    return {"asked": launch.asked(*names)}


def block_size_is_unknown(launch):
    if launch.drafter != "DFLASH" or launch.draft is None or launch.draft.block_size:
        return None
    if launch.draft_tokens is not None:
        return None
    return {"asked": f"--speculative-draft-model-path {launch.draft.path}", "path": launch.draft.path}


def draft_layer_is_not_captured(launch):
    draft, target = launch.draft, launch.target
    if launch.drafter != "DFLASH" or draft is None or target is None:
        return None
    if not draft.target_layer_ids or not target.num_layers:
        return None
    # SGLang captures layer i's output as layer i + 1's input, so the last layer's never arrives.
    wrong = [i for i in draft.target_layer_ids if i >= target.num_layers - 1]
    if not wrong:
        return None
    return {
        "asked": f"target_layer_ids {list(draft.target_layer_ids)} in {draft.path}",
        "wrong": wrong,
        "layers": target.num_layers,
        "limit": target.num_layers - 1,
    }


def draft_tokens_differ(launch):
    asked, draft = launch.draft_tokens, launch.draft
    if launch.drafter != "DFLASH" or asked is None or draft is None:
        return None
    if draft.block_size in (None, asked):
        return None
    return {
        "asked": launch.asked("speculative_num_draft_tokens", "speculative_dflash_block_size"),
        "tokens": asked,
        "block": draft.block_size,
    }


def draft_backend(launch):
    """(asked for or inherited, what SGLang puts in its place or None)."""
    backend = launch.flags.speculative_draft_attention_backend or launch.backends[0]
    if backend is None or launch.drafter != "DFLASH":
        return backend, None
    if backend not in _DRAFT_BACKENDS:
        return backend, "flashinfer"
    if backend == "trtllm_mha" and not (launch.draft and launch.draft.causal_or_windowed):
        capability = launch.gpu.capability if launch.gpu else None
        return backend, _TRTLLM_REPLACEMENT.get(capability, "flashinfer")
    return backend, None


def draft_backend_is_replaced(launch):
    backend, replacement = draft_backend(launch)
    # Left out it follows prefill, which FP4-010 and its neighbours judge.
    if replacement is None or launch.flags.speculative_draft_attention_backend is None:
        return None
    return {
        "asked": launch.asked("speculative_algorithm", "speculative_draft_attention_backend"),
        "backend": backend,
        "replacement": replacement,
    }


def draft_backend_is_untested(launch):
    backend = launch.flags.speculative_draft_attention_backend
    if launch.drafter is None or backend in (None, "triton") or draft_backend(launch)[1]:
        return None
    return {
        "asked": launch.asked("speculative_algorithm", "speculative_draft_attention_backend"),
        "backend": backend,
    }


def drafter_is_not_served(launch):
    multi = launch.flags.enable_multi_layer_eagle
    if launch.drafter in (None, *DRAFTERS) and not multi:
        return None
    names = "kv_cache_dtype", "speculative_algorithm", "enable_multi_layer_eagle"
    return {"asked": launch.asked(*names), "drafter": "a multi-layer EAGLE" if multi else launch.drafter}


def target_captures_nothing(launch):
    """Of a class that SGLang has; EAGLE3's draft may say that it needs no more than the last layer's output."""
    target, needed = launch.target, CAPTURES.get(launch.drafter)
    can = abilities(target.architectures) if target is not None and needed else None
    if can is None or needed in can:
        return None
    own = launch.draft.text.get("eagle_config") if launch.draft is not None else None
    if launch.drafter == "EAGLE3" and isinstance(own, dict) and own.get("use_aux_hidden_state") is False:
        return None
    asked = f"{launch.asked('kv_cache_dtype', 'speculative_algorithm')} for {target.path}"
    return {"asked": asked, "drafter": launch.drafter, "names": " and ".join(target.architectures), "needed": needed}


def ngram_tree_on_pages(launch):
    breadth, page = launch.flags.speculative_ngram_max_bfs_breadth, launch.flags.page_size
    if launch.drafter != "NGRAM" or breadth == 1 or page in (None, 1):
        return None
    asked = launch.asked("speculative_algorithm", "speculative_ngram_max_bfs_breadth", "page_size")
    return {"asked": asked, "width": breadth, "page": page}


def drafted_width(launch):
    """Branches at each step of an EAGLE, EAGLE3, NEXTN or STANDALONE, 1 for a chain; None where SGLang chooses
    by a target that is unknown."""
    width = launch.flags.speculative_eagle_topk
    if width is not None:
        return width
    if launch.drafter == "STANDALONE":
        return 1
    if launch.target is None:
        return None
    return _TREE_WIDTH if launch.target.architectures[:1] in _TREE_TARGETS else 1


def tree_on_pages(launch):
    """FP4-081 is about NGRAM's trees."""
    if launch.drafter == "NGRAM" or launch.drafter not in TREE_DRAFTERS or not launch.on_triton:
        return None
    width, page = drafted_width(launch) or 1, launch.flags.page_size or 1
    if width == 1 or page == 1:
        return None
    names = ("kv_cache_dtype", "attention_backend", "speculative_algorithm", "speculative_eagle_topk", "page_size")
    return {"asked": launch.asked(*names), "drafter": launch.drafter, "width": width, "page": page}


def acceptance_is_relaxed(launch):
    names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    lower = [name for name in names if getattr(launch.flags, name) != 1.0]
    if launch.drafter is None or not lower:
        return None
    return {"asked": launch.asked("speculative_algorithm", *lower)}


def drafting_changed(launch):
    names = (
        "speculative_adaptive", "speculative_token_map", "speculative_use_rejection_sampling",
        "speculative_use_block_verification",
    )  # fmt: skip
    asked = launch.asked(*names)
    if not asked or launch.drafter is None or not launch.on_triton:
        return None
    return {"asked": f"{launch.asked('kv_cache_dtype', 'speculative_algorithm')} {asked}", "flags": asked}


def half_precision_target(launch):
    target = launch.target
    if launch.drafter in (None, *DRAFTERS_WITHOUT_MODEL) or target is None:
        return None
    if not target.half_precision(launch.flags.dtype):
        return None
    return {
        "asked": f"{launch.asked('speculative_algorithm', 'dtype')} for {target.path}",
        "drafter": launch.drafter,
        "stored": target.dtype or "no dtype",
    }


def found_draft(launch):
    """(revision, sha256) of the draft as far as the profile names one; None where nothing says."""
    draft, revision, digest = launch.draft, None, None
    if launch.draft_revision is not None:
        revision = (draft and draft.snapshot) or launch.flags.speculative_draft_model_revision
    if launch.draft_sha256 is not None and draft and draft.folder:
        digest = weights_hash(draft.folder)
    return revision, digest


def draft_differs(launch):
    if launch.drafter is None:
        return None
    revision, digest = found_draft(launch)
    pairs = [("revision", revision, launch.draft_revision), ("sha256", digest, launch.draft_sha256)]
    wrong = [(kind, found, wanted) for kind, found, wanted in pairs if found not in (None, wanted)]
    if not wrong:
        return None
    return {
        "asked": launch.asked("speculative_draft_model_path", "speculative_draft_model_revision"),
        "found": ", ".join(f"{kind} {found}" for kind, found, _ in wrong),
        "wanted": ", ".join(f"{kind} {wanted}" for kind, _, wanted in wrong),
    }


def _dflash(launch):
    """The DraftFacts of a DFLASH draft; None where there is none to read."""
    return launch.draft.dflash if launch.drafter == "DFLASH" and launch.draft is not None else None


def _the_draft(launch, **facts):
    return {"asked": launch.asked("speculative_draft_model_path"), "path": launch.draft.path, **facts}


def draft_keys_are_out_of_place(launch):
    dflash = _dflash(launch)
    if dflash is None or not dflash.misplaced:
        return None
    return _the_draft(launch, keys=" and ".join(dflash.misplaced))


def draft_cannot_be_built(launch):
    dflash = _dflash(launch)
    if dflash is None or not dflash.problems:
        return None
    return _the_draft(launch, problems="; ".join(dflash.problems))


def draft_modules_are_not_built(launch):
    """A checkpoint's modules, or those its keys size, beside those that SGLang would build."""
    dflash = _dflash(launch)
    if dflash is None or dflash.problems:
        return None
    stored = launch.draft.checkpoint.modules
    if launch.draft.checkpoint.weights_bytes is None:  # no safetensors to read
        stored = dflash.modules
    asked = {name for name, keys in MODULE_KEYS.items() if all(dflash.sizes[key] for key in keys)}
    told = []
    for name, keys in MODULE_KEYS.items():
        if name in dflash.modules and name not in stored:
            told.append(f"a {name} is asked for and the checkpoint has no weights for it")
        elif name in asked and name not in dflash.modules:
            named = ", ".join(launch.draft.architectures)
            told.append(f"{keys[0]} asks for a {name}, which architectures {named} does not have")
        elif name in stored and name not in dflash.modules:
            told.append(f"the checkpoint has a {name} and dflash_config has no {keys[0]}")
    return _the_draft(launch, told="; ".join(told)) if told else None


def draft_window_is_too_small(launch):
    window = launch.flags.speculative_draft_window_size
    if launch.drafter != "DFLASH" or window is None:
        return None
    block = launch.draft_tokens or (launch.draft and launch.draft.block_size) or 1
    if window >= block:
        return None
    return {
        "asked": launch.asked(
            "speculative_draft_window_size", "speculative_num_draft_tokens", "speculative_dflash_block_size"
        ),
        "window": window,
        "block": block,
    }


def draft_head_is_untested(launch):
    dflash = _dflash(launch)
    if dflash is None or dflash.other_head is None:
        return None
    return _the_draft(launch, head=dflash.other_head)
