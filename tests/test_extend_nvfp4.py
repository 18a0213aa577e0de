"""extend_nvfp4 (prefill over a packed prefix) against fp32 attention over the decoded values."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from reference_attention import (
    Pool,
    assert_close_enough,
    attend,
    fill_slots,
    indptr,
    make_pool,
    paged_slots,
    visible_keys,
)

from sglang_fp4kv.kernels._plan import (
    INTERPRETER,
    SM120_SHARED_BYTES,
    SM90_SHARED_BYTES,
    DeviceLimits,
    ExtendTile,
    device_limits,
    plan_extend,
)
from sglang_fp4kv.kernels.extend_nvfp4 import extend_nvfp4

PREFIX = [0, 300, 1, 600, 16]
NEW = [40, 9, 33, 1, 0]


@dataclass
class Case:
    pool: Pool
    prefix: list[torch.Tensor]  # slots of each request, on the CPU
    new: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_dtype: torch.dtype = torch.int64
    options: dict = field(default_factory=dict)

    def run(self, out=None, **extra):
        device = self.q.device
        out = torch.full_like(self.q, float("nan")) if out is None else out
        extend_nvfp4(
            self.q,
            self.k,
            self.v,
            out,
            *self.pool.sides,
            indptr(self.new, self.index_dtype).to(device),
            indptr([len(p) for p in self.prefix], self.index_dtype).to(device),
            torch.cat(self.prefix).to(device, self.index_dtype),
            **{
                "max_extend_len": max(self.new),
                "sm_scale": self.q.shape[-1] ** -0.5,
                **self.pool.scales,
                **self.options,
                **extra,
            },
        )
        return out

    def expect(self, masks=None):
        low = torch.float16 if self.q.dtype == torch.float16 else torch.bfloat16
        results = {None: [], low: []}
        start = 0
        for i, (prefix, new) in enumerate(zip(self.prefix, self.new, strict=True)):
            rows = slice(start, start + new)
            start += new
            if new == 0:
                continue
            k, v = self.pool.decoded(prefix.to(self.q.device))
            visible = visible_keys(
                new,
                len(prefix) + new,
                len(prefix),
                prefix=len(prefix),
                causal=self.options.get("causal", True),
                window=self.options.get("sliding_window_size", -1),
                block_mask=None if masks is None else masks[i].to(self.q.device),
                device=self.q.device,
            )
            for dtype, parts in results.items():
                parts.append(
                    attend(
                        self.q[rows],
                        torch.cat((k, self.k[rows].float())),
                        torch.cat((v, self.v[rows].float())),
                        visible,
                        self.q.shape[-1] ** -0.5,
                        self.options.get("logit_cap", 0.0),
                        dtype,
                    )
                )
        return torch.cat(results[None]), torch.cat(results[low])

    def check(self, out, **kwargs):
        return assert_close_enough(out, *self.expect(**kwargs))


def make_case(
    device,
    head_dim=64,
    group=1,
    prefix=PREFIX,
    new=NEW,
    page_size=1,
    dtype=torch.bfloat16,
    seed=0,
    kv_heads=2,
    **options,
):
    g = torch.Generator().manual_seed(seed)
    num_slots = (sum(-(-n // page_size) for n in prefix) + 3) * page_size
    pool = make_pool(num_slots, kv_heads, head_dim, device)
    owned = paged_slots(prefix, page_size, num_slots, g)
    fill_slots(pool, torch.cat(owned), g)
    q, k, v = (
        torch.randn(sum(new), heads, head_dim, generator=g).to(device, dtype)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    return Case(pool, owned, new, q, k, v * 0.3, options=options)


def small_tile(case):
    """Several tiles on every axis, for the interpreter's sake not the default."""
    if case.q.device.type == "cuda":
        return plan_extend(case.q.shape[-1], 10**6, device_limits(case.q.device))
    return ExtendTile(block_m=64, block_n=128, chunk_n=16, num_warps=4, num_stages=1)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "head_dim, group, page_size, dtype, index_dtype",
    [
        (64, 1, 1, torch.bfloat16, torch.int32),
        (80, 5, 16, torch.bfloat16, torch.int64),
        (96, 7, 64, torch.float16, torch.int32),
        (128, 8, 16, torch.bfloat16, torch.int64),
        (256, 6, 64, torch.bfloat16, torch.int32),
        (16, 2, 1, torch.float32, torch.int64),
    ],
)
def test_extend_matches_reference(device, head_dim, group, page_size, dtype, index_dtype):
    case = make_case(device, head_dim, group, page_size=page_size, dtype=dtype)
    case.index_dtype = index_dtype
    case.check(case.run())
    case.check(case.run(tile=small_tile(case)))


@pytest.mark.interpreter
def test_empty_prefix_and_longer_max(device):
    case = make_case(device, 64, 2, [0, 0], [37, 1])
    case.check(case.run(max_extend_len=200))


@pytest.mark.interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_logit_cap_and_causal(device, causal):
    case = make_case(device, 64, 3, [70, 0], [20, 9], logit_cap=5.0, causal=causal)
    case.q *= 8
    case.check(case.run())


@pytest.mark.interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("clipped", [True, False])
def test_sliding_window(device, causal, clipped):
    """clipped: as SGLang builds it, kv_indices list the last window keys of each prefix."""
    window = 50
    case = make_case(
        device, 80, 2, [0, 300, 30, 200], [120, 70, 1, 0], sliding_window_size=window, causal=causal
    )
    whole = case.run()
    case.check(whole)
    if clipped:
        short = replace(case, prefix=[p[max(len(p) - window, 0) :] for p in case.prefix])
        short.check(short.run(tile=small_tile(case)))
        assert (short.run().float() - whole.float()).abs().max() < 0.01


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [-1, 40])
def test_custom_mask(device, window):
    """The mask replaces causal within the chunk; its prefix part is junk nobody reads."""
    prefix, new = [100, 0, 30], [12, 40, 3]
    case = make_case(device, 64, 2, prefix, new, sliding_window_size=window)
    g = torch.Generator().manual_seed(7)
    masks, flat, offsets, sizes = [], [], [], []
    for i, (p, n) in enumerate(zip(prefix, new, strict=True)):
        keep = min(p, window) if window > 0 else p
        case.prefix[i] = case.prefix[i][p - keep :]
        offsets.append(p - keep)
        mask = torch.rand(n, n, generator=g) < 0.5
        mask.fill_diagonal_(True)
        masks.append(mask)
        junk = torch.randint(0, 2, (n, p), generator=g).bool()
        flat.append(torch.cat((junk, mask), 1).flatten())
        sizes.append(n * (p + n))
    out = case.run(
        custom_mask=torch.cat(flat).to(device),
        mask_indptr=indptr(sizes, torch.int64).to(device),
        window_kv_offsets=torch.tensor(offsets, device=device) if window > 0 else None,
    )
    case.check(out, masks=masks)


@pytest.mark.interpreter
def test_poison_does_not_leak(device):
    """Slots without an owner have NaN scales; tokens after a request's chunk are NaN."""
    case = make_case(device, 96, 2, [3, 130], [5, 6])
    rows = case.q.shape[0]
    for name in ("q", "k", "v"):
        x = getattr(case, name)
        padded = torch.full((rows + 7, *x.shape[1:]), float("nan"), dtype=x.dtype, device=device)
        padded[:rows] = x
        setattr(case, name, padded)
    out = case.run()
    assert torch.isnan(out[rows:]).all()  # not written
    for name in ("q", "k", "v"):
        setattr(case, name, getattr(case, name)[:rows])
    case.check(out[:rows])


@pytest.mark.interpreter
def test_strided_inputs_and_float8_scales(device):
    case = make_case(device, 64, 3, [90, 0], [7, 12])
    expect = case.run()
    tokens, heads, head_dim = case.q.shape
    fused = torch.full((tokens, heads + 4, head_dim), 3.0, dtype=case.q.dtype, device=device)
    fused[:, :heads], fused[:, heads : heads + 2], fused[:, heads + 2 :] = case.q, case.k, case.v
    sides = case.pool.sides
    strided = replace(
        case,
        q=fused[:, :heads],
        k=fused[:, heads : heads + 2],
        v=fused[:, heads + 2 :],
        pool=Pool(
            sides[0],
            sides[1].view(torch.float8_e4m3fn),
            sides[2],
            sides[3].view(torch.float8_e4m3fn),
            **case.pool.scales,
        ),
    )
    wide = torch.full((tokens, heads, 2 * head_dim), 9.0, dtype=case.q.dtype, device=device)
    strided.run(out=wide[..., :head_dim])
    assert torch.equal(wide[..., :head_dim], expect)
    assert (wide[..., head_dim:] == 9).all()


@pytest.mark.interpreter
def test_nothing_to_do_leaves_out_unchanged(device):
    case = make_case(device, 64, 1, [5], [3])
    out = torch.full_like(case.q, 4.0)
    case.run(out=out, max_extend_len=0)
    assert (out == 4).all()
    none = replace(case, q=case.q[:0], k=case.k[:0], v=case.v[:0], new=[0])
    none.run(out=out[:0])


BAD = {
    "q must be \\[tokens, heads, head_dim\\], got \\(3, 128\\)": {"q": lambda c: c.q.flatten(1)},
    "k must be torch.bfloat16 like q, got torch.float16": {"k": lambda c: c.k.half()},
    "v must have head dim 64 like q, got 48": {"v": lambda c: c.v[..., :48]},
    "v must be contiguous in its last dim, got stride 2": {
        "v": lambda c: c.v.repeat_interleave(2, -1)[..., ::2]
    },
    "head_dim must be a positive multiple of 16, got 40": {"q": lambda c: c.q[..., :40]},
    "k must be \\[3, 2, 64\\], got \\(2, 2, 64\\)": {"k": lambda c: c.k[:2]},
    "v must be \\[3, 2, 64\\], got \\(3, 1, 64\\)": {"v": lambda c: c.v[:, :1]},
    "out must be \\(3, 2, 64\\) like q, got \\(2, 2, 64\\)": {"out": lambda c: c.q[:2].clone()},
    "k_scales must be uint8 or float8_e4m3fn, got torch.int8": {
        "k_scales": lambda c: c.pool.k_scales.view(torch.int8)
    },
    "v_codes must have 2 heads, got 1": {
        "v_codes": lambda c: c.pool.v_codes[:, :1],
        "v_scales": lambda c: c.pool.v_scales[:, :1],
    },
    "qo_indptr must have at least 1 entries, got 0": {
        "qo_indptr": torch.zeros(0, dtype=torch.int32)
    },
    "kv_indptr must have at least 2 entries, got 1": {
        "kv_indptr": torch.zeros(1, dtype=torch.int32)
    },
    "kv_indptr must be int32 or int64, got torch.int16": {
        "kv_indptr": torch.zeros(2, dtype=torch.int16)
    },
    "kv_indices must be int32 or int64, got torch.float32": {"kv_indices": torch.zeros(5)},
    "custom_mask needs mask_indptr, got None": {"custom_mask": torch.ones(24, dtype=torch.bool)},
    "global scale must be finite and > 0": {"v_global_scale": float("nan")},
    "logit_cap must be 0 \\(none\\) or positive, got -2": {"logit_cap": -2},
    "max_extend_len must not be negative, got -1": {"max_extend_len": -1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    case = make_case("cpu", 64, 1, [5], [3])
    args = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "out": case.q.clone(),
        "k_codes": case.pool.k_codes,
        "k_scales": case.pool.k_scales,
        "v_codes": case.pool.v_codes,
        "v_scales": case.pool.v_scales,
        "qo_indptr": indptr([3]),
        "kv_indptr": indptr([5]),
        "kv_indices": case.prefix[0],
        "max_extend_len": 3,
        "sm_scale": 0.125,
        **case.pool.scales,
    }
    args |= {k: v(case) if callable(v) else v for k, v in BAD[message].items()}
    with pytest.raises(ValueError, match=message):
        extend_nvfp4(**args)


def test_tiles_follow_the_device():
    h200 = DeviceLimits(132, SM90_SHARED_BYTES, 90)
    spark = DeviceLimits(48, SM120_SHARED_BYTES, 121)
    for head_dim in (64, 80, 128, 256):
        big, small = (plan_extend(head_dim, 10**5, x) for x in (h200, spark))
        assert small.block_m * small.block_n <= big.block_m * big.block_n
    assert plan_extend(128, 48, h200).block_m == 64
    assert plan_extend(128, 5, INTERPRETER).block_m == 16


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, heads, group", [(64, 2, 3), (128, 8, 4), (256, 4, 6)])
def test_long_prefixes(device, head_dim, heads, group):
    for prefix, new in (([20000], [300]), ([0, 8192, 1, 3000], [1500, 7, 600, 129])):
        case = make_case(device, head_dim, group, prefix, new, 16, kv_heads=heads)
        case.check(case.run())


@pytest.mark.gpu
def test_one_row_block_at_the_longest_prefix(device):
    case = make_case(device, 256, 6, [131072 - 8], [8], 16, kv_heads=1)
    case.check(case.run())
