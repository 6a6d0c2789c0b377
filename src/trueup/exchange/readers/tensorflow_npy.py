"""Folders of .npy that tfdbg_ascend, precision_tool and msaccucmp's ``convert`` leave: a file for each tensor of a graph.

``conv1_Conv2D.0.1589195081588018.npy`` is output 0 of node ``conv1/Conv2D``, at a time in microseconds;
``Conv2D.conv1_Conv2D.1147.1589195081588018.output.0.npy`` is the same of an Ascend kernel (type, node, task, [stream,] time).
A name that was too long is a hash, which ``mapping.csv`` resolves. Slashes were written as underscores: the node's name is the
scope, and what follows its last underscore is the operator.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from trueup.exchange.readers.arrays import read_npy
from trueup.exchange.readers.dump import Dump, ForeignCall, ForeignTensor, Part
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.tree import Tree, base, folder_of, places

NAME = "tensorflow"

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
    name: str
    """As the tool named it."""


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find .npy files whose names end in a time, or in a time and a slot."""
    hashes = _mapping(tree, notes)
    files = [one for path in tree.ending(".npy") if (one := _parse(path, hashes)) is not None]
    if not files:
        return None
    placed: dict[tuple[int, int], list[_File]] = {}
    for one in files:
        place = places(one.path)
        placed.setdefault((place.get("rank", 0), place.get("step", 0)), []).append(one)
    if len({base(one.path) for one in files}) > 1:
        notes.say("tensors of several folders are taken for one run; import one folder alone if they are not")
    parts = [Part(rank, step, _Nodes(tree, group).calls) for (rank, step), group in sorted(placed.items())]
    lacks = ["only outputs of graph nodes are in the dump, without their edges: a call's own error cannot be told from its inputs'"]
    if any(one.side == "input" for one in files):
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


class _Nodes:
    """The nodes of one rank and step."""

    def __init__(self, tree: Tree, files: list[_File]) -> None:
        self.tree = tree
        self.files = sorted(files, key=lambda one: (one.time, one.node, one.side, one.slot))

    def calls(self) -> Iterator[ForeignCall]:
        """Yield a call for each node and time."""
        first: dict[tuple[str, int], int] = {}
        for one in self.files:
            first.setdefault((one.node, one.time), len(first))
        ordered = sorted(self.files, key=lambda one: first[one.node, one.time])
        for (node, time), files in groupby(ordered, key=lambda one: (one.node, one.time)):
            tensors = [
                ForeignTensor(f"{one.side}.{one.slot}", one.name, load=partial(read_npy, self.tree, one.path)) for one in files
            ]
            match = _TYPE.search(node)
            op = match[1] if match else node.rpartition("_")[2] or node
            backward = node.startswith(("gradients_", "gradient_tape_")) or "_gradients_" in node
            yield ForeignCall(f"{node}.{time}", "aten", "backward" if backward else "forward", node, op, tensors)
