"""What two sides with other optimizer kernels made of the same weights: a fused kernel against its parts, weight by weight.

A weight is told by its bytes: the forward of the step reads it in a call that both sides have, and the optimizer reads the same
bytes before it overwrites them. What it holds after the last kernel that writes to it is compared. Of weights that hold the same
bytes (all ones, at the start) the order of the optimizer tells which is which: enough to find them right, too little to blame one.

Adam's m / sqrt(v) is near ±1 however small the gradient. Where the gradient of a part of a weight should be zero, as that of the
bias of an attention's keys, rounding decides the sign of that part's step, and how large the part is no norm tells. So a weight
whose gradient differs at all may be wrong by twice its step, unless most weights are wrong: one kernel makes them all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from trueup.kernels import distance
from trueup.verdict.criteria import UNIT_ROUNDOFF, Criterion
from trueup.verdict.judged import Judged
from trueup.verdict.measure import Measured, SlotError
from trueup.verdict.regions import Region, Regions
from trueup.verdict.streams import NONE, Stream, is_input

Ends = tuple[int, int]
"""Slots of one side, a weight before the optimizer and after it; or of both, what one weight holds in the end."""


def judge_weights(regions: Regions, criterion: Criterion) -> tuple[list[Judged], list[Ends]]:
    """Return what the optimizer made of weights that agree: where that does not agree, in order of execution; and of the others.

    The others are given as slots, ``(baseline, candidate)``, of what they hold in the end.
    """
    if criterion.limits or not all(loose[:-1].any() for loose in regions.loose):
        return [], []
    counterparts = _counterparts(regions)
    ends = [_ends(regions, side, set(counterparts.keys() if side == 0 else counterparts.values())) for side in (0, 1)]
    both = [(b, ends[1].get(counterparts[digest], [])) for digest, b in ends[0].items()]
    equal = [(first, second) for first, second in both if len(first) == len(second)]
    alike = [(pair, len(first) == 1) for first, second in equal for pair in zip(first, second, strict=True)]
    judged = [(_judged(regions, criterion, *pair), single) for pair, single in sorted(alike, key=lambda one: one[0][1][1])]
    known = [(*found, single) for found, single in judged if found is not None]
    count = sum(weight.ratio > criterion.suspect for weight, _, single in known if single)
    singles = sum(single for *_, single in known)
    wrong, right = [], []
    for weight, step, single in known:
        end = weight.call.slots["output.0"]
        if weight.ratio <= criterion.suspect or not _stands_out(weight, step, count, singles):
            right.append((end.baseline, end.candidate))
        elif single:
            wrong.append(weight)
    return wrong, right


def _stands_out(weight: Judged, step: float, wrong: int, known: int) -> bool:
    """Tell whether rounding cannot be the reason why a weight differs by more than is explained."""
    return 2 * wrong > known or weight.error_in == 0 or weight.error_out > 2 * step


def _counterparts(regions: Regions) -> dict[int, int]:
    """Return the digest on each side of what matched forward calls read and no call of the step made: baseline -> candidate."""
    errors = regions.tree.verdicts.errors
    (first, second), (k, j) = errors.streams, errors.slots
    forward = second.phase[errors.calls[1][errors.pair]] == second.names.number("forward")
    at = errors.inputs & forward & first.has_digest[k] & second.has_digest[j] & np.isfinite(errors.relative)
    at &= (first.producers[k] == NONE) & (second.producers[j] == NONE)
    pairs = set(zip(first.digest[k[at]].tolist(), second.digest[j[at]].tolist(), strict=True))
    seen = [Counter(side) for side in zip(*pairs, strict=True)] if pairs else [Counter(), Counter()]
    return {b: c for b, c in pairs if seen[0][b] == 1 == seen[1][c]}


def _ends(regions: Regions, side: int, wanted: set[int]) -> dict[int, list[Ends]]:
    """Return, by digest and in order, the weights that loose optimizer calls read and overwrite, with what they hold in the end."""
    stream, loose = regions.tree.streams[side], regions.loose[side]
    phase = np.r_[stream.phase == stream.names.number("optimizer"), False]
    optimizer = phase & loose
    read = optimizer[stream.call] & stream.names.table(is_input)[stream.slot]
    slots = np.flatnonzero(read).tolist()
    readers = {(int(stream.producer[k]), int(stream.producer_slot[k])): k for k in slots if _written(stream, k) != NONE}
    starts = [k for k in slots if stream.has_digest[k] and int(stream.digest[k]) in wanted and _written(stream, k) != NONE]
    starts = [k for k in starts if not phase[stream.find(stream.producer_of(k))]]  # nor a state that is zero to begin with
    # A function and the operator inside it read the same: the function is taken, for it comes first.
    outermost = [k for k in starts if not optimizer[stream.parents[stream.call[k]]]]
    found: dict[int, list[Ends]] = {}
    for k in outermost:
        found.setdefault(int(stream.digest[k]), []).append((k, _last(stream, k, readers)))
    return found


def _last(stream: Stream, k: int, readers: dict[tuple[int, int], int]) -> int:
    """Follow what overwrites a slot that a call reads to the last of it."""
    end = _written(stream, k)
    for _ in range(len(readers)):
        reader = readers.get((int(stream.seq[stream.call[end]]), int(stream.slot[end])))
        if reader is None or stream.call[reader] <= stream.call[end]:
            break
        end = _written(stream, reader)
    return end


def _written(stream: Stream, k: int) -> int:
    """Return the slot with which a call overwrites one that it reads, `NONE` where it does not: ``input.0.7`` by ``output.7``."""
    name = stream.names.names[int(stream.slot[k])]
    first, _, rest = name.removeprefix("input.").partition(".")
    op = stream.names.names[int(stream.op[stream.call[k]])]
    if not name.startswith("input.") or not first.isdigit() or not op.endswith("_"):
        return NONE
    slots = stream.slots(int(stream.call[k]))
    names = [f"output.written.{first}.{rest}", f"output.written.{first}"]
    names += [f"output.{rest or first}"] if first == "0" else []
    for name in names:
        found = slots.get(stream.names.number(name), NONE)
        if found != NONE and stream.shapes.squeezed[found] == stream.shapes.squeezed[k]:
            return found
    return NONE


def _judged(regions: Regions, criterion: Criterion, baseline: Ends, candidate: Ends) -> tuple[Judged, float] | None:
    """Return a weight with its verdict, and the size of the baseline's step relative to it."""
    streams = regions.tree.streams
    (b, b_end), (c, c_end) = baseline, candidate
    if not all(s.measured[k] for s, k in zip((*streams, *streams), (b, c, b_end, c_end), strict=True)):
        return None
    calls = int(streams[0].call[b_end]), int(streams[1].call[c_end])
    sources: list[Region] = [regions.walk(None, None, [(side, call)]) for side, call in enumerate(calls)]
    if not all(region.known for region in sources):
        return None
    apart = _apart(streams[0], b_end, streams[1], c_end)
    norm, before = float(streams[0].l2[b_end]), _apart(streams[0], b, streams[1], c)
    if not np.isfinite([apart, before, norm]).all() or norm == 0:
        return None
    rows = [stream.row(call) for stream, call in zip(streams, calls, strict=True)]
    row = max((criterion.row(one.op, one.level, one.phase) for one in rows), key=lambda r: r.ulps)
    unit = max(UNIT_ROUNDOFF.get(s.dtype_of(k) or "", 0.0) for s, k in zip(streams, (b_end, c_end), strict=True))
    worst = max(region.worst for region in sources)
    step = _apart(streams[0], b, streams[0], b_end) / norm
    own = row.ulps * unit
    expected = own + row.factor * (before / norm + step * (worst + np.sqrt(worst)))
    error = SlotError("output.0", b_end, c_end, apart, norm, "sketch")
    given = SlotError("input.0", b, c, before, float(streams[0].l2[b]), "sketch")
    made = Measured(replace(rows[0]), replace(rows[1]), {"input.0": given, "output.0": error}, None, ())
    judged = Judged(made, row, max(worst, given.relative), error.relative, own, float(expected), "output.0")
    judged.slot_expected["output.0"] = float(expected)
    return judged, float(step)


def _apart(first: Stream, k: int, second: Stream, j: int) -> float:
    if first.has_digest[k] and second.has_digest[j] and first.digest[k] == second.digest[j]:
        return 0.0
    return float(distance(first.sketch[k][None], second.sketch[j][None])[0])
