"""Where each process of a run stands: the axes of its meshes, and which of them cut the data.

Of the meshes in a capture the largest names the axes; processes that it does not tell apart differ along one more, ``ranks`` (DDP
places nothing). An axis along which the model's own inputs differ cuts the data; along the others the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from trueup.comparison.layout.described import UNNAMED, mesh_of, part_in
from trueup.foundation.store import Capture


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


def geometry_of(capture: Capture) -> Geometry:
    """Return where each recorded rank of a capture stands."""
    ranks = sorted(capture.ranks)
    worlds = {told for m in capture.ranks.values() if type(told := m.get("world_size")) is int}
    world = max(worlds, default=len(ranks))
    if ranks != list(range(world)):
        missing = [rank for rank in range(world) if rank not in ranks]
        return Geometry(
            (), {}, f"{capture.path} lacks {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))}"
        )
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
    return Geometry(
        (UNNAMED + "-rest" if UNNAMED in names else UNNAMED, *names), {rank: (rest[rank], *place) for rank, place in held.items()}
    )


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
