"""The sketch, format 1: which lane an element goes to, with which sign, and how far apart two sketches are.

Element ``i`` (logical C order) of a tensor is added to one of 64 float64 lanes with a pseudo-random sign::

    row   = i // 64                    sign  = bit (i % 64) of splitmix64(row)      (set: minus)
    group = i // 512                   shift = 8 * (splitmix64(group ^ GOLDEN) >> 61)
    lane  = (i % 64 + shift) % 64      sketch[lane] += sign * element

The shift moves a column of a matrix whose width is a multiple of 64 over eight lanes instead of one. Complex elements
enter as two reals, NaN and Inf do not enter. The sketch is linear, and up to 64 elements it *is* the tensor.

Sources: AMS (Alon, Matias, Szegedy 1996) for the signed sums whose square is an unbiased estimate of the squared norm;
CountSketch (Charikar, Chen, Farach-Colton 2002) for spreading elements over buckets. ``splitmix64``: Steele, Lea, Flood
2014, as in java.util.SplittableRandom. The constants are part of the file format: changing one is a new format version.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels._compiled import native
from trueup.foundation.model import LANES

Floats = NDArray[np.float64]

GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
ROWS_PER_GROUP = 8
GROUP = LANES * ROWS_PER_GROUP  # elements that share one rotation

LEAST_SQUARED = 1e-290  # below, a sum of squares has lost digits to underflow, or all of them

BLOCK = 64 * GROUP  # elements the NumPy twin takes at a time: 256 KB as float64, which stays in the second-level cache


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit integers: add ``GOLDEN``, then two rounds of shift, xor and multiply, modulo 2**64."""
    z = x + np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX[1])
    return z ^ (z >> np.uint64(31))


def signs(first_row: int, rows: int) -> Floats:
    """Return the signs (+1, -1) of ``rows * 64`` elements from row ``first_row`` on, float64 ``(rows * 64,)``."""
    words = splitmix64(np.arange(first_row, first_row + rows, dtype=np.uint64)).astype("<u8", copy=False)
    table = np.array([1.0, -1.0])
    return table[np.unpackbits(words.view(np.uint8), bitorder="little")]


def shifts(first_group: int, groups: int) -> NDArray[np.int64]:
    """Return how far the lanes of each group are rotated: int64 ``(groups,)``, multiples of 8 below 64."""
    numbers = np.arange(first_group, first_group + groups, dtype=np.uint64)
    return 8 * (splitmix64(numbers ^ np.uint64(GOLDEN)) >> np.uint64(61)).astype(np.int64)


def lanes(first_group: int, groups: int) -> NDArray[np.int64]:
    """Return where each lane finds its share: entry ``64 * g + l`` indexes the flat ``(groups, 64)`` column sums."""
    source = (np.arange(LANES) - shifts(first_group, groups)[:, None]) % LANES
    return (source + LANES * np.arange(groups)[:, None]).ravel()


@lru_cache(maxsize=64)  # 64 blocks of 32768: the first two million elements, 24 MB
def _tables(block: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return signs and lane indices of the ``block``-th ``BLOCK`` elements."""
    groups = BLOCK // GROUP
    return signs(block * BLOCK // LANES, BLOCK // LANES), lanes(block * groups, groups)


def tables(block: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return signs and lane indices of a block; the first blocks are remembered, later ones are made anew."""
    return _tables(block) if block < 64 else _tables.__wrapped__(block)


def elements(sketch: Floats, count: int) -> Floats:
    """Return the elements of a tensor of at most 64, which its sketch holds: float64 ``(count,)``."""
    return np.asarray(sketch[(np.arange(count) + int(shifts(0, 1)[0])) % LANES] * signs(0, 1)[:count] + 0.0)


def add_block(sketch: Floats, values: Floats, block: int) -> None:
    """Add the ``block``-th at most ``BLOCK`` elements of a tensor (float64, 1-d, finite) to ``sketch`` ``(64,)``."""
    sign, lane = tables(block)
    size = values.size
    groups = -(-size // GROUP)
    signed = np.empty(groups * GROUP)
    np.multiply(values, sign[:size], out=signed[:size])
    signed[size:] = 0.0
    columns = np.add.reduce(signed.reshape(groups, ROWS_PER_GROUP, LANES), axis=1)
    sketch += np.add.reduce(columns.ravel()[lane[: groups * LANES]].reshape(groups, LANES), axis=0)


def distance(sketch_a: NDArray[Any], sketch_b: NDArray[Any]) -> Floats:
    """Estimate ‖a − b‖ from sketches, float64 ``(..., 64)``, of tensors with equally many elements: ``sqrt(sum((a - b)**2))``,
    ``(...)``.

    The square is an unbiased estimate of the squared distance. Its relative standard deviation is √(2/64) ≈ 18 % (9 % on the
    distance) where the difference is spread over the lanes, √(2/8) = 50 % (about 25 %) where it sits in one column of a matrix
    whose width is a multiple of 64, and 0 up to 64 elements. NaN where a lane is not finite (its sum left the range of float64).
    """
    with np.errstate(all="ignore"):
        difference = np.asarray(sketch_a, np.float64) - np.asarray(sketch_b, np.float64)
        squared = np.asarray(np.einsum("...k,...k->...", difference, difference))
        estimate = np.asarray(np.sqrt(squared))
        extreme = ~((squared > LEAST_SQUARED) & (squared < np.inf))
        if extreme.any():
            estimate[extreme] = _scaled_norm(difference[extreme])
    return np.asarray(estimate, np.float64)


def distances(addresses_a: NDArray[np.int64], addresses_b: NDArray[np.int64]) -> Floats | None:
    """Return `distance` of sketches where they lie, or None where the compiled kernel is missing. Addresses are int64 ``(n,)``,
    each of 64 aligned float64 that the caller holds, or 0: no sketch. float64 ``(n,)``; NaN where `distance` has to look at the
    lanes: a sketch is missing, or the squared distance is not finite, or at most `LEAST_SQUARED` although the two are not
    equal."""
    kernel = native()
    if kernel is None:
        return None
    a, b = (np.ascontiguousarray(side, np.int64) for side in (addresses_a, addresses_b))
    squared = np.empty(len(a))
    at_a, at_b, out = (array.__array_interface__["data"][0] for array in (a, b, squared))
    kernel.squared_distances(at_a, at_b, len(a), out)
    with np.errstate(invalid="ignore"):
        squared[~(((squared > LEAST_SQUARED) & (squared < np.inf)) | (squared == 0))] = np.nan
    return np.sqrt(squared)


def at_least(
    estimate: Floats, first: tuple[Floats, Floats], second: tuple[Floats, Floats], count: Floats, *, summed: float
) -> Floats:
    """Return estimates of ‖a − b‖, float64 ``(n,)``, no smaller than ``(norms, means)`` of both prove: ``|‖a‖ − ‖b‖|`` (triangle
    inequality) and ``|sum(a) − sum(b)| / √count`` (Cauchy-Schwarz), where ``count`` are finite. Of elements that moved by the
    same number, as by Adam's first step, nothing is left where they meet in a lane with opposite signs. ``summed``, relative to the
    norms, is what the same numbers may be off by when they are summed in another order, as in another dtype: it proves nothing."""
    with np.errstate(all="ignore"):
        proved = np.fmax(np.abs(first[0] - second[0]), np.abs(first[1] - second[1]) * np.sqrt(count))
        return np.where(proved > np.maximum(estimate, summed * np.fmax(first[0], second[0])), proved, estimate)


def _scaled_norm(rows: Floats) -> Floats:
    """Return the norms of rows whose squares leave the range of float64, or may; NaN where a number is not finite."""
    largest = np.max(np.abs(rows), axis=-1, initial=0.0)
    scale = np.where(largest > 0, largest, 1.0)
    norm = scale * np.sqrt(np.sum(np.square(rows / scale[..., None]), axis=-1))
    return np.where(np.isfinite(largest), norm, np.nan)
