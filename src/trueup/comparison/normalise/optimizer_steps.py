"""Optimizers of other kernels in one form: their calls of a step become one, `STEP`, with what became of each parameter.

    for-loop    mul_ · lerp_ · mul_ · addcmul_ · sqrt · div · add_ · addcdiv_     for each parameter
    foreach     the same once, of lists                                     ->    optimizer.step
    fused       _fused_adamw_, once                                                 input.fc.weight     output.fc.weight
                                                                                    gradient.fc.weight
                                                                                    input.fc.weight:0   output.fc.weight:0

The pass applies to the steps in which the two sides run other operators, or in another order; else the calls themselves are
matched, and name the exact kernel. States are numbered: ``fc.weight:0`` is Adam's first moment. Where one operator writes a weight
last on both sides, what it adds is compared too (``output.fc.weight:added0``): in 16 bits a step is less than a unit of the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.graph.optimizers import Optimizer, Place, Step, Update
from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.comparison.normalise.updates import ADDED, OF_STEP
from trueup.foundation.kernels import distance
from trueup.foundation.store import Capture


def applies(streams: Sequence[Stream], captures: Sequence[Capture]) -> Numbers:
    """Return the steps in which the first two streams' optimizers run other operators, or the same in another order. The last
    step of a run that did not end holds part of an optimizer, which is no other kernel."""
    baseline, candidate = streams[:2]
    if baseline.is_like(candidate) or baseline.imported or candidate.imported or baseline.mixed:
        return np.empty(0, np.int64)
    cut = [capture.steps[-1] for capture in captures[:2] if capture.unfinished and capture.steps]
    steps = np.setdiff1d(np.intersect1d(baseline.steps, candidate.steps), cut)
    return np.array([step for step in steps.tolist() if not _same_sequence(baseline, candidate, step)], np.int64)


def _same_sequence(baseline: Stream, candidate: Stream, step: int) -> bool:
    found: list[Array] = []
    for stream in (baseline, candidate):
        at = stream.during("optimizer") & (stream.step == step)
        tensors = np.bincount(stream.call[stream.slot != stream.names.number("arguments")], minlength=len(stream))
        found.append(np.stack([stream.op[at], stream.level[at], tensors[at]]))
    return (found[0].shape == found[1].shape and bool((found[0] == found[1]).all())) or not all(side.size for side in found)


def rewrite(streams: Sequence[Stream], captures: Sequence[Capture], steps: Numbers) -> list[Stream]:
    """Return the streams (baseline, candidate, other runs of the baseline) with `STEP` in place of the optimizers' calls, in
    those of the steps where parameters of both were found. The captures say what later steps read."""
    later = [_read_later(stream, capture) for stream, capture in zip(streams, captures, strict=True)]
    made: list[dict[int, Step]] = [{} for _ in streams]
    for step in steps.tolist():
        found = [Optimizer(stream, step, read).updates() for stream, read in zip(streams, later, strict=True)]
        first, *others = found
        fit = [
            first is not None and one is not None and _match(first, one, (streams[0], stream))
            for one, stream in zip(others, streams[1:], strict=True)
        ]
        for side, one, fits in zip(made, found, [True, *fit], strict=True):
            side |= {step: one} if fit[0] and fits and one is not None else {}
        if fit[0] and (alone := found[0].updates.keys() ^ found[1].updates.keys()):  # type: ignore[union-attr]
            for stream, capture in zip(streams, captures, strict=True):
                stream.left_alone[step] = _left_alone(alone, stream, capture, step)
    return [_rewritten(stream, side) if side else stream for stream, side in zip(streams, made, strict=True)]


def _left_alone(names: set[str], stream: Stream, capture: Capture, step: int) -> set[str]:
    """Return the parameters of these names that the next step's layers read as this one's did, bit by bit."""
    steps = [step, next((one for one in capture.steps if one > step), NONE)]
    held: dict[str, set[tuple[int, object]]] = {name: set() for name in names}
    its = capture.records(["step", "scope", "slot", "digest"], rank=stream.rank, step=steps, phase="forward", level="module")
    for row in its.to_pylist():
        name = f"{row['scope']}.{row['slot'].removeprefix('param.')}".removeprefix(".")
        if name in held and row["slot"].startswith("param."):
            held[name].add((row["step"], row["digest"]))
    return {name for name, rows in held.items() if {one for one, _ in rows} == {*steps} and len({data for _, data in rows}) == 1}


def _read_later(stream: Stream, capture: Capture) -> set[Place]:
    """Return what optimizers read of earlier steps, in those of a stream and the next one, by who made it."""
    at = stream.during("optimizer")[stream.call]
    at &= (stream.producers != NONE) & (stream.step[stream.producers] < stream.step[stream.call])
    found = set(zip(stream.producer[at].tolist(), stream.producer_slot[at].tolist(), strict=True))
    following = [step for step in capture.steps if step > stream.steps[-1]][:1]
    if following:
        table = capture.records(["producer_seq", "producer_slot"], rank=stream.rank, step=following, phase="optimizer")
        seqs, slots = table["producer_seq"].to_pylist(), table["producer_slot"].cast(pa.string()).to_pylist()
        found |= {(seq, stream.names.number(slot)) for seq, slot in zip(seqs, slots, strict=True) if slot is not None}
    return found


def _match(baseline: Step, candidate: Step, streams: tuple[Stream, Stream]) -> bool:
    """Give the candidate's parameters and states the baseline's names; return whether the two have parameters in common. Where
    scopes have other names the n-th parameter is the n-th, if all have the same shapes. A state is the one nearest to it."""
    first, second = baseline.updates, candidate.updates
    if not first.keys() & second.keys():
        shapes = [
            [int(stream.shapes.squeezed[update.after]) for update in side.values()]
            for stream, side in zip(streams, (first, second), strict=True)
        ]
        if shapes[0] != shapes[1]:
            return False
        candidate.updates = second = dict(zip(first, second.values(), strict=True))
    if not baseline.counters or not candidate.counters:  # one of them counts in Python
        baseline.counters, candidate.counters = [], []
    for name in first.keys() & second.keys():
        second[name].states = _nearest(first[name], second[name], streams)
        _shared_inputs(first[name], second[name])
        if not _last_is_shared(first[name], second[name], streams):
            first[name].added, second[name].added = [], []
    return True


def _last_is_shared(first: Update, second: Update, streams: tuple[Stream, Stream]) -> bool:
    """Tell whether one operator with the same arguments writes a weight last on both sides, so that it reads the same there."""
    sides = [(stream, stream.call[update.after], update) for stream, update in zip(streams, (first, second), strict=True)]
    told = [(stream.op[call], stream.arguments[call], [stream.slot[k] for k in update.added]) for stream, call, update in sides]
    return bool(told[0] == told[1])


def _shared_inputs(first: Update, second: Update) -> None:
    """Leave out gradients and states that only one side is given: a state that it alone keeps shows in what it writes."""
    count = min(len(first.gradients), len(second.gradients))
    both = [b != NONE != c for (b, _), (c, _) in zip(first.states, second.states, strict=False)]
    for side in (first, second):
        side.gradients = side.gradients[:count]
        side.states = [(before if n < len(both) and both[n] else NONE, after) for n, (before, after) in enumerate(side.states)]


def _nearest(first: Update, second: Update, streams: tuple[Stream, Stream]) -> list[tuple[int, int]]:
    """Return the states of the second side in the order of those of the first that they are nearest to."""
    ends = [[after for _, after in side.states] for side in (first, second)]
    if len(ends[0]) != len(ends[1]) or len(ends[0]) < 2 or NONE in (*ends[0], *ends[1]):
        return second.states
    sketches = [stream.sketch[np.array(its)] for stream, its in zip(streams, ends, strict=True)]
    norms = np.maximum(streams[0].l2[ends[0]], np.finfo(float).tiny)
    apart = np.stack([distance(one, sketches[1]) / norm for one, norm in zip(sketches[0], norms, strict=True)])
    if not np.isfinite(apart).all():
        return second.states
    places = range(len(ends[0]))
    best = min(permutations(places), key=lambda order: float(np.minimum(apart[places, order], 1.0).sum()))
    return [second.states[n] for n in best]


def _rewritten(stream: Stream, steps: dict[int, Step]) -> Stream:
    """Return a stream without the calls that `STEP` stands for, and with `STEP`."""
    made = _Rows(stream, steps)
    found = Stream(made.read, stream.names, stream.values, imported=stream.imported, translated=stream.translated)
    found.left_alone.update(stream.left_alone)
    for number, step in steps.items():
        outermost = step.calls[~np.isin(stream.parents[step.calls], step.calls)]
        found.stands_for[number] = Counter(stream.names.names[op] for op in stream.op[outermost].tolist())
    return found


class _Rows:
    """The rows of a rewritten stream: which row of the records each is, and what those of `STEP` say beside."""

    def __init__(self, stream: Stream, steps: dict[int, Step]) -> None:
        self._read, self._count = stream.read, len(stream.slot)
        self._seqs: dict[int, int] = {}  # by ``seq`` of a call that is left out: that of the `STEP` in its place
        self._ends: dict[tuple[int, str], str] = {}  # by ``seq`` and slot of what they wrote: the slot of `STEP`
        kept, made, self._slots = np.ones(len(stream), bool), list[tuple[int, int, int]](), list[str]()
        for number, step in steps.items():
            kept[step.calls] = False
            seqs = stream.seq[step.calls].tolist()
            self._seqs |= dict.fromkeys(seqs, max(seqs))
            slots = _slots(step)
            made += [(k, max(seqs), number) for k in slots.values()]
            self._slots += slots
            written = [(slot, k) for slot, k in slots.items() if slot.startswith("output.")]
            self._ends |= {(int(stream.seq[stream.call[k]]), stream.names.names[stream.slot[k]]): slot for slot, k in written}
        others = np.flatnonzero(kept[stream.call])
        calls = stream.call[others]
        rows = np.c_[np.array([others, stream.seq[calls], stream.step[calls]]), np.array(made, np.int64).T]
        order = np.lexsort((np.arange(rows.shape[1]), rows[1], rows[2]))
        self._rows, self._seq = rows[0, order], rows[1, order]
        self._made: Array = order >= len(others)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return columns of them; of no rows if a part of the records was damaged since."""
        given = list(dict.fromkeys([*columns, "producer_seq", "producer_slot"]))
        found = self._read(given)
        if len(found) != self._count:
            return found.slice(0, 0).select(list(columns))
        found = found.take(pa.array(self._rows))
        count = len(self._slots)
        of_step: dict[str, Any] = {**OF_STEP, "invocation": None}
        replaced: dict[str, tuple[Array, list[Any]]] = {name: (self._made, [of_step[name]] * count) for name in of_step}
        replaced |= {"slot": (self._made, self._slots), "seq": (np.ones(len(found), bool), self._seq.tolist())}
        seqs, slots = (found[name].to_pylist() for name in ("producer_seq", "producer_slot"))
        at = np.array([seq in self._seqs for seq in seqs], bool)
        places = [(seqs[n], slots[n]) for n in np.flatnonzero(at).tolist()]
        replaced["producer_seq"] = at, [self._seqs[seq] for seq, _ in places]
        replaced["producer_slot"] = at, [self._ends.get(place, place[1]) for place in places]
        return pa.table({name: _replaced(found[name], *replaced[name]) if name in replaced else found[name] for name in columns})


def _slots(step: Step) -> dict[str, int]:
    """Return the slots of `STEP`: what it is given, then what it gives."""
    given, made = dict[str, int](), dict[str, int]()
    for name, update in step.updates.items():
        given[f"input.{name}"], made[f"output.{name}"] = update.before, update.after
        given |= {f"gradient.{name}{f':{n}' if n else ''}": k for n, k in enumerate(update.gradients)}
        for n, (before, after) in enumerate(update.states):
            given[f"input.{name}:{n}"], made[f"output.{name}:{n}"] = before, after
        made |= {f"output.{name}:{ADDED}{n}": k for n, k in enumerate(update.added)}
    made |= {f"output.counter:{n}": k for n, k in enumerate(step.counters)}
    return {slot: k for slot, k in (given | made).items() if k != NONE}


def _replaced(column: pa.ChunkedArray, at: Array, values: list[Any]) -> pa.ChunkedArray:
    """Return a column with other values at some rows, names as plain texts."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    plain = column.cast(kind).combine_chunks()
    return pa.chunked_array([pc.replace_with_mask(plain, pa.array(at), pa.array(values, kind))])
