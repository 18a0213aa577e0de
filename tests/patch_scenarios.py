"""Runs each patched place of an SGLang tree on a CPU and prints what happened as one JSON object.

A process of its own: ``python patch_scenarios.py NAME...``, with the tree and this repository on
PYTHONPATH. An outcome is a plain value, or ``{"raised": class, "text": message}``.
"""

import json
import sys
import types
from types import SimpleNamespace

import torch

FP4 = torch.float4_e2m1fn_x2


def outcome(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return {"raised": type(error).__name__, "text": str(error)}


def _mha_pool(cls=None, dtype=FP4, slots=7, heads=2, dim=32, layers=2):
    """A stock MHA pool with random bytes, made without the parts that need a GPU."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = (cls or MHATokenToKVPool).__new__(cls or MHATokenToKVPool)
    pool.dtype, pool.store_dtype = dtype, torch.uint8
    pool.layer_num, pool.start_layer, pool.use_hnd = layers, 0, False
    pool.cpu_offloading_chunk_size = 2
    pool.head_num, pool.head_dim, pool.v_head_dim = heads, dim, dim
    pool.row_dim = pool.v_row_dim = heads * dim
    width = dim // 2 if dtype == FP4 else dim
    for name, last in (("k_buffer", width), ("v_buffer", width)):
        setattr(pool, name, [_bytes(slots, heads, last) for _ in range(layers)])
    scaled = dtype == FP4
    for name in ("k_scale_buffer", "v_scale_buffer"):
        scales = [_bytes(slots, heads, dim // 16) for _ in range(layers)] if scaled else None
        setattr(pool, name, scales)
    pool.native_k_scale_buffer = pool.native_v_scale_buffer = None
    return pool


def _bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def prefix_valid_commit():
    """The stock writer as a CUDA build takes it, on an FP4 pool and, up to its kernel, on FP8."""
    from sglang.srt.mem_cache import memory_pool

    memory_pool._is_cuda = True
    launched = []
    memory_pool._set_kv_buffer_prefix_valid_impl = lambda *a, **k: launched.append("bytes")
    layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)

    def commit(pool):
        k = torch.randn(6, pool.head_num, pool.head_dim, dtype=torch.bfloat16)
        loc, lens = torch.arange(6).view(2, 3), torch.tensor([1, 2])
        pool.set_kv_buffer_prefix_valid(layer, loc, lens, k, k.clone())
        return launched

    class OwnWriter(memory_pool.MHATokenToKVPool):
        def set_kv_buffer_prefix_valid(self, *args, **kwargs):
            pass

    def build(dtype, pool):
        """DFlashWorkerV2.alloc_memory_pool with a draft runner that holds ``pool``."""
        from contextlib import nullcontext

        from sglang.srt.speculative import dflash_worker_v2 as worker_module

        worker_module.draft_tp_context = lambda layout: nullcontext()
        runner = SimpleNamespace(kv_cache_dtype=dtype, token_to_kv_pool=pool)
        draft_worker = SimpleNamespace(alloc_memory_pool=lambda **kwargs: None)
        worker = SimpleNamespace(
            draft_parallel_layout=None,
            use_compact_draft_cache=False,
            _draft_worker=draft_worker,
            draft_model_runner=runner,
        )
        return worker_module.DFlashWorkerV2.alloc_memory_pool(worker) or "built"

    return {
        "commit_fp4": outcome(commit, _mha_pool()),
        "commit_fp8": outcome(commit, _mha_pool(dtype=torch.float8_e4m3fn)),
        "build_fp4": outcome(build, FP4, _mha_pool()),
        "build_fp4_own_writer": outcome(build, FP4, _mha_pool(OwnWriter)),
        "build_fp4_no_writer": outcome(build, FP4, SimpleNamespace(dtype=FP4)),
        "build_fp8": outcome(build, torch.float8_e4m3fn, _mha_pool(dtype=torch.float8_e4m3fn)),
    }


def input_embeddings():
    """The dtype a model of each dtype is handed its input embeddings in."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    def handed(dtype):
        runner = SimpleNamespace(dtype=dtype, is_generation=True, _pp_kwargs=lambda proxy: {})
        embeds = torch.full((3, 4), 1.0009765625, dtype=dtype)
        batch = SimpleNamespace(input_embeds=embeds, replace_embeds=None, replace_positions=None)
        got = ModelRunner._extend_forward_kwargs(runner, batch, None)["input_embeds"]
        return {"dtype": str(got.dtype), "equal": bool((got == embeds).all())}

    return {str(d): outcome(handed, d) for d in (torch.float16, torch.float32, torch.bfloat16)}


def scale_loss():
    """The end of argument resolution with each option that moves KV, for FP4 and for FP8 KV."""
    from sglang.srt.arg_groups import kv_cache_hook

    quiet = dict.fromkeys(
        "enable_hierarchical_cache enable_lmcache enable_flexkv enable_unified_cache_external_linker "
        "enable_pd_role_switch disable_radix_cache enable_streaming_session "
        "disaggregation_decode_enable_offload_kvcache".split(),
        False,
    )
    quiet |= {"radix_cache_backend": None, "disaggregation_mode": "null", "dcp_size": 1}
    quiet |= {"disaggregation_decode_retraction_backup": None, "radix_eviction_policy": "lru"}
    quiet |= {"_swa_full_tokens_ratio_explicitly_set": False, "swa_prefix_tails": None}
    quiet |= {"speculative_draft_kv_cache_dtype": None, "speculative_algorithm": None}
    quiet |= {"hicache_host_memory_mode": "auto", "hicache_storage_backend": None}
    quiet |= dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
    kv_cache_hook.resolving_view = kv_cache_hook.resolved_view = lambda args: args
    kv_cache_hook.resolution_result = lambda args, name: 0.8
    kv_cache_hook.attn_dp_enabled_of = lambda args: False

    def resolve(**asked):
        kv_cache_hook.handle_cache_compatibility(SimpleNamespace(**(quiet | asked)))
        return "resolved"

    movers = {
        "nothing": {},
        "hicache": {"enable_hierarchical_cache": True},
        "lmcache": {"enable_lmcache": True},
        "flexkv": {"enable_flexkv": True},
        "flexkv_backend": {"radix_cache_backend": "flexkv"},
        "linker": {"enable_unified_cache_external_linker": True},
        "pd_prefill": {"disaggregation_mode": "prefill"},
        "pd_decode": {"disaggregation_mode": "decode"},
        "pd_role_switch": {"enable_pd_role_switch": True},
        "several": {"enable_flexkv": True, "disaggregation_mode": "decode"},
    }
    kinds = {
        "nvfp4": {"kv_cache_dtype": "nvfp4"},
        "fp4_mx_block16": {"kv_cache_dtype": "fp4_mx_block16"},
        "fp4_draft": {"kv_cache_dtype": "fp8_e4m3", "speculative_draft_kv_cache_dtype": "nvfp4"},
        "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    }
    found = {
        kind: {name: outcome(resolve, **dtypes, **asked) for name, asked in movers.items()}
        for kind, dtypes in kinds.items()
    }
    packed = kinds["nvfp4"] | movers["hicache"] | {"attention_backend": "triton"}
    carried = {"nvfp4": packed, "nvfp4_to_storage": packed | {"hicache_storage_backend": "file"}}
    return found | {"host": {name: outcome(resolve, **asked) for name, asked in carried.items()}}


def retraction():
    """Bytes of some slots to the host and back into other slots, per stock pool."""
    from sglang.srt.mem_cache import memory_pool

    class PlainMLA(memory_pool.MLATokenToKVPoolFP4):
        _write_loc_dcp_span = 1  # no decode context parallelism

    def mla():
        pool = PlainMLA.__new__(PlainMLA)
        pool.dtype, pool.layer_num, pool.start_layer = FP4, 2, 0
        pool.cpu_offloading_chunk_size = 2
        pool.kv_buffer = [_bytes(7, 1, 32) for _ in range(2)]
        pool.kv_scale_buffer = [_bytes(7, 4) for _ in range(2)]
        return pool

    memory_pool.get_parallel = lambda: SimpleNamespace(attn_dcp_rank=0)

    def native():
        pool = _mha_pool(slots=16, dim=64)
        pool.k_scale_buffer = pool.v_scale_buffer = None
        for name in ("native_k_scale_buffer", "native_v_scale_buffer"):
            setattr(pool, name, [_bytes(2, 2, 8, 4) for _ in range(2)])
        return pool

    def buffers(pool):
        found = {name: value for name, value in vars(pool).items() if name.endswith("_buffer")}
        return {name: value for name, value in found.items() if value is not None}

    def row(name, buffer, slot):
        """One slot's bytes, by the layout's definition rather than by the code under test."""
        if not name.startswith("native"):
            return buffer[slot]
        page, token = divmod(slot, buffer.shape[2])
        if name == "native_k_scale_buffer":
            return buffer[page, :, token]
        group = buffer.shape[3] // 4
        first = token // 4 * 4
        scales = range(buffer.shape[3])
        order = [(first + j // group, j % group * 4 + token % 4) for j in scales]
        return torch.stack([buffer[page, :, t, j] for t, j in order], dim=-1)

    def round_trip(pool, source=(5, 1, 6), goal=(2, 3, 4)):
        copy = pool.get_cpu_copy(torch.tensor(source))
        held = {
            name: [[row(name, buffer, slot).clone() for slot in source] for buffer in layers]
            for name, layers in buffers(pool).items()
        }
        for layers in buffers(pool).values():
            for buffer in layers:
                buffer.random_(0, 256)
        others = {n: [b.clone() for b in bs] for n, bs in buffers(pool).items()}
        pool.load_cpu_copy(copy, torch.tensor(goal))
        slots = range(len(next(iter(buffers(pool).values()))[0]))
        return {
            name: all(
                torch.equal(row(name, layers[i], slot), was)
                for i, layer in enumerate(held[name])
                for slot, was in zip(goal, layer, strict=True)
            )
            and all(
                torch.equal(row(name, layers[i], slot), row(name, others[name][i], slot))
                for i in range(len(layers))
                for slot in slots
                if slot not in goal
            )
            for name, layers in buffers(pool).items()
        }

    def without_scales():
        pool = _mha_pool()
        copy = pool.get_cpu_copy(torch.tensor([1, 2]))[: pool.layer_num]
        pool.load_cpu_copy(copy, torch.tensor([3, 4]))
        return "loaded"

    return {
        "mha": outcome(round_trip, _mha_pool()),
        "mha_fp4_class": outcome(round_trip, _mha_pool(memory_pool.MHATokenToKVPoolFP4)),
        "mha_fp8": outcome(round_trip, _mha_pool(dtype=torch.float8_e4m3fn)),
        "mla": outcome(round_trip, mla()),
        "native": outcome(round_trip, native(), (5, 9, 14), (2, 11, 12)),
        "empty": outcome(round_trip, _mha_pool(), (), ()),
        "without_scales": outcome(without_scales),
    }


def scheduler_ready():
    """Scheduler.get_init_info with our proof passing, failing and absent, for NVFP4 and FP8 KV."""
    from sglang.srt.managers import scheduler as scheduler_module

    scheduler_module.get_serving = lambda: SimpleNamespace(grpc_port=None)
    asked = []
    scheduler = SimpleNamespace(
        max_total_num_tokens=7, max_req_input_len=3, startup_time=0, _hicache_l3_layout=dict
    )

    def ready(dtype, require_active):
        scheduler_module.get_model = lambda: SimpleNamespace(kv_cache_dtype=dtype)
        module = types.ModuleType("sglang_fp4kv.proof")
        module.require_active = require_active
        sys.modules["sglang_fp4kv.proof"] = module if require_active else None
        return scheduler_module.Scheduler.get_init_info(scheduler)["status"]

    def failing(scheduler):
        raise RuntimeError("the pool is not ours")

    return {
        "passing": outcome(ready, "nvfp4", asked.append),
        "asked_once": len(asked) == 1 and asked[0] is scheduler,
        "failing": outcome(ready, "nvfp4", failing),
        "absent": outcome(ready, "nvfp4", None),
        "fp8": outcome(ready, "fp8_e4m3", failing),
    }


if __name__ == "__main__":
    import sglang

    names = sys.argv[1:]
    results = {name: outcome(globals()[name]) for name in names}
    print(json.dumps({"sglang": sglang.__path__[0], **results}))
