"""Time the sparse reader at 2,048 selected positions a KV head of 64k, beside the dense reader.

    python tests/bench/bench_sparse.py --out sparse.json          try fewest tiles of a part, too
    python tests/bench/run.py --ops sparse                        the rows alone

Compared as bandwidth: bytes of packed rows read over p50, of `ours` (2,048 positions of each head),
of `dense` (all 64k) and of `dense_selected` (2,048 positions side by side, so the same bytes). `lists`
is the dense reader over lists of the same rows, made beforehand: what finding them costs is the difference.
Results are checked against the tests' reference before they are timed. Exit codes: 0 done, 1 a check failed or there is
no GPU, 2 bad usage.
"""

import argparse
import dataclasses
import json
import math
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import bench_attention  # noqa: E402
from bench_attention import Inputs, Shape  # noqa: E402
from reference_attention import assert_close_enough, attend  # noqa: E402
from timing import DEVICE, ROTATE_BYTES, copy_bandwidth, failure, timed  # noqa: E402

from launcher.demo import commit, gpu_name  # noqa: E402
from launcher.probe import installed_versions  # noqa: E402
from sglang_fp4kv import formats  # noqa: E402
from sglang_fp4kv.kernels._plan import device_limits  # noqa: E402
from sglang_fp4kv.kernels.decode_nvfp4 import attention_nvfp4  # noqa: E402
from sglang_fp4kv.kernels.sparse_nvfp4 import plan_sparse, sparse_buffers, sparse_nvfp4  # noqa: E402

CONTEXT, SELECTED = 65536, 2048
SHAPES = tuple(Shape(n, CONTEXT, 1, "decode") for n in (1, 2, 4, 8, 16, 32, 64))
GOAL_SHARE = 0.5  # of the dense reader's bandwidth
FEWEST_TILES = (2, 4, 8, 16)  # tried in place of the plan's
MOST_COPIES = 64  # selections of a graph


class SparseInputs(Inputs):
    """Several selections of random positions, one for each token and KV head, over the pool's lists."""

    def __init__(self, shape: Shape, entries: int = SELECTED, seed: int = 0):
        super().__init__(shape, seed)
        token = formats.bytes_per_token(shape.head_dim, shape.kv_heads)
        self.selected_bytes = token * shape.requests * entries
        self.turns = min(MOST_COPIES, max(self.copies, math.ceil(ROTATE_BYTES / self.selected_bytes)))
        g = torch.Generator(DEVICE).manual_seed(seed + 1)
        self.selected = torch.stack(
            [
                torch.stack(
                    [
                        torch.randperm(shape.context, generator=g, device=DEVICE)[:entries]
                        for _ in range(shape.requests * shape.kv_heads)
                    ]
                ).view(shape.requests, shape.kv_heads, entries)
                for _ in range(self.turns)
            ]
        ).int()

    def plan(self):
        shape, (_, groups, entries) = self.shape, self.selected.shape[1:]
        limits = device_limits(self.q.device)
        sizes = shape.requests, groups, entries, shape.heads, shape.kv_heads, shape.head_dim
        return plan_sparse(*sizes, limits), sizes


def ours(x: SparseInputs, plan=None):
    """call(turn) with buffers made beforehand, as a captured decode has."""
    chosen, sizes = x.plan()
    plan = plan or chosen
    out, buffers = torch.empty_like(x.q), sparse_buffers(plan, *sizes[:-1], sizes[-1], x.q.device)

    def call(i):
        return sparse_nvfp4(
            x.q, *x.pool.sides, out, x.selected[i], x.kv_indptr, x.prefix[i % x.copies],
            sm_scale=x.sm_scale, plan=plan, buffers=buffers, **x.pool.scales,
        )  # fmt: skip

    return call


def over_lists(x: SparseInputs):
    """The dense reader over lists of the selected rows, made once for each turn; bit for bit ours."""
    shape = x.shape
    (plan, sizes), heads = x.plan(), shape.kv_heads
    rows_of_turns = []
    for i in range(x.turns):
        slots = x.prefix[i % x.copies].view(shape.requests, 1, -1).expand(-1, heads, -1)
        rows = slots.gather(2, x.selected[i].long()) * heads
        rows_of_turns.append((rows + torch.arange(heads, device=DEVICE)[:, None]).int().flatten())
    step = torch.arange(shape.requests * heads + 1, device=DEVICE, dtype=torch.int32)
    indptr = step * x.selected.shape[-1]
    sides = [side.view(-1, 1, side.shape[-1]) for side in x.pool.sides]
    q = x.q.view(-1, shape.heads // heads, shape.head_dim)
    out, buffers = torch.empty_like(q), sparse_buffers(plan, *sizes, x.q.device).attention

    def call(i):
        attention_nvfp4(
            q, *sides, out, indptr, rows_of_turns[i], q_per_req=1, sm_scale=x.sm_scale, causal=False,
            plan=plan, buffers=buffers, **x.pool.scales,
        )  # fmt: skip
        return out.view(x.q.shape)

    return call


def check(x: SparseInputs, out: torch.Tensor, turn: int = 0) -> list[float]:
    """The first and the last token, every KV head, against the reference."""
    shape, ratios = x.shape, []
    group = shape.heads // shape.kv_heads
    for t in {0, shape.requests - 1}:
        slots = x.prefix[turn % x.copies].view(shape.requests, -1)[t]
        for h in range(shape.kv_heads):
            k, v = (s[:, h : h + 1] for s in x.pool.decoded(slots[x.selected[turn, t, h].long()]))
            heads = slice(h * group, (h + 1) * group)
            visible = torch.ones(1, k.shape[0], dtype=torch.bool, device=DEVICE)
            exact, low = (
                attend(x.q[t : t + 1, heads], k, v, visible, x.sm_scale, low=dtype)
                for dtype in (None, torch.bfloat16)
            )
            ratios += assert_close_enough(out[t : t + 1, heads], exact, low, f"{shape} {t} {h}")
    return ratios


def with_bandwidth(times: dict, moved: int) -> dict:
    return times | {"bytes_per_second": round(moved / times["p50_us"] * 1e6)}


def run_shape(shape: Shape, seconds: float, sweep: bool = False) -> dict:
    """One row: the sparse reader, the dense one over lists of its rows, over 64k and over 2,048."""
    x = SparseInputs(shape)
    call = ours(x)
    ratios = check(x, call(0).clone())
    entry = with_bandwidth(timed(call, x.turns, seconds), x.selected_bytes)
    lists = over_lists(x)
    assert torch.equal(lists(0), call(0)), "the same rows give something else as lists"
    row = {
        "shape": f"{SELECTED} of {shape}",
        **dataclasses.asdict(shape),
        "selected": SELECTED,
        "selected_bytes": x.selected_bytes,
        "rotated": x.turns,
        "error_over_bf16_attention": round(max(ratios), 3),
        "plan": dataclasses.asdict(x.plan()[0]),
        "ours": entry,
        "lists": with_bandwidth(timed(lists, x.turns, seconds), x.selected_bytes),
        "dense": with_bandwidth(timed(bench_attention.ours(x), x.copies, seconds), x.kv_bytes),
    }
    if sweep:
        row["fewest_tiles"] = {
            tiles: timed(ours(x, dataclasses.replace(x.plan()[0], min_tiles=tiles)), x.turns, seconds)
            for tiles in FEWEST_TILES
        }
    del x, call, lists
    torch.cuda.empty_cache()
    short = Inputs(dataclasses.replace(shape, context=SELECTED))
    row["dense_selected"] = with_bandwidth(
        timed(bench_attention.ours(short), short.copies, seconds), short.kv_bytes
    )
    return row | judged(row)


def judged(row: dict) -> dict:
    """Shares of the dense reader's bandwidth, and whether that of all 64k is reached."""
    ours_speed = row["ours"]["bytes_per_second"]
    share = ours_speed / row["dense"]["bytes_per_second"]
    return {
        "share_of_dense": round(share, 3),
        "share_of_dense_selected": round(ours_speed / row["dense_selected"]["bytes_per_second"], 3),
        "goal_share": GOAL_SHARE,
        "met": share >= GOAL_SHARE,
    }


def rows(seconds: float, sweep: bool = False):
    """A row a number of requests; a failed one says why."""
    for shape in SHAPES:
        try:
            yield run_shape(shape, seconds, sweep)
        except Exception as error:  # the other rows are still worth their time
            yield {"shape": f"{SELECTED} of {shape}", "error": failure(error, 600)}
        torch.cuda.empty_cache()


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of an entry")
    args = parser.parse_args(argv)
    if gpu_name() is None:
        print("bench_sparse: needs an NVIDIA GPU that CUDA can use", file=sys.stderr)
        return 1
    report = {
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": installed_versions(),
        "gpu": gpu_name(),
        "copy_bytes_per_second": copy_bandwidth(),
        "rows": [],
    }
    for row in rows(args.seconds, sweep=True):
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any("error" in row for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
