"""`fp4kv serve [--embedded] -- <SGLang's own flags>`: judges, starts SGLang, proves what runs."""

import os
import signal
import sys
import threading

from launcher import patchset, rules
from launcher.client import ServerError, fp4kv_report, server_info
from launcher.flags import UsageError, parse
from launcher.modelfacts import read_facts
from launcher.process import ServerProcess
from launcher.refusal import Refused, refusal

_PACKED_POOL = "sglang_fp4kv.pool.NVFP4TokenToKVPool"
_POLL_SECONDS = 2


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "serve",
        help="judge a launch, start SGLang with it and print what really runs",
        usage="fp4kv serve [--embedded] -- SGLANG_FLAGS...",
    )
    parser.add_argument(
        "--embedded", action="store_true", help="run on the CPU through Triton's interpreter"
    )
    parser.add_argument("sglang_flags", nargs="*", metavar="SGLANG_FLAGS")
    return parser


def launch_command(sglang_flags, *, embedded=False, environ=os.environ):
    """(argv, env) that start SGLang's HTTP server with these flags."""
    env = dict(environ)
    flags = list(sglang_flags)
    if embedded:
        from sglang_fp4kv.embedded.environment import embedded_env, embedded_flags

        env.update(embedded_env())
        flags += embedded_flags(flags)
    return [sys.executable, "-m", "sglang.launch_server", *flags], env


def judge_launch(sglang_flags):
    """Parses and judges SGLang's flags; returns them as a namespace.

    Raises: UsageError for what cannot be meant, Refused for what cannot run.
    """
    flags = parse(sglang_flags)
    target = read_facts(flags.model_path, "--model-path")
    draft = None
    if flags.speculative_draft_model_path is not None:
        draft = read_facts(flags.speculative_draft_model_path, "--speculative-draft-model-path")
    refusals = rules.judge(rules.Launch(flags, target, draft))
    if flags.kv_cache_dtype == "nvfp4":
        refusals += _judge_patches()
    if refusals:
        raise Refused(*refusals)
    return flags


def _judge_patches():
    state = patchset.patch_state()
    asked = "--kv-cache-dtype nvfp4"
    try:
        patchset.refuse_unless_movable(state, None, asked, half_applied=False)
    except Refused as error:
        return list(error.refusals)
    if state.state != "applied":
        return [refusal("FP4-016", asked=asked, state=state.state, where=state.root)]
    return []


def run(args):
    """Exit codes: the server's own once it started; 2 bad usage, 3 refused or not proven."""
    try:
        flags = judge_launch(args.sglang_flags)
    except UsageError as error:
        print(f"fp4kv serve: {error}", file=sys.stderr)
        return 2
    except Refused as error:
        print(error, file=sys.stderr)
        return 3
    argv, env = launch_command(args.sglang_flags, embedded=args.embedded)
    if args.embedded:
        flags = parse(argv[3:])
    _print_effective(flags)
    return _Supervisor(argv, env, flags).run()


def _print_effective(flags):
    if flags.kv_cache_dtype != "nvfp4" or flags.speculative_algorithm is None:
        return
    asked = flags.speculative_draft_kv_cache_dtype
    print(
        f"fp4kv serve: drafter KV dtype: asked {asked or '(left out)'}, "
        f"effective {asked or rules.DRAFT_DTYPE_DEFAULT}",
        file=sys.stderr,
    )


class _Supervisor:
    """Runs the server in the foreground: its output is ours, our signals are its."""

    def __init__(self, argv, env, flags):
        self.flags = flags
        self.unproven = None
        self.done = threading.Event()
        host = flags.host or "127.0.0.1"
        scheme = "https" if flags.ssl_certfile else "http"
        self.url = f"{scheme}://{'127.0.0.1' if host == '0.0.0.0' else host}:{flags.port}"
        self.server = ServerProcess(argv, env, None, flags.port)

    def run(self):
        previous = {
            number: signal.signal(number, lambda number, _frame: self.server.signal(number))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self.server.start()
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

    def _prove(self):
        """Once the server answers, prints what the scheduler reports, or stops the server."""
        key = self.flags.admin_api_key or self.flags.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else None
        while not self.done.wait(_POLL_SECONDS):
            try:
                info = server_info(self.url, headers=headers, verify=not self.flags.ssl_certfile)
            except (OSError, ServerError):
                continue
            self._conclude(fp4kv_report(info))
            return

    def _conclude(self, report):
        if self.flags.kv_cache_dtype != "nvfp4":
            return
        if report is None or report["target"]["class"] != _PACKED_POOL:
            self.unproven = f"the scheduler does not report the NVFP4 pool (it reports {report})"
            self.server.signal(signal.SIGTERM)
            return
        print(f"fp4kv serve: proven: {describe(report)}", file=sys.stderr, flush=True)


def describe(report):
    """The scheduler's report (sglang_fp4kv.proof) as one line."""
    parts = []
    for side in ("target", "draft"):
        pool = report[side]
        if pool:
            name = pool["class"].rpartition(".")[2]
            parts.append(f"{side} {pool['dtype']} {pool['bytes_per_token']} B/token in {name}")
    return "; ".join([*parts, f"{report['max_total_num_tokens']} tokens"])
