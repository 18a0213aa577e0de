"""The plain Triton readers compile for every supported architecture and fit its shared memory.

Compiled in a process of its own without TRITON_INTERPRET, which would replace the kernels. By
hand, for a table: python tests/test_compile_readers.py 90 121
"""

import json
import sys

import pytest

ARCHS = (90, 100, 103, 120, 121)
SM_COUNT = {90: 132, 100: 148, 103: 160, 120: 170, 121: 48}
# Head dim, heads of a group, KV heads: SmolLM-like, odd, Llama-like, Qwen-like.
SHAPES = ((64, 3, 3), (80, 5, 2), (128, 4, 8), (256, 6, 4))


def stack_limit(kernel: str, head_dim: int) -> int:
    """Spilled bytes a thread that are known and accepted; what decode and verify need is none.

    Extend has none at D 256. Windowed, capped tree verify is no DFlash path.
    """
    if kernel in ("decode", "merge", "unpack", "merge parts"):
        return 16
    if kernel == "verify":
        return 160 if head_dim == 80 else 64
    if kernel == "verify tree":
        return 896 if head_dim == 256 else 352
    return 0 if head_dim == 256 else 96


def limits(arch: int):
    from sglang_fp4kv.kernels._plan import SM90_SHARED_BYTES, SM120_SHARED_BYTES, DeviceLimits

    shared = SM120_SHARED_BYTES if arch >= 120 else SM90_SHARED_BYTES
    return DeviceLimits(SM_COUNT[arch], shared, arch)


def _types(kernel, constexprs: dict, index: str) -> dict:
    """Argument types as the host functions pass them for bf16 q."""

    def of(name: str) -> str:
        if not name.endswith("_ptr"):
            return "fp32" if name.endswith("_scale") else "i32"
        if "codes" in name or "scales" in name or name == "mask_ptr":
            return "*u8"
        if name.startswith("part_") or "lse" in name:
            return "*fp32"
        if "indices" in name or "slots" in name or "mask_indptr" in name:
            return index
        if "indptr" in name or "offsets" in name or "sched" in name:
            return "*i32"
        return "*bf16"

    return {name: of(name) for name in kernel.arg_names if name not in constexprs}


def _aligned(kernel, head_dim: int, kv_heads: int) -> tuple:
    """Pointers, and the strides that are multiples of 16 for these shapes, as a launch finds."""
    stride = {
        "_codes_head": head_dim // 2,
        "kc_head": head_dim // 2,
        "vc_head": head_dim // 2,
        "ks_head": head_dim // 16,
        "vs_head": head_dim // 16,
        "ks_slot": head_dim // 16 * kv_heads,
        "vs_slot": head_dim // 16 * kv_heads,
    }
    names = []
    for name in kernel.arg_names:
        odd = any(name.endswith(tail) and value % 16 for tail, value in stride.items())
        if name.endswith("_ptr") or (name.startswith("stride_") and not odd):
            names.append(name)
    return tuple(names)


def cases(arch: int):
    """(name, kernel, constexprs, warps, stages, head dim, KV heads) of what the hosts launch."""
    import triton.language as tl

    from sglang_fp4kv.kernels import extend_nvfp4 as extend
    from sglang_fp4kv.kernels import merge_nvfp4 as merge_module
    from sglang_fp4kv.kernels import merge_parts as parts_module
    from sglang_fp4kv.kernels import tiled_nvfp4 as tiled
    from sglang_fp4kv.kernels import unpack_nvfp4 as unpack_module
    from sglang_fp4kv.kernels._plan import (
        code_placement,
        half_width,
        plan_attention,
        plan_extend,
        pow2,
    )
    from sglang_fp4kv.kernels._tile import ASM_PURE, FOLD

    for head_dim, group, kv_heads in SHAPES:
        common = {
            "GROUP": group,
            "D": head_dim,
            "HALF": half_width(head_dim),
            "USE_MASK": False,
            "HAS_OFFSETS": False,
            "CAUSAL": True,
            "WINDOW": 0,
            "LOGIT_CAP": 0.0,
            "DTYPE": tl.float16,
            "EMULATE": False,
        }
        for name, count, extra in (
            ("decode", 1, {}),
            ("verify", 8, {}),
            ("verify tree", 8, {"USE_MASK": True, "WINDOW": 512, "LOGIT_CAP": 30.0}),
        ):
            if name == "verify tree" and head_dim < 128:
                continue
            plan = plan_attention(
                8, count, group * kv_heads, kv_heads, head_dim, 65536, limits(arch), False
            )
            constexprs = common | {
                "Q": count,
                "BLOCK_M": plan.block_m,
                "BLOCK_N": plan.block_n,
                "BLOCK_B": 16,
                "MIN_TILES": plan.min_tiles,
                "HAS_BLOCK": count > 1,
                "ASM": code_placement(limits(arch), plan.block_m),
            }
            yield (
                name,
                tiled._attention_nvfp4_kernel,
                constexprs | extra,
                plan.num_warps,
                plan.num_stages,
                head_dim,
                kv_heads,
            )
        merge = {
            "Q": 8,
            "D": head_dim,
            "HALF": half_width(head_dim),
            "BLOCK_H": 1,
            "BLOCK_S": merge_module._SPLITS_AT_A_TIME,
            "EMULATE": False,
        }
        yield "merge", merge_module._merge_nvfp4_kernel, merge, 2, 3, head_dim, kv_heads
        unpack = {
            "D": head_dim,
            "HALF": half_width(head_dim),
            "BLOCK_N": unpack_module.block_tokens(head_dim),
            "FOLDED": FOLD,
            "ASM": ASM_PURE,
        }
        yield "unpack", unpack_module._unpack_nvfp4_kernel, unpack, 4, 3, head_dim, kv_heads
        parts = {
            "HEADS": group * kv_heads,
            "D": head_dim,
            "BLOCK_R": parts_module._ELEMENTS // pow2(head_dim),
            "BLOCK_D": pow2(head_dim),
            "KEEP_LSE": True,
            "EMULATE": False,
        }
        yield "merge parts", parts_module._merge_parts_kernel, parts, 4, 3, head_dim, kv_heads
        for name, rows in (("extend", 10**5), ("extend short", 48)):
            if name == "extend short" and head_dim < 128:
                continue
            tile = plan_extend(head_dim, rows, limits(arch))
            constexprs = common | {
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "CHUNK_N": tile.chunk_n,
                "CHUNK_DTYPE": tl.bfloat16,
                "ASM": code_placement(limits(arch), tile.block_m),
            }
            yield (
                name,
                extend._extend_nvfp4_kernel,
                constexprs,
                tile.num_warps,
                tile.num_stages,
                head_dim,
                kv_heads,
            )


def compile_all(arch: int) -> list[dict]:
    from aot import compile_kernel

    rows = []
    for name, kernel, constexprs, warps, stages, head_dim, kv_heads in cases(arch):
        done = compile_kernel(
            kernel,
            _types(kernel, constexprs, "*i64"),
            constexprs,
            arch,
            num_warps=warps,
            num_stages=stages,
            aligned=_aligned(kernel, head_dim, kv_heads),
        )
        rows.append(
            {
                "arch": arch,
                "kernel": name,
                "D": head_dim,
                "M": constexprs.get("BLOCK_M"),
                "N": constexprs.get("BLOCK_N"),
                "warps": warps,
                "stages": stages,
                "shared": done.shared,
                "regs": done.n_regs,
                "stack": done.stack_bytes,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


@pytest.mark.parametrize("arch", ARCHS)
def test_readers_compile_and_fit(arch):
    from aot import rows_printed

    rows = rows_printed(__file__, arch)
    # Decode, verify, merge, unpack, merge parts, extend; two more at D 128 and 256.
    assert len(rows) == 4 * 6 + 2 * 2
    for row in rows:
        assert row["shared"] <= limits(arch).shared_bytes, row
        assert row["stack"] <= stack_limit(row["kernel"], row["D"]), row


if __name__ == "__main__":
    for arg in sys.argv[1:]:
        compile_all(int(arg))
