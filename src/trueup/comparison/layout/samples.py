"""In which order the ranks' samples make the batch of the other run.

Ranks may take their part of a batch one after the other (0 1 2 3 and 4 5 6 7) or by turns (0 2 4 6 and 1 3 5 7, as PyTorch's
DistributedSampler does), and micro-batches likewise. The samples that the model is given say which: those of both runs are the same
bytes, in another order. All that is cut along the same dimension is put in that order; sums over samples do not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trueup.comparison.layout.pieces import Array, Piece, Way
from trueup.foundation.kernels import digest

Place = tuple[int, ...]


@dataclass(frozen=True)
class Samples:
    """``order``: by place in the other run's batch, the place in the ranks' one after the other; ``held``: how many
    those ranks have that stand at a place along the axes of the data, nothing where each has all."""

    order: tuple[int, ...]
    held: Mapping[Place, int]

    @property
    def moved(self) -> bool:
        """Whether the ranks' samples one after the other are not the other run's batch."""
        return self.order != tuple(range(len(self.order)))


@dataclass(frozen=True)
class Batch:
    """The dimension along which a slot is cut by samples; ``outer``: how often it has all of them, one time after the other."""

    dim: int
    outer: int = 1


def batch_in(ways: Mapping[str, Way], data: Collection[str]) -> Batch | None:
    """Return along what a slot is cut by samples: alike along every axis of the ``data`` that has it; None where it is not."""
    held = {Batch(way.dim, way.outer) for axis, way in ways.items() if axis in data and way.kind == "sharded"}
    natural = all(way.kind == "sharded" and way.order == "natural" for axis, way in ways.items() if axis in data)
    return held.pop() if natural and len(held) == 1 else None


def samples_in(made: Piece, whole: Piece, batch: Batch) -> tuple[list[int], list[int]] | None:
    """Return what tells the samples of a joined tensor and of the other run's; None where some of these are alike, so that nobody
    knows which is which."""
    if made.load is None or whole.load is None or (made.dtype, made.shape) != (whole.dtype, whole.shape) or batch.outer > 1:
        return None
    mine, its = (_digests(one.load(), batch.dim) for one in (made, whole) if one.load is not None)
    return None if len(set(its)) < max(2, len(its)) else (mine, its)


def samples_of(mine: Sequence[int], its: Sequence[int], held: Mapping[Place, int]) -> Samples:
    """Return the order in which ``mine`` are the other run's; as they are where some are others."""
    if set(mine) != set(its):
        return Samples(tuple(range(len(its))), held)
    places = {told: place for place, told in enumerate(mine)}
    return Samples(tuple(places[told] for told in its), held)


def repeated(mine: Sequence[int], its: Sequence[int]) -> str:
    """Say how many of the other run's samples are all that the ranks have, some of them again and again; else nothing."""
    some = set(mine)
    return f"{len(some)} of the baseline's {len(its)}" if some < set(its) else ""


def _digests(array: Array, dim: int) -> list[int]:
    return [digest(np.ascontiguousarray(one)) for one in np.moveaxis(array, dim, 0)]


def reordered(pieces: Mapping[Place, Piece], made: Piece, batch: Batch, samples: Samples) -> Piece | None:
    """Return a joined tensor with its samples in the other run's order; a sample may have several rows. None where its ``pieces``
    have not as many for each."""
    dim, outer = batch.dim, batch.outer
    each, rest = divmod(made.shape[dim], len(samples.order) * outer)
    if rest or any(piece.shape[dim] != each * outer * samples.held.get(place, 0) for place, piece in pieces.items()):
        return None
    if (load := made.load) is None:
        return made  # statistics of all samples do not depend on their order
    once = (np.array(samples.order)[:, None] * each + np.arange(each)).reshape(-1)
    rows = (np.arange(outer)[:, None] * len(once) + once).reshape(-1)

    def part(start: int, stop: int) -> Array:
        if dim:
            return made.rows(start, stop).take(rows, axis=dim)
        wanted = rows[start:stop]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([made.rows(int(run[0]), int(run[-1]) + 1) for run in runs]) if len(wanted) else made.rows(0, 0)

    return replace(made, digest=None, sketch=None, load=lambda: load().take(rows, axis=dim), changed=True, part=part)
