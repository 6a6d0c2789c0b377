"""Formulas that the two runs write another way: differences inside them that come together again are no fault of anybody.

    baseline    -0.5 * (1 + l - m.square() - l.exp())          each pair of calls that both have (`exp`, `sub`, `mul`) stands
    candidate   0.5 * ((0.5 * l).exp().square() + ...)         in both, and reads another intermediate result

A run of calls of one side, and a pair that reads its result, may be a part of two forms of one formula. The search follows what
differs forward, through pairs as long as their outputs differ, through the backward of each forward call, and back to what else
flows in; what one side alone has goes before any pair is asked whether it agrees, for that grants rounding too. It gives two
sets of calls that compute one thing each. They are excused if that thing agrees wherever it leaves the sets, within what rounding
in them explains. What differs and is read by nothing recorded, by an optimizer, by a communication or by a later step (a biased
running variance) has not come together, and excuses nothing. A gradient may go to a backward that no call of this level shows, that
of a gradient (`torch.autograd.grad(..., create_graph=True)`): then what the optimizer reads shows whether it has come together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from copy import copy
from functools import cache, cached_property
from heapq import heappop, heappush

import numpy as np

from trueup.comparison.graph.readers import with_inside
from trueup.comparison.graph.streams import NONE
from trueup.comparison.measures.thresholds import CHANCE, HALF
from trueup.comparison.verdict.budget import unrecorded
from trueup.comparison.verdict.evidence import coherent
from trueup.comparison.verdict.judged import LASTING, Judged, Tree
from trueup.comparison.verdict.optimizer_updates import agreeing
from trueup.comparison.verdict.parts import Parts, coarsest
from trueup.comparison.verdict.regions import Call, Region, Regions, behind, granted
from trueup.foundation.facts.arguments import equal_arguments
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import STEP, is_input, is_output, is_returned, roundoff

LOST: Call = (NONE, NONE)
"""Where a difference goes that does not come together again."""
MOST_CALLS = 100_000
"""Calls of a step that are followed at most; beyond that nothing is excused."""


class Reconvergence:
    """What of one rank and step is excused; ``forced``: with another run's inputs, so what differs goes no further by itself;
    ``rewired``: the pairs that read another call's result, and the entries by which they do."""

    def __init__(self, tree: Tree, regions: Regions, criterion: Criterion, rewired: list[tuple[int, int]], *, forced: bool) -> None:
        self.tree, self.regions, self.criterion, self.rewired = tree, regions, criterion, rewired
        self.never = forced or tree.is_foreign or bool(criterion.limits)
        """Of another tool or framework it is not known who reads what, and limits know of no rounding."""
        self.readers = regions.flow
        # Each run of calls is followed through the same graph, so what is asked of it is asked once.
        self.read_by = tuple(cache(readers.of) for readers in regions.flow)
        self.backwards = tuple(cache(readers.backwards) for readers in regions.flow)
        self.entries, self.differs, self.by_chance = cache(self._entries), cache(self._differs), cache(self.is_by_chance)
        self.ways, self._lost = cache(self._ways), {LOST: math.inf}
        self.left = MOST_CALLS
        self.rewritten: tuple[set[int], set[int]] = set(), set()  # calls of each side that are written another way on the other
        self.unread: dict[int, None] = {}  # pairs among them that make something that differs and that nobody reads

    @cached_property
    def forward(self) -> Reconvergence:
        """The same, followed through no backward: what is lost there may be behind a forward that agrees."""
        found = copy(self)
        backward = [stream.during("backward")[stream.call] for stream in self.tree.streams]
        found.read_by = tuple(cache(lambda k, s=s: [n for n in self.read_by[s](k) if not backward[s][n]]) for s in (0, 1))
        found.backwards, found.ways, found._lost = (cache(lambda _: list[int]()),) * 2, cache(found._ways), {LOST: math.inf}
        return found

    def region(self, region: Region, parts: tuple[Parts, Parts]) -> bool:
        """Tell whether what a run of calls without counterpart makes differs only inside a formula; ``parts`` are its calls'."""
        if self.never:
            return False
        exits = zip(region.exits, granted(region, region.exits, self.criterion, parts), strict=True)
        wrong = {(error.baseline, error.candidate): error.relative for (_, error, _), its in exits if not error.relative <= its[1]}
        return self._follow([(side, call) for side in (0, 1) for call in region.calls[side]], region.agreed, wrong)

    def pair(self, pair: int, slot: str | None = None) -> bool:
        """Tell whether a matched call stands in a formula that is written another way, and what differs there comes together.
        With a slot, only if it is that slot by which it is no counterpart."""
        errors, limits = self.tree.verdicts.errors, self.tree.verdicts.slot_expected
        at = [n for n in errors.entries(pair) if errors.relative[n] > 0 and not errors.relative[n] <= limits[n]]
        arguments = self.tree.verdicts.errors.arguments.get(pair)
        strict = arguments is not None and not equal_arguments(*arguments)  # of -f(x) and g(-x) one may be where the other has none
        if self.never or not (strict or self.is_by_chance(pair, slot)):
            return False
        wrong = {(int(errors.slots[0][n]), int(errors.slots[1][n])): float(errors.relative[n]) for n in at}
        worst = float(self.tree.verdicts.error_in[pair]) if strict else 0.0
        return self._follow([(side, int(errors.calls[side][pair])) for side in (0, 1)], worst, wrong, strict=strict)

    def reader(self, judged: Judged, slot: str) -> bool:
        """Tell whether a call that reads what no compared call made different reads it by chance."""
        return self.pair(int(self.tree.pairs[1][self.tree.streams[1].find(judged.call.candidate.seq)]), slot)

    def holds(self, pair: int) -> bool:
        """Tell whether a matched call stands in a formula that was excused."""
        return pair != NONE and int(self.tree.verdicts.errors.calls[1][pair]) in self.rewritten[1]

    def _entries(self, pair: int) -> tuple[list[int], list[int]]:
        """Return the entries of the errors of a matched call, and those of its results."""
        found = list(self.tree.verdicts.errors.entries(pair))
        return found, [n for n in found if self.tree.verdicts.errors.outputs[n]]

    def _differs(self, pair: int) -> bool:
        """Tell whether a matched call's results are further off than it makes them by itself."""
        relative = self.tree.verdicts.errors.relative[self.entries(pair)[1]]
        return not float(relative.max(initial=0.0)) <= self.tree.verdicts.own[pair]

    def is_by_chance(self, pair: int, slot: str | None = None) -> bool:
        """Tell whether a matched call reads, on the two sides, what no two counterparts made, or its forward does."""
        errors, (_, candidate) = self.tree.verdicts.errors, self.tree.streams
        entries = [n for n in errors.entries(pair) if errors.inputs[n] and (slot is None or errors.distance(n).slot == slot)]
        if any(self._made(0, int(errors.slots[0][n])) != self._made(1, int(errors.slots[1][n])) for n in entries):
            return True
        forward = int(self.tree.pairs[1][candidate.find(int(candidate.forward_seq[errors.calls[1][pair]]))])
        return slot is None and forward not in (NONE, pair) and self.by_chance(forward)

    def fresh(self) -> tuple[Parts, Parts]:
        """Return what each call of both sides grants."""
        return self._parts[0].again(), self._parts[1].again()

    @cached_property
    def _links(self) -> list[bool]:
        """Whether each side goes backward and functions were recorded, which tell whose backward is whose."""
        return [bool((stream.during("backward") & stream.of_level("api")).any()) for stream in self.tree.streams]

    @cached_property
    def astray(self) -> set[int]:
        """Pairs that differ by what one of `rewired` was given in place of another result, unless an eighth is left of that: they
        are no reason for others to differ, but belong to the formula, whose parts may have changed places."""
        errors, found = self.tree.verdicts.errors, set[int]()
        pending = [(pair, float(errors.relative[entry]) / CHANCE) for pair, entry in self.rewired]
        while pending:
            pair, least = pending.pop()
            made = self.entries(pair)[1]
            if pair in found or not float(errors.relative[made].max(initial=0.0)) > least:
                continue
            found.add(pair)
            readers = {int(self.tree.streams[1].call[n]) for k in made for n in self.read_by[1](int(errors.slots[1][k]))}
            pending += [(its, least) for its in self.tree.pairs[1][sorted(readers)].tolist() if its != NONE]
        return found

    @cached_property
    def gradients_agree(self) -> bool:
        """Whether all that the optimizer reads agrees, whoever made it."""
        return agreeing(self.tree) is not None

    @cached_property
    def _parts(self) -> tuple[Parts, Parts]:
        unit = min(map(coarsest, self.tree.streams))
        first, second = (Parts(side, np.arange(len(side.stream)), self.criterion, unit) for side in self.readers)
        return first, second

    def _made(self, side: int, k: int) -> tuple[object, ...]:
        """Return what tells whether two slots hold what counterparts made; no two are alike where a call without one did."""
        stream, pairs = self.tree.streams[side], self.tree.pairs[side]
        made = stream.call[self.readers[side].parts(k)].tolist() or [int(stream.producers[k])]
        return tuple(sorted((int(pairs[call]), 0 if call == NONE else -1 - side if pairs[call] == NONE else 1) for call in made))

    def _follow(self, starts: Iterable[Call], worst: float, wrong: dict[tuple[int, int], float], *, strict: bool = False) -> bool:
        """Follow all that differs from some calls on. ``strict``: nothing but what they were given explains what is left behind
        them, for a wrong number shows in what flows into their backward, too."""
        starts = list(starts)
        if all(call in self.rewritten[side] for side, call in starts):
            return True
        if self.runs_out(starts, max(wrong.values(), default=0.0) / CHANCE):
            return False
        worst = worst if strict else max(worst, _Walk(self, worst, wrong).flows_in(starts))
        walk = _Walk(self, worst, wrong)
        found = walk.run(starts)
        self.left -= sum(map(len, walk.calls))
        if not found and not strict and (flows_in := walk.sources().agreed) > worst:
            # It came from elsewhere, so that the walk went on to where nothing agrees.
            walk = _Walk(self, flows_in, wrong)
            found = walk.run(starts)
            self.left -= sum(map(len, walk.calls))
        if found:
            for mine, its in zip(self.rewritten, walk.calls, strict=True):
                mine |= its
            self.unread |= walk.unread
        return found

    def runs_out(self, starts: Iterable[Call], least: float) -> bool:
        """Tell whether differences above ``least``, which no walk grants, lead from some calls to where nothing comes together any
        more. Each walk would end there, but late; this goes along the largest differences, and remembers where they lead."""
        pending = [(-math.inf, node, node) for node in sorted({self._node(side, call) for side, call in starts})]
        came: dict[Call, Call] = {}
        while pending:
            width, node, before = heappop(pending)
            if node in came:
                continue
            came[node] = before
            lost = min(-width, self._lost.get(node, 0.0))
            if lost > least:
                while came[node] != node:
                    node = came[node]
                    self._lost[node] = max(lost, self._lost.get(node, 0.0))
                return True
            for wide, other in self.ways(node):
                if other not in came and min(wide, -width) > least:
                    heappush(pending, (-min(wide, -width), other, node))
        return False

    def _ways(self, node: Call) -> list[tuple[float, Call]]:
        """Return where a call's results go, or both of a pair's, each with the difference up to which a walk goes there."""
        pair, found = int(self.tree.pairs[node[0]][node[1]]), []
        calls = [node] if pair == NONE else [(side, int(self.tree.verdicts.errors.calls[side][pair])) for side in (0, 1)]
        for side, call in calls:
            stream = self.tree.streams[side]
            if self.lasts(side, call):
                return [(math.inf, LOST)]
            for k, its, lost, _ in self.results(side, call, set()):
                wide = self._width(side, pair, k)
                found += [(wide, LOST)] if lost else [self._way(side, int(stream.call[reader]), reader, wide) for reader in its]
            found += [self._way(side, other, None, math.inf) for other in self.backwards[side](call)]
        return found

    def lasts(self, side: int, call: int) -> bool:
        """Tell whether what a call makes is read by a later step or another rank, and does not agree with what is read there."""
        stream = self.tree.streams[side]
        op, phase = (stream.names.names[int(of[call])] for of in (stream.op, stream.phase))
        if phase not in LASTING or call in self.regions.settled[side]:
            return (side, call) in self.regions.states and call not in self.regions.settled[side]
        alone = self.tree.pairs[side][call] == NONE
        return call in self.regions.ends[side] or phase != LASTING[0] or op == STEP or (has(op, "in-place") and not alone)

    def _way(self, side: int, call: int, k: int | None, wide: float) -> tuple[float, Call]:
        pair = int(self.tree.pairs[side][call])
        node = LOST if self.ends(pair) else self._node(side, call)
        return min(wide, self._width(side, pair, k)), node

    def ends(self, pair: int) -> bool:
        """Tell whether what a matched call reads goes no further: it returns nothing, and holds no calls that read it, too."""
        call = self.tree.verdicts.errors.calls[1][pair]
        return pair != NONE and not self.entries(pair)[1] and not self.tree.streams[1].has_children[call]

    def _node(self, side: int, call: int) -> Call:
        pair = int(self.tree.pairs[side][call])
        return (side, call) if pair == NONE else (1, int(self.tree.verdicts.errors.calls[1][pair]))

    def _width(self, side: int, pair: int, k: int | None) -> float:
        """Return by how much a slot of a matched call differs; infinity where that is not known."""
        n = None if pair == NONE or k is None else self.entry(side, pair, k)
        relative = math.inf if n is None else float(self.tree.verdicts.errors.relative[n])
        return math.inf if math.isnan(relative) else relative

    def entry(self, side: int, pair: int, k: int) -> int | None:
        """Return the entry of the errors of a matched call that compares a slot."""
        return next((n for n in self.entries(pair)[0] if self.tree.verdicts.errors.slots[side][n] == k), None)

    def results(self, side: int, call: int, agree: set[int]) -> Iterator[tuple[int, list[int], bool, bool]]:
        """Yield the results of a call that it made and that do not agree, who reads each, whether it is lost: written by both runs
        into what lasts, and whether nobody reads it in either."""
        stream, alone = self.tree.streams[side], bool(self.tree.pairs[side][call] == NONE)
        outputs = stream.slots_of(call, is_output).tolist()
        readers = {k: self.read_by[side](k) for k in outputs if k not in agree and not self.readers[side].was_there(k)}
        new = not has(stream.names.names[int(stream.op[call])], "in-place")
        read = new and any(map(self.read_by[side], outputs))  # then what nobody reads is a by-product: `min` has places and values
        for k, its in readers.items():
            slot = stream.names.names[stream.slot[k]]
            lasts = new and not alone and slot.startswith("output.") and not is_returned(slot)
            unread = not (its or alone or (read and is_returned(slot)))  # of a call that one side alone has it is said elsewhere
            lost = lasts or (unread and not (self.gradients_agree and self.readers[side].is_unseen(k)))
            # In a training, what is behind a result that no gradient came to is the rest; elsewhere such a result is the run's.
            result = unread and not lasts and slot.startswith("output.") and self._links[side] and not self.backwards[side](call)
            yield k, its, lost and not result, result


class _Walk:
    """One set of calls on each side, as it grows. ``worst``: the largest error of what is known to flow in; ``wrong``: by how
    much slots of both sides disagree that were found to, whatever more calls grant."""

    def __init__(self, of: Reconvergence, worst: float, wrong: dict[tuple[int, int], float]) -> None:
        self.of, self.tree, self.readers = of, of.tree, of.readers
        self.coarsest = 0.0  # unit roundoff of the coarsest dtype that the calls compute in
        self.factor = 1.0  # largest by which one of them multiplies an error that goes in
        self.wrong, self.least = wrong, max(wrong.values(), default=0.0) / CHANCE
        self.errors, self.worst, self.parts = of.tree.verdicts.errors, worst, of.fresh()
        self.calls: tuple[set[int], set[int]] = set(), set()
        self._new: tuple[set[int], set[int]] = set(), set()  # calls whose part in what is granted was not asked for yet
        self.ends: dict[int, None] = {}  # entries of the errors by which what the sets compute leaves them
        self.settled = False  # whether what lasts agrees by what it is
        self._pending: list[Call] = []
        self._later: list[tuple[int, int, int]] = []  # pairs that read something: candidate's call, side, entry of the errors
        self._met: set[int] = set()
        self.unread: dict[int, None] = {}  # pairs that make something that differs and that nobody reads: they may be the end of it

    def flows_in(self, starts: Iterable[Call]) -> float:
        """Return the largest error of what flows into some calls, into their backward, and into what belongs to either."""
        for side, call in starts:
            for one in (call, *self.of.backwards[side](call)):
                self._absorb(side, one)
        while self._pending:
            self._back(*self._pending.pop())
        return self.sources().agreed

    def run(self, starts: Iterable[Call]) -> bool:
        """Follow all that differs; return whether it comes together."""
        for side, call in starts:
            self._absorb(side, call)
        while self._pending or self._later:
            if sum(map(len, self.calls)) > self.of.left:
                return False
            if not self._pending:
                if not self._decide(*heappop(self._later)):
                    return False
                continue
            side, call = self._pending.pop()
            if not self._forward(side, call):
                return False
            self._back(side, call)
        return (bool(self.ends) or self.settled) and self._agree()

    def _absorb(self, side: int, call: int) -> None:
        """Add a call, and the one that it is matched with."""
        if call in self.calls[side]:
            return
        self.calls[side].add(call)
        self._new[side].add(call)
        self.coarsest = max(self.coarsest, self.parts[side].coarsest([call]))
        self.factor = max(self.factor, self.parts[side].rows([call])[0].factor)
        self._pending.append((side, call))
        pair = int(self.tree.pairs[side][call])
        if pair != NONE:
            self._met.add(pair)
            self.ends |= dict.fromkeys(n for n in self.of.entries(pair)[1] if self._agrees(n))
            self._absorb(1 - side, int(self.errors.calls[1 - side][pair]))

    def _forward(self, side: int, call: int) -> bool:
        """Go on to who reads the results that differ; return whether all are read by a call that can be looked at."""
        pair = int(self.tree.pairs[side][call])
        if self.of.lasts(side, call):
            return False
        self.settled |= call in self.of.regions.settled[side]
        agree = {int(self.errors.slots[side][n]) for n in self.ends} if pair != NONE else set()
        for _, its, lost, unread in self.of.results(side, call, agree):
            if lost or not all(self._read(side, reader) for reader in its):
                return False
            self.unread |= {pair: None} if unread else {}
        return all(self._meet(side, other, None) for other in self.of.backwards[side](call))

    def _read(self, side: int, k: int) -> bool:
        pair = int(self.tree.pairs[side][call := int(self.tree.streams[side].call[k])])
        return self._meet(side, call, None if pair == NONE else self.of.entry(side, pair, k))

    def _meet(self, side: int, call: int, entry: int | None) -> bool:
        """Take in a call that reads something and that one side alone has; a pair waits. Return whether it can be looked at."""
        pair = int(self.tree.pairs[side][call])
        if pair == NONE:
            self._absorb(side, call)
            return True
        heappush(self._later, (int(self.errors.calls[1][pair]), side, NONE if entry is None else entry))
        return True

    def _decide(self, place: int, side: int, entry: int) -> bool:
        """Take in a pair that reads something, unless that agrees by what is known once all that one side alone has is."""
        pair = int(self.tree.pairs[1][place])
        if entry != NONE and self._agrees(entry):
            self.ends[entry] = None
            return True
        if pair in self._met:
            return True
        if self.of.ends(pair):
            return False
        self._absorb(side, int(self.errors.calls[side][pair]))
        return True

    def _back(self, side: int, call: int) -> None:
        """Take in what flows into a call and belongs to the formula: calls of one side, and pairs that differ by chance."""
        stream = self.tree.streams[side]
        for slot, k in self.of.regions.given_to(side, call):
            if not is_input(stream.names.names[slot]):
                continue
            for made in self.readers[side].parts(k) or [NONE]:
                producer = int(stream.producers[k]) if made == NONE else int(stream.call[made])
                pair = int(self.tree.pairs[side][producer])
                if producer == NONE or producer in self.calls[side]:
                    continue
                if pair == NONE or pair in self.of.astray or (self.of.differs(pair) and self.of.by_chance(pair)):
                    self._absorb(side, producer)

    def _agrees(self, n: int) -> bool:
        """Tell whether an entry is off by no more than the calls that made it grant."""
        if (int(self.errors.slots[0][n]), int(self.errors.slots[1][n])) in self.wrong:
            return False
        return float(self.errors.relative[n]) <= min(sum(self._granted(n, self.worst)), self.least)

    def _granted(self, n: int, worst: float) -> tuple[float, float]:
        """Return the relative error that rounding makes in the calls, and what the worst of what flows in becomes in them: no more
        than chance makes of it where it could become so much that nothing is told."""
        made = self._makers(n)  # none: a sum that autograd made of whichever
        ends = [[c for s, c in made if s == side] if made else None for side in (0, 1)]
        sides = [parts.of(its, new) for parts, its, new in zip(self.parts, ends, self._new, strict=True)]
        self._new = set(), set()
        factor = max((row.factor for side, call in made for row in self.parts[side].rows([call])), default=self.factor)
        flat = unrecorded(self.of.criterion, self._unit(n))[0] * math.sqrt(max(map(len, self.calls)))
        carried = factor * max(side.gain for side in sides) * worst
        carried = carried if carried < HALF else CHANCE * worst
        return min(flat, math.hypot(*(side.own for side in sides))), carried if carried < HALF else 0.0

    def _unit(self, n: int) -> float:
        """Return the unit roundoff of the coarsest dtype that went into an entry."""
        slots = zip(self.tree.streams, self.errors.slots, strict=True)
        return max(self.coarsest, *(roundoff(stream.dtype_of(int(side[n]))) for stream, side in slots))

    def _agree(self) -> bool:
        """Tell whether all that leaves the two sets agrees, by what their calls grant."""
        region = self.sources()
        self.worst, self.parts, self._new = region.agreed, self.of.fresh(), (set(self.calls[0]), set(self.calls[1]))
        return region.known and all(self._is_granted(n, region) for n in self.ends)

    def sources(self) -> Region:
        """Return the two sets with what flows into them."""
        region = Region(self.tree, calls=self.calls)
        among = tuple(map(with_inside, self.tree.streams, self.calls))
        for side in (0, 1):
            for call in self.calls[side]:
                self.of.regions._expand(region, side, call, among)
        return region

    def _is_granted(self, n: int, region: Region) -> bool:
        own, carried = self._granted(n, min(self.worst, region.worst_of(made)) if (made := self._makers(n)) else self.worst)
        biased = unrecorded(self.of.criterion, self._unit(n))[1] * math.sqrt(max(map(len, self.calls)))
        shared = float(coherent(self.errors, np.array([n]))[0])
        return float(self.errors.relative[n]) <= min(own + carried, self.least) and shared <= biased + carried

    def _makers(self, n: int) -> list[Call]:
        """Return the calls in the sets that made an entry."""
        found = []
        for side, stream in enumerate(self.tree.streams):
            k = int(self.errors.slots[side][n])
            made = [int(stream.call[k])] if self.errors.outputs[n] else [int(stream.producers[k])]
            made += stream.call[self.readers[side].parts(k)].tolist()
            calls = self.calls[side]
            found += [(side, one) for call in made for one in behind(self.tree, side, call, calls.__contains__)]
        return found
