"""NVFP4 KV under --enable-hierarchical-cache on the embedded server; tests/gpu/host_cache.py says how."""

import json

import pytest

from launcher.demo import PAIR
from tests.gpu import host_cache

pytestmark = pytest.mark.e2e

VERDICTS = (
    "nothing was cached at first", "then on the device", "then on the host",
    "answers from the host are those from the device", "so are accept lengths",
    "control: without scales answers change",
    "control: with the drafter's K and V spoiled fewer drafts are accepted", "and no other answers", "every slot came back",
    "host pools take the bytes of the device's",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What one server wrote to its results."""
    folder = tmp_path_factory.mktemp("hierarchical")
    out = folder / "host.json"
    models = [str(PAIR / part) for part in ("target", "draft")]
    host_cache.main([*models, str(out), "--logs", str(folder), "--embedded"])
    written = json.loads(out.read_text())
    if written["broken"]:
        pytest.fail("\n".join(written["broken"].values()))
    (found,) = written["servers"].values()
    return found


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_host_gives_back_what_the_device_held(ran, verdict):
    assert ran["verdicts"][verdict], {k: v for k, v in ran.items() if k not in ("verdicts", "report")}


def test_no_verdict_is_left_out(ran):
    assert tuple(ran["verdicts"]) == VERDICTS


def test_the_server_reports_our_host_pool(ran):
    host = ran["report"]["host"]
    assert host["kv"]["class"] == "sglang_fp4kv.host_pool.NVFP4TokenToKVPoolHost"
    assert host["kv"]["tokens"] == host["draft"]["tokens"] > host_cache.POOL
