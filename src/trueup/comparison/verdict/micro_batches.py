"""Steps in which the two runs go backward another number of times: micro-batches against one batch, or against fewer.

Their calls are no counterparts: each computes with another part of the batch, and the loss of each is divided. What accumulates is
the same, the gradients that the optimizer reads and what it makes of them. Where that agrees no call of the step is blamed for what
it computes; that no call was compared is said, and the runs are not called aligned for it.
"""

from __future__ import annotations

import math

import numpy as np

from trueup.comparison.graph.streams import Stream
from trueup.comparison.measures.roundoff import roundoff
from trueup.comparison.verdict.explain import unrecorded
from trueup.comparison.verdict.tree import Tree

LOSS_OPS = ("torch.Tensor.backward", "paddle.Tensor.backward", "tf.GradientTape.gradient", "tf.Session.run")
"""Calls that a loss goes backward from."""

HALF = 0.5
"""Relative error from which on gradients do not agree, however coarse the dtype."""


def passes(tree: Tree) -> tuple[int, int] | None:
    """Return how often each side goes backward in a step, if that differs and all that accumulates agrees; else None."""
    first, second = (_count(stream) for stream in tree.streams)
    return (first, second) if 0 < first != second > 0 and _update_agrees(tree) else None


def said(step: int, counts: tuple[int, int]) -> str:
    """Say that a step was compared by what accumulates in it."""
    first, second = (f"{n} time{'s' if n > 1 else ''}" for n in counts)
    return (
        f"step {step} goes backward {first} in the baseline and {second} in the candidate, as with micro-batches: its calls are no "
        "counterparts and nobody is blamed; the gradients that the optimizer reads and what it makes of them agree"
    )


def _count(stream: Stream) -> int:
    ops = [stream.names.number(op) for op in LOSS_OPS]
    return int(np.count_nonzero(np.isin(stream.op, ops) & (stream.level == stream.names.number("api"))))


def _update_agrees(tree: Tree) -> bool:
    """Tell whether all calls of the optimizer have counterparts, read what agrees and make what agrees."""
    errors, names = tree.verdicts.errors, tree.streams[1].names
    optimizer = [stream.phase == names.number("optimizer") for stream in tree.streams]
    at = np.flatnonzero((errors.inputs | errors.outputs) & optimizer[1][errors.calls[1]][errors.pair])
    if not len(at) or any(side[calls].any() for side, calls in zip(optimizer, tree.unmatched, strict=True)):
        return False
    calls = max(map(len, tree.streams))
    coarsest = max(roundoff(names.names[dtype]) for dtype in np.unique(tree.streams[0].dtype).tolist() if dtype >= 0)
    limit = min(unrecorded(tree.verdicts.criterion, coarsest)[0] * math.sqrt(calls), HALF)
    return bool((errors.relative[at] <= limit).all())
