"""Bytes come from one place: no module but formats.py works out what a head dim takes."""

import ast
from pathlib import Path

import pytest
import torch

from sglang_fp4kv import formats

ROOT = Path(__file__).parent.parent
# Where sizes are worked out, and the sums with a head dim that are no bytes.
OWN_SIZES = "sglang_fp4kv/formats.py"
NO_BYTES = {
    "sglang_fp4kv/attention.py": ["layer.tp_q_head_num * layer.qk_head_dim"],  # a shape of queries
    "sglang_fp4kv/kernels/_call.py": ["rows * head_dim"] * 2,  # FP32 partial results
    "sglang_fp4kv/kernels/merge_fragments.py": ["head_dim // 16"],  # how fragments lie in registers
    "sglang_fp4kv/prefill.py": ["4 * head_dim"],  # FLOPs of a key
}
# Code compiled for the device addresses rows by constants; its buffers are checked by host functions.
DEVICE = {"jit", "constexpr_function"}
WIDTHS = {"head_dim", "v_head_dim", "qk_head_dim", "HEAD_DIM", "head_size", "dim", "d"}
QUOTIENTS = {"divmod", "floordiv", "truediv", "rshift", "__floordiv__"}
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


def is_width(node):
    """A head dim: by its name, as an entry of a shape or a mapping, with a sign or rounded up."""
    if isinstance(node, ast.UnaryOp):
        return is_width(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return is_width(node.left) or is_width(node.right)
    if isinstance(node, ast.Subscript):
        return last_name(node.value) == "shape" or getattr(node.slice, "value", None) in WIDTHS
    if isinstance(node, ast.Call) and last_name(node) == "getattr":
        return any(getattr(argument, "value", None) in WIDTHS for argument in node.args)
    return last_name(node) in WIDTHS


def is_divisor(op, node):
    divisor = last_name(node) or ast.unparse(node)
    return divisor in DIVISORS or (isinstance(op, ast.RShift) and divisor in ("1", "4"))


def own_sizes(source):
    """Every product and every quotient of a head dim that could be bytes, as it is written."""
    found = []

    def visit(node):
        if on_device(node):
            return
        if isinstance(node, ast.BinOp):
            left, op = node.left, node.op
            if isinstance(op, ast.FloorDiv | ast.Div | ast.RShift) and is_width(left):
                if is_divisor(op, node.right):
                    found.append(ast.unparse(node))
            elif isinstance(op, ast.Mult):
                names = {last_name(factor) for factor in factors(node)}
                if names & WIDTHS:
                    found.append(ast.unparse(node))
                    return
        elif isinstance(node, ast.AugAssign):
            if is_width(node.target) and is_divisor(node.op, node.value):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and last_name(node) in QUOTIENTS:
            if any(is_width(part) for part in (*node.args, getattr(node.func, "value", None)) if part):
                found.append(ast.unparse(node))
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
    "of a shape": "width = codes.shape[-1] // 2",
    "of another name": "width = qk_head_dim // 2",
    "rounded up": "blocks = -(-head_dim // 16)",
    "rounded up by a sum": "blocks = (head_dim + 15) // 16",
    "in place": "def row(head_dim):\n    head_dim //= 2\n    return head_dim",
    "both at once": "width, left = divmod(head_dim, 2)",
    "by operator": "width = operator.floordiv(self.head_dim, 2)",
    "of a mapping": "width = facts['head_dim'] // 2",
    "by getattr": "width = getattr(config, 'head_dim') // 2",
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


HEAD_DIM = 64


@pytest.fixture(params=[2, 4], ids=["two codes a byte", "four codes a byte"])
def code_bytes(request, monkeypatch):
    """Bytes of a row's codes under the format as it is, and under one of other sizes, known to formats alone."""
    monkeypatch.setattr(formats, "CODES_PER_BYTE", request.param)
    return HEAD_DIM // request.param


def test_planner_and_pool_follow_the_one_function(code_bytes):
    from sglang_fp4kv.planner import Attention
    from sglang_fp4kv.recipe import PackedNVFP4Method

    row = code_bytes + HEAD_DIM // 16
    assert Attention(layers=3, kv_heads=2, head_dim=HEAD_DIM).bytes_per_token("nvfp4") == 2 * row * 2 * 3
    recipe = PackedNVFP4Method(3, "cpu")
    recipe.packed = True
    assert recipe.compute_cell_size(2, HEAD_DIM, 3, 1) == 2 * row * 2 * 3
    made = recipe.create_buffers(5, 2, HEAD_DIM, 3, "cpu")
    buffers = [x for layers in made.values() if isinstance(layers, list) for x in layers]
    assert sum(x.numel() * x.element_size() for x in buffers) == 5 * 2 * row * 2 * 3


def test_quantizer_and_readers_follow_the_one_function(code_bytes):
    """What they check their buffers with."""
    from sglang_fp4kv.kernels._check import check_pool_side
    from sglang_fp4kv.kernels.store_nvfp4 import check_pool

    def side(width):
        return [torch.zeros(5, 2, n, dtype=torch.uint8) for n in (width, HEAD_DIM // 16)]

    for check in (check_pool, check_pool_side):
        check("k", *side(code_bytes), 2, HEAD_DIM)
        with pytest.raises(ValueError, match=rf"k_codes must be \[\w+, \w+, {code_bytes}\].* got \(5, 2, 20\)"):
            check("k", *side(20), 2, HEAD_DIM)


@pytest.mark.interpreter
def test_the_cache_follows_the_one_function(code_bytes):
    from sglang_fp4kv.paged import PackedCache

    cache = PackedCache(2, 4, 2, HEAD_DIM, "cpu")
    assert [side.shape[-1] for side in cache.sides] == [code_bytes, HEAD_DIM // 16] * 2
