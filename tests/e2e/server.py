"""The real server on the embedded platform, for tests."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import requests

from launcher.process import ServerProcess, free_port
from launcher.serve import launch_command

# A start takes 25 s on two idle cores; a test machine is seldom idle.
START_TIMEOUT_S = 300
ROOT = Path(__file__).parents[2]
PLUGIN = Path(__file__).parent / "plugin"


def show_progress(seconds: float, line: str) -> None:
    if int(seconds) % 10 == 0:
        print(f"  {seconds:4.0f} s  {line[:140]}", file=sys.stderr, flush=True)


def plugin_path(environ: Mapping[str, str] = os.environ) -> str:
    """The PYTHONPATH of a server that loads the test plugin, in front of the one in `environ`."""
    return os.pathsep.join(filter(None, [str(PLUGIN), environ.get("PYTHONPATH")]))


@contextmanager
def embedded_server(
    model: Path,
    *flags: str,
    log: Path,
    env: dict[str, str] | None = None,
    ready: str = "/health_generate",
) -> Iterator[ServerProcess]:
    """A ready server for `model`; it and its workers are gone when the block ends.

    `ready`: the path that is asked until it answers. What a test asks is the first that the server answers:
    SGLang's own warm-up is left to `fp4kv serve`, the demo and their tests, and so is the end that SGLang makes
    by itself, which takes it 5 s.
    """
    port = free_port()
    own = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup", *flags]
    argv, environment = launch_command(own, embedded=True, environ={**os.environ, **(env or {})})
    with ServerProcess(argv, environment, log, port) as server:
        server.wait_ready(START_TIMEOUT_S, show_progress, path=ready)
        try:
            yield server
        finally:
            if server.returncode() is None:
                os.killpg(server.pid, signal.SIGKILL)


def empty_cache(url):
    """Waits until no request runs and drops the prefix cache."""
    until = time.monotonic() + 60
    while requests.post(f"{url}/flush_cache", timeout=60).status_code != 200:
        assert time.monotonic() < until, "the server never became idle"
        time.sleep(0.2)


def marked_processes(marker: str) -> list[tuple[int, str]]:
    """(pid, command line) of every process whose environment holds `marker`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker.encode() in environ:
            found.append((int(folder.name), command))
    return found


class Serving:
    """One run of `fp4kv serve --embedded`, watched from outside as its users see it."""

    def __init__(self, flags: list[str], log: Path, env: dict[str, str], port: int, watched: bool) -> None:
        self.marker = f"fp4kv-test-{uuid.uuid4().hex}"
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self._seen: set[int] = set()
        command = [sys.executable, "-m", "launcher.cli", "serve", "--embedded", "--", *flags]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, "FP4KV_TEST_MARKER": self.marker},
            )
        self._ended = threading.Event()
        if watched:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """A user who asks for an answer again and again, from the start to the end."""
        while not self._ended.wait(0.5):
            try:
                body = {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}
                answer = requests.post(f"{self.url}/generate", json=body, timeout=60)
                self._seen.add(answer.status_code)
            except requests.RequestException:
                pass

    def statuses_seen(self) -> set[int]:
        """What a user's requests were answered with so far."""
        return set(self._seen)

    def status(self, path: str) -> int:
        return requests.get(self.url + path, timeout=60).status_code

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, line: str) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while line not in self.text():
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < end, f"no {line!r} within {START_TIMEOUT_S} s"
            time.sleep(0.2)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        self._ended.set()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(
    flags: list[str],
    *,
    log: Path,
    env: dict[str, str] | None = None,
    port: int | None = None,
    watched: bool = True,
) -> Iterator[Serving]:
    """`fp4kv serve --embedded` with these flags; killed, if it still runs, when the block ends.

    `watched`: whether a user asks for an answer all the time, which a server on a CPU has little time for.
    """
    server = Serving(flags, log, env or {}, port or free_port(), watched)
    try:
        yield server
    finally:
        server.end()
