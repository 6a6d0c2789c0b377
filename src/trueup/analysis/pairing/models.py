"""`trueup.map_models` and `trueup.convert_weights`: two live models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trueup.analysis.pairing.proposing import Proposal, propose
from trueup.analysis.pairing.weights import Conversion, convert
from trueup.comparison.normalise.mapping import Mapping
from trueup.comparison.normalise.mapping import load as load_mapping
from trueup.foundation.frameworks.trees import Tree
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.models import adapter_of, tree_of


def map_models(baseline: Any, candidate: Any) -> Proposal:
    """Propose which module of one model is which of another, of the same framework or of two.

        >>> proposal = trueup.map_models(torch_model, paddle_model)     # doctest: +SKIP
        >>> print(proposal)                                             # doctest: +SKIP
        12 layers paired, 9 other modules, 0 unsure
        >>> trueup.analysis.pairing.map_file.write(proposal, "map.toml")         # doctest: +SKIP

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
    Nothing is told by shapes. What is of a class that no table has is copied as it is, and named (`Conversion.unsure`).

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
    told: Mapping = load_mapping(mapping)
    kinds = told.kinds, {own: told.kinds[base] for own, base in told.modules.items() if base in told.kinds}
    both = tuple(
        dataclasses.replace(tree, kinds={scope: kind for scope, kind in one.items() if scope in tree.nodes})
        for tree, one in zip(trees, kinds, strict=True)
    )
    modules = {scope: told.scope(scope) for scope in trees[1].nodes}
    return modules, (both[0], both[1])
