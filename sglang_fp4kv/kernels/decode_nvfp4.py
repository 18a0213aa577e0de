"""Split-KV attention over a packed NVFP4 pool: decode and speculative verify in one call."""

import torch

from sglang_fp4kv.formats import check_global_scale
from sglang_fp4kv.kernels._call import (
    AttentionBuffers,
    AttentionCall,
    attention_buffers,
    check_plan,
    partial_rows,
)
from sglang_fp4kv.kernels._check import (
    check_index,
    check_logit_cap,
    check_mask,
    check_out,
    check_pool_side,
    check_rows,
)
from sglang_fp4kv.kernels._plan import AttentionPlan, device_limits, plan_attention
from sglang_fp4kv.kernels.tiled_nvfp4 import launch_tiled


def whole_words(*sides: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 4 bytes, as the fragment kernels read them."""
    return all(
        x.data_ptr() % 4 == 0 and all(stride % 4 == 0 for stride in x.stride()[:-1]) for x in sides
    )


def attention_nvfp4(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scales: torch.Tensor,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    q_per_req: int,
    block_slots: torch.Tensor | None = None,
    k_global_scale: float,
    v_global_scale: float,
    sm_scale: float,
    logit_cap: float = 0.0,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    sliding_window_size: int = -1,
    window_kv_offsets: torch.Tensor | None = None,
    causal: bool = True,
    plan: AttentionPlan | None = None,
    buffers: AttentionBuffers | None = None,
) -> torch.Tensor:
    """Attend from q_per_req rows a request to its packed keys and values; out is overwritten.

    Decode: q_per_req 1, no block_slots, kv_indices list the current token too. Verify: kv_indices
    list the prefix, block_slots the slots the block's own K and V were just written to; row j sees
    the prefix and tokens 0..j of the block, or what custom_mask says. Without block_slots and with
    q_per_req > 1 the rows are the last q_per_req listed keys.

    Sizes: B requests, Q q_per_req, R = B * Q rows, Hq query heads, H KV heads, D head dim, S slots
      q, out             [R, Hq, D]      bf16 | fp16 | fp32   last dim contiguous
      k_codes, v_codes   [S, H, D//2]    uint8                low nibble = even element
      k_scales, v_scales [S, H, D//16]   uint8 | float8_e4m3  no sign bit, not NaN in listed slots
      kv_indptr          [>= B+1]        int32 | int64
      kv_indices         [>= kv_indptr[B]] int32 | int64      slots; below 0 = not visible
      block_slots        [R]             int32 | int64        slots; below 0 = not visible
      custom_mask        flat            bool | uint8         row j of request i at mask_indptr[i] +
        j * (off + prefix + Q), off = window_kv_offsets[i] or 0; entry off + n is key n. Read for
        the block alone: the prefix is always visible (SGLang's skip_prefix_custom_mask)
      sliding_window_size  keys more than this far back are hidden; 0 or less = no window. With a
        window kv_indices may list the last keys of the prefix only
    Kernels: decode_fragments for up to 8 query rows a KV head, verify_fragments for more (16-bit q,
      head dim 64, 128 or 256, whole-word pools), tiled_nvfp4 for the rest; plan_attention decides
    Numerics: fp32 scores, softmax and sums; tiles decoded exactly to fp16, query rows scaled by a
      power of two to fp16, weights fp16 (all three fp32 for fp32 q); both global scales and
      logit_cap in fp32 after the dots; partial results fp32; no visible key gives zeros. Slots not
      listed are never read
    Runs on: sm_80; CUDA-graph safe: yes; allocates partial results unless buffers are passed
    Raises: ValueError for shapes, dtypes and strides that do not fit (the message names the value)
    Reference: tests/reference_attention.py over codec.decode, error at most twice BF16 attention's
    Source: split-KV decoding (Flash-Decoding); mask layout of srt Triton backend @ sglang 0.5.23
    """
    check_rows("q", q)
    check_out(out, q)
    rows, num_q_heads, head_dim = q.shape
    k_scales = check_pool_side("k", k_codes, k_scales, num_q_heads, head_dim)
    v_scales = check_pool_side("v", v_codes, v_scales, num_q_heads, head_dim)
    num_kv_heads = k_codes.shape[1]
    if v_codes.shape[1] != num_kv_heads:
        raise ValueError(f"v_codes must have {num_kv_heads} heads, got {v_codes.shape[1]}")
    if q_per_req < 1 or rows % q_per_req:
        raise ValueError(f"q_per_req must divide the {rows} rows of q, got {q_per_req}")
    batch = rows // q_per_req
    check_index("kv_indptr", kv_indptr, at_least=batch + 1)
    check_index("kv_indices", kv_indices)
    if block_slots is not None:
        check_index("block_slots", block_slots, rows)
    if custom_mask is not None and block_slots is None:
        raise ValueError("custom_mask needs block_slots, got None")
    custom_mask = check_mask(custom_mask, mask_indptr, window_kv_offsets, batch)
    k_global_scale = check_global_scale(k_global_scale)
    v_global_scale = check_global_scale(v_global_scale)
    check_logit_cap(logit_cap)
    if batch == 0:
        return out

    limits = device_limits(q.device)
    sides = (k_codes, k_scales, v_codes, v_scales)
    if plan is None:
        plan = plan_attention(
            batch,
            q_per_req,
            num_q_heads,
            num_kv_heads,
            head_dim,
            kv_indices.numel(),
            limits,
            fragments=q.dtype != torch.float32 and whole_words(*sides),
        )
    if buffers is None:
        parts = partial_rows(plan, q_per_req, num_q_heads, num_kv_heads)
        buffers = attention_buffers(parts, batch, head_dim, q.device)
    check_plan(plan, buffers, batch, q_per_req, num_q_heads, num_kv_heads, head_dim)

    has_offsets = (
        custom_mask is not None and sliding_window_size > 0 and window_kv_offsets is not None
    )
    call = AttentionCall(
        q=q,
        out=out,
        sides=sides,
        lists=(
            kv_indptr,
            kv_indices,
            kv_indices if block_slots is None else block_slots,
            k_codes if custom_mask is None else custom_mask,
            kv_indptr if custom_mask is None else mask_indptr,
            window_kv_offsets if has_offsets else kv_indptr,
        ),
        visibility={
            "HAS_BLOCK": block_slots is not None,
            "USE_MASK": custom_mask is not None,
            "HAS_OFFSETS": has_offsets,
            "CAUSAL": causal,
            "WINDOW": max(sliding_window_size, 0),
            "LOGIT_CAP": float(logit_cap),
        },
        batch=batch,
        q_per_req=q_per_req,
        k_global_scale=k_global_scale,
        v_global_scale=v_global_scale,
        sm_scale=sm_scale,
    )
    if plan.kind == "tiled":
        launch_tiled(call, plan, buffers, limits)
    else:
        # Imported where a GPU runs it: Gluon has no interpreter.
        from sglang_fp4kv.kernels.fragments_nvfp4 import launch_fragments

        launch_fragments(call, plan, buffers, limits)
    return out
