"""Rows wait on the device: none is lost or overwritten, none is read before it is written, and nobody waits but the flush."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from trueup.recording.adapters.torch import device_statistics as rings
from trueup.recording.adapters.torch.device_statistics import Ring, Row

CPU = torch.device("cpu")
WIDTH = 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "CAPACITY", 4)
    monkeypatch.setattr(rings, "SPARES", 1)


def make() -> Ring:
    return Ring(CPU, WIDTH, torch.float64)


def write(ring: Ring, values: Any) -> list[Row]:
    rows = []
    for value in values:
        row = ring.take()
        row.values.fill_(float(value))
        rows.append(row)
    return rows


def read(ring: Ring, rows: list[Row]) -> list[float]:
    found = ring.fetch(rows)
    assert found.shape == (len(rows), WIDTH)
    assert np.array_equal(found[:, 0], found[:, -1])
    return found[:, 0].tolist()


def test_rows_come_in_the_order_asked_for(small: None) -> None:
    ring = make()
    rows = write(ring, range(11))
    order = [7, 0, 10, 3, 4]
    assert read(ring, [rows[k] for k in order]) == order
    assert ring.fetches == 1
    assert read(ring, [rows[k] for k in (1, 2, 5, 6, 8, 9)]) == [1, 2, 5, 6, 8, 9]


def test_a_late_flush_makes_it_longer_and_loses_nothing(small: None) -> None:
    ring = make()
    rows = write(ring, range(21))
    assert ring.chunks == 6
    assert read(ring, rows) == list(range(21))
    assert ring.chunks == 2  # the current one and one spare
    again = write(ring, range(100, 108))
    assert ring.chunks == 2
    assert read(ring, again) == list(range(100, 108))


def test_a_row_is_not_used_again_before_it_was_fetched(small: None) -> None:
    ring = make()
    kept = write(ring, [42])
    for turn in range(10):
        assert read(ring, write(ring, range(turn, turn + 3))) == list(range(turn, turn + 3))
    assert read(ring, kept) == [42]
    assert ring.chunks <= 3


def test_a_steady_load_stays_in_the_first_chunk(small: None) -> None:
    ring = make()
    for _ in range(20):
        read(ring, write(ring, range(3)))
    assert ring.chunks == 1


def test_rows_that_nobody_fetches_come_back(small: None) -> None:
    ring = make()
    for _ in range(20):
        write(ring, range(3))
        read(ring, write(ring, [1]))
    assert ring.chunks <= 2


def test_a_fetched_row_is_gone(small: None) -> None:
    ring = make()
    rows = write(ring, [1])
    read(ring, rows)
    with pytest.raises(AssertionError, match="the row was fetched"):
        _ = rows[0].values


def test_threads_take_rows_while_another_fetches() -> None:
    ring = make()
    queue: deque[tuple[int, Row]] = deque()
    done = threading.Event()

    def produce(first: int) -> None:
        for k in range(first, first + 3000):
            queue.append((k, write(ring, [k])[0]))

    threads = [threading.Thread(target=produce, args=(10000 * k,)) for k in range(3)]
    found: list[bool] = []

    def consume() -> None:
        while not done.is_set() or queue:
            batch = [queue.popleft() for _ in range(len(queue))]
            if batch:
                found.extend(x == y for x, (y, _) in zip(read(ring, [row for _, row in batch]), batch, strict=True))

    consumer = threading.Thread(target=consume)
    for thread in (*threads, consumer):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    consumer.join()
    assert (len(found), all(found)) == (9000, True)


# ---------------------------------------------------------------- streams
class Stream:
    """Work that is executed only when somebody waits for it: the most unfortunate device there can be."""

    def __init__(self, device: Any = None) -> None:
        self.work: deque[Any] = deque()

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def run_to(self, mark: Any) -> None:
        while self.work:
            item = self.work.popleft()
            if item is mark:
                return
            if isinstance(item, Event):
                item.reach()
            elif callable(item):
                item()


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.mark: object = None

    def record(self, stream: Stream) -> None:
        self.stream, self.mark = stream, object()
        stream.work.append(self.mark)

    def reach(self) -> None:
        assert self.stream is not None
        if self.mark in self.stream.work:
            self.stream.run_to(self.mark)

    synchronize = reach


class Device:
    """What `torch.cuda` is to the ring."""

    Event, Stream = Event, Stream

    def __init__(self) -> None:
        self.now = Stream()

    def current_stream(self, device: Any) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Pinned:
    """Host memory that is filled when the device gets there."""

    def __init__(self, device: Device, like: torch.Tensor) -> None:
        self.device, self.memory = device, torch.full_like(like, -1.0)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.device.now.work.append(lambda: self.memory.copy_(source))

    def numpy(self) -> Any:
        return self.memory.numpy()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(rings, "streams_of", lambda _: device)
    monkeypatch.setattr(rings, "_pinned", lambda like: Pinned(device, like))
    return device


def launch(device: Device, ring: Ring, stream: Stream, value: float) -> Row:
    """Enqueue a kernel that writes a row."""
    with device.stream(stream):
        row = ring.take()
        memory = row.values
    stream.work.append(lambda: memory.fill_(value))
    return row


def test_rows_of_several_streams_are_read_when_they_are_written(device: Device) -> None:
    ring, streams = make(), [device.now, Stream(), Stream()]
    rows = [launch(device, ring, stream, k) for k, stream in zip(range(30), itertools.cycle(streams))]
    assert read(ring, rows) == list(range(30))
    later = [launch(device, ring, stream, 100 + k) for k, stream in enumerate(streams)]
    assert read(ring, later) == [100, 101, 102]


def test_what_is_enqueued_after_the_flush_is_not_waited_for(device: Device) -> None:
    ring = make()
    row = launch(device, ring, device.now, 5.0)
    original = rings._joined
    ran: list[str] = []

    def joined(spans: list[torch.Tensor]) -> torch.Tensor:  # after the events were recorded, before the copy
        training.work.append(lambda: ran.append("next step"))
        return original(spans)

    training = device.now
    rings._joined, restore = joined, original
    try:
        assert read(ring, [row]) == [5.0]
    finally:
        rings._joined = restore
    assert ran == []


def test_a_dropped_row_is_not_used_again_before_its_kernel_ran(small: None, device: Device) -> None:
    ring, side = make(), Stream()
    first = launch(device, ring, device.now, 1.0)
    launch(device, ring, side, 13.0)  # measured, then nobody wants it
    assert read(ring, [first]) == [1.0]
    rows = [launch(device, ring, device.now, float(k)) for k in range(4)]
    device.now.run_to(None)
    side.run_to(None)  # what the flush did not wait for comes late
    assert read(ring, rows) == [0.0, 1.0, 2.0, 3.0]


def test_a_second_stream_waits_for_the_allocation(device: Device) -> None:
    """The allocator hands out memory that work enqueued earlier on its stream may still use."""
    ring, side = make(), Stream()
    old_user: Callable[[], Any] = lambda: ring._chunks[0].memory.fill_(99.0)  # noqa: E731
    device.now.work.append(old_user)
    launch(device, ring, device.now, 1.0)
    row = launch(device, ring, side, 2.0)
    side.run_to(None)
    device.now.run_to(None)
    assert read(ring, [row]) == [2.0]
