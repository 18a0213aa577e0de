"""Quantize K and V of a layer to NVFP4 and scatter them into the pool by slot."""

import torch
import triton
import triton.language as tl

from sglang_fp4kv.formats import (
    BLOCK_SIZE,
    check_global_scale,
    check_head_dim,
)

SOURCE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Interpreted programs cost milliseconds each, whatever their size.
INTERPRETED = triton.knobs.runtime.interpret
BLOCKS_PER_PROGRAM = 8192 if INTERPRETED else 128
NUM_WARPS = 4


@triton.jit
def e4m3_code(magnitude):
    """E4M3 code of a non-negative fp32 (no NaN): nearest even, saturated at 0x7E. Integer RNE."""
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Adding 2^14 leaves the nearest multiple of 2^-9 in the low mantissa bits.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.minimum(tl.where(magnitude < 0.015625, subnormal, normal), 126)


@triton.jit
def e4m3_value(code):
    """fp32 value of a non-negative E4M3 code below 0x7F."""
    normal = ((code << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def encode_blocks(x, global_scale):
    """NVFP4 of x [N, 2, 8]: code words [N, 2] int32 (element 0 lowest) and scale codes [N] int32.

    Reference: codec.encode, bit-exact.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0, bits)
    magnitude = bits & 0x7FFFFFFF

    # Magnitude bits of fp32 order like integers.
    finite = tl.where(magnitude == 0x7F800000, 0, magnitude)
    amax = tl.max(tl.max(finite, 2), 1).to(tl.float32, bitcast=True)
    has_inf = tl.max(tl.max(magnitude, 2), 1) == 0x7F800000
    divisor = tl.zeros_like(amax) + global_scale * 6.0
    scale = e4m3_code(tl.div_rn(amax, divisor))
    scale = tl.where((scale == 0) & has_inf, 126, scale)

    # The code is the number of midpoints reached, found in three steps; ties go to the even code.
    step = (e4m3_value(scale) * global_scale)[:, None, None]
    value = magnitude.to(tl.float32, bitcast=True)
    bit2 = value >= 1.75 * step
    bit1 = value >= tl.where(bit2, 3.5 * step, 0.75 * step)
    upper = tl.where(bit1, 5.0 * step, 2.5 * step)
    lower = tl.where(bit1, 1.25 * step, 0.25 * step)
    bit0 = value > tl.where(bit2, upper, lower)

    # Each nibble is built in its place in the word; the sum joins bits that do not overlap.
    nibble = (4 * tl.arange(0, 8))[None, None, :]
    code = tl.where(bit2, 4 << nibble, 0) | tl.where(bit1, 2 << nibble, 0)
    code = code | tl.where(bit0, 1 << nibble, 0) | (((bits >> 31) & 8) << nibble)
    words = tl.sum(code, 2)
    return tl.where((scale == 0)[:, None], 0, words), scale


@triton.jit
def encode_and_store(
    src_ptr, src_offsets, words_ptr, word_offsets, scales_ptr, scale_offsets, live, global_scale
):
    """Encode the 16 values at each src_offsets [N] int64 and write them where live [N].

    word_offsets and scale_offsets [N] int64 count int32 words and scale bytes.
    """
    word = tl.arange(0, 2)
    element = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    source = src_ptr + src_offsets[:, None, None] + element[None, :, :]
    x = tl.load(source, mask=live[:, None, None], other=0.0)
    words, scale = encode_blocks(x, global_scale)
    target = words_ptr + word_offsets[:, None] + word[None, :]
    tl.store(target, words, mask=live[:, None])
    tl.store(scales_ptr + scale_offsets, scale.to(tl.uint8), mask=live)


@triton.jit
def _store_nvfp4_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_words_ptr,
    v_words_ptr,
    k_scales_ptr,
    v_scales_ptr,
    total_blocks,
    num_slots,
    k_global_scale,
    v_global_scale,
    slots_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_words_stride,
    v_words_stride,
    k_scales_stride,
    v_scales_stride,
    HEADS: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    # The unit is one 16-element block of a (token, head) row, so no lane idles at D = 80 or 96.
    index = tl.program_id(0) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    token = (index // (HEADS * BLOCKS_PER_ROW)).to(tl.int64)
    in_slot = index % (HEADS * BLOCKS_PER_ROW)
    head = (in_slot // BLOCKS_PER_ROW).to(tl.int64)
    in_row = in_slot % BLOCKS_PER_ROW * 16
    live = index < total_blocks
    slot = tl.load(slots_ptr + token * slots_stride, mask=live, other=-1)
    live = live & (slot >= 0) & (slot < num_slots)
    encode_and_store(
        k_ptr,
        token * k_token_stride + head * k_head_stride + in_row,
        k_words_ptr,
        slot * k_words_stride + in_slot * 2,
        k_scales_ptr,
        slot * k_scales_stride + in_slot,
        live,
        k_global_scale,
    )
    encode_and_store(
        v_ptr,
        token * v_token_stride + head * v_head_stride + in_row,
        v_words_ptr,
        slot * v_words_stride + in_slot * 2,
        v_scales_ptr,
        slot * v_scales_stride + in_slot,
        live,
        v_global_scale,
    )


def check_sources(k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless k and v are [T, H, D] of one shape, dtype and device, D contiguous."""
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{name} must be [T, H, D], got {tuple(x.shape)}")
        if x.dtype not in SOURCE_DTYPES:
            raise ValueError(
                f"{name} must be float32, float16 or bfloat16, got {x.dtype}"
            )
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous along head_dim, got stride {x.stride(-1)}"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.dtype != v.dtype:
        raise ValueError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    check_head_dim(k.shape[2])


def check_same_device(reference: torch.Tensor, **others: torch.Tensor) -> None:
    """Raise ValueError when one of the others is on another device than reference (k)."""
    for name, x in others.items():
        if x.device != reference.device:
            raise ValueError(
                f"{name} is on {x.device}, k is on {reference.device}"
            )


def pool_views(
    name: str, codes: torch.Tensor, scales: torch.Tensor, heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The int32 view of codes and the uint8 view of scales, or ValueError."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"{name}_codes must be uint8, got {codes.dtype}")
    if scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(
            f"{name}_scales must be uint8 or float8_e4m3fn, got {scales.dtype}"
        )
    slots = codes.shape[0] if codes.ndim else 0
    for label, pool, width in (
        (f"{name}_codes", codes, head_dim // 2),
        (f"{name}_scales", scales, head_dim // BLOCK_SIZE),
    ):
        if tuple(pool.shape) != (slots, heads, width):
            raise ValueError(
                f"{label} must be [S, {heads}, {width}] with S = {slots}, "
                f"got {tuple(pool.shape)}"
            )
        if pool.numel() and pool.stride()[1:] != (width, 1):
            raise ValueError(
                f"{label} must be contiguous within a slot, got strides {pool.stride()}"
            )
    offset = codes.storage_offset()
    if codes.numel() and (offset % 4 or codes.stride(0) % 4 or codes.data_ptr() % 4):
        raise ValueError(
            f"{name}_codes slots must begin at multiples of 4 bytes, got stride "
            f"{codes.stride(0)} at storage offset {offset}"
        )
    return codes.view(torch.int32), scales.view(torch.uint8)


def launch_writer(kernel, k, v, indices, index_layout, pool, global_scales) -> None:
    """Check a layer's pool and start ``kernel`` over the 16-element blocks of k and v.

    indices        name -> tensor, in the kernel's order; on k's device
    index_layout   the kernel's integers about them, in its order
    pool           k_codes, v_codes, k_scales, v_scales as store_nvfp4 takes them
    global_scales  of K and V
    Raises: ValueError for a wrong shape, dtype, stride, device or global scale
    """
    tokens, heads, head_dim = k.shape
    k_codes, v_codes, k_scales, v_scales = pool
    global_scales = [check_global_scale(scale) for scale in global_scales]
    k_words, k_scales = pool_views("k", k_codes, k_scales, heads, head_dim)
    v_words, v_scales = pool_views("v", v_codes, v_scales, heads, head_dim)
    if k_codes.shape != v_codes.shape:
        raise ValueError(
            f"k_codes and v_codes must have one shape, got {tuple(k_codes.shape)} "
            f"and {tuple(v_codes.shape)}"
        )
    check_same_device(
        k,
        v=v,
        **indices,
        k_codes=k_codes,
        v_codes=v_codes,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    blocks_per_row = head_dim // BLOCK_SIZE
    total_blocks = tokens * heads * blocks_per_row
    if total_blocks == 0 or k_codes.numel() == 0:
        return
    blocks_per_program = min(BLOCKS_PER_PROGRAM, triton.next_power_of_2(total_blocks))
    kernel[(triton.cdiv(total_blocks, blocks_per_program),)](
        k,
        v,
        *indices.values(),
        k_words,
        v_words,
        k_scales,
        v_scales,
        total_blocks,
        k_codes.shape[0],
        *global_scales,
        *index_layout,
        *k.stride()[:2],
        *v.stride()[:2],
        k_words.stride(0),
        v_words.stride(0),
        k_scales.stride(0),
        v_scales.stride(0),
        HEADS=heads,
        BLOCKS_PER_ROW=blocks_per_row,
        BLOCKS_PER_PROGRAM=blocks_per_program,
        num_warps=NUM_WARPS,
    )


def store_nvfp4(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    k_global_scale: float,
    v_global_scale: float,
) -> None:
    """Quantize K and V and write them to their slots; changes the codes and scales in place.

    Sizes: T tokens, H KV heads, D head dim, S slots
      k, v      [T, H, D]      bf16 | fp16 | fp32   any strides, last dim contiguous; unchanged
      slots     [T]            int64                skipped when below 0 or not below S
      *_codes   [S, H, D//2]   uint8                out; slots contiguous, 4-byte aligned; low nibble = even
      *_scales  [S, H, D//16]  uint8 | float8_e4m3  out; slots contiguous; unitless
      *_global_scale           float                a constant of a captured CUDA graph
    Numerics: as codec.encode. A slot named twice gets either token's rows.
    Runs on: any GPU that Triton supports, sm_80 or newer; CUDA-graph safe yes; allocates no
    Raises: ValueError for a wrong shape, dtype, stride, device or global scale; the message names it
    Reference: codec.encode, bit-exact
    Source: written from the NVFP4 layout in formats.py
    """
    check_sources(k, v)
    tokens = k.shape[0]
    if tuple(slots.shape) != (tokens,):
        raise ValueError(f"slots must be [{tokens}], got {tuple(slots.shape)}")
    if slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64, got {slots.dtype}")
    launch_writer(
        _store_nvfp4_kernel,
        k,
        v,
        {"slots": slots},
        slots.stride(),
        (k_codes, v_codes, k_scales, v_scales),
        (k_global_scale, v_global_scale),
    )
