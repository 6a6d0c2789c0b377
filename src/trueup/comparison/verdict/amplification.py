"""How much the same operator makes of the error of its inputs elsewhere in the run.

The table grants every operator of a kind the same factor, from what was measured on other models. A run knows more: twelve layers
call the same operator with the same arguments on the same shapes. What a call makes of the errors that it gets, as a share of
what the table grants, is its *amplification*::

    (error of the output - what rounding explains) / what the errors of the inputs explain

Where half of the other calls of its kind, and at least `LEAST` of them, make as much of it or more, so may this one.

A call is no witness for itself, nor is one that is a culprit for certain. A fault that adds the same error whatever goes in
is no amplification: it weighs less the larger the errors of the inputs are, and the first call that has it was given none. It is
never the other way round, that a call is granted less for what others do: on six models with planted faults under noise that
found no fault more, and it blamed the backward of a healthy batch-norm, whose amplification grew a thousandfold within three steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers

LEAST = 4
"""How many other calls must tell: with three, two culprits would be a majority."""

ROOM = 1.5
"""Times the others' median that is granted: both errors are estimates from sketches, within about 18 % each."""

KEPT = 32
"""Amplifications that are remembered of a kind from step to step, spread evenly over those seen."""


@dataclass(slots=True)
class Amplification:
    """What is remembered of a run, over steps and ranks: a kind of output (uint64) and an amplification, an entry each."""

    kinds: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    shares: Array = field(default_factory=lambda: np.zeros(0))

    def factors(self, kinds: Array, shares: Array, witness: Array, widest: float) -> Array:
        """Return by how much what the table grants is to be multiplied; 1 where the others do not ask for more.

        Args:
            kinds: uint64 ``(n,)``, what tells one kind of output from another.
            shares: float64 ``(n,)``, amplifications.
            witness: bool ``(n,)``, whether others may go by it.
            widest: the most that others may earn a call: beyond it they would be culprits themselves.
        """
        found = np.ones(len(kinds))
        mine, at = np.flatnonzero(witness), np.flatnonzero(shares > 1)  # the only ones that can need it
        kind, share = np.r_[kinds[mine], self.kinds], np.r_[shares[mine], self.shares]
        order = np.lexsort((share, kind))
        kind, share = kind[order], share[order]
        if len(at):
            places = np.full(len(kinds) + len(self.kinds), -1)
            places[np.r_[mine, np.full(len(self.kinds), len(kinds))][order]] = np.arange(len(order))
            middle, others = _median_of_others(kind, share, kinds[at], places[at])
            more = (others >= LEAST) & (ROOM * middle > 1)
            found[at[more]] = np.minimum(ROOM * middle[more], widest)
        self.kinds, self.shares = _thinned(kind, share)
        return found


def _median_of_others(kind: Array, share: Array, wanted: Array, place: Numbers) -> tuple[Array, Array]:
    """Return the lower median of the shares of each wanted kind, and of how many; without the one at its own place (-1: none).

    ``kind`` and ``share`` are sorted, by kind first.
    """
    start, stop = (np.searchsorted(kind, wanted, side) for side in ("left", "right"))
    others = stop - start - (place >= 0)
    middle = start + (others - 1) // 2
    middle += (place >= 0) & (place <= middle)
    return np.r_[share, np.nan][np.where(others > 0, middle, len(share))], others


def _thinned(kind: Array, share: Array) -> tuple[Array, Array]:
    """Keep `KEPT` entries of each kind, the smallest and the largest among them; both are sorted."""
    start, stop = (np.searchsorted(kind, kind, side) for side in ("left", "right"))
    place, count = np.arange(len(kind)) - start, stop - start
    step = place * (KEPT - 1) // np.maximum(count - 1, 1)
    first = (place == 0) | (step != np.r_[-1, step[:-1]])
    kept = (count <= KEPT) | first
    return kind[kept], share[kept]
