# SPDX-License-Identifier: Apache-2.0
"""Writes the prompts of `fp4kv check`: launcher/checks/suites/{pair,chat}.json.

    python models/check_suites.py [--check]

`pair` is in the small language of the shipped pair, drawn from its corpus with a seed of its own, so
that the prompts were not in the training rows of another seed. `chat` is for real chat models. Both
hold every prompt with what its answer must contain. --check writes nothing and ends with 1 where a file
differs.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import check_suite_chat
import corpus

SUITES = Path(__file__).parent.parent / "launcher" / "checks" / "suites"
SEED = 20261201
AGREEMENT = {"arithmetic": 14, "list": 10, "code": 10, "chat": 10, "non_english": 6, "thinking": 6, "tool": 8}
WORKLOADS = {
    "chat": "chat",
    "code": "code",
    "json": "tool",
    "non-english": "non_english",
    "thinking": "thinking",
}
EACH = 4


def draw(kind, r, count, taken):
    """`count` exchanges of a corpus kind whose questions were not drawn before."""
    found = []
    while len(found) < count:
        exchange = corpus.SHORT_KINDS[kind](r)
        if exchange.user not in taken:
            taken.add(exchange.user)
            found.append(exchange)
    return found


def item(id, exchange):
    entry = {"id": id, "user": exchange.user}
    if exchange.kind == "tool":
        entry |= {
            "tools": [t["function"]["name"] for t in exchange.tools],
            "expect": json.loads(exchange.check),
        }
    else:
        entry["expect"] = exchange.check
    return entry


def numbered(kind, label, r, count, taken):
    return [item(f"{label}-{n}", e) for n, e in enumerate(draw(kind, r, count, taken), 1)]


def pair():
    """The suite of the shipped pair."""
    r, taken = random.Random(SEED), set()
    products = [(17, 23), (12, 12), (29, 14), (8, 25), (21, 19), (30, 7)]
    arithmetic = [
        {"id": f"{a}x{b}", "user": f"What is {a} x {b}?", "expect": str(a * b)} for a, b in products
    ]
    taken |= {entry["user"] for entry in arithmetic}
    tool_calls = []
    for name in sorted(corpus.TOOLS):
        exchange = corpus.tool_call(r, name)
        taken.add(exchange.user)
        tool_calls.append(item(name, exchange))
    return {
        "name": "pair",
        "seed": SEED,
        "max_tokens": 96,
        "tools": corpus.TOOLS,
        "arithmetic": arithmetic,
        "tool-call": tool_calls,
        "recall": {
            "plant": "The code is {code}.",
            "question": "\n\nWhat is the code?",
            "filler": sorted({corpus.sentence(r) for _ in range(400)}),
        },
        "workloads": {name: numbered(kind, name, r, EACH, taken) for name, kind in WORKLOADS.items()},
        "agreement": [
            entry
            for kind, count in AGREEMENT.items()
            for entry in numbered(kind, kind.replace("_", "-"), r, count, taken)
        ],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    different = []
    for suite in (pair(), check_suite_chat.chat()):
        file = SUITES / f"{suite['name']}.json"
        text = json.dumps(suite, indent=1, ensure_ascii=False) + "\n"
        if not args.check:
            file.write_text(text, "utf-8")
        elif not file.exists() or file.read_text("utf-8") != text:
            different.append(str(file))
    if different:
        sys.exit(f"not what models/check_suites.py writes: {', '.join(different)}")


if __name__ == "__main__":
    main()
