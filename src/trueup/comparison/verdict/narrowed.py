"""Calls that round to a coarser dtype in the candidate alone, though nothing that enters the run is coarser there.

    baseline    (x.float() * r) * (1 + weight.float())      aten::add makes float32
    candidate   (x.float() * r).bfloat16() * (1 + weight)   aten::add makes bfloat16

Rounding once more is too little to show in a norm. Where a run casts by a policy (autocast, of another device or version), it does
so for all calls of an operator; what a narrower input makes coarser is no decision of the call that reads it. So an operator that
rounds in some calls and in others does not, as the baseline does in all, was written otherwise there. So was one that reads what a
function without counterpart casts: a policy casts inside of functions.
"""

from __future__ import annotations

import numpy as np

from trueup.comparison.graph.streams import NONE, Array
from trueup.comparison.verdict.judged import Tree
from trueup.foundation.facts.roundoff import SINGLE, roundoff
from trueup.foundation.facts.slots import is_input


def narrowed(tree: Tree) -> int | None:
    """Return the entry of the first result that is of a 16-bit or 8-bit dtype in the candidate alone by what its call does."""
    errors, streams = tree.verdicts.errors, tree.streams
    if streams[0].dtype is streams[1].dtype or tree.is_foreign:
        return None
    first, second = errors.roundoffs
    fine = (first > 0) & (first <= SINGLE)
    coarse = fine & (second > SINGLE)
    # What rounds in a forward, and not by calls inside it; a backward has the dtypes of its forward.
    rounds = ~tree.verdicts.criterion.exact[tree.verdicts.rows] & tree.leaves
    made = errors.outputs & (rounds & streams[1].during("forward", "recompute")[errors.calls[1]])[errors.pair]
    if not (made & coarse).any() or _enters(tree, coarse):
        return None
    stream, calls = streams[1], errors.calls[1][errors.pair]
    kind = (stream.op[calls] * len(stream.names.names) + stream.level[calls]) * len(stream.names.names) + stream.phase[calls]
    some = np.isin(kind, kind[made & fine & ~coarse]) | _reads_cast(tree, coarse)[errors.pair]
    found = np.flatnonzero(made & coarse & some & ~_hands_on(tree, coarse)[errors.pair])
    return int(found[0]) if len(found) else None


def _enters(tree: Tree, coarse: Array) -> bool:
    """Tell whether weights or data are of a coarser dtype in the candidate: then all of it is in another precision."""
    errors = tree.verdicts.errors
    first, second = (stream.producer[slots] == NONE for stream, slots in zip(tree.streams, errors.slots, strict=True))
    return bool((errors.inputs & coarse & first & second).any())


def _reads_cast(tree: Tree, coarse: Array) -> Array:
    """Tell which matched calls read a tensor that a function of the candidate alone cast, of which there is no other result."""
    errors, stream = tree.verdicts.errors, tree.streams[1]
    reads = np.flatnonzero(errors.inputs & coarse)
    made = stream.producers[errors.slots[1][reads]]
    aten = stream.level[made] == stream.names.number("aten")
    function = np.where(aten, stream.parents[made], made)
    cast = (made != NONE) & (function != NONE) & (tree.pairs[1][function] == NONE)
    cast &= stream.level[function] == stream.names.number("api")
    found = np.zeros(len(tree.verdicts), bool)
    for n, call in zip(reads[cast].tolist(), made[cast].tolist(), strict=True):
        row = stream.row(call)
        exact = tree.verdicts.criterion.row(row.op, row.level, row.phase).own == "exact"
        given = [k for name, k in stream.slots(call).items() if is_input(stream.names.names[name])]
        alike = [k for k in given if stream.numel[k] == stream.numel[errors.slots[1][n]]]
        found[errors.pair[n]] |= exact and any(0 < roundoff(stream.dtype_of(k)) <= SINGLE for k in alike)
    return found


def _hands_on(tree: Tree, coarse: Array) -> Array:
    """Tell which matched calls read what another matched call made coarser."""
    errors, found = tree.verdicts.errors, np.zeros(len(tree.verdicts), bool)
    sides = zip(tree.pairs, tree.streams, errors.slots, strict=True)
    first, second = (pairs[stream.producers[slots]] for pairs, stream, slots in sides)
    found[errors.pair[errors.inputs & coarse & (first != NONE) & (first == second)]] = True
    return found
