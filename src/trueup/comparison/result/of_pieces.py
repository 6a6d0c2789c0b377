"""What pieces say of joined runs: findings that are no faults, what differs is how ranks hold them; and factors of their own."""

from __future__ import annotations

from trueup.comparison.layout.gradients import by_pieces, off
from trueup.comparison.layout.joined import Joined
from trueup.foundation.model import Finding
from trueup.foundation.words.setup_sentence import scaled_apart

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


def each_scaled(step: int, sides: tuple[Joined, Joined]) -> str:
    """Say that each rank multiplies its piece of a flat buffer of gradients by a factor of its own; empty where none does."""
    mine, its = (side.gradients.get(step, {}) for side in sides)
    wrong, ranks = off(mine, its, sides[1].tied) or [], sides[1].standing.ranks
    found = (by_pieces(wrong, its, ranks.size(axis)) for axis in ranks.axes if sides[1].standing.flat)
    return next((scaled_apart(factors) for factors in found if factors), "")


def _key(finding: Finding) -> tuple[str, str, str, str, int]:
    return finding.phase, finding.level, finding.scope, finding.op, finding.ordinal
