"""What a DFlash draft's config.json and weights ask for: both layouts, and what SGLang would misread."""

import pytest

from launcher import draft_facts
from launcher.draft_facts import CONV, SELECTOR
from launcher.flags import UsageError
from launcher.modelfacts import read_facts
from launcher.rules import judge
from launches import DFLASH, NVFP4, folder, launch
from test_rules import dflash2

OLDER = {
    "architectures": ["DFlashDraftModel"], "block_size": 8, "target_layer_ids": [0, 2], "mask_token_id": 5,
    "dflash_config": None,
}  # fmt: skip
NEWER = {
    "architectures": ["DFlashDraftModel"], "block_size": None,
    "dflash_config": {"block_size": 8, "target_layer_ids": [0, 2], "mask_token_id": 5},
}  # fmt: skip
CONV_WEIGHT = {"layers.0.attention_conv.base_kernel": ("BF16", [1], b"12")}
SELECTOR_WEIGHT = {"candidate_selector.predecessor_codebook": ("BF16", [1], b"12")}
PLAIN_WEIGHT = {"fc.weight": ("BF16", [1], b"12")}


def judged(tmp_path, draft, *flags, **folders):
    return judge(launch(tmp_path, [*NVFP4, *DFLASH, "--device", "cpu", *flags], draft=draft, **folders))


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ((), []),
        (("--speculative-num-draft-tokens", "8"), []),
        (("--speculative-dflash-block-size", "16"), ["FP4-030"]),
        (("--speculative-draft-window-size", "8"), []),
        (("--speculative-draft-window-size", "7"), ["FP4-078"]),
    ],
)
def test_both_layouts_are_judged_alike(tmp_path, flags, ids):
    for draft in (OLDER, NEWER):
        assert [r.id for r in judged(tmp_path, draft, *flags)] == ids
    for key in ("block_size", "target_layer_ids"):
        older, newer = (
            read_facts(folder(tmp_path / "d", {"num_hidden_layers": 1, **draft}), "--draft")
            for draft in (OLDER, NEWER)
        )
        assert getattr(older, key) == getattr(newer, key) is not None


def test_dflash_config_wins_over_the_top_of_the_file(tmp_path):
    draft = OLDER | {"dflash_config": {"block_size": 4, "target_layer_ids": [0, 3]}}
    assert [r.id for r in judged(tmp_path, draft, "--speculative-num-draft-tokens", "4")] == ["FP4-013"]


@pytest.mark.parametrize("flag", ["--speculative-dflash-block-size", "--speculative-num-draft-tokens"])
def test_a_block_size_may_come_from_a_flag_alone(tmp_path, flag):
    for draft in (OLDER, NEWER):
        silent = draft | {"block_size": None, "dflash_config": {"target_layer_ids": [0, 2]}}
        assert [r.id for r in judged(tmp_path, silent)] == ["FP4-012"]
        assert judged(tmp_path, silent, flag, "8") == []


def test_a_dflash2_draft_in_the_published_layout_is_accepted(tmp_path):
    config = dflash2() | {
        "layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True,
    }  # fmt: skip
    weights = {**PLAIN_WEIGHT, **CONV_WEIGHT, **SELECTOR_WEIGHT}
    assert judged(tmp_path, config, draft_tensors=weights) == []
    found = launch(tmp_path, [*NVFP4, *DFLASH], draft=config, draft_tensors=weights).draft
    assert found.dflash.modules == found.checkpoint.modules == {CONV, SELECTOR}
    assert found.causal_or_windowed


@pytest.mark.parametrize("kind", draft_facts._SWITCHED)
def test_transformers_drops_a_window_as_read(kind):
    """The configuration classes themselves: no window without the switch, one of their own with it."""
    from transformers import CONFIG_MAPPING

    sizes = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    assert CONFIG_MAPPING[kind](**sizes, sliding_window=99).sliding_window is None
    assert CONFIG_MAPPING[kind](**sizes, use_sliding_window=True, sliding_window=99).sliding_window == 99
    assert CONFIG_MAPPING[kind](**sizes, use_sliding_window=True).sliding_window > 0


def test_a_convolution_needs_no_selector(tmp_path):
    config = dflash2(selector_rank=None, selector_top_k=0) | {"architectures": ["DFlashDraftModel"]}
    assert judged(tmp_path, config, draft_tensors={**PLAIN_WEIGHT, **CONV_WEIGHT}) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"conv_group_size": 0}, "conv_kernel_size 2 and conv_group_size 0 are needed together"),
        ({"selector_rank": None}, "selector_rank 0 and selector_top_k 4 are needed together"),
        ({"conv_group_size": 48}, "conv_group_size 48 does not divide hidden_size 256"),
        (
            {"selector_rank": 0, "selector_top_k": 0},
            "architectures DFlash2DraftModel needs dflash_config.selector_rank",
        ),
    ],
)
def test_sizes_that_sglang_stops_at_are_named(tmp_path, changed, problem):
    (only,) = judged(tmp_path, dflash2(**changed))
    assert only.id == "FP4-076" and problem in only.says


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ({"layer_types": ["sliding_attention"]}, "sliding_window is missing"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 99, "model_type": "qwen3"},
            "without use_sliding_window a qwen3 configuration drops it",
        ),
        ({"layer_types": []}, "layer_types names 0 layers of 1"),
        ({"layer_types": ["chunked_attention"]}, "'chunked_attention' is no kind of layer that a draft has"),
        ({"layer_types": "full_attention"}, "layer_types must be a list, got 'full_attention'"),
    ],
)
def test_layers_that_sglang_stops_at_are_named(tmp_path, layers, problem):
    refusals = judged(tmp_path, NEWER | layers)
    assert [r.id for r in refusals] == ["FP4-076"] and problem in refusals[0].says


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_sizes_that_are_no_numbers_are_named(tmp_path, key, value):
    with pytest.raises(UsageError, match=rf"dflash_config.{key} must be a number from 0, got {value!r}"):
        judged(tmp_path, dflash2(**{key: value}))


@pytest.mark.parametrize(
    ("config", "weights", "told"),
    [
        (NEWER, CONV_WEIGHT, "the checkpoint has a grouped convolution and dflash_config has no conv_kernel_size"),
        (NEWER, SELECTOR_WEIGHT, "has a candidate selector and dflash_config has no selector_rank"),
        (dflash2(), SELECTOR_WEIGHT, "a grouped convolution is asked for and the checkpoint has no weights"),
        (dflash2(), CONV_WEIGHT, "a candidate selector is asked for and the checkpoint has no weights for it"),
        (
            dflash2() | {"architectures": ["DFlashDraftModel"]},
            {**CONV_WEIGHT, **SELECTOR_WEIGHT},
            "selector_rank asks for a candidate selector, which architectures DFlashDraftModel does not have",
        ),
    ],
)
def test_modules_that_would_be_dropped_or_stay_random_are_named(tmp_path, config, weights, told):
    (only,) = judged(tmp_path, config, draft_tensors={**PLAIN_WEIGHT, **weights})
    assert only.id == "FP4-077" and told in only.says


def test_keys_at_the_top_are_named_and_so_are_their_weights(tmp_path):
    config = NEWER | {"selector_rank": 8, "selector_top_k": 4}
    refusals = judged(tmp_path, config, draft_tensors={**PLAIN_WEIGHT, **SELECTOR_WEIGHT})
    assert [r.id for r in refusals] == ["FP4-075", "FP4-077"]
    assert "selector_rank and selector_top_k at the top of its config.json" in refusals[0].says
    # What stands in both places is read in the right one.
    assert judged(tmp_path, dflash2() | {"selector_rank": 8, "selector_top_k": 4}) == []


@pytest.mark.parametrize(
    ("changed", "head"),
    [
        ({"projector_type": "domino"}, "projector_type 'domino'"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "architectures LiLiCorrDraftModel"),
        ({"dflash_config": {"block_size": 8, "attention_sink_bias": True}}, "attention_sink_bias"),
    ],
)
def test_other_heads_are_untested(tmp_path, changed, head):
    (only,) = judged(tmp_path, NEWER | changed)
    assert only.id == "FP4-079" and f"({head})" in only.says
