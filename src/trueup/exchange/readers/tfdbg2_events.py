"""The files of tfdbg2, read once: what stands where is noted, tensors stay in their files until they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trueup.exchange.readers.dump import Array, ForeignCall, ForeignTensor, Frames, UnreadableError
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.stacks import from_text
from trueup.exchange.readers.tensor_proto import array_of
from trueup.exchange.readers.tensorflow_messages import parse, text
from trueup.exchange.readers.tfdbg2_numbers import FULL_TENSOR, Kept, kept
from trueup.exchange.readers.tfrecord import record, records
from trueup.exchange.readers.tree import Tree
from trueup.foundation.frameworks.tensorflow_names import device_name, operation, standing

MOST = 2_000_000
"""Events of a file that are kept in memory, some 300 bytes each; what follows is said to be lost."""
MAX_LOCATION = 400
MAX_OUTPUTS = 4096
Location = tuple[bytes, ...]
"""Frames of a call, outermost first, by their ids."""

MAKING = frozenset({"default_variable_creator_v2", "_initialize_with_initializer", "_deferred_initialize"})
"""Functions of TensorFlow 2.21 and Keras 3.15 below which a variable gets its first value."""
SETTING_UP = frozenset({"__init__", "build", "_create_slots"})
"""Functions of an optimizer that compute no step."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in its file."""

    path: str
    at: int
    index: int
    """Which of an execution's tensors; -1: of a graph's."""
    mode: int
    name: str
    device: str
    kept: Kept

    @property
    def holds_numbers(self) -> bool:
        """Whether it is no text and no handle."""
        return self.mode != HANDLE and (self.mode != FULL_TENSOR or self.kept.dtype is not None)


HANDLE = -1
"""Stands for a mode where an operation gave what has no numbers."""
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
    phase: str
    """``optimizer``, ``backward`` or empty."""
    making: bool
    """Whether a variable gets its first value."""
    model: bool
    """Whether a Keras layer is running."""


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
    """The events of one process.

    Args:
        files: kind -> path.
    """

    def __init__(self, tree: Tree, files: Mapping[str, str], notes: Notes) -> None:
        self._tree, self._notes = tree, notes
        self.modes: set[int] = set()
        self.operations: dict[tuple[bytes, str], Operation] = {}
        self.placeholders: dict[bytes, list[str]] = {}
        """Of each graph, in the order in which they were made."""
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

    # ------------------------------------------------------------------------------------------------------- what is asked for
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
        return Stood(from_text(frames)[0], phase, making, model)

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
