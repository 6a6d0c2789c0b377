"""What a capture or a report has to say to a tracker of experiments: curves by step, findings, facts about the run.

    capture    loss, gradient_norm, tensors_with_nan, tensors_with_inf; the first call that overflowed, where one did
    monitored  every series of its first rank
    report     loss and gradient_norm of both runs; of the candidate: calls_that_deviate, largest_error (how many times the error
               that rounding explains); the verdict and its culprits

It is written where people look, without a server: each tracker's own library writes, and what it wrote stays on this machine.

    tensorboard    DIR/<run>/events.out.tfevents.*       scalars by step; verdict and findings as text
    openmetrics    DIR/trueup.prom                       gauges with labels run and step, for Prometheus' textfile collector, too
    wandb          DIR/wandb/offline-run-*               `wandb sync` sends them, if you want
    mlflow         DIR/<experiment>/<run>                metrics, parameters, tags
"""

from __future__ import annotations

import importlib.util
import io
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from trueup.foundation.progress import advance, variable_set
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.durable import write_file
from trueup.foundation.store.layout import MANIFEST, MONITOR
from trueup.foundation.words.wording import clean

VERDICT = "verdict.json"
LOSS, NORM = "loss", "gradient_norm"
PLACE = ("rank", "step", "phase", "scope", "op")
MOST = 20  # findings that are told

TRACKERS = ("tensorboard", "openmetrics", "wandb", "mlflow")
PROM = "trueup.prom"
EVENTS = "events.out.tfevents.0000000000.trueup"
PROJECT = "trueup"
MOST_SAMPLES = 1000  # of a curve in an OpenMetrics file, where each step is a time series of its own
AT_ONCE = 1000  # metrics that MLflow takes in one call
ALLOWED = "MLFLOW_ALLOW_FILE_STORE"  # MLflow 3.7 and later write files only where this is set


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


def write(found: Metrics, tracker: str, directory: Path) -> tuple[Path, str]:
    """Write metrics for one of `TRACKERS`; returns the file or folder, and a command that shows it. Raises TrueupError if the
    directory cannot be written."""
    writers = {"tensorboard": _tensorboard, "openmetrics": _openmetrics, "wandb": _wandb, "mlflow": _mlflow}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return writers[tracker](found, directory)
    except OSError as error:
        raise TrueupError(
            f"Metrics cannot be written.\n  where:    {error.filename or directory}\n"
            f"  expected: a folder that can be made and written\n  got:      {error.strerror or error}\n"
            "  next:     name another one with -o"
        ) from None


def needed(tracker: str) -> None:
    """Raise TrueupError, with what to install, where a tracker's library is missing."""
    if tracker != "openmetrics" and importlib.util.find_spec(tracker) is None:
        raise TrueupError(f"{tracker} is not installed, which writes its files.\n  next:     pip install 'trueup[{tracker}]'")


def _in_steps(series: Mapping[str, Series]) -> Iterator[tuple[int, dict[str, float]]]:
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for name, one in series.items():
        for step, value in zip(one.steps.tolist(), one.values.tolist(), strict=True):
            rows[step][name] = value
    yield from sorted(rows.items())


def _text(one: Told) -> str:
    return "\n\n".join(filter(None, [one.sentence, *(f"{k}. {held.sentence}" for k, held in enumerate(one.findings, 1))]))


# ---------------------------------------------------------------- TensorBoard
def _tensorboard(found: Metrics, directory: Path) -> tuple[Path, str]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.record_writer import RecordWriter

    now = time.time()
    text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    for one in found.runs:
        told = {"verdict": _text(one), "run": "\n".join(f"- {name}: {value}" for name, value in one.facts.items())}
        rows: list[tuple[int, list[Any]]] = [
            (step, [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])
            for step, numbers in _in_steps(one.series)
        ]
        rows += [
            (0, [Summary.Value(tag=tag, metadata=text, tensor=TensorProto(dtype=DT_STRING, string_val=[value.encode()]))])
            for tag, value in told.items()
            if value
        ]
        events = [Event(wall_time=now, file_version="brain.Event:2")]
        events += [Event(wall_time=now, step=step, summary=Summary(value=values)) for step, values in rows]
        # RecordWriter, for EventFileWriter imports TensorFlow where it is installed, which takes ten seconds
        file = io.BytesIO()
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
        (directory / one.name).mkdir(exist_ok=True)
        write_file(directory / one.name / EVENTS, [file.getvalue()])  # of one name: an earlier export does not stand beside it
    return directory, f"tensorboard --logdir {directory}"


# ---------------------------------------------------------------- OpenMetrics
def _openmetrics(found: Metrics, directory: Path) -> tuple[Path, str]:
    samples: defaultdict[str, list[str]] = defaultdict(list)
    for one in found.runs:
        for name, series in one.series.items():
            if "/" in name:  # a layer's
                continue
            steps, values = series.steps.tolist(), series.values.tolist()
            stride = math.ceil(len(steps) / MOST_SAMPLES)
            for at in sorted({*range(0, len(steps), stride), len(steps) - 1}):  # the last one always
                samples[name].append(_sample(values[at], run=one.name, step=str(steps[at])))
        samples["run_info"].append(_sample(1, run=one.name, **one.facts))
        for state, count in one.counts.items():
            samples["calls"].append(_sample(count, run=one.name, state=state))
        for word in ("aligned", "deviates", "inconclusive") if one.verdict else ():
            samples["verdict"].append(_sample(float(word == one.verdict), run=one.name, verdict=word))
        for number, held in enumerate(one.findings, 1):
            shown = _as_text(held, number)
            samples["finding"].append(_sample(1.0 if held.ratio is None else held.ratio, run=one.name, **shown))
    lines = [line for name, told in samples.items() for line in (f"# HELP trueup_{name} {_help(name)}", *_family(name, told))]
    write_file(directory / PROM, ["\n".join([*lines, "# EOF", ""]).encode("utf-8", "replace")])
    return directory / PROM, f"node_exporter --collector.textfile.directory {directory}"


HELP = {
    "loss": "Loss by step, as recorded.",
    "gradient_norm": "Root of the summed squares of all gradients by step; trueup_run_info says of which.",
    "tensors_with_nan": "Tensors with NaN by step.",
    "tensors_with_inf": "Tensors with infinities by step.",
    "calls_that_deviate": "Calls by step whose outputs are further apart than rounding explains.",
    "largest_error": "Largest error of a call by step, in multiples of what rounding explains.",
    "run_info": "What the run was.",
    "calls": "Calls of the comparison by state.",
    "verdict": "1 at the verdict.",
    "finding": "What is wrong; the value is the error in multiples of what rounding explains, 1 where there is no such number.",
}


def _help(name: str) -> str:
    return HELP.get(name) or f"{kind_of(name).meaning}, by step."


def _family(name: str, told: list[str]) -> list[str]:
    return [f"# TYPE trueup_{name} gauge", *(f"trueup_{name}{one}" for one in told)]


def _sample(value: float, **labels: str) -> str:
    escaped = {name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in labels.items()}
    number = "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf") if math.isinf(value) else repr(value)
    inside = ",".join(f'{name}="{text}"' for name, text in escaped.items())
    return f"{{{inside}}} {number}"


def _as_text(held: Finding, number: int) -> dict[str, str]:
    return {"finding": str(number), **held.facts, "sentence": held.sentence.splitlines()[0] if held.sentence else ""}


# ---------------------------------------------------------------- Weights & Biases
def _wandb(found: Metrics, directory: Path) -> tuple[Path, str]:
    import wandb

    quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
    for one in found.runs:
        run = wandb.init(
            project=PROJECT, name=one.name, mode="offline", dir=str(directory), config=dict(one.facts), notes=_text(one) or None,
            group=directory.resolve().name, settings=quiet,
        )  # fmt: skip
        for step, numbers in _in_steps(one.series):
            run.log(numbers, step=step)
        run.summary.update(_summary(one))
        run.finish()
    return directory / "wandb", f"wandb sync {directory}/wandb/offline-run-*, which sends them"


def _summary(one: Told) -> dict[str, Any]:
    told: dict[str, Any] = {f"calls/{state}": count for state, count in one.counts.items()}
    told |= {"verdict": one.verdict} if one.verdict else {}
    return told | {f"finding/{number}": held.sentence for number, held in enumerate(one.findings, 1)}


# ---------------------------------------------------------------- MLflow
LONGEST = 5000  # characters that MLflow keeps of a tag


def _mlflow(found: Metrics, directory: Path) -> tuple[Path, str]:
    with variable_set(ALLOWED, "true"):
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=directory.resolve().as_uri())
        held = client.get_experiment_by_name(PROJECT)
        experiment = client.create_experiment(PROJECT) if held is None else held.experiment_id
        for one in found.runs:
            run = client.create_run(experiment, run_name=one.name).info.run_id
            now = int(time.time() * 1000)
            metrics = [Metric(name, value, now, step) for step, row in _in_steps(one.series) for name, value in row.items()]
            for start in range(0, len(metrics), AT_ONCE):
                client.log_batch(run, metrics=metrics[start : start + AT_ONCE])
            tags = {"mlflow.note.content": _text(one), **{k.replace("/", "."): str(v) for k, v in _summary(one).items()}}
            client.log_batch(
                run, params=[Param(name, text[:LONGEST]) for name, text in one.facts.items()],
                tags=[RunTag(name, text[:LONGEST]) for name, text in tags.items() if text],
            )  # fmt: skip
            client.set_terminated(run)
    return directory, f"{ALLOWED}=true mlflow ui --backend-store-uri {directory}"
