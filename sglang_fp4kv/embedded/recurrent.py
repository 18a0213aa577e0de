"""What SGLang 0.5.23's gated-delta layers ask of a GPU, answered for a CPU.

Their Triton kernels (sglang/kernels/ops/attention/fla, .../linear, .../mamba) run in the interpreter as they
are. These are the places around them that know CUDA devices only.
"""

import contextlib

import torch

_PROCESSORS = "sglang.kernels.ops.attention.fla.layernorm_gated._get_sm_count"
_COMMIT = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"
TARGETS = (_PROCESSORS, _COMMIT)


def install(registry, kind) -> None:
    """Registers the hooks with SGLang's HookRegistry; ``kind`` is its HookType."""
    give_the_cpu_a_device()
    make_pinning_harmless()
    registry.register(_PROCESSORS, one_processor, kind.REPLACE)
    registry.register(_COMMIT, commit_states, kind.REPLACE)


def give_the_cpu_a_device() -> None:
    """Kernels are launched under ``getattr(torch, device.type).device(index)``, which torch.cpu does not have."""
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda index: contextlib.nullcontext()


def make_pinning_harmless() -> None:
    """Tensor.pin_memory gives the tensor itself: there is no driver to pin for, and torch raises without one.

    The scheduler pins what it tells the prefix cache of states to keep (srt/managers/schedule_batch.py).
    """
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def one_processor(device) -> int:
    """Kernels size their grids by it, so one makes the fewest and largest programs."""
    return 1


def commit_states(
    caches,
    slots: torch.Tensor,
    last_steps: torch.Tensor,
    track_slots: torch.Tensor | None,
    track_steps: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Copies the states after each request's last accepted token into its slot, and those that the prefix
    cache keeps into theirs. The original checks for CUDA tensors and hands raw addresses to its kernel.

    Sizes: L layers, B requests, N draft tokens, S slots
      caches.temporal          [L, S, *state]     caches.intermediate_ssm          [L, rows, N, *state]
      caches.conv              list of the same   caches.intermediate_conv_window  list of the same
      slots, track_slots       [B]   negative = skip
      last_steps, track_steps  [B]   the draft token whose state counts; negative = skip
      src_indices_raw          [B]   rows of the intermediate states; None for 0 to B - 1
    """
    rows = torch.arange(len(last_steps)) if src_indices_raw is None else src_indices_raw.long()
    pairs = [(caches.temporal, caches.intermediate_ssm)]
    pairs += zip(caches.conv, caches.intermediate_conv_window, strict=True)
    for wanted, steps in ((slots, last_steps), (track_slots, track_steps)):
        if wanted is None:
            continue
        valid = (steps >= 0) & (wanted >= 0)
        to, step, row = wanted[valid].long(), steps[valid].long(), rows[valid]
        for states, intermediate in pairs:
            states[:, to] = intermediate[:, row, step]
