"""Gated-delta layers beside packed KV: decode keeps the states that verify would keep.

SGLang decodes such a layer by a kernel that rounds beta to the model's dtype and verifies by one that does not
(fused_recurrent_gated_delta_rule_packed_decode and fused_sigmoid_gating_delta_rule_update @ 0.5.23), so the
states of a drafted and an undrafted run part at the first token, by 2^-9 of what each token writes. The second
kernel serves decode as well; it is SGLang's own other decode path, one launch a layer too. With states in FP32
both then hold the same bits; a narrower state is still rounded after a block instead of after a token.
"""


def decode_as_verify():
    """Sends decode of this process's gated-delta layers through the kernel of verify.

    Read when SGLang builds the layers' backend (GDNKernelDispatcher), which is after the attention backend.
    """
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    TritonGDNKernel.supports_packed_decode = False


def _dispatcher(runner):
    linear = getattr(runner.attn_backend, "linear_attn_backend", None)
    return getattr(linear, "kernel_dispatcher", None)


def state_problems(runner):
    """Why ``runner``'s gated-delta layers are not decoded as they are verified, a text each."""
    dispatcher = _dispatcher(runner)
    if dispatcher is None or type(dispatcher.decode_kernel).__name__ != "TritonGDNKernel":
        return []
    if not dispatcher.supports_packed_decode:
        return []
    return ["recurrent states are decoded by another kernel than verify's"]


def state_report(runner, server_args):
    """The recurrent states of ``runner``'s model as they are allocated; None where it has none.

    Keys: layers; dtype of the states (their conv windows have the model's); slots, without the one that
    padding writes to; slot_bytes of all layers; snapshot_tokens, at whose multiples prefill keeps states for
    the prefix cache (None where that happens only at the end of requests); decode, prefill and verify, the
    kernels' classes.
    """
    from sglang.srt.arg_groups.model_override_base import mamba_extra_buffer_of
    from sglang.srt.arg_groups.overrides import mamba_cache_chunk_size, resolved_view

    pool = getattr(runner.req_to_token_pool, "mamba_pool", None)
    if pool is None:
        return None
    cache = pool.mamba_cache
    one_slot = [state[:, 0] for state in (cache.temporal, *cache.conv)]
    tracked = mamba_extra_buffer_of(resolved_view(server_args))
    found = {
        "layers": cache.temporal.shape[0],
        "dtype": str(cache.temporal.dtype).removeprefix("torch."),
        "slots": pool.size,
        "slot_bytes": sum(state.numel() * state.element_size() for state in one_slot),
        "snapshot_tokens": mamba_cache_chunk_size(server_args) if tracked else None,
    }
    dispatcher = _dispatcher(runner)
    if dispatcher is not None:
        kernels = {"decode": "decode_kernel", "prefill": "extend_kernel", "verify": "verify_kernel"}
        found |= {what: type(getattr(dispatcher, name)).__name__ for what, name in kernels.items()}
    return found
