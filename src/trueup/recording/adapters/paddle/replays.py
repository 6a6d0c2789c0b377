"""Recomputation (``paddle.distributed.fleet.utils.recompute``): where its runs begin; see `trueup.recording.recorder.repeats`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from trueup.recording.recorder.repeats import followed
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

MODULE = "paddle.distributed.fleet.recompute.recompute"


Follow = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the function that is recomputed and returns what runs in its place, the first time and again."""


def replacements(session: Session) -> list[Replacement]:
    """Return what lets a session follow recomputed functions."""
    return around(lambda function: _followed(session, function))


def around(follow: Follow) -> list[Replacement]:
    """Return what stands around the function that is recomputed: in the reentrant form inside the PyLayer, else before it."""
    module = sys.modules.get(MODULE)
    if module is None:
        return []
    found = []
    function = getattr(module, "RecomputeFunction", None)
    if function is not None:
        found.append(Replacement(function, "forward", lambda original: staticmethod(_reentrant(follow, original))))
    if hasattr(module, "_recompute_without_reentrant"):
        found.append(Replacement(module, "_recompute_without_reentrant", lambda original: _plain(follow, original)))
    return found


def _reentrant(follow: Follow, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(context: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(context, follow(function), *args, **kwargs)

    return forward


def _plain(follow: Follow, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(follow(function), *args, **kwargs)

    return recompute


def _followed(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    threads = session.threads
    modules = threads.state.modules
    scope = modules[-1].scope if modules else ""
    return followed(function, defaultdict(list), scope, lambda: (threads.state.runs, len(threads.state.passes)), ran=False)
