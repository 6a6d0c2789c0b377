"""What a step did to the weights, where its optimizer was not recorded: at level module alone, or in the forward alone.

A weight is close to itself a step before, so a wrong gradient or another learning rate hardly shows in it. It shows in the
difference of the two: sketches are linear, so that of the update is known from statistics, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, is_weight
from trueup.comparison.measures.roundoff import roundoff
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.verdict.factors import SHARED
from trueup.comparison.verdict.tree import Tree
from trueup.comparison.verdict.updated import ROUNDINGS
from trueup.report.sentence import NO_OPTIMIZER, WEIGHTS_UNSEEN, moved_weights

LEAST = 0.02
"""Relative error of an update that is explained after any difference: an optimizer that divides by the root of a mean square makes
that of rounding where gradients are near zero, and sketches tell it within some 18 %."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that some steps read and no recorded call made: one entry for each weight and step."""

    key: Numbers = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """Scope and slot."""
    step: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    entry: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    """Entry of the errors of the step, `NONE` of an earlier step."""
    sketches: Array = field(default_factory=lambda: np.empty((2, 0, 64)))


@dataclass(frozen=True, slots=True)
class Updated:
    """Weights whose update differs: entries of the errors, and what there is to say of them."""

    entries: Numbers
    compared: Numbers
    """Entries of all weights whose update is known, and so judged here."""
    sure: bool = True
    """Whether noise in weights that have next to no gradient is ruled out: nothing differed before, or all together do now."""
    wrong: int = 0
    """How many of ``total`` weights they are, in the first step that has any."""
    total: int = 0
    times: float = float("nan")
    """How many times as far they were moved, the same way; NaN where that is not what differs."""


def read(tree: Tree, before: Weights) -> Weights:
    """Return the weights of some steps, those of the last step before in front of them."""
    errors, stream = tree.verdicts.errors, tree.streams[1]
    weight = errors.inputs & stream.names.table(is_weight)[errors.names]
    for side, slots in zip(tree.streams, errors.slots, strict=True):
        weight &= ((side.producer[slots] == NONE) | is_unseen(side)) & side.measured[slots]
    at = np.flatnonzero(weight)
    if not len(at):
        return before
    call = errors.calls[1][errors.pair[at]]
    key = np.stack([stream.scope[call], errors.names[at]], axis=1)
    sketches = np.stack([side.sketch[slots[at]] for side, slots in zip(tree.streams, errors.slots, strict=True)])
    step = stream.step[call]
    old = Weights(before.key, before.step, np.full(len(before.entry), NONE), before.sketches)
    found = Weights(
        np.r_[old.key, key], np.r_[old.step, step], np.r_[old.entry, at], np.concatenate([old.sketches, sketches], axis=1)
    )  # fmt: skip
    _, first = np.unique(np.c_[found.key, found.step], axis=0, return_index=True)  # a module may run several times a step
    return _take(found, first)


def is_unseen(stream: Stream) -> bool:
    """Tell whether what writes the weights is not compared: no optimizer is there, though the capture may hold its calls."""
    return not bool(stream.during("optimizer").any())


def last(weights: Weights) -> Weights:
    """Return those of the last step."""
    return _take(weights, np.flatnonzero(weights.step == weights.step.max(initial=-1)))


def _take(weights: Weights, at: Numbers) -> Weights:
    return Weights(weights.key[at], weights.step[at], weights.entry[at], weights.sketches[:, at])


def deviating(tree: Tree, weights: Weights, before: Array) -> Updated:
    """Return the weights whose update differs from the step before to the next.

    Args:
        tree: of the steps.
        weights: as `read` returned them: sorted by scope, slot and step.
        before: by entry of the errors, in the order of the steps, the largest relative error of what was computed before.
    """
    errors, stream = tree.verdicts.errors, tree.streams[0]
    same, following = (weights.key[1:] == weights.key[:-1]).all(axis=1), weights.step[1:] == weights.step[:-1] + 1
    later = np.flatnonzero(same & following & (weights.entry[1:] != NONE))
    if not len(later):
        return Updated(later, later)
    entry = weights.entry[later + 1]
    first, second = weights.sketches[:, later + 1] - weights.sketches[:, later]
    apart, size = (np.linalg.norm(one, axis=1) for one in (second - first, first))
    unit = stream.names.table(roundoff)[stream.dtype[errors.slots[0][entry]]]
    floor = 2 * ROUNDINGS * unit * errors.norm[entry]  # of the weight before and after
    when = weights.step[later + 1]
    begins = np.searchsorted(errors.streams[1].step[errors.calls[1][errors.pair]], when)
    largest = before[begins]
    signs = tree.verdicts.criterion.row(STEP, "module", "optimizer").factor * (largest + np.sqrt(largest))  # as in one that is seen
    explained = np.where(largest > 0, np.maximum(LEAST, signs), 0.0)
    wrong = apart > explained * size + floor
    if not wrong.any():
        return Updated(entry[wrong], entry)
    of = when == when[wrong].min()
    whole, moved = (float(np.linalg.norm(one[of])) for one in (apart, size))
    sure = bool((largest[of] == 0).all()) or whole > float(explained[of].max()) * moved
    chosen = of & wrong
    return Updated(entry[wrong], entry, sure, int(chosen.sum()), int(of.sum()), _times(first[chosen], second[chosen]))


def _times(first: Array, second: Array) -> float:
    """Return how many times as far all weights were moved, the same way; NaN where they were not."""
    with np.errstate(all="ignore"):
        ratio = (first * second).sum(axis=1) / (first**2).sum(axis=1)
        left = np.linalg.norm(second - first * ratio[:, None], axis=1) / np.linalg.norm(second - first, axis=1)
    middle = float(np.median(ratio))
    return middle if (left <= SHARED).all() and np.ptp(ratio) <= SHARED * abs(middle) else float("nan")


def why(slots: Sequence[str], updated: Updated | None) -> str:
    """Say what is known of weights that differ and were updated by what was not recorded."""
    if not any(map(is_weight, slots)):
        return ""
    said = moved_weights(updated.wrong, updated.total, updated.times) if updated is not None and updated.wrong else ""
    return "; ".join(filter(None, [said, WEIGHTS_UNSEEN]))


def unseen(*, trains: bool, optimizer: bool, gradients: bool) -> list[str]:
    """Return a note on what the verdict cannot tell of a training's weights, if there is anything."""
    return [NO_OPTIMIZER.format(more="" if gradients else ", nor the gradients of weights")] if trains and not optimizer else []
