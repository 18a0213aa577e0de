"""Checks of what the readers are given. Shapes, dtypes and strides only: no sync."""

import torch

from sglang_fp4kv.formats import check_head_dim, packed_bytes, scale_bytes
from sglang_fp4kv.kernels._tile import TL_DTYPE

_INDEX_DTYPES = (torch.int32, torch.int64)


def check_rows(name: str, x: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Rows [T, H, D] of bf16, fp16 or fp32 whose last dim is contiguous; dtype and D of like."""
    if x.ndim != 3:
        raise ValueError(f"{name} must be [tokens, heads, head_dim], got {tuple(x.shape)}")
    if x.dtype not in TL_DTYPE:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    check_head_dim(x.shape[-1])
    if x.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dim, got stride {x.stride(-1)}")
    if like is not None and x.dtype != like.dtype:
        raise ValueError(f"{name} must be {like.dtype} like q, got {x.dtype}")
    if like is not None and x.shape[-1] != like.shape[-1]:
        raise ValueError(f"{name} must have head dim {like.shape[-1]} like q, got {x.shape[-1]}")


def check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    check_rows("out", out)
    if out.shape != q.shape:
        raise ValueError(f"out must be {tuple(q.shape)} like q, got {tuple(out.shape)}")


def check_pool_side(
    name: str, codes: torch.Tensor, scales: torch.Tensor, num_q_heads: int, head_dim: int
) -> torch.Tensor:
    """One side of a layer's pool. Returns its scales as uint8."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"{name}_codes must be uint8, got {codes.dtype}")
    if scales.dtype == torch.float8_e4m3fn:
        scales = scales.view(torch.uint8)
    if scales.dtype != torch.uint8:
        raise ValueError(f"{name}_scales must be uint8 or float8_e4m3fn, got {scales.dtype}")
    if codes.ndim != 3 or codes.shape[2] != packed_bytes(head_dim):
        raise ValueError(
            f"{name}_codes must be [slots, kv_heads, {packed_bytes(head_dim)}], got {tuple(codes.shape)}"
        )
    want = (codes.shape[0], codes.shape[1], scale_bytes(head_dim))
    if tuple(scales.shape) != want:
        raise ValueError(f"{name}_scales must be {want}, got {tuple(scales.shape)}")
    if codes.stride(2) != 1 or scales.stride(2) != 1:
        raise ValueError(
            f"{name}_codes and {name}_scales must be contiguous in their last dim, "
            f"got strides {codes.stride(2)} and {scales.stride(2)}"
        )
    if codes.shape[1] == 0 or num_q_heads % codes.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {num_q_heads} and {codes.shape[1]}"
        )
    return scales


def check_index(
    name: str, x: torch.Tensor, numel: int | None = None, at_least: int = 0
) -> None:
    """A contiguous 1-d int32 or int64 tensor, with numel entries, or that many or more."""
    if x.dtype not in _INDEX_DTYPES:
        raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
    if x.ndim != 1 or not x.is_contiguous():
        raise ValueError(f"{name} must be 1-d and contiguous, got {tuple(x.shape)}")
    if numel is not None and x.numel() != numel:
        raise ValueError(f"{name} must have {numel} entries, got {x.numel()}")
    if x.numel() < at_least:
        raise ValueError(f"{name} must have at least {at_least} entries, got {x.numel()}")


def check_logit_cap(logit_cap: float) -> None:
    if not logit_cap >= 0:  # true for NaN
        raise ValueError(f"logit_cap must be 0 (none) or positive, got {logit_cap}")


def check_mask(
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    window_kv_offsets: torch.Tensor | None,
    batch: int,
) -> torch.Tensor | None:
    """Returns the mask as uint8."""
    if custom_mask is None:
        return None
    if custom_mask.dtype not in (torch.bool, torch.uint8, torch.int8):
        raise ValueError(f"custom_mask must be bool, uint8 or int8, got {custom_mask.dtype}")
    if custom_mask.ndim != 1 or not custom_mask.is_contiguous():
        raise ValueError(
            f"custom_mask must be 1-d and contiguous, got {tuple(custom_mask.shape)}"
        )
    if mask_indptr is None:
        raise ValueError("custom_mask needs mask_indptr, got None")
    check_index("mask_indptr", mask_indptr, at_least=batch)
    if window_kv_offsets is not None:
        check_index("window_kv_offsets", window_kv_offsets, at_least=batch)
    return custom_mask.view(torch.uint8)
