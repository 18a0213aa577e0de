"""`fp4kv serve` from its start to the moment it serves, and every way in which it does not get there."""

import os
import signal
import time
from pathlib import Path

import pytest
import requests

from launcher.canary import Canary
from launcher.demo import PAIR
from launcher.equality import NEAR_TIE_BOUNDS
from tests.e2e.server import (
    START_TIMEOUT_S,
    embedded_server,
    marked_processes,
    plugin_path,
    serving,
)

pytestmark = pytest.mark.e2e

DRAFTED = [
    "--model-path", str(PAIR / "target"), "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton",
    "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "draft"),
]  # fmt: skip
MISREADINGS = ("k-scales-for-v", "next-slot", "verify-k-scales-for-v", "verify-next-slot")


def with_plugin(**env):
    path = plugin_path()
    return {"PYTHONPATH": path, **env}


def serve(tmp_path, **env):
    return serving(DRAFTED, log=tmp_path / "serve.log", env=with_plugin(**env))


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def parent_of(pid):
    status = Path(f"/proc/{pid}/stat").read_text()
    return int(status.rpartition(")")[2].split()[1])


def test_a_reader_of_the_wrong_scales_is_stopped_with_the_evidence(tmp_path):
    told = tmp_path / "how"
    told.write_text("k-scales-for-v")
    with serve(tmp_path, FP4KV_MISREAD=str(told)) as server:
        server.wait_for("fp4kv serve: proven: ")
        assert server.status("/health") == server.status("/v1/models") == 503
        assert server.wait(START_TIMEOUT_S) == 3
    log = server.text()
    assert "not proven, so the server was stopped: the canary failed" in log
    for part in ("arithmetic: ", "prompt: ", "answer: ", "reference: ", "gap at each token: "):
        assert part in log, part
    assert "ready after" not in log and "fired up and ready" not in log
    assert server.statuses_seen() <= {503}
    assert marked_processes(server.marker) == []


@pytest.fixture(scope="module")
def misreader(tmp_path_factory):
    """A server that is not held back, and a way to tell its readers how to read."""
    folder = tmp_path_factory.mktemp("misreader")
    told = folder / "how"
    with embedded_server(
        PAIR / "target", *DRAFTED[2:], log=folder / "log", env=with_plugin(FP4KV_MISREAD=str(told))
    ) as server:

        def ask(how):
            told.write_text(how)
            requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
            canary = Canary(
                url=server.url, access={"headers": {}, "verify": True}, drafted=True,
                bound=NEAR_TIE_BOUNDS["nvfp4"], haystack=4, room=4096, page_size=1,
            )  # fmt: skip
            return canary.run(240)

        yield ask


def test_right_readers_pass_the_canary(misreader):
    outcome = misreader("right")
    assert outcome.failures == ()
    assert "4 repeated from the cache; planted code recalled; accept length" in outcome.summary


@pytest.mark.parametrize("how", MISREADINGS)
def test_the_canary_sees_every_wrong_reading(misreader, how):
    failures = "\n".join(misreader(how).failures)
    assert "verify and prefill read the same pool differently" in failures
    assert "without the pool" in failures


def test_a_worker_without_our_plugin_never_serves(tmp_path):
    with serve(tmp_path, FP4KV_BREAK_IN_CHILDREN="1") as server:
        assert server.wait(START_TIMEOUT_S) not in (0, 2, 3)
    log = server.text()
    assert "broken by the test plugin" in log and "fp4kv is installed but not active" in log
    assert "fired up and ready" not in log and server.statuses_seen() == set()
    assert marked_processes(server.marker) == []


def test_sigterm_during_the_proof_ends_everything(tmp_path):
    with serve(tmp_path) as server:
        server.wait_for("fp4kv serve: proven: ")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert "ready after" not in server.text() and "not proven" not in server.text()
    assert "fired up and ready" not in server.text()
    assert marked_processes(server.marker) == []


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_killed_in_the_middle_of_the_start(tmp_path, victim):
    """SGLang's children ask to die with their parent only after loading their libraries."""
    with serve(tmp_path) as server:
        spawned = lambda: [p for p, args in marked_processes(server.marker) if "spawn_main" in args]
        assert wait_until(spawned, START_TIMEOUT_S), server.text()[-2000:]
        servers = [p for p, args in marked_processes(server.marker) if "sglang.launch_server" in args]
        # A child has its parent's arguments until it runs a program of its own.
        (leader,) = [p for p in servers if parent_of(p) == server.process.pid]
        if victim == "launcher":
            server.process.kill()
        else:
            os.kill(leader, signal.SIGKILL)
            assert server.wait(30) == 128 + signal.SIGKILL
        assert wait_until(lambda: not marked_processes(server.marker), 15)
    assert "fired up and ready" not in server.text() and server.statuses_seen() == set()
