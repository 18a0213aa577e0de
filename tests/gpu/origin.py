"""What a phase on a GPU is called with, and what its result file says of the run."""

import argparse
import sys
import time
from pathlib import Path

from launcher.demo import commit, gpu_name
from launcher.probe import installed_versions


def arguments(description, *switches):
    """OUT, --logs and ``switches`` of a phase that takes no more; the logs' folder is there afterwards."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--logs", type=Path, required=True)
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    return args


def without_folders(words):
    """Command-line ``words`` with the last part of a path that begins at this machine's root."""
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def origin(module, argv=None, *, embedded=False):
    """The head of a result file: command, commit, date, versions and GPU of this run of ``python -m module``.

    ``argv``: the arguments, those of this process where left out. Folders of this machine are left out of them.
    ``embedded``: whether the run was on the embedded platform, so that no GPU took part.
    """
    words = sys.argv[1:] if argv is None else argv
    return {
        "command": ["python", "-m", module, *without_folders(words)],
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": installed_versions(),
        "gpu": None if embedded else gpu_name(),
    }
