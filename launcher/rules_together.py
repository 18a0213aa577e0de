"""Rules about parts that were each tried, but not with one another. Each returns facts for its text, or None."""

from launcher.model_kinds import WINDOWED
from sglang_fp4kv.served import DRAFTERS


def _other_drafter(launch):
    """Whether a served drafter other than DFLASH drafts; FP4-080 is about those that are not served."""
    return launch.drafter in DRAFTERS and launch.drafter != "DFLASH"


def _recurrent(launch):
    return launch.target is not None and launch.target.gated_delta


def _windowed(launch):
    return launch.target is not None and launch.target.trait(WINDOWED) is not None


def _drafts_for(launch):
    asked = launch.asked("kv_cache_dtype", "speculative_algorithm")
    return {"asked": f"{asked} for {launch.target.path}", "drafter": launch.drafter, "path": launch.target.path}


def drafter_of_recurrent_layers(launch):
    return _drafts_for(launch) if _other_drafter(launch) and _recurrent(launch) else None


def drafter_of_windows(launch):
    return _drafts_for(launch) if _other_drafter(launch) and _windowed(launch) else None
