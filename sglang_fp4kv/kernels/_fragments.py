"""NVFP4 rows decoded straight into tensor-core fragments, in Gluon.

Triton chooses layouts itself and moves decoded values through shared memory to reach them. Here the
layouts are written down so that what a thread loads is what its registers need for mma.m16n8k16:

  K is the left operand of S^T = K q^T. A thread holds whole 32-bit words of its rows; the order of
  the sum over D is free, so q is loaded in the order in which the words decode.
  V^T is the left operand of O^T = V^T P^T. Its registers pair two tokens of one column, so two
  tokens' words are interleaved byte by byte before they are decoded, one permute for 8 codes.

Eight codes cost 7 logic operations, 4 conversions and 4 multiplications. How codes become fp16
(constexpr PLACE): E4M3, their bits are those of an E4M3 two mantissa bits up; E2M1, the conversion
of sm_100 and later; TWIN, plain arithmetic with the same result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

TWIN, E4M3, E2M1 = 0, 1, 2
# decoded * FOLDS[place] = E2M1 value * block scale, exact in fp16
FOLDS = {TWIN: 16384.0, E4M3: 16384.0, E2M1: 256.0}

_TO_E4M3 = """
shl.b32 e, x, 2;
and.b32 e, e, 0x1C1C1C1C;
shl.b32 t, x, 4;
lop3.b32 e, t, 0x80808080, e, 0xEA;
shr.b32 o, x, 2;
and.b32 o, o, 0x1C1C1C1C;
lop3.b32 o, x, 0x80808080, o, 0xEA;
mov.b32 {a, b}, e;
cvt.rn.f16x2.e4m3x2 r0, a;
cvt.rn.f16x2.e4m3x2 r1, b;
mov.b32 {a, b}, o;
cvt.rn.f16x2.e4m3x2 r2, a;
cvt.rn.f16x2.e4m3x2 r3, b;
"""
_FROM_E2M1 = """
mov.b32 {b0, b1, b2, b3}, x;
cvt.rn.f16x2.e2m1x2 r0, b0;
cvt.rn.f16x2.e2m1x2 r1, b1;
cvt.rn.f16x2.e2m1x2 r2, b2;
cvt.rn.f16x2.e2m1x2 r3, b3;
"""
_SCALED = """
mul.rn.f16x2 r0, r0, s;
mul.rn.f16x2 r1, r1, s;
mul.rn.f16x2 r2, r2, s;
mul.rn.f16x2 r3, r3, s;
mov.b32 {$0, $1}, r0;
mov.b32 {$2, $3}, r1;
mov.b32 {$4, $5}, r2;
mov.b32 {$6, $7}, r3;
"""


def _asm(head: str, place: int) -> str:
    registers = ".reg .b32 x, y, e, o, t, s, r0, r1, r2, r3;\n.reg .b16 a, b;\n"
    if place == E2M1:
        registers += ".reg .b8 b0, b1, b2, b3;\n"
    return "{\n" + registers + head + (_FROM_E2M1 if place == E2M1 else _TO_E4M3) + _SCALED + "}"


# $8 a word of K, $9 its scale. Out: four elements of the first operand tensor, four of the second.
K_ASM = {place: _asm("mov.b32 x, $8;\nmov.b32 s, {$9, $9};", place) for place in (E4M3, E2M1)}
# $8 and $9 words of two tokens, $10 and $11 their scales, $12 which half of the words.
# Out: the half's two even columns, then its two odd ones, each for both tokens.
V_ASM = {
    E4M3: _asm(
        "mov.b32 s, {$10, $11};\n"
        "mad.lo.u32 t, $12, 0x2222, 0x5140;\nprmt.b32 x, $8, $9, t;",
        E4M3,
    ),
    E2M1: _asm(
        "mov.b32 s, {$10, $11};\n"
        "shl.b32 y, $9, 4;\nlop3.b32 e, $8, 0x0F0F0F0F, y, 0xE2;\n"
        "shr.b32 y, $8, 4;\nlop3.b32 o, y, 0x0F0F0F0F, $9, 0xE2;\n"
        "mad.lo.u32 t, $12, 0x2222, 0x5410;\nprmt.b32 x, e, o, t;",
        E2M1,
    ),
}
_K_OPERANDS = gl.constexpr(",".join(["=&h"] * 8 + ["r", "h"]))
_V_OPERANDS = gl.constexpr(",".join(["=&h"] * 8 + ["r", "r", "h", "h", "r"]))
_EIGHT = gl.constexpr((gl.float16,) * 8)


@constexpr_function
def _k_asm(place):
    return K_ASM[place]


@constexpr_function
def _v_asm(place):
    return V_ASM[place]


def log2(n: int) -> int:
    return n.bit_length() - 1


def linear(reg, lane, warp, shape, each=lambda basis: basis):
    """A linear layout whose bases first go through ``each``."""
    parts = ([each(basis) for basis in bases] for bases in (reg, lane, warp))
    return gl.DistributedLinearLayout(*parts, [], list(shape))


def codes_to_groups(basis):
    """[rows, words] -> [rows, groups, words of a group]; a scale group is two words."""
    return [basis[0], basis[1] >> 1, basis[1] & 1]


def halves_to_groups(basis):
    """[rows, words, halves] -> [rows, groups, half words of a group]."""
    return [basis[0], basis[1] >> 1, (basis[1] & 1) * 2 + basis[2]]


@gluon.jit
def place_scale(codes, PLACE: gl.constexpr):
    """E4M3 bytes as fp16: their value, times 2^-8 except for the twin."""
    s = (codes.to(gl.uint16) << 7).to(gl.float16, bitcast=True)
    if PLACE == 0:
        s = s * 256.0
    return s


@gluon.jit
def _twin(word, at: gl.constexpr):
    """Code ``at`` (0 to 7) of a word as fp16, times 2^-14."""
    code = (word >> (4 * at)) & 15
    return (((code & 8) << 12) | ((code & 7) << 9)).to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def four(a, b, c, d):
    """Four tensors as two new last dimensions: [..., 0, 0], [..., 0, 1], [..., 1, 0], [..., 1, 1]."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def spread_scales(codes, LAYOUT: gl.constexpr, PLACE: gl.constexpr):
    """Scale bytes [N, G], one for each word (LAYOUT of [N, 2G]) or half word ([N, 2G, 2])."""
    N: gl.constexpr = codes.shape[0]
    G: gl.constexpr = codes.shape[1]
    EACH: gl.constexpr = 2 if LAYOUT.rank == 2 else 4
    s = place_scale(codes, PLACE).expand_dims(2).broadcast_to([N, G, EACH])
    return gl.convert_layout(gl.reshape(s, LAYOUT.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def decode_k(words, scales, PLACE: gl.constexpr):
    """Words of K [N, W] and their scales to two operand tensors [N, W, 2, 2] in fp16.

    Element [.., i, j] is code 2i + j of the operand: operands() says which column that is.
    """
    if PLACE == 0:
        a = _twin(words, 0) * scales
        b = _twin(words, 2) * scales
        c = _twin(words, 4) * scales
        d = _twin(words, 6) * scales
        e = _twin(words, 1) * scales
        f = _twin(words, 3) * scales
        g = _twin(words, 5) * scales
        h = _twin(words, 7) * scales
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _k_asm(PLACE), _K_OPERANDS, [words, scales], _EIGHT, is_pure=True, pack=1
        )
    return four(a, b, c, d), four(e, f, g, h)


@gluon.jit
def operands(x, PLACE: gl.constexpr):
    """Columns of words, [P, 8, N], as decode_k splits them: first and second operand, [P, 4, N]."""
    P: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[2]
    if PLACE == 2:  # both columns of bytes 0 and 1, of bytes 2 and 3
        x = gl.permute(gl.reshape(x, [P, 2, 4, N]), [0, 2, 3, 1])
    else:  # even columns, odd columns
        x = gl.permute(gl.reshape(x, [P, 4, 2, N]), [0, 1, 3, 2])
    return gl.split(x)


@gluon.jit
def decode_v(words, words2, scales, scales2, half, PLACE: gl.constexpr):
    """Half words of two tokens' V [P, W, 2] to their even and odd columns, [P, W, 2, 2, 2] in fp16.

    The new dimensions are the byte of the half word and the token of the pair.
    """
    if PLACE == 0:
        x = words >> (16 * half)
        y = words2 >> (16 * half)
        a = _twin(x, 0) * scales
        b = _twin(y, 0) * scales2
        c = _twin(x, 2) * scales
        d = _twin(y, 2) * scales2
        e = _twin(x, 1) * scales
        f = _twin(y, 1) * scales2
        g = _twin(x, 3) * scales
        h = _twin(y, 3) * scales2
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _v_asm(PLACE),
            _V_OPERANDS,
            [words, words2, scales, scales2, half],
            _EIGHT,
            is_pure=True,
            pack=1,
        )
    return four(a, b, c, d), four(e, f, g, h)


@gluon.jit
def query_exponent(amax):
    """Biased exponent of a query row's largest magnitude, kept where both factors are normal."""
    exponent = amax.to(gl.int32, bitcast=True) >> 23
    return gl.minimum(gl.maximum(exponent, 8), 252)


@gluon.jit
def query_up(exponent):
    """Power of two that takes the largest magnitude into [2^7, 2^8)."""
    return ((260 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def query_down(exponent):
    return ((exponent - 6) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def whole_rows(even, odd, STEPS: gl.constexpr, LANES_FIRST: gl.constexpr):
    """Accumulators [D/2, N] of even and odd columns as rows [N, D]; moves nothing between threads.

    Rows of the operand lie as merge_fragments.FragmentOrder says; LANES_FIRST: a lane's columns
    are all side by side, else those of a step of 16 operand rows.
    """
    HALF: gl.constexpr = even.shape[0]
    N: gl.constexpr = even.shape[1]
    x = gl.reshape(gl.join(even, odd), [HALF // (16 * STEPS), STEPS, 2, 8, N, 2])
    if LANES_FIRST:
        x = gl.permute(x, [4, 3, 0, 1, 2, 5])
    else:
        x = gl.permute(x, [4, 1, 3, 0, 2, 5])
    return gl.reshape(x, [N, 2 * HALF])


@gluon.jit
def store_rows(
    out_ptr, x, row0, req, kv_head, stride_ot, stride_oh, Q: gl.constexpr, GROUP: gl.constexpr
):
    """Write rows [N, D], heads of the group of a request's tokens, in out's dtype."""
    L: gl.constexpr = x.type.layout
    row = row0 + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    offsets = (req.to(gl.int64) * Q + row // GROUP) * stride_ot
    offsets += (kv_head * GROUP + row % GROUP) * stride_oh
    x = x.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + offsets[:, None] + column[None, :], x, mask=(row < Q * GROUP)[:, None])
