"""Recomputation (``paddle.distributed.fleet.utils.recompute``): which forward call a recomputed call repeats.

The first run of a recomputed function lists its calls by level, scope and operator; in a later run the n-th call of a list
repeats the n-th of the first.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from trueup.adapters.paddle.replacing import Replacement

if TYPE_CHECKING:
    from trueup.adapters.paddle.session import Session
    from trueup.recorder import Call

MODULE = "paddle.distributed.fleet.recompute.recompute"
Key = tuple[str, str, str]


class Run:
    """One run of a recomputed function."""

    __slots__ = ("_first", "_seen", "depth", "repeats", "scope")

    def __init__(self, first: dict[Key, list[int]], scope: str, *, repeats: bool, depth: int) -> None:
        self._first, self.scope, self.repeats = first, scope, repeats
        self.depth = depth
        """How many backward passes were under way when it began."""
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
    """Give a call that begins inside recomputed functions the forward call it repeats, and list it where it may be repeated."""
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


def replacements(session: Session) -> list[Replacement]:
    """Return what stands around the function that is recomputed: in the reentrant form inside the PyLayer, else before it."""
    module = sys.modules.get(MODULE)
    if module is None:
        return []
    found = []
    function = getattr(module, "RecomputeFunction", None)
    if function is not None:
        found.append(Replacement(function, "forward", lambda original: staticmethod(_reentrant(session, original))))
    if hasattr(module, "_recompute_without_reentrant"):
        found.append(Replacement(module, "_recompute_without_reentrant", lambda original: _plain(session, original)))
    return found


def _reentrant(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(context: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(context, _followed(session, function), *args, **kwargs)

    return forward


def _plain(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_followed(session, function), *args, **kwargs)

    return recompute


def _followed(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    modules = session.threads.state.modules
    scope = modules[-1].scope if modules else ""
    first: dict[Key, list[int]] = defaultdict(list)
    ran = False

    @wraps(function, assigned=("__name__", "__doc__"), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        state = session.threads.state
        state.runs.append(Run(first, scope, repeats=ran, depth=len(state.passes)))
        ran = True
        try:
            return function(*args, **kwargs)
        finally:
            state.runs.pop()

    return run
