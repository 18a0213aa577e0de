"""Greedy tokens of the embedded server against Hugging Face transformers, in BF16.

Two right BF16 implementations add in different orders, so where the two best logits lie within a
few BF16 steps of each other either token may win. The test therefore picks, from seeded random
prompts, those on which transformers' own greedy path never comes that close, and asks for equality
outright on them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from launcher.client import generate
from tests.e2e.server import embedded_server
from tests.e2e.tiny_models import VOCAB, build_draft, build_target

pytestmark = pytest.mark.e2e

PAIR = Path(__file__).parents[2] / "models/pair"
CHUNK = 64
NEW = 12
LENGTHS = (3, 40, 150)  # a few tokens, one chunk, three chunks
EACH = 2
CLEAR_STEPS = 4
FLAGS = ("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "2048")


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = build_target(folder / "target")
    return target, build_draft(folder / "draft", target)


def greedy(model, prompts: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' greedy continuation [N, new] and its narrowest gap, in BF16 steps."""
    tokens, cache, narrowest = prompts, None, torch.full((len(prompts),), torch.inf)
    answers = []
    for _ in range(new):
        out = model(tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[:, -1].float().topk(2)
        step = 2.0 ** (best.values[:, 0].abs().log2().floor() - 7)
        narrowest = torch.minimum(narrowest, (best.values[:, 0] - best.values[:, 1]) / step)
        tokens = best.indices[:, :1]
        answers.append(tokens)
    return torch.cat(answers, 1), narrowest


@pytest.fixture(scope="module")
def reference(models):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        yield model


@pytest.fixture(scope="module")
def cases(reference):
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for length in LENGTHS:
        prompts = torch.randint(0, 256, (96, length), generator=generator)
        answers, narrowest = greedy(reference, prompts, NEW)
        clear = torch.nonzero(narrowest >= CLEAR_STEPS).flatten().tolist()
        assert len(clear) >= EACH, f"only {len(clear)} clear prompts of {length} tokens"
        chosen += [Case(prompts[i].tolist(), answers[i].tolist()) for i in clear[:EACH]]
    return chosen


@pytest.fixture(scope="module")
def undrafted(models, tmp_path_factory):
    log = tmp_path_factory.mktemp("undrafted") / "server.log"
    with embedded_server(models[0], *FLAGS, log=log) as server:
        yield server


def ask(server, prompt):
    return generate(server.url, prompt, NEW, ignore_eos=True)


def test_the_answers_depend_on_the_whole_prompt(reference, cases):
    """Else equal tokens would say nothing about the cache."""
    for case in cases:
        changed = torch.tensor([[(case.prompt[0] + 1) % 256, *case.prompt[1:]]])
        answer, _ = greedy(reference, changed, NEW)
        assert answer[0].tolist() != case.answer


def test_equal_to_transformers(undrafted, cases):
    for case in cases:
        assert list(ask(undrafted, case.prompt).tokens) == case.answer, len(case.prompt)


def test_equal_after_a_prefix_cache_hit(undrafted, cases):
    for case in cases:
        ask(undrafted, case.prompt)
        again = ask(undrafted, case.prompt)
        assert again.cached_tokens >= len(case.prompt) - 1
        assert list(again.tokens) == case.answer


def test_equal_with_a_draft(models, cases, tmp_path):
    """Also with a prefix-cache hit, and the draft's pool in FP8 beside a BF16 target pool."""
    draft = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(models[1]))
    fp8 = ("--speculative-draft-kv-cache-dtype", "fp8_e4m3")
    with embedded_server(models[0], *FLAGS, *draft, *fp8, log=tmp_path / "log") as server:
        assert "torch.float8_e4m3fn" in server.log_path.read_text()
        for case in cases:
            drafted = ask(server, case.prompt)
            assert list(drafted.tokens) == case.answer, len(case.prompt)
            assert drafted.accept_length >= 1
        last = ask(server, cases[-1].prompt)
        assert last.cached_tokens > 0 and list(last.tokens) == cases[-1].answer


def test_equal_with_accepted_drafts(tmp_path):
    """The shipped pair: its drafter is trained, so verify accepts what it proposes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, draft = PAIR / "target", PAIR / "draft"
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    flags = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft))
    accepted = []
    with embedded_server(target, *FLAGS, *flags, log=tmp_path / "log") as server:
        for entry in json.loads((PAIR / "prompts.json").read_text())[:4]:
            text = tokenizer.apply_chat_template(
                entry["messages"],
                tools=entry.get("tools"),
                add_generation_prompt=True,
                tokenize=False,
            )
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            with torch.inference_mode():
                answer, narrowest = greedy(model, torch.tensor([prompt]), NEW)
            assert narrowest[0] >= CLEAR_STEPS, entry["name"]
            got = ask(server, prompt)
            assert list(got.tokens) == answer[0].tolist(), entry["name"]
            accepted.append(got.accept_length)
    assert max(accepted) > 1.5, accepted


def test_fp8_target_with_a_draft_serves(models, cases, tmp_path):
    draft = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(models[1]))
    fp8 = ("--kv-cache-dtype", "fp8_e4m3")
    with embedded_server(models[0], *FLAGS, *draft, *fp8, log=tmp_path / "log") as server:
        for case in cases[-2:]:
            tokens = ask(server, case.prompt).tokens
            assert len(tokens) == NEW and all(0 <= token < VOCAB for token in tokens)
