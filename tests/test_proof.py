"""The scheduler's report and the check before it is ready, on stand-ins for SGLang's objects."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def proof(monkeypatch):
    from sglang.srt.arg_groups import overrides

    from sglang_fp4kv import integration, proof

    monkeypatch.setattr(overrides, "resolved_view", lambda args: args)
    monkeypatch.setattr(integration, "inactive_parts", lambda: [])
    return proof


class OtherPool:
    """A pool of another family: no heads, no layers, sizes of its own."""

    dtype = torch.bfloat16


def scheduler(pool, kv_cache_dtype="nvfp4", draft_pool=None):
    args = SimpleNamespace(
        kv_cache_dtype=kv_cache_dtype,
        attention_backend="triton",
        prefill_attention_backend=None,
        decode_attention_backend=None,
    )
    backend = SimpleNamespace()
    draft_runner = SimpleNamespace(token_to_kv_pool=draft_pool, attn_backend=backend)
    draft = draft_pool and SimpleNamespace(weight_update_runners=lambda: [("draft", draft_runner)])
    runner = SimpleNamespace(token_to_kv_pool=pool, attn_backend=backend, req_to_token_pool=SimpleNamespace())
    return SimpleNamespace(
        server_args=args,
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=draft,
        max_total_num_tokens=7,
    )


def test_a_server_with_another_kind_of_pool_still_answers_server_info(proof):
    output = SimpleNamespace(internal_state={"kept": 1})
    controller = SimpleNamespace(scheduler=scheduler(OtherPool(), "auto"))
    assert proof.add_report(output, controller, None) is output
    report = output.internal_state["fp4kv"]
    assert output.internal_state["kept"] == 1
    assert report["target"]["class"].endswith("OtherPool") and report["draft"] is None
    assert report["max_total_num_tokens"] == 7


def test_a_server_without_nvfp4_is_not_judged(proof):
    proof.require_active(scheduler(OtherPool(), "auto"))


def test_every_part_that_is_not_ours_is_named(proof):
    with pytest.raises(RuntimeError) as error:
        proof.require_active(scheduler(OtherPool(), draft_pool=OtherPool()))
    for named in ("target's pool is OtherPool", "attention backend is types.", "drafter's pool is OtherPool"):
        assert named in str(error.value)


def test_a_plugin_that_did_not_take_effect_is_named(proof, monkeypatch):
    from sglang_fp4kv import integration

    monkeypatch.setattr(integration, "inactive_parts", lambda: ["the plugin"])
    with pytest.raises(RuntimeError, match="not active in the scheduler process: the plugin"):
        proof.require_active(scheduler(OtherPool()))


def test_the_budget_is_what_sglang_divided(proof, monkeypatch):
    monkeypatch.setattr(proof, "_budget", {})
    configurator = SimpleNamespace(_cell_size=576)
    config = SimpleNamespace(max_total_num_tokens=96)
    assert proof.record_budget(lambda *_: config, configurator, 57600, 16) is config
    assert proof._budget == {
        "available_bytes": 57600, "page_size": 16, "bytes_per_token": 576, "tokens": 96,
    }  # fmt: skip


def test_the_rank_that_answers_reports_for_all(proof, monkeypatch):
    monkeypatch.setattr(proof, "_ranks", [])
    answering = scheduler(OtherPool())

    def answer():
        output = SimpleNamespace(internal_state={})
        return proof.add_report(output, SimpleNamespace(scheduler=answering), None).internal_state["fp4kv"]

    own = proof.report(answering)
    other = {**own, "max_total_num_tokens": 8}
    proof.gather_ranks(SimpleNamespace(world_size=1), own)
    assert answer() == own
    group = SimpleNamespace(world_size=2, all_gather_object=lambda mine: [mine, other])
    proof.gather_ranks(group, own)
    assert answer() == {**own, "ranks": [own, other]}


def under_hicache(served, *entries):
    """``served`` with a hierarchical cache of (name, device pool, host pool)."""
    held = [
        SimpleNamespace(name=SimpleNamespace(value=name), device_pool=device, host_pool=host)
        for name, device, host in entries
    ]
    controller = SimpleNamespace(mem_pool_host=SimpleNamespace(entries=held))
    served.tree_cache = SimpleNamespace(cache_controller=controller)
    return served


@pytest.mark.parametrize(
    ("carried", "problems"),
    [
        (("ours", "draft"), []),
        (("ours",), ["the drafter's pool has no host pool"]),
        (("stock", "draft"), ["the target's host pool is OtherPool"]),
        (("draft",), ["the target's pool has no host pool"]),
    ],
)
def test_a_hierarchical_cache_carries_scales_and_the_drafters_k_and_v(proof, carried, problems):
    from sglang_fp4kv.host_pool import NVFP4TokenToKVPoolHost

    ours = NVFP4TokenToKVPoolHost.__new__(NVFP4TokenToKVPoolHost)
    target, draft = OtherPool(), OtherPool()
    entries = {
        "ours": ("kv", target, ours), "stock": ("kv", target, OtherPool()), "draft": ("draft", draft, OtherPool()),
    }  # fmt: skip
    served = under_hicache(scheduler(target, draft_pool=draft), *(entries[name] for name in carried))
    assert proof._host_problems(served, target, proof._draft_runner(served)) == problems


def test_the_report_names_the_host_pools(proof):
    pool, host = OtherPool(), SimpleNamespace(size=64, size_per_token=144)
    served = under_hicache(scheduler(pool, "auto"), ("kv", pool, host))
    assert proof.report(served)["host"] == {
        "kv": {"class": "types.SimpleNamespace", "tokens": 64, "bytes_per_token": 144}
    }
    assert proof.report(scheduler(pool, "auto"))["host"] is None


def hybrid(packed_decode, kernel="TritonGDNKernel"):
    """A runner with gated-delta layers, decoded by ``kernel``."""
    dispatcher = SimpleNamespace(decode_kernel=type(kernel, (), {})(), supports_packed_decode=packed_decode)
    return SimpleNamespace(
        attn_backend=SimpleNamespace(linear_attn_backend=SimpleNamespace(kernel_dispatcher=dispatcher))
    )


def test_states_that_decode_and_verify_keep_differently_are_a_problem():
    from sglang_fp4kv.recurrent import state_problems

    (problem,) = state_problems(hybrid(True))
    assert problem == "recurrent states are decoded by another kernel than verify's"
    assert state_problems(hybrid(False)) == state_problems(hybrid(True, "FlashInferGDNKernel")) == []
    assert state_problems(SimpleNamespace(attn_backend=object())) == []
