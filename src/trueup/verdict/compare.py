"""`trueup.compare`: two captures in, one `Result` out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trueup.model import LEVELS, Finding, Result, RunSummary, TrueupError, VerdictWord
from trueup.report.sentence import verdict_lines
from trueup.store import Capture, open_capture
from trueup.verdict.align import align
from trueup.verdict.criteria import Criterion
from trueup.verdict.criteria import load as load_criterion
from trueup.verdict.findings import suspect_finding, unmatched_finding, victim_finding
from trueup.verdict.judge import Precision, judge, precision_of
from trueup.verdict.locate import Part, Suspect, locate, rank_culprits
from trueup.verdict.measure import measure
from trueup.verdict.streams import COLUMNS, Array, Stream, load
from trueup.verdict.summary import call_rows, count, finish_table, loss_note, summarise

MAX_FINDINGS = 200
"""Victims and unmatched calls listed one by one; all are in the table of calls or counted."""


def compare(
    baseline: str | Path | Capture,
    candidate: str | Path | Capture,
    *,
    level: str | Sequence[str] | None = None,
    criterion: str | Path = "default",
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
        criterion: ``default``, or the path of a criterion file.

    Raises:
        TrueupError: a path is no capture, the format is newer, or the two cannot be compared at all (other frameworks'
            worlds, no step, rank or level in common).
    """
    first, second = (c if isinstance(c, Capture) else open_capture(c) for c in (baseline, candidate))
    return _Comparison(first, second, level, load_criterion(criterion)).run()


class _Comparison:
    def __init__(self, baseline: Capture, candidate: Capture, level: str | Sequence[str] | None, criterion: Criterion) -> None:
        self.captures = baseline, candidate
        self.criterion = criterion
        self.notes: list[str] = []
        self.unmatched: list[Finding] = []
        self._comparable()
        self.levels = self._levels(level)
        self.ranks = self._common("ranks", [sorted(c.ranks) for c in self.captures])
        self.steps = self._common("steps", [c.steps for c in self.captures])
        self.precision = self._precision()
        self.sites = tuple({r: c.sites(r) for r in self.ranks} for c in self.captures)
        self.suspects: list[Suspect] = []
        self.findings: dict[int, Finding] = {}
        self.victims: list[Finding] = []
        self.skipped = 0
        """Ranks and steps that hold nothing on one side."""
        self.uncovered = 0
        self.covered = 0
        self.rows: list[tuple[Any, ...]] = []

    def run(self) -> Result:
        for step in self.steps:
            for rank in self.ranks:
                self._part(rank, step)
        if self.covered:
            self.notes.append(
                f"{self.covered:,} calls exist on one side only, inside functions that were compared as a whole: the two runs "
                "execute other operators for them"
            )
        ranked = rank_culprits(self.suspects)
        certain = [s for s in ranked if s.certain]
        first = certain[0].judged.call.candidate if certain else None
        table = finish_table(
            self.rows,
            {(c.rank, c.step, c.seq) for c in (s.judged.call.candidate for s in certain)},
            None if first is None else (first.step, first.seq),
        )
        counts = count(table, self.uncovered, len(self.steps))
        summaries = [summarise(c, self.ranks) for c in self.captures]
        culprits = [self.findings[id(s)] for s in (certain or ranked[:1])]
        victims = [v for v in self.victims if first is not None and (v.step, v.seq[1]) > (first.step, first.seq)]
        if certain:
            passed_on = sum(role == "victim" for role in table.column("role").to_pylist())
            culprits[0] = dataclasses.replace(culprits[0], victims=passed_on)
        verdict = self._verdict(bool(certain), counts, summaries)
        if not certain:
            self.notes += [f"could be rounding: {f.name} ({f.op}), {f.ratio:.1f} x what is explained" for f in culprits]
            culprits = []
        lines = verdict_lines(verdict, culprits, victims, self.unmatched, self.notes, counts)
        return Result(
            verdict, "\n".join(lines), culprits, victims, self.unmatched, self.notes, self.criterion.name,
            summaries[0], summaries[1], counts, table,
        )  # fmt: skip

    def _verdict(self, deviates: bool, counts: dict[str, int], summaries: list[RunSummary]) -> VerdictWord:
        if deviates:
            return "deviates"
        apart = loss_note(summaries[0], summaries[1], self.criterion.loss)
        if apart is not None:
            self.notes.insert(0, apart)
        lost = [text for capture in self.captures for text in capture.lost]
        if lost:
            self.notes.insert(0, f"{len(lost)} part{'s' if len(lost) > 1 else ''} of the captures cannot be read: {lost[0]}")
        unseen = counts["unmatched"] or counts["incomparable"] or self.skipped or lost
        if not counts["compared"] or unseen or apart is not None:
            return "inconclusive"
        return "aligned"

    # ---------------------------------------------------------------- what can be compared
    def _comparable(self) -> None:
        for capture in self.captures:
            if not capture.rows:
                why = (capture.lost or capture.problems or ["nothing was captured"])[0]
                raise TrueupError(f"{capture.path} holds no records: {why}; record again")
        names = [next((str(m["framework"]) for m in c.ranks.values() if "framework" in m), None) for c in self.captures]
        if None not in names and names[0] != names[1]:
            raise TrueupError(
                f"the captures are of different frameworks: {self._name(0)} of {names[0]}, {self._name(1)} of {names[1]}; "
                "their operators have no common names yet"
            )

    def _levels(self, level: str | Sequence[str] | None) -> list[str]:
        wanted = LEVELS if level is None else (level,) if isinstance(level, str) else tuple(level)
        for name in wanted:
            if name not in LEVELS:
                raise TrueupError(f"level {name!r} is unknown: expected {', '.join(LEVELS)}")
        held = [_levels_of(c) for c in self.captures]
        common = [n for n in wanted if all(n in h for h in held)]
        if not common:
            raise TrueupError(
                f"the captures have no level in common among {', '.join(wanted)}: {self._name(0)} holds "
                f"{', '.join(held[0]) or 'none'}, {self._name(1)} holds {', '.join(held[1]) or 'none'}; capture both with the same --level"
            )
        missing = {n for n in wanted if n in held[0] or n in held[1]} - set(common)
        if missing:
            self.notes.append(f"only one capture holds level {', '.join(sorted(missing))}; compared at {', '.join(common)}")
        return common

    def _common(self, what: str, sides: list[list[int]]) -> list[int]:
        common = sorted(set(sides[0]) & set(sides[1]))
        if not common:
            raise TrueupError(
                f"the captures have no {what} in common: {self._name(0)} holds {_numbers(sides[0])}, "
                f"{self._name(1)} holds {_numbers(sides[1])}; capture the same {what} on both sides"
            )
        for n, side in enumerate(sides):
            if extra := sorted(set(side) - set(common)):
                self.notes.append(f"{what} {_numbers(extra)} are only in {self._name(n)} and were not compared")
        return common

    def _precision(self) -> Precision:
        manifests = [next(iter(c.ranks.values()), {}) for c in self.captures]
        for capture in self.captures:
            self.notes += [f"{capture.path.name}: {problem}" for problem in capture.problems]
        found = precision_of([m.get("environment", {}) for m in manifests], [m.get("devices", []) for m in manifests])
        if found.matmul or found.convolution:
            what = " and ".join(n for n, on in (("matrix products", found.matmul), ("convolutions", found.convolution)) if on)
            self.notes.append(f"float32 {what} are rounded to TF32 or HF32, as a run declares: that much error is explained")
        return found

    def _name(self, side: int) -> str:
        return str(self.captures[side].path)

    # ---------------------------------------------------------------- one rank and step at a time
    def _part(self, rank: int, step: int) -> None:
        tables = [c.records(columns=COLUMNS, level=self.levels, rank=rank, step=step) for c in self.captures]
        if not tables[0].num_rows or not tables[1].num_rows:
            self.skipped += 1
            self.notes.append(f"rank {rank} step {step} holds nothing on one side and was not compared")
            return
        streams = load(tables[0]), load(tables[1])
        alignment = align(*streams)
        payloads = tuple(partial(_payload, c, rank) for c in self.captures)
        measured = measure(alignment.pairs, *streams, payloads)  # type: ignore[arg-type]
        judged = judge(measured, *streams, self.criterion, self.precision)
        part = Part(rank, step, judged, alignment.only_baseline, alignment.only_candidate)
        locate(part, *streams, self.criterion, first_step=step == self.steps[0], from_start=step == 0)
        self._keep(part, streams)

    def _keep(self, part: Part, streams: tuple[Stream, Stream]) -> None:
        """Turn what was found into findings and rows while the streams are at hand."""
        sites = tuple(side[part.rank] for side in self.sites)
        for suspect in part.suspects:
            self.findings[id(suspect)] = suspect_finding(suspect, *streams, sites[1])
        self.suspects += part.suspects
        carried = [j for j in part.judged if j.role == "carried"]
        self.victims += [victim_finding(j, sites[1]) for j in carried[: MAX_FINDINGS - len(self.victims)]]
        self.uncovered += len(part.uncovered)
        for side, call in part.uncovered[: MAX_FINDINGS - len(self.unmatched)]:
            self.unmatched.append(unmatched_finding(call, side, sites[0] if side == "baseline" else sites[1]))
        self.covered += len(part.only_baseline) + len(part.only_candidate) - len(part.uncovered)
        self.rows += call_rows(part.judged, sites[1])


def _payload(capture: Capture, rank: int, segment: str, key: str) -> Array | None:
    """Return a tensor, None where it is lost: the capture then says so, and its sketch is measured instead."""
    try:
        return capture.payload(rank, segment, key)
    except TrueupError as error:
        text = f"rank {rank}: {error}"
        if text not in capture.lost:
            capture.lost.append(text)
        return None


def _levels_of(capture: Capture) -> list[str]:
    held = {value for value in capture.records(columns=["level"]).column("level").unique().to_pylist()}
    return [level for level in LEVELS if level in held]


def _numbers(values: list[int]) -> str:
    """Write sorted numbers in short: ``0-2, 7``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[1]}" for r in runs) or "none"
