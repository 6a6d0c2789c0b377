"""Criteria that put limits to named measures of a slot, as older tools do.

A slot fails when all conditions of one ``[[fail]]`` table hold. A call whose inputs pass and whose outputs fail is a culprit; where
an input fails, its outputs are explained. What a condition needs and the captures do not hold leaves the slot open, never passed.
Every criterion limits how far the losses of two runs may be apart, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter

import numpy as np

from trueup.comparison.graph.streams import Array
from trueup.comparison.measures.measure import DIGEST, STATISTICS, Errors
from trueup.foundation.facts.criteria import Limit
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.kernels import Pair

PERFECT = {"equal": 1.0, "cosine": 1.0, "thousandth": 1.0, "five_thousandths": 1.0}  # of equal tensors; others are 0
SYMMETRIC = 1e-10
"""What ptdbg_ascend adds to the larger magnitude before it divides by it."""


class Measures:
    """Named measures of the slots of matched calls, each an array by entry, NaN where the captures do not tell."""

    def __init__(self, errors: Errors) -> None:
        self.errors = errors
        self.equal_digests = (errors.method == DIGEST) & (errors.absolute == 0)
        self.from_bytes = np.zeros(len(errors.pair), bool)
        self.from_bytes[list(errors.bytes)] = True

    def named(self, name: str) -> Array:
        """Return a measure; perfect where the digests are equal."""
        with np.errstate(all="ignore"):
            found = np.asarray(MEASURES[name](self), np.float64)
        return np.where(self.equal_digests, PERFECT.get(name, 0.0), found)

    def of_bytes(self, measure: Callable[[Pair], float]) -> Array:
        """Return what the pass over both tensors gave, where there was one."""
        found = np.full(len(self.errors.pair), np.nan)
        for n, pair in self.errors.bytes.items():
            found[n] = measure(pair)
        return found

    @cached_property
    def _numbers(self) -> dict[str, tuple[Array, Array]]:
        found = {}
        for name in ("min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf"):
            sides = zip(self.errors.streams, self.errors.slots, strict=True)
            first, second = (stream.number(name)[at] for stream, at in sides)
            found[name] = first, second
        return found

    def equal(self) -> Array:
        """Return 1 for bitwise equal values, 0 for others."""
        told = self.of_bytes(lambda p: float(p.equal == p.counted and not p.n_disagree))
        return np.where(self.from_bytes, told, np.where(self.errors.absolute > 0, 0.0, np.nan))

    def cosine(self) -> Array:
        """Return cosines: of the tensors, else from norms and the estimated distance (1 - cosine within about 18 %)."""
        told = self.of_bytes(lambda p: 1.0 if p.l2_baseline == 0 == p.l2_candidate else p.cosine)
        a, b = self._numbers["l2"]
        estimated = (a**2 + b**2 - self.errors.absolute**2) / (2 * a * b)
        unknown = np.isinf(self.errors.absolute) | (self.errors.method == STATISTICS)
        return np.where(self.from_bytes, told, np.where(unknown, np.nan, estimated))

    def relative_l2(self) -> Array:
        """Return relative errors; not known from statistics, which only bound them."""
        return np.where(self.errors.method == STATISTICS, np.nan, self.errors.relative)

    def error(self) -> Array:
        """Return relative errors as far as the captures tell: from another tool's statistics at least so much."""
        return self.errors.relative

    def mean_scaled(self) -> Array:
        """Return the difference of the means relative to the baseline's root mean square; at most the relative error."""
        size = self.errors.streams[0].numel[self.errors.slots[0]]
        difference = self.difference("mean")
        return np.where(difference == 0, 0.0, difference * np.sqrt(size) / self._numbers["l2"][0])

    def difference(self, name: str) -> Array:
        """Return |candidate - baseline| of a statistic."""
        first, second = self._numbers[name]
        return np.where(first == second, 0.0, np.abs(second - first))

    def relative(self, name: str) -> Array:
        """Return the same relative to the baseline's; Inf where that is zero and the difference is not."""
        difference = self.difference(name)
        return np.where(difference == 0, 0.0, difference / np.abs(self._numbers[name][0]))

    def symmetric(self, name: str) -> Array:
        """Return the same relative to the larger of the two."""
        first, second = self._numbers[name]
        return self.difference(name) / (np.maximum(np.abs(first), np.abs(second)) + SYMMETRIC)

    def new_nonfinite(self) -> Array:
        """Return 1 where the candidate has NaN or Inf and the baseline has none, else 0."""
        first, second = (sum(self._numbers[name][side] for name in ("n_nan", "n_posinf", "n_neginf")) for side in (0, 1))
        return np.where(np.isnan(first) | np.isnan(second), np.nan, (first == 0) & (second > 0))


def _of_bytes(measure: Callable[[Pair], float]) -> Callable[[Measures], Array]:
    return lambda measures: measures.of_bytes(measure)


def _of_statistics() -> dict[str, Callable[[Measures], Array]]:
    found: dict[str, Callable[[Measures], Array]] = {}
    for name, column in (("min", "min"), ("max", "max"), ("mean", "mean"), ("norm", "l2")):
        found[f"{name}_absolute_difference"] = partial(Measures.difference, name=column)
        found[f"{name}_relative_difference"] = partial(Measures.relative, name=column)
        found[f"{name}_symmetric"] = partial(Measures.symmetric, name=column)
    return found


MEASURES: dict[str, Callable[[Measures], Array]] = {
    "equal": Measures.equal,
    "cosine": Measures.cosine,
    "relative_l2": Measures.relative_l2,
    "error": Measures.error,
    "mean_scaled_difference": Measures.mean_scaled,
    **{name: _of_bytes(attrgetter(name)) for name in ("max_absolute", "max_relative", "mean_relative", "rmse")},
    "thousandth": _of_bytes(lambda p: p.n_thousandth / p.counted if p.counted else 1.0),
    "five_thousandths": _of_bytes(lambda p: p.n_five_thousandths / p.counted if p.counted else 1.0),
    "new_nonfinite": Measures.new_nonfinite,
    **_of_statistics(),
}
"""By the names of `trueup.foundation.facts.criteria.MEASURES`."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What limits say of the entries of a step."""

    fails: Array
    open: Array  # where a measure that could make it fail is not known
    known: dict[str, Array]  # the measures that conditions name, by entry

    def why(self, limits: tuple[Limit, ...], entry: int, slot: str) -> tuple[Reason, ...]:
        """Return the figures that made an entry fail: ``mean_symmetric of output.0 is 0.73, above 0.5``; none where it did not."""
        for limit in limits if self.fails[entry] else ():
            values = [(name, float(self.known[name][entry]), side, number) for name, side, number in limit.conditions]
            if all(value > number if side == "above" else value < number for _, value, side, number in values):
                return tuple(Why.FIGURE(name, slot, value, side, number) for name, value, side, number in values)
        return ()


def apply(limits: tuple[Limit, ...], errors: Errors) -> Applied:
    """Judge all entries; what fails is not open."""
    measures = Measures(errors)
    fails, open_ = np.zeros(len(errors.pair), bool), np.zeros(len(errors.pair), bool)
    known = {name: measures.named(name) for limit in limits for name, *_ in limit.conditions}
    for limit in limits:
        holds, possible = np.ones(len(fails), bool), np.ones(len(fails), bool)
        for name, side, number in limit.conditions:
            value = known[name]
            beyond = value > number if side == "above" else value < number
            holds &= beyond
            possible &= beyond | np.isnan(value)
        if limit.detail:
            meant = measures.from_bytes | measures.equal_digests if limit.detail == "tensor" else ~measures.from_bytes
            holds, possible = holds & meant, possible & meant
        fails |= holds
        open_ |= possible & ~holds
    return Applied(fails, open_ & ~fails, known)


def losses_apart(
    baseline: Mapping[int, float], candidate: Mapping[int, float], limit: float, repeats: Sequence[Mapping[int, float]] = (),
    allowed: float = 0.0,
) -> Reason | None:  # fmt: skip
    """Return that the losses per step are too far apart (relative distance over ``limit``) to call two runs aligned, or None.
    Also allowed is ``allowed`` times the distance of the baseline's repeats from it."""
    for step, loss in baseline.items():
        value = candidate.get(step, loss)  # a step that one side lacks is said elsewhere
        if loss == value or (math.isnan(loss) and math.isnan(value)):
            continue
        apart = abs(value - loss) / max(abs(loss), 1e-12)
        spread = max((abs(losses[step] - loss) / max(abs(loss), 1e-12) for losses in repeats if step in losses), default=0.0)
        if not apart <= max(limit, allowed * spread):  # NaN against a number too
            return Why.LOSSES(None if math.isnan(apart) else apart, step, loss, value, limit)
    return None


def summed(losses: Mapping[int, float], counts: Mapping[int, int]) -> dict[int, float]:
    """Return the losses of steps, their means over micro-batches, as sums where the two sides have other numbers of these."""
    return {step: loss * counts.get(step, 1) for step, loss in losses.items()}
