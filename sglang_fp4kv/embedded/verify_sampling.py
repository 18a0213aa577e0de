"""The acceptance test of sampled speculation in torch, for a platform without SGLang's CUDA kernel.

Without one SGLang 0.5.23 warns and accepts greedily, so a sampled request would get greedy tokens.
"""

import torch


def sample_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept drafted tokens with the target's probability, draw one more; changes the first three.

    Sizes: B requests, N tokens of a chain (the first is the last token of the answer), V vocabulary
      predicts                            [B*N]     int32  out; the answer's next token at each index
      accept_index                        [B, N]    int32  out; retrive_index of the accepted, then -1
      accept_token_num                    [B]       int32  out; accepted drafts, the drawn token not counted
      candidates, retrive_*               [B, N]    int64
      uniform_samples                     [B, N]    fp32   in [0, 1); one for each draft, the last unused
      uniform_samples_for_final_sampling  [B]       fp32   in [0, 1)
      target_probs                        [B, N, V] fp32   rows that sum to 1
      draft_probs                         [B, N, V] fp32   zeros, as DFLASH passes them; not read
    Numerics: a rejected draft has no mass in the draw that follows its rejection
    Raises: ValueError for a tree (a sibling in retrive_next_sibling)
    Reference: TreeSpeculativeSamplingTargetOnly in kernels/jit/include/sgl_kernel/speculative/sampling.cuh
      @ sglang 0.5.23, of which this is the case of a chain
    """
    if (retrive_next_sibling != -1).any():
        raise ValueError("the embedded platform verifies chains only, got a draft with siblings")
    requests, length = candidates.shape
    drafted = candidates[:, 1:]
    mass = target_probs[:, :-1].gather(2, drafted.unsqueeze(2)).squeeze(2)
    accepted = (mass > 0) & (
        (uniform_samples[:, :-1] < mass / threshold_acc) | (mass >= threshold_single)
    )
    count = accepted.long().cumprod(1).sum(1)
    row = torch.arange(requests, device=candidates.device)
    left = target_probs[row, count]
    rejected = (count < length - 1).nonzero().squeeze(1)
    left[rejected, drafted[rejected, count[rejected]]] = 0.0
    sums = left.cumsum(1)
    coin = uniform_samples_for_final_sampling.view(-1, 1) * sums[:, -1:]
    drawn = torch.searchsorted(sums, coin, right=True)
    # A coin that rounding puts beyond the last sum draws the last token with mass.
    last = (left > 0).long().cumsum(1).argmax(1, keepdim=True)
    drawn = torch.minimum(drawn, last).squeeze(1)

    place = torch.arange(length, device=candidates.device)
    tokens = torch.cat((drafted, drafted[:, -1:] if length > 1 else candidates), 1).clone()
    tokens[row, count] = drawn
    kept = place <= count[:, None]
    predicts[retrive_index[kept]] = tokens[kept].to(predicts.dtype)
    accept_index.copy_(torch.where(kept, retrive_index, -1))
    accept_token_num.copy_(count)


def install() -> None:
    """Give SGLang's DFLASH verify this function where the device has none; more than once is harmless."""
    from sglang.srt.speculative import dflash_utils

    dflash_utils.tree_speculative_sampling_target_only = sample_target_only
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True
