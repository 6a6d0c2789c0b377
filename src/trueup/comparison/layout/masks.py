"""Masks that ranks drew: of different data they must differ."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trueup.comparison.layout.pieces import Piece

ENOUGH = 64
"""Elements of a mask that are the same on two ranks: by chance that has a probability of 2**-64."""

RARE = 0.02
"""Part of a mask that is kept, or dropped, below which two masks are much alike whatever drew them."""


def same_mask(held: Iterable[tuple[Piece, Piece | None]]) -> bool:
    """Tell whether ranks dropped the same elements, by what each ``held``: what came out and what went in. Elements that are zero
    before on one of them are of no mask; that so many others agree is no chance."""
    loads = [(made.load, None if given is None else given.load) for made, given in held]
    arrays = [(one(), other()) for one, other in loads if one is not None and other is not None]
    if len(arrays) < 2 or len({array.shape for pair in arrays for array in pair}) != 1:
        return False
    seen = np.logical_and.reduce([array != 0 for _, array in arrays])
    masks = [array[seen] == 0 for array, _ in arrays]
    if masks[0].size < ENOUGH or not RARE < masks[0].mean() < 1 - RARE:
        return False
    return all(np.array_equal(mask, masks[0]) for mask in masks)
