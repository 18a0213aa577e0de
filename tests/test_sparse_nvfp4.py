"""sparse_nvfp4 against fp32 attention over the selected values, and against the dense reader."""

from dataclasses import dataclass, replace

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
)

from sglang_fp4kv.kernels import sparse_nvfp4 as module
from sglang_fp4kv.kernels._plan import (
    INTERPRETER,
    SM90_SHARED_BYTES,
    DeviceLimits,
    device_limits,
)
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4
from sglang_fp4kv.kernels.sparse_nvfp4 import plan_sparse, sparse_buffers, sparse_nvfp4

READERS = ("chosen", "tiled") if torch.cuda.is_available() else ("chosen",)
# Two sums in another order, as a share of the largest output: test_decode_nvfp4's VERIFY_BOUND.
ORDER_BOUND = 2e-5


@pytest.fixture(autouse=True, params=READERS)
def reader(request, monkeypatch):
    """On a GPU every test runs with the kernels the plan chooses and with the tiled one."""
    if request.param == "tiled":
        monkeypatch.setattr(
            module, "plan_sparse", lambda *args, **_: plan_sparse(*args, fragments=False)
        )
    return request.param


@dataclass
class Case:
    """Requests, their slots (on the CPU) and what each token's groups select of them."""

    pool: Pool
    slots: list[torch.Tensor]
    q: torch.Tensor  # [T, Hq, D]
    selected: torch.Tensor  # [T, G, K], on the CPU
    logit_cap: float = 0.0

    @property
    def q_per_req(self):
        return max(1, self.q.shape[0] // len(self.slots))

    @property
    def sm_scale(self):
        return self.q.shape[-1] ** -0.5

    def lists(self, index_dtype=torch.int64):
        device = self.q.device
        lengths = indptr([len(s) for s in self.slots]).to(device)
        return lengths, torch.cat(self.slots).to(device, index_dtype)

    def run(self, out=None, selected=None, lists=True, **extra):
        out = torch.full_like(self.q, float("nan")) if out is None else out
        selected = self.selected if selected is None else selected
        return sparse_nvfp4(
            self.q,
            *self.pool.sides,
            out,
            selected.to(self.q.device),
            *(self.lists() if lists else ()),
            q_per_req=self.q_per_req,
            sm_scale=self.sm_scale,
            logit_cap=self.logit_cap,
            **self.pool.scales,
            **extra,
        )

    def expect(self, low=None):
        """[T, Hq, D]: each group's query heads over its own selected positions, duplicates kept."""
        tokens, groups, _ = self.selected.shape
        heads, kv_heads = self.q.shape[1] // groups, self.pool.k_codes.shape[1] // groups
        rows = []
        for t in range(tokens):
            slots = self.slots[t // self.q_per_req]
            for g in range(groups):
                at = self.selected[t, g].long()
                at = slots[at[(at >= 0) & (at < len(slots))]]
                at = at[(at >= 0) & (at < self.pool.k_codes.shape[0])].to(self.q.device)
                k, v = (
                    x[:, g * kv_heads : (g + 1) * kv_heads] for x in self.pool.decoded(at)
                )
                q = self.q[t : t + 1, g * heads : (g + 1) * heads]
                visible = torch.ones(1, len(at), dtype=torch.bool, device=self.q.device)
                rows.append(attend(q, k, v, visible, self.sm_scale, self.logit_cap, low))
        return torch.cat(rows).view(tokens, -1, self.q.shape[-1])

    def check(self, out):
        low = torch.float16 if self.q.dtype == torch.float16 else torch.bfloat16
        return assert_close_enough(out, self.expect(), self.expect(low))


def make_case(
    device,
    head_dim=64,
    kv_heads=2,
    group=1,
    lens=(300, 40),
    groups=None,
    entries=33,
    q_per_req=1,
    page_size=1,
    dtype=torch.bfloat16,
    seed=0,
    by_codec=True,
):
    """Random selections without repetition, filled up with -1 where a request is too short.

    by_codec: values that the codec encodes on the CPU; otherwise random bytes, for large pools.
    """
    g = torch.Generator().manual_seed(seed)
    num_slots = (sum(-(-n // page_size) for n in lens) + 2) * page_size
    pool = make_pool(num_slots, kv_heads, head_dim, device)
    slots = paged_slots(list(lens), page_size, num_slots, g)
    if by_codec:
        fill_slots(pool, torch.cat(slots), g)
    else:
        of_device = torch.Generator(device).manual_seed(seed)
        for codes, scales in (pool.sides[:2], pool.sides[2:]):
            codes.random_(0, 256, generator=of_device)
            scales.random_(0x28, 0x38, generator=of_device)
    tokens, groups = len(lens) * q_per_req, groups or kv_heads
    selected = torch.full((tokens, groups, entries), -1)
    for t in range(tokens):
        for of_group in selected[t]:
            picked = torch.randperm(lens[t // q_per_req], generator=g)[:entries]
            of_group[torch.randperm(entries, generator=g)[: len(picked)]] = picked
    q = torch.randn(tokens, kv_heads * group, head_dim, generator=g)
    return Case(pool, slots, q.to(device, dtype), selected)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "head_dim, kv_heads, group, groups, page_size, dtype, index_dtype",
    [
        (64, 2, 1, 2, 1, torch.bfloat16, torch.int32),
        (80, 2, 5, 1, 16, torch.bfloat16, torch.int64),
        (96, 4, 3, 2, 16, torch.float16, torch.int32),
        (128, 4, 8, 4, 16, torch.bfloat16, torch.int64),
        (256, 4, 6, 4, 64, torch.bfloat16, torch.int32),
        (256, 1, 16, 1, 64, torch.bfloat16, torch.int64),
        (16, 2, 2, 2, 1, torch.float32, torch.int64),
    ],
)
def test_sparse_matches_reference(
    device, head_dim, kv_heads, group, groups, page_size, dtype, index_dtype
):
    case = make_case(
        device, head_dim, kv_heads, group, (300, 40, 1), groups, page_size=page_size, dtype=dtype
    )
    case.selected = case.selected.to(index_dtype)
    case.check(case.run())


@pytest.mark.interpreter
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_everything_selected_equals_dense(device, groups):
    case = make_case(device, 64, 4, 3, (257, 100), groups)
    case.q = case.q.float() if device.type == "cpu" else case.q
    selected = torch.full((2, groups, 260), -1)
    g = torch.Generator().manual_seed(3)
    for t, slots in enumerate(case.slots):
        for of_group in selected[t]:
            of_group[: len(slots)] = torch.randperm(len(slots), generator=g)
    case.selected = selected
    sparse, dense = (torch.empty_like(case.q, dtype=torch.float32) for _ in range(2))
    case.run(out=sparse)
    attention_nvfp4(
        case.q, *case.pool.sides, dense, *case.lists(), q_per_req=1, sm_scale=case.sm_scale,
        **case.pool.scales,
    )  # fmt: skip
    assert (sparse - dense).abs().max() <= ORDER_BOUND * dense.abs().max()


@pytest.mark.interpreter
def test_a_position_named_twice_counts_twice(device):
    case = make_case(device, 64, 2, 2, (100,), entries=6)
    case.selected[0, 0] = torch.tensor([7, 7, 7, 3, -1, 7])
    once = replace(case, selected=torch.tensor([7, 3]).expand(1, 2, 2).contiguous())
    out = case.run()
    case.check(out)
    assert (out[:, :2].float() - once.run()[:, :2].float()).abs().max() > 1e-3


@pytest.mark.interpreter
def test_what_is_not_there_is_no_key(device):
    """Below 0, past the request (though inside the list), a slot below 0, a slot past the pool."""
    case = make_case(device, 64, 2, 3, (50, 60), entries=8)
    plain = case.run()
    junk = torch.tensor([-1, -(2**31), 50, 51, 109, 2**31 - 1]).expand(2, 2, 6).clone()
    junk[1, :, 2:5] = torch.tensor([60, 61, 400])
    case.selected = torch.cat((junk[..., :3], case.selected, junk[..., 3:]), 2).contiguous()
    out = case.run()
    torch.testing.assert_close(out, plain, rtol=2**-7, atol=2**-9)
    case.check(out)
    assert torch.equal(case.run(selected=case.selected.int()), out)
    case.slots[0] = case.slots[0].clone()
    case.slots[0][case.selected[0, 0, 3]] = -1
    case.slots[0][case.selected[0, 0, 4]] = case.pool.k_codes.shape[0]
    case.check(case.run())


@pytest.mark.interpreter
def test_a_selection_without_a_key_gives_zeros(device):
    case = make_case(device, 64, 2, 3, (50, 60), entries=20)
    case.selected[0, 1] = -1
    out = case.run()
    assert (out[0, 3:] == 0).all() and (out[0, :3] != 0).any()
    case.check(out)
    assert (case.run(selected=torch.full((2, 2, 20), -1)) == 0).all()
    assert (case.run(selected=case.selected[..., :0].contiguous()) == 0).all()
    no_slots = replace(case, pool=Pool(*(x[:0] for x in case.pool.sides), **case.pool.scales))
    assert (no_slots.run() == 0).all()
    no_token = replace(case, q=case.q[:0], selected=case.selected[:0])
    assert no_token.run(lists=False).shape == (0, 6, 64)


@pytest.mark.interpreter
def test_slots_instead_of_positions(device):
    case = make_case(device, 64, 2, 3, (50, 60), entries=20)
    slots = torch.full_like(case.selected, -1)
    for t, own in enumerate(case.slots):
        there = case.selected[t] >= 0
        slots[t][there] = own[case.selected[t][there]]
    assert torch.equal(case.run(selected=slots, lists=False), case.run())
    slots[slots < 0] = case.pool.k_codes.shape[0]
    assert torch.equal(case.run(selected=slots, lists=False), case.run())


@pytest.mark.interpreter
def test_tokens_of_a_request_select_for_themselves(device):
    case = make_case(device, 64, 2, 3, (50, 120, 70), entries=40, q_per_req=4)
    case.check(case.run())


@pytest.mark.interpreter
@pytest.mark.parametrize("most", [1, 4, 7])
def test_many_selections_go_in_several_launches(device, most, monkeypatch):
    """Cut anywhere: 12 tokens of 2 groups, 4 tokens a request."""
    case = make_case(device, 64, 2, 3, (50, 120, 70), entries=20, q_per_req=4)
    out = case.run()
    monkeypatch.setattr(module, "MOST_SELECTIONS", most)
    torch.testing.assert_close(case.run(), out, rtol=0, atol=2**-8)
    case.check(case.run())


@pytest.mark.interpreter
def test_logit_cap(device):
    case = replace(make_case(device, 64, 2, 3, (100,)), logit_cap=5.0)
    case.q *= 8
    case.check(case.run())


@pytest.mark.interpreter
def test_only_selected_slots_are_read(device):
    """Every other row, other groups' rows of a selected slot too, has NaN scales."""
    case = make_case(device, 64, 2, 2, (80, 90), entries=25)
    kept = torch.zeros(case.pool.k_codes.shape[0], 2, dtype=torch.bool)
    for t, slots in enumerate(case.slots):
        for g in range(2):
            kept[slots[case.selected[t, g]], g] = True
    for side in case.pool.sides[1::2]:
        side[~kept.to(side.device)] = 0x7F
    out = case.run()
    case.check(out)


@pytest.mark.interpreter
def test_strides_and_float8_scales(device):
    case = make_case(device, 64, 2, 3, (50, 60), entries=20)
    expect = case.run()
    wide = torch.full((2, 8, 80), 7.0, dtype=case.q.dtype, device=device)
    wide[:, 1:-1, :64] = case.q
    case.q = wide[:, 1:-1, :64]
    scales = [x.view(torch.float8_e4m3fn) for x in case.pool.sides[1::2]]
    sides = (case.pool.k_codes, scales[0], case.pool.v_codes, scales[1])
    case.pool = Pool(*sides, **case.pool.scales)
    out = torch.empty_like(expect)
    assert case.run(out=out) is out and torch.equal(out, expect)
    # One selection for all heads takes any strides.
    one = make_case(device, 64, 2, 3, (50, 60), groups=1, entries=20)
    expect = one.run()
    pairs = [torch.stack((x, torch.full_like(x, 0x7F)), 1)[:, 0] for x in one.pool.sides]
    assert torch.equal(replace(one, pool=Pool(*pairs, **one.pool.scales)).run(), expect)


@pytest.mark.interpreter
def test_buffers_may_be_larger_and_must_not_be_smaller(device, monkeypatch):
    """With lists of rows, as readers have them that find no rows themselves."""
    monkeypatch.setattr(module, "finds_rows", lambda plan: False)
    case = make_case(device, 64, 2, 3, (300, 200), entries=150)
    expect = case.run()
    plan = module.plan_sparse(2, 2, 150, 6, 2, 64, device_limits(device))
    buffers = sparse_buffers(plan, 3, 2, 170, 6, 2, 64, device)
    for x in (buffers.attention.acc, buffers.attention.stat):
        x.fill_(float("nan"))
    assert torch.equal(case.run(plan=plan, buffers=buffers), expect)
    small = replace(buffers, rows=buffers.rows[:599])
    with pytest.raises(ValueError, match=r"buffers\.rows must have at least 600 entries, got 599"):
        case.run(plan=plan, buffers=small)
    small = replace(buffers, row_indptr=buffers.row_indptr[:4])
    with pytest.raises(ValueError, match=r"buffers\.row_indptr must have at least 5 .* got 4"):
        case.run(plan=plan, buffers=small)


@pytest.mark.interpreter
def test_own_buffers_and_plan_are_checked(device):
    case = make_case(device, 64, 2, 3, (300, 200), entries=150)
    plan = module.plan_sparse(2, 2, 150, 6, 2, 64, device_limits(device))
    buffers = sparse_buffers(plan, 2, 2, 150, 6, 2, 64, device)
    assert torch.equal(case.run(plan=plan, buffers=buffers), case.run())
    few = replace(buffers.attention, acc=buffers.attention.acc[:64])
    with pytest.raises(ValueError, match=r"buffers\.acc must be contiguous .* got torch.float32 with 64"):
        case.run(plan=plan, buffers=replace(buffers, attention=few))
    with pytest.raises(ValueError, match=r"plan.work_items must be at least budget \+ batch = .* got 3"):
        case.run(plan=replace(plan, work_items=3), buffers=buffers)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, group", [(64, 3), (128, 4), (256, 6)])
@pytest.mark.parametrize("lists", [True, False])
def test_finding_rows_in_the_reader_equals_lists_of_rows(device, monkeypatch, head_dim, group, lists):
    """The same splits over the same rows: bit for bit, junk among the positions, several launches."""
    case = make_case(device, head_dim, 4, group, (700, 90, 3000), entries=600, q_per_req=2, page_size=16)
    g = torch.Generator().manual_seed(5)
    case.selected[case.selected < 0] = -7
    some = torch.rand(case.selected.shape, generator=g) < 0.1
    case.selected[some] = torch.randint(-100, 5000, (int(some.sum()),), generator=g)
    if not lists:  # slots in place of positions: every slot has an owner
        case.selected %= sum(len(s) for s in case.slots)
        free = case.pool.k_scales >= 0x7F
        for scales in case.pool.sides[1::2]:
            scales[free] = 0
    for index_dtype in (torch.int32, torch.int64):
        case.selected = case.selected.to(index_dtype)
        found = case.run(lists=lists)
        with monkeypatch.context() as patch:
            patch.setattr(module, "finds_rows", lambda plan: False)
            assert torch.equal(case.run(lists=lists), found)
            patch.setattr(module, "MOST_SELECTIONS", 8)
            several = case.run(lists=lists)
        with monkeypatch.context() as patch:
            patch.setattr(module, "MOST_SELECTIONS", 8)
            assert torch.equal(case.run(lists=lists), several)
    if lists:
        case.check(found)


BAD = {
    r"selected must be int32 or int64, got torch.int16": {"selected": lambda x: x.short()},
    r"selected must be contiguous \[2, groups, positions\], got \(2, 20\)": {
        "selected": lambda x: x[:, 0].contiguous()
    },
    r"selected must be contiguous \[2, groups, positions\], got \(1, 2, 20\)": {
        "selected": lambda x: x[:1]
    },
    r"got \(2, 2, 10\) with strides \(40, 20, 2\)": {"selected": lambda x: x[..., ::2]},
    r"number of groups that divides the 2 KV heads, got 4": {
        "selected": lambda x: x.repeat(1, 2, 1)
    },
    r"number of groups that divides the 2 KV heads, got 0": {"selected": lambda x: x[:, :0]},
    r"selected must have fewer positions a group, got 1073741824": {
        "selected": lambda x: torch.empty(2, 2, 2**30, dtype=x.dtype, device="meta")
    },
    r"q_per_req must divide the 2 rows of q, got 3": {"q_per_req": 3},
    r"q_per_req must divide the 2 rows of q, got 0": {"q_per_req": 0},
    r"kv_indptr and kv_indices go together, got None for kv_indices": {"kv_indices": None},
    r"kv_indptr and kv_indices go together, got None for kv_indptr": {"kv_indptr": None},
    r"kv_indptr must have at least 3 entries, got 2": {"kv_indptr": lambda x: x[:2]},
    r"kv_indices must be int32 or int64, got torch.float32": {"kv_indices": lambda x: x.float()},
    r"out must be \(2, 6, 64\) like q, got \(2, 6, 32\)": {"out": lambda x: x[..., :32]},
    r"out must be contiguous, got strides \(512, 64, 1\)": {
        "out": lambda x: torch.cat((x, x[:, :2]), 1)[:, :6]
    },
    r"v_codes must have 112 slots and 2 heads, got \(111, 2, 32\)": {
        "v_codes": lambda x: x[:-1],
        "v_scales": lambda x: x[:-1],
    },
    r"k_scales must have slots and their heads side by side for 2 groups, got strides \(16, 4, 1\)": {
        "k_scales": lambda x: torch.cat((x, x), 1)[:, :2]
    },
    r"k_codes must have fewer slots for 2 groups, got 1073741824": {
        name: lambda x: torch.empty(2**30, *x.shape[1:], dtype=x.dtype, device="meta")
        for name in ("k_codes", "k_scales", "v_codes", "v_scales")
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    case = make_case("cpu", 64, 2, 3, (50, 60), entries=20)
    names = ("k_codes", "k_scales", "v_codes", "v_scales")
    args = dict(zip(names, case.pool.sides, strict=True)) | {
        "q": case.q,
        "out": case.q.clone(),
        "selected": case.selected,
        "q_per_req": 1,
        "sm_scale": 0.125,
        **dict(zip(("kv_indptr", "kv_indices"), case.lists(), strict=True)),
        **case.pool.scales,
    }
    args |= {k: v(args[k]) if callable(v) else v for k, v in BAD[message].items()}
    with pytest.raises(ValueError, match=message):
        sparse_nvfp4(**args)


def test_plan_depends_on_shapes_and_bounds_its_programs():
    h200 = DeviceLimits(132, SM90_SHARED_BYTES, 90)
    one = plan_sparse(1, 4, 2048, 24, 4, 256, h200)
    assert one.kind == "decode" and one.min_tiles * one.block_n == 64
    assert one == plan_sparse(1, 4, 2048, 24, 4, 256, h200)
    many = plan_sparse(8192, 4, 2048, 24, 4, 256, h200)
    assert many == plan_sparse(module.MOST_SELECTIONS // 4, 4, 2048, 24, 4, 256, h200)
    assert plan_sparse(1, 4, 2048, 64, 4, 256, h200).kind == "verify"  # 16 rows a KV head
    assert plan_sparse(1, 4, 2048, 24, 4, 256, h200, fragments=False).kind == "tiled"
    assert plan_sparse(1, 4, 2048, 24, 4, 256, INTERPRETER).kind == "tiled"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads, group, head_dim", [(4, 6, 256), (8, 4, 128), (2, 16, 128)])
@pytest.mark.parametrize("requests", [1, 7, 64])
def test_2048_of_long_requests(device, kv_heads, group, head_dim, requests):
    longest = 65536 if requests < 64 else 8192
    g = torch.Generator().manual_seed(requests)
    lens = torch.randint(longest // 2, longest, (requests,), generator=g).tolist()
    lens[0] = longest
    case = make_case(
        device, head_dim, kv_heads, group, tuple(lens), entries=2048, page_size=16, by_codec=False
    )
    case.check(case.run())


@pytest.mark.gpu
def test_more_selections_than_a_launch_takes(device):
    case = make_case(device, 128, 4, 4, (4000, 900), entries=256, q_per_req=160, page_size=16)
    assert case.q.shape[0] * 4 > 2 * module.MOST_SELECTIONS
    case.check(case.run())


@pytest.mark.gpu
def test_graph_replay_equals_eager(device):
    """One capture, then other selections, lists and lengths in the same tensors."""
    case = make_case(device, 256, 4, 6, (9000,) * 6, entries=2048, page_size=16)
    selected = case.selected.to(device)
    kv_indptr, kv_indices = case.lists()
    out = torch.empty_like(case.q)

    def call(result):
        sparse_nvfp4(
            case.q, *case.pool.sides, result, selected, kv_indptr, kv_indices,
            sm_scale=case.sm_scale, **case.pool.scales,
        )  # fmt: skip

    call(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out)
    g = torch.Generator().manual_seed(7)
    owned = case.slots
    for lens in ((9000,) * 6, (1, 9000, 0, 700, 8999, 2048)):
        case.slots = [s[torch.randperm(9000, generator=g)[:n]] for s, n in zip(owned, lens)]
        case.selected = torch.randint(-50, 9050, case.selected.shape, generator=g)
        kv_indptr.copy_(indptr(lens).to(device))
        kv_indices[: sum(lens)] = torch.cat(case.slots).to(device)
        selected.copy_(case.selected)
        graph.replay()
        eager = torch.empty_like(out)
        call(eager)
        assert torch.equal(out, eager)
        case.check(out)
