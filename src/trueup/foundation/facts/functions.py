"""What elementwise operators compute, how steep that is, and whether numbers are those of a coarser dtype: facts that are no rows
of a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.foundation.facts.slots import SINGLE, roundoff

Array = NDArray[Any]
Function = Callable[[Array], Array]

_erf = np.vectorize(math.erf, otypes=[float])

COARSE: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def _sigmoid(x: Array) -> Array:
    return np.asarray((1 + np.tanh(x / 2)) / 2)


FUNCTIONS: dict[str, Function] = {
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2, "silu": lambda x: x * _sigmoid(x), "swish": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)), "relu": lambda x: np.maximum(x, 0), "tanh": np.tanh, "sigmoid": _sigmoid,
    "erf": _erf, "exp": np.exp, "sqrt": np.sqrt,
}  # fmt: skip
"""Functions by the names of their operators; what takes further arguments is none of them, but for a sum (`_function`)."""
SLOPES: dict[str, Function] = {"tanh_backward": lambda y: 1 - y**2, "sigmoid_backward": lambda y: y * (1 - y)}
"""Slopes that the dispatcher's backward computes of the result; the others do of what the function was given."""
APART_BY, MOST = 1 / 8, 512
"""How far apart a function is computed, and at how many points at most: an eighth apart its slopes are told within 1 %."""


def points(low: float, high: float) -> Array:
    """Return where a function is computed to know it over a range."""
    return np.linspace(low, high, int(min(MOST, (high - low) / APART_BY)) + 3 if math.isfinite(high - low) else 3)


def steepest(function: Function, ends: Array) -> tuple[float, float]:
    """Return the largest size of a function's slope over a range, and of the slope's own; Inf where it is not known."""
    x = points(ends[0] - APART_BY, ends[1] + APART_BY)
    slope = np.diff(function(x)) / (x[1] - x[0])
    return _size(slope), _size(np.diff(slope) / (x[1] - x[0]))


def steepest_backward(op: str, ends: Array) -> tuple[float, float] | None:
    """Return the same of an operator whose slope is known, None of others."""
    if op not in SLOPES:
        return None
    x = points(ends[0] - APART_BY, ends[1] + APART_BY)
    slope = SLOPES[op](x)
    return _size(slope), _size(np.diff(slope) / (x[1] - x[0]))


def _size(values: Array) -> float:
    found = float(np.abs(values).max())
    return found if found == found else math.inf


def is_rounded(dtype: str, values: NDArray[Any], added: NDArray[Any], unlikely: float) -> bool:
    """Tell whether float32 numbers are sums, each of a number of a coarser dtype and of one of those that were ``added``.

    Of ``values`` ``(n,)`` and ``added`` ``(m,)``, which is zero where nothing was, and by chance with a probability of
    ``unlikely`` at most: a unit of the sum holds a number of the dtype as often as that unit is a part of the distance between two
    of them. ``dtype``: a key of `COARSE`.
    """
    with np.errstate(all="ignore"):
        rest = values[:, None] - added
        near = rest.astype(COARSE[dtype]).astype(float)
        room = SINGLE * np.abs(values)[:, None] * added.any()
        by_chance = (2 * room / (roundoff(dtype) * np.abs(near))).sum(axis=1).prod()
    return bool((np.abs(rest - near) <= room).any(axis=1).all() and by_chance <= unlikely)
