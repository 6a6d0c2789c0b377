"""Activation checkpointing: which forward call a recomputed call repeats.

A checkpointed function is wrapped. Its first run lists its calls by level, scope and operator; in a later run the n-th call of a
list repeats the n-th of the first. Where one checkpointed function contains another, the inner one is listed in both, and a
recomputed call of the inner names the call that ran in the forward, not an earlier recomputation.

An adapter finds the functions that its framework runs again, and says which backward pass is under way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import FrameType
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
