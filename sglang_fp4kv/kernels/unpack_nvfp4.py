"""Unpack listed slots of a packed pool to the model's dtype, for a library's attention to read."""

import torch
import triton
import triton.language as tl

from sglang_fp4kv.kernels._check import check_index, check_pool_side, check_rows
from sglang_fp4kv.kernels._plan import cdiv, device_limits, half_width
from sglang_fp4kv.kernels._tile import ASM_PURE, FOLD, PLAIN, decode_packed, load_packed

_ELEMENTS = 4096  # of a tile: 32 a thread


def block_tokens(head_dim: int) -> int:
    """Tokens of one program's tiles."""
    return max(1, _ELEMENTS // (2 * half_width(head_dim)))


@triton.jit
def _unpack_side(
    codes_ptr,  # of this KV head
    scales_ptr,
    out_ptr,
    slots,
    live,
    row,
    stride_codes,
    stride_scales,
    stride_out,
    D: tl.constexpr,
    HALF: tl.constexpr,
    FOLDED: tl.constexpr,
    ASM: tl.constexpr,
):
    valid = slots >= 0
    codes, scales = load_packed(
        codes_ptr, scales_ptr, slots, valid, stride_codes, stride_scales, D, HALF
    )
    even, odd = decode_packed(codes, scales, tl.float32, ASM)
    x = tl.interleave(even, odd) * FOLDED
    x = tl.where(valid[:, None], x, float("nan"))
    d = tl.arange(0, 2 * HALF)
    mask = live[:, None]
    if D != 2 * HALF:
        mask = mask & (d < D)[None, :]
    # Exact in bf16 and fp16, so that the interpreter's truncation does not matter.
    x = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * stride_out + d[None, :], x, mask)


# A request's slots begin anywhere in the list; neither that nor their number may compile anew.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots_ptr"])
def _unpack_nvfp4_kernel(
    k_codes_ptr,
    k_scales_ptr,
    v_codes_ptr,
    v_scales_ptr,
    slots_ptr,
    k_out_ptr,
    v_out_ptr,
    count,
    stride_kc_slot,
    stride_kc_head,
    stride_ks_slot,
    stride_ks_head,
    stride_vc_slot,
    stride_vc_head,
    stride_vs_slot,
    stride_vs_head,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FOLDED: tl.constexpr,
    ASM: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < count
    slots = tl.load(slots_ptr + n, mask=live, other=-1).to(tl.int64)
    row = n.to(tl.int64)
    _unpack_side(
        k_codes_ptr + head * stride_kc_head,
        k_scales_ptr + head * stride_ks_head,
        k_out_ptr + head * stride_kh,
        slots,
        live,
        row,
        stride_kc_slot,
        stride_ks_slot,
        stride_kt,
        D,
        HALF,
        FOLDED,
        ASM,
    )
    _unpack_side(
        v_codes_ptr + head * stride_vc_head,
        v_scales_ptr + head * stride_vs_head,
        v_out_ptr + head * stride_vh,
        slots,
        live,
        row,
        stride_vc_slot,
        stride_vs_slot,
        stride_vt,
        D,
        HALF,
        FOLDED,
        ASM,
    )


def unpack_nvfp4(
    k_codes: torch.Tensor,
    k_scales: torch.Tensor,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor,
    slots: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Write K and V of the listed slots, without their global scales; k_out, v_out change.

    Sizes: N listed slots, S slots of the pool, H KV heads, D head dim
      k_codes, v_codes   [S, H, D//2]    uint8                low nibble = even element
      k_scales, v_scales [S, H, D//16]   uint8 | float8_e4m3  no sign bit, not NaN in listed slots
      slots              [N]             int32 | int64        a slot below 0 gives a row of NaN:
        the reader of these rows has no way to hide it, so a caller's mistake must show
      k_out, v_out       [>= N, H, D]    bf16 | fp16 | fp32   out; the first N rows
    Numerics: E2M1 value times E4M3 block scale, exact in every output dtype
    Runs on: sm_80; CUDA-graph safe: yes; allocates: no
    Raises: ValueError for shapes, dtypes and strides that do not fit (the message names the value)
    Reference: codec.decode with global scale 1, bit-exact
    """
    check_rows("k_out", k_out)
    check_rows("v_out", v_out, like=k_out)
    rows, num_heads, head_dim = k_out.shape
    k_scales = check_pool_side("k", k_codes, k_scales, num_heads, head_dim)
    v_scales = check_pool_side("v", v_codes, v_scales, num_heads, head_dim)
    check_index("slots", slots)
    count = slots.numel()
    for name, x in (("k_out", k_out), ("v_out", v_out)):
        if x.shape[0] < count or x.shape[1] != k_codes.shape[1]:
            raise ValueError(
                f"{name} must be [at least {count}, {k_codes.shape[1]}, {head_dim}], "
                f"got {tuple(x.shape)}"
            )
    if v_codes.shape[1] != num_heads:
        raise ValueError(f"v_codes must have {num_heads} heads, got {v_codes.shape[1]}")
    if count == 0:
        return
    limits = device_limits(slots.device)
    block_n = 256 if limits.interpreter else block_tokens(head_dim)
    _unpack_nvfp4_kernel[(cdiv(count, block_n), num_heads)](
        k_codes,
        k_scales,
        v_codes,
        v_scales,
        slots,
        k_out,
        v_out,
        count,
        *k_codes.stride()[:2],
        *k_scales.stride()[:2],
        *v_codes.stride()[:2],
        *v_scales.stride()[:2],
        *k_out.stride()[:2],
        *v_out.stride()[:2],
        D=head_dim,
        HALF=half_width(head_dim),
        BLOCK_N=block_n,
        FOLDED=FOLD,
        ASM=PLAIN if limits.capability < 89 else ASM_PURE,
        num_warps=4,
    )
