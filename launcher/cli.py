"""The `fp4kv` command."""

import argparse
import sys

from launcher import explain, judge, patchset, plan, serve
from launcher.checks import command as check

_TAKES_SGLANG_FLAGS = (["serve"], ["judge"], ["plan"])


def build_parser():
    parser = argparse.ArgumentParser(
        prog="fp4kv", description="NVFP4 KV cache together with a DFlash drafter on SGLang 0.5.23"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands).set_defaults(run=serve.run)
    judge.add_parser(commands).set_defaults(run=judge.run)
    plan.add_parser(commands).set_defaults(run=plan.run)
    explain.add_parser(commands).set_defaults(run=explain.run)
    check.add_parser(commands).set_defaults(run=check.run)
    patchset.add_parser(commands)
    return parser


def main(argv=None):
    """Exit codes: 0 accepted, 2 bad usage, 3 refused or not right, 1 our own failure; serve passes SGLang's on."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # Cut by hand: how argparse treats '--' differs between the releases of Python.
    ours, theirs = argv, []
    if argv[:1] in _TAKES_SGLANG_FLAGS and "--" in argv:
        cut = argv.index("--")
        ours, theirs = argv[:cut], argv[cut + 1 :]
    parser = build_parser()
    args, unknown = parser.parse_known_args(ours)
    if unknown:
        hint = "; SGLang's flags follow '--'" if [args.command] in _TAKES_SGLANG_FLAGS else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if [args.command] in _TAKES_SGLANG_FLAGS:
        args.sglang_flags = [*args.sglang_flags, *theirs]
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
