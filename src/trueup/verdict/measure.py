"""How far apart the two sides of each matched slot are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trueup.kernels import distance
from trueup.model import NUMBERS
from trueup.verdict.streams import Array, Row, Stream

Method = Literal["digest", "tensor", "sketch", "value", "none"]
Payload = Callable[[str, str], Array | None]
"""Returns the tensor that a record names, None where it is lost."""

COUNTS = [NUMBERS.index(n) for n in ("n_nan", "n_posinf", "n_neginf")]
L2 = NUMBERS.index("l2")


@dataclass(slots=True)
class SlotError:
    """Distance of one slot: ``absolute`` is ‖candidate − baseline‖, ``norm`` is ‖baseline‖, both over finite elements."""

    slot: str
    baseline: int
    candidate: int
    absolute: float
    norm: float
    method: Method
    reason: str = ""

    @property
    def relative(self) -> float:
        """``absolute / norm``; 0 where both are zero, Inf where only the baseline is, NaN where not measured."""
        if self.absolute == 0:
            return 0.0
        if np.isnan(self.absolute):
            return float("nan")
        return self.absolute / self.norm if self.norm > 0 else float("inf")


@dataclass(slots=True)
class Measured:
    """A matched call with the errors of its slots."""

    baseline: Row
    candidate: Row
    slots: dict[str, SlotError]
    arguments: tuple[str | None, str | None] | None
    """The two sides' non-tensor arguments where they differ."""
    one_sided: tuple[str, ...]
    """Slots that only one side has."""


def measure(
    pairs: list[tuple[Row, Row]], baseline: Stream, candidate: Stream, payloads: tuple[Payload, Payload]
) -> list[Measured]:
    """Measure all slots of all pairs: digests first, then payloads where both sides have them, else sketches."""
    index = [
        (n, slot, k, c.slots[slot])
        for n, (b, c) in enumerate(pairs)
        for slot, k in b.slots.items()
        if slot != "arguments" and slot in c.slots
    ]
    errors = _errors(index, baseline, candidate, payloads)
    slots: list[dict[str, SlotError]] = [{} for _ in pairs]
    for (n, slot, _, _), error in zip(index, errors, strict=True):
        slots[n][slot] = error
    return [
        Measured(b, c, slots[n], _arguments(b, c, baseline, candidate), tuple(sorted(set(b.slots) ^ set(c.slots) - {"arguments"})))
        for n, (b, c) in enumerate(pairs)
    ]  # fmt: skip


def _arguments(b: Row, c: Row, baseline: Stream, candidate: Stream) -> tuple[str | None, str | None] | None:
    sides = tuple(
        None if (k := row.slots.get("arguments")) is None else stream.value[k]
        for row, stream in ((b, baseline), (c, candidate))
    )
    return None if sides[0] == sides[1] else (sides[0], sides[1])


def _errors(
    index: list[tuple[int, str, int, int]], baseline: Stream, candidate: Stream, payloads: tuple[Payload, Payload]
) -> list[SlotError]:
    kb = np.array([k for _, _, k, _ in index], dtype=np.int64)
    kc = np.array([k for _, _, _, k in index], dtype=np.int64)
    distances = distance(baseline.sketch[kb], candidate.sketch[kc]) if index else np.empty(0)
    norms = baseline.numbers[kb, L2] if index else np.empty(0)
    counts = np.asarray((baseline.numbers[kb][:, COUNTS] != candidate.numbers[kc][:, COUNTS]).any(axis=1)) if index else []
    errors = []
    for n, (_, slot, b, c) in enumerate(index):
        error = SlotError(slot, b, c, float("nan"), float(norms[n]), "none")
        _judge_one(error, baseline, candidate, payloads, float(distances[n]), bool(counts[n]))
        errors.append(error)
    return errors


def _judge_one(
    error: SlotError, baseline: Stream, candidate: Stream, payloads: tuple[Payload, Payload], sketched: float, counts: bool
) -> None:
    b, c = error.baseline, error.candidate
    digests = baseline.digest[b], candidate.digest[c]
    same_shape = baseline.shape[b] == candidate.shape[c]
    if not same_shape and baseline.numel[b] != candidate.numel[c]:
        error.reason = f"shapes differ: {baseline.shape[b]} and {candidate.shape[c]}"
    elif digests[0] is not None and digests[0] == digests[1] and baseline.dtype[b] == candidate.dtype[c]:
        error.absolute, error.method = 0.0, "digest"
        if np.isnan(error.norm):
            error.norm = 0.0
    elif (tensors := _tensors(payloads, baseline.payload[b], candidate.payload[c])) is not None:
        _from_tensors(error, *tensors)
    elif not np.isnan(sketched):
        error.absolute, error.method = sketched, "sketch"
        if counts:
            error.absolute, error.reason = float("inf"), "NaN or Inf counts differ"
        elif np.isnan(error.norm):  # no finite element on the baseline
            error.norm = 0.0
    elif digests[0] is not None and digests[1] is not None:
        error.absolute, error.method, error.reason = float("inf"), "digest", "digests differ; how much is not recorded"
    else:
        error.reason = "no statistics on both sides"


def _tensors(
    payloads: tuple[Payload, Payload], b: tuple[str, str] | None, c: tuple[str, str] | None
) -> tuple[Array, Array] | None:
    """Return both sides' bytes, None unless both are there."""
    if b is None or c is None:
        return None
    first, second = payloads[0](*b), payloads[1](*c)
    return None if first is None or second is None else (first, second)


def _from_tensors(error: SlotError, baseline: Array, candidate: Array) -> None:
    error.method = "tensor"
    b, c = (_float(a) for a in (baseline, candidate))
    with np.errstate(all="ignore"):
        finite_b, finite_c = np.isfinite(b), np.isfinite(c)
        nonfinite_equal = np.array_equal(finite_b, finite_c) and np.array_equal(
            b[~finite_b], c[~finite_c], equal_nan=b.dtype.kind != "c"
        )
        error.norm = float(np.linalg.norm(b[finite_b]))
        if nonfinite_equal:
            error.absolute = float(np.linalg.norm(c[finite_b] - b[finite_b]))
        else:
            error.absolute, error.reason = float("inf"), "NaN or Inf in different places"


def _float(array: Array) -> Array:
    flat: Array = np.asarray(array).reshape(-1)
    return flat if flat.dtype.kind == "c" else flat.astype(np.float64)


def equal_values(first: Any, second: Any) -> bool:
    """Tell whether two decoded arguments are the same, floats to the last digits of a printed double."""
    if isinstance(first, float) or isinstance(second, float):
        try:
            return bool(np.isclose(float(first), float(second), rtol=1e-12, atol=0, equal_nan=True))
        except (TypeError, ValueError):
            return bool(first == second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal_values(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal_values, first, second))
    return bool(first == second)
