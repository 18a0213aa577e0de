"""The launcher's end of the hold-back: a Unix socket that every HTTP process of the server connects to.

Each gets the token that lets the canary through, says when its warm-up is over, and is told to serve.
The server's end is sglang_fp4kv/readiness.py, which also ends the server when this end goes away.
"""

import os
import secrets
import socket
import threading

from sglang_fp4kv.served import HOLD_HEADER, HOLD_SOCKET, SERVE, WARM, peer_uid


class Hold:
    """A listening socket with a random name in Linux's abstract namespace, so that nothing of it stays;
    only processes of this user are answered. A context manager.

    ``env``: what the server's environment needs. ``headers``: what the canary's requests carry.
    """

    def __init__(self):
        self._token = secrets.token_hex(32)
        self._held = []
        self._warm = set()
        self._released = False
        self._changed = threading.Condition()
        name = f"fp4kv-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self.env = {HOLD_SOCKET: name}
        self.headers = {HOLD_HEADER: self._token}
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for connection in self._held:
                try:
                    connection.shutdown(socket.SHUT_RDWR)  # closing waits for whoever reads from it
                except OSError:  # the other end is gone
                    pass
                connection.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if peer_uid(connection) != os.getuid():
                connection.close()
                continue
            threading.Thread(target=self._hold, args=(connection,), daemon=True).start()

    def _hold(self, connection):
        """One process of the server, from its start to its end; one that is restarted comes again."""
        with self._changed:
            self._held.append(connection)
        try:
            connection.sendall(self._token.encode() + b"\n")
            for line in connection.makefile("rb"):
                if line == WARM:
                    with self._changed:
                        self._warm.add(connection)
                        self._changed.notify_all()
                        if self._released:
                            connection.sendall(SERVE)
        except (OSError, ValueError):
            pass
        with self._changed:
            self._warm.discard(connection)

    @property
    def met(self):
        """Whether any process of the server has come to be held."""
        return bool(self._held)

    def wait_warm(self, count, seconds):
        """Whether ``count`` processes have warmed up, within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._warm) >= count, seconds)

    def release(self):
        """Lets the server serve. The token is worth nothing from here on."""
        with self._changed:
            self._released = True
            for connection in self._warm:
                connection.sendall(SERVE)
