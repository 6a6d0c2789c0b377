"""Weights that are longer than the other run's: a vocabulary with rows that belong to no word, so that each rank holds as many.

That a weight is padded its bytes say: without the last rows it is the other run's. Whatever is as long, where the other run's is
as long as that run's weight, is padded as well: scores of words, gradients, what an optimizer keeps. What lies beyond is not
compared, and shows where it is read: a loss that counts words that are none is another one.
"""

from __future__ import annotations

from collections.abc import Mapping

from trueup.comparison.layout.pieces import Array, Piece


def padded_dim(shape: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    """Return the one dimension in which a shape is longer than the other run's; None where there is none, or another differs."""
    if len(shape) != len(whole):
        return None
    longer = [n for n, (mine, its) in enumerate(zip(shape, whole, strict=True)) if mine != its]
    return longer[0] if len(longer) == 1 and shape[longer[0]] > whole[longer[0]] else None


def unpadded(made: Piece, whole: Piece) -> Piece | None:
    """Return a tensor without what it is longer than the other run's by; None where it is not, or nobody kept its bytes."""
    dim, load = padded_dim(made.shape, whole.shape), made.load
    if dim is None or load is None:
        return None
    length = whole.shape[dim]

    def part(start: int, stop: int) -> Array:
        held = made.rows(start, stop if dim else min(stop, length))
        return held if not dim else _first(held, dim, length)

    return Piece(made.dtype, whole.shape, load=lambda: _first(load(), dim, length), changed=True, part=part)


def is_padded(made: tuple[int, ...], whole: tuple[int, ...], padded: Mapping[int, int]) -> bool:
    """Tell whether a shape is the other run's with padding that is known from a weight: ``padded``, by length that without it."""
    dim = padded_dim(made, whole)
    return dim is not None and padded.get(made[dim]) == whole[dim]


def _first(array: Array, dim: int, length: int) -> Array:
    return array[(slice(None),) * dim + (slice(length),)]
