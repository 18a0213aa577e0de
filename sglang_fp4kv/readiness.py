"""Holds SGLang's HTTP server back until the launcher that started it has seen it prove itself.

`fp4kv serve` names a Unix socket in the environment. Each process that serves HTTP connects to it
before it listens, is given a token, says when SGLang's warm-up is over, and waits there for the
launcher's word. Until then SGLang's own state stays "starting" and every request without the token,
/health included, gets 503. The connection stays open for life: when the launcher dies, so does the
process. Without the variable nothing here is installed.
"""

import functools
import hmac
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
from types import SimpleNamespace

from sglang_fp4kv.served import HOLD_HEADER, HOLD_SOCKET, SERVE, WARM, peer_uid

logger = logging.getLogger(__name__)

HTTP_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
HELD_APP = "sglang_fp4kv.held_app:app"
_APP_PATH = "SGLANG_HTTP_SERVER_APP_PATH"
_ANSWER_SECONDS = 30
_BODY = json.dumps(
    {
        "error": {
            "message": "the server is starting: it answers once fp4kv has seen it prove itself",
            "type": "ServiceUnavailable",
            "code": 503,
        }
    }
).encode()
_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"retry-after", b"5"),
]


def wanted():
    """Whether this process is the first one of a server that a launcher holds back."""
    return HOLD_SOCKET in os.environ and multiprocessing.parent_process() is None


class Gate:
    """One process's connection to the launcher. ``is_open`` turns true once, on the launcher's word.

    Raises: RuntimeError at construction when no launcher of this user is behind the socket ``name``.
    """

    def __init__(self, name):
        self.is_open = False
        self._decided = threading.Event()
        self._ending = False
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(_ANSWER_SECONDS)
        try:
            self._connection.connect(f"\0{name}")
            owner = peer_uid(self._connection)
            if owner != os.getuid():
                raise RuntimeError(f"{HOLD_SOCKET}={name}: that socket is user {owner}'s")
            self._lines = self._connection.makefile("rb")
            self._token = self._lines.readline().strip()
        except OSError as error:
            raise RuntimeError(f"{HOLD_SOCKET}={name}: no launcher answers there ({error})") from None
        if not self._token:
            raise RuntimeError(f"{HOLD_SOCKET}={name}: the launcher gave no token")
        self._connection.settimeout(None)
        threading.Thread(target=self._watch, name="fp4kv-hold", daemon=True).start()

    def _watch(self):
        """Opens on the launcher's word; ends the process when the launcher is gone."""
        try:
            while line := self._lines.readline():
                if line == SERVE:
                    self.is_open = True
                    self._token = b""
                    self._decided.set()
        except OSError:
            pass
        if not self._ending:
            os.kill(os.getpid(), signal.SIGKILL)

    def admits(self, token):
        """Whether ``token`` is the launcher's; compared in constant time."""
        return bool(self._token) and hmac.compare_digest(token, self._token)

    def end(self):
        """The server shuts down: nobody has to wait for the launcher any more."""
        self._ending = True
        self._decided.set()

    def wait(self):
        """Says that the warm-up is over; returns whether the launcher lets the server serve."""
        try:
            self._connection.sendall(WARM)
        except OSError:  # the launcher is gone, and _watch ends this process
            pass
        self._decided.wait()
        return self.is_open

    def with_token(self, call):
        """``call``, a function of `requests`, with the token added to the headers."""

        @functools.wraps(call)
        def send(url, headers=None, **options):
            token = {HOLD_HEADER: self._token.decode()} if self._token else {}
            return call(url, headers={**(headers or {}), **token}, **options)

        return send


class HoldBack:
    """ASGI middleware: 503 for whoever lacks the token; once the gate is open, one attribute check."""

    def __init__(self, app, gate):
        self.app = app
        self.gate = gate

    def __call__(self, scope, receive, send):
        if self.gate.is_open:
            return self.app(scope, receive, send)
        return self._held(scope, receive, send)

    async def _held(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.app(scope, self._noticing_the_end(receive), send)
        elif any(
            name == HOLD_HEADER.encode() and self.gate.admits(value)
            for name, value in scope["headers"]
        ):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})
        else:
            await send({"type": "http.response.start", "status": 503, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _BODY})

    def _noticing_the_end(self, receive):
        # SGLang joins its warm-up thread at shutdown, and that thread waits at the gate.
        async def noticing():
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self.gate.end()
            return message

        return noticing


def install(http_server):
    """Puts the gate into the module srt/entrypoints/http_server.py of this process, once.

    The warm-up thread meets it after SGLang's warm-up, or after skipping it, and before SGLang logs
    that the server is ready. SGLang's own requests to itself carry the token.
    """
    gate = Gate(os.environ[HOLD_SOCKET])
    freeze, requests = http_server._freeze_gc_after_server_warmup, http_server.requests
    http_server.requests = SimpleNamespace(
        get=gate.with_token(requests.get),
        post=gate.with_token(requests.post),
        exceptions=requests.exceptions,
    )

    @functools.wraps(freeze)
    def freeze_then_wait(server_args):
        freeze(server_args)
        manager = http_server.get_global_state().tokenizer_manager
        manager.server_status = http_server.ServerStatus.Starting
        logger.info("fp4kv: held back until the launcher has seen the server prove itself")
        let_serve = gate.wait()
        http_server.requests = requests
        if not let_serve:
            raise SystemExit  # of this thread; the server is shutting down
        manager.server_status = http_server.ServerStatus.Up

    http_server._freeze_gc_after_server_warmup = freeze_then_wait
    http_server.app.add_middleware(HoldBack, gate=gate)


def hold_back(original, *args, **kwargs):
    """Around _setup_and_run_http_server: nothing listens before the gate is in place.

    Raises: RuntimeError for an entry point that cannot be held back.
    """
    from sglang.srt.entrypoints import http_server

    serving = http_server.get_serving()
    if serving.grpc_port is not None:
        raise RuntimeError(f"--grpc-port {serving.grpc_port}: gRPC requests cannot be held back")
    if serving.tokenizer_worker_num == 1:
        install(http_server)
    elif _APP_PATH in os.environ:
        raise RuntimeError(f"{_APP_PATH}={os.environ[_APP_PATH]}: another app cannot be held back")
    else:
        os.environ[_APP_PATH] = HELD_APP  # what each HTTP worker imports
    return original(*args, **kwargs)
