"""What `trueup.watch` is asked for: when to stop, how much to save, which calls to see."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trueup.foundation.model import PHASES, TrueupError
from trueup.recording.recorder.options import CaptureOptions, NumberSet

FRAMES = 64
BUDGET = 1 << 30
"""Bytes that a rank may write, all hits together."""
STOPPED = 3
"""Exit code of a run that was stopped."""


class WatchStopped(SystemExit):
    """A watched run was stopped after as many hits as were asked for; its code is 3.

    It is no ``Exception``, so a training loop that survives exceptions does not survive it.
    """


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """When to stop, and how much to save."""

    stop_after: int | None = None
    """Hits after which the run is stopped; None: never."""
    frames: int = FRAMES
    """Calls saved before the bad one, and after it."""
    budget: int = BUDGET

    @classmethod
    def of(cls, stop_after: int | str | None = None, frames: int = FRAMES, budget: int | str = BUDGET) -> WatchOptions:
        """Check the options.

        Raises:
            TrueupError: a value means nothing.
        """
        text = str(stop_after)
        if text not in ("None", "never") and not (text.isdigit() and int(text) > 0):
            raise TrueupError(f"stop_after {stop_after!r} is unknown: expected a number of hits from 1 on, or never")
        if frames < 0:
            raise TrueupError(f"frames {frames} is too small: expected 0 or more calls before the bad one")
        return cls(int(text) if text.isdigit() else None, frames, _bytes(budget))

    def to_json(self) -> str:
        """Encode for the environment of a child process."""
        return json.dumps(dataclasses.asdict(self))


def _bytes(value: int | str) -> int:
    text = str(value).strip().upper().removesuffix("B")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise TrueupError(f"budget {value!r} cannot be read: expected a size such as 500MB or 2GB")
    return size


def capture_options(
    level: str | Sequence[str] | None, phase: str | Sequence[str] | None, include: Any = None, exclude: Any = None,
    steps: NumberSet = None, ranks: NumberSet = None, compile: str = "off",
) -> CaptureOptions:  # fmt: skip
    """Return what is seen: functions and modules' functions, forward and backward; the optimizer's only where it is asked for."""
    phases = [name for name in PHASES if name != "optimizer"] if phase is None else phase
    return CaptureOptions.of(
        level="api" if level is None else level, phase=phases, include=include, exclude=exclude, steps=steps, ranks=ranks,
        compile=compile,
    )  # fmt: skip
