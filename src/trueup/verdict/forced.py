"""What is to be said of a comparison whose candidate computed with inputs that were put in place of its own."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.store import Capture

BLIND = "at level module a forced run does not show what functions between modules compute: compare at level api or aten too"


def lender_of(capture: Capture) -> str | None:
    """Return the capture whose inputs a run was given (``trueup capture --inputs-from``), None for an ordinary run."""
    config = capture.root.get("config")
    found = config.get("inputs_from") if isinstance(config, dict) else None
    return found[:300] if isinstance(found, str) else None


def notes_on(capture: Capture, levels: Sequence[str]) -> tuple[list[str], bool]:
    """Return what to say, and whether agreement at these levels proves nothing.

    Where each module gets the baseline's inputs and gradients, what a function between two modules computes wrongly is replaced
    before anything records it, unless the function itself is recorded.
    """
    lender = lender_of(capture)
    if lender is None:
        return [], False
    notes = [str(note) for manifest in capture.ranks.values() for note in manifest.get("notes") or ()]
    said = [note[:300] for note in notes if "inputs were forced" in note][:2] or [f"inputs were forced: those of {lender}"]
    said[0] += "; each call shows its own error alone"
    recorded = capture.root.get("levels")  # the loss is a call of level api in every capture
    blind = not any(level in recorded for level in {*levels} - {"module"}) if isinstance(recorded, list) else True
    return ([BLIND, *said] if blind else said), blind
