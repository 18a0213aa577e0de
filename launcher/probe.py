"""What this machine is: GPU, installed versions, patch state, SGLang's switches in the environment.

Nothing here imports torch or starts CUDA. A probe that fails is a value with its reason.
"""

import ctypes
import os
import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from launcher import patchset
from launcher.flags import UsageError
from launcher.refusal import Refused

PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "transformers")
GIB = 1 << 30
# SGLang's switches that change the KV pool and have no flag (srt/environ.py @ 0.5.23).
SWITCHES = ("SGLANG_USE_HND_KVCACHE", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
# Its variables that open another way in than its HTTP server, by a port, a switch or a module's name.
ENTRY_VARIABLES = ("SGLANG_GRPC_PORT", "SGLANG_RUST_SERVER", "SGLANG_HTTP_SERVER_APP_PATH")
_NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Failed:
    """A probe without a result, and why; ``refusals`` where the reason is one already."""

    reason: str
    refusals: tuple = ()


@dataclass(frozen=True)
class Gpu:
    """``capability``: (major, minor). ``memory_bytes``: all of it, None where nothing says."""

    name: str
    capability: tuple
    memory_bytes: int | None = None

    @property
    def sm(self):
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Machine:
    """``gpu``: Gpu or Failed. ``patch``: PatchState or Failed. ``switches``: those that are on."""

    gpu: object = Failed("not probed")
    patch: object = Failed("not probed")
    versions: dict = field(default_factory=dict)
    switches: tuple = ()


def parse_gpu(text, memory_gb=None):
    """The Gpu that ``--gpu sm_121`` stands for.

    Raises: UsageError when it is no compute capability.
    """
    found = re.fullmatch(r"(?:sm_?)?(\d{1,2})(\d)[af]?", text)
    if not found:
        raise UsageError(f"--gpu {text}: a compute capability is needed, such as sm_90 or sm_121")
    memory = None if memory_gb is None else int(memory_gb * GIB)
    return Gpu(f"sm_{found[1]}{found[2]} (stated)", (int(found[1]), int(found[2])), memory)


def _visible_index(environ):
    """The NVML index that CUDA's first device has; None where CUDA sees none."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first in ("", "-1"):
        return None
    return int(first) if first.isdigit() else 0


def probe_gpu(environ=os.environ, load=ctypes.CDLL):
    """The first GPU that CUDA would use, through NVML; Failed with the reason where that fails."""
    index = _visible_index(environ)
    if index is None:
        return Failed("CUDA_VISIBLE_DEVICES hides every GPU")
    try:
        nvml = load(_NVML)
    except OSError as error:
        return Failed(f"no NVML here ({error})")
    code = nvml.nvmlInit_v2()
    if code:
        return Failed(f"NVML does not start (nvmlInit: error {code})")
    try:
        return _ask(nvml, index)
    finally:
        nvml.nvmlShutdown()


def _ask(nvml, index):
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    questions = (
        ("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)),
        ("nvmlDeviceGetName", handle, name, len(name)),
        ("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)),
    )
    for function, *arguments in questions:
        code = getattr(nvml, function)(*arguments)
        if code:
            return Failed(f"NVML does not answer for GPU {index} ({function}: error {code})")
    # A machine whose GPU shares the host's memory has none of its own to report.
    known = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 and memory[0] > 0
    name = name.value.decode("utf-8", "replace")
    return Gpu(name, (major.value, minor.value), int(memory[0]) if known else None)


def probe_patch():
    """patchset's PatchState of the SGLang that would start; Failed where that cannot be told."""
    try:
        return patchset.patch_state()
    except Refused as error:
        return Failed("the patch series cannot be read", error.refusals)
    except OSError as error:
        return Failed(f"the patch state cannot be read ({error})")


def installed_versions():
    """Release by package, None where it is not installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def probe(gpu=None, environ=os.environ):
    """The Machine; ``gpu`` stands in for the one that would be asked."""
    on = tuple(s for s in SWITCHES if environ.get(s, "").lower() in ("1", "true", "t", "yes", "y"))
    on += tuple(s for s in ENTRY_VARIABLES if environ.get(s, "").lower() not in ("", "0", "false"))
    return Machine(gpu or probe_gpu(environ), probe_patch(), installed_versions(), on)
