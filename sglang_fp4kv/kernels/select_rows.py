"""Turn selected positions into lists of a pool's rows, for readers that take lists."""

import torch
import triton
import triton.language as tl

from sglang_fp4kv.kernels._check import check_index
from sglang_fp4kv.kernels._plan import cdiv, device_limits, pow2

_BLOCK = 1024  # entries of a program


@triton.jit(do_not_specialize=["first_token", "entries", "q_per_req"])
def _select_rows_kernel(
    selected_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    rows_ptr,  # int32
    row_indptr_ptr,  # int32
    first_token,
    entries,
    num_slots,
    q_per_req,
    GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    selection = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = n < entries
    begin = selection * entries
    slot = tl.load(selected_ptr + begin.to(tl.int64) + n, mask=live, other=-1).to(tl.int64)
    if LISTED:
        request = (first_token + selection // GROUPS) // q_per_req
        start = tl.load(kv_indptr_ptr + request).to(tl.int64)
        length = tl.load(kv_indptr_ptr + request + 1).to(tl.int64) - start
        there = (slot >= 0) & (slot < length)
        slot = tl.load(kv_indices_ptr + start + slot, mask=there, other=-1).to(tl.int64)
    there = (slot >= 0) & (slot < num_slots)
    row = tl.where(there, slot * GROUPS + selection % GROUPS, -1)
    tl.store(rows_ptr + begin + n, row.to(tl.int32), mask=live)
    if tl.program_id(0) == 0:
        tl.store(row_indptr_ptr + selection, begin)
        if selection == tl.num_programs(1) - 1:
            tl.store(row_indptr_ptr + selection + 1, begin + entries)


def select_rows(
    selected: torch.Tensor,
    lists: tuple[torch.Tensor, torch.Tensor] | None,
    rows: torch.Tensor,
    row_indptr: torch.Tensor,
    *,
    first_token: int,
    groups: int,
    q_per_req: int,
    num_slots: int,
) -> None:
    """Write one list of rows for every selection; rows and row_indptr change.

    Sizes: N selections (tokens x groups, tokens from first_token on), K entries of each
      selected    [N, K]       int32 | int64   contiguous: positions in the token's request, or slots
      lists       kv_indptr and kv_indices as attention_nvfp4 has them, int32 | int64, or None for slots
      rows        [>= N * K]   int32           out: slot * groups + group, -1 where nothing is selected
      row_indptr  [>= N + 1]   int32           out: multiples of K
    Runs on: sm_80; CUDA-graph safe: yes; allocates: no
    Raises: ValueError when rows or row_indptr are too short. The rest is sparse_nvfp4's to check
    Reference: tests/test_selection.py, the same in numpy
    """
    count, entries = selected.shape
    check_index("buffers.rows", rows, at_least=count * entries)
    check_index("buffers.row_indptr", row_indptr, at_least=count + 1)
    block = min(pow2(entries), 4096 if device_limits(selected.device).interpreter else _BLOCK)
    _select_rows_kernel[(cdiv(entries, block), count)](
        selected,
        *(lists or (selected, selected)),
        rows,
        row_indptr,
        first_token,
        entries,
        num_slots,
        q_per_req,
        GROUPS=groups,
        LISTED=lists is not None,
        BLOCK=block,
        num_warps=4,
    )
