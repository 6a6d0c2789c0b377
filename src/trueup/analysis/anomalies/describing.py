"""Calls and slots of a stream as frozen facts of a finding, and the policy.toml row for a wider dtype (docs: policy.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trueup.analysis.anomalies.flow import maker
from trueup.comparison.graph.streams import NONE, Array, Stream
from trueup.foundation.facts.anomaly import Anomaly, Led, Place, SlotNumbers
from trueup.foundation.facts.operators import has
from trueup.recording.policy_file import exactly, in_toml

Sites = Mapping[int, tuple[tuple[str, ...], "str | None"]]

LED = 8  # calls shown of those that led to a bad one
STEPS_BACK = 64  # calls that are followed to find those


def place_of(stream: Stream, call: int, sites: Sites) -> Place:
    """Say where a call stands, with the stack of the nearest call around it that has one."""
    row = stream.row(call)
    api: str | None = None
    frames: tuple[str, ...] = ()
    text: str | None = None
    for outer in (row, *map(stream.row, stream.around(call))):
        if outer.site is not None and outer.site in sites and not frames:
            frames, text = sites[outer.site]
        if outer.level == "api" and api is None and row.level == "aten":
            api = outer.op
    if not frames and row.forward_seq is not None:
        forward = stream.find(row.forward_seq)
        site = None if forward < 0 else stream.row(forward).site
        frames, text = sites.get(site, ((), None)) if site is not None else ((), None)
    return Place(
        row.rank, row.step, row.seq, row.phase, row.level, row.scope, row.op, row.ordinal, api,
        frames[0] if frames else None, text, tuple(frames),
    )  # fmt: skip


def step_of(stream: Stream) -> int:
    """Return the step of a stream, which here holds one; 0 if it holds no call."""
    return int(stream.step[0]) if len(stream.step) else 0


def slots_of(stream: Stream, call: int, bits: Array) -> tuple[SlotNumbers, ...]:
    """Give the slots of a call in numbers."""
    return tuple(slot_of(stream, k, int(bits[k])) for k in range(*stream.starts[call : call + 2].tolist()))


def slot_of(stream: Stream, k: int, bits: int) -> SlotNumbers:
    """Give one slot in numbers."""
    name = stream.names.name(int(stream.slot[k])) or ""
    return SlotNumbers(name, stream.dtype_of(k) or "", shape_of(stream, k), stream.stats(k), bits)


def shape_of(stream: Stream, k: int) -> str:
    """Write a shape as ``[8, 16]``."""
    shape = stream.shapes[k]
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def led_to(stream: Stream, call: int, bits: Array, sites: Sites) -> tuple[Led, ...]:
    """Follow, from a call back, the largest of what each call read; views are passed over."""
    found: list[Led] = []
    for _ in range(STEPS_BACK):
        k = _maker_of_largest(stream, call, bits)
        if k == NONE or len(found) == LED:
            break
        call = int(stream.call[k])
        if not has(stream.names.name(int(stream.op[call])) or "", "view"):
            one = slot_of(stream, k, int(bits[k]))
            found.append(Led(place_of(stream, call, sites), one.slot, one.dtype, one.shape, one.largest, one.bad))
    return tuple(found)


def _maker_of_largest(stream: Stream, call: int, bits: Array) -> int:
    """Return the slot of an earlier call that made the worst, else the largest, input of a call; `NONE` where there is none."""
    best, size = NONE, -1.0
    for k in range(*stream.starts[call : call + 2].tolist()):
        made = maker(stream, k)
        if made == NONE or stream.call[made] >= call or (math.isnan(stream.l2[k]) and not bits[k]):
            continue
        rms = math.inf if bits[k] else float(stream.l2[k]) / math.sqrt(max(float(stream.numel[k]), 1.0))
        if rms > size:
            best, size = made, rms
    return best


NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ELSEWHERE = ("input", "parameters", "loss_scale", "collective")  # kinds for which no call is to blame


def policy_row(one: Anomaly) -> str:
    """Return the row, or nothing where a wider dtype is no remedy: already wide, a gradient, or not the call's fault."""
    place = one.place
    op = place.api if place.level == "aten" else place.op
    dtypes = {slot.dtype for slot in one.slots if slot.dtype}
    narrow = bool(dtypes & set(NARROW))
    if one.kind in ELSEWHERE or op is None or "::" in op or (not narrow and "float64" in dtypes):
        return ""
    if not narrow and one.kind == "nan":
        return ""  # NaN in float32 is mathematics (log of a negative number, 0/0), not range
    wide = "float32" if narrow else "float64"
    if place.phase not in ("forward", "recompute", "backward"):
        return ""
    if place.phase == "backward" and not narrow:
        return ""  # a gradient has the dtype of its tensor, however it was computed: a smaller loss scale is the remedy
    if place.scope:  # the result itself does not fit
        return wider_module(place.scope, wide)
    if place.phase == "backward":
        return wider_function("", op, wide)
    return "\n".join(["[[rule]]", f"op = {in_toml(exactly(op))}", f'dtype = "{wide}"']) + "\n"


def wider_module(scope: str, dtype: str = "float32") -> str:
    """Return the row for a module that goes on in a wider dtype and gives it."""
    keys = ['level = "module"', f"scope = {in_toml(exactly(scope))}", f'dtype = "{dtype}"', f'returns = "{dtype}"']
    return "\n".join(["[[rule]]", *keys]) + "\n"


def wider_function(scope: str, op: str, dtype: str = "float32") -> str:
    """Return the row for the calls of a function in a scope that go on in a wider dtype and give it."""
    keys = [f"scope = {in_toml(exactly(scope))}", f"op = {in_toml(exactly(op))}", f'dtype = "{dtype}"', f'returns = "{dtype}"']
    return "\n".join(["[[rule]]", *keys]) + "\n"
