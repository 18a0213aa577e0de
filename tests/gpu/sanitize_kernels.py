"""Every kernel once on small shapes, results checked: what tests/gpu/sanitize.sh runs under a sanitizer.

usage: python tests/gpu/sanitize_kernels.py [--plant bounds|race|uninitialized|barrier]

References are computed on the CPU and inputs copied over, so on the GPU run our kernels and copies
alone. Pools have no slot to spare and the last slot is used, so a step too far leaves the allocation
(with PYTORCH_NO_CUDA_MEMORY_CACHING=1, else the allocator's block hides it). --plant runs a faulty
kernel instead, which a sanitizer that works has to report.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from reference_attention import (  # noqa: E402
    Pool,
    assert_close_enough,
    attend,
    indptr,
    make_pool,
    visible_keys,
)

from sglang_fp4kv import codec  # noqa: E402
from sglang_fp4kv.kernels.commit_prefix import commit_prefix_nvfp4, commit_prefix_plain  # noqa: E402
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.extend_nvfp4 import extend_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.merge_parts import merge_parts  # noqa: E402
from sglang_fp4kv.kernels.sparse_nvfp4 import sparse_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.store_nvfp4 import store_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.unpack_nvfp4 import unpack_nvfp4  # noqa: E402
from sglang_fp4kv.paged import PackedCache  # noqa: E402

HEADS = {64: (9, 3), 128: (8, 2), 256: (6, 1)}  # query and KV heads by head dim
PREFIXES = [1, 130, 1500]  # the last is split, so its parts are merged
BLOCK = 8
CHUNKS = [5, 33, 70]
SELECTED = 300  # of the longest request: its selections are split and merged

RACE = """
extern "C" __global__ void race(float *out) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = s[63 - threadIdx.x];
}
"""
# Half of a warp waits for all of the block. (A warp that has ended counts as arrived: not a fault to synccheck.)
BARRIER = """
extern "C" __global__ void barrier(float *out) {
  if (threadIdx.x % 2) __syncthreads();
  out[threadIdx.x] += 1;
  __syncthreads();
  out[threadIdx.x] += out[63 - threadIdx.x];
}
"""


@triton.jit
def _store_past_the_end_kernel(ptr, count):
    tl.store(ptr + count + tl.arange(0, 32), 1.0)


@triton.jit
def _copy_kernel(source_ptr, target_ptr):
    at = tl.arange(0, 64)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


def plant(kind: str) -> None:
    out = torch.zeros(64).cuda()
    if kind == "bounds":
        _store_past_the_end_kernel[(1,)](out, out.numel())
    elif kind == "uninitialized":
        _copy_kernel[(1,)](torch.empty(64, device="cuda"), out)
    else:
        source = {"race": RACE, "barrier": BARRIER}[kind]
        torch.cuda._compile_kernel(source, kind)((1, 1, 1), (64, 1, 1), [out])
    torch.cuda.synchronize()


class Case:
    """One head dim: a pool on the device, the same pool on the CPU, and the requests' slots."""

    def __init__(self, head_dim: int, device: str):
        self.head_dim, self.device = head_dim, device
        self.q_heads, self.kv_heads = HEADS[head_dim]
        self.generator = torch.Generator().manual_seed(head_dim)
        lengths = [prefix + BLOCK for prefix in PREFIXES]
        self.num_slots = sum(lengths)
        order = torch.randperm(self.num_slots, generator=self.generator)
        self.slots = order.split(lengths)
        self.host = make_pool(self.num_slots, self.kv_heads, head_dim, "cpu")
        self.pool = Pool(*(side.to(device, copy=True) for side in self.host.sides), **self.host.scales)
        self.sm_scale = head_dim**-0.5

    def random(self, rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, self.head_dim)
        return torch.randn(shape, generator=self.generator).bfloat16()

    def on(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)

    def writer_sides(self):
        pool = self.pool
        return pool.k_codes, pool.v_codes, pool.k_scales, pool.v_scales

    def expect(self, k, v, slots):
        """Encode into the CPU's pool and compare the whole of both pools."""
        host = self.host
        for x, codes, scales, scale in (
            (k, host.k_codes, host.k_scales, host.k_global_scale),
            (v, host.v_codes, host.v_scales, host.v_global_scale),
        ):
            codes[slots], scales[slots] = codec.encode(x, scale)
        for ours, theirs in zip(self.pool.sides, host.sides, strict=True):
            assert torch.equal(ours.cpu(), theirs)

    def store(self):
        """The prefixes, and some rows with slots outside the pool that must not be written."""
        slots = torch.cat([s[:-BLOCK] for s in self.slots])
        k, v = (self.random(slots.numel() + 2, self.kv_heads) for _ in range(2))
        listed = torch.cat((torch.tensor([-1]), slots, torch.tensor([self.num_slots])))
        store_nvfp4(
            self.on(k), self.on(v), self.on(listed), *self.writer_sides(), *self.pool.scales.values()
        )
        self.expect(k[1:-1], v[1:-1], slots)

    def commit(self):
        """The blocks, in two halves: 0, 5 and 8 rows of each request, then what is left."""
        blocks = torch.stack([s[-BLOCK:] for s in self.slots])
        k, v = (self.random(blocks.numel(), self.kv_heads) for _ in range(2))
        lens = torch.tensor([0, 5, BLOCK], dtype=torch.int32)
        for last in (False, True):
            lens = torch.full_like(lens, BLOCK) if last else lens
            commit_prefix_nvfp4(
                self.on(k), self.on(v), self.on(blocks), self.on(lens), *self.writer_sides(),
                *self.pool.scales.values(),
            )  # fmt: skip
            written = (torch.arange(BLOCK) < lens[:, None]).flatten()
            self.expect(k[written], v[written], blocks.flatten()[written])
        pools = [self.on(torch.zeros(self.num_slots, *k.shape[1:], dtype=torch.float8_e4m3fn)) for _ in "kv"]
        commit_prefix_plain(self.on(k), self.on(v), self.on(blocks), self.on(lens), *pools)
        for x, pool in zip((k, v), pools, strict=True):
            got = pool.cpu()[blocks.flatten()]
            assert torch.equal(got.view(torch.uint8), x.to(got.dtype).view(torch.uint8))

    def attention(self, rows: int, own: bool):
        """Decode (rows 1) or verify (own: the block's slots apart from the prefix's)."""
        q = self.random(rows * len(PREFIXES), self.q_heads)
        lists = [s[:-BLOCK] if own else s for s in self.slots]
        out = torch.zeros_like(q, device=self.device)
        attention_nvfp4(
            self.on(q), *self.pool.sides, out, self.on(indptr([s.numel() for s in lists])),
            self.on(torch.cat(lists)), q_per_req=rows,
            block_slots=self.on(torch.cat([s[-BLOCK:] for s in self.slots])) if own else None,
            sm_scale=self.sm_scale, **self.pool.scales,
        )  # fmt: skip
        for i, slots in enumerate(self.slots):
            k, v = self.host.decoded(slots)
            visible = visible_keys(rows, slots.numel(), slots.numel() - rows)
            mine = slice(i * rows, (i + 1) * rows)
            self.compare(out.cpu()[mine], q[mine], k, v, visible)

    def sparse(self, groups: int):
        """One token a request; -1, positions past a short request, and one that selects nothing."""
        q = self.random(len(PREFIXES), self.q_heads)
        shape = (len(PREFIXES), groups, SELECTED)
        longest = self.slots[-1].numel()
        selected = torch.randint(-1, longest, shape, generator=self.generator)
        selected[0] = -1
        lists = self.on(indptr([s.numel() for s in self.slots])), self.on(torch.cat(self.slots))
        out = torch.zeros_like(q, device=self.device)
        sparse_nvfp4(
            self.on(q), *self.pool.sides, out, self.on(selected), *lists,
            sm_scale=self.sm_scale, **self.pool.scales,
        )  # fmt: skip
        heads, kv_heads = self.q_heads // groups, self.kv_heads // groups
        for i, slots in enumerate(self.slots):
            for group in range(groups):
                at = selected[i, group]
                at = slots[at[(at >= 0) & (at < slots.numel())]]
                own = slice(group * kv_heads, (group + 1) * kv_heads)
                k, v = (x[:, own] for x in self.host.decoded(at))
                visible = torch.ones(1, at.numel(), dtype=torch.bool)
                own = slice(i, i + 1), slice(group * heads, (group + 1) * heads)
                self.compare(out.cpu()[own], q[own], k, v, visible)

    def cache(self):
        """PackedCache's own methods: the last slot, a skipped row, a rotation, a free."""
        cache = PackedCache(2, 16, self.kv_heads, self.head_dim, self.device)
        slots = torch.tensor([31, -1, 0, 15, 16])
        kept = slots[slots >= 0]
        k, v = (self.random(slots.numel(), self.kv_heads) for _ in "kv")
        cache.write(self.on(k), self.on(v), self.on(slots))
        cache.copy(kept, kept.roll(1))
        scales = cache.k_global_scale, cache.v_global_scale
        for got, x, scale in zip(cache.read(kept.roll(1)), (k, v), scales, strict=True):
            want = codec.decode(*codec.encode(x[slots >= 0], scale), scale, torch.bfloat16)
            assert torch.equal(got.cpu(), want)
        cache.free(kept)
        assert cache.free_blocks == [0, 1]

    def extend(self):
        """A chunk of each request over its prefix."""
        q = self.random(sum(CHUNKS), self.q_heads)
        k, v = (self.random(sum(CHUNKS), self.kv_heads) for _ in range(2))
        lists = [s[:-BLOCK] for s in self.slots]
        out = torch.zeros_like(q, device=self.device)
        extend_nvfp4(
            self.on(q), self.on(k), self.on(v), out, *self.pool.sides, self.on(indptr(CHUNKS)),
            self.on(indptr(PREFIXES)), self.on(torch.cat(lists)), max_extend_len=max(CHUNKS),
            sm_scale=self.sm_scale, **self.pool.scales,
        )  # fmt: skip
        parts = zip(lists, q.split(CHUNKS), k.split(CHUNKS), v.split(CHUNKS), out.cpu().split(CHUNKS))
        for slots, q_own, k_own, v_own, got in parts:
            k_all, v_all = self.host.decoded(slots)
            k_all, v_all = torch.cat((k_all, k_own.float())), torch.cat((v_all, v_own.float()))
            visible = visible_keys(q_own.shape[0], k_all.shape[0], slots.numel())
            self.compare(got, q_own, k_all, v_all, visible)

    def unpack(self):
        """The longest request, decoded without its global scales."""
        slots = self.slots[-1]
        shape = (slots.numel(), self.kv_heads, self.head_dim)
        outs = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in "kv"]
        unpack_nvfp4(*self.pool.sides, self.on(slots), *outs)
        host = self.host
        sides = ((host.k_codes, host.k_scales), (host.v_codes, host.v_scales))
        for got, (codes, scales) in zip(outs, sides, strict=True):
            assert torch.equal(got.cpu(), codec.decode(codes[slots], scales[slots], 1.0).bfloat16())

    def merge(self):
        """Attention over two parts of the longest request's keys, joined."""
        q = self.random(BLOCK, self.q_heads)
        k, v = self.host.decoded(self.slots[-1])
        parts = []
        for keys in (slice(None, 400), slice(400, None)):
            visible = torch.ones(BLOCK, k[keys].shape[0], dtype=torch.bool)
            repeated = k[keys].repeat_interleave(self.q_heads // self.kv_heads, 1)
            scores = torch.einsum("nhd,lhd->nhl", q.float(), repeated) * self.sm_scale
            lse = scores.logsumexp(-1) * math.log2(math.e)
            parts += [attend(q, k[keys], v[keys], visible, self.sm_scale), lse]
        out = torch.zeros_like(q, device=self.device)
        merge_parts(*(self.on(part.contiguous()) for part in parts), 1.0, out)
        visible = torch.ones(BLOCK, k.shape[0], dtype=torch.bool)
        self.compare(out.cpu(), q, k, v, visible)

    def compare(self, got, q, k, v, visible):
        exact, low = (
            attend(q, k, v, visible, self.sm_scale, low=dtype) for dtype in (None, torch.bfloat16)
        )
        assert_close_enough(got, exact, low, f"D {self.head_dim}")


def run(case: Case) -> None:
    """Raises AssertionError for a wrong result."""
    case.store()
    case.commit()
    case.attention(rows=1, own=False)
    case.attention(rows=BLOCK, own=True)
    case.extend()
    case.unpack()
    case.merge()
    for groups in {1, case.kv_heads}:
        case.sparse(groups)
    case.cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plant", choices=("bounds", "race", "uninitialized", "barrier"))
    args = parser.parse_args()
    if args.plant:
        plant(args.plant)
        return 0
    for head_dim in HEADS:
        run(Case(head_dim, "cuda"))
        done = "store, commit, decode, verify, extend, unpack, merge, sparse, cache"
        print(f"D {head_dim}: {done} are right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
