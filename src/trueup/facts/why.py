"""Why two tensors could not be measured, or are apart by more than a number says: facts, of which `words` makes sentences.

Imports nothing, so that what writes the words (`trueup.words.reasons`) may be used by anything.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Why(Enum):
    """What kept a distance from being measured, or makes it infinite, a bound or an estimate."""

    SHAPES = auto()
    """The shapes differ; facts: both."""
    DTYPES = auto()
    """Only digests are there, of two dtypes; facts: both."""
    UNSIZED = auto()
    """The digests differ and nothing else is there: it may be a single rounding."""
    NO_STATISTICS = auto()
    """One side has none."""
    OTHER_STATISTICS = auto()
    """One side's numbers cannot be compared with the other's."""
    UNKNOWN_STATISTICS = auto()
    """A dump lacks them."""
    MEANING = auto()
    """A dump's numbers mean something else, and are not equal."""
    NOT_FINITE = auto()
    """Another number of NaN or Inf."""
    PLACES = auto()
    """NaN or Inf in other places."""
    SAME_BUT_BYTES = auto()
    """As many NaN, Inf or masks, the same finite elements, other bytes."""
    MASKS = auto()
    """Another number of masks."""
    MEANS = auto()
    """Means that only another number of masks explains."""
    SKETCH = auto()
    """A sum of the sketch overflowed."""
    BOUND = auto()
    """The distance is a lower bound, by statistics of a dump."""
    SPREAD = auto()
    """The distance is an estimate, by statistics of a dump."""
    ORDER = auto()
    """The distance is a lower bound: sketches and digests of two layouts say nothing."""
    UNRECORDED = auto()
    """A criterion asks for elements; facts: its name."""
    INPUTS = auto()
    """The result differs, and an input was not measured."""
    SOURCES = auto()
    """What a run of calls without counterpart reads was not all compared."""
    ONE_SIDED = auto()
    """Only one side has these results; facts: the first of them."""
    UNMEASURED = auto()
    """Nothing said why."""


class Reason(NamedTuple):
    """Why, with the facts beside it."""

    why: Why
    facts: tuple[str, ...] = ()
