"""Records in which tensors lie in another order, shapes turned and what depends on the order left out, or at another call.

**Channels last** (`channels_last`): which slots hold such data, and how their axes lie. A convolution, pool or batch norm of
Keras takes and gives ``[batch, ..., channels]``; the tables name these layers. Bytes tell the rest: a slot with the same elements
in the same shape holds the same tensor. Of a call that computes element by element (an Add, an activation, a module that is in no
table) all slots of that shape lie alike, and a gradient lies as what it is the gradient of. Sizes tell nothing: attention has
tensors of four axes, too.

**Padding** (`unpadded`): Keras pads in a layer before a convolution or a pool (`ZeroPadding2D`), other frameworks in the layer
itself. So such a layer takes what the padding was given, and its gradient is the padding's. Bytes tell which padding it was.

**Gradients of layers** (`gradients_of_layers`): a convolution with a bias is one function in PyTorch and two in Paddle, an LSTM
another kernel with other slots. Gradients of such functions have no counterpart. A layer's parameters have, so each one's gradient
becomes ``grad_param.<name>`` of its backward. Bytes tell it: a function of the layer read the parameter's, and its backward gave
the gradient of that slot. Where several parameters hold the same bytes their order tells.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.streams import Array
from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.tables import Axes

OF_CALL = ("rank", "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "forward_seq", "site", "neutral")
"""Columns that say which call a row belongs to; the others are of the tensor."""

Place = tuple[int, int, str]  # rank, step and scope
Held = tuple[tuple[int, ...], "str | None"]  # shape and digest of a tensor

NEUTRAL = "neutral"  # column that a translated capture has beside those of the format: the name by which a call is matched
MARK = "\0"  # begins what a payload's name is told of its layout; no framework's tensor names hold it


def put(table: pa.Table, name: str, column: Any) -> pa.Table:
    """Return a table with another column in place of one."""
    return table.set_column(table.schema.get_field_index(name), name, column)


def masked(column: pa.ChunkedArray, kept: Array) -> pa.ChunkedArray:
    """Return a column with nulls where it is not kept."""
    return column.take(pa.array(np.arange(len(column)), mask=~kept))


def laid_out(table: pa.Table, axes: dict[int, Axes]) -> pa.Table:
    """Turn the shapes of some slots, and leave out what depends on the order of their elements."""
    shapes = table["shape"].to_pylist()
    reordered = np.zeros(len(table), bool)
    layouts: dict[int, str] = {}
    digests = table["digest"].to_pylist()
    for k, order in axes.items():
        shape = shapes[k]
        shapes[k] = [shape[n] for n in order]
        moved = [n for n in order if shape[n] != 1]
        if moved != sorted(moved):
            reordered[k] = True
            layouts[k] = json.dumps({"shape": shape, "axes": list(order), "digest": digests[k]})
    table = put(table, "shape", pa.array(shapes, pa.list_(pa.int64())))
    for name in ("digest", "sketch"):
        if name in table.column_names:
            table = put(table, name, masked(table[name], ~reordered))
    if "payload_key" in table.column_names:
        keys = table["payload_key"].to_pylist()
        for k, layout in layouts.items():
            if keys[k] is not None:
                keys[k] = f"{keys[k]}{MARK}{layout}"
        table = put(table, "payload_key", pa.array(keys, pa.string()))
    return table


ROUNDS = 8
"""How far what is known of one call is carried on to others, at most."""

PRODUCTS = frozenset({"matmul", "linear", "embedding", "convolution"})  # compute along the last axis, or axes of their own
PADS = frozenset({"ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D"})  # layers that do nothing else (Keras 3.15)
KEPT = frozenset({*OF_CALL, "slot", "value"})  # columns of a row that are not the tensor's

Bytes = tuple[tuple[int, ...], str]


def channels_last(table: pa.Table, columns: dict[str, list[str]], starts: list[int], dialect: Dialect) -> dict[int, Axes]:
    """Return, by row, how the axes of data lie; rows without such data are left out. ``columns`` are ``level``, ``scope``, ``op``
    and ``slot`` as texts; ``starts`` says where calls begin, and the end."""
    calls = list(pairwise(starts))
    kinds = [_kind(dialect, *(columns[name][start] for name in ("level", "scope", "op"))) for start, _ in calls]
    if "channels last" not in kinds:
        return {}
    shapes, digests = table["shape"].to_pylist(), table["digest"].to_pylist()
    seqs, forwards = table["seq"].to_pylist(), table["forward_seq"].to_pylist()
    slots = columns["slot"]
    found: set[int] = set()
    bytes_of: set[Bytes] = set()
    places: set[tuple[int, str]] = set()

    def take(k: int) -> None:
        found.add(k)
        if digests[k] is not None:
            bytes_of.add((tuple(shapes[k]), digests[k]))
        if not slots[k].startswith("grad_"):
            places.add((seqs[k], slots[k]))

    for (start, stop), kind in zip(calls, kinds, strict=True):
        if kind == "channels last":
            for k in range(start, stop):
                if _is_data(slots[k], shapes[k]):
                    take(k)
    others = [call for call, kind in zip(calls, kinds, strict=True) if kind == "any"]
    for _ in range(ROUNDS):
        before = len(found)
        for start, stop in others:
            there = [k for k in range(start, stop) if _is_data(slots[k], shapes[k])]
            told = [
                k for k in there
                if k in found or (tuple(shapes[k]), digests[k]) in bytes_of
                or (forwards[k], slots[k].removeprefix("grad_")) in places
            ]  # fmt: skip
            alike = {tuple(shapes[k]) for k in told}
            for k in there:
                if k not in found and tuple(shapes[k]) in alike:
                    take(k)
        if len(found) == before:
            break
    return {k: (0, len(shapes[k]) - 1, *range(1, len(shapes[k]) - 1)) for k in found}


def _kind(dialect: Dialect, level: str, scope: str, op: str) -> str:
    """Return ``channels last`` for a layer that takes such data, ``any`` for what computes element by element."""
    if level == "module":
        layer = dialect.layer(scope, op)
        if layer is not None and dialect.framework in layer.own and layer.own[dialect.framework].channels_last:
            return "channels last"
        return "any" if layer is None or not layer.tensors else "other"
    row = dialect.function(op)
    return "any" if row is None or row.name not in PRODUCTS else "other"


def _is_data(slot: str, shape: list[int] | None) -> bool:
    return slot.startswith(("input.", "output.", "grad_")) and not slot.startswith("output.buffer.") and len(shape or ()) >= 3


def unpadded(table: pa.Table, columns: dict[str, list[str]], dialect: Dialect) -> pa.Table:
    """Return records in which layers that take padded data, and pad nothing themselves, take what was padded."""
    ops, slots = columns["op"], columns["slot"]
    if dialect.framework != "tensorflow" or PADS.isdisjoint(ops):
        return table
    ranks, steps, seqs, forwards, digests = (table[name].to_pylist() for name in ("rank", "step", "seq", "forward_seq", "digest"))
    at: dict[tuple[int, int, int, str], int] = {}  # rows of pads, by their call and slot
    gave: dict[tuple[int, int, str], int] = {}
    backwards: dict[tuple[int, int, int], int] = {}
    for k, op in enumerate(ops):
        if op in PADS:
            at[ranks[k], steps[k], seqs[k], slots[k]] = k
            if slots[k] == "output.0" and digests[k] is not None:
                gave[ranks[k], steps[k], digests[k]] = seqs[k]
            if forwards[k] is not None:
                backwards[ranks[k], steps[k], forwards[k]] = seqs[k]
    instead: dict[int, int] = {}
    padded: dict[tuple[int, int, int], int] = {}  # calls that take padded data, each with the pad's
    for k, op in enumerate(ops):
        pad = gave.get((ranks[k], steps[k], digests[k] or "")) if slots[k] == "input.0" and op not in PADS else None
        layer = dialect.layer(columns["scope"][k], op) if pad is not None and columns["level"][k] == "module" else None
        if layer is not None and pad is not None and layer.own[dialect.framework].channels_last:
            padded[ranks[k], steps[k], seqs[k]] = pad
            instead[k] = at.get((ranks[k], steps[k], pad, "input.0"), k)
    for k, slot in enumerate(slots):
        if slot == "grad_input.0" and (pad := padded.get((ranks[k], steps[k], forwards[k]))) is not None:
            back = backwards.get((ranks[k], steps[k], pad))
            if back is not None:
                instead[k] = at.get((ranks[k], steps[k], back, "grad_input.0"), k)
    if not instead:
        return table
    places = np.arange(len(table))
    places[list(instead)] = list(instead.values())
    taken = table.take(pa.array(places))
    return pa.table({name: (table if name in KEPT else taken)[name] for name in table.column_names})


@dataclass(slots=True)
class _Layer:
    """What is known of a layer in a step; numbers are rows."""

    params: dict[str, Held] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # of its backward calls: seq -> first row
    read: dict[Held, dict[tuple[int, str], None]] = field(default_factory=lambda: defaultdict(dict))
    """What its functions read: by shape and digest, the calls and slots in order."""
    gradients: dict[tuple[int, str], int] = field(default_factory=dict)  # what its functions gave: by forward call and slot
    op: str = ""


@dataclass(slots=True)
class Gradients:
    """Rows to be made: each has the tensor of one row and the call of another."""

    tensors: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    params: list[tuple[str, str]] = field(default_factory=list)  # scope and slot of each parameter, as recorded
    axes: dict[int, Axes] = field(default_factory=dict)


def gradients_of_layers(table: pa.Table, columns: dict[str, list[str]], dialect: Dialect) -> Gradients:
    """Find gradients of layers' parameters in records of whole steps; ``columns``: `level`, `scope`, `op`, `slot` as texts."""
    made = Gradients()
    for (_, _, scope), layer in _layers(table, columns).items():
        row = dialect.layer(scope, layer.op)
        if row is None or not row.tensors or len(layer.calls) != 1:  # of a layer that ran twice each call has a share
            continue
        by_bytes: dict[Held, list[str]] = defaultdict(list)
        named = {slot: dialect.slot("module", scope, layer.op, slot) for slot in layer.params}
        for slot, held in layer.params.items():
            if named[slot].name is not None:  # a running mean, which Paddle calls a parameter, has no gradient
                by_bytes[held].append(slot)
        for held, slots in by_bytes.items():
            there = [k for key in layer.read[held] if (k := layer.gradients.get(key)) is not None]
            if len(there) != len(slots):
                continue
            for slot, k in zip(slots, there, strict=True):
                found = named[slot]
                if found.axes is not None:
                    made.axes[len(made.tensors)] = found.axes
                made.tensors.append(k)
                made.calls.append(next(iter(layer.calls.values())))
                made.slots.append(f"grad_{found.name}")
                made.params.append((scope, slot))
    return made


def _layers(table: pa.Table, columns: dict[str, list[str]]) -> dict[Place, _Layer]:
    found: dict[Place, _Layer] = defaultdict(_Layer)
    phases = table["phase"].cast(pa.string()).to_pylist()
    names = ("rank", "step", "seq", "shape", "digest", "forward_seq")
    ranks, steps, seqs, shapes, digests, forwards = (table[name].to_pylist() for name in names)
    for k, (level, scope, op, slot) in enumerate(zip(*(columns[n] for n in ("level", "scope", "op", "slot")), strict=True)):
        place = ranks[k], steps[k], scope
        held = tuple(shapes[k] or ()), digests[k]
        if level == "module" and phases[k] == "backward":
            found[place].calls.setdefault(seqs[k], k)
        elif level == "api" and phases[k] == "backward" and slot.startswith("grad_input."):
            found[place].gradients[forwards[k], slot.removeprefix("grad_")] = k
        elif phases[k] == "forward" and digests[k] is not None:
            if level == "module" and slot.startswith("param."):
                found[place].op = op
                found[place].params.setdefault(slot, held)
            elif level == "api" and slot.startswith("input."):
                found[place].read[held][seqs[k], slot] = None
    return found


def rows_of(table: pa.Table, found: Gradients) -> pa.Table:
    """Return the rows that were found, of records that have a column ``neutral``."""
    tensors, calls = pa.array(found.tensors, pa.int64()), pa.array(found.calls, pa.int64())
    made = {name: table[name].take(calls if name in OF_CALL else tensors) for name in table.column_names}
    made["slot"] = pa.array(found.slots, pa.string()).dictionary_encode()
    for name in ("producer_seq", "producer_slot"):
        if name in made:
            made[name] = pa.nulls(len(found.slots), table[name].type)
    return pa.table(made)
