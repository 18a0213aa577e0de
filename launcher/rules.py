"""What is refused before SGLang starts: the launches that cannot run at all.

Each rule looks at a Launch and returns the facts for its refusal's text, or None. Only launches
with ``--kv-cache-dtype nvfp4`` are judged; everything else is SGLang's own business.
"""

from dataclasses import dataclass

from launcher.modelfacts import ModelFacts
from launcher.refusal import refusal
from sglang_fp4kv.formats import BLOCK_SIZE
from sglang_fp4kv.served import BACKEND, DRAFT_DTYPES


@dataclass(frozen=True)
class Launch:
    """What was asked for: SGLang's flags as a namespace, and the two models' facts."""

    flags: object
    target: ModelFacts | None
    draft: ModelFacts | None

    @property
    def backends(self):
        """(prefill, decode) as SGLang reads them; None where nothing was asked."""
        base = self.flags.attention_backend
        return (
            self.flags.prefill_attention_backend or base,
            self.flags.decode_attention_backend or base,
        )

    @property
    def drafter(self):
        asked = self.flags.speculative_algorithm
        return asked.upper() if asked else None


def _asked(launch, *names):
    parts = []
    for name in names:
        value = getattr(launch.flags, name)
        if value is not None:
            parts.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(parts)


def backend_is_not_triton(launch):
    if launch.backends == (BACKEND, BACKEND):
        return None
    return {
        "asked": _asked(
            launch,
            "kv_cache_dtype",
            "attention_backend",
            "prefill_attention_backend",
            "decode_attention_backend",
        ),
        "prefill": launch.backends[0] or "SGLang's default",
        "decode": launch.backends[1] or "SGLang's default",
    }


def draft_pool_is_not_plain(launch):
    asked = launch.flags.speculative_draft_kv_cache_dtype
    if launch.drafter is None or asked in (None, *DRAFT_DTYPES):
        return None
    return {
        "asked": _asked(launch, "kv_cache_dtype", "speculative_draft_kv_cache_dtype"),
        "dtype": asked,
    }


def block_size_is_unknown(launch):
    if launch.drafter != "DFLASH" or launch.draft is None or launch.draft.block_size:
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
    if target is None or target.head_dim == target.v_head_dim:
        return None
    return {
        "asked": f"--model-path {target.path}",
        "head_dim": target.head_dim,
        "v_head_dim": target.v_head_dim,
    }


# In the order of their ids, which is the order they are reported in.
RULES = {
    "FP4-010": backend_is_not_triton,
    "FP4-011": draft_pool_is_not_plain,
    "FP4-012": block_size_is_unknown,
    "FP4-013": draft_layer_is_not_captured,
    "FP4-014": head_dim_does_not_divide,
    "FP4-015": widths_differ,
}


def judge(launch):
    """Every refusal that applies to ``launch``, in table order; empty when it may start."""
    if launch.flags.kv_cache_dtype != "nvfp4":
        return []
    found = []
    for id, rule in RULES.items():
        facts = rule(launch)
        if facts is not None:
            found.append(refusal(id, asked=facts.pop("asked"), **facts))
    return found
