"""Where each process of a run stands: the axes of its meshes, and which of them cut the data.

Of the meshes in a capture the largest names the axes; processes that it does not tell apart differ along one more, ``ranks`` (DDP
places nothing). Where their groups make a grid (Megatron), they differ along several: ``ranks-by-2`` are those that stand 2 apart.
An axis along which the model's own inputs differ cuts the data; along the others the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow.compute as pc

from trueup.comparison.layout.described import UNNAMED, mesh_of, part_in
from trueup.foundation.facts.arguments import decoded, ranks_of
from trueup.foundation.store import Capture

BY = f"{UNNAMED}-by-"
"""How names of axes begin that groups of ranks make; how far apart their ranks stand follows."""


@dataclass(frozen=True)
class Geometry:
    """``axes`` name the dimensions, the fastest last; ``coordinates`` say where each rank stands."""

    axes: tuple[str, ...]
    coordinates: Mapping[int, tuple[int, ...]]
    problem: str = ""  # why the processes cannot be told apart; empty where they can

    def size(self, axis: str) -> int:
        """Return how many ranks stand along an axis."""
        at = self.axes.index(axis)
        return 1 + max(place[at] for place in self.coordinates.values())

    def along(self, axis: str) -> list[list[int]]:
        """Return groups of ranks that differ along one axis alone, each in order."""
        at = self.axes.index(axis)
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank, place in self.coordinates.items():
            groups.setdefault(place[:at] + place[at + 1 :], []).append((place[at], rank))
        return [[rank for _, rank in sorted(group)] for group in groups.values()]

    def merged(self, axes: Collection[str]) -> Geometry:
        """Return the same ranks with several axes that groups made as one, ``ranks``, which cuts in the order of ranks."""
        mine = [n for n, axis in enumerate(self.axes) if axis in axes]
        if len(mine) < 2:
            return self
        order = sorted({tuple(place[n] for n in mine) for place in self.coordinates.values()})
        rest = [n for n in range(len(self.axes)) if n not in mine]
        places = {
            rank: (order.index(tuple(place[n] for n in mine)), *(place[n] for n in rest))
            for rank, place in self.coordinates.items()
        }
        return Geometry((_rest(self.axes), *(self.axes[n] for n in rest)), places)


def geometry_of(capture: Capture) -> Geometry:
    """Return where each recorded rank of a capture stands."""
    ranks = sorted(capture.ranks)
    worlds = {told for m in capture.ranks.values() if type(told := m.get("world_size")) is int}
    world = max(worlds, default=len(ranks))
    if len(ranks) != world or ranks != [*range(len(ranks))]:  # a damaged world may be of any size
        missing = [*islice((rank for rank in range(world) if rank not in capture.ranks), 8)]
        return Geometry((), {}, f"{capture.path} lacks {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}")
    if world == 1:
        return Geometry((), {0: ()})
    standing = {rank: _standing(capture, rank) for rank in ranks}
    names = max((names for places in standing.values() for names in places), key=len, default=())
    places = {rank: standing[rank].get(names) if names else () for rank in ranks}
    if any(place is None for place in places.values()):
        return Geometry((), {}, f"{capture.path}: not all ranks say where they stand on the mesh ({', '.join(names)})")
    held = {rank: place or () for rank, place in places.items()}
    return _with_the_rest(names, held, world, capture)


def _with_the_rest(names: tuple[str, ...], held: dict[int, tuple[int, ...]], world: int, capture: Capture) -> Geometry:
    seen: dict[tuple[int, ...], int] = {}
    rest = {}
    for rank, place in held.items():
        rest[rank] = seen.get(place, 0)
        seen[place] = rest[rank] + 1
    if len(set(seen.values())) != 1 or math.prod([len(seen), next(iter(seen.values()))]) != world:
        return Geometry((), {}, f"{capture.path}: its ranks fill no mesh of {' x '.join(names)}")
    if max(seen.values()) == 1:
        return Geometry(names, held)
    grid = _grid(held, _families(capture, world), 1 + max(rest.values()))
    if grid:
        return Geometry((*grid, *names), {rank: (*(axis[rank] for axis in grid.values()), *held[rank]) for rank in held})
    return Geometry((_rest(names), *names), {rank: (rest[rank], *place) for rank, place in held.items()})


def _rest(names: Collection[str]) -> str:
    return UNNAMED + "-rest" if UNNAMED in names else UNNAMED


def by_groups(axis: str) -> int:
    """Return how far apart ranks stand that differ along an axis which groups make; 0 of another axis."""
    before, _, apart = axis.partition(BY)
    return int(apart) if not before and apart.isdigit() else 0


def _families(capture: Capture, world: int) -> list[list[list[int]]]:
    """Return groups that communicate, of one size and stride, where they hold each rank once; the smallest and nearest first."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for rank in capture.ranks:
        rows = capture.records(["value"], rank=rank, step=capture.steps[0], phase="collective")
        for text in pc.unique(rows["value"]).to_pylist():
            group = ranks_of(decoded(text).get("ranks")) or []
            if 1 < len(group) < world and rank in group and group[0] >= 0 and group[-1] < world:
                apart = group[1] - group[0]
                if apart > 0 and group == list(range(group[0], group[0] + apart * len(group), apart)):
                    found.setdefault((len(group), apart), set()).add(tuple(group))
    whole = list(range(world))
    return [list(map(list, sorted(some))) for _, some in sorted(found.items()) if sorted(r for g in some for r in g) == whole]


def _grid(held: Mapping[int, tuple[int, ...]], families: Iterable[list[list[int]]], wanted: int) -> dict[str, dict[int, int]]:
    """Return where ranks stand along axes that groups make and no mesh names, the slowest first; nothing where they make no grid.
    Groups of ranks that stand alike on all other axes are one."""
    chosen: dict[str, dict[int, int]] = {}
    lines: list[list[list[int]]] = []
    left = wanted

    def place(rank: int) -> tuple[Any, ...]:
        return held[rank], *(axis[rank] for axis in chosen.values())

    for family in families:
        along = {rank: n for group in family for n, rank in enumerate(group)}
        alike = all(len(set(map(place, group))) == 1 for group in family)
        across = all(len({along[rank] for rank in group}) == 1 for line in lines for group in line)
        if left % len(family[0]) == 0 and alike and across:
            chosen[f"{BY}{family[0][1] - family[0][0]}"] = along
            lines.append(family)
            left //= len(family[0])
    if left > 1 and chosen:
        seen: dict[tuple[Any, ...], int] = {}
        last = {}
        for rank in sorted(held):
            last[rank] = seen.get(place(rank), 0)
            seen[place(rank)] = last[rank] + 1
        chosen[f"{BY}{_apart(last)}"] = last
    if len(chosen) < 2 or len(set(map(place, held))) != len(held):
        return {}
    return dict(sorted(chosen.items(), key=lambda one: -by_groups(one[0])))


def _apart(along: Mapping[int, int]) -> int:
    return next(rank for rank, n in sorted(along.items()) if n == 1) - next(iter(sorted(along)))


def _standing(capture: Capture, rank: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return where a rank stands on each mesh that its first step names."""
    rows = capture.records(["value"], rank=rank, step=capture.steps[0])
    texts = pc.unique(rows["value"].filter(pc.fill_null(pc.match_substring(rows["value"], '"placements"'), False))).to_pylist()
    return dict(_places(part for text in texts if (part := part_in(text)) is not None))


def _places(parts: Iterable[dict[str, Any]]) -> Iterable[tuple[tuple[str, ...], tuple[int, ...]]]:
    for part in parts:
        mesh, place = mesh_of(part), part.get("coordinate")
        if mesh is not None and isinstance(place, list) and len(place) == len(mesh[0]) and all(type(n) is int for n in place):
            yield mesh[0], tuple(place)
