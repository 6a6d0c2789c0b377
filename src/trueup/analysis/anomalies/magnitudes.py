"""Finite numbers in trouble: gradients that underflow, vanish or explode, by layer; and what a narrower dtype could not hold.

The first three are asked of steps without NaN and Inf, with limits that a healthy training never meets. The last is asked of a
healthy run in a wider dtype, before migrating: a result overflows if its largest magnitude exceeds the narrower dtype's; a
forward result underflows if its root mean square without zeros is below the smallest normal number. A number among its call's
arguments, an infinity and the wider dtype's largest number are masks, which fit: -1e9 becomes -Inf. Small gradients are no
finding, as a loss scale lifts them (`Gradients`). Optimizer results are not asked: they stay in float32 (Micikevicius et al.
2018, Mixed Precision Training, section 3.1).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueup.analysis.anomalies import kinds
from trueup.analysis.anomalies.describing import Sites, led_to, place_of, policy_row, slots_of
from trueup.analysis.anomalies.flow import maker
from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, distinct
from trueup.foundation.facts.anomaly import Anomaly, Kind
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import is_output
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import held_by, list_of
from trueup.foundation.words.wording import counted, number

SUBNORMAL_SHARE = 0.5
"""Subnormal share of a step's nonzero gradient elements from which it underflows. In Micikevicius et al. 2018 (Mixed Precision
Training, section 3.2) a network with two thirds below float16's normal numbers did not train without a loss scale."""
ENOUGH = 64  # elements below which a share says nothing
EXPLODES = 1e4  # times by which the norm of a parameter's gradient grows from one recorded step to the next
LARGE = 1e3  # norm below which a gradient has not exploded, however small it was
VANISHES = 1e-12
"""Norm of a layer's gradient over the step's largest: 2**-40, beyond what float32 adds to a weight at one step size."""
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
MOST, NAMED = 1000, 3  # calls that are counted, and named, beside the first


@dataclass(slots=True)
class Magnitudes:
    """Of one rank, from step to step."""

    manifest: Mapping[str, Any] = field(default_factory=dict)  # of the rank: what its optimizers are set to
    before: dict[tuple[str, str, int, str], float] = field(default_factory=dict)
    _found: dict[Kind, Anomaly] = field(default_factory=dict)  # the first of each kind
    # Further calls: every layer shows a too small scale
    _others: defaultdict[Kind, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def step(self, stream: Stream, sites: Sites) -> None:
        """Look at the gradients of a step."""
        slots = _gradients(stream)
        if not len(slots):
            return
        self._underflow(stream, slots, sites)
        self._by_layer(stream, slots, sites)

    def findings(self) -> list[Anomaly]:
        """Return the first call of each kind, with how many others there are."""
        return [self._told(kind, one) for kind, one in self._found.items()]

    def _told(self, kind: Kind, one: Anomaly) -> Anomaly:
        others = list(self._others[kind])
        if not others:
            return one
        shown = ", ".join(others[:NAMED]) + (" ..." if len(others) > NAMED else "")
        return dataclasses.replace(one, notes=(*one.notes, f"likewise in {counted(len(others), 'other call')}: {shown}"))

    def _underflow(self, stream: Stream, slots: Numbers, sites: Sites) -> None:
        narrow = np.isin(stream.dtype[slots], [stream.names.number(name) for name in NARROW])
        chosen = slots[narrow]
        if not len(chosen):
            return
        subnormal = np.nan_to_num(stream.number("n_subnormal")[chosen])
        filled = stream.numel[chosen] - np.nan_to_num(stream.number("n_zero")[chosen])
        share = subnormal.sum() / max(filled.sum(), 1)
        if filled.sum() < ENOUGH or share <= SUBNORMAL_SHARE:
            return  # of one layer it may be rounding: the gradient of a key's bias, which no softmax feels, is zero in exact terms
        for k in chosen[np.argsort(-subnormal, kind="stable")].tolist():
            text = (
                f"{share:.0%} of the elements of this step's {stream.dtype_of(k)} gradients that are not zero are subnormal, most "
                "of them in {slot} of this call: they have lost digits, and what is smaller is zero; raise the loss scale"
            )
            self._add("underflow", stream, k, sites, text)
            break

    def _by_layer(self, stream: Stream, slots: Numbers, sites: Sites) -> None:
        names = stream.names
        after: dict[tuple[str, str, int, str], float] = {}
        largest = float(np.max(stream.l2[slots], initial=0.0))
        for k in slots.tolist():
            call = int(stream.call[k])
            key = (names.name(int(stream.scope[call])) or "", names.name(int(stream.op[call])) or "", int(stream.ordinal[call]),
                   names.name(int(stream.slot[k])) or "")  # fmt: skip
            norm = after[key] = float(stream.l2[k])
            was = self.before.get(key, 0.0)
            if was > 0 and norm >= EXPLODES * was and norm >= LARGE:
                text = f"the norm of {{slot}} went from {number(was)} to {number(norm)} since the last recorded step"
                self._add("explodes", stream, k, sites, text)
            elif 0 < norm < VANISHES * largest and stream.numel[k] >= ENOUGH:
                text = f"the norm of {{slot}} is {number(norm)}, where the largest gradient of the step has {number(largest)}"
                self._add("vanishes", stream, k, sites, text)
        self.before = after

    def _add(self, kind: Kind, stream: Stream, k: int, sites: Sites, text: str) -> None:
        call = int(stream.call[k])
        place = place_of(stream, call, sites)
        name = f"{place.scope}/{place.op}" if place.scope else place.op
        if kind in self._found:
            first = self._found[kind].place
            if (first.scope, first.op) != (place.scope, place.op) and len(self._others[kind]) < MOST:
                self._others[kind][name] = None
            return
        slot = stream.names.name(int(stream.slot[k])) or ""
        bits: Array = np.zeros(len(stream.slot), np.uint8)
        said = f"{place.name} ({place.op}): {text.format(slot=slot)}"
        because = "gradients of this size may or may not hold the training up: compare the loss with that of a float32 run"
        because = self._clipped() if kind == "explodes" else because
        self._found[kind] = Anomaly(kind, place, "low", said, slots_of(stream, call, bits), matters="unknown", because=because)

    def _clipped(self) -> str:
        """Say whether what explodes is clipped, and what to do."""
        optimizers = list_of(held_by(self.manifest), "optimizers")
        clips = list(dict.fromkeys(str(one["clipping"]) for one in optimizers if one.get("clipping")))
        if clips:
            return f"gradients are clipped ({', '.join(clips)}), so the step stays small: if the loss does not fall, learn slower"
        seen = "no clipping was recorded" if optimizers else "whether gradients are clipped was not recorded"
        return f"{seen}: clip them, for instance their norm at 1, or lower the learning rate, and see whether the loss falls"


def _gradients(stream: Stream) -> Numbers:
    """Return the gradients that backward calls give, at the level closest to the layers: api, else module, else aten."""
    backward = stream.phase == stream.names.number("backward")
    gives = stream.names.table(is_output)[stream.slot] & stream.measured & ~np.isnan(stream.l2)
    for level in ("api", "module", "aten"):
        chosen = backward & (stream.level == stream.names.number(level))
        slots = np.flatnonzero(chosen[stream.call] & gives)
        if len(slots):
            return np.asarray(slots, np.int64)
    return np.empty(0, np.int64)


DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
WIDER = {name: ("float64", "float32", *(["bfloat16"] if name != "bf16" else []), *(["float16"] if "8" in name else []))
         for name in DTYPES}  # fmt: skip
MOST_DESCRIBED = 50  # calls of one rank and step that are described


def dtype_named(name: str) -> str:
    """Return the dtype that an option names; raises TrueupError if it is none of those."""
    if name not in DTYPES:
        raise TrueupError(
            f"--would-overflow cannot be read.\n  expected: one of {', '.join(DTYPES)}\n  got:      {name!r}\n"
            "  next:     correct it"
        )
    return DTYPES[name]


def would_overflow(stream: Stream, narrower: str, sites: Sites) -> list[Anomaly]:
    """Return the calls of a rank and step whose inputs fit a narrower dtype and whose result does not."""
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
        for call in calls[:MOST_DESCRIBED]:
            made.append(_described(stream, call, kind, bad, dtype, (largest, normal), (magnitude, rms), sites, len(calls)))
    return made


class Gradients:
    """Typical magnitudes of the gradients of a run, and the loss scale that a narrower dtype asks for."""

    def __init__(self) -> None:
        self._rms: list[Array] = []
        self._largest = 0.0

    def add(self, stream: Stream, narrower: str) -> None:
        """Take the gradients of a rank and step; raises TrueupError if the dtype is none of those that are known."""
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
    """Tell which results have a number of their call's arguments as their largest (a fill), or only pass one on."""
    found = np.zeros(len(stream.slot), bool)
    for k in np.flatnonzero(over).tolist():
        call = int(stream.call[k])
        size = float(magnitude[k])
        if any(abs(abs(one) - size) <= 0.01 * size for one in kinds.numbers_of(stream.value(int(stream.arguments[call])))):
            found[k] = True
            continue
        made = [maker(stream, j) for j in range(*stream.starts[call : call + 2].tolist())]
        found[k] = any(j != NONE and found[j] for j in made)
    return found


def _first_calls(stream: Stream, slots: Numbers, bad: Array) -> list[int]:
    """Return, in order, calls of which no input is out of range yet and that hold no such call inside."""
    reads = ~stream.names.table(is_output)[stream.slot]
    carried = np.zeros(len(stream), bool)
    carried[stream.call[bad & reads]] = True
    calls = [c for c in distinct(stream.call[slots]).tolist() if not carried[c]]
    around = {outer for c in calls for outer in stream.around(c)}
    return [c for c in calls if c not in around]


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
    return dataclasses.replace(made, policy=policy_row(made).replace('"float64"', '"float32"'))
