"""A payload segment that is being filled: which tensors, in which order, and the bytes of its file.

Tensors that lie next to one another in memory, as the recorder's do, are one *run*: one write, past the page cache where the header
is as long as that takes (`direct`). The others follow in single writes, widest elements first, so that all are aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.store import direct
from trueup.foundation.store.segment import SAFETENSORS, numpy_dtype

ALIGNMENT = 8
"""Bytes to which data is aligned: the widest element that safetensors knows."""

Entry = tuple[str, str, tuple[int, ...], memoryview]
"""Key, dtype, sizes and bytes of a tensor."""


@dataclass(slots=True)
class PendingSegment:
    """A segment that is being filled, in memory."""

    name: str
    size: int = 0
    _run: list[Entry] = field(default_factory=list)
    _begin: int = 0
    _end: int = 0
    """Where the run lies in memory."""
    _others: list[Entry] = field(default_factory=list)

    @property
    def tensors(self) -> list[Entry]:
        """What it holds, in the order of the file."""
        return self._run + sorted(self._others, key=lambda tensor: -_width(tensor[1]))

    def full(self, start: int, size: int) -> bool:
        """Whether ``size`` bytes at the address ``start`` would end a run that is worth a write of its own."""
        return self._large and start != self._end and _may_run(start, size)

    def add(self, key: str, dtype: str, shape: tuple[int, ...], raw: memoryview, start: int) -> None:
        """Take a tensor's bytes, which lie at the address ``start``; they must not change until the segment is written."""
        entry = (key, dtype, shape, raw)
        self.size += raw.nbytes
        if not _may_run(start, raw.nbytes):
            self._others.append(entry)
            return
        if start != self._end:
            self._others += self._run
            self._run, self._begin = [], start
        self._run.append(entry)
        self._end = start + raw.nbytes

    @property
    def _large(self) -> bool:
        return self._end - self._begin >= direct.LARGE

    def chunks(self) -> Iterator[Any]:
        """Yield the file's bytes: length and header, the run, then each other tensor."""
        ordered = self.tensors
        text = _header(ordered)
        text += b" " * (-len(text) % ALIGNMENT)
        run = None
        if self._large:
            run = _Memory(self._begin, self._end - self._begin).view()
            text += b" " * ((self._begin - 8 - len(text)) % direct.BLOCK)
        yield len(text).to_bytes(8, "little") + text
        if run is not None:
            yield run
        for _, _, _, raw in ordered if run is None else ordered[len(self._run) :]:
            yield raw


class _Memory:
    """A range of memory, for NumPy to look at; whoever looks keeps what lies there alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, start: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (start, True)}

    def view(self) -> memoryview:
        """Return its bytes, read only."""
        array: NDArray[np.uint8] = np.asarray(self)
        return array.data


def _may_run(start: int, size: int) -> bool:
    """Whether the next tensor could follow without a gap and be aligned."""
    return size > 0 and size % ALIGNMENT == 0 and start % ALIGNMENT == 0


def _header(ordered: list[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "trueup"}}
    begin = 0
    for key, dtype, shape, raw in ordered:
        end = begin + raw.nbytes
        stored = SAFETENSORS.get(dtype)
        if stored is None:
            header["__metadata__"][key] = json.dumps({"dtype": dtype, "shape": shape})
            shape = (raw.nbytes,)
        header[key] = {"dtype": stored or "U8", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return json.dumps(header, separators=(",", ":")).encode()


def _width(dtype: str) -> int:
    try:
        return int(numpy_dtype(dtype).itemsize)
    except TypeError:
        return 1
