"""A model's facts from its config.json, and the configs that cannot be meant."""

import json

import pytest

from launcher.flags import UsageError
from launcher.modelfacts import read_facts
from launches import cached, scales, write_safetensors

TARGET = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}


def facts(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps({**TARGET, **config}))
    return read_facts(str(tmp_path), "--model-path")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json is not JSON"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be a positive integer, got 10000"),
        ({"head_dim": "64"}, "head_dim must be a positive integer, got '64'"),
        ({"dflash_config": {"target_layer_ids": []}}, r"target_layer_ids must be a list of layer ids, got \[\]"),
        ({"target_layer_ids": [1, 1]}, r"target_layer_ids must ascend without repeats, got \[1, 1\]"),
        ({"target_layer_ids": [2, 0]}, r"target_layer_ids must ascend without repeats, got \[2, 0\]"),
        ("[1]", r"the whole file must be a JSON object, got \[1\]"),
        ("null", "it holds null and no configuration"),
        ("[" * 100_000, "config.json is not JSON"),
        ("\xff", "config.json is not JSON"),
        ({"text_config": [TARGET]}, "text_config must be a JSON object, got "),
        ({"dflash_config": "x"}, "dflash_config must be a JSON object, got 'x'"),
        ({"num_attention_heads": 0, "hidden_size": 64}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_attention_heads": "4", "hidden_size": 64}, "must be a positive integer, got '4'"),
        ({"num_attention_heads": 4, "hidden_size": 64.0}, "hidden_size must be a positive integer, got 64.0"),
        ({"num_attention_heads": 9, "hidden_size": 4}, r"\(4 // 9\) must be a positive integer, got 0"),
    ],
)
def test_a_config_that_cannot_be_meant_is_named(tmp_path, config, message):
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=message):
        read_facts(str(tmp_path), "--model-path")


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(UsageError, match=f"--model-path {tmp_path}/none: there is no such folder"):
        read_facts(f"{tmp_path}/none", "--model-path")
    with pytest.raises(UsageError, match="the folder has no config.json"):
        read_facts(str(tmp_path), "--model-path")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="a folder is needed"):
        read_facts(f"{tmp_path}/file", "--model-path")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "--model-path '': a folder or a hub id is needed"),
        ("a" * 5000, "it cannot be opened .File name too long"),
        ("a\0b", "it cannot be opened .embedded null byte"),
        ("nobody/no--ne", "it is no hub id"),
        ("\u043c\u043e/\u0434\u0435", "there is no such folder"),
        ("gpt2", "a hub id is written owner/name"),
    ],
)
def test_paths_that_cannot_be_meant_are_named(path, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        read_facts(path, "--model-path")


def test_a_config_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(UsageError, match=r"config.json: it cannot be read \(Permission denied\)"):
        read_facts(str(tmp_path), "--model-path")


def test_a_url_is_left_to_sglang():
    assert read_facts("s3://bucket/model", "--model-path") is None


def test_a_hub_id_outside_the_cache_is_left_to_sglang(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read_facts("nobody/no-such-model", "--model-path") is None


@pytest.mark.parametrize(
    ("config", "layers", "recurrent", "sliding"),
    [
        ({}, (0, 1, 2, 3), False, False),
        ({"layer_types": ["full_attention"] * 4}, (0, 1, 2, 3), False, False),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 64}, (0, 1, 2, 3), False, False),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, (1, 3), True, False),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, (0, 1, 2, 3), False, True),
        ({"full_attention_interval": 2}, (1, 3), True, False),
        ({"mamba_d_state": 16}, None, True, False),
        ({"sliding_window": 64}, (0, 1, 2, 3), False, True),
        ({"sliding_window": 64, "use_sliding_window": False}, (0, 1, 2, 3), False, False),
        ({"sliding_window": None}, (0, 1, 2, 3), False, False),
        ({"attention_chunk_size": 64}, (0, 1, 2, 3), False, True),
        ({"num_hidden_layers": None}, None, False, False),
        ({"full_attention_interval": 1, "linear_num_value_heads": 8}, (0, 1, 2, 3), False, False),
        ({"layer_types": ["full_attention"] * 4, "is_hybrid_swa": True}, (0, 1, 2, 3), False, True),
        ({"architectures": ["Llama4ForConditionalGeneration"], "attention_chunk_size": None}, (0, 1, 2, 3), False, True),
        ({"architectures": ["LagunaForCausalLM"]}, (0, 1, 2, 3), False, True),
        ({"architectures": ["LagunaForCausalLM"], "sliding_window": None}, (0, 1, 2, 3), False, False),
        ({"model_type": "lfm2"}, None, True, False),
        ({"layer_group_size": [0, 1, 1, 0]}, None, True, False),
        ({"layer_group_size": [0] * 4}, (0, 1, 2, 3), False, False),
        ({"mixer_types": ["minicpm4"]}, (0, 1, 2, 3), False, False),
        ({"mixer_types": "lightning"}, None, True, False),
        ({"layer_types": ["qwen_sparse_attention"] * 4}, None, False, False),
    ],
)
def test_which_layers_keep_every_token(tmp_path, config, layers, recurrent, sliding):
    found = facts(tmp_path, **config)
    ids = found.attention_layers if found.attention_layers is None else tuple(found.attention_layers)
    assert (ids, found.recurrent, found.sliding) == (layers, recurrent, sliding)


def test_heads_positions_and_kinds(tmp_path):
    found = facts(tmp_path)
    assert (found.q_heads, found.kv_heads, found.max_positions, found.mla) == (4, 4, None, False)
    found = facts(tmp_path, num_key_value_heads=2, max_position_embeddings=99, kv_lora_rank=8)
    assert (found.kv_heads, found.max_positions, found.mla) == (2, 99, True)
    assert facts(tmp_path, architectures=["GptOssForCausalLM"]).sinks
    assert facts(tmp_path, quantization_config={"quant_method": "modelopt"}).quantization == "modelopt"


@pytest.mark.parametrize(
    ("config", "flag", "half"),
    [
        ({"dtype": "bfloat16"}, "auto", False),
        ({"torch_dtype": "float16"}, "auto", True),
        ({"text_config": {**TARGET, "dtype": "float16"}}, "auto", True),
        ({"dtype": "float32"}, "auto", True),
        ({}, "auto", True),
        ({"model_type": "gemma2"}, "auto", False),
        ({"dtype": "bfloat16"}, "half", True),
        ({"dtype": "float16"}, "bfloat16", False),
    ],
)
def test_when_sglang_runs_in_float16(tmp_path, config, flag, half):
    assert facts(tmp_path, **config).half_precision(flag) is half


@pytest.mark.parametrize(
    ("config", "served"),
    [
        ({}, False),
        ({"is_causal": True}, True),
        ({"layer_types": ["sliding_attention"] * 4}, True),
        ({"layer_types": ["sliding_attention"] * 3}, False),
    ],
)
def test_drafts_that_trtllm_serves(tmp_path, config, served):
    assert facts(tmp_path, **config).causal_or_windowed is served


def test_a_hub_snapshot_knows_its_commit(tmp_path):
    folder = tmp_path / "snapshots" / ("ab" * 20)
    folder.mkdir(parents=True)
    assert facts(folder).snapshot == "ab" * 20
    assert facts(tmp_path).snapshot is None


def test_a_hub_id_is_read_at_its_revision_and_its_weights_where_they_are_put(tmp_path, monkeypatch):
    """SGLang keeps config.json in the usual cache, and the weights in --download-dir."""
    usual, asked = tmp_path / "usual", tmp_path / "asked"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(usual))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(usual))
    for commit, layers, value in (("a" * 40, 4, 0.25), ("b" * 40, 6, 0.5)):
        home = cached(usual, commit, main=commit[0] == "a")
        (home / "config.json").write_text(json.dumps({**TARGET, "num_hidden_layers": layers}))
        write_safetensors(cached(asked, commit, main=commit[0] == "a") / "m.safetensors", scales([value]))
    for revision, layers, value in ((None, 4, 0.25), ("main", 4, 0.25), ("b" * 40, 6, 0.5)):
        found = read_facts("org/name", "--model-path", revision, str(asked))
        assert (found.num_layers, found.checkpoint.kv_scales) == (layers, {0: {"k": [value], "v": [value]}})
        assert found.snapshot == found.folder[-40:] and found.folder.startswith(str(asked))
        assert read_facts("org/name", "--model-path", revision).checkpoint.weights_bytes is None
    assert read_facts("org/name", "--model-path", "c" * 40, str(asked)) is None


def test_a_config_beside_the_weights_is_read(tmp_path, monkeypatch):
    (cached(tmp_path, "a" * 40, main=True) / "config.json").write_text(json.dumps(TARGET))
    assert read_facts("org/name", "--model-path", None, str(tmp_path)).num_layers == 4
    assert read_facts("org/name", "--model-path", "other", str(tmp_path)) is None
