"""The bounds of the checks, each with its source."""

from launcher.equality import CPU_BOUND, NEAR_TIE_BOUNDS

# Differences of log-probability (natural log) between the two best tokens, by KV format: the furthest that
# the margin moves in any of 418 steps when a prompt is cut elsewhere (two or four chunks for one, or all but its
# last token from the prefix cache), rounded up to the quarter above
# (tests/bench/results/prefill_cut_smollm2.json). Prefill reads its own chunk in BF16 and what stands before
# it from the pool. What these comparisons failed for a fault in tests/bench/results/faults.json parted at 6.3 and more:
# the shipped pair is sure of its answers. A model that is not parts within them whatever is wrong, and other checks
# have to find it.
CUT_BOUNDS = {"bf16": 0.75, "fp8_e4m3": 2.0, "nvfp4": 5.0}

# What /server_info calls the formats. e5m2 has one mantissa bit less than e4m3 and no study of its own.
KV_FORMATS = {
    "auto": "bf16", "bf16": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e4m3",
    "nvfp4": "nvfp4", "fp4_mx_block16": "nvfp4", "fp4_e2m1": "nvfp4",
}  # fmt: skip
STRICTEST = "bf16"  # where a server does not say how it stores K and V

# McNemar's test on answers right on one side alone; below it a loss against the control is no chance.
MCNEMAR_P = 0.05
# The share of answers whose rightness changed in either direction. A share whose 95% interval lies above
# this is a failure even where gains and losses cancel: 37 of 48 right on both sides with 2 changed, as a
# sound NVFP4 server had it, is 0.04 with an interval from 0.01.
CHANGED_SHARE = 0.10
# A control that is right less often than this shows nothing about a loss.
CONTROL_RIGHT = 0.5
# Mean accept length over the same prompts after the soak, as a share of before. The first answers after it
# find an empty prefix cache, and drafts from recomputed features differ a little.
SOAK_ACCEPT_SHARE = 0.9
# The same for a drafter that drafts from what it has answered, which other requests move: a sound SmolLM2 with NGRAM
# kept 0.90 on an H200. Also the least share of the answer before it that a repeated one keeps.
LEARNING_ACCEPT_SHARE = 0.5
SOAK_USAGE = (0.6, 0.95)  # of the pool's tokens
# A mean accept length at the deepest prompts below this share of the shallowest is reported as a fall.
DEPTH_FALL_SHARE = 0.8


def near_tie_bound(kv_format, device):
    """The largest margin at which two answers may part that read the same K and V in another order."""
    return CPU_BOUND if device == "cpu" else NEAR_TIE_BOUNDS[kv_format]


def cut_bound(kv_format):
    """The same where the prompt was cut into other chunks, so that quantization may show."""
    return CUT_BOUNDS[kv_format]
