"""`fp4kv patch`: states, all-or-nothing changes, refusals, and the series against a real wheel."""

import argparse
import json
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import patch_trees
import pytest
from launcher import patchexport, patchset, patchseries, replacing
from launcher.patchdiff import PatchMismatch, apply_series, parse_message, parse_patch
from launcher.patchseries import load_series, load_upstream, parse_upstream, sha256
from launcher.refusal import Refused

POOL = "sglang/srt/mem_cache/memory_pool.py"
WORKER = "sglang/srt/speculative/dflash_worker_v2.py"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return patch_trees.touched_tree(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def site(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "site"))


@pytest.fixture
def checkout(pristine, tmp_path):
    """A git checkout of SGLang by its layout: python/sglang/..., committed."""
    root = tmp_path / "checkout"
    shutil.copytree(pristine, root / "python")
    git(root, "init", "--quiet")
    commit(root)
    return root


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return patch_trees.wheel_file(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def series(tmp_path):
    """A copy of the series to spoil."""
    return Path(shutil.copytree(patchseries.series_folder(), tmp_path / "series"))


def git(root, *words):
    words = ["git", "-C", root, *words]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def commit(root):
    git(root, "add", "--all")
    git(root, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "as released")


def tree(root):
    files = (p for p in root.rglob("*") if p.is_file() and ".git" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in files}


def cli(*words):
    parser = argparse.ArgumentParser(prog="fp4kv")
    patchset.add_parser(parser.add_subparsers())
    try:
        return patchset.run(parser.parse_args(["patch", *map(str, words)]))
    except SystemExit as stopped:
        return stopped.code


def refused(*words, capsys):
    """The refusal's text; nothing may change and nothing but JSON goes to stdout."""
    assert cli(*words) == 3
    out, err = capsys.readouterr()
    assert out == ""
    return err


def edit(root, path=POOL, text="# an edit of someone's\n"):
    with open(root / path, "a") as file:
        file.write(text)


# -- the series on disk -------------------------------------------------------------------------


def test_series_header_lines_and_thinness():
    series = load_series()
    for patch in series.patches:
        for line in ("Why: ", "Upstream: ", "Drop-when: ", "Test: tests/"):
            assert f"\n{line}" in patch.message, (patch.name, line)
        test = patch.message.partition("\nTest: ")[2].strip()
        file, _, function = test.partition("::")
        assert f"def {function}(" in (patch_trees.REPOSITORY / file).read_text()
        added = removed = 0
        for line in (series.folder / patch.name).read_text().partition("\ndiff --git ")[2].split("\n"):
            added += line.startswith("+") and not line.startswith("+++")
            removed += line.startswith("-") and not line.startswith("---")
        assert added <= 20 and removed <= 1, patch.name


def test_series_lists_every_patch_file_and_no_other():
    series = load_series()
    on_disk = {path.name for path in series.folder.glob("*.patch")}
    assert on_disk == {patch.name for patch in series.patches} == set(series.upstream.patches)
    assert series.upstream.release == "0.5.23" and series.upstream.tag == "v0.5.23"
    assert {c.path for p in series.patches for c in p.changes} == set(series.touched)


def test_upstream_text_reads_back():
    upstream = load_upstream()
    assert parse_upstream(upstream.text()) == upstream


def test_launcher_patch_modules_import_neither_torch_nor_sglang():
    code = "import sys, launcher.patchset, launcher.patchexport\n"
    code += "print({'torch', 'sglang'} & set(sys.modules))"
    words, root = [sys.executable, "-c", code], patch_trees.REPOSITORY
    ended = subprocess.run(words, capture_output=True, text=True, cwd=root)
    assert ended.stdout.strip() == "set()", ended.stderr


# -- status, apply, revert ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["site", "checkout", "package", "python-folder"])
def test_apply_and_revert_in_every_layout(layout, site, checkout, capsys):
    target = {
        "site": site,
        "checkout": checkout,
        "package": site / "sglang",
        "python-folder": checkout / "python",
    }[layout]
    root = checkout if "checkout" in str(target) else site
    before = tree(root)
    assert cli("status", "--target", target) == 0
    assert capsys.readouterr().err.startswith("pristine: sglang 0.5.23 in ")
    assert cli("apply", "--target", target) == 0
    assert capsys.readouterr().err.startswith("applied: sglang 0.5.23 in ")
    changed = {path for path, content in tree(root).items() if before.get(path) != content}
    assert {Path(path).name for path in changed} == {Path(p).name for p in load_upstream().files}
    assert set(patchset.patch_state(target).files.values()) == {"applied"}
    assert cli("revert", "--target", target) == 0
    assert tree(root) == before


def test_patched_checkout_is_what_git_apply_makes(checkout, tmp_path):
    """Our applier against git's, in a plain repository where git's can be trusted."""
    for path in load_upstream().files:
        assert (checkout / path).is_file()
    series = load_series()
    joined = tmp_path / "joined.patch"
    joined.write_bytes(b"".join((series.folder / p.name).read_bytes() for p in series.patches))
    git(checkout, "apply", joined)
    by_git = tree(checkout)
    git(checkout, "checkout", "--quiet", "--", ".")
    patchset.apply_patches(checkout)
    assert tree(checkout) == by_git


def test_inside_another_work_tree(pristine, tmp_path):
    """Where `git apply` changes nothing and exits 0: the target is ignored by a repository above."""
    (tmp_path / ".gitignore").write_text("venv/\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    site = Path(shutil.copytree(pristine, tmp_path / "venv/site-packages"))
    before = tree(site)
    assert patchset.apply_patches(site).state == "applied"
    assert patchset.revert_patches(site).state == "pristine"
    assert tree(site) == before
    assert git(tmp_path, "status", "--porcelain") == ""


def test_applying_and_reverting_twice_changes_nothing_the_second_time(site):
    for move, goal in ((patchset.apply_patches, "applied"), (patchset.revert_patches, "pristine")):
        assert move(site).state == goal
        stamps = {path: path.stat().st_mtime_ns for path in site.rglob("*.py")}
        assert move(site).state == goal
        assert stamps == {path: path.stat().st_mtime_ns for path in site.rglob("*.py")}


def test_default_target_is_what_the_interpreter_would_import(site, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(str(site))
    assert patchset.find_root() == site
    assert patchset.patch_state(None).state == "pristine"
    assert cli("status", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "pristine" and told["root"] == str(site)
    assert told["release_found"] == told["release"] == "0.5.23"
    assert set(told["files"].values()) == {"pristine"}
    assert "sglang" not in sys.modules


def test_read_only_files_are_replaced_and_stay_read_only(site):
    for path in patch_trees.touched():
        (site / path).chmod(0o444)
    patchset.apply_patches(site)
    patchset.revert_patches(site)
    for path in patch_trees.touched():
        assert stat.S_IMODE((site / path).stat().st_mode) == 0o444


def test_a_linked_original_is_not_written_through(site, tmp_path):
    """Installers may hard-link or symlink files out of a cache that other environments share."""
    cached = tmp_path / "cached.py"
    shutil.copy2(site / POOL, cached)
    before = cached.read_bytes()
    (site / POOL).unlink()
    os.link(cached, site / POOL)
    (site / WORKER).rename(tmp_path / "linked.py")
    (site / WORKER).symlink_to(tmp_path / "linked.py")
    linked = (tmp_path / "linked.py").read_bytes()
    patchset.apply_patches(site)
    assert cached.read_bytes() == before and (tmp_path / "linked.py").read_bytes() == linked


def test_compiled_copies_do_not_outlive_the_source(site):
    """Also unchecked ones, which Python would load without looking at the source."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compiled = Path(py_compile.compile(str(site / WORKER), invalidation_mode=unchecked))
    beside = Path(py_compile.compile(str(site / "sglang/_version.py")))
    patchset.apply_patches(site)
    assert not compiled.exists() and beside.exists()


def test_half_applied_is_refused_for_apply_and_finished_by_revert(site, capsys):
    before = tree(site)
    patchset.apply_patches(site)
    (site / POOL).write_bytes(before[POOL])
    half = tree(site)
    assert patchset.patch_state(site).state == "half-applied"
    for command in ("apply", "status"):
        text = refused(command, "--target", site, capsys=capsys)
        assert "refused[FP4-004] half-applied-series: 4 of 5 touched files are patched" in text
        assert f"help: fp4kv patch revert --target {site}" in text
        assert tree(site) == half
    assert cli("revert", "--target", site) == 0
    assert tree(site) == before


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("applied_first", [False, True])
@pytest.mark.parametrize("command", ["status", "apply", "revert"])
def test_foreign_file_is_refused_and_kept(command, applied_first, site, capsys):
    if applied_first:
        patchset.apply_patches(site)
    edit(site)
    before = tree(site)
    text = refused(command, "--target", site, capsys=capsys)
    assert text.count("refused[") == 1
    assert "refused[FP4-003] foreign-files: 1 touched file(s) are neither as released" in text
    assert f"\n  asked:    fp4kv patch {command} --target {site}\n" in text
    assert "\n  why:      a hash that is not on record means someone else's edit" in text
    assert f"\n  evidence: patches/UPSTREAM against {site / POOL}\n" in text
    assert "\n\nhelp: pip install --force-reinstall --no-deps sglang==0.5.23" in text
    assert tree(site) == before
    assert patchset.patch_state(site).state == "foreign"


def test_foreign_and_gone_files_in_a_checkout_name_the_way_back(checkout, capsys):
    edit(checkout / "python")
    (checkout / "python" / WORKER).unlink()
    text = refused("apply", "--target", checkout, capsys=capsys)
    assert "foreign-files: 2 touched file(s)" in text
    assert f"help: git -C {checkout} checkout -- python/{POOL} python/{WORKER}" in text
    assert patchset.patch_state(checkout).files[f"python/{WORKER}"] == "missing"
    subprocess.run(text.partition("help: ")[2].split(), check=True, capture_output=True)
    assert cli("apply", "--target", checkout) == 0


def test_other_release_is_refused_with_its_foreign_files(site, capsys):
    (site / "sglang/_version.py").write_text("__version__ = version = '0.5.22'\n")
    before = tree(site)
    text = refused("apply", "--target", site, capsys=capsys)
    assert "refused[FP4-002] other-sglang-release: SGLang 0.5.22 is not the release" in text
    edit(site)
    before = tree(site)
    assert cli("apply", "--target", site, "--json") == 3
    out, err = capsys.readouterr()
    assert [r["id"] for r in json.loads(out)["refused"]] == ["FP4-002", "FP4-003"]
    assert err.index("refused[FP4-002]") < err.index("refused[FP4-003]")
    assert tree(site) == before


def test_release_is_read_from_the_metadata_where_the_package_does_not_say(site):
    (site / "sglang/_version.py").unlink()
    assert patchset.patch_state(site).release_found is None
    assert not patchset.patch_state(site).other_release
    (site / "sglang-0.5.21.dist-info").mkdir()
    assert patchset.patch_state(site).release_found == "0.5.21"
    assert patchset.patch_state(site).other_release


@pytest.mark.parametrize("command", ["status", "apply", "revert", "refresh"])
def test_folder_without_sglang_is_refused(command, tmp_path, capsys):
    text = refused(command, "--target", tmp_path, capsys=capsys)
    assert f"refused[FP4-001] sglang-not-found: no sglang package in {tmp_path}" in text
    assert "help: pip install sglang==0.5.23, or --target DIR" in text
    assert patchset.patch_state(tmp_path).state == "missing"


def test_no_sglang_to_import_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(patchset.importlib.util, "find_spec", lambda name: None)
    text = refused("apply", capsys=capsys)
    assert "refused[FP4-001] sglang-not-found: no sglang package in this Python environment" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["apply", "--target", "/no/such/folder"], "--target /no/such/folder does not exist"),
        (["verify", "--wheel", "/no/such.whl"], "--wheel /no/such.whl does not exist"),
        (["status", "--target", "a" * 5000], "aaaa does not exist"),
        (["refit"], "invalid choice: 'refit'"),
        (["apply", "--fuzz"], "unrecognized arguments: --fuzz"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_usage_exits_2_and_names_the_value(words, message, capsys):
    assert cli(*words) == 2
    assert message in capsys.readouterr().err


SPOILERS = {
    "added line": lambda text: text.replace(b"+            refuse_", b"+            confuse_"),
    "context line": lambda text: text.replace(b"\n             return\n", b"\n             raise\n", 1),
    "line number": lambda text: text.replace(b"@@ -3348,6 +3348,11 @@", b"@@ -3349,6 +3349,11 @@"),
    "cut off": lambda text: text[:-40],
    "no subject": lambda text: text.replace(b"Subject:", b"Object:"),
    "path outside": lambda text: text.replace(b"b/python/sglang/srt", b"b/python/sglang/../srt"),
    "new file": lambda text: text.replace(b"\nindex ", b"\nnew file mode 100644\nindex ", 1),
}  # fmt: skip


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("recorded_again", [False, True])
def test_altered_patch_is_refused(spoiler, recorded_again, series, site):
    """By its hash, and by what it does where its new hash was put on record too."""
    name = "refuse-prefix-valid-commit-to-fp4.patch"
    text = (series / name).read_bytes()
    spoilt = SPOILERS[spoiler](text)
    assert spoilt != text
    (series / name).write_bytes(spoilt)
    if recorded_again:
        upstream = (series / "UPSTREAM").read_text()
        (series / "UPSTREAM").write_text(upstream.replace(sha256(text), sha256(spoilt)))
    before = tree(site)
    with pytest.raises(Refused, match=r"refused\[FP4-005\] altered-patch-series: ") as caught:
        patchset.apply_patches(site, folder=series)
    assert "help: git checkout -- patches" in str(caught.value)
    if not recorded_again:
        assert f"{name} does not agree with the record" in str(caught.value)
        assert f"its sha256 is {sha256(spoilt)[:16]}, on record is" in str(caught.value)
    assert tree(site) == before


def test_patch_that_was_never_recorded_is_refused(series, site):
    shutil.copy(series / "draft-input-embeddings-dtype.patch", series / "another.patch")
    edit(series, "series", "another.patch\n")
    with pytest.raises(Refused, match="another.patch does not agree with the record"):
        patchset.apply_patches(site, folder=series)


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda s: (s / "series").write_text("# nothing\n"), "the series lists no patch"),
        (lambda s: (s / "series").unlink(), "No such file or directory"),
        (lambda s: (s / "UPSTREAM").unlink(), "No such file or directory"),
        (lambda s: (s / "UPSTREAM").write_text("tag: v0.5.23\n"), "UPSTREAM has no `release:` line"),
        (lambda s: edit(s, "UPSTREAM", "file: 12 a/b\n"), "is not understood: 'file: 12 a/b'"),
        (lambda s: (s / "refuse-fp4-scale-loss.patch").unlink(), "refuse-fp4-scale-loss.patch"),
        (
            lambda s: (s / "UPSTREAM").write_text(
                "".join(line for line in open(s / "UPSTREAM") if not line.startswith("file: "))
            ),
            "python/sglang/srt/arg_groups/kv_cache_hook.py is changed or on record, not both",
        ),
        (
            lambda s: (s / "series").write_text("draft-input-embeddings-dtype.patch\n"),
            "is on record and not listed",
        ),
    ],
)
def test_incomplete_series_is_refused(spoil, problem, series, site):
    spoil(series)
    before = tree(site)
    with pytest.raises(Refused, match=r"refused\[FP4-006\] incomplete-patch-series: ") as caught:
        patchset.apply_patches(site, folder=series)
    assert problem in str(caught.value)
    assert tree(site) == before


@pytest.mark.parametrize("fails_at", [0, 2, 4])
def test_failed_replacement_puts_everything_back(fails_at, site, monkeypatch, capsys):
    before, real, calls = tree(site), os.replace, []

    def replace(source, goal):
        calls.append(goal)
        if len(calls) == fails_at + 1:
            raise PermissionError(13, "Permission denied")
        real(source, goal)

    monkeypatch.setattr(replacing.os, "replace", replace)
    text = refused("apply", "--target", site, capsys=capsys)
    path = calls[fails_at]
    assert f"refused[FP4-007] target-not-writable: {path} cannot be replaced (Permission" in text
    assert "needs write access to its folder; nothing is changed" in text
    assert f"help: run as the owner of {Path(calls[fails_at]).parent}" in text
    assert tree(site) == before


def test_failure_to_put_back_is_told(site, monkeypatch):
    real, calls = os.replace, []

    def replace(source, goal):
        calls.append(goal)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        real(source, goal)

    monkeypatch.setattr(replacing.os, "replace", replace)
    with pytest.raises(Refused, match="some files could NOT be put back, see status"):
        patchset.apply_patches(site)
    monkeypatch.undo()
    assert patchset.patch_state(site).state == "half-applied"
    assert not list(site.rglob("*.fp4kv-*"))
    assert patchset.revert_patches(site).state == "pristine"


def test_full_disk_before_the_first_replacement_changes_nothing(site, monkeypatch):
    before = tree(site)

    def copymode(source, goal):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replacing.shutil, "copymode", copymode)
    with pytest.raises(Refused, match=r"cannot be replaced \(No space left on device\)"):
        patchset.apply_patches(site)
    assert tree(site) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_refused(site):
    (site / POOL).parent.chmod(0o555)
    try:
        with pytest.raises(Refused, match=r"refused\[FP4-007\] target-not-writable"):
            patchset.apply_patches(site)
    finally:
        (site / POOL).parent.chmod(0o755)


# -- the applier on its own ---------------------------------------------------------------------

DIFF = b"""Subject: [PATCH] A subject that
 goes on

Body.

diff --git a/python/sglang/a.py b/python/sglang/a.py
index 1..2 100644
--- a/python/sglang/a.py
+++ b/python/sglang/a.py
@@ -1,2 +1,3 @@
+new
 one
 two
@@ -4,2 +5 @@
 four
-five
\\ No newline at end of file
"""
A = {"python/sglang/a.py": b"one\ntwo\nthree\nfour\nfive"}


def test_applier_keeps_missing_newlines_and_goes_both_ways():
    patch = parse_patch("p", DIFF)
    assert patch.message == "A subject that goes on\n\nBody.\n" == parse_message(DIFF)
    after = apply_series((patch,), A)
    assert after == {"python/sglang/a.py": b"new\none\ntwo\nthree\nfour\n"}
    assert apply_series((patch,), after, reverse=True) == A


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: d.replace(b"@@ -4,2 +5 @@", b"@@ -4,3 +5 @@"), "a hunk ends early"),
        (lambda d: d.replace(b"@@ -4,2 +5 @@", b"@@ -4,1 +5 @@"), "belongs to no hunk"),
        (lambda d: d.replace(b"@@ -4,2 +5 @@", b"@@ -4,1 +5,0 @@"), "a hunk ends early"),
        (lambda d: d.replace(b"@@ -4,2 +5 @@", b"@@ -3,2 +4 @@"), "does not match at line 3"),
        (lambda d: d.replace(b"@@ -4,2 +5 @@", b"@@ -4,2 +9 @@"), "does not match at line 4"),
        (lambda d: d.replace(b" four\n", b" fore\n"), "does not match at line 4"),
        (lambda d: d.split(b"@@")[0], "has no hunk"),
        (lambda d: d.split(b"+++")[0], "a file header is cut off"),
        (lambda d: d.replace(b"--- a/python/sglang/a.py", b"--- /dev/null"), "unexpected paths"),
        (lambda d: d.replace(b"index 1..2 100644", b"deleted file mode 100644"), "only edits"),
        (lambda d: d + d[d.index(b"diff") :], "is changed twice"),
        (lambda d: d.replace(b"Body", "B\u00f6dy".encode()), "not ASCII"),
        (lambda d: d.replace(b"Subject", b"Object"), "no Subject line"),
        (lambda d: d.replace(b"sglang/a.py", b"sglang/b.py"), "python/sglang/b.py is not there"),
    ],
)
def test_applier_takes_no_fuzz(spoil, message):
    with pytest.raises(PatchMismatch, match=message):
        apply_series((parse_patch("p", spoil(DIFF)),), A)


# -- verify and refresh -------------------------------------------------------------------------


def test_verify_on_a_fresh_wheel(wheel, capsys):
    assert cli("verify", "--wheel", wheel, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "ok": True,
        "wheel": wheel.name,
        "applied_hashes": True,
        "only_touched_files": True,
        "same_export": True,
        "reverted": True,
    }


def test_verify_fails_on_a_series_that_is_not_as_exported(wheel, series, capsys):
    """Same edits, another header: it applies and reverts, and is not what refresh would write."""
    name = "draft-input-embeddings-dtype.patch"
    text = (series / name).read_bytes()
    other = text.replace(b"From: sglang-fp4kv", b"From: someone else")
    (series / name).write_bytes(other)
    upstream = (series / "UPSTREAM").read_text().replace(sha256(text), sha256(other))
    (series / "UPSTREAM").write_text(upstream)
    told = patchexport.verify(wheel, folder=series)
    assert told["ok"] is False and told["same_export"] is False and told["reverted"] is True
    assert "FAILED  same_export" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_wheel(pristine, tmp_path_factory):
    """The touched files as a wheel; enough for everything but a true verify."""
    path = tmp_path_factory.mktemp("small") / "sglang-0.5.23-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in tree(pristine).items():
            archive.writestr(name, content)
    return path


def exported(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_refresh_of_an_applied_target_writes_the_same_bytes(site, small_wheel, tmp_path):
    patchset.apply_patches(site)
    out = tmp_path / "out"
    assert cli("refresh", "--target", site, "--wheel", small_wheel, "--out", out) == 0
    assert exported(out) == exported(patchseries.series_folder())


def test_refresh_does_not_depend_on_git_settings(site, small_wheel, tmp_path, monkeypatch):
    settings = "[diff]\n noprefix = true\n algorithm = patience\n context = 9\n"
    settings += "[core]\n autocrlf = true\n[format]\n signature = me\n numbered = true\n"
    settings += "[commit]\n gpgsign = true\n"
    (tmp_path / "gitconfig").write_text(settings)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    patchset.apply_patches(site)
    out = tmp_path / "out"
    patchexport.refresh(site, small_wheel, None, out)
    assert exported(out) == exported(patchseries.series_folder())


def test_refresh_puts_an_edit_into_the_last_patch_touching_the_file(site, small_wheel, series):
    patchset.apply_patches(site)
    edit(site)
    patchexport.refresh(site, small_wheel, None, None, folder=series)
    old, new = exported(patchseries.series_folder()), exported(series)
    changed = {name for name in new if new[name] != old[name]}
    assert changed == {"carry-fp4-scales-to-host.patch", "UPSTREAM"}
    assert patchset.patch_state(site, folder=series).state == "applied"
    assert patchset.revert_patches(site, folder=series).state == "pristine"
    assert patchset.patch_state(site).state == "pristine"


def test_refresh_carries_later_patches_over_an_edit_of_an_earlier_one(site, small_wheel, series):
    patchset.apply_patches(site)
    text = (site / POOL).read_text()
    (site / POOL).write_text("# first line\n" + text)
    first = series / "refuse-prefix-valid-commit-to-fp4.patch"
    last = series / "carry-fp4-scales-to-host.patch"
    patchexport.refresh(site, small_wheel, first.name, None, folder=series)
    assert b"\n+# first line\n" in first.read_bytes()
    assert b"first line" not in last.read_bytes() and b"@@ -2808,6 +2808,10 @@" in last.read_bytes()
    assert patchset.revert_patches(site, folder=series).state == "pristine"
    assert patchset.apply_patches(site, folder=series).state == "applied"


def test_refresh_refuses_an_edit_that_belongs_to_no_patch(site, small_wheel, series, capsys):
    patchset.apply_patches(site)
    with zipfile.ZipFile(small_wheel) as archive:
        (site / "sglang/__init__.py").write_bytes(archive.read("sglang/__init__.py") + b"# edit\n")
    before = exported(series)
    with pytest.raises(Refused, match=r"refused\[FP4-009\] series-not-exportable: ") as caught:
        patchexport.refresh(site, small_wheel, None, None, folder=series)
    assert "python/sglang/__init__.py is edited and no patch touches it" in str(caught.value)
    assert exported(series) == before


def test_refresh_refuses_an_edit_that_a_later_patch_overwrites(site, small_wheel, series):
    patchset.apply_patches(site)
    text = (site / POOL).read_text().replace("append_scale_copies(self, ", "append_scales(self, ", 1)
    (site / POOL).write_text(text)
    name = "refuse-prefix-valid-commit-to-fp4.patch"
    with pytest.raises(Refused, match=f"overlap what a patch after {name}"):
        patchexport.refresh(site, small_wheel, name, None, folder=series)


def test_refresh_refuses_a_patch_that_lost_its_edits(site, small_wheel, series):
    patchset.apply_patches(site)
    with zipfile.ZipFile(small_wheel) as archive:
        archive.extract("sglang/srt/managers/scheduler.py", site)
    with pytest.raises(Refused, match="require-active-in-the-scheduler.patch would change nothing"):
        patchexport.refresh(site, small_wheel, None, None, folder=series)


def test_refresh_to_an_unknown_patch_is_bad_usage(site, small_wheel, capsys):
    patchset.apply_patches(site)
    edit(site)
    assert cli("refresh", "--target", site, "--wheel", small_wheel, "--patch", "x.patch") == 2
    assert "--patch x.patch is not in the series: refuse-prefix" in capsys.readouterr().err


def test_refresh_without_git_is_refused(site, small_wheel, monkeypatch):
    monkeypatch.setattr(patchexport.shutil, "which", lambda name: None)
    with pytest.raises(Refused, match=r"FP4-009\] series-not-exportable: git is not installed"):
        patchexport.refresh(site, small_wheel, None, None)


def test_refresh_against_a_wheel_the_series_does_not_fit_is_refused(site, small_wheel, tmp_path):
    other = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    with zipfile.ZipFile(small_wheel) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"# a line more\n" + old.read(name))
    with pytest.raises(Refused, match=r"(?s)refused\[FP4-005\].*does not match at line"):
        patchexport.refresh(site, other, None, tmp_path / "out")
    with pytest.raises(Refused, match=r"refused\[FP4-003\] foreign-files: 5 touched"):
        patchexport.verify(other)


def test_wheel_that_is_not_the_one_on_record_is_refused(small_wheel, tmp_path, capsys):
    name = next(iter(load_upstream().wheels))
    text = refused("verify", "--wheel", shutil.copy(small_wheel, tmp_path / name), capsys=capsys)
    assert f"refused[FP4-008] wheel-not-usable: {name} is not the wheel on record" in text
    (tmp_path / "x.whl").write_text("no zip")
    text = refused("verify", "--wheel", tmp_path / "x.whl", capsys=capsys)
    assert "wheel-not-usable: x.whl is not a wheel" in text
    assert "help: --wheel PATH with the wheel of sglang 0.5.23 from PyPI" in text


def test_wheel_that_cannot_be_downloaded_is_refused(monkeypatch, tmp_path, capsys):
    for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, f"file://{tmp_path}/nothing")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    text = refused("verify", capsys=capsys)
    assert "refused[FP4-008] wheel-not-usable: pip could not download sglang 0.5.23" in text


# -- the installed package ----------------------------------------------------------------------


def test_series_is_found_in_an_installed_package(monkeypatch, tmp_path):
    """A wheel of ours carries patches/ as launcher/_patches."""
    shutil.copytree(patchseries.series_folder(), tmp_path / "launcher/_patches")
    monkeypatch.setattr(patchseries, "_ROOT", tmp_path / "launcher")
    assert patchseries.series_folder() == tmp_path / "launcher/_patches"
    assert load_series().patches
