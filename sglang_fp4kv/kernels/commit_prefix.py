"""Quantize the accepted prefix of each request's block of K and V into an NVFP4 pool.

A DFlash verify step computes K and V for a whole block of every request and learns afterwards, on
the device, how many rows count. The entries here take what SGLang's set_kv_buffer_prefix_valid
takes and write rows 0 .. commit_lens[i] - 1 of request i's block; nothing else changes.
commit_prefix_plain, for FP8 and 16-bit pools, is in the module of that name.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from sglang_fp4kv.kernels._encode import (
    block_sources,
    encode_and_store,
    load_blocks,
    place_blocks,
    this_side,
    wait_for_predecessor,
)
from sglang_fp4kv.kernels.commit_prefix_plain import commit_prefix_plain
from sglang_fp4kv.kernels.prefix_rows import check_block, row_slot
from sglang_fp4kv.kernels.store_nvfp4 import check_sources, launch_writer

__all__ = ["commit_prefix_nvfp4", "commit_prefix_plain"]


@triton.jit
def _commit_prefix_nvfp4_kernel(
    k_ptr,
    v_ptr,
    loc_ptr,
    commit_lens_ptr,
    k_codes_ptr,
    v_codes_ptr,
    k_scales_ptr,
    v_scales_ptr,
    total_blocks,
    num_slots,
    k_global_scale,
    v_global_scale,
    loc_request_stride,
    loc_row_stride,
    commit_lens_stride,
    block_rows,
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
    # Values of rows that are not accepted are read too: waiting for lengths would cost more.
    blocks = load_blocks(src, live, ASM)
    slot, live = row_slot(
        token,
        live,
        loc_ptr,
        commit_lens_ptr,
        loc_request_stride,
        loc_row_stride,
        commit_lens_stride,
        block_rows,
        num_slots,
    )
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
        live,
        k_ptr.dtype.element_ty,
        ASM,
    )


def commit_prefix_nvfp4(
    k: torch.Tensor,
    v: torch.Tensor,
    loc_2d: torch.Tensor,
    commit_lens: torch.Tensor,
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    k_global_scale: float,
    v_global_scale: float,
) -> None:
    """Quantize and write the first commit_lens[i] rows of request i; changes codes and scales.

    Sizes: B requests, N rows a block, H KV heads, D head dim, S slots
      k, v         [B*N, H, D]    bf16 | fp16 | fp32   any strides, last dim contiguous; unchanged
      loc_2d       [B, N]         int64 | int32        skipped when below 0 or not below S
      commit_lens  [B]            int32 | int64        above N counts as N, below 0 as 0
      *_codes      [S, H, D//2]   uint8                out; slots contiguous, 4-byte aligned; low nibble = even
      *_scales     [S, H, D//16]  uint8 | float8_e4m3  out; slots contiguous; unitless
      *_global_scale              float                a constant of a captured CUDA graph
    Numerics: as codec.encode
    Runs on: any GPU that Triton supports, sm_80 or newer, with assembly for 16-bit k and v on sm_90
      or newer; CUDA-graph safe yes; allocates no
    Raises: ValueError for a wrong shape, dtype, stride, device or global scale; the message names it
    Reference: codec.encode, bit-exact
    Source: contract of MHATokenToKVPool.set_kv_buffer_prefix_valid, srt/mem_cache/memory_pool.py
      @ 0.5.23
    """
    check_sources(k, v)
    check_block(loc_2d, commit_lens, k.shape[0])
    launch_writer(
        _commit_prefix_nvfp4_kernel,
        k,
        v,
        {"loc_2d": loc_2d, "commit_lens": commit_lens},
        (*loc_2d.stride(), commit_lens.stride(0), loc_2d.shape[1]),
        (k_codes, v_codes, k_scales, v_scales),
        (k_global_scale, v_global_scale),
    )
