"""The long run's verdicts: each turns to a failure where its fault is, and only there."""

import json
import os
from types import SimpleNamespace

import pytest
from fake_server import FakeServer, right

from launcher.equality import compare
from tests.gpu import long_run
from tests.gpu.long_traffic import DECK, KINDS, Answer, Job
from tests.gpu.memory_samples import growth, resident_bytes

GIB = 1 << 30


def answer(**changes):
    return Answer(**{"tokens": (1, 2), "prompt_ids": (5,), "right": True, "retractions": 1, "cached_tokens": 0, **changes})


class Flat:
    """Memory that was sampled, in place of a server's."""

    allowed = staticmethod(long_run.Memory.allowed)

    def __init__(self, held=(2 * GIB,) * 40):
        self.held = held

    def series(self):
        return {"host memory": list(enumerate(self.held))}


def sound():
    """What a run without a fault saw."""
    prompt = SimpleNamespace(id="p", max_tokens=8)
    return long_run.Found(
        asked=dict.fromkeys(KINDS, 3),
        answers=[(Job(kind, prompt), answer()) for kind in KINDS if kind != "cancelled"],
        parted=[("short p", compare((1, 2), (1, 2), (9.0, 9.0), 3.5))],
        usage=[0.2, 0.93],
        slots=long_run.Slots(0, 0, 0),
        graphs=(40, 1),
    )


def failed(found, memory=None, embedded=False):
    verdicts = long_run.judge(found, memory or Flat(), embedded)
    return [name for name, (passed, _) in verdicts.items() if not passed]


def test_a_run_without_a_fault_passes():
    assert failed(sound()) == []
    assert len(long_run.judge(sound(), Flat(), embedded=False)) == 7


def fault(name):
    found = sound()
    if name == "every request was answered":
        found.failures.append("long x: server gone")
    elif name == "every kind ran":
        found.answers = [pair for pair in found.answers if pair[0].kind != "tool"]
    elif name == "the pool was full":
        found.usage = [0.5]
    elif name == "every slot came back":
        found.slots.after = 16
    elif name == "no answer of the sample changed":
        found.parted.append(("long y", compare((1, 2), (1, 3), (9.0, 9.0), 3.5)))
    elif name == "decode ran under CUDA graphs":
        found.graphs = (0, 0)
    return found


@pytest.mark.parametrize("name", [n for n in long_run.judge(sound(), Flat(), False) if n != "host memory stayed flat"])
def test_each_fault_fails_its_verdict_alone(name):
    assert failed(fault(name)) == [name]


def test_slots_that_a_flush_hides_are_seen_before_it():
    found = sound()
    found.slots = long_run.Slots(before=0, after=0, after_flush=3)
    assert failed(found) == ["every slot came back"]
    found.slots = None
    assert failed(found) == ["every slot came back"]


def test_nothing_asked_again_is_no_pass():
    found = sound()
    found.parted = []
    assert failed(found) == ["no answer of the sample changed"]


def test_memory_that_grows_after_its_warm_up():
    warm = [GIB] * 10 + [2 * GIB] * 30  # caches that are filled once
    assert failed(sound(), Flat(warm)) == []
    leak = [2 * GIB + (8 << 20) * n for n in range(40)]
    assert failed(sound(), Flat(leak)) == ["host memory stayed flat"]
    assert failed(sound(), Flat([GIB] * 5)) == ["host memory stayed flat"]
    assert growth(list(enumerate([5] * 5))) is None and growth(list(enumerate(leak))) > 64 << 20


def test_an_embedded_run_has_no_graphs_to_show():
    found = sound()
    found.graphs = (0, 0)
    assert failed(found, embedded=True) == []


def test_decode_steps_are_counted_in_the_log(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "Prefill batch, cuda graph: False\nDecode batch, #running-req: 3, cuda graph: True, x\n"
        "Decode batch, cuda graph: False, x\nDecode batch, cuda graph: True, x\n"
    )
    assert long_run.graph_steps(log) == (2, 1)


def test_what_a_stream_wrote_on_after_its_end_is_no_answer():
    assert long_run.until_stop((5, 2, 7, 2), {2}) == (5, 2)
    assert long_run.until_stop((5, 6), {2}) == (5, 6)


def test_the_sample_is_spread_over_the_run():
    assert long_run.spread(list(range(10)), 3) == [0, 3, 6]
    assert long_run.spread([1, 2], 5) == [1, 2]


def test_every_kind_is_in_the_deck():
    assert set(DECK) == set(KINDS) == {"short", "long", "shared", "tool", "streamed", "cancelled"}


def test_this_process_is_resident():
    assert resident_bytes(os.getpgid(0)) > 10 << 20


def test_the_flags_are_those_of_the_served_combination():
    from launcher.flags import parse

    args = long_run.arguments(["MODEL", "DRAFT", "OUT", "--logs", "L", "--pool", "4096", "--page-size", "16"])
    flags = parse(long_run.server_flags(args))
    assert (flags.kv_cache_dtype, flags.speculative_algorithm, flags.page_size) == ("nvfp4", "DFLASH", 16)
    assert flags.max_total_tokens == 4096 and flags.disable_cuda_graph is not True


class FullServer(FakeServer):
    """A server with a full pool that answers `/generate` and `/tokenize` too, a character a token.

    ``leak``: slots that stay in use once something was cancelled. ``garble``: whether what is asked beside
    other requests gets a wrong token.
    """

    def __init__(self, leak=0, garble=False):
        super().__init__(answer=(lambda n, body, text: text[:-1] + "?") if garble else None, meta=self._retracted)
        self.leak, self.leaked, self.streams, self.flushed = leak, 0, 0, 0

    @staticmethod
    def _retracted(n, body, meta):
        meta["num_retractions"] = 1

    def get(self, path):
        if path.startswith("/v1/loads"):
            load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.leaked, "token_usage": 0.9}
            return 200, {"loads": [load]}
        return super().get(path)

    def post(self, path, body):
        """The answer to what FakeServer does not have."""
        if path == "/flush_cache":
            self.flushed += 1
            return 200, {}
        if path == "/tokenize":
            return 200, {"tokens": [ord(c) for c in body["messages"][0]["content"]]}
        text, asked = right("".join(map(chr, body["input_ids"]))), body["sampling_params"]
        if "logprob_start_len" in body:
            given = body["input_ids"][body["logprob_start_len"] + 1 :]
            tops = [[[-0.1, token], [-9.1, 0]] for token in given]
            logprobs = {
                "input_token_logprobs": [[-0.1, token, None] for token in given],
                "input_top_logprobs": tops,
            }
            return 200, {"meta_info": {"cached_tokens": 0, **logprobs}}
        tokens = [ord(c) for c in text]
        if asked.get("ignore_eos"):
            tokens = [*tokens, self.stop_token, *[7] * asked["max_new_tokens"]][: asked["max_new_tokens"]]
        if body.get("stream"):
            self.streams += 1
            self.leaked = self.leak
        meta = {"prompt_tokens": len(body["input_ids"]), "cached_tokens": 0, "completion_tokens": len(tokens)}
        return 200, {"output_ids": tokens, "text": text, "meta_info": meta}


def drive(**faults):
    """A short run against a FullServer."""
    with FullServer(**faults) as server:
        plain = server.http.RequestHandlerClass.do_POST

        def do_post(handler):
            if "/v1/" in handler.path:
                plain(handler)
                return
            body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])) or "{}")
            status, content = server.post(handler.path, body)
            if not body.get("stream"):
                handler._send((status, content))
                return
            handler.send_response(200)
            handler.end_headers()
            for count in (1, 2, 3, len(content["output_ids"])):
                part = {**content, "output_ids": content["output_ids"][:count]}
                handler.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            handler.wfile.write(b"data: [DONE]\n\n")
            handler.close_connection = True

        server.http.RequestHandlerClass.do_POST = do_post
        flags = [
            "--embedded", "--minutes", "0.02", "--requests", "4", "--pool", "4000", "--written", "64",
            "--sample", "30",
        ]  # fmt: skip
        args = long_run.arguments(["MODEL", "DRAFT", "OUT", "--logs", "L", *flags])
        found, process = long_run.Found(), SimpleNamespace(url=server.url, pid=os.getpgid(0))
        long_run.drive(args, process, found, lambda text: None)
        assert server.flushed > 1
    return found


def test_a_sound_server_is_driven_without_a_fault():
    found = drive()
    assert failed(found, embedded=True) == [] and {c.verdict for _, c in found.parted} == {"equal"}
    result = long_run.content(
        long_run.arguments(["MODEL", "DRAFT", "OUT", "--logs", "L", "--embedded"]), found, Flat(), {}, None, 1.0
    )
    assert json.loads(json.dumps(result))["right"]["tool"][0] > 0
    assert result["sample"]["verdicts"]["equal"] == result["sample"]["asked"] > 0


def test_a_server_that_garbles_under_load_and_leaks_is_found_out():
    found = drive(leak=16, garble=True)
    assert failed(found, embedded=True) == ["every slot came back", "no answer of the sample changed"]
    assert {c.gap for _, c in found.parted if not c.passed} == {9.0}
