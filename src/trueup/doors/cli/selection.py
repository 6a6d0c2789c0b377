"""Reading options that several commands share; what the library checks itself is left to it."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.foundation.model import LEVELS, TrueupError


def words(given: Sequence[str] | None) -> tuple[str, ...]:
    """Read a repeated option whose values may also be separated by commas."""
    return tuple(word for text in given or () for word in map(str.strip, text.split(",")) if word)


def levels(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Read ``--level``; ``all`` is every level, and no choice is None."""
    chosen = words(given)
    return LEVELS if "all" in chosen else chosen or None


def one(given: str | None, allowed: Sequence[str], option: str) -> str | None:
    """Read an option that takes one of a few words, or none.

    Raises:
        TrueupError: it is another word.
    """
    if given is None or given in allowed:
        return given
    raise TrueupError(
        f"{option} cannot be read.\n  expected: one of {', '.join(allowed)}\n  got:      {given!r}\n"
        "  next:     correct it, or leave it out"
    )
