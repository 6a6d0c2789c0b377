"""Collectives under way: the buffers they are still writing, which nobody reads before they are complete.

The outputs of a collective are measured when the training itself has waited for it (`Work.wait`, `wait_tensor`), or when
something reads them and the work says that it is done. Nothing here ever waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from trueup.recording.recorder import Call

Span = tuple[int, int, int]
"""A storage and the bytes of it that a tensor covers, from and up to."""

Slot = tuple[str, torch.Tensor]


class Pending:
    """A collective whose outputs were not measured yet.

    Args:
        calls: the calls of the capture that it is, one per level.
        outputs: ``(slot, tensor)`` of what it writes.
        scratch: what it may write besides, and nobody reads.
        sync: the caller of the collective waits for it before anybody reads the outputs.
        task: the autograd graph task that issued it from C++ and waits for it before it ends; -1: none.
    """

    __slots__ = ("calls", "deferred", "outputs", "scratch", "spans", "spoiled", "step", "sync", "task", "thread", "versions",
                 "works")  # fmt: skip

    def __init__(self, calls: list[Call], outputs: list[Slot], scratch: list[Slot], *, sync: bool, task: int) -> None:
        self.calls, self.outputs, self.scratch, self.sync, self.task = calls, outputs, scratch, sync, task
        self.thread = threading.get_ident()
        self.step = 0
        """The step it began in."""
        self.works: list[Any] = []
        """Its `Work` handles, held so that Python keeps one object for each: `Work.wait` is called on that."""
        self.spans = [span for _, tensor in [*outputs, *scratch] if (span := span_of(tensor)) is not None]
        self.deferred: list[Callable[[bool], None]] = []
        """Slots of other calls that show these buffers, recorded once they are complete; False: they cannot be read any more."""
        self.versions = [None if tensor.is_inference() else tensor._version for _, tensor in outputs]
        self.spoiled = False
        """Whether the outputs were written again before they could be measured."""

    def look(self) -> None:
        """Find out whether somebody wrote to the outputs meanwhile, whom no mode of ours saw; collectives count no version."""
        now = [None if tensor.is_inference() else tensor._version for _, tensor in self.outputs]
        self.spoiled = self.spoiled or now != self.versions

    @property
    def complete(self) -> bool:
        """Whether the outputs may be read, as far as can be told without waiting."""
        if self.sync and self.thread == threading.get_ident():  # another thread may read while this one waits
            return True
        if self.task != -1 and torch._C._current_graph_task_id() != self.task:
            return True
        host = all(tensor.device.type == "cpu" for _, tensor in self.outputs)
        return bool(self.works) and all(_is_completed(work, host=host) for work in self.works)


class InFlight:
    """All pending collectives of the process, found by the bytes they write or by their `Work`."""

    def __init__(self) -> None:
        self.pending: dict[int, Pending] = {}
        """By id."""

    def __bool__(self) -> bool:
        return bool(self.pending)

    def add(self, pending: Pending) -> None:
        """Take note of a collective that begins."""
        self.pending[id(pending)] = pending

    def drop(self, pending: Pending) -> bool:
        """Forget a collective; False if it was not pending any more."""
        return self.pending.pop(id(pending), None) is not None

    def covering(self, tensor: torch.Tensor) -> list[Pending]:
        """Return the collectives that write any byte of a tensor."""
        span = span_of(tensor)
        if span is None:
            return []
        storage, start, stop = span
        return [
            p for p in list(self.pending.values())
            if any(s == storage and begin < stop and start < end for s, begin, end in p.spans)
        ]  # fmt: skip

    def of_work(self, work: Any) -> list[Pending]:
        """Return the collectives that a `Work` stands for."""
        return [p for p in list(self.pending.values()) if any(w is work for w in p.works)]

    def spoil(self, tensor: torch.Tensor) -> None:
        """Note that somebody else wrote to a tensor."""
        for pending in self.covering(tensor):
            pending.spoiled = True


def span_of(tensor: torch.Tensor) -> Span | None:
    """Return the bytes that a tensor covers; None where it has no storage of its own, or no elements."""
    try:
        storage = tensor.untyped_storage()._cdata
        if not tensor.numel():
            return None
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    except (NotImplementedError, RuntimeError, AttributeError):  # sparse and other layouts
        return None
    start = tensor.storage_offset() * tensor.element_size()
    return storage, start, start + (last + 1) * tensor.element_size()


def _is_completed(work: Any, *, host: bool) -> bool:
    try:
        # Gloo completes the future first. On an accelerator a future is done as soon as the work is enqueued.
        return bool(work.is_completed() or (host and work.get_future().done()))
    except RuntimeError:  # it failed, of which whoever waits for it will hear; or it has no future
        return False
