"""`PackedCache`: the NVFP4 cache of one layer, without a model and without SGLang.

Its methods check what they are given on the host, so each waits for the device: they are for tests,
tools and trying things out. The kernels under them (store_nvfp4, unpack_nvfp4, attention_nvfp4,
sparse_nvfp4) check shapes, dtypes and strides only, never values, and neither wait nor allocate; they
take `sides` and `global_scales` and are what a server captures in a CUDA graph. A duplicate slot,
a slot outside the pool or a NaN is the caller's to avoid there.
"""

import reprlib

import torch

from sglang_fp4kv import formats
from sglang_fp4kv.embedded import interpreter_fixes
from sglang_fp4kv.kernels.store_nvfp4 import INTERPRETED, check_sources, store_nvfp4
from sglang_fp4kv.kernels.unpack_nvfp4 import unpack_nvfp4

SKIP = -1


def _check_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    return value


def _check_device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, got {device}")
    if INTERPRETED:
        interpreter_fixes.apply()
    elif device.type == "cpu":
        raise ValueError(
            "device cpu needs Triton's interpreter, TRITON_INTERPRET=1 before the first import: "
            f"got {device} without it"
        )
    return device


def _check_tensors(**given: torch.Tensor) -> None:
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {reprlib.repr(x)}")


class PackedCache:
    """K and V of one layer in ``blocks`` blocks of ``page_size`` slots.

    Sizes: S = blocks * page_size slots, H kv_heads, D head_dim
      k_codes, v_codes    [S, H, D//2]   uint8   low nibble = even element
      k_scales, v_scales  [S, H, D//16]  uint8   E4M3 bits, start as zeros
      slots               [N]            int64   on any device; slot = block * page_size + place
    A slot holds a token from its write to its free; writing to a slot that holds one replaces it. Free
    gives slots back, and a block whose slots are all free is in free_blocks; the bytes stay until the
    next write. In every method SKIP (-1) as a slot means: leave this row out.
    Every method of the checked interface (write, mark_written, read, copy, free) raises before it
    changes anything.
    Numerics: as codec.encode and codec.decode. The global scales are fixed for the cache's life: another
      one would change what the old bytes mean
    Runs on: sm_80, or device "cpu" under TRITON_INTERPRET=1; CUDA-graph safe: no, and refused
    Raises: ValueError for counts below 1, a head_dim that is no multiple of 16, a bad global scale,
      device "cpu" without the interpreter
    """

    def __init__(
        self,
        blocks: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str = "cuda",
        k_global_scale: float = formats.DEFAULT_K_GLOBAL_SCALE,
        v_global_scale: float = formats.DEFAULT_V_GLOBAL_SCALE,
    ):
        self.blocks = _check_count("blocks", blocks)
        self.page_size = _check_count("page_size", page_size)
        self.kv_heads = _check_count("kv_heads", kv_heads)
        self.head_dim = formats.check_head_dim(head_dim)
        self.k_global_scale = formats.check_global_scale(k_global_scale)
        self.v_global_scale = formats.check_global_scale(v_global_scale)
        self.device = _check_device(device)
        widths = (formats.packed_bytes(head_dim), formats.scale_bytes(head_dim)) * 2
        # Tensors made under inference mode could not be written once it has ended.
        with torch.inference_mode(False):
            self.k_codes, self.k_scales, self.v_codes, self.v_scales = (
                torch.zeros(self.slots, kv_heads, width, dtype=torch.uint8, device=self.device)
                for width in widths
            )
            self._held = torch.zeros(self.slots, dtype=torch.bool)
        self.device = self.k_codes.device  # "cuda" is another GPU once another one is current

    @property
    def slots(self) -> int:
        return self.blocks * self.page_size

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """K codes, K scales, V codes, V scales: what the unchecked readers take."""
        return self.k_codes, self.k_scales, self.v_codes, self.v_scales

    @property
    def global_scales(self) -> dict[str, float]:
        """The keywords k_global_scale and v_global_scale of the unchecked kernels."""
        return {"k_global_scale": self.k_global_scale, "v_global_scale": self.v_global_scale}

    @property
    def free_blocks(self) -> list[int]:
        """Blocks none of whose slots holds a token."""
        held = self._held.view(self.blocks, self.page_size).any(1)
        return (~held).nonzero().flatten().tolist()

    def block_slots(self, block: int) -> torch.Tensor:
        """The slots [page_size] int64 of a block, on the cache's device."""
        if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < self.blocks:
            raise ValueError(f"block must be 0 to {self.blocks - 1}, got {block!r}")
        first = block * self.page_size
        return torch.arange(first, first + self.page_size, device=self.device)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantize K and V and write them to their slots; k and v stay unchanged.

        Sizes: N tokens, H KV heads, D head dim
          k, v   [N, H, D]  bf16 | fp16 | fp32   any strides, last dim contiguous
          slots  [N]        int64                SKIP leaves the row out, whatever is in it
        Raises: ValueError for what is no tensor, a slot that is named twice or is not in the cache, a
          value that is not finite in a row that is written, other dims or dtypes, another device;
          RuntimeError during CUDA-graph capture. The message has the value; nothing was written
        """
        self._refuse_capture("write", "; capture store_nvfp4 instead")
        _check_tensors(k=k, v=v)
        check_sources(k, v)
        if tuple(k.shape[1:]) != (self.kv_heads, self.head_dim):
            raise ValueError(
                f"k and v must be [N, {self.kv_heads}, {self.head_dim}], got {tuple(k.shape)}"
            )
        for name, x in (("k", k), ("v", v)):
            if x.device != self.k_codes.device:
                raise ValueError(f"{name} must be on {self.k_codes.device}, got {x.device}")
        host = self._checked("slots", slots, k.shape[0])
        self._refuse_duplicates("slots", host)
        written = host != SKIP
        for name, x in (("k", k), ("v", v)):
            bad = ~torch.isfinite(x) & written.to(self.device)[:, None, None]
            if bad.any():
                token, head, element = bad.nonzero()[0].tolist()
                raise ValueError(
                    f"{name} must be finite, got {x[token, head, element].item()} at token {token}, "
                    f"head {head}, element {element}"
                )
        with torch.cuda.device_of(self.k_codes):  # Triton launches on the current GPU
            store_nvfp4(
                k,
                v,
                host.to(self.device),
                self.k_codes,
                self.v_codes,
                self.k_scales,
                self.v_scales,
                self.k_global_scale,
                self.v_global_scale,
            )
        self._held[host[written]] = True

    def mark_written(self, slots: torch.Tensor) -> None:
        """Say that slots [N] int64 hold tokens, which a kernel below the checked interface wrote.

        Raises: ValueError for slots that are not in the cache; RuntimeError during CUDA-graph capture
        """
        self._refuse_capture("mark_written")
        host = self._checked("slots", slots)
        self._held[host[host != SKIP]] = True

    def read(
        self, slots: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded K and V [N, H, D] of the slots [N] int64, in any order; a SKIP row is zeros.

        Raises: ValueError for a slot that holds no token (never written, or free) or is not in the
          cache, another dtype; RuntimeError during CUDA-graph capture
        """
        self._refuse_capture("read", "; capture unpack_nvfp4 instead")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
        host = self._checked("slots", slots)
        self._refuse_empty("slots", host)
        k, v = (
            torch.empty(len(host), self.kv_heads, self.head_dim, device=self.device) for _ in "kv"
        )
        with torch.cuda.device_of(self.k_codes):
            unpack_nvfp4(*self.sides, host.clamp_min(0).to(self.device), k, v)
        skipped = (host == SKIP).to(self.device)
        return tuple(
            (x * scale).masked_fill_(skipped[:, None, None], 0.0).to(dtype)
            for x, scale in ((k, self.k_global_scale), (v, self.v_global_scale))
        )

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the packed rows of slots source [N] to slots target [N] (int64), codes and scales.

        A target may be a source of another pair: all are read before any is written. A pair with SKIP on
        either side is left out.
        Raises: ValueError for a source that holds no token, a target that is named twice, slots that
          are not in the cache; RuntimeError during CUDA-graph capture. Nothing was written
        """
        self._refuse_capture("copy", "; capture side[target] = side[source] of each of `sides` instead")
        source = self._checked("source", source)
        target = self._checked("target", target, len(source))
        kept = (source != SKIP) & (target != SKIP)
        source, target = source[kept], target[kept]
        self._refuse_empty("source", source)
        self._refuse_duplicates("target", target)
        read_from, written = source.to(self.device), target.to(self.device)
        rows = [side[read_from] for side in self.sides]
        for side, row in zip(self.sides, rows, strict=True):
            side[written] = row
        self._held[target] = True

    def free(self, slots: torch.Tensor) -> None:
        """Give slots [N] int64 back. Their bytes stay, but the checked interface reads them no more.

        Raises: ValueError for a slot that holds no token (so for a second free), is named twice or is
          not in the cache; RuntimeError during CUDA-graph capture. Nothing was freed
        """
        self._refuse_capture("free")
        host = self._checked("slots", slots)
        self._refuse_duplicates("slots", host)
        self._refuse_empty("slots", host)
        self._held[host[host != SKIP]] = False

    def _refuse_capture(self, method: str, instead: str = "") -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"PackedCache.{method} works on the host and cannot be captured in a CUDA graph, "
                f"got a capture on {torch.cuda.current_stream()}{instead}"
            )

    def _checked(self, name: str, slots: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """slots on the host; ValueError unless they are [count] int64, SKIP or in the cache."""
        _check_tensors(**{name: slots})
        if slots.is_meta:
            raise ValueError(f"{name} must hold values, got a tensor on {slots.device}")
        if slots.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {slots.dtype}")
        if slots.ndim != 1 or (count is not None and len(slots) != count):
            want = "N" if count is None else count
            raise ValueError(f"{name} must be [{want}], got {tuple(slots.shape)}")
        host = slots.cpu()
        outside = (host < SKIP) | (host >= self.slots)
        if outside.any():
            at = int(outside.nonzero()[0])
            raise ValueError(
                f"{name} must be 0 to {self.slots - 1}, or {SKIP} to skip, got {int(host[at])} at {at}"
            )
        return host

    def _refuse_duplicates(self, name: str, host: torch.Tensor) -> None:
        count = torch.bincount(host[host != SKIP], minlength=self.slots)
        if (count > 1).any():
            slot = int(count.argmax())
            places = (host == slot).nonzero().flatten().tolist()
            raise ValueError(f"{name} must be distinct, got slot {slot} at {places}")

    def _refuse_empty(self, name: str, host: torch.Tensor) -> None:
        empty = (host != SKIP) & ~self._held[host.clamp_min(0)]
        if empty.any():
            at = int(empty.nonzero()[0])
            raise ValueError(
                f"{name} must hold a token, got slot {int(host[at])} at {at}, "
                "which was never written or is free"
            )
