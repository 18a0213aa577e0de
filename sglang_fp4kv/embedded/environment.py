"""What a launcher sets so that the server runs on the embedded platform. Standard library only."""

from collections.abc import Sequence

from sglang_fp4kv.embedded import PLATFORM_NAME

# One thread a process: two cores, several processes and tiny matrices. More threads only wait.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def embedded_env() -> dict[str, str]:
    """Environment variables for the server's process, to be laid over the caller's own."""
    return {
        "SGLANG_PLATFORM": PLATFORM_NAME,
        # Read when Triton is first imported: it cannot be set later, from inside the process.
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # What SGLang decorates with torch.compile runs as written: compiling it with g++ takes longer
        # than the few tokens of a server on a CPU, and importing the compiler a second of every process.
        "TORCHDYNAMO_DISABLE": "1",
        **dict.fromkeys(_ONE_THREAD, "1"),
    }


# Flag, value (None: it takes none), and why embedded mode sets it.
_FLAGS: tuple[tuple[str, str | None, str], ...] = (
    ("--device", "cpu", "the platform is out of tree but its tensors are on the CPU"),
    ("--attention-backend", "triton", "the backend whose kernels the interpreter runs"),
    ("--sampling-backend", "pytorch", "the default needs sgl_kernel"),
    ("--cuda-graph-backend-decode", "disabled", "there is nothing to capture"),
    ("--cuda-graph-backend-prefill", "disabled", "there is nothing to capture"),
    ("--mem-fraction-static", "0.5", "memory is shared with everything else on the machine"),
    ("--max-total-tokens", "8192", "a pool sized from free memory would be gigabytes"),
    ("--max-running-requests", "8", "the kernels run one program after another"),
    ("--hicache-io-backend", "direct", "the hierarchical cache's copy kernels need a GPU"),
    ("--fp4-gemm-backend", "marlin", "NVFP4 weights are decoded, and activations are left as they are"),
    ("--triton-attention-num-kv-splits", "2", "a split is a program and costs milliseconds"),
    ("--watchdog-timeout", "3600", "a long prompt in the interpreter is slow, not hung"),
    ("--sleep-on-idle", None, "a scheduler that waits in a loop takes a whole core from the others"),
)


def embedded_flags(user_flags: Sequence[str] = ()) -> list[str]:
    """SGLang flags that embedded mode adds to `user_flags`; what the user gave is left out."""
    given = {flag.split("=", 1)[0] for flag in user_flags}
    added: list[str] = []
    for flag, value, _ in _FLAGS:
        if flag not in given:
            added += [flag] if value is None else [flag, value]
    return added


def embedded_reasons() -> dict[str, str]:
    """Why each flag of `embedded_flags` is there."""
    return {flag: reason for flag, _, reason in _FLAGS}
