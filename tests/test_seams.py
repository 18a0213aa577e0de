"""The private seams in the installed SGLang are the ones that were read."""

import pytest

from sglang_fp4kv import seams


def test_every_seam_is_there_with_its_parameters():
    seams.check_release()
    seams.check_seams()


def test_another_release_is_named():
    with pytest.raises(RuntimeError, match="made for sglang 0.5.22, but 0.5.23 is installed"):
        seams.check_release("0.5.22")


def test_a_changed_signature_is_named():
    path = "sglang.srt.mem_cache.memory_pool.unwrap_write_loc"
    with pytest.raises(RuntimeError, match=r"unwrap_write_loc: parameters are \('loc_info',\)"):
        seams.check_seams({path: ("loc_info", "new")})


def test_every_missing_seam_is_named():
    gone = {"sglang.srt.mem_cache.memory_pool.gone": None, "sglang.srt.no_such_module.f": ("a",)}
    with pytest.raises(RuntimeError, match="memory_pool.gone: .*no_such_module.f: "):
        seams.check_seams(gone)
