"""Parts that were tried one at a time: every pair of them is refused, by its own rule or by the one about pairs."""

from itertools import combinations

import pytest

from launcher import rules_together as together
from launcher.rules import judge
from launches import DFLASH, HYBRID, NO_GPU, NVFP4, WINDOWED, launch, machine
from test_rules import dflash2

CPU = [*NVFP4, "--device", "cpu"]
HICACHE = ["--enable-hierarchical-cache", "--hicache-io-backend", "direct"]
AS_SERVED = ["--page-size", "64", "--hicache-write-policy", "write_back", *DFLASH]  # the hierarchical cache on file
PARTS = {
    together.RANKS: {"flags": ["--tp-size", "2"]},
    together.HOST_CACHE: {"flags": HICACHE},
    together.RECURRENT: {"target": HYBRID},
    together.EXPERTS: {"target": {**HYBRID, "model_type": "qwen3_5_moe_text"}},
    together.OTHER_RECURRENT: {"target": {**HYBRID, "model_type": "qwen3_next"}},
    together.WINDOWS: {"target": WINDOWED},
    together.OTHER_WINDOWS: {"target": {**WINDOWED, "architectures": ["Qwen3ForCausalLM"]}},
    together.DRAFT: {"flags": DFLASH, "draft": dflash2()},
    together.DRAFT_WINDOW: {"flags": [*DFLASH, "--speculative-draft-window-size", "512"]},
    together.DRAFTER: {"flags": ["--speculative-algorithm", "EAGLE3"]},
}
RECURRENT = (together.RECURRENT, together.EXPERTS, together.OTHER_RECURRENT)
WINDOWS = (together.WINDOWS, together.OTHER_WINDOWS)
ONE_OF_A_KIND = (*combinations((*RECURRENT, *WINDOWS), 2), (together.DRAFT, together.DRAFTER),
                 (together.DRAFT_WINDOW, together.DRAFTER))  # fmt: skip
PAIRS = [pair for pair in combinations(PARTS, 2) if pair not in ONE_OF_A_KIND]
OWN_RULES = {(together.HOST_CACHE, together.DRAFTER): "FP4-098"}
OWN_RULES |= {(kind, together.DRAFTER): "FP4-101" for kind in WINDOWS}
OWN_RULES |= {(together.HOST_CACHE, kind): "FP4-098" for kind in RECURRENT}
OWN_RULES |= {(kind, together.DRAFTER): "FP4-100" for kind in RECURRENT}


def asked(tmp_path, names, *flags):
    cases = [PARTS[name] for name in names]
    words = [*CPU, *(word for case in cases for word in case.get("flags", [])), *flags]
    folders = {key: case[key] for case in cases for key in ("target", "draft") if key in case}
    return launch(tmp_path, words, on=machine(NO_GPU), **folders)


def unknown_class(names, drafted=False):
    """The rules about layers of a class that never ran, where they are among ``names``, and about Gemma 3, whose class
    has nothing for a DFlash draft (``drafted``, or among ``names``)."""
    rules = {together.OTHER_RECURRENT: "FP4-115", together.OTHER_WINDOWS: "FP4-118"}
    drafted = drafted or together.DRAFT in names or together.DRAFT_WINDOW in names
    refused = ["FP4-119"] if drafted and together.WINDOWS in names else []
    return [*(rules[name] for name in names if name in rules), *refused]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_alone_and_with_a_plain_draft_is_accepted(tmp_path, name):
    alone = asked(tmp_path, [name])
    assert together.parts(alone) == [name] and [r.id for r in judge(alone)] == unknown_class([name])
    as_run = asked(tmp_path, [name], *AS_SERVED) if name == together.HOST_CACHE else alone
    assert bool(together.results(as_run)) is (not unknown_class([name]))
    if alone.drafter is None:
        drafted = asked(tmp_path, [name], *DFLASH)
        assert together.parts(drafted) == [name] and [r.id for r in judge(drafted)] == unknown_class([name], drafted=True)


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_every_pair_but_those_tried_is_refused(tmp_path, pair):
    if pair in together.TOGETHER_ON_A_CPU:
        assert judge(asked(tmp_path, pair)) == []
        return
    told, *others = judge(asked(tmp_path, pair))
    assert told.id == OWN_RULES.get(pair, "FP4-102") and [r.id for r in others] == unknown_class(pair)
    assert (" with ".join(pair) in told.says) == (told.id == "FP4-102")
    assert together.results(asked(tmp_path, pair)) == ()


def test_other_backends_are_judged_by_their_own_rules(tmp_path):
    on_flashinfer = ["--attention-backend", "flashinfer", "--speculative-algorithm", "NGRAM", "--tp-size", "2"]
    for target in (HYBRID, WINDOWED):
        found = judge(launch(tmp_path, [*NVFP4, *on_flashinfer], target=target, on=machine("sm_120")))
        assert [r.id for r in found] == ["FP4-010"]


def test_of_three_parts_every_pair_is_named(tmp_path):
    found = judge(asked(tmp_path, (together.RANKS, together.RECURRENT, together.DRAFTER)))
    assert [r.id for r in found] == ["FP4-100", "FP4-102"]
    assert found[1].says.endswith("and not several ranks with another drafter than DFLASH")
    assert "--tp-size 2" in found[1].asked
    found = judge(asked(tmp_path, (together.RANKS, together.HOST_CACHE, together.WINDOWS)))
    pairs = "several ranks with the hierarchical cache; several ranks with windowed layers; "
    assert found[0].says.endswith(f"and not {pairs}the hierarchical cache with windowed layers")


def test_what_ran_together_on_a_cpu_is_told_on_a_gpu(tmp_path):
    """Ranks and recurrent layers have results of a GPU each, but not the two of them."""
    flags = [*NVFP4, "--tp-size", "2"]
    (only,) = judge(launch(tmp_path, flags, target=HYBRID))
    assert only.id == "FP4-103" and "with several ranks with recurrent layers, and" in only.says
    (only,) = judge(launch(tmp_path, [*flags, *DFLASH], target=HYBRID, draft=dflash2()))
    assert only.id == "FP4-103"
    assert "for with several ranks with recurrent layers with a DFlash2 or windowed draft, and no result" in only.says
    assert only.evidence == "tests/e2e/test_two_sparks.py"
    for names in ((together.RANKS, together.RECURRENT), (together.RANKS, together.RECURRENT, together.DRAFT)):
        assert together.results(asked(tmp_path, names)) == ("tests/e2e/test_two_sparks.py",)
        assert together.results(asked(tmp_path, names, "--tp-size", "4")) == ()
    (only,) = judge(launch(tmp_path, [*NVFP4, *DFLASH], target=HYBRID, draft=dflash2()))
    assert only.id == "FP4-103" and only.evidence == "tests/e2e/test_hybrid_serving.py"
    pair = asked(tmp_path, (together.RECURRENT, together.DRAFT))
    assert together.results(pair) == ("tests/e2e/test_hybrid_serving.py",)
    assert together.results(launch(tmp_path, flags, target=HYBRID)) == ()
    assert together.results(asked(tmp_path, (together.RANKS, together.HOST_CACHE))) == ()


def test_a_run_of_three_parts_grants_no_two_of_them(tmp_path):
    """But those that have run by themselves."""
    pair = (together.RANKS, together.DRAFT)
    assert pair not in together.TOGETHER_ON_A_CPU
    (only,) = judge(asked(tmp_path, pair))
    assert only.id == "FP4-102" and only.says.endswith(" with ".join(pair))
    three = (together.RANKS, together.EXPERTS, together.DRAFT)
    (only,) = judge(asked(tmp_path, three))
    assert only.id == "FP4-102" and only.says.endswith("; ".join(map(" with ".join, combinations(three, 2))))


def test_a_draft_window_has_run_on_a_cpu_alone(tmp_path):
    asked_for = PARTS[together.DRAFT_WINDOW]["flags"]
    (only,) = judge(launch(tmp_path, [*NVFP4, *asked_for]))
    assert only.id == "FP4-103" and only.evidence == "tests/e2e/test_draft_serving.py"
    assert "asked for with a draft window, and" in only.says and "--speculative-draft-window-size 512" in only.asked


@pytest.mark.parametrize("flags", [[], DFLASH])
@pytest.mark.parametrize("kind", RECURRENT)
def test_the_host_cache_of_recurrent_layers_is_refused_on_a_gpu(tmp_path, flags, kind):
    asked_for = [*NVFP4, "--enable-hierarchical-cache", *flags]
    found = [r.id for r in judge(launch(tmp_path, asked_for, target=PARTS[kind]["target"]))]
    assert found == ["FP4-095", "FP4-098", *unknown_class([kind])]


@pytest.mark.parametrize(
    ("changed", "how"),
    [
        ([], None),
        (["--page-size", "1"], "pages of 1"),
        (["--hicache-write-policy", "write_through"], "write_through"),
        (["--hicache-write-policy", "write_through_selective"], "write_through_selective"),
    ],
)
def test_a_hierarchical_cache_of_another_kind_is_refused_on_a_gpu(tmp_path, changed, how):
    flags = [*HICACHE, *AS_SERVED, *changed]
    found = judge(launch(tmp_path, [*NVFP4, *flags]))
    assert [r.id for r in found] == ([] if how is None else ["FP4-095"])
    assert how is None or f"asked for with {how}, and no result" in found[0].says
    shown = [bool(together.results(launch(tmp_path, [*words, *flags]))) for words in (NVFP4, CPU)]
    assert shown == [how is None] * 2 and judge(launch(tmp_path, [*CPU, *flags], on=machine(NO_GPU))) == []


def test_sglangs_own_hierarchical_cache_is_named(tmp_path):
    (only,) = judge(launch(tmp_path, [*NVFP4, *HICACHE]))
    assert "with pages of 1 and write_through and no drafter, and" in only.says


@pytest.mark.parametrize(
    "target",
    [
        {"architectures": ["Gemma3ForConditionalGeneration"]}, {"architectures": ["Gemma2ForCausalLM"]},
        {"num_kv_shared_layers": 2}, {"architectures": []},
    ],
)  # fmt: skip
def test_windows_of_a_class_that_never_ran_are_refused(tmp_path, target):
    for on in (NVFP4, CPU):
        (only,) = judge(launch(tmp_path, on, target=WINDOWED | target))
        assert only.id == "FP4-118" and together.results(launch(tmp_path, on, target=WINDOWED | target)) == ()
    assert ("num_kv_shared_layers 2" in only.asked) is ("num_kv_shared_layers" in target)


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_classes_of_sglang_without_windows_have_none(tmp_path, name):
    """Whatever config.json says, and whichever drafter is asked for."""
    target = {"architectures": [name], "sliding_window": 4096}
    for flags in ([], ["--speculative-algorithm", "NGRAM"]):
        asked_for = launch(tmp_path, [*NVFP4, *flags], target=target)
        assert judge(asked_for) == [] and together.WINDOWS not in together.parts(asked_for)
    assert judge(launch(tmp_path, NVFP4, target=target | {"architectures": ["Exaone4ForCausalLM"]}))


def test_the_published_class_of_a_hybrid_has_answered_on_a_cpu(tmp_path):
    target = {**HYBRID, "architectures": ["Qwen3_5ForConditionalGeneration"]}
    for flags, shown in (([], True), (DFLASH, True), (["--tp-size", "2"], False)):
        assert bool(together.results(launch(tmp_path, [*CPU, *flags], target=target))) is shown
        assert together.results(launch(tmp_path, [*NVFP4, *flags], target=target)) == ()
    assert together.results(launch(tmp_path, [*CPU, *DFLASH], target=target, draft=dflash2())) == ()


@pytest.mark.parametrize("kind", [together.RECURRENT, together.EXPERTS, together.WINDOWS])
def test_a_class_of_sglang_that_has_not_run_names_no_result(tmp_path, kind):
    """It is served all the same: the readers do not know of it."""
    target = PARTS[kind]["target"]
    assert together.results(launch(tmp_path, NVFP4, target=target))
    for name in ("Qwen3_5ForConditionalGeneration", "Qwen3MoeForCausalLM"):
        other = launch(tmp_path, NVFP4, target=target | {"architectures": [name]})
        assert together.results(other) == () and [r.id for r in judge(other)] in ([], ["FP4-118"])


@pytest.mark.parametrize("drafter", ["EAGLE3", "STANDALONE"])
def test_a_draft_window_is_a_part_of_every_drafter_with_a_model(tmp_path, drafter):
    asked_for = ["--speculative-algorithm", drafter, "--speculative-draft-window-size", "512"]
    for on, ids in ((CPU, ["FP4-102"]), (NVFP4, ["FP4-102", "FP4-103"])):
        found = judge(launch(tmp_path, [*on, *asked_for]))
        assert [r.id for r in found] == ids and together.results(launch(tmp_path, [*on, *asked_for])) == ()
    assert found[0].says.endswith("not a draft window with another drafter than DFLASH")


@pytest.mark.parametrize(
    "flags",
    [
        ["--moe-runner-backend", "flashinfer_cutlass"], ["--moe-a2a-backend", "deepep"], ["--ep-size", "2"],
        ["--enable-eplb"], ["--mamba-ssm-dtype", "bfloat16"],
    ],
)  # fmt: skip
def test_experts_that_run_in_another_way_name_no_result(tmp_path, flags):
    target = PARTS[together.EXPERTS]["target"]
    for on in (NVFP4, CPU):
        assert together.results(launch(tmp_path, on, target=target))
        assert together.results(launch(tmp_path, [*on, *flags], target=target)) == ()
        assert together.results(launch(tmp_path, on, target=target | {"mamba_ssm_dtype": "bfloat16"})) == ()
