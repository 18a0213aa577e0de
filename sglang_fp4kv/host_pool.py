"""The NVFP4 pool's copy in host memory, for --enable-hierarchical-cache: codes and block scales together.

SGLang's host pool for plain K and V (srt/mem_cache/pool_host/mha.py @ 0.5.23) moves rows of any width, by
slot. Two of them are one NVFP4 host pool: one for the codes and one for the scales, under the same slots,
sizes, layout and I/O backend. Global scales stay where they are: they belong to layers, not to slots.
"""

import torch
from msgspec.structs import replace
from sglang.srt.mem_cache.device_pool_info import (
    KVBuffers,
    KVScaleLayout,
    MHABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_memory

from sglang_fp4kv import formats
from sglang_fp4kv.served import HOST_KERNEL_ROW_BYTES, HOST_LAYOUTS


def codes_info(pool):
    """How the host sees an NVFP4 pool: rows of ``head_dim // 2`` bytes a head, with scales beside them."""
    info = MHABufferInfo(
        buffers=pool._mha_buffers(),
        page_size=pool.page_size,
        head_num=pool.head_num,
        head_dim=formats.packed_bytes(pool.head_dim),
        v_head_dim=formats.packed_bytes(pool.v_head_dim),
        dtype=torch.uint8,
        device=pool.k_buffer[0].device,
        scales=pool._mha_scale_buffers(),
    )
    info.validate()
    return info


def is_packed(info):
    """Whether ``info`` is that of an NVFP4 pool read by Triton, from :func:`codes_info`."""
    linear = info.scales is not None and info.scales.layout == KVScaleLayout.TOKEN
    return linear and info.dtype == torch.uint8


class NVFP4TokenToKVPoolHost(MHATokenToKVPoolHost):
    """K and V of every layer in NVFP4 on the host.

    Sizes: a token takes ``formats.bytes_per_token`` bytes, as on the device.
    Raises: ValueError when the device pool's rows are not codes with one scale for each block of 16, the
    layout is none of HOST_LAYOUTS, or the I/O backend cannot copy rows as short as a token's scales;
    NotImplementedError when a draft's layers are to be packed into it.
    """

    def __init__(
        self, buffer_info, *args, draft_buffer_infos=(), pool_label="kv", host_token_capacity=None, **kwargs
    ):
        if draft_buffer_infos:
            raise NotImplementedError("an NVFP4 host pool takes no draft layers, whose rows are not NVFP4")
        self._scales_info = _scales_info(buffer_info)
        self._head_dim = formats.packed_head_dim(buffer_info.head_dim)
        super().__init__(
            replace(buffer_info, scales=None),
            *args,
            pool_label=pool_label,
            host_token_capacity=host_token_capacity,
            **kwargs,
        )
        # The codes' pool decided how many slots there are; staging buffers are of another width.
        kwargs.pop("write_back_staging", None)
        self.scales = MHATokenToKVPoolHost(
            self._scales_info,
            *args,
            pool_label=f"{pool_label} scales",
            host_token_capacity=self.size,
            **kwargs,
        )
        # With it indices stay on the host, so either both pools take them there or none does.
        both = self.can_use_write_back_jit and self.scales.can_use_write_back_jit
        self.can_use_write_back_jit = self.scales.can_use_write_back_jit = both

    def _allocate_host_buffer(self):
        # Refused before host memory is taken and registered with CUDA, which would outlive a failed constructor.
        if self.layout not in HOST_LAYOUTS:
            raise ValueError(f"NVFP4 KV on the host needs one of the layouts {HOST_LAYOUTS}, got {self.layout!r}")
        self._check_scale_rows()
        super()._allocate_host_buffer()

    def _check_scale_rows(self):
        row = self.head_num * formats.scale_bytes(self._head_dim)
        backend = get_memory().hicache_io_backend
        if self._transfer_device.type == "cuda" and backend == "kernel" and row % HOST_KERNEL_ROW_BYTES:
            raise ValueError(
                f"a token's block scales take {row} bytes a layer, and --hicache-io-backend kernel copies "
                f"multiples of {HOST_KERNEL_ROW_BYTES}; use --hicache-io-backend direct"
            )

    def get_size_per_token(self):
        return formats.bytes_per_token(self._head_dim, self.head_num, self.layer_num)

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend):
        for copy in (super(), self.scales):
            copy.backup_from_device_all_layer(device_pool, host_indices, device_indices, io_backend)

    def load_to_device_per_layer(
        self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False
    ):
        for copy in (super(), self.scales):
            copy.load_to_device_per_layer(
                device_pool, host_indices, device_indices, layer_id, io_backend, is_draft=is_draft
            )

    def destroy(self):
        self.scales.destroy()
        super().destroy()

    # Storage behind the host (L3) takes a page out of one buffer, where the scales are not.

    def get_data_page(self, index, flat=True):
        raise _no_storage()

    def get_dummy_flat_data_page(self):
        raise _no_storage()

    def set_from_flat_data_page(self, index, data_page):
        raise _no_storage()

    def get_page_buffer_meta(self, indices):
        raise _no_storage()

    def get_split_heads_page_buffer_meta(self, indices, split_factor):
        raise _no_storage()


def _no_storage():
    return NotImplementedError(
        "NVFP4 KV cannot go from the host to storage: a page there is codes without their block scales"
    )


def _scales_info(info):
    """The scales of ``info`` as rows of their own.

    Raises: ValueError when they do not belong to its codes.
    """
    if not is_packed(info):
        raise ValueError(f"an NVFP4 host pool needs codes with a scale a block, got {info.dtype} rows")
    width = formats.scale_bytes(formats.packed_head_dim(info.head_dim))
    wrong = [
        tuple(scales.shape)
        for codes, scales in zip((*info.buffers.k, *info.buffers.v), (*info.scales.k, *info.scales.v), strict=True)
        if tuple(scales.shape) != (codes.shape[0], info.head_num, width) or scales.dtype != torch.uint8
    ]
    if wrong:
        raise ValueError(f"block scales of shape {wrong[0]} do not belong to {info.head_num} heads of {width} blocks")

    def pointers(buffers):
        return torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device=info.device)

    return replace(
        info,
        buffers=KVBuffers(
            k=info.scales.k,
            v=info.scales.v,
            k_data_ptrs=pointers(info.scales.k),
            v_data_ptrs=pointers(info.scales.v),
            layout=info.buffers.layout,
        ),
        head_dim=width,
        v_head_dim=width,
        scales=None,
    )
