"""Start the register-fragment kernels (decode_fragments, verify_fragments) and their merge."""

import functools
import math

import torch

from sglang_fp4kv.kernels._call import AttentionBuffers, AttentionCall
from sglang_fp4kv.kernels._fragments import E2M1, E4M3, FOLDS, TWIN
from sglang_fp4kv.kernels._plan import AttentionPlan, DeviceLimits, pow2
from sglang_fp4kv.kernels._selection import DENSE, Selection
from sglang_fp4kv.kernels._verify_parts import verify_layouts
from sglang_fp4kv.kernels.decode_fragments import _decode_fragments_kernel, decode_layouts
from sglang_fp4kv.kernels.merge_fragments import decode_order, merge_fragments, verify_order
from sglang_fp4kv.kernels.verify_fragments import _verify_fragments_kernel

_decode_layouts = functools.cache(decode_layouts)
_verify_layouts = functools.cache(verify_layouts)


def place(limits: DeviceLimits) -> int:
    """How this device turns codes into fp16: one of _fragments.FOLDS."""
    if limits.capability >= 100:
        return E2M1
    return E4M3 if limits.capability >= 89 else TWIN


def row_split(block_m: int) -> tuple[int, int]:
    """Row blocks N1 and N2 of verify_fragments, each a power of two."""
    largest = 1 << (block_m.bit_length() - 1)
    return largest, block_m - largest


def constexprs(
    plan: AttentionPlan,
    batch: int,
    q_per_req: int,
    group: int,
    head_dim: int,
    limits: DeviceLimits,
    selection: Selection = DENSE,
) -> dict:
    """The kernel's constexprs but those of AttentionCall.visibility."""
    shape = {
        "Q": q_per_req,
        "GROUP": group,
        "D": head_dim,
        "MIN_TILES": plan.min_tiles,
        "BLOCK_B": max(32 * plan.num_warps, 0 if selection.groups else pow2(batch)),
        "PLACE": place(limits),
    }
    if plan.kind == "decode":
        shape |= {"T": plan.block_n, "GROUPS": selection.groups, "LISTED": selection.listed}
        return shape | _decode_layouts(head_dim, plan.block_n)
    n1, n2 = row_split(plan.block_m)
    layouts = _verify_layouts(head_dim, plan.num_warps)
    return shape | {"N1": n1, "N2": n2, "WARPS": plan.num_warps} | layouts


def launch_fragments(
    call: AttentionCall,
    plan: AttentionPlan,
    buffers: AttentionBuffers,
    limits: DeviceLimits,
    selection: Selection = DENSE,
) -> None:
    """Start the kernel and its merge; attention_nvfp4 or sparse_nvfp4 checked the call.

    selection: for a plan of kind decode, where the call's block slots are what is selected.
    """
    q, head_dim = call.q, call.q.shape[2]
    fold = FOLDS[place(limits)]
    qk_scale = call.sm_scale * call.k_global_scale * fold
    if call.logit_cap == 0:
        qk_scale *= math.log2(math.e)
    v_scale = call.v_global_scale * fold
    k_codes, k_scales, v_codes, v_scales = call.sides
    if plan.kind == "decode":
        kernel, order = _decode_fragments_kernel, decode_order(head_dim)
        chosen = selection.first_token, selection.entries, selection.num_slots, selection.q_per_req
    else:
        chosen = ()
        kernel, order = _verify_fragments_kernel, verify_order(head_dim, plan.num_warps)
        k_scales, v_scales = k_scales.view(torch.int32), v_scales.view(torch.int32)
    sides = k_codes.view(torch.int32), k_scales, v_codes.view(torch.int32), v_scales
    kernel[(call.num_kv_heads, plan.work_items, plan.row_blocks)](
        q,
        *sides,
        *call.lists,
        buffers.acc,
        buffers.stat,
        buffers.sched,
        call.out,
        call.batch,
        plan.budget,
        *chosen,
        qk_scale,
        v_scale,
        *q.stride()[:2],
        *call.out.stride()[:2],
        *(stride for side in sides for stride in side.stride()[:2]),
        **constexprs(plan, call.batch, call.q_per_req, call.group, head_dim, limits, selection),
        **call.visibility,
        num_warps=plan.num_warps,
    )
    merge_fragments(
        call.out,
        buffers.acc,
        buffers.stat,
        buffers.sched,
        call.q_per_req,
        call.num_kv_heads,
        plan.block_m,
        plan.row_blocks,
        plan.budget,
        order,
        v_scale,
    )
