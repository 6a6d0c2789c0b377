"""From the whole model down to the call that differs: on each floor the module that holds it, with what was executed before.

The guide prints by hand what each module of a floor gave, in order, looks into the first that differs, and so on. The first whose
figures differ may only pass a difference on: what made it can stand between two modules, or begin within the guide's numbers. So
the comparison says which call it is, and this is the way there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from trueup.analysis.recipes.found import Rung, RungStatus
from trueup.analysis.recipes.readings import FAILS, OPEN, PASSES, Reading, percent
from trueup.foundation.model import Finding

WORDS: dict[int, RungStatus] = {PASSES: "pass", FAILS: "DEVIATES", OPEN: "could not tell"}
SIBLINGS = 4
"""Modules before the one that differs that are shown on each floor; more are counted."""


@dataclass
class Node:
    """A module, or a call outside modules."""

    name: str
    own: list[Reading] = field(default_factory=list)
    children: dict[str, Node] = field(default_factory=dict)

    def state(self) -> int:
        """Return whether it differs: by its own tensors where it has any, else by all inside it."""
        found = [reading.state for reading in self.own] or [child.state() for child in self.children.values()]
        return max(found, default=PASSES)

    def worst(self) -> Reading | None:
        """Return its own tensor that differs most, else the first one inside that differs."""
        if self.own:
            return max(self.own, key=lambda reading: (reading.state, -1.0 if math.isnan(reading.error) else reading.error))
        found = [worst for child in self.children.values() if (worst := child.worst()) is not None]
        return next((reading for reading in found if reading.state == FAILS), next(iter(found), None))

    def first(self, side: int) -> int:
        """Return when its first call ended up in the records of a side."""
        return min([*(r.seqs[side] for r in self.own), *(child.first(side) for child in self.children.values())])


@dataclass(frozen=True)
class Trail:
    """The way down to a call."""

    rungs: tuple[Rung, ...]
    said: str
    """Where it is: a module and its figures, or the modules that it stands between."""


def tree(readings: Iterable[Reading]) -> Node:
    """Put the tensors of one rank into the modules that made them; calls of finer levels are leaves of their module."""
    root = Node("")
    for reading in readings:
        node = root
        for part in reading.scope.split(".") if reading.scope else []:
            node = node.children.setdefault(part, Node(part))
        if reading.level != "module":
            short = f"{reading.op.rpartition('.')[2]}#{reading.ordinal}"
            node = node.children.setdefault(_leaf(reading), Node(short))
        node.own.append(reading)
    return root


def way_to(culprit: Finding, root: Node) -> Trail:
    """Return the way from the model to a call: the floors above it, on each what was executed before it.

    Args:
        culprit: the call, found by the comparison; ``seq`` of a side that lacks it is -1.
        root: the model, of the culprit's rank.
    """
    side = 1 if culprit.seq[1] >= 0 else 0
    steps = culprit.scope.split(".") if culprit.scope else []
    steps += [_leaf(culprit)] if culprit.level != "module" else []
    rungs: list[Rung] = []
    node, depth = root, 0
    for depth, name in enumerate(steps):
        inner = node.children.get(name)
        if inner is None:
            before, after = _around(node, culprit.seq[side], side)
            here = Rung(depth, culprit.op.rpartition(".")[2], "DEVIATES", _found(culprit))
            return Trail((*rungs, *_shown(before, depth), here), _between(culprit, before, after))
        before, _ = _around(node, inner.first(side), side)
        rungs += [*_shown(before, depth), _rung(inner, depth, FAILS)]  # the comparison says so, whatever its own figures are
        node = inner
    worst = node.worst()
    where = culprit.scope or culprit.op
    return Trail(tuple(rungs), where if worst is None else f"{where}, {worst.op.rpartition('.')[2]} {worst.slot}: {worst.figures}")


def _leaf(call: Reading | Finding) -> str:
    return f"{call.op}#{call.ordinal}"


def _around(node: Node, place: int, side: int) -> tuple[list[Node], list[Node]]:
    """Return the children that were executed before a place, and those from there on."""
    children = sorted(node.children.values(), key=lambda child: child.first(side))
    before = [child for child in children if child.first(side) < place]
    return before, children[len(before) :]


def _between(culprit: Finding, before: list[Node], after: list[Node]) -> str:
    inside = f" of {culprit.scope}" if culprit.scope else ""
    ends = f"between {before[-1].name} and {after[0].name}" if before and after else ""
    ends = ends or (f"after {before[-1].name}" if before else f"before {after[0].name}" if after else "in the model")
    return f"{ends}{inside}: {culprit.op.rpartition('.')[2]}{_of(culprit)}, {_found(culprit)}"


def _of(culprit: Finding) -> str:
    """Say which run alone has the call."""
    if min(culprit.seq) >= 0:
        return ""
    return f" (only in the {'candidate' if culprit.seq[1] >= 0 else 'baseline'})"


def _found(culprit: Finding) -> str:
    return f"tensor {percent(culprit.error_out)} off"


def _shown(before: list[Node], depth: int) -> list[Rung]:
    hidden, shown = before[:-SIBLINGS], before[-SIBLINGS:]
    counted = [Rung(depth, f"{len(hidden)} before", WORDS[max(child.state() for child in hidden)], "")] if hidden else []
    return counted + [_rung(child, depth, child.state()) for child in shown]


def _rung(node: Node, depth: int, state: int) -> Rung:
    worst = node.worst()
    return Rung(depth, node.name, WORDS[state], "" if worst is None else worst.figures)
