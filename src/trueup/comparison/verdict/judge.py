"""Is the error of a call explained by rounding and by the errors of its inputs? One rule of the criterion decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, most, numbered, spans
from trueup.comparison.limits import Applied
from trueup.comparison.limits import apply as apply_limits
from trueup.comparison.measures.measure import Errors, lacks_gradients
from trueup.comparison.measures.thresholds import HALF, QUORUM, SHOWN
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.verdict.budget import Budget, Calls, Explanation, Tensors
from trueup.comparison.verdict.evidence import NOTHING, Reads, Yardstick, coherent, few_elements, known_differences, peaks
from trueup.comparison.verdict.judged import LASTING, Verdicts, excess
from trueup.comparison.verdict.optimizer_updates import explain_signs, explain_updates
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import having, says
from trueup.foundation.facts.slots import SINGLE, element, is_incoming_gradient, is_output, roundoff, underflow
from trueup.foundation.facts.why import AGREES, CARRIED_ON, COHERENT, EQUAL, FEW, INCOMPARABLE, REPEATS, TRUTH, UNSIZED, Reason, Why
from trueup.foundation.store.declared import Precision
from trueup.foundation.store.durable import side_by_side

MANY = 1 << 15
"""Outputs of a part from which on two threads explain them."""


def judge(
    errors: Errors, criterion: Criterion, precision: Precision, yardstick: Yardstick = NOTHING, *, explain: bool = True
) -> Verdicts:
    """Judge every measured call of one rank and step. A backward call also sees the errors of its forward call, whose tensors it
    saved. ``explain`` is False where nothing differs, and nobody asks what rounding would explain."""
    return _Judge(errors, criterion, precision, yardstick, explain).run()


@dataclass(slots=True)
class _Granted:
    """What is explained of each output so far, and what decided it: arrays of one length."""

    error: Array
    own: Array
    expected: Array
    declared: Array
    decided: Array

    def decide(self, where: Array, own: Array, expected: Array, by: int) -> None:
        """Let something else decide some outputs."""
        self.own, self.expected = np.where(where, own, self.own), np.where(where, expected, self.expected)
        self.decided[where] = by


class _Judge:
    def __init__(self, errors: Errors, criterion: Criterion, precision: Precision, yardstick: Yardstick, explain: bool) -> None:
        self.errors, self.criterion, self.precision, self.yardstick, self.explain = errors, criterion, precision, yardstick, explain
        self.baseline, self.candidate = errors.streams
        self.names = self.baseline.names
        self.count, self.calls = len(errors.calls[0]), errors.calls[1]
        self.relative, self.known = errors.relative, known_differences(errors)
        self.applied: Applied | None = None
        self.untold = 0
        self.rows = self.candidate.rows(criterion)[self.calls]
        self.roundoffs = self.names.table(roundoff)

    def run(self) -> Verdicts:
        errors, relative = self.errors, self.relative
        owner, entry = self._read()
        # What one run alone adds inside a call to a gradient that it is given is no input: the other run's is all that it is given.
        places = zip(errors.streams, errors.slots, errors.calls, strict=True)
        inside, other = (stream.producers[slots[entry]] > calls[errors.pair[entry]] for stream, slots, calls in places)
        known, added = ~np.isnan(errors.absolute[entry]) & (inside == other), {*owner[inside != other].tolist()}
        unmeasured = np.bincount(owner[~known], minlength=self.count) > 0
        if self.explain:
            given = np.bincount(errors.pair[self.names.table(is_incoming_gradient)[errors.names]], minlength=self.count)
            unmeasured |= errors.streams[1].again[self.calls] & (given == 0)
        owner, entry = owner[known], entry[known]
        error_in = np.zeros(self.count)
        np.maximum.at(error_in, owner, relative[entry])
        is_float = errors.roundoffs[0][entry] > 0
        discrete = np.zeros(self.count, bool)  # an index or a mask differs
        discrete[owner[~is_float & (errors.absolute[entry] != 0)]] = True
        outputs = np.flatnonzero(errors.outputs & ~np.isnan(errors.absolute))
        nothing, undecided, open_ = np.zeros(len(outputs)), np.zeros(len(outputs), np.int8), outputs[:0]
        if self.criterion.limits:
            own, expected, open_ = self._by_limits(owner, entry, outputs)
            granted = _Granted(relative[outputs], own, expected, nothing, undecided)
        elif not self.explain:
            granted = _Granted(nothing, nothing, nothing, nothing, undecided)
        else:
            granted = self._granted(owner, entry, outputs, discrete | unmeasured, error_in)
        relative, pair = granted.error, errors.pair[outputs]
        unrecorded = dict.fromkeys(errors.pair[open_].tolist(), Reason(Why.UNRECORDED, (self.criterion.name,)))
        ties, open_choices = self._ties(outputs)
        granted.expected[ties] = np.inf
        lost = np.flatnonzero(errors.outputs & np.isnan(errors.absolute)).tolist()
        not_compared = {int(errors.pair[n]): errors.reasons.get(n, Reason(Why.UNMEASURED)) for n in lost}
        incomparable = not_compared | unrecorded | open_choices
        over = excess(relative, granted.expected) > self.criterion.suspect
        explained = (discrete | ~np.isfinite(error_in))[pair]
        unseen = over & ~explained & unmeasured[pair]
        incomparable |= {at: Reason(Why.ADDED_INSIDE if at in added else Why.INPUTS) for at in pair[unseen].tolist()}
        expected = np.where(explained | unseen, np.inf, granted.expected)
        incomparable |= self._one_sided()
        unsized = self._unsized(outputs, error_in)
        slot_expected = np.full(len(errors.pair), np.nan)
        slot_expected[outputs] = expected
        worst = self._worst(outputs, excess(relative, expected))
        compared = worst >= 0
        place = np.searchsorted(outputs, np.where(compared, worst, 0))
        error_out, its_own, its_expected, its_decided, its_declared = (
            np.where(compared, values[place], 0.0) if len(outputs) else np.zeros(self.count)
            for values in (relative, granted.own, expected, granted.decided, granted.declared)
        )
        found = Verdicts(
            errors, self.criterion, self.rows, error_in, error_out, its_own, its_expected, worst, slot_expected, unsized,
            incomparable, np.zeros(self.count, np.int8), its_decided.astype(np.int8), self._tolerated(),
            its_declared, self._steady(outputs), np.zeros(self.count, bool), self.applied, self.untold,
        )  # fmt: skip
        found.role = _roles(found)
        found.outlier = self._outliers(found.ratio)
        return found

    def _granted(self, owner: Numbers, entry: Numbers, outputs: Numbers, unsure: Array, error_in: Array) -> _Granted:
        errors = self.errors
        is_float = errors.roundoffs[0][entry] > 0
        budget = self._explain(owner[is_float], entry[is_float], outputs)
        rounded, apart = self._rounded_once(outputs), self._rounded_apart(outputs, owner[~errors.same[entry]])
        own, expected = np.hypot(budget.own, rounded), budget.expected + rounded + apart
        granted = _Granted(self.relative[outputs], own, expected, budget.declared, np.zeros(len(outputs), np.int8))
        self._by_elements(owner, entry, outputs, unsure, np.maximum(errors.unit[outputs], budget.unit), granted)
        self._by_direction(outputs, budget, granted)
        updates = self.criterion.row(STEP, "module", "optimizer")
        granted.own, granted.expected = explain_updates(errors, outputs, granted.own, granted.expected, updates)
        signs = np.array([row.carry == "sign" for row in self.criterion.rows])[self.rows]
        explain_signs(errors, outputs, error_in, signs, granted.expected)
        granted.expected = np.maximum(granted.expected, self.known[outputs])
        self._by_yardstick(outputs, granted)
        granted.declared = np.where(granted.decided < REPEATS, granted.declared, 0.0)
        return granted

    def _read(self) -> tuple[Numbers, Numbers]:
        """Return ``(call, entry)`` of what the calls read, sorted by call; a backward reads what its `saved` call did, too. And
        what that made, which it may have saved; but a number made of many says nothing of their gradients one by one."""
        entries = np.flatnonzero(self.errors.inputs)
        owner = self.errors.pair[entries]
        stream, names = self.candidate, self.names
        backward = stream.phase[self.calls] == names.number("backward")
        backward &= (stream.level[self.calls] != names.number("aten")) & (stream.forward_seq[self.calls] >= 0)
        pairs = np.flatnonzero(backward)
        forward = numbered(self.calls, len(stream))[stream.saved[self.calls[pairs]]]
        pairs, forward = pairs[forward >= 0], forward[forward >= 0]
        start, stop = np.searchsorted(self.errors.pair, forward), np.searchsorted(self.errors.pair, forward + 1)
        saved, of = spans(start, stop - start), np.repeat(pairs, stop - start)
        numel = self.baseline.numel[self.errors.slots[0]]
        widest = most(np.where(self.errors.inputs, np.nan_to_num(numel), 0.0), self.errors.pair, self.count)
        kept = ~self.errors.outputs[saved] | (numel[saved] != 1) | (widest[self.errors.pair[saved]] <= 1)
        owner, entries = np.r_[owner, of[kept]], np.r_[entries, saved[kept]]
        order = np.argsort(owner, kind="stable")
        return owner[order], entries[order]

    def _explain(self, owner: Numbers, entries: Numbers, outputs: Numbers) -> Budget:
        stream, names = self.candidate, self.names
        sides = list(zip(self.errors.streams, self.errors.calls, strict=True))
        alike = all(getattr(self.baseline, name) is getattr(stream, name) for name in ("seq", "step", "starts", "parent", "dtype"))
        if alike and np.array_equal(*self.errors.calls):
            del sides[0]  # both say the same
        lowest = np.maximum.reduce([_roundoffs_inside(side, self.roundoffs)[calls] for side, calls in sides])
        aten = stream.level[self.calls] == names.number("aten")
        optimizer = stream.phase[self.calls] == names.number("optimizer")
        inside = np.maximum.reduce([_leaves_inside(side)[calls] for side, calls in sides])
        calls = Calls(self.rows, stream.op[self.calls], aten, optimizer, lowest, inside)
        pair, order = self.errors.pair[outputs], None
        if (names.table(having("listed"))[calls.op] | names.table(having("read"))[calls.op]).any():
            pair, owner, which = self._by_element(owner, entries, outputs)
            pair, owner, entries, which = self._by_read(pair, owner, entries, outputs, which)
            calls = calls.take(which)
            order, sorted_read = np.argsort(pair, kind="stable"), np.argsort(owner, kind="stable")
            pair, outputs, owner, entries = pair[order], outputs[order], owner[sorted_read], entries[sorted_read]
        count, narrowest = len(calls.row), float(self.errors.unit[outputs].max(initial=0.0))

        def explained(these: range) -> Budget:
            bounds = [these.start, these.stop]
            at_out, at_read = (slice(*np.searchsorted(of, bounds).tolist()) for of in (pair, owner))
            out = self._tensors(pair[at_out] - these.start, outputs[at_out])
            read = self._tensors(owner[at_read] - these.start, entries[at_read])
            return Explanation(out, read, calls.take(these), self.criterion, self.precision, names, narrowest).explain()

        # NumPy leaves the interpreter to others meanwhile, and half of a large step stays in a processor's cache.
        middle = int(pair[len(pair) // 2]) if len(pair) > MANY else 0
        halves = side_by_side(explained, [range(middle), range(middle, count)] if middle else [range(count)])
        found = Budget.joined(halves)
        return found if order is None else found.take(np.argsort(order))

    def _by_element(self, owner: Numbers, entries: Numbers, outputs: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Take calls on lists of tensors apart: what is done to one element explains nothing of another. Return the part of a
        call that each output and each entry read belongs to, and the call of each part."""
        pair, of_name = self.errors.pair[outputs], self.names.table(element)
        listed = self.names.table(having("listed"))[self.candidate.op[self.calls]]
        read, made = of_name[self.errors.names[entries]], of_name[self.errors.names[outputs]]
        listed[owner[read == NONE]] = False  # one tensor for all elements
        read, made = np.where(listed[owner], read, 0), np.where(listed[pair], made, 0)
        stride = int(max(read.max(initial=0), made.max(initial=0))) + 1
        parts = np.r_[pair * stride + made, owner * stride + read, np.arange(self.count) * stride]
        found, which = np.unique(parts, return_inverse=True)
        return which[: len(pair)], which[len(pair) : len(pair) + len(owner)], found // stride

    def _by_read(
        self, pair: Numbers, owner: Numbers, entries: Numbers, outputs: Numbers, which: Numbers
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Take apart results that are made of some inputs alone: each is a further part of its call and reads these. Return the
        parts of outputs and of entries, the entries (some of them twice), and the calls of the parts."""
        names, errors = self.names, self.errors
        op = self.candidate.op[self.calls]
        for n in np.flatnonzero(names.table(having("read"))[op[errors.pair[outputs]]]).tolist():
            call = int(errors.pair[outputs[n]])
            its = says(names.names[int(op[call])], "read").get(names.names[int(errors.names[outputs[n]])])
            wanted = [names.number(slot) for slot in its or ()]
            read = entries[(owner == pair[n]) & np.isin(errors.names[entries], wanted)]
            if np.isin(errors.names[list(errors.entries(call))], wanted).any():  # named as it is known, integers or not
                pair[n], owner, entries = len(which), np.r_[owner, np.full(len(read), len(which))], np.r_[entries, read]
                which = np.r_[which, call]
        return pair, owner, entries, which

    def _by_limits(self, owner: Numbers, entry: Numbers, outputs: Numbers) -> tuple[Array, Array, Numbers]:
        """Let limits decide: an output that fails is explained where an input fails; return own, expected and open outputs."""
        self.applied = apply_limits(self.criterion.limits, self.errors)
        fails, open_ = self.applied.fails, self.applied.open
        bad = np.zeros(self.count, bool)
        bad[owner[fails[entry]]] = True
        bad = bad[self.errors.pair[outputs]]
        wrong = fails[outputs]
        return np.where(wrong, 0.0, np.inf), np.where(wrong & ~bad, 0.0, np.inf), outputs[open_[outputs] & ~bad]

    def _by_elements(self, owner: Numbers, entry: Numbers, outputs: Numbers, open_: Array, unit: Array, granted: _Granted) -> None:
        """Let what rounding does to one element, by the ``unit`` it is computed in, decide where an error sits in few."""
        errors, pair, names = self.errors, self.errors.pair[outputs], self.names
        baseline = self.baseline
        apart, peak = np.zeros(self.count), np.zeros(self.count)
        np.maximum.at(apart, owner, errors.absolute[entry])
        with np.errstate(all="ignore"):
            told = peaks(errors)[0][entry]
            largest = np.where(np.isnan(told), errors.absolute[entry], told)
            rms = errors.norm[entry] / np.sqrt(baseline.numel[errors.slots[0][entry]])
            np.maximum.at(peak, owner, np.where(errors.absolute[entry] > 0, np.nan_to_num(largest / rms, nan=np.inf), 0.0))
        module = self.candidate.level[self.calls] == names.number("module")
        given = Reads(((apart == 0) & ~open_)[pair], ~open_[pair], peak[pair], self.rows[pair], module[pair])
        limit = few_elements(errors, outputs, unit, granted.own, granted.expected, given, self.criterion)
        granted.decide(~np.isnan(limit), limit, limit, FEW)

    def _by_direction(self, outputs: Numbers, budget: Budget, granted: _Granted) -> None:
        """Let the part of an error that all elements share decide where it is more than rounding makes."""
        shared = coherent(self.errors, outputs)
        with np.errstate(all="ignore"):
            limit = self.relative[outputs] * budget.coherent / shared
        granted.decide((shared > budget.coherent) & (limit < granted.expected), limit, limit, COHERENT)

    def _by_yardstick(self, outputs: Numbers, granted: _Granted) -> None:
        """Let the user's own runs say how much of an output's error is explained."""
        k, j = (side[outputs] for side in self.errors.slots)
        allowed, yardstick = self.criterion.yardstick, self.yardstick
        if yardstick.spread is not None:
            spread = allowed * yardstick.spread[k]
            granted.decide(spread > granted.expected, spread, spread, REPEATS)
        if yardstick.truth is not None:
            baseline, candidate = yardstick.truth[0][k], yardstick.truth[1][j]
            known = np.isfinite(baseline) & np.isfinite(candidate)
            with np.errstate(invalid="ignore"):
                carried = np.where(np.isinf(granted.expected), np.inf, granted.expected - granted.own)
            measured = np.maximum(allowed * baseline, 2 * self.errors.roundoffs[0][outputs])
            granted.error = np.where(known, candidate, granted.error)
            granted.decide(known, measured, measured + carried, TRUTH)

    def _tolerated(self) -> Array:
        if self.applied is not None:
            return np.where(self.applied.fails, 0.0, np.inf)
        if self.yardstick.spread is None:
            return self.known
        spread = self.yardstick.spread[self.errors.slots[0]]
        return np.where(np.isnan(spread), 0.0, self.criterion.yardstick * spread)

    def _tensors(self, owner: Numbers, entries: Numbers) -> Tensors:
        errors, shapes = self.errors, self.baseline.shapes
        k = errors.slots[0][entries]
        norm, numel = (np.where(np.isnan(x), 0.0, x) for x in (errors.norm[entries], self.baseline.numel[k]))
        first, second = (side[entries] for side in errors.roundoffs)
        return Tensors(
            owner, self.baseline.slot[k], self.relative[entries], errors.absolute[entries], norm, numel, errors.unit[entries],
            np.where(first > np.maximum(second, SINGLE), first, 0.0), lambda at, dimension: shapes.size(k[at], dimension, 1.0),
        )  # fmt: skip

    def _rounded_once(self, outputs: Numbers) -> Array:
        """Return what storing results rounds beyond the budget: a cast on the baseline alone, and numbers near the smallest."""
        sides = zip(self.errors.streams, self.errors.slots, strict=True)
        first, second = (side[outputs] for side in self.errors.roundoffs)
        exact = self.criterion.exact[self.rows[self.errors.pair[outputs]]]
        least = np.maximum.reduce([self.names.table(underflow)[stream.dtype[slots[outputs]]] for stream, slots in sides])
        with np.errstate(all="ignore"):
            small = least * np.sqrt(self.baseline.numel[self.errors.slots[0][outputs]]) / self.errors.norm[outputs]
        alone = exact & (first > np.maximum(second, SINGLE))
        return np.where(alone, first, 0.0) + np.where(exact | ~np.isfinite(small), 0.0, small)

    def _rounded_apart(self, outputs: Numbers, differ: Numbers) -> Array:
        """Return what is one unit of the largest number, which a cast may round to two neighbours where the sides differ before
        it. Two numbers that differ may also cancel in a sketch, and after a transposition they do not."""
        exact = self.criterion.exact[self.rows[self.errors.pair[outputs]]]
        unit, k = self.errors.unit[outputs], self.errors.slots[0][outputs]
        known = exact & (unit > SINGLE)
        known[known] = np.isin(self.errors.pair[outputs[known]], differ)
        if not known.any():  # the extreme elements would be read for nothing
            return np.zeros(len(outputs))
        with np.errstate(all="ignore"):
            peak = np.fmax(np.abs(self.baseline.number("min")[k]), np.abs(self.baseline.number("max")[k]))
            apart = 2 * unit * peak / self.errors.norm[outputs]
        return np.where(known & np.isfinite(apart), apart, 0.0)

    def _one_sided(self) -> dict[int, Reason]:
        """Return calls of which one side has an output that the other lacks, and that is read: what nobody reads does no harm."""
        errors, names = self.errors, self.names
        outputs = {n: [names.number(s) for s in slots if is_output(s)] for n, slots in errors.one_sided.items()}
        outputs = {n: slots for n, slots in outputs.items() if slots}
        if not outputs:
            return {}
        found = {}
        imported = [stream.imported for stream in errors.streams]  # another tool does not say who reads what
        dump = 1 if imported[1] else 0
        lacking = lacks_gradients(errors.streams[dump])
        read = [_read(stream, optimizer=imported[0] == imported[1]) for stream in errors.streams]
        for n, slots in outputs.items():
            made = [int(stream.seq[calls[n]]) for stream, calls in zip(errors.streams, errors.calls, strict=True)]
            lasting = names.name(int(self.candidate.phase[self.calls[n]])) in LASTING
            if imported[0] != imported[1]:  # what a native capture has more is compared where it is read
                native, known = (made[0], read[0]) if imported[1] else (made[1], read[1])
                lost = any((native, slot) not in known for slot in slots)
                if lost and lacking[errors.calls[dump][n]]:
                    self.untold += 1
                    continue
            else:
                lost = any((seq, slot) in known for seq, known in zip(made, read, strict=True) for slot in slots)
            if lasting or lost or all(imported):
                found[n] = Reason(Why.ONE_SIDED, (", ".join(errors.one_sided[n][:3]),))
        return found

    def _ties(self, outputs: Numbers) -> tuple[Array, dict[int, Reason]]:
        """Tell which indices that differ a call may have chosen among equal values: those are the same. Return the calls of which
        somebody reads such indices, too: these are not compared."""
        errors, names, pair = self.errors, self.names, self.errors.pair[outputs]
        differ, rounds = errors.absolute[outputs] != 0, errors.roundoffs[0][outputs] > 0
        found = names.table(having("ties"))[self.candidate.op[self.calls[pair]]] & differ & ~rounds
        if not found.any():
            return found, {}
        found &= ~np.isin(pair, pair[rounds & differ])
        read = [_read(stream, optimizer=True) for stream in errors.streams]
        asked = {}
        for n in outputs[found].tolist():
            call, slot = int(errors.pair[n]), int(errors.names[n])
            made = [int(stream.seq[calls[call]]) for stream, calls in zip(errors.streams, errors.calls, strict=True)]
            if any((seq, slot) in known for seq, known in zip(made, read, strict=True)):
                asked[call] = Reason(Why.TIES)
        return found, asked

    def _unsized(self, outputs: Numbers, error_in: Array) -> Array:
        """Tell for which calls all that is known of an output is that it differs, which may be rounding."""
        at = outputs[self.errors.unsized[outputs]]
        pair = self.errors.pair[at]
        rounds = ~self.criterion.exact[self.rows[pair]] | (error_in[pair] > 0)
        found = np.zeros(self.count, bool)
        found[pair[rounds & (self.errors.roundoffs[0][at] > 0)]] = True
        return found

    def _steady(self, outputs: Numbers) -> Array:
        """Tell before which calls nothing differed, and at least `QUORUM` calls that round were equal to the last bit or
        checksum. Then the two runs round alike, and the first difference is not what another library makes of the same inputs."""
        pair = self.errors.pair[outputs]
        differs = np.zeros(self.count, bool)
        differs[pair[self.errors.absolute[outputs] != 0]] = True
        alike = np.bincount(pair, minlength=self.count).astype(bool) & ~self.criterion.exact[self.rows] & ~differs
        equal: Numbers = np.cumsum(alike) - alike
        inside = self.candidate.has_children[self.calls]  # it shows what a call inside it made
        before: Numbers = np.cumsum(differs & ~inside) - (differs & ~inside)
        return np.asarray((before == 0) & (equal >= QUORUM))

    def _outliers(self, ratio: Array) -> Array:
        """Tell which calls are off by more than is explained while hardly any other of their kind (operator and phase) is near
        that. How a device rounds shows in all: where the others have room to spare, what is explained was no underestimate."""
        kind = self.candidate.kinds[1][self.calls]
        of = np.bincount(kind)
        loud = np.bincount(kind, ratio > HALF * self.criterion.suspect, len(of))
        alone = (of > QUORUM) & (QUORUM * loud <= of)  # one layer of four
        return np.asarray(alone[kind] & (ratio > self.criterion.suspect))

    def _worst(self, outputs: Numbers, over: Array) -> Numbers:
        """Return the first output with the largest excess of each call."""
        pair = self.errors.pair[outputs]
        largest = np.full(self.count, -1.0)
        np.maximum.at(largest, pair, over)
        at = over == largest[pair]
        found = np.full(self.count, len(self.errors.pair), np.int64)
        np.minimum.at(found, pair[at], outputs[at])
        return np.where(found < len(self.errors.pair), found, NONE)


def _read(stream: Stream, *, optimizer: bool) -> set[tuple[int, int]]:
    """Return ``(seq, slot)`` of all results that a call reads, those that only an optimizer does if that is wanted."""
    at = np.flatnonzero((stream.phase != stream.names.number("optimizer"))[stream.call] | optimizer)
    return set(zip(stream.producer[at].tolist(), stream.producer_slot[at].tolist(), strict=True))


def _roundoffs_inside(stream: Stream, roundoffs: Array) -> Array:
    """Return, per call, the unit roundoff of the lowest precision that the calls inside it compute in (autocast)."""
    own = np.zeros(len(stream) + 1)
    np.maximum.at(own, stream.call, roundoffs[stream.dtype])
    inside = np.zeros(len(stream) + 1)
    depth, above = np.zeros(len(stream), np.int64), stream.parents
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, stream.parents[above], NONE)
    for level in range(int(depth.max(initial=0)), 0, -1):
        at = np.flatnonzero(depth == level)
        np.maximum.at(inside, stream.parents[at], np.maximum(inside[at], own[at]))
    return inside[:-1]


def _leaves_inside(stream: Stream) -> Array:
    """Return, per call, how many calls that hold no others run inside it, at whatever depth."""
    found = np.zeros(len(stream) + 1)
    found[:-1] = ~stream.has_children
    count = np.zeros(len(stream) + 1)
    above = np.r_[stream.parents, NONE]
    at = np.flatnonzero(found[:-1])
    while len(at):
        at = above[at]
        at = at[at >= 0]
        np.add.at(count, at, 1.0)
    return count[:-1]


def _roles(verdicts: Verdicts) -> Array:
    """Return incomparable, unsized, equal (bitwise), carried (more than rounding, and explained) or agrees, by call."""
    errors, count = verdicts.errors, len(verdicts)
    equal = np.bincount(errors.pair[~errors.same], minlength=count) == 0
    # Without outputs, what a call reads is all there is.
    least = 0.0 if verdicts.criterion.limits else SHOWN
    limit = np.where(verdicts.worst < 0, SHOWN, np.maximum(8 * verdicts.own, least))
    carried = np.where(verdicts.worst < 0, verdicts.error_in, verdicts.error_out) > limit
    found = np.where(equal, EQUAL, np.where(carried, CARRIED_ON, AGREES))
    found[verdicts.unsized] = UNSIZED
    found[list(verdicts.incomparable)] = INCOMPARABLE
    return found.astype(np.int8)
