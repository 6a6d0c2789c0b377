"""What the machine gives at the moment: how much of it others use, and how fast memory and the page cache are."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
QUIET = 0.1  # of one core, used by others


def user_seconds() -> float:
    """CPU seconds that all programs (and other guests of the host) took since boot; 0 where there is no /proc.

    Time inside the kernel is left out: writing back what *we* wrote happens there, on threads that are not ours.
    """
    try:
        with Path("/proc/stat").open() as stat:
            fields = stat.readline().split()
    except OSError:
        return 0.0
    user, nice, steal = int(fields[1]), int(fields[2]), int(fields[8])
    return (user + nice + steal) / TICK


class Foreign:
    """Measures the CPU time that other processes take from its making on."""

    def __init__(self) -> None:
        self._all, self._own, self._at = user_seconds(), _own(), time.perf_counter()

    def seconds(self) -> float:
        return max(0.0, user_seconds() - self._all - (_own() - self._own))

    def share(self) -> float:
        """Of one core."""
        return self.seconds() / max(1e-9, time.perf_counter() - self._at)


def _own() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def wait_until_quiet(patience: float) -> float:
    """Sleep until others use less than a tenth of a core for half a second, at most ``patience`` seconds; return how long."""
    started = time.perf_counter()
    while True:
        foreign = Foreign()
        time.sleep(min(0.5, max(0.1, patience)))
        waited = time.perf_counter() - started
        if foreign.share() < QUIET or waited >= patience:
            return waited


def peak_megabytes() -> float:
    """Largest resident memory this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_bandwidth(megabytes: int = 256) -> float:
    """Bytes a second that one thread reads from memory: the best of five searches by the C library's memchr."""
    block = bytearray(b"\x02") * (megabytes << 20)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        block.find(b"\x01")
        best = max(best, len(block) / (time.perf_counter() - started))
    return best


def write_bandwidth(folder: str | None = None, megabytes: int = 256) -> tuple[float, float]:
    """Bytes a second that one thread writes into the page cache, and until they are on the disk (fsync)."""
    block = bytearray(os.urandom(1 << 20)) * megabytes
    cached, synced = 0.0, 0.0
    for _ in range(3):
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.perf_counter()
            file.write(block)
            file.flush()
            cached = max(cached, len(block) / (time.perf_counter() - started))
            os.fsync(file.fileno())
            synced = max(synced, len(block) / (time.perf_counter() - started))
    return cached, synced
