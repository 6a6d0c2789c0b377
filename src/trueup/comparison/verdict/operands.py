"""What the formulas of a criterion work on: tensors of matched calls, outputs beside inputs, products, and what names tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, most


@dataclass
class Tensors:
    """Floating-point slots of matched calls, of the baseline: an entry each, sorted by call."""

    call: Numbers  # which of the matched calls it belongs to
    slot: Numbers
    relative: Array
    absolute: Array
    norm: Array
    numel: Array
    roundoff: Array  # unit roundoff of the coarser dtype of the two sides; 0 for integers
    size: Callable[[Numbers, int], Array]  # one size of some: the first (0), second (1) or last (-1); 1 where there is none

    @cached_property
    def rms(self) -> Array:
        """Root mean square."""
        return np.where(self.numel > 0, self.norm / np.sqrt(np.maximum(self.numel, 1.0)), 0.0)


@dataclass(slots=True)
class Calls:
    """What the formulas need to know of matched calls: an entry each."""

    row: Numbers  # row of the criterion
    op: Numbers
    aten: Array  # whether it is one of the dispatcher's operators
    optimizer: Array
    lowest: Array  # unit roundoff of the lowest precision that the calls inside compute in (autocast)
    inside: Array  # how many calls with nothing inside ran inside it; 0 where none was recorded

    def take(self, which: Numbers | range) -> Calls:
        """Return an entry for each of some calls, a call as often as it is named; a range gives views."""
        at = slice(which.start, which.stop) if isinstance(which, range) else which
        return Calls(*(getattr(self, column.name)[at] for column in fields(self)))


@dataclass(slots=True)
class Join:
    """Pairs of an output and a tensor that its call reads, sorted by both."""

    outputs: Numbers
    inputs: Numbers
    count: int  # how many outputs there are

    def sum(self, values: Array) -> Array:
        """Return the sum for each output."""
        return np.bincount(self.outputs, values, self.count)

    def most(self, values: Array, least: float) -> Array:
        """Return the maximum for each output, at least ``least``."""
        return most(values, self.outputs, self.count, least)

    def first(self, mask: Array) -> Numbers:
        """Return the first input of each output for which the mask is true, or `NONE`."""
        found = np.full(self.count, NONE, np.int64)
        at = np.flatnonzero(mask)[::-1]
        found[self.outputs[at]] = self.inputs[at]  # the first is written last
        return found

    def first_largest(self, values: Array, mask: Array | None = None) -> Numbers:
        """Return the first input of each output with the largest value, or `NONE`."""
        largest = self.most(values, -1.0)
        reached = values == largest[self.outputs]
        return self.first(reached if mask is None else reached & mask)


@dataclass(slots=True)
class Product:
    """Sums of ``k`` products of two factors; ``scale`` is the norm had nothing cancelled, relative to the norm there is."""

    k: Array
    scale: Array
    relative: Array  # sum of the factors' relative errors
    one: Numbers
    two: Numbers
    all: Array  # whether the factors are not known, so that all inputs are taken for them
    biased: Array  # whether what is no factor is added to the product, as a bias is; a gradient's product is of two factors alone

    @classmethod
    def nothing(cls, count: int) -> Product:
        """Return products of nothing."""
        none = np.full(count, NONE, np.int64)
        return cls(np.ones(count), np.ones(count), np.zeros(count), none, none, np.zeros(count, bool), np.zeros(count, bool))

    def is_added(self, join: Join) -> Array:
        """Tell which inputs are added to the products that their outputs are."""
        at = join.outputs
        factor = self.all[at] | (join.inputs == self.one[at]) | (join.inputs == self.two[at])
        return np.asarray(self.biased[at] & ~factor)


def blocked(k: Array) -> Array:
    """Growth of the rounding error of a sum of ``k`` terms that is blocked by a device's width."""
    return 1 + np.sqrt(k) / 16
