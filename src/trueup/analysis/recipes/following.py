"""Following a recipe: the steps in order, up to the first that explains the difference."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trueup.analysis.recipes.checks import Facts, make
from trueup.analysis.recipes.deeper import advice
from trueup.analysis.recipes.found import Outcome, RecipeResult
from trueup.analysis.recipes.readings import Readings
from trueup.analysis.recipes.recipe import Recipe, Step, load
from trueup.comparison.result.comparing import compare
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture


def follow(
    baseline: str | Path | Capture, candidate: str | Path | Capture, recipe: str | Path | Recipe = "paddle", *,
    mapping: str | Path | None = None, metric: tuple[float, float] | None = None, every: bool = False,
) -> RecipeResult:  # fmt: skip
    """Make the steps of a recipe over two captures.

        >>> found = follow("runs/gpu", "runs/npu")          # doctest: +SKIP
        >>> found.verdict, found.deviating.name             # doctest: +SKIP
        ('deviates', 'backward')

    Args:
        baseline: the trusted capture.
        candidate: the capture under suspicion.
        recipe: ``paddle``, or the path of a recipe file (docs/align.md).
        mapping: as of `trueup.compare`.
        metric: what the two trainings ended with (accuracy, loss), baseline's first.
        every: make all steps, also after one that deviates.

    Raises:
        TrueupError: the recipe cannot be read, the captures are of different numbers of ranks, or cannot be compared at all.
    """
    known = recipe if isinstance(recipe, Recipe) else load(recipe)
    first, second = (c if isinstance(c, Capture) else open_capture(c) for c in (baseline, candidate))
    _require_same_world(first, second)
    readings = Readings({step.check: step.fail for step in known.steps if step.fail})
    result = compare(first, second, mapping=mapping, see=readings.see)
    facts = Facts(result, readings, metric)
    outcomes: list[Outcome] = []
    for step in known.steps:
        stopped = not every and any(outcome.status == "DEVIATES" for outcome in outcomes)
        outcomes.append(_not_reached(step) if stopped else make(step, facts))
    found = RecipeResult(known.name, tuple(outcomes), result, readings.step or 0, readings.has_operators)
    return dataclasses.replace(found, advice=advice(found, (first, second)))


def _not_reached(step: Step) -> Outcome:
    return Outcome(step.name, step.check, "not reached", "", step.numbers, step.origin)


def _require_same_world(first: Capture, second: Capture) -> None:
    """Refuse 8 ranks against 1: each rank sees other data, and gradients are means over all of them.

    Raises:
        TrueupError: the runs are of different sizes.
    """
    sizes = [_world(capture) for capture in (first, second)]
    if sizes[0] == sizes[1]:
        return
    raise TrueupError(
        "The runs are of different sizes and cannot be aligned.\n"
        f"  where:    {first.path} and {second.path}\n"
        "  expected: the same number of ranks, for each sees its own share of the data and gradients are means over all\n"
        f"  got:      {sizes[0]} and {sizes[1]}\n"
        "  next:     run both with the same number of ranks; one each is the simplest"
    )


def _world(capture: Capture) -> int:
    told = [int(manifest["world_size"]) for manifest in capture.ranks.values() if str(manifest.get("world_size", "")).isdigit()]
    return max([len(capture.ranks), *told])
