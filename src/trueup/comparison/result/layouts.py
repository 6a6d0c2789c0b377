"""A comparison of runs of different layouts: each joined into one process first, and what the ranks did not agree on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc

from trueup.comparison.layout.calls import Key
from trueup.comparison.layout.declaring import load
from trueup.comparison.layout.described import layout_of
from trueup.comparison.layout.geometry import by_groups, geometry_of
from trueup.comparison.layout.gradients import Off, between, off, staying
from trueup.comparison.layout.inferring import CLOSE, Apart, distance
from trueup.comparison.layout.joined import Joined, added, forget_classes, undeclared
from trueup.comparison.layout.losses import near, reduced
from trueup.comparison.layout.pieces import REPLICATED, Way
from trueup.comparison.layout.standing import MICRO, standing_of, tied_of, updates_of
from trueup.comparison.result.micro_batches import lost
from trueup.comparison.result.of_pieces import counts_piece, each_scaled, encloses, is_unplaced
from trueup.comparison.result.summary import SCHEMA, count, summarise
from trueup.comparison.result.sums import doubts_of_sums, odd_sums, travelled
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.model import Finding, Result, SlotComparison
from trueup.foundation.store import Capture
from trueup.foundation.store.columns import Overview
from trueup.foundation.words import setup_sentence as said
from trueup.foundation.words.sentence import HEADS, evidence, verdict_lines
from trueup.foundation.words.wording import counted

SURE = ("replicas", "unreduced", "masks", "places", "samples")
"""Kinds of `Apart` that are faults by themselves; of the others nobody knows."""

HALF_REDUCED = 0.05
"""Relative error from which on a sum of gradients holds a term too often, and no rounding."""

EXCUSED = 0.02
"""Relative error of what a module is given up to which rounding of half types made it, and no fault before it."""

BIASED = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Functions whose third tensor is a bias, that is added once."""

EXACT = 2e-3
"""Relative error of a ratio that is taken for a whole number: bfloat16 rounds to 4e-3, sums of many of its numbers to less."""


def other_layouts(captures: tuple[Capture, Capture]) -> str:
    """Say how the layouts of two captures differ: ``TP=2 against one process``; empty where they do not."""
    first, second = map(layout_of, captures)
    if not first.differs(second):
        return ""
    both = str(first), str(second)
    return f"{both[0]} against {both[1]}" if both[0] != both[1] else f"{both[0]}, and weights or batches that are cut elsewhere"


def joined(captures: tuple[Capture, Capture], shards: str | Path | None = None) -> tuple[Joined, Joined] | str:
    """Return both captures as one process would have recorded them, or why they cannot be joined. The one that is cut along fewer
    axes of the model is joined first, for it tells most about the other; where both are, that of which more shows by itself. Where
    something of it does not, it is joined again, with what the other shows."""
    geometries = [geometry_of(capture) for capture in captures]
    for geometry in geometries:
        if geometry.problem:
            return geometry.problem
    told = undeclared if shards is None else load(shards)
    standings = [standing_of(capture, geometry) for capture, geometry in zip(captures, geometries, strict=True)]
    standings = [dataclasses.replace(one, loss=loss) for one, loss in zip(standings, reduced(standings), strict=True)]
    partial, updates, tied = standings[0].partial | standings[1].partial, updates_of(standings, captures), tied_of(captures)
    first, second = (
        Joined(capture, one, None, told, partial, updates, tied) for capture, one in zip(captures, standings, strict=True)
    )
    cuts = [(len(one.sequence), len({*one.ranks.axes} - one.data - one.stages), len(one.workers.axes)) for one in standings]
    unknown = (0, 0) if 0 in (cuts[0][1], cuts[1][1]) else (_unknown_of(first), _unknown_of(second))
    if (unknown[0], cuts[0]) <= (unknown[1], cuts[1]):
        second = Joined(captures[1], standings[1], first, told, partial, updates, tied)
        again = _unknown_of(first) > 0 or _disagree(first, second)
        first = Joined(captures[0], standings[0], second, told, partial, updates, tied) if again else first
    else:
        first = Joined(captures[0], standings[0], second, told, partial, updates, tied)
        again = _unknown_of(second) > 0 or _disagree(second, first)
        second = Joined(captures[1], standings[1], first, told, partial, updates, tied) if again else second
    forget_classes(first, second)
    return first, second


def _unknown_of(run: Joined) -> int:
    """Return of how many slots of the first step nothing says how they lie."""
    return sum(one.kind == "unknown" for one in run.step(run.steps[0]).apart) if run.steps else 0


def _disagree(first: Joined, second: Joined) -> bool:
    """Tell whether a slot of the first step that was put together in one of several ways is of another shape in the other run, or
    another number."""
    if not first.steps or first.steps[0] not in second.steps:
        return False
    mine, its = first.step(first.steps[0]), second.step(first.steps[0])
    pairs = [(mine.slots[at], its.slots[at]) for at in mine.guessed | its.guessed if at in mine.slots and at in its.slots]
    return any(
        one.shape != other.shape
        or (one.numel == 1 and one.numbers and other.numbers and not near(one.numbers.mean, other.numbers.mean))
        for one, other in pairs
    )


def with_ranks(result: Result, sides: tuple[Joined, Joined], layouts: str) -> Result:
    """Return the result of comparing two joined captures with what their ranks did not agree on: that comes before what follows
    from it. What shows in the baseline is no fault of the candidate, and keeps two runs from being aligned."""
    # What comes after a piece that nobody can place may follow from it.
    unplaced = bool(result.culprits) and is_unplaced(min(result.culprits, key=_place), sides)
    if unplaced:
        result = dataclasses.replace(result, verdict="inconclusive", culprits=[])
    counting = [one for one in result.culprits if counts_piece(one, sides[1])]
    if counting and len(counting) < len(result.culprits):  # what reads places shows whether they are right
        result = dataclasses.replace(result, culprits=[one for one in result.culprits if one not in counting])
    sure = result.verdict == "deviates" and not (result.culprits and all(map(_doubtful, result.culprits)))
    found = [finding_of(first, sides[1]) for first in _firsts(sides[1].apart, wrong=sure)]
    if found and found[0].phase == "optimizer" and (earlier := _not_passed_on(found[0].step, sides)) is not None:
        found = [earlier]
    over = _over_pieces(sides[1]) if result.verdict != "aligned" and not found else None
    found = found if over is None else [over]
    of_baseline = [finding_of(first, sides[0]) for first in _firsts(sides[0].apart)]
    before = [one for one in result.culprits if not found or _comes_before(one, found[0], sides[1])]
    before = [one for one in before if over is None or one.phase == "forward"]  # what follows from the sum is read by it, too
    most = max((one.victims for one in result.culprits), default=result.counts["deviates"])
    found = [dataclasses.replace(one, victims=most) for one in found]
    told = [_added_otherwise(travelled(one, sides), sides[1]) for one in before]
    culprits = [_half_reduced(_swapped(_scaled(one, sides[1]), sides), sides[1]) for one in [*told, *found]]
    put_together = said.PUT_TOGETHER.format(layouts) + (said.IN_ONE_ORDER if any(side.reordered for side in sides) else "")
    notes = [put_together, *(said.OF_BASELINE.format(one.cause) for one in of_baseline), *result.notes]
    doubts = [*_undeclared(sides), *doubts_of_sums(sides)] if result.verdict == "inconclusive" else []
    notes[1:1] = doubts
    alone = sum(side.alone for side in sides)
    if alone:
        notes.insert(1, said.SOME_RANKS.format(counted(alone, "call")))
    verdict, doubt = result.verdict, ""
    if not found and not culprits and verdict == "aligned" and sides[1].left_out:
        found, doubt = _of_gradients(sides)
        culprits = found
    elif not found and not culprits and result.verdict == "inconclusive" and (
        one := _summed_oddly(result, sides[1]) or _times_as_much(sides) or _given_otherwise(sides)
    ) is not None:
        found = culprits = [one]
    if unplaced and not found:
        doubt = said.LIES_UNKNOWN
    if doubt:
        verdict = "inconclusive"
    elif found:
        verdict = "deviates"
    elif culprits and all(map(_doubtful, culprits)):
        verdict, doubt = "inconclusive", said.BY_STATISTICS.format(culprits[0].name)
    elif verdict == "aligned" and (of_baseline or alone):
        verdict = "inconclusive"
    causes = [[one.cause for one in some] for some in (culprits, result.culprits)]
    changed = unplaced or counting or result.verdict != verdict or causes[0] != causes[1]
    if not changed:
        lines = result.sentence.split("\n")
        lines[1:1] = [" " * len(HEADS[verdict]) + f"note: {note}" for note in (notes[0], *doubts)]
        return dataclasses.replace(result, notes=notes, sentence="\n".join(lines))
    if doubt:
        doubts = doubts or _undeclared(sides)
        lines = [HEADS[verdict] + doubt, *(" " * len(HEADS[verdict]) + f"note: {note}" for note in (notes[0], *doubts))]
        notes = [doubt, notes[0], *doubts, *(note for note in notes[1:] if note not in doubts)]
        return dataclasses.replace(result, verdict=verdict, culprits=[], notes=notes, sentence="\n".join(lines))
    lines = verdict_lines(verdict, culprits, result.victims, result.unmatched, notes, result.counts, result.occurrences, notes[:1])
    return dataclasses.replace(result, verdict=verdict, culprits=culprits, notes=notes, sentence="\n".join(lines))


def _firsts(apart: Sequence[Apart], *, wrong: bool = False) -> list[list[Apart]]:
    """Return what is surely wrong and comes first, all of one call together: the rest follows from it. ``wrong``: something is, so
    that results of modules that fit no layout are no lack of knowledge."""
    sure = sorted((one for one in apart if one.kind in SURE), key=lambda one: (one.step, one.seq))
    if (
        (wrong or sure)
        and (odd := _innermost(apart)) is not None
        and (not sure or (odd.step, odd.seq) < (sure[0].step, sure[0].seq))
    ):
        return [[odd]]
    return [[one for one in sure if (one.step, one.seq, one.kind) == (sure[0].step, sure[0].seq, sure[0].kind)]] if sure else []


def _innermost(apart: Sequence[Apart]) -> Apart | None:
    """Return the first result of a module, in the forward, of which nobody knows how it belongs together: of modules inside one
    another the innermost."""
    odd = [
        one for one in apart if one.kind == "unknown" and one.key[:2] == ("forward", "module") and one.slot.startswith("output.")
    ]
    odd.sort(key=lambda one: (one.step, one.seq))
    first = odd[0] if odd else None
    for one in odd:
        if first is not None and one.step == first.step and one.key[2].startswith(f"{first.key[2]}." if first.key[2] else ""):
            first = one if len(one.key[2]) > len(first.key[2]) else first
    return first


def finding_of(apart: Sequence[Apart], run: Joined) -> Finding:
    """Return the finding of what ranks do not agree on in one call."""
    first = apart[0]
    phase, level, scope, op, ordinal = first.key
    where = scope or op
    worst = max((one.apart for one in apart if one.apart == one.apart), default=math.nan)
    if first.kind == "replicas":
        names = list(dict.fromkeys(name for one in apart if (name := _gradient(one, run)) is not None))
        if names:
            cause = said.gradients(names, first.ranks, worst)
        else:
            cause = said.not_equal([one.slot for one in apart], where, first.ranks, run.geometry.size(first.axis), worst)
    elif first.kind == "unknown":
        cause = said.fits_nothing(first.slot, where, first.ranks)
    elif first.kind == "places":
        cause = said.same_places(first.slot, where, first.ranks)
    elif first.kind == "masks":
        cause = said.same_masks(where, first.ranks)
    elif first.kind == "samples":
        cause = said.same_samples(first.slot, where, first.ranks, first.given)
    else:
        cause = said.unreduced(first.given, first.slot, where, first.ranks)
    slots = tuple(SlotComparison(one.slot, "deviates", one.apart, "sketch", ("", ""), ("", ""), None, None) for one in apart)
    rows = run.step(first.step).records.select(["seq", "site"]).to_pylist()
    site = next((row["site"] for row in rows if row["seq"] == first.seq), None)
    stack, line = run.sites(0).get(site, ((), None)) if site is not None else ((), None)
    made = Finding(
        "ranks", first.step, first.ranks[0], phase, level, scope, op, ordinal, stack[0] if stack else None, "", rule="ranks",
        error_out=worst, slots=slots, seq=(-1, first.seq), stack=stack, source_line=line, cause=cause,
    )  # fmt: skip
    return dataclasses.replace(made, sentence=f"{made.name}: {evidence(made)}")


def _gradient(one: Apart, run: Joined) -> str | None:
    """Name the weight whose gradient an optimizer reads, None of another slot; where its name is not known, the call that
    made it."""
    if one.key[0] != "optimizer" or not one.slot.startswith("input."):
        return None
    if one.slot.endswith(".grad"):
        return one.slot.removeprefix("input.").removesuffix(".grad")
    weight = run.step(one.step).updated.get(one.key)
    if weight is not None and (one.made is None or one.made[0][0] != "optimizer"):
        return weight
    if one.made is None or one.made[0][0] != "backward":
        return None
    (_, _, scope, op, _), slot = one.made
    return f"{scope or op} ({slot.removeprefix('grad_')})"


def _comes_before(finding: Finding, found: Finding, run: Joined) -> bool:
    """Tell whether a culprit is there before ranks do not agree on something, and not because of that."""
    return _place(finding) < _place(found) and not _of_unreduced(finding, run) and not encloses(finding, found)


def _of_unreduced(finding: Finding, run: Joined) -> bool:
    """Tell whether a culprit made what ranks are wrong about where it is read: a gradient that was not reduced, of which one rank
    has no whole; places; or, outside of the model, the samples that they are given."""
    some = [one for one in run.apart if one.step == finding.step]
    if finding.phase == "backward":
        made = [one.made[0] for one in some if one.kind == "replicas" and one.made is not None]
        return any((key[0], key[2]) == (finding.phase, finding.scope) for key in made)
    if not finding.scope and any(one.kind == "samples" for one in some):
        return True
    return "arange" in finding.op and any(one.kind == "places" for one in some)


def _place(finding: Finding) -> tuple[int, int]:
    return finding.step, finding.seq[1] if finding.seq[1] >= 0 else finding.seq[0]


def _doubtful(finding: Finding) -> bool:
    """Tell whether what a culprit was given was compared by statistics alone, so that nobody knows whether it agrees."""
    given = [slot for slot in finding.slots if slot.slot.startswith(("input.", "param.", "grad_output."))]
    return finding.kind == "operator" and any(slot.method == "statistics" for slot in given)


def _scaled(finding: Finding, run: Joined) -> Finding:
    """Say of a result that is a multiple of what it should be by which number of ranks, where it is one."""
    for slot in finding.slots:
        if (
            isinstance(slot.baseline, (str, type(None)))
            or isinstance(slot.candidate, (str, type(None)))
            or not slot.baseline.l2 > 0
        ):
            continue
        ratio = slot.candidate.l2 / slot.baseline.l2
        if not abs(slot.relative_l2 - abs(ratio - 1)) < EXACT * ratio:  # else it is no multiple
            continue
        for axis in run.workers.axes:
            size = run.workers.size(axis)
            if _is_multiple(ratio, size):
                told = said.multiple(ratio, size, _ranks_along(axis))
                return dataclasses.replace(finding, cause=f"{finding.cause}: {told}" if finding.cause else f"{slot.slot} is {told}")
    return finding


def _undeclared(sides: tuple[Joined, Joined]) -> list[str]:
    """Name what to declare of the first run of which nothing says how its pieces lie."""
    for which, run in zip(("baseline", "candidate"), sides, strict=True):
        some = sorted((one for one in run.apart if one.kind == "unknown"), key=lambda one: (one.step, one.seq))
        if some:
            first, modules = some[0], len({one.key[2] for one in some})
            return [said.undeclared(first.slot, first.key[2] or first.key[3], first.axis, len(some), modules, which)]
    return []


def _over_pieces(run: Joined) -> Finding | None:
    """Return the first sum over ranks, in the first step, of gradients that are pieces of a weight's, if it adds up ranks that hold
    different pieces: over all ranks in place of those that cut the data."""
    step, rank = run.steps[0], min(run.original.ranks)
    columns = ["seq", "phase", "level", "scope", "op", "ordinal", "slot", "value", "producer_seq", "producer_slot"]
    rows = run.original.records(columns, rank=rank, step=step, level="api").to_pylist()
    keys = {row["seq"]: (row["phase"], row["level"], row["scope"], row["op"], row["ordinal"]) for row in rows}
    sums = {row["seq"]: ranks for row in rows if row["phase"] == "collective" and (ranks := added(row["value"]))}
    ways, places = run.step(step).ways, run.geometry.coordinates
    for row in rows:
        ranks, made = sums.get(row["seq"], []), (keys.get(row["producer_seq"], ("", "", "", "", 0)), row["producer_slot"] or "")
        if not row["slot"].startswith("input.") or made[0][0] != "backward" or not places.keys() >= {*ranks, rank}:
            continue
        for axis, way in ways.get(made, {}).items():
            if way.kind != "sharded" or axis in run.data or axis not in run.geometry.axes:
                continue
            at = run.geometry.axes.index(axis)
            same = [one for one in ranks if places[one][at] == places[rank][at]]
            if len(same) < len(ranks):
                one = Apart("factor", keys[row["seq"]], row["slot"], step, row["seq"], axis, tuple(ranks))
                what = f"{made[0][2] or made[0][3]} ({made[1].removeprefix('grad_')})"
                return dataclasses.replace(finding_of([one], run), cause=said.over_pieces(what, ranks, same))
    return None


def _summed_oddly(result: Result, run: Joined) -> Finding | None:
    """Return a module whose result is far off, where what it was given is not, if it adds up over its ranks another number of times
    than all others of its class: what a wide criterion explains is no reason to doubt that."""
    step = run.steps[0]
    for scope, cause in odd_sums(run, step).items():
        wanted = pc.field("step") == step
        for name, value in (("scope", scope), ("phase", "forward"), ("level", "module")):
            wanted &= pc.field(name) == value
        rows = result.matched.filter(wanted).select(["op", "ordinal", "seq_candidate", "error_in", "error_out"]).to_pylist()
        for row in rows:
            if (row["error_in"] or 0.0) < EXCUSED < HALF_REDUCED < (row["error_out"] or 0.0):
                key = "forward", "module", scope, row["op"], row["ordinal"]
                one = Apart("factor", key, "output.0", step, row["seq_candidate"], "", (0,), row["error_out"])
                return dataclasses.replace(finding_of([one], run), cause=cause)
    return None


def _added_otherwise(finding: Finding, run: Joined) -> Finding:
    if finding.kind not in ("region", "operator") or not finding.scope or finding.phase not in ("forward", "backward"):
        return finding
    told = odd_sums(run, finding.step).get(finding.scope)
    return finding if told is None else dataclasses.replace(finding, cause=told)


def _of_gradients(sides: tuple[Joined, Joined]) -> tuple[list[Finding], str]:
    """Return what is wrong with the gradients that optimizers are given whose own calls were not compared; or why nobody knows."""
    doubt = ""
    for step in sorted(sides[0].gradients.keys() & sides[1].gradients.keys()):
        wrong = off(sides[0].gradients[step], sides[1].gradients[step], sides[1].tied)
        if wrong is None:
            doubt = doubt or said.GRADIENTS_UNKNOWN
        elif wrong and (lost := _lost_in(step, sides)) is not None:
            return [lost], ""
        elif wrong and all(math.isfinite(one.ratio) for one in wrong):
            return [_of_factor(wrong[0], step, sides[1])], ""
        elif wrong:
            names = [name for one in wrong for name in one.weights]
            doubt = doubt or said.gradients_differ(names, max(one.distance for one in wrong))
    if (found := staying(sides[0].weights, sides[1].weights)) is None:
        return [], doubt
    at, *steps = found
    return [_of_factor(Off((), math.nan, math.nan), steps[1], sides[1], at, said.stays(at[1], at[0][2] or at[0][3], steps))], ""


def _lost_in(step: int, sides: tuple[Joined, Joined]) -> Finding | None:
    """Return the finding of a step whose optimizer is given one micro-batch's gradients alone, in the candidate and not in the
    baseline; or gradients that each rank scales by itself."""
    told = lost(sides[1], step)
    told = told if told and not lost(sides[0], step) else each_scaled(step, sides)
    return _of_factor(Off((), math.nan, math.nan), step, sides[1], cause=told) if told else None


def _given_otherwise(sides: tuple[Joined, Joined]) -> Finding | None:
    """Return what is wrong with the gradients that optimizers are given first whose own calls were not compared, if it is no
    rounding whatever could not be told besides: one micro-batch's alone, or as many times the baseline's as there are ranks."""
    step = sides[0].steps[0]
    if not sides[1].left_out or not sides[0].gradients.keys() & sides[1].gradients.keys() & {step}:
        return None
    if (found := _lost_in(step, sides)) is not None:
        return found
    wrong, workers = off(sides[0].gradients[step], sides[1].gradients[step], sides[1].tied), sides[1].workers
    if not wrong or len(wrong) > 1 or not any(_is_multiple(wrong[0].ratio, workers.size(axis)) for axis in workers.axes):
        return None
    return _of_factor(wrong[0], step, sides[1])


def _times_as_much(sides: tuple[Joined, Joined]) -> Finding | None:
    """Return the finding of gradients that the first step of the optimizer reads, where all that differ are as many times the
    baseline's as there are ranks along an axis, or micro-batches."""
    step = sides[0].steps[0]
    if step != sides[1].steps[0]:
        return None
    whole, run = (side.step(step) for side in sides)
    wrong: dict[str, tuple[float, float, tuple[Key, str]]] = {}
    for at, piece in run.slots.items():
        weight, its = run.updated.get(at[0]), whole.slots.get(at)
        if weight is not None and its is not None and at[1].startswith("input.") and None not in (piece.load, its.load):
            ratio, apart = between(its, piece)
            if apart > HALF_REDUCED:
                wrong.setdefault(weight, (ratio, apart, at))
    workers = sides[1].workers
    if not any(wrong and all(_is_multiple(ratio, workers.size(axis)) for ratio, _, _ in wrong.values()) for axis in workers.axes):
        return None
    (ratio, _, at), *_ = wrong.values()
    return _of_factor(Off(tuple(wrong), ratio, max(apart for _, apart, _ in wrong.values())), step, sides[1], at)


def _of_factor(wrong: Off, step: int, run: Joined, at: tuple[Key, str] | None = None, cause: str = "") -> Finding:
    """Return the finding of gradients that are a multiple of the baseline's, or wrong by another ``cause``; ``at``: the first call
    that reads one."""
    read = (one for one in run.step(step).slots if one[0][0] == "optimizer" and one[1].endswith(".grad"))
    key, slot = at or next(read, None) or next(one for one in reversed(run.step(step).slots) if one[0][0] == "backward")
    rows = run.step(step).records.select(["seq"]).to_pylist()
    sizes = {run.workers.size(axis): axis for axis in run.workers.axes}
    found = [said.multiple(wrong.ratio, n, _ranks_along(axis)) for n, axis in sizes.items() if _is_multiple(wrong.ratio, n)]
    one = Apart("factor", key, slot, step, max((row["seq"] for row in rows), default=0), "", (0,), wrong.distance)
    return dataclasses.replace(
        finding_of([one], run), cause=cause or said.gradients_off(wrong.weights, wrong.ratio, "".join(found[:1]))
    )


def _not_passed_on(step: int, sides: tuple[Joined, Joined]) -> Finding | None:
    """Return the first gradient in the backward that is a term of a sum over ranks that cut the model, where a later one is neither
    such a term nor the whole: a module should have added them up, and the gradient of a residual, which is whole, was added."""
    run, first = sides[1].step(step), None
    for (key, slot), ways in run.ways.items():
        if key[:2] != ("backward", "module") or not slot.startswith("grad_"):
            continue
        axis = next((a for a, way in ways.items() if way.kind == "partial" and a not in sides[1].data), None)
        whole, piece = sides[0].step(step).slots.get((key, slot)), run.slots.get((key, slot))
        if axis is None or whole is None or piece is None:
            first = first if axis is not None else None
            continue
        apart = distance(piece, whole)
        if apart < CLOSE and first is None and slot.startswith("grad_input."):
            first = key, slot, axis
        elif apart >= HALF_REDUCED and first is not None:
            made, its, along = first
            seq = next(row["seq"] for row in run.records.select(["seq", "phase", "level", "scope", "op"]).to_pylist()
                       if (row["phase"], row["level"], row["scope"], row["op"]) == made[:4])  # fmt: skip
            one = Apart("factor", made, its, step, seq, along, tuple(sides[1].geometry.coordinates), apart)
            size = sides[1].geometry.size(along)
            cause = said.not_passed_on(its, made[2] or made[3], key[2] or key[3], size)
            return dataclasses.replace(finding_of([one], sides[1]), cause=cause)
    return None


def _is_multiple(ratio: float, size: int) -> bool:
    return any(abs(ratio - whole) < EXACT * whole for whole in (size, 1 / size))


def _ranks_along(axis: str) -> str:
    if apart := by_groups(axis):
        return f"ranks that stand {apart} apart"
    return f"{axis}es" if axis == MICRO else "ranks" if axis.startswith("ranks") else f"ranks along {axis}"


def _swapped(finding: Finding, sides: tuple[Joined, Joined]) -> Finding:
    """Say of a weight that differs that it is the baseline's with its pieces in another order, where it is."""
    first = finding.slots[0].slot if finding.slots else ""
    if finding.kind != "input" or not first.startswith("param."):
        return finding
    key = finding.phase, finding.level, finding.scope, finding.op, finding.ordinal
    order = sides[1].order(finding.step, (key, first), sides[0])
    if order is None:
        return finding
    told = said.other_order if len(set(order)) == len(order) else said.held_twice
    return dataclasses.replace(finding, cause=told(first, finding.scope, order))


def _half_reduced(finding: Finding, run: Joined) -> Finding:
    """Say of a gradient that ranks hold terms of, and that is wrong as their sum, that some of it was reduced and some not."""
    if finding.kind not in ("operator", "region") or (finding.cause and finding.kind == "operator"):
        return finding
    if (told := _bias_of_terms(finding, run) or _unsummed(finding, run)) is not None:
        return dataclasses.replace(finding, cause=told)
    if finding.cause or finding.kind != "operator" or finding.phase != "backward":
        return finding
    key = finding.phase, finding.level, finding.scope, finding.op, finding.ordinal
    ways = run.step(finding.step).ways
    for slot in finding.slots:
        for axis, way in ways.get((key, slot.slot), {}).items():
            added = way.kind == "partial" and axis not in run.data and slot.slot.startswith("grad_input.")
            if added and slot.relative_l2 >= HALF_REDUCED:
                told = said.half_reduced(slot.slot, finding.scope or finding.op, run.geometry.size(axis))
                return dataclasses.replace(finding, cause=told)
    return finding


def _bias_of_terms(finding: Finding, run: Joined) -> str | None:
    """Say of a call in the forward that inside it a bias is added to terms of a sum, where one is."""
    if finding.phase != "forward":
        return None
    held = run.step(finding.step)
    for (key, name), ways in held.ways.items():
        if key[:3] == ("forward", "api", finding.scope) and name == "input.2" and key[3].rpartition(".")[2] in BIASED:
            for axis in run.geometry.axes:
                terms = held.ways.get((key, "output.0"), {}).get(axis)
                if terms is None and any((one.key, one.slot, one.axis) == (key, "output.0", axis) for one in run.apart):
                    terms = Way("partial")
                if axis not in run.data and ways.get(axis) == REPLICATED and terms is not None and terms.kind == "partial":
                    return said.biases(finding.scope, run.geometry.size(axis))
    return None


def _unsummed(finding: Finding, run: Joined) -> str | None:
    """Say of a call in the backward that it is given terms of a sum, and makes pieces, or a whole, of none."""
    if finding.phase != "backward":
        return None
    held = run.step(finding.step)
    wrong = any(slot.slot.startswith("grad_input.") and slot.relative_l2 >= HALF_REDUCED for slot in finding.slots)
    wrong = wrong or (finding.kind == "region" and finding.error_out >= HALF_REDUCED)
    for (key, name), ways in held.ways.items():
        if key[0] == "backward" and key[2] == finding.scope and key[3] in finding.op and name.startswith("grad_output."):
            for axis, way in ways.items():
                made = held.ways.get((key, name.replace("output", "input", 1)), {}).get(axis)
                summed = axis in run.standing.sequence or axis not in (*run.data, MICRO)
                if way.kind == "partial" and summed and wrong and (made is None or made.kind != "partial"):
                    return said.unsummed(key[3], finding.scope or key[3], run.geometry.size(axis))
    return None


def not_told(captures: tuple[Capture, Capture], why: str, criterion: Criterion, further: Sequence[str] = ()) -> Result:
    """Return the result of a comparison that was not made."""
    head = HEADS["inconclusive"]
    lines = [f"{head}{why}", *(" " * len(head) + f"note: {line}" for line in further)]
    overviews = [Overview(capture) for capture in captures]
    for overview in overviews:
        overview.add_the_rest(frozenset())
    first, second = (summarise(c, o, sorted(c.ranks)) for c, o in zip(captures, overviews, strict=True))
    table = SCHEMA.empty_table()
    notes, counts = [why, *further], count(table, (), 0, 0)
    return Result("inconclusive", "\n".join(lines), [], [], [], notes, criterion.name, first, second, counts, table)
