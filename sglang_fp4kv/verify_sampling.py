"""Sampling with a drafter: draws as without it, or a refusal of the request.

With DFLASH SGLang 0.5.23 accepts a drafted token with the probability the target gives it and draws the rest from
what is left (tree_speculative_sampling_target_only), which keeps the target's distribution. But the
distribution that it does this with is not the one that the sampler draws from without a drafter
(srt/speculative/dflash_utils.py against srt/layers/sampler.py):

- top-p is applied to what top-k leaves, renormalized; the sampler applies both to the whole distribution;
- min-p is left out, also where a DFlash2 draft is sampled itself (kernels/ops/speculative/dspark);
- the penalties are read from a field that no longer exists (acc_linear_penalties), and nothing counts a
  drafted request's tokens, so frequency, presence and repetition penalties and min_new_tokens do nothing.

The first two are put right here. The last would need counts for every position of a block, kept on the
device; such a request is answered with an error instead.

The other drafters are verified by one function of their own (eagle_sample in srt/speculative/eagle_utils.py). It
leaves min-p out as well, and reads penalties whose counts take one token of each step and know nothing of a block's
earlier ones; on a CPU it has no kernel that draws. Such requests are answered with an error. Its top-p, too, is
applied to what top-k leaves; that stays as SGLang does it. All of it only where the target's KV is packed NVFP4.
"""

import copy

import torch

# Request field: the value that asks for nothing.
PENALTIES = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
_WAY_OUT = (
    "Leave them out (--sampling-defaults openai keeps the server from taking them from the model's "
    "generation_config.json), or ask a server without the drafter."
)


def _served():
    from sglang_fp4kv.resolution import serves_packed_kv

    return serves_packed_kv()


def refuse_penalties(original, req, enable_overlap):
    """Around validate_dflash_request: the reason why ``req`` cannot be served, or None.

    SGLang answers a request that has a reason with HTTP 400 and the reason.
    """
    reason = original(req, enable_overlap)
    if reason is not None or not _served():
        return reason
    asked = _penalties(req.sampling_params)
    if not asked:
        return None
    return (
        f"{', '.join(asked)}: SGLang 0.5.23 applies no penalties and no min_new_tokens while it verifies a "
        f"DFLASH draft, so the answer would be that of a request without them. {_WAY_OUT}"
    )


def refuse_inexact(original, scheduler, req):
    """Around validate_dllm_request, which every request passes: the reason why ``req`` cannot be served, or None.

    About the drafters beside DFLASH. SGLang answers a request that has a reason with HTTP 400 and the reason.
    """
    reason = original(scheduler, req)
    drafter = scheduler.spec_algorithm
    if reason is not None or drafter.is_none() or drafter.is_dflash_family() or not _served():
        return reason
    parameters = req.sampling_params
    draws = parameters.top_k != 1  # so SGLang writes a temperature of 0 down
    asked = _penalties(parameters)
    if draws and parameters.min_p > 0:
        asked.append(f"min_p {parameters.min_p}")
    if asked:
        return (
            f"{', '.join(asked)}: SGLang 0.5.23 leaves min_p out while it verifies a draft of {drafter.name}, and counts "
            f"one token of each step for penalties and min_new_tokens, so the answer would be another one. {_WAY_OUT}"
        )
    if draws and str(scheduler.device).startswith("cpu"):
        return (
            f"temperature {parameters.temperature}: SGLang 0.5.23 has no kernel for a CPU that draws while it verifies a "
            f"draft of {drafter.name}. Ask with temperature 0, or a server without the drafter."
        )
    return None


def _penalties(parameters):
    """What a request asks for of PENALTIES, name and value, a text each."""
    asked = {name: getattr(parameters, name) for name in PENALTIES}
    return [f"{name} {value}" for name, value in asked.items() if value != PENALTIES[name]]


def filtered_probs(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    width: int,
    in_turn: bool,
) -> torch.Tensor:
    """The distribution that SGLang's sampler draws from, [R, V] fp32; probs stays unchanged.

    Sizes: R rows, V vocabulary
      probs           [R, V] fp32        softmax of the logits over the temperature
      top_ks          [R]    int32       tokens that stay; V or more = all
      top_ps, min_ps  [R]    fp32        1.0 and 0.0 = all
      width           at least the largest of top_ks, host value; V or more where one of them is
      in_turn         top-p looks at what top-k leaves, renormalized, min-p at what is left then;
                      False: all three at the whole distribution
    Source: top_k_top_p_min_p_sampling_from_probs_torch and Sampler._sample_from_probs in
      srt/layers/sampler.py @ 0.5.23
    """
    vocabulary = probs.shape[-1]
    if width < vocabulary:
        values, tokens = torch.topk(probs, width, dim=-1)
    else:
        values, tokens = probs.sort(dim=-1, descending=True)
    rank = torch.arange(values.shape[-1], device=probs.device)
    values = values.masked_fill(rank >= top_ks.view(-1, 1), 0.0)
    whole = values.sum(-1, keepdim=True) if in_turn else 1.0
    before = values.cumsum(-1) - values
    values = values.masked_fill(before > top_ps.view(-1, 1) * whole, 0.0)
    values = values.masked_fill(values < values[:, :1] * min_ps.view(-1, 1), 0.0)
    values = values / values.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, tokens, values)


def target_probs(
    original,
    *,
    next_token_logits,
    sampling_info,
    draft_token_num,
    bs,
    max_top_k=None,
    **options,
):
    """Around build_speculative_verify_target_probs: what the sampler would draw from, [B, N, V] fp32.

    Sizes: B requests, N rows a block, V vocabulary
      next_token_logits  [B*N, V]
    SGLang's own function serves every request for which it is right: top-k or top-p alone.
    """
    from sglang.srt.runtime_context import get_exec

    min_p = sampling_info.need_min_p_sampling
    both = sampling_info.need_top_k_sampling and sampling_info.need_top_p_sampling
    if not (min_p or both) or not _served():
        return original(
            next_token_logits=next_token_logits,
            sampling_info=sampling_info,
            draft_token_num=draft_token_num,
            bs=bs,
            max_top_k=max_top_k,
            **options,
        )
    temperatures, top_ks, top_ps, min_ps = (
        x.repeat_interleave(draft_token_num, dim=0)
        for x in (
            sampling_info.temperatures,
            sampling_info.top_ks,
            sampling_info.top_ps,
            sampling_info.min_ps,
        )
    )
    probs = torch.softmax(next_token_logits.float() / temperatures.view(-1, 1), dim=-1)
    width = probs.shape[-1] if max_top_k is None else int(max_top_k)
    # The flashinfer sampler filters in turn where a request has min-p, together otherwise.
    in_turn = min_p and get_exec().kernel.sampling_backend != "pytorch"
    probs = filtered_probs(probs, top_ks, top_ps, min_ps, width, in_turn)
    return probs.view(bs, draft_token_num, -1)


def accept_with_min_p(original, *, sampling_info, **arguments):
    """Around _accept_sampling_core, which takes the plain softmax where neither top-k nor top-p is asked for.

    With min-p it then asks for the filtered distribution, which is target_probs above.
    """
    if sampling_info.need_min_p_sampling and _served():
        sampling_info = copy.copy(sampling_info)
        sampling_info.need_top_p_sampling = True
    return original(sampling_info=sampling_info, **arguments)
