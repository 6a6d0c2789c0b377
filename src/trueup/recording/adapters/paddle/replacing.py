"""Functions of Paddle in whose place Trueup stands for the time of a capture, wherever somebody holds them by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

LEFT_ALONE = ("paddle.base.libpaddle", "paddle._pir_ops", "paddle._typing")
"""Modules whose names are not replaced: the originals, and what builds programs."""


class Sweep:
    """Functions replaced wherever a module holds them: ``from paddle._C_ops import matmul`` binds the original for good.

    A module that takes one by name while they are replaced keeps the replacement, which hands on to the original afterwards.
    """

    def __init__(self, replaced: Iterable[tuple[Any, Any]]) -> None:
        self._by_id = {id(original): (original, new) for original, new in replaced}
        self._done: list[tuple[dict[str, Any], str, Any]] = []

    def install(self) -> int:
        """Replace; return in how many places."""
        for name, module in list(sys.modules.items()):
            if type(module) is not ModuleType or name.startswith(LEFT_ALONE):
                continue
            names = vars(module)
            for key, value in list(names.items()):
                found = self._by_id.get(id(value))
                if found is not None and found[0] is value:
                    names[key] = found[1]
                    self._done.append((names, key, found[1]))
        return len(self._done)

    def remove(self) -> None:
        """Give every place back that still holds what was put there."""
        originals = {id(new): original for original, new in self._by_id.values()}
        done, self._done = self._done, []
        for names, key, new in done:
            if names.get(key) is new:
                names[key] = originals[id(new)]
