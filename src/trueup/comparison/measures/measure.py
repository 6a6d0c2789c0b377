"""How far apart the two sides of each matched slot are: digests first, then payload where both sides have it, else sketches.

What another tool dumped may have none of these: then its own checksums are compared, or max, min, mean and norm. Statistics bound
the distance of two tensors a and b of n elements from below (triangle inequality, Cauchy and Schwarz)::

    | ‖a‖ − ‖b‖ |   √n · |mean a − mean b|   |max a − max b|   |min a − min b|      each <= ‖a − b‖

Bounds of zero prove nothing: statistics do not see a permutation, a sign, or a small error in few elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from trueup.comparison.graph.streams import Alignment, Array, Numbers, Row, Stream, other_counts, same_slots
from trueup.comparison.measures.thresholds import ANY_ORDER, SHOWN, SINGLE_DIGITS, SMALL
from trueup.comparison.normalise.updates import STEP
from trueup.foundation.facts.arguments import equal_values, from_first_axis, shared, what_matters
from trueup.foundation.facts.slots import (
    is_discrete,
    is_foreign,
    is_inner,
    is_of_module,
    is_of_parameter,
    is_output,
    is_written,
    roundoff,
)
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.frameworks.dialect import BUFFER
from trueup.foundation.kernels import MASKING, Pair, at_least, is_mask
from trueup.foundation.store.call_columns import Payload as Payload
from trueup.foundation.store.call_columns import compare_payloads

Method = Literal["none", "digest", "tensor", "sketch", "value", "statistics"]
METHODS: tuple[Method, ...] = ("none", "digest", "tensor", "sketch", "value", "statistics")
DIGEST, TENSOR, SKETCH, STATISTICS = 1, 2, 3, 5
"""Indices into `METHODS`."""

UNSIZED = Reason(Why.UNSIZED)

WEAK = ("xor", "unknown")  # prefixes of algorithms that may not see the order of elements: equal ones say no more than statistics


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the two sides of a slot are apart: one entry of `Errors`."""

    slot: str
    baseline: int
    candidate: int  # indices of the slot in the two streams
    low: float  # ‖candidate − baseline‖ over finite elements, or what it is at least; NaN where it was not measured
    high: float  # the same, or what it may be where ``low`` is a bound: statistics of a dump tell no more
    norm: float  # ‖baseline‖ over finite elements
    kind: Method  # what it was measured from
    why: Reason | None = None  # why it was not measured, or is infinite, a bound or an estimate

    @property
    def relative(self) -> float:
        """``low / norm``; 0 where both are zero, Inf where only the baseline is, NaN where not measured."""
        if self.low == 0 or math.isnan(self.low):
            return self.low
        return self.low / self.norm if self.norm > 0 else math.inf

    @property
    def unsized(self) -> bool:
        """Whether all that is known is that the bytes differ."""
        return self.why == UNSIZED


@dataclass(slots=True)
class Measured:
    """A matched call with the errors of its slots."""

    baseline: Row
    candidate: Row
    slots: dict[str, Distance]
    arguments: tuple[str | None, str | None] | None  # the two sides' non-tensor arguments where they differ
    one_sided: tuple[str, ...]  # slots that only one side has


@dataclass
class Errors:
    """The matched calls of one rank and step (`calls`), and an entry for each slot that both sides of one have, call by call."""

    streams: tuple[Stream, Stream]
    calls: tuple[Numbers, Numbers]  # indices of the calls of each side, in the candidate's order
    pair: Numbers  # which of the matched calls an entry belongs to
    slots: tuple[Numbers, Numbers]  # indices of the slot in the streams
    absolute: Array
    norm: Array
    method: Array
    reasons: dict[int, Reason] = field(default_factory=dict)  # why an entry was not measured, or is infinite
    one_sided: dict[int, tuple[str, ...]] = field(default_factory=dict)  # of matched calls: slots that only one side has
    bytes: dict[int, Pair] = field(default_factory=dict)  # what the pass over both sides' bytes gave, if it was asked for
    estimates: dict[int, float] = field(default_factory=dict)  # of bounds: the distance if all elements differ alike
    arguments: dict[int, tuple[str | None, str | None]] = field(default_factory=dict)  # of matched calls: differing arguments
    lone_weights: int = 0  # weights that optimizers wrote and that the other side has no counterpart of
    lone_gradients: int = 0  # gradients of such weights
    peaks: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Of entries whose tensors were measured: the largest difference of two elements, and how many differ."""
    payloads: Sequence[Payload] = ()  # reads the bytes of either side

    @cached_property
    def relative(self) -> Array:
        """``absolute / norm`` of each entry, as `Distance.relative`."""
        with np.errstate(all="ignore"):
            found = np.where(self.norm > 0, self.absolute / self.norm, np.inf)
        return np.where(self.absolute == 0, 0.0, np.where(np.isnan(self.absolute), np.nan, found))

    @cached_property
    def generous(self) -> Array:
        """The same, but of entries that statistics only bound what they may be (`estimates`)."""
        found = self.relative.copy()
        for n, estimate in self.estimates.items():
            if self.norm[n] > 0:
                found[n] = max(found[n], estimate / self.norm[n])
        return found

    @cached_property
    def names(self) -> Numbers:
        """Number of each entry's slot name."""
        return self.streams[0].slot[self.slots[0]]

    @cached_property
    def inputs(self) -> Array:
        """Whether an entry is read by its call."""
        return self.streams[1].reads[self.slots[1]]

    @cached_property
    def outputs(self) -> Array:
        """Whether an entry is computed by its call."""
        return self.streams[0].names.table(is_output)[self.names]

    @cached_property
    def roundoffs(self) -> tuple[Array, Array]:
        """Unit roundoff of each entry's dtype, on both sides; 0 for integers."""
        sides = zip(self.streams, self.slots, strict=True)
        first, second = (stream.names.table(roundoff)[stream.dtype[slots]] for stream, slots in sides)
        return first, second

    @cached_property
    def unit(self) -> Array:
        """Unit roundoff of each entry, of the coarser side's dtype."""
        return np.asarray(np.maximum(*self.roundoffs))

    @cached_property
    def unsized(self) -> Array:
        """Whether all that is known of an entry is that the bytes differ."""
        found = np.zeros(len(self.pair), bool)
        found[[n for n, reason in self.reasons.items() if reason == UNSIZED]] = True
        return found

    def say(self, at: Numbers, why: Why) -> None:
        """Say why entries were not measured, or are infinite."""
        self.reasons.update(dict.fromkeys(at.tolist(), Reason(why)))

    def agree(self, at: Numbers, method: int) -> None:
        """Settle entries whose two sides are equal, whether or not a norm is known."""
        self.absolute[at], self.method[at] = 0.0, method
        self.norm[at[np.isnan(self.norm[at])]] = 0.0

    @cached_property
    def same(self) -> Array:
        """Whether the bytes of an entry are the same on both sides, or are memory that a call only writes to."""
        found = (self.absolute == 0) & ((self.method == DIGEST) | (self.method == TENSOR))
        return np.asarray(found | ~(self.inputs | self.outputs))

    @cached_property
    def all_same(self) -> bool:
        """Whether both sides made the same calls, of the same to the same, to the last bit, so that nothing needs a reason."""
        if self.arguments or self.one_sided or self.lone_weights or self.lone_gradients:
            return False
        matched = all(len(calls) == len(stream) for calls, stream in zip(self.calls, self.streams, strict=True))
        return matched and bool(self.same.all())

    def entries(self, pair: int) -> range:
        """Return the entries of a matched call."""
        return range(*np.searchsorted(self.pair, [pair, pair + 1]).tolist())

    def distance(self, n: int) -> Distance:
        """Return an entry as an object."""
        (b, c), low = self.slots, float(self.absolute[n])
        name, kind = self.streams[0].names.names[int(self.names[n])], METHODS[self.method[n]]
        high = max(low, self.estimates.get(n, low))
        return Distance(name, int(b[n]), int(c[n]), low, high, float(self.norm[n]), kind, self.reasons.get(n))

    def measured(self, pair: int) -> Measured:
        """Return a matched call as an object."""
        rows = [stream.row(int(calls[pair])) for stream, calls in zip(self.streams, self.calls, strict=True)]
        slots = {found.slot: found for found in map(self.distance, self.entries(pair))}
        return Measured(rows[0], rows[1], slots, self.arguments.get(pair), self.one_sided.get(pair, ()))


def measure(
    alignment: Alignment, baseline: Stream, candidate: Stream, payloads: tuple[Payload, Payload], *, in_full: bool = False
) -> Errors:
    """Measure all slots of all matched calls; ``in_full`` keeps all that is known of tensors (`Errors.bytes`)."""
    streams, calls = (baseline, candidate), (alignment.baseline, alignment.candidate)
    k, j, pair, odd = same_slots(*calls, *streams)
    arguments, module = map(baseline.names.number, ("arguments", "module"))
    more, one_sided, lone, packed = [], {}, 0, 0
    for n in odd:
        first, second = baseline.slots(int(calls[0][n])), candidate.slots(int(calls[1][n]))
        more += [(n, at, second[name]) for name, at in first.items() if name in second]
        lacking = sorted(baseline.names.names[name] for name in (first.keys() ^ second.keys()) - {arguments})
        if baseline.imported != candidate.imported:
            beside = is_written if baseline.level[calls[0][n]] != module else lambda name: name.startswith(BUFFER)
            lacking = [name for name in lacking if not (is_foreign(name) or beside(name))]  # no tool dumps buffers
        if baseline.mixed:  # a framework hands functions what another keeps to itself
            packed += sum(name.startswith("grad_param.") for name in lacking)
            lacking = [name for name in lacking if is_output(name) and not name.startswith("grad_param.")]
        if baseline.mixed and baseline.op[calls[0][n]] == baseline.names.number(STEP):  # a weight that one packs with others
            lone += sum(map(is_output, lacking))
            lacking = []
        if baseline.op[calls[0][n]] != candidate.op[calls[1][n]]:  # another class at the path of a module names its own
            lacking = [name for name in lacking if not is_of_module(name)]
        if lacking:
            one_sided[n] = tuple(lacking)
    if more:
        pair, k, j = (np.r_[a, b] for a, b in zip((pair, k, j), np.array(more, np.int64).T, strict=True))
        order = np.argsort(pair, kind="stable")
        pair, k, j = pair[order], k[order], j[order]
    kept = baseline.slot[k] != arguments
    kept[kept] &= ~_is_compound(k[kept], j[kept], baseline, candidate)
    alike = k is j
    pair, k = pair[kept], k[kept]
    j = k if alike else j[kept]
    nothing = np.full(len(pair), np.nan)
    errors = Errors(streams, calls, pair, (k, j), nothing, baseline.l2[k], np.zeros(len(pair), np.int8), one_sided=one_sided)
    errors.lone_weights, errors.lone_gradients, errors.payloads = lone, packed, payloads
    _distances(errors, payloads, in_full)
    for stream, slots in zip(streams, errors.slots, strict=True):
        if stream.norms is not stream.l2:
            errors.norm = np.fmin(errors.norm, stream.norms[slots])
    errors.arguments = dict(differing_arguments(streams, calls))
    return errors


def _is_compound(k: Numbers, j: Numbers, baseline: Stream, candidate: Stream) -> Array:
    """Tell which slots both sides recorded by their parts only (a sparse tensor by values and indices): those are measured."""
    sides = ((baseline, k), (candidate, j))
    bare = [~(stream.has_digest | stream.measured)[at] for stream, at in sides]
    found: Array = bare[0] & bare[1]
    for n in np.flatnonzero(found):
        alike = baseline.dtype[k[n]] == candidate.dtype[j[n]] and baseline.shapes[k[n]] == candidate.shapes[j[n]]
        whole = f"{baseline.names.names[int(baseline.slot[k[n]])]}."
        slots = [stream.slots(int(stream.call[at[n]])) for stream, at in sides]
        found[n] = alike and all(any(baseline.names.names[slot].startswith(whole) for slot in one) for one in slots)
    return found


def _distances(errors: Errors, payloads: tuple[Payload, Payload], in_full: bool) -> None:
    """Fill in ``absolute``, ``norm``, ``method`` and ``reasons``; the first rule that applies to a slot measures it."""
    (baseline, candidate), (k, j) = errors.streams, errors.slots
    fit = same_shapes(errors)
    digests = baseline.has_digest[k] & candidate.has_digest[j]
    typed = baseline.dtype[k] == candidate.dtype[j]
    equal = fit & digests & typed & (baseline.digest[k] == candidate.digest[j])
    errors.agree(np.flatnonzero(equal), DIGEST)
    for n in np.flatnonzero(~fit).tolist():
        errors.reasons[n] = Reason(Why.SHAPES, (str(baseline.shapes[k[n]]), str(candidate.shapes[j[n]])))
    left = fit & ~equal
    differ = _from_checksums(errors, left & ~digests & typed) if baseline.imported and candidate.imported else None
    left &= np.isnan(errors.absolute)
    stored = np.flatnonzero(left & baseline.has_payload[k] & candidate.has_payload[j])
    if len(stored):
        left[stored] = False
        left[_from_payload(errors, stored, payloads, in_full)] = True
    if baseline.imported or candidate.imported or baseline.translated:
        _from_statistics(errors, np.flatnonzero(left))
        if differ is not None:
            _mark_differing(errors, differ)
        left &= np.isnan(errors.absolute)
    both = baseline.measured[k] & candidate.measured[j]
    _from_sketches(errors, np.flatnonzero(left & both), digests & typed)
    left &= ~both
    _mark_differing(errors, np.flatnonzero(left & digests & typed))
    for n in np.flatnonzero(left & ~(digests & typed)).tolist():
        if digests[n]:
            errors.reasons[n] = Reason(Why.DTYPES, (str(baseline.dtype_of(k[n])), str(candidate.dtype_of(j[n]))))
        else:
            errors.reasons.setdefault(n, Reason(Why.NO_STATISTICS))


def same_shapes(errors: Errors) -> Array:
    """Tell which entries have the same shape on both sides, but for sizes of one."""
    (first, second), (k, j) = (stream.shapes for stream in errors.streams), errors.slots
    if first is second and k is j:
        return np.ones(len(k), bool)
    same = np.asarray(first.squeezed[k] == second.squeezed[j])
    named = any(stream.imported for stream in errors.streams)  # by a name alone: its shape is unknown then, and not another one
    return same | ~(first.known[k] & second.known[j]) if named else same


def _from_checksums(errors: Errors, of: Array) -> Numbers:
    """Settle entries by another tool's checksums; return those that it says differ, for how much may be told by something else."""
    (baseline, candidate), (k, j) = errors.streams, errors.slots
    at = np.flatnonzero(of & (baseline.shapes.exact[k] == candidate.shapes.exact[j]))
    told = compare_checksums(errors.streams, (k[at], j[at]))
    errors.agree(at[told.equal], DIGEST)
    errors.agree(at[told.weakly], STATISTICS)
    return at[told.unequal]


def _mark_differing(errors: Errors, at: Numbers) -> None:
    """Say that entries differ by an unknown amount, unless something said by how much."""
    unknown = at[(errors.method[at] != TENSOR) & ~(errors.absolute[at] > 0)]
    errors.absolute[unknown], errors.method[unknown] = np.inf, DIGEST
    errors.say(unknown, Why.UNSIZED)


def _from_statistics(errors: Errors, at: Numbers) -> None:
    """Compare entries by max, min, mean and norm that have no sketch on both sides, as an import without tensors."""
    (baseline, candidate), (k, j) = errors.streams, (side[at] for side in errors.slots)
    both = baseline.measured[k] & candidate.measured[j]
    bare = np.isnan(baseline.sketch[k]).all(axis=1) | np.isnan(candidate.sketch[j]).all(axis=1)
    told = both & bare
    found, where = compare_statistics(errors.streams, (k[told], j[told]), errors.inputs[at[told]]), at[told]
    errors.estimates.update(zip(where.tolist(), found.estimates.tolist(), strict=True))
    errors.absolute[where] = found.absolute
    whys = [Why.ORDER if why and baseline.translated else why for why in found.whys]
    errors.reasons.update({n: Reason(why) for n, why in zip(where.tolist(), whys, strict=True) if why})
    for n in at[~both].tolist():
        _from_text(errors, n)
    errors.method[at[told | ~both]] = np.where(np.isnan(errors.absolute[at[told | ~both]]), 0, STATISTICS)
    lacking = at[(told | ~both) & np.isnan(errors.norm[at])]
    its = errors.slots[0][lacking]  # integers have no norm in the dumps of some tools: what it is at most, by their extremes
    peak = np.fmax(np.abs(baseline.number("min")[its]), np.abs(baseline.number("max")[its]))
    errors.norm[lacking] = np.nan_to_num(np.sqrt(baseline.numel[its]) * peak, posinf=0.0)


def _from_text(errors: Errors, n: int) -> None:
    """Compare an entry of which a dump says that it holds NaN or Inf."""
    found = compare_texts(errors.streams, (int(errors.slots[0][n]), int(errors.slots[1][n])))
    errors.absolute[n] = found.absolute
    if found.why:
        errors.reasons[n] = Reason(found.why)
    if found.peak:
        root = float(np.sqrt(np.nan_to_num(errors.streams[0].numel[errors.slots[0][n]], nan=1.0)))
        errors.norm[n], errors.estimates[n] = root * found.peak, root * found.absolute
        errors.absolute[n] = errors.estimates[n] if errors.inputs[n] else found.absolute


def _from_sketches(errors: Errors, at: Numbers, differ: Array) -> None:
    """Take the estimates; where the digests of two integer tensors differ (``differ``), the distance is at least 1."""
    if not len(at):
        return
    baseline, candidate = errors.streams
    k = errors.slots[0][at]
    j = k if errors.slots[0] is errors.slots[1] else errors.slots[1][at]
    discrete = baseline.names.table(is_discrete)[baseline.dtype[k]] & differ[at]
    counted = other_counts(errors.streams, (k, j))
    masked = _masked(baseline, k)
    shared = k is j and baseline.saturated is candidate.saturated and baseline.dtype is candidate.dtype
    unequal = (masked != (masked if shared else _masked(candidate, j))) & (baseline.dtype[k] == candidate.dtype[j]) & ~counted
    counted = counted | unequal
    finite = baseline.numel[k] - baseline.counts[k].sum(axis=1) - masked
    sums = ((baseline.l2[k], baseline.mean[k]), (candidate.l2[j], candidate.mean[j]))
    sketched = at_least(baseline.sketch.distances(k, candidate.sketch, j), *sums, finite, summed=ANY_ORDER)
    known = ~np.isnan(sketched)
    found = np.where(discrete, np.maximum(sketched, 1.0), sketched)
    errors.absolute[at] = np.where(known & counted, np.inf, found)
    errors.method[at] = np.where(known, SKETCH, 0)
    errors.norm[at[known & ~counted & np.isnan(errors.norm[at])]] = 0.0  # no finite element on the baseline
    errors.say(at[known & counted], Why.NOT_FINITE)
    errors.say(at[known & unequal], Why.MASKS)
    same = np.flatnonzero(known & ~counted & (found == 0) & differ[at])
    moved = at[same[finite[same] < baseline.numel[k[same]]]]
    errors.absolute[moved] = np.inf
    errors.say(moved, Why.SAME_BUT_BYTES)  # or a zero has another sign, which is less likely where there are NaN or Inf
    errors.say(at[~known], Why.SKETCH)


def _masked(stream: Stream, k: Numbers) -> Array:
    """Return how many elements of slots are masks, which neither norms nor sketches know of."""
    return np.where(stream.names.table(MASKING.__contains__)[stream.dtype[k]], np.nan_to_num(stream.saturated[k]), 0.0)


def _from_payload(errors: Errors, at: Numbers, payloads: tuple[Payload, Payload], in_full: bool) -> Numbers:
    """Measure from both sides' bytes, several slots at a time; return those whose bytes are lost or hold no numbers. What one
    call returned others read: two tensors are measured once, however many slots show them."""
    wanted = []
    for stream, side in zip(errors.streams, errors.slots, strict=True):
        digests = [int(d) if known else None for d, known in zip(stream.digest[side[at]], stream.has_digest[side[at]], strict=True)]
        wanted.append(list(zip(stream.places(side[at]), digests, strict=True)))
    shown = list(zip(*wanted, strict=True))
    both = list(dict.fromkeys(shown))
    found = compare_payloads(payloads, both)
    lost = []
    for n, one in zip(at.tolist(), shown, strict=True):
        measured = found[one]
        if measured is None:
            lost.append(n)
            continue
        errors.method[n], errors.norm[n], differing = TENSOR, measured.l2_baseline, measured.counted - measured.equal
        errors.peaks[n] = measured.max_absolute, differing
        if in_full:
            errors.bytes[n] = measured
        if measured.n_disagree:
            errors.absolute[n], errors.reasons[n] = np.inf, Reason(Why.PLACES)
        elif measured.l2_difference == 0 and measured.equal < measured.counted:  # integers beyond 2**53
            errors.absolute[n] = np.sqrt(measured.counted - measured.equal)
        else:
            errors.absolute[n] = measured.l2_difference
    return np.array(lost, np.int64)


def differing_arguments(
    streams: tuple[Stream, Stream], calls: tuple[Numbers, Numbers]
) -> Iterator[tuple[int, tuple[str | None, str | None]]]:
    """Yield the matched calls whose non-tensor arguments differ, with both sides'."""
    (baseline, candidate), (b, c) = streams, calls
    collective = candidate.names.number("collective")
    for n in np.flatnonzero(baseline.arguments[b] != candidate.arguments[c]):
        sides = baseline.value(int(baseline.arguments[b[n]])), candidate.value(int(candidate.arguments[c[n]]))
        if baseline.imported or candidate.imported:
            sides = shared(*sides)
        if sides[0] == sides[1] or _same_axes(streams, (b[n], c[n]), sides):
            continue
        if candidate.phase[c[n]] != collective or what_matters(sides[0]) != what_matters(sides[1]):
            yield int(n), sides


def _same_axes(streams: tuple[Stream, Stream], calls: tuple[int, int], sides: tuple[str | None, str | None]) -> bool:
    """Tell whether two calls are given the same but for how axes are numbered, and add none (`unsqueeze` numbers one more)."""
    ends = [stream.shapes.ndim[stream.starts[[call, call + 1]] - [0, 1]] for stream, call in zip(streams, calls, strict=True)]
    first, second = (from_first_axis(side, int(ndim[0])) for side, ndim in zip(sides, ends, strict=True))
    return ends[0][0] == ends[1][0] >= max(ends[0][1], ends[1][1]) and bool(first) and equal_values(first, second)


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
