"""Where a run stands, in every framework: module paths, what activation checkpointing repeats, and when a step ends.

The scope of a call is the path of the innermost module that is running.

A checkpointed function is wrapped. Its first run lists its calls by level, scope and operator; in a later run the n-th call of a
list repeats the n-th of the first. Where one checkpointed function contains another, the inner one is listed in both, and a
recomputed call of the inner names the call that ran in the forward, not an earlier recomputation. An adapter finds the functions
that its framework runs again, and says which backward pass is under way.

A step ends, where nobody calls `step()`, where the first forward begins after all of its optimizers have stepped; which those are
the first step tells: the ones that hold parameters of the modules that ran in it. Where optimizers turn out to step in no fixed
pattern, each optimizer's step with a forward after it ends a step. A loop without an optimizer writes its weights itself: there a
step ends where the first forward begins after a backward whose weights have changed since. The rule sees only the order of events,
which `Optimizers` feeds to it in every framework, so two runs of one program count alike, on whatever device.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.recorder.rows import Call

Key = tuple[str, str, str]


class Scopes(ABC):
    """Gives each module its path. The first root with parameters is ``""``; further roots start with their class name."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: defaultdict[str, int] = defaultdict(int)
        self._has_main = False
        self.wholes: Callable[[], Iterable[Any]] = tuple
        """Gives the living modules that hold others and are never called themselves; set by the session."""

    # ------------------------------------------------------------------------------------------------ what an adapter adds
    @abstractmethod
    def below(self, root: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        """Yield a module and all below it, each with its path; wrappers are left out of it."""

    @abstractmethod
    def children(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Yield the modules that a module holds, each with its name in it."""

    @abstractmethod
    def is_model(self, root: Any) -> bool:
        """Tell whether a root has parameters: a loss or a metric is no model."""

    def inside(self, root: Any) -> Any:
        """Return the user's module inside wrappers."""
        return root

    def made_up(self, module: Any) -> str:
        """Return a name for a module that its parent does not know."""
        return type(module).__name__

    # ---------------------------------------------------------------------------------------------------- what all share
    def register(self, root: Any, name: str | None = None) -> None:
        """Name a root module and all modules below it."""
        for path, module in self.below(root, self._root_name(root) if name is None else name):
            self._paths.setdefault(module, path)

    def path(self, module: Any, parent: Any) -> str:
        """Return the path of a module that starts to run inside ``parent`` (None: outside any module)."""
        found = self._paths.get(module)
        if found is None:
            if parent is None:
                self.register(next((one for one in self.wholes() if self._holds(one, module)), module))
            else:  # built after its parent was registered
                name = next((k for k, child in self.children(parent) if child is module), None) or self.made_up(module)
                above = self._paths.get(parent, "")
                self.register(module, f"{above}.{name}" if above else name)
            found = self._paths[module]
        return found

    def names(self, root: Any) -> dict[str, str]:
        """Return the paths of a module and all below it, each by its path in that module: those named before keep their own."""
        above = self.path(root, None)
        return {at: self._paths.get(one, f"{above}.{at}" if above and at else at or above) for at, one in self.below(root, "")}

    def _holds(self, whole: Any, module: Any) -> bool:
        return whole not in self._paths and any(one is module for _, one in self.below(whole, ""))

    def _root_name(self, root: Any) -> str:
        if not self._has_main and self.is_model(root):
            self._has_main = True
            return ""
        name = type(self.inside(root)).__name__
        self._roots[name] += 1
        return name if self._roots[name] == 1 else f"{name}~{self._roots[name]}"


def walk(module: Any, path: str, children: Callable[[Any], Iterable[tuple[str | None, Any]]]) -> Iterator[tuple[str, Any]]:
    """Yield a module and all below it once, a shared one at its first place, each with its path; a child without a name has its
    parent's."""
    seen: set[int] = set()
    pending = [(path, module)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [(path if name is None else f"{path}.{name}" if path else name, child) for name, child in children(module)]
        pending += reversed(below)


class Run:
    """One run of a checkpointed function that stood in ``scope`` in forward, ``within`` a backward pass in the adapter's numbers.
    A first run adds its calls by level, scope and operator to ``first``, which later ones (``repeats``) read; it goes on while
    ``frame`` is on the stack, or with None until it ends itself."""

    __slots__ = ("_first", "_seen", "frame", "repeats", "scope", "within")

    def __init__(
        self, first: dict[Key, list[int]], scope: str, *, repeats: bool, within: int, frame: FrameType | None = None
    ) -> None:
        self._first, self.scope, self.repeats, self.within, self.frame = first, scope, repeats, within, frame
        self._seen: Counter[Key] = Counter()

    def add(self, key: Key, seq: int) -> None:
        """List a call of the first run."""
        self._first[key].append(seq)

    def repeated(self, key: Key) -> int | None:
        """Return the call of the first run that the next call of this kind repeats; None where it made none such."""
        n = self._seen[key]
        self._seen[key] += 1
        calls = self._first.get(key, ())
        return calls[n] if n < len(calls) else None


def link(runs: list[Run], call: Call) -> None:
    """Give a call that begins inside checkpointed functions the forward call it repeats, and list it where it may be repeated."""
    if call.phase not in ("forward", "recompute"):
        return
    key = (call.level, call.scope, call.op)
    for run in runs:
        if run.repeats and (found := run.repeated(key)) is not None:
            call.forward_seq = found
    origin = call.seq if call.phase == "forward" or call.forward_seq is None else call.forward_seq
    for run in runs:
        if not run.repeats:
            run.add(key, origin)


def followed(
    function: Callable[..., Any], first: dict[Key, list[int]], scope: str, now: Callable[[], tuple[list[Run], int]], *, ran: bool
) -> Callable[..., Any]:
    """Wrap a function that the framework runs again in the backward; ``first`` is where its first run, before this where it
    ``ran``, lists its calls."""

    @wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        runs, within = now()
        runs.append(Run(first, scope, repeats=ran, within=within))
        ran = True
        try:
            return function(*args, **kwargs)
        finally:
            runs.pop()

    return run


def repeated_scope(runs: list[Run], within: int) -> str | None:
    """Return the scope in which the function that a backward pass recomputes stood in forward; None: it recomputes none."""
    return runs[-1].scope if runs and runs[-1].within == within != -1 else None


def drop_stale(runs: list[Run]) -> None:
    """Forget first runs that ended in an exception: whoever holds its traceback keeps their generator from ending."""
    stack = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stack.add(frame)
        frame = frame.f_back
    runs[:] = [run for run in runs if run.frame is None or run.frame in stack]


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
