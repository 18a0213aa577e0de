"""Compile Triton kernels ahead of time, for GPUs this machine does not have.

Not for a process with TRITON_INTERPRET=1: there triton.jit has already replaced the kernels.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

ARCHS = (90, 100, 103, 120, 121)
SHARED_LIMIT_BYTES = 101376  # per block on sm_120 and sm_121


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on one architecture.

    shared       bytes of shared memory a block
    n_regs       registers a thread
    stack_bytes  local memory a thread, which is where spilled registers go
    ptx, sass    text; sass is empty unless asked for
    """

    arch: int
    shared: int
    n_regs: int
    stack_bytes: int
    ptx: str
    sass: str


def _tool(name: str) -> str:
    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


def _run(tool: str, *args: str) -> str:
    return subprocess.run(
        [_tool(tool), *args], check=True, capture_output=True, text=True
    ).stdout


def compile_kernel(
    fn,
    signature: dict,
    constexprs: dict,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple = None,
    sass: bool = False,
) -> Compiled:
    """Compile fn (a @triton.jit or @gluon.jit kernel) for sm_<arch> and return what it takes.

    signature   argument name -> type, "*bf16", "i32", "fp32"; "constexpr" may be left out
    constexprs  argument name -> value
    aligned     arguments known to be multiples of 16, as the launcher would find; all pointers
                when left out
    """
    if not isinstance(fn, triton.JITFunction):
        raise RuntimeError(f"{fn} is no JITFunction; is TRITON_INTERPRET set?")
    full = {
        name: "constexpr" if name in constexprs else signature[name] for name in fn.arg_names
    }
    unknown = (set(signature) | set(constexprs)) - set(fn.arg_names)
    if unknown:
        raise ValueError(f"{fn.__name__} has no argument {sorted(unknown)}")
    if aligned is None:
        aligned = tuple(name for name, kind in full.items() if kind.startswith("*"))
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource if fn.is_gluon() else ASTSource
    kernel = triton.compile(
        source(fn, full, constexprs, attrs),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", cubin.name)
        text = _run("cuobjdump", "--dump-sass", cubin.name) if sass else ""
    found = re.search(
        rf"Function {re.escape(fn.__name__)}:\s*REG:(\d+) STACK:(\d+)", usage
    )
    if found is None:
        raise RuntimeError(f"cuobjdump names no {fn.__name__}: {usage}")
    return Compiled(
        arch=arch,
        shared=kernel.metadata.shared,
        n_regs=int(found[1]),
        stack_bytes=int(found[2]),
        ptx=kernel.asm["ptx"],
        sass=text,
    )


def rows_printed(script: str, arch: int) -> list[dict]:
    """What ``script`` prints for an architecture, a JSON line each, run where kernels are not replaced."""
    tests = Path(__file__).parent
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(tests.parent), str(tests), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, script, str(arch)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]
