"""`trueup.overflow`: one capture in, one `OverflowResult` out.

A collective is the same call on all its members: same step, operator, ordinal and group. If a rank got bad numbers for clean
ones, a recorded rank that gave bad ones is their source; if none gave any, the communication made them (a sum in float16
overflows); if a member was not recorded, the origin is unknown. A second, trusted run can tell whether bad numbers matter: are
its numbers the same?
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trueup.analysis.anomalies.across_steps import Memory, scale_findings
from trueup.analysis.anomalies.classifying import classify_stream
from trueup.analysis.anomalies.effects import Run, in_order, repetitions, settle
from trueup.analysis.anomalies.kinds import unmeasured
from trueup.analysis.anomalies.magnitudes import WIDER, Gradients, Magnitudes, would_overflow
from trueup.comparison.graph.streams import Stream
from trueup.comparison.result.comparing import compare
from trueup.foundation.facts.anomaly import Anomaly, Crossing, OverflowResult, OverflowWord, ScaleStep, StepAnomalies
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.anomaly_sentence import loss_scale, verdict_lines
from trueup.foundation.words.wording import counted, one_line, sci

MOST = 1000  # anomalies that are kept; more are counted


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
            (`trueup.analysis.anomalies.effects_rerun`); takes a capture of detail ``tensor``, and PyTorch.
        against: a capture of the same training on a trusted device, whole or of the calls in question alone: whether they give
            the same there tells, too.

    Raises:
        TrueupError: there is no such capture, step, rank or dtype, or PyTorch is needed and not there.
    """
    opened = open_capture(capture)
    reading = _Reading(opened, chosen("step", step, opened.steps), chosen("rank", rank, sorted(opened.ranks)))
    return reading.run(would_overflow, replay=replay, against=against)


def chosen(name: str, given: int | Sequence[int] | None, there: Sequence[int]) -> list[int]:
    """Return the steps or ranks asked for, in order, by default all; raises TrueupError if one is not there."""
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
        self.magnitudes = {rank: Magnitudes(capture.ranks.get(rank, {})) for rank in ranks}
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
        sizes = [m.get("world_size") for m in self.capture.ranks.values()]
        judged = across_ranks(self.judged, max([s for s in sizes if isinstance(s, int)], default=len(self.capture.ranks)))
        found = settle(judged, run)
        if replay:  # loaded where they are asked for: a watch, which judges too, starts without them
            from trueup.analysis.anomalies.effects_rerun import settled

            found, more = settled(found, self.capture)
            self.notes += more
        if against is not None:
            found, more = settled_against(found, against, self.capture)
            self.notes += more
        found += scale_findings(scale, found)
        for magnitudes in self.magnitudes.values():
            found += magnitudes.findings()
        from trueup.analysis.audit.casts import cast_note  # it reads places as this does

        self.notes += cast_note(self.capture, self.steps, self.ranks)
        return self._result(in_order(found), None)

    def _step(self, rank: int, step: int, narrower: str | None) -> None:
        memory = self.memories[rank]
        read = partial(self.capture.records, rank=rank, step=step)
        stream = Stream(read, memory.names, memory.values, imported=self.capture.imported)
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


Key = tuple[int, str, str, int, "str | None"]


def across_ranks(judged: Sequence[StepAnomalies], world_size: int) -> list[StepAnomalies]:
    """Return the steps of all ranks with collectives explained: an anomaly that another rank explains is dropped, and its source
    noted. If ``world_size`` exceeds the recorded ranks, a giver may be missing."""
    recorded = {one.rank for one in judged}
    crossings: defaultdict[Key, list[tuple[StepAnomalies, Crossing]]] = defaultdict(list)
    for step in judged:
        for one in step.collectives:
            crossings[(step.step, one.level, one.op, one.ordinal, one.ranks)].append((step, one))
    dropped: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    notes: defaultdict[tuple[int, int, int], list[str]] = defaultdict(list)
    for members in crossings.values():
        givers = [(step, one) for step, one in members if one.given]
        for step, one in members:
            if one.given or one.anomaly < 0:
                continue
            if givers:
                dropped[step.rank, step.step].add(one.anomaly)
                for giver, other in givers:
                    for place in _given_by(giver, other):
                        notes[giver.rank, giver.step, place].append(f"rank {step.rank}")
            elif len(recorded) < world_size:
                text = f"{world_size - len(recorded)} of {world_size} ranks were not recorded: one of them may have given it"
                notes[step.rank, step.step, one.anomaly].append(text)
    return [_explained(step, dropped[step.rank, step.step], notes) for step in judged]


def _given_by(step: StepAnomalies, crossing: Crossing) -> list[int]:
    """Return the anomalies of a rank that may be in what it gave: a bucket of gradients holds those of many calls."""
    harmful = {"loss", "gradients", "other ranks", "parameters"}
    return [n for n, one in enumerate(step.anomalies) if one.place.seq < crossing.seq and harmful & set(one.reached)]


def _explained(step: StepAnomalies, dropped: set[int], notes: dict[tuple[int, int, int], list[str]]) -> StepAnomalies:
    found: list[Anomaly | None] = []
    for place, one in enumerate(step.anomalies):
        told = notes.get((step.rank, step.step, place), [])
        ranks = list(dict.fromkeys(text for text in told if text.startswith("rank ")))
        others = [text for text in dict.fromkeys(told) if not text.startswith("rank ")]
        if ranks:
            others.append(f"through a collective it reached {', '.join(ranks[:8])}{' and more' if len(ranks) > 8 else ''}")
        found.append(None if place in dropped else dataclasses.replace(one, notes=(*one.notes, *others)))
    return dataclasses.replace(step, anomalies=tuple(found))  # type: ignore[arg-type]  # places stay what they are


TRAINED = frozenset({"loss", "gradients", "parameters", "other ranks"})


def settled_against(found: Sequence[Anomaly], baseline: str | Path, capture: Capture) -> tuple[list[Anomaly], list[str]]:
    """Compare each anomaly with its call in a baseline (whole, or ``--include`` of these calls); return anomalies and notes.

    - the same numbers there, and nothing lasting got the bad ones: *harmless*, this run loses nothing against that one
    - other numbers of the same inputs: *accuracy-relevant*
    - its inputs differ already, or it is not there: as it was, and why

    Raises TrueupError if the baseline cannot be read.
    """
    result = compare(baseline, capture.path)
    names = ["rank", "seq_candidate", "state", "role", "error_in", "error_out", "expected"]
    places = {(row["rank"], row["seq_candidate"]): row for row in result.matched.select(names).to_pylist()}
    told = [_told(one, places.get((one.place.rank, one.place.seq))) for one in found]
    return told, [f"{result.counts.get('compared', 0):,} calls were compared with {baseline}"]


def _told(one: Anomaly, row: dict[str, Any] | None) -> Anomaly:
    if one.place.seq < 0 or one.kind in ("input", "parameters", "loss_scale"):
        return one
    if row is None:
        return dataclasses.replace(one, because=f"{one.because}; the baseline has no such call", run_next="")
    if row["state"] in ("equal", "agrees"):
        same = "the baseline's call gives the same"
        if one.matters == "accuracy-relevant" or (one.matters == "unknown" and TRAINED & set(one.reached)):
            return dataclasses.replace(one, because=f"{one.because}; {same}, so it is not this device's doing", run_next="")
        return dataclasses.replace(
            one, matters="harmless", transient=True, because=f"{same}: this run loses nothing against it", run_next=""
        )  # fmt: skip
    error = float(row["error_in"] or 0.0)
    if row["state"] == "deviates" and row["role"] != "victim" and np.isfinite(error):
        size = f"by {sci(float(row['error_out']))} (relative L2), where {sci(float(row['expected']))} is explained"
        because = f"the baseline's call gives different numbers from the same inputs, {size}"
        return dataclasses.replace(one, matters="accuracy-relevant", because=because, transient=False, run_next="")
    why = "what it reads is not what the baseline's call reads" if row["state"] == "deviates" else "it cannot be compared"
    return dataclasses.replace(one, because=f"{one.because}; against the baseline: {why}", run_next="")
