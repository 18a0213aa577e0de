"""What sparse_nvfp4 launches compiles for every supported architecture, fits and does not spill.

Compiled in a process of its own without TRITON_INTERPRET, like test_compile_readers. By hand, for a
table: python tests/test_compile_sparse.py 90 121
"""

import collections
import json
import sys

import pytest
from test_compile_fragments import SPILL_BYTES, _aligned, _types
from test_compile_readers import ARCHS, limits

# Head dim, heads of a group, KV heads, query tokens: the shape at 1 and 64 requests and as
# many as a launch takes, two KV heads, Llama-like, SmolLM-like.
SHAPES = (
    (256, 6, 4, 1),
    (256, 6, 4, 64),
    (256, 6, 4, 128),
    (256, 8, 2, 8),
    (128, 4, 8, 64),
    (64, 3, 3, 8),
)
SELECTED = 2048


def compile_all(arch: int) -> None:
    from aot import compile_kernel

    from sglang_fp4kv.kernels import fragments_nvfp4 as fragments
    from sglang_fp4kv.kernels import sparse_nvfp4 as sparse

    plain = {"USE_MASK": False, "HAS_OFFSETS": False, "CAUSAL": False, "WINDOW": 0, "LOGIT_CAP": 0.0}
    for head_dim, group, kv_heads, tokens in SHAPES:
        plan = sparse.plan_sparse(
            tokens, kv_heads, SELECTED, group * kv_heads, kv_heads, head_dim, limits(arch)
        )
        selections = tokens * kv_heads
        constexprs = fragments.constexprs(plan, selections, 1, group, head_dim, limits(arch))
        constexprs |= plain | {"HAS_BLOCK": False}
        reader = fragments._decode_fragments_kernel
        lists = ("kv_indices_ptr", "block_slots_ptr")
        translation = {"GROUPS": kv_heads, "LISTED": True, "BLOCK": sparse._BLOCK}
        selector = sparse._select_rows_kernel
        types = {"selected_ptr": "*i64", "kv_indices_ptr": "*i64"}
        for kernel, values, signature, warps, aligned in (
            (
                reader,
                constexprs,
                _types(reader, constexprs, plan.kind) | dict.fromkeys(lists, "*i32"),
                plan.num_warps,
                _aligned(reader, plan.kind, head_dim, 1),
            ),
            (
                selector,
                translation,
                {n: "*i32" if n.endswith("_ptr") else "i32" for n in selector.arg_names} | types,
                4,
                None,
            ),
        ):
            done = compile_kernel(
                kernel,
                {name: kind for name, kind in signature.items() if name not in values},
                values,
                arch,
                num_warps=warps,
                aligned=aligned,
            )
            row = {
                "arch": arch,
                "kernel": kernel.__name__,
                "kind": plan.kind,
                "D": head_dim,
                "selections": selections,
                "keys": plan.block_n,
                "shared": done.shared,
                "regs": done.n_regs,
                "stack": done.stack_bytes,
            }
            print(json.dumps(row), flush=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_sparse_compiles_fits_and_does_not_spill(arch):
    from aot import rows_printed

    rows = rows_printed(__file__, arch)
    assert collections.Counter(row["kernel"] for row in rows) == {
        "_decode_fragments_kernel": len(SHAPES),
        "_select_rows_kernel": len(SHAPES),
    }
    for row in rows:
        assert row["kind"] == "decode", row
        assert row["shared"] <= limits(arch).shared_bytes, row
        assert row["stack"] <= SPILL_BYTES["plain"], row


if __name__ == "__main__":
    for arg in sys.argv[1:]:
        compile_all(int(arg))
