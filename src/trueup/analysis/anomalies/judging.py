"""`trueup.overflow`: one capture in, one `OverflowResult` out.

A collective is the same call on all its members: same step, operator, ordinal and group. If a rank got bad numbers for clean
ones, a recorded rank that gave bad ones is their source; if none gave any, the communication made them (a sum in float16
overflows); if a member was not recorded, the origin is unknown. A second, trusted run can tell whether bad numbers matter: are
its numbers the same?

Finite numbers in trouble: gradients that underflow, vanish or explode, by layer; and what a narrower dtype could not hold.

The first three are asked of steps without NaN and Inf, with limits that a healthy training never meets. The last is asked of a
healthy run in a wider dtype, before migrating: a result overflows if its largest magnitude exceeds the narrower dtype's; a
forward result underflows if its root mean square without zeros is below the smallest normal number. A number among its call's
arguments, an infinity and the wider dtype's largest number are masks, which fit: -1e9 becomes -Inf. Small gradients are no
finding, as a loss scale lifts them (`Gradients`). Optimizer results are not asked: they stay in float32 (Micikevicius et al.
2018, Mixed Precision Training, section 3.1).
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trueup.analysis.anomalies import flow
from trueup.analysis.anomalies.classifying import classify_stream
from trueup.analysis.anomalies.effects import (
    Memory,
    Run,
    Sites,
    in_order,
    led_to,
    place_of,
    policy_row,
    repetitions,
    scale_findings,
    settle,
    slots_of,
)
from trueup.analysis.anomalies.flow import maker, unmeasured
from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, distinct
from trueup.comparison.result.comparing import compare
from trueup.foundation.facts.anomaly import Anomaly, Crossing, Kind, OverflowResult, OverflowWord, ScaleStep, StepAnomalies
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import is_output
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import held_by, list_of
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.anomaly_sentence import loss_scale, verdict_lines
from trueup.foundation.words.wording import counted, number, one_line, sci

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


SUBNORMAL_SHARE = 0.5
"""Subnormal share of a step's nonzero gradient elements from which it underflows. In Micikevicius et al. 2018 (Mixed Precision
Training, section 3.2) a network with two thirds below float16's normal numbers did not train without a loss scale."""
ENOUGH = 64  # elements below which a share says nothing
EXPLODES = 1e4  # times by which the norm of a parameter's gradient grows from one recorded step to the next
LARGE = 1e3  # norm below which a gradient has not exploded, however small it was
VANISHES = 1e-12
"""Norm of a layer's gradient over the step's largest: 2**-40, beyond what float32 adds to a weight at one step size."""
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
NAMED = 3  # calls that are named beside the first


@dataclass(slots=True)
class Magnitudes:
    """Of one rank, from step to step."""

    manifest: Mapping[str, Any] = field(default_factory=dict)  # of the rank: what its optimizers are set to
    before: dict[tuple[str, str, int, str], float] = field(default_factory=dict)
    _found: dict[Kind, Anomaly] = field(default_factory=dict)  # the first of each kind
    # Further calls: every layer shows a too small scale
    _others: defaultdict[Kind, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def step(self, stream: Stream, sites: Sites) -> None:
        """Look at the gradients of a step."""
        slots = _gradients(stream)
        if not len(slots):
            return
        self._underflow(stream, slots, sites)
        self._by_layer(stream, slots, sites)

    def findings(self) -> list[Anomaly]:
        """Return the first call of each kind, with how many others there are."""
        return [self._told(kind, one) for kind, one in self._found.items()]

    def _told(self, kind: Kind, one: Anomaly) -> Anomaly:
        others = list(self._others[kind])
        if not others:
            return one
        shown = ", ".join(others[:NAMED]) + (" ..." if len(others) > NAMED else "")
        return dataclasses.replace(one, notes=(*one.notes, f"likewise in {counted(len(others), 'other call')}: {shown}"))

    def _underflow(self, stream: Stream, slots: Numbers, sites: Sites) -> None:
        narrow = np.isin(stream.dtype[slots], [stream.names.number(name) for name in NARROW])
        chosen = slots[narrow]
        if not len(chosen):
            return
        subnormal = np.nan_to_num(stream.number("n_subnormal")[chosen])
        filled = stream.numel[chosen] - np.nan_to_num(stream.number("n_zero")[chosen])
        share = subnormal.sum() / max(filled.sum(), 1)
        if filled.sum() < ENOUGH or share <= SUBNORMAL_SHARE:
            return  # of one layer it may be rounding: the gradient of a key's bias, which no softmax feels, is zero in exact terms
        for k in chosen[np.argsort(-subnormal, kind="stable")].tolist():
            text = (
                f"{share:.0%} of the elements of this step's {stream.dtype_of(k)} gradients that are not zero are subnormal, most "
                "of them in {slot} of this call: they have lost digits, and what is smaller is zero; raise the loss scale"
            )
            self._add("underflow", stream, k, sites, text)
            break

    def _by_layer(self, stream: Stream, slots: Numbers, sites: Sites) -> None:
        names = stream.names
        after: dict[tuple[str, str, int, str], float] = {}
        largest = float(np.max(stream.l2[slots], initial=0.0))
        for k in slots.tolist():
            call = int(stream.call[k])
            key = (names.name(int(stream.scope[call])) or "", names.name(int(stream.op[call])) or "", int(stream.ordinal[call]),
                   names.name(int(stream.slot[k])) or "")  # fmt: skip
            norm = after[key] = float(stream.l2[k])
            was = self.before.get(key, 0.0)
            if was > 0 and norm >= EXPLODES * was and norm >= LARGE:
                text = f"the norm of {{slot}} went from {number(was)} to {number(norm)} since the last recorded step"
                self._add("explodes", stream, k, sites, text)
            elif 0 < norm < VANISHES * largest and stream.numel[k] >= ENOUGH:
                text = f"the norm of {{slot}} is {number(norm)}, where the largest gradient of the step has {number(largest)}"
                self._add("vanishes", stream, k, sites, text)
        self.before = after

    def _add(self, kind: Kind, stream: Stream, k: int, sites: Sites, text: str) -> None:
        call = int(stream.call[k])
        place = place_of(stream, call, sites)
        name = f"{place.scope}/{place.op}" if place.scope else place.op
        if kind in self._found:
            first = self._found[kind].place
            if (first.scope, first.op) != (place.scope, place.op) and len(self._others[kind]) < MOST:
                self._others[kind][name] = None
            return
        slot = stream.names.name(int(stream.slot[k])) or ""
        bits: Array = np.zeros(len(stream.slot), np.uint8)
        said = f"{place.name} ({place.op}): {text.format(slot=slot)}"
        because = "gradients of this size may or may not hold the training up: compare the loss with that of a float32 run"
        because = self._clipped() if kind == "explodes" else because
        self._found[kind] = Anomaly(kind, place, "low", said, slots_of(stream, call, bits), matters="unknown", because=because)

    def _clipped(self) -> str:
        """Say whether what explodes is clipped, and what to do."""
        optimizers = list_of(held_by(self.manifest), "optimizers")
        clips = list(dict.fromkeys(str(one["clipping"]) for one in optimizers if one.get("clipping")))
        if clips:
            return f"gradients are clipped ({', '.join(clips)}), so the step stays small: if the loss does not fall, learn slower"
        seen = "no clipping was recorded" if optimizers else "whether gradients are clipped was not recorded"
        return f"{seen}: clip them, for instance their norm at 1, or lower the learning rate, and see whether the loss falls"


def _gradients(stream: Stream) -> Numbers:
    """Return the gradients that backward calls give, at the level closest to the layers: api, else module, else aten."""
    backward = stream.phase == stream.names.number("backward")
    gives = stream.names.table(is_output)[stream.slot] & stream.measured & ~np.isnan(stream.l2)
    for level in ("api", "module", "aten"):
        chosen = backward & (stream.level == stream.names.number(level))
        slots = np.flatnonzero(chosen[stream.call] & gives)
        if len(slots):
            return np.asarray(slots, np.int64)
    return np.empty(0, np.int64)


DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
WIDER = {name: ("float64", "float32", *(["bfloat16"] if name != "bf16" else []), *(["float16"] if "8" in name else []))
         for name in DTYPES}  # fmt: skip
MOST_DESCRIBED = 50  # calls of one rank and step that are described


def dtype_named(name: str) -> str:
    """Return the dtype that an option names; raises TrueupError if it is none of those."""
    if name not in DTYPES:
        raise TrueupError(
            f"--would-overflow cannot be read.\n  expected: one of {', '.join(DTYPES)}\n  got:      {name!r}\n"
            "  next:     correct it"
        )
    return DTYPES[name]


def would_overflow(stream: Stream, narrower: str, sites: Sites) -> list[Anomaly]:
    """Return the calls of a rank and step whose inputs fit a narrower dtype and whose result does not."""
    dtype = dtype_named(narrower)
    found = flow.limits(dtype)
    assert found is not None
    largest, normal, _ = found
    wide = np.isin(stream.dtype, [stream.names.number(name) for name in WIDER[narrower]])
    magnitude = np.fmax(np.abs(stream.number("min")), np.abs(stream.number("max")))
    masks = np.nan_to_num(stream.number("n_saturated")) + np.nan_to_num(stream.counts).sum(axis=1) > 0
    over = wide & (magnitude > largest) & ~masks
    gives = stream.names.table(is_output)[stream.slot]
    with np.errstate(divide="ignore", invalid="ignore"):
        filled = stream.numel - np.nan_to_num(stream.number("n_zero"))
        rms = stream.l2 / np.sqrt(np.maximum(filled, 1))
    forward = np.isin(stream.phase, [stream.names.number(name) for name in ("forward", "recompute")])[stream.call]
    over &= ~(stream.phase == stream.names.number("optimizer"))[stream.call]
    under = wide & forward & gives & (rms < normal) & (rms > 0)
    asked = _asked_for(stream, over & gives, magnitude)
    made: list[Anomaly] = []
    for kind, slots in (("would_overflow", np.flatnonzero(over & gives & ~asked)), ("would_underflow", np.flatnonzero(under))):
        bad = over if kind == "would_overflow" else under
        calls = _first_calls(stream, slots, bad)
        calls = [c for c in calls if not has(stream.names.name(int(stream.op[c])) or "", "view")]
        for call in calls[:MOST_DESCRIBED]:
            made.append(_described(stream, call, kind, bad, dtype, (largest, normal), (magnitude, rms), sites, len(calls)))
    return made


class Gradients:
    """Typical magnitudes of the gradients of a run, and the loss scale that a narrower dtype asks for."""

    def __init__(self) -> None:
        self._rms: list[Array] = []
        self._largest = 0.0

    def add(self, stream: Stream, narrower: str) -> None:
        """Take the gradients of a rank and step; raises TrueupError if the dtype is none of those that are known."""
        dtype_named(narrower)
        wide = np.isin(stream.dtype, [stream.names.number(name) for name in WIDER[narrower]])
        backward = (stream.phase == stream.names.number("backward"))[stream.call]
        slots = np.flatnonzero(wide & backward & stream.names.table(is_output)[stream.slot] & (stream.l2 > 0))
        filled = np.maximum(stream.numel[slots] - np.nan_to_num(stream.number("n_zero")[slots]), 1)
        self._rms.append(stream.l2[slots] / np.sqrt(filled))
        magnitude = np.fmax(np.abs(stream.number("min")[slots]), np.abs(stream.number("max")[slots]))
        self._largest = max(self._largest, float(np.nanmax(magnitude, initial=0.0)))

    def said(self, narrower: str) -> str:
        """Say how many are too small and which loss scale lifts nine of ten; empty where a tenth of them or less is."""
        dtype = dtype_named(narrower)
        limits = flow.limits(dtype)
        rms = np.concatenate(self._rms) if self._rms else np.empty(0)
        if limits is None or not len(rms) or not (tenth := float(np.quantile(rms, 0.1))) < limits[1]:
            return ""
        power = math.ceil(math.log2(limits[1] / tenth))
        room = math.floor(math.log2(limits[0] / self._largest)) if self._largest > 0 else power
        small = int(np.count_nonzero(rms < limits[1]))
        text = f"{small:,} of {counted(len(rms), 'gradient')} are typically below the smallest normal {dtype}"
        lifts = f"{text}: a loss scale of 2**{power} lifts nine of ten"
        return lifts if power <= room else f"{lifts}, and beyond 2**{room} the largest overflows"


def _asked_for(stream: Stream, over: Array, magnitude: Array) -> Array:
    """Tell which results have a number of their call's arguments as their largest (a fill), or only pass one on."""
    found = np.zeros(len(stream.slot), bool)
    for k in np.flatnonzero(over).tolist():
        call = int(stream.call[k])
        size = float(magnitude[k])
        if any(abs(abs(one) - size) <= 0.01 * size for one in flow.numbers_of(stream.value(int(stream.arguments[call])))):
            found[k] = True
            continue
        made = [maker(stream, j) for j in range(*stream.starts[call : call + 2].tolist())]
        found[k] = any(j != NONE and found[j] for j in made)
    return found


def _first_calls(stream: Stream, slots: Numbers, bad: Array) -> list[int]:
    """Return, in order, calls of which no input is out of range yet and that hold no such call inside."""
    reads = ~stream.names.table(is_output)[stream.slot]
    carried = np.zeros(len(stream), bool)
    carried[stream.call[bad & reads]] = True
    calls = [c for c in distinct(stream.call[slots]).tolist() if not carried[c]]
    around = {outer for c in calls for outer in stream.around(c)}
    return [c for c in calls if c not in around]


def _described(
    stream: Stream, call: int, kind: str, bad: Array, dtype: str, limits: tuple[float, float], sizes: tuple[Array, Array],
    sites: Sites, calls: int,
) -> Anomaly:  # fmt: skip
    slots = [k for k in range(*stream.starts[call : call + 2].tolist()) if bad[k]]
    place = place_of(stream, call, sites)
    if kind == "would_overflow":
        size = max(float(sizes[0][k]) for k in slots)
        what = f"its result reaches {number(size)}, beyond the largest {dtype} ({number(limits[0])})"
    else:
        size = min(float(sizes[1][k]) for k in slots)
        what = f"its result is typically {number(size)}, below the smallest normal {dtype} ({number(limits[1])})"
    name = f"{place.name} ({' / '.join(n for n in dict.fromkeys((place.api, place.op)) if n)})"
    bits = np.zeros(len(stream.slot), np.uint8)
    made = Anomaly(
        "would_overflow" if kind == "would_overflow" else "would_underflow", place, "high" if kind == "would_overflow" else "low",
        f"{name}: {what}", slots_of(stream, call, bits), led_to(stream, call, bits, sites), matters="unknown",
        because=(
            "the run itself is healthy; run this call in float32 when the rest is narrower, or scale what goes into it"
            if kind == "would_overflow" else "the run itself is healthy; a wider dtype holds what this call gives"
        ),
        notes=(f"{calls:,} such calls in this rank and step",) if calls > 1 else (),
    )  # fmt: skip
    return dataclasses.replace(made, policy=policy_row(made).replace('"float64"', '"float32"'))
