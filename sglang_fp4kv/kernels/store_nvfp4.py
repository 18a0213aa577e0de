"""Quantize K and V of a layer to NVFP4 and scatter them into the pool by slot."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from sglang_fp4kv.formats import (
    check_global_scale,
    check_head_dim,
    packed_bytes,
    scale_bytes,
)
from sglang_fp4kv.kernels._encode import (
    block_sources,
    encode_and_store,
    load_blocks,
    place_blocks,
    this_side,
    wait_for_predecessor,
)

SOURCE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Interpreted programs cost milliseconds each, whatever their size.
INTERPRETED = triton.knobs.runtime.interpret
BLOCKS_PER_PROGRAM = 8192 if INTERPRETED else 128
NUM_WARPS = 4  # with 128 blocks a program, one thread encodes one block


@triton.jit
def _store_nvfp4_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_codes_ptr,
    v_codes_ptr,
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
    k_codes_stride,
    v_codes_stride,
    k_scales_stride,
    v_scales_stride,
    HEADS: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    token, in_slot, live = place_blocks(total_blocks, HEADS, BLOCKS_PER_ROW, BLOCKS_PER_PROGRAM)
    src = block_sources(
        this_side(k_ptr, v_ptr),
        this_side(k_token_stride, v_token_stride),
        this_side(k_head_stride, v_head_stride),
        token,
        in_slot,
        BLOCKS_PER_ROW,
    )
    if PDL:
        wait_for_predecessor(src)
    # The values do not wait for the slots: both loads are under way at once.
    slot = tl.load(slots_ptr + token * slots_stride, mask=live, other=-1)
    blocks = load_blocks(src, live, ASM)
    if PDL:
        gdc_launch_dependents()
    encode_and_store(
        blocks,
        this_side(k_global_scale, v_global_scale),
        this_side(k_codes_ptr, v_codes_ptr),
        this_side(k_scales_ptr, v_scales_ptr),
        this_side(k_codes_stride, v_codes_stride),
        this_side(k_scales_stride, v_scales_stride),
        slot,
        in_slot,
        live & (slot >= 0) & (slot < num_slots),
        k_ptr.dtype.element_ty,
        ASM,
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


def check_pool(
    name: str, codes: torch.Tensor, scales: torch.Tensor, heads: int, head_dim: int
) -> torch.Tensor:
    """The uint8 view of scales; ValueError unless both are as store_nvfp4 wants them."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"{name}_codes must be uint8, got {codes.dtype}")
    if scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(
            f"{name}_scales must be uint8 or float8_e4m3fn, got {scales.dtype}"
        )
    slots = codes.shape[0] if codes.ndim else 0
    for label, pool, width in (
        (f"{name}_codes", codes, packed_bytes(head_dim)),
        (f"{name}_scales", scales, scale_bytes(head_dim)),
    ):
        if pool.shape != (slots, heads, width):
            raise ValueError(
                f"{label} must be [S, {heads}, {width}] with S = {slots}, "
                f"got {tuple(pool.shape)}"
            )
        if pool.stride()[1:] != (width, 1) and pool.numel():
            raise ValueError(
                f"{label} must be contiguous within a slot, got strides {pool.stride()}"
            )
    if (codes.stride(0) % 4 or codes.data_ptr() % 4) and codes.numel():
        raise ValueError(
            f"{name}_codes slots must begin at multiples of 4 bytes, got stride "
            f"{codes.stride(0)} at storage offset {codes.storage_offset()}"
        )
    return scales if scales.dtype == torch.uint8 else scales.view(torch.uint8)


@functools.lru_cache
def has_hopper_instructions(device: torch.device) -> bool:
    """Whether kernels there may use sm_90 assembly and programmatic dependent launch."""
    if INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def use_assembly(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether values of dtype are encoded by the assembly rather than its plain twin."""
    return dtype != torch.float32 and has_hopper_instructions(device)


def launch_writer(kernel, k, v, indices, index_layout, pool, global_scales) -> None:
    """Check a layer's pool and start ``kernel`` over the 16-element blocks of k and v.

    Grid row 0 takes K, row 1 V. On sm_90 and newer the launch is a programmatic dependent one, as
    that of SGLang's own store_cache: the kernel waits for its predecessor itself.

    indices        name -> tensor, in the kernel's order; on k's device
    index_layout   the kernel's integers about them, in its order
    pool           k_codes, v_codes, k_scales, v_scales as store_nvfp4 takes them
    global_scales  of K and V
    Raises: ValueError for a wrong shape, dtype, stride, device or global scale
    """
    tokens, heads, head_dim = k.shape
    k_codes, v_codes, k_scales, v_scales = pool
    global_scales = [check_global_scale(scale) for scale in global_scales]
    k_scales = check_pool("k", k_codes, k_scales, heads, head_dim)
    v_scales = check_pool("v", v_codes, v_scales, heads, head_dim)
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
    blocks_per_row = scale_bytes(head_dim)  # a scale is one byte
    total_blocks = tokens * heads * blocks_per_row
    if total_blocks == 0 or k_codes.numel() == 0:
        return
    k_strides, v_strides = k.stride(), v.stride()
    if k_strides[1] == v_strides[1] == head_dim:  # a token is one row
        heads, blocks_per_row = 1, heads * blocks_per_row
    blocks_per_program = BLOCKS_PER_PROGRAM
    if INTERPRETED:
        blocks_per_program = min(blocks_per_program, triton.next_power_of_2(total_blocks))
    pdl = has_hopper_instructions(k.device)
    kernel[(-(-total_blocks // blocks_per_program), 2)](
        k,
        v,
        *indices.values(),
        k_codes,
        v_codes,
        k_scales,
        v_scales,
        total_blocks,
        k_codes.shape[0],
        *global_scales,
        *index_layout,
        *k_strides[:2],
        *v_strides[:2],
        k_codes.stride(0),
        v_codes.stride(0),
        k_scales.stride(0),
        v_scales.stride(0),
        HEADS=heads,
        BLOCKS_PER_ROW=blocks_per_row,
        BLOCKS_PER_PROGRAM=blocks_per_program,
        ASM=use_assembly(k.device, k.dtype),
        PDL=pdl,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if pdl else {}),
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
    Runs on: any GPU that Triton supports, sm_80 or newer, with assembly for 16-bit k and v on sm_90
      or newer; CUDA-graph safe yes; allocates no
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
