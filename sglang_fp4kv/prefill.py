"""Prefill over a packed prefix: which kernel, and the way through a library's attention.

The packed kernel (kernels/extend_nvfp4.py) decodes a prefix again for every block of its query rows
and computes it at a Triton kernel's rate, serially. A long chunk is cheaper the other way round:
decode the prefix once, piece by piece, into a small scratch that the L2 holds, run a library's
attention in the model's dtype over every piece, and merge the results by log-sum-exp.
"""

import functools
import logging
import os
from dataclasses import dataclass

import torch

from sglang_fp4kv.formats import bytes_per_token, check_global_scale
from sglang_fp4kv.kernels._check import check_out, check_rows
from sglang_fp4kv.kernels._plan import DeviceLimits, cdiv, device_limits, plan_extend
from sglang_fp4kv.kernels.merge_parts import merge_parts
from sglang_fp4kv.kernels.unpack_nvfp4 import unpack_nvfp4
from sglang_fp4kv.library_attention import Attend, load_flashinfer

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 32 << 20  # K and V of one piece: 8,192 tokens of 4 heads of 256 in bf16
QUERY_TOKENS = 8192  # of one call; bounds the fp32 state between pieces

# Measured on an H200 (D 256, 24 and 4 heads), per SM, so that they scale with a device: our packed
# kernel at 184 TFLOP/s for 8,192 new tokens on 65,536 (tests/bench/NOTES.md), FlashInfer FA3 0.7.2
# at 540 to 650 (tests/bench/results/h200_bench.json).
_PACKED_FLOPS_PER_SM = 1.39e12
_PACKED_LEAST_ROWS = 64  # a program of fewer rows decodes as many keys and takes as long
_LIBRARY_FLOPS_PER_SM = 4.5e12
_LIBRARY_ROWS = 128  # query tokens of one head in a tile of the library
_DECODE_BYTES_PER_SM = 20e9  # a second; read codes, write values: about 2.6 TB/s on 132 SMs
# Host time: a call of the library; decode and merge of a piece.
_CALL_S, _PIECE_S = 30e-6, 50e-6


LIBRARY_VARIABLE = "FP4KV_LIBRARY_PREFILL"


def library_backends(capability: int, environ=os.environ) -> tuple[str, ...]:
    """FlashInfer's backends that a server tries, in this order.

    capability: of the device, 90 or 121. FA3 on sm_90, the only one it is made for. FA2 when
    FP4KV_LIBRARY_PREFILL=1: it keeps within twice BF16 attention's error in norm but not in every value
    (tests/test_prefill.py), and ran on an H200 only. None when it is 0. The first use of a backend on a
    machine may compile for minutes.

    Raises: ValueError for a value that is neither 0 nor 1
    """
    value = environ.get(LIBRARY_VARIABLE)
    if value not in (None, "0", "1"):
        raise ValueError(f"{LIBRARY_VARIABLE} must be 0 or 1, got {value!r}")
    if value == "0":
        return ()
    fa3 = ("fa3",) if capability == 90 else ()
    return (*fa3, "fa2") if value == "1" else fa3


@dataclass(frozen=True)
class QueryBlock:
    """Rows of one request that go through the library together."""

    first: int  # the request's first row in q, k, v
    begin: int  # rows of q; keys of the chunk are rows first to end
    end: int
    pieces: tuple[tuple[int, int], ...]  # prefix, as ranges of kv_indices


@dataclass(frozen=True)
class Choice:
    library: bool
    reason: str
    packed_s: float = 0.0  # estimates, seconds a layer
    library_s: float = 0.0


def split_work(
    prefix_lens: tuple[int, ...],
    new_lens: tuple[int, ...],
    piece_tokens: int,
    query_tokens: int = QUERY_TOKENS,
) -> tuple[QueryBlock, ...]:
    """Cut a batch into query blocks and prefix pieces. Requests without new tokens have none."""
    blocks, row, index = [], 0, 0
    for prefix, new in zip(prefix_lens, new_lens, strict=True):
        pieces = tuple(
            (begin, min(begin + piece_tokens, index + prefix))
            for begin in range(index, index + prefix, piece_tokens)
        )
        size = cdiv(new, cdiv(new, query_tokens)) if new else 1
        for begin in range(row, row + new, size):
            blocks.append(QueryBlock(row, begin, min(begin + size, row + new), pieces))
        row += new
        index += prefix
    return tuple(blocks)


def choose(
    prefix_lens: tuple[int, ...],
    new_lens: tuple[int, ...],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    piece_tokens: int,
    limits: DeviceLimits,
) -> Choice:
    """The packed kernel or the library, from shapes alone: the one with the smaller estimate.

    Packed: programs of block_m rows (tokens x heads of a group) walk all keys of their request, in
    waves over the SMs; a single program is as slow as a wave, so a short chunk on a long prefix
    does not become cheap: 512 tokens on 64k are 96 programs, 6.2 ms, and 8 tokens take half that.
    Library: the same with its own tiles and rate, the prefix decoded once a query block, and host
    time for every call. So the library takes chunks of some hundred tokens and more, and shorter
    ones on a prefix of some thousand; the packed kernel takes small work and crowds of small
    requests, which it serves in one launch.
    """
    if not any(new_lens):
        return Choice(False, "no new tokens")
    group = num_q_heads // num_kv_heads
    block_m = plan_extend(head_dim, max(new_lens) * group, limits).block_m
    flops_per_key = 4 * head_dim  # of one query row
    packed_work = packed_longest = library_work = 0
    for prefix, new in zip(prefix_lens, new_lens, strict=True):
        if new:
            keys = prefix + (new + 1) / 2
            packed_work += cdiv(new * group, block_m) * num_kv_heads * keys
            packed_longest = max(packed_longest, prefix + new)
            tiles = cdiv(new, _LIBRARY_ROWS) * num_q_heads
            # Requests go one after another here: each has waves of its own.
            library_work += max(tiles / limits.sm_count, 1) * keys
    packed_s = max(packed_work / limits.sm_count, packed_longest)
    packed_s *= max(block_m, _PACKED_LEAST_ROWS) * flops_per_key / _PACKED_FLOPS_PER_SM
    library_s = library_work * _LIBRARY_ROWS * flops_per_key / _LIBRARY_FLOPS_PER_SM
    # Packed bytes are read and 16-bit values written.
    token_bytes = bytes_per_token(head_dim, num_kv_heads)
    token_bytes += bytes_per_token(head_dim, num_kv_heads, dtype="bf16")
    for block in split_work(prefix_lens, new_lens, piece_tokens):
        decoded = block.pieces[-1][1] - block.pieces[0][0] if block.pieces else 0
        library_s += decoded * token_bytes / (_DECODE_BYTES_PER_SM * limits.sm_count)
        library_s += _CALL_S + len(block.pieces) * (_CALL_S + _PIECE_S)
    if library_s < packed_s:
        return Choice(True, "long chunk or prefix", packed_s, library_s)
    return Choice(False, "little work or many small requests", packed_s, library_s)


@functools.cache
def _scratch(
    device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int, scratch_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [P, H, D] of one piece, zeroed; one pair a device and shape, whoever asks."""
    token_bytes = bytes_per_token(
        head_dim, num_kv_heads, dtype=str(dtype).removeprefix("torch.")
    )
    tokens = scratch_bytes // token_bytes // 16 * 16
    if tokens == 0:
        raise ValueError(
            f"{scratch_bytes} bytes of scratch do not hold 16 tokens of {token_bytes} bytes"
        )
    k = torch.zeros(tokens, num_kv_heads, head_dim, dtype=dtype, device=device)
    return k, torch.zeros_like(k)


class PackedPrefill:
    """Prefill through a library's attention, for the batches that are cheaper that way.

    Sizes: Hq query heads, H KV heads, D head dim; one scratch of at most scratch_bytes a device,
    allocated here and used by every layer, and only if there is a library to use it.
    attend: the library, see library_attention.Attend. Left out, the first of FlashInfer's backends
      (of library_backends() where not given) that works is loaded, compiled and checked here, minutes
      at the first start on a machine; where there is none plan() answers None and logs the reason.
    Raises: ValueError when scratch_bytes do not hold 16 tokens
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        attend: Attend | None = None,
        backends: tuple[str, ...] | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
        query_tokens: int = QUERY_TOKENS,
        limits: DeviceLimits | None = None,
    ):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.shape = (num_q_heads, num_kv_heads, head_dim)
        self.dtype = dtype
        self.query_tokens = query_tokens
        self.limits = limits or device_limits(device)
        self.library = "the attention given"
        if attend is None:
            if backends is None:
                backends = library_backends(self.limits.capability)
            attend, self.library = load_flashinfer(*self.shape, dtype, device, backends)
        self.attend = attend
        self._logged: set[str] = set()
        self._last: tuple | None = None  # lengths and their plan
        if attend is None:
            self.tell(self.library)
        else:
            self.k, self.v = _scratch(device, dtype, num_kv_heads, head_dim, scratch_bytes)
            if device.type == "cuda":
                self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Compile the kernels for one piece and for several, which merge in other dtypes."""
        num_q_heads, num_kv_heads, head_dim = self.shape
        piece, rows = 16, 16  # the smallest scratch holds such a piece
        slots = torch.arange(3 * piece, device=device)
        sides = [
            torch.zeros(3 * piece, num_kv_heads, head_dim // n, dtype=torch.uint8, device=device)
            for n in (2, 16, 2, 16)
        ]
        q = torch.zeros(rows, num_q_heads, head_dim, dtype=self.dtype, device=device)
        k = torch.zeros(rows, num_kv_heads, head_dim, dtype=self.dtype, device=device)
        for prefix in (piece, 3 * piece):
            self.run(
                split_work((prefix,), (rows,), piece),
                *(q, k, k, torch.empty_like(q), *sides, slots),
                k_global_scale=0.5,
                v_global_scale=0.5,
                sm_scale=1.0,
            )

    def tell(self, reason: str) -> None:
        """Log that the packed kernel serves, once a reason."""
        self._log_once(f"packed kernel ({reason})")

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.info("fp4kv prefill: %s", message)

    def plan(self, prefix_lens: list[int], new_lens: list[int]) -> tuple[QueryBlock, ...] | None:
        """How to run this batch through the library; None = take the packed kernel.

        Prefix and new tokens of every request, on the host. The last answer is kept, so that the
        layers of a forward pass share one plan. No device work.
        """
        if self.attend is None:
            return None
        key = (tuple(prefix_lens), tuple(new_lens))
        if self._last is None or self._last[0] != key:
            choice = choose(*key, *self.shape, self.k.shape[0], self.limits)
            blocks = None
            if choice.library:
                blocks = split_work(*key, self.k.shape[0], self.query_tokens)
                self._log_once(
                    f"{self.library}, pieces of {self.k.shape[0]} tokens ({choice.reason})"
                )
            else:
                self.tell(choice.reason)
            self._last = (key, blocks)
        return self._last[1]

    def run(
        self,
        blocks: tuple[QueryBlock, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_codes: torch.Tensor,
        k_scales: torch.Tensor,
        v_codes: torch.Tensor,
        v_scales: torch.Tensor,
        kv_indices: torch.Tensor,
        *,
        k_global_scale: float,
        v_global_scale: float,
        sm_scale: float,
    ) -> torch.Tensor:
        """Attend from the new tokens to a packed prefix and to themselves; out is overwritten.

        Sizes: T new tokens, S slots; the rest as above
          q, out             [T, Hq, D]      bf16 | fp16          last dim contiguous
          k, v               [T, H, D]       like q               last dim contiguous
          k_codes, v_codes   [S, H, D//2]    uint8                low nibble = even element
          k_scales, v_scales [S, H, D//16]   uint8 | float8_e4m3  not NaN in listed slots
          kv_indices         [N]             int32 | int64        prefix slots, request by request;
            none below 0: the library cannot hide a key, so such a slot makes its request NaN
        blocks: of plan() for these lengths. Causal within the chunk, no window, cap or mask.
        Numerics: prefix values exact in q's dtype, K's global scale in the softmax scale, V's in
          the merge; parts rounded to q's dtype by the library, merged in fp32, rounded once
        Temporaries: of one query block of n tokens, Hq * D values a token: two parts in q's dtype
          and, above one piece, an fp32 state (at 8,192 tokens of 24 heads of 256: 2 x 96 and 192
          MiB), up to three log-sum-exps (0.75 MiB each) and what the library takes (32 MiB)
        Runs on: what the library runs on; CUDA-graph safe: if the library is; syncs: no
        Raises: ValueError for shapes and dtypes that do not fit (the message names the value)
        Reference: tests/reference_attention.py over codec.decode, in norm at most twice
          BF16's error; a single value carries the roundings of its parts too
        """
        check_rows("q", q)
        check_rows("k", k, like=q)
        check_rows("v", v, like=q)
        check_out(out, q)
        if q.dtype != self.dtype:
            raise ValueError(f"q must be {self.dtype} like the scratch, got {q.dtype}")
        if blocks and blocks[-1].end > q.shape[0]:
            raise ValueError(f"the plan has {blocks[-1].end} rows, q has {q.shape[0]}")
        sides = k_codes, k_scales, v_codes, v_scales
        k_scale = sm_scale * check_global_scale(k_global_scale)
        v_scale = check_global_scale(v_global_scale)
        for block in blocks:
            self._run_block(
                block, q, k[block.first : block.end], v[block.first : block.end],
                out[block.begin : block.end], sides, kv_indices, sm_scale, k_scale, v_scale,
            )  # fmt: skip
        return out

    def _run_block(
        self, block, q, k_chunk, v_chunk, out, sides, kv_indices, sm_scale, k_scale, v_scale
    ) -> None:
        """The chunk's part, then each piece's merged into it; temporaries end with the block."""
        q = q[block.begin : block.end]
        part, lse = self.attend(q, k_chunk, v_chunk, True, sm_scale)
        if not block.pieces:
            out.copy_(part)
            return
        last = len(block.pieces) - 1
        for number, (begin, end) in enumerate(block.pieces):
            keys, values = self.k[: end - begin], self.v[: end - begin]
            unpack_nvfp4(*sides, kv_indices[begin:end], keys, values)
            other, other_lse = self.attend(q, keys, values, False, k_scale)
            if number == last:
                merge_parts(part, lse, other, other_lse, v_scale, out)
            else:
                if number == 0:
                    state = torch.empty_like(part, dtype=torch.float32)
                # Not into lse itself: warps of a program read it at different times.
                merged_lse = torch.empty_like(lse)
                merge_parts(part, lse, other, other_lse, v_scale, state, merged_lse)
                part, lse = state, merged_lse
            del other, other_lse  # before the library allocates the next
