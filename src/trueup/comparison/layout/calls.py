"""The calls of one rank and step that any layout of the same training makes, by names that no layout changes.

Left out are collectives, what moves tensors on and off a mesh (DTensor, FSDP), and views: none of them computes, and each layout
has others. What a left-out call wrote counts as made by the call that made its input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

SCALING = frozenset({"div_", "mul_", "__itruediv__", "__imul__", "true_divide_", "divide_", "multiply_"})

SORTING = frozenset({"argsort", "sort", "nonzero"})
MOVING = SORTING | {
    "cat", "concat", "index_select", "gather", "take_along_dim", "bincount", "repeat_interleave", "index_copy", "index_add",
    "scatter", "scatter_add", "index_put", "zeros", "zeros_like", "new_zeros",
}  # fmt: skip
"""Functions that sort rows (by expert, or those that a mask keeps), and those that move them then; in place with an underscore."""

COPIES = frozenset({"clone", "contiguous"})
"""What DTensor does to gradients beside the backward of recorded calls."""

CARRYING = COPIES | {"cat", "concat", "stack", "copy_", "narrow"}
"""What is done to tensors before and after they are sent."""

DIVIDING = frozenset({"div", "__truediv__", "true_divide", "divide", "mul", "__mul__", "__rmul__", "multiply"})
NEARLY = 4e-3
"""Relative error of a loss that was divided: bfloat16 rounds by 2^-8 at most."""

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
    head: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # level, scope and operator of each call, by ``seq``

    updates: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """Of calls that update a weight: which time the optimizer goes through all of them, and its number."""

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


def calls_of(
    table: pa.Table, classes: Mapping[str, str] | None = None, rename: Callable[[str], str] = str, partial: Collection[str] = (),
    shares: Collection[int] = (), *, stepped: bool = True,
) -> Calls:  # fmt: skip
    """Take the calls out of a table of records of one rank and step, sketches included. ``classes``: by scope, the modules' classes
    in the other run: a class that it has nowhere (``ColumnParallelLinear``) goes by that of its scope there. ``rename`` makes names
    of layers global; modules of ``partial`` hold other parts of the model in one of the runs, and are no calls; ``shares``: numbers
    of parts into which the batch is cut: a loss may be divided by them, so that gradients can be added up. ``stepped``: whether the
    optimizer's calls are compared, and what is done to gradients before it."""
    known = frozenset((classes or {}).values())
    backward = math.inf
    sketches = sketch_matrix(table["sketch"])
    rows = table.drop_columns(["sketch"]).to_pylist()
    found = Calls({}, rows, sketches, {}, {}, {})
    ordinals: dict[tuple[str, str, str, str], int] = {}
    left_out: set[int] = set()
    shared: dict[int, int] = {}  # where the loss stands that a call divides, by the call
    calls: dict[int, list[int]] = {}

    def named(op: str, scope: str) -> str:
        kind = class_of(op)
        return kind if classes is None or kind in known or "." in kind else classes.get(scope, kind)

    for n, row in enumerate(rows):
        calls.setdefault(row["seq"], []).append(n)
    sorting = {row["scope"] for row in rows if row["level"] == "api" and row["op"].rpartition(".")[2] in SORTING}
    closed = _closed(rows)
    carried = _serving(rows, closed, sorting, stepped=stepped)
    for seq, held in calls.items():
        first = rows[held[0]]
        found.head[seq] = first["level"], first["scope"], first["op"]
        parent, op = first["parent"], first["op"]
        scope = rename(plain(first["scope"]))
        wraps = first["level"] == "module" and (op in WRAPPING or scope in partial)
        backward = min(backward, seq) if first["phase"] == "backward" else backward
        if _shares(first, [rows[n] for n in held], shares):
            shared[seq] = next(n for n in held if rows[n]["slot"] == "input.0")
        serves = first["level"] != "module" and (
            seq in shared
            or _serves(first)
            or seq in carried
            or (first["scope"] in sorting and _moves([rows[n] for n in held]))
            or first["forward_seq"] in shared
            or _copies(first, found)
            or (seq > backward and _averages([rows[n] for n in held]))
        )
        if parent in left_out or parent in closed or serves or first["phase"] == "collective" or wraps:
            if not wraps:
                left_out.add(seq)
            found.outer[seq] = parent
            _pass_on(found, seq, [rows[n] for n in held])
            continue
        level = first["level"]
        name = (first["phase"], level, scope, named(op, scope) if level == "module" else op)
        ordinals[name] = ordinals.get(name, -1) + 1
        rows_of = {_slot(rows[n], rename): shared.get(rows[n]["producer_seq"], n) for n in held}
        call = Call((*name, ordinals[name]), seq, parent, first["forward_seq"], rows_of)
        found.kept[call.key] = call
        found.keys[seq] = call.key
    return found


def _slot(row: Mapping[str, Any], rename: Callable[[str], str]) -> str:
    """Return the name of a slot; an optimizer's is that of a weight, whose layer goes by its global number."""
    name = plain(row["slot"])
    side, _, weight = name.partition(".")
    return f"{side}.{rename(weight)}" if row["phase"] == "optimizer" and name.endswith(".grad") else name


def tops(calls: Calls) -> dict[int, int]:
    """Return the outermost recorded call around each kept forward call, by ``seq``."""
    found: dict[int, int] = {}
    for key, call in calls.kept.items():
        if key[0] not in ("backward", "optimizer"):
            at, up = call.seq, call.parent
            while up is not None and up in calls.head:
                at, up = up, calls.kept[calls.keys[up]].parent if up in calls.keys else calls.outer.get(up)
            found[call.seq] = at
    return found


def trained(calls: Calls, around: Mapping[int, int]) -> set[int]:
    """Return the outermost calls that a backward goes through."""
    return {around[call.forward] for call in calls.kept.values() if call.forward is not None and call.forward in around}


def in_passes(calls: Calls, passes: int, staged: bool) -> list[Calls]:
    """Return the calls of each of several passes through the model, named as if it were the only one.

    A call of the backward belongs to the pass of its forward call; what runs once for all of them, as an optimizer, counts to the
    first. A pass that no backward goes through is no training (a pipeline asks for shapes so), and left out of several."""
    if passes == 1 and not staged:
        return [calls]
    around = tops(calls)
    back = trained(calls, around)
    found = [Calls({}, calls.rows, calls.sketches, {}, calls.outer, calls.made, calls.head, calls.updates) for _ in range(passes)]
    heads: dict[tuple[str, str, str], list[int]] = {}
    for top in sorted(set(around.values())):
        if top in back or (top in calls.keys and calls.keys[top][1] == "api"):
            heads.setdefault(calls.head[top], []).append(top)
    place: dict[int, int] = {}
    for head, held_tops in heads.items():
        more = len(held_tops) - passes if head[0] == "module" else len(held_tops) % passes
        some = held_tops[more:] if staged and more > 0 else held_tops
        place |= {top: n * passes // len(some) if not len(some) % passes else 0 for n, top in enumerate(some)}
    held: dict[int, int] = {}
    ordinals: dict[tuple[int, tuple[str, ...]], int] = {}
    for key, call in calls.kept.items():
        if call.forward is not None and (call.forward in held or call.forward in around):
            number = held.get(call.forward, -1)
        else:
            number = 0 if key[0] in ("optimizer", "backward") else place.get(around.get(call.seq, call.seq), -1)
        if number < 0:
            calls.outer[call.seq] = call.parent
            continue
        held[call.seq] = number
        ordinals[number, key[:4]] = ordinals.get((number, key[:4]), -1) + 1
        new = call if key[0] == "optimizer" else replace(call, key=(*key[:4], ordinals[number, key[:4]]))
        found[number].kept[new.key] = new
        found[number].keys[call.seq] = new.key
    return found


def _serves(row: Mapping[str, Any]) -> bool:
    return bool(row["op"].startswith(MACHINERY) and not row["op"].startswith(f"{MACHINERY[1]}optim")) or has(row["op"], "view")


def _moves(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a call only moves rows in a module that sorts them (tokens by their expert), or computes their places: each
    layout has other places for them, and what is computed from them shows whether they came to the right one."""
    made = [str(row["dtype"]) for row in rows if row["slot"].startswith("output.")]
    places = bool(made) and all(dtype.startswith(("int", "uint", "bool")) for dtype in made)
    return places or rows[0]["op"].rpartition(".")[2].rstrip("_") in MOVING


def _prepared(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return what is done outside of any module between the last backward and the optimizer, and that no backward goes through:
    gradients are cast, packed, scaled and cut. What the optimizer is given shows whether they are right."""
    steps = [row["seq"] for row in rows if row["phase"] == "optimizer"]
    end = min(steps, default=math.inf)
    back = [row["seq"] for row in rows if row["phase"] == "backward" and row["seq"] < end]
    begin, through = max(back, default=math.inf), {row["forward_seq"] for row in rows if row["phase"] == "backward"}
    return {
        row["seq"] for row in rows
        if begin < row["seq"] < end and row["level"] == "api" and not row["scope"] and row["phase"] == "forward"
    } - through  # fmt: skip


def _serving(rows: Sequence[Mapping[str, Any]], closed: Collection[int], sorting: Collection[str], *, stepped: bool) -> set[int]:
    """Return the calls that serve a layout, by what they read and who reads them."""
    found = _carried(rows)
    found |= _looked_up(rows, found)
    sent = {seq for seq, scope in _sending(rows, closed).items() if scope in sorting}
    found |= sent | {row["seq"] for row in rows if row["phase"] == "backward" and row["forward_seq"] in sent}
    return found if stepped else found | _prepared(rows)


def _carried(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the calls that pack what is sent and unpack what came, and their backward: collectives made all they are given, or
    read all that they make. Each layout has others, and what computes with the result shows what is in it."""
    collectives = {row["seq"] for row in rows if row["phase"] == "collective"}
    if not collectives:
        return set()
    given: dict[int, set[int | None]] = {}
    read: dict[int, set[int]] = {}
    for row in rows:
        if row["slot"].startswith(("input.", "grad_output.")):
            given.setdefault(row["seq"], set()).add(row["producer_seq"])
            if row["producer_seq"] is not None:
                read.setdefault(row["producer_seq"], set()).add(row["seq"])
    moves = {
        row["seq"]: row["forward_seq"] for row in rows
        if row["level"] == "api" and row["phase"] in ("forward", "backward") and row["op"].rpartition(".")[2] in CARRYING
    }  # fmt: skip
    found = set(collectives)
    for seq in moves:
        if given.get(seq) and given[seq] <= found:
            found.add(seq)
    for seq in reversed(list(moves)):
        if read.get(seq) and read[seq] <= found:
            found.add(seq)
    return found | {seq for seq, forward in moves.items() if forward in found}


def _sending(rows: Sequence[Mapping[str, Any]], closed: Collection[int]) -> dict[int, str]:
    """Return the closed functions in which ranks communicate, each with the module that calls it: tokens travel to their expert."""
    around = {row["seq"]: (row["parent"], row["scope"]) for row in rows}
    found: dict[int, str] = {}
    for row in rows:
        at = row["parent"] if row["phase"] == "collective" else None
        while at is not None and at in around and at not in closed:
            at = around[at][0]
        if at is not None and at in closed:
            found[at] = around[at][1]
    return found


def _closed(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the functions whose inside autograd does not see, and that run no module: those with a backward of their own, and
    every backward. Each layout computes in another way inside (attention around a ring, losses of a vocabulary that is cut); what
    they are given and make is compared."""
    around = {row["seq"]: row["parent"] for row in rows}
    holding: set[int | None] = {None}
    for row in rows:
        at = row["parent"] if row["level"] == "module" and row["phase"] != "collective" else None
        while at not in holding:
            holding.add(at)
            at = around.get(at)
    return {
        row["seq"] for row in rows
        if row["level"] == "api" and row["seq"] not in holding and (row["phase"] == "backward" or row["op"].endswith(".apply"))
    }  # fmt: skip


def _looked_up(rows: Sequence[Mapping[str, Any]], carried: Collection[int]) -> set[int]:
    """Return the functions that make integers of nothing but integers, which views and what is carried alone read: places where
    they look. Each layout has others, and what was looked up shows whether they are right."""
    reads: dict[int, set[int]] = {}
    silent, other = set(carried), set[int]()
    for row in rows:
        seq = row["seq"]
        if row["producer_seq"] is not None and row["slot"].startswith(("input.", "grad_output.")):
            reads.setdefault(row["producer_seq"], set()).add(seq)
        if row["level"] != "api" or not (row["dtype"] is None or str(row["dtype"]).startswith(("int", "uint"))):
            other.add(seq)
        if row["level"] == "api" and _serves(row):
            silent.add(seq)
    found: set[int] = set()
    for seq in sorted(reads.keys() - other - silent, reverse=True):
        if reads[seq] <= silent:
            found.add(seq)
            silent.add(seq)
    return found


def _shares(first: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], shares: Collection[int]) -> bool:
    """Tell whether a call outside of any module divides a single number by the number of parts of the batch."""
    if not shares or first["scope"] or first["phase"] != "forward" or first["op"].rpartition(".")[2] not in DIVIDING:
        return False
    told = {row["slot"]: row["mean"] for row in rows if row["numel"] == 1 and row["mean"] is not None}
    before, after = told.get("input.0"), told.get("output.0")
    if before is None or after is None:
        return False
    return any(share > 1 and abs(after * share - before) <= NEARLY * abs(before) for share in shares)


def _copies(row: Mapping[str, Any], found: Calls) -> bool:
    """Tell whether a call of the backward copies a gradient, and is not the backward of a copy."""
    forward = found.head.get(row["forward_seq"])
    return row["phase"] == "backward" and row["op"].rpartition(".")[2] in COPIES and (forward is None or forward[2] != row["op"])


def _averages(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a call after the backward multiplies a tensor in place by a number, outside of any module: a sum of gradients
    becomes their mean."""
    first = rows[0]
    if first["phase"] != "forward" or first["scope"] or first["op"].rpartition(".")[2] not in SCALING:
        return False
    return [row["slot"] for row in rows if row["slot"].startswith("input.")] == ["input.0"]


def _pass_on(found: Calls, seq: int, rows: list[dict[str, Any]]) -> None:
    given = next((row for row in rows if row["slot"].startswith(("input.", "grad_output."))), None)
    for row in rows:
        if row["slot"].startswith(("output.", "grad_input.")):
            whole = given is not None and given["numel"] == row["numel"] and given["producer_seq"] is not None
            found.made[seq, row["slot"]] = (given["producer_seq"], given["producer_slot"]) if whole and given else None
