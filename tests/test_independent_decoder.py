"""The independent decoder: what it uses, what it finds in good pools, and that it finds planted faults."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import independent_decoder as decoder
import numpy as np
import pytest
import torch

from sglang_fp4kv import codec
from tests.gpu import pool_report

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "independent_decoder.py"


def test_it_loads_neither_torch_nor_the_product():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import independent_decoder\n"
        "print({m.split('.')[0] for m in sys.modules} & {'torch', 'triton', 'sglang_fp4kv', 'launcher'})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("global_scale", [0.5, 0.0371])
def test_it_decodes_every_code_under_every_scale_as_the_codec(global_scale):
    scales = np.repeat(np.arange(127, dtype=np.uint8), 2).reshape(127, 2)
    codes = np.arange(256, dtype=np.uint8).reshape(16, 1, 16) ^ np.zeros((1, 127, 1), np.uint8)
    scales = np.broadcast_to(scales, (16, 127, 2)).copy()
    ours = codec.decode(torch.from_numpy(codes), torch.from_numpy(scales), global_scale)
    theirs = decoder.decode(codes, scales, np.float32(global_scale))
    assert np.array_equal(ours.numpy(), theirs.astype(np.float32))
    assert theirs[0, 56, :4].tolist() == [0.0, 0.0, 0.5 * np.float32(global_scale), 0.0]


@pytest.fixture(scope="module")
def report_and_dumps(tmp_path_factory):
    """The script's report of pools that the kernels wrote, and the dumps themselves."""
    path = tmp_path_factory.mktemp("pools") / "report.json"
    assert pool_report.main([str(path), "--tokens", "64"]) == 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return json.loads(path.read_text()), {n: pool_report.dump(n, 64, device) for n in pool_report.CASES}


@pytest.mark.interpreter
def test_pools_of_the_kernels(report_and_dumps):
    report, _ = report_and_dumps
    assert set(report["cases"]) == set(pool_report.CASES)
    assert {"commit", "versions", "gpu", "tokens"} <= set(report)
    for name, case in report["cases"].items():
        even = pool_report.CASES[name][3:5] != (0.0371, 0.7)  # powers of two: no rounding in between
        for side in (case["k"], case["v"]):
            for kind in ("scales", "codes"):
                counts = side[kind]
                assert counts["exact"] + counts["tie"] == counts["bytes"] > 0 == counts["other"]
                assert counts["tie"] == 0 or not even
            assert side["bytes_outside"] == side["values_read_otherwise"] == 0
            assert side["cosine_to_reference"] > 0.999
            if pool_report.CASES[name][5] != "extreme":
                assert side["cosine_to_bf16"] > 0.99
        if "attention" in case:
            assert case["attention"]["cosine_to_decoded"] > 0.99999
            assert 0.98 < case["attention"]["cosine_to_bf16"] < 0.9999
    assert sum("attention" in case for case in report["cases"].values()) == 2
    assert report["total"]["bytes"] == sum(
        side[kind]["bytes"]
        for case in report["cases"].values()
        for side in (case["k"], case["v"])
        for kind in ("scales", "codes")
    )


def flip_code(dump):
    dump["k_codes"][dump["slots"].max(), 0, 3] ^= 0x10


def flip_sign(dump):
    dump["v_codes"][dump["slots"].max(), 0, 0] ^= 0x08


def step_scale(dump):
    dump["v_scales"][dump["slots"].max(), 1, 0] += 1


def nan_scale(dump):
    dump["k_scales"][dump["slots"].max(), 0, 0] = 0x7F


def swap_nibbles(dump):
    codes = dump["k_codes"][dump["slots"].max()]
    codes[:] = codes << 4 | codes >> 4


def write_outside(dump):
    free = np.setdiff1d(np.arange(len(dump["k_codes"])), dump["slots"])
    dump["k_codes"][free[0], 0, 5:7] = 1
    dump["k_scales"][free[0], 1, 2] = 1


def read_otherwise(dump):
    dump["v_read"][np.argmax(dump["slots"]), 0, 0] += 2.0**-10


FAULTS = {
    flip_code: ("other", 1, 1),
    flip_sign: ("other", 1, 1),
    step_scale: ("other", 1, 9),  # its codes may belong to the other scale, too
    nan_scale: ("other", 1, 9),
    swap_nibbles: ("other", 10, 4 * 128),
    write_outside: ("bytes_outside", 3, 3),
    read_otherwise: ("values_read_otherwise", 1, 1),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("plant", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_counted(report_and_dumps, plant):
    dump = copy.deepcopy(report_and_dumps[1]["store_4x256"])
    where, least, most = FAULTS[plant]
    assert decoder.is_clean(decoder.total({"case": decoder.case_report(dump)}))
    plant(dump)
    summed = decoder.total({"case": decoder.case_report(dump)})
    assert least <= summed[where] <= most
    assert summed["tie"] == 0 and not decoder.is_clean(summed)


@pytest.mark.interpreter
def test_the_other_neighbour_of_a_tie_is_a_tie_and_of_anything_else_an_error(report_and_dumps):
    dump = copy.deepcopy(report_and_dumps[1]["store_2x96_ties"])
    x = decoder.bf16(dump["k"])[dump["slots"] >= 0]
    codes = dump["k_codes"][dump["slots"][dump["slots"] >= 0]]
    assert decoder.scale_values(dump["k_scales"][dump["slots"].max()]).max() == 1.0  # x is in steps
    places = np.argwhere((np.abs(x[..., ::2]) == 0.75) | (np.abs(x[..., ::2]) == 2.5))
    assert len(places) > 50
    token, head, pair = places[0]
    slot = dump["slots"][dump["slots"] >= 0][token]
    nibble = codes[token, head, pair] & 7
    assert nibble in (2, 4)  # the even neighbour was taken
    dump["k_codes"][slot, head, pair] += {2: -1, 4: 1}[int(nibble)]
    summed = decoder.total({"case": decoder.case_report(dump)})
    assert (summed["tie"], summed["other"], summed["values_read_otherwise"]) == (1, 0, 1)
    dump["k_codes"][slot, head, pair] += {2: 2, 4: 1}[int(nibble)]
    summed = decoder.total({"case": decoder.case_report(dump)})
    assert (summed["tie"], summed["other"]) == (0, 1)


@pytest.mark.interpreter
def test_attention_over_other_rows_is_seen(report_and_dumps):
    dump = copy.deepcopy(report_and_dumps[1]["cache_2x256"])
    good = decoder.case_report(dump)
    assert good["attention"]["cosine_to_decoded"] > 0.99999 and decoder.is_clean(decoder.total({"case": good}))
    as_written = dump["out"].copy()
    dump["out"][0, 0, 0] = np.nan
    assert decoder.total({"case": decoder.case_report(dump)})["attention_otherwise"] == 1
    dump["out"] = as_written
    dump["selected"][0, 1] = dump["selected"][0, 0]
    bad = decoder.case_report(dump)
    assert bad["attention"]["cosine_to_decoded"] < 0.9
    summed = decoder.total({"case": bad})
    assert summed["attention_otherwise"] == 1 and not decoder.is_clean(summed)


def test_a_scale_with_a_sign_or_nan_is_no_tie():
    """Between the two largest scales, 416 and 448: 0x7F and 0xFF would both be cut to 448's neighbour."""
    x = np.full((1, 16), 6 * 432.0)
    want = decoder.encode_scales(x, 1.0)
    other = 0x7E if want[0, 0] == 0x7D else 0x7D
    got = [np.full_like(want, byte) for byte in (other, 0x7F, 0xFF, 0x80 | other)]
    assert [bool(decoder.scale_ties(x, g, want, 1.0)) for g in got] == [True, False, False, False]


def test_errors_and_bad_usage_have_their_exit_codes(tmp_path):
    def run(*args):
        return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True)

    assert run().returncode == run(tmp_path, tmp_path / "out.json").returncode == 2
    k = np.full((1, 1, 16), 0x3F80, dtype=np.uint16)  # ones
    names = {"slots": np.zeros(1, np.int64), "k_global": np.float32(1), "v_global": np.float32(1)}
    sides = {f"{s}_codes": np.full((1, 1, 8), 0x77, np.uint8) for s in "kv"}
    sides |= {f"{s}_scales": np.full((1, 1, 1), 0x23, np.uint8) for s in "kv"}  # 0.171875, near 1 / 6
    sides |= {f"{s}_read": np.full((1, 1, 16), 1.03125, np.float32) for s in "kv"}
    np.savez(tmp_path / "ones.npz", k=k, v=k, **names, **sides)
    done = run(tmp_path, tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    sides["v_codes"][0, 0, 0] = 0x67
    np.savez(tmp_path / "ones.npz", k=k, v=k, **names, **sides)
    assert run(tmp_path, tmp_path / "out.json").returncode == 1
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["total"]["other"] == 1 and report["total"]["values_read_otherwise"] == 1
    assert math.isclose(report["cases"]["ones"]["k"]["cosine_to_bf16"], 1.0)


@pytest.mark.parametrize("tokens", ["16", "65"])
def test_tokens_that_cannot_be(tokens, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        pool_report.main([str(tmp_path / "r.json"), "--tokens", tokens])
    assert error.value.code == 2
    assert f"--tokens must be a multiple of 8 from 24 on, got {tokens}" in capsys.readouterr().err
