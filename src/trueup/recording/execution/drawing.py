"""Elements drawn to match recorded numbers, for captures that kept no bytes."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.comparison.measures.roundoff import roundoff
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.recorded import RecordedTensor

INTEGERS = ("int", "uint")
MOST = 1 << 28
"""Largest tensor that is drawn, in elements: a size that the file does not bear out is not believed."""


def draw(recorded: RecordedTensor, seed: int = 0) -> NDArray[Any]:
    """Return elements with the recorded min, max, mean, l2 and counts of zero, NaN and Inf, the same each time.

    Bounds and counts are met exactly, mean and l2 to a few per cent where they fit the bounds (a clipped normal distribution). What
    is beside (which element is where, correlations) is not known, so a result may be better or worse conditioned than it was.

    Raises:
        ValueError: the tensor is larger than is drawn.
    """
    count = recorded.numel
    if count > MOST:
        raise ValueError(f"{recorded.slot} has {count:,} elements; at most {MOST:,} are drawn")
    source = np.random.default_rng([seed, zlib.crc32(f"{recorded.slot} {recorded.shape}".encode())])
    numbers = {name: 0.0 if value is None or math.isnan(value) else float(value) for name, value in recorded.numbers.items()}
    low, high, mean = numbers["min"], numbers["max"], numbers["mean"]
    dtype = numpy_dtype(recorded.dtype)
    if dtype == np.bool_:
        values = np.zeros(count)
        values[: max(0, count - int(numbers["n_zero"]))] = 1
        return source.permutation(values).astype(dtype).reshape(recorded.shape)
    if recorded.dtype.startswith(INTEGERS):
        return _integers(source, count, int(low), int(high), int(numbers["n_zero"])).astype(dtype).reshape(recorded.shape)
    special = [int(numbers[name]) for name in ("n_nan", "n_posinf", "n_neginf", "n_zero")]
    left = max(0, count - sum(special))
    deviation = math.sqrt(max(0.0, numbers["l2"] ** 2 / max(left, 1) - _mean(mean, count, special) ** 2)) if left else 0.0
    values = np.clip(source.normal(_mean(mean, count, special), deviation or 0.0, left), low, high)
    if left > 1:
        values[:2] = low, high
    elif left:
        values[0] = low
    whole = np.concatenate([values, *(np.full(n, v) for n, v in zip(special, (np.nan, np.inf, -np.inf, 0.0), strict=True))])[:count]
    with np.errstate(all="ignore"):
        return source.permutation(whole).astype(dtype).reshape(recorded.shape)


def _mean(mean: float, count: int, special: list[int]) -> float:
    finite = count - sum(special[:3])
    return mean * finite / max(finite - special[3], 1)  # of those that are not zero


def _integers(source: np.random.Generator, count: int, low: int, high: int, zeros: int) -> NDArray[np.int64]:
    values = source.integers(low, high + 1, count) if high >= low else np.zeros(count, np.int64)
    if low < 0 or zeros:
        values[values == 0] = high if high else low
        values[: min(zeros, count)] = 0
    if count - zeros > 1:
        values[-2:] = low, high
    return np.asarray(source.permutation(values), np.int64)


def moved(recorded: RecordedTensor) -> NDArray[Any]:
    """Return the elements, each one unit in its last place away, in float64."""
    array, unit = recorded.array(), roundoff(recorded.dtype)
    if not unit or array.dtype.kind == "c":
        return array
    signs = np.random.default_rng(0).integers(0, 2, array.shape) * 2.0 - 1.0
    wide = array.astype(np.float64)
    return np.where(np.abs(wide) < 1e30, wide * (1 + 2 * unit * signs), wide)
