"""A hit, and what is said of it on stderr."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from trueup.analysis.watch.again import Rerun
from trueup.analysis.watch.saving import Reproduced
from trueup.recording.recorder import Call


@dataclass(frozen=True, slots=True)
class Hit:
    """A step with something bad."""

    step: int
    rank: int
    kind: str
    name: str
    """``scope/op, phase``."""
    said: str
    source: str | None
    path: str | None
    """The capture that was saved, None where none was."""
    tensors: str
    """Whether its tensors were saved, or why not."""


def reproduction(again: Rerun, reproduced: Reproduced) -> str:
    """Say whether executing again gave the same tensors."""
    early = f"; it ended early: {again.ended_early}" if again.ended_early else ""
    if reproduced.differing:
        some = ", ".join(reproduced.differing[:3])
        why = "the operation is not deterministic, or depends on what changed"
        return f"executed again and NOT the same: {some} differ, so {why}{early}"
    if not reproduced.same:
        return f"executed again without meeting the call{early}"
    missing = f"; {len(reproduced.missing)} tensors were not met again" if reproduced.missing else ""
    return f"executed again with the same result, {reproduced.same} tensors saved{missing}{early}"


def name_of(call: Call) -> str:
    """Name a call: ``scope/op, phase``."""
    return f"{f'{call.scope}/' if call.scope else ''}{call.op}, {call.phase}"


def message(hit: Hit, text: str | None) -> str:
    """Return what is said of a hit that was saved, several lines."""
    lines = [hit.said]
    if hit.source:
        lines.append(f"  your code: {hit.source}{f': {text}' if text else ''}")
    lines.append(f"  tensors:   {hit.tensors}")
    lines.append(f"  saved:     {hit.path}")
    lines.append(f"  next:      trueup overflow {hit.path}")
    return "\n".join(lines)


def last_words(directory: Path, count: int, hit: Hit) -> str:
    """Return what is said where the run is stopped."""
    hits = "the first hit" if count == 1 else f"{count} hits"
    where = hit.path or directory
    return f"the run was stopped after {hits}, as asked; everything is in {directory}, the last hit in {where} (exit code 3)"


def say(text: str) -> None:
    """Print on stderr."""
    print(f"trueup: {text}", file=sys.stderr, flush=True)
