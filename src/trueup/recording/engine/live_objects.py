"""How a training is set, as living objects hold it: parsed arguments, resolved configurations, losses, schedules, scalers.

Each is known by its class (`live_classes.toml`), looked up where its module is loaded: nothing is imported. Which
objects there are `Built` knows. Values are scalars and short lists of them; what else an attribute holds is left out.
"""

from __future__ import annotations

import enum
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from trueup.foundation import toml

SCALARS = (bool, int, float, str, type(None))
LONGEST_LIST = 16
"""Items of a list that is kept: strides, betas, sizes of layers; a longer one is data."""
LONGEST_TEXT = 200
DEEPEST = 8
"""Mappings in mappings of a configuration that are read."""


class LiveClass(toml.Table):
    """A class whose living objects say how a training is set; ``holds`` is the attribute with the mapping of a configuration."""

    module: str
    name: str = msgspec.field(name="class")
    holds: str = ""


class LiveClasses(toml.Table):
    """The rows of ``live_classes.toml``, by what their objects are."""

    argument: tuple[LiveClass, ...]
    configuration: tuple[LiveClass, ...]
    whole: tuple[LiveClass, ...]
    loss: tuple[LiveClass, ...]
    schedule: tuple[LiveClass, ...]
    scaler: tuple[LiveClass, ...]


@cache
def _known() -> LiveClasses:
    return toml.checked(toml.packaged("trueup.foundation.facts", "live_classes.toml"), LiveClasses)


def _loaded(some: Sequence[LiveClass]) -> tuple[type, ...]:
    return tuple(kind for one in some if isinstance(kind := getattr(sys.modules.get(one.module), one.name, None), type))


def names() -> list[tuple[str, str]]:
    """Return module and name of each class whose objects say how a training is set."""
    known = _known()
    rows = (*known.argument, *known.configuration, *known.whole, *known.loss, *known.schedule, *known.scaler)
    return [(one.module, one.name) for one in rows]


def wholes() -> tuple[type, ...]:
    """Return the loaded classes of modules that hold a model and are never called themselves."""
    return _loaded(_known().whole)


def arguments(found: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a script, those of nested configurations by their paths (``optimizer.lr``, ``layers.0.p``); where two
    objects give a name two values, a list of both, in an order of their own."""
    parsed: list[Mapping[Any, Any]] = [vars(one) for one in found if isinstance(one, (Namespace, *_loaded(_known().argument)))]
    for row in _known().configuration:
        of = [one for one in found if isinstance(one, _loaded([row]))]
        parsed += [vars(one)[row.holds] for one in of if vars(one).get("_parent") is None and row.holds in vars(one)]
    said: dict[str, list[Any]] = {}
    for one in parsed:
        for name, value in _flat(one).items():
            if not name.startswith("_") and value not in said.setdefault(name, []):
                said[name].append(value)
    return {name: values[0] if len(values) == 1 else sorted(values, key=repr) for name, values in said.items()}


def _flat(held: Any, prefix: str = "", depth: int = DEEPEST) -> dict[str, Any]:
    """Return the values of a mapping of mappings by their paths; OmegaConf wraps each value, and what it refers to stays a name."""
    found: dict[str, Any] = {}
    for name, value in held.items() if isinstance(held, Mapping) else ():
        inner = (
            vars(value).get("_content", vars(value).get("_val", value)) if type(value).__module__.startswith("omegaconf") else value
        )
        if isinstance(inner, (list, tuple)):
            inner = [vars(one).get("_val", one) if type(one).__module__.startswith("omegaconf") else one for one in inner]
            if len(inner) <= LONGEST_LIST and not all(isinstance(one, SCALARS) for one in inner):
                inner = {str(at): one for at, one in enumerate(inner)}
        if isinstance(inner, Mapping) and depth:
            found |= _flat(inner, f"{prefix}{name}.", depth - 1)
        else:
            found |= {f"{prefix}{name}": kept for kept in plain({str(name): inner}).values()}
    return found


def losses(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what losses are set to, in an order of their own."""
    mine = [one for one in found if isinstance(one, _loaded(_known().loss))]
    return sorted(
        (
            {"class": type(one).__name__} | plain({n: v for n, v in vars(one).items() if n[0] != "_" and n != "name"})
            for one in mine
        ),
        key=str,
    )


def scalers(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what scalers of losses are set to, in an order of their own."""
    mine = [one for one in found if isinstance(one, _loaded(_known().scaler))]
    held = [{name.lstrip("_"): value for name, value in vars(one).items() if not name.endswith("tracker")} for one in mine]
    return sorted(({"class": type(one).__name__} | plain(own) for one, own in zip(mine, held, strict=True)), key=str)


def schedule(found: Sequence[Any], optimizer: Any) -> str:
    """Name what changes the learning rate of an optimizer: ``CosineAnnealingLR``, ``LambdaLR (warmup)``."""
    mine = [one for one in found if isinstance(one, _loaded(_known().schedule)) and vars(one).get("optimizer") is optimizer]
    return ", ".join(sorted(map(_schedule, mine)))


def _schedule(one: Any) -> str:
    functions = [getattr(each, "func", each) for each in vars(one).get("lr_lambdas") or ()]
    names = dict.fromkeys(name for each in functions if (name := getattr(each, "__name__", "")))
    return type(one).__name__ + (f" ({', '.join(names)})" if names else "")


def plain(held: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what of a mapping is a scalar, or a short list of scalars; numbers of NumPy's kind are Python's."""
    found: dict[str, Any] = {}
    for name, value in held.items():
        if isinstance(name, str) and not name.startswith("__") and (kept := _plain(value)) is not _NOTHING:
            found[name] = kept
    return found


_NOTHING = object()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, SCALARS):  # or a class that derives from one, as NumPy's float64
        value = None if value is None else next(kind for kind in (bool, int, float, str) if isinstance(value, kind))(value)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no infinity
        return value[:LONGEST_TEXT] if isinstance(value, str) else value
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST_LIST:
        items = [_plain(one) for one in value]
        return _NOTHING if any(one is _NOTHING for one in items) else items
    return _NOTHING
