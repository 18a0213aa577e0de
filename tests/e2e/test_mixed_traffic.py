"""The long run's script against the embedded server: 24 seconds of mixed traffic, in pages of 64 tokens."""

import json

import pytest

from launcher.demo import PAIR
from tests.gpu import long_run

pytestmark = pytest.mark.e2e

ARGS = (
    "--embedded", "--minutes", "0.4", "--requests", "4", "--pool", "448", "--context", "448", "--chunk", "128",
    "--long", "110", "--written", "24", "--sample", "6", "--page-size", "64",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(exit code, what was written)"""
    folder = tmp_path_factory.mktemp("long-run")
    out = folder / "long.json"
    code = long_run.main([str(PAIR / "target"), str(PAIR / "draft"), str(out), "--logs", str(folder), *ARGS])
    assert out.exists(), f"exit code {code}; the server's log is in {folder}"
    return code, json.loads(out.read_text())


def test_nothing_failed(ran):
    code, found = ran
    assert [name for name, verdict in found["verdicts"].items() if not verdict["passed"]] == []
    assert code == 0 and all(found["asked"].values())


def test_answers_of_the_sample_are_equal_outright(ran):
    _, found = ran
    assert found["sample"]["verdicts"] == {"equal": found["sample"]["asked"], "near-tie": 0, "different": 0}
