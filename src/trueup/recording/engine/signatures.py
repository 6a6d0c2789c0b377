"""What the arguments of a call are called that were given by position, as the framework itself names them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signatures:
    """Knows the names of the operators of one framework, each asked for once. ``root`` is the framework's package: only its own
    functions are looked up. ``schemas`` gives what Python knows no signature of, the names of each overload."""

    def __init__(self, root: str, schemas: Callable[[str], Iterable[Sequence[str]]] = lambda _: ()) -> None:
        self._root, self._schemas = f"{root}.", schemas
        self._known: dict[str, list[str]] = {}

    def of(self, ops: Iterable[str]) -> dict[str, list[str]]:
        """Return the names by operator; a position whose overloads disagree has an empty one, an unknown operator is left out."""
        for op in ops:
            if op not in self._known:
                self._known[op] = self._python(op) or agreed(self._schemas(op))
        return {op: names for op, names in sorted(self._known.items()) if any(names[1:])}

    def _python(self, op: str) -> list[str]:
        words = op.split(".") if op.startswith(self._root) else []
        at = next((n for n in range(len(words) - 1, 0, -1) if ".".join(words[:n]) in sys.modules), 0)
        found: Any = sys.modules[".".join(words[:at])] if at else None
        for word in words[at:]:
            found = getattr(found, word, None)
        try:
            parameters = inspect.signature(found).parameters.values() if callable(found) else ()
        except (TypeError, ValueError):  # written in C
            return []
        return [one.name for one in parameters if one.kind in POSITIONAL]


def agreed(overloads: Iterable[Sequence[str]]) -> list[str]:
    """Return the name of each position that all overloads have alike: ``[self, "", dim]`` of ``split``."""
    lists = list(overloads)
    at = [{names[k] for names in lists if k < len(names)} for k in range(max(map(len, lists), default=0))]
    return [names.pop() if len(names) == 1 else "" for names in at]
