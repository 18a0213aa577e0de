"""Runs SGLang in the foreground and holds it back until it has proven itself."""

import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack

from launcher.canary import Canary
from launcher.client import ServerError, fp4kv_report, is_healthy, server_info
from launcher.equality import NEAR_TIE_BOUNDS
from launcher.expected import describe, differences, slow_writes
from launcher.hold import Hold
from launcher.launch import FP4
from launcher.process import ServerProcess

_POLL_SECONDS = 1
_STOP_SECONDS = 20  # SGLang looks for SIGTERM every 5 s and gives its workers 10 s
_HAYSTACK, _HAYSTACK_ON_CPU = 100, 12  # sentences; about 1,200 and 150 tokens


class _Unproven(Exception):
    """The server must not serve; the text is the evidence."""


class Supervisor:
    """Runs the server: its output is ours, our signals are its.

    launch: what was judged. canary: whether the canary is to run. seconds: the limit for the proof,
    counted from the end of SGLang's own warm-up; loading the weights is SGLang's own time.
    """

    def __init__(self, argv, env, launch, *, canary, seconds):
        self.launch = launch
        self.canary = canary
        self.seconds = seconds
        self.unproven = None
        self.stopped_by = None
        self.done = threading.Event()
        self.url = server_url(launch.flags)
        key = launch.flags.api_key  # what is asked here needs no administrator's
        self.headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
        self.hold = None
        self.argv, self.env = argv, dict(env)
        self.server = None

    def run(self):
        """The exit code: the server's own, 128 + n for a signal, 3 when it was not proven."""
        previous = {
            number: signal.signal(number, self._forward)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        with ExitStack() as stack:
            if held_back(self.launch):
                self.hold = stack.enter_context(Hold())
                self.env |= self.hold.env
            self.server = ServerProcess(self.argv, self.env, None, self.launch.flags.port)
            try:
                self.server.start()
                if self.stopped_by is not None:  # it came before there was a process to send it to
                    self.server.signal(self.stopped_by)
                watch = self._note_when_up if self.hold is None else self._prove
                threading.Thread(target=watch, daemon=True).start()
                code = self.server.wait()
            finally:
                self.done.set()
                self.server.stop()
                for number, handler in previous.items():
                    signal.signal(number, handler)
        if self.unproven is not None:
            _say(f"not proven, so the server was stopped: {self.unproven}")
            return 3
        return code if code >= 0 else 128 - code

    def _forward(self, number, _frame):
        # SGLang winds down on SIGTERM and SIGINT; the terminal's SIGHUP would just end its leader.
        # It answers every running request first; a second signal does not wait for that.
        again = self.stopped_by is not None
        self.stopped_by = signal.SIGTERM if number == signal.SIGHUP else number
        self.done.set()
        if self.server is not None:
            self.server.signal(signal.SIGKILL if again else self.stopped_by)

    def _note_when_up(self):
        """What a server that is not held back would leave behind is known once it is up."""
        while not self.done.wait(_POLL_SECONDS):
            if is_healthy(self.url):
                self.server.note_shared_memory()
                return

    def _prove(self):
        try:
            self._wait_until_warm()
            if self.done.is_set():
                return
            begun = time.monotonic()
            info = self._report(begun + self.seconds)
            if self.canary:
                self._ask_canary(info, begun + self.seconds)
                info = self._report(begun + self.seconds, again=True)
            # A CPU's was judged to be slow.
            for why in () if self.launch.on_cpu else slow_writes(info["internal_states"]):
                _say(f"warning: the drafter's K and V are written layer by layer, which is slower: {why}")
            self.server.note_shared_memory()
            if self.done.is_set():
                return
            self.hold.release()
            _say(f"ready after {time.monotonic() - begun:.0f} s of proof")
        except _Unproven as error:
            self._stop(str(error))
        except Exception:  # ours; nothing would let the server serve any more
            self._stop(f"the proof itself failed\n{traceback.format_exc()}")

    def _stop(self, why):
        if self.done.is_set():  # a server that was told to end answers nothing any more
            return
        self.unproven = why
        self.server.signal(signal.SIGTERM)
        if self.server.wait(_STOP_SECONDS) is None:
            self.server.signal(signal.SIGKILL)

    def _wait_until_warm(self):
        """Returns when every HTTP process is held with its warm-up over, or the server ends."""
        while not self.hold.wait_warm(self.launch.flags.tokenizer_worker_num, _POLL_SECONDS):
            if self.done.is_set():
                return
            if not self.hold.met and is_healthy(self.url):
                raise _Unproven(f"{self.url} answers without being held back: our plugin is not in it")

    @property
    def _access(self):
        return {
            "headers": {**self.headers, **self.hold.headers},
            "verify": not self.launch.flags.ssl_certfile,
        }

    def _report(self, deadline, *, again=False):
        """GET /server_info, once every replica reports what was judged; ``again``: after the canary's requests."""
        error = None
        while (left := deadline - time.monotonic()) > 0 and not self.done.is_set():
            try:
                info = server_info(self.url, timeout_s=left, **self._access)
                break
            except (OSError, ServerError) as failed:  # warmed up, but not listening yet
                error = failed
                self.done.wait(_POLL_SECONDS)
        else:
            raise _Unproven(f"the scheduler did not report within {self.seconds} s ({error})")
        found = differences(self.launch, info.get("internal_states") or [])
        if found:
            raise _Unproven("the scheduler does not serve what was judged\n  " + "\n  ".join(found))
        if not again:
            _say(f"proven: {describe(fp4kv_report(info))}")
        return info

    def _ask_canary(self, info, deadline):
        report = fp4kv_report(info)
        tokens, states = report["max_total_num_tokens"], report.get("states")
        canary = Canary(
            url=self.url,
            access=self._access,
            drafted=self.launch.drafter is not None,
            bound=NEAR_TIE_BOUNDS["nvfp4"],  # of the FP4 formats the one that was measured
            haystack=_HAYSTACK_ON_CPU if self.launch.on_cpu else _HAYSTACK,
            room=min(n for n in (self.launch.context, tokens) if n),
            page_size=None if info["disable_radix_cache"] else info["page_size"],
            snapshot_tokens=states["snapshot_tokens"] if states else 0,
            ranks=self.launch.flags.dp_size,
            cancelled=self.done,
        )
        try:
            outcome = canary.run(deadline - time.monotonic())
        except (OSError, ServerError) as error:
            raise _Unproven(f"the canary got no answer (limit {self.seconds} s): {error}") from None
        if outcome.failures:
            raise _Unproven("the canary failed\n" + "\n".join(outcome.failures))
        _say(f"canary passed: {outcome.summary}")


def held_back(launch):
    """Whether the server is held back: FP4 KV, on the node that serves HTTP."""
    return launch.kv_dtype in FP4 and not launch.flags.node_rank


def server_url(flags):
    """Where the server is reached from this machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(flags.host or "", flags.host)
    scheme = "https" if flags.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{flags.port}"


def _say(text):
    print(f"fp4kv serve: {text}", file=sys.stderr, flush=True)
