"""What SGLang 0.5.23 assumes about a device and a CPU does not have.

Each hook is registered with SGLang's own hook registry when the platform is created; SGLang
applies the registry in every worker, when it loads its plugins. `require_active` runs in the worker
after the weights are loaded, so a hook that SGLang failed to apply stops the server.
"""

import sys

import torch

from sglang_fp4kv.embedded import fp4_weights, ranks, recurrent, trees

BLOCK_SCALED_POOL = "the block-scaled (fp4 / mxfp8) KV pool"

_REJECT = "sglang.srt.platforms.interface.reject_out_of_tree_path"
_IS_FP4 = "sglang.srt.utils.common.is_float4_e2m1fn_x2"
_TILES = (
    "sglang.kernels.ops.attention.extend_attention._get_block_sizes_for_extend_attention"
)
TARGETS = (_REJECT, _IS_FP4, _TILES, *trees.TARGETS, *ranks.TARGETS, *recurrent.TARGETS, *fp4_weights.TARGETS)

# Kernels that need CUDA. SGLang takes the way of a machine without them where an import fails.
_CUDA_PACKAGES = ("flashinfer", "cutlass")

# Query rows and keys of one tile. A tile costs the interpreter milliseconds, whatever its size:
# 600 new tokens on 300 take 0.23 s a layer instead of 0.75 s with the 64 x 64 of an unknown GPU.
_TILE_ROWS, _TILE_KEYS = 128, 256


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    leave_out_cuda_packages()
    make_record_stream_harmless()
    HookRegistry.register(_REJECT, allow_block_scaled_pool, HookType.AROUND)
    HookRegistry.register(_IS_FP4, is_float4_e2m1fn_x2, HookType.REPLACE)
    HookRegistry.register(_TILES, large_tiles, HookType.AFTER)
    for part in (trees, ranks, recurrent, fp4_weights):
        part.install(HookRegistry, HookType)


def require_active() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in TARGETS if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"the embedded platform's hooks are not active in this worker: {', '.join(missing)}"
        )


def leave_out_cuda_packages() -> None:
    """`import flashinfer` and `import cutlass` fail in this process from here on, if nothing has imported them yet.

    SGLang imports them wherever they are installed, which is a sixth of every process's start, and a
    DFlash2 draft's selector then calls FlashInfer's top-k, which takes CUDA tensors alone
    (srt/layers/quantization/fp4_utils.py, srt/models/dflash.py).
    """
    for name in _CUDA_PACKAGES:
        sys.modules.setdefault(name, None)


def make_record_stream_harmless() -> None:
    """Tensor.record_stream does nothing for a CPU tensor.

    The DFLASH worker calls it on every batch (srt/speculative/dflash_worker_v2.py); torch raises
    "unknown parameter type" because a CPU has no stream to pass. There is nothing to record either:
    work on a CPU tensor is finished when the call returns.
    """
    original = torch.Tensor.record_stream
    if getattr(original, "_fp4kv_harmless", False):
        return

    def record_stream(self, stream):
        if self.device.type != "cpu":
            original(self, stream)

    record_stream._fp4kv_harmless = True
    torch.Tensor.record_stream = record_stream


def allow_block_scaled_pool(original, platform, *, subsystem: str) -> None:
    """Let an FP4 pool be built here; every other path without a platform seam stays refused.

    srt/mem_cache/kv_cache_configurator.py refuses it for every out-of-tree platform, since the
    stock FP4 pool assumes CUDA. Ours does not.
    """
    if subsystem != BLOCK_SCALED_POOL:
        original(platform, subsystem=subsystem)


def is_float4_e2m1fn_x2(dtype) -> bool:
    """The stock function answers False off CUDA, so an FP4 pool would be priced and built as BF16.

    Callers: srt/mem_cache/kv_cache_configurator.py, srt/model_executor/pool_configurator.py.
    """
    return dtype is not None and dtype == getattr(torch, "float4_e2m1fn_x2", None)


def large_tiles(block_sizes: tuple, *args, **kwargs) -> tuple:
    """Large query and key tiles for SGLang's extend kernel; head-dim blocks as they were."""
    return (*block_sizes[:3], _TILE_ROWS, _TILE_KEYS, block_sizes[-1])


def use_plain_qk_norm_rope(model: torch.nn.Module) -> int:
    """Send a DFlash draft's q/k norm and RoPE through torch; return how many layers changed.

    srt/models/dflash.py launches a Triton kernel with one program a token and head for it, which is
    a third of the time of a speculative step in the interpreter. The other branch is the one the
    draft takes on every device without that kernel.
    """
    changed = 0
    for module in model.modules():
        if getattr(module, "use_table_qk_norm_rope", False):
            module.use_table_qk_norm_rope = False
            changed += 1
    return changed
