"""Folders with a file for each tensor, whose names say what it is.

**Of any origin** (`find`): each .npy, .npz and .pt file is an output of a call whose scope is the file's name.
``step1/rank0/encoder.layers.0.npy`` is ``encoder.layers.0`` of rank 0, step 1; ``encoder/attn.output.1.npy`` has slot ``output.1``
of ``encoder.attn``; members of a .npz and of a dictionary in a .pt file are slots by their keys.

**Of a graph** (`find_graph`), as tfdbg_ascend, precision_tool and msaccucmp's ``convert`` leave them:
``conv1_Conv2D.0.1589195081588018.npy`` is output 0 of node ``conv1/Conv2D``, at a time in microseconds;
``Conv2D.conv1_Conv2D.1147.1589195081588018.output.0.npy`` is the same of an Ascend kernel (type, node, task, [stream,] time).
A name that was too long is a hash, which ``mapping.csv`` resolves. Slashes were written as underscores: the node's name is the
scope, and what follows its last underscore is the operator.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from trueup.exchange.readers.contents import EMPTY_ZIP, NPY, ZIP, npz_members, pt_tensors, read_npy, read_npz
from trueup.exchange.readers.dump import (
    Dump,
    ForeignCall,
    ForeignTensor,
    Notes,
    Part,
    Tree,
    UnreadableError,
    base,
    folder_of,
    places,
)

_PLACES = re.compile(r"(?:step|rank|proc)[-_]?\d{1,9}|rank", re.IGNORECASE)
_SLOT = re.compile(r"(?P<scope>.+?)[._](?P<slot>(?:input|output|grad_input|grad_output|param|grad_param)(?:\.\w+)*)$")


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find arrays by their magic."""
    kinds = {path: kind for path in sorted(tree.files) if (kind := _kind(tree, path)) is not None}
    if not kinds:
        return None
    parts = [Part(*at, partial(_calls, tree, {path: kinds[path] for path in paths}, notes)) for at, paths in _by_place(kinds)]
    lacks = ["what the tensors are is known by their names alone, and the order in which they were computed is unknown"]
    return Dump("a folder of arrays", None, ("module",), "tensor", parts, notes, lacks)


def _kind(tree: Tree, path: str) -> str | None:
    head = tree.head(path)
    if head.startswith(NPY):
        return "npy"
    if head.startswith((ZIP, EMPTY_ZIP)):
        return "npz" if path.lower().endswith(".npz") else "pt"
    return {".npy": "npy", ".npz": "npz"}.get(path[-4:].lower(), "pt" if path.lower().endswith((".pt", ".pth")) else None)


def _by_place(paths: Iterable[str]) -> list[tuple[tuple[int, int], list[str]]]:
    """Return the files of each rank and step, by the names of their folders."""
    placed: dict[tuple[int, int], list[str]] = {}
    for path in paths:
        place = places(path)
        placed.setdefault((place.get("rank", 0), place.get("step", 0)), []).append(path)
    return sorted(placed.items())


def _calls(tree: Tree, kinds: dict[str, str], notes: Notes) -> Iterator[ForeignCall]:
    """Yield a call for each scope, in the order of names."""
    for path, kind in kinds.items():
        scope, slot = _named(path)
        if tensors := list(_tensors(tree, path, kind, slot, notes)):
            yield ForeignCall(scope, "module", "forward", scope, "tensor", tensors)


def _tensors(tree: Tree, path: str, kind: str, slot: str | None, notes: Notes) -> Iterator[ForeignTensor]:
    try:
        if kind == "npy":
            yield ForeignTensor(slot or "output.0", path, load=partial(read_npy, tree, path))
        elif kind == "npz":
            for member in npz_members(tree, path):
                key = member.removesuffix(".npy")
                yield ForeignTensor(f"{slot or 'output'}.{key}", f"{path}/{key}", load=partial(read_npz, tree, path, member))
        else:
            for key, array in pt_tensors(tree, path):
                name = f"{slot or 'output'}.{key}" if key else slot or "output.0"
                yield ForeignTensor(name, f"{path}/{key}" if key else path, load=partial(np.asarray, array))
    except UnreadableError as error:
        notes.lose(f"files could not be read: {error}", path)


def _named(path: str) -> tuple[str, str | None]:
    """Return the scope that a path names, and its slot where it names one."""
    parts = path.split("/")
    stem = re.sub(r"\.(npy|npz|pt|pth)$", "", parts[-1], flags=re.IGNORECASE)
    scope = ".".join([*(part for part in parts[:-1] if not _PLACES.fullmatch(part)), stem])
    match = _SLOT.fullmatch(scope)
    return (match["scope"], match["slot"]) if match else (scope, None)


MAPPING = "mapping.csv"
MAPPING_LIMIT = 64 << 20

_KERNEL = re.compile(
    r"(?P<type>[^./]+)\.(?P<node>[^/]+?)\.(?P<task>\d+)(?:\.\d+)?\.(?P<time>\d{13,20})\.(?P<side>input|output)\.(?P<slot>\d+)"
)
_NODE = re.compile(r"(?P<node>[^/]+?)\.(?P<slot>\d+)\.(?P<time>\d{13,20})")
_TYPE = re.compile(r"(?:^|_)([A-Z][A-Za-z0-9]*)(?:_\d+)?$")


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    node: str
    side: str
    slot: int
    time: int
    name: str  # as the tool named it


def find_graph(tree: Tree, notes: Notes) -> Dump | None:
    """Find .npy files whose names end in a time, or in a time and a slot."""
    hashes = _mapping(tree, notes)
    files = {path: one for path in tree.ending(".npy") if (one := _parse(path, hashes)) is not None}
    if not files:
        return None
    if len(set(map(base, files))) > 1:
        notes.say("tensors of several folders are taken for one run; import one folder alone if they are not")
    parts = [Part(*at, partial(_nodes, tree, [files[path] for path in paths])) for at, paths in _by_place(files)]
    lacks = ["only outputs of graph nodes are in the dump, without their edges: a call's own error cannot be told from its inputs'"]
    if any(one.side == "input" for one in files.values()):
        lacks = ["the edges of the graph are not in the dump"]
    return Dump("tfdbg or precision_tool", "tensorflow", ("aten",), "tensor", parts, notes, lacks)


def _parse(path: str, hashes: dict[str, str]) -> _File | None:
    stem = path[len(folder_of(path)) : -len(".npy")]
    name = hashes.get(stem, hashes.get(f"{stem}.npy", stem)).removesuffix(".npy")
    if match := _KERNEL.fullmatch(name):
        return _File(path, match["node"], match["side"], int(match["slot"][:9]), int(match["time"]), name)
    if match := _NODE.fullmatch(name):
        return _File(path, match["node"], "output", int(match["slot"][:9]), int(match["time"]), name)
    return None


def _mapping(tree: Tree, notes: Notes) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in tree.ending(MAPPING):
        if tree.files[path] > MAPPING_LIMIT:
            notes.lose(f"{MAPPING} is larger than {MAPPING_LIMIT:,} bytes and was not read", path)
            continue
        try:
            with tree.open(path) as file:
                rows = csv.reader(io.TextIOWrapper(file, "utf-8", "replace", newline=""))
                found |= {row[0].strip(): row[1].strip().replace("/", "_") for row in rows if len(row) >= 2}
        except (OSError, csv.Error) as error:
            notes.lose(f"{MAPPING} cannot be read: {error}", path)
    return found


def _nodes(tree: Tree, files: Sequence[_File]) -> Iterator[ForeignCall]:
    """Yield a call for each node and time."""
    files = sorted(files, key=lambda one: (one.time, one.node, one.side, one.slot))
    first: dict[tuple[str, int], int] = {}
    for one in files:
        first.setdefault((one.node, one.time), len(first))
    ordered = sorted(files, key=lambda one: first[one.node, one.time])
    for (node, time), group in groupby(ordered, key=lambda one: (one.node, one.time)):
        tensors = [ForeignTensor(f"{one.side}.{one.slot}", one.name, load=partial(read_npy, tree, one.path)) for one in group]
        match = _TYPE.search(node)
        op = match[1] if match else node.rpartition("_")[2] or node
        backward = node.startswith(("gradients_", "gradient_tape_")) or "_gradients_" in node
        yield ForeignCall(f"{node}.{time}", "aten", "backward" if backward else "forward", node, op, tensors)
