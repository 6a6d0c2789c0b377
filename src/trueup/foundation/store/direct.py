"""Writing past the page cache: the disk takes the bytes from where they lie.

Copying into the page cache takes a core as long as a disk takes to write, and the system's threads as long again to empty it;
without it a write costs hardly any CPU time, which is the training's. Only blocks that lie alike in memory and in the file can go
this way (``O_DIRECT``), so `pending` puts them so. The rest goes through the page cache like any other write: the edges; all of it
on a file system that refuses (some that are reached by a network); and all of it on a slow disk, where the page cache holds what
comes in a burst.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import defaultdict
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

if sys.platform != "win32":
    import fcntl

BLOCK = 4096
"""Bytes to whose multiples addresses, places in the file and sizes are cut: the largest block of any disk, and a page."""
LARGE = 1 << 20
"""Bytes from which on this pays."""
AT_ONCE = 64 << 20
"""Most bytes of one write."""
SLOW = 500e6
"""Bytes a second below which a disk is slow."""
JUDGED = 256 << 20
"""Bytes over which the speed is taken: one write may wait for much else."""
PAUSE = 60.0
"""Seconds for which a slow disk is left to the page cache, before it is tried again."""


class _Device:
    """What is known of the disk below a file system."""

    __slots__ = ("again", "seconds", "written")

    def __init__(self) -> None:
        self.written, self.seconds = 0, 0.0
        self.again = 0.0
        """When it may be written to past the page cache, by the monotonic clock."""

    def wrote(self, size: int, seconds: float) -> None:
        """Learn how long a write took; none of its bytes where it was refused."""
        self.written += size
        self.seconds += seconds
        if not size:
            self.again = math.inf
        elif self.written >= JUDGED:
            if self.written < SLOW * self.seconds:
                self.again = time.monotonic() + PAUSE
            self.written, self.seconds = 0, 0.0


_devices: defaultdict[int, _Device] = defaultdict(_Device)


def write(file: IO[bytes], chunk: Any) -> None:
    """Write a chunk (bytes-like) where ``file``, open for binary writing, stands.

    Raises:
        OSError: disk full, file too large.
    """
    view = memoryview(chunk).cast("B")
    if view.nbytes >= LARGE and hasattr(os, "O_DIRECT"):
        view = view[_blocks(file, view) :]
    file.write(view)


def address(view: memoryview) -> int:
    """Return where bytes lie in memory; 0 where there are none."""
    if not view.nbytes:
        return 0
    array: NDArray[np.uint8] = np.frombuffer(view, np.uint8)
    return int(array.__array_interface__["data"][0])


def _blocks(file: IO[bytes], view: memoryview) -> int:
    """Write what can go past the page cache, and what lies before it; return the bytes written."""
    place, start = file.tell(), address(view)
    edge = -start % BLOCK
    if (place + edge) % BLOCK:
        return 0
    descriptor = file.fileno()
    device = _devices[os.fstat(descriptor).st_dev]
    if time.monotonic() < device.again:
        return 0
    file.write(view[:edge])
    file.flush()
    started = time.monotonic()
    blocks = view[edge : view.nbytes - (view.nbytes - edge) % BLOCK]
    written = _past_cache(descriptor, blocks, place + edge)
    device.wrote(written, time.monotonic() - started)
    file.seek(place + edge + written)
    return edge + written


def _past_cache(descriptor: int, blocks: memoryview, place: int) -> int:
    """Return the bytes written: fewer where the system refuses, or an error comes up, which an ordinary write will tell of."""
    written = 0
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            while written < blocks.nbytes and written % BLOCK == 0:
                written += os.pwrite(descriptor, blocks[written : written + AT_ONCE], place + written)
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:
        pass
    return written
