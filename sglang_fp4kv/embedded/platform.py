"""EmbeddedPlatform: an out-of-tree SGLang platform on the CPU, kernels in the Triton interpreter.

It is out of tree rather than SGLang's own CPU platform because that one needs sgl_kernel, which
does not import without libcuda, and has neither Triton kernels nor DFLASH.

Source: srt/platforms/{interface,cpu}.py @ sglang 0.5.23
"""

import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_fp4kv.embedded import hooks, host_transfers, interpreter_fixes, verify_sampling
from sglang_fp4kv.served import DRAFTERS


class EmbeddedPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    capabilities = PlatformCapabilities(supports_triton=True)

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "the embedded platform needs TRITON_INTERPRET=1 in the environment before Python "
                f"starts, got {os.environ.get('TRITON_INTERPRET')!r}; set what "
                "sglang_fp4kv.embedded.environment.embedded_env() returns"
            )
        interpreter_fixes.apply()
        hooks.install()

    # Attention and speculation: Triton, and the drafters that the kit serves.

    def get_default_attention_backend(self) -> str:
        return "triton"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "triton"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in DRAFTERS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm in DRAFTERS and backend == "triton"

    def get_speculative_cache_locs_fn(self):
        return speculative_cache_locs

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Snapshots of recurrent states for the prefix cache: Triton kernels and torch copies."""
        return True

    # Pure torch everywhere else: no sgl_kernel, no inductor.

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def post_load_model(self, model: torch.nn.Module) -> None:
        hooks.require_active()
        host_transfers.install()
        hooks.use_plain_qk_norm_rope(model)
        verify_sampling.install()


def speculative_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device,
) -> torch.Tensor:
    """The slots of each request's draft block, [B * draft_token_num] int64.

    The built-in function knows CUDA, ROCm, MUSA, XPU, NPU and the sgl_kernel CPU only
    (kernels/ops/speculative/cache_locs.py).
    """
    columns = start_offset.to(torch.int64)[:, None] + torch.arange(draft_token_num, device=device)
    rows = req_pool_indices.to(torch.int64)[:, None]
    return req_to_token[rows, columns].reshape(-1).to(torch.int64)
