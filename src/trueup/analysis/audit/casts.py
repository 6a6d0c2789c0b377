"""Casts that destroy numbers: beyond the range, below it, to integers; found in the statistics of one run.

1 dangerous cast (106 looked at): head, forward, step 0, rank 0 (torch.Tensor.half), float32 to float16: 55 of 64 elements
become infinite: the input reaches 7.70e5, the largest float16 is 65504 [net/train.py:11 in forward]

A healthy cast to a narrower float rounds each element by at most one unit roundoff (IEEE 754: relative error at most 2**-p for p
bits of significand). It is dangerous if it makes elements infinite, sets many to zero or moves the tensor by more than rounding
can, as estimated from the two sketches (AMS / CountSketch, about 18 %). A cast to an integer is dangerous if the input holds NaN
or Inf (undefined in C++, ISO/IEC 14882 [conv.fpint]) or goes beyond the integer's range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from trueup.analysis.anomalies.flow import ends, family, limits
from trueup.analysis.audit.reading import (
    Found,
    Places,
    Steps,
    calls,
    cast_source,
    census,
    described,
    difference,
    kinds,
    outermost,
    parts,
)
from trueup.foundation.facts.anomaly import Place
from trueup.foundation.facts.criteria import is_product
from trueup.foundation.kernels import MASKING, distance
from trueup.foundation.model import Finding
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import clean, counted, number, sci, short_source

Kind = Literal["overflow", "not finite", "range", "vanishes", "flushed", "fraction", "rounded"]

ROUNDINGS = 4.0  # unit roundoffs by which a cast may move a tensor: one (IEEE 754), and room for the estimate
LOST_SHARE = 0.5
"""Share of the elements from which setting them to zero is dangerous: a gradient whose smallest elements vanish is usual, one that
loses half of them learns less (Micikevicius et al. 2018, Mixed Precision Training, section 3.2)."""
SAME = 1e-9  # relative difference up to which two sums of the same integers, taken in float64, may differ
ASKED = 1e5  # from here a power of ten is taken for a number that somebody wrote: -1e9 masks an attention and is to become -Inf

MOST = 1000  # casts that are described
LEVELS = ("api", "aten")  # those whose calls may be casts
_STATISTICS = ("min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_zero", "n_saturated")
_COLUMNS = (*_STATISTICS, "numel", "shape", "sketch")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Statistics of a tensor; NaN where there are none."""

    dtype: str
    numel: float
    min: float = math.nan
    max: float = math.nan
    mean: float = math.nan
    l2: float = math.nan
    n_nan: float = math.nan
    n_posinf: float = math.nan
    n_neginf: float = math.nan
    n_zero: float = math.nan
    n_saturated: float = math.nan
    sketch: Any = None

    @property
    def infinite(self) -> float:
        """Elements that are +Inf or -Inf."""
        return self.n_posinf + self.n_neginf

    @property
    def largest(self) -> float:
        """Largest magnitude of the finite elements."""
        return float(np.fmax(abs(self.min), abs(self.max)))

    @property
    def masked(self) -> float:
        """Elements at the largest number of a wide dtype, which are counted and enter no other statistics."""
        return self.n_saturated if self.dtype in MASKING and self.n_saturated > 0 else 0.0

    @property
    def measured(self) -> bool:
        """Whether its range is known."""
        return self.numel >= 0 and (not math.isnan(self.largest) or self.n_nan + self.infinite + self.masked >= self.numel)


@dataclass(frozen=True, slots=True)
class Danger:
    """What a cast did."""

    kind: Kind
    dangerous: bool  # else it lost what such casts lose: fractions, small numbers
    what: str
    share: float = math.nan  # of the elements, NaN where it is not known
    changed: float = math.nan  # ‖result − input‖ / ‖input‖ over what is finite, estimated from sketches; NaN where there are none


def judge(before: Numbers, after: Numbers) -> Danger | None:
    """Return what a cast did beyond rounding; None if it did nothing more, or nothing is known."""
    if before.dtype == after.dtype or not before.measured:
        return None
    kinds = family(before.dtype), family(after.dtype)
    if kinds == ("float", "float"):
        return _overflow(before, after) or _flushed(before, after)
    if kinds == ("float", "integer"):
        return _not_finite(before, after) or _range(before, after) or _fraction(before, after)
    if kinds == ("integer", "integer"):
        return _range(before, after)
    if kinds == ("integer", "float"):
        return _overflow(before, after) or _rounded(before, after)
    return None


def is_mask(before: Numbers, after: Numbers) -> bool:
    """Tell whether what becomes infinite was asked for: the input's infinity or largest number, or a power of ten, as in -1e9."""
    found, wide = limits(after.dtype), limits(before.dtype)
    if found is None or wide is None or wide[0] <= found[0]:
        return False
    ends = [abs(end) for end in (before.min, before.max) if abs(end) > found[0]]  # which leave out the dtype's largest number
    return all(end >= ASKED and _is_power_of_ten(end) for end in ends) if ends else before.masked > 0


def _is_power_of_ten(value: float) -> bool:
    power = 10.0 ** round(math.log10(value))
    return abs(value - power) <= 0.01 * power  # as the dtype holds it: bfloat16 has -1e9 as -9.98e8


def _overflow(before: Numbers, after: Numbers) -> Danger | None:
    largest, _, _ = limits(after.dtype) or (math.inf, 0, 0)
    if not before.largest > largest or is_mask(before, after):
        return None
    made = after.infinite - before.infinite + after.n_nan - before.n_nan - before.masked
    if made <= 0:  # rounded back to the largest, or saturated by an operator that says so
        return None
    if math.isnan(made) and before.largest < largest * (1 + _roundoff(after.dtype)):
        return None
    many = "elements" if math.isnan(made) else f"{made:,.0f} of {counted(int(before.numel), 'element')}"
    what = f"{many} become{'s' if made == 1 else ''} infinite: the input reaches {number(before.largest)}"
    return Danger("overflow", True, f"{what}, the largest {after.dtype} is {number(largest)}", made / before.numel)


def _flushed(before: Numbers, after: Numbers) -> Danger | None:
    lost, filled = after.n_zero - before.n_zero, before.numel - before.n_zero - before.n_nan - before.infinite
    found, changed = limits(after.dtype), _changed(before, after)
    if found is None or not lost > 0 or not filled > 0:
        return None
    moved = changed > ROUNDINGS * _roundoff(after.dtype)
    what = (
        f"{lost:,.0f} of {counted(int(filled), 'number')} that {'is' if filled == 1 else 'are'} not zero become zero, below the "
        f"smallest {after.dtype} ({number(found[2])})"
    )
    if moved:
        what += f"; the tensor changes by {sci(changed)} (rel. L2)"
    return Danger("flushed", bool(moved or lost >= LOST_SHARE * filled), what, lost / filled, changed)


def _not_finite(before: Numbers, after: Numbers) -> Danger | None:
    bad = float(np.nan_to_num(before.n_nan + before.infinite)) + before.masked
    if not bad > 0:
        return None
    be = "is" if bad == 1 else "are"
    names = "NaN or Inf" if not before.masked else f"NaN, Inf or the largest {before.dtype}"
    what = f"{bad:,.0f} of {counted(int(before.numel), 'element')} {be} {names}, which no {after.dtype} is"
    return Danger("not finite", True, f"{what}: what they become differs between devices", bad / before.numel)


def _range(before: Numbers, after: Numbers) -> Danger | None:
    low, high = ends(after.dtype)
    least, most = float(np.trunc(before.min)), float(np.trunc(before.max))  # -0.5 becomes 0 in an unsigned integer
    if not (least < low or most > high):
        return None
    reaches = number(before.max) if most > high else number(before.min)
    held = f"{after.dtype} holds {low:,} to {high:,}" if high < 2**33 else f"{after.dtype} ends at {number(float(high))}"
    wraps = "wraps around" if family(before.dtype) == "integer" else "becomes an arbitrary number, another one on another device"
    return Danger("range", True, f"the input reaches {reaches}, {held}: what lies beyond {wraps}")


def _fraction(before: Numbers, after: Numbers) -> Danger | None:
    changed = _changed(before, after)
    if before.n_zero < before.numel and after.n_zero >= after.numel > 0:
        between = f"the input lies between {number(before.min)} and {number(before.max)}"
        all_ = "the one element" if before.numel == 1 else f"all {int(before.numel):,} elements"
        return Danger("vanishes", True, f"{all_} become{'s' * (before.numel == 1)} 0: {between}", 1.0, 1.0)
    if _alike(before, after):
        return None
    how = "" if math.isnan(changed) else f", which changes the tensor by {sci(changed)} (rel. L2)"
    return Danger("fraction", False, f"fractions are cut off{how}", math.nan, changed)


def _rounded(before: Numbers, after: Numbers) -> Danger | None:
    exact = 2.0 ** _bits(after.dtype)
    if not before.largest > exact or _alike(before, after):
        return None
    what = f"whole numbers up to {number(before.largest)} are rounded: {after.dtype} holds them exactly up to {int(exact):,}"
    return Danger("rounded", _bits(after.dtype) <= 11, what, math.nan, _changed(before, after))


def _alike(before: Numbers, after: Numbers) -> bool:
    """Tell whether the statistics leave no room for a difference; True if nothing is known of the result."""
    pairs = [(getattr(before, name), getattr(after, name)) for name in ("min", "max", "mean", "l2")]
    known = [(a, b) for a, b in pairs if not math.isnan(a + b)]
    return all(abs(a - b) <= SAME * max(abs(a), abs(b)) for a, b in known) and not _changed(before, after) > SAME


def _changed(before: Numbers, after: Numbers) -> float:
    if before.sketch is None or after.sketch is None or not before.l2 > 0 or before.infinite + after.infinite > 0:
        return math.nan
    return float(distance(np.asarray(before.sketch), np.asarray(after.sketch))) / before.l2


def _bits(dtype: str) -> int:
    """Bits of the significand, the implicit one included."""
    found: Any = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return int(found.nmant) + 1


def _roundoff(dtype: str) -> float:
    return float(2.0 ** -_bits(dtype))


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast that lost more than rounding does."""

    place: Place
    kind: Kind
    """``overflow``: elements become infinite. ``not finite``, ``range``, ``vanishes``, ``fraction``: to an integer; NaN and Inf,
    beyond its range, all become 0, fractions are cut off. ``flushed``: small numbers become zero. ``rounded``: large integers."""
    dangerous: bool
    source: str
    target: str  # dtypes
    shape: tuple[int, ...]
    share: float  # of the elements that were lost; NaN: not known
    changed: float  # ‖result − input‖ / ‖input‖, from sketches; NaN: not known
    sentence: str
    times: int = 1  # steps and ranks in which the same call does the same
    implicit: bool = False  # no cast was recorded: a product computes in a narrower dtype than its inputs (autocast)


@dataclass(frozen=True, slots=True)
class Casts:
    """What `dangerous_casts` found."""

    verdict: Literal["clean", "found", "inconclusive"]
    sentence: str
    casts: tuple[Cast, ...]  # dangerous ones first, then in order of execution
    looked: int
    unmeasured: int  # casts without statistics
    masks: int  # casts that make a mask infinite, which is no loss
    unsure: bool = False  # whether casts may be there that were not judged; a run that has none is sure

    @property
    def dangerous(self) -> tuple[Cast, ...]:
        """The casts that nobody wants."""
        return tuple(cast for cast in self.casts if cast.dangerous)


def dangerous_casts(capture: str | Path | Capture, *, step: Steps = None, rank: Steps = None) -> Casts:
    """Find the casts of a run that destroyed numbers, in a capture of detail ``stats`` or ``tensor`` and level ``api`` or
    ``aten``, native or imported. Raises TrueupError if there is no such capture, step or rank."""
    looking = _Looking(open_capture(capture))
    for of, one in parts(looking.capture, step, rank):
        looking.part(of, one)
    return looking.result()


class _Looking:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.places = Places(capture)
        self.found: dict[tuple[Any, ...], Cast] = {}
        self.looked = self.unmeasured = self.masks = 0
        self.implicit = "aten" not in capture.levels  # whether autocast's own casts, which are aten calls, are out of sight
        self.narrowing = False  # whether they are, and there may be any

    def part(self, rank: int, step: int) -> None:
        there = kinds(self.capture, rank, step)
        self.narrowing = self.implicit and len(_products(there)) > 1
        casting = {(op, dtype) for op, level, dtype in there if level in LEVELS and cast_source(op)}
        if not self.narrowing and len(casting) == len({op for op, _ in casting}):
            return  # as a rule: what could cast moves tensors to a device, and their numbers need not be read
        held = calls(self.capture, rank, step, self._wanted, _COLUMNS, levels=LEVELS)
        for one in outermost([one for one in held if cast_source(one.op)]):
            pair = _sides(one)
            if pair is not None and pair[0]["dtype"] != pair[1]["dtype"]:
                self._judge(rank, step, one, pair[0], _numbers(pair[0]), _numbers(pair[1]), implicit=False)
        for one in held:
            if not cast_source(one.op):
                for row, target in _narrowed(one):
                    self._judge(rank, step, one, row, _numbers(row), Numbers(target, math.nan), implicit=True)

    def _wanted(self, op: str, level: str) -> bool:
        return cast_source(op) is not None or (self.narrowing and is_product(op, level))

    def _judge(
        self, rank: int, step: int, one: Found, row: dict[str, Any], before: Numbers, after: Numbers, *, implicit: bool
    ) -> None:
        if not (family(before.dtype) and family(after.dtype)):
            return
        self.looked += 1
        self.unmeasured += not before.measured
        if is_mask(before, after):
            self.masks += 1
            return
        danger = judge(before, after)
        if danger is None:
            return
        key = (one.phase, one.level, one.scope, one.op, one.ordinal, danger.kind)
        if key in self.found:
            self.found[key] = dataclasses.replace(self.found[key], times=self.found[key].times + 1)
        elif len(self.found) < MOST:
            place = self.places.of(rank, step, one.seq)
            sizes = tuple(row["shape"] or ())
            self.found[key] = _cast(place, danger, before.dtype, after.dtype, sizes, implicit=implicit)

    def result(self) -> Casts:
        order = sorted(self.found.values(), key=lambda c: (not c.dangerous, c.place.step, c.place.rank, c.place.seq))
        bad = sum(cast.dangerous for cast in order)
        verdict: Literal["clean", "found", "inconclusive"]
        verdict = "found" if bad else "inconclusive" if self.unmeasured or not self.looked or self.capture.lost else "clean"
        blind = set(LEVELS).isdisjoint(self.capture.levels)
        unsure = bool(self.unmeasured or blind or self.capture.lost)
        return Casts(verdict, self._sentence(order, bad), tuple(order), self.looked, self.unmeasured, self.masks, unsure)

    def _sentence(self, order: list[Cast], bad: int) -> str:
        if not self.looked:
            if set(LEVELS).isdisjoint(self.capture.levels):
                return "could not tell of casts: the capture holds modules alone; record level api or aten"
            return "could not tell of casts: none was recorded"
        if bad:
            which = "" if bad == 1 else "the first: "
            return f"{counted(bad, 'dangerous cast')} ({self.looked:,} looked at): {which}{order[0].sentence}"
        if self.unmeasured:
            return f"could not tell of {self.unmeasured:,} of {counted(self.looked, 'cast')}, which have no statistics"
        lost = f"; {counted(len(order), 'call')} cut or flush numbers as such casts do" if order else ""
        masks = f"; {self.masks:,} make a mask infinite" if self.masks else ""
        return f"no cast is dangerous: {self.looked:,} looked at{lost}{masks}"


def _sides(one: Found) -> tuple[dict[str, Any], dict[str, Any]] | None:
    backward = one.phase == "backward" and one.level != "aten"
    source = "grad_output.0" if backward else cast_source(one.op)
    named = one.slots.get(source or "")
    before = named if named and named["dtype"] else next(iter(one.given), None)
    after = next(iter(one.made), None)
    return None if before is None or after is None else (before, after)


def _narrowed(one: Found) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the inputs of a forward product that are wider than its result, and the dtype in which it computes."""
    made = next((row["dtype"] for row in one.made), None)
    if made is None or family(made) != "float" or one.phase not in ("forward", "recompute"):
        return
    for row in one.given:
        if family(row["dtype"]) == "float" and row["dtype"] != made:
            yield row, made


def _cast(place: Place, danger: Danger, source: str, target: str, shape: tuple[int, ...], *, implicit: bool) -> Cast:
    how = f"computes {target} of {source}" if implicit else f"{source} to {target}"
    code = f" [{short_source(place.source)}]" if place.source else ""
    return Cast(
        place, danger.kind, danger.dangerous, source, target, shape, danger.share, danger.changed,
        clean(f"{described(place)}, {how}: {danger.what}{code}"), implicit=implicit,
    )  # fmt: skip


def _numbers(row: dict[str, Any]) -> Numbers:
    known = {name: math.nan if row[name] is None else float(row[name]) for name in _STATISTICS}
    numel = math.nan if row["numel"] is None else float(row["numel"])
    return Numbers(row["dtype"], numel, **known, sketch=row["sketch"])


def cast_note(capture: Capture, steps: list[int], ranks: list[int]) -> list[str]:
    """Name the first dangerous cast of a run that no Inf shows; an overflow is found by what it makes."""
    found = [cast for cast in dangerous_casts(capture, step=steps, rank=ranks).dangerous if cast.kind != "overflow"]
    return [f"dangerous cast{_more(found)}: {found[0].sentence}"] if found else []


def notes_beside(captures: tuple[Capture, Capture], culprit: Finding) -> list[str]:
    """Say which dangerous casts of a culprit's step only the candidate has, and where the runs' dtypes differ."""
    baseline, candidate = captures
    rank, step = culprit.rank, culprit.step
    if not all(rank in capture.ranks and step in capture.steps for capture in captures):
        return []
    found = dangerous_casts(candidate, step=step, rank=rank).dangerous
    if found:  # as a rule there is none, and those of the baseline need not be looked for
        seen = {_key(cast) for cast in dangerous_casts(baseline, step=step, rank=rank).dangerous}
        found = tuple(cast for cast in found if _key(cast) not in seen)
    notes = [f"dangerous cast{_more(found)} in the candidate alone: {found[0].sentence}"] if found else []
    there, here = (_products(kinds(capture, rank, step)) for capture in captures)
    if there == here and len(here) == 1:  # as a rule; to count the products takes time
        return notes
    other = difference(census(baseline, step=step, rank=rank), census(candidate, step=step, rank=rank))
    return [*notes, *([other.sentence] if other.differs else [])]


def _key(cast: Cast) -> tuple[str, str, str, int, str]:
    return cast.place.phase, cast.place.scope, cast.place.op, cast.place.ordinal, cast.kind


def _products(kinds: Iterable[tuple[str, str, str]]) -> set[str]:
    """Return the dtypes of all tensors of products."""
    return {dtype for op, level, dtype in kinds if is_product(op, level)}


def _more(found: Sequence[Cast]) -> str:
    return "" if len(found) == 1 else f"s ({len(found):,}; trueup check lists them), the first"
