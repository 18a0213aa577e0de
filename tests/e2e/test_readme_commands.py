"""The README's commands that start servers, run as a reader would."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.client import fp4kv_report, generate, server_info
from launcher.process import free_port
from tests.e2e.server import START_TIMEOUT_S
from tests.test_readme import make_recipe

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_make_demo(tmp_path):
    """`make demo` with this environment in place of a fresh .venv, whose set-up `make test` has made."""
    (recipe,) = make_recipe("demo")
    assert recipe == ".venv/bin/python -m launcher.demo"
    result = tmp_path / "demo.json"
    command = recipe.replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        [*shlex.split(command), "--embedded", "--json", str(result), "--logs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    run = json.loads(result.read_text())
    assert [row["b_c"]["verdict"] for row in run["rows"]] == ["equal"] * len(run["rows"])
    lengths = [row["accept_length"] for row in run["rows"]]
    assert sum(lengths) / len(lengths) >= 2.5
    assert run["seconds"] < 480
    for row in run["rows"]:
        assert row["prompt"] in done.stdout
    assert "OK: (c) answers as (b)" in done.stdout
    assert re.search(r"\(c\) target 576 \(float4_e2m1fn_x2, 4 layers\), drafter 512", done.stdout)
    assert "ready after" in done.stderr  # progress while it works


def wait_for(line, log, process):
    begun = time.monotonic()
    while time.monotonic() - begun < START_TIMEOUT_S:
        if line in log.read_text():
            return
        assert process.poll() is None, log.read_text()[-2000:]
        time.sleep(1)
    raise AssertionError(f"no {line!r} within {START_TIMEOUT_S} s")


def test_serve(tmp_path):
    """The README's serve command: proven, answers, ends with SIGTERM and leaves nothing behind."""
    (command,) = re.findall(r"^\.venv/bin/fp4kv serve (.*)$", README, re.MULTILINE)
    port = free_port()
    log = tmp_path / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", "serve", *shlex.split(command), "--port", str(port)],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ,
        )
    try:
        wait_for("fp4kv serve: proven: target float4_e2m1fn_x2 576 B/token", log, process)
        url = f"http://127.0.0.1:{port}"
        assert "391" in generate(url, "<|im_start|>user\nWhat is 17 x 23?<|im_end|>\n<|im_start|>assistant\n", 12).text
        assert fp4kv_report(server_info(url))["draft"]["dtype"] == "float8_e4m3fn"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    left = subprocess.run(["pgrep", "-f", f"--port {port}"], capture_output=True, text=True).stdout
    assert left == ""
