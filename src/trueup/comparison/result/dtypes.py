"""Dtypes in which two runs compute and that differ: said of every comparison, whatever its verdict.

    212 of 388 results are bfloat16 in the candidate and float32 in the baseline, first in torch.nn.functional.linear (...)
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trueup.comparison.graph.streams import NONE, Numbers
from trueup.comparison.measures.measure import Errors

PAIRS = 3
"""Pairs of dtypes that are said; a run has few."""


class Dtypes:
    """Counts results, and else what is read, of which the two runs have another dtype."""

    def __init__(self) -> None:
        self._results: Counter[tuple[str, str]] = Counter()
        self._inputs: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}
        self._total = [0, 0]
        """Results and inputs whose dtype both runs recorded."""

    def add(self, errors: Errors) -> None:
        """Count in the matched calls of some steps."""
        (baseline, candidate), (k, j) = errors.streams, errors.slots
        first, second = baseline.dtype[k], candidate.dtype[j]
        known = (first != NONE) & (second != NONE)
        for n, (kind, counted) in enumerate(((errors.outputs, self._results), (~errors.outputs, self._inputs))):
            self._total[n] += int(np.count_nonzero(known & kind))
            if not (k is j and baseline.dtype is candidate.dtype):
                self._count(errors, np.flatnonzero(known & kind & (first != second)), counted)

    def _count(self, errors: Errors, at: Numbers, counted: Counter[tuple[str, str]]) -> None:
        (baseline, candidate), (k, j) = errors.streams, errors.slots
        at = at[np.argsort(candidate.has_children[candidate.call[j[at]]], kind="stable")]  # what computes, before what is around it
        pairs, firsts, sizes = np.unique(
            np.stack([baseline.dtype[k[at]], candidate.dtype[j[at]]]), axis=1, return_index=True, return_counts=True
        )
        for (b, c), place, size in zip(pairs.T.tolist(), firsts.tolist(), sizes.tolist(), strict=True):
            pair = baseline.names.names[b], candidate.names.names[c]
            counted[pair] += size
            row = candidate.row(int(errors.calls[1][errors.pair[at[place]]]))
            self._first.setdefault(pair, f"{row.op} ({row.key})")

    def notes(self) -> list[str]:
        """Say how many results differ in dtype, from which to which and where first; of inputs where no result does."""
        what, counted, total = ("results", self._results, self._total[0])
        if not counted:
            what, counted, total = ("inputs", self._inputs, self._total[1])
        found = []
        for (before, after), count in counted.most_common(PAIRS):
            those = f"{count:,} of {total:,} {what} {'is' if count == 1 else 'are'} {after} in the candidate"
            found.append(f"{those} and {before} in the baseline, first in {self._first[before, after]}")
        more = sum(counted.values()) - sum(count for _, count in counted.most_common(PAIRS))
        return found + ([f"{more:,} more {what} have other dtypes"] if more else [])
