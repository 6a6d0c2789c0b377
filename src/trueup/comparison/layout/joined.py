"""A capture of several ranks as the capture of one process that does all of the work.

Whoever reads the result reads it as any capture. Steps are joined when they are asked for, each held against the same step of the
other run, which tells what neither placements nor the ranks themselves do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import RLock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trueup.comparison.layout.calls import LEVELS, Key, class_of
from trueup.comparison.layout.geometry import Geometry
from trueup.comparison.layout.inferring import Apart
from trueup.comparison.layout.joining import JOINED, Step, join
from trueup.comparison.layout.pieces import Way
from trueup.comparison.normalise.translated import Translated
from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.mapping import Mapping as Map
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture

KEPT = 2
"""Joined steps that are held: one that is compared, and one that is read ahead."""


def undeclared(key: Key, slot: str, axis: str) -> Way | None:  # noqa: ARG001
    """Return None: nobody declared anything."""
    return None


class Joined(Translated):
    """The ranks of a capture as one. ``other`` is the other run, joined already, None for the one that is joined first."""

    def __init__(
        self, capture: Capture, geometry: Geometry, other: Joined | None = None,
        declared: Callable[[Key, str, str], Way | None] = undeclared,
    ) -> None:  # fmt: skip
        super().__init__(capture, Dialect("", Map(), candidate=False))
        self.geometry, self.declared, self._other = geometry, declared, other
        self.apart: list[Apart] = []
        self.alone = 0  # calls that not all ranks make
        first = min(capture.ranks)
        self.ranks = {0: _as_one(capture.ranks[first])}
        self.root = {**capture.root, "levels": [level for level in LEVELS if level in capture.levels]}
        sizes = capture.sizes
        self._sizes = {(0, step): sizes[first, step] for step in capture.steps if all((r, step) in sizes for r in capture.ranks)}
        self._by_step = {step: parts for step, parts in self._by_step.items() if (0, step) in self._sizes}
        self._held: dict[int, Step] = {}
        self._made: dict[int, tuple[int, str] | None] = {}
        self._seen: set[int] = set()
        self._joining = RLock()
        self._data: frozenset[str] | None = None

    @property
    def levels(self) -> frozenset[str]:
        """Levels of its calls."""
        return self.original.levels & set(LEVELS)

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        """Rows of each step, before it is joined."""
        return self._sizes

    @property
    def data(self) -> frozenset[str]:
        """Axes along which the model's own inputs differ."""
        if self._data is None:
            self._data = _data_axes(self.original, self.geometry)
        return self._data

    def step(self, number: int) -> Step:
        """Return a joined step."""
        with self._joining:
            found = self._held.get(number)
            if found is None:
                other = {} if self._other is None or (0, number) not in self._other.sizes else self._other.step(number).slots
                found = join(self.original, self.geometry, number, self.data, other, self.declared, self._made)
                if number not in self._seen:
                    self._seen.add(number)
                    self.apart += found.apart
                    self.alone += found.alone
                while len(self._held) >= KEPT:
                    self._held.pop(next(iter(self._held)))
                self._held[number] = found
            return found

    def records(
        self,
        columns: Sequence[str] | None = None,
        *,
        rank: int | Collection[int] | None = None,
        step: int | Collection[int] | None = None,
        **where: Any,
    ) -> pa.Table:
        """Return records as `Capture.records` does, of rank 0."""
        steps = self.steps if step is None else [step] if isinstance(step, int) else sorted(step)
        ranks = (0,) if rank is None else (rank,) if isinstance(rank, int) else rank
        tables = [self.step(number).records for number in steps if (0, number) in self._sizes and 0 in ranks]
        if not tables:
            return self.original.records(columns, rank=(), step=())
        table = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries() if len(tables) > 1 else tables[0]
        for name, value in where.items():
            if value is not None:
                kept = [value] if isinstance(value, (str, int)) else list(value)
                column = table[name].cast(pa.string()) if pa.types.is_dictionary(table[name].type) else table[name]
                table = table.filter(pc.is_in(column, value_set=pa.array(kept, column.type)))
        wanted = list(columns) if columns is not None else table.column_names
        if "written" in wanted:
            table = table.append_column("written", pa.array(range(len(table)), pa.int64()))
        for name in set(wanted).difference(table.column_names):
            table = table.append_column(name, pa.nulls(len(table)))
        return table.select(wanted)

    def payload(
        self, rank: int, segment: str, key: str, view: Sequence[int] | None = None, digest: str | None = None
    ) -> NDArray[Any]:
        """Return a recorded tensor, put together if ranks hold parts of it; see `Capture.payload`."""
        if segment != JOINED:
            return self.original.payload(min(self.original.ranks) if rank == 0 else rank, segment, key, view, digest)
        for step in reversed(self._held.values()):
            if key in step.loads:
                return step.loads[key]()
        raise TrueupError(f"{self.path}: tensor {key!r} is no longer at hand; compare with fewer steps at a time")

    def order(self, step: int, slot: tuple[Key, str], other: Joined) -> list[int] | None:
        """Return which piece of the other run's weight each rank holds, counted from 0, if each holds one and they are swapped."""
        whole = other.step(step).slots.get(slot)
        way, pieces = self.step(step).cut.get(slot, (None, []))
        if way is None or whole is None or whole.load is None or any(piece.load is None for piece in pieces):
            return None
        held = [piece.load() for piece in pieces if piece.load is not None]
        array = whole.load()
        edges = np.cumsum([one.shape[way.dim] for one in held])[:-1]
        parts = np.split(array, edges, axis=way.dim)
        found = [next((n for n, part in enumerate(parts) if np.array_equal(part, one)), None) for one in held]
        order = [n for n in found if n is not None]
        return order if sorted(order) == list(range(len(held))) and order != sorted(order) else None

    def sites(self, rank: int) -> dict[int, tuple[tuple[str, ...], str | None]]:  # noqa: ARG002
        """Return the call stacks of the first rank."""
        return self.original.sites(min(self.original.ranks))


def _data_axes(capture: Capture, geometry: Geometry) -> frozenset[str]:
    """Return the axes along which the ranks' first modules are given other tensors."""
    given = {}
    for rank in geometry.coordinates:
        rows = capture.records(
            ["seq", "slot", "digest", "mean", "l2"], rank=rank, step=capture.steps[0], level="module", phase="forward"
        )
        rows = rows.slice(0, 64).to_pylist()
        given[rank] = [
            (row["slot"], row["digest"] or (row["mean"], row["l2"]))
            for row in rows if row["seq"] == rows[0]["seq"] and row["slot"].startswith("input.")
        ]  # fmt: skip
    return frozenset(
        axis for axis in geometry.axes if any(given[rank] != given[group[0]] for group in geometry.along(axis) for rank in group)
    )


def _as_one(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's manifest as one process would have written it: layouts differ in nothing else."""
    found = {**manifest, "rank": 0, "world_size": 1, "parallel": {"groups": []}}
    settings = manifest.get("settings")
    if isinstance(settings, dict) and isinstance(settings.get("modules"), dict):
        modules = {
            str(name): {**held, "class": class_of(str(held.get("class", "")))} if isinstance(held, dict) else held
            for name, held in settings["modules"].items()
        }
        root = next(iter(modules), "")
        if root and "" not in modules and all(name == root or name.startswith(f"{root}.") for name in modules):
            modules = {name[len(root) :].lstrip("."): _renamed(held, f"{root}.") for name, held in modules.items()}
            optimizers = settings.get("optimizers")
            if isinstance(optimizers, list):
                optimizers = [_unprefixed(one, f"{root}.") for one in optimizers]
            settings = {**settings, "optimizers": optimizers}
        found["settings"] = {**settings, "modules": modules}
    return found


def _renamed(held: Any, prefix: str) -> Any:
    """Return a module's settings with the names of other modules as the other run has them."""
    if not isinstance(held, dict):
        return held
    return {name: value.removeprefix(prefix) if isinstance(value, str) else value for name, value in held.items()}


def _unprefixed(optimizer: Any, prefix: str) -> Any:
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("parameters"), list):
        return optimizer
    groups = [
        [name.removeprefix(prefix) if isinstance(name, str) else name for name in group] if isinstance(group, list) else group
        for group in optimizer["parameters"]
    ]
    return {**optimizer, "parameters": groups}
