"""Sampled answers with the DFLASH drafter have the distribution of those without it.

A DFlash2 drafter draws its tokens itself; SGLang's acceptance of those is a Triton kernel, for which the
interpreter is too slow, so a GPU is needed there.

The target is a table: the logits after each token. Sequences of three tokens are drawn through SGLang's
sampler, and through its DFLASH verify with a drafter that is often wrong; on a GPU through SGLang's CUDA
kernel, elsewhere through the embedded platform's. Both samples are compared cell by cell.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_fp4kv import verify_sampling
from sglang_fp4kv.embedded import verify_sampling as embedded

VOCAB, BLOCK, LENGTH, DRAWS = 6, 4, 3, 20_000
# In standard deviations of the chi-square statistic above its mean; the seeds are fixed.
LARGEST_SCORE = 5.0

SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top-p": {"top_p": 0.75},
    "top-k": {"top_k": 3},
    "top-k and top-p": {"temperature": 1.3, "top_k": 3, "top_p": 0.6},
    "min-p": {"min_p": 0.3},
    # Each of the three takes tokens away that the other two leave, whatever their order.
    "all of them": {"temperature": 0.85, "top_k": 4, "top_p": 0.8, "min_p": 0.2},
}


@pytest.fixture(scope="module")
def sglang_parts():
    """SGLang's DFLASH functions and sampler."""
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.speculative import dflash_utils

    return SimpleNamespace(dflash=dflash_utils, sampler=Sampler)


@pytest.fixture
def verify(sglang_parts, device, monkeypatch):
    """SGLang's verify on this device with the kit's distribution, as a server with NVFP4 KV has it."""
    from sglang.srt import runtime_context
    from sglang.srt.layers import sampler

    dflash = sglang_parts.dflash
    if device.type == "cpu":
        monkeypatch.setattr(
            dflash, "tree_speculative_sampling_target_only", embedded.sample_target_only
        )
        monkeypatch.setattr(dflash, "_DFLASH_SAMPLING_VERIFY_AVAILABLE", True)
    stock = dflash.build_speculative_verify_target_probs
    monkeypatch.setattr(
        dflash,
        "build_speculative_verify_target_probs",
        lambda **arguments: verify_sampling.target_probs(stock, **arguments),
    )
    monkeypatch.setattr(verify_sampling, "_served", lambda: True)
    backend = "pytorch" if device.type == "cpu" else "flashinfer"
    kernel = SimpleNamespace(kernel=SimpleNamespace(sampling_backend=backend))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: kernel)
    monkeypatch.setattr(sampler, "get_exec", lambda: kernel)
    return dflash


@pytest.fixture
def verify_drawn(verify, monkeypatch):
    """The same for a drafter that draws (DFlash2)."""
    from sglang.kernels.ops.speculative.dspark import dspark_accept

    monkeypatch.setattr(
        dspark_accept,
        "build_speculative_verify_target_probs",
        verify.build_speculative_verify_target_probs,
    )
    core = dspark_accept._accept_sampling_core
    monkeypatch.setattr(
        dspark_accept,
        "_accept_sampling_core",
        lambda **arguments: verify_sampling.accept_with_min_p(core, **arguments),
    )
    return dspark_accept.accept_sampling


@pytest.fixture
def table(device):
    """Logits [VOCAB, VOCAB] after each token, and the token that the drafter expects there."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCAB, VOCAB, generator=generator)
    drafts = torch.randint(VOCAB, (VOCAB,), generator=generator)
    return logits.to(device), drafts.to(device)


def info(rows, device, temperature=1.0, top_k=VOCAB, top_p=1.0, min_p=0.0):
    def full(value, dtype=torch.float32):
        return torch.full((rows,), value, dtype=dtype, device=device)

    return SimpleNamespace(
        temperatures=full(temperature).view(-1, 1),
        top_ks=full(top_k, torch.int32),
        top_ps=full(top_p),
        min_ps=full(min_p),
        need_top_k_sampling=top_k < VOCAB,
        need_top_p_sampling=top_p < 1,
        need_min_p_sampling=min_p > 0,
        sampling_seed=None,
        sampling_mask_batch_indices=None,
        max_top_k=top_k,
    )


def undrafted(parts, table, setting):
    """LENGTH tokens of each of DRAWS answers after token 0, drawn one by one."""
    logits, _ = table
    sampling = info(DRAWS, logits.device, **setting)
    simple = not (
        sampling.need_top_k_sampling or sampling.need_top_p_sampling or sampling.need_min_p_sampling
    )
    last = torch.zeros(DRAWS, dtype=torch.int64, device=logits.device)
    answer = []
    for _ in range(LENGTH):
        probs = torch.softmax(logits[last] / sampling.temperatures, -1)
        last, _ = parts.sampler._sample_from_probs(None, probs, sampling, None, simple)
        last = last.long().view(-1)
        answer.append(last)
    return torch.stack(answer, 1)


def drafted(table, setting, accept, draw=None):
    """The same through verify steps; ``accept`` returns accepted drafts and the drawn token.

    ``draw``: the drafter's next token [DRAWS] after each of [DRAWS] tokens; its expectation where left out.
    """
    logits, expected = table
    draw = draw or expected.__getitem__
    sampling = info(DRAWS, logits.device, **setting)
    row = torch.arange(DRAWS, device=logits.device)
    answers = torch.zeros(DRAWS, LENGTH * BLOCK, dtype=torch.int64, device=logits.device)
    filled = torch.zeros_like(row)
    last = torch.zeros_like(row)
    for _ in range(LENGTH):  # each step yields a token at least
        chain = [last]
        for _ in range(BLOCK - 1):
            chain.append(draw(chain[-1]))
        candidates = torch.stack(chain, 1)
        count, last = accept(candidates, logits[candidates.view(-1)], sampling)
        count = count.long()
        for place in range(BLOCK):
            token = torch.where(
                place < count, candidates[:, min(place + 1, BLOCK - 1)], last.long()
            )
            kept = place <= count
            answers[row[kept], (filled + place)[kept]] = token[kept]
        filled += count + 1
        last = last.long()
    return answers[:, :LENGTH]


def sampled(dflash):
    def accept(candidates, logits, sampling):
        return dflash.compute_dflash_sampling_correct_drafts_and_bonus(
            candidates=candidates,
            next_token_logits=logits,
            sampling_info=sampling,
            max_top_k=sampling.max_top_k,
            threshold_single=1.0,
            threshold_acc=1.0,
        )

    return accept


def score(a, b):
    """How far two samples [DRAWS, LENGTH] lie apart: chi-square, in standard deviations from its mean."""
    weights = VOCAB ** torch.arange(LENGTH, device=a.device)
    counts = [
        torch.bincount((x * weights).sum(1), minlength=VOCAB**LENGTH).double() for x in (a, b)
    ]
    both = counts[0] + counts[1]
    rare = both < 20
    counts = [torch.cat((c[~rare], c[rare].sum().view(1))) for c in counts]
    both = counts[0] + counts[1]
    kept = both > 0
    freedom = int(kept.sum()) - 1
    statistic = ((counts[0] - counts[1])[kept] ** 2 / both[kept]).sum().item()
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_and_undrafted_answers_have_one_distribution(sglang_parts, verify, table, name):
    torch.manual_seed(11)
    plain = undrafted(sglang_parts, table, SETTINGS[name])
    assert len(plain) >= 10_000
    assert score(plain, undrafted(sglang_parts, table, SETTINGS[name])) < LARGEST_SCORE
    assert score(plain, drafted(table, SETTINGS[name], sampled(verify))) < LARGEST_SCORE


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_a_drafter_that_draws_changes_nothing_either(sglang_parts, verify_drawn, table, name):
    logits, _ = table
    torch.manual_seed(11)
    q = torch.softmax(torch.randn(logits.shape, device=logits.device), -1)

    def accept(candidates, target_logits, sampling):
        count, bonus, _ = verify_drawn(
            candidates=candidates,
            target_logits=target_logits,
            draft_probs=q[candidates[:, :-1]].contiguous(),
            sampling_info=sampling,
            draft_input=SimpleNamespace(max_top_k=sampling.max_top_k, uniform_top_k_value=None),
            gamma=BLOCK - 1,
            verify_num_draft_tokens=BLOCK,
        )
        return count, bonus

    plain = undrafted(sglang_parts, table, SETTINGS[name])
    drawn = drafted(table, SETTINGS[name], accept, lambda t: torch.multinomial(q[t], 1).view(-1))
    assert score(plain, drawn) < LARGEST_SCORE


def test_min_p_alone_is_not_left_out_where_the_drafter_draws(monkeypatch):
    def core(*, sampling_info, gamma):
        return sampling_info.need_top_p_sampling, gamma

    for served, min_p, filtered in ((True, 0.1, True), (True, 0.0, False), (False, 0.1, False)):
        monkeypatch.setattr(verify_sampling, "_served", lambda served=served: served)
        asked = info(2, torch.device("cpu"), min_p=min_p)
        got = verify_sampling.accept_with_min_p(core, sampling_info=asked, gamma=3)
        assert got == (filtered, 3) and asked.need_top_p_sampling is False


def greedy(dflash):
    from sglang.kernels.ops.speculative.dflash import (
        compute_dflash_correct_drafts_and_bonus,
    )

    def accept(candidates, logits, sampling):
        best = logits.argmax(-1).view(candidates.shape)
        return compute_dflash_correct_drafts_and_bonus(candidates=candidates, target_predict=best)

    return accept


def untested(dflash):
    """Every first draft accepted, whatever the target thinks of it."""
    test = sampled(dflash)

    def accept(candidates, logits, sampling):
        count, bonus = test(candidates, logits, sampling)
        after = torch.softmax(logits.view(*candidates.shape, -1)[:, 1], -1)
        drawn = torch.multinomial(after, 1).view(-1)
        return count.clamp_min(1), torch.where(count == 0, drawn, bonus)

    return accept


@pytest.mark.parametrize("wrong", [greedy, untested])
def test_another_acceptance_is_caught(sglang_parts, verify, table, wrong):
    torch.manual_seed(11)
    plain = undrafted(sglang_parts, table, {})
    assert score(plain, drafted(table, {}, wrong(verify))) > 10 * LARGEST_SCORE


@pytest.mark.parametrize("name", ["top-k and top-p", "min-p", "all of them"])
def test_sglangs_own_distribution_is_another_one(sglang_parts, verify, table, monkeypatch, name):
    """Why the kit puts its own in; where this fails SGLang has mended it, and the hook can go."""
    monkeypatch.setattr(verify_sampling, "_served", lambda: False)
    torch.manual_seed(11)
    plain = undrafted(sglang_parts, table, SETTINGS[name])
    assert score(plain, drafted(table, SETTINGS[name], sampled(verify))) > 10 * LARGEST_SCORE


def test_the_samplers_of_a_cpu_and_a_gpu_filter_in_another_order(
    sglang_parts, verify, table, monkeypatch, device
):
    """A min-p that takes nothing away leaves the order of top-k and top-p as the only difference.

    With a min-p FlashInfer's sampler filters in turn, as SGLang's verify does on every device, so that what verify
    leaves out there is min-p itself; the sampler of a CPU looks at the whole distribution each time.
    """
    monkeypatch.setattr(verify_sampling, "_served", lambda: False)
    idle = {"temperature": 1.3, "top_k": 5, "top_p": 0.85, "min_p": 0.2}
    torch.manual_seed(11)
    plain = undrafted(sglang_parts, table, idle)
    apart = score(plain, drafted(table, idle, sampled(verify)))
    if device.type == "cpu":
        assert apart > 10 * LARGEST_SCORE
    else:
        assert apart < LARGEST_SCORE


def test_filters_in_turn_look_at_what_is_left(device):
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device)
    limits = [torch.tensor([x], device=device) for x in (2, 0.5, 0.8)]
    together = verify_sampling.filtered_probs(probs, *limits, width=4, in_turn=False)
    in_turn = verify_sampling.filtered_probs(probs, *limits, width=2, in_turn=True)
    assert together.tolist() == [[1.0, 0.0, 0.0, 0.0]]  # 0.3 is less than 0.8 of 0.4
    assert in_turn.tolist() == together.tolist()
    limits[1:] = [torch.tensor([x], device=device) for x in (0.5, 0.0)]
    together = verify_sampling.filtered_probs(probs, *limits, width=2, in_turn=False)
    in_turn = verify_sampling.filtered_probs(probs, *limits, width=2, in_turn=True)
    assert together[0, :2].tolist() == pytest.approx([4 / 7, 3 / 7])  # 0.4 before it, of 0.5
    assert in_turn.tolist() == [[1.0, 0.0, 0.0, 0.0]]  # 4/7 before it
    assert probs.tolist()[0] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_a_tree_is_refused():
    one = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="verifies chains only"):
        embedded.sample_target_only(*[None] * 3, one, one, one, one, *[None] * 4)


def request(**asked):
    parameters = dict(verify_sampling.PENALTIES) | asked
    return SimpleNamespace(sampling_params=SimpleNamespace(**parameters))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.1),
        ("repetition_penalty", 1.05),
        ("min_new_tokens", 3),
    ],
)
def test_penalties_are_refused_by_name_and_value(monkeypatch, name, value):
    def stock(req, enable_overlap):
        return None

    monkeypatch.setattr(verify_sampling, "_served", lambda: True)
    asked = request(**{name: value})
    reason = verify_sampling.refuse_penalties(stock, asked, True)
    assert reason.startswith(f"{name} {value}: SGLang 0.5.23 applies no penalties")
    assert verify_sampling.refuse_penalties(stock, request(), True) is None
    assert verify_sampling.refuse_penalties(lambda *_: "its own", asked, True) == "its own"
    monkeypatch.setattr(verify_sampling, "_served", lambda: False)
    assert verify_sampling.refuse_penalties(stock, asked, True) is None


def scheduler(drafter, device="cuda"):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string(drafter), device=device)


def inexact(drafter, device="cuda", reason=None, **asked):
    """The reason for refusing a request that draws, on the drafter's server."""
    asked = {"top_k": VOCAB, "min_p": 0.0, "temperature": 1.0, **asked}
    return verify_sampling.refuse_inexact(lambda *_: reason, scheduler(drafter, device), request(**asked))


OTHER_DRAFTERS = ["NGRAM", "EAGLE", "EAGLE3", "STANDALONE"]


@pytest.mark.parametrize("drafter", OTHER_DRAFTERS)
@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 0.1), ("presence_penalty", 0.5), ("repetition_penalty", 1.1), ("min_new_tokens", 2)]
)
def test_what_other_drafters_leave_out_is_refused(monkeypatch, drafter, name, value):
    monkeypatch.setattr(verify_sampling, "_served", lambda: True)
    reason = inexact(drafter, **{name: value})
    assert reason.startswith(f"{name} {value}: SGLang 0.5.23 leaves min_p out while it verifies a draft of {drafter}, ")
    assert inexact(drafter) is None and inexact(drafter, reason="its own", **{name: value}) == "its own"
    assert inexact(None, **{name: value}) is None and inexact("DFLASH", **{name: value}) is None
    monkeypatch.setattr(verify_sampling, "_served", lambda: False)
    assert inexact(drafter, **{name: value}) is None


def test_a_greedy_request_asks_nothing_of_min_p(monkeypatch):
    monkeypatch.setattr(verify_sampling, "_served", lambda: True)
    assert inexact("EAGLE", top_k=1, min_p=0.1) is None
    assert "repetition_penalty 1.1" in inexact("EAGLE", top_k=1, repetition_penalty=1.1)


@pytest.mark.parametrize("drafter", OTHER_DRAFTERS)
def test_a_cpu_draws_for_dflash_alone(monkeypatch, drafter):
    """SGLang's acceptance of trees is a CUDA kernel; called on a CPU it would end the scheduler."""
    monkeypatch.setattr(verify_sampling, "_served", lambda: True)
    assert inexact(drafter, "cpu", temperature=0.7).startswith("temperature 0.7: SGLang 0.5.23 has no kernel for a CPU")
    assert inexact(drafter, "cpu", top_k=1) is None
    assert inexact("DFLASH", "cpu") is None and inexact(None, "cpu") is None


def source(module, function):
    """The text of a function in a module that cannot be imported without a GPU's libraries."""
    import sglang

    text = (Path(sglang.__file__).parent / module).read_text()
    return re.split(r"\n *def ", text.split(f"def {function}(")[1])[0]


def test_eagles_verify_leaves_out_what_is_refused():
    """Where this fails SGLang has changed it, and refuse_inexact has to be read again."""
    sample = source("srt/speculative/eagle_utils.py", "eagle_sample")
    assert "min_p" not in sample and "acc_additive_penalties" in sample and "tree_speculative_sampling" in sample
    assert "cumulate_penalty_output_tokens()" in source("srt/speculative/eagle_utils.py", "eagle_prepare_for_decode")
    assert "req.output_ids[-1]" in source("srt/managers/schedule_batch.py", "cumulate_penalty_output_tokens")
    assert "= eagle_sample(" in source("srt/speculative/ngram_worker.py", "forward_batch_generation")
