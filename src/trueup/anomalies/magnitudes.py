"""Numbers that are finite and in trouble: gradients that underflow, vanish or explode, by layer. Asked of steps without NaN
and Inf.

All three are conservative: a healthy training must not meet them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trueup.anomalies.describing import Sites, place_of, slots_of
from trueup.anomalies.found import Anomaly, Kind
from trueup.report.wording import number
from trueup.verdict.streams import Array, Numbers, Stream, is_output

SUBNORMAL_SHARE = 0.5
"""Share of the elements that are not zero, from which a gradient counts as underflowing. In Micikevicius et al. 2018 (Mixed
Precision
Training, section 3.2) a network whose gradients lay below float16's normal numbers to two thirds did not train without a loss
scale."""
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
MOST = 20


@dataclass(slots=True)
class Magnitudes:
    """Of one rank, from step to step."""

    before: dict[tuple[str, str, int, str], float] = field(default_factory=dict)
    _found: list[Anomaly] = field(default_factory=list)
    _seen: set[tuple[Kind, str, str]] = field(default_factory=set)

    def step(self, stream: Stream, sites: Sites) -> None:
        """Look at the gradients of a step."""
        slots = _gradients(stream)
        if not len(slots):
            return
        self._underflow(stream, slots, sites)
        self._by_layer(stream, slots, sites)

    def findings(self) -> list[Anomaly]:
        """Return what was found, in order."""
        return list(self._found)

    def _underflow(self, stream: Stream, slots: Numbers, sites: Sites) -> None:
        narrow = np.isin(stream.dtype[slots], [stream.names.number(name) for name in NARROW])
        chosen = slots[narrow]
        if not len(chosen):
            return
        subnormal = np.nan_to_num(stream.number("n_subnormal")[chosen])
        filled = stream.numel[chosen] - np.nan_to_num(stream.number("n_zero")[chosen])
        for k in chosen[(filled >= ENOUGH) & (subnormal > SUBNORMAL_SHARE * filled)].tolist():
            share = float(stream.number("n_subnormal")[k] / (stream.numel[k] - stream.number("n_zero")[k]))
            text = (
                f"{share:.0%} of the elements of {{slot}} that are not zero are subnormal {stream.dtype_of(k)}: "
                "they have lost digits, and what is smaller is zero; raise the loss scale"
            )
            self._add("underflow", stream, k, sites, text)

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
        if (kind, place.scope, place.op) in self._seen or len(self._found) >= MOST:
            return
        self._seen.add((kind, place.scope, place.op))
        slot = stream.names.name(int(stream.slot[k])) or ""
        bits: Array = np.zeros(len(stream.slot), np.uint8)
        said = f"{place.name} ({place.op}): {text.format(slot=slot)}"
        because = "gradients of this size may or may not hold the training up: compare the loss with that of a float32 run"
        self._found.append(Anomaly(kind, place, "low", said, slots_of(stream, call, bits), matters="unknown", because=because))


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
