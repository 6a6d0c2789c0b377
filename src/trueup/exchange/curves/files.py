"""One run or several out of a file or a folder, by what it holds.

    events.out.tfevents.*         TensorBoard: a file, or the folder that holds it
    trainer_state.json            Hugging Face: a file, or an output folder (its last checkpoint)
    metrics/loss                  MLflow: the folder of a run, whose files hold `timestamp value step`
    *.csv, *.tsv                  a column a number; W&B's export (`run - loss`); MLflow's (`run, key, value, step`)
    *.json, *.jsonl               rows, or columns; W&B's history, MMEngine's scalars.json
    anything else                 a log, by its lines: a table of how trainers write them (``lines.toml``), or the user's patterns
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from trueup.analysis.curves.run import Run, Series, of_capture, plain
from trueup.exchange.readers import contents
from trueup.exchange.readers.dump import Notes, Tree, UnreadableError
from trueup.exchange.readers.tfdbg2 import records
from trueup.foundation import toml
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.store import open_capture
from trueup.foundation.store.layout import MANIFEST
from trueup.foundation.words.wording import counted

NUMBER = r"[-+]?(?:\d+(?:,\d{3})+|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|NaN|Inf|Infinity)\b"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONGEST = 8192  # characters of a line that are looked at
MOST = 20_000_000  # numbers that are kept of a file
PLACES = ("step", "epoch", "inner", "each", "name", "value")
STEPS = ("step", "steps", "global_step", "global step", "iter", "iteration", "eta", "num_updates")  # are no series
VALIDATION = re.compile(r"(?i)(?<![\w./-])(?:valid(?:at(?:e|ion|ing))?|val|eval(?:uat(?:e|ion|ing))?|test(?:ing)?)(?![\w./-])")
RANK = re.compile(r"(?i)(?<![\w.])rank\W{0,3}(\d{1,6})")
LABEL = re.compile(r"\[default(\d{1,6})\]|\s{0,8}(\d{1,6}): ")  # torchrun's and srun's

Numbers = dict[str, list[tuple[int, float]]]
Ranks = dict[str, dict[str, list[tuple[int, float]]]]
"""Numbers by name and by the rank that wrote them; ranks are those of lines that say one."""

LARGEST = 1 << 28  # bytes of a JSON document, which is read whole
MOST_FILES = 4096  # series of an MLflow run
COLUMNS_OF_STEPS = (
    "step", "global_step", "_step", "iteration", "iter", "steps", "trainer_global_step", "current_iteration", "curr_iter",
    "current_steps", "num_updates", "batch", "epoch",
)  # fmt: skip
"""Names of a step, as `plain` writes them, the likeliest first."""
LONG = {"step": ("step",), "value": ("value",), "key": ("key", "metric", "metrickey"), "run": ("name", "run", "runname", "runid")}
"""Names in a row of one number, as `plain` writes them without ``_``."""
EVENTS = "events.out.tfevents"


class Row(toml.Table):
    """A ``[[row]]`` table."""

    name: str
    line: str
    origin: str
    mark: str = ""
    pair: str = ""
    prefix: str = ""  # before each name
    heading: str = ""  # a line that gives the step of those below it
    first: int = 1  # number of the first epoch
    general: bool = False  # of no trainer: for logs in which no other row knows a line

    def __post_init__(self) -> None:
        for text in filter(None, (self.line, self.pair, self.heading)):
            try:
                re.compile(text.replace("{number}", NUMBER))
            except re.error as error:
                raise ValueError(f"{text!r} is no regular expression ({error})") from None


@dataclass
class _Counted:
    """How far the steps of one rank's lines are, of a training or of its validation."""

    last: tuple[int, int] = (0, -1)  # epoch and step of the last line
    before: int = 0  # steps of the epochs before, where each begins anew
    epochs: dict[str, list[float]] = field(default_factory=dict)  # of lines without a step, by name


@dataclass
class _Reader:
    row: Row
    line: re.Pattern[str]
    pair: re.Pattern[str] | None
    heading: re.Pattern[str] | None
    seen: int = 0
    example: str = ""  # the first line
    counted: dict[tuple[str, str], _Counted] = field(default_factory=dict)
    headed: dict[str, str | None] | None = None  # of the heading above; empty below one that ends it

    @classmethod
    def of(cls, row: Row) -> _Reader:
        line, pair, heading = (re.compile(one.replace("{number}", f"(?:{NUMBER})")) for one in (row.line, row.pair, row.heading))
        return cls(row, line, pair if row.pair else None, heading if row.heading else None)

    def take(self, text: str, into: Ranks) -> bool:
        """Add the numbers of a line, if it is one of this kind."""
        if self.heading is not None and (heading := self.heading.search(text)):
            self.headed = {name: held for name, held in heading.groupdict().items() if held is not None}
            return False
        if self.row.mark not in text or not self._begun():
            return False
        found = self.line.search(text)
        if found is None:
            return False
        groups = found.groupdict()
        if self.row.general:
            if "loss" not in text.lower():
                return False
            values = self._pairs(text, found.end()) or self._pairs(text, 0)
        else:
            values = self._pairs(text, 0) or {name: one for name, one in groups.items() if name not in PLACES and one is not None}
        if not values:
            return False
        numbers = {name.strip(): float(value.replace(",", "")) for name, value in values.items()}
        before = text[: found.end()].lower()
        of_validation = ("val" in before or "test" in before) and VALIDATION.search(text, 0, found.end())
        prefix = self.row.prefix or ("validation " if of_validation else "")
        label = RANK.search(text) if "rank" in text.lower() else LABEL.match(text)
        rank = next(filter(None, label.groups())) if label else ""
        counted = self.counted.setdefault((prefix, rank), _Counted())
        step = self._step({**(self.headed or {}), **groups}, counted)
        self.seen += 1
        self.example = self.example or text.strip()
        for name, value in numbers.items():
            at = _place(counted.epochs.setdefault(name, []), numbers.get("epoch")) if step is None else step
            into.setdefault(f"{prefix}{name}", {}).setdefault(rank, []).append((at, value))
        return True

    def _begun(self) -> bool:
        """Tell whether there was the heading that a line needs; batches of an epoch are counted without one."""
        return self.heading is None or bool(self.headed) or (self.headed is None and "each" in self.line.groupindex)

    def _pairs(self, text: str, start: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for match in self.pair.finditer(text, start) if self.pair is not None else ():
            if match["name"].lower() not in STEPS and not (self.row.general and match["name"] in found):  # an average may follow
                found[match["name"]] = match["value"]
        return {} if self.row.general and not any("loss" in name.lower() for name in found) else found

    def _step(self, groups: dict[str, str | None], counted: _Counted) -> int | None:
        epoch, inner, each, step = (_whole(groups.get(name)) for name in ("epoch", "inner", "each", "step"))
        if step is not None and epoch is not None:  # a step of its epoch, or of all
            if epoch > counted.last[0] and step <= counted.last[1]:
                counted.before += counted.last[1] + (step == 0)
            counted.last = epoch, step
            return counted.before + step
        if step is not None or inner is None or each is None:
            return step
        if epoch is not None:
            return (epoch - self.row.first) * each + inner
        if inner < counted.last[1] and counted.last == (each, each):  # the bar was full, and is drawn anew
            counted.before += each
        counted.last = each, inner
        return counted.before + inner


def _place(epochs: list[float], epoch: float | None) -> int:
    """Return the number of a line without a step: after those before it, or where its epoch goes back to, as after a restart."""
    if epoch is not None and epochs and epoch < epochs[-1]:
        while epochs and epochs[-1] >= epoch:
            epochs.pop()
    epochs.append(-math.inf if epoch is None else epoch)
    return len(epochs)


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text.replace(",", "")[:15])


@cache
def _known() -> tuple[Row, ...]:
    held = toml.packaged(__package__, "lines.toml")
    rows = [{**row, "pair": held["pair"]} if row.get("general") else row for row in held["row"]]
    return toml.checked(rows, tuple[Row, ...])


def rows_of(given: Sequence[str]) -> list[Row]:
    """Read patterns of the user's; raises UsageError if one is none, or names no value."""
    rows = []
    for text in given:
        example = r"--pattern 'it=(?P<step>\d+) .*loss=(?P<loss>{number})'"
        try:
            row = Row("--pattern", text, "given")
            groups = set(_Reader.of(row).line.groupindex)
        except ValueError as error:
            raise UsageError(f"--pattern cannot be read: {error}\n  next:     {example}") from None
        if not groups - set(PLACES):
            raise UsageError(
                "--pattern names no value.\n  expected: a named group for each number, beside step\n"
                f"  got:      {text}\n  next:     {example}"
            )
        rows.append(row)
    return rows


def numbers(lines: Iterable[str], own: Sequence[Row], where: Path) -> tuple[Numbers, list[str], dict[str, list[float]]]:
    """Return the numbers of a log by name, ``(step, value)`` in order of the lines; remarks; and of names whose lines have no step,
    and are counted, the epoch of each. Raises TrueupError if no line is known."""
    readers = [_Reader.of(row) for row in (own or _known())]
    known = [reader for reader in readers if not reader.row.general]
    found: Ranks = {}
    guessed: list[tuple[_Reader, Ranks]] = [(reader, {}) for reader in readers if reader.row.general]
    total = kept = 0
    example = ""
    for text in lines:
        total += 1
        kept += any(reader.take(text, found) for reader in known) or any(reader.take(text, own) for reader, own in guessed)
        example = example or (text.strip() if "loss" in text.lower() else "")
        if kept * 8 > MOST:
            raise TrueupError(f"{where} is too long.\n  expected: at most {MOST:,} numbers\n  next:     give a part of it")
    by = [reader for reader in known if reader.seen]
    if not found and guessed:
        reader, found = max(guessed, key=lambda one: one[0].seen)
        by = [reader]
    if not found:
        raise TrueupError(
            f"No line of the log is known.\n  where:    {where}\n"
            f"  expected: {'lines that match --pattern' if own else 'lines of a trainer, or lines with a step and a loss'}\n"
            f"  got:      {counted(total, 'line')}{f', such as: {_short(example)}' if example else ''}\n"
            r"  next:     say how a line looks: --pattern 'it=(?P<step>\d+) .*loss=(?P<loss>{number})'"
        )
    remarks = [f"read as lines of {reader.row.name}; lines are counted, for they have no step" for reader in by if _counts(reader)]
    for reader in by:
        if reader.row.general:
            read = f"{counted(reader.seen, 'line')} with {reader.row.name} and a loss"
            remarks.append(f"a log of no known trainer; read as it looks, from {read}, such as: {_short(reader.example)}")
        if any(one.before for one in reader.counted.values()):
            remarks.append("steps begin anew in each epoch: they are counted on")
    ranks = {rank for held in found.values() for rank in held}
    if len(ranks) > 1:
        remarks.append(f"lines of {len(ranks)} ranks: where their numbers differ, the mean counts")
    lines_of = [(prefix, one.epochs) for reader in by for (prefix, _), one in reader.counted.items() if _counts(reader)]
    counts = {f"{prefix}{name}": epochs for prefix, held in lines_of for name, epochs in held.items()}
    return {name: _joined(held) for name, held in found.items()}, remarks, counts


def _short(line: str) -> str:
    return line[:100].replace("\t", " ")


def _counts(reader: _Reader) -> bool:
    return not (reader.row.heading or {"step", "inner"} & set(reader.line.groupindex))


def _joined(ranks: dict[str, list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return the mean over the ranks that wrote a step. A rank whose number never moves, while another's does, has none: torchtitan
    writes -1 where a pipeline's stage has no loss."""
    if len(ranks) == 1:
        return next(iter(ranks.values()))
    moves = [held for held in ranks.values() if len({value for _, value in held}) > 1]
    still = [held for held in ranks.values() if len({value for _, value in held}) == 1 and len(held) > 1 and moves]
    by_step: dict[int, list[float]] = {}
    for held in ranks.values():
        for step, value in {} if held in still else dict(held).items():
            by_step.setdefault(step, []).append(value)
    return [(step, held[0] if len(set(held)) == 1 else math.fsum(held) / len(held)) for step, held in by_step.items()]


def of_file(file: Path) -> Iterator[str]:
    """Yield the lines of a log, without colours; a bar's returns and backspaces end a line, too, and a very long line is cut."""
    with file.open(encoding="utf-8", errors="replace", newline=None) as opened:
        while text := opened.readline(LONGEST):
            plain = COLOURS.sub("", text) if "\x1b" in text else text
            yield from (filter(None, plain.split("\b")) if "\b" in plain else (plain,))


def read(source: Path, patterns: Sequence[str] = ()) -> list[Run]:
    """Return the runs that a file or folder holds: mostly one. ``patterns`` read a log's lines in place of the known ones. Raises
    TrueupError if it cannot be read or holds no curve."""
    own = rows_of(patterns)
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


def _file(file: Path, own: Sequence[Row]) -> list[Run]:
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
    found, remarks, counted = numbers(of_file(file), own, file)
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
    return next((by_plain[known] for known in COLUMNS_OF_STEPS if known in by_plain), None)


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
    contents.require("trueup[tfdbg]", "TensorBoard's events", "google_crc32c")
    notes = Notes()
    found: Numbers = {}
    for file in files:
        tree = Tree(file, notes)
        for _, data in records(tree, file.name, notes):
            try:
                _scalars(contents.parse("Event", data), found)
            except UnreadableError as error:
                notes.lose(str(error), file.name)
    return _run(source, found, (*notes.lost, *notes.said))


def _scalars(event: Any, found: Numbers) -> None:
    for value in event.summary.value:
        number: float | None = None
        if value.HasField("tensor"):
            try:
                held = contents.array_of(value.tensor)
            except UnreadableError:  # text, an image: no curve
                continue
            number = float(held.reshape(-1)[0]) if held.size == 1 and held.dtype.kind in "fiub" else None
        elif not (value.image or value.histo or value.audio):
            number = float(value.simple_value)
        if number is not None:
            found.setdefault(contents.text(value.tag), []).append((int(event.step), number))


def _mlflow(metrics: Path, folder: Path) -> Run:
    found: Numbers = {}
    files = [one for one in sorted(metrics.rglob("*")) if one.is_file() and not one.is_symlink()][:MOST_FILES]
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as opened:
            rows = [text.split() for text in opened]
        pairs = [(_step(row[2]), _number(row[1])) for row in rows if len(row) >= 3]
        found[file.relative_to(metrics).as_posix()] = [(at, value) for at, value in pairs if at is not None and value is not None]
    return _run(folder, found)
