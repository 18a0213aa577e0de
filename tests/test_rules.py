"""What is refused before the server starts: each rule fires, and its help passes the rules."""

import json

import pytest

from launcher.flags import UsageError, parse
from launcher.modelfacts import read_facts
from launcher.refusal import TEXTS, render
from launcher.rules import RULES, Launch, judge

TARGET = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
DRAFT = {**TARGET, "num_hidden_layers": 1, "block_size": 8, "dflash_config": {"target_layer_ids": [0, 2]}}
GOOD = [
    "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton",
    "--speculative-algorithm", "DFLASH", "--speculative-draft-kv-cache-dtype", "fp8_e4m3",
]  # fmt: skip


def folder(path, config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def launch(tmp_path, argv=(), target=None, draft=None):
    t = folder(tmp_path / "t", {**TARGET, **(target or {})})
    d = folder(tmp_path / "d", {**DRAFT, **(draft or {})})
    flags = parse(["--model-path", t, "--speculative-draft-model-path", d, *GOOD, *argv])
    return Launch(flags, read_facts(t, "--model-path"), read_facts(d, "--speculative-draft-model-path"))


CASES = {
    "FP4-010": {"argv": ["--decode-attention-backend", "flashinfer"]},
    "FP4-011": {"argv": ["--speculative-draft-kv-cache-dtype", "nvfp4"]},
    "FP4-012": {"draft": {"block_size": None}},
    "FP4-013": {"draft": {"dflash_config": {"target_layer_ids": [0, 3]}}},
    "FP4-014": {"target": {"head_dim": 72}},
    "FP4-015": {"target": {"v_head_dim": 32}},
}


def test_the_good_launch_is_accepted(tmp_path):
    assert judge(launch(tmp_path)) == []


@pytest.mark.parametrize("id", RULES)
def test_every_rule_fires_alone_and_names_its_value(tmp_path, id):
    found = judge(launch(tmp_path, **CASES[id]))
    assert [r.id for r in found] == [id]
    text = render(found)
    assert text.startswith(f"refused[{id}] {TEXTS[id].name}: ")
    assert "{" not in text.replace("{}", "")


def test_all_refusals_come_together_in_table_order(tmp_path):
    found = judge(
        launch(
            tmp_path,
            ["--attention-backend", "flashinfer", "--speculative-draft-kv-cache-dtype", "fp8_e5m2"],
            target={"head_dim": 72},
        )
    )
    assert [r.id for r in found] == ["FP4-010", "FP4-011", "FP4-014"]


@pytest.mark.parametrize("id", [i for i in RULES if TEXTS[i].help.startswith("--")])
def test_the_flags_in_a_help_pass_the_rules(tmp_path, id):
    case = dict(CASES[id])
    case["argv"] = [*case.get("argv", ()), *TEXTS[id].help.split()]
    if id == "FP4-010":
        case["argv"] += ["--decode-attention-backend", "triton"]
    assert judge(launch(tmp_path, **case)) == []


def test_other_kv_dtypes_are_not_judged(tmp_path):
    case = {"argv": ["--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "flashinfer"]}
    assert judge(launch(tmp_path, target={"head_dim": 72}, **case)) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json is not JSON"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
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


def test_nothing_asked_is_told_as_the_default(tmp_path):
    case = launch(tmp_path)
    case.flags.attention_backend = None
    assert "prefill on SGLang's default and decode on SGLang's default" in render(judge(case))


def test_a_hub_id_outside_the_cache_is_left_to_sglang(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read_facts("nobody/no-such-model", "--model-path") is None
