"""What every packed reader shares inside a kernel: one tile of NVFP4 rows, decoded in registers.

A packed row of D values is D//2 code bytes (low nibble: even element) and D//16 scale bytes
(E4M3). A tile is decoded into two half-width tensors, the even and the odd elements, so that
nothing is interleaved: q is split the same way when it is loaded, and V's halves are written side
by side at the end.

Tiles are fp16, for bf16 queries too. An E2M1 value times an E4M3 scale needs six significant bits
and is a multiple of 2^-10 up to 2688, so divided by FOLD = 2^14 it is exact in fp16, subnormals
included. Decoding is placing a code's bits in a float's exponent and mantissa field (its value
times a power of two) and one multiply by the scale; FOLD is taken back in fp32 after the dot, with
the global scale. Query rows are scaled by a power of two into fp16's range, and weights keep three
more bits than in bf16. The interpreter computes fp16 exactly, bf16 not.
"""

import torch
import triton
import triton.language as tl

FOLD = 16384.0  # decoded tile * FOLD = E2M1 value * block scale

TL_DTYPE = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}

# How codes are placed (constexpr ASM). Impure assembly is decoded once and handed to the dot
# through shared memory; pure assembly may be moved behind the layout change, where every warp that
# shares a tile decodes it again. Blackwell's tcgen05 pipeline takes pure assembly only, and stages anyway.
PLAIN, ASM_PURE, ASM_STAGED = 0, 1, 2

# Four code bytes to four even and four odd values in fp16, times 2^-6: a code's bits are those of
# an E4M3 two mantissa bits up, and the conversion of two E4M3 is one instruction (sm_89).
_PLACE_ASM: tl.constexpr = tl.constexpr("""
{
.reg .b32 e, o, t;
.reg .b16 a, b;
shl.b32 e, $4, 2;
and.b32 e, e, 0x1C1C1C1C;
shl.b32 t, $4, 4;
lop3.b32 e, t, 0x80808080, e, 0xEA;
shr.b32 o, $4, 2;
and.b32 o, o, 0x1C1C1C1C;
lop3.b32 o, $4, 0x80808080, o, 0xEA;
mov.b32 {a, b}, e;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
mov.b32 {a, b}, o;
cvt.rn.f16x2.e4m3x2 $2, a;
cvt.rn.f16x2.e4m3x2 $3, b;
}
""")


@triton.jit
def load_packed(
    codes_ptr,  # of this KV head
    scales_ptr,
    slots,  # [N] int64
    valid,  # [N] slots that are owned; the others are never read and decode to 0
    stride_codes,
    stride_scales,
    D: tl.constexpr,
    HALF: tl.constexpr,
):
    """Load whole packed rows: codes [N, HALF] uint8 and scales [N, HALF//8] uint8."""
    c = tl.arange(0, HALF)
    g = tl.arange(0, HALF // 8)
    code_mask = valid[:, None]
    scale_mask = valid[:, None]
    if D // 2 != HALF:
        code_mask = code_mask & (c < D // 2)[None, :]
        scale_mask = scale_mask & (g < D // 16)[None, :]
    codes = tl.load(codes_ptr + slots[:, None] * stride_codes + c[None, :], code_mask, other=0)
    scales = tl.load(scales_ptr + slots[:, None] * stride_scales + g[None, :], scale_mask, other=0)
    return codes, scales


@triton.jit
def decode_packed(codes, scales, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Decode a tile: even and odd elements, [N, HALF] DTYPE each, as true value / FOLD."""
    N: tl.constexpr = codes.shape[0]
    HALF: tl.constexpr = codes.shape[1]
    # At the top of an fp16 an E4M3 without sign is its value times 2^-8, subnormals included.
    s = (scales.to(tl.uint16) << 7).to(tl.float16, bitcast=True)
    if ASM == 0:
        s = s * 256.0
    s = tl.reshape(tl.broadcast_to(s[:, :, None], (N, HALF // 8, 8)), (N, HALF))
    if ASM == 1:
        even, odd = tl.inline_asm_elementwise(
            _PLACE_ASM, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    elif ASM == 2:
        even, odd = tl.inline_asm_elementwise(
            _PLACE_ASM, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), is_pure=False, pack=4
        )
    else:  # the plain twin: at the top of an fp16 a code is its value times 2^-14
        c = codes.to(tl.uint16)
        even = (((c << 12) & 0x8000) | ((c << 9) & 0x0E00)).to(tl.float16, bitcast=True)
        odd = (((c << 8) & 0x8000) | ((c << 5) & 0x0E00)).to(tl.float16, bitcast=True)
    return (even * s).to(DTYPE), (odd * s).to(DTYPE)


@triton.jit
def load_split(ptr, offsets, mask, D: tl.constexpr, HALF: tl.constexpr):
    """Load rows of unpacked values [N, D] and return their even and odd halves [N, HALF]."""
    c = tl.arange(0, HALF)
    cols = (2 * c)[:, None] + tl.arange(0, 2)[None, :]
    row_mask = mask[:, None, None]
    if D // 2 != HALF:
        row_mask = row_mask & (c < D // 2)[None, :, None]
    x = tl.load(ptr + offsets[:, None, None] + cols[None, :, :], row_mask, other=0.0)
    return tl.split(x)


@triton.jit
def load_query(ptr, offsets, mask, D: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Load query rows as halves in DTYPE, and what each row was divided by (a power of two)."""
    even, odd = load_split(ptr, offsets, mask, D, HALF)
    if DTYPE == tl.float32:
        return even.to(tl.float32), odd.to(tl.float32), tl.full((even.shape[0],), 1.0, tl.float32)
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    exponent = amax.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 8), 252)
    up = ((260 - exponent) << 23).to(tl.float32, bitcast=True)  # amax * up is in [2^7, 2^8)
    down = ((exponent - 6) << 23).to(tl.float32, bitcast=True)
    return (even * up[:, None]).to(DTYPE), (odd * up[:, None]).to(DTYPE), down


@triton.jit
def half_scores(q_even, q_odd, k_even, k_odd):
    """Row scores [M, N] in fp32 from the two halves of q [M, HALF] and k [N, HALF]."""
    s = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
    return tl.dot(q_odd, tl.trans(k_odd), s, input_precision="ieee")


@triton.jit
def cap_scores(s, LOGIT_CAP: tl.constexpr):
    """Scaled scores to units of log2; without a cap they are in these units already."""
    if LOGIT_CAP > 0:
        LOG2E: tl.constexpr = 1.4426950408889634
        e = tl.exp2(s * (2.0 * LOG2E / LOGIT_CAP))
        s = (1.0 - 2.0 / (1.0 + e)) * (LOGIT_CAP * LOG2E)
    return s


@triton.jit
def softmax_step(s, m, l, DTYPE: tl.constexpr):
    """One online-softmax step over scores s [M, N] in log2 units, -inf where not visible.

    The running maximum is rounded up to an integer: rescaling is then an exact power of two, and
    how a weight rounds does not depend on where a tile or a split begins. Weights go up to 2^14,
    for fp16's range; the sum carries the same factor and adds the weights as rounded.
    Returns weights p in DTYPE, the factor for what was accumulated, the new maximum and sum.
    """
    m_new = tl.maximum(m, tl.ceil(tl.max(s, 1)))
    top = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - top)
    p = tl.exp2(s - (top - 14.0)[:, None]).to(DTYPE)
    return p, alpha, m_new, l * alpha + tl.sum(p.to(tl.float32), 1)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, EMULATE: tl.constexpr):
    """fp32 to the output dtype, to nearest even also in the interpreter (EMULATE)."""
    if EMULATE and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def store_halves(ptr, offsets, mask, even, odd, D: tl.constexpr, EMULATE: tl.constexpr):
    """Write two fp32 halves [M, HALF] side by side to rows of D values at ptr + offsets."""
    HALF: tl.constexpr = even.shape[1]
    d = tl.arange(0, 2 * HALF)
    x = round_to(tl.interleave(even, odd), ptr.dtype.element_ty, EMULATE)
    store_mask = mask[:, None]
    if D != 2 * HALF:
        store_mask = store_mask & (d < D)[None, :]
    tl.store(ptr + offsets[:, None] + d[None, :], x, store_mask)
