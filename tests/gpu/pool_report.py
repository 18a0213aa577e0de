"""Let the kernels write pools, then let tests/independent_decoder.py judge the bytes.

    python tests/gpu/pool_report.py REPORT.json [--tokens N]

Runs on a GPU, or on a CPU under TRITON_INTERPRET=1. The decoder runs in a process of its own, where
nothing of the product is loaded. Exit codes: those of the decoder.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from launcher.demo import commit, gpu_name  # noqa: E402
from launcher.probe import installed_versions  # noqa: E402
from sglang_fp4kv.kernels.commit_prefix import commit_prefix_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.sparse_nvfp4 import sparse_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.store_nvfp4 import store_nvfp4  # noqa: E402
from sglang_fp4kv.paged import PackedCache  # noqa: E402

# By name: writer, KV heads, head dim, K's and V's global scale, values.
CASES = {
    "store_4x256": ("store", 4, 256, 0.5, 0.0625, "normal"),
    "store_8x128": ("store", 8, 128, 0.5, 0.0625, "normal"),
    "store_3x64_extremes": ("store", 3, 64, 1.0, 2.0**-4, "extreme"),
    "store_2x96_ties": ("store", 2, 96, 1.0, 0.25, "ties"),
    "store_5x80_uneven_global": ("store", 5, 80, 0.0371, 0.7, "normal"),
    "commit_2x80": ("commit", 2, 80, 0.5, 0.0625, "normal"),
    "cache_2x256": ("cache", 2, 256, 0.5, 0.0625, "normal"),
    "cache_4x64_copied": ("copied", 4, 64, 0.5, 0.0625, "normal"),
}
BLOCK = 8  # rows a request commits
QUERIES, GROUP, SELECTED = 3, 3, 24


def values(kind: str, tokens: int, heads: int, head_dim: int, g: torch.Generator) -> torch.Tensor:
    """Finite BF16 [T, H, D]."""
    x = torch.randn(tokens, heads, head_dim // 16, 16, generator=g)
    if kind == "extreme":  # blocks from far too small to far too large, and blocks of zeros
        x *= torch.exp2(torch.randint(-16, 16, (*x.shape[:-1], 1), generator=g).float())
        x[::7, 0, 0] = 0.0
    if kind == "ties":  # quarters up to 6 under a largest value of 6: half of them lie half-way
        x = torch.randint(-24, 25, x.shape, generator=g) / 4
        x[..., 0] = 6.0
    return x.flatten(2).bfloat16()


def write(cache: PackedCache, how: str, k, v, slots: torch.Tensor) -> None:
    """Write the rows whose slot is not below 0."""
    sides = cache.k_codes, cache.v_codes, cache.k_scales, cache.v_scales
    k, v, there = k.to(cache.device), v.to(cache.device), slots.to(cache.device)
    if how == "store":
        store_nvfp4(k, v, there, *sides, **cache.global_scales)
    elif how == "commit":
        lens = (slots >= 0).view(-1, BLOCK).sum(1).int().to(cache.device)
        blocks = there.view(-1, BLOCK).clamp_min(0)
        commit_prefix_nvfp4(k, v, blocks, lens, *sides, *cache.global_scales.values())
    else:
        cache.write(k, v, slots)
        return
    cache.mark_written(slots)


def dump(name: str, tokens: int, device: str) -> dict:
    """The arrays of one case as tests/independent_decoder.py wants them."""
    how, heads, head_dim, k_global, v_global, kind = CASES[name]
    g = torch.Generator().manual_seed(list(CASES).index(name))
    cache = PackedCache(tokens // 8 + 2, 16, heads, head_dim, device, k_global, v_global)
    k, v = (values(kind, tokens, heads, head_dim, g) for _ in "kv")
    slots = torch.randperm(cache.slots, generator=g)[:tokens]
    slots[torch.argmax(slots)] = cache.slots - 1  # the last one, once
    if how == "commit":  # 0 to 8 rows of each request
        taken = torch.randint(0, BLOCK + 1, (tokens // BLOCK, 1), generator=g)
        slots[(torch.arange(BLOCK) >= taken).flatten()] = -1
    elif how == "store":
        slots[::11] = -1
    write(cache, how, k, v, slots)
    if how == "copied":  # every row one slot on, in a ring; what is read afterwards is where it went
        cache.copy(slots, slots.roll(1))
        slots = slots.roll(1)
    arrays = {"slots": slots.numpy(), "k_global": np.float32(k_global), "v_global": np.float32(v_global)}
    names = ("k_codes", "k_scales", "v_codes", "v_scales")
    arrays |= {n: side.cpu().numpy() for n, side in zip(names, cache.sides, strict=True)}
    for side, x, read in zip("kv", (k, v), cache.read(slots, torch.float32), strict=True):
        arrays[side] = x.view(torch.int16).numpy().view(np.uint16)
        arrays[f"{side}_read"] = read.cpu().numpy()
    if how in ("cache", "copied"):
        arrays |= attention(cache, slots, g)
    return arrays


def attention(cache: PackedCache, slots: torch.Tensor, g: torch.Generator) -> dict:
    """The sparse reader over some rows of each KV head."""
    q = torch.randn(QUERIES, GROUP * cache.kv_heads, cache.head_dim, generator=g).bfloat16()
    selected = torch.stack(
        [torch.randperm(len(slots), generator=g)[:SELECTED] for _ in range(QUERIES * cache.kv_heads)]
    ).view(QUERIES, cache.kv_heads, SELECTED)
    out = torch.empty(q.shape, device=cache.device)
    sparse_nvfp4(
        q.to(cache.device), *cache.sides, out, slots[selected].to(cache.device),
        sm_scale=cache.head_dim**-0.5, **cache.global_scales,
    )  # fmt: skip
    bits = q.view(torch.int16).numpy().view(np.uint16)
    return {"q": bits, "selected": selected.numpy(), "out": out.cpu().numpy()}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--tokens", type=int, default=4096, help="of a case, a multiple of 8")
    args = parser.parse_args(argv)
    if args.tokens < SELECTED or args.tokens % BLOCK:
        parser.error(f"--tokens must be a multiple of {BLOCK} from {SELECTED} on, got {args.tokens}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            np.savez(Path(folder) / f"{name}.npz", **dump(name, args.tokens, device))
        decoder = [sys.executable, str(ROOT / "tests" / "independent_decoder.py")]
        done = subprocess.run([*decoder, folder, str(args.report)], capture_output=True, text=True)
    print(done.stdout + done.stderr, end="")
    if done.returncode in (0, 1):
        origin = {"commit": commit(), "versions": installed_versions(), "gpu": gpu_name(), "tokens": args.tokens}
        args.report.write_text(json.dumps(origin | json.loads(args.report.read_text()), indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
