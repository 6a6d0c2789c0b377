"""The wall between Trueup's own work and the training: what fails on our side of it does not get to the other.

Every piece of bookkeeping runs in an `Observing` block. Nothing that executes inside is a call, and an exception there ends the
capture instead of the training, unless the user asked for the contrary (``on_error="stop"``).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Literal

import torch

from trueup.adapters.torch.context import ThreadState
from trueup.model import RunStopped
from trueup.recorder import Recorder


class Failure:
    """Reports the first thing that goes wrong in the observer, on stderr and in the manifest's notes."""

    def __init__(self, recorder: Recorder, on_error: Literal["continue", "stop"]) -> None:
        self._recorder, self._on_error = recorder, on_error
        self.text: str | None = None
        """What went wrong; None while all is well."""

    def take(self, error: Exception, what: str) -> bool:
        """Report an exception; return whether the training goes on as if it had not been raised.

        Raises:
            RunStopped: the user asked to stop in this case.
        """
        if self._on_error == "stop":
            if isinstance(error, RunStopped):
                return False
            raise RunStopped(f"capture stopped, and the run with it, as asked: {_sentence(error, what)}") from error
        if self.text is None:
            self.text = f"capture stopped at step {self._recorder.step}: {_sentence(error, what)}"
            self._recorder.note(f"{self.text}; what ran later is missing")
            print(f"trueup: {self.text}. The training goes on without it.", file=sys.stderr, flush=True)
        return True


def _sentence(error: Exception, what: str) -> str:
    said = (str(error).splitlines() or [""])[0]
    place = "".join(f"in {f.name}, {f.filename}:{f.lineno}, " for f in traceback.extract_tb(error.__traceback__)[-1:])
    return f"{type(error).__name__}: {said} ({place}while recording {what})"


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
