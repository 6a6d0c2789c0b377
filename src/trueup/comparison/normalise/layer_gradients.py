"""Gradients of a layer's parameters as slots of its backward, whatever functions the framework makes of the layer.

A convolution with a bias is one function in PyTorch and two in Paddle, an LSTM another kernel with other slots: gradients of such
functions have no counterpart. A layer's parameters have, so each one's gradient becomes ``grad_param.<name>`` of its backward.
Bytes tell it: a function of the layer read the parameter's, and its backward gave the gradient of that slot. Where several
parameters hold the same bytes their order tells.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pyarrow as pa

from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.tables import Axes

OF_CALL = ("rank", "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "forward_seq", "site", "neutral")
"""Columns that say which call a row belongs to; the others are of the tensor."""

Place = tuple[int, int, str]  # rank, step and scope
Bytes = tuple[tuple[int, ...], "str | None"]  # shape and digest of a tensor


@dataclass(slots=True)
class _Layer:
    """What is known of a layer in a step; numbers are rows."""

    params: dict[str, Bytes] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # of its backward calls: seq -> first row
    read: dict[Bytes, dict[tuple[int, str], None]] = field(default_factory=lambda: defaultdict(dict))
    """What its functions read: by shape and digest, the calls and slots in order."""
    gradients: dict[tuple[int, str], int] = field(default_factory=dict)  # what its functions gave: by forward call and slot
    op: str = ""


@dataclass(slots=True)
class Found:
    """Rows to be made: each has the tensor of one row and the call of another."""

    tensors: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    params: list[tuple[str, str]] = field(default_factory=list)  # scope and slot of each parameter, as recorded
    axes: dict[int, Axes] = field(default_factory=dict)


def find(table: pa.Table, columns: dict[str, list[str]], dialect: Dialect) -> Found:
    """Find gradients of layers' parameters in records of whole steps; ``columns``: `level`, `scope`, `op`, `slot` as texts."""
    made = Found()
    for (_, _, scope), layer in _layers(table, columns).items():
        row = dialect.layer(scope, layer.op)
        if row is None or not row.tensors or len(layer.calls) != 1:  # of a layer that ran twice each call has a share
            continue
        by_bytes: dict[Bytes, list[str]] = defaultdict(list)
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
    ranks, steps, seqs, shapes, digests, forwards = (
        table[name].to_pylist() for name in ("rank", "step", "seq", "shape", "digest", "forward_seq")
    )
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


def rows(table: pa.Table, found: Found) -> pa.Table:
    """Return the rows that were found, of records that have a column ``neutral``."""
    tensors, calls = pa.array(found.tensors, pa.int64()), pa.array(found.calls, pa.int64())
    made = {name: table[name].take(calls if name in OF_CALL else tensors) for name in table.column_names}
    made["slot"] = pa.array(found.slots, pa.string()).dictionary_encode()
    for name in ("producer_seq", "producer_slot"):
        if name in made:
            made[name] = pa.nulls(len(found.slots), table[name].type)
    return pa.table(made)
