"""Every check with every fault on, on the embedded server.

usage: python -m tests.e2e.fault_matrix OUT.json [--faults NAME,..] [--only CHECK,..] [--keep FOLDER]

Starts an undrafted and a drafted server of the shipped pair, switches one fault after another on in the
drafted one (fp4kv_faults.py), and asks all of `fp4kv check`: some minutes a fault on two idle cores. OUT.json is
written after each, so that a run that was ended goes on with --faults, and two runs can share the work. Exit
code 3 when no check fails with a fault, or a sound server fails one. tests/bench/readme_table.py writes the
README's table from tests/bench/results/faults.json.
"""

import argparse
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from launcher.checks import runner
from launcher.checks.equal import DRAFTED
from launcher.checks.registry import CHECKS
from launcher.demo import commit
from launcher.probe import installed_versions
from tests.e2e.faults import (
    NOISE_TOKENS,
    faulty_server,
    options,
    undrafted_server,
    unsure_prompts,
)
from tests.e2e.plugin.fp4kv_faults import FAULTS, SOUND

AGREEMENT, ANSWERS = "agreement", 8
NOISE = f"{DRAFTED} of noise"
COLUMNS = (*CHECKS, NOISE)
NOT_ASKED = {"status": "not asked", "summary": "", "items": []}
NONE = "none"
NAMES = (NONE, *filter(None, SOUND), *FAULTS)
OF_NOISE = {"only": (DRAFTED,), "max_tokens": NOISE_TOKENS}


def record(undrafted, folder):
    """What the undrafted server answers to the prompts of drafted-equality: its folders by column."""
    folders = {column: folder / f"undrafted {column}" for column in (DRAFTED, NOISE)}
    runner.run(options(undrafted, only=(DRAFTED,)), folders[DRAFTED])
    with unsure_prompts():
        runner.run(options(undrafted, **OF_NOISE), folders[NOISE])
    return folders


def ask(name, only, target, undrafted, recorded, folder):
    """A row of the matrix: what each column's check found, of the columns in ``only``."""
    began = time.monotonic()

    def checks(run, **more):
        return runner.run(options(target, **more), folder / f"{name} {run}")["checks"]

    found = dict.fromkeys(COLUMNS, NOT_ASKED)
    most = tuple(id for id in CHECKS if id in only and id != AGREEMENT)
    if most:
        second = {"undrafted": str(recorded[DRAFTED]), "one_chunk": undrafted.url}
        found |= checks("most", **second, only=most, floors=(("", 3.0),))
    if AGREEMENT in only:
        found |= checks(AGREEMENT, control=undrafted.url, answers=ANSWERS, only=(AGREEMENT,))
    if NOISE in only:
        with unsure_prompts():
            noise = checks(NOISE, undrafted=str(recorded[NOISE]), **OF_NOISE)
        found[NOISE] = noise[DRAFTED]
    return {
        "fault": name,
        "seconds": round(time.monotonic() - began),
        "checks": {column: _cell(found[column]) for column in COLUMNS},
    }


def _cell(check):
    """A check's verdict, and what it says of each item that did not pass."""
    items = [
        f"{item['name']}: {item['status']}, {item['detail']}"
        for item in check["items"]
        if item["status"] != "pass"
    ]
    return {"status": check["status"], "summary": check["summary"], "items": items}


def failed(row):
    return [column for column, check in row["checks"].items() if check["status"] == "fail"]


def run(out, names, only, folder):
    """Asks with each of ``names`` on, and puts its row into ``out`` in place of the one on file there."""
    mine = []
    with undrafted_server(folder) as undrafted:
        recorded = record(undrafted, folder)
        with faulty_server(folder) as (target, switch):
            for name in names:
                switch("" if name == NONE else name)
                mine.append(ask(name, only, target, undrafted, recorded, folder))
                print(
                    f"{name}: {mine[-1]['seconds']} s, fails {failed(mine[-1])}",
                    file=sys.stderr,
                    flush=True,
                )
                write(out, mine[-1])
    return mine


def write(out, row):
    """Puts ``row`` into what is on file now, which another run may have added to."""
    on_file = json.loads(out.read_text())["rows"] if out.exists() else []
    found = {row["fault"]: row for row in on_file} | {row["fault"]: row}
    rows = [found[name] for name in NAMES if name in found]
    result = {
        "date": str(date.today()),
        "commit": commit(),
        "versions": installed_versions(),
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--faults",
        default=",".join(NAMES),
        metavar="NAME,..",
        help="others stay as on file",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep every run and both logs there")
    parser.add_argument("--only", default=",".join(COLUMNS), metavar="CHECK,..", help="others are not asked")
    args = parser.parse_args(argv)
    names, only = args.faults.split(","), args.only.split(",")
    for flag, given, known in (("--faults", names, NAMES), ("--only", only, COLUMNS)):
        unknown = set(given) - set(known)
        if unknown:
            parser.error(f"{flag} {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    if args.keep:
        args.keep.mkdir(parents=True)
        rows = run(args.out, names, only, args.keep)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = run(args.out, names, only, Path(folder))
    wrong = [row["fault"] for row in rows if bool(failed(row)) != (row["fault"] in FAULTS)]
    for name in wrong:
        what = "no check fails" if name in FAULTS else "a sound server fails a check"
        print(f"fault_matrix: {name}: {what}", file=sys.stderr)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
