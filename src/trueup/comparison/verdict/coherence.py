"""Rounding has no direction: the part of a difference by which all elements are off alike.

For n elements, a baseline y and a difference d::

    along y:  |<d, y>| / |y|^2              a factor: another scale, epsilon or variance
    along 1:  |sum(d)| / (sqrt(n) |y|)      a term: another bias, mean or constant

Errors that are independent have about ``|d| / (sqrt(n) |y|)`` of either; a formula that is wrong has up to all of ``|d| / |y|``.
No elements are needed: ``<d, y> = (|candidate|^2 - |y|^2 - |d|^2) / 2`` follows from both norms, ``sum(d)`` from both means.

What is coherent is no proof of itself, for a library function may be a unit or two too large everywhere, and the errors of the
inputs may be coherent: `explain.Budget.coherent` says how much of it is explained.
"""

from __future__ import annotations

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers
from trueup.comparison.measures.measure import SKETCH, TENSOR, Errors

CHANCE = 8.0
"""Times the expectation that independent errors reach by chance. [measured] 5 at most over the products and sums of GPT-2 and
ViT with operands rounded to HF32 and with other orders of sums; normally distributed sums reach 8 in 1e-15 of all cases."""


def coherent(errors: Errors, at: Numbers) -> Array:
    """Return float64 ``(n,)``: the part of the relative L2 error of some entries that all elements share, beyond chance.

    0 where nothing is known of it: without norms or means, where elements are not finite on one side only, and where the
    difference is larger than the baseline, of which nothing but rounding may be left.
    """
    (baseline, candidate), (k, j) = errors.streams, (side[at] for side in errors.slots)
    known = np.isin(errors.method[at], (SKETCH, TENSOR)) & np.isfinite(errors.absolute[at]) & (errors.absolute[at] > 0)
    with np.errstate(all="ignore"):
        apart, numel, norm = errors.absolute[at], baseline.numel[k], baseline.l2[k]
        along_itself = np.abs(candidate.l2[j] ** 2 - norm**2 - apart**2) / 2 / norm**2
        along_one = np.abs(candidate.mean[j] - baseline.mean[k]) * np.sqrt(numel) / norm
        found = np.fmax(along_itself, along_one) - CHANCE * apart / norm / np.sqrt(numel)
    return np.where(known & (apart < norm) & np.isfinite(found), np.maximum(found, 0.0), 0.0)
