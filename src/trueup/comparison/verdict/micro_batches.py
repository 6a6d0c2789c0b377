"""Steps in which the two runs go backward another number of times: micro-batches against one batch, or against fewer.

Their calls are no counterparts: each computes with another part of the batch, and the loss of each is divided. What accumulates is
the same, the gradients that the optimizer reads and what it makes of them. Where that agrees no call of the step is blamed for what
it computes. Where it is not off in one direction either, as by a wrong divisor, nor are the sums of the losses apart, the step is
aligned: all that leaves it was compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import Numbers, Stream
from trueup.comparison.measures.roundoff import roundoff
from trueup.comparison.verdict.coherence import coherent
from trueup.comparison.verdict.explain import unrecorded
from trueup.comparison.verdict.tree import Tree

LOSS_OPS = ("torch.Tensor.backward", "paddle.Tensor.backward", "tf.GradientTape.gradient", "tf.Session.run")
"""Calls that a loss goes backward from."""

HALF = 0.5
"""Relative error from which on gradients do not agree, however coarse the dtype."""


@dataclass(frozen=True, slots=True)
class Passes:
    """How often each side goes backward in a step in which all that accumulates agrees; ``sure``: also in direction."""

    baseline: int
    candidate: int
    sure: bool


def passes(tree: Tree) -> Passes | None:
    """Return how often each side goes backward in a step, if that differs and all that accumulates agrees; else None."""
    first, second = (_count(stream) for stream in tree.streams)
    if not 0 < first != second > 0:
        return None
    accumulated = _accumulated(tree)
    own, biased = unrecorded(tree.verdicts.criterion, _coarsest(tree))
    errors, calls = tree.verdicts.errors, max(map(len, tree.streams))
    if not len(accumulated) or not bool((errors.relative[accumulated] <= min(own * math.sqrt(calls), HALF)).all()):
        return None
    return Passes(first, second, bool((coherent(errors, accumulated) <= biased).all()))


def said(step: int, found: Passes) -> str:
    """Say that a step was compared by what accumulates in it."""
    first, second = (f"{n} time{'s' if n > 1 else ''}" for n in (found.baseline, found.candidate))
    alike = "" if found.sure else " but for a part of the difference that all elements share"
    return (
        f"step {step} goes backward {first} in the baseline and {second} in the candidate, as with micro-batches: its calls are no "
        f"counterparts and nobody is blamed; the gradients that the optimizer reads and what it makes of them agree{alike}"
    )


def summed(losses: dict[int, float], steps: Mapping[int, Passes], side: int) -> dict[int, float]:
    """Return the losses of steps, their means over micro-batches, as sums where the two sides have other numbers of these."""
    counts = {step: (found.baseline, found.candidate)[side] for step, found in steps.items()}
    return {step: loss * counts.get(step, 1) for step, loss in losses.items()}


def _count(stream: Stream) -> int:
    ops = [stream.names.number(op) for op in LOSS_OPS]
    return int(np.count_nonzero(np.isin(stream.op, ops) & (stream.level == stream.names.number("api"))))


def _accumulated(tree: Tree) -> Numbers:
    """Return what the calls of the optimizer read and make; nothing if one of them has no counterpart."""
    errors, names = tree.verdicts.errors, tree.streams[1].names
    optimizer = [stream.phase == names.number("optimizer") for stream in tree.streams]
    alone = any(side[calls].any() for side, calls in zip(optimizer, tree.unmatched, strict=True))
    at = (errors.inputs | errors.outputs) & optimizer[1][errors.calls[1]][errors.pair]
    return np.flatnonzero(at & ~np.bool_(alone))


def _coarsest(tree: Tree) -> float:
    """Return the unit roundoff of the coarsest dtype that the baseline holds."""
    names = tree.streams[0].names.names
    return max(roundoff(names[dtype]) for dtype in np.unique(tree.streams[0].dtype).tolist() if dtype >= 0)
