"""Run a piece of inline PTX in numpy: the opcodes of kernels/_encode.py and _fragments.py.

Written from the PTX ISA and on purpose apart from the codec: E4M3 and fp16 are rounded by looking
for neighbours in a table, not by the codec's integer arithmetic. An opcode it does not know raises.
"""

import re

import numpy as np

_E4M3 = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
)
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP16 = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)


def _f32(bits):
    return bits.view(np.float32)


def _halves(bits, kind):
    """Both 16-bit floats of a register as fp32, [2, N]."""
    half = np.stack((bits & 0xFFFF, bits >> 16))
    if kind == "bf16x2":
        return _f32((half << 16).astype(np.uint32))
    return half.astype(np.uint16).view(np.float16).astype(np.float32)


def _join(low, high):
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def _float16(table, code):
    """fp16 bits of codes whose magnitudes are listed in table, the bit above them the sign."""
    size = 1 << (len(table) - 1).bit_length()
    magnitude = np.append(table, [np.nan] * (size - len(table)))[code & (size - 1)]
    return np.where(code & size, -magnitude, magnitude).astype(np.float16).view(np.uint16)


def _to_e4m3(value):
    """Nearest of _E4M3, ties to the even code, above 448 saturated; value >= 0."""
    value = value.astype(np.float64)
    below = np.searchsorted(_E4M3, value, side="right") - 1
    above = np.minimum(below + 1, 126)
    middle = (_E4M3[below] + _E4M3[above]) / 2
    up = (value > middle) | ((value == middle) & (below % 2 == 1))
    return np.where(up, above, below).astype(np.uint32)


def _cut(value, kind):
    """fp32 to 16 bits towards zero; value >= 0 or NaN."""
    bits = value.view(np.uint32)
    if kind == "bf16x2":
        return np.where(np.isnan(value), 0x7FFF, bits >> 16)
    finite = np.where(np.isnan(value), 0.0, value).astype(np.float64)
    return np.where(np.isnan(value), 0x7FFF, np.searchsorted(_FP16, finite, side="right") - 1)


def _lop3(a, b, c, table):
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _prmt(a, b, selector):
    assert not (selector & 0x8888).any(), "sign replication is not emulated"
    both = np.stack([(x >> (8 * i)) & 0xFF for x in (a, b) for i in range(4)]).astype(np.uint32)
    picked = [np.choose(selector >> (4 * i) & 7, both) for i in range(4)]
    return sum(byte << np.uint32(8 * i) for i, byte in enumerate(picked))


_COMPARE = {"gt": np.greater, "lt": np.less, "num": lambda a, b: ~(np.isnan(a) | np.isnan(b))}


def _execute(opcode, args):
    """The value of one instruction; args are uint32 [N] arrays, a bool array for a predicate."""
    name, *rest = opcode.split(".")
    kind = rest[-1] if rest else ""
    a, b, c, *_ = [*args, None, None, None]
    match opcode:
        case "mov.b32" | "cvt.u32.u16":
            return a
        case "and.b32":
            return a & b
        case "shl.b32":
            return a << b
        case "shr.u32" | "shr.b32":
            return a >> b
        case "sub.s32":
            return a - b
        case "max.u32":
            return np.maximum(a, b)
        case "max.u16x2":
            return _join(np.maximum(a & 0xFFFF, b & 0xFFFF), np.maximum(a >> 16, b >> 16))
        case "setp.lt.u32":
            return a < b
        case "setp.eq.u32":
            return a == b
        case "selp.b32":
            return np.where(c, a, b)
        case "lop3.b32":
            return _lop3(a, b, c, int(args[3][0]))
        case "prmt.b32":
            return _prmt(a, b, c)
        case "mad.lo.u32":
            return a * b + c
        case "mul.rn.f32":
            return (_f32(a) * _f32(b)).view(np.uint32)
        case "div.rn.f32":
            return (_f32(a) / _f32(b)).view(np.uint32)
        case "cvt.u16.u32":
            return a & 0xFFFF
        case "cvt.f32.f16":
            return a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        case "cvt.rn.satfinite.e4m3x2.f32":
            return _to_e4m3(_f32(b)) | (_to_e4m3(_f32(a)) << 8)
        case "cvt.rn.f16x2.e4m3x2":
            return _join(_float16(_E4M3, a & 0xFF), _float16(_E4M3, a >> 8))
        case "cvt.rn.f16x2.e2m1x2":
            return _join(_float16(_E2M1, a & 0xF), _float16(_E2M1, a >> 4))
        case "mul.rn.f16x2":
            low, high = (_halves(a, kind) * _halves(b, kind)).astype(np.float16).view(np.uint16)
            return _join(low, high)
        case "cvt.rz.bf16x2.f32" | "cvt.rz.f16x2.f32":
            return _join(_cut(_f32(b), rest[1]), _cut(_f32(a), rest[1]))
        case "abs.bf16x2" | "abs.f16x2":
            return a & 0x7FFF7FFF
    if name == "set" and rest[1] == "u32" and kind in ("bf16x2", "f16x2"):
        low, high = _COMPARE[rest[0]](_halves(a, kind), _halves(b, kind))
        return _join(low * np.uint32(0xFFFF), high * np.uint32(0xFFFF))
    raise NotImplementedError(f"PTX opcode {opcode}")


def run(ptx: str, inputs: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Run ptx for N threads; inputs and results are uint32 [N] by operand number ($n)."""
    threads = len(next(iter(inputs.values())))
    registers = {f"${n}": bits.astype(np.uint32) for n, bits in inputs.items()}
    active, waiting = np.ones(threads, bool), {}

    def value(operand):
        if operand.startswith("0f"):
            operand = "0x" + operand[2:]
        if operand[0].isdigit():
            return np.full(threads, int(operand, 0), np.uint32)
        return registers[operand]

    def write(register, new):
        if register in registers:
            new = np.where(active, new, registers[register])
        registers[register] = new

    with np.errstate(all="ignore"):
        for line in ptx.split("\n"):
            if line in "{}" or line.startswith(".reg"):
                continue
            if line.endswith(":"):
                active = active | waiting.pop(line[:-1])
                continue
            if jump := re.fullmatch(r"@(\w+) bra (\w+);", line):
                leaving = active & registers[jump[1]]
                waiting[jump[2]] = leaving
                active = active & ~leaving
                continue
            opcode, operands = line.rstrip(";").split(" ", 1)
            if unpack := re.fullmatch(r"\{(.+)\}, ([$\w]+)", operands):
                targets = unpack[1].split(", ")
                bits = 32 // len(targets)
                source = value(unpack[2])
                for i, target in enumerate(targets):
                    write(target, source >> np.uint32(bits * i) & np.uint32((1 << bits) - 1))
                continue
            if pack := re.fullmatch(r"(\w+), \{([$\w]+), ([$\w]+)\}", operands):
                write(pack[1], _join(value(pack[2]), value(pack[3])))
                continue
            target, *sources = operands.split(", ")
            write(target, _execute(opcode, [value(x) for x in sources]))
    assert not waiting, f"jumps to {sorted(waiting)} were not resolved"
    return {n: registers[f"${n}"] for n in range(min(inputs))}
