"""Bits for what is wrong in a slot: NaN, +Inf, -Inf, the dtype's largest number, or `CAST`: the least or largest integer, which a
cast makes of an infinity (`flow` tells whether one was cast)."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np

from trueup.comparison.graph.streams import Array, Stream
from trueup.foundation.facts.anomaly import CAST, NAN, NEG, POS, SAT
from trueup.foundation.facts.slots import is_output

INF = POS | NEG

INTEGERS = {"int64": 2.0**63, "int32": 2.0**31}  # casting Inf is undefined in C++: x86 gives the least, ARM and GPUs the nearest

SCALED = ("float8", "float6", "float4")
SCALED_SHARE = 0.01
"""Share of elements at the largest number from which a narrow float counts as saturated: formats of 8 bits and fewer are cast with
a scale that puts the largest element there by design (Micikevicius et al. 2022, FP8 Formats for Deep Learning, section 4)."""


def bits_of(stream: Stream) -> Array:
    """Return uint8 ``(slots,)``: what is wrong with each slot, 0 where nothing is or nothing was measured."""
    counts = np.nan_to_num(stream.counts)
    bits = np.zeros(len(stream.slot), np.uint8)
    for column, bit in enumerate((NAN, POS, NEG)):
        bits |= np.where(counts[:, column] > 0, bit, 0).astype(np.uint8)
    saturated = np.nan_to_num(stream.number("n_saturated"))
    scaled = stream.names.table(_is_scaled)[stream.dtype]
    with np.errstate(invalid="ignore", divide="ignore"):
        enough = saturated >= np.where(scaled, SCALED_SHARE * stream.numel, 1)
    bits |= np.where((saturated > 0) & enough, SAT, 0).astype(np.uint8)
    bits |= np.where(_at_the_end(stream), CAST, 0).astype(np.uint8)
    if stream.imported:
        for k, text in enumerate(stream.foreign["foreign_statistics"]):
            bits[k] |= 0 if text is None else _bits_of_text(text)
    return bits


def unmeasured(stream: Stream) -> int:
    """Count floating results with elements but without statistics. Inputs do not count: another call made them, or they are
    memory that the call only writes to, which nobody measures."""
    there = stream.names.table(is_output)[stream.slot] & stream.names.table(_is_floating)[stream.dtype]
    there &= np.nan_to_num(stream.numel) > 0
    told = stream.measured
    if stream.imported:
        told = told | np.array([text is not None for text in stream.foreign["foreign_statistics"]], bool)
    return int(np.count_nonzero(there & ~told))


def _bits_of_text(text: str) -> int:
    """Return the bits of another tool's max and min for a tensor with NaN or Inf; PyTorch gives NaN where one is NaN."""
    try:
        told: Any = json.loads(text)
        top, bottom = float(told["max"]), float(told["min"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return 0
    if np.isnan(top) or np.isnan(bottom):
        return NAN
    return (POS if top == np.inf else NEG if top == -np.inf else 0) | (NEG if bottom == -np.inf else POS if bottom == np.inf else 0)


def _at_the_end(stream: Stream) -> Array:
    """Return which slots of int64 or int32 hold the least or the largest of these."""
    found = np.zeros(len(stream.slot), bool)
    for dtype, end in INTEGERS.items():
        held = stream.dtype == stream.names.number(dtype)
        if held.any():
            found |= held & ((stream.number("min") <= -end) | (stream.number("max") >= end - 1))
    return found


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def limits(dtype: str) -> tuple[float, float, float] | None:
    """Return ``(largest, smallest normal, smallest subnormal)`` of a floating dtype, else None, by ``ml_dtypes.finfo`` (IEEE
    754-2019 for binary16/32/64, OCP 8-bit floating point specification 1.0 for float8)."""
    try:
        found: Any = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    except (TypeError, ValueError):
        return None
    return float(found.max), float(found.smallest_normal), float(found.smallest_subnormal)


def largest(dtype: str) -> float:
    """Return the largest finite number of a dtype; Inf if it is no float."""
    found = limits(dtype)
    return float("inf") if found is None else found[0]


NEAR = 1e-3  # how near to the largest finite number an argument counts as it: what is written for bfloat16 may have been rounded
BOUNDS = tuple(largest(dtype) for dtype in ("float16", "bfloat16", "float32", "float64"))


def asks_for_a_bound(value: str | None) -> bool:
    """Tell whether non-tensor arguments (JSON) hold an infinity, or the largest number of a dtype: somebody asked for it."""
    return any(abs(one) == float("inf") or any(abs(abs(one) / bound - 1) < NEAR for bound in BOUNDS) for one in numbers_of(value))


def numbers_of(value: str | None) -> list[float]:
    """Return the numbers among non-tensor arguments (JSON), at any depth; infinities as such."""
    try:
        pending = [json.loads(value)] if value else []
    except (ValueError, RecursionError):
        return []
    found: list[float] = []
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, str) and one.lower().lstrip("+-") in ("inf", "infinity"):
            found.append(float("inf"))
        elif isinstance(one, (int, float)) and not isinstance(one, bool):
            found.append(_as_float(one))
    return found


def _as_float(one: float) -> float:
    try:
        return float(one)
    except OverflowError:  # an integer of a file
        return float("inf")


def _is_scaled(dtype: str) -> bool:
    return dtype.startswith(SCALED)
