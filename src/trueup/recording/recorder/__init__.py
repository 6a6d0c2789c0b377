"""What every framework adapter shares: a capture's options, filters, ordinals, call sites, buffering and flushing.

An adapter decides *what* a call is and calls `Recorder.begin` and `Recorder.slot`; this package decides whether it is
kept, what it is named and when it reaches the disk. It knows no framework; adapters and the command line import it,
`verdict` never does. Its names are loaded when they are first used: a command that trains nothing waits for none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.recorder.options import CaptureOptions as CaptureOptions
    from trueup.recording.recorder.recorder import Recorder as Recorder
    from trueup.recording.recorder.rows import Call as Call
    from trueup.recording.recorder.rows import Slot as Slot
    from trueup.recording.recorder.rows import Statistics as Statistics
    from trueup.recording.recorder.rows import Tensor as Tensor

_HOMES = {"CaptureOptions": "options", "Recorder": "recorder"} | dict.fromkeys(("Call", "Slot", "Statistics", "Tensor"), "rows")

__all__ = ["Call", "CaptureOptions", "Recorder", "Slot", "Statistics", "Tensor"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trueup.recording.recorder' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
