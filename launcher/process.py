"""Starts a server in a process group of its own, waits until it answers, and leaves nothing behind.

Standard library only.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

_LAST_LINES = 25
_PR_SET_PDEATHSIG = 1
# SGLang kills its workers, so nobody removes this file (srt/managers/load_snapshot.py @ 0.5.23).
_LEFT_IN_SHARED_MEMORY = "/dev/shm/sglang_loads_"
# Waits for a line. When this process is killed there comes none, and the server's group is killed: its
# workers ask the kernel to die with the leader, but only once they have loaded their libraries.
_GUARD = 'read -r _ || kill -s KILL -- "-$1"'
# urllib would send a request for 127.0.0.1 through a proxy of the environment.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ServerFailed(Exception):
    """The server ended or did not answer in time; the message ends with its last log lines."""


def free_port() -> int:
    """A TCP port that is free on 127.0.0.1 now; another process may still take it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ServerProcess:
    """One server.

    argv, env: the command and its whole environment; env=None inherits this process's. The command
        has to make the server listen on `port`.
    log_path: receives stdout and stderr of every process of the server; overwritten. None: they go
        where this process's go.

    The server dies with this process: with `stop`, with the `with` block, and when this process is
    killed; on Linux also when the thread that called `start` ends.
    """

    def __init__(
        self, argv: list[str], env: dict[str, str] | None, log_path: str | Path | None, port: int
    ) -> None:
        self.argv = list(argv)
        self.env = env
        self.log_path = None if log_path is None else Path(log_path)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen | None = None
        self._guard: subprocess.Popen | None = None
        self._shared: set[Path] = set()

    def __enter__(self) -> "ServerProcess":
        return self.start()

    def __exit__(self, *_exc) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process id, which is also its group's; None before `start`."""
        return self._process.pid if self._process else None

    def returncode(self) -> int | None:
        """The exit status, None while the server runs or before it started."""
        return self._process.poll() if self._process else None

    def start(self) -> "ServerProcess":
        if self._process is not None:
            raise RuntimeError(f"this server was started before, as process {self._process.pid}")
        with self._open_log() as log:
            self._process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log and subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "fp4kv-guard", str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def _open_log(self):
        if self.log_path is None:
            return nullcontext()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        return self.log_path.open("wb")

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status, once the server has ended by itself; None after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """Send a signal to the server's first process; it ends its workers itself."""
        if self._process is not None and self._process.poll() is None:
            self.note_shared_memory()
            self._process.send_signal(number)

    def note_shared_memory(self) -> None:
        """Remember the shared memory to remove in `stop`, for when the server has ended by then."""
        if self._process is not None:
            self._shared |= _shared_memory_of(self._process.pid)

    def wait_ready(
        self,
        timeout: float,
        on_progress: Callable[[float, str], None] | None = None,
        path: str = "/health_generate",
        every: float = 0.5,
    ) -> float:
        """Wait until GET `path` answers 200; return the seconds it took.

        SGLang's /health_generate generates a token, so a server that answers it works.
        on_progress(seconds, last log line) is called about once a second.

        Raises: ServerFailed when the server ends first or `timeout` seconds pass.
        """
        begun = time.monotonic()
        shown = begun
        while True:
            waited = time.monotonic() - begun
            if self.returncode() is not None:
                raise ServerFailed(self._report(f"ended with status {self.returncode()}"))
            if waited > timeout:
                raise ServerFailed(self._report(f"did not answer within {timeout:g} s"))
            if self._answers(path, timeout - waited):
                self.note_shared_memory()
                return time.monotonic() - begun
            if on_progress is not None and time.monotonic() - shown >= 1:
                shown = time.monotonic()
                on_progress(waited, (self.last_lines(1) or [""])[0])
            time.sleep(every)

    def stop(self, grace: float = 5.0) -> None:
        """End the server and every process of its group. Safe to call twice.

        The leader gets SIGTERM and ends its own workers; SGLang takes a worker that ends by itself
        for a crash. What still runs after `grace` seconds is killed.
        """
        if self._process is None:
            return
        group = self._process.pid
        self.note_shared_memory()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace)
            except subprocess.TimeoutExpired:
                pass
        # A worker may outlive the leader, so the group is killed in any case.
        _kill_group(group)
        self._process.wait()
        gone_by = time.monotonic() + grace
        while _group_alive(group) and time.monotonic() < gone_by:
            time.sleep(0.05)
        for path in self._shared:
            path.unlink(missing_ok=True)
        if self._guard is not None and self._guard.poll() is None:
            self._guard.communicate(b"done\n")

    def last_lines(self, count: int = _LAST_LINES) -> list[str]:
        """The last non-empty lines of the log; none without one."""
        if self.log_path is None:
            return []
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - 64 * 1024))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]

    def _answers(self, path: str, seconds: float) -> bool:
        try:
            with _open(self.url + path, timeout=max(1.0, min(60.0, seconds))) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError, ValueError):
            return False

    def _report(self, what: str) -> str:
        lines = "\n".join(f"  | {line[:400]}" for line in self.last_lines())
        return f"the server on port {self.port} {what}; the end of {self.log_path}:\n{lines}"


def _die_with_parent() -> Callable[[], None]:
    """What the child runs before exec, so that the kernel kills it when its parent dies.

    SGLang's own workers ask for the same, so killing the leader ends them too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between the fork and the call above
            os._exit(1)

    return in_child


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _shared_memory_of(group: int) -> set[Path]:
    """Files of SGLang's that a process of the group maps or holds open and SGLang never removes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            links = list((process / "fd").iterdir())
            names = [line.split(maxsplit=5)[-1] for line in (process / "maps").open()]
        except (OSError, ValueError):
            continue
        for link in links:
            with suppress(OSError):  # a connection that was closed meanwhile
                names.append(os.readlink(link))
        for name in names:
            if name.startswith(_LEFT_IN_SHARED_MEMORY):
                found.add(Path(name.strip()))
    return found


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
