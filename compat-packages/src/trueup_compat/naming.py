"""A recorder that names each call as the old tools do and asks, call by call, whether it is wanted.

The tools count the calls of a function over the whole run, so every call is counted, recorded or not. A capture's own filters
choose by scope and operator; ``list`` and ``range`` of ptdbg choose single calls by those numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trueup.recording.recorder import Recorder
from trueup.recording.recorder.options import Seen
from trueup.recording.recorder.recorder import Keeper
from trueup.recording.recorder.rows import FIELDS, Kind, Rows
from trueup_compat.names import CallName, api_of

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


class NamedOp(str):
    """An operator's name that knows which call of the tool it is; the backward of a call is begun with the same object."""

    name: CallName | None

    def __new__(cls, op: str, name: CallName | None) -> NamedOp:
        """Make one."""
        made = super().__new__(cls, op)
        made.name = name
        return made


PAUSED = CallName("", "", -1, "forward")
"""The name of a function that runs while a module is dumped under a name of its own."""


class Names:
    """Counts the calls of each function, and of each module.

    It outlives a capture: a script may switch from one kind of dump to another, and the numbers go on.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._called: dict[str, str] = {}
        self._only: str | None = None

    def call(self, scope: str, name: str) -> None:
        """Call the module of a scope by another name, and pause functions, until `uncall`: ``module_dump`` of the tools."""
        self._called[scope] = self._only = name

    def uncall(self) -> None:
        """Go on with functions."""
        self._only = None

    def is_called(self, name: CallName) -> bool:
        """Tell whether a module's call has a name of its own and was asked for: the backward may come when that is over."""
        return name.api in self._called.values() if name.direction == "backward" else name.api == self._only

    def reset(self) -> None:
        """Count from 0 again."""
        self._counts.clear()

    def name(self, level: str, phase: str, scope: str, op: str) -> CallName | None:
        """Name a call that begins; None where the tools do not see it. What an optimizer computes is not counted."""
        forward = op.name if isinstance(op, NamedOp) else None
        if phase == "optimizer":
            return None
        if forward is not None and phase == "backward":
            return PAUSED if forward is PAUSED else CallName(forward.kind, forward.api, forward.index, "backward")
        if level == "module":
            found: tuple[str, str] | None = ("", self._called.get(scope) or (f"{scope}.{op}" if scope else str(op)))
        elif level == "api" and self._only is not None:
            return PAUSED
        else:
            found = api_of(op) if level == "api" else None
        if found is None:
            return None
        index = self._counts[found]
        self._counts[found] += 1
        return CallName(*found, index, "forward")


class _Naming(Recorder):
    """What both recorders below do: a `Kind` for each call, so that one may be kept and the next not."""

    names: Names
    on: bool = False
    """Whether calls are kept at present."""
    wanted: Callable[[CallName | None], bool] | None = None
    """Tells whether a call is kept while it is on; None: all are. It is asked once for each call, in the order of their begin."""
    all_modules: bool = True
    """Whether each module is kept, where the level is recorded; else those that `Names.call` has named."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names = Names()
        self._ordinals: dict[tuple[str, str, str, str], Iterator[int]] = {}
        self._passing: dict[tuple[str, str, str, str], bool] = {}

    @property
    def selected(self) -> bool:
        """Whether the options kept any call."""
        return any(self._passing.values())

    def seen(self) -> Seen:
        """Return what was executed."""
        return Seen(self._last + 1, self.step, tuple(self._passing))

    def end_step(self) -> None:
        """Finish the present step."""
        super().end_step()
        with self._lock:
            self._ordinals.clear()

    def _new_kind(self, level: str, phase: str, scope: str, op: str) -> Kind:
        """Return where a call stands. It goes into no table, so each call asks again (`Recorder.begin`, ``begin_call`` in C)."""
        with self._lock:
            key = (level, phase, scope, str(op))
            name = self.names.name(level, phase, scope, op)
            if key not in self._passing:
                self._passing[key] = self.selects(level, phase, scope, op)
            kept = self.on and self._passing[key] and self._keeps(level, name)
            kind = Kind(level, phase, scope, NamedOp(op, name), kept)
            kind.ordinals = self._ordinals.setdefault(key, itertools.count())
            return kind


    def _keeps(self, level: str, name: CallName | None) -> bool:
        if name is PAUSED:
            return False
        if level == "module" and not self.all_modules:
            return name is not None and self.names.is_called(name)
        return self.wanted is None or self.wanted(name)


class NamingRecorder(_Naming):
    """Writes a capture, and tells the names of what it wrote."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told: dict[int, CallName] = {}

    @property
    def told(self) -> int:
        """How many calls reached the disk since the names were taken."""
        return len(self._told)

    def take_names(self) -> dict[int, CallName]:
        """Return the names of calls that reached the disk since the last time: by `seq`, which a run gives once."""
        told, self._told = self._told, {}
        return told

    def _write(self, rows: Rows) -> None:
        super()._write(rows)
        for call in rows[1::FIELDS]:
            if (name := getattr(call.kind.op, "name", None)) not in (None, PAUSED):
                self._told[call.seq] = name


class NamingKeeper(_Naming, Keeper):
    """Keeps the rows of a step in memory, as a watch does."""


def lose_the_loss(session: Session, recorder: NamingRecorder | NamingKeeper) -> None:
    """Leave out the loss, which a capture keeps whatever its filters say, where not all calls are wanted."""
    record = session.slots.loss

    def loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorder.on and recorder.wanted is None:
            record(args, kwargs)

    session.slots.loss = loss
