"""What a capture or a report has to say to a tracker of experiments: curves by step, findings, facts about the run.

    capture    loss, gradient_norm, tensors_with_nan, tensors_with_inf; the first call that overflowed, where one did
    monitored  every series of its first rank
    report     loss and gradient_norm of both runs; of the candidate: calls_that_deviate, largest_error (how many times the error
               that rounding explains); the verdict and its culprits
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trueup.analysis.audit.reading import stream_of
from trueup.analysis.curves.run import Series, of_capture
from trueup.analysis.monitor.kinds import kind_of
from trueup.analysis.triage.running import losses_of
from trueup.comparison.result.gradients import Norm, norms_of, over_steps
from trueup.exchange.curves.files import LARGEST
from trueup.foundation.model import TrueupError
from trueup.foundation.progress import advance
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.layout import MANIFEST, MONITOR
from trueup.foundation.words.wording import clean

VERDICT = "verdict.json"
LOSS, NORM = "loss", "gradient_norm"
PLACE = ("rank", "step", "phase", "scope", "op")
MOST = 20  # findings that are told


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: a culprit, the first overflow."""

    sentence: str
    facts: Mapping[str, str] = field(default_factory=dict)  # rank, step, phase, scope, op, source
    ratio: float | None = None  # how many times the error that rounding explains


@dataclass(frozen=True)
class Told:
    """One run, as a tracker has it."""

    name: str
    series: Mapping[str, Series]
    facts: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""  # aligned, deviates, inconclusive; of a capture alone: empty
    sentence: str = ""
    findings: Sequence[Finding] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Metrics:
    """All runs of one capture (one) or report (two), and what could not be told."""

    runs: Sequence[Told]
    notes: Sequence[str] = ()


def read(source: Path) -> Metrics:
    """Return what a capture or a report's folder (or its verdict.json) tells. Raises TrueupError if it is neither, or cannot be
    read, or tells no number and no finding."""
    if (source / MANIFEST).is_file():
        capture = open_capture(source)
        found = _of_monitored(capture) if MONITOR in capture.root else _of_capture(capture)
    elif source.name == VERDICT and source.is_file():
        found = _of_report(source)
    elif (source / VERDICT).is_file():
        found = _of_report(source / VERDICT)
    else:
        got = "another folder" if source.is_dir() else "another file" if source.exists() else "nothing by this name"
        raise TrueupError(
            f"There is nothing to export.\n  where:    {source}\n  expected: a capture, or a report of trueup compare -o\n"
            f"  got:      {got}\n"
            "  next:     check the path; trueup compare BASE CAND -o DIR writes a report"
        )
    if not any(one.series or one.findings or one.verdict for one in found.runs):
        raise TrueupError(
            f"There is nothing to export.\n  where:    {source}\n  expected: losses, gradient norms or findings\n"
            f"  got:      {'; '.join(['none', *found.notes])}\n  next:     record several steps at detail stats, all phases"
        )
    return found


# ---------------------------------------------------------------- a capture
def _of_monitored(capture: Capture) -> Metrics:
    run, ranks = of_capture(capture), len(capture.ranks)
    facts = _texts({"capture": str(capture.path), "ranks": str(ranks), NORM: kind_of(NORM).meaning})
    notes = [*map(clean, run.notes), *([f"the first of {ranks} ranks is written"] if ranks > 1 else [])]
    return Metrics([Told(capture.path.resolve().name or "run", _held(run.series), facts)], notes)


def _of_capture(capture: Capture) -> Metrics:
    notes = [clean(problem) for problem in capture.problems]
    series = {LOSS: Series.of(losses_of(capture))}
    norms: list[Norm] = []
    bad: dict[str, dict[int, int]] = {"tensors_with_nan": {}, "tensors_with_inf": {}}
    places = sorted(capture.sizes, key=lambda place: place[::-1])
    for done, (rank, step) in enumerate(places):
        advance("reading", "steps", done, len(places))
        norms += norms_of(stream_of(capture, rank, step))
        numbers = capture.records(columns=["n_nan", "n_posinf", "n_neginf"], rank=rank, step=step)
        nan, positive, negative = (_filled(numbers[name]) for name in ("n_nan", "n_posinf", "n_neginf"))
        for name, count in (("tensors_with_nan", nan > 0), ("tensors_with_inf", positive + negative > 0)):
            bad[name][step] = bad[name].get(step, 0) + int(np.count_nonzero(count))
    told, way = over_steps(norms, len(capture.ranks))
    series[NORM] = Series.of(told)
    notes += [] if len(series[LOSS].steps) else ["no loss was recorded: what backward() was called on, with statistics"]
    notes += [] if told else [way]
    series |= {name: Series.of({step: float(count) for step, count in counts.items()}) for name, counts in bad.items()}
    findings = _overflows(capture) if any(map(any, (counts.values() for counts in bad.values()))) else []
    first = next(iter(capture.ranks.values()), {})
    facts = {
        "capture": str(capture.path), "framework": str(first.get("framework", "")), "ranks": str(len(capture.ranks)),
        "devices": ", ".join(dict.fromkeys(str(one) for rank in capture.ranks.values() for one in rank.get("devices", ()))),
        "gradient_norm": way,
    }  # fmt: skip
    sentence = findings[0].sentence if findings else ""
    run = Told(capture.path.resolve().name or "run", _held(series), _texts(facts), "", sentence, findings)
    return Metrics([run], notes)


def _filled(column: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(column.fill_null(0).to_numpy(), np.int64)


def _overflows(capture: Capture) -> list[Finding]:
    from trueup.analysis.anomalies import overflow

    found = overflow(capture.path).anomalies
    return [
        Finding(clean(one.sentence), _texts({name: str(getattr(one.place, name)) for name in PLACE})) for one in found[:MOST]
    ]


# ---------------------------------------------------------------- a report
Number = float | str  # verdict.json writes NaN and infinities as text


class _Loss(msgspec.Struct):
    step: int
    loss: Number


class _Norm(msgspec.Struct):
    step: int
    norm: Number


class _Run(msgspec.Struct):
    path: str = ""
    framework: str = ""
    devices: list[str] = []
    ranks: int = 1
    losses: list[_Loss] = []
    gradient_norms: list[_Norm] = []
    gradient_source: str = ""


class _Culprit(msgspec.Struct):
    rank: int
    step: int
    phase: str
    scope: str
    op: str
    sentence: str = ""
    source: str | None = None
    ratio: Number | None = None


class _Verdict(msgspec.Struct):
    schema: str
    verdict: str
    sentence: str
    baseline: _Run
    candidate: _Run
    culprits: list[_Culprit] = []
    counts: dict[str, int] = {}
    notes: list[str] = []


def _of_report(file: Path) -> Metrics:
    held, notes = _verdict(file), []
    more, lacking = _by_step(file.parent / "calls.parquet")
    if lacking:
        notes.append(lacking)
    if len(held.culprits) > MOST:
        notes.append(f"the first {MOST} of {len(held.culprits):,} culprits are told")
    findings = [_finding(one) for one in held.culprits[:MOST]]
    runs = [
        Told("baseline", _held(_curves(held.baseline)), _facts(held.baseline)),
        Told(
            "candidate", _held({**_curves(held.candidate), **more}), _facts(held.candidate), clean(held.verdict),
            clean(held.sentence), findings, {state: count for state, count in held.counts.items() if state != "steps"},
        ),
    ]  # fmt: skip
    return Metrics(runs, [*notes, *map(clean, held.notes)])


def _verdict(file: Path) -> _Verdict:
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= LARGEST else b""
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from None
    if size > LARGEST:
        raise _unreadable(file, f"{size >> 20} MB, more than {LARGEST >> 20}")
    try:
        found = msgspec.json.decode(data, type=_Verdict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(file, str(error)) from None
    if found.schema != "trueup-verdict":
        raise _unreadable(file, clean(found.schema)[:80])
    return found


def _unreadable(file: Path, got: str) -> TrueupError:
    return TrueupError(
        f"The report cannot be read.\n  where:    {file}\n  expected: what trueup compare -o writes\n  got:      {got}\n"
        "  next:     compare again with -o DIR"
    )


def _number(value: Number | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except ValueError:
        return math.nan


def _curves(run: _Run) -> dict[str, Series]:
    losses = [(one.step, _number(one.loss)) for one in run.losses]
    return {LOSS: Series.of(losses), NORM: Series.of([(one.step, _number(one.norm)) for one in run.gradient_norms])}


def _facts(run: _Run) -> dict[str, str]:
    return _texts({
        "capture": run.path, "framework": run.framework, "devices": ", ".join(run.devices), "ranks": str(run.ranks),
        "gradient_norm": run.gradient_source,
    })  # fmt: skip


def _finding(one: _Culprit) -> Finding:
    facts = {name: str(getattr(one, name)) for name in PLACE}
    return Finding(clean(one.sentence), _texts({**facts, "source": one.source or ""}), _number(one.ratio))


def _by_step(file: Path) -> tuple[dict[str, Series], str]:
    """Return how many calls deviate in each step and by how much at most, or why that is not known."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(file, columns=["step", "state", "ratio"])
        steps, ratio = table["step"].to_numpy(), table["ratio"].to_numpy()
        deviates = np.asarray([state == "deviates" for state in table["state"].to_pylist()], bool)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        return {}, f"{file.name} cannot be read: no calls by step ({clean(str(error))[:120]})"
    counts: defaultdict[int, int] = defaultdict(int)
    largest: dict[int, float] = {}
    for step in np.unique(steps).tolist():
        here = (steps == step) & deviates
        counts[step] = int(np.count_nonzero(here))
        told = ratio[here & np.isfinite(ratio)]
        largest[step] = float(told.max()) if told.size else 0.0
    return {"calls_that_deviate": Series.of({k: float(v) for k, v in counts.items()}), "largest_error": Series.of(largest)}, ""


def _held(series: Mapping[str, Series]) -> dict[str, Series]:
    return {name: one for name, one in series.items() if len(one.steps)}


def _texts(facts: Mapping[str, str]) -> dict[str, str]:
    return {name: clean(text) for name, text in facts.items() if text}
