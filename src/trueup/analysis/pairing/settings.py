"""What is no tensor and must agree all the same: a norm's epsilon, padding, momentum, a GELU's kind; before any number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trueup.analysis.pairing.proposing import Pair
from trueup.foundation.frameworks.tables import Named, Own
from trueup.foundation.frameworks.trees import Tree

CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "num_directions": lambda value: value == 2,
    "time_major": lambda value: not value,
    "mode": lambda value: str(value).rpartition("_")[2].lower(),
    "1-": lambda value: round(1 - value, 12) if isinstance(value, (int, float)) else value,
    "!": lambda value: not value,
}
"""What makes neutral values of a framework's (the column ``settings``)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that the two models have in different ways."""

    where: str
    """The layer, or the optimizer."""
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


def neutral_settings(settings: Mapping[str, Any], own: Own) -> dict[str, Any]:
    """Return settings by neutral names and values; those that an instance does not have are left out."""
    held = [one for one in own.settings if one.own in settings]
    found = {one.neutral: _neutral(settings[one.own], one, own.values.get(one.neutral, {})) for one in held}
    if found.get("stride", 0) is None and "kernel_size" in found:  # a pooling's: Paddle writes that it was left out
        found["stride"] = found["kernel_size"]
    if found.get("padding") == "same" and found.get("stride") == 1:  # of an odd kernel the same on both sides
        found["padding"] = _same_padding(settings, found.get("dilation", 1))
    return found


def _same_padding(settings: Mapping[str, Any], dilation: Any) -> Any:
    """Return in numbers what is padded where results are to be as large as what comes in; ``same`` where no number says it."""
    sizes = settings.get("kernel_size", settings.get("_kernel_size"))
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    if not isinstance(dilation, int) or not all(isinstance(size, int) and size % 2 for size in sizes):
        return "same"
    both = [(size - 1) // 2 * dilation for size in sizes]
    return both[0] if all(one == both[0] for one in both) else both


def _neutral(value: Any, one: Named, values: Mapping[str, Any]) -> Any:
    try:
        known = json.dumps(value)
    except TypeError:
        known = ""
    if known in values:
        return values[known]
    made = CONVERTED[one.how](value) if one.how else value
    if one.neutral == "padding_idx" and made == -1:
        return None
    if isinstance(made, (list, tuple)):
        plain = list(made)
        return plain[0] if plain and all(x == plain[0] for x in plain) else plain
    return made.lower() if isinstance(made, str) else made


def same(first: Any, second: Any) -> bool:
    """Tell whether two neutral values are the same; numbers to the last digits that a subtraction leaves."""
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (first, second))
    if numbers:
        return bool(abs(first - second) <= 1e-9 * max(abs(first), abs(second)))
    return bool(first == second)


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
