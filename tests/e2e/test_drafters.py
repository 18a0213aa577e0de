"""Drafters beside DFLASH on an NVFP4 target: NGRAM as a tree and as a chain, an EAGLE3 head, an MTP module.

No prefix cache: where a prompt is cut may move a near-tie, drafted or not, and here prompts are repeated.
"""

import json
from pathlib import Path

import pytest

from launcher.client import ServerError, fp4kv_report, generate, server_info
from launcher.demo import PAIR, load_prompts
from launcher.equality import CPU_BOUND, compare
from sglang_fp4kv import formats
from tests.e2e.test_nvfp4_serving import NVFP4, cell, serve, unsure_prompts
from tests.e2e.tiny_heads import build_eagle3, build_mtp

pytestmark = pytest.mark.e2e

BASE = (*NVFP4, "--disable-radix-cache")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
TREE = (*BASE, *NGRAM, "--speculative-ngram-max-bfs-breadth", "4")
CHAIN = (*BASE, *NGRAM, "--speculative-ngram-max-bfs-breadth", "1", "--page-size", "16")
TOKENS = 24
BUDGET_BYTES = 20_000_000


@pytest.fixture(scope="module")
def prompts():
    """Two tasks that the target was trained on, and random tokens, where its two best tokens often tie."""
    tasks = load_prompts(PAIR / "prompts.json", PAIR / "target")[:2]
    return [p["input_ids"] for p in [*tasks, *unsure_prompts()[:4]]]


def ask(server, prompts, **options):
    return [generate(server.url, p, TOKENS, ignore_eos=True, **options) for p in prompts]


@pytest.fixture(scope="module")
def undrafted(scratch, prompts):
    with serve(scratch, "undrafted", *BASE) as server:
        return ask(server, prompts, top_two=True)


def differing(reference, candidates):
    pairs = enumerate(zip(reference, candidates, strict=True))
    return [i for i, (a, b) in pairs if not compare(a.tokens, b.tokens, a.gaps, CPU_BOUND).passed]


def accepted(answers):
    return sum(a.accept_length for a in answers) / len(answers)


def reason(server, prompt, **asked):
    """Why the server does not answer a request."""
    with pytest.raises(ServerError) as error:
        generate(server.url, prompt, 4, **asked)
    return str(error.value)


class Told:
    """What a server was told to do wrong (FP4KV_MISREAD), and the moves it wrote down."""

    def __init__(self, folder: Path):
        self.how, self.moves = folder / "told", folder / "moves"
        self.env = {"FP4KV_MISREAD": str(self.how), "FP4KV_MOVES": str(self.moves)}

    def moved_rows(self) -> int:
        return sum(map(int, self.moves.read_text().split()))


@pytest.fixture(scope="module")
def tree(scratch, prompts):
    """NGRAM's answers: at first, repeated, without the mask, right again. What it answers wrongly becomes
    part of what it drafts from, so its trees get branches that are wrong."""
    told = Told(scratch)
    with serve(scratch, "tree", *TREE, **told.env) as server:
        rounds = {"first": ask(server, prompts), "repeated": ask(server, prompts)}
        for how in ("verify-without-mask", "right again"):
            told.how.write_text(how)
            before = told.moved_rows()
            rounds[how] = ask(server, prompts)
            rounds[f"moves {how}"] = told.moved_rows() - before
        rounds["refused"] = [reason(server, prompts[0], **asked) for asked in ({"repetition_penalty": 1.1}, {"temperature": 0.7})]
        rounds["report"] = fp4kv_report(server_info(server.url))
    return rounds


@pytest.mark.parametrize("name", ["first", "repeated", "right again"])
def test_a_tree_of_ngrams_changes_no_answer(undrafted, tree, name):
    assert differing(undrafted, tree[name]) == []


def test_repeated_answers_are_accepted_from_the_tree(tree):
    assert accepted(tree["first"]) < 3 and accepted(tree["repeated"]) > 4


def test_accepted_rows_moved_to_the_front_of_their_block(tree):
    """Else equal answers would say nothing about move_kv_cache; its bytes are tests/test_pool.py's."""
    assert tree["moves right again"] > 0


def test_ignoring_the_trees_mask_is_caught(undrafted, tree):
    """The negative control."""
    assert differing(undrafted, tree["verify-without-mask"]) != []


def test_what_a_tree_is_not_verified_with_is_refused(tree):
    counted, drawn = tree["refused"]
    assert "HTTP 400" in counted and "repetition_penalty 1.1: SGLang 0.5.23 leaves" in counted
    assert "HTTP 400" in drawn and "temperature 0.7: SGLang 0.5.23 has no kernel for a CPU" in drawn


def test_ngram_has_no_pool(tree):
    assert tree["report"]["draft"] is None
    assert tree["report"]["target"]["class"] == "sglang_fp4kv.pool.NVFP4TokenToKVPool"


def test_a_chain_of_ngrams_on_pages_changes_no_answer(scratch, prompts, undrafted):
    with serve(scratch, "chain", *CHAIN) as server:
        first, repeated = ask(server, prompts[2:5]), ask(server, prompts[2:5])
    assert differing(undrafted[2:5], first) == differing(undrafted[2:5], repeated) == []
    assert accepted(repeated) > 4


def record(file: Path, prompts, answers):
    recorded = [{"prompt": p, "output": list(a.tokens)} for p, a in zip(prompts, answers, strict=True)]
    file.write_text(json.dumps(recorded))
    return {"FP4KV_ORACLE": str(file)}


def drafting(algorithm, draft, steps, topk, tokens):
    return (
        *BASE, "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
        "--speculative-num-draft-tokens", str(tokens), "--max-total-tokens", "100000000",
    )  # fmt: skip


def check_pools(report, dtype, value_bytes):
    """The draft's own pool, priced as it is built, beside the target's."""
    head_dim, heads, _ = cell("target")
    draft_bytes = 2 * head_dim * heads * value_bytes  # of one layer
    per_token = formats.bytes_per_token(*cell("target")) + draft_bytes
    assert report["draft"]["class"] == "sglang_fp4kv.draft_pool.DraftTokenToKVPool"
    assert report["draft"]["dtype"] == dtype
    assert report["draft"]["bytes_per_token"] == draft_bytes
    assert report["draft"]["allocated_bytes"] == draft_bytes * report["draft"]["slots"]
    assert report["budget"]["bytes_per_token"] == per_token
    assert report["max_total_num_tokens"] == BUDGET_BYTES // per_token


def test_an_eagle3_tree_changes_no_answer(scratch, prompts, undrafted):
    """The oracle's tokens lie along one branch; for the last two prompts every branch is the head's own."""
    draft = build_eagle3(scratch / "eagle3", PAIR / "target")
    told = Told(scratch / "eagle3")
    env = told.env | record(scratch / "recorded.json", prompts[:4], undrafted[:4])
    flags = drafting("EAGLE3", draft, 3, 4, 8)
    with serve(scratch, "eagle3", *flags, FP4KV_KV_BUDGET_BYTES=str(BUDGET_BYTES), **env) as server:
        answers = ask(server, prompts)
        report = fp4kv_report(server_info(server.url))
    assert differing(undrafted, answers) == []
    assert accepted(answers[:4]) > 2.4 and accepted(answers[4:]) < 1.5
    assert told.moved_rows() > 0
    check_pools(report, "float8_e4m3fn", 1)


def test_an_mtp_chain_changes_no_answer(scratch, prompts, undrafted):
    draft = build_mtp(scratch / "mtp", PAIR / "target")
    env = record(scratch / "recorded_mtp.json", prompts[2:4], undrafted[2:4])
    flags = (*drafting("NEXTN", draft, 3, 1, 4), "--speculative-draft-kv-cache-dtype", "bf16")
    with serve(scratch, "mtp", *flags, FP4KV_KV_BUDGET_BYTES=str(BUDGET_BYTES), **env) as server:
        answers = ask(server, prompts[2:])
        report = fp4kv_report(server_info(server.url))
    assert differing(undrafted[2:], answers) == []
    assert accepted(answers[:2]) > 3.5 and accepted(answers[2:]) < 1.5
    check_pools(report, "bfloat16", 2)
