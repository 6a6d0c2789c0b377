"""Numbers that are finite and in trouble: gradients that underflow, vanish or explode, by layer. Asked of steps without NaN
and Inf.

All three are conservative: a healthy training must not meet them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from trueup.analysis.anomalies.describing import Sites, place_of, slots_of
from trueup.comparison.graph.streams import Array, Numbers, Stream, is_output
from trueup.foundation.facts.anomaly import Anomaly, Kind
from trueup.foundation.words.wording import counted, number

SUBNORMAL_SHARE = 0.5
"""Share of the elements of all gradients of a step that are not zero, from which the step counts as underflowing. In Micikevicius
et al. 2018 (Mixed Precision Training, section 3.2) a network whose gradients lay below float16's normal numbers to two thirds did
not train without a loss scale."""
ENOUGH = 64
"""Elements below which a share says nothing."""
EXPLODES = 1e4
"""Times by which the norm of a parameter's gradient grows from one recorded step to the next."""
LARGE = 1e3
"""Norm below which a gradient has not exploded, however small it was."""
VANISHES = 1e-12
"""Norm of a layer's gradient, in parts of the largest in the same step: 2**-40, beyond what float32 adds to a weight at one
step size."""
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
MOST, NAMED = 1000, 3
"""Calls that are counted, and named, beside the first."""


@dataclass(slots=True)
class Magnitudes:
    """Of one rank, from step to step."""

    before: dict[tuple[str, str, int, str], float] = field(default_factory=dict)
    _found: dict[Kind, Anomaly] = field(default_factory=dict)
    """The first of each kind."""
    _others: defaultdict[Kind, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """Further calls of each kind: a scale that is too small shows in every layer."""

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
        self._found[kind] = Anomaly(kind, place, "low", said, slots_of(stream, call, bits), matters="unknown", because=because)


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
