"""What was judged beside what the worker reports (sglang_fp4kv/proof.py): both must be the same."""

from launcher.draft_facts import MODULE_KEYS
from launcher.launch import memory
from launcher.plan_model import target_states
from sglang_fp4kv.draft_writes import PER_LAYER
from sglang_fp4kv.served import DRAFTERS_WITHOUT_MODEL

PACKED_POOL = "sglang_fp4kv.pool.NVFP4TokenToKVPool"
DRAFT_POOL = "sglang_fp4kv.draft_pool.DraftTokenToKVPool"
_RECIPE = "sglang_fp4kv.recipe.PackedNVFP4Method"
_BACKEND = "sglang_fp4kv.attention.TritonAttnBackend"
_FP4 = "float4_e2m1fn_x2"
_TORCH_NAMES = {
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "bf16": "bfloat16", "bfloat16": "bfloat16",
}  # fmt: skip


def expected_values(launch):
    """The report's values, by (side, key), that the judged ``launch`` leads to; a Launch with FP4 KV.

    Our own parts only where they serve: nvfp4 on Triton.
    """
    held = memory(launch)
    values = {("target", "dtype"): _FP4}
    if launch.kv_dtype == "nvfp4" and launch.on_triton:
        values |= {
            ("target", "class"): PACKED_POOL,
            ("target", "recipe"): _RECIPE,
            ("target", "backend"): _BACKEND,
            ("target", "workspace_bytes"): 0,
        }
        if held.target_cell is not None:
            values["target", "bytes_per_token"] = held.target_cell
    if launch.target is not None and launch.target.gated_delta:
        states = target_states(launch.target, max(1, launch.flags.tp_size), launch.flags.mamba_ssm_dtype)
        values |= {
            ("states", "layers"): states.layers,
            ("states", "dtype"): states.state_dtype,
            ("states", "slot_bytes"): states.slot_bytes,
        }
    if launch.drafter not in (None, *DRAFTERS_WITHOUT_MODEL):
        values["draft", "dtype"] = _TORCH_NAMES.get(launch.draft_dtype, launch.draft_dtype)
        if launch.kv_dtype == "nvfp4" and launch.on_triton:
            values["draft", "class"] = DRAFT_POOL
        if held.draft_cell:
            values["draft", "bytes_per_token"] = held.draft_cell
        if launch.draft is not None:
            values["draft", "modules"] = [name for name in MODULE_KEYS if name in launch.draft.dflash.modules]
    return values


def differences(launch, states):
    """Where the scheduler's report is not what was judged, a text each; empty where all is.

    ``states``: internal_states of GET /server_info, one a data-parallel replica.
    """
    found = []
    if len(states) != launch.flags.dp_size:
        found.append(f"{launch.flags.dp_size} replicas were judged, {len(states)} report")
    for number, state in enumerate(states):
        report = state.get("fp4kv")
        where = f"replica {number}: " if len(states) > 1 else ""
        if report is None:
            found.append(f"{where}the scheduler does not report what it serves: our plugin is not in it")
        else:
            found += [where + text for text in _of_all_ranks(launch, report)]
    return found


def _of_all_ranks(launch, report):
    """Differences of every tensor-parallel rank; of the one that answers where no other is gathered."""
    tp = launch.flags.tp_size
    if tp == 1 or launch.kv_dtype != "nvfp4" or not launch.on_triton:
        yield from _of_rank(launch, report)
        return
    ranks = report.get("ranks") or []
    if len(ranks) != tp:
        yield f"{tp} ranks were judged, {len(ranks)} report"
    scales = (report.get("target") or {}).get("global_scales")
    for number, rank in enumerate(ranks):
        yield from (f"rank {number}: {text}" for text in _of_rank(launch, rank))
        reported = (rank.get("target") or {}).get("global_scales")
        if reported != scales:
            yield f"rank {number}: target global_scales: {reported}, and {scales} on the rank that answers"


def _of_rank(launch, report):
    for (side, key), judged in expected_values(launch).items():
        reported = (report.get(side) or {}).get(key)
        if reported != judged:
            yield f"{side} {key}: judged {judged}, reported {reported}"
    if launch.drafter in (None, *DRAFTERS_WITHOUT_MODEL) and report.get("draft"):
        yield f"no drafter's pool was judged, {report['draft']['class']} is reported"


def slow_writes(states):
    """Why a drafter's K and V are written layer by layer, a text each; empty where they are written fused."""
    found = []
    for state in states:
        draft = state["fp4kv"].get("draft") or {}
        if draft.get("kv_writes") == PER_LAYER and draft["why_per_layer"] not in found:
            found.append(draft["why_per_layer"])
    return found


def describe(report):
    """The scheduler's report as one line."""
    parts = []
    for side in ("target", "draft"):
        pool = report[side]
        if pool:
            name = pool["class"].rpartition(".")[2]
            size = f" {pool['bytes_per_token']} B/token" if "bytes_per_token" in pool else ""
            modules = f" with {' and '.join(pool['modules'])}" if pool.get("modules") else ""
            writes = f", written {pool['kv_writes']}" if "kv_writes" in pool else ""
            parts.append(f"{side} {pool['dtype']}{size} in {name}{modules}{writes}")
    ranks = report.get("ranks") or []
    if ranks:
        parts.append(f"the same on each of {len(ranks)} ranks")
    states = report.get("states")
    if states:
        parts.append(f"states {states['dtype']} of {states['layers']} layers in {states['slots']} slots")
    return "; ".join([*parts, f"{report['max_total_num_tokens']} tokens"])
