"""What a token costs with an EAGLE-family drafter, with SGLang's configurator replaced by what it does."""

from types import SimpleNamespace

import pytest

from sglang_fp4kv import formats

TARGET_CELL = 4 * 2 * 2 * 36  # four layers, two heads, D 64 in NVFP4


def configured(aux, algorithm="eagle", draft_worker=False, kv="nvfp4", dtype="fp8_e4m3"):
    spec = SimpleNamespace(
        name=algorithm.upper(), is_eagle=lambda: algorithm == "eagle", is_standalone=lambda: algorithm == "standalone"
    )
    args = SimpleNamespace(
        kv_cache_dtype=kv, attention_backend="triton", prefill_attention_backend=None,
        decode_attention_backend=None, speculative_draft_kv_cache_dtype=dtype,
    )  # fmt: skip
    return SimpleNamespace(
        spec_aux_config=aux, server_args=args, is_draft_worker=draft_worker, spec_algorithm=spec, draft_attn_tp_size=2
    )


def draft(heads=4, head_dim=64, v_head_dim=32):
    return SimpleNamespace(head_dim=head_dim, v_head_dim=v_head_dim, get_num_kv_heads=lambda tp: heads // tp)


def aux(model, layers, counted):
    return SimpleNamespace(draft_model_config=model, draft_kv_num_layers=layers, eagle_draft_num_layers=counted)


@pytest.fixture
def cell(monkeypatch):
    from sglang_fp4kv import draft_sizing

    monkeypatch.setattr(draft_sizing, "resolved_view", lambda args: args)

    def stock(configurator, kvc):
        """SGLang's __init__: the target's layers, and the draft's counted as more of them."""
        counted = kvc.spec_aux_config.eagle_draft_num_layers or 0
        configurator._cell_size = TARGET_CELL + TARGET_CELL * counted // 4

    def run(kvc):
        configurator = SimpleNamespace()
        draft_sizing.price_draft(stock, configurator, kvc)
        return configurator._cell_size

    return run


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bf16", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["eagle", "standalone"])
@pytest.mark.parametrize("counted", [3, None])  # None: a module inside the target, which SGLang leaves out
def test_a_draft_is_priced_by_its_own_rows(cell, dtype, algorithm, counted):
    own = aux(draft(), 3, counted)
    bytes_a_token = formats.bytes_per_token(64, 2, 3, dtype=dtype, v_head_dim=32)
    assert bytes_a_token == 3 * 2 * (64 + 32) * (1 if dtype == "fp8_e4m3" else 2)
    assert cell(configured(own, algorithm, dtype=dtype)) == TARGET_CELL + bytes_a_token
    assert own.eagle_draft_num_layers == counted


@pytest.mark.parametrize("changes", [{"algorithm": "dflash"}, {"draft_worker": True}, {"kv": "fp8_e4m3"}])
def test_everything_else_is_sglangs(cell, changes):
    assert cell(configured(aux(draft(), 2, 2), **changes)) == TARGET_CELL * 6 // 4


@pytest.mark.parametrize("unknown", [aux(None, None, None), aux(draft(), None, None), aux(None, 1, 1)])
def test_a_draft_that_nothing_is_known_of_is_no_free_one(cell, unknown):
    with pytest.raises(RuntimeError, match="layers of the drafter EAGLE"):
        cell(configured(unknown))
