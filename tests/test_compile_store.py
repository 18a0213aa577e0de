"""The writers compile for every supported architecture, fit its shared memory and spill nothing.

Compiled in a process of its own without TRITON_INTERPRET, which would replace the kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aot import ARCHS, SHARED_LIMIT_BYTES

ROOT = Path(__file__).parent.parent


def signature(kernel, constexprs: dict, **types: str) -> dict:
    """Types by name: pointers and scales as given, everything else a 32-bit number."""
    return {
        name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs
    }


def nvfp4_types(source: str) -> dict:
    return {
        "k_ptr": source,
        "v_ptr": source,
        "slots_ptr": "*i64",
        "loc_ptr": "*i64",
        "commit_lens_ptr": "*i32",
        "k_codes_ptr": "*u8",
        "v_codes_ptr": "*u8",
        "k_scales_ptr": "*u8",
        "v_scales_ptr": "*u8",
        "k_global_scale": "fp32",
        "v_global_scale": "fp32",
    }


def plain_types(source: str, pool: str, scale: str) -> dict:
    return {
        "k_ptr": source,
        "v_ptr": source,
        "loc_ptr": "*i64",
        "commit_lens_ptr": "*i32",
        "k_pool_ptr": pool,
        "v_pool_ptr": pool,
        "k_scale": scale,
        "v_scale": scale,
    }


def cases():
    """(name, kernel, types, constexprs) of what the host functions launch."""
    from sglang_fp4kv.kernels import commit_prefix, commit_prefix_plain, store_nvfp4

    blocks = store_nvfp4.BLOCKS_PER_PROGRAM
    for kernel in (store_nvfp4._store_nvfp4_kernel, commit_prefix._commit_prefix_nvfp4_kernel):
        for source, heads, head_dim, assembly in (
            ("*bf16", 1, 1024, True),  # heads side by side: 4 x 256, 8 x 128
            ("*bf16", 1, 512, True),  # 8 x 64
            ("*bf16", 8, 128, True),
            ("*bf16", 8, 128, False),
            ("*fp16", 5, 80, True),
            ("*fp16", 5, 80, False),
            ("*fp32", 2, 256, False),
        ):
            constexprs = {
                "HEADS": heads,
                "BLOCKS_PER_ROW": head_dim // 16,
                "BLOCKS_PER_PROGRAM": blocks,
                "ASM": assembly,
                "PDL": True,
            }
            encoder = "asm" if assembly else "plain"
            name = f"{kernel.__name__}-{source}-{heads}x{head_dim}-{encoder}"
            yield name, kernel, nvfp4_types(source), constexprs
    kernel = commit_prefix_plain._commit_prefix_plain_kernel
    for source, pool, kind, divide, scale in (
        ("*bf16", "*u8", "e4m3", "rounded", "*fp32"),
        ("*bf16", "*u8", "e4m3", "reciprocal", "fp32"),
        ("*fp16", "*u8", "e4m3", "none", "fp32"),
        ("*i16", "*i16", "copy", "none", "fp32"),
        ("*fp32", "*i16", "bf16", "rounded", "*fp32"),
        ("*bf16", "*fp16", "fp16", "reciprocal", "fp32"),
    ):
        constexprs = {
            "HEADS": 8,
            "ROWS_PER_PROGRAM": commit_prefix_plain.ELEMENTS_PER_PROGRAM // 128,
            "POOL": kind,
        }
        for side in "KV":
            constexprs |= {
                f"{side}_WIDTH": 96,
                f"{side}_WIDTH_POW2": 128,
                f"{side}_DIVIDE": divide,
                f"{side}_SCALE_IS_TENSOR": scale.startswith("*"),
            }
        types = plain_types(source, pool, scale)
        yield f"{kernel.__name__}-{source}-{kind}-{divide}", kernel, types, constexprs


def compile_all() -> list[dict]:
    from aot import compile_kernel
    from sglang_fp4kv.kernels.store_nvfp4 import NUM_WARPS

    rows = []
    for name, kernel, types, constexprs in cases():
        types = signature(kernel, constexprs, **types)
        strides = [n for n in types if n.startswith(("k_", "v_")) and n.endswith("_stride")]
        pointers = [n for n, kind in types.items() if kind.startswith("*")]
        for arch in ARCHS:
            compiled = compile_kernel(
                kernel, types, constexprs, arch, NUM_WARPS, aligned=(*pointers, *strides)
            )
            rows.append(
                {
                    "name": name,
                    "arch": arch,
                    "shared": compiled.shared,
                    "registers": compiled.n_regs,
                    "stack_bytes": compiled.stack_bytes,
                    "wide_loads": compiled.ptx.count("ld.global.v4"),
                }
            )
    return rows


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    result = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_writer_compiles_for_every_architecture(compiled):
    names = {row["name"] for row in compiled}
    assert len(names) == 20
    assert len(compiled) == len(names) * len(ARCHS)
    assert {row["arch"] for row in compiled} == set(ARCHS)


def test_shared_memory_fits_sm_120(compiled):
    assert [row for row in compiled if row["shared"] >= SHARED_LIMIT_BYTES] == []


def test_nothing_spills(compiled):
    assert [row for row in compiled if row["stack_bytes"]] == []
    assert max(row["registers"] for row in compiled) <= 128


def test_the_assembly_keeps_a_block_in_one_thread(compiled):
    """No shared memory, so no exchange between threads, and registers for a full SM of them."""
    rows = [row for row in compiled if row["name"].endswith("-asm")]
    assert len(rows) == 8 * len(ARCHS)
    assert [row for row in rows if row["shared"] or row["registers"] > 40] == []
    assert [row for row in rows if row["wide_loads"] != 2] == []


def test_16_bit_sources_are_loaded_16_bytes_at_a_time(compiled):
    narrow = [r for r in compiled if "nvfp4" in r["name"] and "fp32" not in r["name"] and not r["wide_loads"]]
    assert narrow == []


if __name__ == "__main__":
    print(json.dumps(compile_all()))
