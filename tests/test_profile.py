"""Profiles: the shipped ones load and say what proves them; every mistake is named with its line."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from launcher.compat import PAIR, PATCHED
from launcher.flags import UsageError, parse
from launcher.judge import decide, judge
from launcher.probe import Machine, parse_gpu
from launcher.profile import Profile, load_profile
from launches import HYBRID, launch, machine
from test_rules import dflash2, packed

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
GOOD = {
    "name": "mine",
    "gpu": "sm_121",
    "gpu_memory_gb": "121.5",
    "gpus": "2",
    "flags": "\n  - --kv-cache-dtype nvfp4\n  - --tp-size 2",
    "result": "untested",
}


def write(path, text):
    file = path / "p.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def lines(**changes):
    keys = {**GOOD, **changes}
    return "".join(f"{key}: {value}\n" for key, value in keys.items() if value is not None)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_profiles_load_and_name_what_proves_them(file):
    profile = load_profile(file)
    assert profile.name == file.stem
    assert profile.tp <= profile.gpus
    assert "--model-path" in profile.flags or "--model-path" in profile.note
    if profile.result != "untested":
        assert json.loads(Path(profile.result).read_text())["failed"] == []


def test_the_machines_that_were_asked_for():
    by_name = {file.stem: load_profile(file) for file in CONFIGS}
    assert set(by_name) == {"b200", "dgx-spark-2x", "h200", "pair", "rtx-5090"}
    spark = by_name["dgx-spark-2x"]
    flags = parse(["--model-path", "m", *spark.flags])
    assert (spark.gpu, spark.gpus, spark.tp, flags.nnodes) == ("sm_121", 2, 2, 2)
    assert (int(flags.context_length), flags.max_running_requests) == (131072, 32)
    rtx = by_name["rtx-5090"]
    flags = parse(["--model-path", "m", *rtx.flags])
    assert (rtx.gpu, int(flags.context_length), flags.speculative_algorithm) == ("sm_120", 98304, None)
    assert by_name["h200"].gpu == "sm_90"
    assert by_name["b200"].gpu == "sm_100"


@pytest.mark.parametrize(
    ("name", "draft", "without"),
    [("rtx-5090", None, ()), ("dgx-spark-2x", dflash2(), ()), ("dgx-spark-2x", {}, ()), ("dgx-spark-2x", {}, ("FP4-103",))],
)
def test_a_note_names_what_its_target_needs_allowed(tmp_path, name, draft, without):
    """Of a hybrid with NVFP4 weights, which the two profiles are for; ``without`` one of them it is refused."""
    profile = load_profile(ROOT / "configs" / f"{name}.yaml")
    allow = tuple(id for id in re.findall(r"--allow (FP4-\d+)", profile.note) if id not in without)
    folders = {"target": HYBRID, "tensors": packed()} | ({} if draft is None else {"draft": draft})
    asked = launch(tmp_path, list(profile.flags), on=machine(profile.gpu), **folders)
    verdict = decide(asked, allow=allow)
    assert [r.id for r in verdict.refusals] == list(without)
    assert {r.id for r in verdict.allowed} == set(allow)


def test_the_pair_is_what_its_result_measured():
    pair = load_profile(ROOT / "configs" / "pair.yaml")
    result = json.loads(Path(pair.result).read_text())
    flags = parse(pair.flags)
    assert result["command"][3:5] == [flags.model_path, flags.speculative_draft_model_path]
    report = result["reports"]["nvfp4 True graph"]
    assert report["max_total_num_tokens"] == int(flags.max_total_tokens)
    assert (report["target"]["dtype"], report["draft"]["dtype"]) == ("float4_e2m1fn_x2", "float8_e4m3fn")
    assert mean(result["accept_lengths"]["nvfp4 graph"]) > pair.accept_length_floor
    weights = ROOT / flags.speculative_draft_model_path / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == pair.draft_sha256


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_profiles_are_accepted_with_what_their_notes_allow(file):
    """On the pair where the profile leaves the model open; no other rule stands in the way."""
    profile = load_profile(file)
    flags = profile.flags
    if "--model-path" not in flags:
        flags = [*flags, "--model-path", str(PAIR / "target")]
        if "--speculative-algorithm" in flags:
            flags += ["--speculative-draft-model-path", str(PAIR / "draft")]
    allow = re.findall(r"--allow (FP4-\d+)", profile.note)
    machine = Machine(parse_gpu(profile.gpu, profile.gpu_memory_gb), PATCHED)
    found = judge(flags, machine=machine, allow=allow, profile=profile)
    assert [r.id for r in found.refusals] == []
    # The pair needs none of those that a note names for other targets.
    assert [r.id for r in found.allowed] == [id for id in allow if id in ("FP4-026", "FP4-027")]


def test_every_key(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    changes = {"draft_revision": "v1", "draft_sha256": "'" + "0" * 64 + "'", "accept_length_floor": 2}
    changes["accept_length_floors"] = "{code: 3.5, non-english: 2}"
    file = write(tmp_path, lines(**changes, note="a b", result="r.json"))
    assert load_profile(str(file)) == Profile(
        name="mine",
        flags=["--kv-cache-dtype", "nvfp4", "--tp-size", "2"],
        gpu="sm_121",
        gpu_memory_gb=121.5,
        gpus=2,
        tp=2,
        result=str(tmp_path / "r.json"),
        draft_revision="v1",
        draft_sha256="0" * 64,
        accept_length_floor=2.0,
        accept_length_floors={"code": 3.5, "non-english": 2.0},
        note="a b",
    )


def test_what_is_left_out_is_none_and_tp_is_sglangs_default(tmp_path):
    profile = load_profile(write(tmp_path, lines(flags="[]")))
    assert (profile.flags, profile.tp, profile.draft_sha256, profile.note) == ([], 1, None, None)


def test_a_quoted_value_stays_one_word(tmp_path):
    file = write(tmp_path, lines(flags="\n  - '--json-model-override-args \"{}: 1\"'"))
    assert load_profile(file).flags == ["--json-model-override-args", "{}: 1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines(seats=32), ":9: unknown key 'seats'"),
        (lines(gpu_memory=1), ":9: unknown key 'gpu_memory'; nearest is gpu_memory_gb"),
        (lines(tp=2), ":9: unknown key 'tp'; tensor parallelism is SGLang's --tp-size, under flags"),
        (lines() + "[1]: 2\n", ":9: unknown key '?'"),
        (lines() + "name: other\n", ":9: name is written twice"),
        (lines(name=""), ":1: name must be text"),
        (lines(name="1.5"), ":1: name must be text"),
        (lines(name="''"), ":1: name must be text"),
        (lines(note="[a]"), ":9: note must be text"),
        (lines(gpu="'121'"), ":2: gpu must be an architecture like sm_121"),
        (lines(gpu="121"), ":2: gpu must be an architecture like sm_121"),
        (lines(gpu_memory_gb="much"), ":3: gpu_memory_gb must be a number of at least 1"),
        (lines(gpu_memory_gb="0"), ":3: gpu_memory_gb must be a number of at least 1"),
        (lines(gpu_memory_gb=".inf"), ":3: gpu_memory_gb must be a number of at least 1"),
        (lines(gpus="2.0"), ":4: gpus must be a whole number of at least 1"),
        (lines(gpus="true"), ":4: gpus must be a whole number of at least 1"),
        (lines(gpus="9" * 5000), ":4: gpus must be a whole number of at least 1"),
        (lines(draft_sha256="12ab"), ":9: draft_sha256 must be 64 hexadecimal digits"),
        (lines(draft_sha256="0" * 64), ":9: draft_sha256 must be 64 hexadecimal digits, quoted where all are"),
        (lines(accept_length_floor="0.5"), ":9: accept_length_floor must be a number of at least 1"),
        (lines(accept_length_floors="3"), ":9: accept_length_floors must be a mapping of workloads"),
        (lines(accept_length_floors="{talk: 3}"), ":9: accept_length_floors has no workload 'talk'; there are chat"),
        (lines(accept_length_floors="{code: 0}"), ":9: accept_length_floors of code must be a number of at least 1"),
        (lines(draft_revision="5"), ":9: draft_revision must be text"),
        (lines(flags="--tp-size 2"), ":5: flags must be a list, one flag with its values an item"),
        (lines(flags="\n  - --tp-size 2\n  - 4"), ":7: an item of flags is text and starts with '--'"),
        (lines(flags="\n  - --tp-size\n  - 2"), ":6: argument --tp-size/.*: expected one argument"),
        (lines(flags="\n  - --tp-size two"), ":6: argument --tp-size/.*: invalid int value: 'two'"),
        (lines(flags="\n  - --kv-cach-dtype nvfp4"), ":6: unknown flag '--kv-cach-dtype'; nearest is --kv-cache-dtype"),
        (lines(flags="\n  - --kv-cache-dtype nvfp5"), ":6: argument --kv-cache-dtype: invalid choice: 'nvfp5'"),
        (lines(flags="\n  - --host 'a"), ":6: No closing quotation"),
        (lines(result="none.json"), ":8: result .*none.json is not on file; write 'untested' where there is none"),
        (lines(result=None), ":1: result is missing"),
        ("# nothing\n", ":1: the file is empty"),
        ("- a\n", ":1: a profile is a mapping of keys to values"),
        ("name: mine\n\tgpu: x\n", ":2: not YAML .found character"),
        (lines() + "--- \na: b\n", ":9: not YAML .but found another document"),
        (b"name: \xff", ": not YAML .*invalid start byte"),
        ("name: a\0b", ": not YAML .*unacceptable character"),
        ("[" * 100_000, ": not YAML .maximum recursion depth"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(UsageError, match=f"^{tmp_path}/p.yaml{message}"):
        load_profile(write(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none.yaml: it cannot be read \(No such file or directory\)"):
        load_profile(tmp_path / "none.yaml")


def test_reading_a_profile_needs_no_torch():
    code = (
        "import sys; from launcher.profile import load_profile; load_profile('configs/pair.yaml');"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'sglang', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
