"""Findings of joined runs that are no faults: what differs is how ranks hold the pieces."""

from __future__ import annotations

from trueup.comparison.layout.joined import Joined
from trueup.foundation.model import Finding

GIVEN = ("input.", "param.", "grad_output.")


def is_unplaced(finding: Finding, sides: tuple[Joined, Joined]) -> bool:
    """Tell whether a culprit is only given something else of which nobody knows how it lies, so that shapes of pieces differ."""
    slots = {slot.slot for slot in finding.slots}
    unknown = [one for side in sides for one in side.apart if one.kind == "unknown" and one.step == finding.step]
    return finding.kind == "input" and any(one.key == _key(finding) and one.slot in slots for one in unknown)


def counts_piece(finding: Finding, run: Joined) -> bool:
    """Tell whether a culprit is given no tensor, and only counts as far as a rank's piece of the sequence is long."""
    if finding.kind != "argument" or any(slot.slot.startswith(GIVEN) for slot in finding.slots):
        return False
    ways = run.step(finding.step).ways.get((_key(finding), "output.0"), {})
    return any(way.kind == "sharded" and axis in run.standing.sequence for axis, way in ways.items())


def encloses(module: Finding, found: Finding) -> bool:
    """Tell whether a culprit is a module inside of which ranks do not agree on something: it makes what follows from that."""
    inside = not module.scope or found.scope == module.scope or found.scope.startswith(f"{module.scope}.")
    return inside and module.level == "module" and (module.phase, module.step) == (found.phase, found.step)


def _key(finding: Finding) -> tuple[str, str, str, str, int]:
    return finding.phase, finding.level, finding.scope, finding.op, finding.ordinal
