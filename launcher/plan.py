"""`fp4kv plan MODEL`: what a model's KV cache takes, and what fits, before memory is bought.

Reads config.json alone; neither torch nor SGLang is imported.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from decimal import Decimal

from launcher.flags import UsageError, parse
from launcher.modelfacts import read_facts
from launcher.plan_rows import Budget, make_plan
from launcher.plan_table import render_plan
from sglang_fp4kv.planner import PlanError

_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_SMALLEST = 1 << 20
_LARGEST = 1 << 60
# What SGLang 0.5.23 sizes by other sums: a plan would be wrong with these.
_NOT_PLANNED = {
    "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "attn_cp_size": 1, "dcp_size": 1,
    "enable_dp_attention": False, "enable_unified_memory": False, "enable_kv_cache_sharding": False,
    "enable_hisparse": False, "enable_int8_mamba_checkpoint": False,
    "enable_linear_replayssm_spec": False, "disaggregation_mode": "null", "prefill_only_disable_kv_cache": False,
    "json_model_override_args": "{}",
}  # fmt: skip
_POSITIVE = (
    "tp_size", "page_size", "context_length", "max_total_tokens", "max_running_requests",
    "speculative_num_draft_tokens", "speculative_dflash_block_size", "speculative_draft_window_size",
    "max_mamba_cache_size", "mamba_full_memory_ratio",
)  # fmt: skip


def parse_size(text):
    """Bytes of 47.3GB (10^9), 8GiB (2^30) or a plain number of bytes.

    Raises: argparse.ArgumentTypeError for what is no size, or a plain number below 2^20.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B|)\s*", text, re.ASCII)
    if not found or found[2] not in _UNITS or (not found[2] and "." in found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 47.3GB, 8GiB or whole bytes")
    size = int(Decimal(found[1]) * _UNITS[found[2]])
    if not _SMALLEST <= size < _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is {size} bytes; a size from 1MiB on is needed, with its unit"
        )
    return size


def _measured_cell(text):
    kind, _, value = text.partition("=")
    if kind not in ("bf16", "fp8_e4m3", "nvfp4") or not re.fullmatch(r"[1-9]\d{0,11}", value, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: write bf16=N, fp8_e4m3=N or nvfp4=N, N whole bytes")
    return kind, int(value)


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "plan",
        help="bytes a token, and the tokens and requests that fit in a given memory",
        usage="fp4kv plan MODEL [--draft DRAFT] [--tp N] [--kv-memory SIZE | --memory SIZE | --gpu-memory SIZE] "
        "[options] -- SGLANG_FLAGS...",
        description="A size is 47.3GB (10^9), 8GiB (2^30) or a plain number of bytes, of one GPU. SGLang's flags "
        "that change the sums (--page-size, --max-total-tokens, --mem-fraction-static, --mamba-...) follow '--'.",
    )
    parser.add_argument("model", metavar="MODEL", help="the folder with the target's config.json")
    parser.add_argument("--draft", metavar="DRAFT", help="the DFlash draft's folder")
    parser.add_argument("--tp", type=int, metavar="N", help="as SGLang's --tp-size")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--kv-memory", type=parse_size, metavar="SIZE", help="for K and V alone, states excluded"
    )
    memory.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="for K and V and recurrent states: what weights leave",
    )
    memory.add_argument("--gpu-memory", type=parse_size, metavar="SIZE", help="of the GPU, before weights")
    for name, what in (
        ("weights", "once loaded"),
        ("graphs", "CUDA graphs"),
        ("activations", "at their peak"),
    ):
        parser.add_argument(f"--{name}", type=parse_size, metavar="SIZE", help=f"measured: {what}")
    parser.add_argument(
        "--bytes-per-token", type=_measured_cell, action="append", default=[], metavar="KV=N",
        help="measured: of the target, in place of the sum; recurrent states are taken to be in it",
    )  # fmt: skip
    parser.add_argument(
        "--page-tokens", type=int, metavar="N", help="check pages that also hold a layer's state"
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON on stdout")
    parser.add_argument("--plot", metavar="OUT.png", help="a bar chart; needs matplotlib")
    parser.add_argument("sglang_flags", nargs="*", metavar="SGLANG_FLAGS", help="after --")
    return parser


def plan(args):
    """The Plan for parsed arguments.

    Raises: UsageError for what cannot be meant, PlanError for what does not fit.
    """
    flags = _flags(args)
    facts = read_facts(args.model, "MODEL")
    draft = read_facts(args.draft, "--draft") if args.draft is not None else None
    for path, found in ((args.model, facts), (args.draft, draft)):
        if path is not None and found is None:
            raise UsageError(f"{path} is not on this machine: a folder with its config.json is needed")
    for name in ("weights", "graphs", "activations"):
        if getattr(args, name) is not None and args.gpu_memory is None:
            raise UsageError(f"--{name} belongs to --gpu-memory, which is missing")
    budget = Budget(
        kv=args.kv_memory,
        pools=args.memory,
        gpu=args.gpu_memory,
        fraction=flags.mem_fraction_static,
        weights=args.weights,
        graphs=args.graphs,
        activations=args.activations,
    )
    measured = dict(args.bytes_per_token)
    if len(measured) < len(args.bytes_per_token):
        said = ", ".join(f"{kind}={value}" for kind, value in args.bytes_per_token)
        raise UsageError(f"--bytes-per-token {said}: one figure for each KV format is needed")
    return make_plan(facts, draft, flags, budget, measured, args.page_tokens)


def _flags(args):
    words = ["--model-path", args.model]
    if args.draft is not None:
        words += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", args.draft]
    if args.tp is not None:
        words += ["--tp-size", str(args.tp)]
    flags = parse([*words, *args.sglang_flags])  # what stands last wins, so a second account shows below
    if flags.model_path != args.model:
        raise UsageError(f"--model-path {flags.model_path}: the model is MODEL, {args.model}")
    if args.tp not in (None, flags.tp_size):
        raise UsageError(f"--tp-size {flags.tp_size}: --tp says {args.tp}")
    asked = flags.speculative_algorithm
    if asked is not None and (asked.upper() != "DFLASH" or args.draft is None):
        raise UsageError(f"--speculative-algorithm {asked}: a plan has a DFLASH draft, named by --draft")
    if flags.speculative_draft_model_path != args.draft:
        raise UsageError(
            f"--speculative-draft-model-path {flags.speculative_draft_model_path}: the draft is named by --draft"
        )
    for name, plain in _NOT_PLANNED.items():
        value = getattr(flags, name)
        if value not in (None, plain):
            raise UsageError(
                f"--{name.replace('_', '-')} {value}: SGLang sizes its pools otherwise then; not planned"
            )
    for name in _POSITIVE:
        value = getattr(flags, name)
        if value is not None and not 0 < value < _LARGEST:
            raise UsageError(f"--{name.replace('_', '-')} {value}: a positive number is needed")
    fraction = flags.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise UsageError(f"--mem-fraction-static {fraction}: a number between 0 and 1 is needed")
    if args.page_tokens is not None and args.page_tokens <= 0:
        raise UsageError(f"--page-tokens {args.page_tokens}: a positive number is needed")
    return flags


def run(args):
    """Exit codes: 0 planned, 2 bad usage, 3 it does not fit."""
    try:
        found = plan(args)
        if args.plot is not None:
            from launcher.plan_plot import draw

            draw(found, args.plot)
    except UsageError as error:
        print(f"fp4kv plan: {error}", file=sys.stderr)
        return 2
    except PlanError as error:
        print(f"fp4kv plan: refused: {error}", file=sys.stderr)
        return 3
    print(json.dumps(asdict(found), indent=2) if args.json else render_plan(found))
    return 0
