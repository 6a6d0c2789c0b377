"""Reading the options that choose steps, ranks, levels and calls; whatever is wrong with them is said at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from trueup.model import LEVELS, TrueupError

Numbers = range | tuple[int, ...]


def numbers(text: str | None, option: str) -> Numbers | None:
    """Read ``0:3`` (0, 1, 2), ``5:`` (5 and later) or ``0,2,5``; None for no choice."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d*)\s*:\s*(\d*)\s*", text)
    if found and (found[1] or found[2]):
        chosen: Numbers = range(int(found[1] or 0), int(found[2]) if found[2] else sys.maxsize)
    elif re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        chosen = tuple(sorted({int(part) for part in text.split(",")}))
    else:
        raise _bad(option, text, "numbers like 0,2,5 or a range like 0:3 (its end is not part of it)", "correct it")
    if not chosen:
        raise _bad(option, text, "at least one number", "a range ends behind its last number: 0:1 is step 0")
    return chosen


def names(given: Sequence[str] | None, allowed: Sequence[str], option: str) -> tuple[str, ...]:
    """Read repeated or comma-separated names, each one of ``allowed``, in the order of ``allowed``."""
    words = {word.strip() for text in given or () for word in text.split(",")}
    wrong = sorted(words - set(allowed))
    if wrong:
        raise _bad(option, wrong[0], f"one of {', '.join(allowed)}", "correct it; the option may be repeated")
    return tuple(name for name in allowed if name in words)


def one(given: str, allowed: Sequence[str], option: str) -> str:
    """Read exactly one name out of ``allowed``."""
    if given not in allowed:
        raise _bad(option, given, f"one of {', '.join(allowed)}", "correct it")
    return given


def levels(given: Sequence[str] | None) -> tuple[str, ...]:
    """Read ``--level``; ``all`` is every level, and no choice gives none."""
    chosen = names(given, (*LEVELS, "all"), "--level")
    return LEVELS if "all" in chosen else chosen


def patterns(given: Iterable[str] | None, option: str) -> tuple[str, ...] | None:
    """Check globs and ``/regular expressions/``; None for no choice."""
    chosen = tuple(given or ())
    for pattern in chosen:
        if not pattern.strip() or pattern == "//":
            raise _bad(option, pattern, "a glob like encoder.* or an expression like /layers\\.[0-3]/", "correct it")
        if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
            _check_expression(pattern, option)
    return chosen or None


def _check_expression(pattern: str, option: str) -> None:
    try:
        re.compile(pattern[1:-1])
    except re.error as error:
        next_step = f"correct it ({error}), or use a glob without slashes"
        raise _bad(option, pattern, "a regular expression", next_step) from None


def _bad(option: str, got: str, expected: str, next_step: str) -> TrueupError:
    return TrueupError(
        f"{option} cannot be read.\n  expected: {expected}\n  got:      {got!r}\n  next:     {next_step}"
    )
