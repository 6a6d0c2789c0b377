"""One run or several out of a file or a folder, by what it holds.

    events.out.tfevents.*         TensorBoard: a file, or the folder that holds it
    trainer_state.json            Hugging Face: a file, or an output folder (its last checkpoint)
    metrics/loss                  MLflow: the folder of a run, whose files hold `timestamp value step`
    *.csv, *.tsv                  a column a number; W&B's export (`run - loss`); MLflow's (`run, key, value, step`)
    *.json, *.jsonl               rows, or columns; W&B's history, MMEngine's scalars.json
    anything else                 a log, by its lines
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trueup.analysis.curves.run import Run, Series, of_capture, plain
from trueup.exchange.curves import lines
from trueup.exchange.curves.lines import Numbers
from trueup.exchange.readers import messages
from trueup.exchange.readers.dump import Notes, Tree, UnreadableError
from trueup.exchange.readers.tfdbg2 import records
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.foundation.store.layout import MANIFEST

LARGEST = 1 << 28  # bytes of a JSON document, which is read whole
MOST_FILES = 4096  # series of an MLflow run
STEPS = (
    "step", "global_step", "_step", "iteration", "iter", "steps", "trainer_global_step", "current_iteration", "curr_iter",
    "current_steps", "num_updates", "batch", "epoch",
)  # fmt: skip
"""Names of a step, as `plain` writes them, the likeliest first."""
LONG = {"step": ("step",), "value": ("value",), "key": ("key", "metric", "metrickey"), "run": ("name", "run", "runname", "runid")}
"""Names in a row of one number, as `plain` writes them without ``_``."""
EVENTS = "events.out.tfevents"


def read(source: Path, patterns: Sequence[str] = ()) -> list[Run]:
    """Return the runs that a file or folder holds: mostly one. ``patterns`` read a log's lines in place of the known ones. Raises
    TrueupError if it cannot be read or holds no curve."""
    own = lines.patterns(patterns)
    try:
        if source.is_dir():
            return _folder(source)
        if not source.is_file():
            raise TrueupError(
                f"There is no curve.\n  where:    {source}\n  expected: a capture, a log, a table or a folder of a tracker\n"
                f"  got:      {'no regular file' if source.exists() else 'nothing by this name'}\n  next:     check the path"
            )
        return _file(source, own)
    except (OSError, csv.Error, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TrueupError(f"{source} cannot be read: {why}\n  next:     check its permissions, or what wrote it") from None


def _file(file: Path, own: Sequence[lines.Row]) -> list[Run]:
    suffix = file.suffix.lower()
    if file.name.startswith(EVENTS):
        return [_events([file], file)]
    if not own and suffix in (".csv", ".tsv"):
        return _table(file, "\t" if suffix == ".tsv" else ",")
    if not own and suffix in (".jsonl", ".ndjson"):
        return [_rows(_json_lines(file), file)]
    if not own and suffix == ".json":
        return _json(file)
    if not own and _is_rows(file):
        return [_rows(_json_lines(file), file)]
    found, remarks, counted = lines.numbers(lines.of_file(file), own, file)
    return [_run(file, found, remarks, counted=counted)]


def _folder(folder: Path) -> list[Run]:
    if (folder / MANIFEST).is_file():
        return [of_capture(open_capture(folder))]
    events = sorted(one for one in folder.iterdir() if one.name.startswith(EVENTS) and one.is_file())
    if events:
        return [_events(events, folder)]
    state = folder / "trainer_state.json"
    saved = sorted((one for one in folder.glob("checkpoint-*/trainer_state.json")), key=_checkpoint)
    if state.is_file() or saved:
        return _json(state if state.is_file() else saved[-1])
    metrics = folder / "metrics"
    if metrics.is_dir():
        return [_mlflow(metrics, folder)]
    inside = sorted(one.name for one in folder.iterdir() if one.is_dir())[:8]
    raise TrueupError(
        f"There is no curve.\n  where:    {folder}\n"
        f"  expected: a capture, {EVENTS}.*, trainer_state.json, or metrics/ of an MLflow run\n"
        f"  got:      {', '.join(inside) or 'none of these'}\n"
        f"  next:     name {'one of these folders, or ' if inside else ''}the file itself"
    )


def _checkpoint(state: Path) -> int:
    digits = re.search(r"-(\d{1,12})$", state.parent.name)
    return int(digits[1]) if digits else -1


def _run(
    source: Path, found: Mapping[str, Iterable[tuple[int, float]]], remarks: Sequence[str] = (), name: str = "",
    counted: Mapping[str, Sequence[float]] | None = None,
) -> Run:  # fmt: skip
    series = {key: Series.of(pairs) for key, pairs in found.items()}
    held = {key: one for key, one in series.items() if len(one.steps)}
    if not held:
        raise TrueupError(
            f"There is no curve.\n  where:    {source}\n  expected: numbers by step\n"
            f"  got:      {'; '.join(['none', *remarks[:3]])}\n"
            "  next:     check what wrote it"
        )
    return Run(name or str(source), held, tuple(remarks), counted=counted or {})


def _number(value: Any) -> float | None:
    """Return a value as a number, None of anything else; text as the tools write it: ``NaN``, ``1.5``."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def _step(value: Any) -> int | None:
    found = _number(value)
    return int(found) if found is not None and math.isfinite(found) and abs(found) < 2**62 and found == int(found) else None


def _step_key(names: Iterable[str]) -> str | None:
    by_plain = {plain(name) if name != "_step" else "_step": name for name in names}
    return next((by_plain[known] for known in STEPS if known in by_plain), None)


# ---------------------------------------------------------------- tables
EXPORTED = re.compile(r"(?P<run>.+) - (?P<name>[^-].*?)(?P<bound>__M(?:IN|AX))?")


def _table(file: Path, separator: str) -> list[Run]:
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
        reader = csv.reader(opened, delimiter=separator)
        head = next(reader, [])
        rows = (dict(zip(head, row, strict=False)) for row in reader)
        if (keys := _long_keys(head)) is not None:
            return _long(file, rows, keys)
        step = _step_key(head)
        exported = {name: match for name in head if name != step and (match := EXPORTED.fullmatch(name))}
        if exported and len(exported) >= len(head) - 1:
            return _exported(file, head, reader, step, exported)
        return [_rows(rows, file)]


def _long(file: Path, rows: Iterable[Mapping[str, Any]], keys: Mapping[str, str]) -> list[Run]:
    """Read a row a number: MLflow's export, or its answer; ``keys`` are the rows' names of step, value, key and run."""
    runs: dict[str, Numbers] = {}
    for row in rows:
        step, value = _step(row.get(keys["step"])), _number(row.get(keys["value"]))
        if step is not None and value is not None:
            run, name = str(row.get(keys.get("run", ""), "")), str(row.get(keys["key"]))
            runs.setdefault(run, {}).setdefault(name, []).append((step, value))
    return [_run(file, found, (), f"{file}: {name}" if name else "") for name, found in runs.items()] or [_run(file, {})]


def _long_keys(names: Iterable[str]) -> dict[str, str] | None:
    """Return what a row's names of step, value, key and run are, if it is a row of one number."""
    held = {plain(name).replace("_", ""): name for name in reversed(list(names))}
    found = {what: next((held[name] for name in known if name in held), None) for what, known in LONG.items()}
    kept = {what: name for what, name in found.items() if name is not None}
    return kept if {"step", "value", "key"} <= set(kept) else None


def _exported(
    file: Path, head: Sequence[str], rows: Iterable[Sequence[str]], step: str | None, exported: Mapping[str, re.Match[str]]
) -> list[Run]:  # fmt: skip
    """Read W&B's export of a chart: a column a run, with its least and greatest value beside it."""
    runs: dict[str, Numbers] = {}
    at = head.index(step) if step is not None else None
    columns = [(place, exported[name]) for place, name in enumerate(head) if name in exported and not exported[name]["bound"]]
    for number, row in enumerate(rows, 1):
        where = number if at is None else _step(row[at]) if at < len(row) else None
        for place, match in columns:
            value = _number(row[place]) if place < len(row) and row[place] != "" else None
            if value is not None and where is not None:
                runs.setdefault(match["run"], {}).setdefault(match["name"], []).append((where, value))
    return [_run(file, found, (), f"{file}: {name}") for name, found in runs.items()] or [_run(file, {})]


def _rows(rows: Iterable[Mapping[str, Any]], source: Path, remarks: Sequence[str] = ()) -> Run:
    """Read a mapping a row: each number by the row's step; rows without one are counted by name."""
    found: Numbers = {}
    counted: dict[str, Sequence[float]] = {}
    for row in rows:
        key = _step_key(row)
        step = None if key is None else _step(row[key])
        for name, held in row.items():
            value = _number(held)
            if name == key or value is None:
                continue
            into = found.setdefault(str(name), [])
            if step is None:
                counted[str(name)] = ()
            into.append((len(into) + 1 if step is None else step, value))
    told = ["rows are counted where they have no step"] if counted else []
    return _run(source, found, [*remarks, *told], counted=counted)


# ---------------------------------------------------------------- JSON
def _json_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8", errors="replace") as opened:
        while text := opened.readline(1 << 20):
            try:
                row = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError):  # the last line of a killed run
                continue
            if isinstance(row, dict):
                yield row


def _is_rows(file: Path) -> bool:
    """Tell whether a file begins with a line that is JSON, whatever its name says: log.txt of DeiT and MAE."""
    with file.open(encoding="utf-8", errors="replace") as opened:
        first = opened.readline(1 << 20)
    try:
        return first.startswith("{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json(file: Path) -> list[Run]:
    size = file.stat().st_size
    if size > LARGEST:
        got = f"  got:      {size >> 20} MB"
        raise TrueupError(f"{file} is too large.\n  expected: at most {LARGEST >> 20} MB\n{got}\n  next:     write .jsonl")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        rows = list(_json_lines(file))  # a row a line, whatever its name says: MMEngine's scalars.json
        return [_rows(rows, file, () if rows else [f"its JSON ends too early or is broken: {error}"])]
    if isinstance(held, dict):
        listed = [one for one in held.values() if _is_listed(one)]  # log_history of trainer_state.json, metrics of MLflow's answer
        if len(listed) != 1:
            return [_columns(held, file)]
        held = listed[0]
    if _is_listed(held):
        keys = _long_keys(held[0])
        return [_rows(held, file)] if keys is None else _long(file, held, keys)
    pairs = isinstance(held, list) and all(isinstance(row, list) and len(row) == 3 for row in held)
    if pairs:  # TensorBoard's download of a scalar: wall time, step, value
        return [_rows(({"step": row[1], "loss": row[2]} for row in held), file)]
    return [_run(file, {})]


def _is_listed(held: Any) -> bool:
    return isinstance(held, list) and bool(held) and all(isinstance(row, dict) for row in held)


def _columns(held: Mapping[str, Any], file: Path) -> Run:
    """Read a list of numbers a name, with a list of steps, or a mapping from step to number; either may be its ``values``."""
    key = _step_key(held)
    steps = [_step(one) for one in held[key]] if key is not None and isinstance(held[key], list) else None
    found: Numbers = {}
    for name, column in held.items():
        if name == key:
            continue
        pairs: Iterable[tuple[Any, Any]] = ()
        own = steps
        if isinstance(column, dict) and isinstance(column.get("values"), (dict, list)):  # Megatron-LM's golden values
            first, apart = _step(column.get("start_step", 1)), _step(column.get("step_interval", 1))
            column = column["values"]
            own = None if first is None or not apart else list(range(first, first + apart * len(column), apart))
        if isinstance(column, dict):
            pairs = ((_step(at), value) for at, value in column.items())
        elif isinstance(column, list):
            pairs = zip(own or range(1, len(column) + 1), column, strict=False)
        kept = [(at, number) for at, value in pairs if at is not None and (number := _number(value)) is not None]
        if kept:
            found[name] = kept
    return _run(file, found)


# ---------------------------------------------------------------- TensorBoard, MLflow
def _events(files: Sequence[Path], source: Path) -> Run:
    messages.require("trueup[tfdbg]", "TensorBoard's events", "google_crc32c")
    notes = Notes()
    found: Numbers = {}
    for file in files:
        tree = Tree(file, notes)
        for _, data in records(tree, file.name, notes):
            try:
                _scalars(messages.parse("Event", data), found)
            except UnreadableError as error:
                notes.lose(str(error), file.name)
    return _run(source, found, (*notes.lost, *notes.said))


def _scalars(event: Any, found: Numbers) -> None:
    for value in event.summary.value:
        number: float | None = None
        if value.HasField("tensor"):
            try:
                held = messages.array_of(value.tensor)
            except UnreadableError:  # text, an image: no curve
                continue
            number = float(held.reshape(-1)[0]) if held.size == 1 and held.dtype.kind in "fiub" else None
        elif not (value.image or value.histo or value.audio):
            number = float(value.simple_value)
        if number is not None:
            found.setdefault(messages.text(value.tag), []).append((int(event.step), number))


def _mlflow(metrics: Path, folder: Path) -> Run:
    found: Numbers = {}
    files = [one for one in sorted(metrics.rglob("*")) if one.is_file() and not one.is_symlink()][:MOST_FILES]
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as opened:
            rows = [text.split() for text in opened]
        pairs = [(_step(row[2]), _number(row[1])) for row in rows if len(row) >= 3]
        found[file.relative_to(metrics).as_posix()] = [(at, value) for at, value in pairs if at is not None and value is not None]
    return _run(folder, found)
