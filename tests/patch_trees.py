"""SGLang trees to patch: copies of the installed package, of its touched files, and wheels.

The installed SGLang is never changed, and may be pristine or patched already.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from launcher import patchset
from launcher.patchseries import load_upstream

REPOSITORY = Path(__file__).resolve().parents[1]


def installed_root():
    """The folder holding the installed sglang/; skips the test where there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    return Path(list(spec.submodule_search_locations)[0]).resolve().parent


def touched():
    """Touched files as a wheel has them, sglang/srt/..."""
    return [path.removeprefix("python/") for path in load_upstream().files]


def make_pristine(root):
    """Reverts the series in ``root`` where it was copied from a patched SGLang."""
    assert patchset.revert_patches(root).state == "pristine"
    return root


def touched_tree(into, prefix=""):
    """A pristine folder with the touched files and the release's version file only."""
    source = installed_root()
    for path in [*touched(), "sglang/_version.py", "sglang/__init__.py"]:
        (into / prefix / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, into / prefix / path)
    make_pristine(into / prefix)
    return into


def importable_tree(into):
    """A pristine sglang that can be imported: touched files copied, all else linked.

    Compiled files come along, so that importing does not compile what the copy leaves alone.
    """
    source, files = installed_root(), touched()
    folders = {parent for path in files for parent in Path(path).parents} - {Path(".")}
    for folder in sorted(folders):
        (into / folder).mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(source / folder):
            place = into / folder / entry.name
            if entry.name == "__pycache__":
                shutil.copytree(entry.path, place)
            elif folder / entry.name not in folders and str(folder / entry.name) not in files:
                place.symlink_to(entry.path)
    for path in files:
        shutil.copy2(source / path, into / path)
    return make_pristine(into)


def wheel_file(into):
    """The release's wheel: FP4KV_SGLANG_WHEEL, else pip's, else rebuilt from the installed files."""
    given = os.environ.get("FP4KV_SGLANG_WHEEL")
    if given:
        return Path(given)
    release = load_upstream().release
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
    subprocess.run([*pip, "--dest", str(into), f"sglang=={release}"], capture_output=True)
    downloaded = sorted(into.glob("sglang-*.whl"))
    return downloaded[0] if downloaded else rebuilt_wheel(into)


def rebuilt_wheel(into):
    """A wheel of the installed files, pristine again, under a name no record has."""
    source, tree = installed_root(), touched_tree(into / "touched")
    wheel = into / f"sglang-{load_upstream().release}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in importlib.metadata.files("sglang"):
            name = str(file)
            if name.startswith("sglang/") and name.endswith(".py"):
                archive.write((tree if name in touched() else source) / name, name)
    return wheel
