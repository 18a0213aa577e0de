"""Decode NVFP4 pools with numpy and ml_dtypes alone, and compare them byte by byte with what was written.

    python tests/independent_decoder.py DUMPS_DIR REPORT.json

Nothing of the product is used here, and no torch: E2M1 and E4M3 are ml_dtypes' own types, arithmetic is
float64. tests/gpu/pool_report.py writes the dumps, one .npz a case:

  k, v              [T, H, D]       uint16   BF16 bits of what was written
  slots             [T]             int64    where to; below 0: not written
  k_codes, v_codes  [S, H, D//2]    uint8    the whole pool afterwards, which was zeros before
  k_scales, v_scales [S, H, D//16]  uint8
  k_global, v_global                float32
  k_read, v_read    [T, H, D]       float32  what the product decodes from it
  q                 [N, Hq, D]      uint16   BF16 bits; with q also:
  selected          [N, G, K]       int64    rows of k and v that each group of KV heads selects
  out               [N, Hq, D]      float32  the product's attention over them

A byte is exact; or a tie, where a value lies half-way between two neighbours (or so near, 2^-22, that fp32
cannot tell) and the other one was taken; or other, which is an error. Codes are compared under the scale that
the pool has. Attention is an error below a cosine of LEAST_COSINE to the decoded reference.
Exit codes: 0 no error, 1 errors (the report says which), 2 bad usage.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

BLOCK = 16
LEAST_COSINE = 0.9999  # of attention to the same in float64 over the same decoded values
ERRORS = ("other", "bytes_outside", "values_read_otherwise", "attention_otherwise")
TIE = 2.0**-22
GRID = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
SCALES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def bf16(bits: np.ndarray) -> np.ndarray:
    """float64 values of BF16 bits."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes [..., D//2] as [..., D]: the low nibble is the even element."""
    return np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def largest_of_blocks(x: np.ndarray) -> np.ndarray:
    """Largest magnitudes [..., D//16] of x [..., D]."""
    return np.abs(x).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).max(-1)


def scale_values(scales: np.ndarray) -> np.ndarray:
    return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def decode(codes: np.ndarray, scales: np.ndarray, global_scale: float) -> np.ndarray:
    """float64 values [..., D] of codes [..., D//2] and scales [..., D//16], both uint8."""
    values = nibbles(codes).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    steps = np.repeat(scale_values(scales) * float(global_scale), BLOCK, -1)
    return values * steps


def encode_scales(x: np.ndarray, global_scale: float) -> np.ndarray:
    """E4M3 bytes [..., D//16] of finite x [..., D]: nearest even of (largest of 16) / (6 * global)."""
    ratio = np.minimum(largest_of_blocks(x) / (6.0 * float(global_scale)), SCALES[-1])
    return ratio.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def encode_codes(x: np.ndarray, scales: np.ndarray, global_scale: float) -> np.ndarray:
    """Codes [..., D//2] of finite x under these scales: nearest even E2M1, 0 under scale 0."""
    step = np.repeat(scale_values(scales) * float(global_scale), BLOCK, -1)
    quotient = np.clip(x / np.where(step == 0, 1.0, step), -6.0, 6.0)
    codes = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = np.where(step == 0, 0, codes).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def near(value: np.ndarray, middle: np.ndarray) -> np.ndarray:
    return np.abs(value - middle) <= TIE * np.abs(middle)


def scale_ties(x, got, want, global_scale) -> np.ndarray:
    """Where a scale byte is the other neighbour of a half-way value."""
    finite = got < len(SCALES)  # neither NaN nor a sign bit, which are never the other neighbour
    got, want = (np.minimum(b, len(SCALES) - 1).astype(int) for b in (got, want))
    middle = (SCALES[got] + SCALES[want]) / 2 * 6.0 * float(global_scale)
    return finite & (np.abs(got - want) == 1) & near(largest_of_blocks(x), middle)


def code_ties(x, got, want, scales, global_scale) -> np.ndarray:
    """Code bytes [..., D//2] whose nibbles are equal or the other neighbour of a half-way value."""
    got, want = nibbles(got), nibbles(want)
    step = np.repeat(scale_values(scales) * float(global_scale), BLOCK, -1)
    middle = (GRID[got & 7] + GRID[want & 7]) / 2 * step
    neighbours = np.abs((got & 7).astype(int) - (want & 7)) == 1
    tie = (got >> 3 == want >> 3) & neighbours & near(np.abs(x), middle)
    return ((got == want) | tie).reshape(*got.shape[:-1], -1, 2).all(-1)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def count(got: np.ndarray, want: np.ndarray, ties: np.ndarray) -> dict:
    same = got == want
    return {
        "bytes": int(same.size),
        "exact": int(same.sum()),
        "tie": int((~same & ties).sum()),
        "other": int((~same & ~ties).sum()),
    }


def side_report(dump: dict, side: str) -> tuple[dict, np.ndarray, np.ndarray]:
    """Counts and cosines of K or V, and float64 rows: what the pool holds, what was written."""
    written, slots = dump["slots"] >= 0, dump["slots"]
    x, global_scale = bf16(dump[side])[written], dump[f"{side}_global"]
    all_codes, all_scales = dump[f"{side}_codes"], dump[f"{side}_scales"]
    codes, scales = all_codes[slots[written]], all_scales[slots[written]]
    untouched = np.ones(len(all_codes), dtype=bool)
    untouched[slots[written]] = False
    want_scales = encode_scales(x, global_scale)
    want_codes = encode_codes(x, scales, global_scale)
    held = decode(codes, scales, global_scale)
    reference = decode(encode_codes(x, want_scales, global_scale), want_scales, global_scale)
    read = dump[f"{side}_read"][written]
    report = {
        "scales": count(scales, want_scales, scale_ties(x, scales, want_scales, global_scale)),
        "codes": count(codes, want_codes, code_ties(x, codes, want_codes, scales, global_scale)),
        "bytes_outside": int(np.count_nonzero(all_codes[untouched]) + np.count_nonzero(all_scales[untouched])),
        "values_read_otherwise": int((read != held.astype(np.float32)).sum()),
        "cosine_to_bf16": cosine(held, x),
        "cosine_to_reference": cosine(held, reference),
    }
    return report, held, x


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Softmax attention [N, Hq, D] in float64 over the rows each group of KV heads selects."""
    out = np.empty_like(q)
    heads, kv_heads = q.shape[1], k.shape[1]
    groups = selected.shape[1]
    for n, h in np.ndindex(*q.shape[:2]):
        kv = h * kv_heads // heads
        rows = selected[n, kv * groups // kv_heads]
        scores = k[rows, kv] @ q[n, h] * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        out[n, h] = weights @ v[rows, kv] / weights.sum()
    return out


def case_report(dump: dict) -> dict:
    """The report of one dump: K, V, and where there is a q the attention over them."""
    report, held, source = {}, {}, {}
    for side in "kv":
        report[side], held[side], source[side] = side_report(dump, side)
    if "q" in dump:
        q, selected, out = bf16(dump["q"]), dump["selected"], dump["out"].astype(np.float64)
        assert (dump["slots"] >= 0).all(), "rows are selected by their place in k, so all are written"
        report["attention"] = {
            "cosine_to_decoded": cosine(out, attend(q, held["k"], held["v"], selected)),
            "cosine_to_bf16": cosine(out, attend(q, source["k"], source["v"], selected)),
        }
    return report


def total(cases: dict) -> dict:
    """Sums over all cases, sides and kinds of bytes."""
    sides = [case[side] for case in cases.values() for side in "kv"]
    counts = [side[kind] for side in sides for kind in ("scales", "codes")]
    summed = {name: sum(c[name] for c in counts) for name in ("bytes", "exact", "tie", "other")}
    for name in ("bytes_outside", "values_read_otherwise"):
        summed[name] = sum(side[name] for side in sides)
    found = [case["attention"]["cosine_to_decoded"] for case in cases.values() if "attention" in case]
    summed["attention_otherwise"] = sum(not cosine >= LEAST_COSINE for cosine in found)  # counts NaN
    return summed


def is_clean(summed: dict) -> bool:
    return not any(summed[name] for name in ERRORS)


def main(argv: list[str]) -> int:
    files = sorted(Path(argv[0]).glob("*.npz")) if len(argv) == 2 else []
    if not files:
        print(f"usage: {Path(__file__).name} DUMPS_DIR REPORT.json, with dumps in it", file=sys.stderr)
        return 2
    cases = {}
    for file in files:
        with np.load(file) as arrays:
            cases[file.stem] = case_report(dict(arrays))
    report = {"total": total(cases), "cases": cases}
    Path(argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["total"]))
    return 0 if is_clean(report["total"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
