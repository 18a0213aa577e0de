import math
import subprocess
import sys

import pytest

from sglang_fp4kv import formats


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_row_bytes(head_dim):
    assert formats.packed_bytes(head_dim) * 2 == head_dim
    assert formats.scale_bytes(head_dim) * 16 == head_dim
    assert formats.side_bytes(head_dim) == head_dim // 2 + head_dim // 16


def test_bytes_per_token():
    assert formats.bytes_per_token(128, 8) == 2 * 8 * 72
    assert formats.bytes_per_token(64, 3, layers=30) == 2 * 3 * 30 * 36
    assert formats.bytes_per_token(64, 3, layers=0) == 0


@pytest.mark.parametrize("head_dim", [0, -16, 8, 72, 100])
def test_head_dim_that_is_no_multiple_of_16_is_refused(head_dim):
    for function in (formats.check_head_dim, formats.packed_bytes, formats.scale_bytes):
        with pytest.raises(ValueError, match=f"multiple of 16, got {head_dim}$"):
            function(head_dim)


@pytest.mark.parametrize("head_dim", [64.0, "64", None, True])
def test_head_dim_that_is_no_int_is_refused(head_dim):
    with pytest.raises(ValueError, match="head_dim must be an int, got"):
        formats.check_head_dim(head_dim)


def test_bad_counts_are_refused():
    with pytest.raises(ValueError, match="kv_heads must be positive, got 0"):
        formats.bytes_per_token(64, 0)
    with pytest.raises(ValueError, match="layers must not be negative, got -1"):
        formats.bytes_per_token(64, 1, -1)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-40, 1e38])
def test_bad_global_scale_is_refused(scale):
    with pytest.raises(ValueError, match="global scale must be finite and > 0.*got"):
        formats.check_global_scale(scale)


def test_global_scale_is_rounded_to_fp32():
    assert formats.check_global_scale(0.1) == 0.10000000149011612
    assert formats.check_global_scale(2) == 2.0


def test_default_scales_are_powers_of_two_with_the_stated_ranges():
    k, v = formats.DEFAULT_K_GLOBAL_SCALE, formats.DEFAULT_V_GLOBAL_SCALE
    assert math.frexp(k)[0] == 0.5 and math.frexp(v)[0] == 0.5
    assert formats.FULL_PRECISION_MAX * k > 921 > formats.FULL_PRECISION_MAX * k / 2
    assert formats.FULL_PRECISION_MIN * v < 0.021 and formats.FULL_PRECISION_MAX * v == 168


def test_needs_the_standard_library_only():
    code = (
        "import sys, sglang_fp4kv.formats; "
        "print([m for m in ('torch', 'triton', 'numpy', 'sglang') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("dtype", "row"), [("nvfp4", 72), ("fp4_mx_block16", 72), ("fp8_e4m3", 128), ("bf16", 256), ("float32", 512)]
)
def test_row_bytes_by_dtype(dtype, row):
    assert formats.row_bytes(128, dtype) == row
    assert formats.bytes_per_token(128, 3, 5, dtype=dtype) == 2 * row * 3 * 5
    wide = formats.row_bytes(192, dtype)
    assert formats.bytes_per_token(192, 3, dtype=dtype, v_head_dim=128) == (wide + row) * 3


def test_rows_that_no_pool_holds_are_refused():
    with pytest.raises(ValueError, match="dtype must be one of nvfp4, .*, got 'int8'"):
        formats.row_bytes(128, "int8")
    for head_dim in (0, -1, 64.0, True):
        with pytest.raises(ValueError, match=f"head_dim must be a positive int, got {head_dim}"):
            formats.row_bytes(head_dim, "bf16")
    with pytest.raises(ValueError, match="multiple of 16, got 72"):
        formats.bytes_per_token(128, 1, v_head_dim=72)
