"""How the drafter's pool is written, on stand-ins for SGLang's worker: the way in use, and why the slow one."""

import logging
from types import SimpleNamespace

import pytest

from launcher.expected import describe, differences, slow_writes
from sglang_fp4kv import draft_writes
from test_supervise import REPORT, launch_of

sglang_log = logging.getLogger(draft_writes._LOGGER)


HELPER = object()


def worker(helper=HELPER, use=True):
    return SimpleNamespace(_use_fused_kv_materialize=use, _fused_kv_helper=helper)


def gives_up(worker):
    sglang_log.info("DFLASH fused KV materialization disabled: %s", "qkv bias: layer=0")
    worker._use_fused_kv_materialize, worker._fused_kv_helper = False, None


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_the_reason_is_kept_at_every_log_level_and_shown_at_its_own(caplog, monkeypatch, level):
    monkeypatch.setattr(sglang_log, "level", level)
    sglang_log.manager._clear_cache()
    found = worker()
    draft_writes.note_why_not_fused(gives_up, found)
    why = "DFLASH fused KV materialization disabled: qkv bias: layer=0"
    assert draft_writes.describe(found) == {"kv_writes": "per layer", "why_per_layer": why}
    assert [r.getMessage() for r in caplog.records] == ([why] if level == logging.INFO else [])
    assert sglang_log.level == level and not sglang_log.filters


def test_a_fused_write_has_no_reason():
    found = worker()
    draft_writes.note_why_not_fused(lambda worker: sglang_log.info("enabled"), found)
    assert draft_writes.describe(found) == {"kv_writes": "fused", "why_per_layer": None}


def test_silence_is_said():
    found = worker(helper=None)
    draft_writes.note_why_not_fused(lambda worker: None, found)
    assert draft_writes.describe(found)["why_per_layer"] == "SGLang gave no reason"


def test_a_write_that_fails_while_serving_changes_the_report():
    found = worker()

    def fails(worker, hidden, *, cache_loc):
        raise ValueError(f"{hidden} {cache_loc}")

    with pytest.raises(ValueError, match="1 2"):
        draft_writes.note_failed_write(fails, found, 1, cache_loc=2)
    assert draft_writes.describe(found)["kv_writes"] == "fused"  # until the caller has given it up
    found._fused_kv_helper = None
    assert draft_writes.describe(found) == {
        "kv_writes": "per layer", "why_per_layer": "the fused write failed: ValueError: 1 2",
    }  # fmt: skip
    assert draft_writes.note_failed_write(lambda worker: 5, found) == 5


def test_a_device_without_the_kernel_and_another_drafters_worker():
    assert draft_writes.describe(worker(helper=None, use=False))["why_per_layer"] == "the device has no fused kernel"
    assert draft_writes.describe(SimpleNamespace()) == {}


def with_draft(**values):
    return {**REPORT, "draft": {**REPORT["draft"], **values}}


def test_the_launcher_says_which_way_is_in_use():
    slow = with_draft(kv_writes="per layer", why_per_layer="qkv bias")
    fused = with_draft(kv_writes="fused", why_per_layer=None)
    assert slow_writes([{"fp4kv": slow}, {"fp4kv": slow}]) == ["qkv bias"]
    assert slow_writes([{"fp4kv": fused}, {"fp4kv": REPORT}, {"fp4kv": {**REPORT, "draft": None}}]) == []
    assert "DraftTokenToKVPool, written per layer; 8192 tokens" in describe(slow)
    assert "DraftTokenToKVPool, written fused; 8192 tokens" in describe(fused)
    # Slower is no difference: the answers are the same.
    assert differences(launch_of(), [{"fp4kv": slow}]) == []


def test_a_draft_that_lost_its_modules_is_a_difference():
    (text,) = differences(launch_of(), [{"fp4kv": with_draft(modules=["candidate selector"])}])
    assert text == "draft modules: judged [], reported ['candidate selector']"
