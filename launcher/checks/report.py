"""The run as one HTML file with its plots inside; it opens without a network."""

from html import escape
from itertools import pairwise
from pathlib import Path

from launcher.checks.bounds import CUT_BOUNDS
from launcher.checks.table import describe_server, last_line
from launcher.equality import NEAR_TIE_BOUNDS

FILE = "report.html"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 260, 150, 40
_COLORS = {
    "pass": "#1a7f37",
    "fail": "#cf222e",
    "error": "#cf222e",
    "cut": "#9a6700",
    "not run": "#9a6700",
    "skipped": "#57606a",
}
_STYLE = """body{font:14px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#1f2328}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #d0d7de;padding:4px 8px;text-align:left;vertical-align:top}
svg text{font:12px system-ui,sans-serif;fill:#1f2328}summary{cursor:pointer}"""


def write(folder, verdict):
    """Writes the report beside the record."""
    (Path(folder) / FILE).write_text(render(verdict), "utf-8")


def render(verdict):
    """The report as HTML text; everything a server answered is escaped."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>fp4kv check</title>",
        f"<style>{_STYLE}</style><h1>fp4kv check</h1><p><b>{escape(last_line(verdict))}</b></p><ul>",
        *(f"<li>{escape(describe_server(name, facts))}</li>" for name, facts in verdict["servers"].items()),
        f"</ul><p>Suite {escape(verdict['suite'])}, seed {verdict['seed']}, {verdict['requests']} requests.</p>",
        "<table><tr><th>check<th>status<th>found</tr>",
        *(_row(id, check) for id, check in verdict["checks"].items()),
        "</table>",
        _accept_over_depth(verdict["checks"].get("accept-length")),
        _agreement(verdict["checks"].get("agreement")),
        f"<h2>Bounds</h2><p>{escape(_bounds())}</p></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _row(id, check):
    items = "".join(
        f"<li><b>{escape(item['name'])}</b> {escape(item['status'])} {escape(item['detail'])}</li>"
        for item in check["items"]
    )
    more = (
        f"<details><summary>{len(check['items'])} items</summary><ul>{items}</ul></details>" if items else ""
    )
    color = _COLORS[check["status"]]
    return (
        f"<tr><td>{escape(id)}<td style='color:{color}'><b>{escape(check['status'])}</b>"
        f"<td>{escape(check['summary'])}{more}</tr>"
    )


def _bounds():
    near = ", ".join(f"{name} {value:g}" for name, value in NEAR_TIE_BOUNDS.items())
    cut = ", ".join(f"{name} {value:g}" for name, value in CUT_BOUNDS.items())
    return (
        f"Two answers may part where the margin of the two best tokens is below: near-tie {near} (0 on a CPU);"
        f" where the prompt was cut into other chunks {cut}. Natural log units."
    )


def _svg(title, body):
    return (
        f"<h2>{escape(title)}</h2><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' height='{_HEIGHT}'"
        f" role='img' aria-label='{escape(title, quote=True)}'>{body}</svg>"
    )


def _text(x, y, text, anchor="start"):
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(str(text))}</text>"


def _line(x1, y1, x2, y2, color="#57606a", width=1):
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{color}' stroke-width='{width}'/>"


def _dot(x, y, color="#0969da"):
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{color}'/>"


def _accept_over_depth(check):
    """Accept length of every recall over its prompt's tokens, the mean of each depth joined."""
    rows = [row for row in (check or {}).get("numbers", {}).get("depths", []) if row["accept_length"]]
    if not rows:
        return ""
    left, right, top, bottom = 50, _WIDTH - 20, 20, _HEIGHT - _BOTTOM
    most_tokens = max(row["prompt_tokens"] for row in rows)
    most = max(row["accept_length"] for row in rows) * 1.1

    def place(tokens, length):
        return left + (right - left) * tokens / most_tokens, bottom - (bottom - top) * length / most

    body = [_line(left, bottom, right, bottom), _line(left, top, left, bottom)]
    for share in (0, 0.5, 1):
        x, y = place(share * most_tokens, share * most)
        body += [
            _text(x, bottom + 16, f"{share * most_tokens:,.0f}", "middle"),
            _text(left - 6, y + 4, f"{share * most:.1f}", "end"),
        ]
    means = [place(float(depth), mean) for depth, mean in check["numbers"]["fall"]["means"].items()]
    body += [_line(*a, *b, "#0969da", 2) for a, b in pairwise(means)]
    body += [
        _dot(*place(row["prompt_tokens"], row["accept_length"]), "#0969da" if row["right"] else "#cf222e")
        for row in rows
    ]
    body.append(
        _text((left + right) / 2, _HEIGHT - 6, "prompt tokens (red: the code was not recalled)", "middle")
    )
    return _svg("Accept length over depth", "".join(body))


_BARS = (
    ("target_right", "right, target"),
    ("control_right", "right, control"),
    ("unchanged", "rightness unchanged"),
    ("same_text", "same text"),
)


def _agreement(check):
    """Shares with their Wilson intervals."""
    numbers = (check or {}).get("numbers") or {}
    if not numbers:
        return ""
    left, right, step = _LEFT, _WIDTH - 70, 46
    body = []
    for row, (name, label) in enumerate(_BARS):
        y = 30 + step * row
        low, high = numbers[f"{name}_interval"]
        share = numbers[name] / numbers["pairs"]
        x = [left + (right - left) * value for value in (low, share, high)]
        body += [_text(left - 10, y + 4, label, "end"), _line(x[0], y, x[2], y, "#0969da", 3), _dot(x[1], y)]
        body.append(_text(right + 8, y + 4, f"{numbers[name]}/{numbers['pairs']}"))
    bottom = 30 + step * len(_BARS) - 14
    body.append(_line(left, bottom, right, bottom))
    body += [
        _text(left + (right - left) * share, bottom + 16, f"{share:g}", "middle") for share in (0, 0.5, 1)
    ]
    return _svg("Agreement with the control, 95% Wilson intervals", "".join(body))
