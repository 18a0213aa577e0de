"""NVFP4 weights on a GPU: a hybrid as ModelOpt packs it beside the same weights in BF16.

usage: python -m tests.gpu.weights OUT.json --logs FOLDER

The hybrid of tests.gpu.hybrid, packed by tests/e2e/fp4_weights.py: every packed weight is a BF16 number, so that a
twin in BF16 holds the same ones. BF16 KV and NVFP4 KV, alone and with an oracle drafter; Marlin multiplies on sm_80
to sm_90, asked for or chosen by SGLang. Checkpoints that NVFP4 KV is served from have KV scales of their own on each
layer. Those for BF16 KV have none: SGLang's Triton backend would multiply what it reads of plain BF16 by them.
Exit code 3 as tests.gpu.hybrid, and when a KV scale in use is not the checkpoint's.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.fp4_weights import kv_scales, pack_weights
from tests.e2e.tiny_models import INTERVAL, build_hybrid
from tests.gpu.hybrid import NO_GRAPHS, SIZES, Run, Server, findings, finish
from tests.gpu.origin import arguments

MARLIN = ("--fp4-gemm-backend", "marlin")
NAMED = ("--quantization", "modelopt_fp4")  # also the draft's then, which is in BF16
KV_SCALES = kv_scales(range(INTERVAL - 1, SIZES["num_hidden_layers"], INTERVAL))
SERVERS = {
    "twin bf16": Server("bf16"),
    "packed bf16": Server("bf16", None, MARLIN, "twin bf16", "packed"),
    "packed bf16 oracle": Server("bf16", "oracle", MARLIN, "packed bf16", "packed"),
    "twin nvfp4": Server("nvfp4", target="scaled twin"),
    "packed nvfp4": Server("nvfp4", None, MARLIN, "twin nvfp4", "scaled"),
    "packed nvfp4 eager": Server("nvfp4", None, NO_GRAPHS, "packed nvfp4", "scaled"),
    "packed nvfp4 oracle": Server("nvfp4", "oracle", (*MARLIN, *NAMED), "packed nvfp4", "scaled"),
}


def build(folder):
    """The folders of the run's targets."""
    source = build_hybrid(folder / "source", **SIZES)
    plain = pack_weights(source, folder / "plain", {})
    scaled = pack_weights(source, folder / "scaled", KV_SCALES)
    return {"bf16": plain.twin, "packed": plain.packed, "scaled twin": scaled.twin, "scaled": scaled.packed}


def with_scales(run, name):
    """findings of one server and what is wrong with the KV scales that it uses."""
    found = findings(run, name)
    if run.servers[name].kv == "nvfp4":
        used = run.reports[name]["target"]["global_scales"]
        asked = {side: [pair[i] for pair in KV_SCALES.values()] for i, side in enumerate("kv")}
        if used != {"source": "checkpoint", **asked}:
            found["wrong"].append(f"KV scales: {used}, the checkpoint has {asked}")
    return found


def main():
    args, begun = arguments(__doc__), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(Path(scratch), args.logs, SERVERS, build(Path(scratch)))
        run.go()
        found = {name: with_scales(run, name) for name in SERVERS}
    return finish(args.out, "tests.gpu.weights", begun, found, kv_scales=KV_SCALES)


if __name__ == "__main__":
    sys.exit(main())
