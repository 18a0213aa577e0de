"""The table of launch rules, in the order of their ids, which is the order they are reported in.

A rule looks at a Launch and returns the facts for its text (launcher/refusal.py), or None. FP8 and
BF16 KV are SGLang's own business: only the rules under ANY look at them.
"""

from dataclasses import dataclass
from typing import Callable

from launcher import rules_attention as attention
from launcher import rules_drafter as drafter
from launcher import rules_memory as memory
from launcher import rules_models as models
from launcher import rules_storage as storage
from launcher import rules_together as together
from launcher.launch import FP4
from launcher.refusal import refusal

FAILS, UNTESTED = "fails", "untested"
ANY, NVFP4, MX = "any KV dtype", ("nvfp4",), ("fp4_mx_block16",)


@dataclass(frozen=True)
class Rule:
    """``status``: fails, or untested (no result on file). ``server_refuses``: the server stops before
    it loads weights as well, so an untested one cannot be allowed."""

    check: Callable
    status: str
    judges: object
    server_refuses: bool = False

    @property
    def allowable(self):
        return self.status == UNTESTED and not self.server_refuses

    def applies(self, launch):
        return self.judges is ANY or launch.kv_dtype in self.judges


RULES = {
    "FP4-010": Rule(attention.backend_is_not_triton, UNTESTED, NVFP4),
    "FP4-011": Rule(drafter.draft_pool_is_not_plain, FAILS, ANY),
    "FP4-012": Rule(drafter.block_size_is_unknown, FAILS, FP4),
    "FP4-013": Rule(drafter.draft_layer_is_not_captured, FAILS, FP4),
    "FP4-014": Rule(models.head_dim_does_not_divide, FAILS, FP4),
    "FP4-015": Rule(models.widths_differ, FAILS, NVFP4),
    "FP4-017": Rule(attention.nvfp4_drafted_on_flashinfer, FAILS, NVFP4),
    "FP4-018": Rule(attention.nvfp4_drafted_on_trtllm, FAILS, NVFP4),
    "FP4-019": Rule(attention.prefill_and_decode_differ, FAILS, NVFP4),
    "FP4-020": Rule(attention.stock_nvfp4_needs_blackwell, FAILS, NVFP4),
    "FP4-021": Rule(attention.dequant_dtype_has_no_meaning, FAILS, ANY),
    "FP4-022": Rule(attention.deterministic, FAILS, NVFP4, server_refuses=True),
    "FP4-023": Rule(attention.mixed_chunk, FAILS, NVFP4, server_refuses=True),
    "FP4-024": Rule(attention.hnd_layout, FAILS, FP4),
    "FP4-025": Rule(attention.post_capture_sizing, FAILS, FP4),
    "FP4-026": Rule(attention.gpu_is_untested, UNTESTED, NVFP4),
    "FP4-027": Rule(attention.parallel_is_untested, UNTESTED, NVFP4),
    "FP4-028": Rule(attention.mx_writer_copies_bf16, FAILS, MX),
    "FP4-029": Rule(attention.mx_is_untested, UNTESTED, MX),
    "FP4-030": Rule(drafter.draft_tokens_differ, FAILS, FP4),
    "FP4-031": Rule(drafter.draft_backend_is_replaced, FAILS, FP4),
    "FP4-032": Rule(drafter.draft_backend_is_untested, UNTESTED, FP4),
    "FP4-033": Rule(drafter.bf16_draft_pool_is_untested, UNTESTED, NVFP4),
    "FP4-036": Rule(drafter.half_precision_target, FAILS, FP4, server_refuses=True),
    "FP4-037": Rule(drafter.draft_differs, FAILS, ANY),
    "FP4-038": Rule(models.mla, FAILS, NVFP4, server_refuses=True),
    "FP4-039": Rule(models.sliding_window_pool, FAILS, NVFP4, server_refuses=True),
    "FP4-040": Rule(models.recurrent_layers, FAILS, NVFP4, server_refuses=True),
    "FP4-041": Rule(models.attention_sinks, FAILS, NVFP4, server_refuses=True),
    "FP4-042": Rule(models.heads_do_not_divide, FAILS, NVFP4),
    "FP4-043": Rule(models.kv_scales_are_unusable, FAILS, NVFP4, server_refuses=True),
    "FP4-044": Rule(models.kv_scales_are_missing, FAILS, NVFP4, server_refuses=True),
    "FP4-045": Rule(models.safetensors_cannot_be_read, FAILS, FP4),
    "FP4-046": Rule(storage.unified_memory, FAILS, FP4, server_refuses=True),
    "FP4-047": Rule(storage.hierarchical_cache, FAILS, FP4, server_refuses=True),
    "FP4-048": Rule(storage.lmcache, FAILS, FP4, server_refuses=True),
    "FP4-049": Rule(storage.flexkv, FAILS, FP4, server_refuses=True),
    "FP4-050": Rule(storage.external_linker, FAILS, FP4, server_refuses=True),
    "FP4-051": Rule(storage.pd_disaggregation, FAILS, FP4, server_refuses=True),
    "FP4-052": Rule(storage.decode_context_parallel, FAILS, NVFP4, server_refuses=True),
    "FP4-053": Rule(storage.kv_sharding, FAILS, NVFP4, server_refuses=True),
    "FP4-054": Rule(storage.hisparse, FAILS, NVFP4, server_refuses=True),
    "FP4-055": Rule(memory.one_request_does_not_fit, FAILS, FP4),
    "FP4-056": Rule(memory.pools_exceed_the_budget, FAILS, FP4),
    "FP4-057": Rule(memory.mx_decoded_layer_does_not_fit, FAILS, MX),
    "FP4-058": Rule(attention.diffusion_model, UNTESTED, NVFP4),
    "FP4-059": Rule(attention.sglang_refuses_the_backend, FAILS, NVFP4),
    "FP4-060": Rule(models.index_keys, FAILS, NVFP4),
    "FP4-061": Rule(models.looped_layers, UNTESTED, NVFP4),
    "FP4-062": Rule(models.layers_share_k_and_v, FAILS, NVFP4),
    "FP4-063": Rule(models.figures_are_not_in_the_file, UNTESTED, NVFP4),
    "FP4-064": Rule(attention.requests_come_before_the_proof, FAILS, FP4),
    "FP4-065": Rule(attention.weights_come_in_requests, FAILS, FP4),
    "FP4-070": Rule(models.recurrent_kernels_differ, UNTESTED, NVFP4),
    "FP4-071": Rule(models.states_are_kept_otherwise, UNTESTED, NVFP4),
    "FP4-072": Rule(models.narrow_states_are_drafted, UNTESTED, NVFP4),
    "FP4-075": Rule(drafter.draft_keys_are_out_of_place, FAILS, FP4),
    "FP4-076": Rule(drafter.draft_cannot_be_built, FAILS, FP4),
    "FP4-077": Rule(drafter.draft_modules_are_not_built, FAILS, FP4),
    "FP4-078": Rule(drafter.draft_window_is_too_small, FAILS, FP4),
    "FP4-079": Rule(drafter.draft_head_is_untested, UNTESTED, NVFP4),
    "FP4-080": Rule(drafter.drafter_is_not_served, UNTESTED, NVFP4, server_refuses=True),
    "FP4-081": Rule(drafter.ngram_tree_on_pages, FAILS, NVFP4),
    "FP4-090": Rule(drafter.acceptance_is_relaxed, UNTESTED, NVFP4),
    "FP4-091": Rule(models.windows_put_into_one_pool, UNTESTED, NVFP4),
    "FP4-095": Rule(together.hierarchical_cache_differs, UNTESTED, NVFP4),
    "FP4-096": Rule(storage.hierarchical_cache_way, FAILS, NVFP4, server_refuses=True),
    "FP4-097": Rule(storage.hierarchical_cache_rows, FAILS, NVFP4, server_refuses=True),
    "FP4-098": Rule(storage.hierarchical_cache_companions, UNTESTED, NVFP4, server_refuses=True),
    "FP4-100": Rule(together.drafter_of_recurrent_layers, UNTESTED, NVFP4, server_refuses=True),
    "FP4-101": Rule(together.drafter_of_windows, UNTESTED, NVFP4, server_refuses=True),
    "FP4-102": Rule(together.parts_tried_apart, UNTESTED, NVFP4),
    "FP4-103": Rule(together.shown_on_a_cpu_alone, UNTESTED, NVFP4),
    "FP4-104": Rule(drafter.drafting_changed, UNTESTED, NVFP4),
    "FP4-110": Rule(models.nvfp4_weights_have_no_kernel, FAILS, NVFP4),
    "FP4-111": Rule(models.scale_of_the_input_is_left_out, FAILS, NVFP4),
    "FP4-112": Rule(models.scale_of_the_head_is_dropped, FAILS, NVFP4),
    "FP4-113": Rule(models.nvfp4_weights_on_a_gpu, UNTESTED, NVFP4),
    "FP4-114": Rule(attention.scales_file_is_not_read, FAILS, NVFP4, server_refuses=True),
    "FP4-115": Rule(together.class_of_recurrent_layers_is_untested, UNTESTED, NVFP4),
    "FP4-116": Rule(drafter.tree_on_pages, UNTESTED, NVFP4),
    "FP4-117": Rule(storage.hierarchical_cache_without_radix_cache, FAILS, NVFP4),
    "FP4-118": Rule(together.class_of_windowed_layers_is_untested, UNTESTED, NVFP4),
    "FP4-119": Rule(drafter.target_captures_nothing, FAILS, FP4),
}


def judge(launch):
    """Every refusal that applies to ``launch``, in table order; empty when it may start."""
    found = []
    for id, rule in RULES.items():
        facts = rule.check(launch) if rule.applies(launch) else None
        if facts is not None:
            found.append(refusal(id, asked=facts.pop("asked"), **facts))
    return found
