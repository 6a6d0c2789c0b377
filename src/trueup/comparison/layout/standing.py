"""What each axis of a run cuts: the data, the stages of a pipeline, or the model; and into how many passes a step is cut.

data      the modules that run first are given other tensors of the same kind on the ranks along it
stages    the module with weights that runs first on a rank runs on none of the others: each rank holds other layers
sequence  integers that count places (0 1 6 7 on one rank, 2 3 4 5 on the other) say that it cuts sequences, and in which order
micro     passes of micro-batches through the model in one step stand side by side like ranks that have other data

Names of layers that begin anew in each stage are made global by ``layer_number`` (Megatron, counted from 1). A module that runs on
several stages and holds other modules on each is no call of any (``partial``).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trueup.comparison.layout.calls import Calls, calls_of, plain, tops, trained
from trueup.comparison.layout.described import UNNAMED
from trueup.comparison.layout.geometry import Geometry, by_groups
from trueup.comparison.layout.losses import begun
from trueup.comparison.layout.pieces import Array, Way, in_order
from trueup.comparison.layout.updates import flat_in, shapes_of, tied_in, weights_of
from trueup.foundation.facts.operators import has
from trueup.foundation.store import Capture

MICRO = "micro-batch"
"""Name of the axis along which passes of one step stand."""

LARGEST = 1 << 20
"""Elements of a tensor of places that is read."""

Updates = Mapping[str, int] | tuple[()] | None
"""Numbers of the weights that optimizers update; (): their calls stay as they are; None: they are left out."""

Renames = tuple[tuple[str, str], ...]

_LAYER = re.compile(r"(?P<where>(?:.*\.)?)(?P<number>\d+)")


@dataclass(frozen=True)
class Standing:
    """``workers``: the geometry of ranks, each as often as a step has passes; worker ``w`` is rank ``w // passes``."""

    ranks: Geometry
    workers: Geometry
    passes: int = 1
    data: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    sequence: Mapping[str, tuple[int, int, Way]] = field(default_factory=dict)
    """By axis: places of the first rank, of all, and how they lie."""
    partial: frozenset[str] = frozenset()  # scopes of modules that stages share
    renames: Mapping[int, Renames] = field(default_factory=dict)  # by rank
    flat: bool = False  # whether optimizers step flat buffers
    sizes: Mapping[str, int] = field(default_factory=dict)  # of weights that a rank holds in the first step
    weights: Mapping[int, tuple[str, ...] | None] = field(default_factory=dict)  # by rank: what its optimizer updates, in order
    losses: Mapping[int, float] = field(default_factory=dict)  # by worker, of those that have one, in the first step
    loss: Mapping[str, str] = field(default_factory=dict)  # by axis of the data, how they make that of one process


def in_one_pass(standing: Standing) -> Standing:
    """Return a run whose passes are not told apart: gradients of micro-batches are added up, and compared so."""
    return replace(standing, workers=standing.ranks, passes=1, data=standing.data - {MICRO})


def renamed(scope: str, renames: Renames) -> str:
    """Return the global name of a scope, or of what begins with one."""
    for old, new in renames:
        if scope == old or scope.startswith(f"{old}."):
            return (new + scope[len(old) :]).lstrip(".")
    return scope


@dataclass
class _Modules:
    """What runs forward in the modules of a rank, in order."""

    counts: Counter[str]
    leaves: list[str]  # modules that hold weights themselves, the first first
    given: list[tuple[str, Any, Any, Any]]  # what the first module is given: slot, dtype, dimensions, numbers
    whole: dict[tuple[str, str], dict[str, Any]]  # rows of integers that modules are given


def standing_of(capture: Capture, geometry: Geometry) -> Standing:
    """Return what the axes of a run cut, from its first step."""
    if geometry.problem or not capture.steps:
        return Standing(geometry, geometry)
    renames = {rank: _numbered(capture.ranks[rank]) for rank in geometry.coordinates}
    held = {rank: _modules(capture, rank, renames[rank]) for rank in geometry.coordinates}
    stages = frozenset(axis for axis in geometry.axes if _is_of_stages(geometry.along(axis), held))
    partial = _shared(held) if stages else frozenset()
    data = frozenset(
        axis
        for axis in geometry.axes
        if axis not in stages and any(_other_data(held[rank], held[group[0]]) for group in geometry.along(axis) for rank in group)
    )
    read = {rank: calls_of(capture.records(rank=rank, step=capture.steps[0], level=("module", "api"))) for rank in held}
    passes = _passes(read, staged=bool(stages))
    sequence = {axis: found for axis in data if (found := _places(capture, geometry.along(axis), held)) is not None}
    alike = frozenset(axis for axis in data - sequence.keys() if by_groups(axis))
    if len(alike) > 1:
        geometry = geometry.merged(alike)
        data = data - alike | {geometry.axes[0]}
    workers = geometry
    if passes > 1:
        places = {rank * passes + n: (*place, n) for rank, place in geometry.coordinates.items() for n in range(passes)}
        workers, data = Geometry((*geometry.axes, MICRO), places), data | {MICRO}
    sizes = {name: math.prod(shape) for name, shape in shapes_of(read[min(read)]).items()}
    first = min(read)
    flat = bool(flat_in(read[first], len(read), capture.ranks[first], {}))
    weights = {rank: _updated(read[rank], capture.ranks[rank], renames[rank]) for rank in geometry.coordinates}
    begins = {rank: begun(calls.rows) for rank, calls in read.items()}
    if stages:  # asked for their shapes first, stages go back once more
        begins = {rank: some[-passes:] for rank, some in begins.items()}
    losses = {rank * passes + n: one for rank, some in begins.items() if len(some) == passes for n, one in enumerate(some)}
    return Standing(geometry, workers, passes, data, stages, sequence, partial, renames, flat, sizes, weights, losses)


def updates_of(standings: Sequence[Standing], captures: Sequence[Capture]) -> Updates:
    """Return how the updates of optimizers are numbered in two runs."""
    # A run whose ranks all update the same weights has them in the order of the model.
    ordered = sorted(standings, key=lambda one: len(set(one.weights.values())))
    lists = [names for one in ordered for names in one.weights.values()]
    if any(one.flat for one in standings):
        return None
    if len(set(lists)) <= 1 or None in lists:
        others = any(one.stages or len(set(one.weights.values())) > 1 for one in standings)
        return None if others and None in lists else ()
    tied = tied_of(captures)
    order: dict[str, int] = {}
    for names in lists:
        for name in names or ():
            if (one := tied.get(name, name)) not in order:
                order[one] = len(order)
    return order | {name: order[other] for name, other in tied.items() if other in order}


def tied_of(captures: Sequence[Capture]) -> dict[str, str]:
    """Return weights that are another one in a run, by name, each with that one's; stages hold copies of it."""
    return {name: other for capture in captures for rank in capture.ranks.values() for name, other in tied_in(rank).items()}


def cut_by_hand(standings: Sequence[Standing]) -> frozenset[str]:
    """Return the modules of whose weights one of two runs holds less: they are of another class, as `ColumnParallelLinear` in place
    of `Linear`. Nothing where a mesh says which weights are cut, for then the class is the same."""
    first, second = (one.sizes for one in standings)
    if any(not axis.startswith(UNNAMED) for one in standings for axis in one.ranks.axes):
        return frozenset()
    both = (name for name in first.keys() & second.keys() if 0 not in (first[name], second[name]))
    return frozenset(name.rpartition(".")[0] for name in both if first[name] != second[name])


def _updated(read: Calls, manifest: Mapping[str, Any], renames: Renames) -> tuple[str, ...] | None:
    found = weights_of(read, manifest, shapes_of(read))
    return None if found is None else tuple(renamed(name, renames) for name in found)


def _numbered(manifest: Mapping[str, Any]) -> Renames:
    """Return the layers whose name counts from another number than their ``layer_number``, each with its global name."""
    settings = manifest.get("settings")
    modules = settings.get("modules") if isinstance(settings, Mapping) else None
    if not isinstance(modules, Mapping):
        return ()
    held = {plain(str(name)): said for name, said in modules.items() if isinstance(said, Mapping)}
    # Of several models, the chunks of a stage, the second goes by the name of its class.
    further = [name for name, said in held.items() if name and name == said.get("class") and "" in held]
    found = []
    for name, said in held.items():
        number, root = said.get("layer_number"), next((one for one in further if name.startswith(f"{one}.")), "")
        read = _LAYER.fullmatch(name[len(root) :].lstrip("."))
        if type(number) is int and number > 0 and read is not None and (root or int(read["number"]) != number - 1):
            found.append((name, f"{read['where']}{number - 1}"))
    return (*found, *((one, "") for one in further))


def _modules(capture: Capture, rank: int, renames: Renames) -> _Modules:
    columns = ["seq", "level", "scope", "op", "slot", "dtype", "shape", "digest", "mean", "l2", "numel"]
    columns += ["payload_segment", "payload_key", "payload_view"]
    rows = capture.records(columns, rank=rank, step=capture.steps[0], level="module", phase="forward").to_pylist()
    found = _Modules(Counter(), [], [], {})
    seen: set[int] = set()
    first = None
    for row in rows:
        fresh = row["seq"] not in seen
        seen.add(row["seq"])
        scope = renamed(plain(row["scope"]), renames)
        found.counts[scope] += fresh
        if row["slot"].startswith("param.") and scope not in found.leaves:
            found.leaves.append(scope)
        if row["slot"].startswith("input."):
            first = row["seq"] if first is None else first
            if row["seq"] == first:
                found.given.append((row["slot"], row["dtype"], len(row["shape"] or ()), row["digest"] or (row["mean"], row["l2"])))
            if str(row["dtype"]).startswith("int") and row["numel"] <= LARGEST:
                found.whole.setdefault((scope, row["slot"]), row)
    return found


def _is_of_stages(groups: Sequence[Sequence[int]], held: Mapping[int, _Modules]) -> bool:
    """Tell whether each rank of the groups begins with a module that no other rank of its group runs."""
    return all(
        bool(held[rank].leaves) and all(held[rank].leaves[0] not in held[other].counts for other in group if other != rank)
        for group in groups
        for rank in group
    )


def _shared(held: Mapping[int, _Modules]) -> frozenset[str]:
    """Return the modules without weights of their own that run on ranks of several stages, whose modules inside differ."""
    inside: dict[str, set[frozenset[str]]] = {}
    for modules in held.values():
        for scope in modules.counts:
            prefix = f"{scope}." if scope else ""
            inside.setdefault(scope, set()).add(frozenset(s for s in modules.counts if s.startswith(prefix) and s != scope))
    leaves = {scope for modules in held.values() for scope in modules.leaves}
    return frozenset(scope for scope, sets in inside.items() if len(sets) > 1 and scope not in leaves)


def _other_data(mine: _Modules, its: _Modules) -> bool:
    """Tell whether two ranks' first modules are given other tensors."""
    return mine.given != its.given


def _passes(read: Mapping[int, Calls], *, staged: bool) -> int:
    """Return in how many passes a step goes through the model and back: a number that divides how often each model does, and how
    many losses there are. Stages that are asked for their shapes first go back once more than the others."""
    losses, counts = 0, list[int]()
    for calls in read.values():
        around = tops(calls)
        back = trained(calls, around)
        heads = Counter(calls.head[top] for top in back)
        counts += [count for (level, _, _), count in heads.items() if level == "module"]
        losses = max(losses, sum(count for (_, _, op), count in heads.items() if has(op, "loss")))
    if staged and counts:
        return max(1, min(counts))
    return max(1, math.gcd(losses, *counts))


def _places(capture: Capture, groups: Sequence[Sequence[int]], held: Mapping[int, _Modules]) -> tuple[int, int, Way] | None:
    """Return how sequences are cut along an axis, if tensors of integers that modules are given say so: on one rank after the other
    they are all numbers from 0 on."""
    group = groups[0]
    for name in held[group[0]].whole:
        arrays = [_integers(capture, rank, held[rank].whole.get(name)) for rank in group]
        if any(array is None or array.ndim != 1 or array.size < 1 for array in arrays):
            continue
        known = [array for array in arrays if array is not None]
        for order in ("natural", "zigzag"):
            way = Way("sharded", 0, order)
            total = np.concatenate(in_order(known, way))
            if np.array_equal(total, np.arange(total.size)):  # an odd length is cut into pieces of different ones
                return len(known[0]), total.size, way
    return None


def _integers(capture: Capture, rank: int, row: Mapping[str, Any] | None) -> Array | None:
    if row is None or row["payload_segment"] is None:
        return None
    found = capture.payload(rank, row["payload_segment"], row["payload_key"], row["payload_view"], row["digest"])
    return np.asarray(found).reshape(row["shape"])
