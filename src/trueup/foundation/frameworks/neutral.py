"""Settings of layers and optimizers by names that frameworks share, as layers.toml and optimizers.toml have them.

What is not in the tables is left out: of it nothing is known, and two frameworks name and store everything else in their own ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trueup.foundation.facts.slots import SINGLE
from trueup.foundation.frameworks.tables import Named, Optimizer, Own, layers_by_class, optimizers_by_class

CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "num_directions": lambda value: value == 2,
    "time_major": lambda value: not value,
    "mode": lambda value: str(value).rpartition("_")[2].lower(),
    "1-": lambda value: round(1 - value, 12) if isinstance(value, (int, float)) else value,
    "!": lambda value: not value,
}
"""Makes a neutral value of a framework's (the column ``settings`` of the tables)."""


def neutral_settings(settings: Mapping[str, Any], own: Own) -> dict[str, Any]:
    """Return settings by neutral names and values; those that an instance lacks are left out."""
    held = [(one, name) for one in own.settings for name in (one.own, one.own.lstrip("_")) if name in settings]
    found = {one.neutral: neutral_value(settings[name], one, own.values.get(one.neutral, {})) for one, name in held}
    if found.get("padding_idx") == -1:  # Paddle's none
        found["padding_idx"] = None
    if found.get("stride", 0) is None and "kernel_size" in found:  # a pooling's: Paddle writes that it was left out
        found["stride"] = found["kernel_size"]
    if found.get("padding") == "same" and found.get("stride") == 1:  # of an odd kernel the same on both sides
        found["padding"] = _same_padding(settings, found.get("dilation", 1))
    return found


def _same_padding(settings: Mapping[str, Any], dilation: Any) -> Any:
    """Return the padding in numbers that keeps a result as large as its input; ``same`` if there is no such number."""
    sizes = settings.get("kernel_size", settings.get("_kernel_size"))
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    if not isinstance(dilation, int) or not all(isinstance(size, int) and size % 2 for size in sizes):
        return "same"
    both = [(size - 1) // 2 * dilation for size in sizes]
    return both[0] if all(one == both[0] for one in both) else both


def neutral_value(value: Any, one: Named, values: Mapping[str, Any]) -> Any:
    """Return what a framework's value of an attribute or an argument is in neutral terms: by its table ``values``, else made by
    ``one.how``; equal numbers of a list are one number, and a text is in small letters."""
    try:
        known = json.dumps(value)
    except TypeError:
        known = ""
    if known in values:
        return values[known]
    made = CONVERTED[one.how](value) if one.how else value
    if isinstance(made, (list, tuple)):
        plain = list(made)
        return plain[0] if plain and all(x == plain[0] for x in plain) else plain
    return made.lower() if isinstance(made, str) else made


def same(first: Any, second: Any) -> bool:
    """Tell whether two neutral values are the same; numbers up to float32's rounding, in which Keras holds a learning rate."""
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (first, second))
    if numbers:
        return bool(abs(first - second) <= 2 * SINGLE * max(abs(first), abs(second)))
    return bool(first == second)


SELECTIVE = ("apply_decay_param_fun", "exclude_from_weight_decay")
"""Settings that say of which parameters a weight decay is not, by a function or a pattern: what each parameter has is not known."""

CLIPPINGS: Mapping[str, str] = {
    "norm": "norm", "ClipGradByGlobalNorm": "norm", "global_clipnorm": "norm", "ClipGradByNorm": "norm of each gradient",
    "clipnorm": "norm of each gradient", "ClipGradByValue": "value", "clipvalue": "value", "value": "value",
}  # fmt: skip
"""What a clipping is called in PyTorch's words, by the first word of what a manifest says: ``norm at 1``."""


def neutral_optimizers(held: Sequence[Mapping[str, Any]], framework: str) -> list[dict[str, Any]]:
    """Return what a manifest says of optimizers, in neutral terms; nothing where one of them is in no table."""
    known = optimizers_by_class(framework)
    rows = [known.get(str(one.get("class"))) for one in held]
    return [_optimizer(one, row, framework) for one, row in zip(held, rows, strict=True) if row] if all(rows) else []


def _optimizer(held: Mapping[str, Any], row: Optimizer, framework: str) -> dict[str, Any]:
    own = row.own[framework]
    groups = [one for one in _list(held, "groups") if isinstance(one, Mapping)]
    unknown = {"weight_decay"} if any(group.get(name) for group in groups for name in SELECTIVE) else set()

    def known(group: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in {**beside, **neutral_settings(group, own)}.items() if n not in unknown and v is not None}

    found: dict[str, Any] = {"class": row.name, "groups": [known(group, row.defaults) for group in groups]}
    changes = [one for one in _list(held, "changes") if isinstance(one, list) and len(one) == 3 and isinstance(one[2], Mapping)]
    found["changes"] = [[step, group, known(change, {})] for step, group, change in changes]
    how, _, most = str(held.get("clipping", "")).rpartition(" at ")
    if how and how.split()[0] in CLIPPINGS:
        found["clipping"] = f"{CLIPPINGS[how.split()[0]]} at {_plain(most)}"
    return found | ({"parameters": held["parameters"]} if "parameters" in held else {})


def defined_otherwise(classes: Sequence[str], first: str, second: str) -> list[str]:
    """Return what two frameworks define in other ways in optimizers of these classes, which no setting of theirs says."""
    rows = [row for one in classes if (row := optimizers_by_class(second).get(one)) and first in row.own]
    told = {row.name: (row.differs, *(row.own[one].differs for one in (first, second))) for row in rows}
    return [f"{name}: {one}" for name, said in told.items() for one in said if one]


def _list(held: Mapping[str, Any], name: str) -> list[Any]:
    """A manifest is anybody's, and what is of another kind is not there."""
    found = held.get(name)
    return found if isinstance(found, list) else []


def _plain(number: str) -> str:
    try:
        return f"{float(number):g}"
    except ValueError:
        return number


def neutral_modules(held: Mapping[str, Mapping[str, Any]], framework: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the scope and the settings of each module that is in the tables."""
    known = layers_by_class(framework)
    for scope, module in held.items():
        row = known.get(str(module.get("class")))
        if row is not None:
            training = {"training": module["training"]} if isinstance(module.get("training"), bool) else {}
            yield scope, {"class": row.name, **training, **neutral_settings(module, row.own[framework])}
