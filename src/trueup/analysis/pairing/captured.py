"""A model as a capture shows it: the modules that ran, with the parameters that they were given."""

from __future__ import annotations

from pathlib import Path

from trueup.comparison.normalise.dialects import framework_of
from trueup.foundation.frameworks.tables import FRAMEWORKS
from trueup.foundation.frameworks.trees import Node, Shape, Tree
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture

BUFFER = "output.buffer."
COLUMNS = ("seq", "scope", "op", "slot", "shape", "l2")


def tree_of_capture(capture: str | Path | Capture) -> Tree:
    """Return the modules of the first recorded step of a capture, in the order in which they ran.

    A module that did not run is not known, nor are settings. Norms of parameters are, where statistics were recorded.

    Raises:
        TrueupError: there is no such capture, it holds no modules, or its framework has no column in the tables.
    """
    held = capture if isinstance(capture, Capture) else open_capture(capture)
    framework = framework_of(held)
    if framework not in FRAMEWORKS:
        known = f"{', '.join(FRAMEWORKS[:-1])} and {FRAMEWORKS[-1]}"
        raise TrueupError(f"{held.path} is of {framework or 'an unknown framework'}: models of {known} are mapped")
    if "module" not in held.levels:
        raise TrueupError(f"{held.path} holds no modules: record it with --level module,api")
    rows = held.records(list(COLUMNS), rank=min(held.ranks), step=held.steps[0], level="module", phase="forward").to_pylist()
    nodes: dict[str, Node] = {}
    tensors: dict[str, dict[str, Shape | None]] = {}
    norms: dict[str, dict[str, float]] = {}
    for row in rows:
        scope = row["scope"]
        shapes, l2 = tensors.setdefault(scope, {}), norms.setdefault(scope, {})
        nodes.setdefault(scope, Node(scope, (row["op"],), shapes, {}, l2))
        for prefix in ("param.", BUFFER):
            if row["slot"].startswith(prefix):
                name = row["slot"].removeprefix(prefix)
                shapes.setdefault(name, tuple(row["shape"] or ()))
                if prefix == "param." and row["l2"] is not None:
                    l2.setdefault(name, row["l2"])
    _fill(nodes)
    return Tree(framework, nodes)


def _fill(nodes: dict[str, Node]) -> None:
    """Add modules that never ran themselves and hold others that did: a list of layers."""
    for scope in list(nodes):
        while scope:
            scope = scope.rpartition(".")[0]
            nodes.setdefault(scope, Node(scope, ("Module",)))
