"""Both ends of the hold-back: what is answered before and after the launcher's word, and who ends whom."""

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.hold import Hold
from sglang_fp4kv import readiness
from sglang_fp4kv.served import HOLD_HEADER, HOLD_SOCKET

ROOT = Path(__file__).parent.parent


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def hold():
    with Hold() as held:
        yield held


@pytest.fixture
def gate(hold):
    made = readiness.Gate(hold.env[HOLD_SOCKET])
    yield made
    made.end()  # or the launcher's end would end this process


class App:
    """An ASGI app that notes what reached it and streams two chunks."""

    def __init__(self):
        self.reached = []

    async def __call__(self, scope, receive, send):
        self.reached.append(scope["type"])
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})


def ask(app, kind="http", headers=(), messages=()):
    """What ``app`` sends for one connection."""
    sent, incoming = [], iter(messages)

    async def receive():
        return next(incoming)

    async def send(message):
        sent.append(message)

    asyncio.run(app({"type": kind, "headers": list(headers), "path": "/health"}, receive, send))
    return sent


def token_of(hold):
    return [(HOLD_HEADER.encode(), hold.headers[HOLD_HEADER].encode())]


def test_503_without_the_token_until_the_launchers_word(hold, gate):
    app = App()
    held = readiness.HoldBack(app, gate)
    start, body = ask(held)
    assert start["status"] == 503 and b"seen it prove itself" in body["body"]
    assert (b"retry-after", b"5") in start["headers"]
    assert ask(held, headers=[(HOLD_HEADER.encode(), b"guess")])[0]["status"] == 503
    assert app.reached == []
    assert [m.get("status", m.get("body")) for m in ask(held, headers=token_of(hold))] == [200, b"1", b"2"]
    released = threading.Thread(target=gate.wait)
    released.start()
    assert hold.wait_warm(1, 10) and not hold.wait_warm(2, 0)
    hold.release()
    released.join(10)
    assert gate.is_open and ask(held)[0]["status"] == 200


def test_a_websocket_is_closed(gate):
    app = App()
    assert ask(readiness.HoldBack(app, gate), "websocket") == [{"type": "websocket.close", "code": 1013}]
    assert app.reached == []


def test_the_open_gate_adds_nothing_to_a_request(gate):
    gate.is_open = True
    app = App()
    call = readiness.HoldBack(app, gate)({"type": "http", "headers": []}, None, None)
    assert call.cr_code is App.__call__.__code__  # the app's own coroutine
    call.close()


def test_the_token_is_worth_nothing_after_the_release(hold, gate):
    token = hold.headers[HOLD_HEADER].encode()
    assert gate.admits(token) and not gate.admits(token[:-1]) and not gate.admits(b"")
    threading.Thread(target=gate.wait).start()
    assert hold.wait_warm(1, 10)
    hold.release()
    assert wait_until(lambda: not gate.admits(token))
    assert gate.with_token(lambda url, headers: headers)("u") == {}


def test_sglangs_own_requests_carry_the_token(hold, gate):
    assert gate.with_token(lambda url, headers: headers)("u", headers={"a": "b"}) == {
        "a": "b", **hold.headers,
    }  # fmt: skip


def test_a_shutdown_ends_the_wait_without_serving(gate):
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(gate.wait()))
    thread.start()
    ask(
        readiness.HoldBack(App(), gate), "lifespan",
        messages=[{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}],
    )  # fmt: skip
    thread.join(10)
    assert waiting == [False]


def test_a_process_that_comes_after_the_release_is_let_through(hold):
    hold.release()
    late = readiness.Gate(hold.env[HOLD_SOCKET])
    assert late.wait() is True
    late.end()


def test_install_holds_sglangs_warm_up_thread(hold, monkeypatch):
    monkeypatch.setenv(HOLD_SOCKET, hold.env[HOLD_SOCKET])
    calls, manager = [], SimpleNamespace(server_status="Up")
    requests = SimpleNamespace(get=None, post=lambda url, headers: headers, exceptions="e")
    added = []
    server = SimpleNamespace(
        _freeze_gc_after_server_warmup=lambda args: calls.append(server.requests.post("u")),
        requests=requests,
        get_global_state=lambda: SimpleNamespace(tokenizer_manager=manager),
        ServerStatus=SimpleNamespace(Starting="Starting", Up="Up"),
        app=SimpleNamespace(add_middleware=lambda kind, gate: added.append((kind, gate))),
    )
    server.requests.get = requests.post
    readiness.install(server)
    ((kind, gate),) = added
    assert kind is readiness.HoldBack
    thread = threading.Thread(target=server._freeze_gc_after_server_warmup, args=("args",))
    thread.start()
    assert hold.wait_warm(1, 10)
    assert manager.server_status == "Starting" and calls == [hold.headers]
    hold.release()
    thread.join(10)
    assert manager.server_status == "Up" and server.requests is requests
    gate.end()


def test_the_places_in_sglang_are_as_they_were_read():
    from sglang.srt.entrypoints import http_server as found

    assert list(inspect.signature(found._freeze_gc_after_server_warmup).parameters) == ["server_args"]
    names = inspect.unwrap(found._wait_and_warmup).__code__.co_names
    assert "_freeze_gc_after_server_warmup" in names and "server_status" in names
    assert {"Starting", "Up"} <= set(found.ServerStatus.__members__)
    assert "_wait_and_warmup" in inspect.unwrap(found.lifespan).__code__.co_names


@pytest.mark.parametrize(
    ("changes", "environ", "message"),
    [
        ({"grpc_port": 5}, {}, "--grpc-port 5: gRPC requests cannot be held back"),
        (
            {"tokenizer_worker_num": 2}, {"SGLANG_HTTP_SERVER_APP_PATH": "a:b"},
            "SGLANG_HTTP_SERVER_APP_PATH=a:b: another app cannot be held back",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_held_back_does_not_start(monkeypatch, changes, environ, message):
    from sglang.srt.entrypoints import http_server

    serving = SimpleNamespace(**{"grpc_port": None, "tokenizer_worker_num": 1, **changes})
    monkeypatch.setattr(http_server, "get_serving", lambda: serving)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        readiness.hold_back(lambda: pytest.fail("it started"))


def test_several_tokenizers_import_the_held_app(monkeypatch):
    from sglang.srt.entrypoints import http_server

    serving = SimpleNamespace(grpc_port=None, tokenizer_worker_num=2)
    monkeypatch.setattr(http_server, "get_serving", lambda: serving)
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "x")
    monkeypatch.delenv("SGLANG_HTTP_SERVER_APP_PATH")
    assert readiness.hold_back(lambda: os.environ["SGLANG_HTTP_SERVER_APP_PATH"]) == readiness.HELD_APP


def test_no_launcher_is_an_error():
    with pytest.raises(RuntimeError, match="FP4KV_HOLD_SOCKET=nobody: no launcher answers there"):
        readiness.Gate("nobody")


def test_a_launcher_without_a_token_is_an_error():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0fp4kv-test-mute")
        listener.listen()
        threading.Thread(target=lambda: listener.accept()[0].close()).start()
        with pytest.raises(RuntimeError, match="fp4kv-test-mute: the launcher gave no token"):
            readiness.Gate("fp4kv-test-mute")


def test_another_users_socket_is_an_error(hold, monkeypatch):
    monkeypatch.setattr(readiness, "peer_uid", lambda _: os.getuid() + 1)
    with pytest.raises(RuntimeError, match=f"that socket is user {os.getuid() + 1}'s"):
        readiness.Gate(hold.env[HOLD_SOCKET])


def test_another_users_process_gets_no_token(hold, monkeypatch):
    monkeypatch.setattr("launcher.hold.peer_uid", lambda _: os.getuid() + 1)
    with pytest.raises(RuntimeError, match="gave no token"):
        readiness.Gate(hold.env[HOLD_SOCKET])
    assert not hold.met


@pytest.mark.parametrize("released", [False, True])
def test_a_held_process_dies_with_its_launcher_before_and_after_the_release(released):
    script = textwrap.dedent(
        """
        import time
        from sglang_fp4kv.readiness import Gate
        import os
        gate = Gate(os.environ["FP4KV_HOLD_SOCKET"])
        gate.wait()
        time.sleep(60)
        """
    )
    hold = Hold()
    environ = {**os.environ, **hold.env, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], env=environ) as process:
        assert hold.wait_warm(1, 30)
        if released:
            hold.release()
        hold.__exit__()  # what the kernel does for a launcher that is killed
        try:
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()


def test_only_the_first_process_of_a_held_server_is_asked(monkeypatch):
    monkeypatch.delenv(HOLD_SOCKET, raising=False)
    assert not readiness.wanted()
    monkeypatch.setenv(HOLD_SOCKET, "x")
    assert readiness.wanted()
    monkeypatch.setattr(readiness.multiprocessing, "parent_process", lambda: object())
    assert not readiness.wanted()
