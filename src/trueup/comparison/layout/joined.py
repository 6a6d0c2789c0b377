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
from trueup.comparison.layout.gradients import Slots, weights_in
from trueup.comparison.layout.inferring import Apart
from trueup.comparison.layout.joining import JOINED, Earlier, Step, join
from trueup.comparison.layout.pieces import Piece, Way
from trueup.comparison.layout.standing import MICRO, Renames, Standing, Updates, cut_by_hand, renamed
from trueup.comparison.normalise.translated import Translated
from trueup.foundation.facts.arguments import decoded, ranks_of
from trueup.foundation.frameworks.dialect import Dialect
from trueup.foundation.frameworks.mapping import Mapping as Map
from trueup.foundation.frameworks.trees import LIES, TIED
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import list_of, modules_of, names_held
from trueup.foundation.store import Capture

KEPT = 2
"""Joined steps that are held: one that is compared, and one that is read ahead."""


NONE_TIED: Mapping[str, str] = {}


def undeclared(key: Key, slot: str, axis: str) -> Way | None:  # noqa: ARG001
    """Return None: nobody declared anything."""
    return None


class Joined(Translated):
    """The ranks of a capture as one. ``other`` is the other run, joined already, None for the one that is joined first."""

    def __init__(
        self, capture: Capture, standing: Standing, other: Joined | None = None,
        declared: Callable[[Key, str, str], Way | None] = undeclared, partial: Collection[str] = (), updates: Updates = (),
        tied: Mapping[str, str] = NONE_TIED,
    ) -> None:  # fmt: skip
        super().__init__(capture, Dialect("", Map(), candidate=False))
        self.standing, self.geometry, self.data = standing, standing.ranks, standing.data - {MICRO}
        self.workers, self.tied = standing.workers, tied
        self.declared, self._partial, self._updates, self._other = declared, frozenset(partial), updates, other
        self.apart: list[Apart] = []
        self.left_out = updates is None  # whether what optimizers make of gradients is not compared
        self.gradients: dict[int, dict[str, Piece]] = {}  # by step and weight, where it is not
        self.weights: dict[int, Slots] = {}  # likewise
        self.alone = 0  # calls that not all ranks make
        self.reordered = False  # whether samples stood in another order than the other run's
        first = min(capture.ranks)
        self.ranks = {0: _as_one([capture.ranks[rank] for rank in sorted(capture.ranks)], standing, tied, self._partial)}
        self.root = {**capture.root, "levels": [level for level in LEVELS if level in capture.levels]}
        sizes = capture.sizes
        self._sizes = {(0, step): sizes[first, step] for step in capture.steps if all((r, step) in sizes for r in capture.ranks)}
        self._by_step = {step: parts for step, parts in self._by_step.items() if (0, step) in self._sizes}
        self._held: dict[int, Step] = {}
        self._earlier = Earlier()
        self._seen: set[int] = set()
        self._joining = RLock()
        self._sums: dict[int, set[tuple[str, str, int]]] = {}

    @property
    def levels(self) -> frozenset[str]:
        """Levels of its calls."""
        return self.original.levels & set(LEVELS)

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        """Rows of each step, before it is joined."""
        return self._sizes

    def step(self, number: int) -> Step:
        """Return a joined step."""
        with self._joining:
            found = self._held.get(number)
            if found is None:
                other = None if self._other is None or (0, number) not in self._other.sizes else self._other.step(number)
                found = join(
                    self.original, self.standing, number, other, self.declared, self._partial, self._updates, self._earlier
                )
                if number not in self._seen:
                    self._seen.add(number)
                    self.gradients[number] = found.gradients
                    self.weights[number] = weights_in(found.slots) if self.left_out else {}
                    self.apart += found.apart
                    self.alone += found.alone
                    self.reordered |= found.reordered
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
        """Return which piece of the other run's weight each rank holds, counted from 0, if each holds one and not its own."""
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
        return order if len(order) == len(held) and order != list(range(len(held))) else None

    def sums(self, step: int) -> set[tuple[str, str, int]]:
        """Return the terms of the sums over ranks in a step, as they travel: scope, dtype, number of ranks. Read once a step."""
        if step not in self._sums:
            found = self._sums[step] = set()
            columns = ["seq", "scope", "slot", "dtype", "value"]
            for rank in sorted(self.original.ranks):
                rows = self.original.records(columns, rank=rank, step=step, phase="collective").to_pylist()
                members = {row["seq"]: len(ranks) for row in rows if (ranks := added(row["value"]))}
                found |= {
                    (row["scope"], row["dtype"], members[row["seq"]])
                    for row in rows if row["seq"] in members and row["slot"].startswith("input.")
                }  # fmt: skip
        return self._sums[step]

    def sites(self, rank: int) -> dict[int, tuple[tuple[str, ...], str | None]]:  # noqa: ARG002
        """Return the call stacks of the first rank."""
        return self.original.sites(min(self.original.ranks))


def forget_classes(first: Joined, second: Joined) -> None:
    """Forget the settings of modules whose weights one run cuts by hand, where the layouts make them of other classes."""
    one, other = (modules_of(run.ranks[0]) for run in (first, second))
    for name in cut_by_hand((first.standing, second.standing)) & one.keys() & other.keys():
        if one[name].get("class") != other[name].get("class"):
            for run in (first, second):
                del run.ranks[0]["settings"]["modules"][name]


def added(text: str | None) -> list[int]:
    """Return the ranks whose terms a collective adds up, by its recorded arguments; nothing of another one."""
    told = decoded(text)
    return ranks_of(told.get("ranks")) or [] if told.get("reduce_op") in ("SUM", "AVG") else []


def _as_one(
    manifests: Sequence[Mapping[str, Any]], standing: Standing, tied: Mapping[str, str], partial: frozenset[str]
) -> dict[str, Any]:
    """Return the ranks' manifests as one process would have written them: layouts differ in nothing else. Of stages each tells of
    its own modules and weights; otherwise the first tells of all. A module that is no call has no class that matters."""
    found = {**manifests[0], "rank": 0, "world_size": 1, "parallel": {"groups": []}}
    told = [_settings(one, standing.renames.get(rank, ())) for rank, one in enumerate(manifests)]
    if told[0] is None:
        return found
    modules: dict[str, Any] = {}
    for one in told if standing.stages else told[:1]:
        for name, held in (one or {})["modules"].items():
            modules.setdefault(name, held)
    for name in partial & modules.keys():
        modules[name] = {key: value for key, value in modules[name].items() if key != "class"}
    copies = {name: other for name, other in tied.items() if standing.stages}
    for name, other in copies.items():
        scope, _, weight = name.rpartition(".")
        if isinstance(modules.get(scope), dict):
            modules[scope] = {**modules[scope], f"{weight}{TIED}": other}
    optimizers = told[0].get("optimizers")
    if isinstance(optimizers, list):
        groups = [list_of(one or {}, "optimizers") for one in told]  # experts and owners of weights differ by rank, too
        optimizers = [_of_all(one, [held[n] for held in groups if n < len(held)], copies) for n, one in enumerate(optimizers)]
    found["settings"] = {**told[0], "modules": modules, "optimizers": optimizers}
    return found


def _settings(manifest: Mapping[str, Any], renames: Renames) -> dict[str, Any] | None:
    settings = manifest.get("settings")
    if not isinstance(settings, dict) or not isinstance(settings.get("modules"), dict):
        return None
    modules = {
        str(name): {**_of_whole(held), "class": class_of(str(held.get("class", "")))} if isinstance(held, dict) else held
        for name, held in settings["modules"].items()
    }
    optimizers = settings.get("optimizers")
    root = next(iter(modules), "")
    if root and "" not in modules and all(name == root or name.startswith(f"{root}.") for name in modules):
        modules = {name[len(root) :].lstrip("."): _renamed(held, f"{root}.") for name, held in modules.items()}
        if isinstance(optimizers, list):
            optimizers = [_unprefixed(one, lambda name: name.removeprefix(f"{root}.")) for one in optimizers]
    if renames:
        modules = {renamed(name, renames): held for name, held in modules.items()}
        if isinstance(optimizers, list):
            optimizers = [_unprefixed(one, lambda name: renamed(name, renames)) for one in optimizers]
    return {**settings, "optimizers": optimizers, "modules": modules}


def _of_whole(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's settings without where its weights lie."""
    return {name: value for name, value in held.items() if not name.endswith(LIES)}


def _renamed(held: Any, prefix: str) -> Any:
    """Return a module's settings with the names of other modules as the other run has them."""
    if not isinstance(held, dict):
        return held
    return {name: value.removeprefix(prefix) if isinstance(value, str) else value for name, value in held.items()}


def _unprefixed(optimizer: Any, name_of: Callable[[str], str]) -> Any:
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("parameters"), list):
        return optimizer
    groups = [
        [name_of(name) if isinstance(name, str) else name for name in group] if isinstance(group, list) else group
        for group in optimizer["parameters"]
    ]
    return {**optimizer, "parameters": groups}


def _of_all(optimizer: Any, all_of_them: Sequence[Any], copies: Mapping[str, str]) -> Any:
    """Return an optimizer with the weights of all ranks in its groups: of stages, of experts, of owners (ZeRO 1). One that has
    flat buffers in place of weights (ZeRO 2, 3) says of no number."""
    if not isinstance(optimizer, dict) or (len(all_of_them) < 2 and names_held(optimizer)):
        return optimizer
    if not names_held(optimizer):
        return {**optimizer, "groups": [{**group, "parameters": None} for group in list_of(optimizer, "groups")]}
    lists = [one["parameters"] if isinstance(one.get("parameters"), list) else [] for one in all_of_them]
    names = [
        list(dict.fromkeys(copies.get(name, name) for one in lists if n < len(one) for name in one[n]))
        for n in range(len(lists[0]))
    ]
    counts = [len(group) for group in names]
    groups = [
        {**group, "parameters": counts[n]} if isinstance(group, dict) and n < len(counts) else group
        for n, group in enumerate(list_of(optimizer, "groups"))
    ]
    return {**optimizer, "parameters": names, "groups": groups}
