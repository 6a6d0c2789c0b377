"""How far apart the two sides of each matched slot are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trueup.kernels import distance
from trueup.model import NUMBERS
from trueup.verdict.criteria import normalised
from trueup.verdict.streams import Array, Place, Row, Stream

Method = Literal["digest", "tensor", "sketch", "value", "none"]
Payload = Callable[[str, str, "tuple[int, ...] | None"], Array | None]
"""Returns the tensor that a record names, None where it is lost."""

COUNTS = [NUMBERS.index(n) for n in ("n_nan", "n_posinf", "n_neginf")]
SATURATED = NUMBERS.index("n_saturated")
L2 = NUMBERS.index("l2")

INCIDENTAL = frozenset({"group", "group_desc", "async_op", "tag"})
"""What a collective is told beside its ranks: names that a run gives its groups, and when to wait."""

UNSIZED = "digests differ; how much is not recorded"
"""Reason of an infinite error that may be a single rounding."""


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

    @property
    def unsized(self) -> bool:
        """Whether all that is known is that the bytes differ."""
        return self.reason == UNSIZED


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
        if slot != "arguments" and slot in c.slots and not _is_compound(slot, b, c, baseline, candidate)
    ]
    errors = _errors(index, baseline, candidate, payloads)
    slots: list[dict[str, SlotError]] = [{} for _ in pairs]
    for (n, slot, _, _), error in zip(index, errors, strict=True):
        slots[n][slot] = error
    return [
        Measured(b, c, slots[n], _arguments(b, c, baseline, candidate), _one_sided(b, c))
        for n, (b, c) in enumerate(pairs)
    ]


def _is_compound(slot: str, b: Row, c: Row, baseline: Stream, candidate: Stream) -> bool:
    """Tell whether both sides recorded a slot by its parts only (a sparse tensor by values and indices): those are measured."""
    sides = ((baseline, b), (candidate, c))
    if any(stream.digest[row.slots[slot]] is not None or stream.is_measured(row.slots[slot]) for stream, row in sides):
        return False
    known = [(stream.shape[row.slots[slot]], stream.dtype[row.slots[slot]]) for stream, row in sides]
    return known[0] == known[1] and all(any(s.startswith(f"{slot}.") for s in row.slots) for _, row in sides)


def _one_sided(b: Row, c: Row) -> tuple[str, ...]:
    if b.slots.keys() == c.slots.keys():
        return ()
    return tuple(sorted((b.slots.keys() ^ c.slots.keys()) - {"arguments"}))


def _arguments(b: Row, c: Row, baseline: Stream, candidate: Stream) -> tuple[str | None, str | None] | None:
    sides = tuple(
        None if (k := row.slots.get("arguments")) is None else stream.value[k]
        for row, stream in ((b, baseline), (c, candidate))
    )
    if sides[0] == sides[1] or (c.phase == "collective" and _told(sides[0]) == _told(sides[1])):
        return None
    return sides[0], sides[1]


def _told(arguments: str | None) -> dict[str, Any] | str | None:
    """Return the arguments of a collective without those that do not matter to its result."""
    try:
        told = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return {name: value for name, value in told.items() if name not in INCIDENTAL} if isinstance(told, dict) else arguments


def _errors(
    index: list[tuple[int, str, int, int]], baseline: Stream, candidate: Stream, payloads: tuple[Payload, Payload]
) -> list[SlotError]:
    kb = np.array([k for _, _, k, _ in index], dtype=np.int64)
    kc = np.array([k for _, _, _, k in index], dtype=np.int64)
    distances = distance(baseline.sketch[kb], candidate.sketch[kc])
    norms = baseline.numbers[kb, L2]
    counts = np.any(baseline.numbers[kb][:, COUNTS] != candidate.numbers[kc][:, COUNTS], axis=1)
    errors = []
    for n, (_, slot, b, c) in enumerate(index):
        error = SlotError(slot, b, c, float("nan"), float(norms[n]), "none")
        _judge_one(error, baseline, candidate, payloads, float(distances[n]), bool(counts[n]))
        errors.append(error)
    return errors


def _judge_one(
    error: SlotError,
    baseline: Stream,
    candidate: Stream,
    payloads: tuple[Payload, Payload],
    sketched: float,
    counts: bool,
) -> None:
    b, c = error.baseline, error.candidate
    digests = baseline.digest[b], candidate.digest[c]
    both = digests[0] is not None and digests[1] is not None
    same_dtype = baseline.dtype[b] == candidate.dtype[c]
    payload = baseline.payload[b], candidate.payload[c]
    if baseline.shape[b] != candidate.shape[c] and sizes(baseline.shape[b]) != sizes(candidate.shape[c]):
        error.reason = f"shapes differ: {baseline.shape[b]} and {candidate.shape[c]}"
    elif both and digests[0] == digests[1] and same_dtype:
        error.absolute, error.method = 0.0, "digest"
        if np.isnan(error.norm):
            error.norm = 0.0
    elif (tensors := _tensors(payloads, payload[0], payload[1])) is not None:
        _from_tensors(error, *tensors)
    elif not np.isnan(sketched):
        _from_sketches(error, sketched, counts, surely=both and same_dtype and _is_discrete(baseline.dtype[b]))
    elif both and not (baseline.is_measured(b) and candidate.is_measured(c)):
        _from_digests(error, baseline.dtype[b], candidate.dtype[c])
    elif baseline.is_measured(b) and candidate.is_measured(c):
        error.reason = "a sum of the sketch left the range of float64; capture with detail tensor"
    else:
        error.reason = "no statistics on both sides"


def sizes(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return a shape without its sizes of one, which devices add and drop at will."""
    return None if shape is None else tuple(size for size in shape if size != 1)


def _is_discrete(dtype: str | None) -> bool:
    return dtype is not None and dtype.startswith(("int", "uint", "bool"))


def _from_sketches(error: SlotError, sketched: float, counts: bool, *, surely: bool) -> None:
    """Take the estimate; ``surely``: the digests of two integer tensors differ, so that the distance is at least 1."""
    error.absolute, error.method = max(sketched, 1.0) if surely else sketched, "sketch"
    if counts:
        error.absolute, error.reason = float("inf"), "NaN or Inf counts differ"
    elif np.isnan(error.norm):  # no finite element on the baseline
        error.norm = 0.0


def _from_digests(error: SlotError, baseline: str | None, candidate: str | None) -> None:
    if baseline != candidate:
        error.reason = f"dtypes differ ({baseline} and {candidate}) and only digests were recorded"
    else:
        error.absolute, error.method, error.reason = float("inf"), "digest", UNSIZED


def _tensors(
    payloads: tuple[Payload, Payload], b: Place | None, c: Place | None
) -> tuple[Array, Array] | None:
    """Return both sides' bytes, None unless both are there."""
    if b is None or c is None:
        return None
    first, second = payloads[0](*b), payloads[1](*c)
    return None if first is None or second is None else (first, second)


def _from_tensors(error: SlotError, baseline: Array, candidate: Array) -> None:
    error.method = "tensor"
    b, c = (_reals(a) for a in (baseline, candidate))
    with np.errstate(all="ignore"):
        finite = np.isfinite(b)
        error.norm = float(np.linalg.norm(b[finite]))
        if np.array_equal(finite, np.isfinite(c)) and np.array_equal(b[~finite], c[~finite], equal_nan=True):
            error.absolute = float(np.linalg.norm(c[finite] - b[finite]))
        else:
            error.absolute, error.reason = float("inf"), "NaN or Inf in different places"
        if error.absolute == 0 and _is_discrete(baseline.dtype.name) and baseline.dtype == candidate.dtype:
            error.absolute = float(np.sqrt(np.count_nonzero(baseline != candidate)))  # beyond 2**53


def _reals(array: Array) -> Array:
    """Return the elements as float64, a complex one as two."""
    flat: Array = np.ascontiguousarray(array).reshape(-1)
    return (flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat).astype(np.float64)


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


OVERWRITING = frozenset({
    "copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential", "log_normal", "cauchy", "geometric",
    "_foreach_copy", "_foreach_zero",
})  # fmt: skip
"""In-place operators whose result does not depend on what was there before."""


def is_overwritten(error: SlotError, call: Measured) -> bool:
    """Tell whether a slot is memory that the call only writes to: what was there before does not matter."""
    name = call.candidate.op
    return error.slot == "input.0" and name.endswith("_") and normalised(name) in OVERWRITING
