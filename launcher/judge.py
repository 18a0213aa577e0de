"""`fp4kv judge -- SGLANG_FLAGS`: whether a launch can work, why not, and what to type instead.

Nothing is started, and neither torch nor SGLang is imported.
"""

import argparse
import json
import os
import sys

from launcher import patchset, rules
from launcher.effective import effective_values
from launcher.flags import UsageError, parse
from launcher.launch import DRAFT_FLAG, FP4, MODEL_FLAG, MODULES, Launch
from launcher.modelfacts import locate, read_facts
from launcher.probe import Failed, parse_gpu, probe
from launcher.refusal import Refused, refusal
from launcher.results import results_for
from launcher.rules_drafter import found_draft
from launcher.verdict import Verdict, render_verdict
from sglang_fp4kv.served import DRAFTERS_WITH_MODEL, DRAFTERS_WITHOUT_MODEL

WORKS, UNTESTED, FAILS = "works", rules.UNTESTED, rules.FAILS
_LARGEST = 1 << 40


def add_arguments(parser):
    """What judging takes besides SGLang's flags, for `judge` and `serve`."""
    parser.add_argument("--profile", metavar="FILE", help="flags that come before yours, and more")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="FP4-nnn",
        help="start an untested combination all the same; may be repeated",
    )
    parser.add_argument("sglang_flags", nargs="*", metavar="SGLANG_FLAGS", help="after --")


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "judge",
        help="say whether a launch can work, without starting anything",
        usage="fp4kv judge [--profile FILE] [--gpu sm_121] [--gpu-memory GB] [--tp N] "
        "[--allow FP4-nnn] [--json] -- SGLANG_FLAGS...",
    )
    parser.add_argument("--gpu", metavar="sm_121", help="judge for this GPU, not the one here")
    parser.add_argument("--gpu-memory", type=_positive, metavar="GB", help="its memory, in 2^30 bytes")
    parser.add_argument("--tp", type=int, metavar="N", help="as SGLang's --tp-size")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON on stdout")
    add_arguments(parser)
    return parser


def _positive(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no amount of memory")
    return value


def read_profile(path):
    """The profile in the file ``path``; None for None."""
    if path is None:
        return None
    from launcher.profile import load_profile  # needs a YAML parser, which nothing else here does

    return load_profile(path)


def judge(sglang_flags, *, machine, allow=(), profile=None):
    """The Verdict on SGLang's flags (a profile's own are in front already).

    Raises: UsageError for what cannot be meant.
    """
    flags = parse(sglang_flags)
    _check_allow(allow)
    _check_numbers(flags)
    paths = {MODEL_FLAG: flags.model_path}
    if flags.speculative_draft_model_path is not None:
        paths[DRAFT_FLAG] = flags.speculative_draft_model_path
    named = {}
    if profile is not None:
        named = {"draft_revision": profile.draft_revision, "draft_sha256": profile.draft_sha256}
    if flags.kv_cache_dtype in FP4 or any(named.values()):
        revisions = {MODEL_FLAG: flags.revision, DRAFT_FLAG: flags.speculative_draft_model_revision}
        facts = {flag: read_facts(path, flag, revisions[flag], flags.download_dir) for flag, path in paths.items()}
        if flags.kv_cache_dtype in FP4:
            _check_pairing(flags, facts[MODEL_FLAG])
    else:
        facts = {flag: _readable(path, flag) for flag, path in paths.items()}
    target, draft = facts.get(MODEL_FLAG), facts.get(DRAFT_FLAG)
    return decide(Launch(flags, target, draft, machine, **named), allow)


def _readable(path, flag):
    """Facts for a launch that SGLang judges by itself: None where config.json cannot be used.

    Raises: UsageError for a path that is not there.
    """
    if locate(path, flag) is None:
        return None
    try:
        return read_facts(path, flag)
    except UsageError:
        return None


def decide(launch, allow=()):
    """The Verdict on a Launch."""
    found = [*rules.judge(launch), *_judge_patches(launch)]
    allowed = [r for r in found if r.id in allow]
    refusals = sorted((r for r in found if r.id not in allow), key=lambda r: r.id)
    results = results_for(launch)
    unproven = not results or any(r.id in rules.RULES for r in allowed)
    if any(r.id not in rules.RULES or rules.RULES[r.id].status == FAILS for r in refusals):
        status = FAILS
    else:
        status = UNTESTED if refusals or unproven else WORKS
    return Verdict(
        status=status,
        refusals=tuple(refusals),
        allowed=tuple(allowed),
        warnings=tuple(_warnings(launch, allow, found)),
        values=tuple(effective_values(launch)),
        results=results if status == WORKS else (),
        launch=launch,
    )


def _warnings(launch, allow, found):
    unused = sorted(set(allow) - {r.id for r in found})
    yield from (f"--allow {id} allows nothing here: that rule does not fire" for id in unused)
    if launch.kv_dtype not in FP4:
        yield f"--kv-cache-dtype {launch.kv_dtype} is SGLang's own: passed through unchanged, not judged"
        return
    if launch.flags.json_model_override_args not in (None, "{}"):
        yield "--json-model-override-args was not applied to what was read from config.json"
    if launch.on_cpu:
        yield "--device cpu: Triton's interpreter runs the kernels; for tests, not for serving"
    elif launch.gpu is None:
        reason = launch.machine.gpu.reason
        yield f"the GPU is unknown ({reason}), so nothing was judged by it; fp4kv judge --gpu states it"
    elif launch.gpu.memory_bytes is None:
        yield (
            "the GPU's memory is unknown, so the pools were not judged by it; "
            "fp4kv judge --gpu-memory states it"
        )
    for flag, facts in launch.models:
        asked = getattr(launch.flags, flag.lstrip("-").replace("-", "_"))
        if asked is not None and facts is None:
            yield f"{flag} {asked} is not on this machine, so nothing was judged by its config.json"
        elif facts is not None and facts.checkpoint.weights_bytes is None:
            yield f"{flag} {asked} holds no safetensors to read: weights and KV scales are unknown"
    if launch.target is not None and launch.target.checkpoint.kv_scales == {}:
        yield "the checkpoint has no KV scales: 2^-1 for K and 2^-4 for V are used on every layer"
    if launch.target is not None and launch.target.checkpoint.clamped_v_scales:
        yield (
            "every v_scale is 1.0, ModelOpt's lower bound for FP8; NVFP4's own default for V is 2^-4, and V is "
            "stored with the checkpoint's"
        )
    for wanted, known in zip((launch.draft_revision, launch.draft_sha256), found_draft(launch), strict=True):
        if launch.drafter is not None and wanted is not None and known is None:
            yield f"nothing here tells whether the draft is {wanted}, which the profile was made with"


def _check_allow(allow):
    allowable = [id for id, rule in rules.RULES.items() if rule.allowable]
    for id in allow:
        if id in allowable:
            continue
        rule = rules.RULES.get(id)
        why = "is no rule about launches"
        if rule is not None:
            why = "fails, so it cannot be allowed"
            if rule.status == UNTESTED:
                why = "cannot be allowed: it is refused in the server too until it is built and proven"
        raise UsageError(f"--allow {id}: it {why}; what can be: {', '.join(allowable)}")


def _check_numbers(flags):
    fraction = flags.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise UsageError(f"--mem-fraction-static {fraction}: a number between 0 and 1 is needed")
    names = (
        "tp_size", "pp_size", "dp_size", "nnodes", "context_length", "max_total_tokens", "max_running_requests",
    )  # fmt: skip
    for name in names:
        value = getattr(flags, name)
        if value is not None and not 0 < value < _LARGEST:
            raise UsageError(f"--{name.replace('_', '-')} {value}: a number from 1 to 2^40 is needed")
    rank, nodes = flags.node_rank, flags.nnodes
    if not 0 <= rank < nodes:
        raise UsageError(f"--node-rank {rank}: with --nnodes {nodes} a number from 0 to {nodes - 1} is needed")


def _check_pairing(flags, target):
    """``target``: its ModelFacts, None where they are not on this machine."""
    algorithm, draft = flags.speculative_algorithm, flags.speculative_draft_model_path
    if draft is not None and algorithm is None:
        raise UsageError(
            f"--speculative-draft-model-path {draft}: without --speculative-algorithm nothing drafts"
        )
    if algorithm is not None and algorithm.upper() in DRAFTERS_WITHOUT_MODEL:
        for name in ("draft_model_path", "draft_kv_cache_dtype", "draft_attention_backend"):
            value = getattr(flags, f"speculative_{name}")
            if value is not None:
                flag = f"--speculative-{name.replace('_', '-')} {value}"
                raise UsageError(f"{flag}: {algorithm} drafts without a model, and so without a pool of its own")
    if algorithm is None or algorithm.upper() not in DRAFTERS_WITH_MODEL:
        return
    inside = algorithm.upper() in MODULES and (target is None or target.mtp_head)
    if draft is None and not inside:
        why = "" if algorithm.upper() not in MODULES else f", and {target.path} names no MTP module of its own"
        raise UsageError(f"--speculative-algorithm {algorithm}: --speculative-draft-model-path is missing{why}")
    itself = draft is not None and os.path.realpath(draft) == os.path.realpath(flags.model_path)
    if itself and algorithm.upper() in ("DFLASH", "EAGLE3"):
        raise UsageError(f"--speculative-draft-model-path {draft}: that is the target itself")


def _judge_patches(launch):
    if launch.kv_dtype not in FP4:
        return []
    state, asked = launch.machine.patch, launch.asked("kv_cache_dtype")
    if isinstance(state, Failed):
        return list(state.refusals) or [
            refusal("FP4-016", asked=asked, state="unknown", where=state.reason)
        ]
    try:
        patchset.refuse_unless_movable(state, None, asked, half_applied=False)
    except Refused as error:
        return list(error.refusals)
    if state.state != "applied":
        return [refusal("FP4-016", asked=asked, state=state.state, where=state.root)]
    return []


def run(args):
    """Exit codes: 0 accepted, 2 bad usage, 3 refused."""
    try:
        verdict = _judge_arguments(args)
    except UsageError as error:
        print(f"fp4kv judge: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(verdict.as_dict(), indent=2))
    else:
        print(render_verdict(verdict), file=sys.stderr)
    return 0 if verdict.accepted else 3


def _judge_arguments(args):
    profile = read_profile(args.profile)
    flags = [*(profile.flags if profile else []), *args.sglang_flags]
    if args.tp is not None:
        flags += ["--tp-size", str(args.tp)]
    return judge(
        flags, machine=probe(_stated_gpu(args, profile)), allow=args.allow, profile=profile
    )


def _stated_gpu(args, profile):
    """The Gpu that the arguments or the profile state; None where the one here counts."""
    if args.gpu is not None:
        return parse_gpu(args.gpu, args.gpu_memory)
    if profile is not None and profile.gpu is not None:
        return parse_gpu(profile.gpu, args.gpu_memory or profile.gpu_memory_gb)
    if args.gpu_memory is not None:
        raise UsageError("--gpu-memory belongs to --gpu, which is missing")
    return None
