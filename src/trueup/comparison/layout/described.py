"""What layout a capture has: how many processes, which meshes, where each weight is cut.

TP=2          every DTensor lies on a mesh of one dimension named tp, of two ranks
DP=2 TP=2     a mesh of two dimensions
2 processes   nothing is placed: data parallel by DDP, or by hand
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.store import Capture

Mesh = tuple[tuple[str, ...], tuple[int, ...]]  # names of the dimensions, and sizes

UNNAMED = "ranks"
"""Name of a mesh's dimension that the program gave none."""


_GROUP = re.compile(r"input\.group\d+\.\d+\.grad")


@dataclass(frozen=True)
class Work:
    """What a rank does in its first step: the weights of its modules, the shape of what it is given, what its optimizer steps."""

    weights: frozenset[str]
    given: tuple[int, ...] | None
    stepped: tuple[str, ...]
    inputs: frozenset[tuple[str, tuple[int, ...]]] = frozenset()  # of each module, the shape of what it is given first
    times: int = 0  # how often the module that runs first does in the step: once a micro-batch

    @property
    def elements(self) -> int:
        """Number of elements that the module which runs first is given in the step."""
        return math.prod(self.given or ()) * self.times


@dataclass(frozen=True)
class Layout:
    """How one capture lies on its processes. ``world`` is None where the capture does not say."""

    world: int | None
    meshes: frozenset[Mesh]
    weights: frozenset[tuple[str, str]]
    """Names of the modules' weights, each with the shape that a rank holds, and its placements, as text."""
    ends: tuple[Work, Work] | None = None  # what the first and the last rank do

    @cached_property
    def axes(self) -> dict[str, int]:
        """Size of each mesh dimension that has a name of its own, largest mesh first."""
        found: dict[str, int] = {}
        for names, sizes in sorted(self.meshes, key=lambda mesh: -len(mesh[0])):
            for name, size in zip(names, sizes, strict=True):
                found.setdefault(name, size)
        return found

    def __str__(self) -> str:
        if not self.axes:
            return "one process" if self.world == 1 else f"{self.world} processes"
        return " ".join(f"{name.upper() if name != UNNAMED else 'sharded'}={size}" for name, size in self.axes.items())

    def differs(self, other: Layout) -> bool:
        """Tell whether ranks of the same number do different parts of the work in two runs, as far as the captures say."""
        if self.world is None or other.world is None:
            return False
        if self.world != other.world or self.meshes != other.meshes:
            return True
        if self.ends is not None and other.ends is not None and _other_work(self.ends, other.ends):
            return True
        mine, theirs = dict(self.weights), dict(other.weights)
        if mine == theirs and self.ends is not None and other.ends is not None and _cut_inside(self.ends[0], other.ends[0]):
            return True
        return self.world != 1 and any(theirs[name] != placed for name, placed in mine.items() if name in theirs)


def layout_of(capture: Capture) -> Layout:
    """Return how a capture lies on its processes; of one process nothing is read."""
    worlds = {told for m in capture.ranks.values() if type(told := m.get("world_size")) is int}
    world = max(worlds, default=None)
    if world in (None, 1) or not capture.steps:
        return Layout(world, frozenset(), frozenset())
    rows = capture.records(["scope", "slot", "shape", "value"], rank=min(capture.ranks), step=capture.steps[0])
    texts = pc.unique(rows["value"].filter(pc.fill_null(pc.match_substring(rows["value"], '"placements"'), False)))
    placed = {text: part for text in texts.to_pylist() if (part := part_in(text)) is not None}
    meshes = frozenset(mesh for part in placed.values() if (mesh := mesh_of(part)) is not None)
    rows = rows.filter(pc.starts_with(rows["slot"].cast(pa.string()), "param."))
    weights = frozenset(
        (f"{row['scope']}.{row['slot']}", json.dumps([row["shape"], placed.get(row["value"], {}).get("placements")]))
        for row in rows.to_pylist()
    )
    return Layout(world, meshes, weights, (_work(capture, min(capture.ranks)), _work(capture, max(capture.ranks))))


def _work(capture: Capture, rank: int) -> Work:
    columns = ["seq", "phase", "level", "scope", "op", "slot", "shape"]
    rows = capture.records(columns, rank=rank, step=capture.steps[0], level="module", phase=("forward", "optimizer")).to_pylist()
    forward = [row for row in rows if row["phase"] == "forward"]
    given = next((row for row in forward if row["slot"].startswith("input.")), None)
    first = forward[0] if forward else {}
    shapes = {row["scope"]: tuple(row["shape"] or ()) for row in reversed(forward) if row["slot"] == "input.0"}
    runs = {row["seq"] for row in forward if (row["scope"], row["op"]) == (first["scope"], first["op"])}
    return Work(
        frozenset(f"{row['scope']}.{row['slot']}" for row in forward if row["slot"].startswith("param.")),
        None if given is None or given["shape"] is None else tuple(given["shape"]),
        tuple(row["slot"] for row in rows if row["phase"] == "optimizer" and row["slot"].endswith(".grad")),
        frozenset(shapes.items()), len(runs),
    )  # fmt: skip


def _other_work(mine: tuple[Work, Work], its: tuple[Work, Work]) -> bool:
    """Tell whether ranks of the same number hold other layers (a pipeline, experts), are given as much of the data cut elsewhere
    (sequences), in other micro-batches, or step other weights (flat buffers)."""
    apart = any(ends[0].weights != ends[1].weights or ends[0].stepped != ends[1].stepped for ends in (mine, its))
    for one, other in zip(mine, its, strict=True):
        if apart and (one.weights != other.weights or one.stepped != other.stepped):
            return True
        given = one.given, other.given
        if None not in given and given[0] != given[1] and one.elements == other.elements > 0:
            return True
        if one.stepped and other.stepped and one.stepped != other.stepped and (_flat(one) or _flat(other)):
            return True
    return False


def _cut_inside(mine: Work, its: Work) -> bool:
    """Tell whether modules are given a piece in one run of what they are given in the other, while both models are given as much:
    sequence parallelism beside tensor parallelism."""
    first, second = dict(mine.inputs), dict(its.inputs)
    pairs = [(shape, second[scope]) for scope, shape in first.items() if scope in second and len(shape) == len(second[scope])]
    unlike = [[sorted(sizes) for sizes in zip(*pair, strict=True) if sizes[0] != sizes[1]] for pair in pairs]
    return mine.given == its.given and any(len(one) == 1 and one[0][0] > 0 and not one[0][1] % one[0][0] for one in unlike)


def _flat(work: Work) -> bool:
    """Tell whether an optimizer steps tensors that are no module's weights."""
    return all(_GROUP.fullmatch(slot) for slot in work.stepped)


def part_in(text: str | None) -> dict[str, Any] | None:
    """Return what a row's ``value`` says of the place of its tensor in the whole; None of arguments and of what is no JSON."""
    if text is None or '"placements"' not in text:
        return None
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and isinstance(told.get("placements"), list) else None


def mesh_of(part: dict[str, Any]) -> Mesh | None:
    """Return the mesh of a placed tensor; None where the text is none of ours."""
    mesh = part.get("mesh")
    if not isinstance(mesh, dict):
        return None
    shape = mesh.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        return None
    names = mesh.get("dims") or [UNNAMED if len(shape) == 1 else f"{UNNAMED}{n}" for n in range(len(shape))]
    if len(names) != len(shape) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names), tuple(shape)
