"""What each mode of tfdbg2 keeps of a tensor; meanings: tensorflow/core/protobuf/debug_event.proto, TensorDebugMode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trueup.exchange.readers.dump import UnreadableError
from trueup.exchange.readers.tensor_proto import array_of, dtype_of, shape_of

FULL_TENSOR = 7
MODES = {
    1: "NO_TENSOR", 2: "CURT_HEALTH", 3: "CONCISE_HEALTH", 4: "FULL_HEALTH", 5: "SHAPE", 7: "FULL_TENSOR",
    8: "REDUCE_INF_NAN_THREE_SLOTS",
}  # fmt: skip
LACKS = {
    1: "NO_TENSOR keeps nothing of a tensor: two such runs are compared by the calls that they make",
    2: "CURT_HEALTH keeps of a tensor whether it has NaN or Inf, counted as one NaN: whether two runs agree cannot be told",
    3: "CONCISE_HEALTH counts NaN and Inf of a tensor: whether two runs agree cannot be told",
    4: "FULL_HEALTH counts NaN, Inf and zeros of a tensor: whether two runs agree cannot be told",
    5: "SHAPE keeps dtype and shape of a tensor: whether two runs agree in numbers cannot be told",
    8: "REDUCE_INF_NAN_THREE_SLOTS keeps which of NaN and Inf a tensor has, counted as one: whether two runs agree cannot be told",
}
_DTYPE_AND_RANK = {4: (2, 3), 5: (1, 2)}
"""Places of the dtype and of the number of dimensions."""
_SHAPE_AT, _SHAPE_SIZES = 4, 6
MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a tensor without its elements."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)


def kept(tensor: Any, mode: int) -> Kept:
    """Return what a mode keeps, of the tensor in which it gives it.

    Raises:
        UnreadableError: it is not what the mode gives.
    """
    if mode == FULL_TENSOR:
        return Kept(dtype_of(tensor.dtype), shape_of(tensor))
    if mode not in MODES or mode == 1 or not tensor.dtype:  # of what is no float the health modes keep nothing
        return Kept()
    values = [float(one) for one in array_of(tensor).reshape(-1)[:16]]
    if not all(math.isfinite(one) for one in values if mode != 8):
        raise UnreadableError(f"{MODES[mode]} gives numbers that are none")
    try:
        return _kept(values, mode)
    except IndexError:
        raise UnreadableError(f"{MODES[mode]} gives more than {len(values)} numbers") from None


def _kept(values: list[float], mode: int) -> Kept:
    if mode == 2:
        return Kept(statistics=_counts(0, 0, values[1]))
    if mode == 8:
        return Kept(statistics=_counts(*(not math.isfinite(values[k]) for k in range(3))))
    if mode == 3:
        return Kept(statistics=_counts(values[2], values[3], values[4]))
    dtype, rank = (int(values[place]) for place in _DTYPE_AND_RANK[mode])
    if not 0 <= rank <= MAX_RANK:
        raise UnreadableError(f"a tensor of {rank} dimensions is none")
    if mode == 5:
        sizes = [int(one) for one in values[_SHAPE_AT : _SHAPE_AT + _SHAPE_SIZES]]
        known = rank <= _SHAPE_SIZES and all(size >= 0 for size in sizes)  # of more dimensions the last six alone are kept
        return Kept(dtype_of(dtype), tuple(sizes[:rank]) if known else None)
    return Kept(dtype_of(dtype), None, _counts(values[5], values[6], values[7]) | {"n_zero": int(values[9])})


def _counts(negative: float, positive: float, nan: float) -> dict[str, float]:
    return {"n_nan": int(nan), "n_posinf": int(positive), "n_neginf": int(negative)}
