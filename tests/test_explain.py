"""`fp4kv explain`: every refusal at length, the list, unknown ids and JSON."""

import json
import string
import subprocess
import sys

import pytest

from launcher import cli
from launcher.examples import EXAMPLES
from launcher.explain import COLUMNS, explain, nearest, render
from launcher.refusal import TEXTS, Text


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
def test_every_id_has_an_example_with_its_fields(id):
    text = TEXTS[id]
    parts = (text.says, text.why, text.evidence, text.help)
    fields = {name for part in parts for _, name, *_ in string.Formatter().parse(part) if name}
    assert id in EXAMPLES, f"add an example of {id} to launcher/examples.py"
    assert set(EXAMPLES[id]) == fields | {"asked"}


def test_an_explanation_reads_as_written(run):
    assert run("FP4-014")[1] == (
        "FP4-014 head-dim-without-whole-blocks\n"
        "\n"
        "  what:     head_dim 72 is not a multiple of 16\n"
        "\n"
        "  why:      NVFP4 keeps one scale for each 16 elements along head_dim, and a block cannot span two\n"
        "            heads\n"
        "\n"
        "  evidence: sglang_fp4kv/formats.py\n"
        "\n"
        "  example:  --model-path my-model with head_dim 72\n"
        "\n"
        "  to do:    --kv-cache-dtype fp8_e4m3\n"
    )


def test_a_field_without_an_example_is_shown_by_its_name(monkeypatch):
    monkeypatch.setitem(TEXTS, "FP4-999", Text("a-name", "{free_gb:.1f} GB is free", "w", "e", "h"))
    assert "  what:     <free gb> GB is free\n" in render(explain("FP4-999"))


def test_without_an_id_all_are_listed(run):
    code, out, _ = run()
    assert code == 0
    assert out.splitlines() == [f"{id}  {text.name}" for id, text in TEXTS.items()]


def test_an_id_may_be_typed_in_lower_case(run):
    assert run("fp4-010") == run("FP4-010")


@pytest.mark.parametrize(
    ("typed", "near"),
    [("FP4-000", "FP4-001"), ("14", "FP4-014"), ("FP4-9999999", list(TEXTS)[-1]), ("unpatched", "FP4-016")],
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
        ["id", "name", "what", "why", "evidence", "example", "help"]
    ]
    assert found["explained"] == [explain("FP4-010")]
    assert [entry["id"] for entry in json.loads(run("--json")[1])["explained"]] == list(TEXTS)


def test_explaining_needs_no_torch():
    code = (
        "import sys; from launcher.cli import main; main(['explain', 'FP4-010']);"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'sglang', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
