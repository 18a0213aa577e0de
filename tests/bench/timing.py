"""How every benchmark times a call on a GPU, and what it records about the machine."""

import re
import time

import torch

DEVICE = "cuda"
# Inputs of one timed replay together exceed the L2 cache (60 MB on an H200) several times.
ROTATE_BYTES = 256 << 20
FEWEST, MOST = 10, 200  # samples of an entry


def timed(call, copies: int, seconds: float) -> dict:
    """p20, p50 and p80 in microseconds of one call(i), CUDA-graph replays of all i < copies.

    At least 10 replays, then until ``seconds`` have passed, at most 200.
    """
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    samples, started = [], time.monotonic()
    while len(samples) < FEWEST or (
        len(samples) < MOST and time.monotonic() - started < seconds
    ):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000 / copies)
    samples.sort()
    return {
        f"p{p}_us": round(samples[min(len(samples) * p // 100, len(samples) - 1)], 2)
        for p in (20, 50, 80)
    }


def copy_bandwidth() -> float:
    """Bytes read and written a second by an elementwise kernel over 4 GiB.

    A copy_ in a graph is a job of the copy engine, which reached 2.75 TB/s where a kernel reaches 4.25.
    """
    a = torch.zeros(1 << 30, dtype=torch.int32, device=DEVICE)
    b = torch.empty_like(a)
    return 8 * a.numel() / (timed(lambda _: torch.add(a, 1, out=b), 1, 0.3)["p50_us"] * 1e-6)


def told(text: str, most: int) -> str:
    """The text's last ``most`` characters, without the folders that a machine's packages lie in."""
    return re.sub(r"/\S*/(?=(flashinfer|sglang|triton|torch|tests)/)", "", text)[-most:]


def failure(error: Exception, most: int = 300) -> str:
    return told(f"{type(error).__name__}: {error}", most)
