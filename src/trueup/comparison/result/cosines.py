"""The cosine of every tensor that both runs have, from what a comparison measured anyway: precision_tool's measure of a call.

Exact where both sides kept the bytes. Else the cosine of their sketches: a sketch is linear, so tensors that are multiples of each
other have parallel ones, and 1 - cos, a squared distance, is estimated to some 25 %: good near 1, rough where it is far from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers
from trueup.comparison.measures.measure import DIGEST, SKETCH, Errors
from trueup.comparison.verdict.judged import Part
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.kernels.metrics import cosine
from trueup.foundation.model import CallKey
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.words.reasons import in_words

MOST_REASONS = 100_000
BLOCK = 4096
"""Sketches that are looked at together."""


@dataclass(frozen=True, slots=True)
class SlotCosine:
    """One slot of a call: ``cosine`` is NaN where there is none, and ``reason`` says why."""

    slot: str
    cosine: float
    is_estimate: bool
    is_output: bool
    max_absolute: float  # largest difference of two elements; NaN where the elements were not kept
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Dissimilar:
    """A call with an output whose cosine is at most the limit, or that has none because NaN, Inf or zeros differ."""

    key: CallKey
    seq: tuple[int, int]
    slots: tuple[SlotCosine, ...]
    names: tuple[str, str] | None = None  # in another tool's table: its names of both operators; key and seq mean nothing


@dataclass(frozen=True, slots=True)
class Listing:
    """The calls below a limit, in order of execution, as many as were asked for."""

    limit: float
    calls: tuple[Dissimilar, ...]
    total: int
    compared: int  # calls of which every output has a cosine
    unknown: int  # calls not below the limit of which an output could not be measured
    why_unknown: str  # of the first of these
    estimated: bool  # whether any cosine that was looked at is an estimate

    @property
    def exit_code(self) -> int:
        """1 where there are any, else 2 where an output was not measured or nothing was compared, else 0."""
        return 1 if self.total else 2 if self.unknown or not self.compared else 0


@dataclass(slots=True)
class _Part:
    """The calls of a rank and some steps that have a slot which is not equal on both sides, in the candidate's order."""

    rank: int
    keys: dict[str, Array]
    call: Numbers  # of each slot: which of those calls it is of, ascending
    slot: Numbers
    cosine: Array
    apart: Array  # where there is no cosine because the tensors are apart in a way that it cannot tell
    estimate: Array
    output: Array
    peak: Array
    reasons: dict[int, Reason]


class Cosines:
    """Gathers what `trueup.comparison.result.comparing` measures (its ``see``)."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._names: Vocabulary | None = None
        self._equal = 0  # calls whose slots are all equal

    def see(self, part: Part) -> None:
        """Keep the cosines of a part of the comparison; calls that are bitwise equal are counted alone."""
        errors = part.verdicts.errors
        candidate = errors.streams[1]
        self._names = candidate.names
        found, apart = cosines_of(errors)
        outputs = np.asarray(errors.outputs, bool)
        differ = (errors.method != DIGEST) | (errors.absolute != 0)
        chosen = np.zeros(len(errors.calls[1]), bool)
        chosen[errors.pair[differ]] = True
        with_output = np.zeros(len(chosen), bool)
        with_output[errors.pair[outputs]] = True
        self._equal += int(np.count_nonzero(~chosen & with_output))
        at = np.flatnonzero(chosen)
        entries = np.flatnonzero(chosen[errors.pair])
        calls = [side[at] for side in errors.calls]
        keys = {name: getattr(candidate, name)[calls[1]] for name in ("step", "phase", "level", "scope", "op", "ordinal", "seq")}
        keys["seq_baseline"] = errors.streams[0].seq[calls[0]]
        peak = np.full(len(entries), np.nan)
        number = np.full(len(errors.pair), -1)
        number[entries] = np.arange(len(entries))
        for n, (largest, _) in errors.peaks.items():
            if number[n] >= 0:
                peak[number[n]] = largest
        reasons = {int(number[n]): reason for n, reason in list(errors.reasons.items())[:MOST_REASONS] if number[n] >= 0}
        self._parts.append(_Part(
            candidate.rank, keys, np.searchsorted(at, errors.pair[entries]), errors.names[entries], found[entries], apart[entries],
            errors.method[entries] == SKETCH, outputs[entries], peak, reasons,
        ))  # fmt: skip

    def below(self, limit: float, count: int) -> Listing:
        """Return the calls with an output at or below ``limit``, the first ``count`` of them in full."""
        listed: list[Dissimilar] = []
        total = unknown = 0
        compared, why, estimated = self._equal, "", False
        for part in sorted(self._parts, key=lambda part: (int(part.keys["step"].min(initial=0)), part.rank)):
            outputs = part.output
            low = outputs & (part.apart | (part.cosine <= limit))
            lacking = outputs & np.isnan(part.cosine) & ~part.apart
            is_low, is_lacking, has = (_any(part.call, mask, len(part.keys["seq"])) for mask in (low, lacking, outputs))
            open_ = is_lacking & ~is_low
            unknown += int(np.count_nonzero(open_))
            compared += int(np.count_nonzero(has & ~open_))
            estimated |= bool((outputs & part.estimate).any())
            if not why and open_.any():
                n = next(n for n in np.flatnonzero(lacking).tolist() if open_[part.call[n]])
                why = in_words(part.reasons.get(n, Reason(Why.NO_STATISTICS)))
            places = np.flatnonzero(is_low)
            total += len(places)
            listed += [self._call(part, int(k)) for k in places[: max(0, count - len(listed))]]
        return Listing(limit, tuple(listed), total, compared, unknown, why, estimated)

    def of(self, seq: int, rank: int) -> tuple[SlotCosine, ...]:
        """Return the slots of the candidate's call ``seq``; nothing where it is equal or has no counterpart."""
        for part in self._parts:
            at = np.flatnonzero(part.keys["seq"] == seq) if part.rank == rank else np.empty(0, np.int64)
            if len(at):
                return tuple(self._slots(part, int(at[0])))
        return ()

    def _call(self, part: _Part, k: int) -> Dissimilar:
        assert self._names is not None
        numbers = {name: int(column[k]) for name, column in part.keys.items()}
        phase, level, scope, op = (self._names.name(numbers[name]) or "" for name in ("phase", "level", "scope", "op"))
        key = CallKey(part.rank, numbers["step"], phase, level, scope, op, numbers["ordinal"])
        return Dissimilar(key, (numbers["seq_baseline"], numbers["seq"]), tuple(self._slots(part, k)))

    def _slots(self, part: _Part, k: int) -> Iterator[SlotCosine]:
        assert self._names is not None
        for n in range(*np.searchsorted(part.call, [k, k + 1]).tolist()):
            name = self._names.name(int(part.slot[n])) or ""
            reason = in_words(part.reasons.get(n))
            if part.apart[n] and not reason:
                reason = "zero on one side only"
            yield SlotCosine(
                name, float(part.cosine[n]), bool(part.estimate[n]), bool(part.output[n]), float(part.peak[n]), reason
            )


def cosines_of(errors: Errors) -> tuple[Array, Array]:
    """Return the cosine of each entry, NaN where there is none, and whether that is because the two are certainly apart."""
    candidate, j = errors.streams[1], errors.slots[1]
    found = np.full(len(errors.pair), np.nan)
    _from_sketches(errors, found)
    zero = (errors.norm == 0) != (candidate.l2[j] == 0)
    found[zero | (errors.absolute == np.inf)] = np.nan
    found[errors.absolute == 0] = 1.0
    for n, pair in errors.bytes.items():
        found[n] = np.nan if pair.n_disagree else cosine(pair)
        zero[n] = math.isnan(found[n]) and not pair.n_disagree
    apart = np.isnan(found) & ((errors.absolute == np.inf) | (zero & (errors.absolute > 0))) & ~errors.unsized
    return found, apart


def _from_sketches(errors: Errors, found: Array) -> None:
    (baseline, candidate), (k, j) = errors.streams, errors.slots
    at = np.flatnonzero((errors.method == SKETCH) & np.isfinite(errors.absolute) & (errors.absolute != 0))
    for part in np.split(at, range(BLOCK, len(at), BLOCK)):
        sides = [stream.sketch[slots[part]] for stream, slots in ((baseline, k), (candidate, j))] if len(part) else []
        with np.errstate(all="ignore"):
            units = [side / np.abs(side).max(axis=1, keepdims=True) for side in sides]  # squares stay in range
            units = [unit / np.sqrt(np.einsum("nk,nk->n", unit, unit))[:, None] for unit in units]
            apart = units[1] - units[0] if units else np.empty((0, 1))
        found[part] = np.clip(1 - np.einsum("nk,nk->n", apart, apart) / 2, -1.0, 1.0)


def _any(call: Numbers, mask: Array, count: int) -> Array:
    found = np.zeros(count, bool)
    found[call[mask]] = True
    return found
