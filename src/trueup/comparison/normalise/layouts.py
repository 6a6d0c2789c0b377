"""Records of which some tensors lie in another order: shapes turned, and what depends on the order left out. Both are Keras' ways.

**Channels last** (`channels_last`): which slots hold such data, and how their axes lie. A convolution, pool or batch norm of
Keras takes and gives ``[batch, ..., channels]``; the tables name these layers. Bytes tell the rest: a slot with the same elements
in the same shape holds the same tensor. Of a call that computes element by element (an Add, an activation, a module that is in no
table) all slots of that shape lie alike, and a gradient lies as what it is the gradient of. Sizes tell nothing: attention has
tensors of four axes, too.

**Padding** (`unpadded`): Keras pads in a layer before a convolution or a pool (`ZeroPadding2D`), other frameworks in the layer
itself. So such a layer takes what the padding was given, and its gradient is the padding's. Bytes tell which padding it was.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.streams import Array
from trueup.comparison.normalise.layer_gradients import OF_CALL
from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.tables import Axes

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
