"""Two models side by side: `trueup.map_models` and `trueup.convert_weights`, and the settings that must agree before any number.

A model is alive, or a capture's: the modules that ran, with their parameters. Settings are a norm's epsilon, padding, momentum, a
GELU's kind; of optimizers the kind, the settings, clipping, and what the frameworks define differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.analysis.pairing.proposing import Conversion, Pair, Proposal, convert, propose
from trueup.foundation.frameworks.dialect import neutral_settings, same
from trueup.foundation.frameworks.mapping import load as load_mapping
from trueup.foundation.frameworks.tables import FRAMEWORKS, Optimizer, optimizers_by_class
from trueup.foundation.frameworks.trees import Node, OptimizerFacts, Shape, Tree
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.declared import framework_of
from trueup.recording.adapters.models import adapter_of, tree_of


def map_models(baseline: Any, candidate: Any) -> Proposal:
    """Propose which module of one model is which of another, of the same framework or of two.

        >>> proposal = trueup.map_models(torch_model, paddle_model)     # doctest: +SKIP
        >>> print(proposal)                                             # doctest: +SKIP
        12 layers paired, 9 other modules, 0 unsure
        >>> trueup.analysis.pairing.proposing.write_map(proposal, "map.toml")         # doctest: +SKIP

    Args:
        baseline: a ``torch.nn.Module`` or a ``paddle.nn.Layer``.
        candidate: likewise.

    Raises:
        TrueupError: one of them is no model.
    """
    return propose(tree_of(baseline), tree_of(candidate))


def convert_weights(source: Any, target: Any, *, mapping: str | Path | Proposal | None = None, partly: bool = False) -> Conversion:
    """Write the weights of one model into another, of the same framework or of two, by the class of each layer.

        >>> print(trueup.convert_weights(torch_model, paddle_model))    # doctest: +SKIP
        62 tensors converted

    Linear weights are transposed, an attention's packed projections taken apart, running statistics renamed; ties are kept.
    Layer classes decide, never shapes. A tensor of a class that no table has is copied as it is, and named (`Conversion.unsure`).

    Args:
        source: the model that has the weights.
        target: the model that gets them; written in place.
        mapping: which module of the target is which of the source: a `Proposal` of `map_models(source, target)`, or a file as
            ``trueup map`` writes it with the source as the baseline; None: as `map_models` proposes.
        partly: write what can be converted, although something cannot.

    Raises:
        TrueupError: something cannot be converted, and ``partly`` is not set: then nothing was written.
    """
    trees = tree_of(source), tree_of(target)
    if mapping is None:
        mapping = propose(*trees)
    modules, trees = _told(mapping, trees)
    found = convert(*trees, adapter_of(source).state(source), modules)
    if not found.is_whole and not partly:
        first = (found.missing or found.unused)[0]
        more = len(found.missing) + len(found.unused) - 1
        raise TrueupError(
            f"the weights cannot be converted: {first}{f' (and {more} more)' if more else ''}\n"
            "  next:     say in a map file which layer is which (trueup map), or pass partly=True"
        )
    adapter_of(target).load(target, found.state)
    return found


def _told(mapping: str | Path | Proposal, trees: tuple[Tree, Tree]) -> tuple[dict[str, str], tuple[Tree, Tree]]:
    if isinstance(mapping, Proposal):
        return mapping.modules, trees
    told = load_mapping(mapping)
    kinds = told.kinds, {own: told.kinds[base] for own, base in told.modules.items() if base in told.kinds}
    both = tuple(
        dataclasses.replace(tree, kinds={scope: kind for scope, kind in one.items() if scope in tree.nodes})
        for tree, one in zip(trees, kinds, strict=True)
    )
    modules = {scope: told.scope(scope) for scope in trees[1].nodes}
    return modules, (both[0], both[1])


BUFFER = "output.buffer."
COLUMNS = ("seq", "scope", "op", "slot", "shape", "l2")


def tree_of_capture(capture: str | Path | Capture) -> Tree:
    """Return the modules of a capture's first recorded step, in the order in which they ran. Modules that did not run and
    settings are unknown; norms of parameters are known if statistics were recorded. Raises TrueupError if there is no such
    capture, it holds no modules, or the tables have no column for its framework."""
    held = open_capture(capture)
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
    """Add modules that never ran and hold others that did: a list of layers."""
    for scope in list(nodes):
        while scope:
            scope = scope.rpartition(".")[0]
            nodes.setdefault(scope, Node(scope, ("Module",)))


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting in which the two models differ."""

    where: str  # the layer, or the optimizer
    kind: str
    name: str
    baseline: Any
    candidate: Any
    frameworks: tuple[str, str] = ("baseline", "candidate")
    more: str = ""

    def __str__(self) -> str:
        sides = f"{_said(self.baseline)} in {self.frameworks[0]}, {_said(self.candidate)} in {self.frameworks[1]}"
        said = f"{self.where} ({self.kind}): {self.name} is {sides}" if self.name else f"{self.where}: {self.kind}"
        return f"{said}; {self.more}" if self.more else said


def compare_settings(baseline: Tree, candidate: Tree, pairs: Iterable[Pair]) -> list[Difference]:
    """Return the settings of paired layers that differ."""
    found = []
    for pair in pairs:
        layers = baseline.layer(pair.baseline), candidate.layer(pair.candidate)
        if layers[0] is None or layers[0] is not layers[1]:
            continue
        sides = [
            neutral_settings(tree.nodes[scope].settings, layer.own[tree.framework])
            for tree, scope, layer in zip((baseline, candidate), (pair.baseline, pair.candidate), layers, strict=True) if layer
        ]  # fmt: skip
        for name in sides[0].keys() & sides[1].keys():
            if not same(sides[0][name], sides[1][name]):
                where = pair.baseline or "the model"
                names = (baseline.framework, candidate.framework)
                found.append(Difference(where, layers[0].name, name, sides[0][name], sides[1][name], names))
    return found


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def compare_optimizers(baseline: OptimizerFacts, candidate: OptimizerFacts) -> list[Difference]:
    """Return the differences of two optimizers."""
    frameworks = baseline.framework, candidate.framework
    rows = _row(baseline), _row(candidate)
    where = f"optimizer {baseline.classes[0]} against {candidate.classes[0]}"
    if rows[0] is None or rows[1] is None:
        unknown = [one.classes[0] for one, row in zip((baseline, candidate), rows, strict=True) if row is None]
        return [Difference(where, f"{' and '.join(unknown)} is in no table, so its settings were not compared", "", None, None)]
    if rows[0] is not rows[1]:
        return [Difference(where, "they are different algorithms", "", None, None)]
    row = rows[0]
    sides = [{**row.defaults, **neutral_settings(one.settings, row.own[one.framework])} for one in (baseline, candidate)]
    found = [
        Difference(where, row.name, name, sides[0][name], sides[1][name], frameworks)
        for name in sides[0] if name in sides[1] and not same(sides[0][name], sides[1][name])
    ]  # fmt: skip
    if frameworks[0] != frameworks[1]:
        said = [row.differs, *(row.own[one].differs for one in frameworks)]
        found += [Difference(where, one, "", None, None) for one in said if one]
    for name in ("clipping", "schedule"):
        told = getattr(baseline, name), getattr(candidate, name)
        if told[0] != told[1]:
            words = [one or "none of its own" for one in told]
            found.append(Difference(where, row.name, name, words[0], words[1], frameworks))
    if baseline.groups != candidate.groups:
        sizes = len(baseline.groups) + 1, len(candidate.groups) + 1
        only = "only the first groups were compared"
        found.append(Difference(where, row.name, "groups of parameters", sizes[0], sizes[1], frameworks, only))
    return found


def _row(facts: OptimizerFacts) -> Optimizer | None:
    known = optimizers_by_class(facts.framework)
    return next((known[name] for name in facts.classes if name in known), None)
