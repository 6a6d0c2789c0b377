"""Calls executed once more, as an adapter gives them, or why they could not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trueup.recording.recorder import Call
from trueup.recording.recorder.rows import Rows


class CannotRerun(Exception):
    """Why a call could not be executed again."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """What executing again gave."""

    rows: Rows
    ended_early: str | None
    """Why it did not come to its end, after what was recorded."""


Again = Callable[[Sequence[Call], Sequence[Call]], Rerun]
"""Executes calls of the step once more; given also all calls of the step. Raises `CannotRerun`."""
