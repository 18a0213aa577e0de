"""The launch rules: each fires alone with its arithmetic or its values, and its help passes."""

import re
import shlex
from dataclasses import replace

import pytest

from launcher.launch import memory
from launcher.refusal import COLUMNS, TEXTS, render
from launcher.rules import FAILS, RULES, UNTESTED, judge
from sglang_fp4kv.checkpoint_scales import check_scales
from launches import DFLASH, H200, HYBRID, MX, NO_GPU, NVFP4, WINDOWED, launch, machine, scale, scales

GOOD = [*NVFP4, *DFLASH, "--speculative-draft-kv-cache-dtype", "fp8_e4m3"]
UNDRAFTED = {"flags": NVFP4}
HICACHE = ("--enable-hierarchical-cache",)
GIB = 1 << 30


def drafted(*flags, **case):
    return {"flags": [*GOOD, *flags], **case}


def model(**target):
    return {"flags": NVFP4, "target": target}


def plain(*flags):
    return {"flags": [*NVFP4, *flags]}


def dflash2(**changed):
    """The keys of a DFlash2 draft in the layout of published ones, some of dflash_config changed."""
    nested = {"target_layer_ids": [0, 2], "conv_kernel_size": 2, "conv_group_size": 16}
    nested |= {"selector_rank": 8, "selector_top_k": 4, "block_size": 8, **changed}
    return {"architectures": ["DFlash2DraftModel"], "block_size": None, "dflash_config": nested}


PROJECTION = "model.layers.0.mlp.up_proj"


def packed(*names):
    """Tensors of NVFP4 weights, and some more of these names."""
    return dict.fromkeys([f"{PROJECTION}.weight_scale_2", *names], scale(1.0))


# Rule -> a launch on which it fires, and it alone.
CASES = {
    "FP4-010": {"flags": ["--kv-cache-dtype", "nvfp4"], "on": machine("sm_120")},
    "FP4-011": drafted("--speculative-draft-kv-cache-dtype", "nvfp4"),
    "FP4-012": drafted(draft={"block_size": None}),
    "FP4-013": drafted(draft={"dflash_config": {"target_layer_ids": [0, 3]}}),
    "FP4-014": model(head_dim=72),
    "FP4-015": model(v_head_dim=32),
    "FP4-017": drafted("--attention-backend", "flashinfer", on=machine("sm_121")),
    "FP4-018": drafted("--attention-backend", "trtllm_mha", on=machine("sm_100")),
    "FP4-019": drafted("--decode-attention-backend", "flashinfer"),
    "FP4-020": {"flags": [*GOOD, "--attention-backend", "flashinfer"], "with": ["FP4-017"]},
    "FP4-021": plain("--prefill-kv-cache-dequant-dtype", "fp8_e4m3"),
    "FP4-022": plain("--enable-deterministic-inference"),
    "FP4-023": plain("--enable-mixed-chunk"),
    "FP4-024": {"flags": NVFP4, "on": machine(switches=("SGLANG_USE_HND_KVCACHE",))},
    "FP4-025": {"flags": NVFP4, "on": machine(switches=("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",))},
    "FP4-026": {"flags": NVFP4, "on": machine("sm_121")},
    "FP4-027": plain("--tp-size", "4"),
    "FP4-028": {"flags": [*MX, *DFLASH], "with": ["FP4-029"]},
    "FP4-029": {"flags": MX},
    "FP4-030": drafted("--speculative-num-draft-tokens", "16"),
    "FP4-031": drafted("--speculative-draft-attention-backend", "flex_attention"),
    "FP4-032": drafted("--speculative-draft-attention-backend", "fa3"),
    "FP4-033": drafted("--speculative-draft-kv-cache-dtype", "bf16"),
    "FP4-036": drafted(target={"dtype": "float16"}),
    "FP4-037": drafted("--speculative-draft-model-revision", "b", named={"draft_revision": "a"}),
    "FP4-038": model(kv_lora_rank=512),
    "FP4-039": model(architectures=["MellumForCausalLM"]),
    "FP4-040": model(layer_types=["linear_attention", "full_attention"] * 2),
    "FP4-041": {**model(architectures=["GptOssForCausalLM"]), "with": ["FP4-039"]},
    "FP4-042": {"flags": [*NVFP4, "--tp-size", "3"], "with": ["FP4-027"]},
    "FP4-043": {"flags": NVFP4, "tensors": scales([0.5, 0.5, -1.0, 0.5])},
    "FP4-044": {"flags": NVFP4, "tensors": scales([0.5, 0.5, 0.5])},
    "FP4-045": {"flags": NVFP4, "tensors": {"a": ("F32", [1], b"1234")}, "broken": True},
    "FP4-046": plain("--enable-unified-memory"),
    "FP4-047": {"flags": [*MX, *HICACHE], "with": ["FP4-029"]},
    "FP4-048": plain("--enable-lmcache"),
    "FP4-049": plain("--enable-flexkv"),
    "FP4-050": plain("--enable-unified-cache-external-linker"),
    "FP4-051": plain("--disaggregation-mode", "prefill"),
    "FP4-052": plain("--dcp-size", "2"),
    "FP4-053": plain("--enable-kv-cache-sharding"),
    "FP4-054": plain("--enable-hisparse"),
    "FP4-055": plain("--context-length", "9000", "--max-total-tokens", "8192"),
    "FP4-056": drafted("--max-total-tokens", "200000000", weights=(GIB, GIB)),
    "FP4-057": {
        "flags": [*MX, "--mem-fraction-static", "0.9"], "weights": (GIB, 0), "with": ["FP4-029"],
    },
    "FP4-058": plain("--dllm-algorithm", "LowConfidence"),
    "FP4-059": {"flags": [*NVFP4, "--attention-backend", "fa3"], "on": machine("sm_120")},
    "FP4-060": model(indexer_n_heads=1),
    "FP4-061": model(num_loops=2),
    "FP4-062": model(loop_num=2),
    "FP4-063": model(multi_query=True),
    "FP4-064": plain("--grpc-port", "30001"),
    "FP4-065": plain("--checkpoint-engine-wait-weights-before-ready"),
    "FP4-070": {**plain("--linear-attn-backend", "flashinfer"), "target": HYBRID},
    "FP4-071": {**plain("--enable-linear-replayssm"), "target": HYBRID},
    "FP4-072": drafted("--mamba-ssm-dtype", "bfloat16", target=HYBRID),
    "FP4-075": drafted(draft={"conv_kernel_size": 2, "conv_group_size": 16}),
    "FP4-076": drafted(draft=dflash2(selector_top_k=0)),
    "FP4-077": drafted(draft=dflash2() | {"architectures": ["DFlashDraftModel"]}),
    "FP4-078": drafted("--speculative-draft-window-size", "4", **{"with": ["FP4-103"]}),
    "FP4-079": drafted(draft={"projector_type": "domino"}),
    "FP4-080": {"flags": [*NVFP4, "--speculative-algorithm", "DSPARK"]},
    "FP4-081": {
        "flags": [*NVFP4, "--speculative-algorithm", "NGRAM", "--page-size", "16"],
    },
    "FP4-090": drafted("--speculative-accept-threshold-acc", "0.9"),
    "FP4-091": {
        "flags": [*NVFP4, "--disable-hybrid-swa-memory"], "target": {"architectures": ["MellumForCausalLM"]},
    },
    "FP4-095": drafted(*HICACHE),
    "FP4-096": {**plain(*HICACHE, "--hicache-storage-backend", "file"), "with": ["FP4-095"]},
    "FP4-097": {**plain(*HICACHE), "target": {"num_key_value_heads": 1}, "with": ["FP4-095"]},
    "FP4-098": {**plain(*HICACHE, "--speculative-algorithm", "EAGLE3"), "with": ["FP4-095"]},
    "FP4-100": {**plain("--speculative-algorithm", "NEXTN"), "target": HYBRID},
    "FP4-101": {**plain("--speculative-algorithm", "EAGLE3"), "target": WINDOWED},
    "FP4-102": {**plain("--tp-size", "2"), "target": WINDOWED},
    "FP4-103": drafted("--speculative-draft-window-size", "512"),
    "FP4-104": drafted("--speculative-use-block-verification"),
    "FP4-110": {**plain("--fp4-gemm-backend", "flashinfer_cutlass"), "tensors": packed(), "with": ["FP4-113"]},
    "FP4-111": {**plain(), "tensors": packed(f"{PROJECTION}.pre_quant_scale"), "with": ["FP4-113"]},
    "FP4-112": {
        **model(architectures=["Qwen3_5ForCausalLM"]), "tensors": packed("lm_head.weight_scale"),
        "with": ["FP4-113"],
    },
    "FP4-113": {**plain(), "tensors": packed()},
    "FP4-114": plain("--quantization-param-path", "scales.json"),
    "FP4-115": model(**{**HYBRID, "model_type": "qwen3_next"}),
    "FP4-116": plain("--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "4", "--page-size", "16"),
    "FP4-117": {**plain(*HICACHE, "--disable-radix-cache"), "with": ["FP4-095"]},
    "FP4-118": model(**{**WINDOWED, "architectures": ["Gemma2ForCausalLM"]}),
    "FP4-119": drafted(target={"architectures": ["Gemma2ForCausalLM"]}),
}  # fmt: skip


def found(tmp_path, case, extra=()):
    case = {key: value for key, value in case.items() if key not in ("with", "broken")}
    return judge(launch(tmp_path, [*case.pop("flags"), *extra], **case))


@pytest.fixture
def fire(tmp_path, monkeypatch):
    def run(id, extra=()):
        if CASES[id].get("broken"):
            monkeypatch.setattr("launches.write_safetensors", lambda path, _: path.write_bytes(b"\xff" * 8))
        return found(tmp_path, CASES[id], extra)

    return run


def test_every_rule_has_a_case():
    assert list(CASES) == list(RULES) == sorted(RULES)
    assert set(RULES) < set(TEXTS)


@pytest.mark.parametrize("id", RULES)
def test_every_rule_fires_and_names_its_values(fire, id):
    refusals = fire(id)
    assert [r.id for r in refusals] == sorted([id, *CASES[id].get("with", ())])
    text = render([r for r in refusals if r.id == id])
    assert text.startswith(f"refused[{id}] {TEXTS[id].name}: ")
    assert not set("{}") & set(text.replace("{}", ""))


@pytest.mark.parametrize("id", RULES)
def test_every_text_fits_the_columns(fire, id):
    for line in render(fire(id), wrapped=True).splitlines():
        # A path, here of pytest's temporary folder, stays whole.
        assert len(line) <= COLUMNS or max(map(len, line.split())) > 50


def _flags_in(help):
    """(flags to add, flags to take away) of a help text; (None, ...) where it has no flags to add."""
    if help.startswith("leave out"):
        return [], re.findall(r"--[\w-]+", help)
    if not help.startswith("--"):
        return None, []
    alternatives = [part.strip() for part in help.split(", or")]
    return [part for part in alternatives if re.match(r"--(?!allow|gpu)", part)], []


@pytest.mark.parametrize("id", RULES)
def test_the_flags_in_a_help_pass_the_rules(tmp_path, fire, id):
    help = next(r.help for r in fire(id) if r.id == id)
    add, drop = _flags_in(help)
    if add is None:
        assert not re.match(r"--", help)
        return
    case = dict(CASES[id])
    case["flags"] = _without(case["flags"], drop)
    if id in ("FP4-080", "FP4-098", "FP4-100", "FP4-101"):  # NGRAM has no draft model; DFLASH needs one
        case["flags"] = NVFP4
    for flags in add or [""]:
        left = found(tmp_path, case, shlex.split(flags))
        assert id not in [r.id for r in left]
        known = [r.id for r in left if r.id not in CASES[id].get("with", ())]
        assert known in ([], ["FP4-026"], ["FP4-027"], ["FP4-029"], ["FP4-095"])


def _without(words, names):
    kept, skip = [], False
    for word in words:
        if word.startswith("--"):
            skip = word in names
        if not skip:
            kept.append(word)
    return kept


def test_the_good_launches_are_accepted(tmp_path):
    for flags in (GOOD, [*NVFP4, *DFLASH], NVFP4):
        assert judge(launch(tmp_path, flags)) == []
        assert judge(launch(tmp_path, flags, on=machine(NO_GPU))) == []


def test_all_refusals_come_together_in_table_order(tmp_path):
    flags = [*GOOD, "--attention-backend", "flashinfer", "--speculative-draft-kv-cache-dtype", "fp8_e5m2"]
    refusals = judge(launch(tmp_path, flags, target={"head_dim": 72}))
    assert [r.id for r in refusals] == ["FP4-011", "FP4-014", "FP4-017", "FP4-020"]


@pytest.mark.parametrize(
    "flags", [["--grpc-mode"], ["--smg-grpc-mode"], ["--encoder-only"], ["--use-ray"], ["--grpc-port", "5"]]
)
@pytest.mark.parametrize("kv", [NVFP4, MX])
def test_ways_in_that_cannot_be_held_back_are_refused(tmp_path, kv, flags):
    found = [r for r in judge(launch(tmp_path, [*kv, *flags])) if r.id != "FP4-029"]
    assert [(r.id, r.asked) for r in found] == [("FP4-064", " ".join([*kv[:2], *flags]))]


def test_ways_in_by_the_environment_are_refused(tmp_path):
    names = ("SGLANG_GRPC_PORT", "SGLANG_HTTP_SERVER_APP_PATH")
    (only,) = judge(launch(tmp_path, [*NVFP4, "--use-ray"], on=machine(switches=names)))
    assert only.asked == f"--kv-cache-dtype nvfp4 --use-ray with {' and '.join(names)} in the environment"


def test_the_hierarchical_cache_on_a_cpu(tmp_path):
    """What the embedded platform asks for passes; its I/O backend has to be direct."""
    flags = [*GOOD, *HICACHE, "--device", "cpu", "--hicache-write-policy", "write_back"]
    assert judge(launch(tmp_path, [*flags, "--hicache-io-backend", "direct"])) == []
    (only,) = judge(launch(tmp_path, flags))
    assert only.id == "FP4-096" and only.asked.endswith("--hicache-io-backend kernel")


@pytest.mark.parametrize(
    ("flags", "target", "ids"),
    [
        (["--hicache-mem-layout", "page_head"], {}, ["FP4-095", "FP4-096"]),
        (["--hicache-io-backend", "kernel_ascend"], {}, ["FP4-095", "FP4-096"]),
        (["--hicache-io-backend", "direct"], {"num_key_value_heads": 1}, ["FP4-095"]),
        ([], {"num_key_value_heads": 1, "head_dim": 128}, ["FP4-095"]),
        ([], {"layer_types": ["linear_attention", "full_attention"] * 2}, ["FP4-040", "FP4-095", "FP4-098"]),
    ],
)
def test_ways_of_the_hierarchical_cache(tmp_path, flags, target, ids):
    asked = [*NVFP4, *HICACHE, *flags]
    assert [r.id for r in judge(launch(tmp_path, asked, target=target))] == ids


@pytest.mark.parametrize("dtype", ["auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("backend", ["flashinfer", "triton", "trtllm_mha", "fa3"])
def test_other_kv_dtypes_pass_whatever_else_is_asked(tmp_path, dtype, backend):
    flags = [
        "--kv-cache-dtype", dtype, "--attention-backend", backend, *DFLASH, "--enable-lmcache",
        "--speculative-num-draft-tokens", "5", "--tp-size", "3",
    ]  # fmt: skip
    assert judge(launch(tmp_path, flags, target={"head_dim": 72}, on=machine("sm_121"))) == []


def test_an_fp4_drafter_pool_is_refused_next_to_any_target(tmp_path):
    flags = ["--kv-cache-dtype", "bf16", *DFLASH, "--speculative-draft-kv-cache-dtype", "fp4_mx_block16"]
    assert [r.id for r in judge(launch(tmp_path, flags))] == ["FP4-011"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-cache-dtype", "fp8_e4m3"], "fp8_e4m3"),
        ([*NVFP4], "nvfp4 --attention-backend triton"),
    ],
)
def test_the_dequant_dtype_is_refused_without_a_workspace(tmp_path, flags, says):
    (only,) = judge(launch(tmp_path, [*flags, "--prefill-kv-cache-dequant-dtype", "nvfp4"]))
    assert only.id == "FP4-021" and says in only.asked


@pytest.mark.parametrize("device", [["--device", "cpu"], []])
@pytest.mark.parametrize("drafter", ["NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "eagle"])
def test_other_drafters_are_accepted(tmp_path, drafter, device):
    flags = [*NVFP4, "--speculative-algorithm", drafter, *device]
    assert judge(launch(tmp_path, flags, on=machine(NO_GPU) if device else machine())) == []


def test_a_chain_of_eagle3_may_have_a_bf16_pool(tmp_path):
    pool = ["--speculative-draft-kv-cache-dtype", "bf16"]
    assert judge(launch(tmp_path, [*NVFP4, *pool, "--speculative-algorithm", "EAGLE3"])) == []
    tree = ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "2"]
    llama = {"architectures": ["LlamaForCausalLM"]}  # SGLang drafts a tree for it by itself
    for flags, target in (
        (["--speculative-algorithm", "STANDALONE"], {}), (tree, {}), (["--speculative-algorithm", "EAGLE3"], llama),
    ):  # fmt: skip
        (only,) = judge(launch(tmp_path, [*NVFP4, *pool, *flags], target=target))
        assert only.id == "FP4-033" and "h200_drafters.json" in only.evidence
    flags = [*NVFP4, *pool, "--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "1"]
    assert judge(launch(tmp_path, flags, target=llama)) == []
    unknown = replace(launch(tmp_path, [*NVFP4, *pool, "--speculative-algorithm", "EAGLE3"]), target=None)
    assert [r.id for r in judge(unknown)] == ["FP4-033"]


def test_two_hosts_are_not_two_gpus_of_one(tmp_path):
    assert judge(launch(tmp_path, [*NVFP4, "--tp-size", "2"])) == []
    (only,) = judge(launch(tmp_path, [*NVFP4, "--tp-size", "2", "--nnodes", "2"]))
    assert only.id == "FP4-027" and "--nnodes 2" in only.asked


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1", "--page-size", "16"],
        ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "4", "--page-size", "1"],
        ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "1", "--page-size", "16"],
        ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "4", "--page-size", "1"],
        ["--speculative-algorithm", "EAGLE", "--page-size", "16"],
        [*DFLASH, "--speculative-eagle-topk", "4", "--page-size", "16"],
    ],
)
def test_pages_go_with_chains_and_not_with_trees(tmp_path, flags):
    assert judge(launch(tmp_path, [*NVFP4, *flags])) == []


@pytest.mark.parametrize("drafter", ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"])
@pytest.mark.parametrize("device", [[], ["--device", "cpu"]])
def test_trees_on_pages_have_no_result(tmp_path, drafter, device):
    flags = [*NVFP4, *device, "--speculative-algorithm", drafter, "--page-size", "16"]
    (only,) = judge(launch(tmp_path, [*flags, "--speculative-eagle-topk", "2"]))
    assert only.id == "FP4-116" and f"{drafter} drafts a tree of 2 branches a step, a page is to hold 16" in only.says
    by_itself = judge(launch(tmp_path, flags, target={"architectures": ["LlamaForCausalLM"]}))
    assert [r.id for r in by_itself] == ([] if drafter == "STANDALONE" else ["FP4-116"])


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--speculative-algorithm", "FROZEN_KV_MTP"], "FROZEN_KV_MTP"),
        (["--speculative-algorithm", "UNO"], "UNO"),
        (["--speculative-algorithm", "EAGLE", "--enable-multi-layer-eagle"], "a multi-layer EAGLE"),
    ],
)
def test_drafters_that_are_not_served_cannot_be_allowed(tmp_path, flags, shown):
    found = {r.id: r for r in judge(launch(tmp_path, [*NVFP4, *flags, "--device", "cpu"]))}
    assert list(found) == ["FP4-080"] and shown in found["FP4-080"].says
    assert not RULES["FP4-080"].allowable


def test_a_drafter_inside_the_target_is_priced_by_its_own_layers(tmp_path):
    row = 2 * 64 * 2  # one FP8 layer, K and V, of the launches' models
    cases = [
        (["--speculative-algorithm", "NGRAM"], {}, 0),
        (["--speculative-algorithm", "EAGLE3"], {}, row),
        (["--speculative-algorithm", "NEXTN"], {"draft": {"num_nextn_predict_layers": 2}}, 2 * row),
        (["--speculative-algorithm", "STANDALONE"], {"draft": {"num_hidden_layers": 3}}, 3 * row),
    ]
    for flags, folders, draft in cases:
        assert memory(launch(tmp_path, [*NVFP4, *flags], **folders)).draft_cell == draft, flags
    inside = launch(tmp_path, [*NVFP4, "--speculative-algorithm", "NEXTN"], weights=(GIB, GIB))
    inside.flags.speculative_draft_model_path = None
    inside = replace(inside, draft=None)
    assert (memory(inside).draft_cell, memory(inside).weights) == (row, GIB)
    beside = launch(tmp_path, [*NVFP4, "--speculative-algorithm", "STANDALONE"], weights=(GIB, GIB))
    assert memory(replace(beside, draft=beside.target)).weights == 2 * GIB


@pytest.mark.parametrize(
    ("backend", "gpu", "replacement"),
    [
        ("flex_attention", "sm_90", "flashinfer"),
        ("trtllm_mha", "sm_90", "flashinfer"),
        ("trtllm_mha", "sm_100", "fa4"),
    ],
)
def test_a_replaced_draft_backend_names_the_replacement(tmp_path, backend, gpu, replacement):
    flags = [*GOOD, "--speculative-draft-attention-backend", backend]
    refusals = judge(launch(tmp_path, flags, on=machine(gpu)))
    told = next(r for r in refusals if r.id == "FP4-031")
    assert told.says == f"the drafter's backend {backend} would be replaced by {replacement}"


def test_a_block_size_flag_counts_as_draft_tokens(tmp_path):
    flags = [*GOOD, "--speculative-dflash-block-size"]
    assert judge(launch(tmp_path, [*flags, "8"])) == []
    (only,) = judge(launch(tmp_path, [*flags, "4"]))
    assert "4 draft tokens are asked for, and the draft was trained on blocks of 8" in only.says


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_kv_scale_that_cannot_be_used_is_named(tmp_path, value):
    (only,) = judge(launch(tmp_path, NVFP4, tensors=scales([0.5, value, 0.5, 0.5])))
    assert only.id == "FP4-043"
    assert f"k_scale {value} of layer 1, v_scale {value} of layer 1" in only.says


def test_a_kv_scale_that_cannot_be_read_or_is_not_clear_is_refused(tmp_path):
    """As check_scales does in the server."""
    tensors = scales([0.5] * 4) | {"model.layers.2.self_attn.attn.v_scale": ("F8_E8M0", [1], b"\x7f")}
    tensors["model.layers.3.self_attn.k_proj.k_scale"] = scale(2.0)
    (only,) = judge(launch(tmp_path, NVFP4, tensors=tensors))
    assert only.id == "FP4-043"
    assert "v_scale of layer 2 in a form that cannot be read" in only.says
    assert "k_scale 0.5 and 2.0 of layer 3" in only.says
    with pytest.raises(ValueError, match=r"v_scale of layer 2 in a form .*, k_scale 0\.5 and 2\.0 of layer 3"):
        check_scales(tmp_path / "t")


def test_kv_scales_of_other_modules_are_not_the_targets(tmp_path):
    """A draft head's are neither its first layer's nor a reason to refuse, and a vision tower's are none at all."""
    head = {f"mtp.layers.0.self_attn.attn.{side}_scale": scale(0.0) for side in "kv"}
    assert judge(launch(tmp_path, NVFP4, tensors=scales([0.5] * 4) | head)) == []
    tower = {f"vision_tower.encoder.layers.{i}.self_attn.k_proj.k_scale": scale(0.7) for i in range(4)}
    foreign = launch(tmp_path, NVFP4, tensors=head | tower)
    assert judge(foreign) == [] and foreign.target.checkpoint.kv_scales == {}


def test_a_missing_kv_scale_names_its_layers(tmp_path):
    (only,) = judge(launch(tmp_path, NVFP4, tensors=scales([0.5])))
    assert "not for both K and V of layers 1, 2, 3 (of 4)" in only.says
    one_side = scales([0.5] * 4)
    del one_side["model.layers.2.self_attn.attn.v_scale"]
    (only,) = judge(launch(tmp_path, NVFP4, tensors=one_side))
    assert "layers 2 (of 4)" in only.says


def test_good_and_absent_kv_scales_pass(tmp_path):
    assert judge(launch(tmp_path, NVFP4, tensors=scales([0.5, 1.0, 1.0, 2.0]))) == []
    assert judge(launch(tmp_path, NVFP4, tensors={"w": ("BF16", [1], b"12")})) == []


@pytest.mark.parametrize("asked", ["auto", "marlin"])
@pytest.mark.parametrize("on", ["sm_80", "sm_90"])
def test_nvfp4_weights_go_to_marlin_before_blackwell(tmp_path, asked, on):
    flags = [*NVFP4, "--fp4-gemm-backend", asked]
    untested = ["FP4-026"] if on == "sm_80" else []
    kept = judge(launch(tmp_path, flags, tensors=packed(), on=machine(on)))
    assert [r.id for r in kept] == [*untested, "FP4-113"]
    awq = packed(f"{PROJECTION}.pre_quant_scale")
    found = {r.id: r for r in judge(launch(tmp_path, flags, tensors=awq, on=machine(on)))}
    assert [*found] == [*untested, "FP4-111", "FP4-113"]
    where = on if asked == "auto" else "--fp4-gemm-backend marlin"
    assert f"and with {where} nothing scales it" in found["FP4-111"].says


@pytest.mark.parametrize("gemm", ["auto", "flashinfer_cutlass"])
def test_nvfp4_weights_have_their_kernels_on_blackwell(tmp_path, gemm):
    for extra in ([], [f"{PROJECTION}.pre_quant_scale"]):
        flags = [*NVFP4, "--fp4-gemm-backend", gemm]
        case = launch(tmp_path, flags, tensors=packed(*extra), on=machine("sm_120"))
        assert [r.id for r in judge(case)] == ["FP4-026", "FP4-113"]
    flags = [*NVFP4, "--fp4-gemm-backend", "marlin"]
    case = launch(tmp_path, flags, tensors=packed(*extra), on=machine("sm_120"))
    assert [r.id for r in judge(case)] == ["FP4-026", "FP4-111", "FP4-113"]


def test_other_weights_need_no_fp4_kernel(tmp_path):
    flags = [*NVFP4, "--fp4-gemm-backend", "flashinfer_cutlass"]
    plain_scale = {f"{PROJECTION}.weight_scale": scale(1.0), f"{PROJECTION}.pre_quant_scale": scale(1.0)}
    assert judge(launch(tmp_path, flags, tensors=plain_scale)) == []
    unknown = launch(tmp_path, flags, tensors=packed(), on=machine(NO_GPU))
    assert [r.id for r in judge(unknown)] == ["FP4-113"]


def test_nvfp4_weights_of_a_draft_count_too(tmp_path):
    awq = packed(f"{PROJECTION}.pre_quant_scale")
    flags = [*GOOD, "--fp4-gemm-backend", "flashinfer_cutlass"]
    found = judge(launch(tmp_path, flags, draft_tensors=packed()))
    assert [r.id for r in found] == ["FP4-110", "FP4-113"]
    assert found[1].asked == f"--speculative-draft-model-path {tmp_path}/d"
    found = judge(launch(tmp_path, GOOD, draft_tensors=awq))
    assert [r.id for r in found] == ["FP4-111", "FP4-113"] and found[0].says.startswith(f"{tmp_path}/d has NVFP4")
    # Two checkpoints with one half each are no AWQ.
    halves = {"tensors": packed(), "draft_tensors": {f"{PROJECTION}.pre_quant_scale": scale(1.0)}}
    assert [r.id for r in judge(launch(tmp_path, GOOD, **halves))] == ["FP4-113"]


@pytest.mark.parametrize("side", ["tensors", "draft_tensors"])
def test_weights_for_a_scaled_input_are_refused_on_a_cpu(tmp_path, side):
    awq = packed(f"{PROJECTION}.pre_quant_scale")
    (only,) = judge(launch(tmp_path, [*GOOD, "--device", "cpu"], **{side: awq}))
    assert only.id == "FP4-111" and "and with --device cpu nothing scales it" in only.says


def test_a_packed_head_is_loaded_whole_by_other_classes(tmp_path):
    head = packed("lm_head.weight_scale")
    assert judge(launch(tmp_path, [*NVFP4, "--device", "cpu"], tensors=head)) == []


def test_a_head_in_fp8_is_not_called_an_nvfp4_one(tmp_path):
    """The class drops its scales too."""
    fp8, target = {"lm_head.weight_scale": scale(1.0)}, {"architectures": ["Qwen3_5ForCausalLM"]}
    (only,) = judge(launch(tmp_path, NVFP4, target=target, tensors=fp8))
    assert only.id == "FP4-112" and only.says.startswith(f"{tmp_path}/t has a quantized head, whose scales")


def test_a_drafts_hash_is_compared(tmp_path):
    tensors = {"w": ("BF16", [1], b"12")}
    right = launch(tmp_path, GOOD, draft_tensors=tensors, named={"draft_sha256": "0" * 64})
    (only,) = judge(right)
    digest = re.search(r"sha256 ([0-9a-f]{64})", only.says)[1]
    assert judge(launch(tmp_path, GOOD, draft_tensors=tensors, named={"draft_sha256": digest})) == []


def test_the_budget_is_shown_as_a_sum(tmp_path):
    # 4 layers x 2 heads x 2 x (32 + 4) bytes, and 1 layer x 2 heads x 2 x 64 bytes.
    case = {"weights": (10 * GIB, 2 * GIB)}
    flags = [*GOOD, "--mem-fraction-static", "0.5", "--max-total-tokens", "80000000"]
    (only,) = judge(launch(tmp_path, flags, **case))
    assert only.why == (
        "80,000,000 tokens x (target 576 + drafter 256 bytes) = 61.99 GB > "
        "139.00 GB x 0.5 - weights 12.00 GB = 57.50 GB"
    )
    flags[-1] = "70000000"
    assert judge(launch(tmp_path, flags, **case)) == []


def test_bytes_of_heads_that_do_not_split_are_unknown(tmp_path):
    """SGLang stops at 2 KV heads on 3 GPUs by itself; on 4 each GPU keeps a copy of one."""
    cells = {}
    for tp in (1, 2, 3, 4):
        held = memory(launch(tmp_path, [*GOOD, "--tp-size", str(tp)]))
        cells[tp] = (held.target_cell, held.draft_cell, held.layer_cell, held.cell)
    assert cells == {
        1: (576, 256, 512, 832), 2: (288, 128, 256, 416), 3: (None,) * 4, 4: (288, 128, 256, 416),
    }  # fmt: skip


def test_weights_alone_may_exceed_the_budget(tmp_path):
    (only,) = judge(launch(tmp_path, NVFP4, weights=(140 * GIB, 0), on=machine(H200)))[-1:]
    assert only.id == "FP4-056" and "139.00 GB x 1 (SGLang chooses less) - weights 140.00 GB" in only.why


def test_one_request_is_counted_against_the_budget(tmp_path):
    flags = [*GOOD, "--context-length", "2000000", "--mem-fraction-static", "0.02"]
    (only,) = judge(launch(tmp_path, flags, weights=(2 * GIB, 0)))
    assert only.id == "FP4-055"
    assert only.why == (
        "2,000,000 tokens x (target 576 + drafter 256 bytes) = 1.55 GB > "
        "139.00 GB x 0.02 - weights 2.00 GB = 0.78 GB, which holds 1,006,632 tokens"
    )


def test_the_pool_at_the_fractions_maximum_leaves_no_room_for_mx_fp4_and_a_drafter(tmp_path):
    flags = [*MX, *DFLASH, "--mem-fraction-static", "0.9"]
    refusals = judge(launch(tmp_path, flags, weights=(10 * GIB, 2 * GIB)))
    told = next(r for r in refusals if r.id == "FP4-057")
    assert "weights 12.00 GB + target pool 90.48 GB + drafter pool 22.62 GB" in told.why
    assert "+ one decoded layer 80.43 GB = 205.53 GB > 139.00 GB" in told.why
    flags += ["--max-total-tokens", "1000000"]
    refusals = judge(launch(tmp_path, flags, weights=(10 * GIB, 2 * GIB)))
    assert "FP4-057" not in [r.id for r in refusals]


def test_what_is_unknown_is_not_judged(tmp_path):
    flags = [*GOOD, "--max-total-tokens", "200000000"]
    assert judge(launch(tmp_path, flags)) == []  # weights
    assert judge(launch(tmp_path, flags, weights=(1, 1), on=machine(NO_GPU))) == []
    assert judge(launch(tmp_path, flags, weights=(1, 1), on=machine("sm_90"))) == []  # memory


@pytest.mark.parametrize(
    ("flags", "gpu", "expected"),
    [
        (["--attention-backend", "flashinfer"], "sm_121", ["FP4-010"]),
        (["--attention-backend", "trtllm_mha"], "sm_100", ["FP4-010"]),
        (["--attention-backend", "trtllm_mha"], "sm_121", ["FP4-059"]),
        (["--attention-backend", "fa3"], "sm_100", ["FP4-059"]),
        (["--decode-attention-backend", "flashinfer"], "sm_100", ["FP4-059"]),
        (["--attention-backend", "fa3"], "sm_90", ["FP4-020", "FP4-059"]),
    ],
)
def test_sglangs_own_nvfp4_is_untested_where_it_starts(tmp_path, flags, gpu, expected):
    refusals = judge(launch(tmp_path, ["--kv-cache-dtype", "nvfp4", *flags], on=machine(gpu)))
    assert [r.id for r in refusals] == expected


@pytest.mark.parametrize(
    ("target", "draft", "tp", "named"),
    [
        ({}, {}, 2, None), ({}, {}, 4, None),  # 2 KV heads: one each, then copied
        ({}, {}, 3, "2 KV heads"), ({}, {}, 8, "4 query heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, {}, 4, "6 KV heads"),
        ({"num_attention_heads": 28, "num_key_value_heads": 4}, {}, 8, "28 query heads"),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, {"num_attention_heads": 8}, 8, None),
        ({}, {"num_attention_heads": 3, "num_key_value_heads": 1}, 2, "3 query heads"),
    ],
)  # fmt: skip
def test_heads_are_split_or_copied_evenly(tmp_path, target, draft, tp, named):
    flags = [*NVFP4, *DFLASH, "--tp-size", str(tp), "--device", "cpu"]
    left = judge(launch(tmp_path, flags, target=target, draft=draft))
    assert [r.id for r in left] == (["FP4-042"] if named else [])
    if named:
        assert left[0].says == f"{named} cannot be divided evenly by tensor parallel {tp}"


def test_ranks_on_a_cpu_are_tested_and_other_splits_are_not(tmp_path):
    on_cpu = [*NVFP4, "--device", "cpu"]
    assert judge(launch(tmp_path, [*on_cpu, "--tp-size", "2"])) == []
    (found,) = judge(launch(tmp_path, [*on_cpu, "--tp-size", "2", "--pp-size", "2"]))
    assert found.id == "FP4-027" and "--pp-size 2" in found.asked and "tp-size" not in found.asked


def test_nothing_asked_is_told_as_the_default(tmp_path):
    (only,) = judge(launch(tmp_path, ["--kv-cache-dtype", "nvfp4"], on=machine("sm_100")))
    assert "prefill on SGLang's default and decode on SGLang's default" in only.says


def test_only_what_has_no_result_is_untested():
    assert {rule.status for rule in RULES.values()} == {FAILS, UNTESTED}
    allowable = [id for id, rule in RULES.items() if rule.allowable]
    assert allowable == [
        "FP4-010", "FP4-026", "FP4-027", "FP4-029", "FP4-032", "FP4-033", "FP4-058",
        "FP4-061", "FP4-063", "FP4-070", "FP4-071", "FP4-072", "FP4-079", "FP4-090", "FP4-091", "FP4-095",
        "FP4-102", "FP4-103", "FP4-104", "FP4-113", "FP4-115", "FP4-116", "FP4-118",
    ]  # fmt: skip
    for id in allowable:
        assert "no result" in TEXTS[id].says or "no result" in TEXTS[id].why
