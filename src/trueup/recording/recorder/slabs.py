"""Memory for payload on its way to the disk: large slabs, used again and again.

Fresh memory costs a page fault for every 4 KB, which is more than the copy itself. A slab lies in huge pages, where the system has
them: a disk that takes its bytes from there (`store.durable`) is twice as fast as from pages of 4 KB. Payloads lie next to one
another, so that many of them are one write.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation import kernels
from trueup.foundation.store.segment import ALIGNMENT

SLAB_BYTES = 28 << 20
"""A portion of the backlog (24 MB), and room for the tensor that made it one: so most portions are one write."""
KEPT = 4
"""Empty slabs that wait for use; what a burst needed beyond them goes back to the system."""
HUGE_PAGE = 2 << 20


class Slab:
    """One block of memory, filled from its beginning; free again when all that was put into it is written."""

    __slots__ = ("filled", "memory", "users")

    def __init__(self, size: int) -> None:
        self.memory = _memory(size)
        self.filled = 0
        self.users = 0


class Payload:
    """A copy of a tensor's elements in logical C order: ``array`` is flat; `release` gives its memory back."""

    __slots__ = ("_slab", "_slabs", "array")

    def __init__(self, array: NDArray[Any], slab: Slab, slabs: Slabs) -> None:
        self.array = array
        self._slab, self._slabs = slab, slabs

    def release(self) -> None:
        """Say that nobody reads the array any more."""
        self._slabs.release(self._slab)


class Slabs:
    """The slabs of a recorder; used from several threads."""

    def __init__(self) -> None:
        self._free: list[Slab] = []
        self._current = Slab(0)
        self._lock = threading.Lock()

    def copy(self, array: NDArray[Any]) -> Payload:
        """Copy an array of any strides."""
        size = array.nbytes
        with self._lock:
            slab = self._current
            if slab.filled + size > slab.memory.size:
                slab = self._next(size)
            start = slab.filled
            slab.filled += size + -size % ALIGNMENT
            slab.users += 1
        flat = slab.memory[start : start + size].view(array.dtype)
        kernels.copy(array, flat)
        return Payload(flat, slab, self)

    def cut(self) -> None:
        """Begin a new slab, and so a write, with the next payload, unless the present one has much room."""
        with self._lock:
            if self._current.filled > SLAB_BYTES // 2:
                self._turn(Slab(0))

    def release(self, slab: Slab) -> None:
        """Take back the memory of one payload."""
        with self._lock:
            slab.users -= 1
            if not slab.users and slab is not self._current:
                self._recycle(slab)

    def _next(self, size: int) -> Slab:
        if size > SLAB_BYTES:
            return Slab(size)
        self._turn(self._free.pop() if self._free else Slab(SLAB_BYTES))
        return self._current

    def _turn(self, slab: Slab) -> None:
        full, self._current = self._current, slab
        if not full.users:
            self._recycle(full)

    def _recycle(self, slab: Slab) -> None:
        slab.filled = 0
        if slab.memory.size == SLAB_BYTES and len(self._free) < KEPT:
            self._free.append(slab)


def _memory(size: int) -> NDArray[np.uint8]:
    """Return fresh memory, in huge pages where the system gives them for the asking."""
    if size < HUGE_PAGE:
        return np.empty(size, np.uint8)
    mapped = mmap.mmap(-1, size + HUGE_PAGE)  # what is never touched is not there
    with suppress(AttributeError, OSError):  # neither macOS nor Windows has them, nor every Linux
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.__array_interface__["data"][0] % HUGE_PAGE
    return memory[start : start + size]
