"""Backward passes: which one runs, what is asked of it, and what is to be done when it is over.

Everything that starts one (``Tensor.backward``, ``paddle.autograd.backward``, ``paddle.grad``) looks up ``run_backward`` or
``run_partial_grad`` in ``core.eager`` when it is called (Paddle 2.6 to 3.3), and it ends when that returns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paddle.base import core

from trueup.recording.adapters.paddle.context import ThreadState
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

LOSS = "run_backward"
INTERRUPTED = re.compile(r"\(External\) KeyboardInterrupt.*\bAt:\s*\S*trueup/recording/adapters/paddle/", re.DOTALL)
"""What C++ makes of Ctrl-C in one of our hooks."""


class Passes:
    """Numbers backward passes and tells the rest of a session when one begins and ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._numbers = itertools.count()
        self._last = -1
        self._finish: dict[int, list[Callable[[], None]]] = {}
        """What is to be done at the end of a pass, by its number."""
        self._deferred: BaseException | None = None

    def replacements(self) -> list[Replacement]:
        """Return what stands in the places from which a pass starts."""
        return [Replacement(core.eager, name, self._around(name)) for name in (LOSS, "run_partial_grad")]

    def number(self, state: ThreadState) -> int:
        """Return the number of the pass that runs on this thread; of one that was started past us, that of the last."""
        return state.passes[-1] if state.passes else self._last

    def defer(self, error: BaseException) -> None:
        """Raise an exception when the pass that runs has ended, and not inside it, where C++ would make an OSError of it."""
        self._deferred = self._deferred or error

    def at_end(self, finish: Callable[[], None]) -> None:
        """Call ``finish`` when the pass that runs has ended; one inside it, as of a recomputed block, may end before."""
        calls = self._finish.setdefault(self.number(self._session.threads.state), [])
        if finish not in calls:
            calls.append(finish)

    def _around(self, name: str) -> Callable[..., Any]:
        session = self._session

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                state = session.threads.state
                if state.busy or session.over:
                    return original(*args, **kwargs)
                outermost = not state.passes
                self._last = next(self._numbers)
                if session.active and outermost and name == LOSS and args:
                    with session.observing(state, "the loss"):
                        session.slots.loss(args[0])
                state.passes.append(self._last)
                session.buffers.passed()
                try:
                    return original(*args, **kwargs)
                except OSError as error:
                    if INTERRUPTED.match(str(error)):  # between two lines of a hook of ours, where nothing catches it
                        raise KeyboardInterrupt from None
                    raise
                finally:
                    self._ended(state, outermost=outermost)

            return run

        return make

    def _ended(self, state: ThreadState, *, outermost: bool) -> None:
        session = self._session
        with session.observing(state, "the end of a backward pass"):
            for number in list(self._finish) if outermost else [state.passes[-1]]:
                for finish in self._finish.pop(number, []):
                    finish()
            session.buffers.passed()
            if outermost:
                session.graph.release()
                session.graph.reset()
        state.passes.pop()
        if outermost:
            session.optimizers.backward(state)
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            raise deferred
