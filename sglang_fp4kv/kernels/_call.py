"""One decode or verify call as the kernels take it, and the buffers of its partial results."""

from dataclasses import dataclass

import torch

from sglang_fp4kv.kernels._plan import AttentionPlan


@dataclass(frozen=True)
class AttentionCall:
    """Checked arguments of attention_nvfp4; what is absent points at something harmless."""

    q: torch.Tensor
    out: torch.Tensor
    sides: tuple[torch.Tensor, ...]  # k_codes, k_scales, v_codes, v_scales, uint8
    lists: tuple[torch.Tensor, ...]  # indptr, indices, block slots, mask, its indptr, offsets
    visibility: dict  # constexprs HAS_BLOCK, USE_MASK, HAS_OFFSETS, CAUSAL, WINDOW, LOGIT_CAP
    batch: int
    q_per_req: int
    k_global_scale: float
    v_global_scale: float
    sm_scale: float

    @property
    def num_kv_heads(self) -> int:
        return self.sides[0].shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    @property
    def logit_cap(self) -> float:
        return self.visibility["LOGIT_CAP"]


@dataclass(frozen=True)
class AttentionBuffers:
    """Partial results. Sized for the largest call; smaller calls use the front of them."""

    acc: torch.Tensor  # fp32, at least partial_rows * head_dim
    stat: torch.Tensor  # fp32, at least partial_rows * 2
    sched: torch.Tensor  # int32, at least batch * 2


def partial_rows(plan: AttentionPlan, q_per_req: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Rows of partial results a call of this plan may leave."""
    if plan.kind == "tiled":
        return plan.work_items * q_per_req * num_q_heads
    return plan.work_items * plan.row_blocks * num_kv_heads * plan.block_m


def attention_buffers(
    rows: int, batch: int, head_dim: int, device: torch.device | str
) -> AttentionBuffers:
    """Allocate buffers for ``rows`` partial rows, for instance before CUDA-graph capture."""
    return AttentionBuffers(
        acc=torch.empty(rows * head_dim, dtype=torch.float32, device=device),
        stat=torch.empty(rows * 2, dtype=torch.float32, device=device),
        sched=torch.empty(batch * 2, dtype=torch.int32, device=device),
    )


def check_buffers(buffers: AttentionBuffers, rows: int, batch: int, head_dim: int) -> None:
    """Raise ValueError unless ``buffers`` hold ``rows`` partial rows and ``batch`` requests."""
    wants = {
        "acc": (torch.float32, rows * head_dim),
        "stat": (torch.float32, rows * 2),
        "sched": (torch.int32, batch * 2),
    }
    for name, (dtype, numel) in wants.items():
        x = getattr(buffers, name)
        if x.dtype != dtype or x.numel() < numel or not x.is_contiguous():
            raise ValueError(
                f"buffers.{name} must be contiguous {dtype} with at least {numel} entries, "
                f"got {x.dtype} with {x.numel()}"
            )


def check_plan(
    plan: AttentionPlan,
    buffers: AttentionBuffers,
    batch: int,
    q_per_req: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Raise ValueError unless plan and buffers are enough for a call of this size."""
    if plan.work_items < plan.budget + batch:
        raise ValueError(
            f"plan.work_items must be at least budget + batch = {plan.budget + batch}, "
            f"got {plan.work_items}"
        )
    rows = num_q_heads // num_kv_heads * q_per_req
    if plan.block_m * plan.row_blocks < rows:
        raise ValueError(
            f"plan covers {plan.block_m * plan.row_blocks} query rows a KV head, got {rows}"
        )
    parts = partial_rows(plan, q_per_req, num_q_heads, num_kv_heads)
    check_buffers(buffers, parts, batch, head_dim)
