"""What optimizers did to each parameter in a step, by dataflow alone, whichever kernels they run.

A weight is what a forward of the step reads and a call of the optimizer overwrites. Writes in place make a chain, from what the
first call reads to what the last one wrote, or to what another forward reads. Walking back from its end over tensors of as many
elements (over the ``n``-th of a list where a call takes lists) gives what the weight was made of: its gradient, which a call
outside of the optimizer made, and states, which an earlier step left there or a later one reads. Tensors of one element are the
optimizer's counters. All calls on the way to weights and states belong to the update; what else ran in that phase, an average of
the weights, does not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trueup.comparison.graph.streams import NONE, Numbers, Stream
from trueup.foundation.facts.operators import has, normalised
from trueup.foundation.facts.slots import is_input, is_output

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


class Optimizer:
    """The calls of an optimizer in one step. ``later``: what later ones read, as ``(seq, number of the slot's name)``."""

    def __init__(self, stream: Stream, step: int, later: Collection[Place]) -> None:
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
        stream, behind, clipped = self.stream, 0, set[int]()
        for n, call in enumerate(calls):
            makers = {int(stream.producer[k]) for k in self._overwritten(call)}
            if not all(self._first <= made < stream.seq[calls[0]] or made in clipped for made in makers):
                break
            if makers:
                behind = n + 1
                clipped.add(int(stream.seq[call]))
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
        for digest, chains in by_digest.items():
            names = read.get((NONE, digest), [])
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
        made = {int(stream.producers[one]) for one in self._sources(self.chain_ends[k])[0]} - {NONE}
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
            if place not in wanted:
                continue
            inside = any((above, place) in readers for above in stream.around(call))
            readers.add((call, place))
            name = self._parameter(k)
            if not inside and place not in seen[name]:
                found[place].append(f"{name}~{len(seen[name])}" if seen[name] else name)  # a function runs again with another
                seen[name][place] = None
        return found

    def _parameter(self, k: int) -> str:
        """Return ``encoder.fc.weight``, or where no layers were recorded the function that reads it: ``encoder.fc.linear(1)``."""
        stream, call = self.stream, int(self.stream.call[k])
        scope, slot = stream.names.name(int(stream.scope[call])) or "", self._name(k)
        if slot.startswith("param."):
            return ".".join(filter(None, [scope, slot.removeprefix("param.")]))
        given = slot.removeprefix("input.").replace(".", ",")
        return ".".join(filter(None, [scope, f"{normalised(self._op(call))}({given})"]))

    def _op(self, call: int) -> str:
        return self.stream.names.names[int(self.stream.op[call])]

    def _sources(self, end: int) -> tuple[list[int], list[int]]:
        """Return what a slot was made of, tensors of as many elements: slots that other calls made, and those made here."""
        stream = self.stream
        outside, here, pending = dict[int, None](), dict[int, None](), [end]
        while pending:
            e = pending.pop()
            if e in here:
                continue
            here[e] = None
            for k in self._operands(e):
                producer = self.made.get(self._producer(k), NONE)
                if producer == NONE:
                    outside[k] = None
                elif stream.numel[producer] == stream.numel[end]:
                    pending.append(producer)
        return sorted(outside), sorted(here)

    def _operands(self, e: int) -> list[int]:
        """Return what a call reads for one of its results: of lists the tensors at the same place."""
        numel, counts = self.stream.numel, self._counts if self.stream.numel[e] == 1 else ()
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

    def _inputs(self, call: int) -> dict[str, list[int]]:
        """Return what a call reads by the place in its lists, "" for what is in none."""
        inputs, takes_lists = {"": list[int]()}, self._is_list(call)
        for k in self.stream.slots_of(call, is_input).tolist():
            group, _, place = self._name(k).rpartition(".")
            inputs.setdefault(place if takes_lists and "." in group else "", []).append(k)
        return inputs

    def updates(self) -> Step | None:
        """Return what became of each weight, None where no weight was found."""
        found, kept = dict[str, Update](), set[int]()
        for start, name in self.weights.items():
            end = self.chain_ends[start]
            outside, here = self._sources(end)
            beside = [k for k in self._operands(end) if self.starts.get(k) != start]
            update = found[name] = Update(start, end, added=beside)
            states: dict[int, tuple[int, int]] = {}
            for k in outside:
                chain = self.starts.get(k, k)
                if self._is_same(k, start) or any(self._is_same(k, other) for other in update.gradients):
                    continue
                if self._is_gradient(k):
                    update.gradients.append(k)
                else:
                    states.setdefault(chain, (chain, self.chain_ends.get(chain, NONE)))
            for e in here:
                last = self.chain_ends.get(self.starts.get(e, NONE), e)
                if last != end and self._is_read_later(last) and last not in {after for _, after in states.values()}:
                    states.setdefault(last, (NONE, last))
            update.states = [states[k] for k in sorted(states)]
            kept |= {end, *(after for _, after in update.states if after != NONE)}
        if not found:
            return None
        return Step(found, list(self._counters(kept).values()), self._all_for(kept))

    def _is_same(self, k: int, other: int) -> bool:
        """Tell whether two slots hold one tensor: a moment of zeros is made "like" the weight."""
        stream = self.stream
        if self._producer(k) == self._producer(other) and stream.producer[k] != NONE:
            return True
        return bool(stream.is_identified[k] and stream.is_identified[other] and stream.identity[k] == stream.identity[other])

    def _is_gradient(self, k: int) -> bool:
        """Tell whether what is no weight was made in this step, or nobody knows where; states are an earlier step's."""
        made = int(self.stream.producer[k])  # of a level that was not read, maybe
        return made >= self._first or (made == NONE and k not in self.starts)

    def _is_read_later(self, e: int) -> bool:
        return (int(self.stream.seq[self.stream.call[e]]), int(self.stream.slot[e])) in self.later

    def _counters(self, kept: set[int]) -> dict[int, int]:
        """Return states of one element, but those of weights (``kept``), by digest, in the order of their values."""
        stream = self.stream
        ends = [
            e for start, e in self.chain_ends.items()
            if stream.numel[e] == 1 and start not in self.weights and e not in kept and stream.is_identified[e]
            and (self._is_read_later(e) or (is_input(self._name(start)) and self._producer(start) not in self.made
                                            and not self._is_gradient(start)))
        ]  # fmt: skip
        return {int(stream.identity[e]): e for e in sorted(ends, key=lambda e: float(stream.mean[e]))}

    def _all_for(self, kept: Iterable[int]) -> Numbers:
        """Return the calls on the way to some slots, views, what works on single elements alone, and all inside them."""
        stream = self.stream
        done, pending = set[int](), {int(stream.call[e]) for e in kept}
        while pending:
            call = pending.pop()
            done.add(call)
            its = {self.made.get(self._producer(k), NONE) for k in stream.slots(call).values()} - {NONE}
            pending |= {int(stream.call[e]) for e in its} - done
        read = {*stream.producer.tolist(), *(seq for seq, _ in self.later)}
        for call in self.calls:
            largest = np.nan_to_num(stream.numel[stream.starts[call] : stream.starts[call + 1]]).max(initial=0)
            if largest == 1 or (int(stream.seq[call]) not in read and self._is_view(call)):
                done.add(call)
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
