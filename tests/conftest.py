"""Marks and the device fixture.

interpreter  Triton kernels: run in a process with TRITON_INTERPRET=1, or unchanged on a GPU
e2e          the real server on the embedded platform; FP4KV_SKIP_E2E=1 leaves them out
gpu          needs an NVIDIA GPU
Under FP4KV_REQUIRE_GPU=1 every skip of a gpu or interpreter test is a failure.
"""

import os

import pytest
import torch

from sglang_fp4kv.embedded import interpreter_fixes

INTERPRET = interpreter_fixes.apply()  # as the embedded server runs kernels; nothing without it
REQUIRE_GPU = os.environ.get("FP4KV_REQUIRE_GPU") == "1"


def _reason_to_skip(item) -> str | None:
    has_gpu = torch.cuda.is_available()
    if item.get_closest_marker("gpu") and not has_gpu:
        return "needs an NVIDIA GPU"
    if item.get_closest_marker("interpreter") and not (INTERPRET or has_gpu):
        return "needs TRITON_INTERPRET=1 in the environment, or an NVIDIA GPU"
    if item.get_closest_marker("e2e") and os.environ.get("FP4KV_SKIP_E2E") == "1":
        return "FP4KV_SKIP_E2E=1"
    return None


def pytest_runtest_setup(item):
    reason = _reason_to_skip(item)
    if reason is not None:
        pytest.skip(reason)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    wants_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("interpreter")
    if REQUIRE_GPU and wants_gpu and report.skipped and not hasattr(report, "wasxfail"):
        reason = call.excinfo.value if call.excinfo else ""
        report.outcome = "failed"
        report.longrepr = f"skipped under FP4KV_REQUIRE_GPU=1: {reason}"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernel tests run: the GPU, or the CPU under the interpreter."""
    if torch.cuda.is_available() and not INTERPRET:
        return torch.device("cuda")
    return torch.device("cpu")
