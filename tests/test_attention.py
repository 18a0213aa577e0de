"""The attention backend's choices, with the kernels replaced."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def backend(monkeypatch):
    """An unbound backend whose kernels record their keyword arguments."""
    from sglang_fp4kv import attention

    calls = {}
    for name in ("attention_nvfp4", "extend_nvfp4"):
        monkeypatch.setattr(
            attention, name, lambda *args, _name=name, **kwargs: calls.update({_name: kwargs})
        )
    backend = object.__new__(attention.TritonAttnBackend)
    backend.forward_metadata = SimpleNamespace(max_extend_len=8, qo_indptr="qo")
    backend.calls = calls
    return backend


POOL = SimpleNamespace(k_codes=0, k_scales=0, v_codes=0, v_scales=0)


def attend(backend, method, window):
    options = {"sliding_window_size": window, "sm_scale": 1.0}
    getattr(backend, method)("q", "k", "v", "out", POOL, "indptr", "indices", "slots", options)
    return options


def test_the_class_keeps_the_name_that_dflash_looks_for():
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    from sglang_fp4kv.attention import TritonAttnBackend

    name, wants_mask = resolve_dflash_verify_mask_policy(object.__new__(TritonAttnBackend))
    assert (name, wants_mask) == ("TritonAttnBackend", False)


def test_verify_reads_the_block_from_the_pool(backend):
    attend(backend, "_attend_block", -1)
    assert backend.calls["attention_nvfp4"]["block_slots"] == "slots"
    assert backend.calls["attention_nvfp4"]["q_per_req"] == 8
    assert "extend_nvfp4" not in backend.calls


def test_verify_looks_back_as_far_as_decode_lists(backend):
    options = attend(backend, "_attend_block", 32)
    assert backend.calls["attention_nvfp4"]["sliding_window_size"] == 31
    assert options["sliding_window_size"] == 32
    attend(backend, "_attend_block", -1)
    assert backend.calls["attention_nvfp4"]["sliding_window_size"] == -1
    attend(backend, "_attend_chunk", 32)
    assert backend.calls["extend_nvfp4"]["sliding_window_size"] == 32


@pytest.mark.parametrize(
    ("changes", "keywords", "named"),
    [
        ({}, {"sinks": 1}, "attention sinks"),
        ({}, {"score_mod": 1}, "score_mod"),
        ({"xai_temperature_len": 4}, {}, "a temperature length"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"attn_type": "encoder_only"}, {}, "attention type 'encoder_only'"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(backend, changes, keywords, named):
    from sglang.srt.layers.radix_attention import AttentionType

    layer = {
        "layer_id": 5,
        "xai_temperature_len": -1,
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        **changes,
    }
    arguments = {"sinks": None, "score_mod": None, "aux_tensors": None, **keywords}
    with pytest.raises(ValueError, match=f"layer 5: NVFP4 KV does not serve {named}"):
        backend._layer_options(SimpleNamespace(**layer), **arguments)


def test_layers_that_share_k_and_v_are_refused(backend):
    with pytest.raises(ValueError, match="layer 2: NVFP4 KV does not serve layers that share"):
        backend.forward_extend("q", None, None, SimpleNamespace(layer_id=2), None)
