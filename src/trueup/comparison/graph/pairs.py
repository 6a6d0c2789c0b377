"""Which calls and slots of two runs are one another's counterparts, as data: what `align` finds and `measure` reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers, Stream, spans

WAYS = ("exact", "sequence", "renamed", "map", "data")
"""How a pair was made: by its key, by aligning sequences, in a scope that was found or told to be another, by equal data."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Matched calls, in the candidate's execution order, and what has no partner: indices into the streams."""

    baseline: Numbers
    candidate: Numbers
    only_baseline: Numbers
    only_candidate: Numbers
    paired: Array
    """Of each pair, how it was made: index into `WAYS`."""
    scopes: dict[str, str]
    """Scopes of the candidate that have another name in the baseline, as far as that was found and not told."""
    ignored: int = 0
    """Calls of both sides that are not to be compared."""


def same_slots(b: Numbers, c: Numbers, baseline: Stream, candidate: Stream) -> tuple[Numbers, Numbers, Numbers, list[int]]:
    """Pair the slots of pairs of calls whose slots have the same names in the same order.

    Returns:
        baseline's and candidate's slots, the number of the pair that each belongs to, and the pairs of other names or order.
    """
    if b is c and baseline.is_like(candidate) and len(b) == len(baseline):  # `_one_to_one`
        slots = np.arange(len(baseline.slot))
        return slots, slots, baseline.call, []
    counts = baseline.starts[b + 1] - baseline.starts[b]
    even = counts == candidate.starts[c + 1] - candidate.starts[c]
    k, j = spans(baseline.starts[b[even]], counts[even]), spans(candidate.starts[c[even]], counts[even])
    owner = np.repeat(np.flatnonzero(even), counts[even])
    differ = np.unique(owner[baseline.slot[k] != candidate.slot[j]])
    odd = ~even
    odd[differ] = True
    kept = ~odd[owner]
    return k[kept], j[kept], owner[kept], np.flatnonzero(odd).tolist()
