"""A comparison becomes a `Result`: findings and rows of calls while a part is at hand, sentences and the rest at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from trueup.comparison.result.evidence import with_evidence
from trueup.comparison.result.findings import by_itself, suspect_finding, unmatched_finding, victim_findings
from trueup.comparison.result.gradients import Norm
from trueup.comparison.result.occurrences import occurrences
from trueup.comparison.result.remarks import Remarks
from trueup.comparison.result.summary import call_table, count, finish_table, one_sided_tables, summarise, victims, with_one_sided
from trueup.comparison.verdict.compare import Comparison, Said
from trueup.comparison.verdict.judged import SIDES, Part, Suspect
from trueup.comparison.verdict.locate import of_a_kind
from trueup.foundation.facts.why import Why
from trueup.foundation.model import Finding, Result
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.sentence import verdict_lines

ALIKE_NAMED = 20
"""Calls of a culprit's kind that are named beside it; all are counted, and marked in the table of calls."""

MAX_FINDINGS = 200
"""Victims listed one by one; all are in the table of calls or counted."""


class Assembly:
    """What a `Result` is made of.

    Args:
        comparison: gives each part to `add` when it runs.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.sites = tuple({rank: capture.sites(rank) for rank in comparison.ranks} for capture in comparison.captures)
        self.remarks = Remarks(str(comparison.captures[1].path))
        self.findings: dict[int, Finding] = {}
        self.tables: list[pa.Table] = []
        self.one_sided: list[pa.Table] = []
        self.norms: tuple[list[Norm], list[Norm]] = [], []

    def add(self, part: Part) -> None:
        """Turn what was found in a part into findings and rows while its streams are at hand."""
        for found, norms in zip(part.beside, self.norms, strict=True):
            norms += found
        sites = self.sites[0][part.rank], self.sites[1][part.rank]
        self.remarks.add(part, sites)
        self.findings |= {id(suspect): suspect_finding(suspect, *part.streams, sites) for suspect in part.suspects}
        self.tables.append(call_table(part.verdicts, part.alignment.paired, sites[1]))
        self.one_sided += one_sided_tables(part.alignment, part.streams, sites)

    def result(self) -> Result:
        """Return the result of a comparison that has run."""
        found = self.comparison
        certain = found.certain
        for at, given in found.exchange.guilty.items():
            self.findings[at] = by_itself(self.findings[at], given)
        calls = {(s.rank, s.step, s.place) for s in certain if s.kind != "region"}
        first = (certain[0].step, certain[0].place) if certain else None
        table = finish_table(self.tables, calls, first, found.reached)
        counts = count(table, self.one_sided, found.uncovered, len(found.steps))
        culprits = [self._culprit(kind) for kind in of_a_kind(certain)]
        if culprits:
            passed_on, beyond = victims(table)
            culprits[0] = dataclasses.replace(culprits[0], victims=passed_on, beyond=beyond)
        passing = victim_findings(table, MAX_FINDINGS)
        unmatched = [unmatched_finding(call, side, self.sites[SIDES.index(side)][call.rank]) for side, call in found.unmatched]
        summaries = [summarise(c, o, found.ranks) for c, o in zip(found.captures, found.overviews[:2], strict=True)]
        known = [suspect for suspect in found.suspects if suspect.certain]
        seen = occurrences(found.ranks, known, found.exchange.received, found.criterion) if certain else []
        always, notes = self.remarks.always(), self._notes(culprits)
        lines = verdict_lines(found.verdict, culprits, passing, unmatched, notes, counts, seen, always)
        lines += [f"          {in_words(note)}" for note in found.lent[0] if found.verdict == "deviates"]
        result = Result(
            found.verdict, "\n".join(lines), culprits, passing, unmatched, list(map(in_words, notes)), found.criterion.name,
            summaries[0], summaries[1], counts, with_one_sided(table, self.one_sided), occurrences=seen,
        )  # fmt: skip
        return with_evidence(result, found.captures, self.norms, found.criterion)

    def _culprit(self, kind: Sequence[Suspect]) -> Finding:
        """Return the finding of culprits of a kind: the first of them, which ranking made certain if it was not."""
        first, *others = kind
        sure: Literal["high", "could be rounding"] = "could be rounding" if first.judged.unsized else "high"
        names = tuple(dict.fromkeys(self.findings[id(s)].name for s in others))[:ALIKE_NAMED]
        return dataclasses.replace(self.findings[id(first)], confidence=sure, alike=len(others), alike_in=names)

    # ---------------------------------------------------------------- notes
    def _notes(self, culprits: Sequence[Finding]) -> list[Said]:
        """Return what there is to say beside the verdict, what matters most first."""
        found, mixed = self.comparison, self.comparison.overlap.mixed
        notes: list[Said] = [] if culprits else found.reasons
        notes += [*found.lent[0], *self.remarks.always(), *found.mixed.notes(), *found.notes]
        if found.dead_ends:
            notes.append(Why.DEAD_ENDS(len(found.dead_ends), found.dead_ends[0][0], found.dead_ends[0][1].key))
        told: list[Said] = [Why.INNER(found.untold)] if found.untold else []
        if found.by_statistics and not mixed:  # of an alignment it is the first thing to know
            told = [Why.STATISTICS(found.by_statistics, found.compared), *told]
        notes = [*told, *notes] if found.verdict == "aligned" else [*notes, *reversed(told)]
        if found.covered:
            notes.append(Why.COVERED(found.covered, found.captures[0].imported != found.captures[1].imported))
        if found.rewritten:
            notes.append(Why.REWRITTEN(found.rewritten))
        notes += self.remarks.notes()
        if found.ranked and not culprits:
            notes = self._with_suspect(notes, found.ranked[0])
        if not found.suspects:
            notes += [*found.unseen(), *self.remarks.blind()]
        said = set(map(in_words, notes))
        for capture in found.captures:  # reading may have found more
            problems = [Why.PROBLEM(capture.path.name, problem) for problem in (*capture.problems, *capture.lost)]
            notes += [problem for problem in problems if in_words(problem) not in said]
        return [*notes, *self._of_casts(culprits)]

    def _with_suspect(self, notes: list[Said], suspect: Suspect) -> list[Said]:
        """Say of the first suspect, where none is certain, that it could be rounding."""
        finding = self.findings[id(suspect)]
        if any(slot.unsized for slot in finding.slots):
            return [Why.FIRST_UNSIZED(finding.sentence), *notes]
        times = finding.ratio if math.isfinite(finding.ratio) else None
        unlike = any(reason.why is Why.ALONE for reason in suspect.because)
        return [*notes, (Why.UNLIKE_PEERS if unlike else Why.COULD_ROUND)(finding.name, finding.op, times, finding.because)]

    def _of_casts(self, culprits: Sequence[Finding]) -> list[str]:
        if not culprits or self.comparison.overlap.mixed:
            return []
        from trueup.analysis.audit.notes import notes_beside  # takes time to load, and to look

        return notes_beside(self.comparison.captures, culprits[0])
