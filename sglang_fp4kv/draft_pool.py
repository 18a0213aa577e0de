"""The drafter's own KV pool: plain FP8 or BF16 rows, never FP4.

A drafter next to an NVFP4 target writes only the accepted rows of each block. That commit is one
kernel here, with no temporary and without changing the caller's K and V.
"""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_fp4kv import formats
from sglang_fp4kv.kernels.commit_prefix import commit_prefix_plain

# The dtypes a drafter's pool may have, and their names in formats.
DTYPES = {torch.float8_e4m3fn: "fp8_e4m3", torch.bfloat16: "bf16", torch.float16: "float16"}


class DraftTokenToKVPool(MHATokenToKVPool):
    """K and V of the drafter's layers in its own dtype.

    Raises: ValueError when the dtype is not FP8 E4M3, BF16 or FP16, or a quantized recipe is given.
    """

    def __init__(self, size, page_size, dtype, *args, quant_method=None, **kwargs):
        if dtype not in DTYPES or quant_method is not None:
            raise ValueError(
                f"the drafter's pool must be one of {[str(d) for d in DTYPES]}, got {dtype}"
                + (f" with recipe {quant_method.name!r}" if quant_method is not None else "")
            )
        super().__init__(size, page_size, dtype, *args, **kwargs)

    @property
    def bytes_per_token(self):
        """Bytes one token costs in this pool, K and V of all layers."""
        return formats.bytes_per_token(
            self.head_dim,
            self.head_num,
            self.layer_num,
            dtype=DTYPES[self.dtype],
            v_head_dim=self.v_head_dim,
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
          k_scale, v_scale  None, or the layer's scales; an FP8 pool stores value / scale
        """
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        local = layer_id - self.start_layer
        commit_prefix_plain(
            cache_k,
            cache_v,
            loc_2d,
            commit_lens,
            self.k_buffer[local].view(self.dtype),
            self.v_buffer[local].view(self.dtype),
            k_scale=k_scale,
            v_scale=v_scale,
        )
