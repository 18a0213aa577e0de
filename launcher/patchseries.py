"""The patch series on disk: UPSTREAM (release, wheels, hashes), series (order), *.patch."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from launcher.patchdiff import Patch, PatchMismatch, parse_patch
from launcher.refusal import Refused, refusal

_ROOT = Path(__file__).resolve().parent


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Upstream:
    """patches/UPSTREAM: one `key: value` a line, `#` comments, paths as in SGLang's repository."""

    release: str
    tag: str
    wheels: dict = field(default_factory=dict)  # file name -> sha256
    patches: dict = field(default_factory=dict)  # file name -> sha256
    files: dict = field(default_factory=dict)  # path -> (sha256 as released, sha256 as patched)

    def text(self):
        lines = ["# What this series was made against; `fp4kv patch refresh` writes it."]
        lines += [f"release: {self.release}", f"tag: {self.tag}"]
        lines += ["# wheel: sha256 name, as PyPI serves them (the touched files are the same in all)"]
        lines += [f"wheel: {digest} {name}" for name, digest in sorted(self.wheels.items())]
        lines += ["# patch: sha256 name, in the order of `series`"]
        lines += [f"patch: {digest} {name}" for name, digest in self.patches.items()]
        lines += ["# file: sha256 as released, sha256 as patched, path"]
        lines += [f"file: {a} {b} {path}" for path, (a, b) in sorted(self.files.items())]
        return "\n".join(lines) + "\n"


def parse_upstream(text):
    """Reads UPSTREAM; raises PatchMismatch naming the first line it does not understand."""
    single, wheels, patches, files = {}, {}, {}, {}
    for number, line in enumerate(text.splitlines(), 1):
        key, _, value = line.partition(": ")
        words = value.split()
        if not line.strip() or line.startswith("#"):
            continue
        if key in ("release", "tag") and len(words) == 1:
            single[key] = words[0]
        elif key in ("wheel", "patch") and len(words) == 2:
            (wheels if key == "wheel" else patches)[words[1]] = words[0]
        elif key == "file" and len(words) == 3:
            files[words[2]] = (words[0], words[1])
        else:
            raise PatchMismatch(f"UPSTREAM line {number} is not understood: {line!r}")
    for key in ("release", "tag"):
        if key not in single:
            raise PatchMismatch(f"UPSTREAM has no `{key}:` line")
    return Upstream(single["release"], single["tag"], wheels, patches, files)


@dataclass(frozen=True)
class Series:
    folder: Path
    upstream: Upstream
    patches: tuple[Patch, ...]

    @property
    def touched(self):
        return tuple(self.upstream.files)


def series_folder():
    """The series of a source checkout, else the copy inside the installed package."""
    for folder in (_ROOT.parent / "patches", _ROOT / "_patches"):
        if (folder / "UPSTREAM").is_file():
            return folder
    return _ROOT.parent / "patches"


def listed_patches(folder):
    """File names in `series`, in order."""
    lines = (line.split("#")[0].strip() for line in (folder / "series").read_text().splitlines())
    return [line for line in lines if line]


def load_upstream(folder=None, asked="the patch series"):
    folder = folder or series_folder()
    try:
        return parse_upstream((folder / "UPSTREAM").read_text())
    except (OSError, PatchMismatch) as error:
        raise _incomplete(asked, str(error), folder / "UPSTREAM") from None


def load_series(folder=None, asked="the patch series", recorded=True):
    """The whole series, each patch as recorded in UPSTREAM.

    ``recorded=False`` takes the patches as they are on disk, for whoever is about to write new ones.
    Raises: Refused FP4-005 (a patch is not the recorded one), FP4-006 (something is missing)
    """
    folder = folder or series_folder()
    upstream = load_upstream(folder, asked)
    try:
        names = listed_patches(folder)
    except OSError as error:
        raise _incomplete(asked, str(error), folder / "series") from None
    if not names:
        raise _incomplete(asked, "the series lists no patch", folder / "series")
    patches = []
    for name in names:
        try:
            text = (folder / name).read_bytes()
        except OSError as error:
            raise _incomplete(asked, str(error), folder / name) from None
        if recorded and upstream.patches.get(name) != sha256(text):
            on_record = upstream.patches.get(name, "nothing")
            mechanism = f"its sha256 is {sha256(text)[:16]}, on record is {on_record[:16]}"
            raise altered(asked, name, mechanism)
        try:
            patches.append(parse_patch(name, text))
        except PatchMismatch as error:
            raise altered(asked, name, f"it cannot be read: {error}") from None
    unlisted = [name for name in upstream.patches if name not in names]
    if recorded and unlisted:
        raise _incomplete(asked, f"{unlisted[0]} is on record and not listed", folder / "series")
    changed = {change.path for patch in patches for change in patch.changes}
    if recorded and changed != set(upstream.files):
        path = min(changed ^ set(upstream.files))
        raise _incomplete(asked, f"{path} is changed or on record, not both", folder / "UPSTREAM")
    return Series(folder, upstream, tuple(patches))


def altered(asked, patch, mechanism):
    return Refused(refusal("FP4-005", asked=asked, patch=patch, mechanism=mechanism))


def _incomplete(asked, problem, place):
    return Refused(refusal("FP4-006", asked=asked, problem=problem, place=place))
