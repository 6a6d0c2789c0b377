"""A capture as the other side of a comparison calls things: neutral slots and layouts, and a column of neutral operators.

Of one framework only tensors that a map file says lie in another order are changed. Whoever reads the result (`read_ahead`,
`streams`, `evidence`) reads it as any capture. A tensor in another order loses digest and sketch, which depend on the order.
Its statistics stay, and its bytes are handed out transposed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trueup.comparison.normalise import layouts
from trueup.comparison.normalise.layouts import NEUTRAL, channels_last, gradients_of_layers, laid_out, put, rows_of, unpadded
from trueup.comparison.normalise.updates import Updates
from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.mapping import Mapping
from trueup.foundation.frameworks.tables import Axes
from trueup.foundation.store import Capture, Piece
from trueup.foundation.store.declared import framework_of

KEYS = ("rank", "step", "seq", "level", "phase", "scope", "op", "slot", "shape", "value", "digest", "producer_seq", "forward_seq")

FORWARD = ("forward", "recompute")


class Translated(Capture):
    """A capture in neutral terms. It shares the original's problems and losses."""

    def __init__(self, capture: Capture, dialect: Dialect) -> None:
        self.__dict__.update(capture.__dict__)
        self.original, self.dialect = capture, dialect
        self.updates = Updates(capture, dialect)

    @property
    def names(self) -> frozenset[str]:
        """Columns that `records` can give."""
        return self._names | ({NEUTRAL} if self.dialect.framework else set())

    def records(
        self,
        columns: Sequence[str] | None = None,
        *,
        rank: int | Collection[int] | None = None,
        step: int | Collection[int] | None = None,
        **where: Any,
    ) -> pa.Table:
        """Return records as `Capture.records` does, in neutral terms."""
        slots = where.pop("slot", None)
        wanted = list(columns) if columns is not None else [*self._names, NEUTRAL]
        read = [name for name in dict.fromkeys([*wanted, *KEYS]) if name != NEUTRAL]
        table = self.original.records(read, rank=rank, step=step, **where)
        made = self.updates.of(table, read) if self.dialect.framework else None
        table = _Translation(table, self.dialect).table()
        if made is not None:
            table = _inserted(table, made)
        if slots is not None:
            kept = {slots} if isinstance(slots, str) else set(slots)
            table = table.filter(pc.is_in(table["slot"].cast(pa.string()), value_set=pa.array(sorted(kept))))
        return table.select(wanted)

    def pieces(self, rank: int, steps: Collection[int]) -> list[Piece] | None:  # noqa: ARG002
        """Return None: the parts are not in neutral terms."""
        return None

    def payload(
        self, rank: int, segment: str, key: str, view: Sequence[int] | None = None, digest: str | None = None
    ) -> NDArray[Any]:
        """Return a recorded tensor, its axes in the neutral order; see `Capture.payload`."""
        name, mark, told = key.partition(layouts.MARK)
        if not mark:
            return self.original.payload(rank, segment, name, view, digest)
        layout: dict[str, Any] = json.loads(told)
        found = self.original.payload(rank, segment, name, view, layout["digest"])
        return np.transpose(found.reshape(layout["shape"]), layout["axes"])


def sides(baseline: Capture, candidate: Capture, mapping: Mapping, *, mixed: bool) -> tuple[Capture, Capture]:
    """Return both captures in common terms, where they are of different frameworks or the map says how tensors lie."""
    if not mixed and not mapping.slots:
        return baseline, candidate
    first, second = (
        Translated(capture, Dialect((framework_of(capture) or "") if mixed else "", mapping, candidate=bool(side)))
        for side, capture in enumerate((baseline, candidate))
    )
    return first, second


def translated(captures: Sequence[Capture], mapping: Mapping, *, mixed: bool) -> list[Capture]:
    """Return further captures of the baseline's framework in the same terms."""
    return [sides(capture, capture, mapping, mixed=mixed)[0] for capture in captures]


class _Translation:
    """One table of records on its way."""

    def __init__(self, table: pa.Table, dialect: Dialect) -> None:
        self._dialect = dialect
        self._columns = {name: table[name].cast(pa.string()).to_pylist() for name in ("level", "scope", "op", "slot")}
        self._table = table = unpadded(table, self._columns, dialect)
        self._values, self._digests = table["value"].to_pylist(), table["digest"].to_pylist()
        self._forward = table["forward_seq"].to_pylist()
        self._phases = table["phase"].cast(pa.string()).to_pylist()
        self._defaults: dict[int, str] = {}  # by first row of a call recorded without arguments: its function's defaults
        keys = np.stack([table[name].to_numpy() for name in ("rank", "step", "seq")]) if len(table) else np.zeros((3, 0))
        first = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
        self._starts = np.r_[0, 1 + np.flatnonzero(first), len(table)].tolist() if len(table) else [0]

    def table(self) -> pa.Table:
        """Return the records in neutral terms, without those that are not compared."""
        levels, scopes, ops, slots = (self._columns[name] for name in ("level", "scope", "op", "slot"))
        known: dict[tuple[str, str, str, str], Any] = {}
        count = len(self._table)
        names, neutral, values, axes = slots[:], [""] * count, self._values[:], {}
        kept = np.ones(count, bool)
        shared = self._shared() if self._dialect.framework else set()
        seqs, others = self._table["seq"].to_pylist(), set[int]()  # a backward is of the function that its forward is
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            level, scope, op = levels[start], scopes[start], ops[start]
            told = next((self._values[k] for k in range(start, stop) if slots[k] == "arguments"), None)
            other = self._forward[start] in others or (level != "module" and self._dialect.is_other(op, {*slots[start:stop]}, told))
            others |= {seqs[start]} if other else set()
            called = self._dialect.neutral(level, scope, op, other=other)
            if level == "api" and not other and self._phases[start] in FORWARD and "arguments" not in slots[start:stop]:
                value = self._dialect.arguments(op, None) if self._dialect.framework else None
                self._defaults |= {} if value is None else {start: value}
            for k in range(start, stop):
                neutral[k] = called
                if slots[k] == "arguments" and self._dialect.framework:
                    values[k] = None if level == "module" or other else self._dialect.arguments(op, told)
                    kept[k] = values[k] is not None
                    continue
                key = (level, scope, op, slots[k])
                if key not in known:
                    known[key] = self._dialect.slot(*key)
                found = known[key]
                kept[k] = found.name is not None and (self._forward[k], slots[k].removeprefix("grad_")) not in shared
                names[k] = found.name or slots[k]
                if found.axes is not None:
                    axes[k] = found.axes
        if self._dialect.framework:
            axes = channels_last(self._table, self._columns, self._starts, self._dialect) | axes
        return self._made(names, neutral, values, self._reordering(axes), kept)

    def _shared(self) -> set[tuple[int, str]]:
        """Return ``(seq, slot)`` of inputs that are one tensor: a framework tells the gradient of each, another their sum."""
        found: set[tuple[int, str]] = set()
        slots, seqs = self._columns["slot"], self._table["seq"].to_pylist()
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            seen: dict[str, list[str]] = {}
            for k in range(start, stop):
                if slots[k].startswith("input.") and self._digests[k] is not None:
                    seen.setdefault(self._digests[k], []).append(slots[k])
            found.update((seqs[start], slot) for same in seen.values() if len(same) > 1 for slot in same)
        return found

    def _reordering(self, axes: dict[int, Axes]) -> dict[int, Axes]:
        """Return those axes that put elements in another order: of a vector, however many sizes of one it has, none does."""
        shapes = self._table["shape"]
        found = {}
        for k, order in axes.items():
            shape = shapes[k].as_py()
            if shape is not None and len(shape) == len(order) and list(order) != sorted(order):
                found[k] = order
        return found

    def _made(
        self, names: list[str], neutral: list[str], values: list[str | None], axes: dict[int, Axes], kept: NDArray[np.bool_]
    ) -> pa.Table:
        table = put(self._table, "slot", pa.array(names).dictionary_encode())
        table = put(table, "value", pa.array(values, pa.string()))
        table = table.append_column(NEUTRAL, pa.array(neutral, pa.string()).dictionary_encode())
        if "producer_slot" in table.column_names:
            table = put(table, "producer_slot", self._producers(names))
        found = gradients_of_layers(self._table, self._columns, self._dialect) if self._dialect.framework else None
        added = []
        if found is not None and found.slots:
            added.append(rows_of(table, found))
            axes = axes | {len(table) + n: order for n, order in found.axes.items()}
        if self._defaults:
            added.append(_as_arguments(table.take(pa.array(list(self._defaults))), list(self._defaults.values())))
        if added:
            table = pa.concat_tables([table, *added], promote_options="permissive").unify_dictionaries()
            kept = np.r_[kept, np.ones(len(table) - len(kept), bool)]
        if axes:
            table = laid_out(table, axes)
        if not self._dialect.framework:
            return table.filter(pa.array(kept))
        kept = kept & ~pc.equal(table["phase"].cast(pa.string()), "optimizer").to_numpy(zero_copy_only=False)
        return _ordered(table.filter(pa.array(kept)))

    def _producers(self, names: list[str]) -> pa.Array:
        """Return the names of producers' slots: those that calls in the table have now."""
        seqs = self._table["seq"].to_pylist()
        its = zip(seqs, self._columns["slot"], names, strict=True)
        renamed = {(seq, before): after for seq, before, after in its if before != after}
        before = self._table["producer_slot"].cast(pa.string()).to_pylist()
        made = self._table["producer_seq"].to_pylist()
        return pa.array([renamed.get((s, b), b) for s, b in zip(made, before, strict=True)], pa.string()).dictionary_encode()


def _as_arguments(table: pa.Table, values: list[str]) -> pa.Table:
    known = set(layouts.OF_CALL)
    made = {name: table[name] if name in known else pa.nulls(len(table), table[name].type) for name in table.column_names}
    slots = pa.array(["arguments"] * len(table)).dictionary_encode()
    return pa.table({**made, "slot": slots, "value": pa.array(values, pa.string())})


def _inserted(table: pa.Table, made: pa.Table) -> pa.Table:
    """Return both tables' rows, sorted as records are."""
    columns = [made[name].cast(table[name].type) for name in table.column_names]
    both = pa.concat_tables([table, pa.table(dict(zip(table.column_names, columns, strict=True)))], promote_options="permissive")
    return _ordered(both.unify_dictionaries())


def _ordered(table: pa.Table) -> pa.Table:
    """Return rows sorted by call, those of a call as they stand."""
    return table.take(pa.array(np.lexsort([table[name].to_numpy() for name in ("seq", "step", "rank")])))
