"""What is known of one rank and step once it is judged. `Verdicts` holds the matched calls in columns, `Judged` one of the few
that somebody looks at. `Tree` says which calls ran inside which on both sides, and which were compared. `Part` is all of it,
with suspects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from trueup.comparison.graph.streams import NONE, Alignment, Array, Numbers, Row, Stream, distinct, most, numbered
from trueup.comparison.limits import Applied
from trueup.comparison.measures.measure import Errors, Measured
from trueup.comparison.measures.thresholds import CANCELLED, GONE, NESTED
from trueup.comparison.verdict.evidence import NOTHING, Yardstick
from trueup.foundation.facts import criteria
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.slots import is_output, is_weight
from trueup.foundation.facts.why import CARRIED_ON, COHERENT, INCOMPARABLE, ROLES, Reason
from trueup.foundation.frameworks.dialect import MODULE

LASTING = ("optimizer", "collective")  # phases whose results a later step or rank reads: having no reader here proves nothing

Kind = Literal["operator", "argument", "random", "input", "overwritten", "region"]
Side = Literal["baseline", "candidate"]
SIDES: tuple[Side, Side] = ("baseline", "candidate")

OwnErrors = Callable[[int, Sequence[tuple[int, int]]], Mapping[int, Reason | None]]
"""Asked about calls of a rank, the number of each in the baseline and in the candidate, it says by the latter which are wrong by
themselves, and why; None where one is not, and nothing where that cannot be told. Floors above have it (`doors.comparing`)."""


@dataclass(slots=True)
class Judged:
    """A measured call with its verdict: ``expected`` explains ``error_out``, ``own`` is the part that rounding explains."""

    call: Measured
    row: criteria.Row
    error_in: float
    error_out: float
    own: float
    expected: float
    worst: str | None  # the output with the largest excess
    incomparable: Reason | None = None  # why the outputs could not be compared, in full or in part
    unsized: bool = False  # whether an output is known to differ and not how much, so that it may be rounding
    role: str = "agrees"
    slot_expected: dict[str, float] = field(default_factory=dict)
    decided: int = 0  # what decided beside the row: `REPEATS` or one of those beside it, else 0
    declared: float = 0.0  # the part of ``own`` that operands rounded to a declared TF32 or HF32 make
    steady: bool = False  # whether all that rounds before it is bitwise equal on both sides
    outlier: bool = False  # whether it is off by more than is explained and hardly any other call of its kind is near that
    broke: tuple[Reason, ...] = ()  # the figures that broke a limit of the criterion

    @property
    def ratio(self) -> float:
        """``error_out / expected``."""
        return float(excess(np.asarray(self.error_out), np.asarray(self.expected)))

    def is_certain(self, criterion: Criterion) -> bool:
        """Tell whether the error is more than the estimate may be wrong by. The carried part has its own factor for that already.
        ``declared``, known by its definition whatever the device, needs no more room than that, nor does the rest of ``own``
        where the inputs are equal or the error has a direction."""
        if self.error_in == 0 and (self.steady if self.unsized else self.outlier):  # the first difference; alone of its kind
            return self.ratio > criterion.suspect
        if self.unsized or math.isinf(self.expected):
            return False
        certain = criterion.certain_carried if self.error_in == 0 or self.decided == COHERENT else criterion.certain
        carried = max(self.expected - self.own, 0.0)
        decides = self.row.own == "exact" and self.row.carry == "branch"  # how many numbers lie at the edge is in no statistic
        if carried >= GONE or (decides and self.error_in > 0):
            return False  # nothing is left of a result that cancels, and how coherent its terms' errors are is not known
        return self.error_out > certain * (self.own - self.declared) + criterion.certain_carried * (carried + self.declared)


def excess(error: Array, expected: Array) -> Array:
    """Return how many times the explained error an error is; 0 where there is none, or where anything is explained."""
    with np.errstate(all="ignore"):
        found = np.where(expected > 0, error / expected, np.inf)
    return np.where((error == 0) | (expected == np.inf), 0.0, found)


@dataclass(slots=True)
class Verdicts:
    """The matched calls of one rank and step, judged: an entry each, in the candidate's order."""

    errors: Errors
    criterion: Criterion
    rows: Numbers  # row of the criterion
    error_in: Array
    error_out: Array
    own: Array
    expected: Array
    worst: Numbers  # entry of ``errors`` with the largest excess among the outputs, `NONE` where no output was compared
    slot_expected: Array  # by entry of ``errors``; NaN for what is no output
    unsized: Array
    incomparable: dict[int, Reason]
    role: Array  # index into `ROLES`
    decided: Array  # what decided beside the row, as `Judged.decided`
    tolerated: Array  # by entry of ``errors``: the relative error that repeats of the baseline, or limits, allow; else 0
    declared: Array  # the part of ``own`` that operands rounded to a declared TF32 or HF32 make
    steady: Array  # whether all that round before a call are bitwise equal
    outlier: Array  # whether a call is off by more than is explained and hardly any other of its kind is near that
    applied: Applied | None  # what the limits of a criterion say, where it has any
    untold: int = 0  # backward calls of which a dump tells gradients inside alone, and lacks some that no recorded call reads
    _made: dict[int, Judged] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ratio(self) -> Array:
        """``error_out / expected`` of each call."""
        return excess(self.error_out, self.expected)

    def at(self, pair: int) -> Judged:
        """Return a call as an object, always the same one."""
        if pair not in self._made:
            self._made[pair] = self._make(pair)
        return self._made[pair]

    def leave_open(self, pairs: Sequence[int], why: Reason) -> None:
        """Take calls for such as could not be compared."""
        self.incomparable |= dict.fromkeys(pairs, why)
        self.role[pairs] = INCOMPARABLE
        for judged in map(self.at, pairs):  # it may have been handed out before
            judged.incomparable, judged.role = why, ROLES[INCOMPARABLE]

    def set_apart(self, pair: int) -> None:
        """Take a call for one that lacks all of a result on one side."""
        self.incomparable.pop(pair, None)
        self.error_out[pair], self.role[pair] = 1.0, CARRIED_ON
        self._made.pop(pair, None)

    def _make(self, pair: int) -> Judged:
        errors, worst = self.errors, int(self.worst[pair])
        slots = [(errors.distance(n).slot, float(self.slot_expected[n])) for n in errors.entries(pair)]
        why = self.applied.why(self.criterion.limits, worst, errors.distance(worst).slot) if self.applied and worst >= 0 else ()
        return Judged(
            errors.measured(pair), self.criterion.rows[self.rows[pair]], float(self.error_in[pair]), float(self.error_out[pair]),
            float(self.own[pair]), float(self.expected[pair]), None if worst < 0 else errors.distance(worst).slot,
            self.incomparable.get(pair), bool(self.unsized[pair]), ROLES[self.role[pair]],
            {slot: expected for slot, expected in slots if not math.isnan(expected)}, int(self.decided[pair]),
            float(self.declared[pair]), bool(self.steady[pair]), bool(self.outlier[pair]), why,
        )  # fmt: skip


@dataclass(slots=True)
class Suspect:
    """A call where a difference may start; ``kind`` as in `trueup.foundation.model.Finding`."""

    judged: Judged
    kind: Kind
    certain: bool
    children: tuple[str, ...] = ()
    api: str | None = None
    reason: str = ""
    unit: float = 2.0**-24  # unit roundoff of its worst output's dtype
    because: tuple[Reason, ...] = ()  # what else was found out about it
    sides: tuple[bool, bool] = (True, True)  # whether the baseline and the candidate have the call (only a region may lack one)
    added: Reason | None = None  # operators that one run has in a region beside all that the other one has there
    began: int = 0  # when the call began on the candidate, on the scale of `Stream.ready`
    independent: bool = False  # whether it is known that the errors of its inputs are no reason for it, however large they are
    ready: int = 0  # when the difference was there on the candidate: what is wrong with a call's inputs is there when it begins

    @property
    def step(self) -> int:
        """Training step."""
        return self.judged.call.candidate.step

    @property
    def rank(self) -> int:
        """Process."""
        return self.judged.call.candidate.rank

    @property
    def phase(self) -> str:
        """Phase of the call."""
        return self.judged.call.candidate.phase

    @property
    def place(self) -> int:
        """Execution number on the candidate; of a region that it lacks, that of the call that reads the result."""
        return self.judged.call.candidate.seq


@dataclass(frozen=True, slots=True)
class Passes:
    """How often each side goes backward in a step that accumulates alike (``sure``: in direction too); ``worst`` so far."""

    baseline: int
    candidate: int
    sure: bool
    worst: float


@dataclass(slots=True)
class Part:
    """One rank and step, judged."""

    rank: int
    step: int
    verdicts: Verdicts
    alignment: Alignment
    yardstick: Yardstick = NOTHING  # how far the runs are from others of the user's
    beside: list[Any] = field(default_factory=list)  # what somebody asked to be taken of each stream meanwhile
    suspects: list[Suspect] = field(default_factory=list)
    uncovered: list[tuple[Side, Row]] = field(default_factory=list)  # unmatched calls that no coarser level or reader accounts for
    unexplained: list[tuple[Judged, str]] = field(default_factory=list)
    """``(call, input slot)`` where a difference comes in that no compared call made."""
    narrowed: int | None = None  # result that its call makes coarser in the candidate, unlike others of its kind
    stale: tuple[int, int] | None = None  # entry of what was left from an earlier step in the candidate alone, and who made it
    replaced: int | None = None  # differing tensor of the first step that another rank's replaces before it is read
    elsewhere: Reason | None = None  # where a random generator stands elsewhere, and no call shows it
    passes: Passes | None = None  # how often each side goes backward in the step, where that differs and what accumulates agrees
    rewritten: tuple[int, int] = (0, 0)  # calls of each side that are written another way on the other, and agree
    own_errors: tuple[int, int, int] = (0, 0, 0)  # calls asked whether wrong by themselves, answered, and found right
    harmless: list[Judged] = field(default_factory=list)  # calls with other arguments whose results agree within rounding

    @property
    def streams(self) -> tuple[Stream, Stream]:
        """Both sides' calls."""
        return self.verdicts.errors.streams

    def reader(self, entry: int) -> Row:
        """Return the candidate's call that an entry of the errors is a slot of."""
        errors = self.verdicts.errors
        return errors.streams[1].row(int(errors.calls[1][errors.pair[entry]]))


class Tree:
    """The calls of both sides by their ``parent``; calls are indices into the streams of their side."""

    def __init__(self, verdicts: Verdicts, alignment: Alignment) -> None:
        self.verdicts, self.streams = verdicts, verdicts.errors.streams
        self.unmatched = alignment.only_baseline, alignment.only_candidate
        self.pairs = tuple(numbered(calls, len(stream)) for calls, stream in zip(verdicts.errors.calls, self.streams, strict=True))
        """By side: the matched call of each call, `NONE` where it has no counterpart; one more entry, for `NONE`."""

    @cached_property
    def is_foreign(self) -> bool:
        """Whether a side is another tool's dump, or the sides are of two frameworks: then what is recorded is not all that ran."""
        return any(stream.imported or stream.mixed for stream in self.streams)

    @cached_property
    def opened(self) -> frozenset[int]:
        """Matched modules of two frameworks that are none of the known layers, and inside which calls were matched. Two
        frameworks make other functions of nearly every module, so such a module is looked into, not compared as a whole: what is
        inside is matched, or lies between what is. That takes functions, so modules alone are not looked into."""
        stream = self.streams[1]
        if stream.neutral is None or not stream.of_level("api").any():
            return frozenset()
        matched = self.verdicts.errors.calls[1]
        above = distinct(stream.parents[matched])
        modules = [call for call in above[above >= 0].tolist() if stream.neutral[call] == stream.names.number(MODULE)]
        outer = {other for call in modules for other in self.around(call) if stream.neutral[other] == stream.neutral[call]}
        pairs = self.pairs[1][sorted({*modules, *outer})]
        return frozenset(pairs[pairs >= 0].tolist())

    def judged(self, side: int, call: int) -> Judged | None:
        """Return the verdict of a call, None where it has no counterpart."""
        pair = int(self.pairs[side][call])
        return None if pair < 0 else self.verdicts.at(pair)

    def forward(self, pair: int) -> int:
        """Return the matched call that saved tensors for a backward, or `NONE`."""
        return int(self.pairs[1][self.streams[1].saved[int(self.verdicts.errors.calls[1][pair])]])

    def around(self, call: int, side: int = 1) -> list[int]:
        """Return the calls around a call, innermost first."""
        return list(self.streams[side].around(call))

    def inside(self, call: int, side: int = 1) -> Iterator[int]:
        """Yield the calls inside a call, at any depth."""
        pending = [call]
        while pending:
            children = self.streams[side].inside(pending.pop()).tolist()
            pending += children
            yield from children

    @cached_property
    def leaves(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Tell of each matched call whether nothing finer speaks for it: no call was recorded inside, on either side, or the runs
        compute a function by other calls, so that what it returns is all that can be compared."""
        whole = np.zeros(len(self.verdicts), bool)
        finer = np.zeros(len(self.verdicts), bool)
        for stream, calls, pairs, alone in zip(self.streams, self.verdicts.errors.calls, self.pairs, self.unmatched, strict=True):
            around = pairs[stream.parents[alone]]
            whole[around[around != NONE]] = True
            finer |= stream.has_children[calls]
        return ~finer | (whole & self.streams[1].of_level("api")[self.verdicts.errors.calls[1]])

    def resolved(self, pair: int) -> bool:
        """Tell whether the calls inside a matched call speak for it: each was compared, and the call's error may be one of
        theirs. Else weights that differ inside speak: the call was given them, though they are none of its slots."""
        verdicts, stream = self.verdicts, self.streams[1]
        direct = [self._ran_inside(int(calls[pair]), side) for side, calls in enumerate(verdicts.errors.calls)]
        alone = [direct[side][self.pairs[side][direct[side]] < 0] for side in (0, 1)]
        if not len(direct[1]):
            return False
        inner = self.pairs[1][[n for call in direct[1].tolist() for n in (call, *self.inside(call))]]
        inner, nested = inner[inner >= 0], NESTED
        if any(map(len, alone)) and pair not in self.opened and not self._are_judged(pair, alone, inner):
            return False
        if only_modules(stream):  # what arises between those inside one is read there, and no call is seen to make it
            inner = inner[verdicts.error_out[inner] / verdicts.criterion.certain_carried > self._unmade[inner]]
            if stream.phase[verdicts.errors.calls[1][pair]] == stream.names.number("forward"):  # no gradients are added up
                nested = verdicts.criterion.certain
        if verdicts.unsized[inner].any() or any(n in verdicts.incomparable for n in inner.tolist()):
            of, errors = self._weights
            return bool(errors[np.isin(of, inner)].max(initial=0.0) * NESTED >= verdicts.error_out[pair])
        return bool(verdicts.error_out[inner].max(initial=0.0) * nested >= verdicts.error_out[pair])

    def _are_judged(self, pair: int, alone: list[Numbers], inner: Numbers) -> bool:
        """Tell whether what a module was given differs in weights inside, and calls there without counterpart are judged. They
        are where they are read (`loose_calls`); a function, and a module inside, is compared by what it returns."""
        module = self.streams[1].names.number("module")
        inside = any((stream.level[calls] == module).any() for stream, calls in zip(self.streams, alone, strict=True))
        if inside or self.is_foreign:
            return False
        of, errors = self._weights
        return bool(self.streams[1].level[self.verdicts.errors.calls[1][pair]] == module and (errors[np.isin(of, inner)] > 0).any())

    def _ran_inside(self, call: int, side: int) -> Numbers:
        """Return the calls right inside a call: where none names it, those of a forward that began while it ran. Modules know the
        modules around them alone, not a function that calls them (a reentrant checkpoint)."""
        stream = self.streams[side]
        found = stream.inside(call)
        if len(found) or stream.names.name(int(stream.phase[call])) not in ("forward", "recompute"):
            return found
        own = slice(stream.starts[call], stream.starts[call + 1])
        last = stream.ready[own].max(initial=NONE)
        meanwhile = (stream.began > stream.began[call]) & (stream.began < last) & (stream.step == stream.step[call])
        return np.flatnonzero(meanwhile & (stream.parents == stream.parents[call]))

    @cached_property
    def _unmade(self) -> Array:
        """Relative error of what each matched call reads and no compared call made, but for weights."""
        errors, stream = self.verdicts.errors, self.streams[1]
        read = errors.inputs & ~stream.names.table(is_weight)[errors.names] & (stream.producers[errors.slots[1]] < 0)
        return most(np.nan_to_num(errors.relative[read]), errors.pair[read], len(self.verdicts))

    @cached_property
    def _weights(self) -> tuple[Numbers, Array]:
        """Matched calls by the weights they were given, and the relative errors of these."""
        errors = self.verdicts.errors
        at = np.flatnonzero(self.streams[0].names.table(is_weight)[errors.names])
        return errors.pair[at], np.nan_to_num(errors.relative[at])

    @cached_property
    def two_kinds(self) -> Array:
        """Tell which entries hold numbers that round on one side alone, as a mask of bools and one of 0 and -Inf, and go where the
        results agree of who reads them in the end, or differ as its other inputs do: those are compared in their place."""
        errors, verdicts = self.verdicts.errors, self.verdicts
        found = np.not_equal(*(side > 0 for side in errors.roundoffs))
        if not found.any():
            return np.asarray(found)
        made = self.pairs[1][self.streams[1].producers[errors.slots[1]]]
        one_kind = np.where(found, 0.0, np.minimum(np.nan_to_num(errors.relative), CANCELLED))
        given, got = (most(one_kind[at], errors.pair[at], len(verdicts)) for at in (errors.inputs, errors.outputs))
        apart = got > verdicts.criterion.certain * verdicts.own + CANCELLED * given
        for n in reversed(np.flatnonzero(found & errors.inputs & (made != NONE)).tolist()):
            apart[made[n]] |= apart[errors.pair[n]]
        return np.asarray(found & ~(apart & self.leaves)[errors.pair])  # of a module those inside read it in the end

    def covering(self, call: int, side: int) -> list[int]:
        """Return the matched calls around this one that were compared as a whole, by all that they return."""
        pairs, errors = self.pairs[side][self.around(call, side)], self.verdicts.errors
        whole = [n for n in pairs[pairs >= 0].tolist() if n not in self.opened and errors.outputs[errors.entries(n)].any()]
        return [n for n in whole if not any(map(is_output, errors.one_sided.get(n, ())))]

    def operators(self, call: int) -> tuple[str, ...]:
        """Return the dispatcher operators inside a call of the candidate, each once: those that the baseline lacks first."""
        stream = self.streams[1]
        aten = stream.names.number("aten")
        found: dict[str, bool] = {}
        for inner in self.inside(call):
            if stream.level[inner] == aten:
                op = stream.names.names[int(stream.op[inner])]
                found[op] = found.get(op, False) or bool(self.pairs[1][inner] < 0)
        return tuple(sorted(found, key=lambda op: (not found[op], not op.rpartition("::")[2].startswith("_"))))


def only_modules(stream: Stream) -> bool:
    """Tell whether all that computes anything is a module; a loss only reads, and what an optimizer runs comes behind them all."""
    outputs = stream.call[stream.names.table(is_output)[stream.slot]]
    return bool((stream.of_level("module") | stream.during("optimizer"))[outputs].all())


def loose_calls(tree: Tree) -> tuple[list[int], list[int]]:
    """Return the unmatched calls of each side that no compared function accounts for, around them or within. Inside a module they
    may be wrong within its room, and are judged by who reads them; but of two frameworks hardly anything there is matched."""
    whole = tree.is_foreign
    found: list[list[int]] = []
    for side, calls in enumerate(tree.unmatched):
        covered: dict[int, bool] = {}  # by the call around them
        stream = tree.streams[side]
        module = stream.names.number("module")
        kept = []
        for call in calls.tolist():
            above = int(stream.parents[call])
            if above not in covered:
                around = [int(tree.verdicts.errors.calls[side][n]) for n in tree.covering(call, side)]
                covered[above] = bool(around) if whole else any(stream.level[n] != module for n in around)
            if not covered[above]:
                kept.append(call)
        found.append(sorted(set(kept) - _handing_on(tree, side, kept)))
    return found[0], found[1]


def _handing_on(tree: Tree, side: int, calls: list[int]) -> set[int]:
    """Return those of some calls that give, bit by bit, what calls with a counterpart returned while they ran: a function that
    checkpoints another one is not recorded around it."""
    stream = tree.streams[side]
    told = stream.names.table(is_output)[stream.slot] & stream.is_identified & (stream.l2 != 0)  # zeros are zeros by chance
    made = np.flatnonzero(told) if calls else np.empty(0, np.int64)
    own = made[np.isin(stream.call[made], calls) & ~stream.has_children[stream.call[made]]]
    within: dict[int, list[int]] = {digest: [] for digest in stream.identity[own].tolist()}
    for k in made[(tree.pairs[side][stream.call[made]] != NONE) & np.isin(stream.identity[made], stream.identity[own])].tolist():
        within[int(stream.identity[k])].append(k)
    handed: dict[int, bool] = {}
    for k in own.tolist():
        inside = (stream.seq[stream.call[j]] > stream.seq[stream.call[k]] and stream.ready[j] < stream.ready[k]
                  for j in within[int(stream.identity[k])])  # fmt: skip
        handed[int(stream.call[k])] = handed.get(int(stream.call[k]), True) and any(inside)
    return {call for call, so in handed.items() if so}
