"""How the losses of ranks and micro-batches make the loss of one process: along each axis of the data their mean or their sum.

    loss = cross_entropy(...)                        the mean of the ranks' losses; so are the gradients
    loss = cross_entropy(...) / micro_batches        their sum
    loss = summed * ranks / tokens_of_all            their mean, each a sum that counts by the tokens of its rank

What the backward begins from is the loss: of both runs it must come to the same number. A number before it, that ranks make of
their own data, counts as much as its gradient says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from trueup.comparison.layout.geometry import Geometry
from trueup.comparison.layout.pieces import AVERAGE, SUM

SAME = 0.02
"""Relative difference up to which two ways to the loss lead to the same number: other ways are off by a factor of 2 at least, and
losses of bfloat16 by 0.4 %."""

How = dict[str, str]
"""By axis of the data: `AVERAGE` or `SUM`."""


class Losses(Protocol):
    """Where workers stand, which axes cut the data, and the loss of each worker in the first step."""

    @property
    def workers(self) -> Geometry: ...  # noqa: D102
    @property
    def data(self) -> frozenset[str]: ...  # noqa: D102
    @property
    def losses(self) -> Mapping[int, float]: ...  # noqa: D102


def begun(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the numbers that a rank's step goes backward from, in order: no call made their gradients."""
    last: dict[int, str] = {}
    for row in rows:
        seed = row["phase"] == "backward" and row["level"] == "api" and row["numel"] == 1 and row["producer_seq"] is None
        if seed and row["forward_seq"] is not None and row["slot"].startswith("grad_output."):
            last[row["forward_seq"]] = row["slot"].removeprefix("grad_")
    found = {row["seq"]: row["mean"] for row in rows if last.get(row["seq"]) == row["slot"] and row["numel"] == 1}
    return [found[seq] for seq in sorted(found) if found[seq] is not None]


def reduced(sides: Sequence[Losses]) -> list[How]:
    """Return how the losses of each run make one, so that both come to the same; where nothing does, they are means."""
    options = [list(_ways(one.losses, one.workers, one.data)) for one in sides]
    alike = [pair for pair in itertools.product(*options) if near(pair[0][1], pair[1][1])] if len(options) == 2 else []
    best = max(alike, key=lambda pair: sum(_means(how) for how, _ in pair), default=())
    return [how for how, _ in best] or [{} for _ in sides]


def how_of(
    values: Mapping[int, float], workers: Geometry, data: Collection[str], whole: float | None, usual: How,
    otherwise: Collection[float] = (),
) -> tuple[How, bool]:  # fmt: skip
    """Return how a number of each worker makes the ``whole`` of the other run: as losses do (``usual``) if that leads there or the
    other run has none, else as comes nearest; and whether it leads there, as far as is known. ``otherwise``: what the other run's
    number may be as well, which counts if nothing leads to the whole."""
    options = list(_ways(values, workers, data))
    expected = {axis: usual.get(axis, AVERAGE) for axis in data}
    if whole is None or any(how == expected and near(total, whole) for how, total in options):
        return expected, True
    how, total = min(options, key=lambda one: (abs(one[1] - whole), one[0] != expected), default=(expected, whole))
    if near(total, whole):
        return how, True
    alike = [one for one, total in options if any(near(total, its) for its in otherwise)]
    return max(alike, key=_means, default=how), False


def totals(values: Mapping[int, float], workers: Geometry, data: Collection[str]) -> tuple[float, ...]:
    """Return what numbers of each worker may come to."""
    return tuple(total for _, total in _ways(values, workers, data))


def _means(how: How) -> int:
    return list(how.values()).count(AVERAGE)


def weights(gradients: Mapping[int, float | None]) -> dict[int, float]:
    """Return how much the number of each worker counts, 1 on average, where their gradients differ; else nothing."""
    known = {worker: one for worker, one in gradients.items() if one is not None and math.isfinite(one)}
    total = sum(known.values())
    if len(known) < len(gradients) or total == 0 or len(set(known.values())) < 2:
        return {}
    return {worker: one * len(known) / total for worker, one in known.items()}


def _ways(values: Mapping[int, float], workers: Geometry, data: Collection[str]) -> Iterator[tuple[How, float]]:
    """Yield each way in which numbers of workers make one, and that; ranks that cut the model have the same."""
    if not values:
        return
    beside = [n for n, axis in enumerate(workers.axes) if axis not in data]
    places = {worker: tuple(workers.coordinates[worker][n] for n in beside) for worker in values}
    first = places[min(values)]
    total = sum(one for worker, one in values.items() if places[worker] == first)
    for hows in itertools.product((AVERAGE, SUM), repeat=len(data)):
        how = dict(zip(sorted(data), hows, strict=True))
        yield how, total / math.prod(workers.size(axis) for axis in how if how[axis] == AVERAGE)


def near(one: float, other: float) -> bool:
    """Tell whether two numbers are the same but for rounding."""
    return abs(one - other) <= SAME * max(abs(one), abs(other))
