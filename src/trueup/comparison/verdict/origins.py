"""Where differences come in that no compared call made: fail closed on what was not seen.

A call whose inputs differ explains its outputs. That holds only if the difference of its inputs was seen to arise: after a gap
in the captured steps, or in a capture of the backward alone, it may come from anywhere.

Where only modules were compared, a module's own arithmetic, the attention between its projections, a residual addition, is no
call. What it gets wrong comes in at the module that reads it, which only passes it on; so the module around them is the one whose
inputs agree and whose outputs do not (`arising_inside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trueup.comparison.graph.readers import Readers
from trueup.comparison.graph.streams import NONE, Array, Numbers, Row, Stream, distinct, most
from trueup.comparison.measures.measure import Distance
from trueup.comparison.measures.thresholds import CANCELLED, CHANCE, HALF, ROOM, SMALL
from trueup.comparison.verdict import optimizer_updates
from trueup.comparison.verdict.budget import unrecorded
from trueup.comparison.verdict.evidence import coherent
from trueup.comparison.verdict.facts import Shifts
from trueup.comparison.verdict.independent import first_read_out
from trueup.comparison.verdict.judged import LASTING, SIDES, Judged, Tree, only_modules
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.slots import SINGLE, is_gradient_of_step, is_weight, roundoff
from trueup.foundation.facts.why import Reason, Why

Unexplained = tuple[Judged, str]  # a call, and the slot where a difference comes in that no compared call made


@dataclass(slots=True)
class Origins:
    """What is remembered of one rank from step to step."""

    alone: bool = True  # whether no other rank takes part, whose differences may come in unseen
    largest: float = 0.0  # largest relative error of any output so far
    step: int | None = None  # the last step that was gone through
    exact: int | None = None  # the last step of which all calls were there on both sides and bitwise equal
    trains: bool = False  # whether the optimizer was recorded in it on both sides, so that weights do not come from outside
    seen: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))  # phases that were recorded, by side
    imported: tuple[bool, bool] = (False, False)  # whether a side is of another tool's dump
    gradients: bool = False  # whether a backward was recorded at a level that has the gradients of weights
    told: bool = False  # whether weights were found to be updated otherwise: from there on they differ in every step
    lost: int | None = None  # of a dump: execution number from which a difference of unknown origin goes around
    chosen: bool = True  # whether all was seen since the training began, and nothing took numbers that differ out of a tensor
    wrong: bool = False  # whether a call was certainly wrong, so that others are asked whether they are wrong by themselves
    parted: bool = False  # whether one side lacked a gradient that the other made
    drew: Reason | None = None  # call of an earlier step that drew random numbers in one run alone
    accumulated: float = 0.0  # largest relative error of gradients in steps compared by what accumulates (`passes`)
    shifts: Shifts = field(default_factory=dict)  # by what results were larger beside their inputs, at calls with errors
    weights: optimizer_updates.Weights = field(default_factory=optimizer_updates.Weights)
    updated: optimizer_updates.Updated | None = None  # of the weights of the step that `follow` went through last
    errors: list[tuple[Numbers, Array]] = field(default_factory=list)
    """Of each step: ``seq`` of the compared calls on the candidate, and the largest relative error of their outputs."""
    pending: tuple[dict[int, Row], dict[int, Row]] = field(default_factory=lambda: ({}, {}))
    """Unmatched calls whose results later steps read, and nobody has read yet, by side."""
    loose: tuple[dict[int, str], dict[int, str]] = field(default_factory=lambda: ({}, {}))
    """Operators of all unmatched calls of earlier steps that no compared call around them accounts for, by side and seq."""
    _now: optimizer_updates.Weights = field(default_factory=optimizer_updates.Weights)
    _rounded: float = 0.0  # unit roundoff of the coarsest dtype that so far held results on one side alone

    def follow(self, tree: Tree, flow: Sequence[Readers]) -> list[tuple[Judged, str]]:
        """Go through one step's calls in order; return ``(call, slot)`` of inputs whose difference has no origin."""
        verdicts, errors = tree.verdicts, tree.verdicts.errors
        differing, worst, largest = self._suspicious(tree)
        plain = _plain(tree) if len(differing) else worst
        found = [n for n in differing.tolist() if not _is_accounted_for(tree, flow, n, float(plain[n]), worst)]
        self._remember(tree, worst, largest)
        return [(verdicts.at(int(errors.pair[n])), errors.distance(n).slot) for n in found]

    def passes(self, tree: Tree) -> bool:
        """Go through the calls of some steps in which all have a counterpart, unless `follow` would find something in one."""
        suspicious, worst, largest = self._suspicious(tree)
        if len(suspicious):
            return False
        self._remember(tree, worst, largest)
        self.exact = self.step if tree.verdicts.errors.all_same and not any(map(len, tree.unmatched)) else self.exact
        return True

    def _suspicious(self, tree: Tree) -> tuple[Numbers, Array, float]:
        """Return inputs that differ more than what was seen before, the largest error of each call's outputs, and of all."""
        errors, plain = tree.verdicts.errors, _plain(tree)
        worst = _of_outputs(tree, plain)
        before = np.maximum.accumulate(np.r_[self.largest, np.where(tree.leaves, worst, 0.0)])
        grown = CANCELLED * before[:-1][errors.pair]
        least, shared = self._unseen(tree)
        given = tree.verdicts.criterion.input_units * SINGLE
        limit = np.where(self._given(tree, grown), np.maximum(given, grown), np.maximum(least, grown))
        differ = errors.inputs & (plain > np.maximum(limit, tree.verdicts.tolerated))
        differ |= errors.inputs & (plain > 0) & (shared > np.maximum(grown, tree.verdicts.tolerated))
        if tree.streams[0].mixed:  # frameworks sum the gradient of a weight outside of any call that both have
            differ &= ~tree.streams[0].names.table(is_gradient_of_step)[errors.names]
        self._now = optimizer_updates.read(tree, self.weights)
        self.updated = optimizer_updates.deviating(tree, self._now, np.maximum(before, self._coarsest(tree))[:-1])
        # A bias that began at zero is all update, and the limit of an input says nothing of those.
        differ[self.updated.compared] = False
        few, sure = not self.updated.clean and 2 * self.updated.wrong <= self.updated.total, self.updated.sure
        shows = np.array([not few or _shows(tree, n, sure=sure) for n in self.updated.entries.tolist()], bool)
        differ[self.updated.entries] = shows & (errors.relative > tree.verdicts.tolerated)[self.updated.entries]
        return np.flatnonzero(differ), worst, float(before[-1])

    def _coarsest(self, tree: Tree) -> Array:
        """Return the unit roundoff of the coarser dtype of results that the sides held in two, before each call and after the
        last: equal numbers are equal by chance then."""
        first, second = tree.verdicts.errors.roundoffs
        recast = np.where(first != second, np.maximum(first, second), 0.0)
        found = np.full(len(tree.verdicts) + 1, self._rounded)
        if recast.any():
            found = np.maximum.accumulate(np.r_[self._rounded, _of_outputs(tree, recast)])
        self._rounded = float(found[-1])
        return found

    def _unseen(self, tree: Tree) -> tuple[Array, Array]:
        """Return what rounding in unrecorded calls explains of each entry, and by how much all its elements are off alike beyond
        that. Where a step or its forward is missing, or another tool recorded it, rounding may have grown outside for long."""
        errors, candidate = tree.verdicts.errors, tree.streams[1]
        nothing = np.zeros(len(errors.pair))
        steps = candidate.steps if self.step is None else np.r_[self.step, candidate.steps]
        gap = (self.step is None and len(steps) and steps[0] > 0) or (np.diff(steps) > 1).any()
        forward = all(bool(stream.during("forward").any()) for stream in tree.streams)
        if gap or not forward or not self.alone or any(stream.imported or stream.neutral is not None for stream in tree.streams):
            return nothing + SMALL, nothing
        # Under autocast float32 gradients come out of 16-bit products: what was not seen may have gone through any dtype there is.
        roundoffs = candidate.names.table(roundoff)
        coarsest = float(max(roundoffs[stream.dtype].max(initial=0.0) for stream in tree.streams))
        own, biased = unrecorded(tree.verdicts.criterion, coarsest)
        entries = np.flatnonzero(errors.inputs & (errors.absolute != 0) & ~np.isnan(errors.absolute))
        nothing[entries] = np.where((shared := coherent(errors, entries)) > biased, shared, 0.0)
        found = np.full(len(errors.pair), own)
        for n in entries[np.maximum(*errors.roundoffs)[entries] <= SINGLE] if coarsest > SINGLE and any(self.loose) else ():
            if self.lone_maker(tree, errors.distance(n)) is not None:  # it was seen to be made, of no coarser dtype
                found[n], _ = unrecorded(tree.verdicts.criterion, SINGLE)
        return found, nothing

    def _given(self, tree: Tree, grown: Array) -> Array:
        """Tell which entries come from outside, after steps that say what of them may be rounding. Where no step is missing, and
        nothing differed before or the optimizer was recorded as well, no difference can have grown outside of what was recorded:
        it is the batch that differs."""
        errors, (baseline, candidate) = tree.verdicts.errors, tree.streams
        if self.step is None or not self.alone or baseline.imported or candidate.imported:
            return np.zeros(len(errors.pair), bool)
        steps = np.r_[self.step, candidate.steps]
        if (np.diff(steps) > 1).any():
            return np.zeros(len(errors.pair), bool)
        found = (baseline.producer[errors.slots[0]] == NONE) & (candidate.producer[errors.slots[1]] == NONE)
        return np.asarray(found & candidate.during("forward", "data")[errors.calls[1][errors.pair]] & (self.trains | (grown == 0)))

    def _remember(self, tree: Tree, worst: Array, largest: float) -> None:
        self._read(tree)
        self.largest = largest
        self.weights = optimizer_updates.last(self._now)
        streams = tree.streams
        steps = [-1 if self.step is None else self.step, *streams[1].steps.tolist()]
        self.chosen &= self.alone and bool((np.diff(steps) == 1).all()) and first_read_out(tree) == np.inf
        if len(streams[1].steps):
            self.step = int(streams[1].steps[-1])
        self.imported = streams[0].imported, streams[1].imported
        for seen, stream in zip(self.seen, streams, strict=True):
            seen.update(stream.names.names[n] for n in distinct(stream.phase).tolist() if n != NONE)
        self.gradients |= bool((streams[1].during("backward") & ~streams[1].of_level("module")).any())
        self.trains = not any(map(optimizer_updates.is_unseen, streams))
        errors = tree.verdicts.errors
        self.errors.append((errors.streams[1].seq[errors.calls[1]], worst))

    def lacks_optimizer(self, side: int) -> bool:
        """Tell whether a side is of a tool that records no optimizer, and the other's is there."""
        return self.imported[side] and not self.imported[1 - side] and "optimizer" not in self.seen[side]

    def unread(self, side: int) -> list[Row]:
        """Return unmatched calls of a side whose results nobody has read, but for an optimizer that the other's tool leaves out."""
        left_out = self.lacks_optimizer(1 - side)
        return [row for row in self.pending[side].values() if not (left_out and row.phase == "optimizer")]

    def made(self, seq: int) -> float | None:
        """Return the largest relative error of the outputs of a compared call of an earlier step; None where there is none."""
        for seqs, worst in reversed(self.errors):
            at = int(np.searchsorted(seqs, seq))
            if at < len(seqs) and seqs[at] == seq:
                return float(worst[at])
        return None

    def _read(self, tree: Tree) -> None:
        """Take calls off the list of which, or of an earlier step's function around which, a result is read now: it shows there."""
        for pending, stream in zip(self.pending, tree.streams, strict=True):
            read = set(distinct(stream.producer).tolist()) if pending else set()
            earlier = {n for n, r in pending.items() if r.parent in read and r.phase not in LASTING and r.step not in stream.steps}
            for seq in earlier | (pending.keys() & read):
                del pending[seq]

    def lone_maker(self, tree: Tree, error: Distance) -> Reason | None:
        """Return which call made what a slot holds, where one run alone has it: of an earlier step, or half of it is its own."""
        ops = list[str | None]()
        for loose, stream, pairs, k in zip(self.loose, tree.streams, tree.pairs, (error.baseline, error.candidate), strict=True):
            call = int(stream.producers[k]) if error.relative > HALF else NONE
            alone = call != NONE and pairs[call] == NONE
            ops.append(stream.names.names[int(stream.op[call])] if alone else loose.get(int(stream.producer[k])))
        side = 0 if ops[1] is None else 1
        return Why.MADE_ALONE(SIDES[side], ops[side]) if ops.count(None) == 1 else None

    def leave(self, lasting: Iterable[tuple[int, Row]], streams: Sequence[Stream], loose: Iterable[Sequence[int]]) -> None:
        """Remember a step's unmatched calls: those whose results may last, and by side all."""
        for side, row in lasting:
            self.pending[side][row.seq] = row
        for known, stream, calls in zip(self.loose, streams, loose, strict=True):
            known.update((int(stream.seq[call]), stream.names.names[int(stream.op[call])]) for call in calls)


def _shows(tree: Tree, entry: int, *, sure: bool) -> bool:
    """Tell whether a weight's difference is one to what is computed with it: a bias of an attention's keys, or before a batch norm,
    changes no result. What a module around returns may be off by what the module was given, and by a rounding to a 16-bit or 8-bit
    dtype. ``sure``: it is only none where it changes what its reader returns, and by far less what the module around does."""
    errors, verdicts = tree.verdicts.errors, tree.verdicts
    pair, limit = int(errors.pair[entry]), verdicts.criterion.input_units * SINGLE
    limits = {pair: limit}
    for n in tree.covering(int(errors.calls[1][pair]), 1)[:1]:
        made = [k for k in errors.entries(n) if errors.outputs[k]]
        coarsest = max(float(side[made].max()) for side in errors.roundoffs)
        limits[n] = max(limit, ROOM * float(verdicts.error_in[n]), coarsest if coarsest > SINGLE else 0.0)
    its, *around = off = [float(verdicts.error_out[n]) for n in limits]
    gone = any(error <= allowed for error, allowed in zip(off, limits.values(), strict=True))
    return not gone or (sure and CHANCE * max(around, default=np.inf) > its)


def may_have_grown(tree: Tree) -> Array:
    """Return, by entry, the relative error that rounding seen before in the step can have become. Of another tool's dump it is
    not known which call made what another reads: what is no larger than this came from one before."""
    errors = tree.verdicts.errors
    if not any(stream.imported for stream in errors.streams):
        return np.zeros(len(errors.pair))
    worst = np.where(tree.leaves, _of_outputs(tree, _plain(tree)), 0.0)
    return np.asarray(CANCELLED * np.maximum.accumulate(np.r_[0.0, worst])[errors.pair])


def _of_outputs(tree: Tree, relative: Array) -> Array:
    """Return the largest error of the outputs of each matched call."""
    outputs = np.flatnonzero(tree.verdicts.errors.outputs)
    return most(relative[outputs], tree.verdicts.errors.pair[outputs], len(tree.verdicts))


def _is_accounted_for(tree: Tree, flow: Sequence[Readers], entry: int, error: float, worst: Array) -> bool:
    """Tell whether calls that were compared made what an entry reads and are off by as much, or one without counterpart that is
    judged: by itself, or by a call around it. A module that was compared as a whole answers for what it returns and for what is
    read inside it. The gradient of a weight is neither: the optimizer reads it."""
    errors, made, cancels = tree.verdicts.errors, list[set[int]](), 1.0
    for readers, slots, pairs in zip(flow, errors.slots, tree.pairs, strict=True):
        k, stream = int(slots[entry]), readers.stream
        made.append(set(pairs[stream.call[readers.parts(k)].tolist() or [stream.producers[k]]].tolist()))
        cancels = max(cancels, readers.cancels(k))  # autograd may have added gradients up to it
    if made[0] == made[1] and NONE not in made[0] and error <= ROOM * cancels * worst[list(made[0])].max():
        return True
    for side, (stream, slots) in enumerate(zip(tree.streams, errors.slots, strict=True)):
        producer = stream.find(stream.producer_of(int(slots[entry])))
        if producer == NONE or tree.pairs[side][producer] != NONE:
            continue
        covering = tree.covering(producer, side)
        reader = tree.around(int(errors.calls[side][errors.pair[entry]]), side)
        if not covering or any(errors.calls[side][n] in reader for n in covering):
            return True
        if error <= CANCELLED * max(tree.verdicts.error_out[covering].tolist()):
            return True
    return False


def _plain(tree: Tree) -> Array:
    """Return relative errors; 0 where they mean nothing: not measured, unknown in size, or of two kinds. What is given where the
    baseline is given zeros, as a state that begins otherwise, is relative to the largest that its call is given."""
    errors = tree.verdicts.errors
    zero, nothing = (errors.norm == 0) & np.isfinite(errors.absolute), np.isnan(errors.absolute) | errors.unsized | tree.two_kinds
    given = most(np.where(errors.inputs, np.nan_to_num(errors.norm), 0.0), errors.pair, len(tree.verdicts))[errors.pair]
    with np.errstate(all="ignore"):
        beside = np.where(errors.inputs & (given > 0), errors.absolute / given, 0.0)
    return np.where(nothing, 0.0, np.where(zero, beside, errors.generous))


def arising_inside(unexplained: Iterable[Unexplained], tree: Tree, criterion: Criterion) -> tuple[list[int], list[Unexplained]]:
    """Return the matched modules inside which differences arise that came in unseen, and those that this leaves open. The
    innermost module around the reader that was compared as a whole answers, if its own outputs are certainly wrong. Dumps of
    other tools tell inputs by statistics at best, and modules of two frameworks are not the same: of those nothing is said."""
    stream = tree.streams[1]
    module, found, left = stream.names.number("module"), dict[int, None](), []
    known = only_modules(stream) and stream.neutral is None and not any(side.imported for side in tree.streams)
    for judged, slot in unexplained:
        call = stream.find(judged.call.candidate.seq)
        around = tree.covering(call, 1)[:1] if known and stream.level[call] == module and not is_weight(slot) else []
        if around and tree.verdicts.at(around[0]).is_certain(criterion):
            found[around[0]] = None
        else:
            left.append((judged, slot))
    return list(found), left


def came_in(unexplained: Sequence[Unexplained], stream: Stream) -> Callable[[Judged], bool]:
    """Return what tells of a module whether its inputs differ, once a difference came in unseen: it may then only pass that on.
    Weights do not count, for one module reads them, nor anything where functions or operators were recorded too."""
    if not unexplained or not only_modules(stream):
        return lambda judged: False  # noqa: ARG005
    first = min((judged.call.candidate.seq for judged, slot in unexplained if not is_weight(slot)), default=None)
    return lambda judged: first is not None and judged.call.candidate.seq >= first and judged.error_in > SMALL


def comes_from_between(stream: Stream, call: int, slot: str) -> bool:
    """Tell whether nothing shows who made an input, for only modules were recorded and it is of one inside another."""
    if is_weight(slot) or not only_modules(stream):
        return False
    return bool(stream.level[call] != stream.names.number("module") or stream.parents[call] != NONE)  # or it is the loss
