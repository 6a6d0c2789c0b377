"""Which adapter executes the calls of a capture again: that of the framework that recorded it.

>>> executing(framework_of(trueup.open_capture("runs/cpu")))
<module 'trueup.recording.adapters.paddle.executing' ...>

The registry (`adapters.Adapter.executes`) says whose calls can be executed; the adapter's module ``executing`` is an `Executing`.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture
from trueup.recording.execution.case_errors import CaseErrors
from trueup.recording.execution.judging import Bitwise, Judging
from trueup.recording.execution.recorded import RecordedCalls
from trueup.recording.registry import ADAPTERS, adapter, listed


class Executing(Protocol):
    """What an adapter offers."""

    CASES: CaseErrors  # makes tests of calls

    def provide(self, device: str, *, simulated: bool) -> None:
        """Make sure that the framework knows a device; raises TrueupError if it does not."""

    def limit_threads(self, number: int) -> None:
        """Let each operator use so many threads."""

    def Replayer(self, calls: RecordedCalls, device: str, *, draws: bool, recorded: bool) -> Judging[Any]:
        """Return what executes and judges calls."""

    def Verifier(self, calls: RecordedCalls, device: str) -> Bitwise[Any]:
        """Return what executes calls where they were recorded, and compares bits."""


def framework_of(capture: Capture) -> str:
    """Return a capture's framework, by default PyTorch; raises TrueupError if its calls cannot be executed again."""
    names = [str(manifest["framework"]) for manifest in capture.ranks.values() if manifest.get("framework")]
    name = names[0] if names else "torch"
    known = {adapter.name: adapter.title for adapter in ADAPTERS if adapter.executes}
    if name not in known:
        raise TrueupError(
            f"{capture.path} was recorded in {name[:40]}, whose calls Trueup cannot execute again\n"
            f"  expected: a capture of {listed(list(known.values()))}\n  got:      framework {name[:40]}\n"
            "  next:     trueup compare, show, diff and overflow take it"
        )
    return name


def executing(framework: str) -> Executing:
    """Return the adapter that executes calls of a framework; raises TrueupError if the framework is not installed."""
    known = adapter(framework)
    try:
        importlib.import_module(framework)
    except ImportError:
        raise TrueupError(
            f"This executes calls with {known.title}, which is not installed\n  next:     pip install {known.executes}"
        ) from None
    return cast("Executing", importlib.import_module(f"trueup.recording.adapters.{framework}.executing"))


def only_torch(capture: Capture, what: str) -> None:
    """Refuse, by TrueupError, a capture of another framework than PyTorch."""
    name = framework_of(capture)
    if name != "torch":
        raise TrueupError(
            f"{what} executes calls of PyTorch alone.\n  expected: a capture of PyTorch\n"
            f"  got:      one of {adapter(name).title}\n"
            "  next:     trueup replay and verify-capture execute its calls"
        )
