"""Which calls a user asked for: globs such as ``neck.*`` or ``*softmax*``, and regular expressions between slashes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from trueup.foundation.model import TrueupError


class Patterns:
    """A set of patterns matched against the scope, the operator, and ``scope/op`` of a call."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [_compile(p) for p in patterns]

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def match(self, scope: str, op: str) -> bool:
        """Tell whether any pattern matches the call."""
        names = (scope, op, f"{scope}/{op}")
        return any(pattern.search(name) for pattern in self._compiled for name in names)

    def match_name(self, name: str) -> bool:
        """Tell whether any pattern matches a name alone."""
        return any(pattern.search(name) for pattern in self._compiled)


def _compile(pattern: str) -> re.Pattern[str]:
    is_regex = len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/")
    try:
        return re.compile(pattern[1:-1] if is_regex else rf"\A{fnmatch.translate(pattern)}")
    except re.error as error:
        raise TrueupError(f"pattern {pattern} is not a regular expression: {error}") from None
