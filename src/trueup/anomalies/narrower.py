"""What a healthy run in a wider dtype has that a narrower one could not hold: ask before migrating.

A result overflows if its largest magnitude is beyond the narrower dtype's; it underflows if its typical magnitude (root mean
square)
is below the dtype's smallest normal number. A number that somebody asked for (it stands among the arguments of the call that
made it)
and an infinity or largest number of the wider dtype is a mask, which the narrower dtype takes as well: -1e9 becomes -Inf.
"""

from __future__ import annotations

import numpy as np

from trueup.anomalies import kinds
from trueup.anomalies.describing import Sites, led_to, place_of, slots_of
from trueup.anomalies.flow import VIEWS
from trueup.anomalies.found import Anomaly
from trueup.anomalies.suggesting import policy_row
from trueup.model import TrueupError
from trueup.report.wording import number
from trueup.verdict.names import normalised
from trueup.verdict.streams import NONE, Array, Numbers, Stream, is_output

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
    under = wide & gives & (rms < normal) & (rms > 0)
    asked = _asked_for(stream, over & gives, magnitude)
    made: list[Anomaly] = []
    for kind, slots in (("would_overflow", np.flatnonzero(over & gives & ~asked)), ("would_underflow", np.flatnonzero(under))):
        bad = over if kind == "would_overflow" else under
        calls = _first_calls(stream, slots, bad)
        calls = [c for c in calls if normalised(stream.names.name(int(stream.op[c])) or "") not in VIEWS]
        for call in calls[:MOST]:
            made.append(_described(stream, call, kind, bad, dtype, (largest, normal), (magnitude, rms), sites, len(calls)))
    return made


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
            if kind == "would_overflow" else "the run itself is healthy; a loss scale lifts gradients, a wider dtype holds the rest"
        ),
        notes=(f"{calls:,} such calls in this rank and step",) if calls > 1 else (),
    )  # fmt: skip
    return _replace_policy(made)


def _replace_policy(made: Anomaly) -> Anomaly:
    import dataclasses

    row = policy_row(made)
    return dataclasses.replace(made, policy=row.replace('"float64"', '"float32"'))
