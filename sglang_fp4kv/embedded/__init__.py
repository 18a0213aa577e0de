"""The real SGLang server on a machine without a GPU.

SGLang finds this package through the entry point `fp4kv_embedded` of the group
`sglang.srt.platforms`. It stays inert unless SGLANG_PLATFORM selects it by name, so installing
this package changes nothing on a machine with a GPU.

Nothing here imports torch or SGLang; `platform.py` and `interpreter_fixes.py` do.
"""

import os

PLATFORM_NAME = "fp4kv_embedded"
_PLATFORM_CLASS = "sglang_fp4kv.embedded.platform.EmbeddedPlatform"


def is_selected() -> bool:
    """True in a process whose environment selects the embedded platform."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def platform_class() -> str | None:
    """Entry point: the platform's class path when selected, None otherwise."""
    return _PLATFORM_CLASS if is_selected() else None
