"""What SGLang's model classes can do: the file is the installed sources', and these are the classes themselves."""

import importlib

import pytest

from launcher import classes_export
from launcher.rules import judge
from launches import DFLASH, NVFP4, launch
from sglang_fp4kv.model_classes import CAPTURES, TABLE, abilities, never_windowed

EAGLE3 = ["--speculative-algorithm", "EAGLE3"]
SHARED = {"qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM", "gemma3_causal": "Gemma3ForCausalLM"}


def test_the_file_is_the_installed_sources():
    assert TABLE.read_text() == classes_export.dump(classes_export.export())


@pytest.mark.parametrize(("module", "name"), SHARED.items())
def test_the_sources_say_what_the_classes_have(module, name):
    """One with the methods, one that inherits them, one without DFLASH's."""
    found = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    has = {can for can in CAPTURES.values() if hasattr(found, f"set_{can}_layers_to_capture")}
    assert has == set(abilities([name])) & set(CAPTURES.values())
    assert has == ({"eagle3"} if name == "Gemma3ForCausalLM" else {"dflash", "eagle3"})


def test_the_first_class_that_sglang_knows_counts():
    assert abilities(["NoSuchModel", "MixtralForCausalLM", "Qwen3ForCausalLM"]) == []
    assert abilities(["NoSuchModel"]) is None and abilities([]) is None
    assert not never_windowed(["NoSuchModel"]) and not never_windowed(["Gemma2ForCausalLM"])
    assert never_windowed(["Phi3ForCausalLM"])


@pytest.mark.parametrize(
    ("name", "flags", "refused"),
    [
        ("Gemma3ForCausalLM", DFLASH, True), ("Gemma3ForCausalLM", EAGLE3, False), ("MixtralForCausalLM", EAGLE3, True),
        ("MixtralForCausalLM", ["--speculative-algorithm", "NGRAM"], False), ("MixtralForCausalLM", [], False),
        ("Qwen3ForCausalLM", DFLASH, False), ("NoSuchModel", DFLASH, False),
    ],
)  # fmt: skip
def test_a_target_that_hands_nothing_out_is_refused(tmp_path, name, flags, refused):
    found = judge(launch(tmp_path, [*NVFP4, *flags], target={"architectures": [name]}))
    assert [r.id for r in found] == (["FP4-119"] if refused else [])
    assert not refused or f"SGLang's class for {name} hands none out" in found[0].says


def test_a_head_that_needs_no_layers_is_let_through(tmp_path):
    target = {"architectures": ["MixtralForCausalLM"]}
    for needed in (True, False):
        draft = {"eagle_config": {"use_aux_hidden_state": needed}}
        found = judge(launch(tmp_path, [*NVFP4, *EAGLE3], target=target, draft=draft))
        assert [r.id for r in found] == (["FP4-119"] if needed else [])
