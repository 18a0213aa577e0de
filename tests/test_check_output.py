"""What a run shows and keeps: progress, table, JSON, exit codes, the folder and its report."""

import html.parser
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer

from launcher import cli
from launcher.checks import command, report, runner, table
from launcher.checks.registry import CHECKS

ROOT = Path(__file__).parent.parent
FACTS = {
    "url": "http://h:1", "model": "m", "version": "0.5.23", "kv_dtype": "nvfp4", "kv_format": "nvfp4", "device": "cuda",
    "context_tokens": 131072, "chunk_tokens": 8192, "pool_tokens": 1979584, "running_requests": 32, "drafter": "DFLASH",
    "prefix_cache": True,
}  # fmt: skip


def verdict(**statuses):
    checks = {
        id.replace("_", "-"): {
            "check": id,
            "status": status,
            "summary": f"{id} found",
            "items": [],
            "numbers": {},
        }
        for id, status in statuses.items()
    }
    control = {
        **FACTS,
        "url": "http://h:2",
        "kv_dtype": None,
        "drafter": "",
        "pool_tokens": None,
        "model": None,
    }
    return {
        "verdict": "fail" if "fail" in statuses.values() else "incomplete",
        "checks": checks,
        "servers": {"target": FACTS, "control": control},
    }


GOLDEN = """\
target: http://h:1, m, KV nvfp4, drafter DFLASH, context 131,072, pool 1,979,584 tokens
control: http://h:2, model unknown, KV unknown, no drafter, context 131,072

check             status   found
arithmetic        pass     6 of 6 right
recall            fail     5 of 9 right; 60000@0.5: expected '4-7-1-9', answered 'The code is lost in the text
                           above'; 110000@0.1: expected '1-2-3-4', answered ''; 2 more
soak              not run  soak found
degenerate-output skipped  degenerate_output found

FAIL: 1 of 3 checks passed (degenerate-output left out); fail: recall; not run: soak"""


def test_the_table_for_a_person():
    found = verdict(arithmetic="pass", recall="fail", soak="not run", degenerate_output="skipped")
    found["checks"]["arithmetic"]["summary"] = "6 of 6 right"
    found["checks"]["recall"]["summary"] = (
        "5 of 9 right; 60000@0.5: expected '4-7-1-9', answered 'The code is lost in the text above'; 110000@0.1:"
        " expected '1-2-3-4', answered ''; 2 more"
    )
    assert table.render(found) == GOLDEN


@pytest.mark.parametrize(
    ("statuses", "line"),
    [
        ({"arithmetic": "pass", "soak": "pass"}, "PASS: all 2 checks asked passed"),
        ({"arithmetic": "pass", "soak": "skipped"}, "PASS: all 1 checks asked passed (soak left out)"),
        ({"arithmetic": "pass", "soak": "cut"}, "INCOMPLETE: 1 of 2 checks passed; cut: soak"),
        ({"soak": "skipped"}, "INCOMPLETE: 0 of 0 checks passed (soak left out); nothing was asked"),
    ],
)
def test_the_last_line(statuses, line):
    assert table.last_line(verdict(**statuses)) == line


class Parsed(html.parser.HTMLParser):
    """Tags in order, and every attribute that could fetch something."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "xlink:href")]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The folder, output and exit code of one run of the command against three servers."""
    folder = tmp_path_factory.mktemp("check") / "run"
    secrets = {"api_key": "s3cret", "launch_command": ["--api-key=s3cret"], "internal_states": [{"admin_api_key": "s3cret"}]}
    servers = secrets, {"kv_cache_dtype": "bf16"}, {"speculative_algorithm": None, "chunked_prefill_size": 8192}
    with (
        FakeServer(info=servers[0]) as target,
        FakeServer(info=servers[1]) as control,
        FakeServer(info=servers[2]) as undrafted,
    ):
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "check", "--url", target.url, "--control", control.url,
             "--undrafted", undrafted.url, "--suite", "pair", "--depths", "300,900", "--out", str(folder),
             "--profile", "configs/pair.yaml", "--prompts", "2", "--json"],
            cwd=ROOT, capture_output=True, text=True, env=os.environ | {command.KEY_VARIABLE: "s3cret"},
        )  # fmt: skip
        assert target.authorization == control.authorization == "Bearer s3cret"
    return folder, done


def test_a_run_of_the_command(full):
    folder, done = full
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["schema_version"] == runner.SCHEMA_VERSION and shown["verdict"] == "pass"
    assert list(shown["checks"]) == list(CHECKS)
    assert "PASS: all 13 checks asked passed" in done.stderr
    assert all(f"s] {id} " in done.stderr for id in CHECKS)  # a progress line for each
    assert f"everything is in {folder}" in done.stderr
    assert {file.name for file in folder.iterdir()} == {
        "run.json",
        "exchanges.jsonl",
        "verdict.json",
        "report.html",
    }


def test_everything_is_on_file_but_the_key(full):
    folder, _ = full
    about = json.loads((folder / "run.json").read_text())
    assert about["seed"] and about["cache_salt"] and about["versions"]["sglang"] == "0.5.23"
    assert about["server_info"]["target"]["kv_cache_dtype"] == "nvfp4"
    assert about["server_info"]["target"]["launch_command"] == ["--api-key=***"]
    assert about["options"]["floors"] == [["", 5.0]]
    exchanges = [
        json.loads(line)["exchange"] for line in (folder / "exchanges.jsonl").open() if '"exchange"' in line
    ]
    for exchange in exchanges:
        assert exchange["request"]["temperature"] == 0 and exchange["response"]["usage"] is not None
        assert "prompt_token_ids" not in exchange["response"]["choices"][0]
    assert all("s3cret" not in file.read_text() for file in folder.iterdir())


def test_the_report_opens_without_a_network(full):
    folder, _ = full
    text = (folder / report.FILE).read_text()
    parsed = Parsed(text)
    assert parsed.fetched == [] and "script" not in parsed.tags and "url(" not in text
    assert parsed.tags.count("svg") == 2 and parsed.tags.count("circle") == 6 + 4
    assert "Accept length over depth" in text and "95% Wilson intervals" in text
    assert "nvfp4 2 (0 on a CPU)" in text  # the bounds that were used


def test_what_a_server_answers_is_escaped_in_the_report(tmp_path):
    evil = "<script>alert(1)</script>"
    with FakeServer(answer=lambda *_: evil) as target:
        code = cli.main(
            [
                "check",
                "--url",
                target.url,
                "--suite",
                "pair",
                "--only",
                "arithmetic",
                "--out",
                str(tmp_path / "r"),
            ]
        )
    assert code == 3
    text = (tmp_path / "r" / report.FILE).read_text()
    assert evil not in text and "&lt;script&gt;" in text


def test_rescore_gives_the_same_verdict_and_exit_code(full, capsys):
    folder, done = full
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert cli.main(["check", "--rescore", str(folder), "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out) == json.loads(done.stdout) and "the same verdict as on file" in out.err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_rescore_judges_the_answers_and_not_the_verdict_on_file(full, tmp_path, capsys):
    folder, _ = full
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        lines = file.read_text().splitlines(keepends=True)
        wrong = (
            line.replace("It is 391.", "It is 392.") if '"server": "target"' in line else line
            for line in lines
        )
        (copy / file.name).write_text("".join(wrong))
    assert cli.main(["check", "--rescore", str(copy)]) == 3
    out = capsys.readouterr()
    assert (
        "expected '391', answered 'It is 392.'" in out.out
        and "NOT the verdict on file, which is pass" in out.err
    )


def test_rescore_tells_another_wording_from_another_verdict(full, tmp_path, capsys):
    folder, _ = full
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    verdict = json.loads((copy / "verdict.json").read_text())
    verdict["checks"]["arithmetic"]["summary"] = "all right"
    (copy / "verdict.json").write_text(json.dumps(verdict))
    assert cli.main(["check", "--rescore", str(copy)]) == 0
    assert "the same verdict as on file, check by check; what is said of them differs" in capsys.readouterr().err
    verdict["checks"]["arithmetic"]["status"] = "fail"
    (copy / "verdict.json").write_text(json.dumps(verdict))
    assert cli.main(["check", "--rescore", str(copy)]) == 0
    assert "NOT the verdict on file, which is pass" in capsys.readouterr().err


@pytest.mark.parametrize("stored", [[], None, "x", {"verdict": "pass", "checks": ["a"]}, {"checks": {"a": "pass", "b": None}}])
def test_rescore_beside_a_verdict_that_is_none(full, tmp_path, capsys, stored):
    folder, _ = full
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "verdict.json").write_text(json.dumps(stored))
    assert cli.main(["check", "--rescore", str(copy)]) == 0
    said = "NOT the verdict on file" if isinstance(stored, dict) else "no verdict is on file there"
    assert said in capsys.readouterr().err


def test_a_skipped_check_is_listed_and_leaves_the_exit_code(tmp_path, capsys):
    with FakeServer() as target:
        base = ["check", "--url", target.url, "--suite", "pair", "--only", "arithmetic,agreement"]
        assert cli.main([*base, "--out", str(tmp_path / "a")]) == 3
        assert "INCOMPLETE: 1 of 2 checks passed; not run: agreement" in capsys.readouterr().out
        assert cli.main([*base, "--skip", "agreement", "--out", str(tmp_path / "b")]) == 0
        assert "PASS: all 1 checks asked passed (agreement left out)" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_rewrites_its_line_on_a_terminal_only():
    now = iter(range(0, 100, 4))
    shown = Terminal()
    progress = command.Progress(shown, lambda: next(now))
    for asked in (1, 2):
        progress("recall", asked, "target 300@0.5")
    assert shown.getvalue().count("\r") == 2 and "\n" not in shown.getvalue()
    lines = io.StringIO()
    progress = command.Progress(lines, lambda: next(now))
    for asked in range(4):
        progress("recall", asked, "")
    assert [line.split("s] ")[1] for line in lines.getvalue().splitlines()] == ["recall 0", "recall 3"]


def test_an_interrupt_leaves_what_was_asked(tmp_path, capsys):
    def interrupt(check, asked, what):
        if asked == 2:
            raise KeyboardInterrupt

    with FakeServer() as target, pytest.raises(KeyboardInterrupt):
        runner.run(
            command.Options(url=target.url, suite="pair", only=("arithmetic", "recall")),
            tmp_path / "r",
            progress=interrupt,
        )
    assert cli.main(["check", "--rescore", str(tmp_path / "r")]) == 3
    out = capsys.readouterr().out
    assert "arithmetic        error    the run ended in the middle of it; until then: 2 of 2 right" in out
    assert "recall            not run  the run ended before it" in out


def test_the_suites_are_what_their_script_writes():
    done = subprocess.run(
        [sys.executable, "models/check_suites.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_judging_needs_no_torch():
    code = "import sys, launcher.checks.command; print(sorted({'torch', 'sglang', 'scipy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert done.stdout == "[]\n", done.stderr
