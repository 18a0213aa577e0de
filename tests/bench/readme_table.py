"""Fill the README's tables from the result files.

    python tests/bench/readme_table.py             rewrite the blocks
    python tests/bench/readme_table.py --check     exit 1 when a block is not what the files say

A block stands between <!-- bench:begin --> and <!-- bench:end -->, or throughput, sparse, faults or checks in
bench's place. A result that is not on file makes its block say that it was not measured.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launcher import readme_block  # noqa: E402
from launcher.readme_block import markdown  # noqa: E402

RESULTS = ROOT / "tests" / "bench" / "results"
FILES = {
    "bench": "h200_bench.json", "throughput": "h200_throughput.json", "sparse": "h200_sparse.json",
    "faults": "faults.json", "checks": "h200_checks_*.json",
}  # fmt: skip
NOT_MEASURED = "Not measured yet."
BASELINES = {
    "flashinfer_bf16": "FlashInfer BF16",
    "flashinfer_fp8": "FlashInfer FP8",
    "flashinfer_nvfp4": "FlashInfer NVFP4",
    "sglang_triton_bf16": "SGLang Triton BF16",
    "sglang_triton_fp8": "SGLang Triton FP8",
}
KV_NAMES = {"bf16": "BF16", "fp8_e4m3": "FP8", "nvfp4": "NVFP4"}


def number(value: float | None) -> str:
    """Three significant digits at least: 3.46, 46.0, 367, 6482."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def verdict(met: bool | None) -> str:
    return {True: "met", False: "missed", None: "-"}[met]


def p50(entry: dict | None, unit_us: float) -> str:
    """The entry's median; 'error' for a baseline that could not run."""
    if entry is None:
        return "-"
    return "error" if "error" in entry else number(entry["p50_us"] / unit_us)


def attention_tables(rows: list[dict]) -> list[str]:
    lines = []
    for title, unit, wanted in (
        ("Decode and verify, microseconds (p50)", 1, ("decode", "verify")),
        ("Prefill of one request, milliseconds (p50)", 1000, ("prefill",)),
    ):
        chosen = [row for row in rows if row.get("kind") in wanted]
        if not chosen:
            continue
        header = ["requests x prefix, new tokens; heads", *BASELINES.values(), "**ours**", "goal", ""]
        lines += ["", f"{title}:", "", *markdown(header, [attention_cells(r, unit) for r in chosen])]
    return lines


def attention_cells(row: dict, unit: float) -> list[str]:
    goal, met = number(row["goal_us"] and row["goal_us"] / unit), verdict(row["met"])
    if row.get("further_goal_us"):
        goal += f", then {number(row['further_goal_us'] / unit)}"
        met += f", {verdict(row['further_met'])}"
    return [
        f"{row['requests']} x {row['context']}, {row['rows']}; "
        f"{row['heads']}/{row['kv_heads']}/{row['head_dim']}",
        *(p50(row["baselines"].get(name), unit) for name in BASELINES),
        f"**{p50(row['ours'], unit)}**",
        goal,
        met,
    ]


def store_table(rows: list[dict]) -> list[str]:
    """A row a number of tokens, a column a (KV heads x head dim): ours, SGLang's, their ratio."""
    if not rows:
        return []
    cells = {(row["tokens"], row["shape"]): row for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    body = [
        [str(tokens), *(store_cell(cells.get((tokens, shape))) for shape in shapes)]
        for tokens in dict.fromkeys(row["tokens"] for row in rows)
    ]
    met, goal = sum(row["met"] is True for row in rows), rows[0]["goal_ratio"]
    title = "Writer, microseconds (p50), beside SGLang's BF16 store of the same tokens"
    verdict_line = f"At most {goal} times SGLang's store in {met} of {len(rows)} rows."
    header = ["tokens", *(f"{shape}: **ours**, SGLang, ratio" for shape in shapes)]
    return ["", f"{title}:", "", *markdown(header, body), "", verdict_line]


def store_cell(row: dict | None) -> str:
    if row is None or "error" in row:
        return "-" if row is None else "error"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"**{p50(row['ours'], 1)}**, {p50(row['baselines'].get('sglang_bf16'), 1)}, {ratio}"


def origin(result: dict, name: str) -> str:
    versions = result["versions"]
    return (
        f"{result['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, SGLang "
        f"{versions['sglang']}, FlashInfer {versions['flashinfer-python']}, {result['date']}; "
        f"`{(RESULTS / name).relative_to(ROOT)}`."
    )


def of_other_runs(rows: list[dict]) -> list[str]:
    """A row may name the run it came from, where that is not the file's own."""
    runs = {}
    for row in rows:
        if "run" in row:
            runs.setdefault(row["run"]["commit"], []).append(row.get("kind", "writer"))
    return [
        f"\nOf an earlier run (commit {commit}): {len(kinds)} rows ({', '.join(dict.fromkeys(kinds))})."
        for commit, kinds in runs.items()
    ]


def bench_block(result: dict) -> list[str]:
    rows = result["rows"]
    return [
        origin(result, FILES["bench"]),
        *attention_tables([row for row in rows if row["op"] == "attention"]),
        *store_table([row for row in rows if row["op"] == "store"]),
        *of_other_runs(rows),
        *(f"\nFailed: {row['op']} {row['shape']}: {row['error']}" for row in rows if "error" in row),
    ]


def throughput_block(result: dict) -> list[str]:
    """A row a (drafter, streams), a column a (KV dtype, backend)."""
    rows = result["rows"]
    columns = list(dict.fromkeys((row["kv"], row["backend"]) for row in rows))
    cells = {(r["drafted"], r["streams"], r["kv"], r["backend"]): r for r in rows}
    body = []
    for drafted, streams in dict.fromkeys((r["drafted"], r["streams"]) for r in rows):
        found = [cells.get((drafted, streams, *column)) for column in columns]
        body.append(
            [
                f"{streams} {'stream' if streams == 1 else 'streams'}, "
                f"{'drafter' if drafted else 'no drafter'}",
                *(number(row and row["tokens_per_second"]) for row in found),
            ]
        )
    names = {"triton": "Triton", "flashinfer": "FlashInfer"}
    header = ["decode tokens a second", *(f"{KV_NAMES[kv]}, {names[b]}" for kv, b in columns)]
    slower = result["nvfp4_slower_than_fp8"]
    return [
        f"{result['model']}, {result['prompt_tokens']} prompt and {result['new_tokens']} new tokens a stream; "
        f"every verify step is made to yield {result['forced_accept_length']} tokens. "
        + origin(result, FILES["throughput"]),
        "",
        *markdown(header, body),
        "",
        f"NVFP4 is slower than FP8 in {len(slower)} of the rows and backends."
        if slower
        else "NVFP4 is not slower than FP8 in any row.",
    ]


def sparse_block(result: dict) -> list[str]:
    """A row a number of requests: microseconds, bandwidth, and its share of the dense reader's."""

    def cell(entry: dict) -> str:
        return f"{number(entry['p50_us'])} ({entry['bytes_per_second'] / 1e12:.2f})"

    body = [
        [
            str(row["requests"]),
            f"**{cell(row['ours'])}**",
            cell(row["dense"]),
            cell(row["dense_selected"]),
            f"{row['share_of_dense']:.2f}",
            f"{row['share_of_dense_selected']:.2f}",
            verdict(row["met"]),
        ]
        for row in result["rows"]
        if "error" not in row
    ]
    header = ["requests", "**sparse**", "dense, all", "dense, as many", "share of all's", "of as many's", "goal"]
    return [
        origin(result, FILES["sparse"]),
        "",
        "Microseconds (p50) and TB/s of packed bytes: 2,048 random positions of 65,536 for each KV head, all "
        "65,536, and 2,048 side by side; 24/4/256. The goal is half of the dense reader's bandwidth over all.",
        "",
        *markdown(header, body),
        *(f"\nFailed: {row['shape']}: {row['error']}" for row in result["rows"] if "error" in row),
    ]


def faults_block(result: dict) -> list[str]:
    """A row a fault, a column a check; a sound server's row first. A pass is left empty."""
    versions, rows = result["versions"], result["rows"]
    cells = {"pass": "", "fail": "**fails**"}
    body = [
        [row["fault"], *(cells.get(c["status"], c["status"]) for c in row["checks"].values())]
        for row in rows
    ]
    return [
        (
            f"The embedded server, torch {versions['torch']}, Triton {versions['triton']}, SGLang "
            f"{versions['sglang']}, {result['date']}; `{(RESULTS / FILES['faults']).relative_to(ROOT)}` has what "
            "each check found."
        ),
        "",
        *markdown(["fault", *rows[0]["checks"]], body),
    ]


def checks_cells(model: str, name: str, run: dict) -> list[str]:
    """One server: its verdict's parts, each as the checks themselves sum it up."""
    checks = {id: c for id, c in run["checks"].items() if c["status"] != "skipped"}
    failed = [f"{id} ({c['status']})" for id, c in checks.items() if c["status"] != "pass"]
    kv, drafted = name.rsplit("-", 1)
    drafter = ", NGRAM" if run.get("drafter") == "NGRAM" else ", drafter" if drafted == "drafted" else ""

    def of(id: str, shown) -> str:
        return shown(checks[id]) if checks.get(id, {}).get("numbers") else "-"

    depths = of("recall", lambda c: f"{max(d['prompt_tokens'] for d in c['numbers']['depths']):,}")
    return [
        f"{model}, {KV_NAMES[kv]}{drafter}",
        f"{len(checks) - len(failed)} of {len(checks)}",
        ", ".join(failed) or "-",
        depths,
        checks.get("drafted-equality", {}).get("summary", "-"),
        of("agreement", lambda c: f"{c['numbers']['same_text']} of {c['numbers']['pairs']}, p {c['numbers']['p_value']:.2g}"),
        of("accept-length", lambda c: "{:.1f} to {:.1f}".format(*ends(c["numbers"]["workloads"].values()))),
    ]  # fmt: skip


def ends(values) -> tuple:
    return min(values), max(values)


def checks_block(results: dict[str, dict]) -> list[str]:
    """A row a server, by model, KV format and drafter."""
    body = [
        checks_cells(name, server, run)
        for name, result in results.items()
        for server, run in result["runs"].items()
    ]
    header = ["model, KV", "passed", "not passed", "longest recall, tokens", "drafted against undrafted",
              "same answers as BF16's, McNemar", "accept length"]  # fmt: skip
    return [*(f"{name}: {origin(r, f'h200_checks_{name}.json')}" for name, r in results.items()), "",
            *markdown(header, body)]  # fmt: skip


RENDER = {
    "bench": bench_block, "throughput": throughput_block, "sparse": sparse_block, "faults": faults_block,
}  # fmt: skip


def block(name: str, results: Path) -> str:
    files = sorted(results.glob(FILES[name]))
    if not files:
        return NOT_MEASURED
    found = [json.loads(file.read_text()) for file in files]
    if name == "checks":
        models = [file.stem.removeprefix("h200_checks_") for file in files]
        return "\n".join(checks_block(dict(zip(models, found, strict=True))))
    return "\n".join(RENDER[name](found[0]))


def fill(readme: str, results: Path) -> str:
    """The README with every block as the result files say.

    Raises: StaleReadme when a block's markers are not there exactly once.
    """
    for name in FILES:
        readme = readme_block.fill(readme, name, block(name, results))
    return readme


def main(argv=None) -> int:
    parser = readme_block.parser(__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    stale = "the README's tables are stale: run tests/bench/readme_table.py"
    return readme_block.update("readme_table", args, lambda readme: fill(readme, args.results), stale)


if __name__ == "__main__":
    sys.exit(main())
