"""The Triton kernels behind `triton_statistics`: one pass over a tensor, sums in a fixed order.

A program takes every ``programs``-th group of 512 elements, eight rows of 64, and keeps totals for each of the 512 places; at the
end it adds them up and writes a row as `device_row` describes it. A second kernel adds the rows of all programs. How the elements
are dealt out depends on their number alone, and nothing is added atomically, so a tensor gives the same bits each time.

The rotation of the sketch's lanes is in the addresses: lane ``l`` of a group reads column ``(l - shift) % 64``, so sums need no
shuffle. Signs are computed, one hash for 64 elements.

Written for triton and triton-ascend: no atomics, no inline assembly, no unsigned 64-bit numbers, no `tl.where` on 64-bit integers,
no float64 where the device has none (``PAIR``: sums are two float32, the second holds what rounding took from the first: Knuth's
two-sum, Dekker's product).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.foundation.kernels.sketch import GOLDEN, MIX, ROWS_PER_GROUP
from trueup.foundation.model import LANES
from trueup.recording.adapters.torch.device_row import COLUMNS, WIDTH

PLACES = 16
"""Numbers of a row that one program of `merge` adds."""

PLAIN, INTEGER, BRAIN, E4M3, E5M2 = 0, 1, 2, 3, 4
"""How elements are read: converted, as integers, and as the bits of bfloat16 and of the eight-bit floats."""


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


# Triton sees globals only as constexpr.
_GOLDEN = tl.constexpr(_signed(GOLDEN))
_MIX_0, _MIX_1 = tl.constexpr(_signed(MIX[0])), tl.constexpr(_signed(MIX[1]))
_MASK_30, _MASK_27, _MASK_31 = (tl.constexpr((1 << (64 - by)) - 1) for by in (30, 27, 31))
_WIDTH, _LANES, _ROWS = tl.constexpr(WIDTH), tl.constexpr(LANES), tl.constexpr(ROWS_PER_GROUP)
_FIRST_LANE, _EXTRAS = tl.constexpr(len(COLUMNS)), tl.constexpr(len(COLUMNS) + LANES)
_TILE = tl.constexpr(64)
"""Partial rows that `merge` adds at a time."""
_PLACES = tl.constexpr(PLACES)
_INTEGER, _BRAIN = tl.constexpr(INTEGER), tl.constexpr(BRAIN)
_E4M3, _E5M2 = tl.constexpr(E4M3), tl.constexpr(E5M2)


@triton.jit
def _splitmix64(x):
    z = x + _GOLDEN
    z = (z ^ ((z >> 30) & _MASK_30)) * _MIX_0
    z = (z ^ ((z >> 27) & _MASK_27)) * _MIX_1
    return z ^ ((z >> 31) & _MASK_31)


@triton.jit
def _two_sum(a, b):
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit
def _join(a, a_low, b, b_low):
    total, error = _two_sum(a, b)
    return total, error + (a_low + b_low)


@triton.jit
def _add(total, low, x, PAIR: tl.constexpr):
    if PAIR:
        total, error = _two_sum(total, x)
        low += error
    else:
        total += x
    return total, low


@triton.jit
def _add_square(total, low, x, PAIR: tl.constexpr):
    square = x * x
    if PAIR:
        moved = 4097.0 * x
        high = moved - (moved - x)
        rest = x - high
        low += ((high * high - square) + 2.0 * high * rest) + rest * rest
    return _add(total, low, square, PAIR)


@triton.jit
def _put(out, place, total, low, PAIR: tl.constexpr):
    """Store the total over a tile."""
    if PAIR:
        total, low = tl.reduce((total, low), 0, _join)
        total, low = tl.reduce((total, low), 0, _join)
        tl.store(out + _WIDTH + place, low)
    else:
        total = tl.sum(tl.sum(total, 0), 0)
    tl.store(out + place, total)


@triton.jit
def _put_count(out, place, count, ACCUMULATOR: tl.constexpr, PAIR: tl.constexpr):
    tl.store(out + place, tl.sum(tl.sum(count, 0), 0).to(ACCUMULATOR))
    if PAIR:
        tl.store(out + _WIDTH + place, 0.0)


@triton.jit
def _put_one(out, place, number, PAIR: tl.constexpr):
    tl.store(out + place, number)
    if PAIR:
        tl.store(out + _WIDTH + place, 0.0)


@triton.jit
def _decode(loaded, KIND: tl.constexpr, VALUE: tl.constexpr):
    """Return elements as ``VALUE``: eight-bit floats come as bytes, read as the half of the same exponent, bfloat16 as its bits,
    the upper half of a float32, for Triton's interpreter flushes subnormals when it converts (3.9)."""
    if KIND == _BRAIN:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(VALUE)
    elif KIND == _E5M2:
        return ((loaded.to(tl.int16) & 255) << 8).to(tl.float16, bitcast=True).to(VALUE)
    elif KIND == _E4M3:
        code = loaded.to(tl.int16) & 255
        half = ((code & 128) << 8) | ((code & 127) << 7)
        value = half.to(tl.float16, bitcast=True).to(VALUE) * 256.0
        return tl.where((code & 127) == 127, float("nan"), value)
    else:
        return loaded.to(VALUE)


@triton.jit
def _elements(group, row, lane, ACCUMULATOR: tl.constexpr, HINTS: tl.constexpr):
    """Return the places of a group's elements in the order of their lanes, and the sign of each."""
    rotation = ((_splitmix64(group ^ _GOLDEN) >> 61) & 7) * 8
    word = _splitmix64(group * _ROWS + row)
    column = (lane - rotation.to(tl.int32)) & (_LANES - 1)
    if HINTS:  # rotations are by eights: loads stay as wide as without
        column = tl.max_contiguous(tl.multiple_of(column, [1, 8]), [1, 8])
    sign = (1 - 2 * ((word >> column.to(tl.int64)) & 1)).to(ACCUMULATOR)
    return group * (_ROWS * _LANES) + row * _LANES + column, sign


@triton.jit
def _apart(
    exact, big, big_low, big_squares, big_squares_low, little, little_low,
    BIG: tl.constexpr, LITTLE: tl.constexpr, SCALE: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Add up apart what is so large or so small that its square leaves the range; return these sums, what is left of the elements,
    and what of that is squared."""
    is_big = tl.abs(exact) > BIG
    is_little = tl.abs(exact) < LITTLE
    large = tl.where(is_big, exact * (1.0 / SCALE), 0.0)
    big, big_low = _add(big, big_low, large, PAIR)
    big_squares, big_squares_low = _add_square(big_squares, big_squares_low, large, PAIR)
    little, little_low = _add_square(little, little_low, tl.where(is_little, exact * SCALE, 0.0), PAIR)
    exact = tl.where(is_big, 0.0, exact)
    return big, big_low, big_squares, big_squares_low, little, little_low, exact, tl.where(is_little, 0.0, exact)


@triton.jit
def _put_sketch(out, sketch, sketch_low, PAIR: tl.constexpr):
    lanes = out + _FIRST_LANE + tl.arange(0, _LANES)
    if PAIR:
        sketch_sum, sketch_rest = tl.reduce((sketch, sketch_low), 0, _join)
        tl.store(lanes, sketch_sum)
        tl.store(lanes + _WIDTH, sketch_rest)
    else:
        tl.store(lanes, tl.sum(sketch, 0))


@triton.jit
def _put_extremes(
    out, big, big_low, big_squares, big_squares_low, little, little_low, SCALED: tl.constexpr, PAIR: tl.constexpr
):  # fmt: skip
    """Store what was summed apart because its square leaves the range."""
    if SCALED:
        _put(out, _EXTRAS, big, big_low, PAIR)
        _put(out, _EXTRAS + 1, big_squares, big_squares_low, PAIR)
        _put(out, _EXTRAS + 2, little, little_low, PAIR)
    else:
        _put_one(out, _EXTRAS, 0.0, PAIR)
        _put_one(out, _EXTRAS + 1, 0.0, PAIR)
        _put_one(out, _EXTRAS + 2, 0.0, PAIR)


@triton.jit
def _put_counts(
    out, posinf, neginf, zero, saturated, small, kept, ACCUMULATOR: tl.constexpr, PAIR: tl.constexpr
):  # fmt: skip
    _put_count(out, 4, posinf, ACCUMULATOR, PAIR)
    _put_count(out, 5, neginf, ACCUMULATOR, PAIR)
    _put_count(out, 6, zero, ACCUMULATOR, PAIR)
    _put_count(out, 7, saturated, ACCUMULATOR, PAIR)
    _put_count(out, 8, small, ACCUMULATOR, PAIR)
    _put_count(out, 9, kept, ACCUMULATOR, PAIR)


@triton.jit(do_not_specialize=["size", "programs", "turns"])
def measure(
    x, out, size, programs, turns,
    KIND: tl.constexpr, VALUE: tl.constexpr, ACCUMULATOR: tl.constexpr, PAIR: tl.constexpr, SCALED: tl.constexpr,
    SPLIT: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr, KEEP_BELOW: tl.constexpr, BIG: tl.constexpr,
    LITTLE: tl.constexpr, SCALE: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """Write row ``program`` of ``out``: the totals of every ``programs``-th group, in ``turns`` turns."""
    program = tl.program_id(0)
    row = tl.arange(0, _ROWS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    zeros = tl.zeros((_ROWS, _LANES), ACCUMULATOR)
    none = tl.zeros((_ROWS, _LANES), tl.int32)
    least = tl.full((_ROWS, _LANES), float("inf"), VALUE)
    most = tl.full((_ROWS, _LANES), float("-inf"), VALUE)
    sketch, sketch_low, total, total_low, squares, squares_low = zeros, zeros, zeros, zeros, zeros, zeros
    big, big_low, big_squares, big_squares_low, little, little_low = zeros, zeros, zeros, zeros, zeros, zeros
    posinf, neginf, zero, small, saturated, kept = none, none, none, none, none, none
    for turn in range(turns):
        group = program.to(tl.int64) + turn * programs.to(tl.int64)
        offset, sign = _elements(group, row, lane, ACCUMULATOR, HINTS)
        present = offset < size
        if (group + 1) * (_ROWS * _LANES) <= size:  # without a mask loads are as wide as the machine has them
            loaded = tl.load(x + offset)
        else:
            loaded = tl.load(x + offset, mask=present, other=0)
        value = _decode(loaded, KIND, VALUE)
        if KIND == _INTEGER:
            keep = present
        else:
            magnitude = tl.abs(value)
            keep = present & (magnitude < KEEP_BELOW)
            posinf += (value == float("inf")).to(tl.int32)
            neginf += (value == float("-inf")).to(tl.int32)
            small += (present & (magnitude < TINY)).to(tl.int32)
            saturated += ((magnitude >= LARGEST) & (magnitude < float("inf"))).to(tl.int32)
        zero += (present & (value == 0.0)).to(tl.int32)
        kept += keep.to(tl.int32)
        least = tl.minimum(least, tl.where(keep, value, float("inf")))
        most = tl.maximum(most, tl.where(keep, value, float("-inf")))
        exact = tl.where(keep, value, 0.0).to(ACCUMULATOR)
        sketch, sketch_low = _add(sketch, sketch_low, exact * sign, PAIR)
        if SPLIT:  # an integer beyond 2**24 as two float32
            rest = (loaded.to(tl.int64) - exact.to(tl.int64)).to(ACCUMULATOR)
            sketch, sketch_low = _add(sketch, sketch_low, rest * sign, PAIR)
            total, total_low = _add(total, total_low, rest, PAIR)
        squared = exact
        if SCALED:
            big, big_low, big_squares, big_squares_low, little, little_low, exact, squared = _apart(
                exact, big, big_low, big_squares, big_squares_low, little, little_low, BIG, LITTLE, SCALE, PAIR
            )
        squares, squares_low = _add_square(squares, squares_low, squared, PAIR)
        total, total_low = _add(total, total_low, exact, PAIR)
    out += program.to(tl.int64) * (2 * _WIDTH if PAIR else _WIDTH)
    _put_one(out, 0, tl.min(tl.min(least, 0), 0).to(ACCUMULATOR), PAIR)
    _put_one(out, 1, tl.max(tl.max(most, 0), 0).to(ACCUMULATOR), PAIR)
    _put(out, 2, total, total_low, PAIR)
    _put(out, 3, squares, squares_low, PAIR)
    _put_counts(out, posinf, neginf, zero, saturated, small, kept, ACCUMULATOR, PAIR)
    _put_sketch(out, sketch, sketch_low, PAIR)
    _put_extremes(out, big, big_low, big_squares, big_squares_low, little, little_low, SCALED, PAIR)


@triton.jit(do_not_specialize=["rows"])
def merge(partial, out, rows, ACCUMULATOR: tl.constexpr, PAIR: tl.constexpr):
    """Add ``rows`` rows of ``partial`` into the row ``out``; each program takes 16 columns."""
    column = tl.program_id(0) * _PLACES + tl.arange(0, _PLACES)
    part = tl.arange(0, _TILE)[:, None]
    zeros = tl.zeros((_TILE, _PLACES), ACCUMULATOR)
    total, low = zeros, zeros
    least = zeros + float("inf")
    most = zeros + float("-inf")
    for first in range(0, rows, _TILE):
        present = (first + part < rows) & (column[None, :] < _EXTRAS + 3)
        if PAIR:
            place = (first + part) * (2 * _WIDTH) + column[None, :]
            low += tl.load(partial + place + _WIDTH, mask=present, other=0.0)
        else:
            place = (first + part) * _WIDTH + column[None, :]
        value = tl.load(partial + place, mask=present, other=0.0)
        total, low = _add(total, low, value, PAIR)
        least = tl.minimum(least, tl.where(present, value, float("inf")))
        most = tl.maximum(most, tl.where(present, value, float("-inf")))
    if PAIR:
        sums, rest = tl.reduce((total, low), 0, _join)
        tl.store(out + _WIDTH + column, tl.where(column < 2, 0.0, rest))
    else:
        sums = tl.sum(total, 0)
    sums = tl.where(column == 0, tl.min(least, 0), sums)
    tl.store(out + column, tl.where(column == 1, tl.max(most, 0), sums))
