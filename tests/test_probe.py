"""Probes with a faked NVML: what they find, and that a failure is a value."""

import ctypes

import pytest

from launcher import patchset
from launcher.flags import UsageError
from launcher.probe import Failed, Gpu, installed_versions, parse_gpu, probe, probe_gpu, probe_patch
from launcher.refusal import Refused, refusal

GIB = 1 << 30


class Nvml:
    """Two GPUs; ``fails`` maps a function's name to its error code."""

    def __init__(self, **fails):
        self.fails, self.shut = fails, False

    def nvmlInit_v2(self):
        return self.fails.get("init", 0)

    def nvmlShutdown(self):
        self.shut = True
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        if index > 1:
            return 2
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index + 1
        return self.fails.get("handle", 0)

    def nvmlDeviceGetName(self, handle, name, length):
        name.value = f"GPU {handle.value - 1}".encode()
        return self.fails.get("name", 0)

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        ctypes.cast(major, ctypes.POINTER(ctypes.c_int))[0] = 12
        ctypes.cast(minor, ctypes.POINTER(ctypes.c_int))[0] = handle.value - 1
        return self.fails.get("capability", 0)

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))[0] = 32 * GIB
        return self.fails.get("memory", 0)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, Gpu("GPU 0", (12, 0), 32 * GIB)),
        ("1,0", Gpu("GPU 1", (12, 1), 32 * GIB)),
        ("GPU-5f3", Gpu("GPU 0", (12, 0), 32 * GIB)),
        ("", Failed("CUDA_VISIBLE_DEVICES hides every GPU")),
        ("-1", Failed("CUDA_VISIBLE_DEVICES hides every GPU")),
    ],
)
def test_the_gpu_is_the_one_that_cuda_sees_first(visible, found):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert probe_gpu(environ, lambda _: Nvml()) == found


def test_memory_that_is_not_told_is_unknown():
    assert probe_gpu({}, lambda _: Nvml(memory=3)) == Gpu("GPU 0", (12, 0), None)


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (Nvml(init=9), "NVML does not start (nvmlInit: error 9)"),
        (Nvml(handle=2), "NVML does not answer for GPU 0 (nvmlDeviceGetHandleByIndex_v2: error 2)"),
        (Nvml(name=2), "NVML does not answer for GPU 0 (nvmlDeviceGetName: error 2)"),
        (Nvml(capability=2), "(nvmlDeviceGetCudaComputeCapability: error 2)"),
    ],
)
def test_a_failed_probe_is_a_value_with_its_reason(nvml, reason):
    found = probe_gpu({}, lambda _: nvml)
    assert isinstance(found, Failed) and reason in found.reason
    assert nvml.shut is ("init" not in nvml.fails)


def test_no_nvml_is_a_value_too():
    def missing(name):
        raise OSError(f"{name}: no such file")

    assert probe_gpu({}, missing) == Failed("no NVML here (libnvidia-ml.so.1: no such file)")


@pytest.mark.parametrize("text", ["sm_121", "sm121", "121", "sm_121a"])
def test_a_gpu_may_be_stated(text):
    assert parse_gpu(text, 121) == Gpu("sm_121 (stated)", (12, 1), 121 * GIB)
    assert parse_gpu(text).memory_bytes is None


@pytest.mark.parametrize("text", ["", "h200", "sm_9", "sm_9000", "12.1"])
def test_a_gpu_that_is_none_is_named(text):
    with pytest.raises(UsageError, match="a compute capability is needed, such as sm_90 or sm_121"):
        parse_gpu(text)


def test_a_patch_state_that_cannot_be_read_is_a_value(monkeypatch):
    broken = refusal("FP4-006", asked="a", problem="p", place="x")

    def refuse():
        raise Refused(broken)

    monkeypatch.setattr(patchset, "patch_state", refuse)
    assert probe_patch() == Failed("the patch series cannot be read", (broken,))

    def fail():
        raise OSError("disk")

    monkeypatch.setattr(patchset, "patch_state", fail)
    assert probe_patch() == Failed("the patch state cannot be read (disk)")


def test_versions_and_switches():
    assert installed_versions()["sglang"] == "0.5.23"
    environ = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_HND_KVCACHE": "True", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "0"}
    found = probe(environ=environ)
    assert found.switches == ("SGLANG_USE_HND_KVCACHE",) and found.patch.state == "applied"
    assert probe(Gpu("x", (9, 0)), environ).gpu.name == "x"
    environ = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_GRPC_PORT": "5", "SGLANG_RUST_SERVER": "False", "SGLANG_HTTP_SERVER_APP_PATH": ""}
    assert probe(environ=environ).switches == ("SGLANG_GRPC_PORT",)
