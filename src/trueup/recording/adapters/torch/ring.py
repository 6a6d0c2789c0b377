"""Where the rows of a device wait for the next flush, and how they travel: one transfer, and no wait of the training.

Rows lie in chunks of device memory that are filled from front to back, and used again once every row of them is at the host. A late
flush makes the ring longer by a chunk; no row is ever overwritten, and the training never waits here: the recorder makes it wait
when 256 MB of rows are pending, which are 170 MB on the device.

A row is written on whichever stream executes the call. The flush records an event on each of those streams, lets a stream of its
own wait for them, copies there, and waits for that copy alone, in the writer's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

CAPACITY = 4096
"""Rows in a chunk: 2.6 MB."""

SPARES = 8
"""Empty chunks that are kept; more are given back after a burst."""


def streams_of(device: torch.device) -> Any:
    """Return the module with the streams and events of a device, ``torch.cuda`` for one; None where work is done in order."""
    module = getattr(torch, device.type, None) if device.type != "cpu" else None  # torch.cpu has stand-ins of both
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None


class Row:
    """The place of one tensor's row; it is taken until the row was fetched or this object is gone."""

    __slots__ = ("_chunk", "index", "stream")

    def __init__(self, chunk: Chunk, index: int, stream: Any) -> None:
        self._chunk: Chunk | None = chunk
        self.index = index
        self.stream = stream

    @property
    def chunk(self) -> Chunk:
        """The chunk that holds the row."""
        assert self._chunk is not None, "the row was fetched"
        return self._chunk

    @property
    def values(self) -> torch.Tensor:
        """The row itself, ``(width,)`` on the device."""
        return self.chunk.memory[self.index]

    def fetched(self) -> None:
        """Let go of the chunk."""
        self._chunk = None

    def __del__(self) -> None:
        if self._chunk is not None:  # whatever writes the row may still be under way: the next flush waits for it
            self._chunk.dropped.append(self.stream)


class Chunk:
    """Rows that were allocated together, ``memory`` ``(CAPACITY, width)``."""

    __slots__ = ("dropped", "memory", "ready", "taken", "used", "visible")

    def __init__(self, memory: torch.Tensor, stream: Any, ready: Any) -> None:
        self.memory = memory
        self.used = 0
        """Rows handed out since the chunk was last empty."""
        self.taken = 0
        """Rows that are neither fetched nor dropped."""
        self.dropped: deque[Any] = deque()
        """Streams of rows that nobody will fetch; a deque, because the garbage collector appends at any moment."""
        self.ready = ready
        self.visible = {stream}
        """Streams that run after the allocation: the allocator hands out memory that earlier work of its stream may still use."""


class Ring:
    """The rows of one device; rows are ``width`` numbers of ``dtype``."""

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype) -> None:
        self.device, self.width, self.dtype = device, width, dtype
        self.fetches = 0
        """Transfers to the host so far."""
        self._module = streams_of(device)
        self._side: Any = None
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._current: Chunk | None = None

    @property
    def chunks(self) -> int:
        """How many chunks of device memory the ring has."""
        return len(self._chunks)

    def take(self) -> Row:
        """Return a row that is free, for work on the current stream; never waits."""
        stream: Any = None if self._module is None else self._module.current_stream(self.device)
        with self._lock:
            chunk = self._current
            if chunk is None or chunk.used == CAPACITY:
                chunk = self._current = self._next(stream)
            if stream not in chunk.visible:
                stream.wait_event(chunk.ready)
                chunk.visible.add(stream)
            index = chunk.used
            chunk.used += 1
            chunk.taken += 1
            return Row(chunk, index, stream)

    def _next(self, stream: Any) -> Chunk:
        for chunk in self._chunks:
            if chunk.taken == 0:
                chunk.used = 0
                return chunk
        memory = torch.empty((CAPACITY, self.width), dtype=self.dtype, device=self.device)
        ready = None
        if self._module is not None:
            ready = self._module.Event()
            ready.record(stream)
        chunk = Chunk(memory, stream, ready)
        self._chunks.append(chunk)
        return chunk

    def fetch(self, rows: Sequence[Row]) -> NDArray[Any]:
        """Bring rows to the host in one transfer, once what writes them is done; for the writer's thread.

        Returns:
            ``(len(rows), width)`` of the ring's dtype, in the order asked for. The rows are free afterwards.
        """
        spans, place = _spans(rows)
        dropped = self._collect_dropped()
        streams = {row.stream for row in rows} | {stream for _, gone in dropped for stream in gone}
        host = self._copy([chunk.memory[first:last] for chunk, first, last in spans], streams)
        self.fetches += 1
        with self._lock:
            for row in rows:
                row.chunk.taken -= 1
                row.fetched()
            for chunk, gone in dropped:
                chunk.taken -= len(gone)
            self._tidy()
        return host[place]

    def _collect_dropped(self) -> list[tuple[Chunk, list[Any]]]:
        with self._lock:
            chunks = list(self._chunks)
        return [(chunk, [chunk.dropped.popleft() for _ in range(len(chunk.dropped))]) for chunk in chunks if chunk.dropped]

    def _tidy(self) -> None:
        """Start the current chunk again if it is empty, and give chunks back that a burst has left."""
        if self._current is not None and self._current.taken == 0:
            self._current.used = 0
        empty = [chunk for chunk in self._chunks if chunk.taken == 0 and chunk is not self._current]
        surplus = {id(chunk) for chunk in empty[SPARES:]}
        self._chunks = [chunk for chunk in self._chunks if id(chunk) not in surplus]

    def _copy(self, spans: list[torch.Tensor], streams: set[Any]) -> NDArray[Any]:
        module = self._module
        if module is None:
            return np.array(_joined(spans).cpu().numpy())
        if self._side is None:
            self._side = module.Stream(device=self.device)
        for stream in streams:
            written = module.Event()
            written.record(stream)
            self._side.wait_event(written)
        with module.stream(self._side):
            source = _joined(spans)
            host = _pinned(source)
            host.copy_(source, non_blocking=True)
            copied = module.Event()
            copied.record(self._side)
        copied.synchronize()
        return np.array(host.numpy())


def _pinned(like: torch.Tensor) -> torch.Tensor:
    """Return host memory that a device copies to without waiting; PyTorch keeps it for the next time."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _joined(spans: list[torch.Tensor]) -> torch.Tensor:
    return spans[0] if len(spans) == 1 else torch.cat(spans)


def _spans(rows: Sequence[Row]) -> tuple[list[tuple[Chunk, int, int]], NDArray[np.int64]]:
    """Return, for each chunk concerned, its first row and the one after its last, and where each row lies in their concatenation.

    Rows between that nobody asked for travel along: cheaper than an index on the device.
    """
    ends: dict[int, tuple[Chunk, int, int]] = {}
    for row in rows:
        chunk, first, last = ends.get(id(row.chunk), (row.chunk, row.index, row.index + 1))
        ends[id(chunk)] = (chunk, min(first, row.index), max(last, row.index + 1))
    start, offsets = 0, {}
    for key, (_, first, last) in ends.items():
        offsets[key] = start - first
        start += last - first
    return list(ends.values()), np.array([offsets[id(row.chunk)] + row.index for row in rows], np.int64)
