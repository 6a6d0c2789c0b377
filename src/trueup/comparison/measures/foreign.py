"""Comparing what another tool kept of tensors: checksums of its own, or max, min, mean and norm, and nothing else.

Statistics bound the distance of two tensors a and b of n elements from below (triangle inequality, Cauchy and Schwarz)::

    | ‖a‖ − ‖b‖ |   √n · |mean a − mean b|   |max a − max b|   |min a − min b|      each <= ‖a − b‖

Bounds of zero prove nothing: statistics do not see a permutation, a sign, or a small error in few elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers, Stream, other_counts
from trueup.comparison.measures.thresholds import SHOWN, SINGLE_DIGITS, SMALL
from trueup.foundation.facts.slots import is_inner, is_of_parameter, roundoff
from trueup.foundation.facts.why import Why
from trueup.foundation.kernels import MASKING, is_mask

WEAK = ("xor", "unknown")  # prefixes of algorithms that may not see the order of elements: equal ones say no more than statistics


class Checksums(NamedTuple):
    """What the checksums of pairs of slots say, by pair; where all are False they say nothing."""

    equal: Array  # the bytes are equal
    weakly: Array  # the checksums are equal, and do not see the order
    unequal: Array


class Distances(NamedTuple):
    """What statistics say of pairs of slots."""

    absolute: Array  # lower bounds or estimates; 0: statistics agree; Inf: counts of NaN or Inf differ; NaN: unknown
    whys: list[Why | None]  # none where they agree
    estimates: Array  # what it is if all elements differ by as much as the extremes do; 0 where the bound is


def lacks_gradients(dump: Stream) -> Array:
    """Tell of which backward calls a dump lacks gradients by its nature, so that it is no loss. Of a function it may have those
    of a tensor inside alone. A weight's is then with its module, if modules were dumped at all: where no function has such a one
    (they add up over batches) it is a loss, and where some have, it is that of a weight with several readers. Hooks of a module
    get no gradient of an argument that was given by its name."""
    table, number = dump.names.table, dump.names.number
    backward = dump.phase == number("backward")
    inner, weight = np.zeros(len(dump), bool), np.zeros(len(dump), bool)
    inner[dump.call[table(is_inner)[dump.slot]]] = True
    weight[dump.call[dump.slot == number("grad_input.1")]] = True
    if table(is_of_parameter)[dump.slot].any() and not (inner & weight).any():
        inner[:] = False
    return np.asarray(backward & (inner | (dump.level == number("module"))))


def compare_checksums(streams: tuple[Stream, Stream], slots: tuple[Numbers, Numbers]) -> Checksums:
    """Compare the checksums of pairs of slots of one dtype and shape."""
    texts = [stream.foreign["foreign_checksum"] for stream in streams]
    pairs = [(texts[0][k], texts[1][j]) for k, j in zip(*(side.tolist() for side in slots), strict=True)]
    same = np.array([a is not None and b is not None and a.partition(":")[0] == b.partition(":")[0] for a, b in pairs], bool)
    equal = same & np.array([a == b for a, b in pairs], bool)
    weak = np.array([a is not None and a.startswith(WEAK) for a, _ in pairs], bool)
    return Checksums(equal & ~weak, equal & weak, same & ~equal)


def compare_statistics(streams: tuple[Stream, Stream], slots: tuple[Numbers, Numbers], spread: Array) -> Distances:
    """Bound the distance of pairs of slots whose statistics both sides have. ``spread``, by pair: estimate the distance instead.
    What a call reads may explain the error of its results, so it must not be taken for less than it is."""
    low, high, mean, norm = (_of_both(name, streams, slots) for name in ("min", "max", "mean", "l2"))
    units = [s.names.table(roundoff)[s.dtype[at]] for s, at in zip(streams, slots, strict=True)]
    unit = np.maximum(*units)
    root = np.sqrt(np.nan_to_num(streams[0].numel[slots[0]]))
    with np.errstate(all="ignore"):
        peak = np.max(np.abs([*low, *high]), axis=0)
        largest = np.fmax(np.fmax(*norm), 0.0)
        largest = np.where(largest > 0, largest, root * peak)
        off = np.maximum(SHOWN, 2 * unit) * largest
        printed = np.where(units[0] == units[1], SINGLE_DIGITS, np.maximum(SINGLE_DIGITS, 2 * unit)) * peak
        apart = np.maximum(np.abs(low[1] - low[0]), np.abs(high[1] - high[0])) - printed
        sums = [np.abs(norm[1] - norm[0]) - off, root * np.abs(mean[1] - mean[0]) - off]
        bound = np.maximum(np.fmax.reduce([apart, *sums]), 0.0)  # an unknown mean or norm bounds nothing
        estimate = np.minimum(np.fmax(bound, root * apart), 2 * np.fmax(root * peak, bound))
        estimate = np.where(bound > 0, estimate, 0.0)
        found = np.where(spread, estimate, bound)
    known = np.isfinite(peak) & np.isfinite(found) & _agree_where_overflown(streams, slots, bound)
    counted = other_counts(streams, slots)
    # Ours leave out the largest finite number, of which the other tool's numbers would not mean what ours do (`compare_texts`).
    counted |= np.not_equal(*(np.nan_to_num(number) for number in _of_both("n_saturated", streams, slots)))
    empty = np.isnan(peak) & (streams[0].numel[slots[0]] == 0) & (streams[1].numel[slots[1]] == 0)
    found = np.where(counted, np.inf, np.where(empty, 0.0, np.where(known, found, np.nan)))
    whys = [
        Why.NOT_FINITE if f == np.inf else Why.UNKNOWN_STATISTICS if f != f else None if f == 0 else Why.SPREAD if s else Why.BOUND
        for f, s in zip(found.tolist(), spread.tolist(), strict=True)
    ]
    return Distances(found, whys, np.where(np.isfinite(found), estimate, 0.0))


class OfText(NamedTuple):
    """What numbers say of a pair of slots that no column holds."""

    absolute: float  # as in `Distances`
    why: Why | None = None
    peak: float = 0.0  # the largest finite magnitude that is known, in place of a norm


def compare_texts(streams: tuple[Stream, Stream], slots: tuple[int, int]) -> OfText:
    """Compare a pair of slots with NaN or Inf in them, or of another meaning: of the former, max and min alone say something."""
    texts = [stream.foreign["foreign_statistics"][k] for stream, k in zip(streams, slots, strict=True)]
    if texts[0] is not None and texts[0] == texts[1]:
        return OfText(0.0)
    first, second = (_extremes(*one) for one in zip(streams, slots, texts, strict=True))
    if first is None or second is None:
        return OfText(math.nan, Why.OTHER_STATISTICS)
    sides = zip(streams, slots, texts, strict=True)
    masks = [text is None and s.dtype_of(k) in MASKING and bool(s.number("n_saturated")[k] > 0) for s, k, text in sides]
    if any(masks):  # whether they were the largest or the least is told by the other side alone
        first, second = (_or(first, second), second) if masks[0] else (first, _or(second, first))
    pairs = list(zip(first, second, strict=True))
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if any(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in pairs if (a, b) not in finite):
        return OfText(math.inf, Why.NOT_FINITE)
    bound = max((abs(a - b) - SINGLE_DIGITS * max(abs(a), abs(b)) for a, b in finite), default=0.0)
    if bound > 0:
        return OfText(bound, Why.BOUND, max(abs(value) for one in finite for value in one))
    if len(finite) == len(pairs):
        return OfText(math.nan, Why.MEANING)
    return OfText(math.inf, Why.MEANS) if _other_means(texts) else OfText(0.0)


def _other_means(texts: Sequence[str | None]) -> bool:
    """Tell whether the means of two tensors differ that agree on their extremes, masks among them: so many elements are masked."""
    try:
        first, second = (float(json.loads(text or "{}")["mean"]) for text in texts)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return False
    return abs(first - second) > SMALL * max(abs(first), abs(second))


def _extremes(stream: Stream, k: int, text: str | None) -> tuple[float, float] | None:
    """Return max and min over all elements, NaN and Inf included, as other tools take them; of masks Inf."""
    if text is None:
        if not stream.measured[k] or (stream.dtype_of(k) or "").startswith("complex"):
            return None
        nan, above, below = stream.counts[k].tolist()
        if nan:
            return math.nan, math.nan
        return math.inf if above else float(stream.number("max")[k]), -math.inf if below else float(stream.number("min")[k])
    try:
        told: Any = json.loads(text)
        high, low = float(told["max"]), float(told["min"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None
    dtype = stream.dtype_of(k) or ""
    return math.inf if is_mask(high, dtype) else high, -math.inf if is_mask(low, dtype) else low


def _or(mine: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return extremes, in the places where the other's are infinite, the other's."""
    return math.inf if other[0] == math.inf else mine[0], -math.inf if other[1] == -math.inf else mine[1]


def _of_both(name: str, streams: tuple[Stream, Stream], slots: tuple[Numbers, Numbers]) -> list[Array]:
    return [stream.number(name)[at] for stream, at in zip(streams, slots, strict=True)]


def _agree_where_overflown(streams: tuple[Stream, Stream], slots: tuple[Numbers, Numbers], bound: Array) -> Array:
    """Tell where nothing is left open: a norm beyond the dtype's range, of which a text alone is left, must be that of both."""
    texts: list[Sequence[str | None]] = [stream.foreign["foreign_statistics"] for stream in streams]
    same = [texts[0][k] == texts[1][j] for k, j in zip(*(side.tolist() for side in slots), strict=True)]
    return np.array(same, bool) | (bound > 0)
