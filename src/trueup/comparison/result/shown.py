"""Causes that no setting tells and that the calls of two runs show, in the words of the first line of a verdict.

    random numbers are drawn in the candidate only: aten::rand, forward, step 0
    gradients are clipped in the candidate only: torch._foreach_norm, torch.stack
    gradients are added to those of the step before in the candidate only: they are not cleared
    the candidate goes backward 2 times a step, the baseline once: gradients of micro-batches are added up

Each is looked for while a part is at hand, and none is sought where a setting explains the call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Row, Stream, distinct, spans
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.result.summary import Frames, tensor_text
from trueup.comparison.verdict.judged import SIDES, Part, Suspect
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import normalised
from trueup.foundation.facts.slots import is_input
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import LANES, CallKey
from trueup.foundation.words.sentence import argument_name
from trueup.foundation.words.setup_sentence import some
from trueup.foundation.words.wording import is_own, one_line, user_source

PARAM = "param."
SUMMED = 0.01
"""How far what is read may be from a sum of gradients, relative to it: sketches of unlike tensors are as far as they are long."""


class Lacking:
    """Finds a tensor that one run alone gives a call: its mask. Where the inputs differ anyway, no culprit shows that."""

    def __init__(self) -> None:
        self.found = ""

    def add(self, part: Part, modules: Mapping[str, Mapping[str, Any]]) -> None:
        """Look at the forward calls of a part; ``modules`` are what modules are set to, by scope."""
        errors = part.verdicts.errors
        if self.found or errors.all_same:
            return
        given = [_tensors(stream) for stream in part.streams]
        stream = part.streams[1]
        inside = (stream.parents != NONE) & stream.of_level("api")[stream.parents]  # of which the function is the user's
        named = stream.during("forward") & ~inside
        differ = named[errors.calls[1]] & (given[0][errors.calls[0]] != given[1][errors.calls[1]])
        pairs = list(zip(*(side[differ].tolist() for side in errors.calls), strict=True))
        pairs += [(a, b) for a, b in _of_one_name(part) if named[b] and given[0][a] != given[1][b]]
        around = set(stream.parents[[b for _, b in pairs]].tolist())
        for pair in pairs:  # the innermost: a function of a module has the name that its user gave
            if pair[1] not in around and not self.found:
                rows = [one.row(call) for one, call in zip(part.streams, pair, strict=True)]
                self.found = _lacking(rows, part.streams, modules.get(rows[1].scope, {}).get("inputs"))


def _of_one_name(part: Part) -> list[tuple[int, int]]:
    """Return calls without counterpart that have the same name in both runs: an operator that is given more is not matched."""
    alone = part.alignment.only_baseline, part.alignment.only_candidate
    keys = [{stream.row(int(call)).key: int(call) for call in calls} for stream, calls in zip(part.streams, alone, strict=True)]
    return [(call, keys[1][key]) for key, call in keys[0].items() if key in keys[1]]


def _lacking(rows: Sequence[Row], streams: Sequence[Stream], inputs: object) -> str:
    """Say which tensor of a call one side lacks, by its argument's name; ``inputs`` are those of the module's ``forward``."""
    held = [{slot: k for slot, k in row.slots.items() if _is_given(slot)} for row in rows]
    for slot in sorted(held[0].keys() ^ held[1].keys()):
        name = argument_name(rows[1].op, slot)
        if rows[1].level == "module" and name.isdecimal() and isinstance(inputs, list) and int(name) < len(inputs):
            name = str(inputs[int(name)])
        sides = [tensor_text(stream, k[slot]) if slot in k else "absent" for stream, k in zip(streams, held, strict=True)]
        if name.isidentifier():
            return f"{name} of {one_line(rows[1].op)}: {sides[0]} in the baseline, {sides[1]} in the candidate"
    return ""


def _tensors(stream: Stream) -> Numbers:
    """Return how many tensors each call is given, its module's parameters left out."""
    given = stream.names.table(_is_given)[stream.slot]
    return np.bincount(stream.call[given], minlength=len(stream))


def _is_given(slot: str) -> bool:
    return is_input(slot) and not slot.startswith(PARAM)


class Unmade:
    """Gradients that an optimizer reads and, in one run alone, no recorded backward made: something wrote to them unseen."""

    def __init__(self) -> None:
        self.found: Reason | None = None
        self._made: set[int] = set()  # ranks in which a backward made them in a step before
        self._read: tuple[dict[int, Given], dict[int, Given]] = {}, {}  # of each side by rank: what a backward made once

    def add(self, part: Part) -> None:
        """Look at the optimizers of a part."""
        errors = part.verdicts.errors
        read = ~errors.outputs & part.streams[1].during("optimizer")[errors.calls[1][errors.pair]]
        made = [stream.producers[slots] for stream, slots in zip(part.streams, errors.slots, strict=True)]
        by = [(of != NONE) & stream.during("backward")[of] for stream, of in zip(part.streams, made, strict=True)]
        lacks = [self._lacks(side, part.rank, stream) for side, stream in enumerate(part.streams)]
        for side in (0, 1):
            paired = bool((read & by[1 - side] & (made[side] == NONE)).any())
            if self.found is None and (paired or (lacks[side] and not lacks[1 - side])):
                self.found = Why.UNMADE(SIDES[side], part.step, lacks[side] or part.rank in self._made)
        if (read & by[0] & by[1]).any():
            self._made.add(part.rank)

    def _lacks(self, side: int, rank: int, stream: Stream) -> bool:
        """Tell whether an operator of the optimizer reads nothing that a backward made where it did in a step before: two
        optimizers have no operator in common."""
        names, before = stream.names, self._read[side].setdefault(rank, set())
        at = np.flatnonzero(stream.during("optimizer")[stream.call] & names.table(is_input)[stream.slot])
        of = stream.producers[at]
        given, number = np.unique(np.stack([stream.op[stream.call[at]], stream.slot[at]]), axis=1, return_inverse=True)
        which = (of != NONE) & stream.during("backward")[of], of == NONE
        counts = [np.bincount(number.reshape(-1)[one], minlength=given.shape[1]) > 0 for one in which]
        named = [(names.name(int(op)), names.name(int(slot))) for op, slot in given.T]
        made, unmade = ({one for one, has in zip(named, some, strict=True) if has} for some in counts)
        lacks = bool(before & (unmade - made))
        before |= made
        return lacks


Given = set[tuple[str | None, str | None]]  # operators and their slots


class Alone:
    """What one run alone does between loss and optimizer, whatever its numbers are: it is seen behind a culprit that spoils all."""

    def __init__(self) -> None:
        self.clipped: Reason | None = None
        self.drawn: Reason | None = None
        self._scaled: tuple[set[Times], set[Times]] = set(), set()
        self._losses: tuple[dict[str, None], dict[str, None]] = {}, {}  # operators outside of modules that make the loss, in order

    def add(self, part: Part, sites: tuple[Frames, Frames], criterion: Criterion) -> None:
        """Look at the calls of a part that stand in no module; ``sites`` are the call stacks of both sides."""
        for times, losses, stream in zip(self._scaled, self._losses, part.streams, strict=True):
            times |= loss_factors(stream)
            losses |= dict.fromkeys(_making_loss(stream, criterion))
        unmatched = part.alignment.only_baseline, part.alignment.only_candidate
        outside = [_outermost(stream, calls) for stream, calls in zip(part.streams, unmatched, strict=True)]
        draws = [_draw(stream, calls, criterion) for stream, calls in zip(part.streams, outside, strict=True)]
        if self.drawn is None and (draws[0] is None) != (draws[1] is None):
            at, row = next((at, row) for at, row in enumerate(draws) if row is not None)
            reason = _drawn_alone(row.key, SIDES[at], row.site, sites)
            self.drawn = reason if is_own(reason.facts[2]) else None  # a loader that begins anew shuffles again
        only = [_of_gradients(stream, calls) for stream, calls in zip(part.streams, outside, strict=True)]
        names = [list(dict.fromkeys(_op(stream, n) for n in calls)) for stream, calls in zip(part.streams, only, strict=True)]
        reach = [_reach_optimizer(stream, found) for stream, found in zip(part.streams, only, strict=True)]
        for step in sorted(part.streams[1].stands_for) if self.clipped is None else ():
            self.clipped = self.clipped or _clipped_within(part, step)
        self.clipped = self.clipped or _one_clips([ops if there else [] for ops, there in zip(names, reach, strict=True)])

    @property
    def scaled(self) -> list[Reason]:
        """Return by which numbers the loss is multiplied or divided in one run only."""
        sides = [(side, self._scaled[n] - self._scaled[1 - n]) for n, side in enumerate(SIDES)]
        return [Why.LOSS_SCALED_ALONE(side, *one) for side, alone in sides for one in sorted(alone)]

    @property
    def factors(self) -> frozenset[float]:
        """Return these numbers."""
        return frozenset(number for _, number in self._scaled[0] ^ self._scaled[1])

    @property
    def loss(self) -> Reason | None:
        """Return by which operators the loss is made in one run alone; None where they are the same."""
        alone = [tuple(op for op in ops if op not in self._losses[1 - n]) for n, ops in enumerate(self._losses)]
        if all(len(ops) == 1 and REDUCTIONS & set(normalised(ops[0]).rpartition(".")[2].split("_")) for ops in alone):
            return Why.REDUCED(alone[0][0], alone[1][0])
        if bool(alone[0]) == bool(alone[1]) or not all(self._losses):  # else nothing says that the loss was recorded
            return None
        side = 0 if alone[0] else 1
        return Why.RUNS_ALONE(SIDES[side], alone[side])

    @property
    def times(self) -> float:
        """How many times as large the candidate's loss is by these numbers."""
        made = [math.prod(n if done == "multiplied" else 1 / n for done, n in times if n) for times in self._scaled]
        return made[1] / made[0] if all(made) else math.nan


Times = tuple[str, float]  # multiplied or divided, by which number
TIMES = {"mul": "multiplied", "multiply": "multiplied", "scale": "multiplied"}
CASTS = ("to", "_to_copy", "cast", "detach", "clone", "backward")
TIMES |= {"div": "divided", "divide": "divided", "true_divide": "divided", "truediv": "divided", "real_div": "divided"}


def loss_factors(stream: Stream) -> set[Times]:
    """Return by which numbers a step multiplies or divides single elements that its backward starts from."""
    firsts = stream.starts[:-1]
    single = (stream.numel[firsts] == 1) & (stream.parents == NONE) & stream.during("forward") & (stream.arguments != NONE)
    single &= (stream.scope == NONE) | (stream.scope == stream.names.number(""))
    found = set()
    for call in np.flatnonzero(single & _differentiated(stream)).tolist():
        done = TIMES.get(normalised(_op(stream, call)))
        numbers = [one for one in stream.given(call).values() if isinstance(one, (int, float)) and not isinstance(one, bool)]
        if done and len(numbers) == 1 and numbers[0] != 1:
            found.add((done, float(numbers[0])))
    return found


REDUCTIONS = frozenset(("sum", "mean"))


def _making_loss(stream: Stream, criterion: Criterion) -> list[str]:
    """Return the operators between modules, in order, from which a backward goes back, and those that make what they read; what
    only scales, casts or draws is left out."""
    outside = _outermost(stream, np.flatnonzero(stream.during("forward") & ~stream.of_level("module")))
    left, makes = np.zeros((2, len(stream) + 1), bool)  # the last entry is for `NONE`
    left[outside] = True
    pending = outside[_differentiated(stream)[outside]]
    while len(pending):
        makes[pending], left[pending] = True, False
        slots = spans(stream.starts[pending], stream.starts[pending + 1] - stream.starts[pending])
        read = stream.producers[slots[stream.names.table(is_input)[stream.slot[slots]]]]
        pending = distinct(read[left[read]])
    calls = np.flatnonzero(makes)
    firsts = np.unique(stream.kinds[1][calls], return_index=True)[1]
    found = []
    for row in map(stream.row, calls[np.sort(firsts)].tolist()):
        name = normalised(row.op)
        if name not in TIMES and name not in CASTS and not criterion.row(row.op, row.level, row.phase).random:
            found.append(row.op)
    return found


def _differentiated(stream: Stream) -> Array:
    """Tell which calls a recorded backward goes back through."""
    found = np.zeros(len(stream) + 1, bool)  # the last entry is for `NONE`
    found[stream.index(stream.forward_seq[stream.during("backward") & (stream.forward_seq != NONE)])] = True
    return found[:-1]


def _outermost(stream: Stream, calls: Numbers) -> Numbers:
    """Return the calls between modules that are of no backward."""
    outside = (stream.scope[calls] == NONE) | (stream.scope[calls] == stream.names.number(""))
    return np.asarray(calls[outside & (stream.parents[calls] == NONE) & stream.during("forward", "optimizer")[calls]])


def _of_gradients(stream: Stream, calls: Numbers) -> list[int]:
    """Return those of some calls that compute from gradients: a backward made them, a communication, or one of these calls; or
    they are the sum of what several passes made, which a framework may add up out of sight."""
    made = stream.during("backward", "collective")
    found: set[int] = set()
    summed = set(_summed(stream, calls).tolist())
    for call in calls.tolist():
        read = makers(stream, call)
        if call in summed or made[read[read != NONE]].any() or not found.isdisjoint(read.tolist()):
            found.add(call)
    return sorted(found)


def _summed(stream: Stream, calls: Numbers) -> Numbers:
    """Return those of some calls that read, of no recorded call, the sum of what the passes of a step gave one tensor."""
    passes = stream.during("backward")[stream.call] & stream.names.table(_is_given_back)[stream.slot] & (stream.numel > 1)
    at = np.flatnonzero(passes & np.isin(stream.step[stream.call], stream.step[calls]))
    of = stream.call[at]
    keys = np.stack([stream.step[of], stream.level[of], stream.scope[of], stream.op[of], stream.slot[at], stream.numel[at]])
    kinds, which, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    read = np.flatnonzero(
        np.isin(stream.call, calls) & stream.names.table(is_input)[stream.slot] & (stream.producers == NONE) & (stream.l2 > 0)
    )
    read = read[np.isin(stream.numel[read], kinds[-1][counts > 1])]
    if not len(read):
        return read
    sums = np.zeros((len(counts), LANES))
    several = counts[which.reshape(-1)] > 1
    np.add.at(sums, which.reshape(-1)[several], stream.sketch[at[several]])
    found = []
    for slot, held in zip(read.tolist(), stream.sketch[read], strict=True):
        call = int(stream.call[slot])
        same = (kinds[0] == stream.step[call]) & (kinds[-1] == stream.numel[slot]) & (counts > 1)
        if (np.linalg.norm(held - sums[same], axis=-1) <= SUMMED * np.linalg.norm(held)).any():
            found.append(call)
    return distinct(np.array(found, np.int64))


def _is_given_back(slot: str) -> bool:
    return slot.startswith("grad_input.")


def _draw(stream: Stream, calls: Numbers, criterion: Criterion) -> Row | None:
    """Return the first of some calls that draws random numbers."""
    rows = map(stream.row, calls.tolist())
    return next((row for row in rows if criterion.row(row.op, row.level, row.phase).random), None)


def _reach_optimizer(stream: Stream, calls: list[int]) -> bool:
    """Tell whether an optimizer reads what some calls make: by who wrote it, or where nobody is known to have, by its bytes."""
    if _is_of(stream, np.setdiff1d(stream.call[np.isin(stream.producers, calls)], calls), "optimizer"):
        return True
    made = np.isin(stream.call, calls) & ~stream.names.table(is_input)[stream.slot] & stream.is_identified & (stream.numel > 1)
    read = stream.during("optimizer")[stream.call] & stream.names.table(is_input)[stream.slot] & (stream.producers == NONE)
    return bool(np.isin(stream.identity[read & (stream.l2 > 0)], stream.identity[made]).any())


SHOWING = (
    Why.STEPS_AGAIN, Why.MADE_ALONE, Why.READS, Why.READS_OTHER, Why.RUNS_ALONE, Why.RUNS_INSTEAD, Why.NO_GRADIENT,
    Why.NOT_UPDATED,
)  # fmt: skip
"""What is said of a call that tells its cause, where nothing else does."""


def shown(suspect: Suspect, part: Part, sites: tuple[Frames, Frames]) -> Reason | None:
    """Return what a culprit shows of its cause by itself; None where it shows none. ``sites`` are the call stacks of both sides."""
    found = _drawn(suspect, sites) or _clipped(suspect, part) or _changed(suspect, part) or _left(suspect, part)
    return found or suspect.added or next((reason for reason in suspect.because if reason.why in SHOWING), None)


def _drawn(suspect: Suspect, sites: tuple[Frames, Frames]) -> Reason | None:
    for reason in suspect.because:
        for one in _within(reason):
            if one.why is Why.ONE_SIDE_DREW:
                call, side, site = one.facts
                return _drawn_alone(call, side, site, sites)
    return None


def _drawn_alone(call: CallKey, side: str, site: int | None, sites: tuple[Frames, Frames]) -> Reason:
    frames, _ = ((), None) if site is None else sites[SIDES.index(side)].get(site, ((), None))
    return Why.DRAWN_ALONE(call, side, user_source(frames[0], frames) if frames else None)


def _within(reason: Reason) -> Iterator[Reason]:
    yield reason
    for fact in reason.facts:
        if isinstance(fact, Reason):
            yield from _within(fact)


def _clipped(suspect: Suspect, part: Part) -> Reason | None:
    """Tell of an optimizer whether one side alone clips what it is given."""
    if suspect.kind == "region" and suspect.phase == "optimizer" and not all(suspect.sides):  # before the update, which agrees
        ops = sorted(suspect.children, key=lambda op: "norm" not in op)
        side = SIDES[0 if suspect.sides[0] else 1]
        return Why.CLIPPED_ALONE(side, some(ops)) if _clips(set(map(normalised, ops))) else None
    return _clipped_within(part, suspect.step) if suspect.judged.call.candidate.op == STEP else None


def _clipped_within(part: Part, step: int) -> Reason | None:
    """Tell which side alone clips among the calls of optimizers in a step."""
    ran = [stream.stands_for.get(step, Counter()) for stream in part.streams]
    return _one_clips([list(first - second) for first, second in (ran, ran[::-1])])


def _one_clips(names: Sequence[list[str]]) -> Reason | None:
    """Tell by what each side alone runs whether one of them clips."""
    clips = [_clips(set(map(normalised, ops))) for ops in names]
    at = 0 if clips[0] else 1
    return Why.CLIPPED_ALONE(SIDES[at], some(sorted(names[at], key=lambda op: "norm" not in op))) if clips[0] != clips[1] else None


def _clips(ops: set[str]) -> bool:
    """Tell whether operators clip: they clamp, or take a norm and multiply or divide; a norm alone may be for a log."""
    norms = any("norm" in op for op in ops) or ("sum" in ops and not ops.isdisjoint(("square", "pow")))
    return any("clamp" in op for op in ops) or (norms and any("mul" in op or "div" in op for op in ops))


def _changed(suspect: Suspect, part: Part) -> Reason | None:
    """Tell of a run of calls of one side alone whether it reads gradients, and an optimizer reads what it makes."""
    if suspect.kind != "region" or suspect.phase != "forward":  # what runs after a backward and is none is of this phase
        return None
    for side, stream in enumerate(part.streams):
        call = stream.find((suspect.judged.call.baseline, suspect.judged.call.candidate)[side].seq) if suspect.sides[side] else NONE
        if call != NONE and _is_of(stream, _read_by(stream, call), "optimizer") and _reads_gradients(stream, call):
            sides = [s for s, there in zip(SIDES, suspect.sides, strict=True) if there]
            return Why.GRADIENTS_CHANGED(sides[0] if len(sides) == 1 else None, _op(stream, call))
    return None


def _reads_gradients(stream: Stream, call: int) -> bool:
    """Tell whether a call computes, in its step, from what a backward made."""
    seen, pending = {NONE, call}, [call]
    while pending:
        made = makers(stream, pending.pop())
        if _is_of(stream, made, "backward"):
            return True
        further = set(made[stream.step[made] == stream.step[call]].tolist()) - seen
        seen |= further
        pending += further
    return False


def _left(suspect: Suspect, part: Part) -> Reason | None:
    """Tell of gradients that are added up in one run alone whether what they are added to was left by an earlier step."""
    stream = part.streams[1]
    call = stream.find(suspect.place)
    if suspect.kind != "region" or suspect.phase != "backward" or not part.step or call == NONE:
        return None
    if normalised(_op(stream, call)) not in ("add", "add_") or stream.parents[call] != NONE:
        return None
    made = makers(stream, call)
    if bool((made == NONE).any()):
        return Why.NOT_CLEARED()
    return None


def makers(stream: Stream, call: int) -> Numbers:
    """Return the calls that made what a call reads, `NONE` of what was made in no step at hand."""
    slots = slice(stream.starts[call], stream.starts[call + 1])
    read = stream.names.table(is_input)[stream.slot[slots]]
    return np.asarray(stream.producers[slots][read])


def _read_by(stream: Stream, call: int) -> Numbers:
    """Return the calls that read what a call makes, and what is made of that without gradients."""
    return np.asarray(stream.call[stream.producers == call])


def _is_of(stream: Stream, calls: Numbers, phase: str) -> bool:
    return bool(stream.during(phase)[calls[calls != NONE]].any())


def _op(stream: Stream, call: int) -> str:
    return stream.names.names[int(stream.op[call])]


def passes_counts(sides: tuple[dict[int, int], dict[int, int]]) -> tuple[int, int] | None:
    """Return how often each run goes backward in the first step of both in which they differ; None where they do not."""
    counts = ((sides[0][step], sides[1][step]) for step in sorted(sides[0].keys() & sides[1].keys()))
    return next(((first, second) for first, second in counts if first != second), None)


def passes_text(counted: tuple[int, int] | None) -> str:
    """Say that the runs go backward another number of times in a step; empty where they do not."""
    if counted is None:
        return ""
    more, less = ("candidate", "baseline") if counted[1] > counted[0] else ("baseline", "candidate")
    often, rare = (f"{n} times" if n > 1 else "once" for n in (max(counted), min(counted)))
    return f"the {more} goes backward {often} in a step, the {less} {rare}: gradients of micro-batches are added up"
