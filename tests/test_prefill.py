"""Prefill through a library's attention: the choice, the cut, the kernels, and the whole against
fp32 attention over the decoded values. Off a GPU a plain-torch attention stands in for FlashInfer.
"""

import importlib.util
import logging
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from reference_attention import assert_close_enough, fill_slots, make_pool
from test_extend_nvfp4 import make_case

from sglang_fp4kv import codec, library_attention
from sglang_fp4kv import prefill as prefill_module
from sglang_fp4kv.kernels._plan import SM90_SHARED_BYTES, SM120_SHARED_BYTES, DeviceLimits
from sglang_fp4kv.kernels.merge_parts import merge_parts
from sglang_fp4kv.kernels.unpack_nvfp4 import unpack_nvfp4
from sglang_fp4kv.prefill import (
    LIBRARY_VARIABLE,
    QUERY_TOKENS,
    SCRATCH_BYTES,
    PackedPrefill,
    QueryBlock,
    choose,
    library_backends,
    split_work,
)

H200 = DeviceLimits(132, SM90_SHARED_BYTES, 90)
LOG2E = 1.4426950408889634

# Not a skip: under FP4KV_REQUIRE_GPU=1 that would be a failure, and the GPU is there.
needs_flashinfer = pytest.mark.xfail(
    importlib.util.find_spec("flashinfer") is None
    and os.environ.get("FP4KV_REQUIRE_FLASHINFER") != "1",
    reason="FlashInfer is not installed; under FP4KV_REQUIRE_FLASHINFER=1 this is a failure",
    run=False,
)


def plain_attend(q, k, v, causal, sm_scale):
    """library_attention.Attend with the roundings of a BF16 kernel."""
    low, group = q.dtype, q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("nhd,lhd->nhl", q.float(), k) * sm_scale
    if causal:
        n, length = q.shape[0], k.shape[0]
        hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
        s = s.masked_fill(hidden[:, None], float("-inf"))
    lse = s.logsumexp(-1)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    out = torch.einsum("nhl,lhd->nhd", p.to(low).float(), v) / p.sum(-1)[..., None]
    return out.to(low).contiguous(), (lse * LOG2E).contiguous()


def prefill_for(case, piece_tokens, attend=plain_attend, query_tokens=QUERY_TOKENS):
    heads, head_dim = case.q.shape[1:]
    kv_heads = case.k.shape[1]
    return PackedPrefill(
        heads,
        kv_heads,
        head_dim,
        case.q.dtype,
        case.q.device,
        attend=attend,
        scratch_bytes=piece_tokens * 2 * kv_heads * head_dim * case.q.element_size(),
        query_tokens=query_tokens,
        limits=H200,
    )


def run(case, prefill, out=None):
    """The library's way for this case, whatever the choice would be."""
    out = torch.full_like(case.q, float("nan")) if out is None else out
    blocks = split_work(
        tuple(len(p) for p in case.prefix),
        tuple(case.new),
        prefill.k.shape[0],
        prefill.query_tokens,
    )
    return prefill.run(
        blocks,
        case.q,
        case.k,
        case.v,
        out,
        *case.pool.sides,
        torch.cat(case.prefix).to(case.q.device, case.index_dtype),
        sm_scale=case.q.shape[-1] ** -0.5,
        **case.pool.scales,
    )


BATCHES = {
    "one": ([150], [37]),
    "three": ([0, 17, 100], [20, 1, 33]),
    "seven": ([0, 1, 15, 16, 17, 65, 300], [3, 40, 1, 16, 17, 0, 9]),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "head_dim, group, page_size, dtype",
    [(64, 3, 1, torch.bfloat16), (80, 5, 16, torch.float16), (256, 6, 16, torch.bfloat16)],
)
def test_matches_reference(device, batch, head_dim, group, page_size, dtype):
    """Prefixes below, at and above one piece of 32 tokens; one, two and many pieces to merge."""
    prefix, new = BATCHES[batch]
    case = make_case(device, head_dim, group, prefix, new, page_size, dtype)
    prefill = prefill_for(case, 32)
    assert prefill.k.shape[0] == 32
    case.check(run(case, prefill))


@pytest.mark.interpreter
@pytest.mark.parametrize("pieces, prefix", [(2, 33), (3, 96), (9, 270)])
def test_number_of_pieces(device, monkeypatch, pieces, prefix):
    """Parts and log-sum-exps of every merge, what is held meanwhile; values in fp32."""
    tokens, lens = 20, ([prefix, 40], [60, 9])
    plain = make_case(device, 64, 3, *lens, dtype=torch.float32)
    error_ratios = plain.check(run(plain, prefill_for(plain, 32, query_tokens=tokens)))
    assert max(error_ratios) < 0.01

    case = make_case(device, 64, 3, *lens)
    heads, head_dim = case.q.shape[1:]
    part_bytes = tokens * heads * head_dim * case.q.element_size()
    held, merges, in_library, in_merge = [], [], set(), set()

    def held_parts():
        return sum(x.nbytes for x in (ref() for ref in held) if x is not None) / part_bytes

    def attend(*args):
        part, lse = plain_attend(*args)
        held.append(weakref.ref(part))
        in_library.add(held_parts())
        return part, lse

    def merge(a, a_lse, b, b_lse, scale, out, out_lse=None):
        merges.append((a.dtype, out.dtype))
        assert a_lse.shape == b_lse.shape == out.shape[:2]
        assert out_lse is None or out_lse.shape == out.shape[:2]
        assert out_lse is not a_lse
        if out.dtype == torch.float32 and out is not a:
            held.append(weakref.ref(out))
        in_merge.add(held_parts())
        merge_parts(a, a_lse, b, b_lse, scale, out, out_lse)

    monkeypatch.setattr(prefill_module, "merge_parts", merge)
    prefill = prefill_for(case, 32, attend, query_tokens=tokens)
    for of_warm_up in (held, merges, in_library, in_merge):
        of_warm_up.clear()
    run(case, prefill)
    low, state = case.q.dtype, torch.float32
    one_block = [(low, state), *[(state, state)] * (pieces - 2), (state, low)]
    assert merges == one_block * 3 + [(low, state), (state, low)]
    # At most the fp32 state (two parts) and a part; the first merge has both of its parts.
    assert max(in_library) == 3 and max(in_merge) == 4


@pytest.mark.interpreter
def test_warm_up_fits_the_smallest_scratch(device):
    """A GPU runs it in the constructor, with whatever scratch there is."""
    case = make_case(device, 64, 2, [3], [2])
    calls = []

    def attend(q, k, v, causal, sm_scale):
        calls.append((q.shape[0], k.shape[0], causal))
        return plain_attend(q, k, v, causal, sm_scale)

    prefill = prefill_for(case, 16, attend)
    assert prefill.k.shape[0] == 16
    calls.clear()
    prefill._warm_up(device)
    chunk, piece = (16, 16, True), (16, 16, False)
    assert calls == [chunk, piece, chunk, piece, piece, piece]


@pytest.mark.interpreter
def test_query_blocks(device):
    """A chunk above the query block: the later blocks see the earlier rows of the chunk."""
    case = make_case(device, 64, 2, [70, 0, 5], [50, 33, 16])
    case.check(run(case, prefill_for(case, 48, query_tokens=16)))


@pytest.mark.interpreter
def test_padded_rows_and_strides(device):
    """SGLang pads q above the batch's tokens; q, k and v are slices of one projection."""
    case = make_case(device, 64, 3, [90, 0], [7, 12])
    expect = run(case, prefill_for(case, 32))
    tokens, heads, head_dim = case.q.shape
    fused = torch.full((tokens + 5, heads + 4, head_dim), float("nan"), dtype=case.q.dtype)
    fused = fused.to(device)
    fused[:tokens, :heads] = case.q
    fused[:tokens, heads : heads + 2], fused[:tokens, heads + 2 :] = case.k, case.v
    case.q, case.k, case.v = fused[:, :heads], fused[:, heads : heads + 2], fused[:, heads + 2 :]
    wide = torch.full((tokens + 5, heads, 2 * head_dim), 9.0, dtype=case.q.dtype, device=device)
    run(case, prefill_for(case, 32), out=wide[..., :head_dim])
    assert torch.equal(wide[:tokens, :, :head_dim], expect)
    assert (wide[tokens:] == 9).all() and (wide[..., head_dim:] == 9).all()


@pytest.mark.interpreter
def test_agrees_with_the_packed_kernel(device):
    case = make_case(device, 128, 4, [0, 90, 33], [30, 8, 1])
    off = (run(case, prefill_for(case, 32)).float() - case.run().float()).abs().max()
    assert off < 0.02


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim, index_dtype", [(16, torch.int32), (80, torch.int64)])
def test_unpack_is_the_codec_with_scale_one(device, dtype, head_dim, index_dtype):
    """Any code under any scale byte that is ever written, largest and subnormal ones too."""
    g = torch.Generator().manual_seed(1)
    pool = make_pool(340, 3, head_dim, device)
    for codes, scales in ((pool.k_codes, pool.k_scales), (pool.v_codes, pool.v_scales)):
        codes.copy_(torch.randint(0, 256, codes.shape, generator=g))
        scales.copy_(torch.randint(0, 127, scales.shape, generator=g))
    slots = torch.cat((torch.randperm(339, generator=g)[:299], torch.tensor([339, 339])))
    k, v = (torch.full((305, 3, head_dim), 5.0, dtype=dtype, device=device) for _ in range(2))
    unpack_nvfp4(*pool.sides, slots.to(device, index_dtype), k, v)
    for got, codes, scales in (
        (k, pool.k_codes, pool.k_scales),
        (v, pool.v_codes, pool.v_scales),
    ):
        want = codec.decode(codes[slots.to(device)], scales[slots.to(device)], 1.0)
        assert torch.equal(got[:301].float(), want)
        assert (got[301:] == 5).all()


@pytest.mark.interpreter
def test_unpack_marks_what_it_cannot_hide(device):
    """A slot below 0 is NaN, not zero: zeros would take part in the softmax unnoticed."""
    pool = make_pool(20, 2, 32, device)
    fill_slots(pool, torch.arange(20), torch.Generator().manual_seed(2))
    k, v = (torch.zeros(3, 2, 32, dtype=torch.bfloat16, device=device) for _ in range(2))
    unpack_nvfp4(*pool.sides, torch.tensor([4, -1, 7], device=device), k, v)
    assert torch.isnan(k[1]).all() and torch.isnan(v[1]).all()
    assert torch.isfinite(k[[0, 2]]).all() and torch.isfinite(v[[0, 2]]).all()
    unpack_nvfp4(*pool.sides, torch.tensor([], dtype=torch.int64, device=device), k, v)


@pytest.mark.interpreter
@pytest.mark.parametrize("a_dtype", [torch.bfloat16, torch.float32])
def test_merge(device, a_dtype):
    """Rows seen by both parts, by one of them (the other holding NaN), and by none."""
    g = torch.Generator().manual_seed(3)
    a = torch.randn(7, 3, 80, generator=g).to(a_dtype)
    b = torch.randn(7, 3, 80, generator=g).to(torch.bfloat16)
    a_lse, b_lse = (torch.randn(7, 3, generator=g) * 5 for _ in range(2))
    a_lse[0], b_lse[1], a_lse[2], b_lse[2] = 200.0, 300.0, -float("inf"), -float("inf")
    a_lse[3], b_lse[4] = -float("inf"), -float("inf")
    a[3], b[4] = float("nan"), float("nan")
    weights = torch.stack((a_lse, b_lse)).double().mul(0.6931471805599453)
    want_lse = weights.logsumexp(0) * LOG2E
    weights = torch.nan_to_num(weights.softmax(0))
    want = (
        weights[0, ..., None] * torch.nan_to_num(a.double())
        + weights[1, ..., None] * torch.nan_to_num(b.double()) * 0.25
    ).float()
    a, b, a_lse, b_lse = (x.to(device) for x in (a, b, a_lse, b_lse))
    out, lse = torch.empty(7, 3, 80, device=device), torch.empty_like(a_lse)
    merge_parts(a, a_lse, b, b_lse, 0.25, out, lse)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.cpu(), want_lse.float(), rtol=1e-5, atol=1e-5)
    half = torch.empty_like(out, dtype=torch.bfloat16)
    merge_parts(a, a_lse, b, b_lse, 0.25, half)
    assert torch.equal(half, out.to(torch.bfloat16))
    if a_dtype == torch.float32:
        again = torch.empty_like(lse)
        merge_parts(a, a_lse, b, b_lse, 0.25, a, again)
        assert torch.equal(a, out) and torch.equal(again, lse)
    merge_parts(a[:0], a_lse[:0], b[:0], b_lse[:0], 1.0, out[:0])


@pytest.mark.interpreter
def test_a_slot_below_zero_shows(device):
    """One piece, several, and the first of several: NaN in every row of that request."""
    for prefix, place in (([20], 5), ([90], 5), ([90], 89)):
        case = make_case(device, 64, 2, [*prefix, 40], [6, 3])
        case.prefix[0][place] = -1
        out = run(case, prefill_for(case, 32))
        assert torch.isnan(out[:6]).all() and torch.isfinite(out[6:]).all()


def test_which_libraries_a_server_tries(caplog):
    assert library_backends(90, {}) == ("fa3",) and library_backends(121, {}) == ()
    wanted = {LIBRARY_VARIABLE: "1"}
    assert library_backends(90, wanted) == ("fa3", "fa2") and library_backends(121, wanted) == ("fa2",)
    assert library_backends(90, {LIBRARY_VARIABLE: "0"}) == ()
    with pytest.raises(ValueError, match="FP4KV_LIBRARY_PREFILL must be 0 or 1, got 'yes'"):
        library_backends(90, {LIBRARY_VARIABLE: "yes"})
    with caplog.at_level(logging.INFO, "sglang_fp4kv.prefill"):
        prefill = PackedPrefill(24, 4, 256, torch.bfloat16, "cpu", backends=(), limits=H200)
    assert "packed kernel (no library is asked for)" in caplog.text
    assert prefill.plan([65536], [8192]) is None and not hasattr(prefill, "k")


def test_work_is_cut_by_piece_and_block():
    assert split_work((5, 0, 20), (3, 2, 0), 8) == (
        QueryBlock(0, 0, 3, ((0, 5),)),
        QueryBlock(3, 3, 5, ()),
    )
    blocks = split_work((20, 4), (1, 10), 8, query_tokens=4)
    assert blocks[0].pieces == ((0, 8), (8, 16), (16, 20))
    assert [(b.first, b.begin, b.end) for b in blocks[1:]] == [(1, 1, 5), (1, 5, 9), (1, 9, 11)]
    assert all(b.pieces == ((20, 24),) for b in blocks[1:])
    assert split_work((), (), 8) == ()


@pytest.mark.parametrize(
    "prefix, new, library",
    [
        ((65536,), (8192,), True),
        ((8192,), (8192,), True),
        ((65536,), (512,), True),
        ((65536,), (16,), True),  # a lone packed program walks 64k keys
        ((0,), (8192,), True),
        ((0,) * 4, (2000,) * 4, True),
        ((600,), (4,), False),
        ((1000,) * 32, (50,) * 32, False),
        ((0,), (0,), False),
    ],
)
@pytest.mark.parametrize("limits", [H200, DeviceLimits(48, SM120_SHARED_BYTES, 121)])
def test_choice(prefix, new, library, limits):
    choice = choose(prefix, new, 24, 4, 256, 8192, limits)
    assert choice.library == library, choice
    if any(new):
        assert (choice.library_s < choice.packed_s) == library


def test_plan_is_shared_and_logged_once(caplog):
    case = make_case("cpu", 256, 6, [5], [3], kv_heads=4)
    prefill = prefill_for(case, 8192)
    with caplog.at_level(logging.INFO, "sglang_fp4kv.prefill"):
        long = [prefill.plan([65536], [8192]) for _ in range(3)]
        assert prefill.plan([40000], [4096]) is not None
        assert [prefill.plan([30], [3]), prefill.plan([31], [3])] == [None, None]
    assert long[0] is long[1] is long[2]
    assert [r.getMessage() for r in caplog.records] == [
        "fp4kv prefill: the attention given, pieces of 8192 tokens (long chunk or prefix)",
        "fp4kv prefill: packed kernel (little work or many small requests)",
    ]


def test_scratch_is_bounded_and_shared():
    case = make_case("cpu", 256, 6, [5], [3], kv_heads=4)
    first, second = (prefill_for(case, 8192) for _ in range(2))
    assert first.k is second.k and first.v is second.v
    assert 2 * first.k.nbytes == SCRATCH_BYTES
    with pytest.raises(ValueError, match="1024 bytes of scratch do not hold 16 tokens of 4096"):
        PackedPrefill(
            24, 4, 256, torch.bfloat16, "cpu", attend=plain_attend, scratch_bytes=1024, limits=H200
        )


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1)]
)
def test_a_device_without_an_index_is_the_current_one(device, monkeypatch):
    """However the device is written, the scratch is one and lies where the queries do."""
    asked = []

    def scratch(device, *args):
        asked.append(device)
        return torch.empty(16, 2, 64), torch.empty(16, 2, 64)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(prefill_module, "_scratch", scratch)
    monkeypatch.setattr(PackedPrefill, "_warm_up", lambda self, device: asked.append(device))
    PackedPrefill(4, 2, 64, torch.bfloat16, device, attend=plain_attend, limits=H200)
    assert asked == [torch.device("cuda", 1)] * 2


@pytest.mark.gpu
def test_a_device_by_name_and_by_index_share_the_scratch():
    here = torch.device("cuda", torch.cuda.current_device())
    first, second = (
        PackedPrefill(4, 2, 64, torch.bfloat16, device, attend=plain_attend, scratch_bytes=1 << 20)
        for device in ("cuda", here)
    )
    assert first.k is second.k and first.k.device == here


def test_without_the_library_the_packed_kernel_serves(caplog):
    with caplog.at_level(logging.INFO, "sglang_fp4kv.prefill"):
        prefill = PackedPrefill(24, 4, 256, torch.bfloat16, "cpu", backends=("fa3",))
    assert prefill.plan([65536], [8192]) is None
    assert not hasattr(prefill, "k")  # no memory for a way that is never taken
    assert "packed kernel (FlashInfer does not run on cpu)" in caplog.text


@pytest.mark.parametrize(
    "head_dim, dtype, reason",
    [
        (256, torch.float32, "does not take torch.float32"),
        (80, torch.bfloat16, "are not made for head dim 80"),
    ],
)
def test_what_flashinfer_is_not_asked_for(head_dim, dtype, reason):
    attend, why = library_attention.load_flashinfer(4, 2, head_dim, dtype, torch.device("cuda"), ("fa2",))
    assert attend is None and reason in why


def test_a_backend_that_fails_or_is_wrong_is_passed_over(monkeypatch):
    def broken(backend):
        if backend == "fails":
            raise RuntimeError("nvcc not found")

        def attend(q, k, v, causal, sm_scale):
            out, lse = plain_attend(q, k, v, causal, sm_scale)
            return out, lse / LOG2E if backend == "natural" else lse

        return attend

    monkeypatch.setattr(library_attention, "_flashinfer", broken)
    check = library_attention.check_attend
    monkeypatch.setattr(  # on the CPU, whatever the device asked for
        library_attention, "check_attend", lambda *args: check(*args[:-1], torch.device("cpu"))
    )
    cuda = torch.device("cuda")
    load = library_attention.load_flashinfer
    order = ("fails", "natural", "right")
    attend, name = load(4, 2, 64, torch.bfloat16, cuda, order)
    assert attend is not None and name == "FlashInfer right"
    attend, why = load(4, 2, 64, torch.bfloat16, cuda, order[:2])
    assert attend is None
    assert "fails: RuntimeError: nvcc not found" in why
    assert "natural: ValueError: log-sum-exp is off by" in why


PLAIN = {"sliding_window_size": -1, "custom_mask": None, "logit_cap": 0.0}


@pytest.mark.parametrize(
    ("options", "batch", "why"),
    [
        ({}, {}, None),
        ({"sliding_window_size": 64}, {}, "a sliding window"),
        ({"custom_mask": 1}, {}, "a custom mask"),
        ({"logit_cap": 30.0}, {}, "a logit cap"),
        ({}, {"extend_prefix_lens_cpu": None}, "lengths are not on the host"),
        ({}, {"extend_seq_lens_cpu": [9000]}, "lengths of more rows than the batch has"),
    ],
)
def test_the_backend_asks_only_for_what_the_library_does(caplog, options, batch, why):
    from sglang_fp4kv.attention import TritonAttnBackend

    case = make_case("cpu", 64, 2, [5], [3])
    backend = object.__new__(TritonAttnBackend)
    backend.prefill = prefill_for(case, 8192)
    q = torch.empty(8192, 4, 64, dtype=torch.bfloat16)
    lens = {"extend_prefix_lens_cpu": [65536], "extend_seq_lens_cpu": [8192]}
    with caplog.at_level(logging.INFO, "sglang_fp4kv.prefill"):
        plan = backend._library_plan(q, PLAIN | options, SimpleNamespace(**(lens | batch)))
    assert (plan is None) == (why is not None)
    if why:
        assert f"packed kernel ({why})" in caplog.text
        assert backend._library_plan(q.float(), PLAIN, SimpleNamespace(**lens)) is None


BAD_MERGE = {
    r"b must be \(2, 2, 16\) like a, got \(1, 2, 16\)": {"b": lambda x: x[:1]},
    r"a must be contiguous, got strides": {"a": lambda x: x.repeat(1, 1, 2)[..., :16]},
    r"b_lse must be contiguous float32 \[2, 2\], got torch.float64": {"b_lse": torch.Tensor.double},
    r"out must be bfloat16, float16 or float32, got torch.float64": {"out": torch.Tensor.double},
}


@pytest.mark.parametrize("message", BAD_MERGE)
def test_bad_merges_are_named(message):
    args = {name: torch.zeros(2, 2, 16) for name in ("a", "b", "out")}
    args |= {name: torch.zeros(2, 2) for name in ("a_lse", "b_lse")}
    args |= {name: change(args[name]) for name, change in BAD_MERGE[message].items()}
    with pytest.raises(ValueError, match=message):
        merge_parts(b_scale=1.0, **args)


BAD_UNPACK = {
    r"k_out must be \[at least 3, 2, 32\], got \(2, 2, 32\)": {"k_out": lambda x: x[:2]},
    r"v_out must be torch.float32 like q, got torch.float16": {"v_out": torch.Tensor.half},
    r"v_codes must have 2 heads, got 1": {
        "v_codes": lambda x: x[:, :1],
        "v_scales": lambda x: x[:, :1],
    },
    r"slots must be int32 or int64, got torch.float32": {"slots": torch.Tensor.float},
}


@pytest.mark.parametrize("message", BAD_UNPACK)
def test_bad_unpacks_are_named(message):
    pool = make_pool(5, 2, 32, "cpu")
    args = dict(zip(("k_codes", "k_scales", "v_codes", "v_scales"), pool.sides, strict=True))
    args |= {
        "slots": torch.arange(3),
        "k_out": torch.zeros(4, 2, 32),
        "v_out": torch.zeros(4, 2, 32),
    }
    args |= {name: change(args[name]) for name, change in BAD_UNPACK[message].items()}
    with pytest.raises(ValueError, match=message):
        unpack_nvfp4(**args)


def test_a_plan_or_dtype_that_does_not_fit_is_named():
    case = make_case("cpu", 64, 2, [5], [3])
    prefill = prefill_for(case, 16)
    case.new = [4]
    with pytest.raises(ValueError, match="the plan has 4 rows, q has 3"):
        run(case, prefill)
    case.q, case.k, case.v = case.q.half(), case.k.half(), case.v.half()
    with pytest.raises(ValueError, match="q must be torch.bfloat16 like the scratch, got"):
        run(case, prefill)


@pytest.fixture(scope="module")
def flashinfer_attend():
    """FlashInfer's attention by backend, shape and dtype; compiled once."""
    loaded = {}

    def load(backend, case):
        key = backend, case.q.shape[1:], case.k.shape[1], case.q.dtype
        if key not in loaded:
            heads, head_dim = case.q.shape[1:]
            loaded[key] = library_attention.load_flashinfer(
                heads, case.k.shape[1], head_dim, case.q.dtype, case.q.device, (backend,)
            )
        attend, why = loaded[key]
        assert attend is not None, why
        return attend

    return load


def backends():
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return ("fa3", "fa2") if hopper else ("fa2",)


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.timeout(1200)  # its first use on a machine compiles
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    "head_dim, kv_heads, group, dtype",
    [(256, 4, 6, torch.bfloat16), (128, 8, 4, torch.bfloat16), (64, 3, 3, torch.float16)],
)
def test_flashinfer_matches_reference(
    device, flashinfer_attend, backend, head_dim, kv_heads, group, dtype
):
    """Error at most twice BF16 attention's, through FlashInfer itself, with many pieces.

    FA2 cuts keys and merges them in BF16 itself: there it holds in norm, and threefold for a value.
    """
    for prefix, new, piece, block in (
        ([20000], [300], 4096, QUERY_TOKENS),
        ([0, 8192, 1, 3000, 17], [1500, 7, 600, 129, 1], 1024, QUERY_TOKENS),
        ([9000], [1000], 1024, 384),
    ):
        case = make_case(device, head_dim, group, prefix, new, 16, dtype, kv_heads=kv_heads)
        attend = flashinfer_attend(backend, case)
        most = (3, 2) if backend == "fa2" else (2, 2)
        out = run(case, prefill_for(case, piece, attend, block))
        ratios = assert_close_enough(out, *case.expect(), most=most)
        print(f"{backend} D {head_dim} {prefix} + {new}: error over baseline {ratios}")


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.timeout(1200)
def test_the_default_library_serves_without_a_sync(device, flashinfer_attend):
    """As the backend uses it: PackedPrefill loads FlashInfer, plans, runs; nothing waits."""
    case = make_case(device, 256, 6, [20000, 0], [600, 100], 16, kv_heads=4)
    prefill = PackedPrefill(24, 4, 256, torch.bfloat16, device)
    blocks = prefill.plan([20000, 0], [600, 100])
    assert blocks is not None, prefill.library
    indices = torch.cat(case.prefix).to(device)
    out = torch.empty_like(case.q)
    torch.cuda.synchronize()
    for mode in ("default", "error"):  # the first call compiles our two kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prefill.run(
                blocks, case.q, case.k, case.v, out, *case.pool.sides, indices,
                sm_scale=case.q.shape[-1] ** -0.5, **case.pool.scales,
            )  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")
    case.check(out)
