"""Which of several switches are guilty: the fewest that, off together, take the difference away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def fewest(items: Sequence[T], enough: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return a smallest set in the sense that none of its members can be left out: delta debugging (ddmin).

    Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002. For one guilty member of n it asks about
    2 log2(n) times.

    Args:
        items: all of them together are enough; not asked again.
        enough: tells whether some of them are; a set that cannot be tried is not.
    """
    kept = tuple(items)
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        pieces = [kept[k : k + size] for k in range(0, len(kept), size)]
        rests = [tuple(item for item in kept if item not in piece) for piece in pieces]
        piece = next((piece for piece in pieces if enough(piece)), None)
        if piece is not None:
            kept, parts = piece, 2
            continue
        rest = None if len(pieces) == 2 else next((rest for rest in rests if enough(rest)), None)
        if rest is not None:
            kept, parts = rest, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept
