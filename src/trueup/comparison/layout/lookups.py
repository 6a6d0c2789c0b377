"""Rows that are looked up of a weight of which each rank holds some: what another rank holds counts as zeros, and all are added.

A rank that is given all words looks up those of its own rows, at their place in these, and any row for the others, which it
sets to zero afterwards. So says the shape of what is looked up; no name does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trueup.comparison.layout.geometry import Geometry
from trueup.comparison.layout.pieces import Array, Piece, Way


@dataclass(frozen=True)
class Lookup:
    """``words`` and ``weight`` are slots of the call; ``axis`` cuts the weight's rows; ``local``: words are places in these."""

    axis: str
    words: str = "input.0"
    weight: str = "input.1"
    local: bool = False


def lookup_in(
    given: Mapping[str, Mapping[str, Any]], made: Sequence[int], all_words: Sequence[int], ways: Callable[[str], Mapping[str, Way]]
) -> Lookup | None:
    """Return how a call looks up rows, by what it is ``given``, the shapes of what it ``made`` and of the words that its module is
    given; ``ways``: how a slot's bytes lie."""
    words = [
        name
        for name, row in given.items()
        if row["shape"] == list(all_words) and str(row["dtype"]).startswith(("int", "uint"))
    ]
    for name, row in given.items():
        cuts = [axis for axis, way in ways(name).items() if way.kind == "sharded"] if name not in words else []
        by_rows = len(cuts) == 1 and ways(name)[cuts[0]] == Way("sharded", 0)
        if len(words) == 1 and by_rows and [*all_words, *row["shape"][1:]] == list(made):
            return Lookup(cuts[0], words[0], name, local=True)
    return None


def own_rows(
    held: Mapping[int, Piece], geometry: Geometry, lookup: Lookup, words: Mapping[int, Piece], weights: Mapping[int, Piece],
    *, places: bool,
) -> dict[int, Piece] | None:  # fmt: skip
    """Return what ranks looked up of their own rows, and zeros for the rest, or, of ``places``, where these stand in the whole;
    None where no bytes were kept. ``words`` are all of them."""
    found = {}
    for group in geometry.along(lookup.axis):
        offset = 0
        for worker in group:
            if worker not in held:
                continue
            piece, told, weight = held[worker], words.get(worker), weights.get(worker)
            if piece.load is None or told is None or told.load is None or weight is None:
                return None
            end = offset + weight.shape[0]
            load = partial(_own, piece.load, told.load, offset, end, offset if places and lookup.local else 0)
            found[worker] = Piece(piece.dtype, piece.shape, None, None, None, load, changed=True)
            offset = end
    return found


def _own(load: Callable[[], Array], words: Callable[[], Array], first: int, end: int, offset: int) -> Array:
    told, held = words(), load()
    own = ((told >= first) & (told < end)).reshape(*told.shape, *(1,) * (held.ndim - told.ndim))
    return np.where(own, held + offset if offset else held, np.zeros(1, held.dtype))
