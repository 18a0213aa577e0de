"""Plain-torch attention over decoded NVFP4 values: fp32, and the low-precision baseline.

The readers' error may be at most twice that of the baseline: the same attention over the same
decoded values with q, k, v and the weights rounded to bf16 (fp16 for fp16 q), fp32 accumulation
and an output of that dtype.
"""

import math
from dataclasses import dataclass

import torch

from sglang_fp4kv import codec


@dataclass
class Pool:
    """One layer of a packed pool; every slot starts poisoned with NaN scales."""

    k_codes: torch.Tensor
    k_scales: torch.Tensor
    v_codes: torch.Tensor
    v_scales: torch.Tensor
    k_global_scale: float = 0.5
    v_global_scale: float = 0.0625

    @property
    def sides(self):
        return self.k_codes, self.k_scales, self.v_codes, self.v_scales

    @property
    def scales(self):
        return {"k_global_scale": self.k_global_scale, "v_global_scale": self.v_global_scale}

    def decoded(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [L, H, D] in fp32 of the given slots."""
        slots = slots.long()
        k = codec.decode(self.k_codes[slots], self.k_scales[slots], self.k_global_scale)
        v = codec.decode(self.v_codes[slots], self.v_scales[slots], self.v_global_scale)
        return k, v


def make_pool(
    slots: int, heads: int, head_dim: int, device: torch.device | str, **global_scales: float
) -> Pool:
    """A pool without owners: codes 0xFF, scales alternating between the two NaN bytes."""
    scales = torch.full((slots, heads, head_dim // 16), 0x7F, dtype=torch.uint8)
    scales[..., ::2] = 0xFF
    codes = torch.full((slots, heads, head_dim // 2), 0xFF, dtype=torch.uint8)
    sides = (codes.clone().to(device), scales.clone().to(device))
    return Pool(*sides, codes.to(device), scales.to(device), **global_scales)


def fill_slots(pool: Pool, slots: torch.Tensor, generator: torch.Generator) -> None:
    """Give slots an owner: normal K and V with a few large channels, encoded by the codec."""
    _, heads, half = pool.k_codes.shape
    shape = (slots.numel(), heads, 2 * half)
    spread = torch.ones(2 * half)
    spread[:: max(half // 4, 1)] = 4.0
    slots = slots.long().to(pool.k_codes.device)
    k = torch.randn(shape, generator=generator) * spread
    v = torch.randn(shape, generator=generator) * 0.3
    for x, codes, scales, scale in (
        (k, pool.k_codes, pool.k_scales, pool.k_global_scale),
        (v, pool.v_codes, pool.v_scales, pool.v_global_scale),
    ):
        c, s = codec.encode(x, scale)
        codes[slots] = c.to(codes.device)
        scales[slots] = s.to(scales.device)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    sm_scale: float,
    logit_cap: float = 0.0,
    low: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows q [n, Hq, D] over k, v [L, H, D]; visible [n, L]. low: the baseline in that dtype.

    A row that sees nothing gives zeros. Result fp32 (rounded to low for the baseline).
    """

    def rounded(x):
        return x.float() if low is None else x.to(low).float()

    group = q.shape[1] // k.shape[1]
    k = rounded(k).repeat_interleave(group, 1)
    v = rounded(v).repeat_interleave(group, 1)
    s = torch.einsum("nhd,lhd->hnl", rounded(q), k) * sm_scale
    if logit_cap > 0:
        s = logit_cap * torch.tanh(s / logit_cap)
    s = s.masked_fill(~visible[None], -math.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:2], 1)
    p = torch.exp(s - top.masked_fill(top == -math.inf, 0.0))
    total = p.sum(-1).clamp_min(1e-38)
    o = torch.einsum("hnl,lhd->nhd", rounded(p), v) / total.T[..., None]
    return rounded(o)


def visible_keys(
    rows: int,
    length: int,
    first_pos: int,
    *,
    prefix: int = 0,
    causal: bool = True,
    window: int = -1,
    block_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """[rows, length]: key n for row j at first_pos + j. block_mask [rows, length - prefix]."""
    pos = first_pos + torch.arange(rows, device=device)[:, None]
    n = torch.arange(length, device=device)[None]
    visible = torch.ones(rows, length, dtype=torch.bool, device=device)
    if block_mask is not None:
        visible[:, prefix:] = block_mask.bool()
    elif causal:
        visible &= n <= pos
    if window > 0:
        visible &= pos - n <= window
        if not causal:
            visible &= n - pos <= window
    return visible


def assert_close_enough(
    got: torch.Tensor,
    exact: torch.Tensor,
    baseline: torch.Tensor,
    context: str = "",
    most: tuple[float, float] = (2, 2),
) -> tuple[float, float]:
    """Max-abs and relative Frobenius error at most twice the baseline's. Returns the ratios."""
    got = got.float()
    assert torch.isfinite(got).all(), f"{context}: not finite"
    tiny = 1e-6 * max(exact.abs().max().item(), 1e-30)
    ratios = []
    for norm, factor in zip((lambda x: x.abs().max().item(), lambda x: x.norm().item()), most):
        ours, theirs = norm(got - exact), norm(baseline - exact)
        assert ours <= factor * theirs + tiny, f"{context}: error {ours:.3e}, baseline {theirs:.3e}"
        ratios.append(ours / max(theirs, tiny))
    return ratios[0], ratios[1]


def paged_slots(
    lens: list[int], page_size: int, num_slots: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Slots of each request: whole pages of a permuted page list, as SGLang's allocator deals."""
    pages = torch.randperm(num_slots // page_size, generator=generator).tolist()
    result = []
    for length in lens:
        own = [pages.pop() for _ in range(-(-length // page_size))]
        slots = torch.tensor(own, dtype=torch.int64)[:, None] * page_size
        result.append((slots + torch.arange(page_size)).flatten()[:length])
    return result


def indptr(lens: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(dtype)
