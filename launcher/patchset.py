"""`fp4kv patch`: state of an SGLang's touched files, and applying or reverting the series on them.

A state is a comparison of hashes, never the exit code of a tool. Applying and reverting work out
every new file in memory, check it against the recorded hash, and only then replace the files, each
atomically, all or none.
"""

import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import patchseries
from launcher.patchdiff import PatchMismatch, apply_series
from launcher.patchseries import load_series, sha256
from launcher.refusal import Refused, refusal
from launcher.replacing import replace_files

AS_RELEASED, AS_PATCHED = 0, 1
_TREE = "python/"  # repository paths start with python/sglang/, a wheel's with sglang/


class BadUsage(Exception):
    """An argument that cannot be meant; exit code 2."""


@dataclass(frozen=True)
class PatchState:
    """What the touched files are, by their hashes.

    ``state``: pristine | applied | half-applied | foreign (a file is neither, or gone) | missing (no
    sglang there). ``files``: path in SGLang's repository -> pristine | applied | foreign | missing.
    """

    state: str
    root: Path | None  # the folder that holds sglang/
    release: str  # the series' own
    release_found: str | None  # None where nothing says
    files: dict

    @property
    def other_release(self):
        return self.release_found not in (None, self.release)

    def as_dict(self):
        return {
            "state": self.state,
            "root": str(self.root) if self.root else None,
            "release": self.release,
            "release_found": self.release_found,
            "files": self.files,
        }


def find_root(target=None):
    """The folder that holds sglang/: below ``target``, else what this interpreter would import."""
    if target is None:
        try:
            spec = importlib.util.find_spec("sglang")
        except (ImportError, ValueError):
            spec = None
        packages = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    else:
        target = Path(target)
        packages = [target / "python/sglang", target / "sglang"]
        packages += [target] if target.resolve().name == "sglang" else []
    return next((p.resolve().parent for p in packages if (p / "srt").is_dir()), None)


def find_release(root):
    """The release of the sglang in ``root`` by its own files, None where nothing says."""
    try:
        found = re.search(r"'(\d[^']*)'", (root / "sglang/_version.py").read_text())
        if found:
            return found.group(1)
    except OSError:
        pass
    names = [path.name for path in root.glob("sglang-*.dist-info")]
    return names[0].removeprefix("sglang-").removesuffix(".dist-info") if len(names) == 1 else None


def _place(root, path):
    return root / path.removeprefix(_TREE)


def _read(root, paths):
    contents = {}
    for path in paths:
        try:
            contents[path] = _place(root, path).read_bytes()
        except OSError:
            contents[path] = None
    return contents


def _judge(content, hashes):
    if content is None:
        return "missing"
    digest = sha256(content)
    return {hashes[AS_RELEASED]: "pristine", hashes[AS_PATCHED]: "applied"}.get(digest, "foreign")


def patch_state(site_or_checkout=None, *, folder=None):
    """PatchState of a checkout, a folder holding sglang/, or (None) what would be imported."""
    series = load_series(folder)
    return _state(series.upstream, find_root(site_or_checkout))[0]


def _state(upstream, root):
    if root is None:
        return PatchState("missing", None, upstream.release, None, {}), {}
    contents = _read(root, upstream.files)
    files = {path: _judge(contents[path], hashes) for path, hashes in upstream.files.items()}
    kinds = set(files.values())
    if kinds - {"pristine", "applied"}:
        state = "foreign"
    else:
        state = kinds.pop() if len(kinds) == 1 else "half-applied"
    return PatchState(state, root, upstream.release, find_release(root), files), contents


def apply_patches(target=None, *, folder=None, asked="fp4kv patch apply"):
    """Applies the series to a pristine sglang; returns the PatchState after it.

    Does nothing where it is applied already. Raises: Refused, with nothing changed.
    """
    return _move(AS_PATCHED, target, folder, asked)


def revert_patches(target=None, *, folder=None, asked="fp4kv patch revert"):
    """Takes the series off again, also a half-applied one; returns the PatchState after it.

    Does nothing where it is pristine already. Raises: Refused, with nothing changed.
    """
    return _move(AS_RELEASED, target, folder, asked)


def _move(goal, target, folder, asked):
    series = load_series(folder, asked)
    state, contents = _state(series.upstream, find_root(target))
    goal_name = ("pristine", "applied")[goal]
    if state.state == goal_name and not state.other_release:
        return state
    refuse_unless_movable(state, target, asked, half_applied=goal == AS_RELEASED)
    start = [path for path, kind in state.files.items() if kind != goal_name]
    try:
        if goal == AS_PATCHED:
            after = apply_series(series.patches, contents)
        else:
            after = _revert(series.patches, contents, skip=set(state.files) - set(start))
    except PatchMismatch as error:
        raise patchseries.altered(asked, str(error).partition(":")[0], str(error)) from None
    for path, hashes in series.upstream.files.items():
        if sha256(after[path]) != hashes[goal]:
            mechanism = f"the series leaves {path} with a sha256 that is not the recorded one"
            raise patchseries.altered(asked, "the series", mechanism)
    replace_files(
        {_place(state.root, path): (contents[path], after[path]) for path in start}, asked
    )
    state, _ = _state(series.upstream, state.root)
    if state.state != goal_name:
        raise RuntimeError(f"after the replacement {state.root} is {state.state}, not {goal_name}")
    return state


def _revert(patches, contents, skip):
    """Takes the series off, leaving out the paths in ``skip``: they are as released already."""
    kept = tuple(
        replace(patch, changes=tuple(c for c in patch.changes if c.path not in skip))
        for patch in patches
    )
    return apply_series(kept, contents, reverse=True)


def refuse_unless_movable(state, target, asked, *, half_applied):
    """Raises Refused unless the touched files are a state that apply (or revert) can start from."""
    if state.state == "missing":
        facts = {"where": target or "this Python environment", "release": state.release}
        by_import = f"what {sys.executable} imports"
        facts["looked_for"] = f"{target}/[python/]sglang/srt" if target else by_import
        raise Refused(refusal("FP4-001", asked=asked, **facts))
    files = {kind: [p for p, k in state.files.items() if k == kind] for kind in state.files.values()}
    found = []
    if state.other_release:
        facts = {"found": state.release_found, "release": state.release, "found_in": state.root}
        found.append(refusal("FP4-002", asked=asked, **facts))
    strange = files.get("foreign", []) + files.get("missing", [])
    if strange:
        in_checkout = state.root.name == "python" and (state.root.parent / ".git").exists()
        restore = (
            f"git -C {state.root.parent} checkout -- {' '.join(strange)}"
            if in_checkout
            else f"pip install --force-reinstall --no-deps sglang=={state.release}"
        )
        names = ", ".join(str(_place(state.root, path)) for path in strange)
        facts = {"count": len(strange), "files": names, "restore": restore}
        found.append(refusal("FP4-003", asked=asked, **facts))
    elif state.state == "half-applied" and not half_applied:
        facts = {
            "applied": len(files["applied"]),
            "total": len(state.files),
            "files": ", ".join(str(_place(state.root, path)) for path in files["applied"]),
            "target_flag": f" --target {target}" if target is not None else "",
        }
        found.append(refusal("FP4-004", asked=asked, **facts))
    if found:
        raise Refused(*found)


def add_parser(subparsers):
    """Adds `patch` and its commands to the launcher's parser; run with :func:`run`."""
    parser = subparsers.add_parser("patch", help="the patch series on SGLang: status, apply, revert")
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(dest="patch_command", required=True, metavar="COMMAND")
    for name, text in (
        ("status", "compare the touched files with the recorded hashes"),
        ("apply", "apply the series to a pristine SGLang"),
        ("revert", "take the series off again"),
        ("verify", "apply, re-export and revert on a freshly unpacked wheel"),
        ("refresh", "write patches and hashes from an edited SGLang"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="the result on stdout as JSON")
        if name != "verify":
            where = "a git checkout of SGLang, or a folder holding sglang/"
            command.add_argument("--target", type=Path, metavar="DIR", help=where)
        if name in ("verify", "refresh"):
            where = "the release's wheel (default: downloaded with pip)"
            command.add_argument("--wheel", type=Path, metavar="PATH", help=where)
        if name == "refresh":
            owner = "the patch that the edits belong to (default: the last one touching the file)"
            command.add_argument("--patch", metavar="NAME", help=owner)
            where = "write here instead of over the series"
            command.add_argument("--out", type=Path, metavar="DIR", help=where)
    return parser


def run(args):
    """Runs a parsed `patch` command; 0 done, 2 bad usage, 3 refused, 1 our own failure."""
    result = {}
    try:
        _run(args, result)
        code = 0 if result.get("ok", True) else 1
    except BadUsage as error:
        print(f"fp4kv patch {args.patch_command}: {error}", file=sys.stderr)
        return 2
    except Refused as error:
        print(error, file=sys.stderr)
        result["refused"] = [r.as_dict() for r in error.refusals]
        code = 3
    if args.json:
        print(json.dumps(result, indent=2))
    return code


def _run(args, result):
    command, target = args.patch_command, getattr(args, "target", None)
    for flag in ("target", "wheel"):
        path = getattr(args, flag, None)
        if path is not None and not os.path.exists(path):
            raise BadUsage(f"--{flag} {path} does not exist")
    asked = f"fp4kv patch {command}" + (f" --target {target}" if target is not None else "")
    if command == "verify":
        from launcher.patchexport import verify

        result.update(verify(args.wheel, asked=asked))
    elif command == "refresh":
        from launcher.patchexport import refresh

        result.update(refresh(target, args.wheel, args.patch, args.out, asked=asked))
    elif command == "status":
        state = patch_state(target)
        result.update(state.as_dict())
        if state.root:
            _report(state)
            for path, kind in state.files.items():
                print(f"  {kind:9} {path}", file=sys.stderr)
        refuse_unless_movable(state, target, asked, half_applied=False)
    else:
        state = (apply_patches if command == "apply" else revert_patches)(target, asked=asked)
        result.update(state.as_dict())
        _report(state)


def _report(state):
    found = state.release_found or "of unknown release"
    print(f"{state.state}: sglang {found} in {state.root}", file=sys.stderr)
