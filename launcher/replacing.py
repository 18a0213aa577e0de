"""Replacing a set of files, each atomically, all or none."""

import os
import shutil

from launcher.refusal import Refused, refusal


def replace_files(changes, asked):
    """Replaces files {path: (old, new)}, each atomically; on a failure puts the old ones back."""
    finished, done = {}, []
    try:
        for path, (_, new) in changes.items():
            finished[path] = _write_beside(path, new)
        for path, beside in finished.items():
            os.replace(beside, path)
            done.append(path)
    except OSError as error:
        undone = _put_back(done, changes)
        aftermath = "nothing is changed" if undone else "some files could NOT be put back, see status"
        facts = {"path": path, "folder": path.parent, "aftermath": aftermath}
        facts["error"] = error.strerror or type(error).__name__
        raise Refused(refusal("FP4-007", asked=asked, **facts)) from error
    finally:
        for beside in finished.values():
            beside.unlink(missing_ok=True)
    for path in done:
        _drop_bytecode(path)


def _write_beside(path, content):
    """A finished copy next to ``path`` with its mode; a new inode, so hard-linked caches stay whole."""
    beside = path.with_name(f".{path.name}.fp4kv-{os.getpid()}")
    try:
        with open(beside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, beside)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return beside


def _put_back(done, changes):
    try:
        for path in done:
            os.replace(_write_beside(path, changes[path][0]), path)
    except OSError:
        return False
    return True


def _drop_bytecode(path):
    """Removes compiled copies: unchecked ones would outlive the source, and so would one of the
    same second and size."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        try:
            compiled.unlink()
        except OSError:
            pass
