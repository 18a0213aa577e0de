"""Which rows of the requests' blocks a prefix commit writes, and where: shared by both entries."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_slot(
    row,
    live,
    loc_ptr,
    commit_lens_ptr,
    loc_request_stride,
    loc_row_stride,
    commit_lens_stride,
    block_rows,
    num_slots,
):
    """Slot [N] int64 of each block row [N] int64 and whether it is to be written."""
    request = row // block_rows
    position = row % block_rows
    length = tl.load(commit_lens_ptr + request * commit_lens_stride, mask=live, other=0)
    live = live & (position < length)
    loc = loc_ptr + request * loc_request_stride + position * loc_row_stride
    slot = tl.load(loc, mask=live, other=-1).to(tl.int64)
    return slot, live & (slot >= 0) & (slot < num_slots)


def check_block(loc_2d: torch.Tensor, commit_lens: torch.Tensor, tokens: int) -> None:
    if loc_2d.ndim != 2:
        raise ValueError(f"loc_2d must be [B, N], got {tuple(loc_2d.shape)}")
    if loc_2d.numel() != tokens:
        raise ValueError(
            f"k and v must have one row per entry of loc_2d {tuple(loc_2d.shape)}, "
            f"got {tokens} rows"
        )
    if tuple(commit_lens.shape) != (loc_2d.shape[0],):
        raise ValueError(
            f"commit_lens must be [{loc_2d.shape[0]}], got {tuple(commit_lens.shape)}"
        )
    for name, x in (("loc_2d", loc_2d), ("commit_lens", commit_lens)):
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
