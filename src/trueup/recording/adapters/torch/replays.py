"""Activation checkpointing in PyTorch: where its first runs and its repetitions begin; see `trueup.recording.recorder.repeats`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.recorder.repeats import Key, Run, followed

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


def follow_reentrant(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that PyTorch is about to run, and to run again in the backward."""
    return _followed(session, function, defaultdict(list), ran=False)


def follow(session: Session, original: Callable[..., Any], function: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """Stand in for the generator around the first run of a function; it is handed the function for the later runs."""
    runs, task = _now(session)
    first: dict[Key, list[int]] = defaultdict(list)
    run = Run(first, _scope(session), repeats=False, within=task, frame=sys._getframe(1))
    runs.append(run)
    try:
        yield from original(_followed(session, function, first, ran=True), *rest, **kwargs)
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
    session: Session, function: Callable[..., Any], first: dict[Key, list[int]], *, ran: bool
) -> Callable[..., Any]:
    return followed(function, first, _scope(session), lambda: _now(session), ran=ran)


def _now(session: Session) -> tuple[list[Run], int]:
    return session.threads.state.runs, torch._C._current_graph_task_id()


def _scope(session: Session) -> str:
    modules = session.threads.state.modules
    return modules[-1].scope if modules else ""


def scope_of_replay(runs: list[Run], task: int) -> str | None:
    """Return the scope in which the function that a backward pass is recomputing stood in forward; None when it is not."""
    return runs[-1].scope if runs and runs[-1].within == task != -1 else None
