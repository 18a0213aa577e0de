"""The interpreter's corrections against ml_dtypes, torch and numpy.

Under TRITON_INTERPRET=1 the kernels below run in the corrected interpreter. On a GPU they run as
they are, which checks that the references describe the hardware.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sglang_fp4kv.embedded import interpreter_fixes as fixes

FP8 = {
    "fp8e4nv": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn, 448.0),
    "fp8e5": (ml_dtypes.float8_e5m2, torch.float8_e5m2, 57344.0),
}
SPECIAL = np.float32(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 448.0, 464.0, 465.0]
)


@pytest.fixture(scope="module", autouse=True)
def corrected():
    fixes.apply()


def ties(dtype) -> np.ndarray:
    """The midpoints between all neighbouring finite values of a narrow format, and around them."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    with np.errstate(invalid="ignore"):  # some of the patterns are NaN
        values = np.arange(np.iinfo(bits).max + 1).astype(bits).view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    return np.concatenate([middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)])


def random_fp32(count: int, seed: int) -> np.ndarray:
    """Random bit patterns: every exponent, subnormals, infinities and NaN."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def narrowed(values: np.ndarray, dtype, largest: float) -> np.ndarray:
    """The bits that ml_dtypes gives, saturated as PTX saturates."""
    with np.errstate(invalid="ignore"):
        return np.clip(values, -largest, largest).astype(dtype).view(np.uint8)


def test_every_bf16_widens_as_in_torch():
    bits = np.arange(2**16, dtype=np.uint16)
    wanted = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(fixes.bf16_bits_to_fp32(bits), wanted, equal_nan=True)


@pytest.mark.parametrize("values", [random_fp32(400_000, 1), ties(ml_dtypes.bfloat16)])
def test_fp32_rounds_to_bf16_as_in_torch(values):
    bits = fixes.fp32_to_bf16_bits(values)
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    assert np.array_equal(bits[number], wanted[number])
    assert np.isnan(fixes.bf16_bits_to_fp32(bits[~number])).all()


def test_fp32_truncates_to_bf16():
    values = random_fp32(10_000, 2)
    values = values[~np.isnan(values)]
    wanted = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(fixes.fp32_to_bf16_bits(values, truncate=True), wanted)


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_widens_as_in_ml_dtypes(name):
    bits = np.arange(256, dtype=np.uint8)
    wanted = bits.view(FP8[name][0]).astype(np.float32)
    assert np.array_equal(fixes.fp8_bits_to_fp32(bits, name), wanted, equal_nan=True)


@pytest.mark.parametrize("name", FP8)
def test_fp32_rounds_to_fp8_and_saturates(name):
    dtype, _, largest = FP8[name]
    values = np.concatenate([random_fp32(400_000, 3), ties(dtype), SPECIAL])
    wanted = narrowed(values, dtype, largest)
    bits = fixes.fp32_to_fp8_bits(values, name)
    number = ~np.isnan(values)
    assert np.array_equal(bits[number], wanted[number])
    assert np.isnan(fixes.fp8_bits_to_fp32(bits[~number], name)).all()


def test_nothing_is_changed_without_the_interpreter(monkeypatch):
    for value in (None, "0"):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if value is not None:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        monkeypatch.setattr(fixes, "_applied", False)
        assert fixes.apply() is False and fixes.is_applied() is False


# From here on: kernels.


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def _truncate_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    tl.store(out_ptr + i, a + b)
    tl.store(out_ptr + N + i, a - b)
    tl.store(out_ptr + 2 * N + i, a * b)
    tl.store(out_ptr + 3 * N + i, -a)
    tl.store(out_ptr + 4 * N + i, tl.abs(a))
    tl.store(out_ptr + 5 * N + i, tl.where(a < b, a, b))
    tl.store(out_ptr + 6 * N + i, a * 1.5)
    tl.store(out_ptr + 7 * N + i, tl.full([N], -2.25, tl.bfloat16) + a)


@triton.jit
def _mask_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, (tl.load(a_ptr + i) > tl.load(b_ptr + i)).to(out_ptr.dtype.element_ty))


@triton.jit
def _reduce_kernel(x_ptr, sum_ptr, max_ptr, cum_ptr, R: tl.constexpr, C: tl.constexpr):
    r, c = tl.arange(0, R), tl.arange(0, C)
    x = tl.load(x_ptr + r[:, None] * C + c[None, :])
    tl.store(sum_ptr + r, tl.sum(x, 1))
    tl.store(max_ptr + r, tl.max(x, 1))
    tl.store(cum_ptr + r[:, None] * C + c[None, :], tl.cumsum(x, 1))


def padded(values) -> np.ndarray:
    values = np.asarray(values, np.float32)
    size = 1 << (len(values) - 1).bit_length()
    return np.concatenate([values, np.zeros(size - len(values), np.float32)])


def cast(values: torch.Tensor, dtype: torch.dtype, device) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype, device=device)
    _cast_kernel[(1,)](values.to(device), out, N=values.numel())
    return out.cpu()


@pytest.mark.interpreter
def test_cast_fp32_to_bf16(device):
    values = torch.from_numpy(padded(np.concatenate([random_fp32(3000, 4), SPECIAL])))
    got = cast(values, torch.bfloat16, device)
    assert torch.equal(got.nan_to_num(7.0), values.bfloat16().nan_to_num(7.0))


@pytest.mark.interpreter
def test_cast_fp32_to_bf16_towards_zero(device):
    values = torch.from_numpy(padded(np.nan_to_num(random_fp32(3000, 5), nan=1.0)))
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=device)
    _truncate_kernel[(1,)](values.to(device), out, N=values.numel())
    wanted = (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.interpreter
def test_cast_bf16_to_fp32_keeps_subnormals(device):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    got = cast(values, torch.float32, device)
    assert torch.equal(got.nan_to_num(7.0), values.float().nan_to_num(7.0))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_to_fp8(device, name, source):
    numpy_dtype, dtype, largest = FP8[name]
    values = np.concatenate([random_fp32(2000, 6), ties(numpy_dtype), SPECIAL])
    values = torch.from_numpy(padded(values)).to(source)
    got = cast(values, dtype, device).view(torch.uint8).numpy()
    exact = values.float().numpy()
    wanted = narrowed(exact, numpy_dtype, largest)
    number = ~np.isnan(exact)
    assert np.array_equal(got[number], wanted[number])
    assert np.isnan(got[~number].view(numpy_dtype).astype(np.float32)).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_every_fp8(device, name, target):
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = cast(bits.view(FP8[name][1]), target, device).float().numpy()
    wanted = bits.numpy().view(FP8[name][0]).astype(np.float32)
    assert np.array_equal(got, wanted, equal_nan=True)


@pytest.mark.interpreter
def test_cast_between_int_and_bf16(device):
    whole = torch.arange(-256, 256, dtype=torch.int32)
    assert torch.equal(cast(whole, torch.bfloat16, device), whole.bfloat16())
    values = whole.bfloat16() * 0.5
    assert torch.equal(cast(values, torch.int32, device), values.to(torch.int32))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("m, n, k", [(16, 16, 32), (64, 32, 64), (16, 128, 128)])
def test_dot(device, dtype, m, n, k):
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = torch.randn(k, n, generator=generator).to(dtype)
    out = torch.empty(m, n, device=device)
    _dot_kernel[(1,)](a.to(device), b.to(device), out, M=m, N=n, K=k)
    wanted = a.double() @ b.double()
    # Products of such operands are exact in fp32; only the order of the sum differs.
    bound = (a.double().abs() @ b.double().abs()) * k * 2.0**-24
    if device.type == "cuda":  # fp8 tensor cores keep fewer bits of a sum
        bound = bound + 2.0**-9 * wanted.abs().max()
    assert ((out.cpu().double() - wanted).abs() <= bound).all()


@pytest.mark.interpreter
def test_bf16_arithmetic_rounds_once(device):
    generator = torch.Generator().manual_seed(8)
    a, b = (
        (torch.randn(512, generator=generator) * 4.0 ** torch.randint(-4, 5, (512,))).bfloat16()
        for _ in range(2)
    )
    out = torch.empty(8, 512, dtype=torch.bfloat16, device=device)
    _arithmetic_kernel[(1,)](a.to(device), b.to(device), out, N=512)
    wanted = [a + b, a - b, a * b, -a, a.abs(), torch.minimum(a, b), a * 1.5, a - 2.25]
    for row, (got, want) in enumerate(zip(out.cpu(), wanted, strict=True)):
        assert torch.equal(got, want), f"row {row}"


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32, torch.int32])
def test_a_mask_casts_to_zero_and_one(device, dtype, target):
    generator = torch.Generator().manual_seed(9)
    a, b = (torch.randn(64, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(64, dtype=target, device=device)
    _mask_kernel[(1,)](a.to(device), b.to(device), out, N=64)
    assert torch.equal(out.cpu(), (a > b).to(target))


@pytest.mark.interpreter
def test_bf16_reductions(device):
    # Small whole numbers: every order of summation gives the same bf16.
    x = torch.randint(-4, 5, (4, 16), generator=torch.Generator().manual_seed(10)).bfloat16()
    total, largest = (torch.empty(4, dtype=torch.bfloat16, device=device) for _ in range(2))
    running = torch.empty(4, 16, dtype=torch.bfloat16, device=device)
    _reduce_kernel[(1,)](x.to(device), total, largest, running, R=4, C=16)
    assert torch.equal(total.cpu(), x.float().sum(1).bfloat16())
    assert torch.equal(largest.cpu(), x.amax(1))
    assert torch.equal(running.cpu(), x.float().cumsum(1).bfloat16())


@pytest.mark.interpreter
@pytest.mark.parametrize("first", [torch.float32, torch.int32])
def test_types_are_remembered_without_mixing_them_up(device, first):
    for dtype in (first, torch.int64, torch.float32, torch.int32):
        values = torch.arange(32).to(dtype)
        assert torch.equal(cast(values, torch.float32, device), values.float())
        assert torch.equal(cast(values[:16].clone(), torch.int64, device), torch.arange(16))


# SGLang's own attention kernels, in BF16.


def reference_attention(q, k, v, causal_from=None):
    """q [T, H, D], k and v [L, KV, D] -> fp64 [T, H, D]; query t sees keys to causal_from + t."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.double(), k) * q.shape[-1] ** -0.5
    if causal_from is not None:
        hidden = torch.arange(k.shape[0]) > causal_from + torch.arange(q.shape[0])[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), v)


def bf16(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close_enough(got, wanted):
    """The error of BF16 attention: the weights and the result are rounded to 8 bits."""
    error = (got.double().cpu() - wanted).abs().max().item()
    return error <= 2.0**-7 * max(1.0, wanted.abs().max().item())


@pytest.mark.interpreter
@pytest.mark.parametrize("length", [1, 33, 300])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (2, 2)])
def test_sglang_decode_attention(device, length, heads, kv_heads):
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    q, k, v = (
        bf16(1, heads, 64, seed=1),
        bf16(512, kv_heads, 64, seed=2),
        bf16(512, kv_heads, 64, seed=3),
    )
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(4))[:length]
    out = torch.empty_like(q, device=device)
    decode_attention_fwd(
        q.to(device),
        k.to(device),
        v.to(device),
        out,
        torch.tensor([0, length], dtype=torch.int32, device=device),
        slots.to(device),
        torch.empty(1, heads, 2, 64, device=device),
        torch.empty(1, heads, 2, device=device),
        torch.tensor([2], dtype=torch.int32, device=device),
        2,
        64**-0.5,
        1.0,
        1.0,
    )
    assert close_enough(out, reference_attention(q, k[slots], v[slots]))


@pytest.mark.interpreter
@pytest.mark.parametrize("prefix, new", [(0, 5), (100, 8), (70, 130)])
@pytest.mark.parametrize("causal", [True, False])
def test_sglang_extend_attention(device, prefix, new, causal):
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    q, k_new, v_new = (bf16(new, h, 64, seed=s) for s, h in ((5, 4), (6, 2), (7, 2)))
    k, v = (bf16(512, 2, 64, seed=s) for s in (8, 9))
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(10))[:prefix]
    out = torch.empty_like(q, device=device)
    extend_attention_fwd(
        q.to(device),
        k_new.to(device),
        v_new.to(device),
        out,
        k.to(device),
        v.to(device),
        torch.tensor([0, new], dtype=torch.int32, device=device),
        torch.tensor([0, prefix], dtype=torch.int32, device=device),
        slots.to(device),
        None,
        causal,
        None,
        new,
        1.0,
        1.0,
    )
    keys, values = torch.cat([k[slots], k_new]), torch.cat([v[slots], v_new])
    assert close_enough(out, reference_attention(q, keys, values, prefix if causal else None))


@triton.jit
def _scaled_kernel(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < N) * (2 if TWICE else 1), i < N)


def _autotuned(**options):
    """The kernel above with a heuristic under an autotuner of two block sizes."""
    configs = [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64}, pre_hook=options.pop("pre_hook", None))]
    tuned = triton.autotune(configs, key=["N"], **options)
    return tuned(triton.heuristics({"TWICE": lambda args: args["N"] > 50})(_scaled_kernel))


@pytest.mark.interpreter
def test_an_autotuned_kernel_runs_by_the_first_configuration_that_is_left(device):
    x = torch.arange(100.0, device=device)
    out, seen = torch.zeros_like(x), []

    def keep_the_large(configs, named_args, **kwargs):
        return [config for config in configs if config.kwargs["BLOCK"] == 64]

    kernel = _autotuned(
        prune_configs_by={"early_config_prune": keep_the_large},
        pre_hook=lambda args: seen.append((args["N"], args["BLOCK"])),
    )
    kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out, 100)
    assert torch.equal(out, 2 * x)
    assert kernel.best_config.kwargs == {"BLOCK": 64} and (100, 64) in seen


@pytest.mark.interpreter
def test_no_driver_times_an_autotuned_kernel(device):
    if not fixes.is_applied():
        pytest.skip("on a GPU a driver does")
    x = torch.arange(40.0)
    out = torch.zeros_like(x)
    kernel = _autotuned(do_bench=lambda *args, **kwargs: pytest.fail("timed"))
    kernel[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, out, 40)
    assert torch.equal(out, x) and kernel.best_config.kwargs == {"BLOCK": 16}
