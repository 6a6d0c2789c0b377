"""What another tool's numbers say in our words, and what they leave open.

The Ascend tools take max, min, mean and norm over all elements: a NaN or Inf in a tensor shows in its maximum or minimum, and then
nothing is known of its finite elements, of which ours are. So does the largest finite number, of which attention masks are made and
which our statistics leave out (`kernels.MASKING`). Sums are in the dtype of the tensor or float32, so ``mean`` and ``l2``
are good to about 1e-6 (1e-3 for half precision).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trueup.foundation.kernels import is_mask

NAMES = ("max", "min", "mean", "norm")


def told_statistics(
    numbers: Sequence[Any], dtype: str | None, shape: tuple[int, ...] | None
) -> tuple[dict[str, float], str | None]:
    """Return columns of a record, and the numbers as JSON where they do not mean what the columns do.

    >>> told_statistics((2.0, -1.0, 0.5, 3.0), "float32", (4,))
    ({'max': 2.0, 'min': -1.0, 'n_nan': 0, 'n_posinf': 0, 'n_neginf': 0, 'mean': 0.5, 'l2': 3.0}, None)
    >>> told_statistics((float("inf"), -1.0, float("inf"), float("inf")), "float32", (4,))
    ({}, '{"max": "inf", "min": -1.0, "mean": "inf", "norm": "inf"}')

    Args:
        numbers: max, min, mean, norm; whatever is no number is unknown.
        dtype: of the tensor, without prefix.
        shape: of the tensor.
    """
    known = {name: value for name, number in zip(NAMES, numbers, strict=False) if (value := _number(number)) is not None}
    if not known:
        return {}, None
    extremes = known.get("max", math.nan) - known.get("min", math.nan)
    if dtype is None or shape is None or dtype.startswith("complex") or not math.isfinite(extremes):  # complex: of magnitudes
        return {}, _told(known)
    if any(is_mask(known[name], dtype) for name in ("max", "min")):
        return {}, _told(known)
    columns = {"max": known["max"], "min": known["min"], "n_nan": 0, "n_posinf": 0, "n_neginf": 0}
    if math.isfinite(known.get("mean", math.nan)):
        columns["mean"] = known["mean"]
    if math.isfinite(known.get("norm", math.nan)):
        columns["l2"] = abs(known["norm"])  # of a scalar the tools give the value itself
    overflown = any(name in known and not math.isfinite(known[name]) for name in ("mean", "norm"))
    return columns, _told(known) if overflown else None


def _told(known: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else str(value) for name, value in known.items()})


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, str) and value.strip().lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return float(value)
    return None
