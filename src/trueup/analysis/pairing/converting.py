"""Weights of one framework as those of another by a map file: no model is at hand, so names come from the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trueup.analysis.pairing.weights import Conversion, convert, neutral_names
from trueup.comparison.normalise.mapping import Mapping as LayerMap
from trueup.foundation.frameworks.tables import FRAMEWORKS, layers_by_name
from trueup.foundation.frameworks.trees import Node, Shape, Tree, path
from trueup.foundation.model import TrueupError

Array = np.ndarray[Any, Any]


def convert_state(state: Mapping[str, Array], told: LayerMap, to: str) -> Conversion:
    """Return a state in the terms of the side of a map that is of framework ``to``.

    Args:
        state: the other side's tensors by full name.
        told: a map as ``trueup map`` writes it, with the framework of each side and the kind of each layer.
        to: ``torch`` or ``paddle``.

    Raises:
        TrueupError: the map does not say which frameworks it is of, or both are the same or other ones.
    """
    sides = {side: framework for side, framework in told.frameworks.items() if framework in FRAMEWORKS}
    if len(set(sides.values())) != 2 or to not in sides.values():
        raise TrueupError(
            f"the map is of {' and '.join(told.frameworks.values()) or 'no named frameworks'}, and weights for {to} are wanted: it "
            "needs a line `made = { baseline = 'torch', candidate = 'paddle' }`, as `trueup map` writes it"
        )
    target = next(side for side, framework in sides.items() if framework == to)
    source = "baseline" if target == "candidate" else "candidate"
    trees = {side: _tree(told, side, framework) for side, framework in sides.items()}
    modules = told.modules if target == "candidate" else {b: c for c, b in told.modules.items()}
    names = neutral_names(trees[source], state)
    wanted = _expected(trees[target], modules, names)
    return convert(trees[source], wanted, state, modules)


def _tree(told: LayerMap, side: str, framework: str) -> Tree:
    """Return the modules of one side of a map, their tensors unknown."""
    scopes = list(told.modules) if side == "candidate" else list(told.modules.values())
    kinds = {scope: told.kinds.get(told.modules[scope] if side == "candidate" else scope, "") for scope in scopes}
    kinds |= told.alone[side]
    nodes = {scope: Node(scope, ("",)) for scope in sorted({"", *kinds}, key=lambda one: one.count("."))}
    return Tree(framework, nodes, {}, {scope: kind for scope, kind in kinds.items() if kind in layers_by_name()})


def _expected(target: Tree, modules: Mapping[str, str], names: Mapping[str, Shape]) -> Tree:
    """Return the target with the tensors that the source's can become, by the tables."""
    nodes = {}
    held: dict[str, set[str]] = {}
    for name in names:
        scope, _, tensor = name.rpartition(".")
        held.setdefault(scope, set()).add(tensor)
    for scope in target.nodes:
        layer, source = target.layer(scope), _source(scope, modules)
        there = held.get(source, set())
        own = layer.own[target.framework] if layer is not None else None
        tensors: dict[str, Shape | None] = {}
        if own is None or layer is None:
            tensors = dict.fromkeys(sorted(there))
        else:
            back = {neutral: name for name, neutral in own.tensors.items()}
            tensors = {back.get(one, one): None for one in sorted(there)}
            for packed, parts in own.packed.items():
                if all(path(source, part) in names for part in parts):
                    for name in [name for name in tensors if own.tensors.get(name, name) in parts]:
                        del tensors[name]
                    tensors[packed] = None
        nodes[scope] = Node(scope, ("",), tensors)
    return Tree(target.framework, nodes, {}, target.kinds)


def _source(scope: str, modules: Mapping[str, str]) -> str:
    inner = ""
    while scope not in modules and scope:
        scope, _, last = scope.rpartition(".")
        inner = path(last, inner)
    return path(modules.get(scope, scope), inner)
