"""The exported flag table and its parser."""

import os
import subprocess
import sys

import pytest

from launcher.flags import TABLE, UsageError, parse

BASE = ["--model-path", "m"]


def test_table_is_what_the_installed_sglang_accepts():
    code = "from launcher.flags_export import dump, export; print(dump(export()), end='')"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert TABLE.read_text() == out.stdout[out.stdout.index("{") :]


def test_sglangs_fields_and_defaults():
    flags = parse([*BASE, "--kv-cache-dtype", "nvfp4", "--tp", "2"])
    assert (flags.kv_cache_dtype, flags.tp_size, flags.page_size) == ("nvfp4", 2, None)
    assert flags.disaggregation_mode == "null"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*BASE, "--kv-cach-dtype", "nvfp4"], "unknown flag '--kv-cach-dtype'; nearest is --kv-cache-dtype"),
        ([*BASE, "--kv-cache-dtype", "nvfp5"], "invalid choice: 'nvfp5'"),
        ([*BASE, "--tp-size", "two"], "invalid int value: 'two'"),
        ([*BASE, "--context-length", "1.5Ki"], "invalid human_int value: '1.5Ki'"),
        ([*BASE, "--max-total-tokens", "many"], "invalid human_int value: 'many'"),
        ([*BASE, "stray"], "unexpected argument 'stray'"),
        (["--model-path"], "expected one argument"),
        ([], "required: --model-path"),
        ([*BASE, "--config", "f.yaml"], "--config is not read here"),
        ([*BASE, "--conf=f.yaml"], "--config is not read here"),
        ([*BASE, "--", "--tp", "2"], "'--' is written once"),
        (["--help"], "python -m sglang.launch_server --help"),
    ],
)
def test_bad_flags_are_named(argv, message):
    with pytest.raises(UsageError, match=message):
        parse(argv)


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("4k", 4000), ("25.6k", 25600), ("4Ki", 4096), ("1M", 10**6)]
)
def test_numbers_are_read_as_sglang_reads_them(text, number):
    from sglang.srt.utils.common import human_readable_int

    assert parse([*BASE, "--context-length", text]).context_length == number
    assert human_readable_int(text) == number


def test_parsing_needs_no_torch():
    code = (
        "import sys; from launcher.flags import parse; parse(['--model-path', 'm']);"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'sglang', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_fp4_draft_dtype_reaches_the_rules():
    assert parse([*BASE, "--speculative-draft-kv-cache-dtype", "nvfp4"]).speculative_draft_kv_cache_dtype
