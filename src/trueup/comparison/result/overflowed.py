"""NaN and Inf that both runs make alike: nothing deviates, and both are wrong.

An infinity that is read and healed is none of it: a mask of -Inf that a softmax takes. So the walk starts from what a training
keeps (a gradient, a weight, the loss, what the model returns) and goes back along what was read, to the call that read only finite
numbers. Where that call was asked for infinities (they stand among its arguments) it goes to the call that made NaN of them.
"""

from __future__ import annotations

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Stream, is_input, is_output
from trueup.comparison.measures.measure import Errors

NAMES = ("NaN", "Inf", "-Inf")
KEPT = ("backward", "optimizer")
"""Phases whose results a training keeps."""
STEPS = 10_000
"""Calls that are walked back at most: chains end long before, damaged captures may go in circles."""


class Overflowed:
    """Finds the first NaN or Inf that both runs kept."""

    def __init__(self) -> None:
        self.note: str | None = None

    def add(self, errors: Errors, path: str) -> None:
        """Look at the matched calls of some steps, until something was found; ``path`` is the candidate's."""
        baseline, candidate = errors.streams
        if self.note is not None or not (bad := _bad(candidate)).any():
            return
        k, j = errors.slots
        both = _bad(baseline)[k] & bad[j] & errors.outputs & np.isfinite(errors.absolute)
        kept = np.flatnonzero(both & _is_kept(candidate)[candidate.call[j]])
        if len(kept):
            self.note = _note(candidate, _first(candidate, bad, int(j[kept[0]])), path)


def _bad(stream: Stream) -> Array:
    nan, above, below = stream.counts.T
    return np.asarray((nan > 0) | (above > 0) | (below > 0))


def _is_kept(stream: Stream) -> Array:
    """Tell which calls make what a training keeps: gradients, weights, and what modules at the top return."""
    phases = [stream.names.number(name) for name in KEPT]
    top = (stream.parent == NONE) & (stream.level == stream.names.number("module"))
    return np.asarray(np.isin(stream.phase, phases) | top)


def _first(stream: Stream, bad: Array, slot: int) -> int:
    """Return the slot that was bad first, of those from which a bad slot comes."""
    found = _source(stream, bad, slot)
    asked = "inf" in (stream.value(int(stream.arguments[stream.call[found]])) or "").lower()
    nan = stream.counts[:, 0] > 0
    return _source(stream, nan, slot) if asked and nan[slot] else found


def _source(stream: Stream, bad: Array, slot: int) -> int:
    """Walk back from a bad slot, into calls and along what they read."""
    reads, gives = (stream.names.table(kind)[stream.slot] for kind in (is_input, is_output))
    for _ in range(STEPS):
        call = int(stream.call[slot])
        read = [n for n in _of(stream, call) if bad[n] and reads[n]]
        made = [n for inner in stream.inside(call).tolist() for n in _of(stream, inner) if bad[n] and gives[n]]
        if read:
            before = _producer(stream, bad, read[0])
            if before == NONE:
                return read[0]
            slot = before
        elif made:
            slot = made[0]
        else:
            break
    return slot


def _of(stream: Stream, call: int) -> range:
    return range(*stream.starts[call : call + 2].tolist())


def _producer(stream: Stream, bad: Array, slot: int) -> int:
    """Return the bad result that an earlier call gave for what is read, `NONE` where none is known."""
    call = int(stream.producers[slot])
    if not 0 <= call < int(stream.call[slot]):
        return NONE
    named = [n for n in _of(stream, call) if bad[n] and stream.slot[n] == stream.producer_slot[slot]]
    return named[0] if named else NONE


def _note(stream: Stream, slot: int, path: str) -> str:
    row = stream.row(int(stream.call[slot]))
    what = " and ".join(name for name, count in zip(NAMES, stream.counts[slot].tolist(), strict=True) if count > 0)
    name = stream.names.names[int(stream.slot[slot])]
    made = f"made {what} first in" if is_output(name) else f"got {what}, which no recorded call made, first in {name} of"
    return f"both runs {made} {row.op} ({row.key}): `trueup overflow {path}` says why and what it did"
