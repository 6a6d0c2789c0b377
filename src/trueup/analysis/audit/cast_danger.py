"""What a cast does to numbers, by the statistics of its input and result.

A healthy cast to a narrower float rounds each element by at most one unit roundoff (IEEE 754: relative error at most 2**-p for p
bits of significand). It is dangerous if it makes elements infinite, sets many to zero or moves the tensor by more than rounding
can, as estimated from the two sketches (AMS / CountSketch, about 18 %). A cast to an integer is dangerous if the input holds NaN
or Inf (undefined in C++, ISO/IEC 14882 [conv.fpint]) or goes beyond the integer's range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np

from trueup.analysis.anomalies.kinds import limits
from trueup.foundation.kernels import MASKING, distance
from trueup.foundation.words.wording import counted, number, sci

Kind = Literal["overflow", "not finite", "range", "vanishes", "flushed", "fraction", "rounded"]

ROUNDINGS = 4.0  # unit roundoffs by which a cast may move a tensor: one (IEEE 754), and room for the estimate
LOST_SHARE = 0.5
"""Share of the elements from which setting them to zero is dangerous: a gradient whose smallest elements vanish is usual, one that
loses half of them learns less (Micikevicius et al. 2018, Mixed Precision Training, section 3.2)."""
SAME = 1e-9  # relative difference up to which two sums of the same integers, taken in float64, may differ
ASKED = 1e5  # from here a power of ten is taken for a number that somebody wrote: -1e9 masks an attention and is to become -Inf


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


@cache
def family(dtype: str) -> str:
    """Return ``float``, ``integer``, or an empty word for bool, complex and the rest."""
    if limits(dtype) is not None:
        return "" if dtype.startswith("complex") else "float"
    try:
        ends(dtype)
    except (TypeError, ValueError, AttributeError):
        return ""
    return "integer"


@cache
def ends(dtype: str) -> tuple[int, int]:
    """Return the least and the greatest integer of a dtype; raises ValueError or TypeError for another dtype."""
    found: Any = ml_dtypes.iinfo(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.iinfo(np.dtype(dtype))
    return int(found.min), int(found.max)


def _bits(dtype: str) -> int:
    """Bits of the significand, the implicit one included."""
    found: Any = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return int(found.nmant) + 1


def _roundoff(dtype: str) -> float:
    return float(2.0 ** -_bits(dtype))
