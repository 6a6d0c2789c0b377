"""`trueup.compare`: two captures in, one `Result` out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.holes import Recorded, keeps_all
from trueup.comparison.graph.streams import NEEDED, SHARED, Alignment, Numbers, Read, Row, Stream, Vocabulary, is_weight
from trueup.comparison.measures.measure import STATISTICS, Errors, measure, read_payload
from trueup.comparison.normalise import kernels
from trueup.comparison.normalise.mapping import Mapping
from trueup.comparison.normalise.mapping import load as load_mapping
from trueup.comparison.normalise.translated import Translated, sides, translated
from trueup.comparison.verdict import rewritten
from trueup.comparison.verdict.align import align
from trueup.comparison.verdict.criteria import FRAMEWORKS, Criterion
from trueup.comparison.verdict.criteria import load as load_criterion
from trueup.comparison.verdict.evidence import Amplification, behind, loss_note, yardstick_of
from trueup.comparison.verdict.exchange import Exchange, replaced_note
from trueup.comparison.verdict.judge import judge
from trueup.comparison.verdict.judged import SIDES, Part, Passes, Side, Suspect, Verdicts
from trueup.comparison.verdict.locate import is_quiet, locate, of_a_kind, rank_culprits
from trueup.comparison.verdict.origins import Origins, unseen
from trueup.comparison.verdict.overlap import (
    Mixed,
    Overlap,
    filtered_note,
    fragment_notes,
    lender_of,
    notes_on,
    repeated_note,
    require_common_names,
    require_records,
)
from trueup.facts.why import Reason
from trueup.model import Finding, Result, RunSummary, TrueupError, VerdictWord
from trueup.report.view.evidence import with_evidence
from trueup.report.view.findings import by_itself, suspect_finding, unmatched_finding, victim_findings
from trueup.report.view.gradients import Norm, norms_of
from trueup.report.view.occurrences import first_received, occurrences
from trueup.report.view.remarks import Remarks
from trueup.report.view.summary import (
    Overview,
    call_table,
    count,
    finish_table,
    one_sided_tables,
    summarise,
    victims,
    with_one_sided,
)
from trueup.store import Capture, open_capture
from trueup.store.ahead import Ahead, Place, Records, RecordsOfStep, places
from trueup.words.reasons import in_words
from trueup.words.sentence import (
    COMPLETELY,
    MISSING,
    NOISY,
    NOTHING_MADE,
    UNSEEN,
    inner_note,
    rounds_note,
    stale_note,
    statistics_note,
    verdict_lines,
)
from trueup.words.wording import counted

ALIKE_NAMED = 20
"""Calls of a culprit's kind that are named beside it; all are counted, and marked in the table of calls."""

MAX_FINDINGS = 200
"""Victims and unmatched calls listed one by one; all are in the table of calls or counted."""


def compare(
    baseline: str | Path | Capture,
    candidate: str | Path | Capture,
    *,
    level: str | Sequence[str] | None = None,
    criterion: str | Path = "default",
    mapping: str | Path | None = None,
    repeat: Sequence[str | Path | Capture] = (),
    reference: str | Path | Capture | None = None,
    see: Callable[[Part], None] | None = None,
) -> Result:
    """Line up two captures and name the first call whose inputs agree and whose outputs do not.

        >>> result = trueup.compare("runs/cpu", "runs/npu")     # doctest: +SKIP
        >>> result.verdict                                      # doctest: +SKIP
        'deviates'
        >>> result.culprit.scope, result.culprit.phase          # doctest: +SKIP
        ('neck.lstm', 'backward')

    Args:
        baseline: the trusted capture.
        candidate: the capture under suspicion.
        level: compare only these levels; all that both captures hold by default.
        criterion: ``default`` (between frameworks ``frameworks``), one of ``bitwise``, ``ptdbg``, ``ptdbg-summary``,
        ``precision-tool``, ``paddle`` and ``msprobe``,
            or the path of a criterion file (docs/criteria.md).
        mapping: path of a file that says which scopes and operators of the candidate are which of the baseline, and which
            calls are not to be compared (docs/alignment.md).
        repeat: captures of the baseline's run made again: what differs no more than a few times as much as they do is explained.
        reference: capture of the same training in float64: both runs are judged by their distance from it.
        see: called with what was measured and judged of each part, a rank and some steps, while it is at hand.

    Raises:
        TrueupError: a path is no capture, the format is newer, or the two cannot be compared at all (other frameworks'
            worlds, no step, rank or level in common).
    """
    given = (baseline, candidate, *repeat, *([] if reference is None else [reference]))
    first, second, *others = (c if isinstance(c, Capture) else open_capture(c) for c in given)
    told = Mapping() if mapping is None else load_mapping(mapping)
    comparison = _Comparison(first, second, level, load_criterion(criterion), told)
    comparison.measure_by(others[: len(repeat)], None if reference is None else others[-1])
    comparison.see = see
    return comparison.run()


class _Comparison:
    def __init__(
        self, baseline: Capture, candidate: Capture, level: str | Sequence[str] | None, criterion: Criterion, mapping: Mapping
    ) -> None:
        self.overlap = Overlap((baseline, candidate), level)
        self.captures = sides(baseline, candidate, mapping, mixed=self.overlap.mixed)
        baseline, candidate = self.captures
        self.mixed = Mixed(self.captures)
        self.forced = any(lender_of(capture) is not None for capture in self.captures)
        self.rewritten = 0
        """Calls that are written another way on the other side, and compute what agrees."""
        self.passes: dict[int, Passes] = {}
        """How often each side goes backward in the steps that were compared by what accumulates in them."""
        self.repeats: list[Capture] = []
        self.reference: Capture | None = None
        self.runs: list[Capture] = [baseline, candidate]
        """All captures that are read: baseline, candidate, repeats, reference."""
        self.see: Callable[[Part], None] | None = None
        if criterion.name == "default" and self.overlap.mixed:
            criterion = load_criterion(FRAMEWORKS)
        self.criterion, self.mapping = criterion, mapping
        self.ranks, self.steps, self.notes = self.overlap.ranks, self.overlap.steps, list(self.overlap.notes)
        self.uncompared = not self.overlap.is_whole
        """Whether something that one run holds was not compared, so that the runs cannot be called aligned."""
        self.sites = tuple({r: c.sites(r) for r in self.ranks} for c in self.captures)
        alone = all(len(capture.ranks) == 1 for capture in self.captures)
        self.origins = {rank: Origins(alone) for rank in self.ranks}
        self.amplification = Amplification()
        self.exchange = Exchange(self.ranks, limited=bool(criterion.limits))
        self.remarks = Remarks(str(candidate.path))
        self.suspects: list[Suspect] = []
        self.findings: dict[int, Finding] = {}
        self.unmatched: list[Finding] = []
        self.uncovered = 0
        self.covered = 0
        self.dead_ends: list[tuple[Side, Row]] = []
        self.unexplained: list[str] = []
        self.outputs = 0
        self.repeated: list[str] = []
        """Of each side, a slot that is recorded twice."""
        recorded = [(keeps_all(capture.root.get("config")), capture.steps[0] == self.steps[0]) for capture in self.captures]
        self.recorded = [{rank: Recorded(*facts) for rank in self.ranks} for facts in recorded]
        self.holes: list[str] = []
        """Of each side, a call that is missing by what other calls say."""
        self.by_statistics = 0  # calls of which a tensor was compared by another tool's statistics alone
        self.untold = 0  # calls of which another tool's dump lacks gradients that nobody reads
        self.incomparable: Counter[Reason] = Counter()  # why calls were not compared
        self.left_open: dict[Reason, Row] = {}  # and the first of them
        self.tables: list[pa.Table] = []
        self.one_sided: list[pa.Table] = []
        self.norms: tuple[list[Norm], list[Norm]] = [], []
        self.names = Vocabulary()

    def run(self) -> Result:
        overviews = self._parts()
        self._followed()
        for rank, origins in self.origins.items():
            self._unmatched(rank, [(SIDES[side], row) for side in (0, 1) for row in origins.unread(side)])
        reached = first_received(self.exchange.received)
        ranked = rank_culprits(self.suspects, reached)
        certain = [s for s in ranked if s.certain]
        calls = {(s.rank, s.step, s.place) for s in certain if s.kind != "region"}
        table = finish_table(self.tables, calls, (certain[0].step, certain[0].place) if certain else None, reached)
        self._beside_the_point()
        counts = count(table, self.one_sided, self.uncovered, len(self.steps))
        culprits = [self._found(kind) for kind in of_a_kind(certain)] if certain else [self.findings[id(s)] for s in ranked[:1]]
        if certain:
            culprits[0] = dataclasses.replace(culprits[0], victims=victims(table))
        passing = victim_findings(table, MAX_FINDINGS)
        summaries = [summarise(c, o, self.ranks) for c, o in zip(self.captures, overviews[:2], strict=True)]
        forced, blind = notes_on(self.captures[1], self.overlap.levels)
        always = self.remarks.always()
        self.notes[:0] = [*forced, *always, *self.mixed.notes()]
        self.uncompared = self.uncompared or blind or self.mixed.is_blind
        repeated = [overview.losses for overview in overviews[2:]]
        verdict = self._verdict(bool(certain), ranked, counts, summaries, repeated)
        if self.untold:
            self.notes.insert(0 if verdict == "aligned" else len(self.notes), inner_note(self.untold))
        if self.by_statistics and not self.overlap.mixed:  # of an alignment it is the first thing to know
            first = 0 if verdict == "aligned" else len(self.notes)
            self.notes.insert(first, statistics_note(self.by_statistics, counts["compared"]))
        self._last_notes(None if certain else next(iter(culprits), None))
        culprits = culprits if certain else []
        if culprits and not self.overlap.mixed:  # a package that stands on this one, so it is loaded here
            self.notes += import_module("trueup.audit.notes").notes_beside(self.captures, culprits[0])
        known = [s for s in self.suspects if s.certain]
        seen = occurrences(self.ranks, known, self.exchange.received, self.criterion) if certain else []
        lines = verdict_lines(verdict, culprits, passing, self.unmatched, self.notes, counts, seen, always)
        lines += [f"          {note}" for note in forced if verdict == "deviates"]
        result = Result(
            verdict, "\n".join(lines), culprits, passing, self.unmatched, self.notes, self.criterion.name,
            summaries[0], summaries[1], counts, with_one_sided(table, self.one_sided), occurrences=seen,
        )  # fmt: skip
        return with_evidence(result, self.captures, self.norms, self.criterion)

    def _found(self, kind: Sequence[Suspect]) -> Finding:
        """Return the finding of culprits of a kind: the first of them, which ranking made certain if it was not."""
        first, *others = kind
        sure: Literal["high", "could be rounding"] = "could be rounding" if first.judged.unsized else "high"
        names = tuple(dict.fromkeys(self.findings[id(s)].name for s in others))[:ALIKE_NAMED]
        return dataclasses.replace(self.findings[id(first)], confidence=sure, alike=len(others), alike_in=names)

    def _beside_the_point(self) -> None:
        """Note calls of one side that nobody reads."""
        if self.dead_ends:
            (side, call), calls = self.dead_ends[0], counted(len(self.dead_ends), "call")
            what = "in one run only compute what no recorded call reads"
            self.notes.append(f"{calls} {what}, the first in the {side}: {call.op} ({call.key})")

    def _followed(self) -> None:
        """Leave out what another rank explains, and say of the rest what the other ranks gave."""
        self.exchange.finish()
        self.suspects = [s for s in self.suspects if id(s) not in self.exchange.answered]
        for suspect, why in self.exchange.unknown:
            call = suspect.judged.call.candidate
            self.unexplained.append(f"what {call.op} ({call.key}) brought differs, and {why}")
        for suspect in self.suspects:
            if id(suspect) in self.exchange.guilty:
                self.findings[id(suspect)] = by_itself(self.findings[id(suspect)], self.exchange.guilty[id(suspect)])

    def _verdict(
        self, deviates: bool, ranked: list[Suspect], counts: dict[str, int], summaries: list[RunSummary],
        repeated: list[dict[int, float]],
    ) -> VerdictWord:  # fmt: skip
        """Decide; whatever was not compared, or not seen to arise, keeps two runs from being called aligned."""
        if deviates:
            return "deviates"
        losses = [dict(run.losses) for run in summaries]
        if self.passes:
            losses = [rewritten.summed(of_run, self.passes, side) for side, of_run in enumerate(losses)]
        apart = loss_note(losses[0], losses[1], self.criterion.loss, repeated, self.criterion.yardstick)
        one_sided = self.covered + self.uncovered
        filtered = filtered_note(self.overlap.filters, one_sided) if self.overlap.filters and one_sided else None
        reasons = [r for r in (*fragment_notes(self.captures), filtered, apart, *self.unexplained[:1]) if r]
        lost = [*(text for capture in self.captures for text in capture.lost), *self.repeated]
        if self.holes:
            reasons.insert(0, f"{MISSING}: {self.holes[0]}")
        if lost:
            reasons.insert(0, f"{len(lost)} part{'s' if len(lost) > 1 else ''} of the captures cannot be read: {lost[0]}")
        self.notes[:0] = [*reasons, *self._why_not()]
        if one_sided and not self.outputs and self.overlap.levels == ["module"]:
            self.notes.insert(0, f"{NOTHING_MADE}: {self.overlap.finer()}, where what the optimizer reads and makes is compared")
        elif counts["compared"] and not self.outputs:
            self.notes.insert(0, "no output of any call was compared")
        open_ = counts["unmatched"] or counts["incomparable"] or self.uncompared or ranked
        return "inconclusive" if reasons or open_ or not self.outputs else "aligned"

    def _why_not(self) -> list[str]:
        """Say why most calls that were not compared were not."""
        found = []
        for why, calls in self.incomparable.most_common(1):
            first, where = self.left_open[why], "first in" if calls > 1 else "in"
            found.append(f"{counted(calls, 'call')} not compared: {in_words(why)}, {where} {first.op} ({first.key})")
        return found

    def _last_notes(self, suspect: Finding | None) -> None:
        if self.covered:
            other = self.captures[0].imported != self.captures[1].imported
            why = "the dump has none of their kind" if other else "the runs use different operators there"
            exist = f"{counted(self.covered, 'call')} exist{'s' if self.covered == 1 else ''} in only one run"
            self.notes.append(f"{exist}; {why}, so their combined results were compared")
        if self.rewritten:
            together = "are written another way in the candidate; what they compute together agrees"
            self.notes.append(f"{counted(self.rewritten, 'call')} {together}")
        self.notes += self.remarks.notes()
        if suspect is not None and any(slot.unsized for slot in suspect.slots):
            self.notes.insert(0, f"the first call whose outputs differ: {suspect.sentence}; it could be rounding")
        elif suspect is not None:
            times = f", {suspect.ratio:.1f} x what is explained" if math.isfinite(suspect.ratio) else ""
            why = f"; {suspect.because}" if suspect.because else ""
            self.notes.append(f"could be rounding: {suspect.name} ({suspect.op}){times}{why}")
        if not self.suspects:
            self.notes += [*unseen(self.origins.values()), *self.remarks.blind()]
        for capture in self.captures:  # reading may have found more
            self.notes += [
                note for p in (*capture.problems, *capture.lost) if (note := f"{capture.path.name}: {p}") not in self.notes
            ]

    # ---------------------------------------------------------------- one rank and step at a time, or several
    def _parts(self) -> list[Overview]:
        """Compare all that the runs have in common; return what there is to say of each capture, but the float64 run's."""
        found = places(self.runs, self.ranks, self.steps)
        overviews = [Overview(capture) for capture in self.runs[: 2 + len(self.repeats)]]
        seen: set[tuple[int, int]] = set()
        with Ahead(self.runs, self.overlap.chosen, found, NEEDED, SHARED) as ahead:
            for at, place in enumerate(found):
                self.exchange.close(place.steps[0])
                reads = ahead.reads(at)
                if self.overlap.chosen is None:  # else records of other levels were not read
                    seen.update((place.rank, step) for step in place.steps)
                    for overview, records in zip(overviews, reads, strict=False):
                        overview.add(records(Overview.COLUMNS))
                if len(place.steps) > 1 and self._at_once(place, reads, ahead):
                    continue
                for step in place.steps:
                    self._part(Place(place.rank, (step,)), [records.of(step) for records in reads], ahead, len(place.steps) == 1)
        for overview in overviews:
            overview.add_the_rest(seen)
        return overviews

    def _at_once(self, place: Place, reads: Sequence[Read], ahead: Ahead) -> bool:
        """Compare several small steps in one go, unless one of them has to be looked at by itself: return whether it was done."""
        streams = self._streams(reads)
        self._look_for_holes(place, streams)
        if not all(stream.is_ordered and len(stream.steps) == len(place.steps) for stream in streams):
            return False
        before = dataclasses.replace(self.amplification)
        norms = [ahead.meanwhile(norms_of, stream) for stream in streams[:2]]
        streams = self._normalised(streams)
        alignment, verdicts, worse = self._judged(place.rank, streams)
        part = Part(place.rank, place.steps[0], verdicts, alignment)
        if not is_quiet(part, self.criterion, self.origins[place.rank]):
            self.amplification = before  # each step is judged again, and no call is a witness for itself
            return False
        self._keep(part, worse, norms)
        return True

    def _part(self, place: Place, reads: Sequence[Read], ahead: Ahead, alone: bool) -> None:
        rank, (step,) = place.rank, place.steps
        streams = self._streams(reads)
        if alone:
            self._look_for_holes(place, streams)
        held = [len(stream) > 0 for stream in streams[:2]]
        if not all(held):
            if any(held):
                self.uncompared = True
                self.notes.append(f"rank {rank} step {step} is only in {self.captures[held.index(True)].path} and was not compared")
            return
        for capture, stream in zip(self.runs[2:], streams[2:], strict=True):
            if not len(stream):
                self.notes.append(f"{capture.path} holds nothing of rank {rank} step {step}, which was judged without it")
        norms = [ahead.meanwhile(norms_of, stream) for stream in streams[:2]]
        # A run that was killed in a step has the first calls of it: what the other has more is no difference of the two.
        cut_off = any(capture.unfinished and step == capture.steps[-1] for capture in self.captures)
        streams = streams if cut_off else self._normalised(streams)
        alignment, verdicts, worse = self._judged(rank, streams)
        part = Part(rank, step, verdicts, alignment)
        locate(part, self.criterion, self.origins[rank], first_step=step == self.steps[0], from_start=step == 0,
               forced=self.forced)  # fmt: skip
        part.suspects = [suspect for suspect in part.suspects if not (cut_off and _is_cut(suspect))]
        self._keep(part, worse, norms)

    def _streams(self, reads: Sequence[Read]) -> list[Stream]:
        values, found = Vocabulary(), list[Stream]()
        for read, capture in zip(reads, self.runs, strict=True):
            like = found[0] if found else None
            translated = isinstance(capture, Translated)
            sketches = read.sketches if isinstance(read, (Records, RecordsOfStep)) else None
            found.append(
                Stream(read, self.names, values, imported=capture.imported, translated=translated, like=like, sketches=sketches)
            )
        return found

    def _look_for_holes(self, place: Place, streams: Sequence[Stream]) -> None:
        """Find what a capture lacks that is said to be whole; other tools' dumps never are."""
        for capture, stream, recorded in zip(self.captures, streams, self.recorded, strict=False):
            if capture.imported or capture.unfinished or capture.lost or self.overlap.mixed or not len(stream):
                continue
            if self.overlap.chosen is not None:
                stream = Stream(partial(capture.records, rank=place.rank, step=place.steps), self.names, Vocabulary())
            if (hole := recorded[place.rank].hole(stream)) is not None:
                self.holes.append(f"{capture.path.name}: {hole}")

    def _normalised(self, streams: list[Stream]) -> list[Stream]:
        """Return the streams in one form, where the two runs say the same in other words."""
        steps = kernels.applies(streams, self.runs)
        return kernels.rewrite(streams, self.runs, steps) if len(steps) else streams

    def _judged(self, rank: int, streams: Sequence[Stream]) -> tuple[Alignment, Verdicts, Numbers]:
        """Return what is matched, the verdicts, and the calls of which the baseline is the less precise."""
        baseline, candidate = streams[:2]
        alignment = align(baseline, candidate, self.mapping)
        payloads = [partial(read_payload, capture, rank) for capture in self.runs]
        in_full = bool(self.criterion.limits) or self.see is not None
        errors = measure(alignment, baseline, candidate, (payloads[0], payloads[1]), in_full=in_full)
        yardstick = yardstick_of(streams, payloads, len(self.repeats), self.mapping)
        by = self.overlap.precision, yardstick, self.amplification
        verdicts = judge(errors, self.criterion, *by, explain=not errors.all_same)
        return alignment, verdicts, behind(errors, yardstick, self.criterion)

    def measure_by(self, repeats: Sequence[Capture], reference: Capture | None) -> None:
        """Judge by more runs than two: repeats of the baseline, and a run in float64.

        Raises:
            TrueupError: one of them is of another framework, or holds no records.
        """
        others = [*repeats, *([] if reference is None else [reference])]
        for capture in others:
            require_records(capture)
            if require_common_names(self.captures[0], capture):
                raise TrueupError(f"{capture.path} and the baseline are of different frameworks; repeat the baseline in its own")
        others = translated(others, self.mapping, mixed=self.overlap.mixed)
        self.repeats, self.runs = others[: len(repeats)], [*self.captures, *others]
        self.reference = None if reference is None else others[-1]

    def _keep(self, part: Part, worse: Numbers, coming: Sequence[Future[list[Norm]]]) -> None:
        """Turn what was found into findings and rows while the streams are at hand."""
        if self.see is not None:
            self.see(part)
        self.repeated += self._repeated(part)
        for found, norms in zip(coming, self.norms, strict=True):
            norms += found.result()
        sites = self.sites[0][part.rank], self.sites[1][part.rank]
        self.remarks.add(part, worse, sites)
        for suspect in part.suspects:
            self.findings[id(suspect)] = suspect_finding(suspect, *part.streams, sites)
        self.suspects += part.suspects
        self.exchange.keep(part)
        self.covered += len(part.alignment.only_baseline) + len(part.alignment.only_candidate)
        self._unmatched(part.rank, part.uncovered)
        self.rewritten += max(part.rewritten)
        self.dead_ends += part.dead_ends
        if part.passes is not None:
            self.passes[part.step] = part.passes
            said = rewritten.said(part.step, part.passes)
            (self.notes if part.passes.sure else self.unexplained).append(said)
        for judged, slot in part.unexplained[:1]:
            what = f"{slot} of {judged.call.candidate.key} differs (rel. L2 {judged.call.slots[slot].relative:.2g})"
            updated = self.origins[part.rank].updated
            if updated is not None and not updated.sure and is_weight(slot):
                self.unexplained.append(f"{what} and {NOISY}: {self.overlap.finer()}, where gradients and the optimizer show which")
            else:
                inside = judged.call.candidate.parent is not None and self.overlap.levels == ["module"]
                how = f"{self.overlap.finer()}, where calls between modules show" if inside else COMPLETELY
                self.unexplained.append(f"{what} and {UNSEEN}: {how}")
        errors = part.verdicts.errors
        if part.narrowed is not None:
            self.unexplained.append(_rounds(errors, part.narrowed))
        if part.stale is not None:
            error, reader = errors.error(part.stale[0]), errors.streams[1].row(int(errors.calls[1][errors.pair[part.stale[0]]]))
            self.unexplained.append(stale_note(f"{error.slot} of {reader.op} ({reader.key})", error.relative, part.stale[1]))
        self.mixed.add(errors)
        self.by_statistics += len(np.unique(errors.pair[errors.method == STATISTICS]))
        self.untold += part.verdicts.untold
        self.incomparable.update(part.verdicts.incomparable.values())
        for pair, why in part.verdicts.incomparable.items():
            if why not in self.left_open:
                self.left_open[why] = errors.streams[1].row(int(errors.calls[1][pair]))
        if part.elsewhere is not None:
            self.notes.append(part.elsewhere)
        if part.replaced is not None:
            call = errors.streams[1].row(int(errors.calls[1][errors.pair[part.replaced]]))
            self.notes.append(replaced_note(call, errors.error(part.replaced).slot))
        self.outputs += int(np.count_nonzero(part.verdicts.worst >= 0))
        self.tables.append(call_table(part.verdicts, part.alignment.paired, sites[1]))
        self.one_sided += one_sided_tables(part.alignment, part.streams, sites)

    def _repeated(self, part: Part) -> list[str]:
        first, second = part.streams
        alike = first.call is second.call and first.slot is second.slot  # what is true of one is true of both
        sides = zip(self.captures[: 1 if alike else 2], part.streams, strict=False)
        return [] if self.repeated else [note for capture, stream in sides if (note := repeated_note(capture, stream)) is not None]

    def _unmatched(self, rank: int, calls: Sequence[tuple[Side, Row]]) -> None:
        self.uncovered += len(calls)
        self.covered -= len(calls)
        for side, call in calls[: MAX_FINDINGS - len(self.unmatched)]:
            self.unmatched.append(unmatched_finding(call, side, self.sites[SIDES.index(side)][rank]))


def _rounds(errors: Errors, entry: int) -> str:
    """Say of a result that it is coarser in the candidate."""
    first, second = (stream.dtype_of(int(slots[entry])) for stream, slots in zip(errors.streams, errors.slots, strict=True))
    call = errors.streams[1].row(int(errors.calls[1][errors.pair[entry]]))
    return rounds_note(f"{call.op} ({call.key})", second or "", first or "")


def _is_cut(suspect: Suspect) -> bool:
    """Tell whether what a suspect lacks may be what a kill cut off: the calls after it, or its own results and arguments."""
    return suspect.kind == "region" or (suspect.kind == "argument" and suspect.judged.worst is None)
