"""Operators of which Inductor, the compiler behind ``torch.compile``, generates code: left to ATen's own kernels instead.

No policy reaches into compiled code, and while one is applied the Python code runs that was compiled. So the compiler itself is
changed: an operator of the list is not decomposed, and its lowering is a call of ATen (`torch._inductor.lowering.make_fallback`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from trueup.analysis.bisection.running import RUN, Setup
from trueup.analysis.triage.running import compiled, last_line
from trueup.foundation.facts.operators import named
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import say
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions

ATEN = "aten"
DONE = "computed by ATen's kernels"
FILE = "inductor_fallbacks.py"
"""What a process is changed by, and what a user imports: it stands without Trueup."""


def is_compiled(capture: Capture) -> bool:
    """Tell whether the training used ``torch.compile``, as the notes of a capture say."""
    return any(str(note).startswith("torch.compile was used") for one in capture.ranks.values() for note in one.get("notes", ()))


def order(adapter: str, names: Sequence[str]) -> dict[str, object]:
    """Return the order to a launched process: ``left_to_aten`` or ``operators_compiled`` of the adapter's switches."""
    return {"name": "Inductor", "framework": "torch", "adapter": {adapter: list(names)}}


def listed(command: Sequence[str], place: Path) -> tuple[str, ...]:
    """Run the first step, compiled, and return the operators of which Inductor generated code; raises TrueupError if of none."""
    capture = place / "compiled"
    if not capture.exists():
        say("recording the first step, which tells what is compiled")
        place.mkdir(exist_ok=True)
        told = {RUN: str(place.absolute())}
        options = CaptureOptions.of(level="api", include=named("loss"), steps="0", stop=True)
        launch.execute(
            capture.absolute(), options, command, environment=told, output=place / "compiled.txt",
            switches=[order("operators_compiled", ())], options_of=compiled(options),
        )  # fmt: skip
    found: set[str] = set()
    for report in open_capture(capture).processes():
        said = (report.get("switches") or {}).get("torch", {}).get("seen", {}).get("Inductor")
        found.update(str(name) for name in said or () if str(name).isidentifier())
    if not found:
        raise TrueupError(
            f"Inductor generated code of no operator in the first step.\n  where:    {place}{last_line(place / 'compiled.txt')}\n"
            "  expected: a training under torch.compile, with its own backend\n"
            "  next:     --as float32, float64 or cpu change operators that are not compiled"
        )
    return tuple(sorted(found))


def setup(names: Sequence[str]) -> Setup:
    """Return how a run leaves operators to ATen; none: as it is."""
    return Setup(switches=[order("left_to_aten", names)] if names else ())


def written(names: Sequence[str], folder: Path) -> list[str]:
    """Write the list for the user's script; return what to do with it."""
    file = folder / FILE
    text = files("trueup.recording.adapters.torch").joinpath(FILE).read_text(encoding="utf-8")
    file.write_text(f"{text}\n\nleave_to_aten(({''.join(f'{name!r}, ' for name in names).rstrip()}))\n", encoding="utf-8")
    return [f"copy {file} beside the script and import it before the first compiled call: import {file.stem}"]
