"""How servers' decode speed is measured and judged; the servers themselves need a GPU."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.gpu import stream_rate, throughput
from tests.gpu.stream_rate import Stream, StreamFailed

NEW_TOKENS = 21


class FakeServer(BaseHTTPRequestHandler):
    """Streams the first token, waits, and sends the rest; a prompt of one token breaks it."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sampling = body["sampling_params"]
        assert sampling["ignore_eos"] and sampling["temperature"] == 0 and body["stream"]
        prompt = body["input_ids"]
        if prompt == [400]:
            self.send_error(400, "bad")
            return
        self.send_response(200)
        self.end_headers()
        tokens = sampling["max_new_tokens"] - (prompt == [1])
        for count, pause in ((1, 0.3), (tokens, 0)):
            meta = {"completion_tokens": count, "cached_tokens": len(prompt) - 1, "spec_accept_length": 4.0}
            self.wfile.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(pause)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_streams_are_timed_from_their_first_token_to_their_last(url):
    streams = stream_rate.run_streams(url, [[5, 6, 7]] * 3, NEW_TOKENS)
    for stream in streams:
        assert stream.tokens == NEW_TOKENS - 1
        assert (stream.accept_length, stream.cached_tokens) == (4.0, 2)
        assert 0.1 < stream.last_s - stream.first_s < 10


@pytest.mark.parametrize("prompt, message", [([1], "20 tokens came, 21 were asked for"), ([400], "HTTP 400")])
def test_an_answer_that_is_not_whole_fails(url, prompt, message):
    with pytest.raises(StreamFailed, match=message):
        stream_rate.run_streams(url, [[5, 6], prompt], NEW_TOKENS)


def test_one_chunk_is_no_stream():
    line = b'data: {"error": {"message": "out of memory"}}'
    with pytest.raises(StreamFailed, match="no stream of chunks but .*out of memory"):
        stream_rate.parse_stream([(0.0, line)], NEW_TOKENS)


def test_waiting_for_the_other_streams_counts():
    rounds = [
        [Stream(0.0, 1.0, 100, None, 7), Stream(1.0, 2.0, 100, None, 9)],
        [Stream(0.0, 1.0, 100, None, 9), Stream(0.0, 1.0, 100, None, 9)],
        [Stream(0.0, 2.0, 100, None, 9), Stream(0.0, 4.0, 100, None, 9)],
    ]
    assert stream_rate.summarize(rounds) == {
        "tokens_per_second": 100.0,
        "rounds_tokens_per_second": [100.0, 200.0, 50.0],
        "per_stream_tokens_per_second": 100.0,
        "accept_length": None,
        "fewest_cached_tokens": 7,
    }


def row(kv, backend, rate, drafted=False, streams=1):
    return {
        "kv": kv,
        "backend": backend,
        "drafted": drafted,
        "streams": streams,
        "tokens_per_second": rate,
    }


def test_nvfp4_is_compared_with_fp8_on_every_backend():
    rows = [
        row("fp8_e4m3", "triton", 100),
        row("nvfp4", "triton", 99),  # within the slack
        row("fp8_e4m3", "flashinfer", 110),
        row("bf16", "triton", 200),
        row("fp8_e4m3", "triton", 100, drafted=True),
        row("nvfp4", "triton", 97, drafted=True),
        row("fp8_e4m3", "triton", 500, streams=8),  # no NVFP4 row beside it
    ]
    assert throughput.slower_rows(rows) == [(False, 1, "flashinfer", 0.9), (True, 1, "triton", 0.97)]
    lines = throughput.table(rows)
    assert lines[1].split() == ["undrafted", "x1", "100", "99", "110", "200"]
    assert lines[3].split() == ["undrafted", "x8", "500", "-", "-", "-"]


def options(tmp_path, *extra):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    args = throughput.parse([str(tmp_path), "out.json", "--logs", "logs", *extra])
    args.draft = Path("draft")
    return args


def test_servers(tmp_path):
    args = options(tmp_path, "--sglang-flags", "--page-size 1")
    configs = throughput.configurations(args.backends)
    assert len(configs) == 10 and ("flashinfer", "nvfp4", False) not in configs
    for config in configs:
        flags = " ".join(throughput.server_flags(args, config))
        assert f"--kv-cache-dtype {config[1]} --attention-backend {config[0]}" in flags
        assert ("--speculative-algorithm DFLASH" in flags) == config[2]
        assert flags.endswith("--page-size 1")
        assert ("SGLANG_SIMULATE_ACC_LEN" in throughput.server_env(args, config)) == config[2]
    held = int(flags.split("--max-total-tokens ")[1].split()[0])
    assert held >= 8 * (args.prompt_tokens + args.new_tokens)


def test_prompts_differ_and_stay_the_same(tmp_path):
    args = options(tmp_path, "--prompt-tokens", "50")
    prompts = throughput.make_prompts(args)
    assert len(prompts) == 8 and len(set(map(tuple, prompts))) == 8
    assert all(len(p) == 50 and 256 <= min(p) and max(p) < 300 for p in prompts)
    assert throughput.make_prompts(args) == prompts


@pytest.mark.parametrize(
    "dtype, tokens, message",
    [
        ("bfloat16", 10**6, "asked for nvfp4, the pool is bfloat16"),
        ("float4_e2m1fn_x2", 100, "the pool has 100 tokens, 64800 are needed"),
    ],
)
def test_another_pool_than_asked_for_is_not_measured(tmp_path, monkeypatch, dtype, tokens, message):
    report = {"target": {"dtype": dtype}, "draft": None, "max_total_num_tokens": tokens}
    monkeypatch.setattr(throughput, "server_info", lambda _: {"internal_states": [{"fp4kv": report}]})
    run = throughput.Run(options(tmp_path), save=None)
    server = type("Server", (), {"url": "http://nowhere"})
    run.one(("triton", "nvfp4", False), server, [])
    assert run.failed == {("triton", "nvfp4", False): message}


def test_knobs_are_those_of_the_release():
    """SGLang reads the names the drafted servers are started with."""
    from sglang.srt.environ import envs

    for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_ACC_TOKEN_MODE"):
        assert hasattr(envs, name)
    assert not hasattr(envs, "SGLANG_NO_SUCH_KNOB")


def test_a_run_that_is_cut_off_keeps_what_was_measured(tmp_path, monkeypatch):
    args = options(tmp_path, "--backends", "triton")
    args.out = tmp_path / "out.json"
    saved = []

    def save(run):
        throughput.write(args, ["model", "out"], True, 0.0, run)
        saved.append(json.loads(args.out.read_text()))

    class Server:
        def wait_ready(self, seconds, path):
            return 1.0

        def stop(self, grace):
            pass

    monkeypatch.setattr(throughput, "start", lambda args, config: Server())
    monkeypatch.setattr(throughput, "make_prompts", lambda args: [])
    monkeypatch.setattr(
        throughput,
        "measure",
        lambda args, config, server, prompts: [
            {"kv": config[1], "backend": config[0], "drafted": config[2], "streams": 1,
             "tokens_per_second": 9.0}
        ],
    )  # fmt: skip
    throughput.Run(args, save).go()
    assert [len(content["rows"]) for content in saved] == [1, 2, 3, 4, 5, 6]
    assert [content["complete"] for content in saved] == [False] * 5 + [True]
