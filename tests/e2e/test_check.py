"""`fp4kv check` against the real server, drafted and undrafted, on the shipped pair."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.checks import runner
from launcher.checks.options import Options
from launcher.demo import PAIR
from tests.e2e.server import embedded_server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
NVFP4 = ("--kv-cache-dtype", "nvfp4", "--max-running-requests", "4")
# A pool that four requests fill and outgrow, and a chunk that a prompt of the context is longer than.
SMALL = ("--max-total-tokens", "512", "--context-length", "512", "--chunked-prefill-size", "128")
DRAFTER = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "draft"))


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    log = tmp_path_factory.mktemp("drafted") / "server.log"
    with embedded_server(PAIR / "target", *NVFP4, *SMALL, *DRAFTER, log=log) as server:
        yield server


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory):
    log = tmp_path_factory.mktemp("undrafted") / "server.log"
    with embedded_server(PAIR / "target", *NVFP4, log=log) as server:
        yield server


def test_readme_commands(drafted, tmp_path):
    """The README's two commands, on another port and into another folder."""
    lines = re.findall(r"^\.venv/bin/fp4kv (check .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        line = line.replace("http://127.0.0.1:30000", drafted.url).replace("check-pair", str(tmp_path / "check"))
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", *shlex.split(line)],
            cwd=ROOT, capture_output=True, text=True, env=os.environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "PASS: all 5 checks asked passed" in done.stdout
    assert "the same verdict as on file" in done.stderr
    numbers = json.loads((tmp_path / "check" / "verdict.json").read_text())["checks"]["accept-length"]["numbers"]
    assert min(numbers["workloads"].values()) >= 3


@pytest.fixture(scope="module")
def checks(drafted, undrafted, tmp_path_factory):
    """The checks that the README's commands leave out, with few prompts for two cores' sake."""
    common = {"url": drafted.url, "suite": "pair", "depths": (300,), "prompts": 1, "answers": 3}
    asked = ("drafted-equality", "prefix-cache", "batch-identical", "prefix-cut", "chunked-prefill", "soak", "degenerate-output")
    found = {}
    for name, options in (
        ("most", Options(**common, undrafted=undrafted.url, only=asked)),
        ("agreement", Options(**common, control=undrafted.url, only=("agreement",))),
    ):
        folder = tmp_path_factory.mktemp(name) / "check"
        verdict = runner.run(options, folder)
        again, stored = runner.rescore(folder)
        assert json.loads(json.dumps(again)) == stored
        assert verdict["exit_code"] == (0 if verdict["verdict"] == "pass" else 3)
        found |= verdict["checks"]
    return found


def test_every_check_passes_on_a_sound_server(checks):
    assert {id: check["summary"] for id, check in checks.items() if check["status"] != "pass"} == {}


def test_drafted_tokens_are_equal_outright(checks):
    assert {item["detail"].split(",")[0] for item in checks["drafted-equality"]["items"]} == {"equal"}


def test_the_soak_filled_the_pool_and_retracted(checks):
    soak = checks["soak"]["numbers"]
    # Four drafted requests hold 64 of the 512 tokens for their next step, so it is full below 0.95.
    assert soak["peaks"]["0.6"] > 0.6 and soak["peaks"]["0.95"] > 0.85 and soak["retractions"] >= 1
    assert {item["status"] for item in checks["soak"]["items"] if "retracted" in item["name"]} == {"pass"}
