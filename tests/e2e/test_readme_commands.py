"""The README's commands that start servers, run as a reader would."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.client import fp4kv_report, generate, server_info
from launcher.process import free_port
from tests.e2e.server import marked_processes, serving
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


def test_serve(tmp_path):
    """The README's serve command: 503 until proven, then answers; ends with SIGTERM, leaves nothing."""
    (command,) = re.findall(r"^\.venv/bin/fp4kv serve --embedded -- (.*)$", README, re.MULTILINE)
    port = free_port()
    with serving(shlex.split(command), log=tmp_path / "serve.log", port=port) as server:
        server.wait_for("fp4kv serve: proven: target float4_e2m1fn_x2 576 B/token")
        for path in ("/health", "/health_generate", "/ready", "/v1/models", "/server_info"):
            assert server.status(path) == 503, path
        assert server.statuses_seen() <= {503}
        server.wait_for("fp4kv serve: ready after ")
        for path in ("/health", "/ready", "/v1/models"):
            assert server.status(path) == 200, path
        before, _, after = server.text().partition("fp4kv serve: canary passed: 4 prompts, ")
        assert "planted code recalled" in after and "fired up and ready" not in before
        question = "<|im_start|>user\nWhat is 17 x 23?<|im_end|>\n<|im_start|>assistant\n"
        assert "391" in generate(server.url, question, 12).text
        assert fp4kv_report(server_info(server.url))["draft"]["dtype"] == "float8_e4m3fn"
        second = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "serve", "--embedded", "--", *shlex.split(command),
             "--port", str(port)],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert second.returncode == 2 and f"--port {port}: nothing can listen there" in second.stderr
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert {503, 200} == server.statuses_seen()
    assert marked_processes(server.marker) == []
