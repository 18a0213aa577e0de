# SPDX-License-Identifier: Apache-2.0
"""The shipped pair of small models: sizes, configs, names, tokenizer, answers, recorded hashes."""
import hashlib
import json
import random
import re
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parent.parent / "models"
PAIR = MODELS / "pair"
sys.path.insert(0, str(MODELS))

import corpus  # noqa: E402
import tokenizer as pair_tokenizer  # noqa: E402

torch = pytest.importorskip("torch")

LAYER = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight",
         "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
         "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate_proj.weight",
         "mlp.up_proj.weight", "mlp.down_proj.weight")


def config(part: str) -> dict:
    return json.loads((PAIR / part / "config.json").read_text())


def weights(part: str) -> dict:
    from safetensors.torch import load_file
    return load_file(str(PAIR / part / "model.safetensors"))


def prompts() -> list[dict]:
    return json.loads((PAIR / "prompts.json").read_text())


@pytest.fixture(scope="module")
def tok():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(str(PAIR / "target"))


@pytest.fixture(scope="module")
def pair():
    import modeling
    return modeling.load(PAIR / "target"), modeling.load(PAIR / "draft")


def test_weights_are_bf16_and_under_eight_megabytes():
    total = 0
    for part in ("target", "draft"):
        total += (PAIR / part / "model.safetensors").stat().st_size
        assert {t.dtype for t in weights(part).values()} == {torch.bfloat16}
        assert all(torch.isfinite(t.float()).all() for t in weights(part).values())
    assert total < 8_000_000


def test_draft_config_has_what_sglang_reads_and_fits_the_target():
    target, draft = config("target"), config("draft")
    assert target["architectures"] == ["Qwen3ForCausalLM"] and draft["architectures"] == ["DFlashDraftModel"]
    assert draft["block_size"] == 8 and draft["num_target_layers"] == target["num_hidden_layers"]
    ids = draft["dflash_config"]["target_layer_ids"]
    # Captured one layer later, so the last layer's id would capture nothing; capture order is layer order.
    assert ids == sorted(set(ids)) and 0 <= ids[0] and ids[-1] < target["num_hidden_layers"] - 1
    assert draft["dflash_config"]["mask_token_id"] < target["vocab_size"]
    for key in ("hidden_size", "vocab_size", "head_dim", "rope_theta", "max_position_embeddings"):
        assert draft[key] == target[key], key
    assert target["head_dim"] == 64 and target["max_position_embeddings"] >= 4096
    assert target["num_key_value_heads"] >= 2
    assert target["num_attention_heads"] // target["num_key_value_heads"] >= 2


def test_weight_names_and_shapes_are_complete():
    """SGLang skips a draft weight whose name it does not know, so names are checked both ways."""
    for part, extra in (("target", {"model.embed_tokens.weight", "model.norm.weight"}),
                        ("draft", {"norm.weight", "fc.weight", "hidden_norm.weight"})):
        c, w = config(part), weights(part)
        prefix = "model." if part == "target" else ""
        names = {f"{prefix}layers.{i}.{n}" for i in range(c["num_hidden_layers"]) for n in LAYER} | extra
        assert set(w) == names
        if part == "draft":
            k = len(c["dflash_config"]["target_layer_ids"])
            assert w["fc.weight"].shape == (c["hidden_size"], k * c["hidden_size"])
        else:
            assert w["model.embed_tokens.weight"].shape == (c["vocab_size"], c["hidden_size"])


def test_sglang_parses_the_draft_config():
    utils = pytest.importorskip("sglang.srt.speculative.dflash_utils")
    parsed = utils.parse_dflash_draft_config(draft_hf_config=config("draft"))
    assert parsed.block_size == 8 and parsed.mask_token_id == 3 and not parsed.is_domino
    assert parsed.resolve_target_layer_ids(target_num_layers=4) == config("draft")["dflash_config"]["target_layer_ids"]


def test_tokenizer_round_trip_and_special_tokens(tok):
    assert len(tok) == config("target")["vocab_size"]
    for text in ("17 x 23 = 391", "Zähle von 3 bis 9. ¿Cómo estás?", '{"a": [1, 2]}\n\n  x\t', "日本 🎈"):
        assert tok.decode(tok(text)["input_ids"]) == text
    assert tok.eos_token_id == config("target")["eos_token_id"] == 2
    # SGLang refuses a mask_token_id that is not the tokenizer's id of its default mask token.
    assert tok.get_vocab()["<|MASK|>"] == config("draft")["dflash_config"]["mask_token_id"]
    assert tok.decode(tok("<tool_call>{}</tool_call>")["input_ids"], skip_special_tokens=True) == \
        "<tool_call>{}</tool_call>"


def test_chat_template_writes_what_training_saw(tok):
    r = random.Random(5)
    for i in range(60):
        messages, tools = corpus.conversation(r, 300 * (i % 3 == 0))
        want = pair_tokenizer.render(messages, tools)
        given = tools if i % 2 else [t["function"] for t in tools]  # both forms a server may pass
        got = tok.apply_chat_template(messages, tools=given or None, add_generation_prompt=True, tokenize=False)
        assert got == want


def test_corpus_is_repeatable_and_its_answers_hold():
    a, b = ([corpus.conversation(random.Random(s), 400) for s in range(5)] for _ in range(2))
    assert a == b
    r = random.Random(1)
    for kind, make in corpus.SHORT_KINDS.items():
        for _ in range(200):
            e = make(r)
            assert e.kind == kind and e.check in e.answer
            if kind == "tool":
                call = json.loads(e.answer.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
                known = {t["function"]["name"]: t["function"] for t in e.tools}[call["name"]]
                assert set(call["arguments"]) == set(known["parameters"]["required"])
    assert corpus.arithmetic(r, 17, 23).answer.startswith(("17 x 23 = 391.", "17 + 23 = 40."))


@pytest.mark.parametrize("name", ["arithmetic", "recall", "tool"])
def test_target_answers_demo_prompts_with_transformers(name, tok):
    from transformers import AutoModelForCausalLM
    p = next(p for p in prompts() if p["name"] == name)
    model = AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=torch.bfloat16)
    text = tok.apply_chat_template(p["messages"], tools=p.get("tools"), add_generation_prompt=True, tokenize=False)
    ids = tok(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**ids, max_new_tokens=p["max_new_tokens"], do_sample=False)
    answer = tok.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True)
    assert p["expect"] in answer


def test_drafter_is_accepted_and_changes_no_token(tok, pair):
    import decode
    target, draft = pair
    tokens = steps = 0
    for p in prompts():
        text = pair_tokenizer.render(p["messages"], p.get("tools") or [])
        ids = tok(text, add_special_tokens=False)["input_ids"]
        new, n = decode.speculate(target, draft, ids, p["max_new_tokens"])
        alone = decode.generate(target, torch.tensor([ids]), torch.tensor([len(ids)]), p["max_new_tokens"])[0]
        assert new == [t for t in alone.tolist() if t >= 0], p["name"]
        tokens, steps = tokens + len(new), steps + n
    assert tokens / steps >= 2.5


def test_accept_length_falls_to_one_when_features_are_wrong(tok, pair):
    """The negative control: a drafter that reads noise instead of target features is not accepted."""
    import decode
    target, draft = pair
    p = prompts()[0]
    ids = tok(pair_tokenizer.render(p["messages"]), add_special_tokens=False)["input_ids"]
    _, good = decode.speculate(target, draft, ids, p["max_new_tokens"])
    torch.manual_seed(0)
    fc = draft.fc.weight.data.clone()
    draft.fc.weight.data.normal_(std=0.1)
    try:
        _, bad = decode.speculate(target, draft, ids, p["max_new_tokens"])
    finally:
        draft.fc.weight.data.copy_(fc)
    assert bad > 2 * good


def test_training_record_matches_the_weights():
    text = (PAIR / "TRAINING.md").read_text()
    for part in ("target", "draft"):
        found = re.search(rf"`{part}/model.safetensors` ([\d,]+) bytes, sha256 ([0-9a-f]{{64}})", text)
        data = (PAIR / part / "model.safetensors").read_bytes()
        assert int(found[1].replace(",", "")) == len(data)
        assert found[2] == hashlib.sha256(data).hexdigest()
