"""What a run executed beside what was kept of it: which option selected nothing, and what it could have selected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trueup.foundation.model import LEVELS, PHASES
from trueup.recording.recorder.filters import Patterns
from trueup.recording.recorder.options import CaptureOptions, Ranges

NAMED = 8
"""How many scopes or operators are named before they are counted."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was executed while the capture was on; ``keys`` are (level, phase, scope, op)."""

    calls: int
    steps: int
    keys: tuple[tuple[str, str, str, str], ...]


def unused(options: CaptureOptions, seen: Seen) -> dict[str, str]:
    """Return what selected nothing: option -> why, with what there was.

    Steps hide all else: where none of those selected was executed, nothing was seen.
    """
    said = {f"steps {_text(r)}": _steps_that_ran(seen.steps) for r in options.steps or () if r[0] >= max(seen.steps, 1)}
    if not seen.keys:
        return said
    for what, chosen, known, column in (("level", options.levels, LEVELS, 0), ("phase", options.phases, PHASES, 1)):
        present = {key[column] for key in seen.keys}
        if len(chosen) < len(known):
            were = ", ".join(name for name in known if name in present)
            reason = f"matched none of {seen.calls:,} calls; {what}s seen: {were}"
            said |= {f"{what} {name}": reason for name in chosen if name not in present}
    names = {(key[2], key[3]) for key in seen.keys}
    for what, patterns in (("include", options.include), ("exclude", options.exclude)):
        for pattern in patterns:
            if not any(Patterns([pattern]).match(scope, op) for scope, op in names):
                said[f"{what} {pattern!r}"] = f"matched none of {seen.calls:,} calls; {_names(names)}"
    return said


def sentence(option: str, reason: str) -> str:
    """Say one item of `unused`."""
    return f"{option} {reason}" if reason.startswith("matched") else f"{option} selected nothing: {reason}"


def _steps_that_ran(steps: int) -> str:
    if not steps:
        return "the run ended no step (no optimizer made one), so all it did was step 0"
    return f"the run had {steps} step{'s, 0 to ' + str(steps - 1) if steps > 1 else ', step 0'}"


def _names(names: Iterable[tuple[str, str]]) -> str:
    scopes = sorted({scope.split(".")[0] for scope, _ in names} - {""})
    if scopes:
        return f"scopes seen: {_some(scopes)}"
    return f"no scopes seen (no module ran); operators seen: {_some(sorted({op for _, op in names}))}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _text(bounds: tuple[int, int | None]) -> str:
    start, stop = bounds
    return str(start) if stop == start + 1 else f"{start}:" if stop is None else f"{start}:{stop}"


def ranges_text(ranges: Ranges) -> str:
    """Write ranges as they are given on the command line."""
    return ",".join(map(_text, ranges))
