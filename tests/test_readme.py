"""Every command in the README is run by a test."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import patch_trees
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

# Where each command is run. `make test` runs this file.
RUN_BY = {
    "make demo": "tests/e2e/test_readme_commands.py::test_make_demo",
    "make test": ".ci/run",
    "make bench": "test_make_bench_without_a_gpu",
    "fp4kv serve": "tests/e2e/test_readme_commands.py::test_serve",
    "fp4kv judge": "test_judge",
    "fp4kv explain": "test_explain",
    "fp4kv plan": "test_plan",
    "fp4kv check": "tests/e2e/test_check.py::test_readme_commands",
    "fp4kv patch status": "test_patch_commands",
    "fp4kv patch apply": "test_patch_commands",
    "fp4kv patch verify": "tests/test_patchset.py",
    "fp4kv patch revert": "test_patch_commands",
}


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_has_a_test():
    found = {c.removeprefix(".venv/bin/") for c in commands()}
    named = {next((k for k in RUN_BY if c.startswith(k)), c) for c in found}
    assert named == set(RUN_BY)
    for place in RUN_BY.values():
        file, _, test = place.partition("::")
        path = Path(__file__) if "/" not in file else ROOT / file
        assert path.is_file()
        assert (test or file if "/" not in file else test) in path.read_text()


def make_recipe(goal):
    """The commands `make GOAL` runs once .venv is set up, also when make runs this test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--dry-run", "-o", ".venv/.installed", goal],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout.splitlines()


def test_make_test_runs_all_three_kinds():
    assert make_recipe("test") == [
        '.venv/bin/python -m pytest -n 2 --dist loadfile -m "not interpreter and not e2e"',
        "TRITON_INTERPRET=1 .venv/bin/python -m pytest -n 2 --dist worksteal -m interpreter",
        ".venv/bin/python -m pytest -n 2 --dist loadfile -m e2e",
    ]


def test_make_bench_without_a_gpu():
    """The recipe's first line ends with 1 and says what it needs; no later line would run."""
    recipe = make_recipe("bench")
    assert recipe == [".venv/bin/python tests/bench/run.py", ".venv/bin/python tests/bench/readme_table.py"]
    done = subprocess.run(
        [sys.executable, *recipe[0].split()[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "make bench: needs an NVIDIA GPU that CUDA can use"


def test_speed_tables_are_those_of_the_result_files():
    done = subprocess.run(
        [sys.executable, "tests/bench/readme_table.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_judge():
    (command,) = [c.removeprefix(".venv/bin/fp4kv ") for c in commands() if "fp4kv judge" in c]
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.endswith("\nrefused: FP4-026 (untested)\n")


def test_explain():
    (command,) = (c for c in commands() if "fp4kv explain" in c)
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{command.split()[-1]} ")


def test_plan():
    (command,) = (c.removeprefix(".venv/bin/fp4kv ") for c in commands() if "fp4kv plan" in c)
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    tokens = 8_500_000_000 // (4 * 2 * 2 * 36 + 2 * 2 * 2 * 64) // 16 * 16
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("nvfp4, drafter fp8_e4m3"))
    assert row.split()[-2:] == [f"{tokens:,}", f"{tokens / 4096:,.2f}"]


def test_patch_commands(tmp_path):
    """On a copy of the touched files, in the README's order, ending where it began."""
    tree = patch_trees.touched_tree(tmp_path)
    for command, state in (("apply", "applied"), ("status", "applied"), ("revert", "pristine")):
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "patch", command, "--target", str(tree)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=os.environ,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(f"{state}: sglang 0.5.23")


@pytest.mark.parametrize("file", re.findall(r"`((?:configs|models|patches|sglang_fp4kv|launcher|tests)/[\w./-]*)`", README))
def test_every_path_exists(file):
    assert (ROOT / file).exists()


def test_every_phase_that_is_named_is_one():
    """Of tests/gpu/session.sh, which only a GPU runs."""
    phases = set(re.findall(r"^ {4}([a-z0-9-]+)\)", (ROOT / "tests/gpu/session.sh").read_text(), re.M))
    named = re.findall(r"tests/gpu/session\.sh\s+OUT_DIR\s+([a-z0-9\s-]+)`", README)
    assert len(named) >= 5 and {phase for text in named for phase in text.split()} <= phases
