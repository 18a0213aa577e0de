"""Attention over selected positions of a packed pool: only the selected rows are read.

A selection (one query token's positions for one group of KV heads) is read as the dense readers read
a request: rows of a group's heads lie side by side in a slot, so a slot is one row a group, and what
is selected is a list of these rows. decode_fragments finds the rows itself; for the other readers
select_rows writes the lists. The readers, their splits and their merge stay the same.
"""

import dataclasses

import torch

from sglang_fp4kv.formats import check_global_scale
from sglang_fp4kv.kernels._call import (
    AttentionBuffers,
    AttentionCall,
    attention_buffers,
    check_plan,
    partial_rows,
)
from sglang_fp4kv.kernels._check import (
    check_index,
    check_logit_cap,
    check_out,
    check_pool_side,
    check_rows,
)
from sglang_fp4kv.kernels._plan import (
    AttentionPlan,
    DeviceLimits,
    device_limits,
    plan_attention,
)
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4, whole_words
from sglang_fp4kv.kernels.select_rows import select_rows

# Selections of one launch: programs of readers that take lists look at all of them to find their own.
MOST_SELECTIONS = 512
_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SparseBuffers:
    """What a call leaves on its way. Sized for the largest call; smaller calls use the front."""

    rows: torch.Tensor  # int32, at least selections of a launch * selected; unused by decode_fragments
    row_indptr: torch.Tensor  # int32, at least selections of a launch + 1; the same
    attention: AttentionBuffers


def finds_rows(plan: AttentionPlan) -> bool:
    """Whether the plan's kernel takes positions; the others take lists of rows."""
    return plan.kind == "decode"


def _tokens_a_launch(tokens: int, groups: int) -> int:
    return max(1, min(tokens, MOST_SELECTIONS // groups))


def plan_sparse(
    tokens: int,
    groups: int,
    selected: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    limits: DeviceLimits,
    fragments: bool = True,
) -> AttentionPlan:
    """The plan of one launch, from shapes alone: plan_attention's.

    fragments: whether q and the pool are of a kind that the fragment kernels read.
    """
    return plan_attention(
        _tokens_a_launch(tokens, groups) * groups,
        1,
        num_q_heads // groups,
        num_kv_heads // groups,
        head_dim,
        selected,
        limits,
        fragments,
    )


def sparse_buffers(
    plan: AttentionPlan,
    tokens: int,
    groups: int,
    selected: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> SparseBuffers:
    """Allocate what calls of these shapes need, for instance before CUDA-graph capture."""
    selections = _tokens_a_launch(tokens, groups) * groups
    parts = partial_rows(plan, 1, num_q_heads // groups, num_kv_heads // groups)
    rows, indptr = (0, 0) if finds_rows(plan) else (selections * selected, selections + 1)
    return SparseBuffers(
        rows=torch.empty(rows, dtype=torch.int32, device=device),
        row_indptr=torch.empty(indptr, dtype=torch.int32, device=device),
        attention=attention_buffers(parts, selections, head_dim, device),
    )


def _check_selected(selected: torch.Tensor, tokens: int, num_kv_heads: int) -> tuple[int, int]:
    """Groups and selected entries of ``selected``; ValueError unless it fits q and the pool."""
    if selected.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"selected must be int32 or int64, got {selected.dtype}")
    if selected.ndim != 3 or selected.shape[0] != tokens or not selected.is_contiguous():
        raise ValueError(
            f"selected must be contiguous [{tokens}, groups, positions], "
            f"got {tuple(selected.shape)} with strides {selected.stride()}"
        )
    groups, entries = selected.shape[1:]
    if groups == 0 or num_kv_heads % groups:
        raise ValueError(
            f"selected must have a number of groups that divides the {num_kv_heads} KV heads, "
            f"got {groups}"
        )
    if _tokens_a_launch(tokens, groups) * groups * entries > _INT32_MAX:
        raise ValueError(f"selected must have fewer positions a group, got {entries}")
    return groups, entries


def _check_lists(
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    q_per_req: int,
    tokens: int,
) -> None:
    if q_per_req < 1 or tokens % q_per_req:
        raise ValueError(f"q_per_req must divide the {tokens} rows of q, got {q_per_req}")
    if (kv_indptr is None) != (kv_indices is None):
        missing = "kv_indptr" if kv_indptr is None else "kv_indices"
        raise ValueError(f"kv_indptr and kv_indices go together, got None for {missing}")
    if kv_indptr is not None:
        check_index("kv_indptr", kv_indptr, at_least=tokens // q_per_req + 1)
        check_index("kv_indices", kv_indices)


def _by_group(name: str, side: torch.Tensor, groups: int) -> torch.Tensor:
    """[S, H, W] as rows of a group's heads, [S * groups, H / groups, W]."""
    if groups > 1 and side.stride(0) != side.shape[1] * side.stride(1):
        raise ValueError(
            f"{name} must have slots and their heads side by side for {groups} groups, "
            f"got strides {side.stride()}"
        )
    return side.unflatten(1, (groups, -1)).flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One launch's selections: what every reader of them is called with."""

    q: torch.Tensor  # [selections, query heads of a group, D]
    sides: tuple[torch.Tensor, ...]  # rows of a group's heads
    out: torch.Tensor
    selected: torch.Tensor  # [selections, entries]
    lists: tuple[torch.Tensor, torch.Tensor] | None  # kv_indptr, kv_indices
    first_token: int
    groups: int
    q_per_req: int
    scales: dict  # k_global_scale, v_global_scale, sm_scale
    logit_cap: float

    @property
    def entries(self) -> int:
        return self.selected.shape[1]

    @property
    def num_slots(self) -> int:
        return self.sides[0].shape[0] // self.groups


def _read_positions(
    x: _Launch, plan: AttentionPlan, buffers: AttentionBuffers, limits: DeviceLimits
) -> None:
    """decode_fragments, which finds the rows itself."""
    # Imported where a GPU runs it: Gluon has no interpreter.
    from sglang_fp4kv.kernels._selection import Selection
    from sglang_fp4kv.kernels.fragments_nvfp4 import launch_fragments

    selections, heads, head_dim = x.q.shape
    check_plan(plan, buffers, selections, 1, heads, x.sides[0].shape[1], head_dim)
    nothing = x.selected  # harmless to point at
    indptr, indices = x.lists or (nothing, nothing)
    call = AttentionCall(
        q=x.q,
        out=x.out,
        sides=x.sides,
        lists=(indptr, indices, x.selected, x.sides[0], nothing, nothing),
        visibility={
            "HAS_BLOCK": False,
            "USE_MASK": False,
            "HAS_OFFSETS": False,
            "CAUSAL": False,
            "WINDOW": 0,
            "LOGIT_CAP": float(x.logit_cap),
        },
        batch=selections,
        q_per_req=1,
        **x.scales,
    )
    selection = Selection(
        x.first_token, x.entries, x.num_slots, x.q_per_req, x.groups, x.lists is not None
    )
    launch_fragments(call, plan, buffers, limits, selection)


def _read_lists(x: _Launch, plan: AttentionPlan, buffers: SparseBuffers) -> None:
    """Any reader, over lists of rows that are written first."""
    select_rows(
        x.selected,
        x.lists,
        buffers.rows,
        buffers.row_indptr,
        first_token=x.first_token,
        groups=x.groups,
        q_per_req=x.q_per_req,
        num_slots=x.num_slots,
    )
    attention_nvfp4(
        x.q,
        *x.sides,
        x.out,
        buffers.row_indptr,
        buffers.rows,
        q_per_req=1,
        **x.scales,
        logit_cap=x.logit_cap,
        causal=False,
        plan=plan,
        buffers=buffers.attention,
    )


def sparse_nvfp4(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scales: torch.Tensor,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor,
    out: torch.Tensor,
    selected: torch.Tensor,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    *,
    q_per_req: int = 1,
    k_global_scale: float,
    v_global_scale: float,
    sm_scale: float,
    logit_cap: float = 0.0,
    plan: AttentionPlan | None = None,
    buffers: SparseBuffers | None = None,
) -> torch.Tensor:
    """Attend from every query token to the positions selected for it; out is overwritten.

    Sizes: T query tokens, Hq query heads, H KV heads, D head dim, S slots, B = T / q_per_req requests
      q, out             [T, Hq, D]      bf16 | fp16 | fp32   out contiguous; q copied where it is not
      k_codes, v_codes   [S, H, D//2]    uint8                slots, heads side by side where G > 1
      k_scales, v_scales [S, H, D//16]   uint8 | float8_e4m3  no sign bit, not NaN in selected slots
      selected           [T, G, K]       int32 | int64        contiguous; G divides H: group g selects
        for KV heads g * H/G to (g+1) * H/G - 1 and their query heads. G = H: each head its own
      kv_indptr          [>= B+1]        int32 | int64        with kv_indices, as attention_nvfp4 has
      kv_indices         [>= kv_indptr[B]] int32 | int64      them: ``selected`` holds positions in
        token t's request t // q_per_req. Without both it holds slots
    Selections: in any order. An entry below 0, at or past the request's length, or whose slot is not
      in the pool is no key: -1 fills a selection up. One that is named twice counts twice. A selection
      without a key gives zeros. What a token may see is the selector's to decide: no causal mask here
    Kernels: for up to 8 query heads a KV head (16-bit q, head dim 64, 128 or 256, whole-word pools)
      decode_fragments and its merge; for the rest one that writes lists of rows, then those of
      attention_nvfp4. Once for every MOST_SELECTIONS selections. Slots not selected are never read
    Numerics: as attention_nvfp4
    Runs on: sm_80; CUDA-graph safe: yes, splits depend on shapes alone; allocates unless buffers
      are passed
    Raises: ValueError for shapes, dtypes and strides that do not fit (the message names the value)
    Reference: tests/reference_attention.py over codec.decode of the selected slots
    """
    check_rows("q", q)
    check_out(out, q)
    tokens, num_q_heads, head_dim = q.shape
    k_scales = check_pool_side("k", k_codes, k_scales, num_q_heads, head_dim)
    v_scales = check_pool_side("v", v_codes, v_scales, num_q_heads, head_dim)
    if v_codes.shape[:2] != k_codes.shape[:2]:
        raise ValueError(
            f"v_codes must have {k_codes.shape[0]} slots and {k_codes.shape[1]} heads, "
            f"got {tuple(v_codes.shape)}"
        )
    num_slots, num_kv_heads = k_codes.shape[:2]
    groups, entries = _check_selected(selected, tokens, num_kv_heads)
    _check_lists(kv_indptr, kv_indices, q_per_req, tokens)
    if num_slots * groups > _INT32_MAX:
        raise ValueError(f"k_codes must have fewer slots for {groups} groups, got {num_slots}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    sides = tuple(
        _by_group(name, side, groups)
        for name, side in zip(
            ("k_codes", "k_scales", "v_codes", "v_scales"),
            (k_codes, k_scales, v_codes, v_scales),
            strict=True,
        )
    )
    scales = {
        "k_global_scale": check_global_scale(k_global_scale),
        "v_global_scale": check_global_scale(v_global_scale),
        "sm_scale": sm_scale,
    }
    check_logit_cap(logit_cap)
    if tokens == 0:
        return out
    if num_slots == 0 or entries == 0:  # nothing is selected, and no slot could stand in for none
        return out.zero_()

    limits = device_limits(q.device)
    sizes = tokens, groups, entries, num_q_heads, num_kv_heads, head_dim
    if plan is None:
        fragments = q.dtype != torch.float32 and whole_words(*sides)
        plan = plan_sparse(*sizes, limits, fragments=fragments)
    if buffers is None:
        buffers = sparse_buffers(plan, *sizes, q.device)
    q, by_group = (x.reshape(tokens * groups, num_q_heads // groups, head_dim) for x in (q, out))
    selected = selected.flatten(0, 1)
    step = _tokens_a_launch(tokens, groups)
    for first in range(0, tokens, step):
        own = slice(first * groups, min(first + step, tokens) * groups)
        launch = _Launch(
            q=q[own],
            sides=sides,
            out=by_group[own],
            selected=selected[own],
            lists=None if kv_indptr is None else (kv_indptr, kv_indices),
            first_token=first,
            groups=groups,
            q_per_req=q_per_req,
            scales=scales,
            logit_cap=logit_cap,
        )
        if finds_rows(plan):
            _read_positions(launch, plan, buffers.attention, limits)
        else:
            _read_lists(launch, plan, buffers)
    return out
