"""Copies between the device's pool and the host's on a CPU, where SGLang has kernels for GPUs only.

SGLang's I/O backend "direct" calls three functions of sgl_kernel (imported in
srt/mem_cache/pool_host/mha.py @ 0.5.23 where there is CUDA, ROCm or XPU). Here are the same copies in torch.
"kernel", the default, has none: a launch on this platform needs --hicache-io-backend direct.
"""


def install():
    """Gives SGLang's host pools these copies, and host memory that is not registered with CUDA."""
    from sglang.srt.mem_cache.pool_host import common, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    for copy in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
        setattr(mha, copy.__name__, copy)


def allocate(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    return allocator.allocate(dims, dtype=dtype, device=device)


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Rows ``src_indices`` of every source into ``dst_indices`` of its destination, [slots, heads, width]."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """One layer from [pages, layers, page_size, heads, width] into [slots, heads, width]."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """All layers, first those of K then those of V, into [pages, layers, page_size, heads, width] each."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        side, layer = divmod(number, layers)
        dst_ptrs[side][dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]
