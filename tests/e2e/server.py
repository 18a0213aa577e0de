"""The real server on the embedded platform, for tests."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.process import ServerProcess, free_port
from launcher.serve import launch_command

# A start takes 25 s on two idle cores; a test machine is seldom idle.
START_TIMEOUT_S = 300


def show_progress(seconds: float, line: str) -> None:
    if int(seconds) % 10 == 0:
        print(f"  {seconds:4.0f} s  {line[:140]}", file=sys.stderr, flush=True)


@contextmanager
def embedded_server(
    model: Path,
    *flags: str,
    log: Path,
    env: dict[str, str] | None = None,
    ready: str = "/health_generate",
) -> Iterator[ServerProcess]:
    """A ready server for `model`; it and its workers are gone when the block ends.

    `ready`: the path that is asked until it answers.
    """
    port = free_port()
    own = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    argv, environment = launch_command(own, embedded=True, environ={**os.environ, **(env or {})})
    with ServerProcess(argv, environment, log, port) as server:
        server.wait_ready(START_TIMEOUT_S, show_progress, path=ready)
        yield server
