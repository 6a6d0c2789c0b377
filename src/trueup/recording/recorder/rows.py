"""What a recorder holds between a call and the disk.

A row is six references in a list of all rows: everything that repeats from step to step (where a call stands, what a slot looks
like) is an object made once, and becomes columns by its number (`columns`). So a row costs the training no object, which Python's
garbage collector would look at again and again until the row is written, and it costs the writer's thread a few look-ups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from trueup.recording.recorder.slabs import Payload


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
