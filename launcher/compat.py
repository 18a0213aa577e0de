"""The README's compatibility tables, as the judge decides.

usage: python -m launcher.compat [--check]     rewrite the block, or exit 1 when it is stale

Each cell of the first two is the judge's verdict on the shipped pair, launched like that on one patched GPU; the third is
launcher.compat_features'.
"""

import sys
from functools import cache
from itertools import groupby
from pathlib import Path

from launcher import compat_features
from launcher.compat_features import PATCHED, cell
from launcher.judge import judge
from launcher.probe import Machine, parse_gpu
from launcher.readme_block import fill, markdown, parser, update

ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "models" / "pair"
KV_DTYPES = ("nvfp4", "fp4_mx_block16", "fp8_e4m3", "bf16")
DRAFTERS = (None, "DFLASH", "DSPARK", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
BACKENDS = ("triton", "flashinfer", "trtllm_mha", "fa3", "fa4")
MEASURED_ON = "sm_90"
GPUS = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
BY_GPU = (
    ("triton", None), ("triton", "DFLASH"), ("flashinfer", None), ("flashinfer", "DFLASH"),
    ("trtllm_mha", "DFLASH"),
)  # fmt: skip


@cache
def verdict(kv, drafter, backend, gpu):
    """The judge's Verdict on the pair with these flags."""
    argv = ["--model-path", str(PAIR / "target"), "--kv-cache-dtype", kv, "--attention-backend", backend]
    if drafter:
        argv += ["--speculative-algorithm", drafter]
    if drafter not in (None, "NGRAM"):
        argv += ["--speculative-draft-model-path", str(PAIR / "draft")]
    return judge(argv, machine=Machine(parse_gpu(gpu), PATCHED))


def block():
    """The block's text: backends by KV dtype and drafter on one GPU, then NVFP4 by GPU, then by model and feature."""
    rows = []
    for kv in KV_DTYPES:
        cells = [
            (drafter or "none", [cell(verdict(kv, drafter, backend, MEASURED_ON)) for backend in BACKENDS])
            for drafter in DRAFTERS
        ]
        for shown, same in groupby(cells, key=lambda row: row[1]):
            rows.append([kv, ", ".join(drafter for drafter, _ in same), *shown])
    lines = markdown(["KV dtype", f"drafter, on {MEASURED_ON}", *BACKENDS], rows)
    header = ["nvfp4, on", *(f"{backend}, {drafter or 'no drafter'}" for backend, drafter in BY_GPU)]
    by_gpu = [[gpu, *(cell(verdict("nvfp4", drafter, backend, gpu)) for backend, drafter in BY_GPU)] for gpu in GPUS]
    return "\n".join([*lines, "", *markdown(header, by_gpu), "", *compat_features.table()])


def main(argv=None):
    args = parser(__doc__.splitlines()[0], prog="python -m launcher.compat").parse_args(argv)
    stale = "the README's tables are stale: run python -m launcher.compat"
    return update("compat", args, lambda readme: fill(readme, "compat", block()), stale)


if __name__ == "__main__":
    sys.exit(main())
