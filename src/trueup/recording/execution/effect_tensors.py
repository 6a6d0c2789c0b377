"""The tensors that `effects` follows: what was recorded, what should have been, and how far apart they are in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.anomalies import kinds
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import number, one_line
from trueup.recording.execution.cases import HeldTensor
from trueup.recording.execution.local_error import Distance
from trueup.recording.execution.recorded import RecordedCall, RecordedTensor
from trueup.recording.execution.rounding import Operand


class Untold(Exception):
    """A call could not be executed or followed; the text says why."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A slot that holds other numbers without the anomaly."""

    tensor: RecordedTensor
    without: NDArray[Any]
    """In the recorded shape."""


def with_tensors(call: RecordedCall, given: Mapping[str, RecordedTensor]) -> RecordedCall:
    """Return a call with other tensors in some slots."""
    return replace(call, tensors={**call.tensors, **given}) if given else call


def bad_elements(tensor: RecordedTensor) -> NDArray[np.bool_]:
    """Return which elements are NaN, Inf or the dtype's largest number."""
    if not tensor.kept:
        raise Untold(f"{tensor.slot} was not kept: record with --detail tensor")
    try:
        held = wide(tensor.array())
    except TrueupError as error:
        raise Untold(line_of(error)) from None
    if not is_float(held):
        return np.zeros(held.shape, bool)
    return np.asarray(~np.isfinite(held) | (np.abs(held) == kinds.largest(tensor.dtype)))


def wide(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as float64; integers and complex numbers as they are."""
    if array.dtype.kind in "biuc":
        return array
    return array.astype(np.float64)


def shown(changed: Changed, tensor: RecordedTensor) -> NDArray[Any]:
    """Return what a reader sees of a changed slot: the same memory, perhaps through a view.

    Raises:
        Untold: which of its elements are which cannot be told.
    """
    recorded = wide(tensor.array())
    if tensor.buffer is not None and tensor.buffer == changed.tensor.buffer:
        there, wanted = changed.tensor.positions().reshape(-1), tensor.positions()
        order = np.argsort(there, kind="stable")
        at = np.minimum(np.searchsorted(there[order], wanted), len(order) - 1)
        known = there[order][at] == wanted
        return np.where(known, changed.without.reshape(-1)[order][at], recorded)
    before = wide(changed.tensor.array()).reshape(-1)
    if before.size == recorded.size and np.array_equal(before, recorded.reshape(-1), equal_nan=is_float(recorded)):
        return changed.without.reshape(recorded.shape)
    raise Untold("it reads a part of the memory that cannot be told from the rest")


def floored(a: NDArray[Any], b: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return ``b``, but what lies within the smallest number of the dtype of ``a`` as ``a``: it would be rounded away."""
    limits = kinds.limits(dtype) if a.dtype.kind == "f" else None
    if limits is None:
        return b
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(a - b) <= limits[2], a, b)


def is_float(array: NDArray[Any]) -> bool:
    """Tell whether an array holds floating or complex numbers."""
    return array.dtype.kind in "fc"


def operand(tensor: RecordedTensor) -> Operand:
    """Return a tensor's numbers, as rounding is told by them."""
    l2 = tensor.numbers["l2"]
    if isinstance(tensor, HeldTensor) and tensor.kept:
        finite = tensor.array()[np.isfinite(tensor.array())] if is_float(tensor.array()) else np.zeros(0)
        l2 = float(np.linalg.norm(finite.astype(np.float64)))
    return Operand(tensor.slot, tensor.dtype, tensor.shape, 0.0 if l2 is None or np.isnan(l2) else l2)


# ---------------------------------------------------------------- words
def sizes(changed: Changed) -> str:
    """Say how far apart the recorded and the intended numbers are."""
    recorded = wide(changed.tensor.array())
    if changed.tensor.numel == 1:
        return f"{_word(changed.without.reshape(-1)[0])} and not {_word(recorded.reshape(-1)[0])}"
    distance = Distance.of(changed.without, recorded)
    if distance.disagreeing:
        return f"finite in {distance.disagreeing:,} elements that were recorded as NaN or Inf"
    return f"off by {distance.relative:.1%} of its norm"


def _word(value: Any) -> str:
    wide = float(value)
    return number(wide) if np.isfinite(wide) else {True: "NaN", False: "Inf"}[bool(np.isnan(wide))]


def name_of(call: RecordedCall) -> str:
    """Name a call: ``scope/op``."""
    return one_line(f"{call.key.scope}/{call.key.op}" if call.key.scope else call.key.op)


def line_of(error: BaseException) -> str:
    """Return what an exception says, in one line."""
    return " ".join(str(error).split())
