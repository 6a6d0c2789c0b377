"""Delta debugging (ddmin): the fewest of several things with which something still happens, found by asking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def fewest(items: Sequence[T], enough: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return a smallest set of ``items`` that is enough: none of its members can be left out. All items together are taken to be
    enough without asking; a set that cannot be tried is not. With one guilty of n items it asks about 2 log2(n) times (Zeller and
    Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002)."""
    kept = tuple(items)
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        pieces = [kept[k : k + size] for k in range(0, len(kept), size)]
        # Where no half was enough no smaller piece is: beyond halves, a piece is left out and the rest tried.
        tried = pieces if parts == 2 else [tuple(item for item in kept if item not in piece) for piece in pieces]
        found = next((some for some in tried if enough(some)), None)
        if found is not None:
            kept, parts = found, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept
