"""tests/gpu/sanitize.sh and the kernels it runs, as far as they go without a GPU."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu import sanitize_kernels

SCRIPT = Path(__file__).parent / "gpu" / "sanitize.sh"

MODES = {"memcheck": "bounds", "racecheck": "race", "initcheck": "uninitialized", "synccheck": "barrier"}

# A stand-in for compute-sanitizer: called with --tool NAME --log-file FILE ... [--plant FAULT]. FAKE says
# what it does: "clean", "errors MODE" in our kernels, "blind MODE" to its planted fault, "unsupported".
TOOL = """#!/usr/bin/env bash
[ "$1" = --version ] && { echo "Version 2025.3"; exit 0; }
name=$2 log=$4 found=no
[ "$FAKE" = unsupported ] && { echo "========= Error: Device not supported." >"$log"; exit 1; }
case "$*" in
  *--plant*) [ "$FAKE" = "blind $name" ] || found=yes; echo "${@: -1}" >"$log.fault" ;;
  *) [ "$FAKE" != "errors $name" ] || found=yes; printf 'D %s are right\n' 64 128 256 ;;
esac
summary="ERROR SUMMARY: 32 errors"
[ $name = racecheck ] && summary="RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
[ $found = no ] && summary=$(sed 's/32 errors/0 errors/; s/1 hazard/0 hazards/; s/1 error,/0 errors,/' <<<"$summary")
echo "========= $summary" >"$log"
[ $found = no ] || exit 9
"""


def sanitize(folder, behaviour, *modes, tool="tool", python="true"):
    fake = folder / "tool"
    fake.write_text(TOOL)
    fake.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, folder / "out", *modes],
        capture_output=True,
        text=True,
        env=os.environ | {"COMPUTE_SANITIZER": str(folder / tool), "PYTHON": python, "FAKE": behaviour},
    )
    log = folder / "out" / "sanitize.log"
    return done.returncode, log.read_text()


def test_all_four_modes_are_clean(tmp_path):
    status, log = sanitize(tmp_path, "clean")
    assert status == 0
    assert [line.split(":")[0] for line in log.splitlines() if "no errors" in line] == list(MODES)
    for name, fault in MODES.items():
        assert (tmp_path / "out" / f"sanitize_{name}_planted.log.fault").read_text().strip() == fault
        assert "SUMMARY" in (tmp_path / "out" / f"sanitize_{name}.log").read_text()


@pytest.mark.parametrize("name", MODES)
def test_errors_and_a_blind_tool_are_told(tmp_path, name):
    status, log = sanitize(tmp_path, f"errors {name}")
    assert status == 1 and f"{name}: FAILED, status 9" in log
    assert log.count("no errors") == len(MODES) - 1
    status, log = sanitize(tmp_path, f"blind {name}")
    assert status == 5 and f"{name} did not report a planted fault" in log


def test_an_unsupported_device_is_no_verdict(tmp_path):
    status, log = sanitize(tmp_path, "unsupported")
    assert status == 4 and "not run: memcheck: ========= Error: Device not supported." in log


def test_modes_can_be_chosen(tmp_path):
    status, log = sanitize(tmp_path, "errors memcheck", "synccheck", "initcheck")
    assert status == 0
    assert [line.split(":")[0] for line in log.splitlines()[1:]] == ["synccheck", "initcheck"]


@pytest.mark.parametrize("arguments", [[], ["out", "leakcheck"]])
def test_usage(tmp_path, arguments):
    done = subprocess.run([SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "OUT_DIR [memcheck|racecheck|initcheck|synccheck]" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_tool_and_failing_kernels_are_no_verdict(tmp_path):
    status, log = sanitize(tmp_path, "clean", tool="missing")
    assert status == 4 and log.startswith("not run: no compute-sanitizer at ")
    status, log = sanitize(tmp_path, "clean", python="false")
    assert status == 1 and "the kernels failed without a sanitizer" in log


@pytest.mark.interpreter
@pytest.mark.parametrize("head_dim", sanitize_kernels.HEADS)
def test_the_driver_finds_the_kernels_right(head_dim, device):
    sanitize_kernels.run(sanitize_kernels.Case(head_dim, device.type))


def test_every_planted_fault_is_one_the_driver_knows(monkeypatch):
    """Without a GPU the driver gets as far as asking for one."""
    for fault in MODES.values():
        monkeypatch.setattr("sys.argv", ["sanitize_kernels.py", "--plant", fault])
        asked = []
        monkeypatch.setattr(sanitize_kernels, "plant", asked.append)
        assert sanitize_kernels.main() == 0 and asked == [fault]


@pytest.mark.interpreter
def test_the_driver_finds_a_wrong_result(device):
    case = sanitize_kernels.Case(64, device.type)
    case.store()
    case.pool.k_codes[case.slots[2][0]] ^= 0x77
    with pytest.raises(AssertionError):
        case.commit()
