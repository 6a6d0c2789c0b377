"""Where differences come in that no compared call made: fail closed on what was not seen.

A call whose inputs differ explains its outputs. That holds only if the difference of its inputs was seen to arise: after a gap
in the captured steps, or in a capture of the backward alone, it may come from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from trueup.verdict.judge import Judged
from trueup.verdict.measure import SlotError, is_overwritten
from trueup.verdict.streams import Row, is_input, is_output
from trueup.verdict.tree import Tree

LEAST = 1e-3
"""Relative error below which an unexplained input is left alone: it can be the growth of rounding outside the capture."""

GROWTH = 100.0
"""How many times the largest error seen before an input's may be: gradients that add up outside of any call may cancel."""


@dataclass(slots=True)
class Origins:
    """What is remembered of one rank from step to step."""

    largest: float = 0.0
    """Largest relative error of any output so far."""
    errors: dict[int, float] = field(default_factory=dict)
    """Largest relative error of the outputs of each compared call, by ``seq`` on the candidate."""
    pending: tuple[dict[int, Row], dict[int, Row]] = field(default_factory=lambda: ({}, {}))
    """Unmatched calls whose results later steps read, and nobody has read yet, by side."""
    loose: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    """All unmatched calls of earlier steps that no compared call around them accounts for, by side."""

    def follow(self, judged: list[Judged], tree: Tree) -> list[tuple[Judged, str]]:
        """Go through one step's calls in order; return ``(call, slot)`` of inputs whose difference has no origin."""
        self._read(tree)
        found = []
        for call in sorted(judged, key=lambda j: j.call.candidate.seq):
            for error in call.call.slots.values():
                if not is_input(error.slot) or is_overwritten(error, call.call):
                    continue
                if _plain(error) <= max(LEAST, GROWTH * self.largest):
                    continue
                if not _from_unmatched(error, tree):  # else it is accounted for with the call that made it
                    found.append((call, error.slot))
            worst = max((_plain(e) for s, e in call.call.slots.items() if is_output(s)), default=0.0)
            if tree.is_leaf(call):
                self.largest = max(self.largest, worst)
            self.errors[call.call.candidate.seq] = worst
        return found

    def _read(self, tree: Tree) -> None:
        """Take calls off the list whose results are read now: what became of them shows in the reader, or in its readers."""
        for pending, stream in zip(self.pending, tree.streams, strict=True):
            if pending:
                for producer in stream.producer:
                    pending.pop(producer, None)  # type: ignore[arg-type]

    def leave(self, lasting: Iterable[tuple[int, Row]], loose: tuple[dict[int, Row], dict[int, Row]]) -> None:
        """Remember a step's unmatched calls."""
        for side, row in lasting:
            self.pending[side][row.seq] = row
        for known, rows in zip(self.loose, loose, strict=True):
            known.update(rows)


def _from_unmatched(error: SlotError, tree: Tree) -> bool:
    return any(
        stream.producer[k] in unmatched
        for stream, k, unmatched in zip(tree.streams, (error.baseline, error.candidate), tree.unmatched, strict=True)
    )


def _plain(error: SlotError) -> float:
    """Return the relative error; 0 where it means nothing: not measured, unknown in size, or relative to a zero."""
    if math.isnan(error.absolute) or error.unsized or (error.norm == 0 and math.isfinite(error.absolute)):
        return 0.0
    return error.relative
