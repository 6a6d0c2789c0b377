"""The calls of one rank and a step, or several small ones, as a graph: who made what, what runs inside what, when it was there.

`Alignment` says which calls and slots of two runs are counterparts: `align` finds them and `measure` reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import having
from trueup.foundation.facts.slots import is_input, is_output, roundoff
from trueup.foundation.store.call_columns import CallColumns, Row
from trueup.foundation.store.columns import NONE, Array, Numbers, distinct, integers, most, numbered, spans
from trueup.foundation.store.reader import WRITTEN

__all__ = ["NONE", "WAYS", "Alignment", "Array", "Numbers", "Row", "Stream", "distinct", "most", "numbered", "same_slots", "spans"]
VANISHING = 104
"""So much below the largest operand of a softmax an exponential is zero beside it in float32: ln 2**150."""


class Stream(CallColumns):
    """Calls sorted by ``seq``, and their slots: call ``i`` has the slots ``starts[i]`` to ``starts[i + 1]``."""

    @cached_property
    def stands_for(self) -> dict[int, Counter[str]]:
        """By step, the operators that one call stands for in place of an optimizer's (`normalise.optimizer_steps`)."""
        return {}

    @cached_property
    def left_alone(self) -> dict[int, set[str]]:
        """By step, parameters that the other side's optimizer alone updates, and that are the same here in the next step."""
        return {}

    @property
    def matched_by(self) -> Numbers:
        """Number of the operator, or neutral name, by which each call is matched."""
        return self.op if self.neutral is None else self.neutral

    @property
    def mixed(self) -> bool:
        """Whether the other side's records are of another framework."""
        return self.neutral is not None

    @cached_property
    def producers(self) -> Numbers:
        """Call that last wrote the storage of each slot, `NONE` where there is none here; of whatever step."""
        return self.index(self.producer)

    @cached_property
    def parents(self) -> Numbers:
        """Index of the call around each call, `NONE` for those that have none here: a call comes before what runs inside it."""
        found = self.index(self.parent)
        return np.where((found < np.arange(len(found))) & (self.step[found] == self.step), found, NONE)

    @cached_property
    def norms(self) -> Array:
        """Norm of each slot without masks in it (-1e9), which vanish in the exponential that it is read by. They do if all are one
        number, for -1e4 + x is rounded, too: the norm tells how many. The rest is no larger than what it was made of."""
        reads, large = self.names.table(is_input)[self.slot], self.l2 > VANISHING * np.sqrt(self.numel)
        its = np.flatnonzero(large & reads & self.names.table(having("exponential"))[self.op[self.call]])
        if not len(its):
            return self.l2
        at = np.flatnonzero(large)
        least, largest = self.number("min"), np.abs(self.number("max"))
        most, masked = np.full(len(large), np.inf), np.zeros(len(large), bool)
        with np.errstate(all="ignore"):
            norm, numel, low, high = self.l2[at], self.numel[at], least[at], largest[at]
            most[at] = (high + VANISHING) * np.sqrt(numel)
            count, rest = (norm / low) ** 2, numel * (np.maximum(high, 1.0) / low) ** 2
            masked[at] = (norm > most[at]) & (rest < 0.01) & (np.abs(count - np.rint(count)) <= rest + 1e-9 * count)
        if not masked[its].any():
            return self.l2.copy()  # not itself: norms of both sides are held against each other where such a call is
        found, number = self.l2.copy(), np.where(self.is_identified, self.identity, NONE - np.arange(len(masked)))
        bare = np.isclose(self.l2, np.sqrt(self.numel - self.number("n_zero")) * -least, atol=0) & (least < -VANISHING)
        left = masked & ~bare  # a mask by itself holds zeros besides, and no more
        while len(its):  # back to what they were made of
            some = np.flatnonzero(left)
            its = some[np.isin(number[some], number[its])]
            found[its], left[its] = most[its], False
            made = np.r_[self.producers[its[reads[its]]], self.call[its[~reads[its]]]]
            some = np.flatnonzero(left)
            its = some[np.isin(self.call[some], made[made != NONE])]
        known, peak = dict[int, float](), np.where(masked, largest, self.l2)
        for k in np.flatnonzero(found < self.l2).tolist():
            given = self.slots_of(int(self.call[k]), is_input)
            given = given[(self.names.table(roundoff)[self.dtype[given]] > 0) & ~bare[given]]
            if not reads[k] and largest[k] <= peak[given].sum():
                whole = float((found[given] * np.sqrt(self.numel[k] / np.maximum(self.numel[given], 1.0))).sum())
                known.setdefault(int(number[k]), min(whole, float(found[k])))
            found[k] = known.get(int(number[k]), found[k])
        return found

    @cached_property
    def has_children(self) -> Array:
        """Whether each call has others inside."""
        found = np.zeros(len(self.seq) + 1, bool)
        found[self.parents] = True
        return found[:-1]

    @cached_property
    def ready(self) -> Numbers:
        """When each slot was there, int64 ``(slots,)``: larger is later, and no number is before the call began. A record is
        written when its tensor is there, so row order tells what a call that began first, and went on while others ran, had at
        hand: a backward that recomputes its forward. What a call returns is there when all inside it is."""
        written = self._again([WRITTEN])[WRITTEN]
        found = np.arange(len(self.slot)) if written.null_count else integers(written)
        found = found - found.min(initial=0)
        last = np.full(len(self) + 1, NONE, np.int64)
        np.maximum.at(last, self.call, found)
        for call in np.flatnonzero(self.parents != NONE)[::-1].tolist():  # what runs inside a call comes after it
            last[self.parents[call]] = max(last[self.parents[call]], last[call])
        returned = self.names.table(is_output)[self.slot] & self.has_children[self.call]
        return np.where(returned, last[self.call], found)

    @cached_property
    def began(self) -> Numbers:
        """When each call recorded its first slot, int64 ``(calls,)`` on the scale of `ready`."""
        found = np.full(len(self), len(self.slot), np.int64)
        np.minimum.at(found, self.call, self.ready)
        return found

    @cached_property
    def forward(self) -> Numbers:
        """Call that each backward call goes back through, `NONE` of other calls, and where there is none here."""
        return self.index(self.forward_seq)

    @cached_property
    def origin(self) -> Numbers:
        """The same as it ran first: a reentrant checkpoint goes back through what recomputed it."""
        of = self.forward
        again = self.during("backward") & (of != NONE) & self.during("recompute")[of]
        return np.where(again, of[of], of)

    @cached_property
    def saved(self) -> Numbers:
        """Call whose tensors each backward call reads: its forward call, or what recomputed that last; `NONE` of other calls."""
        of = self.forward
        latest = np.arange(len(self) + 1)
        latest[-1] = NONE
        again = np.flatnonzero(self.during("recompute") & (of != NONE))
        latest[of[again]] = again
        backward = self.during("backward") & (self.forward_seq != NONE)
        found = np.where(backward, latest[of], NONE)
        return np.where(self.step[found] == self.step, found, NONE)

    @cached_property
    def again(self) -> Array:
        """Whether each call goes back through a forward that another one went back through before: a part of its gradients may come
        from the backward of a backward, which no slot shows."""
        at = np.flatnonzero(self.during("backward") & (self.forward_seq != NONE) & ~self.of_level("aten"))
        found = np.zeros(len(self), bool)
        found[at] = True
        found[at[np.unique(self.forward_seq[at], return_index=True)[1]]] = False
        return found

    @cached_property
    def kinds(self) -> tuple[Numbers, Numbers]:
        """First call of each kind (operator, level and phase), and the place of each call's kind among these."""
        size = len(self.names.names)
        keys = (self.op * size + self.level) * size + self.phase
        kind = np.searchsorted(distinct(keys), keys)
        firsts = np.zeros(int(kind.max(initial=-1)) + 1, np.int64)
        firsts[kind[::-1]] = np.arange(len(keys))[::-1]
        return firsts, kind

    @cached_property
    def reads(self) -> Array:
        """Whether each slot is read by its call; memory that the call only writes to is not."""
        fresh = self.names.table(having("overwrites"))[self.op[self.call]]
        written = np.isin(self.slot, [self.names.number("input.0"), self.names.number("input.tensor")])
        return np.asarray(self.names.table(is_input)[self.slot] & ~(fresh & written))

    @property
    def not_finite(self) -> Array:
        """Whether each slot holds NaN or an infinity."""
        return np.asarray((self.counts > 0).any(axis=1))

    @property
    def keeps(self) -> Array:
        """Whether each call makes what a training keeps: gradients, weights, and what modules at the top return."""
        return np.asarray(self.during("backward", "optimizer") | ((self.parent == NONE) & self.of_level("module")))

    def rows(self, criterion: Criterion) -> Numbers:
        """Return the row of a criterion that is for each call."""
        firsts, kind = self.kinds
        places = {id(row): n for n, row in enumerate(criterion.rows)}
        asked = [(row.op, row.level, row.phase) for row in map(self.row, firsts.tolist())]
        return np.array([places[id(criterion.row(*one))] for one in asked], np.int64)[kind]

    @cached_property
    def children(self) -> tuple[Numbers, Numbers]:
        """Calls in the order of their parents, and those parents."""
        order = np.argsort(self.parents, kind="stable")
        return order, self.parents[order]

    def name_views(self, calls: Sequence[int]) -> None:
        """Name these calls, which one run alone has, as producers of what reads the views they take: of what their step made, and
        of what no call made (weights, data) those that show other bytes first, as a transposed one."""
        known, before, producers, shapes = (self.numel > 1) & self.is_identified, self.producer, self.producers, self.shapes.exact
        outputs, alone = self.names.table(is_output)[self.slot] & known, np.isin(self.call, calls)
        made = np.flatnonzero(outputs & alone)
        others = np.flatnonzero(outputs & ~alone & np.isin(self.identity, self.identity[made]))[::-1]
        first = dict(zip(self.identity[others].tolist(), self.call[others].tolist(), strict=True))  # that returned such bytes
        reads = np.flatnonzero(self.names.table(is_input)[self.slot] & known & np.isin(self.identity, self.identity[made]))
        reads = reads[np.argsort(self.identity[reads], kind="stable")]
        read, self.producer, self.producer_slot = self.identity[reads], before.copy(), self.producer_slot.copy()
        for k in made[np.isin(self.identity[made], read)].tolist():  # in order: of several that take one view the last one counts
            given = self.slots_of(int(self.call[k]), is_input)
            here = (producers[given] != NONE) & (self.step[producers[given]] == self.step[self.call[k]])
            if self.identity[k] not in self.identity[given] and first.get(int(self.identity[k]), self.call[k]) >= self.call[k]:
                alike = np.isclose(self.l2[given], self.l2[k], 1e-9, 0)  # the same elements, added in another order
                here |= (before[given] == NONE) & (self.numel[given] == self.numel[k]) & alike
            of = before[given][here]
            its = reads[slice(*(int(np.searchsorted(read, self.identity[k], side)) for side in ("left", "right")))]
            its = its[(self.call[its] > self.call[k]) & (shapes[its] == shapes[k]) & np.isin(before[its], of)]
            self.producer[its], self.producer_slot[its] = self.seq[self.call[k]], self.slot[k]
        self.__dict__.pop("producers", None)

    def around(self, call: int) -> Iterator[int]:
        """Yield the calls around a call, innermost first."""
        while call >= 0 and (call := int(self.parents[call])) >= 0:
            yield call

    def during(self, *phases: str) -> Array:
        """Tell which calls are of some phases."""
        return self._coded(self.phase, phases)

    def of_level(self, *levels: str) -> Array:
        """Tell which calls are of some levels."""
        return self._coded(self.level, levels)

    def _coded(self, codes: Numbers, names: Sequence[str]) -> Array:
        found = np.zeros(len(codes), bool)
        for name in names:
            found |= codes == self.names.number(name)
        return found

    def inside(self, call: int) -> Numbers:
        """Return the calls directly inside a call, in order."""
        order, parents = self.children
        return order[slice(*np.searchsorted(parents, [call, call + 1]))]

    def slots_of(self, call: int, kind: Callable[[str], bool]) -> Numbers:
        """Return the slots of a call of one kind: `is_input`, `is_output`."""
        slots = np.arange(*self.starts[call : call + 2].tolist())
        return np.asarray(slots[self.names.table(kind)[self.slot[slots]]])

    def find(self, seq: int | None) -> int:
        """Return the call of a seq, `NONE` where there is none."""
        return NONE if seq is None else int(self.index(np.array([seq]))[0])


def other_counts(streams: tuple[Stream, Stream], slots: tuple[Numbers, Numbers]) -> Array:
    """Tell which slots have other counts of NaN and Inf on the two sides, or none on one."""
    first, second = streams
    if first.counts is second.counts and slots[0] is slots[1]:
        return ~first.measured[slots[0]]
    differ = first.counts[slots[0]] != second.counts[slots[1]]
    return np.asarray(differ[:, 0] | differ[:, 1] | differ[:, 2])  # a reduction over so short an axis takes ten times as long


WAYS = ("exact", "sequence", "renamed", "map", "data")  # by key, by order, in a scope found or told to be another, by equal data


@dataclass(frozen=True, slots=True)
class Alignment:
    """Matched calls, in the candidate's execution order, and what has no partner: indices into the streams."""

    baseline: Numbers
    candidate: Numbers
    only_baseline: Numbers
    only_candidate: Numbers
    paired: Array  # of each pair, how it was made: index into `WAYS`
    scopes: dict[str, str]  # scopes of the candidate that were found (not told) to have another name in the baseline
    ignored: int = 0  # calls of both sides that are not to be compared


def same_slots(b: Numbers, c: Numbers, baseline: Stream, candidate: Stream) -> tuple[Numbers, Numbers, Numbers, list[int]]:
    """Pair the slots of pairs of calls with the same slot names in the same order. Return both sides' slots, the pair that each
    belongs to, and the pairs with other names or another order."""
    if b is c and baseline.is_like(candidate) and len(b) == len(baseline):  # the n-th is the n-th
        slots = np.arange(len(baseline.slot))
        return slots, slots, baseline.call, []
    counts = baseline.starts[b + 1] - baseline.starts[b]
    even = counts == candidate.starts[c + 1] - candidate.starts[c]
    k, j = spans(baseline.starts[b[even]], counts[even]), spans(candidate.starts[c[even]], counts[even])
    owner = np.repeat(np.flatnonzero(even), counts[even])
    differ = distinct(owner[baseline.slot[k] != candidate.slot[j]])
    odd = ~even
    odd[differ] = True
    kept = ~odd[owner]
    return k[kept], j[kept], owner[kept], np.flatnonzero(odd).tolist()
