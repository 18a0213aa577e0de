"""The packed pool inside SGLang's pool for hybrids: a layer's id in the model, its place in the pool, its scales.

Layers 3 and 7 of eight keep K and V. Each has scales of its own, so that the wrong row of either list shows.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.test_pool import DIM, HEADS, PAGE, SIZE, build_pool, decoded, expected, layer, packed_recipe, rows

pytestmark = pytest.mark.interpreter

ATTENTION = [3, 7]
K_SCALES = [1.0, 1.0, 1.0, 0.25, 1.0, 1.0, 1.0, 2.0]
V_SCALES = [1.0, 1.0, 1.0, 0.0625, 1.0, 1.0, 1.0, 0.5]


@pytest.fixture
def pool(device):
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    from sglang_fp4kv.recipe import PackedNVFP4Method

    recipe = packed_recipe(PackedNVFP4Method, device, K_SCALES, V_SCALES)
    return HybridLinearKVPool(
        size=SIZE, dtype=torch.float4_e2m1fn_x2, page_size=PAGE, head_num=HEADS, head_dim=DIM,
        full_attention_layer_ids=ATTENTION, device=str(device), mamba_pool=None,
        full_kv_pool=build_pool(recipe, device, layer_num=len(ATTENTION)),
    )  # fmt: skip


@pytest.fixture
def backend(pool):
    from sglang_fp4kv.attention import TritonAttnBackend

    backend = object.__new__(TritonAttnBackend)
    backend.token_to_kv_pool = pool
    return backend


def write(pool, device, number):
    k, v = rows(4, device, seed=number)
    slots = torch.tensor([1, 9, 17, 33], device=device)
    pool.set_kv_buffer(layer(number), slots, k, v)
    return slots, k, v


def wrong(backend, device):
    """What the backend reads of each layer beside what was written to it: the layers that differ."""
    written = {number: write(backend.token_to_kv_pool, device, number) for number in ATTENTION}
    found = []
    for number, (slots, k, v) in written.items():
        packed = backend._pool_layer(layer(number))
        read = decoded(SimpleNamespace(packed_layer=lambda _, packed=packed: packed), number, slots)
        wanted = (expected(k, K_SCALES[number]), expected(v, V_SCALES[number]))
        if not all(torch.equal(a, b) for a, b in zip(read, wanted, strict=True)):
            found.append(number)
    return found


def test_each_layer_is_read_where_it_was_written_and_with_its_own_scales(backend, device):
    assert wrong(backend, device) == []


def test_scales_by_the_place_in_the_pool_would_be_noticed(backend, device):
    """The negative control: SGLang builds the inner pool with places and tells it the ids afterwards."""
    backend.token_to_kv_pool.full_kv_pool.model_layer_ids = (0, 1)
    write(backend.token_to_kv_pool, device, 3)
    backend.token_to_kv_pool.full_kv_pool.model_layer_ids = tuple(ATTENTION)
    packed = backend._pool_layer(layer(3))
    slots, k, _ = torch.tensor([1, 9, 17, 33], device=device), *rows(4, device, seed=3)
    read, _ = decoded(SimpleNamespace(packed_layer=lambda _: packed), 3, slots)
    assert not torch.equal(read, expected(k, K_SCALES[3]))


@pytest.mark.parametrize("fault", ["swapped", "by id"])
def test_a_wrong_place_would_be_noticed(backend, device, fault):
    mapping = backend.token_to_kv_pool.full_attention_layer_id_mapping
    if fault == "by id":  # the layer's id where its place is meant
        packed = backend.token_to_kv_pool.full_kv_pool
        for number in ATTENTION:
            with pytest.raises(IndexError):
                packed.packed_layer(number)
        return
    for number in ATTENTION:
        write(backend.token_to_kv_pool, device, number)
    right = backend._pool_layer(layer(3))
    mapping.update({3: 1, 7: 0})
    assert not torch.equal(backend._pool_layer(layer(3)).k_codes, right.k_codes)


def test_a_recurrent_layer_has_no_place(backend):
    with pytest.raises(ValueError, match="layer_id=4 not in full attention layers"):
        backend._pool_layer(layer(4))


def test_reads_wait_for_layers_that_come_from_the_host(backend):
    waited = []
    backend.token_to_kv_pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    backend._pool_layer(layer(7))
    assert waited == [7]
