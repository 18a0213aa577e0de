"""A drafted server whose faults are switched while it runs, and what `fp4kv check` asks it."""

import random
import string
from contextlib import contextmanager
from unittest import mock

from launcher.checks.options import Options
from launcher.checks.suite import WORKLOADS, Prompt, Suite
from launcher.demo import PAIR
from tests.e2e.server import embedded_server, empty_cache, plugin_path
from tests.e2e.test_check import DRAFTER, NVFP4, SMALL

MAX_TOKENS = 56  # what the longest right answer has
NOISE_TOKENS = 16
# Of 0 to 199, the ones in whose answers most margins are small, by transformers in FP32.
NOISE_SEEDS = (58, 132, 34, 177, 37, 127, 33, 137, 82, 43)


def undrafted_server(scratch):
    return embedded_server(PAIR / "target", *NVFP4, log=scratch / "undrafted.log")


@contextmanager
def faulty_server(scratch):
    """(server, switch): ``switch(name)`` turns that fault on and every other off; "" is a sound server."""
    file = scratch / "fault"
    path = plugin_path()
    env = {"PYTHONPATH": path, "FP4KV_FAULT_FILE": str(file)}
    flags = (*NVFP4, *SMALL, *DRAFTER)
    with embedded_server(PAIR / "target", *flags, log=scratch / "faulty.log", env=env) as server:

        def switch(name):
            empty_cache(server.url)
            written = file.with_suffix(".new")
            written.write_text(name)
            written.replace(file)

        yield server, switch


def options(server, **more):
    """Of a run with few and short prompts, for two cores' sake."""
    common = {"suite": "pair", "depths": (100,), "positions": (0.5,), "prompts": 1, "max_tokens": MAX_TOKENS}
    return Options(url=server.url, **common | more)


@contextmanager
def unsure_prompts():
    """The workloads' prompts replaced by noise. The shipped pair is sure of its own tasks by several nats,
    so that small errors change no answer there; on noise its two best tokens often tie."""

    def workload(suite, name):
        first = 2 * WORKLOADS.index(name)
        seeds = NOISE_SEEDS[first : first + 2][: suite._most]
        return [Prompt(f"noise-{seed}", _noise(seed), max_tokens=suite.max_tokens) for seed in seeds]

    with mock.patch.object(Suite, "workload", workload):
        yield


def _noise(seed):
    characters = string.ascii_letters + string.digits + "     .,?"
    return "".join(random.Random(seed).choices(characters, k=40))
