"""Write the accepted prefix of each request's block of K and V into an FP8 or 16-bit pool."""

import torch
import triton
import triton.language as tl

from sglang_fp4kv.kernels._encode import e4m3_code
from sglang_fp4kv.kernels.prefix_rows import check_block, row_slot
from sglang_fp4kv.kernels.store_nvfp4 import (
    INTERPRETED,
    NUM_WARPS,
    SOURCE_DTYPES,
    check_same_device,
)

PLAIN_POOL_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)
ELEMENTS_PER_PROGRAM = 65536 if INTERPRETED else 4096

_BITS = {1: torch.uint8, 2: torch.int16}
_POOL_KINDS = {
    torch.float8_e4m3fn: ("e4m3", torch.uint8),
    torch.bfloat16: ("bf16", torch.int16),
    torch.float16: ("fp16", torch.float16),
}


@triton.jit
def _bf16_bits(x):
    """bf16 bits (int32) of fp32, to nearest even; NaN stays NaN. The interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def _round_to_source(x, SOURCE: tl.constexpr):
    """fp32 rounded to the precision of the source dtype, as fp32."""
    if SOURCE == tl.bfloat16:
        return (_bf16_bits(x) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(SOURCE).to(tl.float32)


@triton.jit
def _divide(x, scale, SOURCE: tl.constexpr, DIVIDE: tl.constexpr):
    """x / scale in the source dtype, as torch's in-place div rounds it (see _divide_mode)."""
    if DIVIDE == "none":
        return x
    if DIVIDE == "reciprocal":
        quotient = x * tl.div_rn(1.0, scale)
    else:
        if DIVIDE == "rounded":
            scale = _round_to_source(scale, SOURCE)
        quotient = tl.div_rn(x, tl.zeros_like(x) + scale)
    return _round_to_source(quotient, SOURCE)


@triton.jit
def _commit_plain_side(
    src_ptr,
    src_rows,
    dst_ptr,
    dst_rows,
    scale,
    live,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    POOL: tl.constexpr,
    DIVIDE: tl.constexpr,
    SCALE_IS_TENSOR: tl.constexpr,
):
    column = tl.arange(0, WIDTH_POW2)[None, :]
    mask = live[:, None]
    if WIDTH != WIDTH_POW2:
        mask = mask & (column < WIDTH)
    x = tl.load(src_ptr + src_rows[:, None] + column, mask=mask, other=0)
    if POOL != "copy":
        SOURCE: tl.constexpr = src_ptr.dtype.element_ty
        if SCALE_IS_TENSOR:
            scale = tl.load(scale)
        x = _divide(x.to(tl.float32), scale, SOURCE, DIVIDE)
        if POOL == "e4m3":
            bits = x.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            code = e4m3_code(magnitude.to(tl.float32, bitcast=True))
            code = tl.where(magnitude > 0x7F800000, 127, code)
            x = (code | ((bits >> 24) & 128)).to(tl.uint8)
        elif POOL == "bf16":
            x = _bf16_bits(x).to(tl.int16)
        else:
            x = x.to(tl.float16)
    tl.store(dst_ptr + dst_rows[:, None] + column, x, mask=mask)


@triton.jit
def _commit_prefix_plain_kernel(
    k_ptr,
    v_ptr,
    loc_ptr,
    commit_lens_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scale,
    v_scale,
    total_rows,
    num_slots,
    loc_request_stride,
    loc_row_stride,
    commit_lens_stride,
    block_rows,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_slot_stride,
    k_pool_head_stride,
    v_slot_stride,
    v_pool_head_stride,
    HEADS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_WIDTH_POW2: tl.constexpr,
    V_WIDTH_POW2: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    POOL: tl.constexpr,
    K_DIVIDE: tl.constexpr,
    K_SCALE_IS_TENSOR: tl.constexpr,
    V_DIVIDE: tl.constexpr,
    V_SCALE_IS_TENSOR: tl.constexpr,
):
    row = tl.program_id(0) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    slot, live = row_slot(
        token,
        row < total_rows,
        loc_ptr,
        commit_lens_ptr,
        loc_request_stride,
        loc_row_stride,
        commit_lens_stride,
        block_rows,
        num_slots,
    )
    _commit_plain_side(
        k_ptr,
        token * k_token_stride + head * k_head_stride,
        k_pool_ptr,
        slot * k_slot_stride + head * k_pool_head_stride,
        k_scale,
        live,
        K_WIDTH,
        K_WIDTH_POW2,
        POOL,
        K_DIVIDE,
        K_SCALE_IS_TENSOR,
    )
    _commit_plain_side(
        v_ptr,
        token * v_token_stride + head * v_head_stride,
        v_pool_ptr,
        slot * v_slot_stride + head * v_pool_head_stride,
        v_scale,
        live,
        V_WIDTH,
        V_WIDTH_POW2,
        POOL,
        V_DIVIDE,
        V_SCALE_IS_TENSOR,
    )


def _divide_mode(scale, device: torch.device) -> str:
    """How torch's x.div_(scale), which SGLang's pool calls, rounds on this device.

    CUDA: a number becomes a multiplication by its fp32 reciprocal; a tensor is rounded to the
    dtype of x first. CPU: x is divided by the fp32 value of either.
    """
    if scale is None:
        return "none"
    if device.type == "cpu":
        return "exact"
    return "rounded" if isinstance(scale, torch.Tensor) else "reciprocal"


def _check_scale(name: str, scale, device: torch.device):
    """The scale as the kernel takes it: a float, or a tensor of one fp32 on the device."""
    if scale is None:
        return 1.0
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must hold one float32, got {scale.dtype} {tuple(scale.shape)}"
            )
        if scale.device != device:
            raise ValueError(f"{name} is on {scale.device}, k is on {device}")
        return scale
    value = float(scale)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} must be finite and > 0, got {scale!r}")
    return value


def _check_plain_side(name: str, x: torch.Tensor, pool: torch.Tensor) -> None:
    if x.ndim != 3:
        raise ValueError(f"{name} must be [T, H, D], got {tuple(x.shape)}")
    if x.dtype not in SOURCE_DTYPES and x.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} must be float32, float16, bfloat16 or float8_e4m3fn, got {x.dtype}"
        )
    if pool.dtype not in PLAIN_POOL_DTYPES:
        raise ValueError(
            f"{name}_pool must be float8_e4m3fn, bfloat16 or float16, got {pool.dtype}"
        )
    if x.dtype == torch.float8_e4m3fn and pool.dtype != x.dtype:
        raise ValueError(f"{name} is float8_e4m3fn, {name}_pool is {pool.dtype}")
    if pool.ndim != 3 or pool.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"{name}_pool must be [S, {x.shape[1]}, {x.shape[2]}], got {tuple(pool.shape)}"
        )
    for label, tensor in ((name, x), (f"{name}_pool", pool)):
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(
                f"{label} must be contiguous along head_dim, got stride {tensor.stride(-1)}"
            )


def commit_prefix_plain(
    k: torch.Tensor,
    v: torch.Tensor,
    loc_2d: torch.Tensor,
    commit_lens: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> None:
    """Write the first commit_lens[i] rows of request i to a plain pool; changes the pools.

    Sizes: B requests, N rows a block, H KV heads, D head dim (K and V may differ), S slots
      k, v         [B*N, H, D]  bf16 | fp16 | fp32 | e4m3   any strides, last dim contiguous;
                                                            unchanged (SGLang divides in place)
      loc_2d       [B, N]       int64 | int32               skipped when below 0 or not below S
      commit_lens  [B]          int32 | int64               above N counts as N, below 0 as 0
      *_pool       [S, H, D]    e4m3 | bf16 | fp16          out
      *_scale      None, a float, or one fp32 on the device of k; unused when source and pool
                   have one dtype, as in SGLang
    Numerics: x / scale rounded to the dtype of x as torch's div_ does on that device
      (_divide_mode), then to the pool's dtype, to nearest even. E4M3 saturates at 448, Inf too;
      NaN stays NaN.
    Runs on: any GPU that Triton supports, sm_80 or newer; CUDA-graph safe yes; allocates no
    Raises: ValueError for a wrong shape, dtype, stride, device or scale; the message names it
    Reference: srt/mem_cache/memory_pool.py, MHATokenToKVPool.set_kv_buffer @ 0.5.23, bit-exact
      (except for the sign and payload of NaN)
    """
    _check_plain_side("k", k, k_pool)
    _check_plain_side("v", v, v_pool)
    tokens, heads, _ = k.shape
    if v.shape[:2] != k.shape[:2] or v.dtype != k.dtype:
        raise ValueError(
            f"k and v must have the same rows, heads and dtype, got {tuple(k.shape)} {k.dtype} "
            f"and {tuple(v.shape)} {v.dtype}"
        )
    if k_pool.dtype != v_pool.dtype or k_pool.shape[0] != v_pool.shape[0]:
        raise ValueError(
            f"k_pool and v_pool must have one dtype and slot count, got {k_pool.dtype} "
            f"{tuple(k_pool.shape)} and {v_pool.dtype} {tuple(v_pool.shape)}"
        )
    check_block(loc_2d, commit_lens, tokens)
    check_same_device(
        k, v=v, loc_2d=loc_2d, commit_lens=commit_lens, k_pool=k_pool, v_pool=v_pool
    )
    k_scale_arg = _check_scale("k_scale", k_scale, k.device)
    v_scale_arg = _check_scale("v_scale", v_scale, k.device)
    if k.numel() + v.numel() == 0 or k_pool.shape[0] == 0:
        return
    if k.dtype == k_pool.dtype:
        kind, bits = "copy", _BITS[k.dtype.itemsize]
        k, v = k.view(bits), v.view(bits)
    else:
        kind, bits = _POOL_KINDS[k_pool.dtype]
    slots = k_pool.shape[0]
    k_pool, v_pool = k_pool.view(bits), v_pool.view(bits)
    widths = [max(1, triton.next_power_of_2(x.shape[2])) for x in (k, v)]
    total_rows = tokens * heads
    rows_per_program = min(
        max(1, ELEMENTS_PER_PROGRAM // max(widths)), triton.next_power_of_2(total_rows)
    )
    _commit_prefix_plain_kernel[(triton.cdiv(total_rows, rows_per_program),)](
        k,
        v,
        loc_2d,
        commit_lens,
        k_pool,
        v_pool,
        k_scale_arg,
        v_scale_arg,
        total_rows,
        slots,
        *loc_2d.stride(),
        commit_lens.stride(0),
        loc_2d.shape[1],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        HEADS=heads,
        K_WIDTH=k.shape[2],
        V_WIDTH=v.shape[2],
        K_WIDTH_POW2=widths[0],
        V_WIDTH_POW2=widths[1],
        ROWS_PER_PROGRAM=rows_per_program,
        POOL=kind,
        K_DIVIDE=_divide_mode(k_scale, k.device),
        K_SCALE_IS_TENSOR=isinstance(k_scale, torch.Tensor),
        V_DIVIDE=_divide_mode(v_scale, k.device),
        V_SCALE_IS_TENSOR=isinstance(v_scale, torch.Tensor),
        num_warps=NUM_WARPS,
    )
