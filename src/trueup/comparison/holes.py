"""Calls that a capture lacks, as those that are there show: a capture whose counts agree may still have holes.

What a recorder leaves out by its options leaves no trace here: a producer is named only if it was recorded, and the calls of one
operator in one scope and phase are kept all or none. Numbers tell nothing: a call without tensors takes one and has no rows.
So each of these means that a call was there and is gone::

    input.0 of aten::gelu was made by call 412     and no call 412 is there
    aten::add #0, #2                               and no #1
    aten::mul in scope blocks.1.ln1                and the call around it is blocks.1
    call 87 runs inside call 85                    and no call 85 is there, though all calls were to be kept
    blocks.1.ln1, backward                         and it belongs to no forward, though forwards were to be kept
    torch.Tensor.unflatten #0 runs nothing         and #1 runs aten::view on a tensor of the same layout
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, distinct
from trueup.foundation.facts.slots import is_gradient, is_output
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import CallKey

SILENT = ("backward", "recompute")  # phases in which a call may begin and record nothing: a module's backward without gradients


@dataclass(slots=True)
class Recorded:
    """The calls of one rank of a capture, place by place. ``whole``: the options kept all calls. ``from_first``: the first step
    read is the first there is, so nothing refers to an earlier one."""

    whole: bool
    from_first: bool
    before: list[Numbers] = field(default_factory=list)  # the ``seq`` of all calls of each earlier place, sorted

    def hole(self, stream: Stream) -> Reason | None:
        """Return the call that some steps lack, or None; remember the steps. ``stream`` has their calls of all levels."""
        found, seqs = None, stream.seq
        if len(stream) and stream.is_ordered:
            found = self._maker(stream, seqs) or _around(stream) or _ordinal(stream)
            if self.whole:
                found = found or self._referred(stream, seqs) or _without_forward(stream) or _empty(stream)
        self.before += [seqs] if len(seqs) else []
        return found

    def _maker(self, stream: Stream, seqs: Numbers) -> Reason | None:
        lost = np.flatnonzero(self._are_lost(stream.producer, stream.producers, seqs))
        if not len(lost):
            return None
        slot, call = stream.names.name(int(stream.slot[lost[0]])), int(stream.call[lost[0]])
        return Why.MAKER_GONE(slot, _key(stream, call), int(stream.producer[lost[0]]))

    def _referred(self, stream: Stream, seqs: Numbers) -> Reason | None:
        silent = stream.during(*SILENT)
        forwards = stream.forward_seq, stream.forward, Why.FORWARD_GONE
        for column, calls, why in ((stream.parent, stream.parents, Why.OUTER_GONE), forwards):
            lost = np.flatnonzero(self._are_lost(column, calls, seqs) & ~(silent & (column is stream.parent)))
            if len(lost):
                return why(_key(stream, lost[0]), int(column[lost[0]]))
        return None

    def _are_lost(self, references: Numbers, calls: Numbers, seqs: Numbers) -> Array:
        """Tell which references are to a call that steps which were read should have and do not; ``calls`` are those found here."""
        astray = np.flatnonzero((calls == NONE) & (references != NONE))
        missing = distinct(references[astray])
        lost, there = (missing > seqs[0]) & (missing < seqs[-1]), np.zeros(len(missing), bool)
        nearest = np.searchsorted([known[0] for known in self.before], missing, side="right") - 1
        for n in distinct(np.r_[nearest, nearest - 1]).tolist():
            if n >= 0:
                known = self.before[n]
                there |= np.isin(missing, known)
                lost |= (missing > known[0]) & (missing < known[-1])
        if self.from_first:
            lost |= missing < (self.before or [seqs])[0][0]
        found = np.zeros(len(references), bool)
        found[astray] = np.isin(references[astray], missing[lost & ~there])
        return found


def _around(stream: Stream) -> Reason | None:
    """Look for a function or operator whose module is gone: the call around it is of another scope."""
    names, parents = stream.names, stream.parents
    inner = (parents != NONE) & ~stream.of_level("module") & (stream.scope != stream.scope[parents])
    found = np.flatnonzero(inner & ~stream.during(*SILENT))
    if not len(found):
        return None
    call = int(found[0])
    return Why.MODULE_GONE(_key(stream, call), names.name(int(stream.scope[parents[call]])))


def _ordinal(stream: Stream) -> Reason | None:
    """Look for an operator whose calls in one scope and phase of a step are not numbered 0, 1, 2, ..."""
    number = np.zeros(len(stream), np.int64)
    for key in (stream.step, stream.phase, stream.level, stream.scope, stream.op):
        number = number * (int(key.max(initial=0)) + 2) + key + 1
    order = np.argsort(number, kind="stable")
    starts = np.r_[True, number[order][1:] != number[order][:-1]]
    place = np.arange(len(order)) - np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    fine = stream.of_level("aten")[order]
    found = np.flatnonzero((stream.ordinal[order] > place) & (fine | ~stream.during(*SILENT)[order]))
    return Why.EARLIER_GONE(_key(stream, order[found[0]])) if len(found) else None


def _without_forward(stream: Stream) -> Reason | None:
    """Look for the backward of a function or module whose forward, which it names, is gone. What Python code calls while a
    backward runs is none: it reads inputs and makes outputs, no gradients."""
    names = stream.names
    backward = stream.during("backward") & (stream.level != names.number("aten"))
    backward &= np.bincount(stream.call[names.table(is_gradient)[stream.slot]], minlength=len(stream)) > 0
    found = np.flatnonzero(backward & (stream.forward_seq == NONE) & stream.during("forward").any())
    return Why.NO_FORWARD(_key(stream, found[0])) if len(found) else None


def _empty(stream: Stream) -> Reason | None:
    """Look for a function that runs no operator, though elsewhere it runs some on just the same. Not of the backward: which
    gradients a call is asked for is no argument of it. What returned nothing raised: checkpointing stops a recomputation so."""
    names = stream.names
    if not (stream.level == names.number("aten")).any():
        return None
    functions = np.flatnonzero((stream.level == names.number("api")) & ~stream.during("backward"))
    runs = stream.has_children[functions]
    mixed = np.intersect1d(stream.op[functions[runs]], stream.op[functions[~runs]])
    calls = functions[np.isin(stream.op[functions], mixed)].tolist()
    if not calls:
        return None
    strides = stream.read(("strides",))["strides"]
    full = {_given(stream, call, strides) for call in calls if stream.has_children[call]}
    bare = (call for call in calls if not stream.has_children[call] and len(stream.slots_of(call, is_output)))
    found = next((call for call in bare if _given(stream, call, strides) in full), None)
    return None if found is None else Why.RUNS_NOTHING(_key(stream, found))


def _given(stream: Stream, call: int, strides: pa.ChunkedArray) -> tuple[object, ...]:
    """Return all that tells what a function runs: what it is called with, and how that lies in memory."""
    slots = ((stream.names.names[slot], k) for slot, k in stream.slots(call).items())
    layouts = [(name, stream.dtype[k], stream.shapes.exact[k], str(strides[k])) for name, k in slots if not is_output(name)]
    return int(stream.phase[call]), int(stream.op[call]), int(stream.arguments[call]), *layouts


def _key(stream: Stream, call: int) -> CallKey:
    return stream.row(int(call)).key
