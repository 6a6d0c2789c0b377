"""The rule by which training steps end when nobody calls `step()`, and what feeds it in every framework (`Optimizers`).

A step ends where the first forward begins after all of its optimizers have stepped; which those are the first step tells: the
ones that hold parameters of the modules that ran in it. Where optimizers turn out to step in no fixed pattern, each optimizer's
step with a forward after it ends a step. A loop without an optimizer writes its weights itself: there a step ends where the first
forward begins after a backward whose weights have changed since.

The rule sees only the order of events, so two runs of one program count alike, on whatever device.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Steps:
    """Tells from forwards and optimizer steps when a training step ends; optimizers are numbers. Each event returns whether the
    present step ends, for forwards and begun optimizer steps *before* the event; whoever asks then calls `ended`."""

    def __init__(self) -> None:
        self.manual = False  # whether `step()` was called: from then on only it ends steps
        self.irregular = False
        """Whether an optimizer stepped twice in a step or joined later: no pattern tells what an iteration is."""
        self.stepped: set[int] = set()  # optimizers that have stepped in the present step
        self.pattern: frozenset[int] | None = None  # the optimizers of a step, known after the first
        self._forward = False
        self._waiting = False
        self._over = False  # whether an optimizer ended a step, and nothing that this hears of came since

    def by_hand(self) -> bool:
        """`step()` was called: return whether the present step ends, or the optimizer's step ended it just before."""
        ends, self.manual = self.manual or not self._over, True
        return ends

    def forward(self, *, inside: bool, others: Callable[[], bool], by_hand: bool = False) -> bool:
        """A model's forward begins, ``inside`` an optimizer's closure; ``others()``: does one that has not stepped hold
        parameters that ran? ``by_hand``: weights have changed that no optimizer holds."""
        self._over = False
        over = (by_hand or bool(self.stepped)) and not (self.manual or inside or self._waiting)
        if over and not (by_hand or self.irregular) and self._incomplete(others):
            self._waiting = True
            over = False
        if not over:
            self._forward = True
        return over

    def begin(self, optimizer: int) -> bool:
        """An optimizer begins to step."""
        self._over = False
        again = optimizer in self.stepped
        if again and not self._waiting:  # nothing ran since: the step is over (LBFGS runs its forwards inside)
            return not self.manual
        if again or (self.pattern is not None and optimizer not in self.pattern):
            self.irregular = True
        return False

    def end(self, optimizer: int) -> bool:
        """An optimizer has stepped, or a scaler skipped its step. Without forwards nothing else says where a step ends."""
        self.stepped.add(optimizer)
        self._waiting = False
        self._over = not (self._forward or self.manual)
        return self._over

    def ended(self) -> None:
        """The present step has ended."""
        if self.pattern is None and self._forward and self.stepped:
            self.pattern = frozenset(self.stepped)
        self.stepped.clear()
        self._forward = self._waiting = False

    def _incomplete(self, others: Callable[[], bool]) -> bool:
        return others() if self.pattern is None else not self.pattern <= self.stepped


IRREGULAR = (
    "the optimizers do not step in one pattern, so from step {step} on each optimizer's step that a forward follows ends a step; "
    "call step() at the end of an iteration to count iterations"
)
ELSEWHERE = "an optimizer stepped on thread {thread}; only those on the thread that began the capture end steps"
ENDLESS = "no {optimizer} stepped and step() was never called, so everything is step 0; call step() at the end of an iteration"


class Optimizers(ABC):
    """Feeds `Steps` with what happens in the process, and ends the session's steps."""

    optimizer = "optimizer"  # what is missed where none stepped
    kind: type[Any] | None = None  # class of all optimizers of the framework; None: which of them are alive is not known

    def __init__(self, session: Any) -> None:
        self.steps = Steps()
        self._session = session
        self._thread = threading.get_ident()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._ran: dict[int, weakref.ref[Any]] = {}  # modules that ran outside any other in the first step
        self._backwards = 0

    # ------------------------------------------------------------------------------------------------ what an adapter adds
    @abstractmethod
    def parameters(self, optimizers: list[Any]) -> set[int]:
        """Return the addresses of the parameters that optimizers hold."""

    def in_backward(self) -> bool:
        """Tell whether this thread executes a backward pass."""
        return bool(self._session.threads.state.passes)

    def counts(self) -> bool:
        """Tell whether this thread's optimizers end steps."""
        return threading.get_ident() == self._thread

    # ---------------------------------------------------------------------------------------------------- what all share
    @property
    def pending(self) -> bool:
        """Whether an optimizer has stepped and the step is not over: what follows still belongs to it."""
        return bool(self.steps.stepped)

    def close(self) -> None:
        """Note what the whole run tells: a loop whose steps nothing ended."""
        if self._backwards > 1 and not (self.steps.manual or self._count or self._session.recorder.step):
            self._session.recorder.note(ENDLESS.format(optimizer=self.optimizer))

    def forward(self, module: Any, *, inside: bool, by_hand: bool = False) -> None:
        """A model, one with parameters, begins to run outside any other; ``inside`` an optimizer's step."""
        if threading.get_ident() != self._thread or self.in_backward():
            return
        if self._session.settings is not None and module is not None:
            self._session.settings.entered(module)
        if self.kind is not None and self.steps.pattern is None:
            self._ran.setdefault(id(module), weakref.ref(module))
        if self.steps.forward(inside=inside, others=self._others, by_hand=by_hand):
            self._session.end_step()
            self.steps.forward(inside=False, others=self._others)

    def ended(self) -> None:
        """The session's step has ended."""
        self.steps.ended()
        if self.steps.pattern is not None:
            self._ran.clear()

    def begun(self, optimizer: Any) -> None:
        """An optimizer begins to step."""
        session = self._session
        with session.observing(session.threads.state, "the begin of an optimizer's step"):
            if not self.counts():
                session.recorder.note(ELSEWHERE.format(thread=threading.current_thread().name))
                return
            was = self.steps.irregular
            if self.steps.begin(self._number(optimizer)):
                session.end_step()
            if session.settings is not None:
                session.settings.stepping(self._number(optimizer), optimizer, session.recorder.step)
            if self.steps.irregular and not was and not self.steps.manual:
                session.recorder.note(IRREGULAR.format(step=session.recorder.step + 1))

    def done(self, optimizer: Any) -> None:
        """An optimizer has stepped, or a scaler skipped its step."""
        session = self._session
        with session.observing(session.threads.state, "the end of an optimizer's step"):
            if self.counts() and self.steps.end(self._number(optimizer)):
                session.end_step()

    def _number(self, optimizer: Any) -> int:
        """Number optimizers as they come: the address of one that is gone may be another's."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._count
            self._count += 1
        return number

    @property
    def unowned(self) -> bool:
        """Whether nothing but the loop itself says where its steps end: no optimizer has stepped, and nobody called `step()`."""
        return not (self._count or self.steps.manual)

    def ran(self) -> list[Any]:
        """Return the modules that ran outside any other in the first step, or since then where it has no optimizer."""
        return [module for ref in self._ran.values() if (module := ref()) is not None]

    def _others(self) -> bool:
        """Tell whether an optimizer that has not stepped yet holds parameters of the modules that ran, and those alone."""
        ran = self.ran()
        stepped = [optimizer for optimizer, number in self._numbers.items() if number in self.steps.stepped]
        missing = {id(p) for module in ran for p in module.parameters()} - self.parameters(stepped)
        if not missing or self.kind is None:
            return False
        return bool(missing & self.parameters(self._session.built.of(self.kind)))
