"""Whether two tensors are close, element by element, and which elements are farthest apart.

An element is close where ``|b - a| <= atol + rtol |a|``, the rule of ``numpy.isclose`` and ``torch.isclose`` with the baseline
as the reference; NaN is close to NaN, Inf to the same Inf. Of complex elements magnitudes are taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels import distance, subtracted
from trueup.foundation.kernels.metrics import counts_that_differ, differences, index_of
from trueup.foundation.kernels.sketch import GROUP, ROWS_PER_GROUP
from trueup.foundation.model import LANES, TensorStats

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What ``|b - a| <= atol + rtol |a|`` takes."""

    rtol: float = 1e-5
    atol: float = 1e-8

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}".replace("e-0", "e-") for name, value in (("rtol", self.rtol), ("atol", self.atol)))


@dataclass(frozen=True, slots=True)
class Element:
    """One element on both sides."""

    index: tuple[int, ...]
    baseline: Any  # as NumPy holds it: its own dtype
    candidate: Any
    absolute: float  # |b - a|; Inf where one side is NaN or Inf and the other is not the same
    times: float  # ``absolute`` over what the tolerance allows; Inf where that is nothing


@dataclass(frozen=True, slots=True)
class Closeness:
    """What a tolerance says of two tensors."""

    elements: int
    outside: int  # elements that are not close
    worst: tuple[Element, ...]  # the elements farthest from the tolerance, worst first; none that is the same on both sides

    @property
    def close(self) -> bool:
        """Whether all elements are."""
        return self.outside == 0


def closeness(baseline: NDArray[Any], candidate: NDArray[Any], tolerance: Tolerance, top: int = 10) -> Closeness:
    """Look at every element of two tensors of the same shape, in bounded memory. Raises ValueError if the shapes differ,
    TypeError if a dtype holds no numbers or is wider than float64."""
    parts = 2 if "c" in (baseline.dtype.kind, candidate.dtype.kind) else 1
    worst = np.empty((0, 3))  # times, absolute, flat index
    outside = start = 0
    for a, b, d in subtracted(baseline, candidate):
        size, base = _sizes(a, b, d, parts)
        with np.errstate(all="ignore"):
            allowed = tolerance.atol + tolerance.rtol * base
            outside += int(np.count_nonzero(~(size <= allowed)))
            times = np.where(size == 0, 0.0, np.where(np.isinf(size), np.inf, size / allowed))
        places = _largest(times, size, top)
        found = np.stack([times[places], size[places], start + places.astype(np.float64)], axis=1)
        worst = np.concatenate([worst, found])
        worst = worst[np.lexsort((worst[:, 2], -worst[:, 1], -worst[:, 0]))][:top]
        start += size.size
    elements = tuple(_element(baseline, candidate, row) for row in worst.tolist())
    return Closeness(baseline.size, outside, elements)


def _sizes(a: Floats, b: Floats, d: Floats, parts: int) -> tuple[Floats, Floats]:
    """Return |b - a| and |a| of each element; 0 where both sides are the same NaN or Inf, Inf where only one is."""
    with np.errstate(all="ignore"):
        size, base = np.abs(d), np.abs(a)
        odd = ~(np.isfinite(a) & np.isfinite(b))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        size[odd] = np.where(same[odd], 0.0, np.inf)
        base[~np.isfinite(base)] = 0.0  # an infinite reference would allow anything
    if parts == 2:
        return np.hypot(size[::2], size[1::2]), np.hypot(base[::2], base[1::2])
    return size, base


def _largest(times: Floats, size: Floats, top: int) -> NDArray[np.int64]:
    """Return where the at most ``top`` worst elements of a piece are, none of which is the same on both sides."""
    places = np.flatnonzero(size > 0)
    if places.size > 4 * top:  # what is tied at the edge is sorted out by its size
        edge = np.partition(times[places], -top)[-top] if top else math.inf
        places = places[times[places] >= edge]
    return places[np.lexsort((places, -size[places], -times[places]))][:top]


def _element(baseline: NDArray[Any], candidate: NDArray[Any], row: list[float]) -> Element:
    index = index_of(int(row[2]), baseline.shape)
    assert index is not None
    return Element(index, baseline[index], candidate[index], row[1], row[0])


@dataclass(frozen=True, slots=True)
class Estimate:
    """What statistics and sketches of two tensors tell about their elements."""

    relative_l2: float  # from the sketches, about ±18 %; NaN without them
    apart: str  # why the elements cannot all be close, or nothing


def estimate(
    baseline: TensorStats, candidate: TensorStats, sketches: tuple[Floats, Floats] | None, tolerance: Tolerance
) -> Estimate:
    """Compare two tensors of which only statistics were kept. If all elements are close, then counts of NaN and Inf are equal,
    max and min agree within the tolerance of either, norms within the norm of all tolerances, and sketches within `_farthest`.
    The converse does not hold."""
    found = _apart(baseline, candidate, tolerance)
    if sketches is None:
        return Estimate(math.nan, found)
    far = float(distance(*sketches))
    relative = 0.0 if far == 0 else far / baseline.l2 if baseline.l2 > 0 else math.inf
    if not found and baseline.n_saturated == candidate.n_saturated and far > _farthest(baseline, tolerance):
        found = f"the sketches are {far:.2g} apart"
    return Estimate(relative, found)


def _farthest(baseline: TensorStats, tolerance: Tolerance) -> float:
    """Return how far the sketches of two close tensors can be apart. A lane adds at most 8 of each 512 elements, so its square is
    at most that many times their squares (Cauchy-Schwarz), and those are at most what the tolerance allows."""
    n = baseline.numel * 2  # a complex element is two reals
    most = ROWS_PER_GROUP * math.ceil(n / GROUP)
    norm = baseline.l2 if math.isfinite(baseline.l2) else 0.0
    allowed = tolerance.atol * math.sqrt(n) + tolerance.rtol * norm
    return math.sqrt(most) * allowed + 1e-12 * math.sqrt(n) * norm


def _apart(baseline: TensorStats, candidate: TensorStats, tolerance: Tolerance) -> str:
    for each in counts_that_differ(baseline, candidate):
        if each.name != "n_saturated":
            return f"{each.name} is {each.baseline:,} and {each.candidate:,}"
    if baseline.n_saturated != candidate.n_saturated:
        return ""  # what is a mask on one side only is missing from the other numbers of that side
    for each in differences(baseline, candidate):
        if each.name == "mean" or not math.isfinite(each.absolute):
            continue
        allowed = tolerance.atol + tolerance.rtol * max(abs(each.baseline), abs(each.candidate))
        if each.name == "l2":
            allowed = tolerance.atol * math.sqrt(baseline.numel) + tolerance.rtol * each.baseline
        if abs(each.absolute) > allowed * (1 + 1e-9):
            return f"{each.name} is {each.baseline:.7g} and {each.candidate:.7g}"
    return ""


def from_sketch(stats: TensorStats, sketch: Floats, shape: tuple[int, ...], complex_: bool) -> Floats | None:
    """Return the elements of a small tensor from its sketch: float64 (complex128 for a complex one). None where it has more than
    64 reals, not as many as its shape says, or NaN, Inf or a mask, which a sketch does not hold."""
    from trueup.foundation.kernels import sketch as places

    reals = math.prod(shape) * (2 if complex_ else 1)
    if math.prod(max(size, 1) for size in shape) > LANES or reals > LANES or math.prod(shape) != stats.numel:
        return None
    if stats.n_nan or stats.n_posinf or stats.n_neginf or stats.n_saturated:
        return None
    values = places.elements(sketch, reals)
    return values.view(np.complex128).reshape(shape) if complex_ else values.reshape(shape)  # type: ignore[return-value]
