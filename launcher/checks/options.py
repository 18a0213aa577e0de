"""What a run is asked to do."""

import math
from dataclasses import asdict, dataclass

from launcher.checks.suite import SUITES, WORKLOADS
from launcher.flags import UsageError

DEPTHS = (8_000, 60_000, 110_000)
POSITIONS = (0.1, 0.5, 0.9)
ANSWERS = 64
MIN_ANSWERS = 60  # of the agreement; fewer is said in the verdict


@dataclass(frozen=True)
class Options:
    """``url``: the server to check. ``control``: one with FP8 or BF16 KV. ``undrafted``: the same launch
    without its drafter, a URL or the folder of a run of it. ``one_chunk``: the same launch with prefill
    in larger chunks. ``floors``: accept length by workload, "" for all others. ``only``, ``skip``: check
    ids. ``prompts``: at most so many of a kind, for a slow server. ``kv``: the KV format where the server
    does not say. ``template``: chat_template_kwargs of every request, {"enable_thinking": False} say.

    Raises: UsageError for what cannot be meant.
    """

    url: str
    control: str | None = None
    undrafted: str | None = None
    one_chunk: str | None = None
    suite: str = "chat"
    only: tuple = ()
    skip: tuple = ()
    depths: tuple = DEPTHS
    positions: tuple = POSITIONS
    answers: int = ANSWERS
    prompts: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    floors: tuple = ()
    kv: str | None = None
    model: str | None = None
    template: dict | None = None
    timeout_s: float = 600

    def __post_init__(self):
        for name in ("url", "control", "one_chunk"):
            value = getattr(self, name)
            if value is not None and not value.startswith(("http://", "https://")):
                raise UsageError(f"--{name.replace('_', '-')} {value}: a URL like http://HOST:PORT is needed")
        if self.suite not in SUITES:
            raise UsageError(f"--suite {self.suite}: there are {', '.join(SUITES)}")
        for depth in self.depths:
            if depth < 64:
                raise UsageError(f"--depths {depth}: a depth is at least 64 tokens")
        for position in self.positions:
            if not 0 <= position <= 1:
                raise UsageError(f"--positions {position}: from 0 (the beginning) to 1 (the end)")
        for name, least in (("answers", 1), ("prompts", 1), ("max_tokens", 1), ("timeout_s", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise UsageError(f"--{name.removesuffix('_s').replace('_', '-')} {value}: at least {least}")
        for workload, floor in self.floors:
            if workload and workload not in WORKLOADS:
                raise UsageError(f"--floor {workload}: the workloads are {', '.join(WORKLOADS)}")
            if not 1 <= floor < math.inf:
                raise UsageError(f"--floor {floor}: an accept length is at least 1")

    def floor(self, workload):
        """The accept length that ``workload`` must reach, None where nothing states one."""
        stated = dict(self.floors)
        return stated.get(workload, stated.get(""))

    def as_json(self):
        return asdict(self)


def from_json(data):
    """The Options that ``as_json`` gave."""
    lists = ("only", "skip", "depths", "positions")
    return Options(
        **data | {name: tuple(data[name]) for name in lists} | {"floors": tuple(map(tuple, data["floors"]))}
    )
