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

# Head dim, query heads of a KV head, KV heads, query tokens: the shape, two KV heads, Llama-like,
# SmolLM-like. One compilation serves any number of tokens.
SHAPES = (
    (256, 6, 4, 8),
    (256, 8, 2, 8),
    (128, 4, 8, 64),
    (64, 3, 3, 8),
)
SELECTED = 2048


def launches(arch: int):
    """(kernel, constexprs, argument types, warps, aligned arguments, row of the table)."""
    from sglang_fp4kv.kernels import fragments_nvfp4 as fragments
    from sglang_fp4kv.kernels import select_rows as lists
    from sglang_fp4kv.kernels import sparse_nvfp4 as sparse
    from sglang_fp4kv.kernels._selection import Selection

    plain = {"USE_MASK": False, "HAS_OFFSETS": False, "CAUSAL": False, "WINDOW": 0, "LOGIT_CAP": 0.0}
    for head_dim, group, kv_heads, tokens in SHAPES:
        plan = sparse.plan_sparse(
            tokens, kv_heads, SELECTED, group * kv_heads, kv_heads, head_dim, limits(arch)
        )
        selections = tokens * kv_heads
        row = {"kind": plan.kind, "D": head_dim, "selections": selections, "keys": plan.block_n}
        for listed, index in ((True, "*i32"), (True, "*i64"), (False, "*i64")):
            selection = Selection(groups=kv_heads, listed=listed)
            kernel = fragments._decode_fragments_kernel
            constexprs = plain | {"HAS_BLOCK": False}
            constexprs |= fragments.constexprs(
                plan, selections, 1, group, head_dim, limits(arch), selection
            )
            types = _types(kernel, constexprs, plan.kind) | {"block_slots_ptr": index}
            aligned = _aligned(kernel, plan.kind, head_dim, 1)
            yield kernel, constexprs, types, plan.num_warps, aligned, row | {"listed": listed}

            kernel = lists._select_rows_kernel
            constexprs = {"GROUPS": kv_heads, "LISTED": listed, "BLOCK": lists._BLOCK}
            types = {n: "*i32" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
            types |= {"selected_ptr": index, "kv_indices_ptr": "*i64"}
            types = {name: kind for name, kind in types.items() if name not in constexprs}
            yield kernel, constexprs, types, 4, None, row | {"listed": listed}


def compile_all(arch: int) -> None:
    from aot import compile_kernel

    for kernel, constexprs, types, warps, aligned, row in launches(arch):
        done = compile_kernel(kernel, types, constexprs, arch, num_warps=warps, aligned=aligned)
        row = {"arch": arch, "kernel": kernel.__name__} | row
        row |= {"shared": done.shared, "regs": done.n_regs, "stack": done.stack_bytes}
        print(json.dumps(row), flush=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_sparse_compiles_fits_and_does_not_spill(arch):
    from aot import rows_printed

    rows = rows_printed(__file__, arch)
    assert collections.Counter(row["kernel"] for row in rows) == {
        "_decode_fragments_kernel": 3 * len(SHAPES),
        "_select_rows_kernel": 3 * len(SHAPES),
    }
    for row in rows:
        assert row["kind"] == "decode", row
        assert row["shared"] <= limits(arch).shared_bytes, row
        assert row["stack"] <= SPILL_BYTES["plain"], row


if __name__ == "__main__":
    for arg in sys.argv[1:]:
        compile_all(int(arg))
