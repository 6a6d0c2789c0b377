"""`trueup.overflow`: one capture in, one `OverflowResult` out."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trueup.analysis.anomalies.across import across_ranks
from trueup.analysis.anomalies.classifying import classify_stream
from trueup.analysis.anomalies.kinds import unmeasured
from trueup.analysis.anomalies.magnitudes import Magnitudes
from trueup.analysis.anomalies.mattering import Run, in_order, repetitions, settle
from trueup.analysis.anomalies.memory import Memory
from trueup.analysis.anomalies.narrower import WIDER, Gradients, would_overflow
from trueup.analysis.anomalies.scaling import scale_findings
from trueup.comparison.graph.streams import Read, Stream
from trueup.foundation.facts.anomaly import Anomaly, OverflowResult, OverflowWord, ScaleStep, StepAnomalies
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.anomaly_sentence import verdict_lines
from trueup.foundation.words.scaling import loss_scale
from trueup.foundation.words.wording import counted, one_line

MOST = 1000
"""Anomalies that are kept; more are counted."""


def overflow(
    capture: str | Path | Capture,
    *,
    would_overflow: str | None = None,
    step: int | Sequence[int] | None = None,
    rank: int | Sequence[int] | None = None,
    replay: bool = False,
    against: str | Path | None = None,
) -> OverflowResult:
    """Find the first call of a run that made NaN, Inf or saturated numbers of clean ones, and say whether it matters.

        >>> result = trueup.overflow("runs/npu")                # doctest: +SKIP
        >>> result.verdict, result.first.place.scope            # doctest: +SKIP
        ('found', 'crf')

    Args:
        capture: what to read, of detail ``stats`` or ``tensor``, native or imported.
        would_overflow: ask of a healthy run in a wider dtype instead what would not fit ``fp16``, ``bf16``, ``fp8_e4m3`` or
            ``fp8_e5m2``.
        step: steps to judge; all by default.
        rank: ranks to judge; all by default.
        replay: execute the bad calls and those that read them again, in float64, to tell whether they matter
            (`trueup.analysis.anomalies.effects`); takes a capture of detail ``tensor``, and PyTorch.
        against: a capture of the same training on a trusted device, whole or of the calls in question alone: whether they give
            the same there tells, too.

    Raises:
        TrueupError: there is no such capture, step, rank or dtype, or PyTorch is needed and not there.
    """
    opened = capture if isinstance(capture, Capture) else open_capture(capture)
    reading = _Reading(opened, chosen("step", step, opened.steps), chosen("rank", rank, sorted(opened.ranks)))
    return reading.run(would_overflow, replay=replay, against=against)


def chosen(name: str, given: int | Sequence[int] | None, there: Sequence[int]) -> list[int]:
    """Return the steps or ranks that are asked for, in order; all where nothing is.

    Raises:
        TrueupError: one of them is not there.
    """
    wanted = list(there) if given is None else [given] if isinstance(given, int) else list(given)
    missing = [one for one in wanted if one not in there]
    if missing or not wanted:
        raise TrueupError(
            f"The capture has no such {name}.\n"
            f"  expected: one of {', '.join(map(str, there[:20])) or 'none: it holds no records'}\n"
            f"  got:      {', '.join(map(str, missing)) or 'nothing'}\n  next:     choose another --{name}, or leave it out"
        )
    return sorted(wanted)


class _Reading:
    def __init__(self, capture: Capture, steps: list[int], ranks: list[int]) -> None:
        self.capture, self.steps, self.ranks = capture, steps, ranks
        self.memories = {rank: Memory() for rank in ranks}
        self.magnitudes = {rank: Magnitudes() for rank in ranks}
        self.judged: list[StepAnomalies] = []
        self.more: list[Anomaly] = []
        self.notes: list[str] = []
        self.gradients = Gradients()
        self.calls = self.measured = self.slots = self.unmeasured = 0

    def run(self, narrower: str | None, *, replay: bool, against: str | Path | None) -> OverflowResult:
        for step in self.steps:
            for rank in self.ranks:
                self._step(rank, step, narrower)
        if narrower is not None:
            order = sorted(self.more, key=lambda one: (one.kind, one.place.step, one.place.rank, one.place.seq))  # overflows first
            self.notes += [self.gradients.said(narrower)] if self.gradients.said(narrower) else []
            return self._result(repetitions(order), narrower)
        scale = tuple(one for judged in self.judged for one in judged.scale)
        tensors = self.capture.root.get("detail") == "tensor"
        run = Run(str(self.capture.path), tuple(self.steps), scale, max(len(self.capture.ranks), 1), tensors)
        judged = across_ranks(self.judged, self._members())
        found = settle(judged, run)
        if replay:  # loaded where they are asked for: a watch, which judges too, starts without them
            from trueup.analysis.anomalies.settling import settled

            found, more = settled(found, self.capture)
            self.notes += more
        if against is not None:
            from trueup.analysis.anomalies.against import settled_against

            found, more = settled_against(found, against, self.capture)
            self.notes += more
        found += scale_findings(scale, found)
        for magnitudes in self.magnitudes.values():
            found += magnitudes.findings()
        from trueup.analysis.audit.notes import cast_note  # it reads places as this does

        self.notes += cast_note(self.capture, self.steps, self.ranks)
        return self._result(in_order(found), None)

    def _members(self) -> int:
        sizes = [m.get("world_size") for m in self.capture.ranks.values()]
        return max([s for s in sizes if isinstance(s, int)], default=len(self.capture.ranks))

    def _step(self, rank: int, step: int, narrower: str | None) -> None:
        memory = self.memories[rank]
        stream = Stream(self._reader(rank, step), memory.names, memory.values, imported=self.capture.imported)
        sites = self.capture.sites(rank)
        self.slots += len(stream.slot)
        self.unmeasured += unmeasured(stream)
        if narrower is not None:
            self.calls, self.measured = self.calls + len(stream), self.measured + int(stream.measured.sum())
            self.gradients.add(stream, narrower)
            if len(self.more) < MOST:
                self.more += would_overflow(stream, narrower, sites)
            return
        found = classify_stream(stream, memory, sites)
        self.calls, self.measured = self.calls + found.calls, self.measured + found.measured
        self.judged.append(found)
        if not any(one.severity in ("critical", "high") for one in found.anomalies) and not found.follows:
            self.magnitudes[rank].step(stream, sites)

    def _reader(self, rank: int, step: int) -> Read:
        return partial(self.capture.records, rank=rank, step=step)

    def _result(self, found: list[Anomaly], narrower: str | None) -> OverflowResult:
        notes = self._notes(narrower)
        scale: tuple[ScaleStep, ...] = tuple(one for judged in self.judged for one in judged.scale)
        expected: Counter[str] = Counter()
        for judged in self.judged:
            expected.update(dict(judged.expected))
        verdict = self._verdict(found)
        first = min((one.rank for one in scale), default=0)  # all ranks have one scale
        history = loss_scale([(one.scale, one.skipped) for one in scale if one.rank == first])
        lines = verdict_lines(verdict, found, notes, self.measured, len(self.steps), tuple(expected.most_common()), narrower)
        return OverflowResult(
            verdict, "\n".join(lines), tuple(found[:MOST]), tuple(expected.most_common()), scale, history,
            tuple(notes), str(self.capture.path), len(self.ranks), len(self.steps), self.calls, self.measured, narrower,
            self._try_next(found) if narrower is None else "",
        )  # fmt: skip

    def _try_next(self, found: list[Anomaly]) -> str:
        """Return the command that runs the step again with the suggested policy."""
        if not found or found[0].matters == "harmless" or not found[0].policy:
            return ""
        command, launched = self.capture.root.get("command"), "run" in self.capture.root  # else it is a script's arguments
        words = "COMMAND"
        if launched and isinstance(command, list) and all(isinstance(word, str) for word in command):
            words = " ".join(shlex.quote(one_line(word)) for word in command)
        return f"trueup heal {shlex.quote(one_line(str(self.capture.path)))} -- {words}"

    def _verdict(self, found: list[Anomaly]) -> OverflowWord:
        if any(one.matters != "harmless" for one in found):
            return "found"
        if not self.measured or self.unmeasured or self.capture.lost:
            return "inconclusive"
        return "harmless" if found else "clean"

    def _notes(self, narrower: str | None) -> list[str]:
        notes = []
        if not self.measured:
            why = "it holds digests, which tell nothing of NaN: record with --detail stats" if self.slots else "it holds no records"
            notes.append(f"no statistics to judge by: {why}")
        elif self.unmeasured:
            notes.append(f"{counted(self.unmeasured, 'result')} of calls without statistics: record with --detail stats")
        if self.capture.lost:
            notes.append(f"{len(self.capture.lost)} part(s) of the capture cannot be read: {self.capture.lost[0]}")
        if self.capture.imported and self.measured:
            notes.append("imported: which call made a tensor is told by equal numbers, and what reads an infinity likewise")
        if narrower is not None:
            notes.append(f"judged by the largest and the typical magnitude of each result in {', '.join(WIDER[narrower])}")
        told = dict.fromkeys(str(n) for r in self.ranks for n in self.capture.ranks.get(r, {}).get("notes", []))
        return [*notes, *self.notes, *told]
