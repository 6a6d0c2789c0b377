"""A trace in Chrome's format (torch.profiler, torch_npu's ``trace_view.json``), read event by event: a file of any size is never
in memory whole, of each event only what the judgement needs is kept, as numbers in arrays.

    {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 12.5, "dur": 3.1, "tid": 7}, ...]}

The names of operators, kernels and calls tell the class of a step's time: ``classes.toml``.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from trueup.foundation import toml
from trueup.foundation.model import TrueupError

OPERATOR, COPY, FRAMEWORK, COMPILE, HOST, COMMUNICATION = (
    "operator", "copy and format", "framework", "compile", "host", "communication",
)  # fmt: skip
CLASSES = (OPERATOR, COPY, FRAMEWORK, COMPILE, HOST, COMMUNICATION)

CHUNK = 4 << 20  # characters read at once
LARGEST = 16 << 20  # characters of one event, or of one value before the events
MOST = 5_000_000  # events kept: about 200 MB
NAMES = 200_000  # names kept apart
FAR = 1e13  # microseconds: four months from the first event

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events"})
ON_HOST = frozenset({"cpu_op", "operator", "cuda_runtime", "cuda_driver", "runtime", "mtia_runtime"})
STEP = re.compile(r"ProfilerStep#?\d+")
BLANK = re.compile(r"[\s,]*")


class Row(toml.Table):
    """A class that names decide."""

    name: str
    says: tuple[str, ...]
    sign: str
    remedy: str


class _File(toml.Table, rename={"rows": "class"}):
    wrapper: tuple[str, ...]
    sync: tuple[str, ...]
    made_for: tuple[str, ...]
    graphs: tuple[str, ...]
    rows: tuple[Row, ...]
    other: dict[str, str]


@functools.cache
def _file() -> _File:
    return toml.checked(toml.packaged(__package__, "classes.toml"), _File)


@functools.cache
def _expression(name: str) -> re.Pattern[str]:
    parts = [re.sub(r"^\(\?i\)(.*)", r"(?i:\1)", one) for one in getattr(_file(), name)]
    return re.compile("|".join(f"(?:{part})" for part in parts))


@functools.cache
def _rows() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple(
        (row.name, re.compile("|".join(re.sub(r"^\(\?i\)(.*)", r"(?i:\1)", one) for one in row.says))) for row in _file().rows
    )


@functools.lru_cache(maxsize=200_000)
def named_class(name: str) -> str:
    """Return the class that a name alone decides, `OPERATOR` where none does."""
    return next((found for found, says in _rows() if says.search(name)), OPERATOR)


@functools.lru_cache(maxsize=200_000)
def is_wrapper(name: str) -> bool:
    """Tell whether a span only holds operators that have spans of their own."""
    return named_class(name) != COMPILE and _expression("wrapper").search(name) is not None


@functools.lru_cache(maxsize=200_000)
def is_sync(name: str) -> bool:
    """Tell whether the host waits for the device there."""
    return _expression("sync").search(name) is not None


@functools.lru_cache(maxsize=200_000)
def is_graph(name: str) -> bool:
    """Tell whether a graph of launches is started there."""
    return _expression("graphs").search(name) is not None


def is_made_for(name: str) -> bool:
    """Tell whether a device is made for an operator, so that much time in it is no fault."""
    return _expression("made_for").search(name) is not None


def sign(kind: str, variant: str = "") -> str:
    """Return the sign that proves a class, or a variant of one."""
    return _said(kind, variant, "")


def remedy(kind: str, variant: str = "") -> str:
    """Return what to do about a class, or a variant of one."""
    return _said(kind, variant, "_remedy")


def _said(kind: str, variant: str, part: str) -> str:
    row = next((row for row in _file().rows if row.name == kind), None)
    if row is None or variant:
        return _file().other[f"{variant or kind}{part}"]
    return row.remedy if part else row.sign


@dataclass
class Spans:
    """Spans of one role: start and length in microseconds, number of the name, thread, and the operator's id or -1."""

    start: array[float] = field(default_factory=lambda: array("d"))
    length: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("l"))
    thread: array[int] = field(default_factory=lambda: array("l"))
    id: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.start)

    def add(self, start: float, length: float, name: int, thread: int, id: int) -> None:
        """Keep one more."""
        self.start.append(start)
        self.length.append(length)
        self.name.append(name)
        self.thread.append(thread)
        self.id.append(id)

    def intervals(self) -> np.ndarray[Any, Any]:
        """Return starts and ends, float64 of shape (n, 2), in microseconds."""
        start = np.frombuffer(self.start) if len(self) else np.zeros(0)
        length = np.frombuffer(self.length) if len(self) else np.zeros(0)
        return np.stack([start, start + length], 1)


@dataclass
class Trace:
    """What a trace holds, by role."""

    where: str
    steps: Spans = field(default_factory=Spans)
    host: Spans = field(default_factory=Spans)  # operators, data loaders, compilers, calls that wait
    device: Spans = field(default_factory=Spans)
    frames: Spans = field(default_factory=Spans)  # Python's functions
    names: list[str] = field(default_factory=list)
    graphs: int = 0  # launches of graphs
    cut: bool = False  # more events than are kept


def read(path: Path) -> Trace:
    """Read a trace, packed by gzip or not. Raises TrueupError where it cannot be read, is cut off, or holds no events."""
    trace = Trace(str(path))
    collected = _Collecting(trace)
    try:
        for event in _events(path):
            if not collected.take(event):
                trace.cut = True
                break
    except (OSError, EOFError, zlib.error) as error:
        raise _refused(path, getattr(error, "strerror", None) or str(error) or "it is cut off") from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, str(error)[:200]) from None
    if not len(trace.host) and not len(trace.device):
        raise _refused(path, "no event that has a time")
    return trace


def _refused(path: Path, got: str) -> TrueupError:
    return TrueupError(
        f"A trace cannot be read.\n  where:    {path}\n  expected: a whole trace of torch.profiler or torch_npu (.json, .json.gz)\n"
        f"  got:      {got}\n  next:     export it again, and wait until the training has written it"
    )


def kernel(name: str) -> str:
    """Return the kernel's own name where torch_npu puts the function before it: ``aclnnMm_TransData_TransData`` moves data."""
    return name.rpartition("_")[2] if name.startswith("aclnn") else name


def opened(path: Path) -> IO[str]:
    """Open a file, packed by gzip or not, as text."""
    raw = path.open("rb")
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return io.TextIOWrapper(gzip.open(raw) if packed else raw, "utf-8", errors="replace")


class _Buffer:
    """The part of a text that is read but not used."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.text = stream.read(CHUNK)
        self.at = 0
        self._decode = json.JSONDecoder().raw_decode

    def more(self) -> bool:
        read = self._stream.read(CHUNK)
        self.text, self.at = self.text[self.at :] + read, 0
        return bool(read)

    def peek(self) -> str:
        """Return the next character that is neither blank nor a comma, empty at the end."""
        while True:
            self.at = BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """Return the next value; raises ValueError where there is none."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self.text, self.at)
            except ValueError:
                end = len(self.text)
            if end < len(self.text):  # a number at the end may go on
                self.at = end
                return value
            if len(self.text) - self.at > LARGEST:
                raise ValueError("something that is no JSON, or one value of more than 16 MB")
            if not self.more():
                raise ValueError("it is cut off, or no JSON")


def _events(path: Path) -> Iterator[Any]:
    with opened(path) as stream:
        buffer = _Buffer(stream)
        first = buffer.peek()
        if first == "{":
            buffer.at += 1
            while buffer.peek() == '"':
                key = buffer.value()
                if buffer.peek() != ":":
                    raise ValueError("no JSON")
                buffer.at += 1
                if key == "traceEvents":
                    break
                buffer.value()
            else:
                raise ValueError("no traceEvents")
            first = buffer.peek()
        if first != "[":
            raise ValueError("no list of events")
        buffer.at += 1
        while (next_one := buffer.peek()) != "]":
            if not next_one:
                raise ValueError("it is cut off")
            yield buffer.value()


class _Collecting:
    """Sorts events into a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._base: int | None = None
        self._processes: dict[Any, str] = {}
        self._kept = 0

    def take(self, event: Any) -> bool:
        """Keep what an event says; false once there are too many."""
        if not isinstance(event, Mapping):
            raise ValueError("an event that is no object")
        if event.get("ph") == "M":
            self._process(event)
        elif event.get("ph") == "X":
            self._span(event)
        return self._kept < MOST

    def _process(self, event: Mapping[str, Any]) -> None:
        arguments = event.get("args")
        if event.get("name") == "process_name" and isinstance(arguments, Mapping) and len(self._processes) < NAMES:
            self._processes[str(event.get("pid"))] = str(arguments.get("name"))

    def _span(self, event: Mapping[str, Any]) -> None:
        start, length, name = self._time(event.get("ts")), _number(event.get("dur")), str(event.get("name"))[:300]
        if start is None or length is None or not 0 <= length < FAR or abs(start) > FAR:
            return
        spans = self._role(str(event.get("cat", "")).lower(), name, str(event.get("pid")))
        if spans is None:
            return
        thread = self._threads.setdefault((str(event.get("pid")), str(event.get("tid"))), len(self._threads))
        if spans is self._trace.device:
            name = kernel(name)
        arguments = event.get("args")
        id = arguments.get("External id", arguments.get("external id")) if isinstance(arguments, Mapping) else None
        number = id if isinstance(id, int) and abs(id) < 1 << 62 else -1
        spans.add(start, length, self._name(name), thread, number)
        self._kept += 1

    def _role(self, category: str, name: str, process: str) -> Spans | None:
        """Return where a span belongs; torch_npu gives no categories, but names of processes."""
        trace, of = self._trace, self._processes.get(process, "")
        if STEP.fullmatch(name):
            return trace.steps if category != "gpu_user_annotation" else None
        if is_graph(name):
            trace.graphs += 1
        if category == "python_function":
            return trace.frames
        if category in DEVICE or (not category and of.startswith(("Ascend Hardware", "HCCL"))):
            return None if name.startswith(("EVENT_", "NOTIFY_")) else trace.device
        if category == "user_annotation" and named_class(name) == "host":
            return trace.host
        if category in ON_HOST or of in ("Python", "CANN"):
            runtime = "runtime" in category or "driver" in category or of == "CANN"
            wanted = is_sync(name) or named_class(name) == "compile" if runtime else not is_wrapper(name)
            return trace.host if wanted else None
        return None

    def _name(self, name: str) -> int:
        found = self._names.get(name)
        if found is None:
            if len(self._names) >= NAMES:
                name = "(further names)"
            found = self._names.setdefault(name, len(self._names))
            if found == len(self._trace.names):
                self._trace.names.append(name)
        return found

    def _time(self, given: Any) -> float | None:
        """Return a time in microseconds from the first one: absolute ones have more digits than a float64."""
        whole, _, rest = str(given).partition(".") if isinstance(given, str | int) else (given, "", "")
        try:
            number = int(whole) if not isinstance(whole, float) else whole
            if self._base is None:
                self._base = int(number)
            return float(number - self._base) + (float(f"0.{rest}") if rest else 0.0)
        except (TypeError, ValueError, OverflowError):
            return None


def _number(given: Any) -> float | None:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        return None
