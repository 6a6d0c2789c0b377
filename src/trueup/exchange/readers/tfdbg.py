"""TensorFlow's debugger, version 1: what ``DumpingDebugWrapperSession`` and ``DumpingDebugHook`` write, a file for each tensor.

    run_<microseconds>_<k>/
        _tfdbg_core_metadata_sessionrun..._<microseconds>          which run of the session it was
        _tfdbg_device_,job_localhost,replica_0,task_0,device_CPU_0/
            _tfdbg_graph_hash..._<microseconds>                    the graph of the device, with the debugger's own nodes
            net/head/MatMul_0_DebugIdentity_<microseconds>         output 0 of node net/head/MatMul

Each file is one Event. The graph says what an operation is and what it reads, so a call has its inputs: what the operations before
it gave. precision_tool writes such runs to ``precision_data/tf/tf_debug``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trueup.exchange.readers.contents import MOST, array_of, dtype_of, parse, require, text
from trueup.exchange.readers.dump import Array, Dump, ForeignCall, ForeignTensor, Notes, Part, Tree, UnreadableError, places
from trueup.foundation.frameworks.dialect import APPLIES, PASSED_OVER, READS, UPDATE, device_name, operation, standing

_FILE = re.compile(r"(?P<node>.+)_(?P<slot>\d{1,6})_(?P<debug>Debug[A-Za-z]+)_(?P<time>\d{10,20})")
_DEVICE = re.compile(r"_tfdbg_device_(?P<name>[^/]*)")
_RUN = re.compile(r"run_(\d{1,20})")
_COPY = re.compile(r"__copy_(?P<node>.+)_(?P<slot>\d+)")
_SUMMARY = ("", "numel", "n_nan", "n_neginf", "", "n_zero", "", "n_posinf", "min", "max", "mean", "variance")
"""What DebugNumericSummary gives first; then the dtype, the number of dimensions and the sizes (core/kernels/debug_ops.h)."""
_OWN = ("__copy_", "__dbg_", "_arg_", "_retval_")


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    node: str
    slot: int
    debug: str
    time: int
    device: str


@dataclass(frozen=True, slots=True)
class _Node:
    op: str
    inputs: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Run:
    """One run of a session."""

    folder: str
    files: list[_File] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    metadata: str | None = None


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find files below folders that are named after devices."""
    runs: dict[str, _Run] = {}
    for path in sorted(tree.files):
        parts = path.split("/")
        at = next((k for k, part in enumerate(parts[:-1]) if _DEVICE.fullmatch(part)), None)
        if at is None:
            continue
        folder = "/".join(parts[:at])
        run = runs.setdefault(folder, _Run(folder))
        if parts[-1].startswith("_tfdbg_graph_"):
            run.graphs.append(path)
        elif (match := _FILE.fullmatch("/".join(parts[at + 1 :]))) is not None:
            device = device_name(_device_of(parts[at]))
            run.files.append(_File(path, match["node"], int(match["slot"]), match["debug"], int(match["time"]), device))
    runs = {folder: run for folder, run in runs.items() if run.files}
    if not runs:
        return None
    require("trueup[tfdbg]", f"{tree.source}, a dump of TensorFlow's debugger,", "google_crc32c")
    for path in sorted(tree.files):
        folder, _, name = path.rpartition("/")
        if folder in runs and name.startswith("_tfdbg_core_metadata"):
            runs[folder].metadata = path
    dump_parts, details = _parts(tree, runs, notes)
    return Dump("tfdbg", "tensorflow", ("api",), details, dump_parts, notes, _LACKS)


_LACKS = [
    "the lines of code are not in the dump",
    "what was fed, what a graph's optimizer fused and what the debugger was not told to watch are not in the dump",
]


def _device_of(folder: str) -> str:
    """Return ``/device:GPU:0`` for ``_tfdbg_device_,job_localhost,replica_0,task_0,device_GPU_0``."""
    match = re.search(r"device_([A-Za-z]+)_(\d+)$", folder)
    return f"/device:{match[1]}:{match[2]}" if match else ""


def _parts(tree: Tree, runs: Mapping[str, _Run], notes: Notes) -> tuple[list[Part], str]:
    """Put runs into steps: the run after one in which an optimizer stepped begins a step, as in a capture."""
    placed: dict[tuple[int, int], list[_Graphed]] = {}
    by_rank: dict[int, list[_Run]] = {}
    for run in runs.values():
        by_rank.setdefault(places(f"{run.folder}/x").get("rank", 0), []).append(run)
    details = "stats"
    for rank, ordered in by_rank.items():
        step, stepped = 0, False
        for run in sorted(ordered, key=lambda one: _index(tree, one, notes)):
            graphed = _Graphed(tree, run, notes)
            if stepped:
                step, stepped = step + 1, False
            placed.setdefault((rank, step), []).append(graphed)
            stepped = stepped or graphed.updates
            if any(one.debug == "DebugIdentity" for one in run.files):
                details = "tensor"
    return [Part(rank, step, partial(_calls, group)) for (rank, step), group in sorted(placed.items())], details


def _index(tree: Tree, run: _Run, notes: Notes) -> tuple[int, str]:
    """Return which run of the session it was: as its metadata say, else by the time in its folder's name."""
    try:
        if run.metadata is not None:
            told = json.loads(_event(tree, run.metadata).log_message.message)
            return int(told["session_run_index"]), run.folder
    except (OSError, UnreadableError, ValueError, TypeError, LookupError, RecursionError):
        notes.lose("which run of the session it was cannot be read; runs are in the order of their folders' times", run.folder)
    match = _RUN.match(run.folder.rpartition("/")[2])
    return int(match[1]) if match else min(one.time for one in run.files), run.folder


def _event(tree: Tree, path: str) -> Any:
    if tree.files[path] > MOST:
        raise UnreadableError(f"it is larger than {MOST:,} bytes")
    with tree.open(path) as file:
        return parse("Event", file.read())


def _calls(runs: list[_Graphed]) -> Iterator[ForeignCall]:
    for run in runs:
        yield from run.calls()


class _Graphed:
    """A run with what its graphs say."""

    def __init__(self, tree: Tree, run: _Run, notes: Notes) -> None:
        self.tree, self.run, self.notes = tree, run, notes
        self.nodes: dict[str, _Node] = {}
        for path in run.graphs:
            self._read(path)
        if not self.nodes:
            notes.lose("the graph is not there: operations go by their nodes' names, and their inputs are unknown", run.folder)
        names = [name for name, node in self.nodes.items() if APPLIES.match(node.op)]
        self.updated = frozenset(found[1] for name in names if (found := UPDATE.match(name)))
        self.updates = bool(names)  # whether an optimizer steps in it

    def _read(self, path: str) -> None:
        try:
            graph = parse("GraphDef", _event(self.tree, path).graph_def)
        except (OSError, UnreadableError) as error:
            self.notes.lose(f"a graph could not be read: {error}", path)
            return
        for node in graph.node:
            name = text(node.name)
            if not name.startswith(_OWN):
                self.nodes[name] = _Node(text(node.op), tuple(_read_from(text(one)) for one in node.input if one[:1] != b"^"))

    def calls(self) -> Iterator[ForeignCall]:
        """Yield a call for each node and each time it ran, in the order of time, then those that gave nothing (optimizers)."""
        made: dict[str, list[_File]] = {}
        for one in sorted(self.run.files, key=lambda f: (f.time, f.node, f.slot)):
            made.setdefault(one.node, []).append(one)
        outputs = {(node, one.slot): one for node, files in made.items() for one in files if one.debug == "DebugIdentity"}
        order = {node: k for k, node in enumerate(made)}
        for node in self.nodes:  # what has no output that is watched reads what is
            if node not in made and any(source in outputs for source in self.nodes[node].inputs):
                made[node] = []
        last = len(order)
        for node in sorted(made, key=lambda name: order.get(name, last)):
            yield from self._executions(node, made[node], outputs)

    def _executions(self, node: str, files: list[_File], outputs: Mapping[tuple[str, int], _File]) -> Iterator[ForeignCall]:
        known = self.nodes.get(node)
        op = known.op if known is not None else re.sub(r"_\d+$", "", node.rpartition("/")[2])
        if op in PASSED_OVER:
            return
        phase, scope, forward = standing(node, op, self.updated)
        runs: list[list[_File]] = [[]]
        for one in files:  # a node in a loop gives the same slot again
            if any((one.slot, one.debug) == (other.slot, other.debug) for other in runs[-1]):
                runs.append([])
            runs[-1].append(one)
        for k, group in enumerate(runs):
            tensors = []
            if known is not None and len(runs) == 1:
                given = ((n, outputs[source]) for n, source in enumerate(known.inputs) if source in outputs)
                tensors = [self._tensor(f"input.{n}", one) for n, one in given if not self._is_handle(one)]
            if op in READS:
                tensors += [self._tensor(f"input.{one.slot}", one) for one in group]
            tensors += [self._tensor(f"output.{one.slot}", one) for one in group]
            key = f"{self.run.folder}:{node}:{k}"
            named = None if forward is None else f"{self.run.folder}:{forward}:0"
            yield ForeignCall(key, "api", phase, scope, operation(op), tensors, forward=named)

    def _is_handle(self, one: _File) -> bool:
        known = self.nodes.get(one.node)
        return known is not None and known.op == "VarHandleOp"

    def _tensor(self, slot: str, one: _File) -> ForeignTensor:
        name = f"{one.node}:{one.slot}:{one.debug}"
        if one.debug == "DebugIdentity":
            return ForeignTensor(slot, name, device=one.device, load=partial(_load, self.tree, one.path))
        if one.debug == "DebugNumericSummary":
            try:
                return _summarised(ForeignTensor(slot, name, device=one.device), _load(self.tree, one.path))
            except (OSError, UnreadableError) as error:
                self.notes.lose(f"summaries could not be read: {error}", name)
        else:
            self.notes.say(f"what {one.debug} gives is not read", name)
        return ForeignTensor(slot, name, device=one.device)


def _read_from(name: str) -> tuple[str, int]:
    """Return the node and output that an input names, past the copy that the debugger put between."""
    if (copied := _COPY.fullmatch(name)) is not None:
        return copied["node"], int(copied["slot"][:6])
    node, _, slot = name.partition(":")
    return node, int(slot) if slot.isdecimal() and len(slot) < 7 else 0


def _load(tree: Tree, path: str) -> Array:
    """Read the tensor of an Event; raises UnreadableError if it holds none, or none of numbers."""
    values = _event(tree, path).summary.value
    if len(values) != 1:
        raise UnreadableError(f"it holds {len(values)} values, expected 1")
    return array_of(values[0].tensor)


def _summarised(tensor: ForeignTensor, numbers: Array) -> ForeignTensor:
    """Take the numbers of DebugNumericSummary."""
    given = [float(value) for value in numbers.reshape(-1)]
    if len(given) < len(_SUMMARY) + 2 or given[0] != 1 or not all(math.isfinite(one) for one in given[12:]):
        return tensor  # not initialised
    told = dict(zip(_SUMMARY, given, strict=False))
    tensor.dtype = dtype_of(int(given[12]))
    tensor.shape = tuple(int(size) for size in given[14:78])
    counts = {name: int(told[name]) for name in ("n_nan", "n_posinf", "n_neginf", "n_zero")}
    finite = told["numel"] - counts["n_nan"] - counts["n_posinf"] - counts["n_neginf"]
    columns: dict[str, float] = dict(counts)
    if finite > 0 and math.isfinite(told["mean"]) and told["variance"] >= 0:
        columns |= {"min": told["min"], "max": told["max"], "mean": told["mean"]}
        columns["l2"] = math.sqrt(finite * (told["variance"] + told["mean"] ** 2))
    tensor.statistics = columns
    return tensor
