"""Launch shapes of the packed readers, from tensor shapes and the device alone (no sync)."""

import functools
import math
from dataclasses import dataclass

import torch

from sglang_fp4kv.formats import packed_bytes
from sglang_fp4kv.kernels._tile import ASM_PURE, ASM_STAGED, PLAIN

SM90_SHARED_BYTES = 232448
SM120_SHARED_BYTES = 101376


@dataclass(frozen=True)
class DeviceLimits:
    sm_count: int
    shared_bytes: int  # most dynamic shared memory one block may have
    capability: int  # 90, 100, 121; 0 for the interpreter

    @property
    def interpreter(self) -> bool:
        return self.capability == 0


INTERPRETER = DeviceLimits(sm_count=2, shared_bytes=SM90_SHARED_BYTES, capability=0)


@functools.cache
def _cuda_limits(index: int) -> DeviceLimits:
    props = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        sm_count=props.multi_processor_count,
        shared_bytes=props.shared_memory_per_block_optin,
        capability=10 * props.major + props.minor,
    )


def device_limits(device: torch.device) -> DeviceLimits:
    """What the plan needs to know of a device. A CPU means the Triton interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _cuda_limits(index)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def half_width(head_dim: int) -> int:
    """Columns of a half-width tile; a dot needs at least 16."""
    return max(16, pow2(packed_bytes(head_dim)))


def code_placement(limits: DeviceLimits, block_m: int) -> int:
    """PLAIN, ASM_PURE or ASM_STAGED of _tile.py for a program of block_m query rows."""
    if limits.capability < 89:
        return PLAIN
    if limits.capability // 10 == 10 and block_m >= 64:  # tcgen05
        return ASM_PURE
    return ASM_STAGED


@dataclass(frozen=True)
class AttentionPlan:
    """How one decode or verify call is cut. Fixed at CUDA-graph capture.

    The KV tiles of all requests are shared out on the device over about ``budget`` work items a KV
    head; ``work_items`` is the number launched, enough for any lengths.
    """

    block_m: int  # query rows (head of the group x token of the block) of one program, padded
    block_n: int  # keys of one tile
    row_blocks: int
    budget: int
    work_items: int
    min_tiles: int  # fewest tiles worth a split
    num_warps: int
    num_stages: int
    kind: str = "tiled"  # decode | verify: decode_fragments, verify_fragments; tiled: tiled_nvfp4


FRAGMENT_HEAD_DIMS = (64, 128, 256)
_DECODE_ROWS = 8
_VERIFY_ROWS = (16, 24, 32, 48)
# Keys of a decode tile, and programs a multiprocessor holds: what the registers allow.
_DECODE_TILE = {64: (32, 12), 128: (32, 12), 256: (32, 8)}
# Warps of a verify program and programs a multiprocessor holds: the wide ones, which hold twice the
# values of V a thread, and the narrow ones, which always fit.
_VERIFY_WIDE = {256: (4, 2)}
_VERIFY_LEAST_TILES = 4  # of 64 keys or more; fewer cost less than a program's start and its merge
_VERIFY_NARROW = {64: (2, 6), 128: (4, 3), 256: (8, 1)}


def _verify_tile(head_dim: int, limits: DeviceLimits) -> tuple[int, int]:
    """sm_120 and 121 have shared memory for one program only, and their compiler spills the wide one."""
    wide = limits.shared_bytes >= SM90_SHARED_BYTES and head_dim in _VERIFY_WIDE
    return (_VERIFY_WIDE if wide else _VERIFY_NARROW)[head_dim]


def _decode_tile(head_dim: int, block_m: int, limits: DeviceLimits) -> tuple[int, int, int]:
    """Keys of a tile, warps, stages. tests/test_compile_readers.py shows what each takes."""
    if limits.interpreter:
        return 256, 4, 1
    large = limits.shared_bytes >= SM90_SHARED_BYTES
    half = half_width(head_dim)
    padded = packed_bytes(head_dim) != half
    if half > 64:
        stages = 3 if large else 2
        return (64, 4, stages) if block_m <= 32 else (64, 8, stages)
    if block_m == 16 and not padded:
        return (128, 4, 3) if large or half <= 32 else (64, 4, 3)
    wide = block_m == 64 and (padded or not large)
    return 64, 8 if wide else 4, 3


def _budget(batch: int, resident: int) -> int:
    """Work items a KV head: what the device holds at once, or equal shares that fill whole waves.

    More requests than programs leave a last wave that is partly empty; cutting every request into
    the same few parts shrinks it. A part costs about as much as 3% of a wave.
    """
    if batch <= resident:
        return resident

    def gain(parts):
        waves = batch * parts / resident
        return waves / math.ceil(waves) - 0.03 * parts

    return batch * max(range(1, 5), key=gain)


def plan_attention(
    batch: int,
    q_per_req: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    limits: DeviceLimits,
    fragments: bool = True,
) -> AttentionPlan:
    """Choose kernel, tile, splits, warps and stages for decode (q_per_req 1) or verify.

    max_kv_len bounds the keys of one request; an overestimate only costs idle programs.
    fragments: whether q and the pool are of a kind that the fragment kernels read.
    """
    rows = num_q_heads // num_kv_heads * q_per_req
    num_stages, min_tiles = 1, 2
    if fragments and head_dim in FRAGMENT_HEAD_DIMS and limits.capability >= 80:
        if rows <= _DECODE_ROWS:
            kind, block_m, row_blocks, num_warps = "decode", _DECODE_ROWS, 1, 1
            block_n, programs = _DECODE_TILE[head_dim]
        else:
            kind, row_blocks = "verify", cdiv(rows, _VERIFY_ROWS[-1])
            block_m = min(n for n in _VERIFY_ROWS if n * row_blocks >= rows)
            num_warps, programs = _verify_tile(head_dim, limits)
            block_n = 16 * num_warps
            min_tiles = _VERIFY_LEAST_TILES
    else:
        kind, block_m = "tiled", min(64, max(16, pow2(rows)))
        row_blocks = cdiv(rows, block_m)
        block_n, num_warps, num_stages = _decode_tile(head_dim, block_m, limits)
        programs = 2 if num_warps == 4 else 1
        min_tiles = 1 if limits.interpreter else 2
    resident = max(1, limits.sm_count * programs // (num_kv_heads * row_blocks))
    most = batch * cdiv(max_kv_len + q_per_req, block_n * min_tiles)  # none of them idle
    budget = min(_budget(batch, resident), max(1, most))
    return AttentionPlan(
        block_m=block_m,
        block_n=block_n,
        row_blocks=row_blocks,
        budget=budget,
        work_items=budget + batch,
        min_tiles=min_tiles,
        num_warps=num_warps,
        num_stages=num_stages,
        kind=kind,
    )


@dataclass(frozen=True)
class ExtendTile:
    block_m: int  # query rows: tokens x heads of a group
    block_n: int  # packed keys of the prefix
    chunk_n: int  # keys of the chunk
    num_warps: int
    num_stages: int


def plan_extend(head_dim: int, max_rows: int, limits: DeviceLimits) -> ExtendTile:
    """Choose the prefill tile from head dim, the most query rows of a request, and the device."""
    if limits.interpreter:
        return ExtendTile(min(256, max(16, pow2(max_rows))), 256, 256, 4, 1)
    half = half_width(head_dim)
    if limits.shared_bytes >= SM90_SHARED_BYTES:
        if half > 64:  # what the registers hold: tests/test_compile_readers.py
            chunk_n = 64 if limits.capability == 90 and max_rows > 64 else 32
            return ExtendTile(128 if max_rows > 64 else 64, 32, chunk_n, 8, 2)
        if max_rows > 64:
            return ExtendTile(128, 64, 64, 8, 2)
        warps = 4 if packed_bytes(head_dim) == half and half <= 64 else 8
        return ExtendTile(64, 64, 64, warps, 2)
    if half <= 32:
        return ExtendTile(128 if max_rows > 64 else 64, 64, 64, 8, 2)
    if half <= 64:
        return ExtendTile(128 if max_rows > 64 else 64, 32, 64, 8, 2)
    return ExtendTile(32, 64, 32, 8, 1)
