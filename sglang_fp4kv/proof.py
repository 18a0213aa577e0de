"""What really runs, read off the live objects in the scheduler process.

The report is part of ``GET /server_info`` (``internal_states[i]["fp4kv"]``), so a launcher reads it
over HTTP. :func:`require_active` is called by a patch before the scheduler reports ready. With tensor
parallelism one rank of several answers HTTP, so each rank's report is gathered there, once.
"""

import logging

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_fp4kv import __version__, draft_writes, formats
from sglang_fp4kv.served import CONV, SELECTOR

logger = logging.getLogger(__name__)

_budget = {}
_ranks = []


def record_budget(original, configurator, available_bytes, page_size):
    """Remembers the byte budget SGLang divided by the cost of a token."""
    config = original(configurator, available_bytes, page_size)
    _budget.update(
        available_bytes=int(available_bytes),
        page_size=int(page_size),
        bytes_per_token=int(configurator._cell_size),
        tokens=int(config.max_total_num_tokens),
    )
    return config


def _pool_report(pool):
    """What a plain or packed K/V pool costs; of any other family only its class and dtype."""
    found = {
        "class": f"{type(pool).__module__}.{type(pool).__name__}",
        "dtype": str(pool.dtype).removeprefix("torch."),
    }
    if not isinstance(pool, MHATokenToKVPool):
        return found
    allocated = int(sum(pool.get_kv_size_bytes()))
    slots = pool.size + pool.page_size
    return {
        **found,
        "layers": pool.layer_num,
        "kv_heads": pool.head_num,
        "head_dim": pool.head_dim,
        "bytes_per_token": getattr(pool, "bytes_per_token", allocated // slots),
        "slots": slots,
        "allocated_bytes": allocated,
    }


def _backend_report(runner):
    backend = runner.attn_backend
    backend = getattr(backend, "full_attn_backend", backend)
    return f"{type(backend).__module__}.{type(backend).__name__}"


def _model_report(model):
    """The draft's class and what of a DFlash2 was built: keys model, modules (named as in served.py)."""
    layers = list(getattr(model, "layers", ()))
    convolved = any(getattr(layer, "attention_conv", None) is not None for layer in layers)
    built = {
        CONV: convolved,
        SELECTOR: getattr(model, "candidate_selector", None) is not None,
    }
    return {"model": type(model).__name__, "modules": [name for name, there in built.items() if there]}


def report(scheduler):
    """A JSON-able description of the pools, recipe and backends that ``scheduler`` serves with.

    Keys: version, target, draft (None without a drafter), states (of recurrent layers, None without),
    budget (the sizing that chose the number of tokens), max_total_num_tokens, host (the hierarchical
    cache's pools by name, None without it). Bytes are bytes on this GPU, or in host memory for it.
    """
    from sglang_fp4kv.pool import find_packed_pool
    from sglang_fp4kv.recurrent import state_report

    runner = scheduler.tp_worker.model_runner
    target = {
        **_pool_report(find_packed_pool(runner.token_to_kv_pool) or runner.token_to_kv_pool),
        "backend": _backend_report(runner),
    }
    packed = find_packed_pool(runner.token_to_kv_pool)
    if packed is not None:
        method = packed.quant_method
        target["recipe"] = f"{type(method).__module__}.{type(method).__name__}"
        target["global_scales"] = {
            "source": method.scales.source,
            "k": [method.scales.k[i] for i in packed.model_layer_ids],
            "v": [method.scales.v[i] for i in packed.model_layer_ids],
        }
        target["workspace_bytes"] = sum(
            b.numel() * b.element_size()
            for b in (packed.dq_k_buffer, packed.dq_v_buffer)
            if b is not None
        )
    draft_runner = _draft_runner(scheduler)
    draft = None
    if draft_runner is not None:
        draft = {
            **_pool_report(draft_runner.token_to_kv_pool),
            "backend": _backend_report(draft_runner),
            **_model_report(draft_runner.model),
            **draft_writes.describe(scheduler.draft_worker),
        }
    return {
        "version": __version__,
        "target": target,
        "draft": draft,
        "states": state_report(runner, scheduler.server_args),
        "budget": dict(_budget),
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "host": _host_report(scheduler),
    }


def _host_report(scheduler):
    return {
        str(entry.name.value): {
            "class": f"{type(entry.host_pool).__module__}.{type(entry.host_pool).__name__}",
            "tokens": entry.host_pool.size,
            "bytes_per_token": getattr(entry.host_pool, "size_per_token", None),
        }
        for entry in _host_entries(scheduler)
    } or None


def _host_entries(scheduler):
    """The hierarchical cache's pools (PoolEntry); none without it."""
    controller = getattr(getattr(scheduler, "tree_cache", None), "cache_controller", None)
    return getattr(getattr(controller, "mem_pool_host", None), "entries", ())


def _draft_runner(scheduler):
    """The runner of the drafter's model; None without a drafter and for NGRAM, which has no model."""
    worker = getattr(scheduler, "draft_worker", None)
    runners = worker.weight_update_runners() if worker is not None else []
    return runners[0][1] if runners else None


def require_active(scheduler):
    """Checks that NVFP4 KV is served by our pool, recipe and backend, and the draft by its own pool.

    Called by patches/require-active-in-the-scheduler.patch once the pools exist, on every rank: a rank
    that fails ends the server, and the reports of all of them are gathered.
    Raises: RuntimeError naming everything that is not as it must be.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_fp4kv.integration import inactive_parts

    inactive = inactive_parts()
    if inactive:
        raise RuntimeError(
            "fp4kv is installed but not active in the scheduler process: "
            f"{', '.join(inactive)}; SGLang logged the failure above ('Failed to ...')"
        )
    from sglang_fp4kv.draft_pool import DraftTokenToKVPool
    from sglang_fp4kv.pool import find_packed_pool
    from sglang_fp4kv.recurrent import state_problems
    from sglang_fp4kv.resolution import uses_packed_read

    if not uses_packed_read(resolved_view(scheduler.server_args)):
        return
    runner = scheduler.tp_worker.model_runner
    packed = find_packed_pool(runner.token_to_kv_pool)
    problems = []
    if packed is None:
        problems.append(f"the target's pool is {type(runner.token_to_kv_pool).__name__}")
    else:
        expected = formats.bytes_per_token(packed.head_dim, packed.head_num, packed.layer_num)
        allocated = sum(packed.get_kv_size_bytes())
        if allocated != expected * (packed.size + packed.page_size):
            problems.append(
                f"the target's pool allocated {allocated} bytes for "
                f"{packed.size + packed.page_size} slots of {expected} bytes"
            )
    if not _backend_report(runner).startswith("sglang_fp4kv."):
        problems.append(f"the target's attention backend is {_backend_report(runner)}")
    problems.extend(state_problems(runner))
    draft_runner = _draft_runner(scheduler)
    if draft_runner is not None:
        pool = draft_runner.token_to_kv_pool
        if not isinstance(pool, DraftTokenToKVPool):
            problems.append(f"the drafter's pool is {type(pool).__name__}")
        if getattr(pool, "dtype", None) == getattr(torch, "float4_e2m1fn_x2", object()):
            problems.append("the drafter's pool is FP4")
    problems += _host_problems(scheduler, packed, draft_runner)
    if problems:
        raise RuntimeError("fp4kv does not serve as asked: " + "; ".join(problems))
    own = report(scheduler)
    logger.info("fp4kv: %s", own)
    gather_ranks(scheduler.tp_group, own)


def gather_ranks(tp_group, own):
    """Keeps the report of every rank of ``tp_group``, each of which has to call this with its ``own``."""
    if tp_group.world_size > 1:
        _ranks[:] = tp_group.all_gather_object(own)


def _host_problems(scheduler, packed, draft_runner):
    """What the hierarchical cache does not carry: the scales, or the drafter's K and V."""
    from sglang_fp4kv.host_pool import NVFP4TokenToKVPoolHost

    entries = _host_entries(scheduler)
    carried = [entry.device_pool for entry in entries]
    problems = [
        f"the target's host pool is {type(entry.host_pool).__name__}"
        for entry in entries
        if entry.device_pool is packed and not isinstance(entry.host_pool, NVFP4TokenToKVPoolHost)
    ]
    wanted = {"target": packed, "drafter": draft_runner and draft_runner.token_to_kv_pool}
    return problems + [
        f"the {whose}'s pool has no host pool"
        for whose, pool in wanted.items()
        if entries and pool is not None and not any(pool is one for one in carried)
    ]


def add_report(output, controller, recv_req):
    """Adds the report to the scheduler's answer to GET /server_info.

    With NVFP4 KV and tensor parallelism it has one more key, ranks: what each rank reported at its start,
    the one that answers included, in rank order.
    """
    ranks = {"ranks": list(_ranks)} if _ranks else {}
    output.internal_state["fp4kv"] = report(controller.scheduler) | ranks
    return output
