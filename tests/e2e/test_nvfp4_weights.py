"""NVFP4 KV on checkpoints with NVFP4 weights and KV scales, as ModelOpt writes them.

The embedded platform decodes the weights when they are loaded, so that a checkpoint in BF16 with the decoded weights
has to give the same tokens. Every layer has KV scales of its own.
"""

import pytest

from launcher.client import fp4kv_report, generate, server_info
from tests.e2e.fp4_weights import kv_scales, pack_weights
from tests.e2e.test_hybrid_serving import ALONE, NEW_TOKENS, drafter, serve
from tests.e2e.tiny_models import INTERVAL, LAYERS, TINY_HYBRID, build_draft, build_hybrid, build_target

pytestmark = pytest.mark.e2e

HYBRID_SCALES = kv_scales(range(INTERVAL - 1, TINY_HYBRID["num_hidden_layers"], INTERVAL))
DENSE_SCALES = kv_scales(range(LAYERS))


def in_report(scales):
    """KV scales as the worker's report has them."""
    return {"source": "checkpoint", **{side: [pair[i] for pair in scales.values()] for i, side in enumerate("kv")}}


@pytest.fixture(scope="module")
def hybrids(scratch):
    return pack_weights(build_hybrid(scratch / "weights-hybrid"), scratch / "weights", HYBRID_SCALES)


def examine(model, log):
    """Answers and the report of a hybrid, whose states are kept in BF16 as asked."""
    with serve(model, log, "--mamba-ssm-dtype", "bfloat16") as server:
        answers = {name: generate(server.url, p, NEW_TOKENS, ignore_eos=True).tokens for name, p in ALONE.items()}
        return answers, fp4kv_report(server_info(server.url))


@pytest.fixture(scope="module")
def packed(hybrids, scratch):
    return examine(hybrids.packed, scratch / "weights-packed.log")


@pytest.fixture(scope="module")
def twin(hybrids, scratch):
    return examine(hybrids.twin, scratch / "weights-twin.log")


def test_packed_weights_answer_as_the_bf16_weights_they_stand_for(packed, twin):
    assert packed[0] == twin[0]


@pytest.mark.parametrize("side", ["packed", "twin"])
def test_scales_of_a_checkpoint_and_narrow_states_arrive(request, side):
    report = request.getfixturevalue(side)[1]
    assert report["target"]["global_scales"] == in_report(HYBRID_SCALES)
    assert report["states"]["dtype"] == "bfloat16"


def test_a_dense_target_keeps_its_scales_and_its_draft_stays_as_it_is(scratch):
    """The older layout; Qwen3ForCausalLM drops KV scales when it loads, and --quantization is the draft's as well."""
    source = build_target(scratch / "weights-dense")
    target = pack_weights(source, scratch / "weights-older", DENSE_SCALES, older=True).packed
    flags = ("--quantization", "modelopt_fp4", *drafter(build_draft(scratch / "weights-draft", source)))
    with serve(target, scratch / "weights-dense.log", *flags) as server:
        answer = generate(server.url, ALONE["short"], NEW_TOKENS, ignore_eos=True)
        report = fp4kv_report(server_info(server.url))
    assert report["target"]["global_scales"] == in_report(DENSE_SCALES)
    assert report["draft"]["dtype"] == "float8_e4m3fn" and len(answer.tokens) == NEW_TOKENS
