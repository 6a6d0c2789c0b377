"""Optimizers of other kernels in one form: their calls of a step become one, `STEP`, with what became of each parameter.

    for-loop    mul_ · lerp_ · mul_ · addcmul_ · sqrt · div · add_ · addcdiv_     for each parameter
    foreach     the same once, of lists                                     ->    optimizer.step
    fused       _fused_adamw_, once                                                 input.fc.weight     output.fc.weight
                                                                                    gradient.fc.weight
                                                                                    input.fc.weight:0   output.fc.weight:0

The pass applies to the steps in which the two sides run other operators, or in another order of calls or of tensors; else the
calls themselves are matched, and name the exact kernel. States are numbered: ``fc.weight:0`` is Adam's first moment. Where one
operator writes a weight last on both sides, what it adds is compared too (``output.fc.weight:added0``): in 16 bits a step is less
than a unit of the weight.

**What optimizers did**, by dataflow alone, whichever kernels they run. A weight is what a forward of the step reads and a call of
the optimizer overwrites. Writes in place make a chain, from what the first call reads to what the last one wrote, or to what
another forward reads. Walking back from its end over tensors of as many elements (over the ``n``-th of a list where a call takes
lists) gives what the weight was made of: its gradient, which a call outside of the optimizer made, and states, which an earlier
step left there or a later one reads. Tensors of one element are the optimizer's counters. All calls on the way to weights and
states belong to the update; what else ran in that phase, an average of the weights, does not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.comparison.normalise.updates import ADDED, OF_STEP
from trueup.foundation.facts.operators import has, normalised
from trueup.foundation.facts.slots import is_input, is_output
from trueup.foundation.kernels import distance
from trueup.foundation.store import Capture

Place = tuple[int, int]  # ``seq`` of a call and the number of a slot's name: how a slot says who made it


@dataclass(slots=True)
class Update:
    """What an optimizer did to one parameter; numbers are slots, `NONE` where there is none."""

    before: int
    after: int
    gradients: list[int] = field(default_factory=list)
    states: list[tuple[int, int]] = field(default_factory=list)  # before and after, in the order in which the states are read
    added: list[int] = field(default_factory=list)  # what the call that writes the weight last reads beside it, of its size


@dataclass(slots=True)
class Step:
    """What the optimizers of one step did."""

    updates: dict[str, Update]  # by the parameter's name: that of the layer's slot, ``encoder.fc.weight``
    counters: list[int]  # distinct values of the states of one element, as slots
    calls: Numbers  # the calls that did it, and all inside them


def applies(streams: Sequence[Stream], captures: Sequence[Capture]) -> Numbers:
    """Return the steps in which the first two streams' optimizers run other operators, or the same in another order or of tensors
    of another. The last step of a run that did not end holds part of an optimizer, which is no other kernel."""
    baseline, candidate = streams[:2]
    if baseline.is_like(candidate) or baseline.imported or candidate.imported or baseline.mixed:
        return np.empty(0, np.int64)
    cut = [capture.steps[-1] for capture in captures[:2] if capture.unfinished and capture.steps]
    steps = np.setdiff1d(np.intersect1d(baseline.steps, candidate.steps), cut)
    return np.array([step for step in steps.tolist() if not _same_sequence(baseline, candidate, step)], np.int64)


def _same_sequence(baseline: Stream, candidate: Stream, step: int) -> bool:
    found: list[list[Array]] = []
    for stream in (baseline, candidate):
        at = stream.during("optimizer") & (stream.step == step)
        tensors = at[stream.call] & (stream.slot != stream.names.number("arguments"))
        found.append([stream.op[at], stream.level[at], stream.shapes.squeezed[tensors],
                      np.bincount(stream.call[tensors], minlength=len(stream))[at]])  # fmt: skip
    return all(map(np.array_equal, *found)) or not all(side[0].size for side in found)


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
    """Return the parameters of these names that the next step's layers and functions read as this one's did, bit by bit."""
    steps = [step, next((one for one in capture.steps if one > step), NONE)]
    held: dict[str, set[tuple[int, object]]] = {name: set() for name in names}
    its = capture.records(["step", "scope", "op", "slot", "digest"], rank=stream.rank, step=steps, phase="forward")
    for row in its.to_pylist():
        if (name := _parameter(row["scope"], row["op"], row["slot"])) in held:
            held[name].add((row["step"], row["digest"]))
    return {name for name, rows in held.items() if {one for one, _ in rows} == {*steps} and len({data for _, data in rows}) == 1}


def _parameter(scope: str, op: str, slot: str) -> str:
    """Return ``encoder.fc.weight``, or where no layers were recorded the function that reads it: ``encoder.fc.linear(1)``."""
    given = slot.removeprefix("input.").replace(".", ",")
    name = slot.removeprefix("param.") if slot.startswith("param.") else f"{normalised(op)}({given})"
    return ".".join(filter(None, [scope, name]))


def _read_later(stream: Stream, capture: Capture) -> set[Place]:
    """Return what optimizers read of earlier steps, in those of a stream and the next one, by who made it."""
    at = stream.during("optimizer")[stream.call]
    at &= (stream.producers != NONE) & (stream.step[stream.producers] < stream.step[stream.call])
    found = set(zip(stream.producer[at].tolist(), stream.producer_slot[at].tolist(), strict=True))
    following = [step for step in capture.steps if step > stream.steps[-1]][:1]
    if not following:
        return found | _as_before(stream, capture)
    table = capture.records(["producer_seq", "producer_slot"], rank=stream.rank, step=following, phase="optimizer")
    seqs, slots = table["producer_seq"].to_pylist(), table["producer_slot"].cast(pa.string()).to_pylist()
    return found | {(seq, stream.names.number(slot)) for seq, slot in zip(seqs, slots, strict=True) if slot is not None}


def _as_before(stream: Stream, capture: Capture) -> set[Place]:
    """Return what a step after the last one would read: of the same calls what the last one reads of the step before it."""
    last = int(stream.steps[-1])
    before = [step for step in capture.steps if step < last][-1:]
    rows = capture.records(["seq", "op"], rank=stream.rank, step=before, phase="optimizer")
    calls = dict(sorted(zip(rows["seq"].to_pylist(), rows["op"].to_pylist(), strict=True)))
    its = np.flatnonzero(stream.during("optimizer") & (stream.step == last))
    if [stream.names.names[op] for op in stream.op[its]] != list(calls.values()):
        return set()
    same = dict(zip(calls, stream.seq[its].tolist(), strict=True))
    at = np.isin(stream.call, its) & np.isin(stream.producer, list(calls))
    return {(same[seq], slot) for seq, slot in zip(stream.producer[at].tolist(), stream.producer_slot[at].tolist(), strict=True)}


def _match(baseline: Step, candidate: Step, streams: tuple[Stream, Stream]) -> bool:
    """Give the candidate's parameters and states the baseline's names; return whether the two have parameters in common. Of
    parameters with other names, in other scopes or read by other functions, the n-th is the n-th if all have the same shapes. A
    state is the one nearest to it."""
    first, second = baseline.updates, candidate.updates
    alone = [name for name in first if name not in second], [name for name in second if name not in first]
    sides = zip(streams, (first, second), alone, strict=True)
    shapes = [[int(stream.shapes.squeezed[side[name].after]) for name in names] for stream, side, names in sides]
    if shapes[0] == shapes[1]:
        named = dict(zip(alone[1], alone[0], strict=True))
        candidate.updates = second = {named.get(name, name): update for name, update in second.items()}
    elif not first.keys() & second.keys():
        return False
    if not baseline.counters or not candidate.counters:  # one of them counts in Python
        baseline.counters, candidate.counters = [], []
    for name in first.keys() & second.keys():
        if len(first[name].states) != len(second[name].states):  # of which none is another's: they show in the weights
            first[name].states, second[name].states = [], []
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
    """Return the states of the second side in the order of those of the first that they are nearest to, the nearest pair first."""
    ends = [[after for _, after in side.states] for side in (first, second)]
    if len(ends[0]) != len(ends[1]) or len(ends[0]) < 2 or NONE in (*ends[0], *ends[1]):
        return second.states
    sketches = [stream.sketch[np.array(its)] for stream, its in zip(streams, ends, strict=True)]
    norms = np.maximum(streams[0].l2[ends[0]], np.finfo(float).tiny)
    apart = np.stack([distance(one, sketches[1]) / norm for one, norm in zip(sketches[0], norms, strict=True)])
    found = dict[int, int]()
    for n in np.argsort(np.minimum(apart, 1.0), axis=None, kind="stable").tolist():  # those that are nobody's keep their order
        if n // len(apart) not in found and n % len(apart) not in found.values():
            found[n // len(apart)] = n % len(apart)
    return [second.states[found[n]] for n in range(len(found))]


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


class Optimizer:
    """The calls of an optimizer in one step. ``later``: what later ones read, as ``(seq, number of the slot's name)``."""

    def __init__(self, stream: Stream, step: int, later: set[Place]) -> None:
        self.stream, self.step, self.later = stream, step, later
        optimizer = stream.during("optimizer") & (stream.step == step)
        outermost = optimizer & ~np.r_[optimizer, False][stream.parents]
        self._first = int(stream.seq[stream.step == step].min())
        self.calls = self._behind_gradients(np.flatnonzero(outermost).tolist())
        self.made: dict[Place, int] = {}  # slots that these calls write, by what their readers call them
        self.starts: dict[int, int] = {}  # by slot that is overwritten or that overwrites: the first slot of its chain
        self.chain_ends: dict[int, int] = {}  # by first slot of a chain: the last
        self._read = {call: self._inputs(call) for call in self.calls}
        forward = stream.during("forward", "recompute") & (stream.step == step)
        given = np.flatnonzero(forward[stream.call] & stream.names.table(is_input)[stream.slot])
        self._given_forward = given[(stream.producer[given] != NONE) | stream.is_identified[given]].tolist()
        self._read_between = set(map(self._producer, self._given_forward))  # what a forward reads ends a chain: it shows there
        for call in self.calls:
            self._write(call)

    def _behind_gradients(self, calls: list[int]) -> list[int]:
        """Leave out what is done to gradients before anything else is written, as by clipping: another run may do it elsewhere."""
        stream, behind, clipped, own = self.stream, 0, set[int](), set[int]()
        forward = np.r_[stream.during("forward"), False]  # weights that this step made, too
        for n, call in enumerate(calls):
            makers = {int(stream.producer[k]) for k in self._overwritten(call)} - own  # a flag (`found_inf`) made for it is nothing
            if not all(self._first <= seq < stream.seq[calls[0]] and not forward[stream.find(seq)] for seq in makers - clipped):
                break
            behind = n + 1 if makers else behind
            (clipped if makers else own).add(int(stream.seq[call]))
        return calls[behind:]

    def _write(self, call: int) -> None:
        names, slots = self.stream.names.names, self.stream.slots(call)
        for k, e in self._overwritten(call).items():
            producer = self.made.get(self._producer(k), NONE) if self._producer(k) not in self._read_between else NONE
            start = self.starts.get(producer, k if producer == NONE else producer)
            self.starts[k] = self.starts[e] = self.starts[start] = start
            self.chain_ends[start] = e
        seq = int(self.stream.seq[call])
        self.made.update({(seq, slot): k for slot, k in slots.items() if is_output(names[slot])})

    def _producer(self, k: int) -> Place:
        return int(self.stream.producer[k]), int(self.stream.producer_slot[k])

    def _overwritten(self, call: int) -> dict[int, int]:
        """Return the slots that a call overwrites, and those that hold what they become. A function names them by argument
        (``output.written.2.0``, ``output.0`` for the first), an operator by the argument's name in order (``output.self.0``)."""
        stream = self.stream
        if not has(self._op(call), "in-place"):
            return {}
        read, wrote = (defaultdict[str, dict[str, int]](dict) for _ in range(2))
        takes_lists = self._is_list(call)
        for slot, k in stream.slots(call).items():
            kind, _, rest = stream.names.names[slot].removeprefix("output.written.").partition(".")
            if stream.names.names[slot].startswith("output.written."):
                wrote[kind][rest] = k
            elif kind in ("input", "output"):
                group, _, place = rest.partition(".")
                if kind == "output" and group.isdigit():
                    group, place = "0", group if place == "" and takes_lists else place
                (read if kind == "input" else wrote)[group][place] = k
        in_order = sorted(read, key=lambda group: (int(group) if group.isdigit() else math.inf, group))
        named = dict(zip((group for group in wrote if not group.isdigit()), in_order, strict=False))
        pairs = [(read[named.get(group, group)].get(n, NONE), e) for group, its in wrote.items() for n, e in its.items()]
        return {k: e for k, e in pairs if k != NONE and stream.shapes.squeezed[k] == stream.shapes.squeezed[e]}

    def _is_list(self, call: int) -> bool:
        names = self.stream.names.names
        return any(names[slot].count(".") == 2 for slot in self.stream.slots(call) if names[slot].startswith("input."))

    @cached_property
    def weights(self) -> dict[int, str]:
        """First slots of the chains that are weights, with the names of the parameters."""
        stream = self.stream
        candidates = [k for k, start in self.starts.items() if k == start and is_input(self._name(k))]
        by_digest, found = defaultdict[int, list[int]](list), dict[int, str]()
        read = self._read_forward({self._place(k) for k in candidates})
        for k in candidates:
            name = read.get(self._producer(k)) if stream.producer[k] != NONE else None
            if name is not None:
                found[k] = name[0]
            elif stream.producer[k] == NONE and stream.is_identified[k]:
                by_digest[int(stream.identity[k])].append(k)
        for digest, chains in sorted(by_digest.items(), key=lambda one: len(one[1])):
            if len(chains) > 1:  # a state of zeros is no bias of zeros: other operators write it than other weights
                written_by = set(stream.op[stream.call[[self.chain_ends[k] for k in found]]].tolist())
                chains = [k for k in chains if stream.op[stream.call[self.chain_ends[k]]] in written_by] or chains
            names, ends = read.get((NONE, digest), []), {self.chain_ends[k] for k in chains}
            if len(chains) > 1 and names:  # what is made of another one is its average
                chains = [k for k in chains if not (ends - {self.chain_ends[k]}) & {*self._sources(self.chain_ends[k], set())[1]}]
            names += [f"{names[0]}+{n}" for n in range(1, 1 + len(chains) - len(names))] if names else []
            layers = {name: name.rpartition(".")[0] for name in names}
            behind = {k: self._layers(k) if len(names) > 1 else set[str]() for k in chains if names}
            for k, its in sorted(behind.items(), key=lambda one: one[1].isdisjoint(layers.values())):
                found[k] = next((name for name in names if layers[name] in its), names[0])  # else their order tells
                names.remove(found[k])
        return found

    def _layers(self, k: int) -> set[str]:
        """Return the layers whose backward made what goes into a weight."""
        stream, backward = self.stream, self.stream.names.number("backward")
        made = {int(stream.producers[one]) for one in self._sources(self.chain_ends[k], set())[0]} - {NONE}
        return {stream.names.name(int(stream.scope[call])) or "" for call in made if stream.phase[call] == backward}

    def _name(self, k: int) -> str:
        return self.stream.names.names[int(self.stream.slot[k])]

    def _place(self, k: int) -> Place:
        """Return who made what a slot holds, or where nobody did its bytes."""
        return self._producer(k) if self.stream.producer[k] != NONE else (NONE, int(self.stream.identity[k]))

    def _read_forward(self, wanted: set[Place]) -> dict[Place, list[str]]:
        """Return the names of parameters that a forward of the step reads, by `_place`. The outermost reader names a parameter:
        its layer, or a function outside of layers that were recorded."""
        stream = self.stream
        found: dict[Place, list[str]] = defaultdict(list)
        readers, seen = set[tuple[int, Place]](), defaultdict[str, dict[Place, None]](dict)
        for k in self._given_forward:
            place, call = self._place(k), int(stream.call[k])
            if place not in wanted or has(self._op(call), "shape"):
                continue
            inside = any((above, place) in readers for above in stream.around(call))
            readers.add((call, place))
            name = _parameter(stream.names.name(int(stream.scope[call])) or "", self._op(call), self._name(k))
            if not inside and place not in seen[name]:
                found[place].append(f"{name}~{len(seen[name])}" if seen[name] else name)  # a function runs again with another
                seen[name][place] = None
        return found

    def _op(self, call: int) -> str:
        return self.stream.names.names[int(self.stream.op[call])]

    def _sources(self, end: int, counts: Collection[int] | None = None) -> tuple[list[int], list[int]]:
        """Return what a slot was made of, tensors of as many elements: slots that other calls made, and those made here. Without
        ``counts``, single elements that are no states, those that are known once weights are."""
        stream = self.stream
        outside, here, pending = dict[int, None](), dict[int, None](), [end]
        while pending:
            e = pending.pop()
            if e in here:
                continue
            here[e] = None
            for k in self._operands(e, counts):
                producer = self.made.get(self._producer(k), NONE)
                if producer == NONE:
                    outside[k] = None
                elif stream.numel[producer] == stream.numel[end]:
                    pending.append(producer)
        return sorted(outside), sorted(here)

    def _operands(self, e: int, counts: Collection[int] | None = None) -> list[int]:
        """Return what a call reads for one of its results: of lists the tensors at the same place."""
        numel = self.stream.numel
        counts = () if numel[e] != 1 else self._counts if counts is None else counts
        return [k for k in self._given(e) if numel[k] == numel[e] and int(self.stream.identity[k]) not in counts]

    def _given(self, e: int) -> list[int]:
        inputs = self._read[int(self.stream.call[e])]
        return sorted((*inputs[""], *inputs.get(self._name(e).rpartition(".")[2], ())))

    @cached_property
    def _counts(self) -> set[int]:
        """The single elements that larger weights are made with, which are no states of a weight of one element."""
        stream = self.stream
        larger = [end for start, end in self.chain_ends.items() if start in self.weights and stream.numel[end] > 1]
        its = [k for end in larger for e in self._sources(end)[1] for k in self._given(e) if stream.numel[k] == 1]
        return set(stream.identity[its].tolist())

    @cached_property
    def _afterwards(self) -> set[int]:
        """Calls that work on weights as the step leaves them, and what these are given besides: an average is no state."""
        ends, found = {self.chain_ends[start] for start in self.weights}, set[int]()
        read = {call: [self.made.get(self._producer(k), NONE) for its in self._read[call].values() for k in its]
                for call in self.calls}  # fmt: skip
        for call, its in read.items():
            found |= {call} if any(e in ends or (e != NONE and int(self.stream.call[e]) in found) for e in its) else set()
        for call in reversed(self.calls):
            found |= {int(self.stream.call[e]) for e in read[call] if e not in ends and e != NONE} if call in found else set()
        return found

    def _inputs(self, call: int) -> dict[str, list[int]]:
        """Return what a call reads by the place in its lists, "" for what is in none."""
        inputs, takes_lists = {"": list[int]()}, self._is_list(call)
        for k in self.stream.slots_of(call, is_input).tolist():
            group, _, place = self._name(k).rpartition(".")
            inputs.setdefault(place if takes_lists and "." in group else "", []).append(k)
        return inputs

    def updates(self) -> Step | None:
        """Return what became of each weight, None where no weight was found."""
        found, kept, begun = dict[str, Update](), set[int](), set[int]()
        for start, name in self.weights.items():
            end = self.chain_ends[start]
            outside, here = self._sources(end)
            update = found[name] = Update(start, end, added=[k for k in self._operands(end) if self.starts.get(k) != start])
            states: dict[int, tuple[int, int]] = {}
            for k in outside:
                # The chain whose start it reads, maybe beside the call that overwrites that.
                chain = self.starts.get(k, self._begun.get(self._producer(k), k) if self.stream.producer[k] != NONE else k)
                if self._is_same(k, start) or any(self._is_same(k, other) for other in update.gradients):
                    continue
                if self._is_gradient(k):
                    update.gradients.append(k)
                else:
                    states.setdefault(chain, (chain, self.chain_ends.get(chain, NONE)))
            here += [e for k in update.gradients for e in self._lasting[self._place(k)]]
            for e in here:
                last = self.chain_ends.get(self.starts.get(e, NONE), e)
                if last != end and self._is_read_later(last) and last not in {after for _, after in states.values()}:
                    given = self._sources(last)[0]  # a new tensor may be what became of a state that nobody overwrites
                    old = [k for k, (before, after) in states.items() if after == NONE and before in given]
                    before = old[0] if len(old) == 1 else self.starts.get(last, NONE)
                    states[before if before != NONE else last] = (before, last)
            update.states = [states[k] for k in sorted(states)]
            kept |= {end, *(after for _, after in update.states if after != NONE)}
            begun |= {self._maker(before) for before, _ in update.states if before != NONE} - {NONE}
        return Step(found, list(self._counters(kept).values()), self._all_for(kept, begun)) if found else None

    @cached_property
    def _begun(self) -> dict[Place, int]:
        return {self._producer(start): start for start in self.chain_ends if self.stream.producer[start] != NONE}

    @cached_property
    def _lasting(self) -> defaultdict[Place, list[int]]:
        """What later steps read, by what it was made of: a moment that the weight does not need yet (RAdam's, Lion's)."""
        found = defaultdict[Place, list[int]](list)
        for place in sorted(self.later & self.made.keys()):
            for k in self._sources(self.made[place])[0]:
                found[self._place(k)].append(self.made[place])
        return found

    def _is_same(self, k: int, other: int) -> bool:
        """Tell whether two slots hold one tensor: a moment of zeros is made "like" the weight."""
        stream = self.stream
        made = stream.producer[k] != NONE and self._producer(k) == self._producer(other)
        known = stream.is_identified[k] and stream.is_identified[other]
        return bool(made or (known and stream.identity[k] == stream.identity[other]))

    def _is_gradient(self, k: int) -> bool:
        """Tell whether what is no weight was made in this step, or nobody knows where; states are an earlier step's."""
        made = int(self.stream.producer[k])  # of a level that was not read, maybe
        return self._maker(k) == NONE and (made >= self._first or (made == NONE and k not in self.starts))

    def _maker(self, k: int) -> int:
        """Return the call that made a state of nothing, as an optimizer's constructor does; else `NONE`."""
        call = self.stream.find(int(self.stream.producer[k]))
        return call if call != NONE and has(self._op(call), "shape") else NONE

    def _is_read_later(self, e: int) -> bool:
        return (int(self.stream.seq[self.stream.call[e]]), int(self.stream.slot[e])) in self.later

    def _counters(self, kept: set[int]) -> dict[int, int]:
        """Return states of one element, but those of weights (``kept``), by digest, in the order of their values."""
        stream = self.stream
        ends = [
            e for start, e in self.chain_ends.items()
            if stream.numel[e] == 1 and start not in self.weights and e not in kept and stream.is_identified[e]
            and int(stream.call[e]) not in self._afterwards
            and (self._is_read_later(e) or (is_input(self._name(start)) and self._producer(start) not in self.made
                                            and not self._is_gradient(start)))
        ]  # fmt: skip
        return {int(stream.identity[e]): e for e in sorted(ends, key=lambda e: float(stream.mean[e]))}

    def _all_for(self, kept: Iterable[int], begun: set[int]) -> Numbers:
        """Return some calls and those on the way to some slots, all inside them, views, what works on single elements alone, and
        what goes among them into one that nobody reads: Python does (``param.norm().item()``)."""
        stream = self.stream
        done, pending = set[int](), {int(stream.call[e]) for e in kept}
        while pending:
            call = pending.pop()
            done.add(call)
            its = {self.made.get(self._producer(k), NONE) for k in stream.slots(call).values()} - {NONE}
            pending |= {int(stream.call[e]) for e in its} - done
        read = {*stream.producer.tolist(), *(seq for seq, _ in self.later)}
        sizes = np.nan_to_num(stream.numel)
        small = [call for call in self.calls if sizes[stream.starts[call] : stream.starts[call + 1]].max(initial=0) == 1]
        done |= set(small) - self._afterwards
        for call in self.calls:
            told = min(done) < call < max(done) and (stream.numel[stream.slots_of(call, is_output)] == 1).all()
            if int(stream.seq[call]) not in read and (told or self._is_view(call)):
                done.add(call)
        done |= begun
        pending = set(done)
        while pending:
            inside = stream.inside(pending.pop()).tolist()
            pending.update(inside)
            done.update(inside)
        return np.array(sorted(done), np.int64)

    def _is_view(self, call: int) -> bool:
        """Tell whether all results of a call are tensors that it read; who reads such a view names what wrote the tensor."""
        stream, name = self.stream, self._name
        slots = [k for k in stream.slots(call).values() if stream.is_identified[k]]
        read = {int(stream.identity[k]) for k in slots if is_input(name(k))}
        made = [int(stream.identity[k]) for k in slots if is_output(name(k))]
        return bool(made) and read.issuperset(made) and not has(self._op(call), "in-place")
