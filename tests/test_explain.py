"""`fp4kv explain`: every refusal at length, the list, unknown ids and JSON."""

import json
import re
import string
import subprocess
import sys
from dataclasses import replace

import pytest

from launcher import cli
from launcher.compat import PAIR
from launcher.examples import EXAMPLES
from launcher.explain import explain, nearest, render
from launcher.flags import parse
from launcher.launch import Launch
from launcher.modelfacts import read_facts
from launcher.probe import Machine, parse_gpu
from launcher.refusal import COLUMNS, TEXTS
from launcher.rules import RULES, judge


@pytest.fixture
def run(capsys):
    def call(*argv):
        code = cli.main(["explain", *argv])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("id", TEXTS)
def test_every_id_is_explained_without_a_field_left(run, id):
    code, out, err = run(id)
    assert (code, err) == (0, "")
    assert out.startswith(f"{id} {TEXTS[id].name}\n")
    assert not set("{}") & set(out)
    assert max(len(line) for line in out.splitlines()) <= COLUMNS
    for label in ("what:", "why:", "evidence:", "example:", "to do:"):
        assert out.count(f"\n  {label} ") == 1


@pytest.mark.parametrize("id", TEXTS)
def test_every_id_has_an_example_and_no_value_is_stale(id):
    text = TEXTS[id]
    parts = (text.says, text.why, text.evidence, text.help)
    fields = {name for part in parts for _, name, *_ in string.Formatter().parse(part) if name}
    assert EXAMPLES.get(id, {}).get("asked"), f"add an example of {id} to launcher/examples.py"
    assert set(EXAMPLES[id]) <= fields | {"asked"}


@pytest.mark.parametrize("id", [id for id in RULES if EXAMPLES.get(id, {}).get("asked", "").startswith("--")])
def test_what_an_example_asks_is_what_its_rule_refuses(id):
    """Where the models are to blame, at least SGLang's parser takes the flags."""
    asked = EXAMPLES[id]["asked"]
    argv = re.split(" for | with ", asked)[0].split()
    for flag, value in (("--model-path", "m"), ("--kv-cache-dtype", "nvfp4"), ("--speculative-algorithm", "DFLASH")):
        drafts = "speculative" in asked or flag != "--speculative-algorithm"
        argv += [flag, value] if flag not in argv and drafts else []
    flags = parse(argv)
    if "my-" in asked:
        return
    target, draft = (read_facts(str(PAIR / part), "--model-path") for part in ("target", "draft"))
    switches = tuple(re.findall(r"SGLANG_\w+", asked))
    machine = Machine(parse_gpu("sm_121" if id == "FP4-026" else "sm_90"), switches=switches)
    assert id in [found.id for found in judge(Launch(flags, target, draft, machine))]


def test_an_explanation_reads_as_written(monkeypatch):
    text = replace(
        TEXTS["FP4-016"],
        name="too-hot",
        says="{degrees:.0f} degrees are more than the 90 that hold",
        why="a GPU that is this hot lowers its clock, and the figures of a run are then those of the room",
        evidence="tests/bench/NOTES.md",
        help="open a window",
    )
    monkeypatch.setitem(TEXTS, "FP4-999", text)
    monkeypatch.setitem(EXAMPLES, "FP4-999", {"asked": "make bench", "degrees": "95"})
    assert render(explain("FP4-999")) == (
        "FP4-999 too-hot\n"
        "\n"
        "  what:     95 degrees are more than the 90 that hold\n"
        "\n"
        "  why:      a GPU that is this hot lowers its clock, and the figures of a run are then those of the\n"
        "            room\n"
        "\n"
        "  evidence: tests/bench/NOTES.md\n"
        "\n"
        "  example:  make bench\n"
        "\n"
        "  to do:    open a window"
    )


@pytest.mark.parametrize(
    ("id", "status"),
    [
        ("FP4-001", None),
        ("FP4-017", "fails"),
        ("FP4-026", "untested: --allow FP4-026 starts it all the same"),
        ("FP4-080", "untested, and refused in the server too"),
    ],
)
def test_the_status_of_a_launch_rule(run, id, status):
    assert explain(id)["status"] == status
    assert (f"\n  status:   {status}\n" in run(id)[1]) == (status is not None)


def test_a_field_without_an_example_is_shown_by_its_name(monkeypatch):
    monkeypatch.setitem(TEXTS, "FP4-999", replace(TEXTS["FP4-016"], says="{free_gb:.1f} GB is free"))
    assert "  what:     <free gb> GB is free\n" in render(explain("FP4-999"))


def test_without_an_id_all_are_listed(run):
    code, out, _ = run()
    assert code == 0
    assert out.splitlines() == [f"{id}  {text.name}" for id, text in sorted(TEXTS.items())]


def test_an_id_may_be_typed_in_lower_case(run):
    assert run("fp4-010") == run("FP4-010")


@pytest.mark.parametrize(
    ("typed", "near"),
    [("FP4-000", "FP4-001"), ("14", "FP4-014"), ("FP4-9999999", max(TEXTS)), ("unpatched", "FP4-016")],
)
def test_an_unknown_id_is_bad_usage_and_names_the_nearest(run, typed, near):
    assert run(typed) == (2, "", f"fp4kv explain: there is no {typed}; nearest is {near}\n")


def test_nothing_typed_has_a_nearest_id_too():
    assert nearest("") in TEXTS


def test_json(run):
    code, out, _ = run("FP4-010", "--json")
    found = json.loads(out)
    assert (code, found["version"]) == (0, 1)
    assert [list(entry) for entry in found["explained"]] == [
        ["id", "name", "what", "why", "evidence", "status", "example", "help"]
    ]
    assert found["explained"] == [explain("FP4-010")]
    assert [entry["id"] for entry in json.loads(run("--json")[1])["explained"]] == sorted(TEXTS)


def test_explaining_needs_no_torch():
    code = (
        "import sys; from launcher.cli import main; main(['explain', 'FP4-010']);"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'sglang', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
