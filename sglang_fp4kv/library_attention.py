"""FlashInfer's unquantized attention for one request, loaded and checked when a server starts.

``single_prefill_with_kv_cache`` (flashinfer 0.7.2) needs no plan: softmax scale and lengths are
arguments of the call, nothing is copied to the device and nothing waits for it. Its other form, the
ragged batch wrapper, fixes one softmax scale a plan, where ours carries each layer's global scale.
"""

import logging
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

# attend(q, k, v, causal, sm_scale) -> out, lse
#   q [n, Hq, D]; k, v [L, H, D]  one dtype, last dim contiguous; causal aligns the last q and key
#   out [n, Hq, D]  dtype of q, contiguous
#   lse [n, Hq]     fp32, contiguous, base 2, of the scores times sm_scale
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]
]

HEAD_DIMS = (64, 128, 256)  # what FlashInfer's FA2 and FA3 are both made for
_CHECK_ROWS, _CHECK_KEYS = 40, 100
_CHECK_TOLERANCE = 0.02  # of the largest value; bf16 has 0.004


def _flashinfer(backend: str) -> Attend:
    from flashinfer import single_prefill_with_kv_cache

    def attend(q, k, v, causal, sm_scale):
        return single_prefill_with_kv_cache(
            q, k, v, causal=causal, sm_scale=sm_scale, backend=backend, return_lse=True
        )

    return attend


def _expected(q, k, v, causal, sm_scale):
    """The contract of Attend in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("nhd,lhd->nhl", q.float(), k) * sm_scale
    if causal:
        n, length = q.shape[0], k.shape[0]
        hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
        s = s.masked_fill(hidden[:, None], float("-inf"))
    out = torch.einsum("nhl,lhd->nhd", s.softmax(-1), v)
    return out, s.logsumexp(-1) * 1.4426950408889634


def check_attend(
    attend: Attend,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compare attend with fp32 attention on a small input. Synchronizes: for a server's start.

    Raises: ValueError naming what is off: the output, or the log-sum-exp and its base
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, head_dim, generator=g).to(device, dtype)
        for rows, heads in (
            (_CHECK_ROWS, num_q_heads),
            (_CHECK_KEYS, num_kv_heads),
            (_CHECK_KEYS, num_kv_heads),
        )
    )
    for causal in (False, True):
        got = attend(q, k, v, causal, head_dim**-0.5)
        for name, have, want in zip(
            ("output", "log-sum-exp"), got, _expected(q, k, v, causal, head_dim**-0.5), strict=True
        ):
            off = (have.float() - want).abs().max().item() / want.abs().max().item()
            if not off <= _CHECK_TOLERANCE:  # true for NaN
                raise ValueError(f"{name} is off by {off:.3g} of its largest value, {causal=}")


def load_flashinfer(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    backends: tuple[str, ...],
) -> tuple[Attend | None, str]:
    """FlashInfer's attention, compiled and checked; or None and why it is not to be had.

    backends: fa2, fa3, ...; tried in this order, each failure is logged. The first use of a backend
    compiles for some minutes; FlashInfer keeps the result under ~/.cache.
    """
    if not backends:
        return None, "no library is asked for"
    if device.type != "cuda":
        return None, f"FlashInfer does not run on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"FlashInfer does not take {dtype}"
    if head_dim not in HEAD_DIMS:
        return None, f"FlashInfer's prefill kernels are not made for head dim {head_dim}"
    problems = []
    for backend in backends:
        started = time.monotonic()
        logger.info(
            "fp4kv prefill: loading FlashInfer %s, head dim %d, %s; compiles at first use",
            backend,
            head_dim,
            dtype,
        )
        try:
            attend = _flashinfer(backend)
            check_attend(attend, num_q_heads, num_kv_heads, head_dim, dtype, device)
        except Exception as error:  # import, build, launch: whatever it is, prefill has another way
            problems.append(f"{backend}: {type(error).__name__}: {error}"[:500])
            logger.warning("fp4kv prefill: FlashInfer %s is not usable: %s", backend, error)
            continue
        name = f"FlashInfer {backend}"
        logger.info("fp4kv prefill: %s ready in %.1f s", name, time.monotonic() - started)
        return attend, name
    return None, "FlashInfer is not usable: " + "; ".join(problems)
