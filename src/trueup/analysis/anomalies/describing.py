"""Calls and slots of a stream, as the frozen facts of a finding."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trueup.comparison.graph.streams import NONE, Array, Stream
from trueup.foundation.facts.anomaly import Led, Place, SlotNumbers
from trueup.foundation.facts.operators import has
from trueup.foundation.model import TensorStats

Sites = Mapping[int, tuple[tuple[str, ...], "str | None"]]

LED = 8
"""Calls shown of those that led to a bad one."""
STEPS_BACK = 64
"""Calls that are followed to find them."""


def place_of(stream: Stream, call: int, sites: Sites) -> Place:
    """Say where a call stands, with the stack of the nearest call around it that has one."""
    row = stream.row(call)
    api: str | None = None
    frames: tuple[str, ...] = ()
    text: str | None = None
    around, stack_of = call, row.site
    for _ in range(STEPS_BACK):
        if stack_of is not None and stack_of in sites and not frames:
            frames, text = sites[stack_of]
        around = int(stream.parents[around])
        if around == NONE:
            break
        outer = stream.row(around)
        if outer.level == "api" and api is None and row.level == "aten":
            api = outer.op
        stack_of = outer.site
    if not frames and row.forward_seq is not None:
        forward = stream.find(row.forward_seq)
        site = None if forward < 0 else stream.row(forward).site
        frames, text = sites.get(site, ((), None)) if site is not None else ((), None)
    return Place(
        row.rank, row.step, row.seq, row.phase, row.level, row.scope, row.op, row.ordinal, api,
        frames[0] if frames else None, text, tuple(frames),
    )  # fmt: skip


def step_of(stream: Stream) -> int:
    """Return the step that a stream is of, which here holds one; 0 where it holds no call."""
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
    seen = {call}
    for _ in range(STEPS_BACK):
        made = _largest_input(stream, call, bits)
        if made is None or made[0] in seen or len(found) == LED:
            break
        call, k = made
        seen.add(call)
        if not has(stream.names.name(int(stream.op[call])) or "", "view"):
            one = slot_of(stream, k, int(bits[k]))
            found.append(Led(place_of(stream, call, sites), one.slot, one.dtype, one.shape, one.largest, one.bad))
    return tuple(found)


def _largest_input(stream: Stream, call: int, bits: Array) -> tuple[int, int] | None:
    """Return the call and slot that made the worst, else the largest, input of a call."""
    best, size = None, -1.0
    for k in range(*stream.starts[call : call + 2].tolist()):
        if stream.producer[k] < 0 or (math.isnan(stream.l2[k]) and not bits[k]):
            continue
        made = stream.find(int(stream.producer[k]))
        if made < 0 or made >= call:
            continue
        slot = next((j for j in range(*stream.starts[made : made + 2].tolist()) if stream.slot[j] == stream.producer_slot[k]), None)
        rms = math.inf if bits[k] else float(stream.l2[k]) / math.sqrt(max(float(stream.numel[k]), 1.0))
        if slot is not None and rms > size:
            best, size = (made, slot), rms
    return best


def largest_of(stats: TensorStats | str | None) -> float:
    """Return the largest magnitude of the finite elements, NaN where there is none."""
    return max(abs(stats.min), abs(stats.max)) if isinstance(stats, TensorStats) else math.nan
