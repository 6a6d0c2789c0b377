"""What a healthy run in a wider dtype has that a narrower one could not hold: ask before migrating.

A result overflows if its largest magnitude is beyond the narrower dtype's; a result of the forward pass underflows if its typical
magnitude (root mean square of what is not zero) is below the dtype's smallest normal number. A number that somebody asked for (it
stands among the arguments of the call that made it) and an infinity or largest number of the wider dtype is a mask, which the
narrower dtype takes as well: -1e9 becomes -Inf.

Small gradients are no finding: every healthy training has them, and a loss scale lifts them. `Gradients` says which. An optimizer's
results are to stay in float32 (Micikevicius et al. 2018, Mixed Precision Training, section 3.1), so they are not asked.
"""

from __future__ import annotations

import math

import numpy as np

from trueup.analysis.anomalies import kinds
from trueup.analysis.anomalies.describing import Sites, led_to, place_of, slots_of
from trueup.analysis.anomalies.suggesting import policy_row
from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, is_output
from trueup.foundation.facts.anomaly import Anomaly
from trueup.foundation.facts.operators import has
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import counted, number

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
WIDER = {name: ("float64", "float32", *(["bfloat16"] if name != "bf16" else []), *(["float16"] if "8" in name else []))
         for name in DTYPES}  # fmt: skip
MOST = 50
"""Calls of one rank and step that are described."""


def dtype_named(name: str) -> str:
    """Return the dtype that an option names.

    Raises:
        TrueupError: it is none of those.
    """
    if name not in DTYPES:
        raise TrueupError(
            f"--would-overflow cannot be read.\n  expected: one of {', '.join(DTYPES)}\n  got:      {name!r}\n"
            "  next:     correct it"
        )
    return DTYPES[name]


def would_overflow(stream: Stream, narrower: str, sites: Sites) -> list[Anomaly]:
    """Return the calls of a rank and step that make, of inputs which fit a narrower dtype, a result that does not."""
    dtype = dtype_named(narrower)
    found = kinds.limits(dtype)
    assert found is not None
    largest, normal, _ = found
    wide = np.isin(stream.dtype, [stream.names.number(name) for name in WIDER[narrower]])
    magnitude = np.fmax(np.abs(stream.number("min")), np.abs(stream.number("max")))
    masks = np.nan_to_num(stream.number("n_saturated")) + np.nan_to_num(stream.counts).sum(axis=1) > 0
    over = wide & (magnitude > largest) & ~masks
    gives = stream.names.table(is_output)[stream.slot]
    with np.errstate(divide="ignore", invalid="ignore"):
        filled = stream.numel - np.nan_to_num(stream.number("n_zero"))
        rms = stream.l2 / np.sqrt(np.maximum(filled, 1))
    forward = np.isin(stream.phase, [stream.names.number(name) for name in ("forward", "recompute")])[stream.call]
    over &= ~(stream.phase == stream.names.number("optimizer"))[stream.call]
    under = wide & forward & gives & (rms < normal) & (rms > 0)
    asked = _asked_for(stream, over & gives, magnitude)
    made: list[Anomaly] = []
    for kind, slots in (("would_overflow", np.flatnonzero(over & gives & ~asked)), ("would_underflow", np.flatnonzero(under))):
        bad = over if kind == "would_overflow" else under
        calls = _first_calls(stream, slots, bad)
        calls = [c for c in calls if not has(stream.names.name(int(stream.op[c])) or "", "view")]
        for call in calls[:MOST]:
            made.append(_described(stream, call, kind, bad, dtype, (largest, normal), (magnitude, rms), sites, len(calls)))
    return made


class Gradients:
    """Typical magnitudes of the gradients of a run, and the loss scale that a narrower dtype asks for."""

    def __init__(self) -> None:
        self._rms: list[Array] = []
        self._largest = 0.0

    def add(self, stream: Stream, narrower: str) -> None:
        """Take the gradients of a rank and step.

        Raises:
            TrueupError: the dtype is none of those that are known.
        """
        dtype_named(narrower)
        wide = np.isin(stream.dtype, [stream.names.number(name) for name in WIDER[narrower]])
        backward = (stream.phase == stream.names.number("backward"))[stream.call]
        slots = np.flatnonzero(wide & backward & stream.names.table(is_output)[stream.slot] & (stream.l2 > 0))
        filled = np.maximum(stream.numel[slots] - np.nan_to_num(stream.number("n_zero")[slots]), 1)
        self._rms.append(stream.l2[slots] / np.sqrt(filled))
        magnitude = np.fmax(np.abs(stream.number("min")[slots]), np.abs(stream.number("max")[slots]))
        self._largest = max(self._largest, float(np.nanmax(magnitude, initial=0.0)))

    def said(self, narrower: str) -> str:
        """Say how many are too small and which loss scale lifts nine of ten; empty where a tenth of them or less is."""
        dtype = dtype_named(narrower)
        limits = kinds.limits(dtype)
        rms = np.concatenate(self._rms) if self._rms else np.empty(0)
        if limits is None or not len(rms) or not (tenth := float(np.quantile(rms, 0.1))) < limits[1]:
            return ""
        power = math.ceil(math.log2(limits[1] / tenth))
        room = math.floor(math.log2(limits[0] / self._largest)) if self._largest > 0 else power
        small = int(np.count_nonzero(rms < limits[1]))
        text = f"{small:,} of {counted(len(rms), 'gradient')} are typically below the smallest normal {dtype}"
        lifts = f"{text}: a loss scale of 2**{power} lifts nine of ten"
        return lifts if power <= room else f"{lifts}, and beyond 2**{room} the largest overflows"


def _asked_for(stream: Stream, over: Array, magnitude: Array) -> Array:
    """Tell which results have as their largest a number of their call's arguments (a fill), or only pass such a number on."""
    found = np.zeros(len(stream.slot), bool)
    for k in np.flatnonzero(over).tolist():
        call = int(stream.call[k])
        size = float(magnitude[k])
        if any(abs(abs(one) - size) <= 0.01 * size for one in kinds.numbers_of(stream.value(int(stream.arguments[call])))):
            found[k] = True
            continue
        for j in range(*stream.starts[call : call + 2].tolist()):
            made = _maker(stream, j)
            if made != NONE and found[made]:
                found[k] = True
    return found


def _maker(stream: Stream, j: int) -> int:
    call = stream.find(int(stream.producer[j])) if stream.producer[j] >= 0 else NONE
    if call < 0:
        return NONE
    return next((i for i in range(*stream.starts[call : call + 2].tolist()) if stream.slot[i] == stream.producer_slot[j]), NONE)


def _first_calls(stream: Stream, slots: Numbers, bad: Array) -> list[int]:
    """Return calls of which no input is out of range yet, and none inside them is the one; in order."""
    reads = ~stream.names.table(is_output)[stream.slot]
    carried = np.zeros(len(stream), bool)
    carried[stream.call[bad & reads]] = True
    calls = [c for c in np.unique(stream.call[slots]).tolist() if not carried[c]]
    chosen = set(calls)
    around = {int(stream.parents[c]) for c in calls}
    pending = set(around)
    while pending:
        pending = {int(stream.parents[c]) for c in pending if c != NONE} - around
        around |= pending
    return [c for c in calls if c not in around or c not in chosen]


def _described(
    stream: Stream, call: int, kind: str, bad: Array, dtype: str, limits: tuple[float, float], sizes: tuple[Array, Array],
    sites: Sites, calls: int,
) -> Anomaly:  # fmt: skip
    slots = [k for k in range(*stream.starts[call : call + 2].tolist()) if bad[k]]
    place = place_of(stream, call, sites)
    if kind == "would_overflow":
        size = max(float(sizes[0][k]) for k in slots)
        what = f"its result reaches {number(size)}, beyond the largest {dtype} ({number(limits[0])})"
    else:
        size = min(float(sizes[1][k]) for k in slots)
        what = f"its result is typically {number(size)}, below the smallest normal {dtype} ({number(limits[1])})"
    name = f"{place.name} ({' / '.join(n for n in dict.fromkeys((place.api, place.op)) if n)})"
    bits = np.zeros(len(stream.slot), np.uint8)
    made = Anomaly(
        "would_overflow" if kind == "would_overflow" else "would_underflow", place, "high" if kind == "would_overflow" else "low",
        f"{name}: {what}", slots_of(stream, call, bits), led_to(stream, call, bits, sites), matters="unknown",
        because=(
            "the run itself is healthy; run this call in float32 when the rest is narrower, or scale what goes into it"
            if kind == "would_overflow" else "the run itself is healthy; a wider dtype holds what this call gives"
        ),
        notes=(f"{calls:,} such calls in this rank and step",) if calls > 1 else (),
    )  # fmt: skip
    return _replace_policy(made)


def _replace_policy(made: Anomaly) -> Anomaly:
    import dataclasses

    row = policy_row(made)
    return dataclasses.replace(made, policy=row.replace('"float64"', '"float32"'))
