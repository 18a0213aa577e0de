"""Tensor parallelism on the embedded platform: several ranks, a process each, on one CPU with gloo.

What SGLang 0.5.23 does otherwise where ``--device cpu`` meets several ranks: it wants a NUMA node for each,
adds heads until they divide, and gathers through an op that has no kernel for CPU tensors. With these hooks
the ranks split and copy heads as on GPUs. Registered by ``hooks.install``.
"""

import torch

_BIND = "sglang.srt.distributed.bootstrap._bind_threads_if_cpu"
_PAD = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
_GATHER = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor"
TARGETS = (_BIND, _PAD, _GATHER)


def install(registry, kind) -> None:
    """Registers the hooks with SGLang's HookRegistry; ``kind`` is its HookType."""
    registry.register(_BIND, leave_threads_unbound, kind.REPLACE)
    registry.register(_PAD, keep_heads, kind.REPLACE)
    registry.register(_GATHER, all_gather_on_cpu, kind.AROUND)


def leave_threads_unbound(*, device: str) -> None:
    """No CPU cores for a rank of its own: a rank has one thread (environment.py), wherever it runs.

    The stock function stops when there are more ranks than NUMA nodes.
    """


def keep_heads(model_config, load_config, tp_size: int):
    """The model's own heads and sizes, as on a GPU, where KV heads fewer than ranks are copied.

    On a CPU the stock function adds heads of zeros until they divide, which the weight loaders of SGLang's
    own CPU engine know of; here loading would stop.
    """
    return model_config


def all_gather_on_cpu(original, group, output: torch.Tensor, input: torch.Tensor) -> None:
    """Gathers ``input`` of every rank into ``output``, in rank order along the first dimension.

    The stock method goes through the op sglang::reg_all_gather_into_tensor, which is registered for the
    device of an out-of-tree platform (PrivateUse1). What the op calls, a collective of the process group,
    gloo has for a CPU tensor.
    """
    if input.is_cpu:
        group._all_gather_into_tensor(output, input)
    else:
        original(group, output, input)
