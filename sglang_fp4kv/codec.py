"""NVFP4 encode and decode in plain torch: the numeric truth the kernels are compared with.

Block scale: E4M3, round to nearest even of (largest finite magnitude) / (6 * global_scale). This
nearest scale is the format's baseline and what is written; a search for a better one keeps the
bytes and the decoder and is a later step.

Every operation is one IEEE fp32 operation or integer work, in the same order as in
kernels/store_nvfp4.py, so both give the same bytes on any device. Elements are not divided by their
scale: |x| is compared with (midpoint between two E2M1 values) * (scale * global_scale). With a power
of two as global scale these products are exact, and so is the rounding. With another global scale a
product may round, so that a value within one fp32 ulp of a midpoint may fall to the other neighbour.
"""

from dataclasses import dataclass

import torch

from sglang_fp4kv.formats import (
    BLOCK_SIZE,
    E2M1_VALUES,
    E4M3_MAX_CODE,
    check_global_scale,
    check_head_dim,
)

_INF_BITS = 0x7F800000
_SOURCE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class EncodeStats:
    """What an encode had to give up. Counts of elements (nan, inf) and of blocks."""

    blocks: int
    nan: int
    inf: int
    saturated_blocks: int  # the nearest E4M3 scale would be above 448
    vanished_blocks: int  # finite values, not all zero, stored as a zero block


def _check_source(x: torch.Tensor) -> None:
    if x.dtype not in _SOURCE_DTYPES:
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("x must have a last dimension of head_dim values, got a scalar")
    check_head_dim(x.shape[-1])


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitude bits and sign nibbles of x in blocks of 16; NaN becomes +0."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    bits = bits.unflatten(-1, (-1, BLOCK_SIZE))
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > _INF_BITS
    sign = ((bits >> 28) & 8).masked_fill(is_nan, 0)
    return magnitude.masked_fill(is_nan, 0), sign


def _scale_ratio(magnitude: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Largest finite magnitude of a block over 6 * global_scale, in fp32."""
    finite = magnitude.masked_fill(magnitude == _INF_BITS, 0)
    amax = finite.amax(-1).view(torch.float32)
    # A tensor divisor: dividing by a host number multiplies by a reciprocal on CUDA.
    divisor = torch.full_like(amax, global_scale) * 6.0
    return amax / divisor


def _e4m3_codes(ratio: torch.Tensor) -> torch.Tensor:
    """Round non-negative fp32 to E4M3 codes, nearest even, not saturated (int32)."""
    bits = ratio.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Adding 2^14 leaves the multiple of 2^-9 nearest to ratio in the low mantissa bits.
    subnormal = (ratio + 16384.0).view(torch.int32) - 0x46800000
    return torch.where(ratio < 2.0**-6, subnormal, normal)


def _e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of non-negative E4M3 codes below 0x7F (int32)."""
    normal = ((codes << 20) + 0x3C000000).view(torch.float32)
    return torch.where(codes < 8, codes.to(torch.float32) * 2.0**-9, normal)


def encode(
    x: torch.Tensor, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to NVFP4; x is left unchanged.

    Sizes: D head dim, a multiple of 16
      x       [..., D]      fp32 | fp16 | bf16   any strides
      codes   [..., D//2]   uint8                returned; low nibble = even element
      scales  [..., D//16]  uint8                returned; view as float8_e4m3fn
    Numerics: fp32. Scale: nearest even E4M3, saturated at 0x7E. Elements: nearest even E2M1,
      saturated at 6. A zero result keeps the element's sign bit. NaN becomes +0. +-Inf becomes
      +-6 * scale of its block and does not count for the scale; where the rest of the block
      encodes to zero, the scale is 0x7E. A block whose scale rounds to 0 has 0 in every code.
    Runs on: any device; allocates temporaries
    Raises: ValueError for another dtype, a D that is no multiple of 16, a bad global scale
    """
    _check_source(x)
    global_scale = check_global_scale(global_scale)
    magnitude, sign = _blocks(x)
    has_inf = magnitude.amax(-1) == _INF_BITS
    scales = _e4m3_codes(_scale_ratio(magnitude, global_scale)).clamp(max=E4M3_MAX_CODE)
    scales = torch.where((scales == 0) & has_inf, E4M3_MAX_CODE, scales)

    step = (_e4m3_values(scales) * global_scale).unsqueeze(-1)
    value = magnitude.view(torch.float32)
    # Code n is reached at the midpoint below its value; an even code wins the tie.
    codes = (value > 0.25 * step).to(torch.int32)
    codes += value >= 0.75 * step
    codes += value > 1.25 * step
    codes += value >= 1.75 * step
    codes += value > 2.5 * step
    codes += value >= 3.5 * step
    codes += value > 5.0 * step
    codes = (codes | sign).masked_fill((scales == 0).unsqueeze(-1), 0)

    codes = codes.flatten(-2)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.to(torch.uint8), scales.to(torch.uint8)


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the values of encoded rows: (E2M1 value * block scale, exact) * global scale.

    Sizes: D head dim
      codes   [..., D//2]   uint8
      scales  [..., D//16]  uint8 | float8_e4m3fn
      result  [..., D]      dtype
    Numerics: fp32, then one conversion to dtype. Scale bytes that encode never writes decode as
      E4M3 has them: the sign bit negates, 0x7F and 0xFF are NaN.
    Raises: ValueError when the two do not fit each other, for other dtypes, a bad global scale
    """
    global_scale = check_global_scale(global_scale)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    if scales.dtype == torch.float8_e4m3fn:
        scales = scales.view(torch.uint8)
    if scales.dtype != torch.uint8:
        raise ValueError(f"scales must be uint8 or float8_e4m3fn, got {scales.dtype}")
    if codes.ndim == 0 or codes.shape[:-1] + (codes.shape[-1] // 8,) != scales.shape or (
        codes.shape[-1] % 8
    ):
        raise ValueError(
            f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not fit: "
            "want [..., D//2] and [..., D//16]"
        )
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = table[nibbles.to(torch.int64)].unflatten(-1, (-1, BLOCK_SIZE))

    byte = scales.to(torch.int32)
    magnitude = byte & 0x7F
    scale = _e4m3_values(magnitude)
    scale = torch.where(magnitude == 0x7F, torch.nan, scale)
    scale = torch.where(byte >= 0x80, -scale, scale)
    return ((values * scale.unsqueeze(-1)) * global_scale).flatten(-2).to(dtype)


def encode_stats(x: torch.Tensor, global_scale: float) -> EncodeStats:
    """Count what encode(x, global_scale) would replace, clip or lose. Synchronizes."""
    _check_source(x)
    global_scale = check_global_scale(global_scale)
    magnitude, _ = _blocks(x)
    is_inf = magnitude == _INF_BITS
    raw = _e4m3_codes(_scale_ratio(magnitude, global_scale))
    finite_nonzero = ((magnitude > 0) & ~is_inf).any(-1)
    return EncodeStats(
        blocks=raw.numel(),
        nan=int(torch.isnan(x).sum()),
        inf=int(is_inf.sum()),
        saturated_blocks=int((raw > E4M3_MAX_CODE).sum()),
        vanished_blocks=int((finite_nonzero & (raw == 0) & ~is_inf.any(-1)).sum()),
    )
