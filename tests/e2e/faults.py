"""A drafted server whose faults are switched while it runs, and what `fp4kv check` asks it."""

import os
import time
from contextlib import contextmanager
from pathlib import Path

import requests

from launcher.checks.options import Options
from launcher.demo import PAIR
from tests.e2e.server import embedded_server

PLUGIN = Path(__file__).parent / "plugin"
NVFP4 = ("--kv-cache-dtype", "nvfp4", "--max-running-requests", "4")
# A pool that four requests fill and outgrow, so that they are retracted and every slot changes owner.
SMALL = ("--max-total-tokens", "512", "--context-length", "512", "--chunked-prefill-size", "128")
DRAFTER = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "draft"))


def undrafted_server(scratch):
    return embedded_server(PAIR / "target", *NVFP4, log=scratch / "undrafted.log")


@contextmanager
def faulty_server(scratch):
    """(server, switch): ``switch(name)`` turns that fault on and every other off; "" is a sound server."""
    file = scratch / "fault"
    path = os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "FP4KV_FAULT_FILE": str(file)}
    with embedded_server(
        PAIR / "target", *NVFP4, *SMALL, *DRAFTER, log=scratch / "faulty.log", env=env
    ) as server:

        def switch(name):
            empty_cache(server.url)
            written = file.with_suffix(".new")
            written.write_text(name)
            written.replace(file)

        yield server, switch


def empty_cache(url):
    """Waits until no request runs and drops the prefix cache."""
    until = time.monotonic() + 60
    while requests.post(f"{url}/flush_cache", timeout=60).status_code != 200:
        assert time.monotonic() < until, "the server never became idle"
        time.sleep(0.2)


def options(server, **more):
    """Few and short prompts, for two cores' sake."""
    return Options(url=server.url, suite="pair", depths=(300,), positions=(0.5,), prompts=1, answers=3, **more)
