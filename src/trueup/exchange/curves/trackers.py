"""Writing metrics where people look, without a server: each tracker's own library writes, and what it wrote stays on this machine.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trueup.analysis.curves.run import Series
from trueup.analysis.monitor.kinds import kind_of
from trueup.exchange.curves.metrics import Finding, Metrics, Told
from trueup.foundation.environment import variable_set
from trueup.foundation.model import TrueupError
from trueup.foundation.store.durable import write_file

TRACKERS = ("tensorboard", "openmetrics", "wandb", "mlflow")
PROM = "trueup.prom"
EVENTS = "events.out.tfevents.0000000000.trueup"
PROJECT = "trueup"
MOST_SAMPLES = 1000  # of a curve in an OpenMetrics file, where each step is a time series of its own
AT_ONCE = 1000  # metrics that MLflow takes in one call
ALLOWED = "MLFLOW_ALLOW_FILE_STORE"  # MLflow 3.7 and later write files only where this is set


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


def _by_step(series: Mapping[str, Series]) -> Iterator[tuple[int, dict[str, float]]]:
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
            for step, numbers in _by_step(one.series)
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
            shown = _finding(held, number)
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


def _finding(held: Finding, number: int) -> dict[str, str]:
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
        for step, numbers in _by_step(one.series):
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
            metrics = [Metric(name, value, now, step) for step, row in _by_step(one.series) for name, value in row.items()]
            for start in range(0, len(metrics), AT_ONCE):
                client.log_batch(run, metrics=metrics[start : start + AT_ONCE])
            tags = {"mlflow.note.content": _text(one), **{k.replace("/", "."): str(v) for k, v in _summary(one).items()}}
            client.log_batch(
                run, params=[Param(name, text[:LONGEST]) for name, text in one.facts.items()],
                tags=[RunTag(name, text[:LONGEST]) for name, text in tags.items() if text],
            )  # fmt: skip
            client.set_terminated(run)
    return directory, f"{ALLOWED}=true mlflow ui --backend-store-uri {directory}"
