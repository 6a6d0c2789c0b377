"""Runs of calls that only one side has: what goes into them, what comes out, and whether the difference starts there.

A device may compute an LSTM in one operator and another in a hundred. Without a function around them that could be compared as
a whole, what such calls did shows where their results are read by calls that do have a counterpart (the exits). Walking back
from an exit through calls without counterpart to those that have one gives the sources.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

import numpy as np

from trueup.comparison.graph.readers import Readers, mask
from trueup.comparison.graph.streams import NONE, Array, Numbers, Row, Stream, distinct
from trueup.comparison.measures.measure import Distance, Measured
from trueup.comparison.measures.thresholds import FLIPPED, HALF
from trueup.comparison.verdict.budget import unrecorded
from trueup.comparison.verdict.evidence import coherent, entry_of, few_elements_of
from trueup.comparison.verdict.judged import LASTING, SIDES, Judged, Tree, excess
from trueup.comparison.verdict.origins import Origins
from trueup.comparison.verdict.parts import BRANCHES, Parts
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.criteria import Row as CriterionRow
from trueup.foundation.facts.operators import has, having
from trueup.foundation.facts.slots import SINGLE, is_input, is_output, is_written, roundoff
from trueup.foundation.facts.why import FEW, Reason, Why

Call = tuple[int, int]  # side and call


@dataclass(slots=True)
class Region:
    """Calls without counterpart between their sources and one exit or several."""

    tree: Tree
    exits: list[tuple[Judged, Distance, list[Call]]] = field(default_factory=list)
    """Calls with a counterpart that read a result, what they read, and who made it."""
    calls: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))  # of the baseline and of the candidate
    beside: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))  # of other runs, whose results are moved here
    sources: dict[str, Distance] = field(default_factory=dict)
    earlier: float = 0.0  # largest relative error of calls of earlier steps whose results go in: weights, states
    known: bool = True  # whether all sources that a recorded call produced were compared
    given: dict[Call, list[Call | float]] = field(default_factory=dict)
    """By call, what it reads: others of the region, and the relative errors of what came from outside."""
    _worst: dict[Call, float] = field(default_factory=dict)  # by call, the largest of these errors behind it

    @property
    def worst(self) -> float:
        """Largest relative error of what goes in."""
        return max([self.earlier, *(source.relative for source in self.sources.values())])

    @property
    def agreed(self) -> float:
        """Largest relative error of what goes in and agrees: what does not tells nothing of what is made of the rest."""
        return max([self.earlier, *(source.relative for source in self.sources.values() if source.relative < HALF)])

    def worst_of(self, starts: Sequence[Call]) -> float:
        """Return the largest relative error of what goes into some of its calls, and into those that they are made of: what is made
        of a result explains nothing of it."""
        if len(self._worst) != len(self.given):
            self._worst = {}
            for call in sorted(self.given, key=itemgetter(1)):  # what a call reads was made by earlier ones
                read = [self._worst.get(one, 0.0) if isinstance(one, tuple) else one for one in self.given[call]]
                self._worst[call] = max(read, default=0.0)
        if not all(call in self._worst for call in starts):
            return self.worst  # of a run whose results are moved here
        return max((self._worst[call] for call in starts), default=0.0)

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest dtype that goes in."""
        stream = self.tree.streams[0]
        return max((roundoff(stream.dtype_of(s.baseline)) for s in self.sources.values()), default=0.0)

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether it has calls on the baseline, and on the candidate."""
        return bool(self.calls[0]), bool(self.calls[1])

    def take(self, other: Region) -> None:
        """Take over what another one holds."""
        for mine, its in zip((*self.calls, *self.beside), (*other.calls, *other.beside), strict=True):
            mine |= its
        self.exits += other.exits
        self.sources |= other.sources
        self.given |= other.given
        self.known &= other.known
        self.earlier = max(self.earlier, other.earlier)


class Regions:
    """The regions of a rank and step. ``loose``, by side: calls that no counterpart and no compared call around speaks for."""

    def __init__(self, tree: Tree, loose: tuple[list[int], list[int]], origins: Origins) -> None:
        self.tree, self.origins, self.given = tree, origins, loose
        self.flow = Readers(tree.streams[0]), Readers(tree.streams[1])
        self.loose = tuple(mask(calls, len(stream)) for calls, stream in zip(loose, tree.streams, strict=True))
        self.readers: tuple[set[int], set[int]] = set(), set()  # loose calls whose result somebody reads
        self.settled: tuple[dict[int, float], dict[int, float]] = {}, {}
        """By side, loose calls that agree with what the other side wrote, and their relative errors."""
        self.uncompared: set[Call] = set()  # ``(side, call)`` of loose calls with a matched reader that could not be compared
        self.compared: set[Call] = set()  # the same where it was; a transposed gradient has another shape and tells nothing
        self._all: dict[int, Region] = {}
        self._holding: dict[tuple[int, int, int], int] = {}  # by exit phase, side and call: the region that first held it
        self._taken: dict[int, int] = {}  # regions that another one took over, and that
        self.unmatched = tuple(mask(calls.tolist(), len(s)) for calls, s in zip(tree.unmatched, tree.streams, strict=True))
        self.ends = tuple(_ends(stream, mask) for stream, mask in zip(tree.streams, self.unmatched, strict=True))
        """By side, and call without counterpart: its results that nobody reads yet. Those of a backward whose optimizer was not
        recorded, of which a module that was compared around it says nothing; and of the phases that later steps read from."""
        self.states: set[Call] = set()  # ``(side, call)`` of loose calls of a forward that write what only a later step reads
        self.spare: list[dict[int, list[int]]] = []  # results of other loose calls that nobody reads in this step: a later one may
        if loose[0] or loose[1]:
            producers = [stream.producers for stream in tree.streams]
            for stream, made, pairs, readers in zip(tree.streams, producers, tree.pairs, self.readers, strict=True):
                reads = stream.names.table(is_input)[stream.slot] & (pairs[stream.call] == NONE)
                readers.update(made[reads & (made >= 0) & (made != stream.call)].tolist())
            for pair in self._pairs_that_read(producers):
                self._exits(pair)
        for side, (stream, ends) in enumerate(zip(tree.streams, self.ends, strict=True)):
            done, lasting = self._with_family(side, self.readers[side]), stream.during(*LASTING)
            calls = (call for call in loose[side] if lasting[call] and call not in done)
            ends |= {call: stream.slots_of(call, is_output).tolist() for call in calls}
            forward = stream.during("forward") & ~stream.has_children
            ends |= (states := {call: its for call in loose[side] if (its := self._states(side, call, forward))})
            self.states |= {(side, call) for call in states}
            spare = (call for call in loose[side] if call not in done and call not in ends)
            self.spare.append({call: stream.slots_of(call, is_output).tolist() for call in spare})

    def _states(self, side: int, call: int, forward: Array) -> list[int]:
        """Return what a call of a forward changes in memory of an earlier step and this one's reads no more: running statistics."""
        stream, at, given = self.tree.streams[side], call, self.tree.streams[side].slots_of(call, is_input)
        while at != NONE and has(stream.names.names[int(stream.op[at])], "in-place") and len(read := stream.slots_of(at, is_input)):
            at = int(stream.producers[read[0]])
        made = stream.slots_of(call, is_output if at == NONE else is_written) if forward[call] else given[:0]
        made = made[stream.names.table(roundoff)[stream.dtype[made]] > 0]
        made = made[~np.isin(stream.identity[made], stream.identity[given[:1] if at == NONE else given])]
        return [k for k in made.tolist() if not forward[stream.call[self.flow[side].named(k)]].any()]

    def add(self, region: Region) -> None:
        """Add one whose result nobody reads yet."""
        self._all[len(self._all) + len(self._taken)] = region

    @property
    def found(self) -> list[Region]:
        """The regions, each once; what is wrong in the forward shows there, and apart from that in the backward."""
        return list(self._all.values())

    @cached_property
    def rewritten(self) -> list[set[int]]:
        """By side, the calls of regions that both sides have calls in."""
        return [set().union(*(region.calls[side] for region in self.found if all(region.sides))) for side in (0, 1)]

    def _pairs_that_read(self, producers: list[Numbers]) -> list[int]:
        """Return the matched calls that read a result of a loose call, in order."""
        found: list[Numbers] = []
        for side, stream in enumerate(self.tree.streams):
            reads = stream.names.table(is_input)[stream.slot] & self.loose[side][producers[side]]
            reads[[k for k, terms in self.flow[side].sums if self.loose[side][stream.call[terms]].any()]] = True
            found.append(self.tree.pairs[side][stream.call[reads]])
        pairs = distinct(np.concatenate(found))
        return list(pairs[pairs >= 0].tolist())

    def _exits(self, pair: int) -> None:
        judged, errors = self.tree.verdicts.at(pair), self.tree.verdicts.errors
        two_kinds = {int(errors.slots[0][n]) for n in errors.entries(pair) if self.tree.two_kinds[n]}
        rows = judged.call.baseline, judged.call.candidate
        otherwise = pair in errors.arguments and self.tree.verdicts.error_out[pair] <= self.tree.verdicts.own[pair]  # a + 2 b
        stands = self._stands_alike(rows) and not otherwise and not has(rows[1].op, "shape")
        names = [s for s in dict.fromkeys([*rows[0].slots, *rows[1].slots]) if is_input(s)]
        for name in names:
            made = [self._made(side, rows[side].slots.get(name)) for side in (0, 1)]
            starts = [[self.tree.streams[side].find(seq) for seq, _ in made[side]] for side in (0, 1)]
            loose = [(side, call) for side in (0, 1) for call in starts[side] if self.loose[side][call]]
            if not loose:
                continue
            for side, call in loose:
                self.readers[side].add(call)
            error = judged.call.slots.get(name)
            if not stands or (error is not None and error.baseline in two_kinds):
                continue  # who applies it is compared
            lost = any(self._is_lost(side, rows[side].slots.get(name)) for side in (0, 1) if set(starts[side]) <= {NONE})
            if error is None or math.isnan(error.low) or lost:
                self.uncompared.update(loose)
            else:
                phase = self.tree.streams[1].names.number(judged.call.candidate.phase)
                region = self._gather(phase, loose)
                for side in (0, 1) if len(made[0]) + len(made[1]) > 2 else ():  # of a sum the other terms may bring the difference
                    terms = [term for term in zip(made[side], starts[side], strict=True) if not self.loose[side][term[1]]]
                    region.given[loose[0]] += [self._source(region, side, seq, call, slot) for (seq, slot), call in terms]
                region.exits.append((judged, error, loose + self._moved(region, loose, starts)))
                self.compared.update(loose)

    def _moved(self, region: Region, loose: list[Call], starts: list[list[int]]) -> list[Call]:
        """Return the loose calls of the side that `loose` has none of whose results a call that is none only moved here; the region
        keeps the run that made them."""
        side = 1 - loose[0][0]
        if any(of == side for of, _ in loose):
            return []
        wanted = self.loose[side].__getitem__
        found = [(side, call) for start in starts[side] for call in behind(self.tree, side, start, wanted)]
        region.beside[side].update(self.walk(found).calls[side])
        return found

    def _stands_alike(self, rows: tuple[Row, Row]) -> bool:
        """Tell whether the calls around two matched ones are each other's counterparts: else the operators are alike by chance."""
        around = [stream.find(row.parent) for stream, row in zip(self.tree.streams, rows, strict=True)]
        pairs = [int(self.tree.pairs[side][call]) for side, call in enumerate(around)]
        return pairs[0] == pairs[1] and (pairs[0] != NONE or around == [NONE, NONE])

    def _is_lost(self, side: int, k: int | None) -> bool:
        """Tell whether the call that made what a slot holds was recorded and is missing."""
        stream = self.tree.streams[side]
        made = NONE if k is None else int(stream.producer[k])
        complete = bool((stream.level == stream.names.number("aten")).any())  # else it may be of a level that was not read
        return complete and not stream.imported and not stream.mixed and made > stream.seq[0] and stream.find(made) == NONE

    def _gather(self, phase: int, starts: list[Call]) -> Region:
        """Return the region of some loose calls that are read in a phase, joined with those that it meets on the way back."""
        number, region = len(self._all) + len(self._taken), Region(self.tree)
        met: set[int] = set()
        pending = list(starts)
        while pending:
            side, call = pending.pop()
            holder = self._holding.setdefault((phase, side, call), number)
            if holder != number:
                met.add(self._holder(holder))
            elif call not in region.calls[side]:
                pending += self._expand(region, side, call, self.loose)
        kept = min(met, default=number)
        if kept == number:
            self._all[number] = region
            return region
        self._taken[number] = kept
        self._all[kept].take(region)
        for other in met - {kept}:
            self._taken[other] = kept
            self._all[kept].take(self._all.pop(other))
        return self._all[kept]

    def _holder(self, number: int) -> int:
        while number in self._taken:
            number = self._taken[number]
        return number

    def walk(self, starts: list[Call], *, covered: bool = False) -> Region:
        """Gather the loose calls from ``(side, call)`` back to their sources; with ``covered`` those inside compared calls too."""
        region, among = Region(self.tree), self.unmatched if covered else self.loose
        pending = list(starts)
        while pending:
            side, call = pending.pop()
            if call not in region.calls[side]:
                pending += self._expand(region, side, call, among)
        return region

    def _expand(self, region: Region, side: int, call: int, among: tuple[Array, ...]) -> list[Call]:
        """Add a call and its sources to a region; return the loose calls that it reads."""
        region.calls[side].add(call)
        stream, found = self.tree.streams[side], []
        given = region.given[side, call] = []
        for number, k in self.given_to(side, call):
            if not is_input(stream.names.names[number]):
                continue
            grown = self.flow[side].cancels(k)
            makers = self._made(side, k)
            for seq, slot in makers:
                if seq == stream.seq[call]:
                    continue
                producer = stream.find(seq)
                if among[side][producer]:
                    found.append((side, producer))
                else:
                    given.append(grown * self._source(region, side, seq, producer, slot, k if len(makers) == 1 else None))
        for inner in self._compared_inside(side, call) if self.tree.pairs[side][call] == NONE else ():  # else its slots say it
            errors, pair = self.tree.verdicts.errors, int(self.tree.pairs[side][inner])  # of what came from outside
            its = [n for n in errors.entries(pair) if not self.unmatched[side][stream.producers[errors.slots[side][n]]]]
            error = float(np.fmax.reduce(np.where(errors.inputs[its], errors.relative[its], 0.0), initial=0.0))
            region.earlier = max(region.earlier, error)
            given.append(error)
        given += found
        return found

    def _compared_inside(self, side: int, call: int) -> Iterator[int]:
        """Yield the calls with a counterpart inside one that has none: it makes of their inputs, and weights, what they do."""
        for inner in self.tree.streams[side].inside(call).tolist():
            if self.tree.pairs[side][inner] != NONE:
                yield inner
            else:
                yield from self._compared_inside(side, inner)

    def _made(self, side: int, k: int | None) -> list[tuple[int, str | None]]:
        """Return who made what a slot holds, and as which slot; of gradients that autograd added up, who made each."""
        stream = self.tree.streams[side]
        if k is None:
            return []
        seq, name = stream.producer_of(k), stream.names.name
        terms = self.flow[side].parts(k)
        found = [(int(stream.seq[stream.call[term]]), name(int(stream.slot[term]))) for term in terms]
        return found or ([] if seq is None else [(seq, name(int(stream.producer_slot[k])))])

    def given_to(self, side: int, call: int) -> list[tuple[int, int]]:
        """Return a call's slots; of the backward of a function or module also those of its forward that it may have saved: what a
        call of this step made, for what was there before (weights, which may be old ones) explains nothing. Between frameworks
        all, for no common operator shows them."""
        stream = self.tree.streams[side]
        found = list(stream.slots(call).items())
        forward, aten = stream.find(int(stream.forward_seq[call])), stream.level[call] == stream.names.number("aten")
        if forward == NONE or (aten and not stream.mixed):
            return found
        saved = stream.slots(forward).items()
        return found + [(slot, k) for slot, k in saved if stream.mixed or stream.producers[k] != NONE]

    def _source(self, region: Region, side: int, seq: int, producer: int, slot: str | None, read: int | None = None) -> float:
        """Add what a call outside of a region made, and a slot ``read``, to its sources; return its relative error, where known."""
        judged = self.tree.judged(side, producer)
        if judged is not None:
            error = judged.call.slots.get(slot or "")
        elif producer != NONE:  # inside a function that was compared as a whole
            error = self._returned(side, producer, slot, read)
        elif seq in self.origins.loose[side]:
            error = None
        else:
            before = (self.origins.made(seq) or 0.0) if side == 1 else 0.0
            region.earlier = max(region.earlier, before)
            return before
        if error is None or math.isnan(error.low):
            region.known = False
            return 0.0
        region.sources[f"{side} {seq} {slot}" if judged is None else f"{judged.call.candidate.seq} {slot}"] = error
        return error.relative

    def _returned(self, side: int, call: int, slot: str | None, read: int | None) -> Distance | None:
        """Return the error of what a compared call around another one returns, where the inner one made that, bit by bit, or what
        is ``read`` is that: a view of what the inner one made."""
        stream, errors = self.tree.streams[side], self.tree.verdicts.errors
        made = stream.slots(call).get(stream.names.number(slot)) if slot is not None else None
        known = [stream.identity[k] for k in (made, read) if k is not None and stream.is_identified[k]]
        for pair in self.tree.covering(call, side):
            for n in errors.entries(pair):
                its = errors.slots[side][n]
                if errors.outputs[n] and stream.is_identified[its] and stream.identity[its] in known:
                    return errors.distance(n)
        return None

    def unread(self) -> set[Call]:
        """Return loose calls whose result was read and compared nowhere, neither theirs nor that of a function around them."""
        around = {(s, call): ((s, n) for n in (call, *self.tree.around(call, s))) for s, call in self.uncompared}
        return {call for call, its in around.items() if self.compared.isdisjoint(its)}

    def lasting(self) -> Iterator[tuple[int, Row]]:
        """Yield ``(side, call)`` of the loose calls whose results later steps read."""
        told = set(self.untold())
        for side, stream in enumerate(self.tree.streams):
            settled, lasting = self._with_family(side, self.settled[side]), stream.during(*LASTING)
            ends = (call for call in self.ends[side] if call not in settled and (lasting[call] or (side, call) not in told))
            yield from ((side, stream.row(call)) for call in ends)

    def dead_ends(self) -> Iterator[Call]:
        """Yield loose calls that compute something which shows up nowhere else: nobody reads it, no call around returns it. What
        another tool or framework records is not all that ran: of that nothing is said."""
        if self.tree.is_foreign:
            return
        for side, stream in enumerate(self.tree.streams):
            calls = np.flatnonzero(self.loose[side][:-1] & ~stream.has_children)
            if not len(calls):
                continue
            family = self._with_family(side, self.readers[side] | self.settled[side].keys())
            chosen = np.zeros(len(stream), bool)
            chosen[[call for call in calls.tolist() if call not in family]] = True
            rounds = stream.names.table(roundoff)[stream.dtype] > 0
            slots = np.flatnonzero(chosen[stream.call] & rounds & stream.names.table(is_output)[stream.slot] & stream.is_identified)
            known = distinct(stream.identity[slots])
            shows: dict[int, set[int]] = {digest: set() for digest in known.tolist()}
            for k in np.flatnonzero(np.isin(stream.identity, known) & stream.is_identified).tolist():
                shows[int(stream.identity[k])].add(int(stream.call[k]))
            for call in dict.fromkeys(stream.call[slots].tolist()):
                around = {n for n in self.tree.around(call, side) if self.loose[side][n]}
                made = slots[stream.call[slots] == call].tolist()
                if all(not shows[int(stream.identity[k])] - around - {call} for k in made) and not self.flow[side].is_added(call):
                    yield side, call

    def untold(self) -> Iterator[tuple[int, int]]:
        """Yield ``(side, call)`` of the loose calls of which it is not known who reads their results, for a dump does not say. Of
        a native capture they are those that a dump on the other side might have had and whose results nobody reads."""
        streams = self.tree.streams
        for side, stream in enumerate(streams):
            other = streams[1 - side]
            if not stream.imported and not other.imported:
                continue
            listed = set(zip(other.op.tolist(), other.phase.tolist(), strict=True))
            for call in np.flatnonzero(self.loose[side][:-1]).tolist():
                is_listed = (int(stream.op[call]), int(stream.phase[call])) in listed and call not in self.readers[side]
                if is_listed or (stream.imported and not _passes_on(stream, call)):
                    yield side, call

    def _with_family(self, side: int, calls: Iterable[int]) -> set[int]:
        """Add the loose calls inside and around calls. An operator and the function that is no more than it write one result, and
        only one of the two is named as its producer."""
        stream, loose, found = self.tree.streams[side], self.loose[side], set(calls)
        for call in calls:
            inner, outer = call, int(stream.parents[call])
            while len(inside := stream.inside(inner)) == 1 and loose[inside[0]]:
                inner = int(inside[0])
                found.add(inner)
            while outer != NONE and loose[outer] and len(stream.inside(outer)) == 1:
                found.add(outer)
                outer = int(stream.parents[outer])
        return found


def behind(tree: Tree, side: int, call: int, wanted: Callable[[int], bool]) -> list[int]:
    """Return the calls of some that made what a call returns: itself, or those whose results it only moves. Where one side has a
    view, which is named by who wrote what it shows, the other may have a copy."""
    stream, criterion = tree.streams[side], tree.verdicts.criterion
    found, seen, pending = [], {NONE}, [call]
    while pending:
        if (call := pending.pop()) in seen:
            continue
        seen.add(call)
        op, level, phase = (stream.names.names[int(of[call])] for of in (stream.op, stream.level, stream.phase))
        if wanted(call):
            found.append(call)
        elif has(op, "view") or criterion.row(op, level, phase).own == "exact":
            pending += stream.producers[stream.slots_of(call, is_input)].tolist()
        else:
            found += [inner for inner in stream.inside(call).tolist() if wanted(inner)]
    return found


def _passes_on(stream: Stream, call: int) -> bool:
    """Tell whether all results of a call are what it got, by what is known of both: a module that does nothing (``Dropout(0)``)."""
    slots = [stream.slots_of(call, kind) for kind in (is_input, is_output)]
    known = [np.where(stream.is_identified[k], stream.identity[k].astype(np.float64), 0) for k in slots]
    read, made = (np.c_[stream.numel[k], stream.mean[k], stream.l2[k], its] for k, its in zip(slots, known, strict=True))
    return len(made) > 0 and bool((made[:, None] == read).all(axis=2).any(axis=1).all())


def _ends(stream: Stream, unmatched: Array) -> dict[int, list[int]]:
    """Return gradients that go to no recorded call: those of what no forward call made, and what a hook on a gradient computes.
    Who reads them is the optimizer; where it was recorded, they are compared there."""
    number = stream.names.number
    if stream.imported or (stream.phase == number("optimizer")).any():
        return {}
    fine = stream.level == number("aten")  # where who reads a result of a backward cannot be told from the end of it
    calls = np.flatnonzero(unmatched[:-1] & (stream.phase == number("backward")) & ~fine).tolist()
    read = set(zip(stream.producer.tolist(), stream.producer_slot.tolist(), strict=True)) if calls else set()
    found = {}
    for call in calls:
        forward = stream.find(int(stream.forward_seq[call]))
        given = stream.slots(forward) if forward != NONE else {}
        known, seq = stream.names.names, int(stream.seq[call])
        made = ((known[slot], k) for slot, k in stream.slots(call).items() if (seq, slot) not in read)
        made = ((name, k) for name, k in made if is_output(name) and not (stream.mixed and _is_told(stream, call, k)))
        if slots := [k for name, k in made if forward == NONE or _is_made_by_none(stream, given, name)]:
            found[call] = slots
    return found


def _is_told(stream: Stream, call: int, k: int) -> bool:
    """Tell whether the backward of the layer around a call has a gradient as one of its parameters'."""
    around = int(stream.parents[call])
    slots = {} if around == NONE else stream.slots(around)
    named = [j for name, j in slots.items() if stream.names.names[name].startswith("grad_param.")]
    return any(stream.numel[j] == stream.numel[k] and stream.l2[j] == stream.l2[k] for j in named)


def _is_made_by_none(stream: Stream, given: dict[int, int], gradient: str) -> bool:
    """Tell whether a gradient is one of an input that no recorded call made."""
    k = given.get(stream.names.number(gradient.removeprefix("grad_")))
    return k is not None and stream.producer_of(k) is None


def judge_region(region: Region, criterion: Criterion, parts: tuple[Parts, Parts]) -> Judged:
    """Judge a region that somebody reads as one call of its last operator, at the exit that is furthest from what is explained."""
    limits = granted(region, region.exits, criterion, parts)
    errors = np.array([error.relative for _, error, _ in region.exits])
    at = int(np.argmax(excess(errors, np.array([expected for _, expected in limits]))))
    (exit_judged, error, starts), (own, expected) = region.exits[at], limits[at]
    worst = region.worst_of(starts)
    tree, exit_ = region.tree, exit_judged.call
    calls = [[tree.streams[side].row(call) for call in sorted(region.calls[side])] for side in (0, 1)]
    row = criterion.rows[-1]
    baseline, candidate = (rows[-1] if rows else None for rows in calls)
    # A side without calls of its own stands where the result is read.
    first = baseline or replace(exit_.baseline, slots={})
    last = candidate or replace(baseline or exit_.candidate, seq=exit_.candidate.seq, slots={})
    slots = {f"input.{n}": replace(s, slot=f"input.{n}") for n, s in enumerate(region.sources.values())}
    slots["output.0"] = replace(error, slot="output.0")
    judged = Judged(Measured(first, last, slots, None, ()), row, worst, error.relative, own, expected, "output.0")
    limit = math.nan
    if worst == 0 and region.known:
        unit = max(region.unit, roundoff(tree.streams[0].dtype_of(error.baseline)))
        limit = few_elements_of(tree.verdicts.errors, error, own, unit, criterion)
    if not math.isnan(limit):
        judged.own = judged.expected = min(limit, expected)
        judged.decided = FEW if limit < expected else 0
    judged.slot_expected["output.0"] = judged.expected
    judged.unsized = error.unsized
    if not region.known:
        judged.incomparable = Reason(Why.SOURCES)
    return judged


def chooses(region: Region) -> bool:
    """Tell whether gradients go through the backward of a call that selects numbers, which gives them to any of equal ones."""
    for stream, calls in zip(region.tree.streams, region.calls, strict=True):
        forward = stream.forward[sorted(calls)]
        if stream.names.table(having("selects"))[stream.op[forward[forward != NONE]]].any():
            return True
    return False


def is_part_of(region: Region, other: Region) -> bool:
    """Tell whether a region is another one at a finer level, or the backward of that: all its calls lie inside, or some go on."""
    shares = any(not its.isdisjoint(others) for its, others in zip(region.calls, other.calls, strict=True))
    if shares and region.exits[0][0].call.candidate.seq > other.exits[0][0].call.candidate.seq:
        return True
    for side, calls in enumerate(region.calls):
        stream, its = region.tree.streams[side], other.calls[side]
        for call in calls:
            forward = stream.find(int(stream.forward_seq[call]))
            around = region.tree.around(call, side)
            above = next((stream.find(int(stream.forward_seq[n])) for n in around if stream.forward_seq[n] >= 0), NONE)
            if its.isdisjoint((*around, forward, above)):
                return False
    return region.calls != other.calls


def granted(
    region: Region, exits: Iterable[tuple[object, Distance, list[Call]]], criterion: Criterion, parts: tuple[Parts, Parts]
) -> list[tuple[float, float]]:
    """Return, by exit, the relative error that rounding makes in a run up to it, and with what the worst of its sources explains.
    What its parts grant, carried through the run, and no more than the row for what has no name."""
    row, count, found = criterion.rows[-1], max(map(len, region.calls)), []
    calls = [its | beside for its, beside in zip(region.calls, region.beside, strict=True)]
    coarsest = max(region.unit, *(side.coarsest(its) for side, its in zip(parts, calls, strict=True)))
    flat = criterion.limits or region.tree.streams[0].mixed or not any(region.calls)  # frameworks' parts are not one another's
    rows: list[CriterionRow] = []
    for side, its in zip(parts, calls, strict=True) if not flat else ():
        side.of(None, its)
        rows += side.rows(its)
    for _, error, starts in exits:
        worst, unit = region.worst_of(starts), max(coarsest, roundoff(region.tree.streams[0].dtype_of(error.baseline)))
        own, most = explained(row, unit, count, 0.0), explained(row, unit, count, worst)
        if rows:
            sides = [parts[side].of([c for s, c in starts if s == side], set()) for side in (0, 1)]
            cancels, summed = np.max([parts[n].cancels(k) for n, k in enumerate((error.baseline, error.candidate))], axis=0)
            carried = max(r.factor for r in rows) * max(side.gain for side in sides) * summed * worst
            passed = most - own if math.isfinite(most) else math.inf
            own = min(max(cancels, summed) * own, cancels * math.hypot(*(side.own for side in sides)))
            most = own + passed if any(r.carry in BRANCHES for r in rows) else min(max(cancels, summed) * most, own + carried)
            shared = float(coherent(errors := region.tree.verdicts.errors, entry_of(errors, error)).max(initial=0.0))
            biased = unrecorded(criterion, unit)[1] * (math.sqrt(count) if unit <= SINGLE else 1.0) + most - own
            if shared > biased:  # all elements are off alike
                own, most = (min(limit, error.relative * biased / shared) for limit in (own, most))
        found.append((own, most))
    return found


def explained(row: CriterionRow, unit: float, calls: int, worst: float) -> float:
    """Return the relative error that a run of calls may have, given the worst of what goes in."""
    own = row.ulps * unit * math.sqrt(max(1, calls))
    return own + row.factor * worst + FLIPPED * math.sqrt(worst) if math.isfinite(worst) else math.inf


def operators(region: Region) -> tuple[str, ...]:
    """Return the operators of a region, each once, in order: the candidate's, or the baseline's where it has none."""
    stream = region.tree.streams[1 if region.calls[1] else 0]
    calls = sorted(region.calls[1] or region.calls[0])
    return tuple(dict.fromkeys(stream.names.names[int(stream.op[call])] for call in calls))


def added(region: Region) -> Reason | None:
    """Return which operators one run has in a region beside what the other one has there, or in their place."""
    sides = zip(region.tree.streams, region.calls, strict=True)
    ran = [Counter(stream.names.names[int(stream.op[call])] for call in sorted(calls)) for stream, calls in sides]
    return ran_otherwise([tuple(first - second) for first, second in (ran, ran[::-1])])


def ran_otherwise(alone: Sequence[tuple[object, ...]]) -> Reason | None:
    """Return what one run executes and the other does not, by side, or both do in place of the other's; None where nothing is."""
    side = 0 if alone[0] else 1
    return Why.RUNS_INSTEAD(*alone) if all(alone) else Why.RUNS_ALONE(SIDES[side], alone[side]) if any(alone) else None
