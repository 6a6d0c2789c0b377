"""Data whose channels come last (Keras), as records of a framework show it: which slots hold such, and how their axes lie.

A convolution, a pool, a batch norm of Keras takes and gives ``[batch, ..., channels]``: the tables say of which layers that is
true. What other calls do with such a tensor is told by its bytes: a slot that holds the same elements in the same shape holds
the same tensor. Of a call that computes element by element (an Add, an activation, a module that is in no table) all slots of
that shape lie alike, and a gradient lies as what it is the gradient of. Nothing is told by sizes: attention has tensors of four
axes, too.
"""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa

from trueup.comparison.normalise.dialects import Dialect
from trueup.frameworks.tables import Axes

ROUNDS = 8
"""How far what is known of one call is carried on to others, at most."""

PRODUCTS = frozenset({"matmul", "linear", "embedding", "convolution"})
"""Functions that compute along the last axis, or along axes of their own."""

Bytes = tuple[tuple[int, ...], str]


def channels_last(
    table: pa.Table, columns: dict[str, list[str]], starts: list[int], dialect: Dialect
) -> dict[int, Axes]:
    """Return, by row, how the axes of data lie; rows that hold no such data are not in it.

    Args:
        table: records, as recorded.
        columns: their ``level``, ``scope``, ``op`` and ``slot`` as texts.
        starts: where calls begin, and the end.
        dialect: what the framework calls things.
    """
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
