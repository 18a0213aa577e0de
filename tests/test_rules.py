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
    ],
)
def test_a_config_that_cannot_be_meant_is_named(tmp_path, config, message):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
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


def test_a_hub_id_outside_the_cache_is_left_to_sglang(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read_facts("nobody/no-such-model", "--model-path") is None
