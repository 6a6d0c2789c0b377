"""Memory for payload on its way to the disk: large slabs, used again and again.

Fresh memory costs a page fault for every 4 KB, which is more than the copy itself.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLAB_BYTES = 32 << 20
KEPT = 4
"""Empty slabs that wait for use; what a burst needed beyond them goes back to the system."""
ALIGNMENT = 64


class Slab:
    """One block of memory, filled from its beginning; free again when all that was put into it is written."""

    __slots__ = ("filled", "memory", "users")

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size, np.uint8)
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
        np.copyto(flat.reshape(array.shape), array)
        return Payload(flat, slab, self)

    def release(self, slab: Slab) -> None:
        """Take back what one payload used."""
        with self._lock:
            slab.users -= 1
            if not slab.users and slab is not self._current:
                self._recycle(slab)

    def _next(self, size: int) -> Slab:
        if size > SLAB_BYTES:
            return Slab(size)
        full, self._current = self._current, self._free.pop() if self._free else Slab(SLAB_BYTES)
        if not full.users:
            self._recycle(full)
        return self._current

    def _recycle(self, slab: Slab) -> None:
        slab.filled = 0
        if slab.memory.size == SLAB_BYTES and len(self._free) < KEPT:
            self._free.append(slab)
