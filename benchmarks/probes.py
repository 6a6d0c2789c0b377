"""Clocks around the inside of a capture: the kernel that reads the data, the file that is written, the writer's thread.

The only place of the benchmarks that knows names of Trueup's inside. When one of them moves, change it here.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

NATIVE = "trueup.foundation.kernels._native"
"""The compiled kernel, which has a clock of its own: C code calls it."""

TWINS = (("trueup.foundation.kernels._summary", "summarize"), ("trueup.foundation.kernels", "digest"))
"""What else reads data, where it is Python: (module, function)."""

FILES = ("trueup.foundation.store.durable", "write_file")
WRITER = "trueup-writer"
"""Name of the thread that writes."""


class Clock:
    """Adds up the seconds and calls of a function on the thread that made the clock, and on others."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._inside = threading.local()
        self.clear()

    def clear(self) -> None:
        self.nanoseconds = self.calls = self.elsewhere = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` under this clock; what it calls of the same clock is not counted again."""
        now, home, inside = time.perf_counter_ns, self._home, self._inside

        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "on", False):
                return function(*args, **kwargs)
            inside.on = True
            started = now()
            try:
                return function(*args, **kwargs)
            finally:
                spent = now() - started
                inside.on = False
                if threading.get_ident() == home:
                    self.nanoseconds += spent
                    self.calls += 1
                else:
                    self.elsewhere += spent

        return timed

    def cost(self) -> float:
        """Seconds that the clock itself adds to a call, most of which it does not see."""
        timed = self.around(int)
        started = time.perf_counter()
        for _ in range(20_000):
            timed()
        spent = (time.perf_counter() - started) / 20_000
        self.clear()
        return spent


class Reading:
    """Seconds and calls of what reads the data: the compiled kernel, or its twin where that was not built."""

    def __init__(self) -> None:
        self._twin = Clock()
        try:
            self._native = importlib.import_module(NATIVE)
        except ImportError:
            print("no compiled kernel: the figures are those of the NumPy twin")
            self._native = None
        for module, name in TWINS:
            _replace(importlib.import_module(module), name, self._twin)
        self.cost = self._twin.cost() if self._native is None else 0.0
        """Seconds that clocks add to a call."""
        self.clear()

    def clear(self) -> None:
        self._twin.clear()
        self._from = self._native.spent() if self._native else (0, 0)

    @property
    def seconds(self) -> float:
        native = self._native.spent()[0] - self._from[0] if self._native else 0
        return (self._twin.nanoseconds + native) / 1e9

    @property
    def calls(self) -> int:
        native = self._native.spent()[1] - self._from[1] if self._native else 0
        return self._twin.calls + int(native)


def install() -> tuple[Reading, Clock]:
    """Put clocks around kernel and files; call it before an adapter binds the functions it imports."""
    files = Clock()
    _replace(importlib.import_module(FILES[0]), FILES[1], files)
    return Reading(), files


def _replace(module: ModuleType, name: str, clock: Clock) -> None:
    if not hasattr(module, name):
        raise AttributeError(f"{module.__name__} has no {name} any more: say in {__file__} what took its place")
    setattr(module, name, clock.around(getattr(module, name)))


def writer_seconds() -> float:
    """CPU seconds that the writer's thread has used; 0 before it started."""
    for thread in threading.enumerate():
        if thread.name == WRITER and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0
