"""Layer paths: the scope of a call is the path of the innermost Layer that is running."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator

import paddle

WRAPPERS = {"DataParallel": "_layers", "PipelineParallel": "_layers", "TensorParallel": "_layers", "ShardingParallel": "_layers"}
"""Layers that hold the user's, and under which name (Paddle 3.3: paddle.DataParallel and fleet's wrappers)."""


class Scopes:
    """Gives each Layer its path. The first root with parameters is ``""``; further roots start with their class name.

    Not by ``full_name()``: that counts all Layers that the process ever made.
    """

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[paddle.nn.Layer, str] = weakref.WeakKeyDictionary()
        self._roots: defaultdict[str, int] = defaultdict(int)
        self._has_main = False

    def register(self, root: paddle.nn.Layer, name: str | None = None) -> None:
        """Name a root Layer and all Layers below it."""
        prefix = self._root_name(root) if name is None else name
        for path, layer in _walk(root, prefix):
            self._paths.setdefault(layer, path)

    def path(self, layer: paddle.nn.Layer, parent: paddle.nn.Layer | None) -> str:
        """Return the path of a Layer that starts to run inside ``parent`` (None: outside any Layer)."""
        found = self._paths.get(layer)
        if found is None:
            if parent is None:
                self.register(layer)
            else:  # built after its parent was registered
                name = next((k for k, child in parent.named_children() if child is layer), type(layer).__name__)
                above = self._paths.get(parent, "")
                self.register(layer, f"{above}.{name}" if above else name)
            found = self._paths[layer]
        return found

    def _root_name(self, root: paddle.nn.Layer) -> str:
        if not self._has_main and next(iter(root.parameters()), None) is not None:
            self._has_main = True
            return ""
        inner = root
        while type(inner).__name__ in WRAPPERS and (held := inner._sub_layers.get(WRAPPERS[type(inner).__name__])) is not None:
            inner = held
        name = type(inner).__name__
        self._roots[name] += 1
        return name if self._roots[name] == 1 else f"{name}~{self._roots[name]}"


def _walk(layer: paddle.nn.Layer, path: str) -> Iterator[tuple[str, paddle.nn.Layer]]:
    """Yield each Layer once, with its path, wrappers left out of it; a shared one goes by its first place."""
    seen: set[int] = set()
    pending = [(path, layer)]
    while pending:
        path, layer = pending.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield path, layer
        hidden = WRAPPERS.get(type(layer).__name__)
        below = [
            (path if name == hidden else f"{path}.{name}" if path else name, child)
            for name, child in layer._sub_layers.items()
            if child is not None
        ]
        pending += reversed(below)
