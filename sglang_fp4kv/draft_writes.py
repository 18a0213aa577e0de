"""How the DFLASH worker writes the target's features into the drafter's pool, and why that way.

SGLang 0.5.23 projects K and V of all draft layers in one fused step, or, where it cannot, layer by layer: the same
values, more kernels. It says so in its log at most, and after a failure while serving it changes over for good. The two
hooks here note the reason, so that the report (proof.py) states the way in use at the moment it is asked.

Source: _init_fused_kv_helper and _append_target_hidden_fused in srt/speculative/dflash_worker_v2.py @ 0.5.23
"""

import logging

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
INIT_HELPER = f"{WORKER}._init_fused_kv_helper"
APPEND_FUSED = f"{WORKER}._append_target_hidden_fused"
FUSED, PER_LAYER = "fused", "per layer"
_LOGGER = "sglang.srt.speculative.dflash_worker_v2"
_REASON = "_fp4kv_why_per_layer"
_UNSAID = "SGLang gave no reason"


def note_why_not_fused(original, worker):
    """Around _init_fused_kv_helper, which swallows what stops it: keeps what it logs, at whatever log level."""
    said = _Listener()
    said.attach()
    try:
        original(worker)
    finally:
        said.detach()
    if worker._fused_kv_helper is None:
        setattr(worker, _REASON, said.last or _UNSAID)


def note_failed_write(original, worker, *args, **kwargs):
    """Around _append_target_hidden_fused, whose caller catches every failure and goes on layer by layer."""
    try:
        return original(worker, *args, **kwargs)
    except Exception as error:
        setattr(worker, _REASON, f"the fused write failed: {type(error).__name__}: {error}")
        raise


def describe(worker):
    """{"kv_writes": "fused" or "per layer", "why_per_layer": a sentence or None} of a worker; {} of another kind."""
    if not hasattr(worker, "_use_fused_kv_materialize"):
        return {}
    if worker._use_fused_kv_materialize and worker._fused_kv_helper is not None:
        return {"kv_writes": FUSED, "why_per_layer": None}
    why = getattr(worker, _REASON, "the device has no fused kernel")
    return {"kv_writes": PER_LAYER, "why_per_layer": why}


class _Listener(logging.Filter):
    """Hears the worker module's log; lets through what its level would have let through."""

    def __init__(self):
        super().__init__()
        self.last = None
        self.logger = logging.getLogger(_LOGGER)

    def attach(self):
        self.level, self.shown = self.logger.level, self.logger.getEffectiveLevel()
        self.logger.addFilter(self)
        self.logger.setLevel(min(self.shown, logging.INFO))

    def detach(self):
        self.logger.removeFilter(self)
        self.logger.setLevel(self.level)

    def filter(self, record):
        self.last = record.getMessage()
        return record.levelno >= self.shown
