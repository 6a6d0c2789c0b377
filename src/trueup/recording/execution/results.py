"""What a replay says of two results: drawn alike or not, the same bits or not, and the outcome of a call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.recording.execution.local_error import Distance, LocalError, thresholds
from trueup.recording.execution.outcomes import Outcome
from trueup.recording.execution.recorded import RecordedCall, RecordedTensor
from trueup.recording.execution.rounding import Operation

MASK = 1e30
"""Magnitude from which an element is a mask: left out of norms."""
SAME_DRAW = 0.9
"""Cosine of a random operator's result and the truth from which both drew the same numbers: independent draws of a mask that keeps
nine of ten elements of a centred tensor have 0.9 at most; the same mask with another scale has 1."""


def of_one_draw(
    exact: NDArray[Any], target: NDArray[Any], known: NDArray[Any] | None, missing: str
) -> tuple[NDArray[Any] | None, NDArray[Any] | None, str]:  # fmt: skip
    """Drop the truth, or the baseline, of a random operator where it drew other numbers than the target."""
    if known is not None and not parallel(exact, known):
        if not parallel(exact, target):
            return None, known, missing or "float64 draws other random numbers"
        known = None
    if not parallel(exact, target):
        return None, known, missing or "float64 draws other random numbers"
    return exact, known, missing


def parallel(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two tensors point the same way, so that a scale or rounding is all that differs."""
    x, y = (np.asarray(v).reshape(-1).astype(np.float64) for v in (a, b))
    kept = np.isfinite(x) & np.isfinite(y) & (np.abs(x) < MASK) & (np.abs(y) < MASK)
    x, y = x[kept], y[kept]
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    zeros = bool(x.size) and float(np.mean((x == 0) != (y == 0))) < 0.01
    return norms == 0 or (float(x @ y) > SAME_DRAW * norms and zeros)


def untold(operation: Operation, why: str) -> LocalError:
    """Return that nothing can be told of an output, and why."""
    kind = thresholds().of(operation)
    return LocalError("could not tell", math.nan, 0.0, math.nan, math.nan, math.nan, f"{kind.name}: no truth", kind.origin, why)


def same_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two arrays have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def apart(recorded: NDArray[Any], found: NDArray[Any]) -> str:
    """Say how two results differ."""
    if recorded.dtype != found.dtype or recorded.shape != found.shape:
        return f"{found.dtype.name} {list(found.shape)} for {recorded.dtype.name} {list(recorded.shape)}"
    return f"relative L2 error {Distance.of(recorded, found).relative:.1e}"


def outcome(call: RecordedCall, **found: Any) -> Outcome:
    """Return the outcome of a call."""
    key = call.key
    overload = (call.invocation or {}).get("overload")
    overload = overload if isinstance(overload, str) and overload != "default" else ""
    shapes = shapes_of(call.inputs)
    return Outcome(key.rank, key.step, call.seq, key.level, key.phase, key.scope, key.op, overload, key.ordinal, shapes, **found)


def shapes_of(inputs: Mapping[str, RecordedTensor]) -> str:
    """Return dtypes and shapes of the inputs: ``float32 [8,128] [128,512]``."""
    parts: list[str] = []
    dtype = ""
    for recorded in list(inputs.values())[:6]:
        if recorded.dtype != dtype:
            dtype = recorded.dtype
            parts.append(dtype)
        parts.append(f"[{','.join(map(str, recorded.shape))}]")
    more = len(inputs) - 6
    return " ".join([*parts, *([f"and {more} more"] if more > 0 else [])])
