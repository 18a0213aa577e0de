"""`fp4kv serve [--embedded] -- <SGLang's own flags>`: judges, starts SGLang, proves what runs."""

import os
import signal
import socket
import sys
import threading

from launcher import judge
from launcher.client import ServerError, fp4kv_report, server_info
from launcher.flags import UsageError, parse
from launcher.probe import probe
from launcher.process import ServerProcess
from launcher.refusal import Refused, render
from launcher.verdict import render_verdict

# -P: a folder sglang/ where the user stands is not the SGLang that was judged.
COMMAND = (sys.executable, "-P", "-m", "sglang.launch_server")
PACKED_POOL = "sglang_fp4kv.pool.NVFP4TokenToKVPool"
_POLL_SECONDS = 2


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "serve",
        help="judge a launch, start SGLang with it and print what really runs",
        usage="fp4kv serve [--embedded] [--profile FILE] [--allow FP4-nnn] -- SGLANG_FLAGS...",
    )
    parser.add_argument(
        "--embedded", action="store_true", help="run on the CPU through Triton's interpreter"
    )
    judge.add_arguments(parser)
    return parser


def launch_command(sglang_flags, *, embedded=False, environ=os.environ):
    """(argv, env) that start SGLang's HTTP server with these flags."""
    env = dict(environ)
    flags = list(sglang_flags)
    if embedded:
        from sglang_fp4kv.embedded.environment import embedded_env, embedded_flags

        env.update(embedded_env())
        # Before the user's: of a repeated flag SGLang takes the last, in any spelling.
        flags = [*embedded_flags(flags), *flags]
    return [*COMMAND, *flags], env


def judge_launch(sglang_flags, *, allow=(), profile=None):
    """Judges SGLang's flags as `fp4kv judge` does on this machine; returns the Verdict.

    Raises: UsageError for what cannot be meant, Refused for what cannot run.
    """
    _check_address(parse(sglang_flags))
    verdict = judge.judge(sglang_flags, machine=probe(), allow=allow, profile=profile)
    if verdict.refusals:
        raise Refused(*verdict.refusals)
    return verdict


def _check_address(flags):
    """Raises UsageError unless the server could listen where it is asked to, now."""
    host, port = flags.host, flags.port
    if not 1 <= port <= 65535:
        raise UsageError(f"--port {port}: a port is a number from 1 to 65535")
    if flags.enable_http_worker_reuseport:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host} --port {port}: nothing can listen there ({why})") from None


def run(args):
    """Exit codes: the server's own once it started; 2 bad usage, 3 refused or not proven."""
    try:
        profile = judge.read_profile(args.profile)
        given = [*(profile.flags if profile else []), *args.sglang_flags]
        argv, env = launch_command(given, embedded=args.embedded)
        verdict = judge_launch(argv[len(COMMAND) :], allow=args.allow, profile=profile)
    except UsageError as error:
        print(f"fp4kv serve: {error}", file=sys.stderr)
        return 2
    except Refused as error:
        print(render(error.refusals, wrapped=True), file=sys.stderr)
        return 3
    print(render_verdict(verdict), file=sys.stderr, flush=True)
    return _Supervisor(argv, env, verdict.flags).run()


class _Supervisor:
    """Runs the server in the foreground: its output is ours, our signals are its."""

    def __init__(self, argv, env, flags):
        self.flags = flags
        self.unproven = None
        self.stopped_by = None
        self.done = threading.Event()
        self.url = _url(flags)
        self.server = ServerProcess(argv, env, None, flags.port)

    def run(self):
        previous = {
            number: signal.signal(number, self._forward)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            self.server.start()
            if self.stopped_by is not None:  # it came before there was a process to send it to
                self.server.signal(self.stopped_by)
            threading.Thread(target=self._prove, daemon=True).start()
            code = self.server.wait()
        finally:
            self.done.set()
            self.server.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.unproven is not None:
            print(f"fp4kv serve: {self.unproven}; the server was stopped", file=sys.stderr)
            return 3
        return code if code >= 0 else 128 - code

    def _forward(self, number, _frame):
        # SGLang winds down on SIGTERM and SIGINT; the terminal's SIGHUP would just end its leader.
        # It answers every running request first; a second signal does not wait for that.
        again = self.stopped_by is not None
        self.stopped_by = signal.SIGTERM if number == signal.SIGHUP else number
        self.server.signal(signal.SIGKILL if again else self.stopped_by)

    def _prove(self):
        """Once the server answers, prints what the scheduler reports, or stops the server."""
        key = self.flags.admin_api_key or self.flags.api_key
        headers = {"Authorization": f"Bearer {key}".encode()} if key else None
        while not self.done.wait(_POLL_SECONDS):
            try:
                info = server_info(self.url, headers=headers, verify=not self.flags.ssl_certfile)
            except (OSError, ServerError):
                continue
            self.server.note_shared_memory()
            self._conclude(fp4kv_report(info))
            return

    def _conclude(self, report):
        if self.flags.kv_cache_dtype != "nvfp4":
            return
        if report is None or report["target"]["class"] != PACKED_POOL:
            self.unproven = f"the scheduler does not report the NVFP4 pool (it reports {report})"
            self.server.signal(signal.SIGTERM)
            return
        print(f"fp4kv serve: proven: {describe(report)}", file=sys.stderr, flush=True)


def _url(flags):
    """Where the server is reached from this machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(flags.host or "", flags.host)
    scheme = "https" if flags.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{flags.port}"


def describe(report):
    """The scheduler's report (sglang_fp4kv.proof) as one line."""
    parts = []
    for side in ("target", "draft"):
        pool = report[side]
        if pool:
            name = pool["class"].rpartition(".")[2]
            parts.append(f"{side} {pool['dtype']} {pool['bytes_per_token']} B/token in {name}")
    return "; ".join([*parts, f"{report['max_total_num_tokens']} tokens"])
