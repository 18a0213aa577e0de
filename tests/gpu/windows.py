"""Windowed layers in one KV pool and capped scores on a GPU: tests.gpu.serving's servers and comparisons.

usage: python -m tests.gpu.windows OUT.json --logs FOLDER

The small random Gemma 3 of tests/e2e/test_windows.py, with the cap and the drafter's layers that the test plugin gives
it, and prompts up to 40 windows long. An oracle drafts the undrafted answers. That readers without the window or the
cap are caught is what that test shows; here BF16 KV on SGLang's own reader stands beside. Exit code as tests.gpu.serving's.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

from tests.e2e.server import plugin_path
from tests.e2e.test_windows import CAP
from tests.e2e.tiny_models import WINDOW, build_draft, build_windowed
from tests.gpu.origin import arguments
from tests.gpu.serving import serve_and_compare

LENGTHS = (WINDOW // 2, WINDOW + 1, 3 * WINDOW + 4, 10 * WINDOW, 20 * WINDOW + 7, 40 * WINDOW)
NEW_TOKENS = 64


def prompts():
    seeded = random.Random(1)
    return [
        {
            "name": f"{length} tokens",
            "input_ids": [seeded.randrange(3, 500) for _ in range(length)],
            "max_new_tokens": NEW_TOKENS,
        }
        for length in LENGTHS
    ]


def main():
    args = arguments(__doc__)
    # Every server needs the cap, not only those with an oracle.
    os.environ |= {"PYTHONPATH": plugin_path(), "FP4KV_GEMMA3": CAP}
    with tempfile.TemporaryDirectory() as scratch:
        args.model = build_windowed(Path(scratch, "target"))
        args.draft = build_draft(Path(scratch, "draft"), args.model)
        args.oracle, args.tp = True, 1
        return serve_and_compare("tests.gpu.windows", args, prompts())


if __name__ == "__main__":
    sys.exit(main())
