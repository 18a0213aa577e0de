"""What serves the same attention shapes today: FlashInfer and SGLang's Triton kernels.

Each baseline takes the Inputs of bench_attention and returns its ways of making the call, by name;
a way is call(i) -> output over the i-th set of slots. The fastest way is what counts.

FlashInfer runs its FA2 kernels, as SGLang's flashinfer backend does (srt/layers/attention/
flashinfer_backend.py @ 0.5.23), over pages of one token and with split-KV planned for the lengths
timed. SGLang's Triton kernels get the number of splits its server would give them.
"""

import torch
from timing import DEVICE

from sglang_fp4kv import codec

WORKSPACE_BYTES = 512 << 20
SGLANG_MAX_SPLITS = 8  # --triton-attention-num-kv-splits when it is not given


def sglang_triton(x, dtype: torch.dtype) -> dict:
    return {"decode" if x.shape.kind == "decode" else "extend": _sglang_call(x, dtype)}


def _sglang_call(x, dtype):
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    shape, out = x.shape, torch.empty_like(x.q)
    k_pool, v_pool = x.plain(dtype)
    if shape.kind == "decode":
        splits = _sglang_splits(x)
        parts = (shape.requests, shape.heads, SGLANG_MAX_SPLITS)
        logits = torch.empty(*parts, shape.head_dim, device=DEVICE, dtype=torch.float32)
        lse = torch.empty(parts, device=DEVICE, dtype=torch.float32)
        use_pdl = torch.cuda.get_device_capability() >= (9, 0)

        def call(i):
            decode_attention_fwd(
                x.q, k_pool, v_pool, out, x.kv_indptr, x.prefix[i], logits, lse, splits,
                SGLANG_MAX_SPLITS, x.sm_scale, 1.0, 1.0, use_pdl=use_pdl,
            )  # fmt: skip
            return out

        return call

    own = [
        (k_pool[b].bfloat16(), v_pool[b].bfloat16()) if shape.kind == "verify" else (x.k, x.v)
        for b in x.block
    ]

    def call(i):
        extend_attention_fwd(
            x.q, *own[i], out, k_pool, v_pool, x.qo_indptr, x.kv_indptr, x.prefix[i],
            None, True, None, shape.rows, 1.0, 1.0, x.sm_scale,
        )  # fmt: skip
        return out

    return call


def _sglang_splits(x):
    """KV splits of each request, chosen by the kernel SGLang's server chooses them with."""
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    shape = x.shape
    lens = torch.full((shape.requests,), shape.context, device=DEVICE, dtype=torch.int32)
    splits = torch.empty_like(lens)
    get_num_kv_splits_triton[(1,)](
        splits,
        lens,
        shape.requests,
        1,
        shape.heads,
        shape.kv_heads,
        SGLANG_MAX_SPLITS,
        torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        MAX_NUM_SEQ=256,
    )
    return splits


def flashinfer_paged(x, dtype: torch.dtype) -> dict:
    """dtype uint8: FlashInfer's own NVFP4 read of the same bytes.

    Decode is tried through both wrappers; they launch the same kernels under different plans.
    """
    sides, lists, lens, scales = _flashinfer_pool(x, dtype)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    wrappers = {"prefill": _prefill_wrapper}
    if x.shape.kind == "decode":
        wrappers["decode"] = _decode_wrapper
    return {
        name: _flashinfer_call(
            x, [make(x, workspace, lens, lists[i], dtype) for i in range(x.copies)], sides, scales
        )
        for name, make in wrappers.items()
    }


def _flashinfer_call(x, wrappers, sides, scales):
    out = torch.empty_like(x.q)

    def call(i):
        wrappers[i].run(x.q, sides, out=out, **scales)
        return out

    return call


def _prefill_wrapper(x, workspace, lens, slots, dtype):
    import flashinfer

    shape = x.shape
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        x.qo_indptr, lens, slots, x.ones, shape.heads, shape.kv_heads, shape.head_dim, 1,
        causal=True, sm_scale=x.sm_scale, q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    return wrapper


def _decode_wrapper(x, workspace, lens, slots, dtype):
    import flashinfer

    shape = x.shape
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        lens, slots, x.ones, shape.heads, shape.kv_heads, shape.head_dim, 1,
        sm_scale=x.sm_scale, q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    return wrapper


def _flashinfer_pool(x, dtype):
    """K and V pages, slot lists by copy, their indptr, and the scale arguments of a run.

    A prefill's chunk is put behind the pool, in the pool's format: FlashInfer reads it from there.
    """
    pool, packed = x.pool, dtype == torch.uint8
    sides = (pool.k_codes, pool.v_codes) if packed else x.plain(dtype)
    scales = pool.k_scales, pool.v_scales
    lists, lens = x.all, x.all_indptr
    if x.shape.kind == "prefill":
        own = torch.arange(x.k.shape[0], device=DEVICE) + pool.k_codes.shape[0]
        lists = torch.cat((x.prefix, own.expand(x.copies, -1)), 1)
        lens = x.kv_indptr + x.qo_indptr  # one request
        chunk = x.k, x.v
        if packed:
            global_scales = pool.k_global_scale, pool.v_global_scale
            encoded = [codec.encode(c, g) for c, g in zip(chunk, global_scales, strict=True)]
            chunk = [codes for codes, _ in encoded]
            scales = [torch.cat((s, e)) for s, (_, e) in zip(scales, encoded, strict=True)]
        sides = [torch.cat((s, c.to(s.dtype))) for s, c in zip(sides, chunk, strict=True)]
    arguments = {}
    if packed:
        arguments = {
            "kv_cache_sf": tuple(s[:, None].view(torch.float8_e4m3fn) for s in scales),
            "k_scale": pool.k_global_scale,
            "v_scale": pool.v_global_scale,
        }
    return tuple(s[:, None] for s in sides), lists.int(), lens, arguments


FLASHINFER = {
    "flashinfer_bf16": lambda x: flashinfer_paged(x, torch.bfloat16),
    "flashinfer_fp8": lambda x: flashinfer_paged(x, torch.float8_e4m3fn),
    "flashinfer_nvfp4": lambda x: flashinfer_paged(x, torch.uint8),
}
SGLANG = {
    "sglang_triton_bf16": lambda x: sglang_triton(x, torch.bfloat16),
    "sglang_triton_fp8": lambda x: sglang_triton(x, torch.float8_e4m3fn),
}
BASELINES = FLASHINFER | SGLANG
