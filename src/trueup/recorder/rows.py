"""What a recorder holds between a call and the disk, and the columns that the store takes.

A row is six references in a list of all rows: everything that repeats from step to step (where a call stands, what a slot looks
like) is an object made once, and becomes columns by its number. So a row costs the training no object, which Python's garbage
collector would look at again and again until the row is written, and it costs the writer's thread a few look-ups.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trueup.model import PACKED
from trueup.recorder.slabs import Payload
from trueup.store import statistics as spread
from trueup.store import table


class Kind:
    """Where calls stand and what they are: level, phase, scope and op. The n-th of a step has the ordinal n."""

    __slots__ = ("level", "op", "ordinals", "phase", "recorded", "scope")

    def __init__(self, level: str, phase: str, scope: str, op: str, recorded: bool) -> None:
        self.level, self.phase, self.scope, self.op = level, phase, scope, op
        self.recorded = recorded
        """False when the options leave such calls out; they still have their numbers."""
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
    tensor: Tensor | None
    """None for arguments that are no tensors."""


Place = tuple[str, str, "tuple[int, ...] | None"]
"""Where a slot's bytes lie: segment, key, and which part of that tensor they are (None: all of it)."""


class Statistics:
    """What was measured of one buffer, shared by every slot that shows the same bytes.

    ``values`` is the packed float64 vector of `trueup.kernels`: an object whose ``bytes()`` it is (a NumPy array is one), or
    what is still on its device; ``data`` holds the bytes of the tensor until the writer has taken them: the kernel's view of
    them at first, then a copy.
    """

    __slots__ = ("data", "digest", "place", "values", "within")

    def __init__(self, values: Any = None, digest: int | None = None, data: NDArray[Any] | Payload | None = None) -> None:
        self.values = values
        self.digest = digest
        self.data = data
        self.place: Place | None = None
        """Where the bytes lie, once they are written."""
        self.within: tuple[Statistics, tuple[int, ...]] | None = None
        """A buffer whose bytes are kept and that these are part of: offset, sizes and strides there, in elements."""


FIELDS = 6
Rows = list[Any]
"""Slots of calls, one after the other, `FIELDS` entries each: step (int), `Call`, `Slot`, non-tensor arguments (str or None), the
call and slot that last wrote the storage (``(seq, name)`` or None), `Statistics` or None."""


def fields(rows: Rows) -> list[list[Any]]:
    """Return steps, calls, slots, values, producers and statistics."""
    return [rows[k::FIELDS] for k in range(FIELDS)]


def parts(rows: Rows, places: Sequence[Place | None]) -> dict[int, pa.Table]:
    """Return the rows of each step as a table; made as one and taken apart, for a table of few rows costs as much as one of many.

    Args:
        rows: whose statistics are on the host by now.
        places: of each row's payload.
    """
    steps = np.array(rows[::FIELDS], np.int64)
    whole = table(columns(rows, places))
    edges = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    spans: defaultdict[int, list[pa.Table]] = defaultdict(list)
    for start, stop in pairwise(edges):  # as a rule the rows of a step lie together
        spans[int(steps[start])].append(whole.slice(start, stop - start))
    return {step: pa.concat_tables(tables) for step, tables in spans.items()}


def columns(rows: Rows, places: Sequence[Place | None]) -> dict[str, Any]:
    """Turn rows into the columns of a part."""
    _, calls, slots, values, producers, statistics = fields(rows)
    found = _of_calls(calls) | _of_slots(slots) | _of_producers(producers) | _of_statistics(statistics)
    found["value"] = values
    if any(places):
        for k, name in enumerate(("payload_segment", "payload_key", "payload_view")):
            found[name] = [None if place is None else place[k] for place in places]
    return found


def _of_calls(calls: Sequence[Call]) -> dict[str, Any]:
    distinct, number = _distinct(calls)
    kinds, kind = _distinct([call.kind for call in distinct])
    kind = kind.take(number)
    return {name: _taken([getattr(one, name) for one in kinds], kind) for name in ("level", "phase", "scope", "op")} | {
        name: _taken(map(attrgetter(name), distinct), number, pa.int64())
        for name in ("seq", "parent", "ordinal", "forward_seq", "site")
    }


def _of_slots(slots: Sequence[Slot]) -> dict[str, Any]:
    distinct, numbers = _distinct(slots)
    found = {"slot": _taken([slot.name for slot in distinct], numbers)}
    for name, kind in (
        ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("strides", pa.list_(pa.int64())), ("device", pa.string()),
        ("numel", pa.int64()),
    ):  # fmt: skip
        found[name] = _taken([None if s.tensor is None else getattr(s.tensor, name) for s in distinct], numbers, kind)
    return found


def _of_producers(producers: Sequence[tuple[int, str] | None]) -> dict[str, Any]:
    return {
        "producer_seq": [None if p is None else p[0] for p in producers],
        "producer_slot": [None if p is None else p[1] for p in producers],
    }


def _of_statistics(statistics: Sequence[Statistics | None]) -> dict[str, Any]:
    known = [k for k, s in enumerate(statistics) if s is not None and s.values is not None]
    packed = np.frombuffer(b"".join([bytes(statistics[k].values) for k in known]))  # type: ignore[union-attr]
    found = spread(packed.reshape(-1, PACKED), np.array(known, dtype=np.int64), len(statistics))
    found["digest"] = _hexadecimal([None if s is None else s.digest for s in statistics])
    return found


def _hexadecimal(digests: Sequence[int | None]) -> pa.Array:
    """Write each number with 16 digits."""
    text = np.array([0 if number is None else number for number in digests], ">u8").tobytes().hex().encode()
    ends = np.arange(0, len(text) + 1, 16, dtype=np.int64)
    known = np.packbits([number is not None for number in digests], bitorder="little")
    buffers = (pa.py_buffer(ends), pa.py_buffer(text), pa.py_buffer(known))
    return pa.LargeStringArray.from_buffers(len(digests), *buffers).cast(pa.string())


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], pa.Array]:
    """Return the distinct objects, and for each object its number among them."""
    number = {found: k for k, found in enumerate(dict.fromkeys(objects))}
    return list(number), pa.array([number[one] for one in objects], pa.int32())


def _taken(values: Iterable[Any], numbers: pa.Array, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind or pa.string()).take(numbers)
