"""`trueup profile`: traces and tables as they are given, or those of a training that is run for a few steps.

Profiles that are tables: torch_npu's CSV and what ``key_averages().table()`` prints.

    kernel_details.csv    Name, Type, Accelerator Core, Start Time(us), Duration(us), Wait Time(us)   a row a kernel
    op_summary_*.csv      Op Name, OP Type, Task Type, Task Start Time(us), Task Duration(us)         the same
    op_statistic.csv      OP Type, Count, Total Time(us)                                              a row an operator
    operator_details.csv  Name, Host Self Duration(us), Device Self Duration(us)                      a row a call of PyTorch's
    step_trace_time.csv   Step, Computing, Communication(Not Overlapped), Overlapped, Free            a row a step
    *.txt                 Name  Self CPU %  Self CPU  ...  Self NPU  ...  # of Calls                  a row an operator

A table of operators knows no gaps between them: shares are of the time in operators, and a remark says so.
"""

from __future__ import annotations

import csv
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from trueup.foundation.model import TrueupError
from trueup.migration.profile.judging import FREE, TINY, UNSEEN, Part, Profile, judge
from trueup.migration.profile.reading import (
    COMMUNICATION,
    FAR,
    FRAMEWORK,
    OPERATOR,
    Trace,
    is_wrapper,
    kernel,
    named_class,
    opened,
    read,
)
from trueup.recording.recorder.launch import program, run_to_the_end

VARIABLE = "TRUEUP_PROFILE"
INSIDE = ("trace_view.json", "kernel_details.csv", "step_trace_time.csv")  # of torch_npu's output folder, the most telling first


def profile(path: Path, lines: Mapping[str, Sequence[str]] | None = None) -> Profile:
    """Return where the time of a trace goes.

    Args:
        path: Chrome's JSON (.json, .json.gz), a CSV of torch_npu, a text that holds a table, or torch_npu's output folder.
        lines: the user's lines by names of operators; else those of the trace's stacks, which know a function's first line.

    Raises:
        TrueupError: it is not there, or cannot be read.
    """
    path = _inside(path) if path.is_dir() else path
    if not path.is_file():
        raise TrueupError(
            f"A trace is not there.\n  where:    {path}\n  expected: .json, .json.gz, .csv, .txt, or torch_npu's output folder\n"
            "  got:      nothing of that name\n  next:     correct the path, or: trueup profile -- python train.py"
        )
    kind = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    found = read_csv(path) if kind == "csv" else read_text(path) if kind in ("txt", "log", "out") else read(path)
    if isinstance(found, Profile):
        return found
    return judge(found, lines)


def _inside(folder: Path) -> Path:
    found = [one for name in INSIDE for one in sorted(folder.rglob(name))] or sorted(folder.glob("*.json*"))
    return found[0] if found else folder / INSIDE[0]


def profiled(command: Sequence[str], steps: int) -> list[Profile]:
    """Run a training until some of its steps are recorded, and return where their time goes, for each process that trained.

    Raises:
        TrueupError: the command cannot start, or no step of it was recorded.
    """
    with tempfile.TemporaryDirectory(prefix="trueup-profile-") as name:
        folder = Path(name)
        try:
            code = run_to_the_end([program(command[0]), *command[1:]], {**os.environ, VARIABLE: f"{folder}:{steps}"}, None, None)
        except OSError as error:
            raise TrueupError(f"The command cannot start: {command[0]}: {error.strerror or error}") from None
        traces = sorted(folder.glob("times-*.json"))
        if not traces:
            raise TrueupError(
                f"No step was recorded.\n  expected: a training in PyTorch that steps an optimizer at least {steps + 3} times\n"
                f"  got:      the command ended with exit code {code} before that\n"
                "  next:     train for more steps, or time fewer: --steps 1 needs 4"
            )
        return [
            replace(profile(one, _lines(one)), where=f"process {one.stem.removeprefix('times-')}", compiled=_compiled(one))
            for one in traces
        ]  # fmt: skip


def _beside(trace: Path, what: str) -> bytes:
    path = trace.with_name(trace.name.replace("times-", f"{what}-"))
    return path.read_bytes() if path.is_file() else b""


def _compiled(trace: Path) -> tuple[str, ...]:
    return msgspec.json.decode(_beside(trace, "compiled") or b"[]", type=tuple[str, ...])


def _lines(trace: Path) -> dict[str, list[str]]:
    found = msgspec.json.decode(_beside(trace, "lines") or b"{}", type=dict[str, dict[str, int]])
    return {name: sorted(counts, key=counts.__getitem__, reverse=True)[:3] for name, counts in found.items()}


MOST_ROWS = 5_000_000
LONGEST = 1 << 20  # characters of a line
UNITS = {"ns": 1e-3, "us": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6}
TIME = re.compile(r"(-?[\d.]+)(ns|us|μs|ms|s)")
NO_GAPS = "A table of operators knows no gaps between them: shares are of the time in operators, not of a step."

KERNEL = (("Name", "Op Name"), ("Type", "OP Type"), ("Start Time(us)", "Task Start Time(us)", "Task Start Time"),
          ("Duration(us)", "Task Duration(us)"))  # fmt: skip


def read_csv(path: Path) -> Trace | Profile:
    """Read one of torch_npu's CSV files: rows of kernels as a trace without a host, sums as a profile. Raises TrueupError where it
    is none, or a row of it cannot be read."""
    try:
        rows = _rows(path)
        head = [one.strip() for one in next(rows, [])]
        chosen = [next((head.index(name) for name in names if name in head), None) for names in KERNEL]
        if {"Computing", "Free"} <= set(head):
            return _steps(path, head, rows)
        if {"OP Type", "Count", "Total Time(us)"} <= set(head):
            return _sums(path, head, rows)
        if {"Name", "Host Self Duration(us)", "Device Self Duration(us)"} <= set(head):
            return _details(path, head, rows)
        if None not in chosen:
            return _kernels(path, [place for place in chosen if place is not None], rows)
        raise ValueError(f"columns {', '.join(head)[:200] or 'none'}")
    except (OSError, EOFError, csv.Error, ValueError, IndexError) as error:
        known = "kernel_details, op_summary, op_statistic, operator_details or step_trace_time"
        raise _refused(path, f"{known} of torch_npu", error) from None


def _refused(path: Path, expected: str, error: Exception) -> TrueupError:
    got = getattr(error, "strerror", None) or str(error)[:200] or type(error).__name__
    return TrueupError(
        f"A table cannot be read.\n  where:    {path}\n  expected: {expected}\n  got:      {got}\n  next:     export it again"
    )


def _rows(path: Path) -> Iterator[list[str]]:
    with opened(path) as stream:
        lines = iter(lambda: stream.readline(LONGEST), "")
        for number, row in enumerate(csv.reader(line.lstrip("\ufeff").replace("\0", "") for line in lines)):
            if number > MOST_ROWS:
                return
            if row:
                yield row


def _time(text: str) -> float:
    value = float(text.strip() or 0)
    if not 0 <= value < FAR:
        raise ValueError(f"{text!r} where a time is expected")
    return value


def _kernels(path: Path, columns: Sequence[int], rows: Iterator[list[str]]) -> Trace:
    trace, names, base = Trace(str(path)), dict[str, int](), None
    for row in rows:
        name, kind, start, length = (row[column].strip() for column in columns)
        label = kind if kind not in ("", "N/A") else kernel(name)
        whole, _, rest = start.partition(".")
        base = int(whole) if base is None else base
        number = names.setdefault(label[:300], len(names))
        begins = int(whole) - base + float(f"0.{rest or 0}")
        if abs(begins) >= FAR:
            raise ValueError(f"{start!r} where a time is expected")
        trace.device.add(begins, _time(length), number, 0, -1)
    trace.names = list(names)
    if not len(trace.device):
        raise ValueError("no row")
    return trace


def _steps(path: Path, head: Sequence[str], rows: Iterator[list[str]]) -> Profile:
    """Return what a table of steps says: its free time has no name, and may be the framework's or the host's."""
    sums: dict[str, float] = defaultdict(float)
    steps = 0
    for row in rows:
        if "Type" in head and row[head.index("Type")].strip() == "stage":  # the longest of the ranks that stand above it
            continue
        steps += 1
        for name in ("Computing", "Communication(Not Overlapped)", "Free"):
            sums[name] += _time(row[head.index(name)]) if name in head else 0.0
    parts = (
        Part(OPERATOR, "(computing)", sums["Computing"], steps), Part(FRAMEWORK, FREE, sums["Free"], steps),
        Part(COMMUNICATION, "(communication)", sums["Communication(Not Overlapped)"], steps),
    )  # fmt: skip
    return Profile(str(path), float(sum(sums.values())), steps, tuple(one for one in parts if one.time), remarks=(UNSEEN,))


def _sums(path: Path, head: Sequence[str], rows: Iterator[list[str]]) -> Profile:
    some: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for row in rows:
        name = row[head.index("OP Type")].strip()
        some[name] += _time(row[head.index("Total Time(us)")])
        calls[name] += int(row[head.index("Count")])
    return _of_operators(path, some, calls, on_device=True)


def _details(path: Path, head: Sequence[str], rows: Iterator[list[str]]) -> Profile:
    """Return what a table of PyTorch's calls says: the time of their kernels, or the host's where there is none."""
    times: dict[str, dict[str, float]] = {"Device": defaultdict(float), "Host": defaultdict(float)}
    calls: Counter[str] = Counter()
    for row in rows:
        name = row[head.index("Name")].strip()
        calls[name] += 1
        for side, some in times.items():
            some[name] += _time(row[head.index(f"{side} Self Duration(us)")])
    on_device = any(times["Device"].values())
    return _of_operators(path, times["Device" if on_device else "Host"], calls, on_device=on_device)


def read_text(path: Path) -> Profile:
    """Read what ``print(prof.key_averages().table())`` prints, alone or among lines of a log. Raises TrueupError where there is no
    such table."""
    times: dict[str, dict[str, float]] = {"device": defaultdict(float), "cpu": defaultdict(float)}
    calls: Counter[str] = Counter()
    try:
        for cells in _cells(path):
            name = cells["Name"]
            device = next((column for column in cells if re.fullmatch(r"Self (NPU|CUDA|XPU|MTIA|PrivateUse1|HIP)", column)), None)
            if is_wrapper(name):
                continue
            times["device"][name] += _in_us(cells[device]) if device else 0.0
            times["cpu"][name] += _in_us(cells["Self CPU"])
            calls[name] += int(cells.get("# of Calls", "1").replace(",", "") or 1)
        if not calls:
            raise ValueError("no table with the columns Name and Self CPU")
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise _refused(path, "the table that key_averages().table() prints", error) from None
    on_device = any(times["device"].values())
    return _of_operators(path, times["device" if on_device else "cpu"], calls, on_device=on_device)


def _in_us(text: str) -> float:
    found = TIME.fullmatch(text)
    return float(found[1]) * UNITS[found[2]] if found else 0.0


def _cells(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table whose columns are as wide as the dashes over and under its head."""
    with opened(path) as stream:
        columns: list[tuple[int, int]] = []
        head: list[str] = []
        for line in iter(lambda: stream.readline(LONGEST), ""):
            if re.fullmatch(r"\s*-{3,}(?:\s+-{3,})+\s*", line):
                columns = [match.span() for match in re.finditer("-+", line)]
                head = head if len(head) == len(columns) else []
            elif columns and line.strip():
                cells = [line[start:end].strip() for start, end in columns]
                if not head and cells[0] == "Name":
                    head = cells
                elif head and "Self CPU" in head:
                    yield dict(zip(head, cells, strict=True))
            elif not line.strip():
                columns, head = [], []


def _of_operators(path: Path, times: Mapping[str, float], calls: Counter[str], *, on_device: bool) -> Profile:
    parts = []
    for name, time in times.items():
        kind = named_class(name)
        if kind == OPERATOR and not on_device and time / max(calls[name], 1) < TINY:
            kind = FRAMEWORK
        if time > 0 and not name.startswith("ProfilerStep"):
            parts.append(Part(kind, name, time, calls[name]))
    return Profile(str(path), float(sum(part.time for part in parts)), 0, tuple(parts), remarks=(NO_GAPS,))
