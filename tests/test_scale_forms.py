"""Every form in which SGLang hands over a layer's KV scale leads to the same bytes and the same attention."""

from types import SimpleNamespace

import pytest
import torch
from test_pool import DIM as HEAD_DIM
from test_pool import HEADS, PAGE, SIZE, build_pool

from sglang_fp4kv.formats import DEFAULT_K_GLOBAL_SCALE, DEFAULT_V_GLOBAL_SCALE

pytestmark = pytest.mark.interpreter

LAYERS, QUERY_HEADS, PREFIX, NEW = 3, 4, 9, 4
# What a form is made of: the format's own defaults, so that None has to give the same.
K_SCALE, V_SCALE = DEFAULT_K_GLOBAL_SCALE, DEFAULT_V_GLOBAL_SCALE
FORMS = {
    "none": lambda value: None,
    "float": lambda value: value,
    "0-d tensor": torch.tensor,
    "shape [1]": lambda value: torch.tensor([value]),
    "parameter": lambda value: torch.nn.Parameter(torch.tensor(value), requires_grad=False),
    "parameter of shape [1]": lambda value: torch.nn.Parameter(torch.tensor([value]), requires_grad=False),
}
ON_GPU = {
    "CUDA parameter": lambda value: torch.nn.Parameter(torch.tensor(value, device="cuda"), requires_grad=False),
}


def attention_layer(layer_id, k_scale, v_scale):
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = RadixAttention(QUERY_HEADS, HEAD_DIM, HEAD_DIM**-0.5, HEADS, layer_id)
    layer.k_scale, layer.v_scale = k_scale, v_scale
    return layer


def loaded_recipe(layers, device, monkeypatch, quant_config=None):
    """The recipe after it read the scales of a model with these layers, as the server has it read them."""
    from sglang.srt import runtime_context

    from sglang_fp4kv.recipe import PackedNVFP4Method

    monkeypatch.setattr(runtime_context, "get_model", lambda: SimpleNamespace(model_path=None, revision=None, download_dir=None))
    recipe = PackedNVFP4Method(num_layers=LAYERS, device=device, page_size=PAGE)
    recipe.configure_attention_backends("triton", "triton")
    model = torch.nn.ModuleList(layers)
    model.quant_config = quant_config
    recipe.load_scales_from_model(model)
    return recipe


def test_scales_that_were_promised_and_are_nowhere_stop_the_launch(monkeypatch):
    """Streamed weights of a class that drops them: there is neither a loaded scale nor a file to take it from."""
    layers = [attention_layer(i, None, None) for i in range(LAYERS)]
    config = SimpleNamespace(kv_cache_quant_algo="FP8")
    with pytest.raises(ValueError, match=r"promises KV scales \(kv_cache_quant_algo FP8\).*no safetensors are on this"):
        loaded_recipe(layers, "cpu", monkeypatch, config)


class Served:
    """A pool and the attention backend over it, without a server, for one request in the slots 1, 2, ..."""

    def __init__(self, recipe, device):
        from sglang_fp4kv.attention import TritonAttnBackend

        self.device = device
        self.pool = build_pool(recipe, device)
        self.backend = object.__new__(TritonAttnBackend)
        self.backend.token_to_kv_pool = self.pool
        # The packed kernel takes every prefill, as it does where no library is asked for.
        self.backend.prefill = SimpleNamespace(dtype=None, tell=lambda why: None)

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def attend(self, layer, prefix, q, k, v, verify=False):
        """The output of ``len(q)`` new tokens after ``prefix`` that are there: prefill, verify, or one decoded."""
        new = len(q)
        decode = new == 1
        listed = prefix + new if decode else prefix
        self.backend.forward_metadata = SimpleNamespace(
            kv_indptr=self.ints(0, listed), kv_indices=torch.arange(1, listed + 1, device=self.device),
            qo_indptr=self.ints(0, new), max_extend_len=new, custom_mask=None, mask_indptr=None,
        )  # fmt: skip
        batch = SimpleNamespace(
            out_cache_loc=torch.arange(prefix + 1, prefix + new + 1, device=self.device),
            out_cache_loc_is_physical=False,
            forward_mode=SimpleNamespace(is_target_verify=lambda: verify),
            extend_prefix_lens_cpu=[prefix], extend_seq_lens_cpu=[new],
        )  # fmt: skip
        forward = self.backend.forward_decode if decode else self.backend.forward_extend
        return forward(q.flatten(1), k, v, layer, batch)


def tokens(device):
    generator = torch.Generator().manual_seed(3)
    count = PREFIX + NEW + 1
    return [
        torch.randn(count, heads, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
        for heads in (QUERY_HEADS, HEADS, HEADS)
    ]


def serve(k_scale, v_scale, device, monkeypatch, *, cut=PREFIX):
    """The pool's bytes and the outputs of prefill in two chunks, verify and decode, in the last layer."""
    layers = [attention_layer(i, k_scale, v_scale) for i in range(LAYERS)]
    served = Served(loaded_recipe(layers, device, monkeypatch), device)
    q, k, v = tokens(device)
    outs = []
    for begin, end, verify in ((0, cut, False), (cut, PREFIX + NEW, True), (PREFIX + NEW, len(q), False)):
        chunk = slice(begin, end)
        outs.append(served.attend(layers[-1], begin, q[chunk], k[chunk], v[chunk], verify))
    return list(served.pool._layer_buffers())[-1], outs, served.pool.packed_layer(LAYERS - 1)


@pytest.fixture(scope="module")
def by_float(device):
    with pytest.MonkeyPatch.context() as patch:
        return serve(K_SCALE, V_SCALE, device, patch)


def assert_same(found, reference):
    for buffers in zip(found[0], reference[0], strict=True):
        assert torch.equal(*buffers)
    for outs in zip(found[1], reference[1], strict=True):
        assert torch.equal(*outs)
    scales = [(layer.k_global_scale, layer.v_global_scale) for _, _, layer in (found, reference)]
    assert scales == [(K_SCALE, V_SCALE)] * 2 and all(type(x) is float for x in scales[0])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_scale_gives_the_same_result(by_float, device, monkeypatch, form):
    made = FORMS[form]
    assert_same(serve(made(K_SCALE), made(V_SCALE), device, monkeypatch), by_float)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ON_GPU)
def test_a_scale_on_the_gpu_gives_the_same_result(by_float, device, monkeypatch, form):
    made = ON_GPU[form]
    assert_same(serve(made(K_SCALE), made(V_SCALE), device, monkeypatch), by_float)


def test_another_scale_gives_other_bytes(by_float, device, monkeypatch):
    """Else equal results would say nothing."""
    found = serve(0.3, 0.07, device, monkeypatch)
    assert not torch.equal(found[0][0], by_float[0][0])
    for out, reference in zip(found[1], by_float[1], strict=True):
        # The same attention, rounded otherwise.
        assert (out - reference).float().norm() < 0.3 * reference.float().norm()


@pytest.mark.parametrize("form", [name for name in FORMS if name != "none"])
@pytest.mark.parametrize("value", [0.0, -0.25, float("nan"), float("inf"), float("-inf")])
def test_an_unusable_scale_is_refused_with_layer_and_value(device, monkeypatch, form, value):
    layers = [attention_layer(i, 0.5, 0.5) for i in range(LAYERS)]
    layers[1].v_scale = FORMS[form](value)
    with pytest.raises(ValueError, match=f"layer 1: v_scale must be finite and above zero, got {value}"):
        loaded_recipe(layers, device, monkeypatch)


@pytest.mark.parametrize(("k_scale", "v_scale"), [(0.3, 0.07), (7.0, 0.013)])
def test_a_prefix_from_the_cache_reads_like_one_just_written(device, monkeypatch, k_scale, v_scale):
    """A request whose first chunk another request left in the pool, and one that wrote it itself before."""
    layers = [attention_layer(i, k_scale, v_scale) for i in range(LAYERS)]
    served = Served(loaded_recipe(layers, device, monkeypatch), device)
    q, k, v = tokens(device)
    layer = layers[-1]
    first, rest = slice(0, PREFIX), slice(PREFIX, PREFIX + NEW)
    served.attend(layer, 0, q[first], k[first], v[first])
    own = served.attend(layer, PREFIX, q[rest], k[rest], v[rest])
    held = [buffer.clone() for buffer in list(served.pool._layer_buffers())[-1]]
    cached = served.attend(layer, PREFIX, q[rest], k[rest], v[rest])  # the chunk alone, its prefix is there
    assert torch.equal(cached, own)
    for before, after in zip(held, list(served.pool._layer_buffers())[-1], strict=True):
        assert torch.equal(before, after)
    assert SIZE > PREFIX + NEW
