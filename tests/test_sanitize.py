"""tests/gpu/sanitize.sh and the kernels it runs, as far as they go without a GPU."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu import sanitize_kernels

SCRIPT = Path(__file__).parent / "gpu" / "sanitize.sh"

# A stand-in for compute-sanitizer: called with --tool NAME --log-file FILE ... [--plant FAULT].
TOOL = """#!/usr/bin/env bash
[ "$1" = --version ] && { echo "Version 2025.3"; exit 0; }
name=$2 log=$4 status=0
case "$*" in *--plant*) kind=planted status=9 ;; *) kind=kernels; printf 'D %s are right\\n' 64 128 256 ;; esac
case $name-$kind-$FAKE in
  *-unsupported) echo "========= Error: Device not supported." >"$log"; exit 1 ;;
  memcheck-planted-blind | memcheck-kernels-clean | memcheck-kernels-racy) echo "========= ERROR SUMMARY: 0 errors" >"$log"; exit 0 ;;
  memcheck-*) echo "========= ERROR SUMMARY: 32 errors" >"$log"; exit 9 ;;
  racecheck-kernels-clean) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" >"$log"; exit 0 ;;
  racecheck-*) echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)" >"$log"; exit 9 ;;
esac
"""


def sanitize(folder, behaviour, *, tool="tool", python="true"):
    fake = folder / "tool"
    fake.write_text(TOOL)
    fake.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, folder / "out"],
        capture_output=True,
        text=True,
        env=os.environ | {"COMPUTE_SANITIZER": str(folder / tool), "PYTHON": python, "FAKE": behaviour},
    )
    log = folder / "out" / "sanitize.log"
    return done.returncode, log.read_text()


@pytest.mark.parametrize(
    "behaviour, status, message",
    [
        ("clean", 0, "racecheck: no errors"),
        ("racy", 1, "racecheck: FAILED, status 9"),
        ("errors", 1, "memcheck: FAILED, status 9"),
        ("blind", 5, "memcheck did not report a planted fault"),
        ("unsupported", 4, "not run: memcheck: ========= Error: Device not supported."),
    ],
)
def test_verdicts(tmp_path, behaviour, status, message):
    assert sanitize(tmp_path, behaviour)[0] == status
    assert message in sanitize(tmp_path, behaviour)[1]


def test_a_missing_tool_and_failing_kernels_are_no_verdict(tmp_path):
    status, log = sanitize(tmp_path, "clean", tool="missing")
    assert status == 4 and log.startswith("not run: no compute-sanitizer at ")
    status, log = sanitize(tmp_path, "clean", python="false")
    assert status == 1 and "the kernels failed without a sanitizer" in log


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim", sanitize_kernels.HEADS)
def test_the_driver_finds_the_kernels_right(head_dim, device):
    sanitize_kernels.run(sanitize_kernels.Case(head_dim, device.type))


@pytest.mark.interpreter
def test_the_driver_finds_a_wrong_result(device):
    case = sanitize_kernels.Case(64, device.type)
    case.store()
    case.pool.k_codes[case.slots[2][0]] ^= 0x77
    with pytest.raises(AssertionError):
        case.commit()
