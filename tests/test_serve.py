"""`fp4kv serve` up to the moment the server would start: exit codes and messages."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from launcher import cli, patchset, serve, supervise
from launcher.patchset import PatchState
from launcher.process import free_port

TARGET = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "dtype": "bfloat16", "max_position_embeddings": 4096,
}  # fmt: skip
DRAFT = {**TARGET, "block_size": 8, "dflash_config": {"target_layer_ids": [0, 1, 2]}}


class Started(Exception):
    pass


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Runs `fp4kv serve` on small configs; returns (exit code, stderr) or raises Started."""
    sglang = {"state": "applied", "release_found": "0.5.23"}

    def start(*_):
        raise Started

    monkeypatch.setattr(supervise.ServerProcess, "start", start)
    monkeypatch.setattr(
        patchset,
        "patch_state",
        lambda: PatchState(
            sglang["state"], tmp_path, "0.5.23", sglang["release_found"], 
            {"python/sglang/a.py": "applied", "python/sglang/b.py": "pristine"}
            if sglang["state"] == "half-applied"
            else {"python/sglang/a.py": sglang["state"]},
        ),
    )

    def run(*flags, target=TARGET, draft=DRAFT, embedded=False, state="applied", release="0.5.23", ours=()):
        sglang.update(state=state, release_found=release)
        for name, config in (("t", target), ("d", draft)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        base = ["--model-path", str(tmp_path / "t"), "--kv-cache-dtype", "nvfp4"]
        base += ["--attention-backend", "triton", "--port", str(free_port())]
        argv = ["serve", *(["--embedded"] if embedded else []), *ours, "--", *base, *flags]
        code = cli.main(argv)
        return code, re.sub(r"\n {4,}", " ", capsys.readouterr().err)  # wrapped lines as one

    run.draft = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(tmp_path / "d")]
    return run


def test_a_good_launch_starts_the_server(launch):
    with pytest.raises(Started):
        launch(*launch.draft)


def test_bad_usage_is_exit_2_and_starts_nothing(launch):
    code, text = launch("--kv-cach-dtype", "nvfp4")
    assert code == 2 and "unknown flag '--kv-cach-dtype'; nearest is --kv-cache-dtype" in text
    code, text = launch("--model-path", "/no/such/model")
    assert code == 2 and "--model-path /no/such/model: there is no such folder" in text
    code, text = launch("--speculative-draft-model-path", "/no/such/draft")
    assert code == 2 and "--speculative-draft-model-path /no/such/draft: there is no such" in text


def test_refusals_are_exit_3_and_start_nothing(launch):
    code, text = launch(*launch.draft, draft={**DRAFT, "block_size": None})
    assert code == 3 and "refused[FP4-012]" in text
    code, text = launch(*launch.draft, draft={**DRAFT, "dflash_config": {"target_layer_ids": [4]}})
    assert code == 3 and "wants the output of target layers [4], and the target has 4" in text
    code, text = launch(target={**TARGET, "head_dim": 72})
    assert code == 3 and "head_dim 72 is not a multiple of 16" in text
    code, text = launch(target={**TARGET, "v_head_dim": 32})
    assert code == 3 and "K is 64 wide and V is 32" in text
    code, text = launch("--attention-backend", "flashinfer")
    assert code == 3 and "prefill on flashinfer and decode on flashinfer" in text
    code, text = launch(*launch.draft, "--speculative-draft-kv-cache-dtype", "nvfp4")
    assert code == 3 and "the drafter's KV dtype cannot be nvfp4" in text


def test_unpatched_and_other_releases_are_refused(launch):
    code, text = launch(state="pristine")
    assert code == 3 and "refused[FP4-016] unpatched-sglang: the patch series is pristine" in text
    code, text = launch(state="foreign", release="0.5.22")
    assert code == 3 and "refused[FP4-002]" in text and "SGLang 0.5.22" in text
    code, text = launch(state="half-applied")
    assert code == 3 and "refused[FP4-004] half-applied-series" in text


def test_all_refusals_come_together(launch):
    code, text = launch(target={**TARGET, "head_dim": 72}, state="pristine")
    assert code == 3 and text.index("FP4-014") < text.index("FP4-016")


def test_other_kv_dtypes_need_no_patches(launch):
    with pytest.raises(Started):
        launch("--kv-cache-dtype", "bf16", state="pristine")


def test_what_was_asked_and_what_is_effective_are_shown(launch, capsys):
    with pytest.raises(Started):
        launch(*launch.draft)
    text = capsys.readouterr().err
    assert re.search(r"^drafter KV dtype +\(left out\) +fp8_e4m3 \(fp4kv: next to NVFP4\)$", text, re.M)
    assert re.search(r"^draft tokens +\(left out\) +8 \(the draft's block size\)$", text, re.M)
    assert "accepted: works (tests/bench/results/h200_pair.json" in text


def test_untested_is_refused_unless_allowed(launch, capsys):
    bf16 = [*launch.draft, "--speculative-draft-kv-cache-dtype", "bf16"]
    code, text = launch(*bf16)
    assert code == 3 and "refused[FP4-033]" in text
    with pytest.raises(Started):
        launch(*bf16, ours=["--allow", "FP4-033"])
    assert "allowed[FP4-033] bf16-draft-pool-untested" in capsys.readouterr().err


def test_a_profiles_flags_come_before_the_users(launch, tmp_path, monkeypatch):
    profile = tmp_path / "profile.yaml"
    profile.write_text(
        "name: n\ngpu: sm_90\ngpu_memory_gb: 9\ngpus: 1\nresult: untested\n"
        "flags:\n- --page-size 4\n- --max-total-tokens 4096\n"
    )
    started = []
    monkeypatch.setattr(supervise, "Supervisor", lambda argv, env, launch, **_: started.append(launch.flags))
    with pytest.raises(AttributeError):  # nothing to run
        launch("--page-size", "8", ours=["--profile", str(profile)])
    assert (started[0].page_size, started[0].max_total_tokens) == (8, 4096)


def test_embedded_adds_its_flags_and_keeps_the_users(tmp_path):
    flags = ["--model-path", "m", "--max-total-tokens", "99"]
    argv, env = serve.launch_command(flags, embedded=True, environ={"HOME": "/h"})
    assert argv[:4] == [sys.executable, "-P", "-m", "sglang.launch_server"]
    assert argv.count("--max-total-tokens") == 1 and argv[argv.index("--max-total-tokens") + 1] == "99"
    assert argv[argv.index("--device") + 1] == "cpu"
    assert env["TRITON_INTERPRET"] == "1" and env["HOME"] == "/h"
    argv, env = serve.launch_command(flags, environ={"HOME": "/h"})
    assert argv[4:] == flags and env == {"HOME": "/h"}


def test_what_is_judged_is_what_starts(launch, tmp_path):
    base = ["serve", "--embedded", "--", "--model-path", str(tmp_path / "t"), "--port", str(free_port())]
    with pytest.raises(Started):
        launch()
    with pytest.raises(Started):  # embedded mode itself asks for Triton
        cli.main([*base, "--kv-cache-dtype", "nvfp4"])
    argv, _ = serve.launch_command(["--model-path", "m", "--max-total-tok", "99"], embedded=True)
    assert argv.index("--max-total-tokens") < argv.index("--max-total-tok")  # SGLang takes the last


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "0"], "--port 0: a port is a number from 1 to 65535"),
        (["--port", "65536"], "--port 65536: a port is a number from 1 to 65535"),
        (["--host", "127.0.0.1:80"], "--host 127.0.0.1:80 --port"),
        (["--speculative-algorithm", "dflash"], "dflash: --speculative-draft-model-path is missing"),
        (["--speculative-draft-model-path", "d"], "without --speculative-algorithm nothing drafts"),
        (
            ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "./t/"],
            "--speculative-draft-model-path ./t/: that is the target itself",
        ),
    ],
)
def test_flags_that_cannot_be_meant_are_exit_2(launch, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    code, text = launch(*flags)
    assert code == 2 and message in text


@pytest.mark.parametrize(
    ("flags", "environ", "shown"),
    [
        (["--grpc-port", "5"], {}, "--grpc-port 5"),
        (["--grpc-mode"], {}, "--grpc-mode"),
        (["--smg-grpc-mode"], {}, "--smg-grpc-mode"),
        (["--encoder-only"], {}, "--encoder-only"),
        (["--use-ray"], {}, "--use-ray"),
        (["--checkpoint-engine-wait-weights-before-ready"], {}, "--checkpoint-engine-wait-weights-before-ready"),
        ([], {"SGLANG_GRPC_PORT": "5"}, "with SGLANG_GRPC_PORT in the environment"),
        ([], {"SGLANG_RUST_SERVER": "1"}, "with SGLANG_RUST_SERVER in the environment"),
        ([], {"SGLANG_HTTP_SERVER_APP_PATH": "a:b"}, "with SGLANG_HTTP_SERVER_APP_PATH in the environment"),
    ],
)
def test_what_cannot_be_held_back_is_refused_as_by_judge(
    launch, monkeypatch, tmp_path, capsys, flags, environ, shown
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, text = launch(*flags)
    id = "FP4-065" if "weights" in shown else "FP4-064"
    assert code == 3 and f"asked: --kv-cache-dtype nvfp4 {shown}" in re.sub(r" +", " ", text)
    judged = ["--model-path", str(tmp_path / "t"), "--kv-cache-dtype", "nvfp4", "--attention-backend", "triton"]
    assert cli.main(["judge", "--gpu", "sm_90", "--", *judged, *flags]) == 3
    told = re.sub(r"\n {4,}", " ", capsys.readouterr().err)
    refusal = text[text.index(f"refused[{id}]") :].rstrip()
    assert refusal in told
    with pytest.raises(Started):
        launch(*flags, "--kv-cache-dtype", "bf16")
    if environ == {"SGLANG_RUST_SERVER": "1"}:
        monkeypatch.setenv("SGLANG_RUST_SERVER", "0")
        with pytest.raises(Started):
            launch()


def test_no_canary_is_echoed_as_a_warning(launch, capsys):
    with pytest.raises(Started):
        launch(ours=["--no-canary"])
    assert "fp4kv serve: warning: --no-canary: what the server answers is not" in capsys.readouterr().err
    with pytest.raises(Started):
        launch()
    assert "--no-canary" not in capsys.readouterr().err


def test_a_second_node_says_where_the_proof_is(launch, capsys):
    with pytest.raises(Started):
        launch("--node-rank", "1", "--nnodes", "2", ours=["--allow", "FP4-027"])
    assert "--node-rank 1: node 0 serves, and it is proven" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_a_limit_that_is_none_is_exit_2(launch, capsys, seconds):
    with pytest.raises(SystemExit) as end:
        launch(ours=["--proof-timeout", seconds])
    assert end.value.code == 2
    assert f"{seconds} is no number of seconds above 0" in capsys.readouterr().err


def test_a_busy_port_is_exit_2_before_anything_starts(launch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        code, text = launch("--port", port)
    assert code == 2 and f"--port {port}: nothing can listen there (Address already in use)" in text


def test_sglang_flags_before_the_dashes_name_the_dashes(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--model-path", "m"])
    assert end.value.code == 2 and "SGLang's flags follow '--'" in capsys.readouterr().err


def test_other_kv_dtypes_take_a_config_nobody_understands(launch):
    with pytest.raises(Started):
        launch("--kv-cache-dtype", "bf16", target=[1])


@pytest.mark.parametrize(
    ("host", "certificate", "url"),
    [
        (None, None, "http://127.0.0.1:7"),
        ("0.0.0.0", None, "http://127.0.0.1:7"),
        ("::", None, "http://[::1]:7"),
        ("fe80::1", "c.pem", "https://[fe80::1]:7"),
        ("example.org", None, "http://example.org:7"),
    ],
)
def test_url(host, certificate, url):
    assert supervise.server_url(SimpleNamespace(host=host, port=7, ssl_certfile=certificate)) == url


SIGNALLED = textwrap.dedent(
    """
    import os, signal, sys
    from types import SimpleNamespace
    from launcher import supervise
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # whatever this test run inherited
    flags = SimpleNamespace(host=None, port=1, ssl_certfile=None, api_key=None)
    launch = SimpleNamespace(flags=flags, kv_dtype="bf16")
    server = supervise.Supervisor([sys.executable, "-c", sys.argv[3]], os.environ, launch, canary=True, seconds=9)
    start = supervise.ServerProcess.start
    def interrupted(process):
        if sys.argv[2] == "before":
            os.kill(os.getpid(), int(sys.argv[1]))
        start(process)
        if sys.argv[2] == "after":
            os.kill(os.getpid(), int(sys.argv[1]))
    supervise.ServerProcess.start = interrupted
    code = server.run()
    sys.exit(code if server.server.returncode() is not None else 99)
    """
)


def signalled(number, when, child):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, str(int(number)), when, child],
        cwd=root, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_even_while_it_starts(number, when):
    with signalled(number, when, "import time; time.sleep(60)") as process:
        expected = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        assert process.wait(30) in (1, 128 + expected)


def test_a_second_signal_does_not_wait_for_running_requests():
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('drains', flush=True));"
        "print('up', flush=True); time.sleep(60)"
    )
    with signalled(0, "never", child) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.stdout.readline() == "drains\n"
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGKILL
