"""Activation checkpointing: which forward call a recomputed call repeats.

A checkpointed function is wrapped. Its first run lists its calls by level, scope and operator; in a later run the n-th call of a
list repeats the n-th of the first. Where one checkpointed function contains another, the inner one is listed in both, and a
recomputed call of the inner names the call that ran in the forward, not an earlier recomputation.

An adapter finds the functions that its framework runs again, and tells which backward pass is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.recorder.rows import Call

Key = tuple[str, str, str]


class Run:
    """One run of a checkpointed function.

    Args:
        first: the calls of the first run, by level, scope and operator; this run adds to it, or reads it.
        scope: in which the function stood in forward.
        repeats: whether it is a later run.
        within: which backward pass is under way, in the adapter's numbers.
        frame: what has to be on the stack for the run to go on; None where the run ends itself.
    """

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
    """Wrap a function that the framework runs again in the backward.

    Args:
        function: what is run.
        first: where its first run lists its calls.
        scope: in which it stands in forward.
        now: tells the runs under way on this thread, and which backward pass is.
        ran: whether its first run was before.
    """

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
