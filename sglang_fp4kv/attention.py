"""SGLang's Triton attention backend with every read taken from the packed NVFP4 pool.

Metadata (index lists, masks, CUDA-graph buffers) stays the stock backend's
(srt/layers/attention/triton_backend.py @ 0.5.23); the kernels are ours.
"""

import logging

import torch
from sglang.srt.layers.attention import triton_backend as stock
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, unwrap_write_loc

from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4
from sglang_fp4kv.kernels.extend_nvfp4 import extend_nvfp4
from sglang_fp4kv.pool import find_packed_pool
from sglang_fp4kv.prefill import PackedPrefill

logger = logging.getLogger(__name__)


# The name is the stock one on purpose: SGLang's DFLASH worker keys its verify-mask policy on
# type(backend).__name__ (srt/speculative/dflash_utils.py @ 0.5.23).
class TritonAttnBackend(stock.TritonAttnBackend):
    """Prefill, verify and decode over NVFP4 KV.

    Prefill reads a packed prefix and its own chunk in the model's dtype. Verify reads the draft
    block back from the pool, so that it sees exactly the K and V that plain decode would see.

    Raises: ValueError at construction for what the kernels do not serve (MLA, decode context
    parallelism, deterministic inference, diffusion LLM, sliding-window pools).
    """

    def __init__(self, model_runner, *args, **kwargs):
        super().__init__(model_runner, *args, **kwargs)
        refused = {
            "MLA": self.use_mla,
            "decode context parallelism": self.dcp_size > 1,
            "deterministic inference": self.enable_deterministic,
            "diffusion LLM decoding": self.dllm_attention is not None,
            "a sliding-window KV pool": self.use_sliding_window_kv_pool,
        }
        for what, present in refused.items():
            if present:
                raise ValueError(f"NVFP4 KV on the Triton backend does not serve {what}")
        # The stock class takes the width of the value buffer, which is packed here.
        pool = find_packed_pool(self.token_to_kv_pool)
        self.v_head_dim = pool.v_head_dim
        # Our kernels bring their own partial results; keep the stock ones from costing memory.
        self.max_kv_splits = 1
        self.static_kv_splits = True
        # Compiles and allocates here, before the first request; the scratch comes out of what
        # --mem-fraction-static leaves free, as the workspaces of SGLang's own backends do.
        self.prefill = PackedPrefill(
            self.num_head,
            pool.head_num,
            pool.head_dim,
            model_runner.dtype,
            self.device,
        )

    def _layer_options(self, layer, sinks, score_mod, aux_tensors):
        """Keyword arguments of both readers for ``layer``, and its index lists.

        Raises: ValueError for options the kernels do not have.
        """
        refused = {
            "attention sinks": sinks is not None,
            "score_mod": score_mod is not None or aux_tensors is not None,
            "a temperature length": layer.xai_temperature_len > 0,
            "cross attention": layer.is_cross_attention,
            f"attention type {layer.attn_type!r}": layer.attn_type != AttentionType.DECODER,
        }
        for what, present in refused.items():
            if present:
                raise ValueError(f"layer {layer.layer_id}: NVFP4 KV does not serve {what}")
        pool = self._pool_layer(layer)
        windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        meta = self.forward_metadata
        lists = (
            (meta.window_kv_indptr, meta.window_kv_indices)
            if windowed
            else (meta.kv_indptr, meta.kv_indices)
        )
        options = {
            "k_global_scale": pool.k_global_scale,
            "v_global_scale": pool.v_global_scale,
            "sm_scale": layer.scaling,
            "logit_cap": stock.logit_capping_mod(layer.logit_capping_method, layer.logit_cap),
        }
        return pool, lists, windowed, options

    def _pool_layer(self, layer):
        pool = self.token_to_kv_pool
        packed = find_packed_pool(pool)
        if pool is packed:
            return packed.packed_layer(layer.layer_id)
        # A pool of attention and recurrent layers: it waits for layers that are loaded from the host, and
        # counts the attention layers alone.
        pool._wait_for_layer(layer.layer_id)
        return packed.packed_layer(pool._transfer_full_attention_id(layer.layer_id))

    def _write(self, layer, forward_batch, k, v):
        loc_info = KVWriteLoc.for_batch(forward_batch)
        self.token_to_kv_pool.set_kv_buffer(layer, loc_info, k, v)
        return unwrap_write_loc(loc_info)[0]

    def forward_extend(
        self,
        q,
        k,
        v,
        layer,
        forward_batch,
        save_kv_cache=True,
        sinks=None,
        score_mod=None,
        aux_tensors=None,
    ):
        """Prefill of new tokens, or the drafted block of a verify step.

        Sizes: T tokens, Hq query heads, H KV heads, D head dim
          q  [T, Hq*D]   k, v  [T, H, D]   out  [T, Hq*D]   bf16 | fp16
        """
        if k is None or v is None:
            raise ValueError(
                f"layer {layer.layer_id}: NVFP4 KV does not serve layers that share another "
                "layer's K and V"
            )
        pool, (kv_indptr, kv_indices), windowed, options = self._layer_options(
            layer, sinks, score_mod, aux_tensors
        )
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = torch.empty_like(q)
        if save_kv_cache:
            slots = self._write(layer, forward_batch, k, v)
        else:
            slots = unwrap_write_loc(KVWriteLoc.for_batch(forward_batch))[0]

        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out_rows = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        meta = self.forward_metadata
        options |= {
            "custom_mask": meta.custom_mask,
            "mask_indptr": meta.mask_indptr,
            "sliding_window_size": layer.sliding_window_size if windowed else -1,
            "window_kv_offsets": meta.window_kv_offsets if windowed else None,
        }
        if forward_batch.forward_mode.is_target_verify():
            self._attend_block(rows, k, v, out_rows, pool, kv_indptr, kv_indices, slots, options)
        else:
            blocks = self._library_plan(rows, options, forward_batch)
            if blocks is None:
                self._attend_chunk(
                    rows, k, v, out_rows, pool, kv_indptr, kv_indices, slots, options
                )
            else:
                self._attend_through_library(
                    blocks, rows, k, v, out_rows, pool, kv_indices, options
                )
        return out

    def _attend_block(self, q, k, v, out, pool, kv_indptr, kv_indices, slots, options):
        """Verify: prefix and draft block alike come from the pool; ``k`` and ``v`` are not read."""
        if options["sliding_window_size"] >= 0:
            # The stock decode lists W keys of a window, the token's own among them, while extend
            # and verify look back W keys more. Verify has to see what decode would.
            options = {**options, "sliding_window_size": options["sliding_window_size"] - 1}
        attention_nvfp4(
            q,
            pool.k_codes,
            pool.k_scales,
            pool.v_codes,
            pool.v_scales,
            out,
            kv_indptr,
            kv_indices,
            q_per_req=self.forward_metadata.max_extend_len,
            block_slots=slots,
            **options,
        )

    def _library_plan(self, q, options, forward_batch):
        """PackedPrefill's plan for this batch; None when the packed kernel has to take it.

        From host values alone. SGLang's default prefill graphs (--cuda-graph-backend-prefill
        breakable) run attention as Python between the captured segments, with the live batch
        (srt/layers/radix_attention.py @ 0.5.23), so the library serves there too. What is captured
        or compiled itself (tc_piecewise) goes to the packed kernel: lengths change at replay.
        """
        if torch.compiler.is_compiling():
            return None
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        new_lens = forward_batch.extend_seq_lens_cpu
        known = prefix_lens is not None and new_lens is not None
        obstacles = {
            "lengths are not on the host": not known,
            "lengths of more rows than the batch has": known and sum(new_lens) > q.shape[0],
            "a sliding window": options["sliding_window_size"] >= 0,
            "a custom mask": options["custom_mask"] is not None,
            "a logit cap": options["logit_cap"] > 0,
            f"queries in {q.dtype}": q.dtype != self.prefill.dtype,
            "under CUDA-graph capture": q.is_cuda and torch.cuda.is_current_stream_capturing(),
        }
        for what, present in obstacles.items():
            if present:
                self.prefill.tell(what)
                return None
        return self.prefill.plan(prefix_lens, new_lens)

    def _attend_through_library(self, blocks, q, k, v, out, pool, kv_indices, options):
        """Prefill: the prefix decoded piece by piece, a library's attention over both parts."""
        self.prefill.run(
            blocks,
            q,
            k,
            v,
            out,
            pool.k_codes,
            pool.k_scales,
            pool.v_codes,
            pool.v_scales,
            kv_indices,
            k_global_scale=options["k_global_scale"],
            v_global_scale=options["v_global_scale"],
            sm_scale=options["sm_scale"],
        )

    def _attend_chunk(self, q, k, v, out, pool, kv_indptr, kv_indices, slots, options):
        """Prefill: the prefix comes from the pool, the chunk is ``k`` and ``v`` as computed."""
        extend_nvfp4(
            q,
            k,
            v,
            out,
            pool.k_codes,
            pool.k_scales,
            pool.v_codes,
            pool.v_scales,
            self.forward_metadata.qo_indptr,
            kv_indptr,
            kv_indices,
            max_extend_len=self.forward_metadata.max_extend_len,
            **options,
        )

    def forward_decode(
        self,
        q,
        k,
        v,
        layer,
        forward_batch,
        save_kv_cache=True,
        sinks=None,
        score_mod=None,
        aux_tensors=None,
    ):
        """One new token a request; its own K and V are read back from the pool.

        Sizes: B requests, Hq query heads, H KV heads, D head dim
          q  [B, Hq*D]   k, v  [B, H, D]   out  [B, Hq*D]   bf16 | fp16
        """
        pool, (kv_indptr, kv_indices), _, options = self._layer_options(
            layer, sinks, score_mod, aux_tensors
        )
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        out = torch.empty_like(q)
        if save_kv_cache:
            self._write(layer, forward_batch, k, v)
        attention_nvfp4(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.k_codes,
            pool.k_scales,
            pool.v_codes,
            pool.v_scales,
            out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            kv_indptr,
            kv_indices,
            q_per_req=1,
            **options,
        )
        return out
