"""The H200's scripts: which servers the checks start and compare, and what the others write down and judge."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
from fake_server import FakeServer

from launcher.checks import runner
from launcher.flags import parse
from launcher.process import ServerFailed
from tests.gpu import checks, drafters, host_cache, hybrid


def test_every_format_drafted_and_undrafted():
    args = checks.arguments(["MODEL", "OUT", "--draft", "DRAFT"])
    flags = {key: parse(checks.server_flags(args, *key)) for key in checks.runs(args.draft)}
    assert [(f.kv_cache_dtype, f.speculative_algorithm) for f in flags.values()] == [
        (kv, algorithm) for algorithm in (None, "DFLASH") for kv in ("bf16", "fp8_e4m3", "nvfp4")
    ]
    assert {key[1]: f.chunked_prefill_size for key, f in flags.items()} == {False: -1, True: 1024}
    assert len(checks.runs(None)) == 3


def test_ngram_in_a_drafts_place():
    args = checks.arguments(["MODEL", "OUT", "--draft", "NGRAM"])
    flags = parse(checks.server_flags(args, "nvfp4", True))
    assert (flags.speculative_algorithm, flags.speculative_ngram_max_bfs_breadth) == ("NGRAM", 1)
    assert flags.speculative_draft_model_path is None and len(checks.runs(args.draft)) == 6


def test_a_drafted_server_leaves_no_check_out(tmp_path):
    """Its undrafted twin reads in one chunk and the BF16 server is its control."""
    args = checks.arguments(["MODEL", str(tmp_path), "--draft", "DRAFT", "--depths", "300,900"])
    undrafted = {"speculative_algorithm": None, "chunked_prefill_size": -1}
    with FakeServer() as target, FakeServer(info=undrafted) as twin:
        with FakeServer(info={**undrafted, "kv_cache_dtype": "bf16"}) as control:
            urls = {("nvfp4", True): target.url, ("nvfp4", False): twin.url, checks.CONTROL: control.url}
            asked = checks.options(args, ("nvfp4", True), urls)
            verdict = runner.run(asked, tmp_path / "a")
            alone = runner.run(checks.options(args, checks.CONTROL, urls), tmp_path / "b")
    assert asked.skip == () and checks.summary(verdict)["verdict"] == "pass"
    assert alone["verdict"] == "pass" and "items" not in checks.summary(alone)["checks"]["recall"]


class FakeStart:
    """A server that is ready after a second, or does not start."""

    url = "http://nowhere"

    def __init__(self, starts=True):
        self.starts, self.stopped = starts, False

    def wait_ready(self, timeout):
        if not self.starts:
            raise ServerFailed("ended with status 1")
        return 1.0

    def stop(self):
        self.stopped = True


@pytest.fixture
def host_cache_run(tmp_path, monkeypatch):
    """(main, servers by way, the file it writes); no server is asked anything."""
    servers, out = {}, tmp_path / "host.json"

    def start(run, way):
        run.running[way] = servers.setdefault(way, FakeStart())

    monkeypatch.setattr(host_cache.Run, "start", start)
    monkeypatch.setattr(host_cache, "prompts", lambda model: [[1]])
    monkeypatch.setattr(host_cache, "examine", lambda url, asked, told: host_cache.Seen(used_tokens=0))
    return lambda: host_cache.main(["T", "D", str(out), "--logs", str(tmp_path)]), servers, out


def test_the_host_cache_is_written_down_after_each_server(host_cache_run, monkeypatch):
    main, servers, out = host_cache_run
    asked = []

    def judge(seen):
        asked.append(seen)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"it holds": len(asked) == 1}

    monkeypatch.setattr(host_cache, "judge", judge)
    with pytest.raises(KeyboardInterrupt):
        main()
    assert len(servers) == 4 and all(server.stopped for server in servers.values())
    written = json.loads(out.read_text())
    assert [w["verdicts"]["it holds"] for w in written["servers"].values()] == [True, False]
    assert written["unfinished"] == list(servers)[2:]


def test_a_host_cache_that_did_not_start_leaves_the_others(host_cache_run, monkeypatch):
    main, servers, out = host_cache_run
    servers["kernel layer_first"] = FakeStart(starts=False)
    monkeypatch.setattr(host_cache, "judge", lambda seen: {"it holds": True})
    assert main() == 1
    written = json.loads(out.read_text())
    assert written["broken"] == {"kernel layer_first": "ended with status 1"}
    assert len(written["servers"]) == 3 and not written["unfinished"]
    servers["kernel layer_first"] = FakeStart()
    assert main() == 0
    monkeypatch.setattr(host_cache, "judge", lambda seen: {"it holds": False})
    assert main() == 3


def test_controls_of_the_hybrids_decide_nothing():
    found = {name: {"kv": server.kv, "wrong": []} for name, server in hybrid.SERVERS.items()}
    found["bf16 oracle"]["wrong"] = ["alone / repeated: different at token 57 (gap 2.375)"]
    assert hybrid.verdicts(found) == ([], ["bf16 oracle"])
    found["nvfp4 oracle"]["wrong"] = ["the oracle's blocks are not accepted: [1.0]"]
    assert hybrid.verdicts(found) == (["nvfp4 oracle"], ["bf16 oracle"])


def test_drafters_may_be_tried_again(tmp_path, monkeypatch):
    """Its heads and what servers wrote down are of this try alone, whatever an earlier one left in the logs' folder."""
    monkeypatch.setattr(drafters, "fp4kv_report", lambda info: {})
    monkeypatch.setattr(drafters, "server_info", lambda url: {})
    monkeypatch.setattr(drafters, "generate", lambda *asked, **options: asked)
    args = Namespace(logs=tmp_path, only=None, embedded=True, tokens=4)
    for number in (1, 2):
        scratch = tmp_path / f"scratch{number}"
        scratch.mkdir()
        run = drafters.Run(args, [[1]], scratch)
        key = ("eagle3-tree", "eager")
        if number == 1:
            run.moves_file(key).write_text("3\n2\n")
        run.ask(key, SimpleNamespace(url="http://nowhere"))
        assert run.moved == {key: 5 if number == 1 else 0}
