"""Steps that go backward another number of times: micro-batches against one batch, or against fewer.

Their calls are no counterparts: each computes with another part of the batch, and each loss is divided. The same are the
gradients that the optimizer reads, and what it makes of them. Where these agree no call of the step is blamed for what it
computes. Where they are not off in one direction either, as by a wrong divisor, and the sums of the losses agree, the step is
aligned: all that leaves it was compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from trueup.comparison.graph.streams import Numbers, Stream, most
from trueup.comparison.measures.thresholds import CANCELLED, HALF, ROOM
from trueup.comparison.verdict.budget import unrecorded
from trueup.comparison.verdict.evidence import coherent
from trueup.comparison.verdict.judged import Passes, Tree
from trueup.foundation.facts.operators import having
from trueup.foundation.facts.roundoff import roundoff


def passes(tree: Tree, before: float = 0.0) -> Passes | None:
    """Return how often each side goes backward in a step, if that differs and all that accumulates agrees; else None. Gradients
    off by ``before`` in earlier steps moved the weights by as much of a step: that has a direction."""
    first, second = (_count(stream) for stream in tree.streams)
    if not 0 < first != second > 0:
        return None
    if (found := _agreeing(tree)) is None:
        return None
    (accumulated, biased), errors = found, tree.verdicts.errors
    sure = bool((coherent(errors, accumulated) <= biased + ROOM * before).all())
    return Passes(first, second, sure, max(before, float(errors.relative[accumulated].max(initial=0.0))))


def gradients_agree(tree: Tree) -> bool:
    """Tell whether all that the optimizer reads and makes agrees by what rounding makes of a whole step; not where it was not
    recorded, or where a call of it has no counterpart."""
    return _agreeing(tree) is not None


def _agreeing(tree: Tree) -> tuple[Numbers, float] | None:
    """Return what agrees of it, and what its elements may be off by alike; None where something does not agree. A gradient of which
    little is left, as that of a bias of keys, may be off by as much as others of its shape that the same operator gets or makes."""
    at, errors, (first, stream) = _accumulated(tree), tree.verdicts.errors, tree.streams
    own, biased = unrecorded(tree.verdicts.criterion, float(first.names.table(roundoff)[first.dtype].max(initial=0.0)))
    agree = errors.relative[at] <= min(own * math.sqrt(max(map(len, tree.streams))), HALF)
    slots, off = errors.slots[1][at], np.where(agree, np.fmax(errors.absolute[at], errors.unit[at] * errors.norm[at]), 0.0)
    _, kind = np.unique(np.stack([stream.op[stream.call[slots]], stream.shapes.squeezed[slots]]), axis=1, return_inverse=True)
    little = errors.absolute[at] <= CANCELLED * most(off, kind := kind.reshape(-1), len(at))[kind]
    return (at[agree], biased) if len(at) and (agree | little).all() else None


def summed(losses: dict[int, float], steps: Mapping[int, Passes], side: int) -> dict[int, float]:
    """Return the losses of steps, their means over micro-batches, as sums where the two sides have other numbers of these."""
    counts = {step: (found.baseline, found.candidate)[side] for step, found in steps.items()}
    return {step: loss * counts.get(step, 1) for step, loss in losses.items()}


def _count(stream: Stream) -> int:
    losses = stream.names.table(having("loss"))[stream.op]
    return int(np.count_nonzero(losses & (stream.level == stream.names.number("api"))))


def _accumulated(tree: Tree) -> Numbers:
    """Return what the calls of the optimizer read and make; nothing if one of them has no counterpart."""
    errors, names = tree.verdicts.errors, tree.streams[1].names
    optimizer = [stream.phase == names.number("optimizer") for stream in tree.streams]
    alone = any(side[calls].any() for side, calls in zip(optimizer, tree.unmatched, strict=True))
    at = (errors.inputs | errors.outputs) & optimizer[1][errors.calls[1]][errors.pair]
    return np.flatnonzero(at & ~np.bool_(alone))
