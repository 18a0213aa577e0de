"""PackedCache: write, read, copy and free against the codec, and what its checks refuse."""

import copy
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_fp4kv import codec, formats, paged
from sglang_fp4kv.kernels.sparse_nvfp4 import sparse_nvfp4
from sglang_fp4kv.kernels.store_nvfp4 import store_nvfp4
from sglang_fp4kv.paged import PackedCache

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.interpreter


def make_cache(device, **changes):
    sizes = {"blocks": 4, "page_size": 16, "kv_heads": 2, "head_dim": 64}
    return PackedCache(**{**sizes, "device": device, **changes})


def tokens(count, device, heads=2, head_dim=64, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, head_dim, generator=g).to(device, dtype) for _ in "kv"]


def expect(cache, k, v, dtype):
    scales = cache.k_global_scale, cache.v_global_scale
    return [codec.decode(*codec.encode(x, s), s, dtype) for x, s in zip((k, v), scales, strict=True)]


def assert_reads(cache, slots, k, v, dtype=torch.bfloat16):
    for got, want in zip(cache.read(slots, dtype), expect(cache, k, v, dtype), strict=True):
        assert got.dtype == dtype and torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_written_is_read(device, dtype):
    cache = make_cache(device, kv_heads=3, head_dim=80)
    k, v = tokens(5, device, 3, 80, dtype)
    before = k.clone(), v.clone()
    slots = torch.tensor([63, 0, 15, 16, 31])
    cache.write(k, v, slots.to(device))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert_reads(cache, slots, k, v, out_dtype)
    order = torch.tensor([2, 2, 0])
    assert_reads(cache, slots[order].to(device), k[order], v[order])


def test_own_global_scales(device):
    cache = make_cache(device, k_global_scale=0.0371, v_global_scale=3.0)
    k, v = tokens(4, device)
    cache.write(k, v, torch.arange(4))
    assert_reads(cache, torch.arange(4), k, v, torch.float32)
    assert cache.global_scales == {
        "k_global_scale": formats.check_global_scale(0.0371), "v_global_scale": 3.0
    }  # fmt: skip


def test_bytes_are_those_of_formats(device):
    cache = make_cache(device, kv_heads=2, head_dim=256)
    held = sum(side.numel() * side.element_size() for side in cache.sides)
    assert cache.slots == 64 and held == 64 * formats.bytes_per_token(256, 2) == 64 * 576
    assert all((side == 0).all() for side in cache.sides)


def test_skipped_rows_are_left_out(device):
    cache = make_cache(device)
    k, v = tokens(4, device)
    k[1], v[3] = math.nan, math.inf  # in rows that are not written
    slots = torch.tensor([9, -1, 40, -1])
    cache.write(k, v, slots)
    assert_reads(cache, slots[[0, 2]], k[[0, 2]], v[[0, 2]])
    for x in cache.read(slots):
        assert (x[[1, 3]] == 0).all() and (x[[0, 2]] != 0).any()
    cache.copy(torch.tensor([9, -1, 9]), torch.tensor([-1, 50, 51]))
    assert_reads(cache, torch.tensor([51]), k[:1], v[:1])
    cache.free(torch.tensor([-1, 9, -1]))
    for slot in (9, 50):
        with pytest.raises(ValueError, match=f"got slot {slot} at 0, which was never written or is free"):
            cache.read(torch.tensor([slot]))


def test_nothing_to_do(device):
    cache = make_cache(device)
    none = torch.zeros(0, dtype=torch.int64)
    k, v = tokens(0, device)
    cache.write(k, v, none)
    cache.copy(none, none)
    cache.free(none)
    assert [x.shape for x in cache.read(none)] == [(0, 2, 64)] * 2
    assert cache.free_blocks == [0, 1, 2, 3] and all((side == 0).all() for side in cache.sides)


def test_a_slot_is_reused_and_a_freed_one_written_again(device):
    cache = make_cache(device)
    slots = torch.arange(16, 32)
    for seed in (0, 1):
        k, v = tokens(16, device, seed=seed)
        cache.write(k, v, slots)
        assert_reads(cache, slots, k, v)
    cache.free(slots)
    assert cache.free_blocks == [0, 1, 2, 3]
    k, v = tokens(1, device, seed=2)
    cache.write(k, v, slots[-1:])
    assert cache.free_blocks == [0, 2, 3]
    assert_reads(cache, slots[-1:], k, v)
    with pytest.raises(ValueError, match="slots must hold a token, got slot 30 at 0"):
        cache.read(slots[-2:])


def test_copy_moves_codes_and_scales(device):
    """Targets may be sources: a rotation of three slots, then one slot to many."""
    cache = make_cache(device)
    k, v = tokens(3, device)
    at = torch.tensor([0, 17, 63])
    cache.write(k, v, at)
    cache.copy(at, at.roll(-1))
    assert_reads(cache, at.roll(-1), k, v)
    cache.copy(at[:1].expand(4), torch.arange(40, 44))
    assert_reads(cache, torch.arange(40, 44), k[2:].expand(4, -1, -1), v[2:].expand(4, -1, -1))


def test_slots_written_by_a_kernel_below_are_marked(device):
    cache = make_cache(device)
    k, v = tokens(3, device)
    slots = torch.tensor([63, -1, 20])
    store_nvfp4(
        k, v, slots.to(device), cache.k_codes, cache.v_codes, cache.k_scales, cache.v_scales,
        **cache.global_scales,
    )  # fmt: skip
    with pytest.raises(ValueError, match="got slot 63 at 0, which was never written"):
        cache.read(slots)
    cache.mark_written(slots)
    assert_reads(cache, slots[::2], k[::2], v[::2])
    assert cache.free_blocks == [0, 2]


def test_blocks_and_their_slots(device):
    cache = make_cache(device, blocks=3, page_size=5)
    assert cache.device == cache.k_codes.device == cache.block_slots(0).device
    assert cache.slots == 15 and cache.block_slots(2).tolist() == [10, 11, 12, 13, 14]
    k, v = tokens(5, device)
    cache.write(k, v, cache.block_slots(1))
    assert cache.free_blocks == [0, 2]
    cache.free(cache.block_slots(1)[:4])
    assert cache.free_blocks == [0, 2]
    cache.free(cache.block_slots(1)[4:])
    assert cache.free_blocks == [0, 1, 2]
    for block in (-1, 3, True, 1.0):
        with pytest.raises(ValueError, match=f"block must be 0 to 2, got {block!r}"):
            cache.block_slots(block)


def test_a_cache_made_in_inference_mode_outlives_it(device):
    with torch.inference_mode():
        cache = make_cache(device)
        k, v = tokens(2, device)
        cache.write(k, v, torch.tensor([3, 20]))
    assert not any(side.is_inference() for side in cache.sides)
    cache.write(k, v, torch.tensor([4, 5]))
    cache.copy(torch.tensor([3]), torch.tensor([60]))
    cache.free(torch.tensor([3]))
    assert_reads(cache, torch.tensor([20, 4, 5, 60]), k[[1, 0, 1, 0]], v[[1, 0, 1, 0]])
    assert cache.free_blocks == [2]


def test_values_that_carry_a_gradient(device):
    cache = make_cache(device)
    k, v = tokens(2, device)
    cache.write(k.clone().requires_grad_(), torch.nn.Parameter(v), torch.tensor([3, 20]))
    assert_reads(cache, torch.tensor([3, 20]), k, v)
    assert not any(x.requires_grad for x in (*cache.sides, *cache.read(torch.tensor([3]))))


def test_a_copy_and_a_pickle_are_caches_of_their_own(device):
    cache = make_cache(device)
    k, v = tokens(2, device)
    cache.write(k, v, torch.tensor([3, 20]))
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.free(torch.tensor([3]))
        other.write(k[:1], v[:1], torch.tensor([20]))
        assert_reads(other, torch.tensor([20]), k[:1], v[:1])
    assert_reads(cache, torch.tensor([3, 20]), k, v)


def one(device, **changes):
    """Arguments of a good write of three tokens, changed."""
    k, v = tokens(3, device)
    return {"k": k, "v": v, "slots": torch.tensor([33, 5, 40])} | changes


def with_value(device, value, name, dtype=torch.bfloat16):
    args = one(device)
    args["k"], args["v"] = args["k"].to(dtype), args["v"].to(dtype)
    args[name][1, 1, 63] = value
    return args


REFUSED_WRITES = {
    r"slots must be distinct, got slot 5 at \[0, 2\]": lambda d: one(d, slots=torch.tensor([5, -1, 5])),
    r"slots must be 0 to 63, or -1 to skip, got 64 at 1": lambda d: one(d, slots=torch.tensor([1, 64, 2])),
    r"slots must be 0 to 63, or -1 to skip, got -2 at 2": lambda d: one(d, slots=torch.tensor([1, 3, -2])),
    r"got 1099511627776 at 0": lambda d: one(d, slots=torch.tensor([1 << 40, 3, 2])),
    r"k must be finite, got nan at token 1, head 1, element 63": lambda d: with_value(d, math.nan, "k"),
    r"v must be finite, got inf at token 1, head 1, element 63": lambda d: with_value(d, math.inf, "v"),
    r"k must be finite, got -inf at token": lambda d: with_value(d, -math.inf, "k", torch.float16),
    r"v must be finite, got nan at token": lambda d: with_value(d, math.nan, "v", torch.float32),
    r"k must be \[T, H, D\], got \(3, 128\)": lambda d: one(d, k=tokens(3, d)[0].flatten(1)),
    r"k and v must be \[N, 2, 64\], got \(3, 4, 64\)": lambda d: one(
        d, **dict(zip("kv", tokens(3, d, heads=4), strict=True))
    ),
    r"k and v must be \[N, 2, 64\], got \(3, 2, 32\)": lambda d: one(
        d, **dict(zip("kv", tokens(3, d, head_dim=32), strict=True))
    ),
    r"k and v must have one shape, got \(3, 2, 64\) and \(2, 2, 64\)": lambda d: one(d, v=tokens(2, d)[1]),
    r"k must be float32, float16 or bfloat16, got torch.float64": lambda d: one(d, k=tokens(3, d)[0].double()),
    r"k and v must have one dtype, got torch.bfloat16 and torch.float16": lambda d: one(
        d, v=tokens(3, d)[1].half()
    ),
    r"slots must be int64, got torch.int32": lambda d: one(d, slots=torch.tensor([1, 2, 3]).int()),
    r"slots must be \[3\], got \(2,\)": lambda d: one(d, slots=torch.tensor([1, 2])),
    r"slots must be \[3\], got \(3, 1\)": lambda d: one(d, slots=torch.tensor([[1], [2], [3]])),
    r"v must be on (cpu|cuda:0), got meta": lambda d: one(d, v=tokens(3, "meta")[1]),
    r"k must be a tensor, got \[\[1\.0\]\]": lambda d: one(d, k=[[1.0]]),
    r"v must be a tensor, got None": lambda d: one(d, v=None),
    r"slots must be a tensor, got \[33, 5, 40\]": lambda d: one(d, slots=[33, 5, 40]),
    r"slots must be a tensor, got array": lambda d: one(d, slots=torch.tensor([33, 5, 40]).numpy()),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_WRITES)
def test_a_refused_write_writes_nothing(device, message):
    cache = make_cache(device)
    cache.write(*tokens(2, device), torch.tensor([5, 6]))
    before = [side.clone() for side in cache.sides]
    with pytest.raises(ValueError, match=message):
        cache.write(**REFUSED_WRITES[message](device))
    assert all(torch.equal(a, b) for a, b in zip(cache.sides, before, strict=True))
    with pytest.raises(ValueError, match="slots must hold a token, got slot 33 at 0"):
        cache.read(torch.tensor([33]))
    cache.write(**one(device))


REFUSED_OTHERS = {
    r"slots must hold a token, got slot 7 at 1, which was never written or is free": lambda c: c.read(
        torch.tensor([5, 7])
    ),
    r"slots must be 0 to 63, or -1 to skip, got 64 at 0": lambda c: c.read(torch.tensor([64])),
    r"slots must be int64, got torch.float32": lambda c: c.read(torch.zeros(1)),
    r"slots must be \[N\], got \(1, 1\)": lambda c: c.read(torch.tensor([[5]])),
    r"dtype must be bfloat16, float16 or float32, got torch.int8": lambda c: c.read(
        torch.tensor([5]), torch.int8
    ),
    r"slots must be a tensor, got 5": lambda c: c.read(5),
    r"slots must hold values, got a tensor on meta": lambda c: c.free(torch.tensor([5], device="meta")),
    r"target must be a tensor, got \[9\]": lambda c: c.copy(torch.tensor([5]), [9]),
    r"source must hold a token, got slot 8 at 0": lambda c: c.copy(torch.tensor([8]), torch.tensor([5])),
    r"target must be distinct, got slot 9 at \[0, 1\]": lambda c: c.copy(
        torch.tensor([5, 6]), torch.tensor([9, 9])
    ),
    r"target must be \[2\], got \(1,\)": lambda c: c.copy(torch.tensor([5, 6]), torch.tensor([9])),
    r"target must be 0 to 63, or -1 to skip, got 70 at 0": lambda c: c.copy(
        torch.tensor([5]), torch.tensor([70])
    ),
    r"source must be 0 to 63, or -1 to skip, got -3 at 0": lambda c: c.copy(
        torch.tensor([-3]), torch.tensor([9])
    ),
    r"slots must be 0 to 63, or -1 to skip, got 65 at 1": lambda c: c.mark_written(torch.tensor([9, 65])),
    r"slots must hold a token, got slot 9 at 2": lambda c: c.free(torch.tensor([5, 6, 9])),
    r"slots must be distinct, got slot 6 at \[1, 2\]": lambda c: c.free(torch.tensor([5, 6, 6])),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_OTHERS)
def test_refused_reads_copies_and_frees_change_nothing(device, message):
    cache = make_cache(device)
    k, v = tokens(2, device)
    cache.write(k, v, torch.tensor([5, 6]))
    before = [side.clone() for side in cache.sides]
    with pytest.raises(ValueError, match=message):
        REFUSED_OTHERS[message](cache)
    assert all(torch.equal(a, b) for a, b in zip(cache.sides, before, strict=True))
    assert_reads(cache, torch.tensor([5, 6]), k, v)
    with pytest.raises(ValueError, match="which was never written or is free"):
        cache.read(torch.tensor([9]))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"blocks": 0}, "blocks must be a positive int, got 0"),
        ({"page_size": -1}, "page_size must be a positive int, got -1"),
        ({"kv_heads": 2.0}, r"kv_heads must be a positive int, got 2\.0"),
        ({"blocks": True}, "blocks must be a positive int, got True"),
        ({"head_dim": 72}, "head_dim must be a positive multiple of 16, got 72"),
        ({"k_global_scale": 0.0}, "global scale must be finite and > 0"),
        ({"v_global_scale": math.nan}, "global scale must be finite and > 0 .* got nan"),
        ({"device": "meta"}, "device must be cuda or cpu, got meta"),
    ],
)
def test_a_cache_that_cannot_be(device, changes, message):
    with pytest.raises(ValueError, match=message):
        make_cache(**{"device": device, **changes})


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(paged, "INTERPRETED", False)
    with pytest.raises(ValueError, match="device cpu needs Triton's interpreter.* got cpu without it"):
        make_cache("cpu")


CALLS = {
    "write": lambda c, k, v, slots: c.write(k, v, slots),
    "read": lambda c, k, v, slots: c.read(slots),
    "copy": lambda c, k, v, slots: c.copy(slots, slots + 8),
    "free": lambda c, k, v, slots: c.free(slots),
    "mark_written": lambda c, k, v, slots: c.mark_written(slots),
}


@pytest.mark.gpu
@pytest.mark.parametrize("method", CALLS)
def test_capture_is_refused_and_the_kernels_under_it_are_not(device, method):
    cache = make_cache(device)
    k, v = tokens(3, device)
    slots = torch.arange(3, device=device)
    cache.write(k, v, slots)
    before = [side.clone() for side in cache.sides]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=f"PackedCache.{method} works on the host .* got a capture on"):
            CALLS[method](cache, k, v, slots)
        store_nvfp4(
            k, v, slots + 20, cache.k_codes, cache.v_codes, cache.k_scales, cache.v_scales,
            **cache.global_scales,
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(cache.sides, before, strict=True))
    graph.replay()
    cache.mark_written(slots + 20)
    assert_reads(cache, slots + 20, k, v)


@pytest.mark.parametrize("method", CALLS)
def test_capture_is_refused_by_what_the_device_says(device, monkeypatch, method):
    """The same refusal without a GPU: torch's answers are replaced, the cache is not."""
    cache = make_cache(device)
    k, v = tokens(3, device)
    cache.write(k, v, torch.arange(3))
    before = [side.clone() for side in cache.sides]
    cache.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream 7")
    with pytest.raises(RuntimeError, match=f"PackedCache.{method} works .* got a capture on stream 7"):
        CALLS[method](cache, k, v, torch.arange(3))
    assert all(torch.equal(a, b) for a, b in zip(cache.sides, before, strict=True))


def test_the_unchecked_readers_take_the_cache(device):
    cache = make_cache(device)
    k, v = tokens(20, device)
    slots = torch.arange(8, 28)
    cache.write(k, v, slots)
    q = tokens(1, device, heads=6)[0].float()
    selected = torch.stack((slots[:5], slots[10:15]))[None].to(device)
    out = torch.empty_like(q)
    sparse_nvfp4(q, *cache.sides, out, selected, sm_scale=0.125, **cache.global_scales)
    for head, own in enumerate(selected[0]):
        keys, values = (x[:, head] for x in cache.read(own, torch.float32))
        weights = torch.softmax(q[0, 3 * head : 3 * head + 3] @ keys.T * 0.125, 1)
        torch.testing.assert_close(out[0, 3 * head : 3 * head + 3], weights @ values)


def run_python(code):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_example(device):
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert 'PackedCache(blocks=4, page_size=16, kv_heads=2, head_dim=256, device="cuda")' in example
    told = "\n".join(re.findall(r"# prints (.*)", example))
    assert run_python(example.replace('"cuda"', repr(device.type))).strip() == told


def test_neither_a_model_nor_sglang_is_needed():
    out = run_python(
        "import sys, sglang_fp4kv.paged, sglang_fp4kv.kernels.sparse_nvfp4\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'sglang', 'transformers', 'flashinfer'}))"
    )
    assert out.strip() == "[]"


def test_kernels_start_on_the_gpu_that_holds_the_cache(device, monkeypatch):
    """Triton launches on the current GPU, whichever the tensors are on."""
    cache = make_cache(device)
    current = []

    class Current:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            current.append(self.tensor)

        def __exit__(self, *_):
            current.pop()

    def inside(kernel):
        def call(*args, **kwargs):
            assert len(current) == 1 and current[0] is cache.k_codes
            return kernel(*args, **kwargs)

        return call

    monkeypatch.setattr(torch.cuda, "device_of", Current)
    for name in ("store_nvfp4", "unpack_nvfp4"):
        monkeypatch.setattr(paged, name, inside(getattr(paged, name)))
    k, v = tokens(2, device)
    cache.write(k, v, torch.tensor([3, 40], device=device))
    assert_reads(cache, torch.tensor([40, 3]), k.flip(0), v.flip(0))
