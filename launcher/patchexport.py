"""`fp4kv patch verify` and `refresh`: the series against a wheel, exported with git format-patch.

git runs in a scratch repository only, without the user's configuration, so that the same edits give
the same bytes on every machine.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from launcher import patchset
from launcher.patchdiff import PatchMismatch, apply_series
from launcher.patchseries import Series, altered, load_series, sha256
from launcher.refusal import Refused, refusal

_TREE = "python/"
_DATE = "2026-01-01T00:00:00+0000"  # one date for all, or no two exports are the same
_NAME, _EMAIL = "sglang-fp4kv", "patches@sglang-fp4kv.invalid"
_FORMAT = (
    "format-patch --stdout --no-numbered --no-stat --no-signature --zero-commit --full-index "
    "--no-renames --unified=3 --diff-algorithm=myers --inter-hunk-context=0 -1"
).split()


def verify(wheel=None, *, folder=None, asked="fp4kv patch verify"):
    """Applies, re-exports and reverts the series on a freshly unpacked wheel.

    Returns a dict with ``ok`` and one bool per check. Raises: Refused
    """
    series = load_series(folder, asked)
    with tempfile.TemporaryDirectory(prefix="fp4kv-verify-") as scratch:
        scratch = Path(scratch)
        wheel = _wheel(series, wheel, scratch / "wheel", asked)
        site = scratch / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        released = _tree(site)
        state = patchset.apply_patches(site, folder=folder, asked=asked)
        changed = {path for path, digest in _tree(site).items() if released.get(path) != digest}
        checks = {"applied_hashes": state.state == "applied"}
        checks["only_touched_files"] = changed == {p.removeprefix(_TREE) for p in series.touched}
        out = scratch / "out"
        refresh(site, wheel, None, out, folder=folder, asked=asked, quiet=True)
        checks["same_export"] = all(
            (out / name).read_bytes() == (series.folder / name).read_bytes()
            for name in ["UPSTREAM", *series.upstream.patches]
        )
        state = patchset.revert_patches(site, folder=folder, asked=asked)
        checks["reverted"] = state.state == "pristine" and _tree(site) == released
        for name, passed in checks.items():
            print(f"{'ok' if passed else 'FAILED':7} {name}", file=sys.stderr)
        return {"ok": all(checks.values()), "wheel": wheel.name, **checks}


def refresh(target, wheel, patch, out, *, folder=None, asked="fp4kv patch refresh", quiet=False):
    """Writes patches and hashes anew from the edits in ``target``.

    A file's edits go to the last patch that touches it, or to ``patch``; later patches are carried
    over them. ``out`` is a folder to write into, by default the series itself.
    """
    series = load_series(folder, asked, recorded=False)
    if shutil.which("git") is None:
        raise _not_exportable(asked, "git is not installed", "install git")
    root = patchset.find_root(target)
    if root is None:
        state = patchset.patch_state(target, folder=folder)
        patchset.refuse_unless_movable(state, target, asked, half_applied=True)
    with tempfile.TemporaryDirectory(prefix="fp4kv-refresh-") as scratch:
        scratch = Path(scratch)
        wheel = _wheel(series, wheel, scratch / "wheel", asked)
        base, wanted = _edited(series, wheel, root)
        steps = _steps(series, base, asked)
        steps = _place_edits(series, steps, wanted, patch, scratch, asked)
        exported = _export(series, steps, scratch / "repo", asked)
    files = {
        path: (sha256(base[path]), sha256(wanted[path]))
        for path in base
        if base[path] != wanted[path]
    }
    patches = {name: sha256(text) for name, text in exported.items()}
    upstream = replace(series.upstream, patches=patches, files=files)
    out = out or series.folder
    out.mkdir(parents=True, exist_ok=True)
    for name, text in exported.items():
        (out / name).write_bytes(text)
    (out / "UPSTREAM").write_text(upstream.text())
    if out != series.folder:
        shutil.copyfile(series.folder / "series", out / "series")
    if not quiet:
        print(f"wrote {len(exported)} patches and UPSTREAM to {out}", file=sys.stderr)
    return {"ok": True, "out": str(out), "patches": patches}


def _wheel(series, wheel, into, asked):
    """The release's wheel: the given one, else pip's; a recorded name must have its recorded hash."""
    release = series.upstream.release
    facts = {"release": release}
    if wheel is None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        pip += ["--disable-pip-version-check", "--dest", str(into), f"sglang=={release}"]
        ended = subprocess.run(pip, capture_output=True, text=True)
        found = sorted(into.glob("sglang-*.whl")) if ended.returncode == 0 else []
        if not found:
            lines = (ended.stderr or ended.stdout).strip().splitlines() or ["no wheel came"]
            facts |= {"problem": f"pip could not download sglang {release}", "mechanism": lines[-1]}
            raise Refused(refusal("FP4-008", asked=asked, place="pip's answer", **facts))
        wheel = found[0]
    facts["place"] = wheel
    if not zipfile.is_zipfile(wheel):
        facts |= {"problem": f"{wheel.name} is not a wheel", "mechanism": "it is no zip archive"}
        raise Refused(refusal("FP4-008", asked=asked, **facts))
    recorded, digest = series.upstream.wheels.get(wheel.name), sha256(wheel.read_bytes())
    if recorded not in (None, digest):
        facts["problem"] = f"{wheel.name} is not the wheel on record"
        facts["mechanism"] = f"its sha256 is {digest[:16]}, patches/UPSTREAM has {recorded[:16]}"
        raise Refused(refusal("FP4-008", asked=asked, **facts))
    return wheel


def _tree(site):
    """Path -> sha256 of every file; bytecode is not part of a wheel."""
    files = (path for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(site)): sha256(path.read_bytes()) for path in files}


def _edited(series, wheel, root):
    """(as released, as in ``root``) of every file the series touches or the target has edited."""
    base, wanted = {}, {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            place = root / name
            if not name.startswith("sglang/") or not name.endswith(".py") or not place.is_file():
                continue
            released, found = archive.read(name), place.read_bytes()
            if _TREE + name in series.touched or released != found:
                base[_TREE + name], wanted[_TREE + name] = released, found
    return base, wanted


def _steps(series, base, asked):
    """Contents before the series and after each patch."""
    steps = [base]
    for patch in series.patches:
        try:
            steps.append(apply_series((patch,), steps[-1]))
        except PatchMismatch as error:
            raise altered(asked, patch.name, str(error)) from None
    return steps


def _place_edits(series, steps, wanted, patch, scratch, asked):
    """The steps with each edited file's edits put at their patch and merged into the later ones."""
    names = [p.name for p in series.patches]
    if patch is not None and patch not in names:
        raise patchset.BadUsage(f"--patch {patch} is not in the series: {', '.join(names)}")
    steps = [dict(step) for step in steps]
    for path in wanted:
        if steps[-1][path] == wanted[path]:
            continue
        owners = [i for i, p in enumerate(series.patches) if path in (c.path for c in p.changes)]
        if patch is None and not owners:
            problem = f"{path} is edited and no patch touches it"
            way_out = "--patch NAME, after adding the patch's header to patches/ and its name to series"
            raise _not_exportable(asked, problem, way_out, "an edit needs a patch to belong to")
        first = (names.index(patch) if patch is not None else owners[-1]) + 1
        last = steps[-1][path]
        for step in steps[first:]:
            step[path] = _merge(step[path], last, wanted[path], scratch)
        if None in (step[path] for step in steps) or steps[-1][path] != wanted[path]:
            problem = f"the edits in {path} overlap what a patch after {names[first - 1]} changes"
            why = "git merge-file could not carry them over the later patch"
            raise _not_exportable(asked, problem, "--patch NAME with the later patch", why)
    return steps


def _merge(current, before, after, scratch):
    """``current`` with the change from ``before`` to ``after``; None on a conflict."""
    if current == before:
        return after
    paths = []
    for name, content in (("current", current), ("before", before), ("after", after)):
        paths.append(scratch / name)
        paths[-1].write_bytes(content)
    words = ["git", "merge-file", "-p", *paths]
    merged = subprocess.run(words, capture_output=True, env=_git_env(scratch))
    return merged.stdout if merged.returncode == 0 else None


def _export(series: Series, steps, repo, asked):
    """File name -> bytes of `git format-patch`, one commit a patch in a scratch repository."""
    repo.mkdir()
    _git(repo, "init", "--quiet")
    (repo / ".git/info/attributes").write_text("* -text diff\n")
    exported = {}
    messages = ["as released\n", *(patch.message for patch in series.patches)]
    for number, (message, step) in enumerate(zip(messages, steps, strict=True)):
        for path, content in step.items():
            (repo / path).parent.mkdir(parents=True, exist_ok=True)
            (repo / path).write_bytes(content)
        _git(repo, "add", "--all")
        _git(repo, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-F", "-", text=message)
        if number:
            name = series.patches[number - 1].name
            exported[name] = _git(repo, *_FORMAT, "HEAD")
            if b"\ndiff --git " not in exported[name]:
                raise _not_exportable(
                    asked, f"{name} would change nothing", "drop it from series, or edit for it",
                    "the target holds no edit that belongs to it",
                )  # fmt: skip
    return exported


def _git_env(folder):
    """No configuration but our own, and no work tree above the scratch folder."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    kept |= {"GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    kept |= {"GIT_CONFIG_GLOBAL": os.devnull, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    for who in ("AUTHOR", "COMMITTER"):
        kept |= {f"GIT_{who}_NAME": _NAME, f"GIT_{who}_EMAIL": _EMAIL, f"GIT_{who}_DATE": _DATE}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


def _git(repo, *words, text=None):
    ended = subprocess.run(
        ["git", *words], cwd=repo, env=_git_env(repo), capture_output=True,
        input=text.encode("ascii") if text is not None else None,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"git {words[0]} failed: {ended.stderr.decode(errors='replace').strip()}")
    return ended.stdout


def _not_exportable(asked, problem, way_out, mechanism="the series is exported with git format-patch"):
    facts = {"problem": problem, "way_out": way_out, "mechanism": mechanism}
    return Refused(refusal("FP4-009", asked=asked, place="patches/series and the target", **facts))
