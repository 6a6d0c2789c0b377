"""`trueup.watch`: looks at every call of a run, at the cost of statistics, and writes only when something is bad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import TrueupError
from trueup.recording.adapters import ADAPTERS, listed, meant
from trueup.recording.recorder.options import NumberSet
from trueup.recording.recorder.watch_options import BUDGET, FRAMES, WatchOptions, capture_options

if TYPE_CHECKING:
    from trueup.analysis.watch.watch import Watch

def watch(
    model: Any = None, directory: str | Path = "trueup-watch", *, stop_after: int | str | None = None, frames: int = FRAMES,
    budget: int | str = BUDGET, level: str | Sequence[str] | None = None, phase: str | Sequence[str] | None = None,
    include: str | Sequence[str] | None = None, exclude: str | Sequence[str] | None = None, steps: NumberSet = None,
    ranks: NumberSet = None, compile: str = "off",
) -> Watch:  # fmt: skip
    """Watch a training run for NaN, Inf and saturation, in a ``with`` block.

        with trueup.watch(model, "runs/watch", stop_after=1):
            for batch in loader:
                ...; loss.backward(); optimizer.step(); optimizer.zero_grad()

    While all is well nothing is written. On a hit the call is named, executed once more from what the step was given, and saved
    with its inputs and outputs and the calls around it as a capture of its own, ``runs/watch/step-000412``.

    Args:
        model: the module, or modules, whose paths name the scopes; without it the first module with parameters that runs is the
            root.
        directory: where hits are saved; made with the first.
        stop_after: hits after which the run is stopped by `WatchStopped` (exit code 3); None or ``"never"`` goes on.
        frames: calls saved before the bad one, and after it, with their statistics.
        budget: bytes that each rank may write; hits beyond it are counted and named, not saved.
        level: one or more of ``module``, ``api``, ``aten``, or ``all``; by default ``api``.
        phase: as for `trueup.capture`; by default all but ``optimizer``.
        include: as for `trueup.capture`.
        exclude: as for `trueup.capture`.
        steps: steps to watch; None watches all.
        ranks: ranks that watch; None: all.
        compile: as for `trueup.capture`.

    Raises:
        TrueupError: an option is unknown or selects nothing, the directory holds something, a capture is already running, or
            no framework is imported that can be watched.
        WatchStopped: in the training, after the last hit that was allowed.
    """
    options = capture_options(level, phase, include, exclude, steps, ranks, compile)
    chosen = WatchOptions.of(stop_after, frames, budget)
    found = meant(model)
    if found is None:
        names = listed([one.name for one in ADAPTERS if "watch" not in one.lacks])
        raise TrueupError(f"watch found no framework: import {names} before you call trueup.watch")
    if "watch" in found.lacks:
        raise TrueupError(f"watch is not there for {found.title} yet ({found.page} says what there is)")
    models: Iterable[Any] = [] if model is None else model if isinstance(model, (list, tuple)) else [model]
    adapted: Any = import_module(f"trueup.recording.adapters.{found.name}.watching")
    made: Watch = adapted.watch(Path(directory), models, options, chosen)
    return made
