"""A comparison of runs of different layouts: each joined into one process first, and what the ranks did not agree on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from trueup.comparison.layout.declaring import load
from trueup.comparison.layout.described import layout_of
from trueup.comparison.layout.geometry import geometry_of
from trueup.comparison.layout.gradients import Off, off
from trueup.comparison.layout.inferring import Apart
from trueup.comparison.layout.joined import Joined, undeclared
from trueup.comparison.layout.standing import MICRO, standing_of, tied_of, updates_of
from trueup.comparison.result.summary import SCHEMA, count, summarise
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.model import Finding, Result, SlotComparison
from trueup.foundation.store import Capture
from trueup.foundation.store.overview import Overview
from trueup.foundation.words import layout_sentence as said
from trueup.foundation.words.sentence import HEADS, evidence, verdict_lines
from trueup.foundation.words.wording import counted

SURE = ("replicas", "unreduced", "masks")
"""Kinds of `Apart` that are faults by themselves; of the others nobody knows."""

HALF_REDUCED = 0.05
"""Relative error from which on a sum of gradients holds a term too often, and no rounding."""

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
    axes of the model is joined first, for it tells most about the other."""
    geometries = [geometry_of(capture) for capture in captures]
    for geometry in geometries:
        if geometry.problem:
            return geometry.problem
    told = undeclared if shards is None else load(shards)
    standings = [standing_of(capture, geometry) for capture, geometry in zip(captures, geometries, strict=True)]
    partial, updates, tied = standings[0].partial | standings[1].partial, updates_of(standings, captures), tied_of(captures)
    first, second = (
        Joined(capture, one, None, told, partial, updates, tied) for capture, one in zip(captures, standings, strict=True)
    )
    cuts = [(len(one.sequence), len({*one.ranks.axes} - one.data - one.stages), len(one.workers.axes)) for one in standings]
    if cuts[0] <= cuts[1]:
        return first, Joined(captures[1], standings[1], first, told, partial, updates, tied)
    return Joined(captures[0], standings[0], second, told, partial, updates, tied), second


def with_ranks(result: Result, sides: tuple[Joined, Joined], layouts: str) -> Result:
    """Return the result of comparing two joined captures with what their ranks did not agree on: that comes before what follows
    from it. What shows in the baseline is no fault of the candidate, and keeps two runs from being aligned."""
    found = [finding_of(first, sides[1]) for first in _firsts(sides[1].apart, wrong=result.verdict == "deviates")]
    of_baseline = [finding_of(first, sides[0]) for first in _firsts(sides[0].apart)]
    before = [one for one in result.culprits if not found or _place(one) < _place(found[0])]
    most = max((one.victims for one in result.culprits), default=result.counts["deviates"])
    found = [dataclasses.replace(one, victims=most) for one in found]
    culprits = [_half_reduced(_swapped(_scaled(one, sides[1]), sides), sides[1]) for one in [*before, *found]]
    notes = [said.PUT_TOGETHER.format(layouts), *(said.BASELINE.format(one.cause) for one in of_baseline), *result.notes]
    alone = sum(side.alone for side in sides)
    if alone:
        notes.insert(1, said.SOME_RANKS.format(counted(alone, "call")))
    verdict, doubt = result.verdict, ""
    if not found and not culprits and verdict == "aligned" and sides[1].left_out:
        found, doubt = _of_gradients(sides)
        culprits = found
    if doubt:
        verdict = "inconclusive"
    elif found:
        verdict = "deviates"
    elif culprits and all(map(_doubtful, culprits)):
        verdict, doubt = "inconclusive", said.BY_STATISTICS.format(culprits[0].name)
    elif verdict == "aligned" and (of_baseline or alone):
        verdict = "inconclusive"
    changed = result.verdict != verdict or [one.cause for one in culprits] != [one.cause for one in result.culprits]
    if not changed:
        lines = result.sentence.split("\n")
        lines.insert(1, " " * len(HEADS[verdict]) + f"note: {notes[0]}")
        return dataclasses.replace(result, notes=notes, sentence="\n".join(lines))
    if doubt:
        lines = [HEADS[verdict] + doubt, " " * len(HEADS[verdict]) + f"note: {notes[0]}"]
        return dataclasses.replace(result, verdict=verdict, culprits=[], notes=[doubt, *notes], sentence="\n".join(lines))
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
        names = [name for one in apart if (name := _gradient(one)) is not None]
        if names:
            cause = said.gradients(names, first.ranks, worst)
        else:
            cause = said.not_equal([one.slot for one in apart], where, first.ranks, run.geometry.size(first.axis), worst)
    elif first.kind == "unknown":
        cause = said.fits_nothing(first.slot, where, first.ranks)
    elif first.kind == "masks":
        cause = said.same_masks(where, first.ranks)
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


def _gradient(one: Apart) -> str | None:
    """Name the weight whose gradient an optimizer reads, None of another slot; where its name is not known, the call that
    made it."""
    if one.key[0] != "optimizer" or not one.slot.startswith("input."):
        return None
    if one.slot.endswith(".grad"):
        return one.slot.removeprefix("input.").removesuffix(".grad")
    if one.made is None or one.made[0][0] != "backward":
        return None
    (_, _, scope, op, _), slot = one.made
    return f"{scope or op} ({slot.removeprefix('grad_')})"


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


def _of_gradients(sides: tuple[Joined, Joined]) -> tuple[list[Finding], str]:
    """Return what is wrong with the gradients that optimizers are given whose own calls were not compared; or why nobody knows."""
    for step in sorted(sides[0].gradients.keys() & sides[1].gradients.keys()):
        wrong = off(sides[0].gradients[step], sides[1].gradients[step])
        if wrong is None:
            return [], said.GRADIENTS_UNKNOWN
        if wrong and all(math.isfinite(one.ratio) for one in wrong):
            return [_of_factor(wrong[0], step, sides[1])], ""
        if wrong:
            names = [name for one in wrong for name in one.weights]
            return [], said.gradients_differ(names, max(one.distance for one in wrong))
    return [], ""


def _of_factor(wrong: Off, step: int, run: Joined) -> Finding:
    """Return the finding of gradients that are a multiple of the baseline's."""
    (key, slot), *_ = [one for one in run.step(step).slots if one[0][0] == "optimizer" and one[1].endswith(".grad")]
    rows = run.step(step).records.select(["seq"]).to_pylist()
    sizes = {run.workers.size(axis): axis for axis in run.workers.axes}
    found = [said.multiple(wrong.ratio, n, _ranks_along(axis)) for n, axis in sizes.items() if _is_multiple(wrong.ratio, n)]
    one = Apart("factor", key, slot, step, max((row["seq"] for row in rows), default=0), "", (0,), wrong.distance)
    return dataclasses.replace(finding_of([one], run), cause=said.gradients_off(wrong.weights, wrong.ratio, "".join(found[:1])))


def _is_multiple(ratio: float, size: int) -> bool:
    return any(abs(ratio - whole) < EXACT * whole for whole in (size, 1 / size))


def _ranks_along(axis: str) -> str:
    return f"{axis}es" if axis == MICRO else "ranks" if axis.startswith("ranks") else f"ranks along {axis}"


def _swapped(finding: Finding, sides: tuple[Joined, Joined]) -> Finding:
    """Say of a weight that differs that it is the baseline's with its pieces in another order, where it is."""
    first = finding.slots[0].slot if finding.slots else ""
    if finding.kind != "input" or not first.startswith("param."):
        return finding
    key = finding.phase, finding.level, finding.scope, finding.op, finding.ordinal
    order = sides[1].order(finding.step, (key, first), sides[0])
    return finding if order is None else dataclasses.replace(finding, cause=said.other_order(first, finding.scope, order))


def _half_reduced(finding: Finding, run: Joined) -> Finding:
    """Say of a gradient that ranks hold terms of, and that is wrong as their sum, that some of it was reduced and some not."""
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
