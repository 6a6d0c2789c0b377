"""TensorFlow's debugger, version 2: what ``tf.debugging.experimental.enable_dump_debug_info`` writes, as calls.

    tfdbg_events.<seconds>.<host>.metadata                   the version
                                 .source_files .stack_frames where Python stood
                                 .graphs                     operations put into graphs: type, name, inputs, stack
                                 .execution                  operations that executed eagerly, and functions, with what they gave
                                 .graph_execution_traces     what the operations of graphs gave

A graph's results carry the time at which they came; the function that ran them is the first whose end is later.

The files are read once: what stands where is noted, tensors stay in their files until they are asked for. They are files of records
(TFRecord, tensorflow/core/lib/io/record_writer.h): a length, its checksum, the bytes, theirs (CRC-32C, masked by a rotation and a
constant), so damage is noticed. What each mode keeps of a tensor: tensorflow/core/protobuf/debug_event.proto, TensorDebugMode.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trueup.exchange.readers.contents import array_of, dtype_of, parse, require, shape_of, text
from trueup.exchange.readers.dump import (
    Array,
    Dump,
    ForeignCall,
    ForeignTensor,
    Frames,
    Notes,
    Part,
    Tree,
    UnreadableError,
    frames_of,
    places,
)
from trueup.foundation.frameworks.dialect import PASSED_OVER, READS, device_name, operation, standing

FULL_TENSOR = 7
MODES = {
    1: "NO_TENSOR", 2: "CURT_HEALTH", 3: "CONCISE_HEALTH", 4: "FULL_HEALTH", 5: "SHAPE", 7: "FULL_TENSOR",
    8: "REDUCE_INF_NAN_THREE_SLOTS",
}  # fmt: skip
LACKS = {
    1: "NO_TENSOR keeps nothing of a tensor: two such runs are compared by the calls that they make",
    2: "CURT_HEALTH keeps of a tensor whether it has NaN or Inf, counted as one NaN: whether two runs agree cannot be told",
    3: "CONCISE_HEALTH counts NaN and Inf of a tensor: whether two runs agree cannot be told",
    4: "FULL_HEALTH counts NaN, Inf and zeros of a tensor: whether two runs agree cannot be told",
    5: "SHAPE keeps dtype and shape of a tensor: whether two runs agree in numbers cannot be told",
    8: "REDUCE_INF_NAN_THREE_SLOTS keeps which of NaN and Inf a tensor has, counted as one: whether two runs agree cannot be told",
}
_DTYPE_AND_RANK = {4: (2, 3), 5: (1, 2)}  # places of the dtype and of the number of dimensions
_SHAPE_AT, _SHAPE_SIZES = 4, 6
MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a tensor without its elements."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)


def kept(tensor: Any, mode: int) -> Kept:
    """Return what a mode keeps, of the tensor in which it gives it; raises UnreadableError if it is not what the mode gives."""
    if mode == FULL_TENSOR:
        return Kept(dtype_of(tensor.dtype), shape_of(tensor))
    if mode not in MODES or mode == 1 or not tensor.dtype:  # of what is no float the health modes keep nothing
        return Kept()
    values = [float(one) for one in array_of(tensor).reshape(-1)[:16]]
    if not all(math.isfinite(one) for one in values if mode != 8):
        raise UnreadableError(f"{MODES[mode]} gives numbers that are none")
    try:
        return _kept(values, mode)
    except IndexError:
        raise UnreadableError(f"{MODES[mode]} gives more than {len(values)} numbers") from None


def _kept(values: list[float], mode: int) -> Kept:
    if mode == 2:
        return Kept(statistics=_counts(0, 0, values[1]))
    if mode == 8:
        return Kept(statistics=_counts(*(not math.isfinite(values[k]) for k in range(3))))
    if mode == 3:
        return Kept(statistics=_counts(values[2], values[3], values[4]))
    dtype, rank = (int(values[place]) for place in _DTYPE_AND_RANK[mode])
    if not 0 <= rank <= MAX_RANK:
        raise UnreadableError(f"a tensor of {rank} dimensions is none")
    if mode == 5:
        sizes = [int(one) for one in values[_SHAPE_AT : _SHAPE_AT + _SHAPE_SIZES]]
        known = rank <= _SHAPE_SIZES and all(size >= 0 for size in sizes)  # of more dimensions the last six alone are kept
        return Kept(dtype_of(dtype), tuple(sizes[:rank]) if known else None)
    return Kept(dtype_of(dtype), None, _counts(values[5], values[6], values[7]) | {"n_zero": int(values[9])})


def _counts(negative: float, positive: float, nan: float) -> dict[str, float]:
    return {"n_nan": int(nan), "n_posinf": int(positive), "n_neginf": int(negative)}


MOST = 2_000_000  # events of a file that are kept in memory, some 300 bytes each; what follows is said to be lost
MAX_LOCATION = 400
MAX_OUTPUTS = 4096
Location = tuple[bytes, ...]  # frames of a call, outermost first, by their ids

MAKING = frozenset({"default_variable_creator_v2", "_initialize_with_initializer", "_deferred_initialize"})
"""Functions of TensorFlow 2.21 and Keras 3.15 below which a variable gets its first value."""
SETTING_UP = frozenset({"__init__", "build", "_create_slots"})  # functions of an optimizer that compute no step


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in its file."""

    path: str
    at: int
    index: int  # which of an execution's tensors; -1: of a graph's
    mode: int
    name: str
    device: str
    kept: Kept

    @property
    def holds_numbers(self) -> bool:
        """Whether it is no text and no handle."""
        return self.mode != HANDLE and (self.mode != FULL_TENSOR or self.kept.dtype is not None)


HANDLE = -1  # stands for a mode where an operation gave what has no numbers
UNKNOWN = Source("", -1, -1, 1, "not in the dump", "cpu", Kept())
"""A tensor that a call was given and that nothing tells of: a constant of Python's, what came from outside a function."""
_HANDLE = Source("", -1, -1, HANDLE, "", "cpu", Kept())


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a graph."""

    kind: str
    inputs: tuple[tuple[str, int], ...]
    location: Location


@dataclass(frozen=True, slots=True)
class Execution:
    """What executed eagerly: an operation, or a function (then ``graph`` is that of its inside)."""

    time: float
    kind: str
    graph: bytes
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, Source], ...]
    location: Location


@dataclass(frozen=True, slots=True)
class Trace:
    """What an operation of a graph gave."""

    time: float
    graph: bytes
    op: str
    slot: int
    source: Source


@dataclass(slots=True)
class Stood:
    """What the stack of a call tells."""

    frames: Frames | None
    phase: str  # ``optimizer``, ``backward`` or empty
    making: bool  # whether a variable gets its first value
    model: bool  # whether a Keras layer is running


@dataclass(slots=True)
class Made:
    """A call, as it becomes one of the capture."""

    key: str
    kind: str
    scope: str
    phase: str
    location: Location
    inputs: list[tuple[str, Source]] = field(default_factory=list)
    outputs: list[tuple[str, Source]] = field(default_factory=list)


class Events:
    """The events of one process; ``files``: kind -> path."""

    def __init__(self, tree: Tree, files: Mapping[str, str], notes: Notes) -> None:
        self._tree, self._notes = tree, notes
        self.modes: set[int] = set()
        self.operations: dict[tuple[bytes, str], Operation] = {}
        self.placeholders: dict[bytes, list[str]] = {}  # of each graph, in the order in which they were made
        self.executions: list[Execution] = []
        self.traces: list[Trace] = []
        self._files: list[str] = []
        self._frames: dict[bytes, Any] = {}
        self._stood: dict[Location, Stood] = {}
        self._shared: dict[Location, Location] = {}
        takers = {
            "metadata": self._metadata, "source_files": self._file, "stack_frames": self._frame, "graphs": self._operation,
            "execution": self._execution, "graph_execution_traces": self._trace,
        }  # fmt: skip
        for kind, take in takers.items():
            if kind not in files:
                notes.lose(f"the file of {kind.replace('_', ' ')} is not there")
                continue
            for n, (at, event) in enumerate(self._events(files[kind])):
                if n >= MOST:
                    notes.lose(f"a file holds more than {MOST:,} events, and what follows was left out", files[kind])
                    break
                take(files[kind], at, event)

    def _events(self, path: str) -> Iterator[tuple[int, Any]]:
        for at, data in records(self._tree, path, self._notes):
            try:
                yield at, parse("DebugEvent", data)
            except UnreadableError as error:
                self._notes.lose(f"events could not be read: {error}", path)

    def _metadata(self, path: str, _at: int, event: Any) -> None:
        version = text(event.debug_metadata.file_version)
        if version not in ("", "debug.Event:1"):
            self._notes.say(f"the files are of version {version[:40]}; version debug.Event:1 is known", path)

    def _file(self, _path: str, _at: int, event: Any) -> None:
        self._files.append(text(event.source_file.file_path))

    def _frame(self, _path: str, _at: int, event: Any) -> None:
        place = event.stack_frame_with_id.place
        self._frames[event.stack_frame_with_id.id] = (place.file_index, place.line, text(place.func), text(place.code))

    def _operation(self, _path: str, _at: int, event: Any) -> None:
        made = event.graph_op_creation
        if made.op_name:
            inputs = tuple(_output(text(one)) for one in made.input_names)
            location = self._location(made.code_location)
            self.operations[made.graph_id, text(made.op_name)] = Operation(text(made.op_type), inputs, location)
            if made.op_type == b"Placeholder":
                self.placeholders.setdefault(made.graph_id, []).append(text(made.op_name))

    def _execution(self, path: str, at: int, event: Any) -> None:
        done = event.execution
        if not done.op_type:
            return
        self.modes.add(done.tensor_debug_mode)
        name = text(done.op_type)
        outputs = []
        for n, number in enumerate(done.output_tensor_ids[:MAX_OUTPUTS]):
            source = _HANDLE
            if n < len(done.tensor_protos):
                source = self._source(path, at, n, done.tensor_debug_mode, done.tensor_protos[n], f"{name}:{n}", "")
            outputs.append((int(number), source))
        inputs = tuple(int(one) for one in done.input_tensor_ids[:MAX_OUTPUTS])
        self.executions.append(
            Execution(event.wall_time, name, done.graph_id, inputs, tuple(outputs), self._location(done.code_location))
        )

    def _trace(self, path: str, at: int, event: Any) -> None:
        given = event.graph_execution_trace
        if not given.op_name:
            return
        self.modes.add(given.tensor_debug_mode)
        name = text(given.op_name)
        slot = f"{name}:{given.output_slot}"
        source = self._source(path, at, -1, given.tensor_debug_mode, given.tensor_proto, slot, text(given.device_name))
        self.traces.append(Trace(event.wall_time, given.tfdbg_context_id, name, given.output_slot, source))

    def _source(self, path: str, at: int, index: int, mode: int, tensor: Any, name: str, device: str) -> Source:
        try:
            known = kept(tensor, mode)
        except (UnreadableError, ValueError, OverflowError) as error:
            self._notes.lose(f"what is known of tensors could not be read: {error}", name)
            known = Kept()
        return Source(path, at, index, mode, name, device_name(device), known)

    def _location(self, location: Any) -> Location:
        ids = tuple(location.stack_frame_ids[:MAX_LOCATION])
        return self._shared.setdefault(ids, ids)

    def stood(self, location: Location) -> Stood:
        """Return what a stack tells."""
        found = self._stood.get(location)
        if found is None:
            found = self._stood[location] = self._read(location)
        return found

    def _read(self, location: Location) -> Stood:
        frames = []
        for one in reversed(location):
            index, line, function, code = self._frames.get(one, (-1, 0, "", ""))
            if 0 <= index < len(self._files):
                frames.append([self._files[index], line, function, code])
        named = [(str(file).replace("\\", "/"), function) for file, _, function, _ in frames]
        optimizer = any("/optimizers/" in file or "/training/optimizer" in file for file, _ in named)
        backward = any(file.endswith(("eager/backprop.py", "ops/gradients_util.py")) for file, _ in named)
        model = any(file.endswith("keras/src/layers/layer.py") and function == "__call__" for file, function in named)
        phase = "optimizer" if optimizer else "backward" if backward else ""
        making = any(function in MAKING or ("/optimizers/" in file and function in SETTING_UP) for file, function in named)
        return Stood(frames_of(frames)[0], phase, making, model)

    def call(self, made: Made) -> ForeignCall:
        """Return a call with its tensors."""
        tensors = [self._tensor(slot, source) for slot, source in (*made.inputs, *made.outputs)]
        frames = self.stood(made.location).frames
        return ForeignCall(made.key, "api", made.phase, made.scope, operation(made.kind), tensors, frames=frames)

    def _tensor(self, slot: str, source: Source) -> ForeignTensor:
        known = source.kept
        load = partial(self._load, source) if source.mode == FULL_TENSOR else None
        return ForeignTensor(slot, source.name, known.dtype, known.shape, known.statistics, load=load, device=source.device)

    def _load(self, source: Source) -> Array:
        event = parse("DebugEvent", record(self._tree, source.path, source.at))
        if source.index < 0:
            return array_of(event.graph_execution_trace.tensor_proto)
        if source.index >= len(event.execution.tensor_protos):
            raise UnreadableError("the file changed")
        return array_of(event.execution.tensor_protos[source.index])


def place_of(name: str, kind: str, stood: Stood) -> tuple[str, str]:
    """Return phase and scope of an operation of a graph, by its name and by where Python stood."""
    phase, scope, _ = standing(name, kind, frozenset())
    if stood.phase == "optimizer":
        return "optimizer", ""
    return stood.phase or phase, scope


def _output(name: str) -> tuple[str, int]:
    node, _, slot = name.rpartition(":")
    return (node, int(slot)) if node and slot.isdecimal() and len(slot) < 7 else (name, 0)


MASK = 0xA282EAD8
_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")


def records(tree: Tree, path: str, notes: Notes) -> Iterator[tuple[int, bytes]]:
    """Yield where each record begins, and its bytes; what follows damage is lost, for nothing says where the next record begins."""
    size = tree.files[path]
    try:
        with tree.open(path) as file:
            at = 0
            while at < size:
                file.seek(at)
                data = _data(file.read(_HEAD.size), size - at, file)
                yield at, data
                at += _HEAD.size + len(data) + _FOOT.size
    except (OSError, UnreadableError) as error:
        notes.lose(f"a file is damaged or cut off, and the rest of it is lost: {error}", path)


def record(tree: Tree, path: str, at: int) -> bytes:
    """Return the bytes of the record that begins at ``at``; raises UnreadableError if it is damaged, OSError if unreadable."""
    with tree.open(path) as file:
        file.seek(at)
        return _data(file.read(_HEAD.size), tree.files[path] - at, file)


def _data(head: bytes, left: int, file: object) -> bytes:
    if len(head) < _HEAD.size:
        raise UnreadableError("a record is cut off")
    length, check = _HEAD.unpack(head)
    if masked(head[:8]) != check:
        raise UnreadableError("the checksum of a record's length is wrong")
    if length > left - _HEAD.size - _FOOT.size:
        raise UnreadableError(f"a record claims {length:,} bytes beyond the file's end")
    data: bytes = file.read(length)  # type: ignore[attr-defined]
    foot = file.read(_FOOT.size)  # type: ignore[attr-defined]
    if len(foot) < _FOOT.size or masked(data) != _FOOT.unpack(foot)[0]:
        raise UnreadableError("the checksum of a record is wrong")
    return data


def masked(data: bytes) -> int:
    """Return the checksum as it is written."""
    import google_crc32c

    check = int(google_crc32c.value(data))
    return (((check >> 15) | (check << 17)) + MASK) & 0xFFFFFFFF

_FILE = re.compile(
    r"(?P<prefix>.*tfdbg_events\.[^/]+)\.(?P<kind>metadata|source_files|stack_frames|graphs|execution|graph_execution_traces)"
)

_LACKS = (
    "what a function is given and what is constant are not in the dump, so not all inputs of a call are",
    "the backward is operations of its own: beside a native capture, which has gradients by forward call, it is on one side only",
)


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find sets of files by their names' endings and the heads of their records."""
    sets: dict[str, dict[str, str]] = {}
    for path in sorted(tree.files):
        if (match := _FILE.fullmatch(path)) is not None:
            sets.setdefault(match["prefix"], {})[match["kind"]] = path
    sets = {prefix: files for prefix, files in sets.items() if "execution" in files or "graph_execution_traces" in files}
    if not sets:
        return None
    require("trueup[tfdbg]", f"{tree.source}, a dump of TensorFlow's debugger,", "google_crc32c")
    parts: list[Part] = []
    modes: set[int] = set()
    for number, (prefix, files) in enumerate(sorted(sets.items())):
        rank = places(f"{prefix}/x").get("rank", number)
        events = Events(tree, files, notes)
        made = executed(events, notes)
        steps = in_order(made)
        parts += [Part(rank, step, partial(map, events.call, calls)) for step, calls in enumerate(steps)]
        modes |= events.modes
    if len(sets) > 1:
        notes.say(f"{len(sets)} processes wrote there; they are ranks in the order of their times and hosts")
    detail = "tensor" if FULL_TENSOR in modes else "stats"
    lacks = [LACKS[mode] for mode in sorted(modes) if mode in LACKS]
    lacks += _LACKS
    named = ", ".join(MODES[mode] for mode in sorted(modes) if mode in MODES)
    return Dump(f"tfdbg2 {named}".strip(), "tensorflow", ("api",), detail, parts, notes, lacks)


Run = list[Made]  # the calls of an eager operation or of a function's run


def executed(events: Events, notes: Notes) -> list[tuple[Run, bool, bool]]:
    """Return runs in order, each with whether a model (a Keras layer; if none is seen, any forward) and an optimizer runs in
    it."""
    found = _Executed(events)
    runs = list(found.runs())
    if found.making:
        notes.say(f"{found.making:,} operations that give variables their first values were left out")
    models = any(events.stood(call.location).model for run in runs for call in run)
    told = []
    for run in runs:
        steps = any(call.phase == "optimizer" for call in run)
        begins = any(events.stood(call.location).model if models else call.phase == "forward" for call in run)
        told.append((run, begins, steps))
    return told


def in_order(runs: list[tuple[Run, bool, bool]]) -> list[Run]:
    """Put runs into steps: where a model begins to run after an optimizer has stepped, a step begins, as in a capture."""
    steps: list[Run] = [[]]
    stepped = False
    for run, begins, updates in runs:
        if stepped and begins:
            steps.append([])
            stepped = False
        steps[-1] += run
        stepped = stepped or updates
    return [step for step in steps if step]


class _Executed:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._made: dict[int, Source] = {}  # eager tensors by number; constants, which no operation makes, are not among them
        self.making = 0

    def runs(self) -> Iterator[Run]:
        """Yield the calls of each eager operation, and of each run of a function."""
        traces = sorted(self._events.traces, key=lambda one: one.time)  # threads write them as they come
        at, number = 0, 0
        for execution in self._events.executions:
            self._made.update(execution.outputs)
            if execution.graph:
                until = at
                while until < len(traces) and traces[until].time <= execution.time:
                    until += 1
                yield self._function(traces[at:until], number, self._given(execution))
                at = until
            elif (call := self._eager(execution, number)) is not None:
                yield [call]
            number += 1
        if at < len(traces):  # of a function that had not returned when the process ended
            yield self._function(traces[at:], number, {})

    def _given(self, execution: Execution) -> dict[tuple[bytes, str, int], list[Source]]:
        """Return what a function was given, by its graph's placeholders: they are made in the order of its inputs."""
        places = self._events.placeholders.get(execution.graph, ())
        if len(places) != len(execution.inputs):
            return {}
        return {
            (execution.graph, name, 0): [self._made.get(id_, UNKNOWN)] for name, id_ in zip(places, execution.inputs, strict=True)
        }

    def _eager(self, execution: Execution, number: int) -> Made | None:
        stood = self._events.stood(execution.location)
        if execution.kind in PASSED_OVER:
            return None
        if stood.making:
            self.making += 1
            return None
        made = Made(f"{number}", execution.kind, "", stood.phase or "forward", execution.location)
        given = ((n, self._made.get(id_, UNKNOWN)) for n, id_ in enumerate(execution.inputs))
        made.inputs = [(f"input.{n}", source) for n, source in given if source.holds_numbers]
        made.outputs = [(f"output.{n}", source) for n, (_, source) in enumerate(execution.outputs) if source.holds_numbers]
        return _read(made)

    def _function(self, traces: list[Trace], number: int, given: dict[tuple[bytes, str, int], list[Source]]) -> Run:
        """Return the calls of what ran inside; an operation in the body of a loop is a call each time."""
        seen: Counter[tuple[bytes, str, int]] = Counter()
        gave = dict(given)
        calls: dict[tuple[bytes, str, int], Made] = {}
        for trace in traces:
            key = trace.graph, trace.op, trace.slot
            k = seen[key]
            seen[key] += 1
            gave.setdefault(key, []).append(trace.source)
            made = self._of_graph(trace.graph, trace.op, number, k)
            if made is not None and trace.source.holds_numbers:
                calls.setdefault((trace.graph, trace.op, k), made).outputs.append((f"output.{trace.slot}", trace.source))
        graphs = {trace.graph for trace in traces}
        for (graph, name), its in self._events.operations.items():  # what gives nothing reads what others gave: updates
            if graph in graphs and (graph, name, 0) not in calls and any((graph, *source) in gave for source in its.inputs):
                made = self._of_graph(graph, name, number, 0)
                if made is not None:
                    calls[graph, name, 0] = made
        for (graph, name, k), call in calls.items():
            known = self._events.operations.get((graph, name))
            for n, (node, slot) in enumerate(known.inputs if known is not None else ()):
                sources = gave.get((graph, node, slot)) or self._unseen(graph, node)
                if sources and sources[0].holds_numbers:
                    call.inputs.append((f"input.{n}", sources[min(k, len(sources) - 1)]))
        return [_read(call) for call in calls.values()]

    def _unseen(self, graph: bytes, node: str) -> list[Source]:
        """Return what stands for a tensor that a graph was given and that is not known; nothing for a handle, by its name."""
        known = self._events.operations.get((graph, node))
        return [UNKNOWN] if known is not None and known.kind == "Placeholder" and not node.endswith("resource") else []

    def _of_graph(self, graph: bytes, name: str, number: int, k: int) -> Made | None:
        known = self._events.operations.get((graph, name))
        kind = known.kind if known is not None else name.rpartition("/")[2]
        if kind in PASSED_OVER:
            return None
        location = known.location if known is not None else ()
        phase, scope = place_of(name, kind, self._events.stood(location))
        return Made(f"{number}:{graph.hex()}:{name}:{k}", kind, scope, phase, location)


def _read(call: Made) -> Made:
    """Say of an operation that reads a variable that it was given what it gives."""
    if call.kind in READS:
        call.inputs = [(slot.replace("output", "input"), source) for slot, source in call.outputs]
    return call
