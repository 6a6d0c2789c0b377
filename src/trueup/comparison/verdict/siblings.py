"""One call of several that does otherwise. **One layer computes otherwise**: it differs of equal inputs, and another that does the
same does not.

    blocks.0.attn   inputs bitwise equal   output bitwise equal
    blocks.1.attn   inputs bitwise equal   output differs by 2 units of roundoff

Two runs of one kernel round alike wherever it runs, so it is no rounding that one of two such calls differs in many elements.
Nor is it where a step before was bitwise equal throughout: a weight that autocast cast in that step, and casts no more.
Nothing is said of calls inside which other operators ran, nor of ``ln1`` beside ``ln2``, of which one may be written by hand.

**One call rounds otherwise**: it makes a coarser dtype in the candidate alone, though nothing that enters the run is coarser there.

    baseline    (x.float() * r) * (1 + weight.float())      aten::add makes float32
    candidate   (x.float() * r).bfloat16() * (1 + weight)   aten::add makes bfloat16

Rounding once more is too little to show in a norm. A policy (autocast, of another device or version) casts for all calls of an
operator, inside of functions. So one that rounds in some calls and in others does not, as the baseline does in all, was written
otherwise there, and one that reads what a function without counterpart casts.
"""

from __future__ import annotations

import re
import zlib

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers
from trueup.comparison.measures.measure import DIGEST, TENSOR
from trueup.comparison.measures.thresholds import CHANCE, ENOUGH
from trueup.comparison.verdict.judged import Tree
from trueup.foundation.facts.slots import SINGLE, is_input, roundoff
from trueup.foundation.facts.why import INCOMPARABLE
from trueup.foundation.kernels.sketch import splitmix64

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
PHASES = ("forward", "backward", "recompute")  # where a call reads only what its slots show, and does the same everywhere


def unlike(tree: Tree, *, exact: bool) -> dict[int, int]:
    """Return the matched calls that differ of equal inputs, each with one that does the same and is bitwise equal; `NONE` where
    all calls of an earlier step were (``exact``): a function or an operator is the same kernel then."""
    verdicts, errors = tree.verdicts, tree.verdicts.errors
    if verdicts.criterion.limits or tree.is_foreign:
        return {}
    same = (errors.absolute == 0) & np.isin(errors.method, (DIGEST, TENSOR))
    count = len(verdicts)
    given = np.bincount(errors.pair[errors.inputs], minlength=count) > 0
    clean = given & (verdicts.error_in == 0) & (np.bincount(errors.pair[errors.inputs & ~same], minlength=count) == 0)
    clean &= tree.streams[0].during(*PHASES)[errors.calls[0]] & (verdicts.role != INCOMPARABLE)
    at = np.flatnonzero(errors.outputs & clean[errors.pair])
    kernels = tree.streams[0].of_level("api", "aten") & tree.streams[0].during("forward")
    same_kernel = exact & kernels[errors.calls[0][errors.pair]]
    differ = at[_differs(tree, at, np.where(same_kernel[at], CHANCE, ENOUGH))]
    if not len(differ):
        return {}
    kinds = dict(zip(at.tolist(), _kinds(tree, at).tolist(), strict=True))
    siblings = {kinds[n]: int(errors.pair[n]) for n in at[same[at]][::-1].tolist()}
    known = (n for n in differ.tolist() if kinds[n] in siblings or same_kernel[n])
    found = {int(errors.pair[n]): siblings.get(kinds[n], NONE) for n in known}
    return {pair: sibling for pair, sibling in found.items() if _is_closed(tree, pair)}


def _differs(tree: Tree, at: Numbers, least: Array) -> Array:
    """Tell which entries differ in many elements, as far as their norms tell: in ``least`` by a rounding."""
    errors = tree.verdicts.errors
    unit, numel, relative = errors.unit[at], tree.streams[0].numel[errors.slots[0][at]], errors.relative[at]
    with np.errstate(all="ignore"):
        many = numel * (relative / (2 * unit)) ** 2 >= least
    told = ~errors.unsized[at] & np.isfinite(relative) & (relative > tree.verdicts.tolerated[at])
    return np.asarray(told & many & (unit > 0) & (numel >= ENOUGH))


def _kinds(tree: Tree, at: Numbers) -> Numbers:
    """Return numbers that are the same for outputs of calls that do the same."""
    errors, stream = tree.verdicts.errors, tree.streams[0]
    k = errors.slots[0][at]
    call = stream.call[k]
    # Where one is given zeros, as layers that begin at zero are, and the other is not, it has nothing to round.
    zeros = (stream.l2 == 0).astype(np.int64)
    slots = np.asarray(stream.shapes.exact, np.uint64)
    for column in (stream.slot, stream.dtype, zeros):
        slots = splitmix64(slots ^ column.view(np.uint64))
    given = np.add.reduceat(slots, stream.starts[:-1]).view(np.int64)
    columns = stream.op, stream.phase, stream.level, stream.arguments, given, stream.names.table(_layer)[stream.scope]
    keys = np.stack([*(column[call] for column in columns), stream.slot[k]])
    return np.asarray(np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1))


def _layer(scope: str) -> int:
    """Return a number of a scope that is the same for the layers of one name in repeated blocks. A number at the end is a name
    where another one before it counts the blocks."""
    blocks, _, name = scope.rpartition(".")
    counted, blocks_before = _NUMBER.subn("0", blocks)
    name = name if blocks_before else _NUMBER.sub("0", name)
    return zlib.crc32(f"{counted}.{name}".encode("utf-8", "surrogatepass"))


def _is_closed(tree: Tree, pair: int) -> bool:
    """Tell whether nothing inside a call shows why it differs: neither an operator of one run alone, nor a call that differs."""
    errors = tree.verdicts.errors
    random = tree.verdicts.criterion.rows[int(tree.verdicts.rows[pair])].random
    inside = [list(tree.inside(int(errors.calls[side][pair]), side)) for side in (0, 1)]
    alone = any((tree.pairs[side][inside[side]] < 0).any() for side in (0, 1))
    return not random and pair not in errors.arguments and not alone and not tree.resolved(pair)


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
    unmade = [stream.producer[slots] == NONE for stream, slots in zip(streams, errors.slots, strict=True)]
    enters = errors.inputs & coarse & unmade[0] & unmade[1]  # weights or data: then all of it is in another precision
    if not (made & coarse).any() or enters.any():
        return None
    stream, calls, size = streams[1], errors.calls[1][errors.pair], len(streams[1].names.names)  # which another thread adds to
    kind = (stream.op[calls] * size + stream.level[calls]) * size + stream.phase[calls]
    some = np.isin(kind, kind[made & fine & ~coarse]) | _reads_cast(tree, coarse)[errors.pair]
    found = np.flatnonzero(made & coarse & some & ~_hands_on(tree, coarse)[errors.pair])
    return int(found[0]) if len(found) else None


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
