"""What `make demo` shows of three servers' answers, and whether they are what the table says."""

from launcher.equality import compare
from launcher.expected import PACKED_POOL


def not_as_asked(reports):
    """Where the servers' own reports contradict the table's headings; empty when nowhere."""
    problems = []
    for name, report in reports.items():
        if report is None:
            problems.append(f"({name}) does not report what it runs")
            continue
        pool, drafted = report["target"]["class"], report["draft"] is not None
        if (pool == PACKED_POOL) != (name != "a"):
            problems.append(f"({name}) serves with {pool}")
        if drafted != (name == "c"):
            problems.append(f"({name}) runs {'a' if drafted else 'no'} drafter")
    return problems


def judge(prompts, results, bound):
    """Rows of the table: each prompt's tokens three ways, and how (c) compares with (b)."""
    rows = []
    for index, prompt in enumerate(prompts):
        a, b, c = (results[name][0][index] for name in "abc")
        rows.append(
            {
                "prompt": prompt["name"],
                "prompt_tokens": b.prompt_tokens,
                "tokens": {"a": a.tokens, "b": b.tokens, "c": c.tokens},
                "text": {"a": a.text, "b": b.text, "c": c.text},
                "b_c": compare(b.tokens, c.tokens, b.gaps, bound),
                "a_b": compare(a.tokens, b.tokens, a.gaps, bound),
                "accept_length": c.accept_length,
            }
        )
    return rows


def print_table(rows, reports):
    """The table for a person: answers first, then the comparison, then the pools."""
    for row in rows:
        print(f"\n{row['prompt']} ({row['prompt_tokens']} prompt tokens)")
        for name in "abc":
            print(f"  ({name}) {row['text'][name]!r}")
            print(f"      {' '.join(map(str, row['tokens'][name]))}")
    print(f"\n{'prompt':<16}{'tokens':>7}  {'(b) and (c)':<32}{'accept length':>14}  (a) and (b)")
    for row in rows:
        length = row["accept_length"]
        print(
            f"{row['prompt']:<16}{len(row['tokens']['b']):>7}  {row['b_c']!s:<32}"
            f"{'-' if length is None else format(length, '.2f'):>14}  {row['a_b']!s}"
        )
    lengths = [row["accept_length"] for row in rows if row["accept_length"] is not None]
    if lengths:
        print(f"mean accept length {sum(lengths) / len(lengths):.2f}")
    print("\nKV bytes a token:")
    for name, report in reports.items():
        target, draft = report["target"], report["draft"]
        line = f"  ({name}) target {target['bytes_per_token']} ({target['dtype']}, {target['layers']} layers)"
        if draft:
            line += f", drafter {draft['bytes_per_token']} ({draft['dtype']}, {draft['layers']} layers)"
        print(f"{line}; {report['max_total_num_tokens']} tokens")
