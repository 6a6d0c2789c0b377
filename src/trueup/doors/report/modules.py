"""The module tree with the errors of the calls in it: one node a scope, errors by phase.

Built from the table of calls alone, so it needs no model: ``a.b.c`` stands below ``a.b``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.model import PHASES
from trueup.foundation.words.wording import one_line, sci

NODES = 2500
"""Most nodes shown; of a larger tree the upper levels."""
STEPS = (1e-4, 1e-2)
"""Relative errors from which a deviating cell is coloured more strongly."""
OUTSIDE = "outside any module"


@dataclass
class Cell:
    """The calls of one phase below a node."""

    calls: int = 0
    deviates: int = 0
    incomparable: int = 0
    error: float = 0.0
    """Largest relative L2 error among their outputs, of those that deviate where any does."""

    def add(self, other: Cell) -> None:
        """Take another cell's calls in."""
        self.calls += other.calls
        self.incomparable += other.incomparable
        if bool(other.deviates) == bool(self.deviates):
            self.error = max(self.error, other.error)
        elif other.deviates:
            self.error = other.error
        self.deviates += other.deviates

    @property
    def tone(self) -> str:
        """Name of its colour: calm, unsure, or one of three for what deviates."""
        if self.deviates:
            return f"bad-{1 + sum(self.error >= limit for limit in STEPS)}"
        return "unsure" if self.incomparable else "calm"

    @property
    def text(self) -> str:
        """What stands in it."""
        if self.deviates:
            return sci(self.error)
        return "not comparable" if self.incomparable else "equal" if self.error == 0 else sci(self.error)


@dataclass
class Module:
    """A scope with what lies below it."""

    name: str
    path: str
    cells: dict[str, Cell] = field(default_factory=dict)
    children: dict[str, Module] = field(default_factory=dict)
    culprits: int = 0
    is_open: bool = False

    @property
    def deviates(self) -> int:
        """Deviating calls below it."""
        return sum(cell.deviates for cell in self.cells.values())

    @property
    def calls(self) -> int:
        """Calls below it."""
        return sum(cell.calls for cell in self.cells.values())


@dataclass(frozen=True)
class Modules:
    """The whole tree, the phases that occur, and how many nodes were left out."""

    root: Module
    phases: tuple[str, ...]
    omitted: int


def module_tree(calls: pa.Table) -> Modules:
    """Add up the calls of every scope and of the scopes below it."""
    root = Module("all calls", "", is_open=True)
    seen: set[str] = set()
    for entry in _grouped(calls):
        cell = Cell(entry["calls"], 0, 0, entry["error"])
        cell.deviates = cell.calls if entry["state"] == "deviates" else 0
        cell.incomparable = cell.calls if entry["state"] == "incomparable" else 0
        seen.add(entry["phase"])
        for node in _path(root, entry["scope"]):
            node.cells.setdefault(entry["phase"], Cell()).add(cell)
            node.culprits += entry["calls"] if entry["role"] == "culprit" else 0
    _open_culprits(root)
    known = [phase for phase in PHASES if phase in seen]
    return Modules(root, (*known, *sorted(seen - set(known))), _cut(root))


def _grouped(calls: pa.Table) -> Iterator[dict[str, Any]]:
    if not calls.num_rows:
        return
    names = ("scope", "phase", "state", "role")
    table = pa.table({name: pc.fill_null(calls[name].cast(pa.string()), "") for name in names} | {"error": calls["error_out"]})
    grouped = table.group_by(list(names)).aggregate([("error", "max"), ([], "count_all")])
    for row in grouped.to_pylist():
        error = row["error_max"]
        yield {
            "scope": row["scope"], "phase": row["phase"], "state": row["state"], "role": row["role"],
            "calls": row["count_all"], "error": math.inf if error is None or math.isnan(error) else error,
        }  # fmt: skip


def _path(root: Module, scope: str) -> list[Module]:
    """Return the nodes from the root down to a scope, made where they are not there yet."""
    nodes = [root]
    parts = scope.split(".") if scope else [""]
    for k, part in enumerate(parts):
        path = ".".join(parts[: k + 1])
        made = nodes[-1].children.setdefault(part, Module(one_line(part) or OUTSIDE, path))
        nodes.append(made)
    return nodes


def _open_culprits(node: Module) -> None:
    """Open the way to each culprit, and nodes with a single child on the way."""
    for child in node.children.values():
        child.is_open = child.culprits > 0 or (node.is_open and len(node.children) == 1)
        _open_culprits(child)


def _cut(root: Module) -> int:
    """Drop the deepest levels until the tree is small enough; return how many nodes went."""
    levels = [[root]]
    while levels[-1]:
        levels.append([child for node in levels[-1] for child in node.children.values()])
    total = kept = 0
    last = None
    for depth, nodes in enumerate(levels):
        total += len(nodes)
        if last is None and total > NODES and depth:
            last = depth - 1
        kept += len(nodes) if last is None else 0
    if last is not None:
        for node in levels[last]:
            node.children = {}
    return total - kept
