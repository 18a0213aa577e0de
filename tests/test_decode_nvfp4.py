"""attention_nvfp4 (decode and verify) against fp32 attention over the decoded values."""

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

from sglang_fp4kv.kernels import decode_nvfp4
from sglang_fp4kv.kernels._call import attention_buffers, partial_rows
from sglang_fp4kv.kernels._plan import (
    INTERPRETER,
    SM120_SHARED_BYTES,
    SM90_SHARED_BYTES,
    DeviceLimits,
    device_limits,
    plan_attention,
)
from sglang_fp4kv.kernels._tile import ASM_PURE, ASM_STAGED, PLAIN
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4

KV_HEADS = 2
READERS = ("chosen", "tiled") if torch.cuda.is_available() else ("chosen",)
LENS = [1, 300, 0, 700, 17, 256]


@pytest.fixture(autouse=True, params=READERS)
def reader(request, monkeypatch):
    """On a GPU every test runs with the kernel the plan chooses and with the tiled one."""
    if request.param == "tiled":
        monkeypatch.setattr(
            decode_nvfp4,
            "plan_attention",
            lambda *args, **kwargs: plan_attention(*args, **{**kwargs, "fragments": False}),
        )
    return request.param


@dataclass
class Case:
    """A batch: its pool, index lists and query rows."""

    pool: Pool
    prefix: list[torch.Tensor]  # slots of each request, on the CPU
    block: torch.Tensor | None  # [B, Q] slots, on the CPU
    q: torch.Tensor
    index_dtype: torch.dtype = torch.int64
    options: dict = field(default_factory=dict)

    @property
    def q_per_req(self):
        return self.q.shape[0] // len(self.prefix)

    def run(self, out=None, **extra):
        device = self.q.device
        out = torch.full_like(self.q, float("nan")) if out is None else out
        block = self.block
        attention_nvfp4(
            self.q,
            *self.pool.sides,
            out,
            indptr([len(p) for p in self.prefix]).to(device),
            torch.cat(self.prefix).to(device, self.index_dtype),
            **{
                "q_per_req": self.q_per_req,
                "block_slots": None
                if block is None
                else block.flatten().to(device, self.index_dtype),
                "sm_scale": self.q.shape[-1] ** -0.5,
                **self.pool.scales,
                **self.options,
                **extra,
            },
        )
        return out

    def expect(self, masks=None, sees=None):
        """fp32 result and low-precision baseline. masks: [Q, Q] a request; sees: [B, keys]."""
        low = torch.float16 if self.q.dtype == torch.float16 else torch.bfloat16
        results = {None: [], low: []}
        count = self.q_per_req
        for i, prefix in enumerate(self.prefix):
            slots, first_pos = prefix, len(prefix) - count
            if self.block is not None:
                slots, first_pos = torch.cat((prefix, self.block[i])), len(prefix)
            k, v = self.pool.decoded(slots.clamp_min(0).to(self.q.device))
            visible = visible_keys(
                count,
                len(slots),
                first_pos,
                prefix=len(prefix),
                causal=self.options.get("causal", True),
                window=self.options.get("sliding_window_size", -1),
                block_mask=None if masks is None else masks[i].to(self.q.device),
                device=self.q.device,
            )
            visible &= (slots >= 0).to(self.q.device)
            for dtype, rows in results.items():
                rows.append(
                    attend(
                        self.q[i * count : (i + 1) * count],
                        k,
                        v,
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
    q_per_req=1,
    lens=LENS,
    block=False,
    page_size=1,
    dtype=torch.bfloat16,
    seed=0,
    kv_heads=KV_HEADS,
    **options,
):
    g = torch.Generator().manual_seed(seed)
    count = len(lens)
    need = [n + (q_per_req if block else 0) for n in lens]
    num_slots = (sum(-(-n // page_size) for n in need) + 3) * page_size
    pool = make_pool(num_slots, kv_heads, head_dim, device)
    owned = paged_slots(need, page_size, num_slots, g)
    fill_slots(pool, torch.cat(owned), g)
    q = torch.randn(count * q_per_req, kv_heads * group, head_dim, generator=g)
    return Case(
        pool,
        [slots[:n] for slots, n in zip(owned, lens, strict=True)],
        torch.stack([s[n:] for s, n in zip(owned, lens, strict=True)]) if block else None,
        q.to(device, dtype),
        options=options,
    )


def split_plan(case, budget=9, block_n=64):
    """Many short splits, so that several requests are cut and merged."""
    rows, heads, head_dim = case.q.shape
    plan = decode_nvfp4.plan_attention(
        len(case.prefix),
        case.q_per_req,
        heads,
        case.pool.k_codes.shape[1],
        head_dim,
        1024,
        device_limits(case.q.device),
        fragments=case.q.dtype != torch.float32,
    )
    batch = len(case.prefix)
    if plan.kind == "tiled":
        plan = replace(plan, block_n=block_n)
    return replace(plan, budget=budget, work_items=budget + batch, min_tiles=1)


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
def test_decode_matches_reference(device, head_dim, group, page_size, dtype, index_dtype):
    case = make_case(device, head_dim, group, page_size=page_size, dtype=dtype)
    case.index_dtype = index_dtype
    case.check(case.run())
    case.check(case.run(plan=split_plan(case)))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "head_dim, group, q_per_req, page_size, dtype",
    [
        (64, 1, 8, 1, torch.bfloat16),
        (80, 7, 3, 16, torch.float16),
        (96, 6, 8, 64, torch.bfloat16),
        (128, 5, 16, 1, torch.bfloat16),  # 80 rows a KV head: two row blocks
        (256, 8, 4, 16, torch.bfloat16),
    ],
)
def test_verify_matches_reference(device, head_dim, group, q_per_req, page_size, dtype):
    lens = [0, 1, 700, 129]
    case = make_case(device, head_dim, group, q_per_req, lens, True, page_size, dtype)
    case.check(case.run())
    case.check(case.run(plan=split_plan(case)))


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim, q_per_req, index_dtype", [(64, 4, torch.int32)])
def test_rows_without_block_slots_are_the_last_keys(device, head_dim, q_per_req, index_dtype):
    case = make_case(device, head_dim, 2, q_per_req, [0, 2, 300])
    case.index_dtype = index_dtype
    out = case.run()
    case.check(out)
    # The second request lists two keys for four rows: the first two rows see nothing.
    assert (out[4:6] == 0).all() and (out[:4] == 0).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("block", [False, True])
def test_logit_cap(device, block):
    case = make_case(device, 64, 3, 4 if block else 1, [1, 300, 64], block, logit_cap=5.0)
    case.q *= 8  # scores far beyond the cap
    case.check(case.run())
    case.check(case.run(plan=split_plan(case)))


@pytest.mark.interpreter
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_sliding_window_over_whole_lists(device, block, causal):
    case = make_case(
        device,
        80,
        2,
        4 if block else 1,
        [0, 1, 300, 700],
        block,
        sliding_window_size=100,
        causal=causal,
    )
    case.check(case.run())
    case.check(case.run(plan=split_plan(case)))


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [2, 64])
def test_sliding_window_over_clipped_lists_with_tree_mask(device, window):
    """As SGLang builds them: the last keys of the prefix, their start as window_kv_offsets."""
    count, lens = 6, [0, 1, 130, 300]
    case = make_case(device, 64, 2, count, lens, True, sliding_window_size=window)
    whole = [len(p) for p in case.prefix]
    case.prefix = [p[max(len(p) - window, 0) :] for p in case.prefix]
    offsets = [n - len(p) for n, p in zip(whole, case.prefix, strict=True)]
    masks, flat, starts = tree_masks(whole, count, seed=5)
    out = case.run(
        custom_mask=flat.to(device),
        mask_indptr=starts.to(device),
        window_kv_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
    )
    case.check(out, masks=masks)


def tree_masks(lens, count, seed):
    """A random draft tree a request. SGLang's flat layout: Q rows of (prefix + Q) entries.

    The prefix part is filled with junk: skip_prefix_custom_mask means nobody reads it.
    """
    g = torch.Generator().manual_seed(seed)
    masks, flat = [], []
    for n in lens:
        mask = torch.eye(count, dtype=torch.bool)
        for j in range(1, count):
            mask[j] |= mask[int(torch.randint(0, j, (), generator=g))]
        masks.append(mask)
        junk = torch.randint(0, 2, (count, n), generator=g).bool()
        flat.append(torch.cat((junk, mask), 1).flatten())
    sizes = [count * (n + count) for n in lens]
    return masks, torch.cat(flat), indptr(sizes, torch.int64)


@pytest.mark.interpreter
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
def test_tree_mask(device, mask_dtype):
    count, lens = 8, [0, 37, 300]
    case = make_case(device, 128, 3, count, lens, True)
    masks, flat, starts = tree_masks(lens, count, seed=3)
    extra = {"custom_mask": flat.to(device, mask_dtype), "mask_indptr": starts.to(device)}
    case.check(case.run(**extra), masks=masks)
    case.check(case.run(plan=split_plan(case), **extra), masks=masks)
    causal = case.expect()[0]
    assert (case.run(**extra).float() - causal).abs().max() > 0.01  # the mask matters


@pytest.mark.interpreter
def test_not_causal_sees_the_whole_block(device):
    case = make_case(device, 64, 2, 5, [0, 40], True, causal=False)
    case.check(case.run())


@pytest.mark.interpreter
def test_poison_in_unowned_slots_and_skipped_slots(device):
    """Every slot without an owner has NaN scales; slots below 0 are not visible."""
    case = make_case(device, 64, 2, 4, [3, 200], True)
    case.block[1, 2] = -1
    case.prefix[1][5] = -1
    owned = torch.cat((*case.prefix, case.block.flatten()))
    assert 0 not in owned or case.pool.k_scales.shape[0] > owned.numel()
    free = torch.ones(case.pool.k_codes.shape[0], dtype=torch.bool)
    free[owned[owned >= 0]] = False
    for side in case.pool.sides:
        side[free.to(side.device)] = 0x7F if side.shape[-1] == 4 else 0xFF
    out = case.run()
    case.check(out)
    assert torch.isfinite(out.float()).all()


@pytest.mark.interpreter
def test_padding_requests_are_finite(device):
    """CUDA-graph padding: no key, or one key in the padding slot."""
    case = make_case(device, 64, 2, lens=[0, 1, 0, 200, 0])
    out = case.run()
    assert (out[[0, 2, 4]] == 0).all()
    case.check(out)
    alone = make_case(device, 64, 2, lens=[0, 0])
    assert (alone.run() == 0).all()
    empty = make_case(device, 64, 2, lens=[5])
    nothing = replace(empty, prefix=[], q=empty.q[:0])
    assert (
        attention_nvfp4(
            nothing.q,
            *empty.pool.sides,
            nothing.q.clone(),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
            q_per_req=1,
            sm_scale=1.0,
            **empty.pool.scales,
        ).numel()
        == 0
    )


@pytest.mark.interpreter
def test_large_and_zero_queries(device):
    """Query rows are scaled into fp16's range by a power of two: nothing overflows."""
    case = make_case(device, 64, 2, lens=[100, 100, 100])
    case.q[0] *= 2.0**30
    case.q[1] = 0
    case.q[2] *= 2.0**-30
    case.options["sm_scale"] = 0.125
    out = case.run()
    case.check(out)


@pytest.mark.interpreter
def test_strided_inputs_and_float8_scales(device):
    case = make_case(device, 64, 3, 2, [1, 90], True)
    expect = case.run()
    rows, heads, head_dim = case.q.shape
    wide = torch.full((rows, heads + 2, head_dim + 16), 7.0, dtype=case.q.dtype, device=device)
    wide[:, 1:-1, :head_dim] = case.q
    strided = replace(case, q=wide[:, 1:-1, :head_dim])
    sides = []
    for side in case.pool.sides:
        both = torch.full((side.shape[0], 2, *side.shape[1:]), 0xFF, dtype=torch.uint8)
        both = both.to(device)
        both[:, 1] = side
        sides.append(both[:, 1])
    sides[1] = sides[1].view(torch.float8_e4m3fn)
    sides[3] = sides[3].view(torch.float8_e4m3fn)
    strided.pool = Pool(*sides, **case.pool.scales)
    wide_out = torch.full_like(wide, 9.0)
    strided.run(out=wide_out[:, 1:-1, :head_dim])
    assert torch.equal(wide_out[:, 1:-1, :head_dim], expect)
    assert (wide_out[:, [0, -1]] == 9).all() and (wide_out[..., head_dim:] == 9).all()


# The largest difference between a verify row and the decode of the same position, as a share of
# the largest output: both sum in fp32, and a score that differs in its last bit may round one
# fp16 weight to its other neighbour. The interpreter shows 8e-8.
VERIFY_BOUND = 2e-5


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim, group", [(64, 2), (256, 6)])
def test_verify_row_equals_decode_at_the_same_length(device, head_dim, group):
    count, lens = 4, [0, 63, 254, 600]
    case = make_case(device, head_dim, group, count, lens, True)
    shape = case.q.shape
    verify = case.run(out=torch.empty(shape, dtype=torch.float32, device=device))
    verify = verify.unflatten(0, (len(lens), count))
    for j in range(count):
        decode = Case(
            case.pool,
            [torch.cat((p, b[: j + 1])) for p, b in zip(case.prefix, case.block, strict=True)],
            None,
            case.q.unflatten(0, (len(lens), count))[:, j].contiguous(),
        )
        for plan in (None, split_plan(decode, budget=5)):
            out = torch.empty(decode.q.shape, dtype=torch.float32, device=device)
            decode.run(out=out, plan=plan)
            difference = (out - verify[:, j]).abs().max() / verify.abs().max()
            assert difference <= VERIFY_BOUND


@pytest.mark.interpreter
def test_buffers_may_be_larger_and_must_not_be_smaller(device):
    case = make_case(device, 64, 2, lens=[300, 90])
    plan = split_plan(case)
    expect = case.run(plan=plan)
    rows = partial_rows(plan, 1, 4, KV_HEADS)
    big = attention_buffers(rows + 7, 8, 64, device)
    for x in (big.acc, big.stat):
        x.fill_(float("nan"))
    assert torch.equal(case.run(plan=plan, buffers=big), expect)
    small = attention_buffers(rows - 1, 2, 64, device)
    with pytest.raises(
        ValueError, match=rf"buffers\.acc must be .* at least {64 * rows} entries"
    ):
        case.run(plan=plan, buffers=small)
    with pytest.raises(ValueError, match=r"buffers\.sched must be .* at least 4 entries"):
        case.run(plan=plan, buffers=replace(big, sched=big.sched[:3]))


BAD = {
    "q must be \\[tokens, heads, head_dim\\], got \\(1, 8, 64, 1\\)": {
        "q": lambda c: c.q[..., None]
    },
    "q must be bfloat16, float16 or float32, got torch.float64": {"q": lambda c: c.q.double()},
    "head_dim must be a positive multiple of 16, got 60": {"q": lambda c: c.q[..., :60]},
    "q must be contiguous in its last dim, got stride 2": {
        "q": lambda c: c.q.repeat_interleave(2, -1)[..., ::2]
    },
    "out must be \\(1, 8, 64\\) like q, got \\(1, 4, 64\\)": {"out": lambda c: c.q[:, :4].clone()},
    "k_codes must be uint8, got torch.int8": {"k_codes": lambda c: c.pool.k_codes.view(torch.int8)},
    "k_scales must be uint8 or float8_e4m3fn, got torch.int8": {
        "k_scales": lambda c: c.pool.k_scales.view(torch.int8)
    },
    "v_codes must be \\[slots, kv_heads, 32\\], got": {
        "v_codes": lambda c: c.pool.v_codes[..., :16]
    },
    "v_scales must be \\(13, 2, 4\\), got \\(13, 2, 3\\)": {
        "v_scales": lambda c: c.pool.v_scales[..., :3]
    },
    "k_codes and k_scales must be contiguous in their last dim, got strides 2 and 1": {
        "k_codes": lambda c: c.pool.k_codes.repeat_interleave(2, -1)[..., ::2]
    },
    "query heads must be a multiple of KV heads, got 7 and 2": {
        "q": lambda c: c.q[:, :7],
        "out": lambda c: c.q[:, :7].clone(),
    },
    "v_codes must have 2 heads, got 1": {
        "v_codes": lambda c: c.pool.v_codes[:, :1],
        "v_scales": lambda c: c.pool.v_scales[:, :1],
    },
    "q_per_req must divide the 1 rows of q, got 2": {"q_per_req": 2},
    "q_per_req must divide the 1 rows of q, got 0": {"q_per_req": 0},
    "kv_indptr must be int32 or int64, got torch.float32": {"kv_indptr": torch.zeros(2)},
    "kv_indptr must have at least 2 entries, got 1": {
        "kv_indptr": torch.zeros(1, dtype=torch.int32)
    },
    "kv_indices must be 1-d and contiguous, got \\(1, 1\\)": {
        "kv_indices": torch.zeros(1, 1, dtype=torch.int64)
    },
    "block_slots must have 1 entries, got 2": {"block_slots": torch.zeros(2, dtype=torch.int64)},
    "custom_mask needs block_slots, got None": {"custom_mask": torch.ones(9, dtype=torch.bool)},
    "custom_mask must be bool, uint8 or int8, got torch.float32": {
        "custom_mask": torch.ones(9),
        "block_slots": torch.zeros(1, dtype=torch.int64),
    },
    "custom_mask must be 1-d and contiguous, got \\(3, 3\\)": {
        "custom_mask": torch.ones(3, 3, dtype=torch.bool),
        "block_slots": torch.zeros(1, dtype=torch.int64),
    },
    "custom_mask needs mask_indptr, got None": {
        "custom_mask": torch.ones(9, dtype=torch.bool),
        "block_slots": torch.zeros(1, dtype=torch.int64),
    },
    "mask_indptr must have at least 1 entries, got 0": {
        "custom_mask": torch.ones(9, dtype=torch.bool),
        "block_slots": torch.zeros(1, dtype=torch.int64),
        "mask_indptr": torch.zeros(0, dtype=torch.int64),
    },
    "window_kv_offsets must have at least 1 entries, got 0": {
        "custom_mask": torch.ones(9, dtype=torch.bool),
        "block_slots": torch.zeros(1, dtype=torch.int64),
        "mask_indptr": torch.zeros(2, dtype=torch.int64),
        "window_kv_offsets": torch.zeros(0, dtype=torch.int64),
    },
    "global scale must be finite and > 0": {"k_global_scale": 0.0},
    "logit_cap must be 0 \\(none\\) or positive, got -1.0": {"logit_cap": -1.0},
    "plan.work_items must be at least budget \\+ batch = 10, got 9": {
        "plan": lambda c: replace(split_plan(c), work_items=9)
    },
    "plan covers 2 query rows a KV head, got 4": {
        "plan": lambda c: replace(split_plan(c), block_m=2)
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    case = make_case("cpu", 64, 4, lens=[10])
    args = {
        "q": case.q,
        "out": case.q.clone(),
        "k_codes": case.pool.k_codes,
        "k_scales": case.pool.k_scales,
        "v_codes": case.pool.v_codes,
        "v_scales": case.pool.v_scales,
        "kv_indptr": indptr([10]),
        "kv_indices": case.prefix[0],
        "q_per_req": 1,
        "sm_scale": 0.125,
        **case.pool.scales,
    }
    args |= {k: v(case) if callable(v) else v for k, v in BAD[message].items()}
    with pytest.raises(ValueError, match=message):
        attention_nvfp4(**args)


def test_plan_fills_the_device_and_bounds_its_programs():
    h200 = DeviceLimits(132, SM90_SHARED_BYTES, 90)
    one = plan_attention(1, 1, 24, 4, 256, 65536, h200)
    assert one.kind == "decode" and one.budget * 4 == 8 * 132
    many = plan_attention(64, 1, 24, 4, 256, 8192, h200)
    assert many.work_items == many.budget + 64
    short = plan_attention(2, 1, 24, 4, 256, 10, h200)
    assert short.budget <= 2
    # 8,192 keys are 32 programs of four tiles; none is launched that has none.
    few = plan_attention(1, 8, 24, 4, 256, 8192, h200)
    assert (few.block_n, few.min_tiles, few.budget) == (64, 4, 33)
    for q_per_req, block_m, row_blocks in ((2, 16, 1), (4, 24, 1), (5, 32, 1), (8, 48, 1), (16, 48, 2)):
        verify = plan_attention(1, q_per_req, 24, 4, 256, 65536, h200)
        assert (verify.kind, verify.block_m, verify.row_blocks) == ("verify", block_m, row_blocks)
    # 64 requests of 8 heads on 396 places: one part each would leave a third of the waves empty.
    assert plan_attention(64, 8, 32, 8, 128, 8192, h200).budget == 3 * 64
    tiled = (DeviceLimits(48, SM120_SHARED_BYTES, 75), INTERPRETER)
    for limits in (h200, DeviceLimits(48, SM120_SHARED_BYTES, 121), *tiled):
        for q_per_req in (1, 8):
            plan = plan_attention(8, q_per_req, 24, 4, 256, 9999, limits)
            assert (plan.kind == "tiled") == (limits in tiled)
    assert plan_attention(8, 1, 24, 4, 80, 9999, h200).kind == "tiled"
    assert plan_attention(8, 1, 24, 4, 256, 9999, h200, fragments=False).kind == "tiled"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("q_per_req", [1, 8])
def test_assembly_equals_its_plain_twin(device, head_dim, q_per_req, monkeypatch):
    """All 256 code bytes under all 127 scales, through attention: bit for bit."""
    from sglang_fp4kv.kernels import _fragments, fragments_nvfp4, tiled_nvfp4

    case = make_case(device, head_dim, 6, q_per_req, [4000, 3, 700], q_per_req > 1)
    g = torch.Generator(device).manual_seed(2)
    for codes, scales in (case.pool.sides[:2], case.pool.sides[2:]):
        codes.random_(0, 256, generator=g)
        scales.random_(0, 127, generator=g)
    case.options["sm_scale"] = 1e-4
    if split_plan(case).kind == "tiled":
        module, name, variants = tiled_nvfp4, "code_placement", (PLAIN, ASM_PURE, ASM_STAGED)
    else:
        module, name, variants = fragments_nvfp4, "place", (_fragments.TWIN, _fragments.E4M3)
        if torch.cuda.get_device_capability()[0] >= 10:
            variants += (_fragments.E2M1,)
    results = []
    for variant in variants:
        monkeypatch.setattr(module, name, lambda *_, v=variant: v)
        results.append(case.run())
    assert torch.isfinite(results[0].float()).all()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, heads, group", [(128, 8, 4), (256, 4, 6)])
@pytest.mark.parametrize("q_per_req", [1, 8])
def test_long_ragged_batches(device, head_dim, heads, group, q_per_req):
    g = torch.Generator().manual_seed(1)
    for lens in (
        [131072],
        [1, 131072, 700],
        [int(n) for n in torch.randint(1, 9000, (64,), generator=g)],
    ):
        case = make_case(
            device, head_dim, group, q_per_req, lens, q_per_req > 1, 16, kv_heads=heads
        )
        case.check(case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("q_per_req", [1, 8])
def test_graph_replay_equals_eager(device, q_per_req):
    """One capture, then lengths that grow and shrink, with requests dropping to nothing."""
    batch, longest, head_dim, group, heads = 8, 20000, 256, 6, 4
    block = q_per_req > 1
    case = make_case(
        device, head_dim, group, q_per_req, [longest] * batch, block, kv_heads=heads
    )
    all_slots = torch.stack(case.prefix).to(device)
    kv_indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    kv_indices = torch.zeros(batch * longest, dtype=torch.int64, device=device)
    block_slots = case.block.flatten().to(device) if block else None
    out = torch.empty_like(case.q)

    def call(result):
        attention_nvfp4(
            case.q,
            *case.pool.sides,
            result,
            kv_indptr,
            kv_indices,
            q_per_req=q_per_req,
            block_slots=block_slots,
            sm_scale=head_dim**-0.5,
            **case.pool.scales,
        )

    def set_lens(lens):
        kv_indptr.copy_(indptr(lens).to(device))
        flat = torch.cat([all_slots[i, :n] for i, n in enumerate(lens)])
        kv_indices[: flat.numel()] = flat

    set_lens([1] * batch)
    call(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out)
    for lens in (
        [1] * batch,
        [longest] * batch,
        [5, 20000, 1, 700, 0, 64, 65, 8192],
        [700, 1, 1, 1, 0, 0, 0, 0],
    ):
        set_lens(lens)
        graph.replay()
        eager = torch.empty_like(out)
        call(eager)
        assert torch.equal(out, eager), lens
        replace(case, prefix=[all_slots[i, :n].cpu() for i, n in enumerate(lens)]).check(out)
