"""SGLang's gated-delta kernels in the corrected interpreter, against the recurrence written out.

The state of a head is S [V, K]; a token with key k, value v, decay g <= 0 and strength beta turns it into
exp(g) S + beta (v - exp(g) S k) k^T and reads S q / sqrt(K). Keys and queries are normalized first.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu, softplus

from sglang_fp4kv.embedded import recurrent
from tests.conftest import INTERPRET

pytestmark = pytest.mark.interpreter

KEY_HEADS, HEADS, K, V = 2, 4, 16, 16
CHANNELS, WIDTH = 80, 4  # of the convolution before the recurrence
SLOTS = torch.tensor([4, 1, 2], dtype=torch.int32)
LENS = (5, 70, 1)  # in a chunk, over a chunk of 64, one token
STARTS = torch.tensor([0, 5, 75, 76], dtype=torch.int32)
BLOCK = 8


@pytest.fixture(scope="module")
def ops():
    """The kernels' host functions, with the answers a CPU needs where the server's hooks put them."""
    if not INTERPRET:
        pytest.skip("the hooks tested here are the embedded platform's")
    from sglang.kernels.ops.attention.fla import chunk, fused_recurrent, layernorm_gated
    from sglang.kernels.ops.attention.linear import fused_gdn_gating, fused_sigmoid_gating_recurrent
    from sglang.kernels.ops.mamba import causal_conv1d_triton, mamba_state_scatter_triton

    patch = pytest.MonkeyPatch()
    recurrent.give_the_cpu_a_device()
    patch.setattr(layernorm_gated, "_get_sm_count", recurrent.one_processor)
    yield SimpleNamespace(
        chunk=chunk.chunk_gated_delta_rule,
        gates=fused_gdn_gating.fused_gdn_gating,
        packed_decode=fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode,
        update=fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update,
        norm=layernorm_gated.RMSNorm,
        convolve=causal_conv1d_triton.causal_conv1d_fn,
        convolve_on=causal_conv1d_triton.causal_conv1d_update,
        track=mamba_state_scatter_triton.track_mamba_states_all_layers,
    )
    patch.undo()


@pytest.fixture
def layer():
    """Decay parameters and inputs of a layer, as the projections give them."""
    g = torch.Generator().manual_seed(3)

    def normal(*sizes):
        return torch.randn(*sizes, generator=g)

    def tokens(count):
        q, k = (normal(count, KEY_HEADS, K).bfloat16() for _ in "qk")
        a, b = (normal(count, HEADS).bfloat16() for _ in "ab")
        return q, k, normal(count, HEADS, V).bfloat16(), a, b

    return SimpleNamespace(
        A_log=normal(HEADS), dt_bias=normal(HEADS).bfloat16(), tokens=tokens, states=normal(6, HEADS, V, K)
    )


def written_out(layer, tokens, state):
    """What the tokens read [T, HEADS, V], and the state after each [T, HEADS, V, K], in float64."""
    q, k, v, a, b = (x.double() for x in tokens)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    decay = (-layer.A_log.double().exp() * softplus(a + layer.dt_bias.double())).exp()
    beta, state, out, states = b.sigmoid(), state.double(), [], []
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        change = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + change[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]) * K**-0.5)
        states.append(state)
    return torch.stack(out), torch.stack(states)


def rows(tokens, start, end):
    return [x[start:end] for x in tokens]


def close(ours, wanted, share):
    """Within ``share`` of the largest value."""
    return (ours.double() - wanted).abs().max() <= share * wanted.abs().max()


def test_prefill_in_chunks(ops, layer):
    tokens, states = layer.tokens(sum(LENS)), layer.states.clone()
    q, k, v, a, b = tokens
    g, beta = ops.gates(layer.A_log, a, b, layer.dt_bias)
    out, _, _ = ops.chunk(
        q=q[None], k=k[None], v=v[None], g=g, beta=beta, initial_state=states, initial_state_indices=SLOTS,
        cu_seqlens=STARTS, head_first=False, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    for slot, start, end in zip(SLOTS, STARTS, STARTS[1:], strict=False):
        wanted, after = written_out(layer, rows(tokens, start, end), layer.states[slot])
        assert close(out[0, start:end], wanted, 0.01)
        assert close(states[slot], after[-1], 0.01)
    unused = [0, 3, 5]
    assert torch.equal(states[unused], layer.states[unused])


def update(ops, layer, tokens, states, starts, **options):
    q, k, v, a, b = tokens
    return ops.update(
        A_log=layer.A_log, dt_bias=layer.dt_bias, q=q[None], k=k[None], v=v[None], a=a, b=b,
        initial_state_source=states, initial_state_indices=SLOTS, cu_seqlens=starts, softplus_beta=1.0,
        softplus_threshold=20.0, use_qk_l2norm_in_kernel=True, **options,
    )[0]  # fmt: skip


def verify(ops, layer, tokens, states):
    """A verify step of BLOCK tokens a request: what they read, and the states after each."""
    after = torch.zeros(5, BLOCK, HEADS, V, K)
    starts = torch.arange(0, len(SLOTS) * BLOCK + 1, BLOCK, dtype=torch.int32)
    out = update(
        ops, layer, tokens, states, starts, disable_state_update=True, intermediate_states_buffer=after,
        intermediate_state_indices=torch.arange(len(SLOTS), dtype=torch.int32), cache_steps=BLOCK,
    )  # fmt: skip
    return out, after[: len(SLOTS)]


def test_verify_keeps_the_state_after_each_token(ops, layer):
    tokens, states = layer.tokens(len(SLOTS) * BLOCK), layer.states.clone()
    out, after = verify(ops, layer, tokens, states)
    assert torch.equal(states, layer.states)
    for request, slot in enumerate(SLOTS):
        start, end = request * BLOCK, (request + 1) * BLOCK
        wanted, wanted_states = written_out(layer, rows(tokens, start, end), layer.states[slot])
        assert close(out[start:end], wanted, 0.005)
        assert close(after[request], wanted_states, 1e-5)


def test_decode_by_the_same_kernel_repeats_verify_to_the_bit(ops, layer):
    tokens, states = layer.tokens(len(SLOTS) * BLOCK), layer.states.clone()
    out, after = verify(ops, layer, tokens, states)
    starts = torch.arange(len(SLOTS) + 1, dtype=torch.int32)
    for step in range(BLOCK):
        at = torch.arange(len(SLOTS)) * BLOCK + step
        one = update(ops, layer, [x[at] for x in tokens], states, starts)
        assert torch.equal(one, out[at])
        assert torch.equal(states[SLOTS.long()], after[:, step])


def test_packed_decode_rounds_what_verify_does_not(ops, layer):
    """Why sglang_fp4kv.recurrent takes the other kernel: beta in bf16 moves the state by its 2^-9."""
    tokens, states = layer.tokens(len(SLOTS)), layer.states.clone()
    q, k, v, a, b = tokens
    out = torch.empty(len(SLOTS), 1, HEADS, V, dtype=torch.bfloat16)
    ops.packed_decode(
        mixed_qkv=torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1), a=a, b=b, A_log=layer.A_log,
        dt_bias=layer.dt_bias, scale=K**-0.5, initial_state=states, out=out, ssm_state_indices=SLOTS,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    for request, slot in enumerate(SLOTS):
        _, after = written_out(layer, rows(tokens, request, request + 1), layer.states[slot])
        assert close(states[slot], after[-1], 0.01)
        assert not close(states[slot], after[-1], 1e-5)


def convolved(past, x, weights):
    full = torch.cat([past.T.double(), x.double()])
    return silu(sum(full[j : j + len(x)] * weights[:, j].double() for j in range(WIDTH))), full


def test_convolution_in_prefill_verify_and_decode(ops):
    g = torch.Generator().manual_seed(4)
    weights = torch.randn(CHANNELS, WIDTH, generator=g).bfloat16()
    x = torch.randn(sum(LENS), CHANNELS, generator=g).bfloat16()
    old = torch.randn(6, CHANNELS, WIDTH - 1, generator=g).bfloat16()
    states, known = old.clone(), torch.tensor([True, False, True])
    out = ops.convolve(
        x.T, weights, None, activation="silu", conv_states=states, has_initial_state=known, cache_indices=SLOTS,
        query_start_loc=STARTS, seq_lens_cpu=list(LENS),
    ).T  # fmt: skip
    for slot, start, end, had in zip(SLOTS, STARTS, STARTS[1:], known, strict=False):
        wanted, full = convolved(old[slot] * had, x[start:end], weights)
        assert close(out[start:end], wanted, 0.01)
        assert torch.equal(states[slot].T.double(), full[1 - WIDTH :])

    block = torch.randn(len(SLOTS), BLOCK, CHANNELS, generator=g).bfloat16()
    windows = torch.zeros(5, BLOCK, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
    verified = ops.convolve_on(
        block.transpose(1, 2), states.clone(), weights, None, "silu", conv_state_indices=SLOTS,
        intermediate_conv_window=windows, intermediate_state_indices=torch.arange(len(SLOTS), dtype=torch.int32),
    )  # fmt: skip
    for step in range(BLOCK):
        one = ops.convolve_on(block[:, step].clone(), states, weights, None, "silu", conv_state_indices=SLOTS)
        assert torch.equal(one, verified[:, :, step])
        assert torch.equal(states[SLOTS.long()], windows[: len(SLOTS), step])


def test_gated_norm(ops):
    g = torch.Generator().manual_seed(5)
    x, z = (torch.randn(7, V, generator=g).bfloat16() for _ in "xz")
    norm = ops.norm(V, eps=1e-6, group_size=None, norm_before_gate=True, dtype=torch.bfloat16)
    norm.weight.data = torch.rand(V, generator=g).bfloat16()
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert close(norm(x, z), wanted * silu(z.double()), 0.01)


def test_tracked_states_are_copied_for_the_prefix_cache(ops):
    g = torch.Generator().manual_seed(6)
    conv = torch.randn(3, 6, CHANNELS, WIDTH - 1, generator=g).bfloat16()
    states = torch.randn(3, 6, HEADS, V, K, generator=g)
    wanted = [pool.clone() for pool in (conv, states)]
    for pool in wanted:
        pool[:, 5] = pool[:, 1]
    mask, to = torch.tensor([False, True, False]), torch.tensor([3, 5, 0])
    ops.track(conv, states, SLOTS, mask, to, len(SLOTS))
    assert torch.equal(conv, wanted[0]) and torch.equal(states, wanted[1])


def caches(layers=2, slots=6, requests=3):
    g = torch.Generator().manual_seed(7)
    return SimpleNamespace(
        temporal=torch.randn(layers, slots, HEADS, V, K, generator=g),
        intermediate_ssm=torch.randn(layers, requests, BLOCK, HEADS, V, K, generator=g),
        conv=[torch.randn(layers, slots, CHANNELS, 3, generator=g)],
        intermediate_conv_window=[torch.randn(layers, requests, BLOCK, CHANNELS, 3, generator=g)],
    )


@pytest.mark.parametrize("source", [None, [2, 0, 1]], ids=["in order", "by row"])
def test_commit_takes_the_last_accepted_state(source):
    held, before = caches(), caches()
    track_slots, track_steps = torch.tensor([3, 5, 0]), torch.tensor([-1, 0, -1])
    steps, rows_given = torch.tensor([7, 2, -1]), source and torch.tensor(source)
    recurrent.commit_states(held, SLOTS, steps, track_slots, track_steps, rows_given)
    first, second, _ = source or [0, 1, 2]
    for states, old, kept in (
        (held.temporal, before.temporal, before.intermediate_ssm),
        (held.conv[0], before.conv[0], before.intermediate_conv_window[0]),
    ):
        old[:, 4], old[:, 1] = kept[:, first, 7], kept[:, second, 2]
        old[:, 5] = kept[:, second, 0]
        assert torch.equal(states, old)


def test_commit_without_tracking_skips_padded_rows():
    held, before = caches(), caches()
    recurrent.commit_states(held, torch.tensor([4, -1, 2]), torch.tensor([0, 3, 1]), None, None)
    before.temporal[:, 4], before.temporal[:, 2] = (
        before.intermediate_ssm[:, 0, 0], before.intermediate_ssm[:, 2, 1],
    )  # fmt: skip
    assert torch.equal(held.temporal, before.temporal)
