"""Streams, events and graphs of the simulated device: kernels run when they are called, in the order of the host.

A stream orders nothing, an event has happened when it is recorded, with the time of the host. A graph keeps the operators that
ran while it was captured, and runs them again into the same memory; as on a device, capturing leaves weights, random state and all
other memory from before as it was.
"""

# ruff: noqa: ARG001, ARG002, ARG004 - the parameters are those of torch_npu

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trueup.simdev import tensor
from trueup.simdev.tensor import Plan, index_of

_EVENT, _STREAM = torch.Event, torch.Stream


class Stream(torch.Stream):
    """A queue of work that is done at once."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        """Make a stream of a device, the current one if none is given."""
        made: Stream = _STREAM.__new__(cls, "npu")
        made.place = torch.device("npu", index_of(device))
        return made

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority, self.npu_stream = priority, id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return self.place

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _entered.pop()

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: what was queued is done."""

    wait_event = wait_stream

    def query(self) -> bool:
        """Return True: nothing is under way."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one if none is given."""
        event = event or Event()
        event.record()
        return event


class Event(torch.Event):
    """A point in time of a stream; ``torch.Event("npu", ...)`` and ``torch.npu.Event(...)`` alike."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        """Make an event of the device."""
        made: Event = _EVENT.__new__(cls, "npu")
        return made

    def __init__(self, *args: Any, enable_timing: bool = False, **_: Any) -> None:
        self._timed, self._seconds = enable_timing or args[:1] == (True,), 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until another event; raises RuntimeError without ``enable_timing``."""
        if not (self._timed and end._timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        return (end._seconds - self._seconds) * 1000


_default: dict[int, Stream] = {}
_entered: list[Stream] = []
"""Streams that were entered or set, the current one last."""


def default_stream(device: Any = None) -> Stream:
    """Return the stream that is current where none was entered."""
    index = index_of(device)
    if index not in _default:
        _default[index] = Stream(index)
    return _default[index]


def current_stream(device: Any = None) -> Stream:
    """Return the stream that was entered last."""
    return _entered[-1] if _entered else default_stream(device)


def set_stream(stream: Any) -> None:
    """Make a stream the current one."""
    _entered[-1:] = [stream]


@contextmanager
def stream(stream: Any = None) -> Iterator[None]:
    """Enter a stream; None: none."""
    if stream is not None:
        _entered.append(stream)
    try:
        yield
    finally:
        if stream is not None:
            _entered.pop()


# ---------------------------------------------------------------- graphs
capturing: NPUGraph | None = None
Recorded = tuple[Callable[..., Any], Plan, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]


class NPUGraph:
    """Operators that ran once and can run again, on the same memory: ``torch.npu.NPUGraph`` and ``torch.accelerator.Graph``."""

    def __init__(self, keep_graph: bool = False, **_: Any) -> None:
        self._calls: list[Recorded] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()
        self._random: torch.Tensor | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Keep what runs from now on; raises RuntimeError where a capture is under way."""
        global capturing
        if capturing is not None or tensor.runner is not None:
            raise RuntimeError("a graph is being captured already")
        self.reset()
        self._random = torch.default_generator.get_state()
        capturing, tensor.runner = self, self._keep

    def capture_end(self) -> None:
        """Stop, and set memory from before the capture back: a capture computes nothing."""
        global capturing
        capturing, tensor.runner = None, None
        for written, kept in self._before.values():
            written.copy_(kept)
        if self._random is not None:
            torch.default_generator.set_state(self._random)
        self._before.clear()

    def replay(self) -> None:
        """Run the operators again; results go where those of the capture went."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for func, plan, args, kwargs, outputs in self._calls:
                made = [one for one in tree_leaves(tensor.run(func, plan, args, kwargs)) if isinstance(one, torch.Tensor)]
                for there, new in zip(outputs, made, strict=True):
                    if there.data_ptr() != new.data_ptr():
                        there.copy_(new)

    def reset(self) -> None:
        """Forget all operators."""
        self._calls, self._made = [], set()

    def pool(self) -> tuple[int, int]:
        """Return the name of the graph's memory pool; there is none on the simulated device, and any may be shared."""
        return (0, id(self))

    def __enter__(self) -> NPUGraph:
        self.capture_begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.capture_end()

    def _keep(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted while a graph is being captured: it reads a number back to the host")
        for place in plan.written:
            target = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for one in tree_leaves(target):
                if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self._made:
                    self._before.setdefault(one.data_ptr(), (one, one.clone()))
        result = tensor.run(func, plan, args, kwargs)
        outputs = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if plan.view_of is None and not plan.written:
            self._made.update(one.untyped_storage()._cdata for one in outputs)
        self._calls.append((func, plan, args, kwargs, outputs))
        return result


@contextmanager
def graph(npu_graph: NPUGraph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    """Capture what runs inside into a graph."""
    with npu_graph:
        yield


def is_current_stream_capturing() -> bool:
    """Return whether a graph is being captured."""
    return capturing is not None
