"""Bit layout of the NVFP4 KV cache and its byte arithmetic. Standard library only.

One row is one token's K (or V) of one KV head: D values, split into blocks of 16 along head_dim.

  codes   [..., D//2]   uint8         two E2M1 codes a byte; the low nibble is the even element
  scales  [..., D//16]  float8_e4m3   one per block, non-negative, 0x00 to 0x7E, unitless
  global scale          float         one per layer and side (K or V), not stored in the pool

decoded = E2M1_VALUES[code] * e4m3(scale) * global_scale

Full precision holds while a block's largest magnitude lies between FULL_PRECISION_MIN and
FULL_PRECISION_MAX times the global scale. Above, it saturates; below, the block scale is an E4M3
subnormal and the block's absolute error stops shrinking; below VANISH_MAX times the global scale
the block becomes zero.
"""

import struct

BLOCK_SIZE = 16
CODES_PER_BYTE = 2

# Bytes of one value that is stored as it is, by the names SGLang and config.json give the dtypes.
VALUE_BYTES = {
    "float32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
# KV formats of E2M1 codes with a scale of one byte for each block of 16.
PACKED_DTYPES = ("nvfp4", "fp4_mx_block16")

# Code 0..7; codes 8..15 are the same magnitudes with the sign bit (8) set.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)
E2M1_MAX = 6.0

E4M3_MAX_CODE = 126  # 0x7E; 0x7F is NaN and never written as a scale
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E4M3_MIN_SUBNORMAL = 2.0**-9

FULL_PRECISION_MIN = E2M1_MAX * E4M3_MIN_NORMAL  # 0.09375
FULL_PRECISION_MAX = E2M1_MAX * E4M3_MAX  # 2688.0
VANISH_MAX = E2M1_MAX * E4M3_MIN_SUBNORMAL / 2  # 0.00586; a tie rounds to zero

# Keeps every product of the codec a normal fp32 number.
GLOBAL_SCALE_MIN = 2.0**-100
GLOBAL_SCALE_MAX = 2.0**100

# Used where a checkpoint brings no scale; powers of two, so that products stay exact. Block maxima
# with full precision: K 0.047 to 1344, V 0.0059 to 168.
#
# K: models whose k_proj has a bias have boundary layers with huge K: the bias norm of Qwen2.5-7B is
#   about 605 in layer 0 and 921 in layer 27 (github.com/ggml-org/llama.cpp/issues/21385), and an
#   element cannot exceed norm plus activation. 2^-1 is the smallest power that takes 921
#   unsaturated; it leaves no subnormal block scale on SmolLM2-135M (block maxima 0.063 to 24.2).
# V: small, and smallest in the first layer: block maxima 0.021 to 15.4 on SmolLM2-135M, median 0.08
#   in layer 0. 2^-4 leaves a factor of 3.6 below that and 10.9 above; 2^0 would make 1.9 % of
#   the block scales subnormal.
# Counts for 2^-8 to 2^2: tests/bench/results/global_scale_smollm2.json.
DEFAULT_K_GLOBAL_SCALE = 2.0**-1
DEFAULT_V_GLOBAL_SCALE = 2.0**-4


def check_head_dim(head_dim: int) -> int:
    """Return head_dim; raise ValueError when it is not a positive multiple of 16."""
    if isinstance(head_dim, bool) or not isinstance(head_dim, int):
        raise ValueError(f"head_dim must be an int, got {head_dim!r}")
    if head_dim <= 0 or head_dim % BLOCK_SIZE:
        raise ValueError(
            f"head_dim must be a positive multiple of {BLOCK_SIZE}, got {head_dim}"
        )
    return head_dim


def check_global_scale(global_scale: float) -> float:
    """Return global_scale rounded to fp32; raise ValueError unless it is finite, > 0 and usable."""
    value = float(global_scale)
    if not GLOBAL_SCALE_MIN <= value <= GLOBAL_SCALE_MAX:  # false for NaN
        raise ValueError(
            "global scale must be finite and > 0 (within 2^-100 to 2^100), "
            f"got {global_scale!r}"
        )
    # The kernels take fp32; the interpreter computes with this number in double.
    return struct.unpack("f", struct.pack("f", value))[0]


def packed_bytes(head_dim: int) -> int:
    """Bytes of E2M1 codes in one row."""
    return check_head_dim(head_dim) // CODES_PER_BYTE


def packed_head_dim(packed: int) -> int:
    """The head dim whose codes take `packed` bytes: packed_bytes read backwards."""
    return check_head_dim(packed * CODES_PER_BYTE)


def scale_bytes(head_dim: int) -> int:
    """Bytes of E4M3 block scales in one row."""
    return check_head_dim(head_dim) // BLOCK_SIZE


def side_bytes(head_dim: int) -> int:
    """Bytes of one row, codes and scales: D/2 + D/16."""
    return packed_bytes(head_dim) + scale_bytes(head_dim)


def row_bytes(head_dim: int, dtype: str = "nvfp4") -> int:
    """Bytes of one row in a pool of ``dtype``: D/2 + D/16 where it is packed, D values elsewhere.

    Raises: ValueError for another dtype, or a head_dim the format cannot hold.
    """
    if dtype in PACKED_DTYPES:
        return side_bytes(head_dim)
    if dtype not in VALUE_BYTES:
        known = ", ".join((*PACKED_DTYPES, *VALUE_BYTES))
        raise ValueError(f"dtype must be one of {known}, got {dtype!r}")
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim <= 0:
        raise ValueError(f"head_dim must be a positive int, got {head_dim!r}")
    return head_dim * VALUE_BYTES[dtype]


def bytes_per_token(
    head_dim: int,
    kv_heads: int,
    layers: int = 1,
    *,
    dtype: str = "nvfp4",
    v_head_dim: int | None = None,
) -> int:
    """Bytes one token takes in a pool of ``dtype``: K and V, all KV heads, all layers.

    The one place where they are computed: pools, quantizer, readers, planner and rules ask here.
    ``v_head_dim``: V's width where it is not K's.
    """
    if kv_heads <= 0:
        raise ValueError(f"kv_heads must be positive, got {kv_heads}")
    if layers < 0:
        raise ValueError(f"layers must not be negative, got {layers}")
    v_row = row_bytes(head_dim if v_head_dim is None else v_head_dim, dtype)
    return (row_bytes(head_dim, dtype) + v_row) * kv_heads * layers
