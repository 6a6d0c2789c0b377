"""What one run alone has: calls that nothing on the other side stands for, results that nobody reads yet, gradients of nothing.

**Calls.** Two implementations of one formula execute other operators, and their results are compared where somebody reads them.
That explains an unmatched call only where the other side has calls of its own, or passes on what went in. It does not where

- nobody reads the result (an added dead end, a branch that was cut),
- the other side reads a result there that no call made, although what it is made of was computed in the same step,
- the function around it computes by operators on one side and by none on the other,
- it is the backward of a call that both sides made, and the other side's has none.

Data movement, comparisons and what returns a tensor that it was given compute nothing, and need no counterpart.

**Results that last** (`Lasting`): gradients where no optimizer was recorded, and what runs behind an optimizer, as an average of
the weights. Each is compared with the nearest of its shape and dtype on the other side, which need not be its counterpart. Where
none is near enough, two that are nearest to each other, and nearer than chance, are counterparts that differ.

**Gradients** (`parted`): behind ``detach()``, ``no_grad()`` or a frozen weight a backward ends early. What is not there is a
gradient of zero to whoever would read it. So the call that makes it on one side alone is where the runs part, whatever its inputs'
errors, and all that lies behind has no counterpart. Likewise the optimizer's step that updates a weight on one side alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import numpy as np

from trueup.comparison.graph.readers import with_inside
from trueup.comparison.graph.streams import NONE, Numbers, Stream
from trueup.comparison.measures.measure import Distance, Measured
from trueup.comparison.measures.thresholds import HALF
from trueup.comparison.verdict.judged import SIDES, Judged, Suspect, Tree, only_modules
from trueup.comparison.verdict.parts import Parts
from trueup.comparison.verdict.regions import Call, Region, Regions, explained, granted
from trueup.comparison.verdict.rewritten import Reconvergence
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import STEP, is_gradient_of_input, is_gradient_of_step, is_input, is_output, roundoff
from trueup.foundation.facts.why import Why
from trueup.foundation.kernels import distance

Source = tuple[int, int]  # a matched call and a slot of it, or `NONE` and a digest
Kind = tuple[int, int]  # shape and dtype of a result
MOST_PAIRS = 1 << 20
"""Distances that are taken for one shape; more are not looked at."""


def dead_ends(regions: Regions, criterion: Criterion) -> list[Call]:
    """Return the unmatched calls that compute what shows up nowhere else, in neither run, but gradients of functions and modules,
    whose sum nobody is named for. Where the other side has a calculation of its own on the same tensor, or of what becomes of it,
    that leads on, it is another implementation that has a by-product."""
    tree, found, rewritten, ends = regions.tree, [], regions.rewritten, list(regions.dead_ends())
    read = [_read_by_loose(regions, n, criterion, [end for end in ends if end[0] == n]) for n in (0, 1)] if ends else []
    for side, call in ends:
        stream, other = tree.streams[side], tree.streams[1 - side]
        fine = stream.level[call] == stream.names.number("aten") or stream.phase[call] != stream.names.number("backward")
        made = stream.slots_of(call, is_output)
        seen = np.isin(stream.identity[made], other.identity[other.is_identified]) & stream.is_identified[made]
        made_of = regions.walk([(side, call)]).calls[side]
        part = not rewritten[side].isdisjoint(made_of) or any(read[1 - side] & _sources(tree, side, n) for n in made_of)
        read_back = bool((stream.numel[made] == 1).all()) and bool(regions.flow[side].backwards(call))  # a backward starts there
        read_back |= bool(only_modules(stream) and tree.covering(call, side))  # by the module's own arithmetic, which is no call
        if fine and not part and not read_back and computes(stream, call, criterion) and not seen.all():
            found.append((side, call))
    return found


def _read_by_loose(regions: Regions, side: int, criterion: Criterion, ends: list[Call]) -> set[Source]:
    stream = regions.tree.streams[side]
    leads_on = regions.loose[side] & ~with_inside(stream, regions.walk(ends).calls[side])
    calls = [call for call in np.flatnonzero(leads_on[:-1]).tolist() if computes(stream, call, criterion)]
    return {source for call in calls for source in _sources(regions.tree, side, call)}


def _sources(tree: Tree, side: int, call: int) -> set[Source]:
    """Return what a call reads, named alike on both sides: by the matched call that made it, or by its bytes."""
    stream = tree.streams[side]
    slots = stream.slots_of(call, is_input)
    made = tree.pairs[side][stream.producers[slots]]
    named = {(pair, int(stream.producer_slot[k])) for pair, k in zip(made.tolist(), slots.tolist(), strict=True) if pair != NONE}
    return named | {(NONE, int(stream.identity[k])) for k in slots.tolist() if stream.is_identified[k]}


def unaccounted(regions: Regions, criterion: Criterion) -> set[Call]:
    """Return the other unmatched calls that nothing on the other side stands for."""
    tree = regions.tree
    if tree.is_foreign:
        return set()
    return {*_from_nowhere(regions), *_without_operators(tree, criterion), *_without_backward(regions, criterion)}


def computes(stream: Stream, call: int, criterion: Criterion) -> bool:
    """Tell whether a call makes numbers that round and that it was not given."""
    made, given = _rounding(stream, call, criterion), stream.slots_of(call, is_input)
    same = stream.is_identified[made] & np.isin(stream.identity[made], stream.identity[given[stream.is_identified[given]]])
    return len(made) > 0 and not same.all()


def _rounding(stream: Stream, call: int, criterion: Criterion) -> Numbers:
    """Return the results of a call that may round, equal to what it was given or not (`x - 0`)."""
    made = stream.slots_of(call, is_output)
    made = made[stream.names.table(roundoff)[stream.dtype[made]] > 0]
    name = stream.names.names
    op, level, phase = (name[int(of[call])] for of in (stream.op, stream.level, stream.phase))
    return made[:0] if criterion.row(op, level, phase).own == "exact" else made


def _from_nowhere(regions: Regions) -> Iterator[Call]:
    """Yield the calls whose results the other side reads too, where they are what no call there made. What a region makes of
    weights and constants alone may have been made before the capture began."""
    for region in regions.found:
        side = 1 if region.sides[1] else 0
        if region.sides[0] == region.sides[1] or not _reads_results(regions.tree.streams[side], region.calls[side]):
            continue
        other = regions.tree.streams[1 - side]
        if any(_is_made_by_none(other, error.candidate if side == 0 else error.baseline) for _, error, _ in region.exits):
            yield from ((side, call) for call in region.calls[side])


def _reads_results(stream: Stream, calls: set[int]) -> bool:
    """Tell whether some calls read what another one computed before in these steps."""
    chosen = np.zeros(len(stream) + 1, bool)
    chosen[list(calls)] = True
    reads = chosen[stream.call] & stream.names.table(is_input)[stream.slot] & (stream.producer >= stream.seq[0])
    return bool((reads & ~chosen[stream.producers]).any())


def _is_made_by_none(stream: Stream, k: int) -> bool:
    """Tell whether no call made what a slot holds, in a capture that shows who made what: one of modules alone does not."""
    if int(stream.producer[k]) != NONE or stream.of_level("aten").any():
        return int(stream.producer[k]) == NONE
    return bool(((stream.producer > stream.seq[0]) & (stream.producers == NONE)).any())  # calls of a level that was not read


def _without_operators(tree: Tree, criterion: Criterion) -> Iterator[Call]:
    """Yield operators in a function that both sides called, and that has none on the other side which computes."""
    aten, api = (tree.streams[0].names.number(level) for level in ("aten", "api"))
    if not any(len(calls) and (s.level[calls] == aten).any() for s, calls in zip(tree.streams, tree.unmatched, strict=True)):
        return
    functions = np.flatnonzero(tree.streams[1].level[tree.verdicts.errors.calls[1]] == api)
    inside = [s.has_children[calls[functions]] for s, calls in zip(tree.streams, tree.verdicts.errors.calls, strict=True)]
    for side, (stream, calls) in enumerate(zip(tree.streams, tree.unmatched, strict=True)):
        above = tree.pairs[side][stream.parents[calls[stream.level[calls] == aten]]]
        pairs = {*functions[inside[side] & ~inside[1 - side]].tolist(), *above[np.isin(above, functions)].tolist()}
        for pair in sorted(pairs):
            if not any(len(_rounding(tree.streams[1 - side], call, criterion)) for call in _operators(tree, pair, 1 - side)):
                alone = (call for call in _operators(tree, pair, side) if not _adds_up(stream, call))
                yield from ((side, call) for call in alone if computes(stream, call, criterion))


def _adds_up(stream: Stream, call: int) -> bool:
    """Tell whether a call reads what a backward made and the function around it was not given: autograd adds gradients up as they
    come, and the function at which it does so is another one where they come in another order."""
    above, backward = int(stream.parents[call]), stream.names.number("backward")
    given = stream.identity[slice(*stream.starts[above : above + 2])]
    read = stream.slots_of(call, is_input)
    read = read[(stream.phase[stream.producers[read]] == backward) & (stream.producers[read] != NONE) & stream.is_identified[read]]
    made = [k for k in read.tolist() if above not in stream.around(int(stream.producers[k]))]
    return stream.phase[call] == backward and not set(stream.identity[made].tolist()) <= set(given.tolist())


def _operators(tree: Tree, pair: int, side: int) -> list[int]:
    """Return the calls inside a matched call that have none inside."""
    around = int(tree.verdicts.errors.calls[side][pair])
    return [call for call in tree.inside(around, side) if not tree.streams[side].has_children[call]]


def _without_backward(regions: Regions, criterion: Criterion) -> Iterator[Call]:
    """Yield the backward of functions and modules that both sides called, where the other side's went backward fewer times and
    has none of its own there."""
    tree = regions.tree
    for side, (stream, calls) in enumerate(zip(tree.streams, tree.unmatched, strict=True)):
        other, aten = tree.streams[1 - side], stream.names.number("aten")
        backward = (stream.phase[calls] == stream.names.number("backward")) & (stream.level[calls] != aten)
        chosen = calls[backward & (stream.saved[calls] != NONE)]
        pairs = tree.pairs[side][stream.forward[chosen]]
        partner = np.r_[tree.verdicts.errors.calls[1 - side], NONE][pairs]
        theirs = np.flatnonzero((other.phase == other.names.number("backward")) & (other.level != aten))
        mine = np.flatnonzero((stream.phase == stream.names.number("backward")) & (stream.level != aten))
        often, less = (np.bincount(of[of != NONE], minlength=1) for of in (stream.forward[mine], other.forward[theirs]))
        missing = chosen[(partner != NONE) & (_at(less, partner) < _at(often, stream.forward[chosen]))]
        forward = stream.forward[missing].tolist()
        alone = (pair for pair in zip(missing.tolist(), forward, strict=True) if pair[0] not in regions.rewritten[side])
        yield from ((side, call) for call, of in alone if computes(stream, of, criterion))


def _at(counts: Numbers, of: Numbers) -> Numbers:
    return np.where((of >= 0) & (of < len(counts)), counts[np.minimum(of, len(counts) - 1)], 0)


class Lasting:
    """The results of one rank and step that nobody reads yet."""

    def __init__(self, regions: Regions, criterion: Criterion, parts: tuple[Parts, Parts]) -> None:
        self.regions, self.streams, self.criterion, self.parts = regions, regions.tree.streams, criterion, parts
        self.unread = [spare | ends for spare, ends in zip(regions.spare, regions.ends, strict=True)]
        self.made = [_by_kind(stream, unread) for stream, unread in zip(self.streams, self.unread, strict=True)]
        self.nearest = cache(self._nearest)
        self.walked = cache(lambda side, call: regions.walk([(side, call)], covered=not regions.loose[side][call]))

    def settle(self) -> None:
        """Find the calls whose results agree with what the other side has there, and the runs of calls that differ in theirs."""
        for side, (ends, settled) in enumerate(zip(self.unread, self.regions.settled, strict=True)):
            for call, slots in ends.items():
                errors = [its] if (its := self._moved(side, call)) is not None else [self._apart(side, k) for k in slots]
                settled |= {call: max(known)} if len(known := [e for e in errors if e is not None]) == len(errors) > 0 else {}
        self._differing()

    def _differing(self) -> None:
        """Make a region of each run of calls whose results are unlike any of the other side, but nearest to one that is nearest to
        them: too near for chance."""
        ends, settled, held = self.regions.ends, self.regions.settled, dict[Call, Region]()
        left = [{k for call in its.keys() - done.keys() for k in its[call]} for its, done in zip(ends, settled, strict=True)]
        for k in sorted(left[0]):
            best = self.nearest(0, k)
            if best not in left[1] or self.nearest(1, best) != k or self.streams[0].numel[k] == 1:  # a number is near another
                continue
            found, error = self._between((0, k), best)
            calls = [(side, int(stream.call[its])) for side, (stream, its) in enumerate(zip(self.streams, (k, best), strict=True))]
            if not error.relative < HALF:
                continue
            rows = [self.streams[side].row(call) for side, call in calls]
            judged = Judged(Measured(rows[0], rows[1], {}, None, ()), self.criterion.rows[-1], 0.0, 0.0, 0.0, 0.0, None)
            region = held.setdefault(max(calls, key=lambda one: len(ends[one[0]][one[1]])), found)
            region.take(found)
            region.exits.append((judged, error, calls))
        for region in held.values():
            self.regions.add(region)

    def _moved(self, side: int, call: int) -> float | None:
        """Return the error of what a call only moves here and no call moves on the other side, where it lasts as it was made. That
        it does the steps before have shown: of the first one a result may have been dropped there."""
        stream, other, tree = self.streams[side], self.streams[1 - side], self.regions.tree
        made, given = (stream.slots_of(call, kind) for kind in (is_output, is_input))
        given = given[stream.is_identified[given] & np.isin(stream.identity[given], stream.identity[made])]
        pairs = tree.pairs[side][stream.producers[given]]
        for pair in pairs[pairs != NONE].tolist() if len(made) == 1 and self.regions.origins.step is not None else ():
            its = int(tree.verdicts.errors.calls[1 - side][pair])
            op = other.names.names[int(other.op[its])]
            read = any(self.regions.flow[1 - side].of(k) for k in other.slots_of(its, is_output).tolist())
            if not (read or op == STEP or has(op, "in-place")):
                return float(tree.verdicts.error_out[pair])
        return None

    def _nearest(self, side: int, k: int) -> int:
        """Return the result of the other side that is nearest to one, `NONE` where none has its shape and dtype."""
        mine, other = self.streams[side], self.streams[1 - side]
        near = self.made[1 - side].get(_kind(mine, k)) if mine.measured[k] else None
        if near is None or len(near) * len(self.made[side].get(_kind(mine, k), ())) > MOST_PAIRS:
            return NONE
        apart = distance(mine.sketch[k], other.sketch[near])
        return NONE if np.isnan(apart).all() else int(near[np.nanargmin(apart)])

    def _apart(self, side: int, k: int) -> float | None:
        """Return how far a result is from the nearest of the other side, None where that is further than it may be."""
        mine, other = self.streams[side], self.streams[1 - side]
        if mine.l2[k] == 0:  # of zeros nothing comes
            return 0.0
        if (best := self.nearest(side, k)) == NONE:
            return None
        found, error = self._between((side, k), best)
        ends = [(side, int(mine.call[k])), (1 - side, int(other.call[best]))]
        if all(self.regions.loose[of][call] for of, call in ends):
            limit = granted(found, [(None, error, ends)], self.criterion, self.parts)[0][1]
        else:
            limit = explained(self.criterion.rows[-1], found.unit, max(map(len, found.calls)), found.worst)
        return error.relative if found.known and error.relative <= limit else None

    def _between(self, one: Call, other: int) -> tuple[Region, Distance]:
        """Return what makes a result of one side and one of the other, and how far these are apart. What goes in and does not agree
        tells nothing of what is made of the rest."""
        slots = (one[1], other) if one[0] == 0 else (other, one[1])
        found = Region(self.regions.tree)
        for side, (stream, k) in enumerate(zip(self.streams, slots, strict=True)):
            found.take(self.walked(side, int(stream.call[k])))
        found.sources = {name: source for name, source in found.sources.items() if source.relative < HALF}
        found.given = {call: [x for x in its if isinstance(x, tuple) or x < HALF] for call, its in found.given.items()}
        apart = float(distance(*(stream.sketch[k] for stream, k in zip(self.streams, slots, strict=True))))
        return found, Distance("output.0", *slots, apart, apart, float(self.streams[0].l2[slots[0]]), "sketch")


def _by_kind(stream: Stream, ends: dict[int, list[int]]) -> dict[Kind, Numbers]:
    found: defaultdict[Kind, list[int]] = defaultdict(list)
    around = set(stream.parents[list(ends)].tolist())  # they return what the calls inside them do
    for k in sorted(k for call, slots in ends.items() for k in slots if stream.measured[k] and call not in around):
        found[_kind(stream, k)].append(k)
    return {key: np.array(slots, np.int64) for key, slots in found.items()}


def _kind(stream: Stream, k: int) -> Kind:
    return int(stream.shapes.squeezed[k]), int(stream.dtype[k])


def parted(tree: Tree, excused: Reconvergence) -> tuple[list[Suspect], set[Call]]:
    """Return the innermost calls that make a gradient, or update a weight, on one side alone, the first of those that autograd
    adds up for one reader; and the calls that read what is lost."""
    verdicts, calls = tree.verdicts, tree.verdicts.errors.calls[1]
    lost = dict(_lost(tree, excused))
    around = {other for pair in lost for other in tree.around(int(calls[pair]))}
    suspects, read = list[Suspect](), set[Call]()
    for pair in sorted(pair for pair in lost if calls[pair] not in around):
        side, names, readers = lost[pair]
        row, more = verdicts.at(pair).call.candidate, max(len(names) - 3, 0) or None
        if read.isdisjoint(readers) and not (row.op == STEP and suspects):  # no gradient, no update
            verdicts.set_apart(pair)
            why = Why.NOT_UPDATED if row.op == STEP else Why.NO_GRADIENT
            because = (why(SIDES[side], ", ".join(sorted(names)[:3]), more, row.scope or row.op),)
            suspects.append(Suspect(verdicts.at(pair), "operator", True, because=because, independent=True))
        read |= readers
    return suspects, read


def _lost(tree: Tree, excused: Reconvergence) -> Iterator[tuple[int, tuple[int, list[str], set[Call]]]]:
    """Yield calls with the side that lacks gradients which the other one uses, of what they are, and who reads them there."""
    errors = tree.verdicts.errors
    for pair in errors.one_sided if not tree.is_foreign else ():
        rows = [stream.slots(int(calls[pair])) for stream, calls in zip(tree.streams, errors.calls, strict=True)]
        named = [{stream.names.names[n]: k for n, k in its.items()} for stream, its in zip(tree.streams, rows, strict=True)]
        for side in (0, 1):  # that has them; a sparse gradient beside a dense one is none that is lacking
            parts = {slot.rpartition(".")[0] for slot in named[1 - side]}
            alone = {slot: k for slot, k in named[side].items() if not {slot, slot.rpartition(".")[0]} & named[1 - side].keys()}
            alone = {slot: k for slot, k in alone.items() if slot not in parts}
            used = {slot: its for slot, k in alone.items() if (its := _users(tree, excused, side, slot, k))}
            forward = [int(stream.forward[calls[pair]]) for stream, calls in zip(tree.streams, errors.calls, strict=True)]
            ran = {of != NONE and bool(stream.has_children[of]) for stream, of in zip(tree.streams, forward, strict=True)}
            # A module inside which one side ran nothing hands on what was computed outside: its gradient goes there.
            if used and len(ran) == 1 and not excused.pair(pair) and not excused.holds(pair):
                names = [slot.removeprefix("grad_").removeprefix("gradient.") for slot in used]
                yield pair, (1 - side, names, set().union(*used.values()))
                break


def _users(tree: Tree, excused: Reconvergence, side: int, slot: str, k: int) -> set[Call]:
    """Return who reads a gradient, by side: nobody if it is one of zeros, or if their counterparts get one from somewhere else (a
    weight that autocast casts). Of a step both sides made what it alone reads."""
    stream, other, made = tree.streams[side], tree.streams[1 - side], int(tree.streams[side].producers[k])
    if not (0 < stream.l2[k] < np.inf):
        return set()
    if is_gradient_of_step(slot):
        if slot.removeprefix("gradient.") not in other.left_alone.get(int(stream.step[stream.call[k]]), ()):
            return set()  # it may have been updated there by what a damaged capture lacks, or be tied to another
        return {(side, int(stream.call[k]))} if made != NONE or excused.readers[side].parts(k) else set()
    found = set()
    for reader in excused.read_by[side](k) if is_gradient_of_input(slot) else ():
        pair = int(tree.pairs[side][stream.call[reader]])
        if pair == NONE or int(stream.slot[reader]) not in other.slots(int(tree.verdicts.errors.calls[1 - side][pair])):
            found.add((side, int(stream.call[reader])))
    return found
