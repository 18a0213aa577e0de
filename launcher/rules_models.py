"""Rules about what the target is and what its checkpoint holds. Each returns facts, or None."""

import reprlib

from launcher.checkpoint import INPUT_SCALED, NVFP4_WEIGHTS, PACKED_HEAD
from launcher.model_kinds import GATED_DELTA, INDEXED, LOOPED, OTHER_HEADS, RECURRENT, SHARED
from launcher.packed_weights import MARLIN, fp4_gemm, packed_weights
from launcher.rules_attention import BLACKWELL
from sglang_fp4kv.formats import BLOCK_SIZE
from sglang_fp4kv.served import BACKEND

_STRATEGIES = ("auto", "extra_buffer")  # of keeping states for the prefix cache, as they were tried
_SHORT = reprlib.Repr()
_SHORT.maxstring = 64  # the name of an architecture stays whole


def _model(launch, condition, **facts):
    target = launch.target
    if target is None or not condition(target):
        return None
    return {"asked": f"--model-path {target.path}", "path": target.path, **facts}


def head_dim_does_not_divide(launch):
    head_dim = launch.target.head_dim if launch.target else None
    if head_dim is None or head_dim % BLOCK_SIZE == 0:
        return None
    return {
        "asked": f"--model-path {launch.target.path} with head_dim {head_dim}",
        "head_dim": head_dim,
        "block": BLOCK_SIZE,
    }


def widths_differ(launch):
    target = launch.target
    if target is None or target.head_dim in (None, target.v_head_dim):
        return None
    return _model(launch, bool, head_dim=target.head_dim, v_head_dim=target.v_head_dim)


def mla(launch):
    return _model(launch, lambda target: target.mla)


def _kept(launch, kind):
    """Facts with the key and value of the target's config.json that say it is of that kind."""
    return _told(launch, launch.target.trait(kind) if launch.target else None)


def _told(launch, trait, flag=""):
    if trait is None:
        return None
    key = f"{trait.key} {_SHORT.repr(trait.value)}"
    asked = f"{flag} --model-path {launch.target.path} with {key}".lstrip()
    return {"asked": asked, "path": launch.target.path}


def _window_pool(launch):
    return launch.target.window_pool if launch.target else None


def sliding_window_pool(launch):
    return None if launch.flags.disable_hybrid_swa_memory else _told(launch, _window_pool(launch))


def windows_put_into_one_pool(launch):
    flag = "--disable-hybrid-swa-memory"
    return _told(launch, _window_pool(launch), flag) if launch.flags.disable_hybrid_swa_memory else None


def recurrent_layers(launch):
    return None if launch.target and launch.target.gated_delta else _kept(launch, RECURRENT)


def _of_states(launch, asked):
    """Facts where flags are ``asked`` of a target with gated-delta layers."""
    if not asked or launch.target is None or not launch.target.gated_delta:
        return None
    return {"asked": f"{asked} for {launch.target.path}"}


def recurrent_kernels_differ(launch):
    flags = launch.flags
    decode = flags.linear_attn_decode_backend or flags.linear_attn_backend
    verify = flags.linear_attn_verify_backend or ("flashinfer" if decode == "flashinfer" else BACKEND)
    if decode == verify == BACKEND:
        return None
    names = ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_verify_backend")
    return _of_states(launch, launch.asked(*names))


def states_are_kept_otherwise(launch):
    names = [
        "enable_linear_replayssm", "enable_linear_replayssm_spec", "enable_int8_mamba_checkpoint",
        "enable_mamba_cache_stochastic_rounding",
    ]  # fmt: skip
    names += ["mamba_radix_cache_strategy"] if launch.flags.mamba_radix_cache_strategy not in _STRATEGIES else []
    return _of_states(launch, launch.asked(*names))


def narrow_states_are_drafted(launch):
    if launch.drafter is None or launch.state_dtype == "float32":
        return None
    return _of_states(launch, launch.asked("mamba_ssm_dtype", "speculative_algorithm"))


def index_keys(launch):
    return _kept(launch, INDEXED)


def looped_layers(launch):
    return _kept(launch, LOOPED)


def layers_share_k_and_v(launch):
    return _kept(launch, SHARED)


def figures_are_not_in_the_file(launch):
    for flag, facts in launch.models:
        if facts is not None and facts.unread:
            key = next((key for key in OTHER_HEADS if facts.text.get(key)), "model_type")
            asked = f"{flag} {facts.path} with {key} {_SHORT.repr(facts.text[key])}"
            reasons = "; ".join(dict.fromkeys(facts.unread.values()))
            return {"asked": asked, "path": facts.path, "keys": " and ".join(facts.unread), "reasons": reasons}
    return None


def attention_sinks(launch):
    return _model(launch, lambda target: target.sinks)


def heads_do_not_divide(launch):
    tp = launch.flags.tp_size
    for _, facts in launch.models:
        kinds = {"KV": facts.kv_heads, "query": facts.q_heads} if facts is not None and tp >= 1 else {}
        if kinds and facts.gated_delta:
            kinds |= {f"linear {side}": facts.text[GATED_DELTA[f"{side}_heads"]] for side in ("key", "value")}
        for kind, heads in kinds.items():
            copied = kind == "KV" and heads and tp % heads == 0  # fewer than GPUs: each is held more than once
            if heads and heads % tp and not copied:
                asked = f"{launch.asked('tp_size')} for {facts.path}"
                return {"asked": asked, "heads": heads, "kind": kind, "tp": tp}
    return None


def _counted(items, shown=4):
    text = ", ".join(str(item) for item in items[:shown])
    return text if len(items) <= shown else f"{text} and {len(items) - shown} more"


def kv_scales_are_unusable(launch):
    bad = launch.target.checkpoint.bad_scales if launch.target else []
    if not bad:
        return None
    return _model(launch, bool, scales=_counted(bad, 3))


def kv_scales_are_missing(launch):
    target = launch.target
    if target is None or not target.attention_layers:
        return None
    missing = target.checkpoint.layers_without_scales(target.attention_layers)
    if not missing:
        return None
    return _model(launch, bool, layers=_counted(missing), total=len(target.attention_layers))


def safetensors_cannot_be_read(launch):
    problem = launch.target.checkpoint.problem if launch.target else None
    return _model(launch, bool, problem=problem) if problem else None


# SGLang's classes that load no more of a head than its weight (load_weights in srt/models/qwen3_5_text.py @ 0.5.23).
_PLAIN_HEADS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def _holding(launch, *kinds):
    """Facts with the first of target and draft whose checkpoint holds weights of all ``kinds``; None without one."""
    for flag, facts in launch.models:
        if facts is not None and facts.checkpoint.weights >= set(kinds):
            return {"asked": f"{flag} {facts.path}", "path": facts.path}
    return None


def nvfp4_weights_have_no_kernel(launch):
    held, gemm, gpu = _holding(launch, NVFP4_WEIGHTS), fp4_gemm(launch), launch.gpu
    if held is None or gpu is None or gpu.capability >= BLACKWELL[0] or gemm == MARLIN:
        return None
    asked = f"--fp4-gemm-backend {gemm} for {held['path']}"
    return held | {"asked": asked, "gemm": gemm, "gpu": gpu.sm}


def scale_of_the_input_is_left_out(launch):
    held = _holding(launch, NVFP4_WEIGHTS, INPUT_SCALED)
    if held is None or not (launch.on_cpu or fp4_gemm(launch) == MARLIN):
        return None
    if launch.on_cpu:
        return held | {"where": "--device cpu"}
    asked = launch.flags.fp4_gemm_runner_backend == MARLIN
    return held | {"where": f"--fp4-gemm-backend {MARLIN}" if asked else launch.gpu.sm}


def scale_of_the_head_is_dropped(launch):
    target = launch.target
    plain = target is not None and any(name in _PLAIN_HEADS for name in target.architectures)
    return _model(launch, bool) if plain and PACKED_HEAD in target.checkpoint.weights else None


def nvfp4_weights_on_a_gpu(launch):
    return _holding(launch, NVFP4_WEIGHTS) if not launch.on_cpu and not packed_weights(launch) else None
