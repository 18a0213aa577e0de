"""`fp4kv plan`: figures, table, JSON, chart, and what cannot be meant."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli
from launcher.plan import parse_size

ROOT = Path(__file__).parent.parent
PAIR = ROOT / "models" / "pair"
# Report 1's model: 64 layers, one in four keeps K and V; a GPU of two has two KV heads of 256.
HYBRID = {
    "num_hidden_layers": 64, "full_attention_interval": 4, "num_attention_heads": 24, "num_key_value_heads": 4,
    "head_dim": 256, "hidden_size": 5120, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 131072,
}  # fmt: skip
PLAIN = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
    "max_position_embeddings": 98304,
}  # fmt: skip
DRAFT = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512,
    "block_size": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 2048,
}  # fmt: skip


def folder(path, config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def plain(tmp_path):
    return folder(tmp_path / "plain", PLAIN)


@pytest.fixture
def hybrid(tmp_path):
    return folder(tmp_path / "hybrid", {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": HYBRID})


@pytest.fixture
def draft(tmp_path):
    return folder(tmp_path / "draft", DRAFT)


@pytest.fixture
def plan(capsys):
    def run(*words, code=0):
        assert cli.main(["plan", *map(str, words)]) == code
        return capsys.readouterr()

    return run


def rows(plan, *words):
    """The JSON plan, and its rows by (KV, drafter, workspace)."""
    found = json.loads(plan(words[0], "--json", *words[1:]).out)
    return found, {(row["kv"], row["drafter"], row["workspace"]): row for row in found["rows"]}


BF16, FP8, NVFP4 = (("bf16", None, None), ("fp8_e4m3", None, None), ("nvfp4", None, None))
WORKSPACE = ("nvfp4", None, "fp8_e4m3")


def test_the_reported_bytes(plan, hybrid):
    found, by = rows(plan, hybrid, "--tp", "2")
    assert [by[kv]["layer_bytes"] for kv in (BF16, FP8, NVFP4)] == [2048, 1024, 576]
    assert [by[kv]["bytes_per_token"] for kv in (FP8, NVFP4, WORKSPACE)] == [16384, 9216, 10240]
    assert [round(by[kv]["times_fp8"], 2) for kv in (NVFP4, WORKSPACE)] == [1.78, 1.60]
    assert by[WORKSPACE]["workspace_bytes"] == 1024
    assert (found["version"], found["tp"], found["target"]["kv_heads_per_gpu"]) == (1, 2, 2)
    assert all(row["tokens"] is None for row in by.values())


def test_the_reported_tokens(plan, hybrid):
    _, by = rows(plan, hybrid, "--tp", "2", "--kv-memory", "47.30GB")
    assert abs(by[FP8]["tokens"] / 2_887_228 - 1) < 1e-4
    measured = ("--bytes-per-token", "fp8_e4m3=36166", "--bytes-per-token", "nvfp4=22014")
    for memory in ("--kv-memory", "--memory"):
        _, by = rows(plan, hybrid, memory, "8.5GB", *measured, "--", "--context-length", "98304")
        for kv, tokens, requests in ((FP8, 235_074, 2.39), (NVFP4, 386_194, 3.93)):
            assert abs(by[kv]["tokens"] / tokens - 1) < 1e-3
            assert round(by[kv]["requests"], 2) == requests
            assert by[kv]["measured"] and by[kv]["layer_bytes"] is None and by[kv]["state_slots"] is None


def test_pages_of_the_hybrid(plan, hybrid):
    found, _ = rows(plan, hybrid)
    pages = {page["kv"]: page for page in found["pages"]}
    # All four heads on one GPU: twice report 2's bytes per token, half its tokens.
    assert (pages["nvfp4"]["state_bytes"], pages["nvfp4"]["tokens"]) == (3_207_168, 2784)
    assert all(page["page_bytes"] >= page["state_bytes"] for page in pages.values())
    assert pages["nvfp4"]["page_bytes"] == 2784 * 1152


def test_the_reported_page(plan, tmp_path):
    model = folder(tmp_path / "m", {**HYBRID, "num_key_value_heads": 2})
    found, _ = rows(plan, model)
    assert [page["tokens"] for page in found["pages"]] == [1568, 3136, 5568]
    plan(model, "--page-tokens", 5568)
    assert plan(model, "--page-tokens", 3136, code=3).err == (
        "fp4kv plan: refused: nvfp4: 3,136 tokens x 576 bytes = 1,806,336 bytes, less than the state page of "
        "3,207,168; it takes 5,568 tokens\n"
    )
    assert "5,570 tokens are no multiple of 16" in plan(model, "--page-tokens", 5570, code=3).err
    found, _ = rows(plan, model, "--", "--page-size", "64")
    assert [page["tokens"] for page in found["pages"]] == [1600, 3136, 5568]


def test_states_come_out_of_the_memory(plan, hybrid, draft):
    found, by = rows(plan, hybrid, "--draft", draft, "--memory", "60GB")
    assert found["states"]["slot_bytes"] == 48 * 3_207_168 and found["states"]["slots_per_request"] == 5
    assert by[NVFP4]["state_bytes"] == (by[NVFP4]["state_slots"] + 1) * found["states"]["slot_bytes"]
    drafted = by["nvfp4", "fp8_e4m3", None]
    assert drafted["state_slots"] < by[NVFP4]["state_slots"] and drafted["tokens"] < by[NVFP4]["tokens"]
    # The states of 48 seats' drafted blocks, one padding slot each.
    running = min(48, drafted["state_slots"] // 5)
    slots = drafted["state_slots"] + 1 + (running + 1) * 8
    assert drafted["state_bytes"] == slots * found["states"]["slot_bytes"]
    text = plan(hybrid, "--memory", "60GB").out
    assert "states: 48 recurrent layers, 3,207,168 bytes a layer, 153,944,064 a slot, 5 slots a request" in text
    assert "state slots" in text


def test_state_flags(plan, hybrid):
    flags = ("--max-mamba-cache-size", "20", "--mamba-ssm-dtype", "bfloat16", "--disable-overlap-schedule")
    found, by = rows(plan, hybrid, "--memory", "60GB", "--", *flags)
    assert (found["states"]["dtype"], found["states"]["layer_bytes"]) == ("bfloat16", 1_634_304)
    assert found["states"]["slots_per_request"] == 3  # no overlap and pages of 1: no_buffer
    assert (by[NVFP4]["state_slots"], by[NVFP4]["state_requests"]) == (20, 6)
    found, by = rows(plan, hybrid, "--memory", "60GB", "--", "--disable-overlap-schedule", "--page-size", "64")
    assert found["states"]["slots_per_request"] == 4
    assert by[NVFP4]["tokens"] % 64 == 0
    found, _ = rows(plan, hybrid, "--", "--linear-attn-backend", "flashinfer")
    assert found["states"]["slots_per_request"] == 3


def test_drafted_rows(plan, plain, draft):
    found, by = rows(plan, plain, "--draft", draft, "--kv-memory", "1GB", "--", "--page-size", "16")
    cells = {key[:2]: row["bytes_per_token"] for key, row in by.items() if key[1]}
    assert cells == {
        ("bf16", "bf16"): 8192 + 2048, ("fp8_e4m3", "fp8_e4m3"): 4096 + 1024,
        ("nvfp4", "fp8_e4m3"): 2304 + 1024, ("nvfp4", "bf16"): 2304 + 2048,
    }  # fmt: skip
    assert by["nvfp4", "fp8_e4m3", None]["tokens"] == 10**9 // 3328 // 16 * 16
    assert round(by["nvfp4", "fp8_e4m3", None]["times_fp8"], 4) == round(5120 / 3328, 4)
    assert found["drafter"]["windows"] == [2048, 2048, 2048, 0] and found["drafter"]["draft_tokens"] == 8
    # 98,304 tokens in four layers of 256 bytes are kept; three layers read the last 2,048.
    assert found["drafter"]["request_bytes_fp8_e4m3"] == {"kept": 98304 * 1024, "read": (98304 + 3 * 2048) * 256}
    text = " ".join(plan(plain, "--draft", draft).out.split())
    assert (
        "3 of 4 drafter layers read the last 2,048 tokens, but SGLang 0.5.23 keeps every token of every layer: "
        "100,663,296 bytes in FP8 for a request of 98,304 tokens, of which 26,738,688 are ever read" in text
    )


@pytest.mark.parametrize(
    "window",
    [{"sliding_window": 512}, {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}],
)
def test_windows_in_one_pool_are_counted_whole(plan, plain, tmp_path, window):
    """As SGLang serves Gemma 3: each layer keeps every token, windowed or not."""
    model = folder(tmp_path / "windowed", {**PLAIN, **window})
    (found, by), (_, whole) = rows(plan, model), rows(plan, plain)
    assert {key: row["target_bytes"] for key, row in by.items()} == {key: row["target_bytes"] for key, row in whole.items()}
    assert any("windowed layers of the target" in note for note in found["notes"])


def test_a_window_that_is_asked_for(plan, plain, draft):
    flags = ("--", "--speculative-draft-window-size", "1024", "--speculative-num-draft-tokens", "4")
    found, _ = rows(plan, plain, "--draft", draft, *flags)
    assert found["drafter"]["windows"] == [1024] * 4 and found["drafter"]["draft_tokens"] == 4
    found, _ = rows(plan, PAIR / "target", "--draft", PAIR / "draft")
    assert found["drafter"]["windows"] == [0, 0] and "request_bytes_bf16" not in found["drafter"]


def test_a_window_that_only_the_dflash_config_has(plan, plain, tmp_path):
    keys = {"sliding_window": None, "dflash_config": {"swa_window_size": 1024}}
    found, _ = rows(plan, plain, "--draft", folder(tmp_path / "d", {**DRAFT, **keys}))
    assert found["drafter"]["windows"] == [1024, 1024, 1024, 0]
    keys["dflash_config"]["swa_window_size"] = 0
    assert "swa_window_size must be a positive integer, got 0" in (
        plan(plain, "--draft", folder(tmp_path / "d", {**DRAFT, **keys}), code=2).err
    )


@pytest.mark.parametrize(("flags", "message"), [
    (["--speculative-dflash-block-size", "8", "--speculative-num-draft-tokens", "4"], "block-size 8: --speculative-num-draft-tokens says 4"),
    (["--speculative-draft-window-size", "7"], "--speculative-draft-window-size 7: a block of 8 tokens does not fit in it"),
])  # fmt: skip
def test_flags_of_a_draft_that_cannot_be_meant(plan, plain, draft, flags, message):
    assert message in plan(plain, "--draft", draft, "--", *flags, code=2).err


def test_replicated_heads(plan, plain):
    _, two = rows(plan, plain, "--tp", "2")
    found, four = rows(plan, plain, "--tp", "4")
    assert two[NVFP4]["bytes_per_token"] == four[NVFP4]["bytes_per_token"] == 4 * 288
    assert "2 KV heads on 4 GPUs: each GPU keeps 1, so a token's bytes stay the same beyond 2 GPUs" in found["notes"]
    assert "num_key_value_heads: 2 KV heads cannot be split or copied evenly over 3 GPUs" in (
        plan(plain, "--tp", "3", code=2).err
    )


def test_what_is_not_known_is_said(plan, plain):
    found, by = rows(plan, plain)
    assert found["unknown"] == ["weights", "graphs", "activations"]
    assert "no memory was given" in found["notes"][0]
    found, by = rows(plan, plain, "--gpu-memory", "10GB")
    assert by[NVFP4]["tokens"] == 10**10 // 2304
    assert [re.split(", so|:", note)[0] for note in found["notes"]] == [
        "--gpu-memory is counted whole",
        "weights are not known (--weights) and not counted",
        "without --mem-fraction-static SGLang chooses it; 1 is counted",
    ]
    fraction = ("--", "--mem-fraction-static", "0.75")
    found, by = rows(plan, plain, "--gpu-memory", "10GB", "--weights", "2GB", *fraction)
    assert by[NVFP4]["tokens"] == (7_500_000_000 - 2_000_000_000) // 2304
    assert found["unknown"] == ["graphs", "activations"]
    assert found["notes"][1:] == ["graphs and activations are not known; 2,500,000,000 bytes are left for them"]
    measured = ("--weights", "2GB", "--graphs", "1GB", "--activations", "1.5GB")
    found, _ = rows(plan, plain, "--gpu-memory", "10GB", *measured, *fraction)
    assert found["unknown"] == []
    assert found["notes"][1:] == ["graphs and activations take 2,500,000,000 of the 2,500,000,000 bytes left for them"]
    assert "Not known" not in plan(plain, "--gpu-memory", "10GB", *measured, *fraction).out
    assert plan(plain, "--gpu-memory", "10GB", *measured[:-1], "1.6GB", *fraction, code=3).err == (
        "fp4kv plan: refused: graphs and activations take 2,600,000,000 bytes, and 2,500,000,000 are left for them\n"
    )


def test_weights_by_the_files_headers(plan):
    found, by = rows(plan, PAIR / "target", "--draft", PAIR / "draft", "--gpu-memory", "1GiB")
    size = {name: sum(f.stat().st_size for f in (PAIR / name).glob("*.safetensors")) for name in ("target", "draft")}
    plain, drafted = by[NVFP4], by["nvfp4", "fp8_e4m3", None]
    for row, weights in ((plain, size["target"]), (drafted, sum(size.values()))):
        # The headers themselves are some kilobytes.
        assert abs((1 << 30) - weights - row["tokens"] * row["bytes_per_token"]) < 40_000
    assert any("weights are not measured" in note for note in found["notes"])


def test_memory_that_holds_nothing(plan, plain, hybrid):
    assert "weights of 2,000,000,000 bytes leave nothing of 2,000,000,000 x 0.9" in (
        plan(plain, "--gpu-memory", "2GB", "--weights", "2GB", "--", "--mem-fraction-static", "0.9", code=3).err
    )
    assert re.search("1,048,576 bytes hold no page of 1024 tokens", plan(
        plain, "--kv-memory", "1MiB", "--", "--page-size", "1024", code=3
    ).err)  # fmt: skip
    assert "slots for recurrent states of 153,944,064 bytes each" in plan(hybrid, "--memory", "200MB", code=3).err


def test_a_format_that_does_not_fit_hides_no_other(plan, plain, hybrid, draft):
    """Pages of 1,024 tokens: 8.4 MB in BF16, 2.4 MB in NVFP4."""
    words = (plain, "--kv-memory", "3MB", "--", "--page-size", "1024")
    _, by = rows(plan, *words)
    assert (by[NVFP4]["tokens"], by[NVFP4]["problem"]) == (1024, None)
    problem = "3,000,000 bytes hold no page of 1024 tokens of 8,192 bytes"
    assert (by[BF16]["tokens"], by[BF16]["requests"], by[BF16]["problem"]) == (0, 0.0, problem)
    assert f"- bf16: {problem}" in plan(*words).out.splitlines()
    # Without a drafter 6 slots fit; a drafted block's states leave none.
    _, by = rows(plan, hybrid, "--draft", draft, "--memory", "3GB")
    assert by[NVFP4]["tokens"] > 0 and by["nvfp4", "fp8_e4m3", None]["tokens"] == 0
    assert "slots for recurrent states" in by["nvfp4", "fp8_e4m3", None]["problem"]


def test_the_table(plan):
    found = plan(PAIR / "target", "--draft", PAIR / "draft", "--kv-memory", "1GB", "--", "--page-size", "16")
    lines = found.out.splitlines()
    assert lines[:3] == [
        f"target {PAIR / 'target'}: 4 layers with K and V, 2 KV heads, head dim 64",
        f"drafter {PAIR / 'draft'}: 2 layers with K and V, 2 KV heads, head dim 64",
        "one GPU of 1, pages of 16 tokens",
    ]
    assert lines[4].split() == (
        "KV bytes/token/layer target drafter bytes/token x FP8 tokens requests of 4,096".split()
    )
    assert [line.split() for line in lines[5:13]][2] == "nvfp4 144 576 - 576 1.78 1,736,096 423.85".split()
    assert lines[11].split() == "nvfp4, drafter fp8_e4m3 144 576 512 1,088 1.41 919,104 224.39".split()
    assert "Not known: weights, graphs, activations." in lines
    assert found.err == ""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("47.30GB", 47_300_000_000), ("8.5 GB", 8_500_000_000), ("1GiB", 1 << 30), ("1.5GiB", 3 << 29),
        ("1000MB", 10**9), ("2TB", 2 * 10**12), ("20141722828", 20141722828), ("1048576", 1 << 20),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.5", "1gb", "1kiB", "nan", "1e9", "139", "1000B", "9999999TB"])
def test_sizes_that_cannot_be_meant(text, capsys, plain):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", plain, f"--kv-memory={text}"])
    assert re.search(f"argument --kv-memory: '{re.escape(text)}' is (no size|.* bytes; a size from 1MiB)", capsys.readouterr().err)


@pytest.mark.parametrize("text", ["mxfp8=5", "nvfp4", "nvfp4=0", "nvfp4=x", "nvfp4=1.5"])
def test_measured_bytes_that_cannot_be_meant(text, capsys, plain):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", plain, "--bytes-per-token", text])
    assert f"{text!r}: write bf16=N, fp8_e4m3=N or nvfp4=N, N whole bytes" in capsys.readouterr().err


def test_two_memories_at_once(plain, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", plain, "--kv-memory", "1GB", "--memory", "1GB"])
    assert "not allowed with argument" in capsys.readouterr().err


BAD_CONFIGS = {
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "no heads": ({"num_attention_heads": None, "num_key_value_heads": None}, "num_key_value_heads and num_attention_heads are missing"),
    "no head dim": ({"head_dim": None, "hidden_size": None}, "head_dim is missing"),
    "odd head dim": ({"head_dim": 72}, "head_dim must be a positive multiple of 16, got 72"),
    "odd V": ({"v_head_dim": 100}, "multiple of 16, got 100"),
    "text for a number": ({"num_key_value_heads": "2"}, "num_key_value_heads must be a positive integer, got '2'"),
    "heads by another name": ({"multi_query": True}, "multi_query names the KV heads"),
    "MLA": ({"kv_lora_rank": 512}, "kv_lora_rank: MLA keeps no K and V by head"),
    "MLA with a head dim of its own": ({"kv_lora_rank": 512, "head_dim": None, "hidden_size": 7168, "num_attention_heads": 128}, "kv_lora_rank: MLA keeps"),
    "index keys of QSA": ({"indexer_n_heads": 4}, "indexer_n_heads: index keys lie beside K and V, which is not planned"),
    "index keys of MiniMax": ({"sparse_attention_config": {"sparse_index_dim": 128}}, "sparse_attention_config: index keys lie"),
    "windows by a pattern": ({"hybrid_layer_pattern": [0, 1, 1, 1]}, "hybrid_layer_pattern: windowed layers get pools"),
    "windows by layer ids": ({"local_layer_ids": [1]}, "local_layer_ids: windowed layers get pools"),
    "windows by architecture": ({"architectures": ["Llama4ForConditionalGeneration"]}, "architectures Llama4ForConditionalGeneration: such a target with windowed layers"),
    "layers in groups": ({"layer_group_size": 4}, "layer_group_size: some layers are recurrent"),
    "mixers": ({"mixer_types": ["minicpm4", "lightning"]}, "mixer_types: some layers may be recurrent"),
    "kinds by number": ({"attn_type_list": [0, 0, 0, 1]}, "attn_type_list: some layers are recurrent"),
    "loops": ({"num_loops": 2}, "num_loops: layers run more than once, with K and V for each pass"),
    "loops by another name": ({"loop_num": 2}, "loop_num: layers run more than once"),
    "a kind of its own": (
        {**HYBRID, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["qwen_sparse_attention"]},
        "layer_types: index keys lie beside K and V, which is not planned",
    ),
    "a kind that is not known": (
        {**HYBRID, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["conv"]},
        "layer_types: 'conv' is no kind of layer that is planned",
    ),
    "one index head": ({"indexer_n_heads": 1}, "indexer_n_heads: index keys lie beside K and V"),
    "index keys by architecture": ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "architectures: index keys lie"),
    "loops that a class adds": ({"model_type": "nanbeige"}, "num_loops: layers run more than once"),
    "loops that code adds": ({"architectures": ["IQuestLoopCoderForCausalLM"]}, "loop_num: layers run more than once"),
    "states that a class adds": ({"model_type": "qwen3_next"}, "layer_types and full_attention_interval are missing"),
    "windows by a class": (
        {"architectures": ["Gemma4ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
        "architectures Gemma4ForCausalLM: such a target with windowed layers",
    ),
    "chunks": ({"attention_chunk_size": 512}, "attention_chunk_size: such a target with windowed layers"),
    "too few kinds": ({"layer_types": ["full_attention"]}, "layer_types must list 4 layers, got 1"),
    "kinds that are no list": ({"layer_types": "full"}, "layer_types must list 4 layers, got 'full'"),
    "no attention": ({"layer_types": ["linear_attention"] * 4}, "layer_types names no layer that keeps K and V"),
    "unknown layers": ({"mamba_d_state": 16}, "layer_types and full_attention_interval are missing"),
    "two accounts": (
        {"layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 4},
        "layer_types and full_attention_interval 4 name other layers",
    ),
    "another recurrence": (
        {"layer_types": ["linear_attention", "full_attention"] * 2, "model_type": "lfm2"},
        "linear_num_value_heads is missing: of recurrent layers only the gated delta rule's states are planned "
        "(model_type 'lfm2')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_cannot_be_planned_names_the_key(plan, tmp_path, name):
    changes, message = BAD_CONFIGS[name]
    model = folder(tmp_path / "m", {**PLAIN, **changes})
    found = plan(model, code=2)
    assert found.err.startswith(f"fp4kv plan: {model}/config.json: ") and message in found.err
    assert found.out == ""


HARMLESS = {
    "one pass": {"num_loops": 1, "loop_num": 1},
    "one layer a group": {"layer_group_size": 1},
    "attention everywhere": {"attn_type_list": [1] * 4},
    "nothing in them": {"hybrid_layer_pattern": None, "mixer_types": [], "sparse_attention_config": {}},
    "a type that derives them": {"model_type": "llama", "num_key_value_heads": 2},
}


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
def test_keys_that_change_no_pool(plan, plain, tmp_path, changes):
    model = folder(tmp_path / "m", {**PLAIN, **changes})
    assert rows(plan, model)[1] == rows(plan, plain)[1]


@pytest.mark.parametrize(("kind", "key"), [
    ("qwen3", "num_key_value_heads"), ("qwen3", "head_dim"), ("qwen3_5_text", "head_dim"), ("mixtral", "num_key_value_heads"),
])  # fmt: skip
def test_a_figure_that_only_the_models_class_knows(plan, tmp_path, kind, key):
    base = HYBRID if kind.startswith("qwen3_5") else PLAIN
    config = {k: v for k, v in {**base, "model_type": kind}.items() if k != key}
    assert f"config.json: {key} is missing; model_type '{kind}' has a figure of its own" in (
        plan(folder(tmp_path / "m", config), code=2).err
    )


def test_layers_without_end_take_no_memory(plan, tmp_path):
    config = {**HYBRID, "num_hidden_layers": 2_000_000_000}
    found, _ = rows(plan, folder(tmp_path / "m", config))
    assert (found["target"]["layers"], found["states"]["layers"]) == (500_000_000, 1_500_000_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer, got 0"),
        ({"linear_num_value_heads": True}, "linear_num_value_heads must be a positive integer, got True"),
        ({"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_states_that_cannot_be_planned_name_the_key(plan, tmp_path, changes, message):
    model = folder(tmp_path / "m", {**HYBRID, **changes})
    assert f"{model}/config.json: {message}" in plan(model, code=2).err


def test_states_that_do_not_split_over_the_gpus(plan, hybrid):
    assert "linear_num_value_heads: 48 value heads cannot be split over 32 GPUs" in plan(hybrid, "--tp", "32", code=2).err
    assert "linear_num_key_heads: 16 key heads cannot be split over 12 GPUs" in plan(hybrid, "--tp", "12", code=2).err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must list 4 layers, got 1"),
        ({"layer_types": 4}, "layer_types must list 4 layers, got 4"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types: chunked_attention is no kind"),
        ({"layer_types": None, "full_attention_interval": 2}, "a draft with recurrent layers is not planned"),
        ({"is_hybrid_swa": True}, "is_hybrid_swa: a draft with pools of two lengths is not planned"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"kv_lora_rank": 4}, "kv_lora_rank: MLA"),
    ],
)
def test_a_draft_that_cannot_be_planned_names_the_key(plan, plain, tmp_path, changes, message):
    draft = folder(tmp_path / "d", {**DRAFT, **changes})
    assert f"{draft}/config.json: {message}" in plan(plain, "--draft", draft, code=2).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--page-tokens", "16"], "--page-tokens 16: the model has no recurrent states to share pages with"),
        (["--page-tokens", "0"], "--page-tokens 0: a positive number is needed"),
        (["--weights", "1GB"], "--weights belongs to --gpu-memory, which is missing"),
        (["--graphs", "1GB", "--kv-memory", "1GB"], "--graphs belongs to --gpu-memory, which is missing"),
        (["--tp", "0"], "--tp-size 0: a positive number is needed"),
        (["--", "--page-size", "-1"], "--page-size -1: a positive number is needed"),
        (["--", "--mamba-full-memory-ratio", "0"], "--mamba-full-memory-ratio 0.0: a positive number is needed"),
        (["--", "--mem-fraction-static", "1.5"], "--mem-fraction-static 1.5: a number between 0 and 1 is needed"),
        (["--", "--pp-size", "2"], "--pp-size 2: SGLang sizes its pools otherwise then; not planned"),
        (["--", "--json-model-override-args", '{"num_hidden_layers": 2}'], '--json-model-override-args {"num_hidden_layers": 2}: SGLang sizes'),
        (["--", "--disaggregation-mode", "prefill"], "--disaggregation-mode prefill: SGLang sizes"),
        (["--", "--prefill-only-disable-kv-cache"], "--prefill-only-disable-kv-cache True: SGLang sizes"),
        (["--", "--enable-unified-memory"], "--enable-unified-memory True: SGLang sizes"),
        (["--", "--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE: a plan has a DFLASH draft"),
        (["--", "--speculative-algorithm", "DFLASH"], "--speculative-algorithm DFLASH: a plan has a DFLASH draft, named by --draft"),
        (["--", "--model-path", "other"], "--model-path other: the model is MODEL"),
        (["--", "--no-such-flag"], "unknown flag '--no-such-flag'"),
        (["--tp", "2", "--", "--tp-size", "4"], "--tp-size 4: --tp says 2"),
        (["--bytes-per-token", "nvfp4=1", "--bytes-per-token", "nvfp4=2"], "--bytes-per-token nvfp4=1, nvfp4=2: one figure"),
        (["--", "--speculative-draft-model-path", "d"], "--speculative-draft-model-path d: the draft is named by --draft"),
        (["--draft", str(PAIR / "draft"), "--", "--speculative-draft-model-path", "d"], "path d: the draft is named"),
        (["--draft", str(PAIR / "draft"), "--", "--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE: a plan"),
        (["--plot", ""], "--plot '': a file with an ending, as out.png, is needed"),
        (["stray"], "unexpected argument 'stray'"),
        (["--draft", ""], "--draft '': a folder or a hub id is needed"),
        (["--draft", "no/such/folder"], "--draft no/such/folder: there is no such folder"),
    ],
)
def test_arguments_that_cannot_be_meant(plan, plain, words, message):
    assert message in plan(plain, *words, code=2).err


def test_a_hub_id_outside_the_cache(plan, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "nobody/no-such-model is not on this machine: a folder with its config.json is needed" in (
        plan("nobody/no-such-model", code=2).err
    )


@pytest.mark.parametrize("memory", [[], ["--kv-memory", "1GB"]], ids=["bytes", "tokens"])
def test_the_chart(plan, tmp_path, memory):
    from matplotlib import pyplot

    out = tmp_path / "out.png"
    plan(PAIR / "target", "--draft", PAIR / "draft", "--plot", out, *memory)
    height, width = pyplot.imread(out).shape[:2]
    assert height > 300 and width > 600


def test_the_chart_shows_every_row(plan, tmp_path):
    out = tmp_path / "out.svg"
    plan(PAIR / "target", "--draft", PAIR / "draft", "--kv-memory", "1GB", "--plot", out)
    drawn = out.read_text()
    found, by = rows(plan, PAIR / "target", "--draft", PAIR / "draft", "--kv-memory", "1GB")
    for row in by.values():
        assert f"{row['tokens']:,}" in drawn  # matplotlib writes each text beside its outlines
    assert "nvfp4 + one decoded fp8_e4m3 layer" in drawn and "tokens that fit on one GPU" in drawn


def test_a_chart_that_cannot_be_written(plan, plain, tmp_path):
    assert f"--plot {tmp_path}/none/out.png: it cannot be written" in plan(
        plain, "--plot", tmp_path / "none" / "out.png", code=2
    ).err
    assert f"--plot '{tmp_path}': a file with an ending" in plan(plain, "--plot", tmp_path, code=2).err
    assert "--plot out.nothing: it cannot be written" in plan(plain, "--plot", "out.nothing", code=2).err


def test_a_chart_without_matplotlib(plan, plain, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = plan(plain, "--plot", tmp_path / "out.png", code=2)
    assert found.err == (
        f"fp4kv plan: --plot {tmp_path}/out.png: matplotlib is not installed; pip install 'sglang-fp4kv[plot]'\n"
    )
    plan(plain)  # the table needs none


def test_planning_imports_neither_torch_nor_sglang():
    code = (
        "import sys; from launcher import cli; code = cli.main(['plan', sys.argv[1], '--kv-memory', '1GB']); "
        "print(code, [m for m in ('torch', 'sglang', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(PAIR / "target")], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_the_gpu_script_names_what_differs(tmp_path):
    from tests.gpu.plan_servers import FIXED_BUDGET, cases, compare

    fixed, (natural,) = cases(tmp_path)
    assert len({case.name for case in fixed}) == len(fixed) == 9
    by = {case.name: case for case in (*fixed, natural)}
    budget = {"available_bytes": FIXED_BUDGET, "bytes_per_token": 1088, "page_size": 16}
    report = {"budget": budget, "max_total_num_tokens": 4_595_584, "draft": {"bytes_per_token": 512}}
    for name in ("pair nvfp4 drafted --page-size 16", natural.name):
        row, differ = compare(by[name], report)
        assert (row["kv"], row["drafter"], differ) == ("nvfp4", "fp8_e4m3", {})
    _, differ = compare(natural, {**report, "max_total_num_tokens": 4_595_600})
    assert differ == {"max_total_num_tokens": (4_595_584, 4_595_600)}
    row, differ = compare(by["hybrid bf16"], {**report, "draft": None})
    assert differ["state_bytes"] == (row["state_bytes"], 0) and row["drafter"] is None
    row, differ = compare(by["pair nvfp4 drafted --page-size 16 --speculative-draft-kv-cache-dtype bf16"], report)
    assert row["drafter"] == "bf16" and differ["drafter_bytes"] == (1024, 512)
