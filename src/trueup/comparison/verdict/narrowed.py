"""Calls that round to a coarser dtype in the candidate alone, though nothing that enters the run is coarser there.

    baseline    (x.float() * r) * (1 + weight.float())      aten::add makes float32
    candidate   (x.float() * r).bfloat16() * (1 + weight)   aten::add makes bfloat16

Rounding once more is too little to show in a norm. Where a run casts by a policy (autocast, of another device or version), it does
so for all calls of an operator; what a narrower input makes coarser is no decision of the call that reads it. So an operator that
rounds in some calls and in others does not, as the baseline does in all, was written otherwise there.
"""

from __future__ import annotations

import numpy as np

from trueup.comparison.graph.streams import NONE, Array
from trueup.comparison.measures.roundoff import SINGLE, roundoff
from trueup.comparison.verdict.judged import Tree


def narrowed(tree: Tree) -> int | None:
    """Return the entry of the first result that is of a 16-bit or 8-bit dtype in the candidate alone by what its call does."""
    errors, streams = tree.verdicts.errors, tree.streams
    if streams[0].dtype is streams[1].dtype or tree.is_foreign:
        return None
    table = streams[0].names.table(roundoff)
    first, second = (table[stream.dtype[slots]] for stream, slots in zip(streams, errors.slots, strict=True))
    fine = (first > 0) & (first <= SINGLE)
    coarse = fine & (second > SINGLE)
    made = errors.outputs & _computes(tree)[errors.pair]
    if not (made & coarse).any() or _enters(tree, coarse):
        return None
    stream, calls = streams[1], errors.calls[1][errors.pair]
    kind = (stream.op[calls] * len(stream.names.names) + stream.level[calls]) * len(stream.names.names) + stream.phase[calls]
    some = np.isin(kind, kind[made & fine & ~coarse])
    found = np.flatnonzero(made & coarse & some & ~_hands_on(tree, coarse)[errors.pair])
    return int(found[0]) if len(found) else None


def _computes(tree: Tree) -> Array:
    """Tell which matched calls round in a forward, and not by calls inside them; a backward has the dtypes of its forward."""
    stream, verdicts = tree.streams[1], tree.verdicts
    rounds = ~verdicts.criterion.exact[verdicts.rows]
    return np.asarray(rounds & tree.leaves() & stream.during("forward", "recompute")[verdicts.errors.calls[1]])


def _enters(tree: Tree, coarse: Array) -> bool:
    """Tell whether weights or data are of a coarser dtype in the candidate: then all of it is in another precision."""
    errors = tree.verdicts.errors
    first, second = (stream.producer[slots] == NONE for stream, slots in zip(tree.streams, errors.slots, strict=True))
    return bool((errors.inputs & coarse & first & second).any())


def _hands_on(tree: Tree, coarse: Array) -> Array:
    """Tell which matched calls read what another matched call made coarser."""
    errors, found = tree.verdicts.errors, np.zeros(len(tree.verdicts), bool)
    sides = zip(tree.pairs, tree.streams, errors.slots, strict=True)
    first, second = (pairs[stream.producers[slots]] for pairs, stream, slots in sides)
    found[errors.pair[errors.inputs & coarse & (first != NONE) & (first == second)]] = True
    return found
