"""What a recorder holds between a call and the disk.

A row is six references in a list of all rows: everything that repeats from step to step (where a call stands, what a slot looks
like) is an object made once, and becomes columns by its number (`columns`). So a row costs the training no object, which Python's
garbage collector would look at again and again until the row is written, and it costs the writer's thread a few look-ups.

Statistics of a tensor in host memory are measured by the compiled kernel straight from its address, else by NumPy.

Memory for payload on its way to the disk: large slabs, used again and again.

Fresh memory costs a page fault for every 4 KB, which is more than the copy itself. A slab lies in huge pages, where the system has
them: a disk that takes its bytes from there (`store.durable`) is twice as fast as from pages of 4 KB. Payloads lie next to one
another, so that many of them are one write.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation import kernels
from trueup.foundation.model import PACKED
from trueup.foundation.store.segment import ALIGNMENT


class Kind:
    """Where calls stand and what they are: level, phase, scope and op. The n-th of a step has the ordinal n."""

    __slots__ = ("level", "op", "ordinals", "phase", "recorded", "scope")

    def __init__(self, level: str, phase: str, scope: str, op: str, recorded: bool) -> None:
        self.level, self.phase, self.scope, self.op = level, phase, scope, op
        self.recorded = recorded  # false when the options leave such calls out; they still have their numbers
        self.ordinals: Iterator[int] = itertools.count()


class Call:
    """One execution of one operator, function or module, as the recorder knows it."""

    __slots__ = ("forward_seq", "kind", "ordinal", "parent", "seq", "site")

    def __init__(self, seq: int, kind: Kind, ordinal: int, parent: int | None, site: int | None, forward_seq: int | None) -> None:
        self.seq, self.kind, self.ordinal, self.parent, self.site, self.forward_seq = seq, kind, ordinal, parent, site, forward_seq

    @property
    def level(self) -> str:
        """Level of the call."""
        return self.kind.level

    @property
    def phase(self) -> str:
        """Phase of the call."""
        return self.kind.phase

    @property
    def scope(self) -> str:
        """Module path of the call."""
        return self.kind.scope

    @property
    def op(self) -> str:
        """Operator, function or module class."""
        return self.kind.op

    @property
    def recorded(self) -> bool:
        """Whether the options keep it."""
        return self.kind.recorded


@dataclass(frozen=True, slots=True)
class Tensor:
    """The description of a slot's tensor: dtype, shape and strides in elements, device."""

    dtype: str
    shape: Sequence[int]
    strides: Sequence[int] | None
    device: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A named slot and what its tensor looks like; compared by identity, so that adapters keep one of each."""

    name: str
    tensor: Tensor | None  # none for arguments that are no tensors


Place = tuple[str, str, "tuple[int, ...] | None"]
"""Where a slot's bytes lie: segment, key, and which part of that tensor they are (None: all of it)."""


class Statistics:
    """What was measured of one buffer, shared by every slot that shows the same bytes: ``values`` has the packed float64 vector
    of `kernels` as its ``bytes()`` (a NumPy array is one), or is what still lies on its device; ``data`` holds the tensor's bytes
    until the writer has taken them, the kernel's view at first, then a copy."""

    __slots__ = ("data", "digest", "place", "values", "within")

    def __init__(self, values: Any = None, digest: int | None = None, data: NDArray[Any] | Payload | None = None) -> None:
        self.values = values
        self.digest = digest
        self.data = data
        self.place: Place | None = None  # where the bytes lie, once they are written
        self.within: tuple[Statistics, tuple[int, ...]] | None = None
        """A buffer whose bytes are kept and that these are part of: offset, sizes and strides there, in elements."""


FIELDS = 6
Rows = list[Any]
"""Slots of calls, one after the other, `FIELDS` entries each: step (int), `Call`, `Slot`, non-tensor arguments (str or None), the
call and slot that last wrote the storage (``(seq, name)`` or None), `Statistics` or None."""


def fields(rows: Rows) -> list[list[Any]]:
    """Return steps, calls, slots, values, producers and statistics."""
    return [rows[k::FIELDS] for k in range(FIELDS)]


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether elements lie one after the other in C order; strides in elements."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


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


class _Memory:
    """Host memory that somebody owns, and whom it keeps alive, for NumPy to look at."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Any, start: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3, "typestr": dtype.str, "shape": tuple(shape), "data": (start, True),
            "strides": tuple([stride * dtype.itemsize for stride in strides]),
        }  # fmt: skip


def view(owner: Any, start: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """View host memory, kept alive by its owner, as NumPy, read only; ``strides`` count elements. Other dtypes are views of what
    NumPy knows."""
    array: NDArray[Any] = np.asarray(_Memory(owner, start, shape, strides, dtype))
    return array


def measure(
    start: int, kind: int | None, shape: tuple[int, ...], strides: tuple[int, ...], array: Callable[[], NDArray[Any]], detail: str,
    threads: int = 1,
) -> Statistics:  # fmt: skip
    """Measure host memory from the address ``start`` (0: sizes without memory), with ``strides`` in elements: its digest, unless
    the detail is ``digest`` its statistics, and for ``tensor`` its bytes, a view that whoever keeps them copies. ``kind`` is the
    compiled kernel's number of the dtype, None where ``array``, the tensor as NumPy, is measured."""
    kernel = kernels.native()
    if kernel is None or kind is None or (not start and 0 not in shape):
        stats = Statistics(digest=kernels.digest(array()))
        if detail != "digest":
            stats.values = np.empty(PACKED)
            kernels.summarize(array(), stats.values)
    elif detail == "digest":
        stats = Statistics(None, kernel.measure(start, kind, shape, strides, 0, threads))
    else:
        stats = Statistics(*kernel.measured(start, kind, shape, strides, threads))
    if detail == "tensor":
        stats.data = array()
    return stats
