"""Corrections to the Triton interpreter: the one place that knows its faults.

Under TRITON_INTERPRET=1 a kernel runs in numpy, program by program. Numpy has no bf16 and no fp8,
so the interpreter keeps such values as raw uint16 and uint8, and Triton 3.8 forgets in places that
they are not integers. With `apply()` every kernel of the process, ours and SGLang's, is right on a
CPU. What was wrong, and what happens now:

  fault                                             now
  tl.dot multiplies the bits of bf16 operands       operands are widened to fp32 first
  bf16 add, mul, compare, neg, fma, sum work on     computed in fp32, rounded to bf16 once, as the
    the bits                                          hardware instruction does
  bf16 subnormals are lost when widened             widening is a 16-bit shift
  fp32 to bf16 truncates                            rounds to nearest even; RTZ still truncates
  fp32 to e4m3 and e5m2 lose the carry, break       rounds to nearest even, saturates (as PTX
    ties upwards, do not saturate                     cvt.rn.satfinite), keeps NaN
  e4m3 NaN reads as 480                             NaN
  int and bf16 or fp8 convert into each other       through fp32
    as bits
  a comparison is tagged with its operands' type,   tagged int1
    so casting a mask to float reads bits
  a bf16 constant other than 0 cannot be made       made
  an autotuned kernel asks the GPU's driver to      the first configuration that pruning leaves;
    time its configurations                           heuristics as they are

`interpreter_speed.py`, applied with these, makes the interpreter faster without changing a result.

Not covered: tl.dot_scaled, bf16 atomics, fp8e4b15, fp8e4b8 and fp8e5b16 stay as Triton has them.

Source: triton/runtime/interpreter.py @ 3.8.0
"""

import os
from collections.abc import Callable

import numpy as np

from sglang_fp4kv.embedded import interpreter_speed

_applied = False

# Narrow float formats by Triton's names: mantissa bits, exponent bias, largest finite value, NaN.
_FP8 = {
    "fp8e4nv": (3, 7, 448.0, 0x7F),
    "fp8e5": (2, 15, 57344.0, 0x7E),
}


def bf16_bits_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16_bits(values: np.ndarray, truncate: bool = False) -> np.ndarray:
    """Round to nearest even, or towards zero; NaN stays NaN, subnormals are kept."""
    bits = values.view(np.uint32)
    if truncate:
        rounded = bits >> 16
    else:
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # The carry of a NaN's payload would turn it into an infinity or a zero.
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _fp8_table(mantissa_bits: int, bias: int, largest: float) -> np.ndarray:
    codes = np.arange(256)
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    magnitude = np.where(
        exponent == 0,
        np.ldexp(mantissa, 1 - bias),
        np.ldexp(1 + mantissa, exponent - bias),
    )
    if mantissa_bits == 2:  # e5m2 has infinities; e4m3 spends that exponent on finite values
        magnitude = np.where((codes & 0x7F) == 0x7C, np.inf, magnitude)
    beyond = (magnitude > largest) & np.isfinite(magnitude)
    return np.where(codes >= 128, -1.0, 1.0).astype(np.float32) * np.where(
        beyond, np.nan, magnitude
    ).astype(np.float32)


_FP8_TABLES = {name: _fp8_table(m, b, top) for name, (m, b, top, _) in _FP8.items()}


def fp8_bits_to_fp32(bits: np.ndarray, name: str) -> np.ndarray:
    return _FP8_TABLES[name][bits]


def fp32_to_fp8_bits(values: np.ndarray, name: str) -> np.ndarray:
    """Round to nearest even and saturate, infinities included; NaN stays NaN."""
    mantissa_bits, bias, largest, nan = _FP8[name]
    is_nan = np.isnan(values)
    magnitude = np.where(is_nan, np.float32(0), np.minimum(np.abs(values), np.float32(largest)))
    # Normal: round the fp32 bits; a carry moves into the exponent, as it should.
    shift = 23 - mantissa_bits
    bits = magnitude.view(np.uint32)
    rounded = (bits + (((bits >> shift) & 1) + np.uint32((1 << (shift - 1)) - 1))) >> shift
    normal = rounded.astype(np.int32) - ((127 - bias) << mantissa_bits)
    # Subnormal: the step is constant. np.rint breaks ties to even.
    smallest_normal = np.float32(2.0 ** (1 - bias))
    step = smallest_normal / np.float32(1 << mantissa_bits)
    steps = np.rint(np.minimum(magnitude, smallest_normal) / step).astype(np.int32)
    code = np.where(magnitude >= smallest_normal, normal, steps)
    code = np.where(is_nan, nan, code | np.where(np.signbit(values), 0x80, 0))
    return code.astype(np.uint8)


def apply() -> bool:
    """Correct the interpreter of this process; idempotent.

    Returns False and changes nothing when TRITON_INTERPRET is not 1.
    """
    global _applied
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    if not _applied:
        _correct_conversions()
        _correct_arithmetic()
        _correct_reductions()
        _choose_without_timing()
        interpreter_speed.apply()
        _applied = True
    return True


def is_applied() -> bool:
    return _applied


def _format_of(handle) -> str | None:
    """The narrow format a handle's integers stand for, None for every other handle."""
    name = handle.dtype.scalar.name
    if name == "bf16":
        return name if handle.data.dtype == np.uint16 else None
    if name in _FP8:
        return name if handle.data.dtype == np.uint8 else None
    return None


def _widen(data: np.ndarray, name: str) -> np.ndarray:
    return bf16_bits_to_fp32(data) if name == "bf16" else fp8_bits_to_fp32(data, name)


def _narrow(data: np.ndarray, name: str, truncate: bool = False) -> np.ndarray:
    # asarray: numpy turns a zero-dimensional result into a scalar, which has no view().
    data = np.asarray(data).astype(np.float32, copy=False)
    if name == "bf16":
        return fp32_to_bf16_bits(np.ascontiguousarray(data), truncate)
    return fp32_to_fp8_bits(data, name)


def _values(handle) -> np.ndarray:
    name = _format_of(handle)
    return handle.data if name is None else _widen(handle.data, name)


def _correct_conversions() -> None:
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle_of = interpreter.TensorHandle
    original_fp_to_fp = builder.create_fp_to_fp
    narrow_names = {"bf16", *_FP8}

    def convert(src, dst_type, truncate=False):
        dst = dst_type.scalar
        values = _values(src)
        if dst.name in narrow_names:
            return handle_of(_narrow(values, dst.name, truncate), dst)
        return handle_of(values.astype(interpreter._get_np_dtype(dst)), dst)

    def cast_impl(self, src, dst_type):
        return convert(src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        names = {src.dtype.scalar.name, dst_type.scalar.name}
        truncate = rounding_mode == ir.ROUNDING_MODE.RTZ
        if not names & narrow_names or (truncate and dst_type.scalar.name != "bf16"):
            return original_fp_to_fp(self, src, dst_type, rounding_mode)
        return convert(src, dst_type, truncate)

    def get_bf16(self, value):
        import triton.language as tl

        return handle_of(_narrow(np.array([value]), "bf16"), tl.bfloat16)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.get_bf16 = get_bf16


def _correct_arithmetic() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle_of = interpreter.TensorHandle

    def finish(output, like):
        """A handle for a result computed from handles of the type of `like`."""
        if output.dtype == np.bool_:
            return handle_of(output, tl.int1)
        name = _format_of(like)
        if name is not None and output.dtype == np.float32:
            return handle_of(_narrow(output, name), like.dtype.scalar)
        if not interpreter._validate_np_data_size(output, like.dtype.scalar):
            output = output.astype(interpreter._get_np_dtype(like.dtype.scalar))
        return handle_of(output, like.dtype.scalar)

    def binary_op(self, lhs, rhs, op):
        return finish(op(_values(lhs), _values(rhs)), lhs)

    def unary_op(self, arg, op):
        return finish(op(_values(arg)), arg)

    def ternary_op(self, lhs, rhs, other, op):
        if op is np.where:  # a selection moves bits, whatever they mean
            output = op(lhs.data, rhs.data, other.data)
            if output.dtype == np.bool_:
                return handle_of(output, tl.int1)
            return handle_of(output, other.dtype.scalar)
        return finish(op(_values(lhs), _values(rhs), _values(other)), other)

    def create_fma(self, x, y, z):
        return finish(_values(x) * _values(y) + _values(z), z)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if d.data.dtype.kind in "iu":
            product = np.matmul(a.data, b.data, dtype=d.data.dtype)
        else:
            wide = np.promote_types(np.float32, d.data.dtype)
            product = np.matmul(
                _values(a).astype(wide, copy=False), _values(b).astype(wide, copy=False)
            )
        return handle_of((product + d.data).astype(d.data.dtype, copy=False), d.dtype.scalar)

    builder.binary_op = binary_op
    builder.unary_op = unary_op
    builder.ternary_op = ternary_op
    builder.create_fma = create_fma
    builder.create_dot = create_dot


def _correct_reductions() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(apply_impl: Callable) -> Callable:
        def corrected(self, inputs):
            if not any(_format_of(one.handle) for one in inputs):
                return apply_impl(self, inputs)
            wide = tuple(
                self.to_tensor(_values(one.handle), tl.float32) if _format_of(one.handle) else one
                for one in inputs
            )
            result = apply_impl(self, wide)
            if not isinstance(result, (list, tuple)):
                result = (result,)
            return tuple(
                _narrow_tensor(self, out, one) if _format_of(one.handle) else out
                for out, one in zip(result, inputs, strict=False)
            )

        return corrected

    def _narrow_tensor(op, out, like):
        return op.to_tensor(_narrow(out.handle.data, like.dtype.name), like.dtype)

    for op in (interpreter.ReduceOps, interpreter.ScanOps):
        op.apply_impl = widened(op.apply_impl)


def _choose_without_timing() -> None:
    """Autotuner.run without the benchmark, for which there is no driver.

    A configuration is tile sizes and what a compiler wants (warps, stages), so any gives the kernel's
    result. Hooks of the configuration are called as the original calls them.
    """
    from triton.runtime import autotuner

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            config = self.configs[0] if len(self.configs) == 1 else self.prune_configs(kwargs)[0]
            self.best_config = config
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
            return self.fn.run(*args, **kwargs, **config.all_kwargs())
        finally:
            self.nargs = None

    autotuner.Autotuner.run = run
