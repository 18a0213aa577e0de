"""A strict unified-diff applier: exact lines at exact places, in memory, forwards and backwards.

Ours rather than `git apply`, because a user's machine may have no git, and because `git apply`
inside another work tree can change nothing and still exit 0.
"""

import re
from dataclasses import dataclass

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_TREE = "python/sglang/"  # where SGLang's repository keeps the package


class PatchMismatch(Exception):
    """A patch is malformed, or a file does not hold the lines it names."""


@dataclass(frozen=True)
class Hunk:
    old_start: int
    old: tuple  # lines, each with its newline
    new_start: int
    new: tuple


@dataclass(frozen=True)
class FileChange:
    path: str  # relative to the repository, python/sglang/...
    hunks: tuple


@dataclass(frozen=True)
class Patch:
    name: str
    message: str  # subject, blank line, body
    changes: tuple


def parse_message(text):
    """Subject and body of a `git format-patch` file, as they were committed."""
    lines = text.decode("ascii").split("\n")
    subject, body = None, []
    for number, line in enumerate(lines):
        if line.startswith("Subject: "):
            subject = re.sub(r"^\[PATCH[^\]]*\] ", "", line.removeprefix("Subject: "))
            while lines[number + 1].startswith(" "):
                number += 1
                subject += lines[number]
            body = lines[number + 1 :]
            break
    if subject is None:
        raise PatchMismatch("no Subject line")
    end = next(
        (i for i, line in enumerate(body) if line == "---" or line.startswith("diff --git ")),
        len(body),
    )
    return f"{subject}\n\n" + "\n".join(body[:end]).strip("\n") + "\n"


def parse_patch(name, text):
    """Reads one patch file; raises PatchMismatch on anything but plain edits of SGLang's files."""
    try:
        message = parse_message(text)
    except UnicodeDecodeError as error:
        raise PatchMismatch(f"{name}: not ASCII ({error})") from None
    except PatchMismatch as error:
        raise PatchMismatch(f"{name}: {error}") from None
    lines = text.split(b"\n")
    changes, at = [], 0
    while at < len(lines):
        if not lines[at].startswith(b"diff --git "):
            at += 1
            continue
        path, hunks, at = _parse_file(name, lines, at + 1)
        if path in (change.path for change in changes):
            raise PatchMismatch(f"{name}: {path} is changed twice")
        changes.append(FileChange(path, tuple(hunks)))
    return Patch(name, message, tuple(changes))


def _parse_file(name, lines, at):
    while at < len(lines) and not lines[at].startswith(b"--- "):
        if lines[at].startswith((b"diff --git ", b"@@ ")) or not lines[at].startswith(b"index "):
            raise PatchMismatch(f"{name}: only edits are supported, got {lines[at][:60]!r}")
        at += 1
    if at + 1 >= len(lines) or not lines[at + 1].startswith(b"+++ "):
        raise PatchMismatch(f"{name}: a file header is cut off")
    old, new = lines[at][4:].decode(), lines[at + 1][4:].decode()
    path = new.removeprefix("b/")
    if old != f"a/{path}" or not path.startswith(_TREE) or ".." in path.split("/"):
        raise PatchMismatch(f"{name}: unexpected paths {old!r} and {new!r}")
    at += 2
    hunks = []
    while at < len(lines) and (header := _HUNK.match(lines[at])):
        hunk, at = _parse_hunk(name, header, lines, at + 1)
        hunks.append(hunk)
    if not hunks:
        raise PatchMismatch(f"{name}: {path} has no hunk")
    if at < len(lines) and lines[at] and not lines[at].startswith(b"diff --git "):
        raise PatchMismatch(f"{name}: line {at + 1} belongs to no hunk")
    return path, hunks, at


def _parse_hunk(name, header, lines, at):
    old_left, new_left = (int(count) if count is not None else 1 for count in header.group(2, 4))
    old, new = [], []
    while old_left or new_left:
        if at >= len(lines) or lines[at][:1] not in (b" ", b"-", b"+"):
            raise PatchMismatch(f"{name}: a hunk ends early at line {at + 1}")
        mark, line = lines[at][:1], lines[at][1:] + b"\n"
        at += 1
        cut = at < len(lines) and lines[at].startswith(b"\\ ")
        if cut:
            line, at = line[:-1], at + 1
        if mark != b"+":
            old.append(line)
            old_left -= 1
        if mark != b"-":
            new.append(line)
            new_left -= 1
    return Hunk(int(header.group(1)), tuple(old), int(header.group(3)), tuple(new)), at


def apply_series(patches, files, *, reverse=False):
    """New contents after all patches, from ``files`` {path: bytes}, which stays as it is."""
    files = dict(files)
    for patch in reversed(patches) if reverse else patches:
        for change in patch.changes:
            if change.path not in files:
                raise PatchMismatch(f"{patch.name}: {change.path} is not there")
            files[change.path] = _apply_file(patch.name, change, files[change.path], reverse)
    return files


def _apply_file(name, change, content, reverse):
    lines = content.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out, taken = [], 0
    for hunk in change.hunks:
        start, old, new_start, new = hunk.old_start, hunk.old, hunk.new_start, hunk.new
        if reverse:
            start, old, new_start, new = new_start, new, start, old
        at = start - 1 if old else start  # with no old line, the hunk goes after line `start`
        out += lines[taken:at]
        in_place = taken <= at and len(out) == (new_start - 1 if new else new_start)
        if not in_place or tuple(lines[at : at + len(old)]) != old:
            raise PatchMismatch(f"{name}: {change.path} does not match at line {start}")
        out += new
        taken = at + len(old)
    return b"".join(out + lines[taken:])
