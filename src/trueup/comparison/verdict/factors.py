"""Exact factors: a result that is the baseline's times one number, and which number that is.

A scale that is missing or applied twice, a mean for a sum over n ranks, a sign: then ``candidate = r baseline`` to rounding, for::

    r  =  <baseline, candidate> / <baseline, baseline>        |candidate - r baseline|  <<  |candidate - baseline|

Both follow from the elements, and as well from anything linear in them: a sketch of either side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trueup.comparison.graph.streams import Array

SHARED = 0.02
"""Largest part of a difference that is not along the baseline where one factor makes all of it."""
ALONE = 8
"""Fewest elements that say by themselves that they share a factor; of fewer, a number that somebody would write has to say it."""
LARGEST = 4096
"""Largest integer, or integer under a root, that is looked for: heads, ranks, widths."""
CHANCE = 0.01
"""Part of all numbers that may lie as near to an integer, or to a root of one, as the factor does."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One number by which all elements are off."""

    value: float
    exact: str
    """What it is to rounding, ``2``, ``1/3``, ``sqrt(24)``; empty where it is none of them."""

    def __str__(self) -> str:
        """Say it in words."""
        if self.exact:
            return f"off by a factor of exactly {self.exact}"
        return f"all elements are off by the same factor, {self.value:.5g}"


def factor(baseline: Array, candidate: Array, rounding: float, elements: int) -> Factor | None:
    """Return the factor between two sides, None where they are no multiples of one another.

    Args:
        baseline: float64 ``(n,)``, elements or a sketch.
        candidate: the same of the other side.
        rounding: relative error that rounding explains.
        elements: how many there are in the tensor.
    """
    square = float(baseline @ baseline)
    apart = float(np.linalg.norm(candidate - baseline))
    if not (np.isfinite(candidate).all() and 0 < square < math.inf and apart > 0):
        return None
    value = float(baseline @ candidate) / square
    rest = float(np.linalg.norm(candidate - value * baseline))
    size = abs(value) * math.sqrt(square)
    if value == 0 or rest > SHARED * apart or rest > max(rounding, 2.0**-40) * size:
        return None
    exact = _exact(value, max(rounding, rest / size))
    return Factor(value, exact) if exact or elements >= ALONE else None


def _exact(value: float, within: float) -> str:
    """Return an integer, a root of one or one over either that a number is, if that is no chance; else nothing."""
    size, sign = abs(value), "-" if value < 0 else ""
    inverse = size < 1
    large = 1 / size if inverse else size
    for number, what, gap in ((round(large), "{}", 1.0), (round(large * large), "sqrt({})", 0.5)):
        target = float(number) if gap == 1.0 else math.sqrt(number)
        near = abs(large - target) <= within * large
        if 1 <= number <= LARGEST and near and within * number / gap <= CHANCE:
            found = what.format(number)
            return sign + (f"1/{found}" if inverse else found)
    simple = Fraction(size).limit_denominator(8)
    if abs(size - simple) <= within * size and 64 * within <= CHANCE and simple.numerator <= 8:
        return f"{sign}{simple}"
    return ""
