"""`fp4kv check --url URL [--control URL] [--undrafted URL]`: does a running server answer rightly?"""

import json
import os
import sys
import time
from datetime import datetime

from launcher.checks import report, runner, table
from launcher.checks.options import ANSWERS, DEPTHS, POSITIONS, Options
from launcher.checks.registry import CHECKS
from launcher.checks.suite import SUITES, WORKLOADS
from launcher.flags import UsageError

KEY_VARIABLE = "FP4KV_API_KEY"


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "check",
        help="ask a running SGLang server and say whether it answers rightly",
        description="Exit code 0 when every check asked passed, 3 when not, 2 for bad usage. A check that could"
        f" not run is no pass; --skip leaves it out. An API key is read from {KEY_VARIABLE}.",
    )
    add = parser.add_argument
    add("--url", metavar="URL", help="the server to check, http://HOST:PORT")
    add("--control", metavar="URL", help="the same model with FP8 or BF16 KV")
    add(
        "--undrafted",
        metavar="URL|FOLDER",
        help="the same launch without its drafter, or the folder of a run of it",
    )
    add(
        "--one-chunk",
        metavar="URL",
        help="the same launch with larger prefill chunks; the other servers serve too",
    )
    add(
        "--suite",
        default="chat",
        help=f"the prompts: {', '.join(SUITES)} (default chat; pair is for the shipped pair)",
    )
    add("--only", type=_ids, default=(), metavar="ID,..", help=f"of {', '.join(CHECKS)}")
    add("--skip", type=_ids, default=(), metavar="ID,..", help="leave these out")
    add(
        "--depths",
        type=_numbers(int),
        default=DEPTHS,
        metavar="N,..",
        help=f"tokens before the question of a recall (default {','.join(map(str, DEPTHS))})",
    )
    add(
        "--positions",
        type=_numbers(float),
        default=POSITIONS,
        metavar="P,..",
        help=f"of the code, 0 to 1 (default {','.join(map(str, POSITIONS))})",
    )
    add(
        "--answers",
        type=int,
        default=ANSWERS,
        metavar="N",
        help=f"compared with the control (default {ANSWERS})",
    )
    add(
        "--prompts",
        type=int,
        metavar="N",
        help="at most so many prompts of a kind, for a slow server (default: all)",
    )
    add("--max-tokens", type=int, metavar="N", help="of an answer (default: the suite's)")
    add("--seed", type=int, metavar="N", help="of texts and codes (default: the suite's)")
    add(
        "--floor",
        type=_floor,
        action="append",
        default=[],
        metavar="[WORKLOAD=]N",
        help=f"accept length; workloads {', '.join(WORKLOADS)}",
    )
    add("--profile", metavar="FILE", help="a profile (configs/*.yaml) that states the floors")
    add("--kv", choices=("bf16", "fp8_e4m3", "nvfp4"), help="the KV format where the server does not say")
    add("--model", help="the model's name in requests (default: the first that the server lists)")
    add("--chat-template-kwargs", type=_object, metavar="JSON", help='of every request, {"enable_thinking": false} say')
    add("--timeout", type=float, default=600, metavar="S", help="of one answer (default 600)")
    add("--out", metavar="FOLDER", help="where everything is kept (default fp4kv-check-DATE)")
    add("--json", action="store_true", help="the verdict as JSON on stdout")
    add("--rescore", metavar="FOLDER", help="judge a run on file again; asks no server")
    return parser


def _ids(text):
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(kind):
    def read(text):
        return tuple(kind(part) for part in text.split(","))

    read.__name__ = "list of numbers"  # what argparse calls a value that is none
    return read


def _object(text):
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    return found


_object.__name__ = "JSON object"


def _floor(text):
    workload, _, number = text.rpartition("=")
    return workload, float(number)


class Progress:
    """One line on stderr: rewritten on a terminal, else one a check and one every ten seconds."""

    def __init__(self, out=None, clock=time.monotonic):
        self.out, self.clock = out or sys.stderr, clock
        self.begun = self.shown = clock()
        self.check = None

    def __call__(self, check, asked, what):
        now = self.clock()
        line = f"[{now - self.begun:5.0f} s] {check} {asked} {what}"
        if self.out.isatty():
            print(f"\r{line[:100]:<100}", end="", file=self.out, flush=True)
        elif check != self.check or now - self.shown >= 10:
            self.shown = now
            print(line.rstrip(), file=self.out, flush=True)
        self.check = check

    def end(self):
        if self.out.isatty():
            print(file=self.out)


def options_of(args):
    """The Options of parsed arguments.

    Raises: UsageError
    """
    floors = dict(_profile_floors(args.profile)) | dict(args.floor)
    given = ("url", "control", "undrafted", "one_chunk", "suite", "only", "skip", "depths", "positions", "answers",
             "prompts", "max_tokens", "seed", "kv", "model")  # fmt: skip
    return Options(
        **{name: getattr(args, name) for name in given},
        floors=tuple(floors.items()),
        template=args.chat_template_kwargs,
        timeout_s=args.timeout,
    )


def _profile_floors(file):
    """The floors that a profile states, by workload.

    Raises: UsageError
    """
    if file is None:
        return {}
    from launcher.profile import load_profile

    profile = load_profile(file)
    floors = dict(profile.accept_length_floors or {})
    if profile.accept_length_floor is not None:
        floors.setdefault("", profile.accept_length_floor)
    if not floors:
        raise UsageError(f"--profile {file}: it states no accept_length_floor")
    return floors


def run(args):
    """Exit codes: 0 all asked passed, 3 not, 2 bad usage, 130 interrupted."""
    progress = Progress()
    try:
        if args.rescore is not None:
            return _rescore(args)
        if args.url is None:
            raise UsageError("--url URL is needed, or --rescore FOLDER")
        options = options_of(args)
        folder = args.out or f"fp4kv-check-{datetime.now():%Y%m%d-%H%M%S}"
        verdict = runner.run(
            options, folder, api_key=os.environ.get(KEY_VARIABLE), progress=progress, command=sys.argv[1:]
        )
    except UsageError as error:
        print(f"fp4kv check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.end()
        print("fp4kv check: interrupted; what was asked is on file", file=sys.stderr)
        return 130
    progress.end()
    report.write(folder, verdict)
    _show(args, verdict)
    print(f"everything is in {folder}, the report in {folder}/{report.FILE}", file=sys.stderr)
    return verdict["exit_code"]


def _rescore(args):
    verdict, stored = runner.rescore(args.rescore)
    _show(args, verdict)
    if stored is None:
        print("no verdict is on file there to compare with", file=sys.stderr)
    elif stored == json.loads(json.dumps(verdict)):
        print("the same verdict as on file", file=sys.stderr)
    elif _statuses(stored) == _statuses(verdict):
        print("the same verdict as on file, check by check; what is said of them differs", file=sys.stderr)
    else:
        print(f"NOT the verdict on file, which is {stored.get('verdict')}", file=sys.stderr)
    return verdict["exit_code"]


def _statuses(verdict):
    """The verdict and each check's status; what is on file may have been changed by hand."""
    checks = verdict.get("checks")
    named = checks.items() if isinstance(checks, dict) else ()
    return verdict.get("verdict"), {id: c.get("status") if isinstance(c, dict) else c for id, c in named}


def _show(args, verdict):
    if args.json:
        print(json.dumps(verdict, indent=1))
        print(table.render(verdict), file=sys.stderr)
    else:
        print(table.render(verdict))
