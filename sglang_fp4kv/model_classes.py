"""What the model classes of SGLang 0.5.23 can do, by the architectures that a config.json names.

From sglang_classes.json, which ``python -m launcher.classes_export`` writes out of SGLang's sources.
"""

import json
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("sglang_classes.json")
CAPTURES = {"DFLASH": "dflash", "EAGLE3": "eagle3"}  # drafter: what the target's class has to have
WINDOWS = "windows"


@cache
def _classes():
    return json.loads(TABLE.read_text("utf-8"))["classes"]


def abilities(architectures):
    """What the class that SGLang takes for these ``architectures`` can do; None where it has no such class.

    It takes the first that it knows.
    """
    known = (_classes()[name] for name in architectures if name in _classes())
    return next(known, None)


def never_windowed(architectures):
    """Whether that class reads every token, whatever windows config.json has."""
    can = abilities(architectures)
    return can is not None and WINDOWS not in can
