"""`fp4kv serve` with a stand-in for SGLang that is held back by the real gate."""

import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launcher import supervise
from launcher.canary import Outcome
from launcher.expected import DRAFT_POOL, PACKED_POOL, describe, differences, expected_values
from launcher.flags import parse
from launcher.judge import judge
from launcher.launch import Launch
from launcher.probe import Gpu, Machine
from launcher.process import free_port

ROOT = Path(__file__).parent.parent
PAIR = ROOT / "models" / "pair"
DRAFTED = [
    "--model-path", str(PAIR / "target"), "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton",
    "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "draft"),
]  # fmt: skip
REPORT = {
    "target": {
        "class": PACKED_POOL, "dtype": "float4_e2m1fn_x2", "bytes_per_token": 576, "workspace_bytes": 0,
        "backend": "sglang_fp4kv.attention.TritonAttnBackend",
        "recipe": "sglang_fp4kv.recipe.PackedNVFP4Method",
    },
    "draft": {"class": DRAFT_POOL, "dtype": "float8_e4m3fn", "bytes_per_token": 512, "modules": []},
    "max_total_num_tokens": 8192,
}  # fmt: skip

SERVER = textwrap.dedent(
    """
    import http.server, json, os, signal, sys, threading, time
    from sglang_fp4kv.readiness import Gate
    port, how, report = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    gate = None if how == "not held" else Gate(os.environ["FP4KV_HOLD_SOCKET"])
    if how == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            token = self.headers.get("x-fp4kv-hold", "").encode()
            admitted = gate is None or gate.is_open or gate.admits(token)
            if how in ("hangs", "ignores SIGTERM"):
                time.sleep(60)
            info = {"internal_states": [{"fp4kv": report}], "page_size": 1, "disable_radix_cache": False}
            body = json.dumps(info).encode()
            self.send_response(200 if admitted else 503)
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if how == "ends late":
        signal.signal(signal.SIGTERM, lambda *_: threading.Timer(2, os.kill, (os.getpid(), 9)).start())
    if how == "ends":
        sys.exit(7)
    if gate is not None and gate.wait():
        print("serves", flush=True)
        gate.end()
        os._exit(0)
    time.sleep(60)
    """
)


def launch_of(*flags):
    return judge([*DRAFTED, *flags], machine=Machine(gpu=Gpu("H200", (9, 0), 150 << 30))).launch


@pytest.fixture
def supervised(capfd, monkeypatch):
    """Runs the stand-in under a Supervisor; returns (exit code, its and our output)."""

    def run(how="serves", report=REPORT, seconds=20, canary=None):
        port = free_port()
        launch = launch_of("--port", str(port))
        asked = []

        class Canary:
            def __init__(self, **values):
                asked.append(values)

            def run(self, seconds):
                return canary(seconds)

        monkeypatch.setattr(supervise, "Canary", Canary)
        monkeypatch.setattr(supervise, "_STOP_SECONDS", 1)
        command = [sys.executable, "-c", SERVER, str(port), how, json.dumps(report)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        code = supervise.Supervisor(
            command, environ, launch, canary=canary is not None, seconds=seconds
        ).run()
        run.asked = asked
        out, err = capfd.readouterr()
        return code, out + err

    return run


def test_a_proven_server_is_let_serve(supervised):
    code, text = supervised(canary=lambda seconds: Outcome((), "all well"))
    assert code == 0 and "serves" in text
    assert "proven: target float4_e2m1fn_x2 576 B/token in NVFP4TokenToKVPool; draft float8" in text
    assert "canary passed: all well" in text and re.search(r"ready after \d+ s of proof", text)
    ((asked),) = supervised.asked
    assert (asked["drafted"], asked["bound"], asked["page_size"], asked["room"]) == (True, 2.0, 1, 4096)
    assert len(asked["access"]["headers"]["x-fp4kv-hold"]) == 64


def test_no_canary_still_waits_for_the_report(supervised):
    code, text = supervised()
    assert code == 0 and "serves" in text and "canary" not in text
    code, text = supervised(report={**REPORT, "draft": None})
    assert code == 3 and "draft dtype: judged float8_e4m3fn, reported None" in text
    assert "serves" not in text


def test_a_failed_canary_stops_the_server_with_the_evidence(supervised):
    code, text = supervised(canary=lambda seconds: Outcome(("first\n  answer: [1]", "second"), ""))
    assert code == 3 and "serves" not in text and "ready after" not in text
    assert "not proven, so the server was stopped: the canary failed\nfirst\n  answer: [1]\nsecond" in text


def test_a_canary_without_an_answer_stops_the_server(supervised):
    def silent(seconds):
        raise TimeoutError("read timed out")

    code, text = supervised(canary=silent)
    assert code == 3 and "the canary got no answer (limit 20 s): read timed out" in text


def test_a_failure_of_our_own_does_not_leave_the_server_held(supervised):
    def broken(seconds):
        raise ZeroDivisionError("ours")

    code, text = supervised(canary=broken)
    assert code == 3 and "the proof itself failed" in text and "ZeroDivisionError: ours" in text


@pytest.mark.parametrize("how", ["hangs", "ignores SIGTERM"])
def test_a_worker_that_hangs_in_the_proof_is_stopped(supervised, how):
    begun = time.monotonic()
    code, text = supervised(how, seconds=2)
    assert code == 3 and "the scheduler did not report within 2 s" in text
    assert time.monotonic() - begun < 30


def test_a_server_that_is_not_held_is_stopped(supervised):
    code, text = supervised("not held")
    assert code == 3 and "answers without being held back: our plugin is not in it" in text


def test_the_exit_code_of_a_server_that_ends_is_passed_on(supervised):
    code, text = supervised("ends")
    assert code == 7 and "not proven" not in text


@pytest.mark.parametrize("found", [(), ("cut off",)])
def test_a_signal_during_the_proof_neither_fails_nor_proves_anything(supervised, found):
    def interrupted(seconds):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        return Outcome(found, "")

    code, text = supervised("ends late", canary=interrupted)
    assert code == 128 + signal.SIGKILL and "not proven" not in text and "ready after" not in text
    assert supervised.asked[0]["cancelled"].is_set() and "serves" not in text


def test_what_is_judged_is_what_must_be_reported():
    assert expected_values(launch_of()) == {
        ("target", key): value for key, value in REPORT["target"].items()
    } | {("draft", key): value for key, value in REPORT["draft"].items()}
    bf16 = expected_values(launch_of("--speculative-draft-kv-cache-dtype", "bf16"))
    assert (bf16["draft", "dtype"], bf16["draft", "bytes_per_token"]) == ("bfloat16", 1024)


@pytest.mark.parametrize(
    ("side", "key", "value"),
    [
        ("target", "class", "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"),
        ("target", "dtype", "bfloat16"),
        ("target", "recipe", None),
        ("target", "backend", "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"),
        ("target", "bytes_per_token", 2048),
        ("target", "workspace_bytes", 4096),
        ("draft", "dtype", "float4_e2m1fn_x2"),
        ("draft", "class", "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"),
    ],
)
def test_every_difference_is_named(side, key, value):
    report = {**REPORT, side: {**REPORT[side], key: value}}
    (text,) = differences(launch_of(), [{"fp4kv": report}])
    assert text.startswith(f"{side} {key}: judged ") and text.endswith(f"reported {value}")
    assert differences(launch_of(), [{"fp4kv": REPORT}]) == []


def test_every_replica_has_to_report():
    assert differences(launch_of(), [{}]) == [
        "the scheduler does not report what it serves: our plugin is not in it"
    ]
    assert differences(launch_of(), [{"fp4kv": REPORT}] * 2) == ["1 replicas were judged, 2 report"]
    two = launch_of("--dp-size", "2")
    other = {**REPORT, "draft": {**REPORT["draft"], "dtype": "x"}}
    (text,) = differences(two, [{"fp4kv": REPORT}, {"fp4kv": other}])
    assert text == "replica 1: draft dtype: judged float8_e4m3fn, reported x"


def two_ranks(**changes):
    """The report of the rank that answers, and with it both ranks'; ``changes`` are rank 1's."""
    target = {**REPORT["target"], "bytes_per_token": 288, "global_scales": {"k": [0.5], "v": [0.0625]}}
    own = {**REPORT, "target": target, "draft": {**REPORT["draft"], "bytes_per_token": 256}}
    other = {**own, **{side: {**own[side], **values} for side, values in changes.items()}}
    return {**own, "ranks": [own, other]}


def on_two_ranks(**changes):
    return differences(launch_of("--tp-size", "2"), [{"fp4kv": two_ranks(**changes)}])


def test_every_rank_is_judged_by_its_share():
    assert on_two_ranks() == []
    assert describe(two_ranks()).endswith("the same on each of 2 ranks; 8192 tokens")
    (text,) = on_two_ranks(target={"bytes_per_token": 576})
    assert text == "rank 1: target bytes_per_token: judged 288, reported 576"
    (text,) = on_two_ranks(draft={"dtype": "float4_e2m1fn_x2"})
    assert text == "rank 1: draft dtype: judged float8_e4m3fn, reported float4_e2m1fn_x2"


def test_every_rank_reads_with_the_same_scales():
    (text,) = on_two_ranks(target={"global_scales": {"k": [0.25], "v": [0.0625]}})
    assert text.startswith("rank 1: target global_scales: {'k': [0.25], ")
    assert text.endswith("and {'k': [0.5], 'v': [0.0625]} on the rank that answers")


def test_a_rank_that_does_not_report_is_a_difference():
    launch, report = launch_of("--tp-size", "2"), two_ranks()
    assert differences(launch, [{"fp4kv": {**report, "ranks": report["ranks"][:1]}}]) == [
        "2 ranks were judged, 1 report"
    ]
    del report["ranks"]
    assert differences(launch, [{"fp4kv": report}]) == ["2 ranks were judged, 0 report"]


def test_ranks_are_gathered_for_nvfp4_on_triton_alone():
    flags = ["--model-path", "m", "--kv-cache-dtype", "fp4_mx_block16", "--attention-backend", "triton", "--tp-size", "2"]
    report = {"target": {"dtype": "float4_e2m1fn_x2"}, "draft": None}
    assert differences(Launch(parse(flags), None, None), [{"fp4kv": report}]) == []


def test_a_drafter_that_was_not_asked_for_is_a_difference():
    plain = judge(DRAFTED[:6], machine=Machine()).launch
    assert differences(plain, [{"fp4kv": REPORT}]) == [f"no drafter's pool was judged, {DRAFT_POOL} is reported"]


def test_only_fp4_is_held_back_and_only_where_http_is_served():
    def launch(*flags):
        return Launch(parse(["--model-path", "m", *flags]), None, None)

    assert supervise.held_back(launch("--kv-cache-dtype", "nvfp4"))
    assert supervise.held_back(launch("--kv-cache-dtype", "fp4_mx_block16"))
    assert not supervise.held_back(launch("--kv-cache-dtype", "fp8_e4m3"))
    assert not supervise.held_back(launch("--kv-cache-dtype", "nvfp4", "--node-rank", "1"))


def test_slow_writes_of_the_drafter_are_said(supervised):
    why = "DFLASH fused KV materialization disabled: qkv bias"
    draft = {**REPORT["draft"], "kv_writes": "per layer", "why_per_layer": why}
    code, text = supervised(report={**REPORT, "draft": draft})
    assert code == 0 and "DraftTokenToKVPool, written per layer; 8192 tokens" in text
    assert f"warning: the drafter's K and V are written layer by layer, which is slower: {why}\n" in text
    code, text = supervised(report={**REPORT, "draft": draft | {"kv_writes": "fused", "why_per_layer": None}})
    assert code == 0 and "layer by layer" not in text
