"""Which adapter executes the calls of a capture again: that of the framework that recorded it.

>>> executing(framework_of(trueup.open_capture("runs/cpu")))
<module 'trueup.recording.adapters.paddle.executing' ...>

A framework whose calls can be executed again says so in the registry (`adapters.Adapter.executes`); the module ``executing``
of its adapter has what `Executing` lists.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture
from trueup.recording.adapters import ADAPTERS, adapter, listed
from trueup.recording.execution.bitwise import Bitwise
from trueup.recording.execution.case_errors import CaseErrors
from trueup.recording.execution.judging import Judging
from trueup.recording.execution.recorded import RecordedCalls


class Executing(Protocol):
    """What an adapter offers."""

    CASES: CaseErrors
    """Makes tests of calls."""

    def provide(self, device: str, *, simulated: bool) -> None:
        """Make sure that the framework knows a device.

        Raises:
            TrueupError: it does not.
        """

    def limit_threads(self, number: int) -> None:
        """Let each operator use so many threads."""

    def Replayer(self, calls: RecordedCalls, device: str, *, draws: bool, recorded: bool) -> Judging[Any]:
        """Return what executes and judges calls."""

    def Verifier(self, calls: RecordedCalls, device: str) -> Bitwise[Any]:
        """Return what executes calls where they were recorded, and compares bits."""


def framework_of(capture: Capture) -> str:
    """Return the framework of a capture, as its manifests name it; one that does not say is PyTorch's.

    Raises:
        TrueupError: it is one whose calls Trueup cannot execute again.
    """
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
    """Return the adapter that executes calls of a framework.

    Raises:
        TrueupError: the framework is not installed.
    """
    known = adapter(framework)
    try:
        importlib.import_module(framework)
    except ImportError:
        raise TrueupError(
            f"This executes calls with {known.title}, which is not installed\n  next:     pip install {known.executes}"
        ) from None
    return cast("Executing", importlib.import_module(f"trueup.recording.adapters.{framework}.executing"))


def only_torch(capture: Capture, what: str) -> None:
    """Refuse what executes calls of PyTorch alone.

    Raises:
        TrueupError: the capture is of another framework.
    """
    name = framework_of(capture)
    if name != "torch":
        raise TrueupError(
            f"{what} executes calls of PyTorch alone.\n  expected: a capture of PyTorch\n"
            f"  got:      one of {adapter(name).title}\n"
            "  next:     trueup replay and verify-capture execute its calls"
        )
