"""What the patch series calls: refusals and scale copies for FP4 KV pools.

Each function is called from one or two lines of patched SGLang 0.5.23 (patches/), always behind a
check that FP4 KV is in use, so a server without FP4 never imports this module. Importing it imports
nothing of SGLang's.
"""

import torch

_WRITER = "set_kv_buffer_prefix_valid"


def refuse_prefix_valid_commit(pool):
    """Called where MHATokenToKVPool's own prefix-valid commit meets a pool in FP4.

    Raises: NotImplementedError always; that writer knows no block scales.
    """
    raise NotImplementedError(
        f"prefix-valid commit: {type(pool).__name__} holds {pool.dtype} and has no writer of its own "
        "that quantizes the committed rows and stores their block scales. "
        "Use --speculative-draft-kv-cache-dtype fp8_e4m3."
    )


def require_prefix_valid_writer(pool):
    """Called when the DFLASH worker has built its draft pool, before anything is served.

    Raises: NotImplementedError when an FP4 pool only has MHATokenToKVPool's writer, or none.
    """
    owner = next((c for c in type(pool).__mro__ if _WRITER in vars(c)), None)
    if owner is None or owner.__name__ == "MHATokenToKVPool":
        refuse_prefix_valid_commit(pool)


def refuse_scale_loss(cfg):
    """Called at the end of argument resolution when the target's or the draft's KV is FP4.

    ``cfg`` is SGLang's resolving view of the server arguments.
    Raises: ValueError naming every option that would copy FP4 codes without their block scales.
    """
    movers = {
        "--enable-hierarchical-cache": cfg.enable_hierarchical_cache and not _on_the_host(cfg),
        "--enable-lmcache": cfg.enable_lmcache,
        "--enable-flexkv": cfg.enable_flexkv,
        f"--radix-cache-backend {cfg.radix_cache_backend}": cfg.radix_cache_backend == "flexkv",
        "--enable-unified-cache-external-linker": cfg.enable_unified_cache_external_linker,
        f"--disaggregation-mode {cfg.disaggregation_mode}": cfg.disaggregation_mode != "null",
        "--enable-pd-role-switch": cfg.enable_pd_role_switch,
    }
    asked = [flag for flag, on in movers.items() if on]
    if asked:
        raise ValueError(
            f"FP4 KV (--kv-cache-dtype {cfg.kv_cache_dtype}, draft "
            f"{cfg.speculative_draft_kv_cache_dtype}) cannot be used with {', '.join(asked)}: "
            "KV is moved there without its block scales, so what comes back decodes to other values."
        )


def _on_the_host(cfg):
    """Whether the hierarchical cache's host pool is ours, which takes the scales along."""
    from sglang_fp4kv.resolution import uses_packed_read

    return uses_packed_read(cfg) and cfg.hicache_storage_backend is None


def append_scale_copies(pool, indices, kv_cache_cpu):
    """Appends one more entry to a stock FP4 pool's host copy: the scales of the slots ``indices``.

    Sizes: N slots
      indices       [N] int64
      kv_cache_cpu  list, one entry a layer; a last one is appended, which the stock loader skips:
                    per layer the scale tensors [N, ...] in the order of _scale_sides
    """
    kv_cache_cpu.append(
        [
            [read(buffer, indices).to("cpu", non_blocking=True) for buffer, read, _ in sides]
            for sides in _scale_sides(pool)
        ]
    )


def restore_scale_copies(pool, indices, kv_cache_cpu):
    """Writes back what append_scale_copies took, into the slots ``indices`` [N].

    Raises: ValueError when the copy has no scales or another number of slots.
    """
    layers = _scale_sides(pool)
    held = kv_cache_cpu[-1] if len(kv_cache_cpu) == len(layers) + 1 else [[]] * len(layers)
    for sides, copies in zip(layers, held, strict=True):
        if [len(values) for values in copies] != [len(indices)] * len(sides):
            raise ValueError(
                f"host copy of {type(pool).__name__} carries no block scales for {len(indices)} slots"
            )
        for (buffer, _, write), values in zip(sides, copies, strict=True):
            write(buffer, indices, values.to(buffer.device, non_blocking=True))


def _scale_sides(pool):
    """For each layer of a stock FP4 pool: its (scale buffer, reader, writer) triples."""
    kinds = {
        "k_scale_buffer": (_read_slots, _write_slots),
        "v_scale_buffer": (_read_slots, _write_slots),
        "kv_scale_buffer": (_read_slots, _write_slots),  # MLA keeps K and V in one
        "native_k_scale_buffer": (_read_native_k, _write_native_k),
        "native_v_scale_buffer": (_read_native_v, _write_native_v),
    }
    held = [(getattr(pool, name, None), *ways) for name, ways in kinds.items()]
    held = [entry for entry in held if entry[0] is not None]
    return [[(buffers[layer], *ways) for buffers, *ways in held] for layer in range(pool.layer_num)]


def _read_slots(buffer, slots):
    return buffer[slots]


def _write_slots(buffer, slots, values):
    buffer[slots] = values


# SM100's native layout is [pages, heads, page, scales]: K plain inside a page, V interleaved over
# groups of four tokens (_move_nvfp4_native_scales_kernel in srt/layers/quantization/nvfp4_kv_cache.py).


def _native_k_index(buffer, slots):
    _, heads, page_size, scales = buffer.shape
    slots = slots.to(buffer.device).view(-1, 1, 1)
    head = torch.arange(heads, device=buffer.device).view(1, -1, 1)
    scale = torch.arange(scales, device=buffer.device).view(1, 1, -1)
    return slots // page_size, head, slots % page_size, scale


def _native_v_index(buffer, slots):
    page, head, token, scale = _native_k_index(buffer, slots)
    group = buffer.shape[3] // 4
    return page, head, token // 4 * 4 + scale // group, scale % group * 4 + token % 4


def _read_native_k(buffer, slots):
    return buffer[_native_k_index(buffer, slots)]


def _write_native_k(buffer, slots, values):
    buffer[_native_k_index(buffer, slots)] = values


def _read_native_v(buffer, slots):
    return buffer[_native_v_index(buffer, slots)]


def _write_native_v(buffer, slots, values):
    buffer[_native_v_index(buffer, slots)] = values
