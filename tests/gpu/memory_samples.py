"""Resident memory of a server's processes and of the GPU over time, and whether it grew."""

import os
import statistics
import time
from pathlib import Path

# The first third of a run fills caches that grow once: allocators, graphs of shapes not seen before.
_WARM_UP = 1 / 3
_FEWEST = 8
# What may be added between the first and the last quarter of the rest, as a share of what is held.
_SHARE, _LEAST_BYTES = 0.02, 64 << 20


class Memory:
    """``group``: the server's process group. ``gpu``: whether what its processes hold on GPUs is sampled too."""

    def __init__(self, group, gpu):
        self.group, self._gpu = group, gpu
        self._began = time.monotonic()
        self._rss, self._device = [], []

    def sample(self):
        at = round(time.monotonic() - self._began, 1)
        self._rss.append((at, resident_bytes(self.group)))
        if self._gpu:
            self._device.append((at, gpu_bytes(self.group)))

    def series(self):
        """Name -> [(seconds, bytes)]."""
        found = {"host memory (RSS of all processes)": self._rss}
        return found | ({"GPU memory": self._device} if self._gpu else {})

    @staticmethod
    def allowed(samples):
        """Bytes that ``samples`` may have grown by."""
        return max(_LEAST_BYTES, int(_SHARE * max((held for _, held in samples), default=0)))


def resident_bytes(group):
    """The sum of the resident sets of the processes in ``group``; a page that two share counts twice."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return total


def gpu_bytes(group):
    """What the processes in ``group`` hold on all GPUs, by NVML. RuntimeError where the driver does not say."""
    import pynvml

    pynvml.nvmlInit()
    total = 0
    for index in range(pynvml.nvmlDeviceGetCount()):
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index)):
            try:
                if os.getpgid(process.pid) != group:
                    continue
            except ProcessLookupError:  # it ended meanwhile
                continue
            if process.usedGpuMemory is None:
                raise RuntimeError(f"NVML does not say what process {process.pid} holds on GPU {index}")
            total += process.usedGpuMemory
    if not total:
        raise RuntimeError(f"NVML knows of no process of group {group} on a GPU")
    return total


def growth(samples):
    """Bytes by which the median of the last quarter exceeds that of the first, after the warm-up.

    None for fewer samples than can be told apart from noise.
    """
    held = [value for _, value in samples][int(len(samples) * _WARM_UP) :]
    quarter = len(held) // 4
    if len(held) < _FEWEST:
        return None
    return int(statistics.median(held[-quarter:]) - statistics.median(held[:quarter]))
