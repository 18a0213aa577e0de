"""The register-fragment readers compile for every supported architecture, fit and do not spill.

Compiled in a process of its own without TRITON_INTERPRET, like test_compile_readers. By hand, for a
table with instructions a KV element: python tests/test_compile_fragments.py 90 121
"""

import collections
import json
import re
import sys

import pytest
from test_compile_readers import ARCHS, limits

# Head dim, heads of a group, KV heads, query tokens: issue shapes, SmolLM-like, a tree under a window.
SHAPES = (
    (256, 6, 4, 1),
    (256, 6, 4, 8),
    (128, 4, 8, 1),
    (128, 4, 8, 8),
    (64, 3, 3, 1),
    (64, 3, 3, 8),
)
TREE = {"USE_MASK": True, "WINDOW": 512, "LOGIT_CAP": 30.0}
# A windowed, capped tree verify is no DFlash path. The merge has 8 bytes on sm_103 in some compilations.
SPILL_BYTES = {"plain": 0, "tree": 8, "merge": 8}


def _types(kernel, constexprs: dict, kind: str) -> dict:
    """Argument types as launch_fragments passes them for bf16 q."""

    def of(name: str) -> str:
        if not name.endswith("_ptr"):
            return "fp32" if name.endswith("_scale") else "i32"
        if "codes" in name or ("scales" in name and kind == "verify"):
            return "*i32"
        if "scales" in name or name == "mask_ptr":
            return "*u8"
        if name.startswith("part_"):
            return "*fp32"
        if "indices" in name or "slots" in name or "mask_indptr" in name:
            return "*i64"
        if "indptr" in name or "offsets" in name or "sched" in name:
            return "*i32"
        return "*bf16"

    return {name: of(name) for name in kernel.arg_names if name not in constexprs}


def _aligned(kernel, kind: str, head_dim: int, kv_heads: int) -> tuple:
    """Pointers, and strides that are multiples of 16 in the units the kernel counts in."""
    row_words, row_scales = head_dim // 8, head_dim // 16 // (4 if kind == "verify" else 1)
    strides = {
        "stride_qt": 16,
        "stride_qh": head_dim,
        "stride_ot": 16,
        "stride_oh": head_dim,
        "c_slot": row_words * kv_heads,
        "c_head": row_words,
        "s_slot": row_scales * kv_heads,
        "s_head": row_scales,
    }
    return tuple(
        name
        for name in kernel.arg_names
        if name.endswith("_ptr")
        or any(name.endswith(tail) and value % 16 == 0 for tail, value in strides.items())
    )


def loop_instructions(sass: str) -> dict:
    """Opcodes between the widest backward branch and its target, which is the walk over the keys."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", sass)
    lines = [(int(at, 16), op, rest) for at, op, rest in lines]
    loops = [
        (int(target[1], 16), at)
        for at, op, rest in lines
        if op.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", rest))
    ]
    first, last = max(((a, b) for a, b in loops if a < b), key=lambda loop: loop[1] - loop[0])
    return collections.Counter(op.split(".")[0] for at, op, _ in lines if first <= at <= last)


def compile_all(arch: int, sass: bool = False) -> None:
    from aot import compile_kernel

    from sglang_fp4kv.kernels import fragments_nvfp4 as fragments
    from sglang_fp4kv.kernels import merge_fragments as merge
    from sglang_fp4kv.kernels._plan import plan_attention

    plain = {"USE_MASK": False, "HAS_OFFSETS": False, "CAUSAL": True, "WINDOW": 0, "LOGIT_CAP": 0.0}
    for head_dim, group, kv_heads, count in SHAPES:
        plan = plan_attention(
            8, count, group * kv_heads, kv_heads, head_dim, 65536, limits(arch)
        )
        kernel = {
            "decode": fragments._decode_fragments_kernel,
            "verify": fragments._verify_fragments_kernel,
        }[plan.kind]
        for name, options in (("plain", {}), ("tree", TREE)):
            if name == "tree" and (count == 1 or head_dim == 64):
                continue
            constexprs = fragments.constexprs(plan, 8, count, group, head_dim, limits(arch))
            constexprs |= plain | {"HAS_BLOCK": count > 1} | options
            done = compile_kernel(
                kernel,
                _types(kernel, constexprs, plan.kind),
                constexprs,
                arch,
                num_warps=plan.num_warps,
                aligned=_aligned(kernel, plan.kind, head_dim, kv_heads),
                sass=sass,
            )
            row = {
                "arch": arch,
                "kernel": plan.kind,
                "variant": name,
                "D": head_dim,
                "rows": plan.block_m,
                "keys": plan.block_n,
                "warps": plan.num_warps,
                "shared": done.shared,
                "regs": done.n_regs,
                "stack": done.stack_bytes,
                "e2m1": "cvt.rn.f16x2.e2m1x2" in done.ptx,
            }
            if sass:
                elements = plan.block_n * head_dim * 2 / (32 * plan.num_warps)
                opcodes = loop_instructions(done.sass)
                row["per_element"] = round(sum(opcodes.values()) / elements, 2)
                row["opcodes"] = dict(opcodes.most_common(12))
            print(json.dumps(row), flush=True)
        for columns, splits in (merge._FEW, merge._DEEP, merge._MANY):
            constexprs = {
                "Q": count,
                "GROUP": group,
                "D": head_dim,
                "N": plan.block_m,
                "LANE_BYTES": 2,
                "STEP_BYTES": 16,
                "STEPS": 8,
                "COLUMNS": columns,
                "SPLITS": splits,
                "EMULATE": False,
            }
            done = compile_kernel(
                merge._merge_fragments_kernel,
                _types(merge._merge_fragments_kernel, constexprs, plan.kind),
                constexprs,
                arch,
            )
            row = {
                "arch": arch,
                "kernel": "merge",
                "variant": "plain",
                "D": head_dim,
                "rows": plan.block_m,
                "shared": done.shared,
                "regs": done.n_regs,
                "stack": done.stack_bytes,
                "e2m1": False,
            }
            print(json.dumps(row), flush=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_fragments_compile_fit_and_do_not_spill(arch):
    from aot import rows_printed

    rows = rows_printed(__file__, arch)
    kinds = collections.Counter((row["kernel"], row["variant"]) for row in rows)
    assert kinds == {
        ("decode", "plain"): 3,
        ("verify", "plain"): 3,
        ("verify", "tree"): 2,
        ("merge", "plain"): 18,
    }
    for row in rows:
        assert row["shared"] <= limits(arch).shared_bytes, row
        kind = "merge" if row["kernel"] == "merge" else row["variant"]
        assert row["stack"] <= SPILL_BYTES[kind], row
        if row["kernel"] != "merge":
            assert row["e2m1"] == (arch >= 100), row


if __name__ == "__main__":
    for arg in sys.argv[1:]:
        compile_all(int(arg), sass=True)
