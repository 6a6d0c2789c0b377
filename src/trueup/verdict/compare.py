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

from trueup.model import Finding, Result, RunSummary, TrueupError, VerdictWord
from trueup.report.sentence import COMPLETELY, NOISY, UNSEEN, harmless_argument, verdict_lines
from trueup.report.wording import counted
from trueup.store import Capture, open_capture
from trueup.verdict import few
from trueup.verdict.ahead import Ahead, Place, Records, RecordsOfStep, places
from trueup.verdict.align import Alignment, align
from trueup.verdict.amplification import Amplification
from trueup.verdict.criteria import FRAMEWORKS, Criterion
from trueup.verdict.criteria import load as load_criterion
from trueup.verdict.evidence import with_evidence
from trueup.verdict.exchange import Exchange
from trueup.verdict.findings import by_itself, suspect_finding, unmatched_finding, victim_findings
from trueup.verdict.forced import notes_on
from trueup.verdict.foreign import inner_note, statistics_note
from trueup.verdict.gradients import Norm, norms_of
from trueup.verdict.handed_out import replaced_note
from trueup.verdict.judge import judge
from trueup.verdict.judged import Verdicts
from trueup.verdict.locate import SIDES, Part, Side, Suspect, is_quiet, locate
from trueup.verdict.mapping import Mapping
from trueup.verdict.mapping import load as load_mapping
from trueup.verdict.measure import STATISTICS, UNSIZED, measure
from trueup.verdict.mixed import Mixed
from trueup.verdict.moved import is_weight
from trueup.verdict.occurrences import first_received, occurrences
from trueup.verdict.origins import Origins, unseen
from trueup.verdict.overlap import Overlap, require_common_names, require_records
from trueup.verdict.payloads import read_payload
from trueup.verdict.ranking import rank_culprits
from trueup.verdict.streams import Numbers, Read, Row, Stream, Vocabulary
from trueup.verdict.summary import Overview, call_table, count, finish_table, loss_note, summarise, victims
from trueup.verdict.translated import Translated, sides, translated
from trueup.verdict.yardstick import behind, yardstick_of

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
    see: Callable[[Verdicts], None] | None = None,
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
        self.repeats: list[Capture] = []
        self.reference: Capture | None = None
        self.runs: list[Capture] = [baseline, candidate]
        """All captures that are read: baseline, candidate, repeats, reference."""
        self.see: Callable[[Verdicts], None] | None = None
        if criterion.name == "default" and self.overlap.mixed:
            criterion = load_criterion(FRAMEWORKS)
        self.criterion, self.mapping = criterion, mapping
        self.renames: dict[str, str] = {}
        self.ignored = 0
        self.ranks, self.steps, self.notes = self.overlap.ranks, self.overlap.steps, list(self.overlap.notes)
        self.uncompared = not self.overlap.is_whole
        """Whether something that one run holds was not compared, so that the runs cannot be called aligned."""
        self.sites = tuple({r: c.sites(r) for r in self.ranks} for c in self.captures)
        alone = all(len(capture.ranks) == 1 for capture in self.captures)
        self.origins = {rank: Origins(alone) for rank in self.ranks}
        self.amplification = Amplification()
        self.exchange = Exchange(self.ranks, limited=bool(criterion.limits))
        self.suspects: list[Suspect] = []
        self.findings: dict[int, Finding] = {}
        self.unmatched: list[Finding] = []
        self.behind = 0
        self.first_behind: Row | None = None
        """How many calls there are of which the baseline is further from the truth than the candidate, and the first."""
        self.uncovered = 0
        self.covered = 0
        self.unexplained: list[str] = []
        self.outputs = 0
        self.harmless: list[Finding] = []
        self.n_harmless = 0
        """Calls that were given other arguments and whose results agree within rounding: the first ones, and how many."""
        self.sketched = 0
        """How many results differ within rounding and were compared by statistics."""
        self.by_statistics = 0  # calls of which a tensor was compared by another tool's statistics alone
        self.untold = 0  # calls of which another tool's dump lacks gradients that nobody reads
        self.incomparable: Counter[str] = Counter()  # why calls were not compared
        self.tables: list[pa.Table] = []
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
        counts = count(table, self.uncovered, len(self.steps))
        culprits = [self.findings[id(s)] for s in (certain or ranked[:1])]
        if certain:
            sure: Literal["high", "could be rounding"]
            for n, suspect in enumerate(certain):
                sure = "could be rounding" if suspect.judged.unsized else "high"  # what ranking made certain too
                culprits[n] = dataclasses.replace(culprits[n], confidence=sure)
            culprits[0] = dataclasses.replace(culprits[0], victims=victims(table))
        passing = victim_findings(table, MAX_FINDINGS)
        summaries = [summarise(c, o, self.ranks) for c, o in zip(self.captures, overviews[:2], strict=True)]
        forced, blind = notes_on(self.captures[1], self.overlap.levels)
        self.notes[:0] = [*forced, *self.mixed.notes()]
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
        lines = verdict_lines(verdict, culprits, passing, self.unmatched, self.notes, counts, seen)
        lines += [f"          {note}" for note in forced if verdict == "deviates"]
        result = Result(
            verdict, "\n".join(lines), culprits, passing, self.unmatched, self.notes, self.criterion.name,
            summaries[0], summaries[1], counts, table, occurrences=seen,
        )  # fmt: skip
        return with_evidence(result, self.captures, self.norms, self.criterion)

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
        apart = loss_note(summaries[0], summaries[1], self.criterion.loss, repeated, self.criterion.yardstick)
        reasons = [r for r in (apart, *self.unexplained[:1]) if r]
        lost = [text for capture in self.captures for text in capture.lost]
        if lost:
            reasons.insert(0, f"{len(lost)} part{'s' if len(lost) > 1 else ''} of the captures cannot be read: {lost[0]}")
        self.notes[:0] = [*reasons, *self._why_not()]
        if counts["compared"] and not self.outputs:
            self.notes.insert(0, "no output of any call was compared")
        unsized = any(s.judged.unsized for s in ranked)
        open_ = counts["unmatched"] or counts["incomparable"] or self.uncompared or unsized
        return "inconclusive" if reasons or open_ or not self.outputs else "aligned"

    def _why_not(self) -> list[str]:
        """Say why most calls that were not compared were not."""
        return [f"{counted(calls, 'call')} not compared: {why}" for why, calls in self.incomparable.most_common(1)]

    def _last_notes(self, suspect: Finding | None) -> None:
        if self.covered:
            other = self.captures[0].imported != self.captures[1].imported
            why = "the dump has none of their kind" if other else "the two runs execute other operators for it"
            self.notes.append(
                f"{self.covered:,} calls exist on one side only, where what they computed was compared as a whole: {why}"
            )
        if self.renames:
            some = ", ".join(f"{c or 'no module'} is {b or 'no module'}" for c, b in list(self.renames.items())[:3])
            more = f" and {len(self.renames) - 3} more" if len(self.renames) > 3 else ""
            self.notes.append(f"scopes have other names in the candidate and were paired by what they execute: {some}{more}")
        if self.ignored:
            self.notes.append(f"{self.ignored:,} calls were not compared, as the map file says")
        if self.harmless:
            self.notes.append(harmless_argument(self.harmless[0], self.n_harmless - 1))
        if (first := self.first_behind) is not None:
            self.notes.append(
                f"in {self.behind:,} calls the baseline is further from the float64 run than the candidate, first in "
                f"{first.op} ({first.key}): it is the less precise of the two there"
            )
        if suspect is not None and any(slot.reason == UNSIZED for slot in suspect.slots):
            self.notes.insert(0, f"the first call whose outputs differ: {suspect.sentence}; it could be rounding")
        elif suspect is not None:
            times = f", {suspect.ratio:.1f} x what is explained" if math.isfinite(suspect.ratio) else ""
            self.notes.append(f"could be rounding: {suspect.name} ({suspect.op}){times}")
        if not self.suspects:
            self.notes += [*unseen(self.origins.values()), *few.note(self.sketched)]
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
        with Ahead(self.runs, self.overlap.chosen, found) as ahead:
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
                    self._part(place.rank, step, [records.of(step) for records in reads], ahead)
        for overview in overviews:
            overview.add_the_rest(seen)
        return overviews

    def _at_once(self, place: Place, reads: Sequence[Read], ahead: Ahead) -> bool:
        """Compare several small steps in one go, unless one of them has to be looked at by itself: return whether it was done."""
        streams = self._streams(reads)
        if not all(stream.is_ordered and len(stream.steps) == len(place.steps) for stream in streams):
            return False
        before = dataclasses.replace(self.amplification)
        norms = [ahead.meanwhile(norms_of, stream) for stream in streams[:2]]
        alignment, verdicts, worse = self._judged(place.rank, streams)
        part = Part(place.rank, place.steps[0], verdicts, alignment)
        if not is_quiet(part, self.criterion, self.origins[place.rank]):
            self.amplification = before  # each step is judged again, and no call is a witness for itself
            return False
        self._keep(part, worse, norms)
        return True

    def _part(self, rank: int, step: int, reads: Sequence[Read], ahead: Ahead) -> None:
        streams = self._streams(reads)
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
        alignment, verdicts, worse = self._judged(rank, streams)
        part = Part(rank, step, verdicts, alignment)
        locate(part, self.criterion, self.origins[rank], first_step=step == self.steps[0], from_start=step == 0)
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

    def _judged(self, rank: int, streams: Sequence[Stream]) -> tuple[Alignment, Verdicts, Numbers]:
        """Return what is matched, the verdicts, and the calls of which the baseline is the less precise."""
        baseline, candidate = streams[:2]
        alignment = align(baseline, candidate, self.mapping)
        payloads = [partial(read_payload, capture, rank) for capture in self.runs]
        in_full = bool(self.criterion.limits) or self.see is not None
        errors = measure(alignment, baseline, candidate, (payloads[0], payloads[1]), in_full=in_full)
        yardstick = yardstick_of(streams, payloads, len(self.repeats), self.mapping)
        verdicts = judge(errors, self.criterion, self.overlap.precision, yardstick, self.amplification)
        return alignment, verdicts, behind(errors, yardstick, self.criterion.yardstick)

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
            self.see(part.verdicts)
        self.renames |= part.alignment.scopes
        self.ignored += part.alignment.ignored
        self.behind += len(worse)
        if self.first_behind is None and len(worse):
            self.first_behind = part.streams[1].row(int(part.alignment.candidate[worse[0]]))
        for found, norms in zip(coming, self.norms, strict=True):
            norms += found.result()
        sites = self.sites[0][part.rank], self.sites[1][part.rank]
        for suspect in part.suspects:
            self.findings[id(suspect)] = suspect_finding(suspect, *part.streams, sites)
        self.suspects += part.suspects
        self.exchange.keep(part)
        self.covered += len(part.alignment.only_baseline) + len(part.alignment.only_candidate)
        self._unmatched(part.rank, part.uncovered)
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
        self.mixed.add(errors)
        self.by_statistics += len(np.unique(errors.pair[errors.method == STATISTICS]))
        self.sketched += few.hidden(errors)
        self.untold += part.verdicts.untold
        self.incomparable.update(part.verdicts.incomparable.values())
        self.harmless += [suspect_finding(Suspect(j, "argument", False), *part.streams, sites) for j in part.harmless[:1]]
        self.n_harmless += len(part.harmless)
        if part.elsewhere is not None:
            self.notes.append(part.elsewhere)
        if part.replaced is not None:
            call = errors.streams[1].row(int(errors.calls[1][errors.pair[part.replaced]]))
            self.notes.append(replaced_note(call, errors.error(part.replaced).slot))
        self.outputs += int(np.count_nonzero(part.verdicts.worst >= 0))
        self.tables.append(call_table(part.verdicts, part.alignment.paired, sites[1]))

    def _unmatched(self, rank: int, calls: Sequence[tuple[Side, Row]]) -> None:
        self.uncovered += len(calls)
        self.covered -= len(calls)
        for side, call in calls[: MAX_FINDINGS - len(self.unmatched)]:
            self.unmatched.append(unmatched_finding(call, side, self.sites[SIDES.index(side)][rank]))
