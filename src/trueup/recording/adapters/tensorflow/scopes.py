"""Layer paths: the scope of a call is the path of the innermost Keras layer that is running.

Keras counts layers of a class for the whole process (``dense``, ``dense_1``), so a model that was built second has other names.
Here a path is made of attributes (``encoder.fc1``), places in lists (``blocks.0``) and, in functional and sequential models, of the
names that the user gave; a name that Keras made up is counted anew inside its model.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any


def layer_class() -> Any:
    """Return the class of Keras's layers; None where Keras is not loaded yet."""
    module = sys.modules.get("keras.src.layers.layer")
    return getattr(module, "Layer", None)


class Scopes:
    """Gives each layer its path. The first root with weights is ``""``; further roots start with their class name."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots: defaultdict[str, int] = defaultdict(int)
        self._has_main = False
        self._weights: dict[int, tuple[weakref.ref[Any], str]] = {}

    def name_weight(self, variable: Any, name: str) -> None:
        """Take note of the path of a weight: of its layer, and its name there."""
        self._weights[id(variable)] = weakref.ref(variable), name

    def weight(self, variable: Any) -> str:
        """Return the path of a weight; the name that TensorFlow knows it by where no layer has it."""
        known = self._weights.get(id(variable))
        if known is not None and known[0]() is variable:
            return known[1]
        return str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))

    def register(self, root: Any, name: str | None = None) -> None:
        """Name a root layer and all layers below it."""
        prefix = self._root_name(root) if name is None else name
        for path, layer in _walk(root, prefix):
            self._paths.setdefault(layer, path)

    def path(self, layer: Any, parent: Any | None) -> str:
        """Return the path of a layer that starts to run inside ``parent`` (None: outside any layer)."""
        found = self._paths.get(layer)
        if found is None:
            if parent is None:
                self.register(layer)
            else:  # built after its parent was registered
                name = next((k for k, child in children(parent) if child is layer), snake(type(layer).__name__))
                above = self._paths.get(parent, "")
                self.register(layer, f"{above}.{name}" if above else name)
            found = self._paths[layer]
        return found

    def _root_name(self, root: Any) -> str:
        if not self._has_main and has_weights(root):
            self._has_main = True
            return ""
        name = type(root).__name__
        self._roots[name] += 1
        return name if self._roots[name] == 1 else f"{name}~{self._roots[name]}"


def has_weights(layer: Any) -> bool:
    """Tell whether a layer has weights, or may have them once it is built: a loss or a metric is no model."""
    return bool(layer.weights) or not layer.built


def snake(name: str) -> str:
    """Return ``multi_head_attention`` for ``MultiHeadAttention``, as Keras makes names up (``to_snake_case``)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def children(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers that a layer holds, each with its name in it."""
    kind = layer_class()
    graph = hasattr(layer, "_operations") or type(layer).__name__ == "Sequential"
    if graph:
        yield from _of_model(layer)
    seen = set()
    for name, value in list(vars(layer).items()):
        if name.startswith("_") and not isinstance(value, kind):
            continue
        for path, child in _held(name.lstrip("_"), value, kind):
            if id(child) not in seen:
                seen.add(id(child))
                yield path, child


def _of_model(model: Any) -> Iterator[tuple[str, Any]]:
    counted: Counter[str] = Counter()
    for child in list(getattr(model, "layers", ())):
        made_up = snake(type(child).__name__)
        if re.fullmatch(rf"{re.escape(made_up)}(_\d+)?", child.name):
            n = counted[made_up]
            counted[made_up] += 1
            yield (made_up if n == 0 else f"{made_up}_{n}"), child
        else:
            yield child.name, child


def _held(name: str, value: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, kind):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            if isinstance(item, kind):
                yield f"{name}.{k}", item
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, kind):
                yield f"{name}.{key}", item


def layers_of(model: Any) -> list[tuple[str, Any]]:
    """Return the layers of a model with their paths, the model first: its path is empty."""
    return list(_walk(model, ""))


def _walk(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each layer once, with its path; a shared one goes by its first place."""
    seen: set[int] = set()
    pending = [(path, layer)]
    while pending:
        path, layer = pending.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield path, layer
        pending += reversed([(f"{path}.{name}" if path else name, child) for name, child in children(layer)])
