"""Optimizers and loss scaling: when a training step ends."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import paddle
from paddle.optimizer import Optimizer

from trueup.recording.adapters.paddle import scaling
from trueup.recording.adapters.paddle.context import ThreadState
from trueup.recording.recorder.replacing import Replacement
from trueup.recording.recorder.steps import Steps

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

IRREGULAR = (
    "the optimizers do not step in one pattern, so from step {step} on each optimizer's step that a forward follows ends a step; "
    "call step() at the end of an iteration to count iterations"
)
ELSEWHERE = "an optimizer stepped on thread {thread}; only those on the thread that began the capture end steps"
ENDLESS = (
    "no optimizer of paddle.optimizer stepped and step() was never called, so everything is step 0; call step() at the end of an "
    "iteration"
)


class Optimizers:
    """Feeds `Steps` with what happens in the process, and ends the session's steps."""

    def __init__(self, session: Session) -> None:
        self.steps = Steps()
        self._session = session
        self._thread = threading.get_ident()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._ran: dict[int, weakref.ref[paddle.nn.Layer]] = {}
        """Layers that ran outside any other in the first step."""
        self._scaled = False
        """Whether a GradScaler steps an optimizer: a step that it skips counts, too."""
        self._stepped = False
        """Whether the optimizer's own step was reached."""
        self._backwards = 0

    @property
    def pending(self) -> bool:
        """Whether an optimizer has stepped and the step is not over: what follows still belongs to it."""
        return bool(self.steps.stepped)

    def replacements(self) -> list[Replacement]:
        """Return what stands around every optimizer's own ``step`` and ``minimize``, and around a GradScaler's."""
        found = [
            Replacement(kind, name, self._around)
            for kind in kinds(Optimizer) for name in ("step", "minimize") if name in vars(kind)
        ]  # fmt: skip
        scaler = paddle.amp.GradScaler
        found += [Replacement(scaler, name, self._around_scaler) for name in ("step", "minimize")]
        return [*found, Replacement(scaler, "update", self._around_update)]

    def close(self) -> None:
        """Note what the whole run tells: a loop whose steps nothing ended."""
        if self._backwards > 1 and not (self.steps.manual or self._count or self._session.recorder.step):
            self._session.recorder.note(ENDLESS)

    # ---------------------------------------------------------------------------------------------------- what happens
    def entered(self, layer: paddle.nn.Layer, state: ThreadState) -> None:
        """A Layer begins to run outside any other. Steps are counted idle or not."""
        if self._session.over:
            return
        state.updating = False
        if threading.get_ident() != self._thread or state.passes:
            return
        if next(iter(layer.parameters()), None) is None:  # a loss or a metric is no model
            return
        if self.steps.pattern is None:
            self._ran.setdefault(id(layer), weakref.ref(layer))
        if self.steps.forward(inside=bool(state.stepping), others=self._others):
            self._session.end_step()
            self.steps.forward(inside=False, others=self._others)

    def ended(self) -> None:
        """The session's step has ended."""
        self.steps.ended()
        if self.steps.pattern is not None:
            self._ran.clear()

    def backward(self, state: ThreadState) -> None:
        """A backward pass has ended: what runs without gradients from here to the next forward is for the optimizer."""
        if threading.get_ident() == self._thread:
            state.updating = True
            self._backwards += 1

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.threads.state
            if session.over or state.busy:
                return original(optimizer, *args, **kwargs)
            outermost = not state.stepping and not self._scaled
            if outermost:
                self._begun(optimizer, state)
            if outermost or (self._scaled and state.stepping == 1):
                self._stepped = True
                session.updates(optimizer, scaled=self._scaled)
            state.stepping += 1
            try:
                result = original(optimizer, *args, **kwargs)
            finally:
                state.stepping -= 1
            if outermost:
                self._ended(optimizer, state)
            return result

        return step

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.threads.state
            if session.over or state.busy or self._scaled or not isinstance(optimizer, Optimizer) or not scaler.is_enable():
                return original(scaler, optimizer, *args, **kwargs)
            self._begun(optimizer, state)
            scale = scaling.scale_of(scaler)
            self._scaled, self._stepped = True, False
            state.stepping += 1
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaled = False
                state.stepping -= 1
            if session.active:
                with session.observing(state, "the step of a GradScaler"):
                    scaling.record_step(session, scaler, scale, optimizer)
            session.scaled(scaler, scale, stepped=self._stepped)
            self._ended(optimizer, state)
            return result

        return step

    def _around_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.threads.state
            before = scaling.scale_of(scaler)
            result = original(scaler, *args, **kwargs)
            if session.active and not state.busy and scaler.is_enable():
                with session.observing(state, "the update of a GradScaler"):
                    scaling.record_update(session, before, scaler)
            return result

        return update

    # ------------------------------------------------------------------------------------------------------------- inside
    def _begun(self, optimizer: Any, state: ThreadState) -> None:
        session = self._session
        with session.observing(state, "the begin of an optimizer's step"):
            if threading.get_ident() != self._thread:
                session.recorder.note(ELSEWHERE.format(thread=threading.current_thread().name))
                return
            was = self.steps.irregular
            if self.steps.begin(self._number(optimizer)):
                session.end_step()
            if self.steps.irregular and not was and not self.steps.manual:
                session.recorder.note(IRREGULAR.format(step=session.recorder.step + 1))

    def _ended(self, optimizer: Any, state: ThreadState) -> None:
        session = self._session
        with session.observing(state, "the end of an optimizer's step"):
            session.buffers.passed()
            if threading.get_ident() == self._thread and self.steps.end(self._number(optimizer)):
                session.end_step()

    def _number(self, optimizer: Any) -> int:
        """Number optimizers as they come: the address of one that is gone may be another's."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._count
            self._count += 1
        return number

    def _others(self) -> bool:
        """Tell whether an optimizer that has not stepped yet holds parameters of the Layers that ran, and those alone."""
        ran = [layer for ref in self._ran.values() if (layer := ref()) is not None]
        stepped = [optimizer for optimizer, number in self._numbers.items() if number in self.steps.stepped]
        missing = {id(p) for layer in ran for p in layer.parameters()} - _parameters(stepped)
        if not missing:
            return False
        alive = [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
        return bool(missing & _parameters(alive))


def kinds(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all that derive from it."""
    yield kind
    below: type[Any]
    for below in kind.__subclasses__():
        yield from kinds(below)


def _parameters(optimizers: list[Any]) -> set[int]:
    found: set[int] = set()
    for optimizer in optimizers:
        for group in getattr(optimizer, "_param_groups", None) or ():
            found |= {id(p) for p in (group.get("params", ()) if isinstance(group, dict) else (group,))}
    return found
