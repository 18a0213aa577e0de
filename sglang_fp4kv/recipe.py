"""The ``nvfp4`` KV recipe as SGLang sees it, with a packed read for the Triton backend.

Subclasses SGLang's own recipe (srt/layers/quantization/fp4_kv_cache_quant_method.py @ 0.5.23).
For every backend pair other than Triton with Triton it behaves exactly as the stock class.
"""

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    KVCacheAttentionAccess,
    KVCacheAttentionAccessKind,
    KVCacheAttentionPhase,
    KVCacheBackendMatcher,
    NVFP4KVCacheMethod,
)
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_fp4kv import formats
from sglang_fp4kv.checkpoint_scales import checkpoint_folder
from sglang_fp4kv.scales import promised_scales, read_global_scales
from sglang_fp4kv.served import BACKEND

_PACKED_ACCESSES = tuple(
    KVCacheAttentionAccess(
        phase=phase,
        kind=KVCacheAttentionAccessKind.NATIVE_FP4,
        backend_matcher=KVCacheBackendMatcher(exact=frozenset({BACKEND})),
        storage_dtype=torch.uint8,
        attention_kv_dtype=getattr(torch, "float4_e2m1fn_x2", None),
        scale_recipe="nvfp4",
    )
    for phase in (KVCacheAttentionPhase.PREFILL, KVCacheAttentionPhase.DECODE)
)


class PackedNVFP4Method(NVFP4KVCacheMethod):
    """NVFP4 with token-linear scales and no workspace when Triton reads it.

    Sizes: per token, layer and side ``formats.side_bytes(head_dim)`` bytes a KV head; nothing else.
    Global scales: one float per model layer and side, fixed once loaded (they are baked into CUDA
    graphs), see :mod:`sglang_fp4kv.scales`.
    """

    packed = False
    scales = None

    def attention_accesses(self):
        return (*super().attention_accesses(), *_PACKED_ACCESSES)

    def configure_attention_backends(self, prefill_backend, decode_backend):
        self.packed = prefill_backend == BACKEND and decode_backend == BACKEND
        if self.packed:
            self.use_trtllm_gen_native_scale_layout = False
        super().configure_attention_backends(prefill_backend, decode_backend)

    def load_scales_from_model(self, model_runner):
        """Reads every attention layer's scales, wherever it sits in the module tree.

        Raises: ValueError from :func:`sglang_fp4kv.scales.read_global_scales`, or when the model
        has no attention layer.
        """
        if not self.packed:
            super().load_scales_from_model(model_runner)
            return
        from sglang.srt.runtime_context import get_model

        model = getattr(model_runner, "model", model_runner)
        layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no attention layer to read KV scales from"
            )
        served = get_model()
        folder = checkpoint_folder(served.model_path, served.revision, served.download_dir)
        self.scales = read_global_scales(layers, folder, promised_scales(model))
        size = max(self.scales.k) + 1
        self.k_scales_float = [self.scales.k.get(i, 1.0) for i in range(size)]
        self.v_scales_float = [self.scales.v.get(i, 1.0) for i in range(size)]
        self.k_scales_gpu = torch.tensor(self.k_scales_float, device=self.device)
        self.v_scales_gpu = torch.tensor(self.v_scales_float, device=self.device)

    def compute_cell_size(self, head_num, head_dim, num_layers, kv_size):
        """Bytes a token costs in ``num_layers`` layers, K and V, block scales included."""
        if not self.packed:
            return super().compute_cell_size(head_num, head_dim, num_layers, kv_size)
        return formats.bytes_per_token(head_dim, head_num, num_layers)

    def create_buffers(self, size, head_num, head_dim, layer_num, device):
        """Zeroed code and scale buffers of ``size`` slots; zero scales keep unowned slots finite."""
        if not self.packed:
            return super().create_buffers(size, head_num, head_dim, layer_num, device)
        formats.check_head_dim(head_dim)

        def zeros(width):
            return [
                torch.zeros((size, head_num, width), dtype=torch.uint8, device=device)
                for _ in range(layer_num)
            ]

        codes, scales = formats.packed_bytes(head_dim), formats.scale_bytes(head_dim)
        return {
            "k_buffer": zeros(codes),
            "v_buffer": zeros(codes),
            "k_scale_buffer": zeros(scales),
            "v_scale_buffer": zeros(scales),
            "store_dtype": torch.uint8,
        }

    def quantize_and_store(self, *args, **kwargs):
        if self.packed:
            raise RuntimeError("packed NVFP4 writes go through NVFP4TokenToKVPool.set_kv_buffer")
        super().quantize_and_store(*args, **kwargs)
