"""The wall between Trueup's own work and the training: what fails on our side of it does not get to the other."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Busy(Protocol):
    """What an adapter knows of a thread."""

    busy: bool
    """True while Trueup itself works: nothing it executes is a call."""


class Observing:
    """A block of Trueup's own work on one thread: nothing that executes inside is a call.

    An exception goes to ``failed``, which tells whether the training goes on.
    """

    __slots__ = ("_before", "_failed", "_state", "_what")

    def __init__(self, state: Busy, failed: Callable[[Exception, str], bool], what: str) -> None:
        self._state, self._failed, self._what = state, failed, what

    def __enter__(self) -> None:
        self._before, self._state.busy = self._state.busy, True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._state.busy = self._before
        return isinstance(error, Exception) and self._failed(error, self._what)
