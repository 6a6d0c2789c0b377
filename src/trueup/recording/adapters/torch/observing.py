"""The wall between Trueup's own work and the training: what fails on our side of it does not get to the other.

Every piece of bookkeeping runs in an `Observing` block. Nothing that executes inside is a call, and an exception there ends the
capture instead of the training, unless the user asked for the contrary (``on_error="stop"``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch

from trueup.recording.adapters.torch.context import ThreadState


class Observing:
    """A block of Trueup's own work on one thread.

    Function overrides are off inside it, ours and those of the user's tensor classes. An exception goes to ``failed``, which
    tells whether the training goes on.
    """

    __slots__ = ("_before", "_failed", "_plain", "_state", "_what")

    def __init__(self, state: ThreadState, failed: Callable[[Exception, str], bool], what: str) -> None:
        self._state, self._failed, self._what = state, failed, what

    def __enter__(self) -> None:
        self._before, self._state.busy = self._state.busy, True
        self._plain = torch._C.DisableTorchFunction()
        self._plain.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._plain.__exit__(kind, error, trace)
        self._state.busy = self._before
        return isinstance(error, Exception) and self._failed(error, self._what)
