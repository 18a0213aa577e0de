"""The writers' assembly against codec.encode on a CPU, in tests/ptx_emulator.py.

Every magnitude is a block's maximum once, so every block scale occurs; the other elements are
those around every midpoint of that scale, where rounding is decided.
"""

import math

import numpy as np
import pytest
import torch

import ptx_emulator
from sglang_fp4kv import codec
from sglang_fp4kv.kernels import store_nvfp4 as writer
from sglang_fp4kv.kernels._encode import encode_ptx

SOURCES = {torch.bfloat16: "bf16", torch.float16: "f16"}
INF_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Powers of two, where ties are exact; others, where a product rounds; the ends of the range.
GLOBAL_SCALES = (1.0, 0.5, 2.0**-4, 0.1, 0.0371, 1 / 3, 3.0, 2.0**-20, 2.0**20, 2.0**-100, 2.0**100)


def encode_in_ptx(bits, dtype, global_scale):
    """Codes [N, 8] and scales [N] of 16-bit patterns [N, 16] (uint16 in int32)."""
    bits = bits.numpy().astype(np.uint32)
    g = np.float32(global_scale)
    constants = np.array([g * np.float32(6.0), g], np.float32).view(np.uint32)
    inputs = {3 + i: bits[:, 2 * i] | (bits[:, 2 * i + 1] << 16) for i in range(8)}
    inputs |= {11 + i: np.full(len(bits), x, np.uint32) for i, x in enumerate(constants)}
    out = ptx_emulator.run(encode_ptx(SOURCES[dtype]), inputs)
    words = torch.from_numpy(np.stack((out[0], out[1]), 1).astype(np.uint32).view(np.uint8))
    return words, torch.from_numpy(out[2].astype(np.uint8))


def assert_same(bits, dtype, global_scale):
    x = bits.to(torch.int16).view(dtype)
    want_codes, want_scales = codec.encode(x, global_scale)
    codes, scales = encode_in_ptx(bits, dtype, global_scale)
    assert torch.equal(scales, want_scales[:, 0])
    assert torch.equal(codes, want_codes)


def blocks_at_midpoints(dtype, global_scale):
    """Blocks [2 * magnitudes, 16]: a maximum and the values around its scale's midpoints."""
    top = torch.arange(INF_BITS[dtype], dtype=torch.int32)
    head = torch.zeros(len(top), 16, dtype=torch.int32)
    head[:, 0] = top
    _, scales = codec.encode(head.to(torch.int16).view(dtype), global_scale)
    step = scales[:, 0].view(torch.float8_e4m3fn).float() * global_scale
    near = (step[:, None] * torch.tensor(MIDPOINTS)).to(dtype).view(torch.int16).to(torch.int32)
    blocks = []
    for offsets in ((0, 1), (-1, 0)):
        around = torch.cat([(near + i).clamp(min=0) for i in offsets], 1)
        around = torch.minimum(around, top[:, None])  # not above the maximum
        signs = torch.arange(14).remainder(3).eq(0).int() << 15
        blocks.append(torch.cat((top[:, None], around | signs, top[:, None] * 0 + 0x8000), 1))
    return torch.cat(blocks)


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_every_scale_at_every_midpoint(dtype, global_scale):
    assert_same(blocks_at_midpoints(dtype, global_scale), dtype, global_scale)


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("global_scale", [1.0, 0.0371])
def test_every_value_at_every_place(dtype, global_scale):
    values = torch.arange(65536, dtype=torch.int32)
    rolled = torch.stack([values.roll(4099 * i) for i in range(16)], 1)
    assert_same(rolled, dtype, global_scale)
    # beside a maximum of its own size, so that it is no vanishing part of its block
    alone = torch.stack([values if i in (0, 9) else values & 0x7FC0 for i in range(16)], 1)
    assert_same(alone, dtype, global_scale)


@pytest.mark.parametrize("dtype", SOURCES)
def test_nan_inf_and_zero_blocks(dtype):
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
    special = torch.cat((special.view(torch.int16), torch.tensor([-1, 1, -32767], dtype=torch.int16)))
    special = special.to(torch.int32) & 0xFFFF
    for few in (3, 16):  # among finite values, and nothing but special ones
        bits = torch.randn(4096, 16, generator=generator).to(dtype).view(torch.int16)
        bits = bits.to(torch.int32) & 0xFFFF
        place = torch.randint(few, (4096, 16), generator=generator) < 2 if few == 3 else bits >= 0
        chosen = special[torch.randint(len(special), (4096, 16), generator=generator)]
        for global_scale in (1.0, 2.0**-10, 2.0**12):
            assert_same(torch.where(place, chosen, bits), dtype, global_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("assembly", [True, False])
@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_the_kernel_at_every_midpoint(global_scale, dtype, assembly, monkeypatch):
    device = torch.device("cuda")
    assert writer.use_assembly(device, dtype) or not assembly, "no assembly before sm_90"
    monkeypatch.setattr(writer, "use_assembly", lambda *_: assembly)
    x = blocks_at_midpoints(dtype, global_scale).to(torch.int16).view(dtype)
    want_codes, want_scales = codec.encode(x, global_scale)
    x = x.view(-1, 1, 16).to(device)
    pool = [torch.zeros(len(x), 1, n, dtype=torch.uint8, device=device) for n in (8, 8, 1, 1)]
    slots = torch.arange(len(x), device=device)
    writer.store_nvfp4(x, x, slots, *pool, global_scale, global_scale)
    for got, want in zip(pool, (want_codes, want_codes, want_scales, want_scales), strict=True):
        assert torch.equal(got[:, 0].cpu(), want)


@pytest.mark.parametrize(
    "line, wrong",
    [
        ("sub.s32 x, x, 1;", "sub.s32 x, x, 0;"),  # ties that go up
        ("selp.b32 low, 126, 0, p;", "selp.b32 low, 0, 0, p;"),  # Inf beside a vanishing rest
        ("and.b32 a5, a5, x;", "and.b32 a5, a5, a5;"),  # Inf in the maximum
    ],
)
def test_a_wrong_line_is_noticed(line, wrong, monkeypatch):
    ptx = encode_ptx("bf16")
    assert line in ptx
    monkeypatch.setattr(f"{__name__}.encode_ptx", lambda source: ptx.replace(line, wrong))
    with pytest.raises(AssertionError):
        test_nan_inf_and_zero_blocks(torch.bfloat16)


@pytest.mark.parametrize("capability, hopper", [((8, 9), False), ((9, 0), True), ((12, 1), True)])
def test_assembly_is_for_16_bit_sources_on_sm_90_and_newer(capability, hopper, monkeypatch):
    monkeypatch.setattr(writer, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    writer.has_hopper_instructions.cache_clear()
    try:
        device = torch.device("cuda", 0)
        assert writer.has_hopper_instructions(device) is hopper
        assert writer.use_assembly(device, torch.bfloat16) is hopper
        assert not writer.use_assembly(device, torch.float32)
        assert not writer.use_assembly(torch.device("cpu"), torch.bfloat16)
    finally:
        writer.has_hopper_instructions.cache_clear()


def test_an_unknown_opcode_is_refused():
    with pytest.raises(NotImplementedError, match="PTX opcode popc.b32"):
        ptx_emulator.run("popc.b32 $0, $1;", {1: np.zeros(1, np.uint32)})
