import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launcher.process import ServerFailed, ServerProcess, free_port

SERVER = textwrap.dedent(
    """
    import http.server, subprocess, sys, time
    print("coming up", flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(float(sys.argv[2]))
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health_generate" else 404)
            self.end_headers()
        def log_message(self, *args):
            pass
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)


def server(tmp_path, source=SERVER, delay="0.1"):
    port = free_port()
    return ServerProcess(
        [sys.executable, "-c", source, str(port), delay], None, tmp_path / "logs" / "s.log", port
    )


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def group_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def child_of(process):
    for line in process.last_lines():
        if line.startswith("child "):
            return int(line.split()[1])
    raise AssertionError(process.last_lines())


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_becomes_ready_and_leaves_no_process(tmp_path):
    seen = []
    with server(tmp_path, delay="2.5") as process:
        assert process.wait_ready(30, lambda seconds, line: seen.append((seconds, line))) >= 2
        pids = [process.pid, child_of(process)]
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)
    assert seen and seen[-1][1].startswith("child ")
    process.stop()


def test_group_of_a_dead_leader_is_killed(tmp_path):
    process = server(tmp_path).start()
    process.wait_ready(30)
    child = child_of(process)
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: process.returncode() is not None)
    assert alive(child)
    process.stop()
    assert not alive(child)


def test_a_leader_that_ignores_sigterm_is_killed(tmp_path):
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
    process = server(tmp_path, source).start()
    process.wait_ready(30)
    process.stop(grace=0.3)
    assert process.returncode() == -signal.SIGKILL


def test_early_end_is_reported_with_the_log(tmp_path):
    with server(tmp_path, "print('no such model'); raise SystemExit(3)") as process:
        with pytest.raises(ServerFailed, match=r"(?s)ended with status 3; .*\| no such model"):
            process.wait_ready(30)


def test_no_answer_in_time(tmp_path):
    with server(tmp_path, delay="60") as process:
        with pytest.raises(ServerFailed, match=r"did not answer within 1 s"):
            process.wait_ready(1)


def test_a_second_start_is_refused(tmp_path):
    with server(tmp_path) as process, pytest.raises(RuntimeError, match="was started before"):
        process.start()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm")
def test_sglangs_shared_memory_is_removed(tmp_path):
    path = Path(f"/dev/shm/sglang_loads_test_{os.getpid()}.shm")
    source = f"held = open({str(path)!r}, 'w')\n" + SERVER
    with server(tmp_path, source) as process:
        process.wait_ready(30)
        assert path.exists()
    assert not path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm")
def test_shared_memory_of_a_server_that_ended_by_itself_is_removed(tmp_path):
    path = Path(f"/dev/shm/sglang_loads_ended_{os.getpid()}.shm")
    source = f"held = open({str(path)!r}, 'w')\n" + SERVER
    with server(tmp_path, source) as process:
        process.wait_ready(30)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert path.exists()
    assert not path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_connection_that_closes_meanwhile_hides_no_shared_memory(tmp_path, monkeypatch):
    path = Path(f"/dev/shm/sglang_loads_seen_{os.getpid()}.shm")
    readlink, asked = os.readlink, []

    def vanishing(link):
        asked.append(link)
        if len(asked) == 1:
            raise FileNotFoundError(link)
        return readlink(link)

    with server(tmp_path, f"held = open({str(path)!r}, 'w')\n" + SERVER) as process:
        process.wait_ready(30)
        process._shared.clear()
        monkeypatch.setattr("launcher.process.os.readlink", vanishing)
        process.note_shared_memory()
        assert process._shared == {path} and len(asked) > 1
    assert not path.exists()


def test_before_start(tmp_path):
    process = server(tmp_path)
    assert process.pid is None and process.returncode() is None and process.last_lines() == []
    process.stop()


def test_free_port_can_be_bound():
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_dies_with_a_killed_parent(tmp_path):
    port = free_port()
    script = (
        "import sys, time; from launcher.process import ServerProcess\n"
        f"p = ServerProcess([sys.executable, '-c', {SERVER!r}, '{port}', '0'], None, "
        f"{str(tmp_path / 's.log')!r}, {port}).start()\n"
        "p.wait_ready(30); print(p.pid, flush=True); time.sleep(600)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert wait_until(lambda: not group_alive(pid))  # the child too, which asked for nothing
