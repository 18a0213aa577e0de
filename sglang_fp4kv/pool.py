"""The NVFP4 token-to-KV pool: packed codes and block scales, no dequantized copy.

Built by SGLang's own KVCacheConfigurator (srt/mem_cache/kv_cache_configurator.py @ 0.5.23) through
the hook in :mod:`sglang_fp4kv.integration`.
"""

from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from sglang.srt.platforms import current_platform

from sglang_fp4kv import formats
from sglang_fp4kv.kernels.commit_prefix import commit_prefix_nvfp4
from sglang_fp4kv.kernels.store_nvfp4 import store_nvfp4
from sglang_fp4kv.recipe import PackedNVFP4Method


@dataclass(frozen=True)
class PackedLayer:
    """One layer's cache as the kernels take it.

    Sizes: S slots, H KV heads, D head dim
      k_codes, v_codes    [S, H, D//2]   uint8   low nibble = even element
      k_scales, v_scales  [S, H, D//16]  uint8   E4M3 bits
      k_global_scale, v_global_scale     float   unitless, multiply when decoding
    """

    k_codes: torch.Tensor
    k_scales: torch.Tensor
    v_codes: torch.Tensor
    v_scales: torch.Tensor
    k_global_scale: float
    v_global_scale: float


class NVFP4TokenToKVPool(MHATokenToKVPool):
    """K and V of every layer in NVFP4, addressed by slot.

    Raises: ValueError when the recipe is not the packed one, K and V differ in width, head_dim is
    not a multiple of 16, or a layout is asked for that the kernels do not read.
    """

    def __init__(self, *args, quant_method=None, **kwargs):
        if not isinstance(quant_method, PackedNVFP4Method) or not quant_method.packed:
            raise ValueError(
                f"NVFP4TokenToKVPool needs the packed NVFP4 recipe, got {type(quant_method).__name__}"
            )
        super().__init__(*args, quant_method=quant_method, **kwargs)

    def _create_buffers(self):
        formats.check_head_dim(self.head_dim)
        if self.v_head_dim != self.head_dim:
            raise ValueError(
                "NVFP4 KV needs K and V of one width, got "
                f"head_dim={self.head_dim} and v_head_dim={self.v_head_dim}"
            )
        if self.kv_cache_layout != "nhd":
            raise ValueError(f"NVFP4 KV reads the nhd layout only, got {self.kv_cache_layout!r}")
        super()._create_buffers()

    @property
    def bytes_per_token(self):
        """Bytes one token costs in this pool, K and V of all layers."""
        return formats.bytes_per_token(self.head_dim, self.head_num, self.layer_num)

    def _model_layer_id(self, local_layer_id):
        return self.model_layer_ids[local_layer_id]

    def packed_layer(self, layer_id):
        """The packed buffers of ``layer_id`` (the id this pool is asked with) and its scales."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return self._packed_layer(layer_id - self.start_layer)

    def _packed_layer(self, local):
        model_layer = self._model_layer_id(local)
        return PackedLayer(
            self.k_buffer[local],
            self.k_scale_buffer[local],
            self.v_buffer[local],
            self.v_scale_buffer[local],
            self.quant_method.k_scales_float[model_layer],
            self.quant_method.v_scales_float[model_layer],
        )

    # Codes, never values: whoever needs values reads them tile by tile in a kernel.
    def _get_key_buffer(self, layer_id):
        return self.k_buffer[layer_id - self.start_layer]

    def _get_value_buffer(self, layer_id):
        return self.v_buffer[layer_id - self.start_layer]

    def _local_layer(self, layer, layer_id_override):
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        return layer_id - self.start_layer

    def set_kv_buffer(
        self,
        layer,
        loc_info,
        cache_k,
        cache_v,
        k_scale=None,
        v_scale=None,
        layer_id_override=None,
        dcp_kv_mask=None,
    ):
        """Quantizes and writes K and V into their slots; the caller's tensors stay unchanged.

        Sizes: T tokens, H KV heads, D head dim
          loc_info          [T] int64 slots, or a KVWriteLoc; negative = skip
          cache_k, cache_v  [T, H, D] bf16 | fp16
        ``k_scale`` and ``v_scale`` are the layer's own, which the recipe read at load time; they are
        not used again here, so that writer and readers share one value.
        Raises: ValueError when ``dcp_kv_mask`` is given.
        """
        if dcp_kv_mask is not None:
            raise ValueError("NVFP4 KV does not support decode context parallelism (dcp_kv_mask)")
        loc, _, _ = unwrap_write_loc(loc_info)
        p = self._packed_layer(self._local_layer(layer, layer_id_override))
        store_nvfp4(
            cache_k,
            cache_v,
            loc,
            p.k_codes,
            p.v_codes,
            p.k_scales,
            p.v_scales,
            p.k_global_scale,
            p.v_global_scale,
        )

    def set_kv_buffer_prefix_valid(
        self,
        layer,
        loc_2d,
        commit_lens,
        cache_k,
        cache_v,
        k_scale=None,
        v_scale=None,
        layer_id_override=None,
    ):
        """Writes the first ``commit_lens[i]`` rows of request i's block.

        Sizes: B requests, N rows a block
          loc_2d            [B, N] int64     commit_lens  [B] int32
          cache_k, cache_v  [B*N, H, D] bf16 | fp16
        """
        p = self._packed_layer(self._local_layer(layer, layer_id_override))
        commit_prefix_nvfp4(
            cache_k,
            cache_v,
            loc_2d,
            commit_lens,
            p.k_codes,
            p.v_codes,
            p.k_scales,
            p.v_scales,
            p.k_global_scale,
            p.v_global_scale,
        )

    def get_cpu_copy(self, indices, mamba_indices=None, req_pool_index=None):
        """Codes and scales of the slots ``indices`` [N], on the host; see load_cpu_copy.

        A list by layer of lists by chunk of four tensors: K codes, K scales, V codes, V scales.
        """
        current_platform.synchronize()
        step = self.cpu_offloading_chunk_size
        copies = [
            [
                [buffer[indices[i : i + step]].to("cpu", non_blocking=True) for buffer in buffers]
                for i in range(0, len(indices), step)
            ]
            for buffers in self._layer_buffers()
        ]
        current_platform.synchronize()
        return copies

    def load_cpu_copy(self, kv_cache_cpu, indices, mamba_indices=None, req_pool_index=None):
        """Writes back what get_cpu_copy returned, into the slots ``indices`` [N].

        Raises: ValueError when the copy holds another number of slots or layers.
        """
        step = self.cpu_offloading_chunk_size
        held = [sum(len(chunk[0]) for chunk in layer) for layer in kv_cache_cpu]
        if held != [len(indices)] * self.layer_num:
            raise ValueError(
                f"host copy holds {held} slots by layer, the pool wants {len(indices)} in each of "
                f"{self.layer_num} layers"
            )
        current_platform.synchronize()
        for buffers, chunks in zip(self._layer_buffers(), kv_cache_cpu, strict=True):
            for number, chunk in enumerate(chunks):
                slots = indices[number * step : (number + 1) * step]
                for buffer, values in zip(buffers, chunk, strict=True):
                    buffer[slots] = values.to(buffer.device, non_blocking=True)
        current_platform.synchronize()

    def get_contiguous_buf_infos(self):
        """PD transfer would register codes without their scales.

        Raises: ValueError always.
        """
        raise ValueError("NVFP4 KV cannot be transferred between servers: PD registers no scales")

    def _mha_buffer_info(self):
        """What the hierarchical cache copies to and from the host; see sglang_fp4kv.host_pool."""
        from sglang_fp4kv.host_pool import codes_info

        return codes_info(self)

    def _layer_buffers(self):
        return zip(
            self.k_buffer, self.k_scale_buffer, self.v_buffer, self.v_scale_buffer, strict=True
        )


def find_packed_pool(pool):
    """The NVFP4 pool inside ``pool`` (itself, or the attention part of a hybrid), else None."""
    for candidate in (pool, getattr(pool, "full_kv_pool", None)):
        if isinstance(candidate, NVFP4TokenToKVPool):
            return candidate
    return None
