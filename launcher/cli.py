"""The `fp4kv` command."""

import argparse
import sys

from launcher import patchset, serve


def build_parser():
    parser = argparse.ArgumentParser(
        prog="fp4kv", description="NVFP4 KV cache together with a DFlash drafter on SGLang 0.5.23"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands).set_defaults(run=serve.run)
    patchset.add_parser(commands)
    return parser


def main(argv=None):
    """Exit codes: 0 accepted, 2 bad usage, 3 refused, 1 our own failure; serve passes SGLang's on."""
    args = build_parser().parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
