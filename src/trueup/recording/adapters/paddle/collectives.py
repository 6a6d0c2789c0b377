"""Collectives of Paddle: each method of a ``ProcessGroup`` that Python calls is a call of phase ``collective``, at each level.

All of `paddle.distributed` and of fleet's Python comes through these methods. What C++ issues does not: the reducer of
``paddle.DataParallel`` (`reductions` shows what it does to the gradients).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import paddle
from paddle.base import core

from trueup.recording.adapters.paddle.communication import METHODS, STREAM, Communication, read
from trueup.recording.adapters.paddle.context import ThreadState, enclosing
from trueup.recording.adapters.paddle.replacing import Sweep
from trueup.recording.recorder import Call
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

OBJECTS = ("all_gather_object", "broadcast_object_list", "scatter_object_list")
"""Functions that send pickled objects: their bytes are no tensors of the training, and differ where the objects are equal."""

UNFINISHED = (
    "a collective was still under way when the capture ended, and nobody had waited for it: its output was not read"
)


@dataclass(slots=True)
class _Pending:
    """A collective that was launched and not waited for."""

    task: Any
    calls: list[Call]
    outputs: Any


class Collectives:
    """Sees and records the collectives of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: dict[int, _Pending] = {}
        self._sweep = Sweep(())
        self._parts: list[Replacement] = []

    def install(self) -> None:
        """Stand in the way of every method that communicates; in a Paddle without any there is nothing to see."""
        group = getattr(core, "ProcessGroup", None)
        if group is None:
            return
        names = [name + end for name in METHODS for end in ("", STREAM) if hasattr(group, name + end)]
        task = core.task
        self._parts = [
            *(Replacement(group, name, self._around(name)) for name in names),
            *(Replacement(task, name, self._waiting) for name in ("wait", "synchronize")),
        ]
        for part in self._parts:
            part.install()
        functions = [getattr(paddle.distributed, name, None) for name in OBJECTS]
        self._sweep = Sweep([(function, self._of_objects(function)) for function in functions if function is not None])
        self._sweep.install()

    def remove(self) -> None:
        """Leave no trace."""
        self._sweep.remove()
        for part in reversed(self._parts):
            part.remove()
        self._parts = []

    def settle(self) -> None:
        """Record the outputs of all collectives that are complete, at the end of a step."""
        for pending in [one for one in self._pending.values() if one.task.is_completed()]:
            self._complete(pending)

    def end(self) -> None:
        """Record what is complete and give up the rest, when the capture ends."""
        self.settle()
        if self._pending:
            self._session.recorder.note(UNFINISHED)
            self._pending.clear()

    # ------------------------------------------------------------------------------------------------------------- inside
    def _around(self, name: str) -> Callable[[Any], Any]:
        method = name.removesuffix(STREAM)
        session = self._session

        def make(original: Any) -> Any:
            @wraps(original)
            def run(group: Any, *args: Any, **kwargs: Any) -> Any:
                state = session.threads.state
                if not session.active or state.busy:
                    return original(group, *args, **kwargs)
                calls: list[Call] = []
                found: Communication | None = None
                with session.observing(state, name):
                    found = read(method, group, (*args, *kwargs.values()))
                    calls = self._begin(found, state)
                task = original(group, *args, **kwargs)
                if found is not None and session.active:
                    with session.observing(state, name):
                        self._launched(_Pending(task, calls, found.outputs), at_once=name.endswith(STREAM))
                return task

            return run

        return make

    def _begin(self, found: Communication, state: ThreadState) -> list[Call]:
        session = self._session
        calls = self.calls(found.function, state)
        text = json.dumps(found.arguments, sort_keys=True)
        for call in calls:
            if call.recorded:
                session.slots.inputs(call, found.inputs)
                session.recorder.value(call, text)
        return calls

    def calls(self, function: str, state: ThreadState) -> list[Call]:
        """Begin a call at each level recorded, coarse to fine, one inside the other."""
        session = self._session
        operator, layer = enclosing(state)
        above = operator or layer
        parent, scope = (None, "") if above is None else (above.call.seq, above.scope)
        site = session.site(state)
        found: list[Call] = []
        for level in ("module", "api"):
            if session.records(level):
                found.append(session.recorder.begin(level, "collective", scope, function, parent=parent, site=site))
                parent = found[-1].seq
        return found

    def _launched(self, pending: _Pending, *, at_once: bool) -> None:
        if not pending.outputs:
            return
        if at_once or pending.task is None:
            self._record(pending)
        else:
            self._pending[id(pending.task)] = pending

    def _waiting(self, original: Any) -> Any:
        @wraps(original)
        def wait(task: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(task, *args, **kwargs)
            pending = self._pending.get(id(task))
            if pending is not None and pending.task is task:
                with self._session.observing(self._session.threads.state, "a collective"):
                    self._complete(pending)
            return result

        return wait

    def _complete(self, pending: _Pending) -> None:
        self._pending.pop(id(pending.task), None)
        self._record(pending)

    def _record(self, pending: _Pending) -> None:
        session = self._session
        for _, tensor in pending.outputs:
            session.buffers.written(tensor)
        for call in pending.calls:
            session.slots.results(call, [], pending.outputs, set())

    def _of_objects(self, original: Any) -> Any:
        """Make the exchange of pickled objects one call without tensors, instead of those that it is made of."""

        @wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.threads.state
            if not session.active or state.busy:
                return original(*args, **kwargs)
            with session.observing(state, original.__name__):
                for call in self.calls(f"paddle.distributed.{original.__name__}", state):
                    if call.recorded:
                        session.recorder.value(call, "{}")
            state.busy = True
            try:
                return original(*args, **kwargs)
            finally:
                state.busy = False

        return exchange
