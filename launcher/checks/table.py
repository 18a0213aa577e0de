"""The verdict as a table for a terminal."""

import textwrap

from launcher.checks.result import PASS, SKIPPED

_WIDTH = 110


def describe_server(name, facts):
    """One line of what a server says about itself."""
    parts = [facts["url"], facts["model"] or "model unknown"]
    parts.append(f"KV {facts['kv_dtype'] or 'unknown'}")
    drafter = {None: "drafter unknown", "": "no drafter"}.get(facts["drafter"], f"drafter {facts['drafter']}")
    parts.append(drafter)
    if facts["context_tokens"]:
        parts.append(f"context {facts['context_tokens']:,}")
    if facts["pool_tokens"]:
        parts.append(f"pool {facts['pool_tokens']:,} tokens")
    return f"{name}: {', '.join(parts)}"


def render(verdict):
    """The whole table; the last line says what the exit code means."""
    lines = [describe_server(name, facts) for name, facts in verdict["servers"].items()]
    lines += ["", f"{'check':<18}{'status':<9}found"]
    for id, check in verdict["checks"].items():
        found = textwrap.wrap(check["summary"], _WIDTH - 27) or [""]
        lines.append(f"{id:<18}{check['status']:<9}{found[0]}")
        lines += [" " * 27 + line for line in found[1:]]
    return "\n".join([*lines, "", last_line(verdict)])


def last_line(verdict):
    by_status = {}
    for id, check in verdict["checks"].items():
        by_status.setdefault(check["status"], []).append(id)
    skipped = by_status.pop(SKIPPED, [])
    passed = by_status.pop(PASS, [])
    asked = len(passed) + sum(map(len, by_status.values()))
    left_out = f" ({', '.join(skipped)} left out)" if skipped else ""
    if not by_status and passed:
        return f"PASS: all {asked} checks asked passed{left_out}"
    named = "; ".join(f"{status}: {', '.join(ids)}" for status, ids in by_status.items())
    word = "FAIL" if verdict["verdict"] == "fail" else "INCOMPLETE"
    return f"{word}: {len(passed)} of {asked} checks passed{left_out}; {named or 'nothing was asked'}"
