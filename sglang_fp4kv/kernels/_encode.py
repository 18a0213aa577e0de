"""What both NVFP4 writers share inside a kernel: load 16-element blocks, encode, store.

One thread encodes one block. For 16-bit sources on sm_90 and newer one piece of assembly does it,
two elements an instruction; `encode_blocks` is its plain twin, for fp32 sources, older GPUs and the
interpreter. Both give the bytes of codec.encode.

Why comparing in 16 bits is exact: for a 16-bit value v >= 0 and an fp32 threshold t >= 0, v > t
says the same as v > (t cut to v's format), since no 16-bit value lies between the two; and v >= t
says the same as v > (the fp32 number below t). So any global scale works, and fp16 like bf16.
Blackwell's cvt.e2m1x2 is not used: it rounds |x| / step, while the codec compares |x| with the
rounded product midpoint * step, which differs where the global scale is no power of two.
"""

import triton
import triton.language as tl


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


def encode_ptx(source: str) -> str:
    """Assembly that encodes one block of 16 values of type source ("bf16" or "f16").

    In: $3..$10 the block as pairs (even element in the low half), $11 global scale * 6,
    $12 global scale. Out: $0 and $1 the code words, $2 the scale code.
    """
    inf = {"bf16": "0x7F80", "f16": "0x7C00"}[source]
    widen = {
        "bf16": "shl.b32 m, m, 16;\nmov.b32 f, m;",
        "f16": "cvt.u16.u32 h, m;\ncvt.f32.f16 f, h;",
    }[source]
    pairs = range(8)
    amax = "\n".join(
        ["max.u16x2 m, a0, a1;"]
        + [f"max.u16x2 m, m, a{i};" for i in pairs[2:]]
        + ["shr.u32 x, m, 16;", "and.b32 m, m, 0xFFFF;", "max.u32 m, m, x;"]
    )
    lines = [
        "{",
        ".reg .b32 w<8>, a<8>, n<8>, t<8>, m, x, y, k, low, scale;",
        ".reg .b16 h, g;",
        ".reg .f32 f, step, u;",
        ".reg .pred p;",
        *(f"mov.b32 w{i}, ${3 + i};" for i in pairs),
        *(f"and.b32 a{i}, w{i}, 0x7FFF7FFF;" for i in pairs),
        amax,
        "mov.b32 low, 0;",
        f"setp.lt.u32 p, m, {inf};",
        "@p bra finite;",
        # A NaN or an Inf, seldom: NaN becomes +0, Inf does not count for the scale but makes it
        # 0x7E (low) where it would be 0.
        *(
            f"set.num.u32.{source}x2 x, w{i}, w{i};\n"
            f"and.b32 w{i}, w{i}, x;\n"
            f"and.b32 a{i}, w{i}, 0x7FFF7FFF;"
            for i in pairs
        ),
        amax,
        f"setp.eq.u32 p, m, {inf};",
        "selp.b32 low, 126, 0, p;",
        f"mov.b32 k, {inf}{inf[2:]};",
        *(f"set.lt.u32.{source}x2 x, a{i}, k;\nand.b32 a{i}, a{i}, x;" for i in pairs),
        amax,
        "finite:",
        widen,
        "div.rn.f32 f, f, $11;",
        "cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, f;",
        "cvt.u32.u16 x, h;",
        "setp.eq.u32 p, x, 0;",
        "selp.b32 scale, low, x, p;",
        "setp.eq.u32 p, scale, 0;",
        "cvt.u16.u32 h, scale;",
        "cvt.rn.f16x2.e4m3x2 x, h;",
        "mov.b32 {h, g}, x;",
        "cvt.f32.f16 step, h;",
        "mul.rn.f32 step, step, $12;",
    ]
    # t1..t7: step times 0.25 0.75 1.25 1.75 2.5 3.5 5, one fp32 number lower where a tie goes up.
    for i, midpoint in enumerate(
        ("3E800000", "3F400000", "3FA00000", "3FE00000", "40200000", "40600000", "40A00000"), 1
    ):
        lines.append(f"mul.rn.f32 u, step, 0f{midpoint};")
        if i % 2 == 0:
            lines += ["mov.b32 x, u;", "sub.s32 x, x, 1;", "mov.b32 u, x;"]
        lines.append(f"cvt.rz.{source}x2.f32 t{i}, u, u;")
    # A comparison gives 0xFFFF or 0 in each half; lop3 0xCA is (first ? second : third), bit by
    # bit. n: sign and the code's three bits at the top of each half.
    for i in pairs:
        lines += [
            f"abs.{source}x2 a{i}, w{i};",
            f"set.gt.u32.{source}x2 m, a{i}, t4;",
            "lop3.b32 x, m, t6, t2, 0xCA;",
            f"set.gt.u32.{source}x2 k, a{i}, x;",
            "lop3.b32 x, m, t5, t1, 0xCA;",
            "lop3.b32 y, m, t7, t3, 0xCA;",
            "lop3.b32 x, k, y, x, 0xCA;",
            f"set.gt.u32.{source}x2 x, a{i}, x;",
            f"lop3.b32 m, 0x80008000, w{i}, m, 0xCA;",
            "lop3.b32 m, 0xC000C000, m, k, 0xCA;",
            f"lop3.b32 n{i}, 0xE000E000, m, x, 0xCA;",
        ]
    # Four pairs to a word: the bytes of the even elements, those of the odd ones, joined.
    for word in (0, 1):
        a, b, c, d = (f"n{4 * word + i}" for i in range(4))
        lines += [
            f"prmt.b32 x, {a}, {b}, 0x7351;",
            f"prmt.b32 y, {c}, {d}, 0x7351;",
            "prmt.b32 m, x, y, 0x5410;",
            "prmt.b32 x, x, y, 0x7632;",
            "shr.u32 m, m, 4;",
            "lop3.b32 x, 0xF0F0F0F0, x, m, 0xCA;",
            f"selp.b32 ${word}, 0, x, p;",
        ]
    # Outputs come last: the compiler may give one the register of an input.
    return "\n".join([*lines, "mov.b32 $2, scale;", "}"])


_BF16_PTX: tl.constexpr = tl.constexpr(encode_ptx("bf16"))
_FP16_PTX: tl.constexpr = tl.constexpr(encode_ptx("f16"))


@triton.jit
def this_side(k, v):
    """K's argument in the programs of grid row 0, V's in those of row 1."""
    return tl.where(tl.program_id(1) == 0, k, v)


@triton.jit
def place_blocks(
    total_blocks,
    HEADS: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    """This program's blocks [N]: their row of k or v (int64), place in a slot, whether they exist.

    The unit is one 16-element block of a (token, head) row, so no lane idles at D = 80 or 96.
    """
    # Unsigned, so that dividing by a power of two is a shift.
    first = tl.program_id(0).to(tl.uint32) * BLOCKS_PER_PROGRAM
    index = first + tl.arange(0, BLOCKS_PER_PROGRAM).to(tl.uint32)
    token = (index // (HEADS * BLOCKS_PER_ROW)).to(tl.int64)
    in_slot = (index % (HEADS * BLOCKS_PER_ROW)).to(tl.int32)
    return token, in_slot, index < total_blocks


@triton.jit
def _load_pairs(src, mask):
    """Eight 16-bit values at each src [N] as four int32 [N] of two, the earlier in the low half."""
    N: tl.constexpr = src.shape[0]
    x = tl.load(src[:, None] + tl.arange(0, 8)[None, :], mask=mask[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), (N, 4, 2)))
    pairs = even.to(tl.uint32) | (odd.to(tl.uint32) << 16)
    pairs_02, pairs_13 = tl.split(tl.reshape(pairs.to(tl.int32, bitcast=True), (N, 2, 2)))
    p0, p2 = tl.split(pairs_02)
    p1, p3 = tl.split(pairs_13)
    return p0, p1, p2, p3


@triton.jit
def block_sources(
    src_ptr, token_stride, head_stride, token, in_slot, BLOCKS_PER_ROW: tl.constexpr
):
    """Where the values of each block [N] begin."""
    head = (in_slot.to(tl.uint32) // BLOCKS_PER_ROW).to(tl.int64)
    in_row = (in_slot.to(tl.uint32) % BLOCKS_PER_ROW).to(tl.int32) * 16
    return src_ptr + (token * token_stride + head * head_stride + in_row)


@triton.jit
def wait_for_predecessor(addresses):
    """Wait until the kernel before this one has finished and its writes are visible.

    addresses [N] are where the first loads go. Waiting on condition that they are not null, which
    they never are, keeps ptxas from computing them only after the wait.
    """
    tl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s64 p, $1, 0;\n@p griddepcontrol.wait;\n}\n// $0",
        "=r,l",
        [addresses.to(tl.int64, bitcast=True)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_blocks(src, mask, ASM: tl.constexpr):
    """The 16 values at each src [N], as encode_and_store takes them."""
    if ASM:
        # Two loads of eight give each thread a whole block; one load of 16 would be shared by two.
        return (_load_pairs(src, mask), _load_pairs(src + 8, mask))
    else:
        element = tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
        x = src[:, None, None] + element[None, :, :]
        return tl.load(x, mask=mask[:, None, None], other=0.0)


@triton.jit
def encode_and_store(
    blocks,
    global_scale,
    codes_ptr,
    scales_ptr,
    codes_stride,
    scales_stride,
    slot,
    in_slot,
    live,
    SOURCE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Encode what load_blocks gave and write it to slot [N] where live [N].

    Strides count bytes; codes of a slot begin at multiples of 4 bytes. ASM: see use_assembly.
    """
    if ASM:
        first, second = blocks
        p0, p1, p2, p3 = first
        p4, p5, p6, p7 = second
        zero = tl.zeros_like(p0).to(tl.float32)
        word0, word1, scale = tl.inline_asm_elementwise(
            _BF16_PTX if SOURCE == tl.bfloat16 else _FP16_PTX,
            "=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [p0, p1, p2, p3, p4, p5, p6, p7, zero + global_scale * 6.0, zero + global_scale],
            (tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        words = tl.join(word0, word1)
    else:
        words, scale = encode_blocks(blocks, global_scale)
    target = codes_ptr + (slot * codes_stride + in_slot * 8)
    target = target.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(target, words, mask=live[:, None])
    tl.store(scales_ptr + (slot * scales_stride + in_slot), scale.to(tl.uint8), mask=live)
