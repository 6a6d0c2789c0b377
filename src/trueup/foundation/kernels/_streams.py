"""Sums of many tensors by one call, each element read once: what a monitor takes of gradients, weights, moments and outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.kernels._compiled import KINDS, native

SPREAD, ALIKE, ABOVE, APART = range(4)
"""What is taken: of each tensor its squares, extremes and counts; of pairs how alike they are (gradient and momentum), where the
square of the one is above the other (momentum and variance), how far they are apart (weights now and before)."""

STREAMED = {name: KINDS[name] for name in ("float32", "float16", "bfloat16")}  # dtypes that are taken, and the kernel's numbers


def streams(
    what: int, table: Sequence[int], ends: tuple[float, float] = (-math.inf, math.inf), threads: int = 1
) -> NDArray[np.float64] | None:  # fmt: skip
    """Return a row for each five numbers of ``table``: address, kind (of `STREAMED`), address and kind of the other of the pair (0
    where there is none), and elements, which lie in a row in memory. None where the compiled kernel is not there.

    The columns of `SPREAD`: sum of squares, three that are 0, least, largest (NaN where an element is), elements that are not 0,
    elements outside of ``ends``. Of `ALIKE`: squares of the one, of the other, products, their signs. Of `ABOVE`: squares of both,
    0, signs of ``y - x ** 2``. Of `APART`: squares of the one, of the differences. All in float64, in which squares of float32 are
    exact: the same bits by whatever instruction set and number of threads, but for the last ones of squares of differences."""
    take = getattr(native(), "streams", None)  # not there either in a kernel that was built for an older Trueup
    if take is None:
        return None
    entries = np.array(table, np.int64)
    count = len(entries) // 5
    out = np.empty((count, 8))
    take(what, _address(entries), count, *ends, _address(out), threads)
    return out


def _address(array: NDArray[np.int64] | NDArray[np.float64]) -> int:
    return int(array.__array_interface__["data"][0])
