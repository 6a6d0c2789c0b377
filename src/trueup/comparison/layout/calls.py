"""The calls of one rank and step that any layout of the same training makes, by names that no layout changes.

Left out are collectives, what moves tensors on and off a mesh (DTensor, FSDP), and views: none of them computes, and each layout
has others. What a left-out call wrote counts as made by the call that made its input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from trueup.foundation.facts.operators import has
from trueup.foundation.frameworks.trees import WRAPPERS
from trueup.foundation.store import sketch_matrix
from trueup.foundation.store.columns import Array

Key = tuple[str, str, str, str, int]  # phase, level, scope, op, ordinal

LEVELS = ("module", "api")
"""Below these, each layout runs operators of its own."""

WRAPPING = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule", "CheckpointWrapper"})

MACHINERY = ("fsdp.", "torch.distributed.", "c10d", "_c10d", "aten.")
"""How the names of functions begin that serve a layout alone; functions named after dispatcher operators are DTensor's."""

_INSIDE = re.compile(rf"(?:^|\.)(?:{'|'.join(WRAPPERS)})(?=\.|$)")


@dataclass(slots=True)
class Call:
    """One call of a rank: ``rows`` are the rows of its slots in the rank's table."""

    key: Key
    seq: int
    parent: int | None
    forward: int | None
    rows: dict[str, int] = field(default_factory=dict)


@dataclass
class Calls:
    """The calls of one rank and step that are kept, in order, with the rows and sketches they were read from."""

    kept: dict[Key, Call]
    rows: list[dict[str, Any]]
    sketches: Array
    keys: dict[int, Key]  # of kept calls, by ``seq``
    outer: dict[int, int | None]  # the call around each that was left out, by ``seq``
    made: dict[tuple[int, str], tuple[int, str] | None]
    """Who made what a left-out call wrote, by ``seq`` and slot: of one that packs several tensors nobody."""

    def around(self, seq: int | None) -> int | None:
        """Return the nearest kept call, from one outwards."""
        while seq is not None and seq not in self.keys:
            seq = self.outer.get(seq)
        return seq


def plain(name: str) -> str:
    """Return a scope or the name of a parameter without modules that wrap others."""
    return _INSIDE.sub("", name).lstrip(".")


def class_of(op: str) -> str:
    """Return the class of a module, for ``fully_shard`` makes an ``FSDPBlock`` of a ``Block``."""
    return op[4:] if op.startswith("FSDP") and len(op) > 4 and op[4].isupper() else op


def calls_of(table: pa.Table, classes: Mapping[str, str] | None = None) -> Calls:
    """Take the calls out of a table of records of one rank and step, sketches included. ``classes``: by scope, the modules' classes
    in the other run: a class that it has nowhere (``ColumnParallelLinear``) goes by that of its scope there."""
    known = frozenset((classes or {}).values())
    sketches = sketch_matrix(table["sketch"])
    rows = table.drop_columns(["sketch"]).to_pylist()
    found = Calls({}, rows, sketches, {}, {}, {})
    ordinals: dict[tuple[str, str, str, str], int] = {}
    left_out: set[int] = set()
    calls: dict[int, list[int]] = {}

    def named(op: str, scope: str) -> str:
        kind = class_of(op)
        return kind if classes is None or kind in known or "." in kind else classes.get(scope, kind)

    for n, row in enumerate(rows):
        calls.setdefault(row["seq"], []).append(n)
    for seq, held in calls.items():
        first = rows[held[0]]
        parent, op = first["parent"], first["op"]
        wraps = first["level"] == "module" and op in WRAPPING
        if parent in left_out or (first["level"] != "module" and _serves(first)) or first["phase"] == "collective" or wraps:
            if not wraps:
                left_out.add(seq)
            found.outer[seq] = parent
            _pass_on(found, seq, [rows[n] for n in held])
            continue
        scope, level = plain(first["scope"]), first["level"]
        name = (first["phase"], level, scope, named(op, scope) if level == "module" else op)
        ordinals[name] = ordinals.get(name, -1) + 1
        call = Call((*name, ordinals[name]), seq, parent, first["forward_seq"], {plain(rows[n]["slot"]): n for n in held})
        found.kept[call.key] = call
        found.keys[seq] = call.key
    return found


def _serves(row: dict[str, Any]) -> bool:
    return (row["op"].startswith(MACHINERY) and not row["op"].startswith(f"{MACHINERY[1]}optim")) or has(row["op"], "view")


def _pass_on(found: Calls, seq: int, rows: list[dict[str, Any]]) -> None:
    given = next((row for row in rows if row["slot"].startswith(("input.", "grad_output."))), None)
    for row in rows:
        if row["slot"].startswith(("output.", "grad_input.")):
            whole = given is not None and given["numel"] == row["numel"] and given["producer_seq"] is not None
            found.made[seq, row["slot"]] = (given["producer_seq"], given["producer_slot"]) if whole and given else None
