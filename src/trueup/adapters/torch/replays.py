"""Activation checkpointing: which forward call a recomputed call repeats.

A checkpointed function is wrapped. Its first run lists its calls by level, scope and operator; in a later run the n-th call of a
list repeats the n-th of the first. Where one checkpointed function contains another, the inner one is listed in both, and a
recomputed call of the inner names the call that ran in the forward, not an earlier recomputation.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session
    from trueup.recorder import Call

Key = tuple[str, str, str]


class Run:
    """One run of a checkpointed function."""

    __slots__ = ("_first", "_seen", "frame", "repeats", "scope", "task")

    def __init__(self, first: dict[Key, list[int]], scope: str, *, repeats: bool, frame: FrameType | None = None) -> None:
        self._first, self.scope, self.repeats = first, scope, repeats
        self.task = torch._C._current_graph_task_id()
        self.frame = frame
        """What has to be on the stack for the run to go on; None where the run ends itself."""
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


def follow_reentrant(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that PyTorch is about to run, and to run again in the backward."""
    first: dict[Key, list[int]] = defaultdict(list)
    return _followed(session, function, first, [False])


def follow(session: Session, original: Callable[..., Any], function: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """Stand in for the generator around the first run of a function; it is handed the function for the later runs."""
    runs = session.threads.state.runs
    first: dict[Key, list[int]] = defaultdict(list)
    run = Run(first, _scope(session), repeats=False, frame=sys._getframe(1))
    runs.append(run)
    try:
        yield from original(_followed(session, function, first, [True]), *rest, **kwargs)
    finally:
        run.frame = None
        if run in runs:
            runs.remove(run)


def drop_stale(runs: list[Run]) -> None:
    """Forget first runs that ended in an exception: whoever holds its traceback keeps their generator from ending."""
    stack = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stack.add(frame)
        frame = frame.f_back
    runs[:] = [run for run in runs if run.frame is None or run.frame in stack]


def _followed(
    session: Session, function: Callable[..., Any], first: dict[Key, list[int]], ran: list[bool]
) -> Callable[..., Any]:
    scope = _scope(session)

    @wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        runs = session.threads.state.runs
        runs.append(Run(first, scope, repeats=ran[0]))
        ran[0] = True
        try:
            return function(*args, **kwargs)
        finally:
            runs.pop()

    return run


def _scope(session: Session) -> str:
    modules = session.threads.state.modules
    return modules[-1].scope if modules else ""


def scope_of_replay(runs: list[Run], task: int) -> str | None:
    """Return the scope in which the function that a backward pass is recomputing stood in forward; None when it is not."""
    return runs[-1].scope if runs and runs[-1].task == task != -1 else None
