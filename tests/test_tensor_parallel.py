"""Tensor parallel 1, 2, 4 and 8 in arithmetic: SGLang's own split of the heads, our pools and readers on it.

What each rank holds is read off SGLang's fused QKV layer, so nothing here assumes which heads a rank has.
A rank's K and V reach the pool as the model hands them over: columns of the fused rows, not contiguous.
"""

from types import SimpleNamespace

import pytest
import torch
from launches import NVFP4, launch
from test_pool import PAGE, build_pool, packed_recipe

from launcher.launch import memory
from sglang_fp4kv import formats
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4
from sglang_fp4kv.kernels.extend_nvfp4 import extend_nvfp4
from sglang_fp4kv.planner import Attention, rank_heads

LAYERS, LAYER, DIM, SLOTS = 3, 1, 64, 40
# (query heads, KV heads, tensor parallel): groups of 6 and 7, split, one KV head a rank, and copied.
SPLIT = [(24, 4, 1), (24, 4, 2), (24, 4, 4), (28, 4, 2), (28, 4, 4), (48, 8, 8), (56, 8, 8)]
COPIED = [(24, 4, 8), (14, 1, 2), (12, 2, 4), (56, 2, 8)]
UNEVEN = [(24, 6, 4), (28, 4, 8), (12, 4, 6), (8, 3, 2)]
PREFIX, BLOCK = 21, 5


def rank_of(monkeypatch, rank, tp):
    """SGLang's fused QKV layer as ``rank`` of ``tp`` builds it."""
    from sglang.srt.layers import linear

    monkeypatch.setattr(linear, "_resolve_linear_group", lambda _: linear._LogicalGroup(rank, tp))
    return linear.QKVParallelLinear


def heads_of(monkeypatch, rank, tp, q_heads, kv_heads):
    """(query heads, KV heads) of the whole model that SGLang gives to ``rank``, two lists of indices."""
    layer = rank_of(monkeypatch, rank, tp)(
        1, DIM, q_heads, kv_heads, bias=False, params_dtype=torch.float32
    )
    for shard, count in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
        named = torch.arange(count, dtype=torch.float32).repeat_interleave(DIM)[:, None]
        layer.weight_loader(layer.weight, named, shard)
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    q, k, v = layer.weight.data.view(-1, DIM)[:, 0].long().split(sizes)
    assert torch.equal(k, v)
    return q.tolist(), k.tolist()


def rank_pool(kv_heads, device):
    """The NVFP4 pool of a rank that holds ``kv_heads``."""
    from sglang_fp4kv.recipe import PackedNVFP4Method

    recipe = packed_recipe(PackedNVFP4Method, device)
    return build_pool(recipe, device, size=SLOTS - PAGE, head_num=kv_heads, head_dim=DIM)


def sides(pool):
    """The buffers of the layer that is written, [slots, heads, bytes] each."""
    p = pool.packed_layer(LAYER)
    return p.k_codes, p.k_scales, p.v_codes, p.v_scales


class Model:
    """Q, K and V of every head for a prefix and a block, and what attention makes of them on a rank."""

    def __init__(self, q_heads, kv_heads, device):
        generator = torch.Generator().manual_seed(q_heads)
        self.device = device
        tokens = PREFIX + BLOCK
        shapes = ((tokens, q_heads, DIM), (tokens, kv_heads, DIM), (tokens, kv_heads, DIM))
        self.q, self.k, self.v = (torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes)
        self.slots = torch.randperm(SLOTS, generator=generator)[:tokens].to(device)

    def fused(self, q_heads, kv_heads):
        """Q, K and V of these heads as views of fused rows."""
        parts = (self.q[:, q_heads], self.k[:, kv_heads], self.v[:, kv_heads])
        rows = torch.cat([x.flatten(1) for x in parts], 1)
        q, k, v = rows.split([x.shape[1] * DIM for x in parts], 1)
        return q.contiguous().view(-1, len(q_heads), DIM), k.unflatten(1, (-1, DIM)), v.unflatten(1, (-1, DIM))

    def run(self, q_heads, kv_heads):
        """The rank's pool after every token was written, and its decode, verify and prefill outputs."""
        pool = rank_pool(len(kv_heads), self.device)
        q, k, v = self.fused(q_heads, kv_heads)
        assert not k.is_contiguous()
        pool.set_kv_buffer(SimpleNamespace(layer_id=LAYER), self.slots, k, v)
        p = pool.packed_layer(LAYER)
        options = {"k_global_scale": p.k_global_scale, "v_global_scale": p.v_global_scale, "sm_scale": DIM**-0.5}
        ends = lambda *lengths: torch.tensor([0, *lengths], dtype=torch.int32, device=self.device)
        new, prefix = slice(PREFIX, None), self.slots[:PREFIX]
        outs = [torch.empty_like(q[rows]) for rows in (slice(-1, None), new, new)]
        attention_nvfp4(q[-1:], *sides(pool), outs[0], ends(PREFIX + BLOCK), self.slots, q_per_req=1, **options)
        attention_nvfp4(
            q[new], *sides(pool), outs[1], ends(PREFIX), prefix, q_per_req=BLOCK, block_slots=self.slots[new], **options
        )
        extend_nvfp4(
            q[new], k[new], v[new], outs[2], *sides(pool), ends(BLOCK), ends(PREFIX), prefix, max_extend_len=BLOCK, **options
        )
        return pool, outs


@pytest.fixture(scope="module")
def whole(device):
    """A Model and its outputs on one rank, by (query heads, KV heads)."""
    known = {}

    def of(q_heads, kv_heads):
        if (q_heads, kv_heads) not in known:
            model = Model(q_heads, kv_heads, device)
            known[q_heads, kv_heads] = model, *model.run(list(range(q_heads)), list(range(kv_heads)))
        return known[q_heads, kv_heads]

    return of


@pytest.mark.interpreter
@pytest.mark.parametrize(("q_heads", "kv_heads", "tp"), SPLIT + COPIED)
def test_the_ranks_together_answer_as_one(whole, monkeypatch, q_heads, kv_heads, tp):
    model, one_pool, one = whole(q_heads, kv_heads)
    held = [heads_of(monkeypatch, rank, tp, q_heads, kv_heads) for rank in range(tp)]
    assert sorted(head for q, _ in held for head in q) == list(range(q_heads))
    parts = []
    for q, kv in held:
        pool, outs = model.run(q, kv)
        parts.append(outs)
        for mine, everyone in zip(sides(pool), sides(one_pool), strict=True):
            assert torch.equal(mine, everyone[:, kv])
    for step, reference in enumerate(one):
        assert torch.equal(torch.cat([outs[step] for outs in parts], 1), reference), step


@pytest.mark.interpreter
@pytest.mark.parametrize(("q_heads", "kv_heads", "tp"), [(24, 4, 4), (24, 4, 8), (12, 2, 4)])
def test_a_wrong_split_of_the_heads_is_caught(whole, monkeypatch, q_heads, kv_heads, tp):
    """The negative control: copies dealt out in turn instead of side by side, or ranks in another order."""
    model, _, one = whole(q_heads, kv_heads)
    rank = tp - 2
    q, kv = heads_of(monkeypatch, rank, tp, q_heads, kv_heads)
    wrong = [(kv[0] + 1) % kv_heads] if tp <= kv_heads else [rank % kv_heads]
    assert wrong != kv
    _, outs = model.run(q, wrong)
    for out, reference in zip(outs, one, strict=True):
        assert not torch.allclose(out, reference[:, q], atol=0.1)


@pytest.mark.parametrize(("q_heads", "kv_heads", "tp"), SPLIT + COPIED)
def test_a_rank_costs_what_the_plan_says(tmp_path, monkeypatch, q_heads, kv_heads, tp):
    _, held = heads_of(monkeypatch, tp - 1, tp, q_heads, kv_heads)
    assert len(held) == rank_heads(kv_heads, tp)
    pool = rank_pool(len(held), "cpu")
    planned = Attention(LAYERS, rank_heads(kv_heads, tp), DIM).bytes_per_token("nvfp4")
    assert pool.bytes_per_token == planned == formats.bytes_per_token(DIM, len(held), LAYERS)
    assert sum(pool.get_kv_size_bytes()) == planned * SLOTS
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "num_hidden_layers": LAYERS}
    judged = launch(tmp_path, [*NVFP4, "--tp-size", str(tp)], target={**heads, "head_dim": DIM})
    assert memory(judged).target_cell == planned
    for buffer, width in zip(sides(pool), (DIM // 2, DIM // 16) * 2, strict=True):
        assert buffer.shape == (SLOTS, len(held), width)
        assert buffer.stride() == (len(held) * width, width, 1)


@pytest.mark.parametrize(("q_heads", "kv_heads", "tp"), UNEVEN)
def test_heads_that_are_refused_are_heads_sglang_cannot_split(monkeypatch, q_heads, kv_heads, tp):
    """The heads of FP4-042 (test_rules.py::test_heads_are_split_or_copied_evenly)."""
    with pytest.raises(AssertionError, match="not divisible"):
        heads_of(monkeypatch, 0, tp, q_heads, kv_heads)
