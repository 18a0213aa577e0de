"""`make demo` without a server: what it takes for a success, and what it refuses before it starts one."""

import json
from pathlib import Path

import pytest

from launcher import demo
from launcher.client import Generation, ServerError, generate, server_info
from launcher.demo_table import judge, not_as_asked, print_table
from launcher.flags import UsageError
from launcher.process import ServerFailed
from launcher.prompts import load_prompts
from launcher.expected import PACKED_POOL

PROMPTS = [{"name": "one"}, {"name": "two"}]
POOL = {"bytes_per_token": 144, "dtype": "uint8", "layers": 4}


def generation(*tokens, gaps=None, accept_length=None):
    return Generation(tokens, "text", accept_length, gaps or (1.0,) * len(tokens), 5, 0)


def report(name):
    pool = PACKED_POOL if name != "a" else "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
    return {
        "target": {**POOL, "class": pool},
        "draft": {**POOL, "class": "d"} if name == "c" else None,
        "max_total_num_tokens": 99,
    }


def results(c=((1, 2), (3,)), length=2.5):
    answers = {"a": ((1, 2), (3,)), "b": ((1, 2), (3,)), "c": c}
    return {
        name: (
            [generation(*t, accept_length=length if name == "c" else None) for t in tokens],
            {"internal_states": [{"fp4kv": report(name)}]},
        )
        for name, tokens in answers.items()
    }


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the demo with faked answers; returns (exit code, stdout, stderr)."""

    def start(outcome, *argv):
        def run_all(*_args, **_kwargs):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(demo, "judged_launches", lambda *_: {})
        monkeypatch.setattr(demo, "load_prompts", lambda *_: PROMPTS)
        monkeypatch.setattr(demo, "run_all", run_all)
        code = demo.main(["--embedded", *argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return start


def test_equal_answers_are_exit_0_and_kept(run, tmp_path):
    file = tmp_path / "run.json"
    code, out, _ = run(results(), "--json", str(file))
    assert code == 0 and "OK: (c) answers as (b) on all 2 prompts (0 parted at a near-tie)" in out
    assert "mean accept length 2.50" in out
    assert [row["b_c"]["verdict"] for row in json.loads(file.read_text())["rows"]] == ["equal"] * 2


def test_a_different_answer_is_exit_3_and_named(run):
    code, out, _ = run(results(c=((1, 2), (4,))))
    assert code == 3 and "FAILED: (b) and (c) differ on two" in out and "OK" not in out


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ServerFailed("it ended"), 1),
        (ServerError("HTTP 500"), 1),
        (ConnectionRefusedError("refused"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_failed_run_is_one_message(run, failure, code):
    found, out, err = run(failure)
    assert found == code and "OK" not in out
    assert "make demo: " in err and "Traceback" not in err


def test_servers_that_run_something_else_are_no_success(run):
    wrong = results()
    wrong["c"][1]["internal_states"][0]["fp4kv"]["draft"] = None
    code, out, err = run(wrong)
    assert code == 1 and "(c) runs no drafter" in err and "OK" not in out
    wrong["b"] = (wrong["b"][0], {})
    assert "(b) does not report what it runs" in run(wrong)[2]


def test_not_as_asked():
    assert not_as_asked({name: report(name) for name in "abc"}) == []
    swapped = {"a": report("b"), "b": report("a"), "c": report("c")}
    assert not_as_asked(swapped) == [
        f"(a) serves with {PACKED_POOL}",
        "(b) serves with sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    ]


def test_table_without_an_accept_length(capsys):
    print_table(judge(PROMPTS, results(length=None), 0.0), {"c": report("c")})
    out = capsys.readouterr().out
    assert "mean accept length" not in out and "drafter 144 (uint8, 4 layers); 99 tokens" in out


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--model", "--model-path .*none: there is no"), ("--draft", "draft-model-path .*none: there is no")],
)
def test_missing_models_start_nothing(flag, message, tmp_path):
    args = demo.build_parser().parse_args(["--embedded", flag, str(tmp_path / "none")])
    with pytest.raises(UsageError, match=message):
        demo.judged_launches(args, None)


def test_unknown_flags_for_sglang_start_nothing(capsys):
    assert demo.main(["--embedded", "--", "--kv-cach-dtype", "x"]) == 2
    assert "unknown flag '--kv-cach-dtype'" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "name"), [("--json", "file/x.json"), ("--json", "."), ("--logs", "file/x")])
def test_outputs_that_cannot_be_written_are_named_first(flag, name, tmp_path):
    (tmp_path / "file").write_text("")
    args = demo.build_parser().parse_args([flag, str(tmp_path / name)])
    with pytest.raises(UsageError, match=flag):
        demo.check_outputs(args)


def test_one_failure_stops_the_other_servers(monkeypatch):
    stopped = []

    class Server:
        def stop(self):
            stopped.append(self)

    def ask(name, flags, prompts, servers, **_):
        servers.append(Server())
        if name == "b":
            raise ServerFailed("it ended")
        return [], {}

    monkeypatch.setattr(demo, "ask", ask)
    with pytest.raises(ServerFailed):
        demo.run_all({"a": [], "b": []}, [], embedded=True, logs=".", progress=print)
    assert stopped


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the prompts cannot be read from"),
        ("{", "the prompts cannot be read from"),
        ("[]", "has no prompts"),
        ("{}", "has no prompts"),
        ("[1]", "prompt 1 in .* needs a name, messages"),
        ('[{"name": "x", "messages": [], "max_new_tokens": 1}]', "prompt 1 in"),
        ('[{"name": "x", "messages": [1], "max_new_tokens": 0}]', "prompt 1 in"),
    ],
)
def test_prompts_that_cannot_be_asked_are_named(text, message, tmp_path):
    file = tmp_path / "prompts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_prompts(file, tmp_path)


def test_a_model_without_a_tokenizer_is_named(tmp_path):
    file = demo.PAIR / "prompts.json"
    with pytest.raises(UsageError, match="its tokenizer cannot be loaded"):
        load_prompts(file, tmp_path)


def test_the_shipped_prompts_can_be_asked():
    for file in (demo.PAIR / "prompts.json", Path(__file__).parent / "gpu/smollm2_prompts.json"):
        assert all(p["input_ids"] for p in load_prompts(file, demo.PAIR / "target"))


@pytest.fixture
def answering():
    """Starts an HTTP server that answers everything with one status and body; returns its URL."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    servers = []

    def start(status, body):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b"boom", "HTTP 500: boom"),
        (200, b"<html>", "no JSON object but '<html>'"),
        (200, b"[]", "no JSON object"),
        (200, b'{"output_ids": []}', "returned no token ids"),
        (200, b'{"output_ids": [1]}', "left out what was asked for .KeyError.'meta_info'"),
    ],
)
def test_answers_that_are_none_are_a_server_error(answering, status, body, message):
    with pytest.raises(ServerError, match=message):
        generate(answering(status, body), [1], 1)


def test_a_proxy_of_the_environment_is_not_used(answering, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert server_info(answering(200, b'{"x": 1}')) == {"x": 1}
