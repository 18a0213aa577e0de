# SPDX-License-Identifier: Apache-2.0
"""The pair's larger sibling: how it is trained, and, where its weights are present, what they are."""
import hashlib
import json
import random
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
MODELS = Path(__file__).resolve().parent.parent / "models"
PAIR, SIBLING = MODELS / "pair", MODELS / "sibling"
sys.path.insert(0, str(MODELS))

import corpus  # noqa: E402
import curriculum  # noqa: E402
import decode  # noqa: E402
import evaluate  # noqa: E402
import evaluate_long  # noqa: E402
import long_rows  # noqa: E402
import modeling  # noqa: E402
import train_target  # noqa: E402

needs_weights = pytest.mark.skipif(
    not (SIBLING / "draft/model.safetensors").exists(), reason="models/sibling was not fetched"
)


@pytest.fixture(scope="module")
def tok():
    from tokenizers import Tokenizer
    return Tokenizer.from_file(str(PAIR / "target/tokenizer.json"))


@pytest.fixture(scope="module")
def pair():
    return [modeling.load(PAIR / part, dtype=torch.float32) for part in ("target", "draft")]


def recall_prompt(tok, chars):
    e = corpus.recall(random.Random(3), chars, 0.5)[0]
    return evaluate.encode(tok, [{"role": "user", "content": e.user}], []), e.check


@pytest.mark.parametrize("chunk", [64, 353, 4096])
def test_a_prompt_in_chunks_is_the_prompt_at_once(tok, pair, chunk):
    """A bottom-right causal mask over earlier chunks; a top-left one would see nothing of them."""
    target, draft = pair
    ids, code = recall_prompt(tok, 1200)
    prompt, length = torch.tensor([ids]), torch.tensor([len(ids)])
    alone = decode.generate(target, prompt, length, 28)[0]
    assert code in tok.decode([t for t in alone.tolist() if t >= 0])
    assert decode.generate(target, prompt, length, 28, None, chunk)[0].equal(alone)
    new, _ = decode.speculate(target, draft, ids, 28, None, None, chunk)
    assert new == [t for t in alone.tolist() if t >= 0]
    whole, _ = target.full(prompt)
    parts, features = decode.prefill(target, decode.Cache(target, 1, len(ids)), prompt, (0, 2), chunk)
    assert (whole - parts).abs().max() < 1e-3 and features.shape == (1, len(ids), 2 * target.s.hidden)


def test_a_later_chunk_reads_the_earlier_ones_as_the_pool_stored_them(tok, pair):
    target, _ = pair
    ids, _ = recall_prompt(tok, 1200)
    prompt = torch.tensor([ids])
    whole, _ = target.full(prompt)
    cache = decode.Cache(target, 1, len(ids), decode.as_nvfp4)
    parts, _ = decode.prefill(target, cache, prompt, (), 64)
    assert (whole - parts)[:, :64].abs().max() < 1e-3  # its own chunk is not rounded
    assert (whole - parts)[:, 64:].abs().max() > 0.01


def test_spread_positions_leave_answers_whole_and_reach_the_span(tok):
    torch.manual_seed(1)
    text = tok.encode(" ".join(corpus.filler(random.Random(2), 900)), add_special_tokens=False).ids
    ids = torch.tensor([text] * 400)
    learn = torch.zeros_like(ids, dtype=torch.bool)
    learn[:, 40:120] = True
    stop = tok.token_to_id(curriculum.FULL_STOP)
    at = curriculum.spread_positions(ids, learn, stop, 131072, 0.5)
    steps = at.diff(dim=1)
    assert at[:, 0].eq(0).all() and steps.min() == 1 and at.max() < 131072 and at.max() > 110_000
    gaps = steps > 1
    assert 0.35 < gaps.any(1).float().mean() < 0.65 and gaps.sum(1).max() == curriculum.CUTS
    assert not gaps[:, 40:119].any() and ids[:, :-1][gaps].eq(stop).all()
    unspread = curriculum.spread_positions(ids, learn, stop, 131072, 0.0)
    assert unspread.equal(torch.arange(ids.shape[1]).expand_as(ids))
    none = curriculum.spread_positions(torch.zeros_like(ids), learn, stop, 131072, 1.0)  # nowhere to cut
    assert none.equal(unspread)


def test_every_code_of_a_long_text_is_planted_once_and_asked_for():
    for seed in range(60):
        r = random.Random(seed)
        count = r.randint(1, 14)
        exs = long_rows.many_codes(r, 3000, count)
        assert len(exs) == count
        text = exs[0].user
        for e in exs:
            key = re.search(r"code( of the \w+ \w+)? is", e.answer)[1] or ""
            assert text.count(f"code{key} is {e.check}.") == 1 and text.count(f"code{key} is ") == 1
            assert re.search(rf"code{key}[?.]$", e.user)


def test_long_rows_fill_their_length_and_mark_only_answers(tok):
    train_target._start(tok.to_str())
    _, ids, learn, lengths = long_rows._long_shard(("seed", 6, 8192))
    again = long_rows._long_shard(("seed", 6, 8192))
    assert (ids == again[1]).all() and lengths.max() <= 8192 and lengths.mean() > 5500
    for row, mask, n in zip(ids, learn, lengths):
        assert not row[n:].any() and not mask[n:].any() and mask.sum() > 10
        answers = tok.decode(row[mask].tolist(), skip_special_tokens=False).split("<|im_end|>")
        assert any(a.startswith("The code") for a in answers) and answers[-1] == ""


def test_block_loss_ends_with_the_answer_and_follows_positions(tok, pair):
    target, draft = pair
    ids, _ = recall_prompt(tok, 600)
    n = len(ids)
    answer = [t for t in decode.generate(target, torch.tensor([ids]), torch.tensor([n]), 40)[0].tolist() if t >= 0]
    row = torch.tensor([ids + answer + ids])  # another turn follows: blocks must not be scored on it
    learn = torch.zeros_like(row, dtype=torch.bool)
    learn[:, n:n + len(answer)] = True
    last = torch.tensor([[n + len(answer) - 2]])
    _, accept, first = decode.block_loss(target, draft, row, learn, last)
    assert accept <= 2 and first in (0, 1)
    anchors = torch.tensor([[n, n + 6]])
    plain, *_ = decode.block_loss(target, draft, row, learn, anchors)
    at = torch.arange(row.shape[1])[None]
    moved, *_ = decode.block_loss(target, draft, row, learn, anchors, at + 500)
    wrong, *_ = decode.block_loss(target, draft, row, learn, anchors, at * 3)
    assert float(moved) == pytest.approx(float(plain), rel=1e-2) and wrong > 2 * plain


def test_a_phase_ends_by_its_steps_and_the_probe_ends_the_run(tok):
    train_target._start(tok.to_str())
    rows = train_target.pad([train_target._shard(("s", 40, 0, 0, False))])
    feed = curriculum.Feed("cpu", 512, 1)
    feed.add(rows)
    model = modeling.Target(modeling.Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=32, layers=2))
    phases = [curriculum.Phase(name, 3, 600, {curriculum.BRIEF: 1.0, 8192: 1.0}, 0.5, 0.05) for name in "abc"]
    seen = []
    took = curriculum.run("target", model, feed, phases, lambda *x: curriculum.target_loss(model, *x), 1, 1e-3,
                          tok.token_to_id("."), 1000, lambda text: None, None,
                          lambda phase, last: seen.append((phase.name, last)) or phase.name == "a")
    assert seen == [("a", True), ("b", True)] and took["ended by the probe"] == "b" and "c" not in took
    assert took["a"]["steps"] == 3 and not took["a"]["ended by the clock"]


def test_roughening_is_as_large_as_an_nvfp4_pool_makes_it():
    torch.manual_seed(0)
    x = torch.randn(64, 2, 100, 128)
    error = (decode.as_nvfp4(x) - x).square().mean()
    noise = (modeling.rough(x, 0.05) - x).square().mean()
    assert 0.8 < noise / error < 2


@needs_weights
def test_sibling_is_larger_within_30_megabytes_and_its_record_is_of_its_weights():
    text, total = (SIBLING / "TRAINING.md").read_text(), 0
    for part in ("target", "draft"):
        data = (SIBLING / part / "model.safetensors").read_bytes()
        total += len(data)
        found = re.search(rf"`{part}/model.safetensors` ([\d,]+) bytes, sha256 ([0-9a-f]{{64}})", text)
        assert int(found[1].replace(",", "")) == len(data) and found[2] == hashlib.sha256(data).hexdigest()
        assert len(data) > (PAIR / part / "model.safetensors").stat().st_size
        config = json.loads((SIBLING / part / "config.json").read_text())
        assert config["max_position_embeddings"] == 131072 and config["head_dim"] == 128
    assert total < 30_000_000


@needs_weights
def test_sibling_recalls_at_two_thousand_tokens_and_its_drafter_is_accepted(tok):
    target, draft = (modeling.load(SIBLING / part, dtype=torch.bfloat16) for part in ("target", "draft"))
    tokens = steps = 0
    for at, prompt, code, _ in evaluate_long.recall_cases(tok, 7, 2000, 1):
        new, n = decode.speculate(target, draft, prompt, 48, decode.as_nvfp4, decode.as_fp8, 512)
        assert code in tok.decode(new), at
        tokens, steps = tokens + len(new), steps + n
    assert tokens / steps >= 3


@needs_weights
def test_sibling_does_sums_and_calls_tools(tok):
    target = modeling.load(SIBLING / "target", dtype=torch.bfloat16)
    rows = [row for row in evaluate.cases(11, 3) if row[0] in ("arithmetic", "tool")]
    assert len(rows) == 6
    prompts = [evaluate.encode(tok, messages, tools) for _, messages, tools, _ in rows]
    answers = evaluate.batched(target, prompts, 88, decode.as_nvfp4, "cpu")
    for (kind, *_, check), answer in zip(rows, answers):
        assert evaluate.is_right(kind, tok.decode(answer, skip_special_tokens=False), check), (kind, check)


@needs_weights
def test_sibling_record_shows_recall_at_every_depth_and_three_accepted_tokens():
    long = json.loads((SIBLING / "training.json").read_text())["long"]
    assert not long["left out"]
    for depth in map(str, evaluate_long.DEPTHS):
        for pool in ("bf16", "nvfp4"):
            assert min(long["recall"][depth][pool].values()) == 1.0, (depth, pool)
        assert min(x["accept"] for x in long["accept"][depth].values()) >= 3, depth
