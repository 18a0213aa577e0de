"""Bytes come from one place: no module but formats.py works out what a head dim takes."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Where sizes are worked out, and the sums with a head dim that are no bytes.
OWN_SIZES = "sglang_fp4kv/formats.py"
NO_BYTES = {
    "sglang_fp4kv/kernels/_call.py": ["rows * head_dim"] * 2,  # FP32 partial results
    "sglang_fp4kv/kernels/merge_fragments.py": ["head_dim // 16"],  # how fragments lie in registers
    "sglang_fp4kv/prefill.py": ["4 * head_dim"],  # FLOPs of a key
}
# Code compiled for the device addresses rows by constants; its buffers are checked by host functions.
DEVICE = {"jit", "constexpr_function"}
WIDTHS = {"head_dim", "v_head_dim", "HEAD_DIM"}
DIVISORS = {"2", "16", "BLOCK_SIZE", "CODES_PER_BYTE"}
MODULES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("sglang_fp4kv", "launcher")
    for path in (ROOT / folder).rglob("*.py")
    if str(path.relative_to(ROOT)) != OWN_SIZES
)


def last_name(node):
    """What a name, an attribute or a call is called; None for anything else."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def on_device(node):
    return isinstance(node, ast.FunctionDef) and any(last_name(d) in DEVICE for d in node.decorator_list)


def factors(node):
    """The factors of a product, through sums in brackets."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        return factors(node.left) + factors(node.right)
    return [node]


def own_sizes(source):
    """Every product and every quotient of a head dim that could be bytes, as it is written."""
    found = []

    def visit(node):
        if on_device(node):
            return
        if isinstance(node, ast.BinOp):
            left, op = node.left, node.op
            if isinstance(op, ast.FloorDiv | ast.Div | ast.RShift) and last_name(left) in WIDTHS:
                divisor = last_name(node.right) or ast.unparse(node.right)
                if divisor in DIVISORS or (isinstance(op, ast.RShift) and divisor in ("1", "4")):
                    found.append(ast.unparse(node))
            elif isinstance(op, ast.Mult):
                names = {last_name(factor) for factor in factors(node)}
                if names & WIDTHS:
                    found.append(ast.unparse(node))
                    return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_module_computes_bytes_of_its_own(module):
    assert own_sizes((ROOT / module).read_text()) == NO_BYTES.get(module, [])


PLANTED = {
    "codes": "width = head_dim // 2",
    "scales": "width = self.head_dim // 16",
    "scales by name": "width = head_dim // formats.BLOCK_SIZE",
    "a shift": "width = head_dim >> 1",
    "an exact quotient": "width = head_dim / 2",
    "a plain row": "row = heads * head_dim * dtype.itemsize",
    "K and V": "row = self.head_num * (self.head_dim + self.v_head_dim)",
    "a token": "cell = 2 * facts.kv_heads * facts.head_dim",
    "a call": "row = rank_heads(draft, tp) * draft.head_dim",
    "inside a function": "def cell(launch):\n    return [2 * n * launch.head_dim * launch.layers for n in (1,)]",
    "under another decorator": "@property\ndef row(self):\n    return self.head_dim // 2 + self.head_dim // 16",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED)
def test_a_planted_sum_is_found(source):
    assert own_sizes(source)


HARMLESS = {
    "a check": "ok = head_dim % 16 == 0",
    "device code": "@triton.jit\ndef kernel(head_dim):\n    return head_dim // 2",
    "device code with arguments": "@gluon.jit(noinline=True)\ndef kernel(head_dim):\n    return head_dim // 2",
    "words": "words = head_dim // 8",
    "the one function": "cell = formats.bytes_per_token(head_dim, kv_heads, layers) * tokens",
}


@pytest.mark.parametrize("source", HARMLESS.values(), ids=HARMLESS)
def test_other_uses_of_a_head_dim_are_left_alone(source):
    assert own_sizes(source) == []


def test_every_user_of_sizes_asks_formats():
    """The four that the sizes must agree between, and the rules."""
    for module in ("kernels/store_nvfp4", "kernels/_check", "prefill", "planner", "pool", "draft_pool", "recipe"):
        source = (ROOT / "sglang_fp4kv" / f"{module}.py").read_text()
        assert "formats" in source and ("_bytes(" in source or "bytes_per_token(" in source), module
    assert "bytes_per_token" in (ROOT / "launcher" / "launch.py").read_text()
