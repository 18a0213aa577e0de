"""`fp4kv serve [--embedded] -- <SGLang's own flags>`: judges, starts SGLang, proves what runs."""

import argparse
import os
import socket
import sys

from launcher import judge
from launcher.flags import UsageError, parse
from launcher.launch import FP4
from launcher.probe import probe
from launcher.refusal import Refused, render
from launcher.verdict import render_verdict

# -P: a folder sglang/ where the user stands is not the SGLang that was judged.
COMMAND = (sys.executable, "-P", "-m", "sglang.launch_server")
_PROOF_SECONDS = 600


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "serve",
        help="judge a launch, start SGLang with it and print what really runs",
        usage="fp4kv serve [--embedded] [--profile FILE] [--allow FP4-nnn] [--no-canary] "
        "[--proof-timeout SECONDS] -- SGLANG_FLAGS...",
    )
    parser.add_argument(
        "--embedded", action="store_true", help="run on the CPU through Triton's interpreter"
    )
    parser.add_argument(
        "--no-canary", action="store_true", help="serve without asking the server its test prompts"
    )
    parser.add_argument(
        "--proof-timeout",
        type=_seconds,
        default=_PROOF_SECONDS,
        metavar="SECONDS",
        help="stop a server that is not proven so long after its warm-up (default %(default)s)",
    )
    judge.add_arguments(parser)
    return parser


def _seconds(text):
    try:
        seconds = int(text)
    except ValueError:
        seconds = 0
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


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
    for text in _warnings(verdict.launch, canary=not args.no_canary):
        print(f"fp4kv serve: warning: {text}", file=sys.stderr, flush=True)
    from launcher.supervise import Supervisor  # an HTTP client, which judging would wait for

    return Supervisor(
        argv, env, verdict.launch, canary=not args.no_canary, seconds=args.proof_timeout
    ).run()


def _warnings(launch, *, canary):
    if launch.kv_dtype not in FP4:
        return
    if launch.flags.node_rank:
        yield f"--node-rank {launch.flags.node_rank}: node 0 serves, and it is proven and held back there"
    elif not canary:
        yield "--no-canary: what the server answers is not checked before it serves"
