"""Which rows of the legacy table are red and which yellow: the rules of ptdbg_ascend 6.0, each output beside each input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Layout = Literal["tensor", "stats", "digest"]
PLAIN, YELLOW, RED = 0, 1, 2


def colours(numbers: Mapping[str, Array], call: Array, is_input: Array, layout: Layout) -> Array:
    """Return `PLAIN`, `YELLOW` or `RED` for each row.

    Args:
        numbers: columns of the layout, ``(n,)`` float64; NaN for what is no number, and as it is for what is NaN or infinite.
        call: number of the call of each row, ascending from 0.
        is_input: which rows are inputs.
        layout: rows of digests have no colour.
    """
    if layout == "digest":
        return np.zeros(len(call), np.int8)
    bad = np.zeros(len(call), bool)
    for name in ("NPU max", "NPU min"):
        bad |= _is_bad(numbers, name)
    largest = "MaxAbsErr" if layout == "tensor" else "Max diff"
    red = bad | (np.abs(_finite(numbers[largest], 0.0)) > 1e10)
    worse = _by_elements if layout == "tensor" else _by_statistics
    more_red, yellow = worse(numbers, call, is_input)
    red = red | (more_red & ~is_input)
    return np.asarray(np.where(red, RED, np.where(yellow & ~is_input, YELLOW, PLAIN)).astype(np.int8))


def _is_bad(numbers: Mapping[str, Array], name: str) -> Array:
    """Tell where a recorded number is NaN or infinite; what was not recorded is masked."""
    column = numbers[name]
    return np.asarray(~np.isfinite(np.asarray(column)) & ~np.ma.getmaskarray(column))


def _by_elements(numbers: Mapping[str, Array], call: Array, is_input: Array) -> tuple[Array, Array]:
    share, cosine = numbers["One Thousandth Err Ratio"], numbers["Cosine"]
    magnitude = np.log10(np.maximum(1.0, _finite(numbers["MaxAbsErr"], 0.0)))
    best = _largest(_finite(share, 0.0), call, is_input)
    own = _finite(share, 1.0)
    red = (best > 0.9) & (own < 0.6)
    grown = magnitude + _largest(-magnitude, call, is_input) >= 1
    turned = _largest(_finite(cosine, 0.0), call, is_input) - _finite(cosine, 1.0) > 0.1
    return red, grown | (best - own > 0.1) | turned


def _by_statistics(numbers: Mapping[str, Array], call: Array, is_input: Array) -> tuple[Array, Array]:
    share = np.abs(_finite(numbers["Max diff"], 0.0)) / np.maximum(0.01, np.abs(_finite(numbers["Bench max"], 0.0)))
    told = is_input & ~np.ma.getmaskarray(numbers["Max diff"])
    return share > 0.5, (share > 0.1) & (-_largest(-share, call, told) < 0.01)


def _largest(values: Array, call: Array, chosen: Array) -> Array:
    """Return, for each row, the largest value among the chosen rows of its call; -Inf where there is none."""
    found = np.full(int(call[-1]) + 1 if len(call) else 0, -np.inf)
    np.maximum.at(found, call[chosen], values[chosen])
    return found[call]


def _finite(values: Array, otherwise: float) -> Array:
    filled = np.ma.filled(values, np.nan)
    return np.where(np.isfinite(filled), filled, otherwise)
