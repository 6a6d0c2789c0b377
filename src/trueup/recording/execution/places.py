"""Where and how a recorded call is executed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from trueup.recording.execution.recorded import RecordedTensor

Draw = Callable[[RecordedTensor], NDArray[Any]]


class NotReplayable(Exception):
    """A call cannot be executed again; the text says why."""


class ContextBroken(NotReplayable):
    """A call before the last one cannot be executed."""

    def __init__(self, seq: int, why: object) -> None:
        super().__init__(f"call {seq}, before it, is not executed: {why}")
        self.seq = seq


@dataclass(frozen=True)
class Place:
    """Where and how calls are executed.

    Args:
        device: ``npu``, ``cuda:1``, ``cpu``.
        home: type of device that the capture was taken on; its tensors move to ``device``, others (a CPU scalar beside them) stay.
        wide: on the CPU in float64 and complex128, without autocast: the truth.
        draw: makes the elements of tensors of which only numbers were kept; None: such calls are not executed.
    """

    device: str
    home: str = "cpu"
    wide: bool = False
    draw: Draw | None = None
    hosted: tuple[str, ...] = ()
    """Slots that are on the CPU whatever the device."""
    perturb: bool = False
    """Move each floating-point element by one unit in its last place, up or down."""
