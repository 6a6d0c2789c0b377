"""What Trueup stands in the place of for the time of a capture: attributes, and functions wherever somebody holds them by name.

Activation checkpointing: which forward call a recomputed call repeats.

A checkpointed function is wrapped. Its first run lists its calls by level, scope and operator; in a later run the n-th call of a
list repeats the n-th of the first. Where one checkpointed function contains another, the inner one is listed in both, and a
recomputed call of the inner names the call that ran in the forward, not an earlier recomputation.

An adapter finds the functions that its framework runs again, and tells which backward pass is under way.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.recorder.rows import Call

Key = tuple[str, str, str]


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


class Replacement:
    """An attribute of a class or module in whose place stands, between `install` and `remove`, what ``make`` makes of it. That
    passes through when the capture is over, for others may hold a reference to it, and is taken back only where it still
    stands."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self.original: Any = None
        self.ours: Any = None
        self._inherited = False

    def install(self) -> None:
        """Replace the attribute; where this version of the framework has none of that name, do nothing."""
        self._inherited = self._name not in vars(self._owner)
        original = getattr(self._owner, self._name, None) if self._inherited else vars(self._owner)[self._name]
        if original is not None:
            if self.ours is None or original is not self.original:
                self.original, self.ours = original, self._make(original)
            setattr(self._owner, self._name, self.ours)

    def remove(self) -> bool:
        """Put the original back; return whether ours stood there."""
        stands = self.ours is not None and vars(self._owner).get(self._name) is self.ours
        if stands and self._inherited:
            delattr(self._owner, self._name)
        elif stands:
            setattr(self._owner, self._name, self.original)
        return stands


class Around(Replacement):
    """A function or method around which another is called: with the original, then with what the original is given."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        def make(original: Callable[..., Any]) -> Any:
            @wraps(original)
            def around(*args: Any, **kwargs: Any) -> Any:
                return call(original, *args, **kwargs)

            return staticmethod(around) if isinstance(original, staticmethod) else around

        super().__init__(owner, name, make)


class Sweep:
    """Functions replaced wherever a module holds them: ``from paddle._C_ops import matmul`` binds the original for good. A module
    that takes one by name while they are replaced keeps the replacement, which hands on to the original afterwards. Modules whose
    names begin with one of ``left_alone`` keep theirs."""

    def __init__(self, replaced: Iterable[tuple[Any, Any]], left_alone: tuple[str, ...] = ()) -> None:
        self._left_alone = left_alone
        self._by_id = {id(original): (original, new) for original, new in replaced}
        self._done: list[tuple[dict[str, Any], str, Any]] = []

    def install(self) -> int:
        """Replace; return in how many places."""
        for name, module in list(sys.modules.items()):
            if type(module) is not ModuleType or name.startswith(self._left_alone):
                continue
            names = vars(module)
            for key, value in list(names.items()):
                found = self._by_id.get(id(value))
                if found is not None and found[0] is value:
                    names[key] = found[1]
                    self._done.append((names, key, found[1]))
        return len(self._done)

    def remove(self) -> None:
        """Restore every place that still holds the replacement."""
        originals = {id(new): original for original, new in self._by_id.values()}
        done, self._done = self._done, []
        for names, key, new in done:
            if names.get(key) is new:
                names[key] = originals[id(new)]


@contextlib.contextmanager
def attributes_set(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[int]:
    """Set attributes of objects for a while; gives how many objects."""
    before = [(one, name, getattr(one, name)) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            setattr(one, name, value)
        yield len({id(one) for one, _, _ in changes})
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def without_dropout(modules: Iterable[Any]) -> contextlib.AbstractContextManager[int]:
    """Turn dropout (``p`` of a Dropout, a number ``dropout`` of any other module) off for a while; gives how many had any."""
    found: list[tuple[Any, str, Any]] = []
    for module in modules:
        if re.fullmatch(r"(Feature)?(Alpha)?Dropout([123][dD])?", type(module).__name__):
            found += [(module, "p", 0.0)] if module.p else []
        elif isinstance(getattr(module, "dropout", None), float) and module.dropout:
            found.append((module, "dropout", 0.0))
    return attributes_set(found)
