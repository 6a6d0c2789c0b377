"""Causes that no setting tells and that the calls of two runs show, in the words of the first line of a verdict.

    initial weights of 14 of 31 parameters differ (tokens.weight, places.weight, mix.weight…)
    batches differ from step 0 on
    random numbers are drawn in the candidate only: aten::rand, forward, step 0
    gradients are clipped in the candidate only: torch._foreach_norm, torch.stack
    gradients are added to those of the step before in the candidate only: they are not cleared
    the candidate goes backward 2 times a step, the baseline once: gradients of micro-batches are added up

Each is looked for while a part is at hand, and none is sought where a setting explains the call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from trueup.comparison.graph.streams import NONE, Numbers, Row, Stream
from trueup.comparison.measures.measure import Errors
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.result.findings import Frames
from trueup.comparison.verdict.judged import SIDES, Part, Suspect
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import normalised
from trueup.foundation.facts.roundoff import SINGLE
from trueup.foundation.facts.slots import is_input
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.frameworks.trees import path
from trueup.foundation.model import CallKey, Finding
from trueup.foundation.words.setting_sentence import some
from trueup.foundation.words.wording import is_own, user_source

PARAM = "param."
ROUNDED = 8 * SINGLE
"""Relative error up to which two devices may draw the same numbers in float32, and nobody would say that weights differ."""


class Beginnings:
    """What the runs begin with: initial weights, and batches."""

    def __init__(self) -> None:
        self._weights: dict[str, bool] = {}  # by parameter: whether its first value differs
        self.batches: dict[int, int] = {}  # by rank: the first step in which a model is given other inputs
        self._first: dict[int, tuple[int, int]] = {}  # by rank: seqs of each side's first call of a module
        self._resized: set[int] = set()  # ranks whose batches have another shape

    def add(self, part: Part) -> None:
        """Look at the modules of a part; of weights at those of the step in which training began."""
        errors = part.verdicts.errors
        candidate = errors.streams[1]
        calls = errors.calls[1][errors.pair]
        forward = (candidate.of_level("module") & candidate.during("forward"))[calls]
        if not forward.any():
            return
        if part.rank not in self._first:
            at = int(np.flatnonzero((candidate.of_level("module") & candidate.during("forward"))[errors.calls[1]])[0])
            seqs = [int(stream.seq[side[at]]) for stream, side in zip(errors.streams, errors.calls, strict=True)]
            self._first[part.rank] = seqs[0], seqs[1]
        if part.step == 0:
            self._look_at_weights(errors, np.flatnonzero(forward & candidate.names.table(_is_parameter)[errors.names]))
        outermost = forward & (candidate.parents[calls] == NONE) & candidate.names.table(is_input)[errors.names]
        shapes = np.isin(np.arange(len(errors.pair)), [n for n, why in errors.reasons.items() if why.why is Why.SHAPES])
        differ = outermost & (_apart(errors) | shapes) & ~candidate.names.table(_is_parameter)[errors.names]
        if (outermost & shapes).any():
            self._resized.add(part.rank)
        if differ.any():
            self.batches.setdefault(part.rank, int(candidate.step[calls[differ]].min()))

    def _look_at_weights(self, errors: Errors, at: Numbers) -> None:
        candidate, apart = errors.streams[1], _apart(errors)
        for n in at.tolist():
            call, names = int(errors.calls[1][errors.pair[n]]), candidate.names.names
            slot = names[int(errors.names[n])].removeprefix(PARAM)
            self._weights.setdefault(path(names[int(candidate.scope[call])], slot), bool(apart[n]))

    @property
    def weights(self) -> str:
        """Say which initial weights differ; empty where none does."""
        other = [name for name, apart in self._weights.items() if apart]
        return f"initial weights of {len(other):,} of {len(self._weights):,} parameters differ ({some(other)})" if other else ""

    def said(self, finding: Finding) -> str:
        """Say of a culprit that stands where training begins which initial weights and batches differ."""
        if finding.phase not in ("forward", "data") or (finding.kind == "operator" and finding.phase != "data"):
            return ""
        slot = finding.slots[0].slot if finding.kind == "input" and finding.slots else ""
        before = self._is_before(finding)
        found = [self.weights] if self.weights and (before or slot.startswith(PARAM)) else []
        since = self.batches.get(finding.rank)
        sized = finding.rank in self._resized and bool(slot) and finding.slots[0].shape[0] != finding.slots[0].shape[1]
        follows = since is not None and since <= finding.step and not finding.scope and finding.kind not in ("argument", "region")
        if since is not None and (before or sized or follows) and not slot.startswith(PARAM):
            found.append(f"batches differ from step {since} on")
        return "; ".join(found)

    def _is_before(self, finding: Finding) -> bool:
        """Tell whether a call was made before any module ran."""
        first = self._first.get(finding.rank)
        if first is None or finding.scope:
            return False
        return any(NONE < seq < of for seq, of in zip(finding.seq, first, strict=True))


class Unmade:
    """Gradients that an optimizer reads and, in one run alone, no recorded backward made: something wrote to them unseen."""

    def __init__(self) -> None:
        self.found: Reason | None = None
        self._made: set[int] = set()  # ranks in which a backward made them in a step before

    def add(self, part: Part) -> None:
        """Look at the optimizers of a part."""
        errors = part.verdicts.errors
        read = ~errors.outputs & part.streams[1].during("optimizer")[errors.calls[1][errors.pair]]
        made = [stream.producers[slots] for stream, slots in zip(part.streams, errors.slots, strict=True)]
        by = [(of != NONE) & stream.during("backward")[of] for stream, of in zip(part.streams, made, strict=True)]
        for side in (0, 1):
            if self.found is None and (read & by[1 - side] & (made[side] == NONE)).any():
                self.found = Why.UNMADE(SIDES[side], part.step, part.rank in self._made)
        if (read & by[0] & by[1]).any():
            self._made.add(part.rank)


class Alone:
    """What one run alone does between loss and optimizer, whatever its numbers are: it is seen behind a culprit that spoils all."""

    def __init__(self) -> None:
        self.clipped: Reason | None = None
        self.drawn: Reason | None = None
        self._scaled: tuple[set[Times], set[Times]] = set(), set()

    def add(self, part: Part, sites: tuple[Frames, Frames], criterion: Criterion) -> None:
        """Look at the calls of a part that stand in no module; ``sites`` are the call stacks of both sides."""
        for times, stream in zip(self._scaled, part.streams, strict=True):
            times |= loss_factors(stream)
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
    def times(self) -> float:
        """How many times as large the candidate's loss is by these numbers."""
        made = [math.prod(n if done == "multiplied" else 1 / n for done, n in times if n) for times in self._scaled]
        return made[1] / made[0] if all(made) else math.nan


Times = tuple[str, float]  # multiplied or divided, by which number
TIMES = {"mul": "multiplied", "multiply": "multiplied", "scale": "multiplied"}
TIMES |= {"div": "divided", "divide": "divided", "true_divide": "divided", "truediv": "divided", "real_div": "divided"}


def loss_factors(stream: Stream) -> set[Times]:
    """Return by which numbers a step multiplies or divides single elements that its backward starts from."""
    firsts = stream.starts[:-1]
    single = (stream.numel[firsts] == 1) & (stream.parents == NONE) & stream.during("forward") & (stream.arguments != NONE)
    single &= (stream.scope == NONE) | (stream.scope == stream.names.number(""))
    back = stream.index(stream.forward_seq[stream.during("backward") & (stream.forward_seq != NONE)])
    found = set()
    for call in np.intersect1d(np.flatnonzero(single), back).tolist():
        done = TIMES.get(normalised(_op(stream, call)))
        numbers = [one for one in stream.given(call).values() if isinstance(one, (int, float)) and not isinstance(one, bool)]
        if done and len(numbers) == 1 and numbers[0] != 1:
            found.add((done, float(numbers[0])))
    return found


def _outermost(stream: Stream, calls: Numbers) -> Numbers:
    """Return the calls between modules that are of no backward."""
    outside = (stream.scope[calls] == NONE) | (stream.scope[calls] == stream.names.number(""))
    return np.asarray(calls[outside & (stream.parents[calls] == NONE) & stream.during("forward", "optimizer")[calls]])


def _of_gradients(stream: Stream, calls: Numbers) -> list[int]:
    """Return those of some calls that compute from gradients: a backward made them, a communication, or one of these calls."""
    made = stream.during("backward", "collective")
    found: set[int] = set()
    for call in calls.tolist():
        read = _read(stream, call)
        if made[read[read != NONE]].any() or not found.isdisjoint(read.tolist()):
            found.add(call)
    return sorted(found)


def _draw(stream: Stream, calls: Numbers, criterion: Criterion) -> Row | None:
    """Return the first of some calls that draws random numbers."""
    rows = map(stream.row, calls.tolist())
    return next((row for row in rows if criterion.row(row.op, row.level, row.phase).random), None)


def _reach_optimizer(stream: Stream, calls: list[int]) -> bool:
    """Tell whether an optimizer reads what some calls make."""
    return _is_of(stream, np.setdiff1d(stream.call[np.isin(stream.producers, calls)], calls), "optimizer")


def _is_parameter(name: str) -> bool:
    return name.startswith(PARAM)


def _apart(errors: Errors) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell of which entries the two sides differ by more than rounding; in another dtype they are rounded."""
    (baseline, candidate), (k, j) = errors.streams, errors.slots
    return np.asarray((np.nan_to_num(errors.relative) > ROUNDED) & (baseline.dtype[k] == candidate.dtype[j]))


def shown(suspect: Suspect, part: Part, sites: tuple[Frames, Frames]) -> Reason | None:
    """Return what a culprit shows of its cause by itself; None where it shows none. ``sites`` are the call stacks of both sides."""
    found = _drawn(suspect, sites) or _clipped(suspect, part) or _changed(suspect, part) or _left(suspect, part)
    return found or suspect.added


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
        made = _read(stream, pending.pop())
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
    made = _read(stream, call)
    if bool((made == NONE).any()):
        return Why.NOT_CLEARED()
    return None


def _read(stream: Stream, call: int) -> Numbers:
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


def passes_text(sides: tuple[dict[int, int], dict[int, int]]) -> str:
    """Say that the runs go backward another number of times in a step that both have; empty where they do not."""
    for step in sorted(sides[0].keys() & sides[1].keys()):
        first, second = sides[0][step], sides[1][step]
        if first != second:
            more, less = ("candidate", "baseline") if second > first else ("baseline", "candidate")
            counts = max(first, second), min(first, second)
            often, rare = (f"{n} times" if n > 1 else "once" for n in counts)
            return f"the {more} goes backward {often} in a step, the {less} {rare}: gradients of micro-batches are added up"
    return ""
