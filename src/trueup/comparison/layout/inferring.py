"""How a slot lies along each axis of the mesh: as recorded, as declared, else as the numbers and the other run show.

    recorded    the placements of a DTensor, or of one that holds the same bytes on each rank
    declared    a line of `shards.toml` (`declaring`)
    equal       the same bytes on all ranks: replicated
    a gradient  of what is replicated: a partial sum; of what is cut: cut alike; of a sum: replicated
    a call      that is given a tensor of the shape of its result: it is cut alike; that is given what its pieces make together
    the same    bytes on all ranks that another slot has, of which it is known
    the data    along an axis that cuts the data, the first dimension of an activation; a single number is a mean
    the other   run, which has the whole: the dimension that is longer there; or as long, and the sum of the ranks

Weights, states and the gradients that an optimizer reads must be replicated where nothing else is recorded. Where they are not, and
where no rule fits, that is said (`Apart`), and the slot is never taken for replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from trueup.comparison.layout.calls import Key
from trueup.comparison.layout.losses import How
from trueup.comparison.layout.padding import unpadded
from trueup.comparison.layout.pieces import AVERAGE, REPLICATED, Piece, Way, put_together
from trueup.comparison.layout.samples import Batch, Samples, repeated, samples_in
from trueup.comparison.layout.stated import stated_of, weight_of
from trueup.foundation.facts.slots import is_weight
from trueup.foundation.frameworks.trees import path

Ways = dict[str, Way]

CLOSE, NEAR = 1e-2, 0.2
"""Relative distance up to which ranks hold the same number, differently rounded or drifted; and up to which a sum of the ranks
is the other run's whole: sketches estimate distances to 18 %."""


AT_A_TIME = 1 << 20
"""Elements of two tensors that are held against each other at a time: 8 MB of float64 each."""

PACKS = (*((1,) * n for n in (2, 3, 4)), *((n, 1, 1) for n in (2, 3, 4, 5, 6, 7, 8, 12, 16)))
"""How large the weights are that one may pack, in proportion: gate and up; queries, keys and values, of which several queries
share one."""


@dataclass(frozen=True)
class Apart:
    """Ranks that do not hold what they should. ``kind``: ``replicas`` (they must be equal), ``unreduced`` (a partial sum is read as
    if it were the whole), ``places`` (each counts from 0 on in a sequence that is cut), ``samples`` (they have some of
    the batch again and again, and others not at all), ``unknown`` (nothing says how the ranks belong together)."""

    kind: str
    key: Key
    slot: str
    step: int
    seq: int
    axis: str
    ranks: tuple[int, ...]  # those that are odd, where a majority tells; else all
    apart: float = math.nan  # relative distance of the ranks that differ most
    given: str = ""  # of ``unreduced``: the slot that is a partial sum; of ``samples``: how many they have
    made: tuple[Key, str] | None = None  # call and slot that made it, of what an optimizer reads


Guessed = dict[tuple[Key, str], tuple[float, ...]]
"""Slots that were put together in one of several ways; of a number what each way leads to."""


@dataclass
class Told:
    """What is known when a slot is looked at."""

    step: int
    sizes: Mapping[str, int]  # ranks along each axis
    data: frozenset[str]  # axes that cut the data
    other: Mapping[tuple[Key, str], Piece]  # slots of the other run, whole
    declared: Callable[[Key, str, str], Way | None]
    ways: dict[tuple[Key, str], Ways] = field(default_factory=dict)
    placed: dict[tuple[str | None, ...], Ways] = field(default_factory=dict)  # of digests on all ranks: how a DTensor of these lies
    shapes: dict[tuple[Key, str], tuple[int, ...]] = field(default_factory=dict)  # of one rank's
    apart: list[Apart] = field(default_factory=list)
    flat: frozenset[str] = frozenset()  # slots of optimizers that are flat pieces of weights
    stated: dict[str, Way] = field(default_factory=dict)  # by weight: how it says itself that it lies, along ``model``
    model: str = ""  # the axis that alone cuts the model
    said: dict[str, Ways] = field(default_factory=dict)  # by weight: how it was declared to lie
    updated: Mapping[Key, str] = field(default_factory=dict)  # by call of an optimizer: the weight that it updates
    sequence: Mapping[str, tuple[int, int, Way]] = field(default_factory=dict)
    """By axis that cuts sequences: length of the first piece, of all of it, its way."""
    lies: dict[tuple[str | None, ...], Ways] = field(default_factory=dict)  # of digests on all ranks: how that was found to lie
    joined: dict[tuple[Key, str], Piece] = field(default_factory=dict)  # slots of the step put together, in the ranks' order
    samples: Samples | None = None  # in which order the ranks' samples are the other run's, once that is known
    batch: dict[tuple[Key, str], Batch] = field(default_factory=dict)  # along what slots are cut by samples
    cut: dict[str, Ways] = field(default_factory=dict)  # by weight: how it was found to lie
    looked_up: set[tuple[Key, str]] = field(default_factory=set)  # rows of a weight, of which each rank has some
    padded: dict[int, int] = field(default_factory=dict)  # lengths of padded weights, each with that of the other run's
    batched: Mapping[tuple[Key, str], Batch] = field(default_factory=dict)  # likewise, of the other run
    loss: Mapping[str, str] = field(default_factory=dict)  # by axis, whether the loss is the mean or the sum of the ranks'
    guessed: Guessed = field(default_factory=dict)
    otherwise: Mapping[tuple[Key, str], tuple[float, ...]] = field(default_factory=dict)  # what the other run guessed
    numbers: dict[tuple[Key, str], How] = field(default_factory=dict)  # by axis, the same of single numbers of each rank


@dataclass(frozen=True)
class Slot:
    """A slot of one call as all ranks have it."""

    key: Key
    name: str
    seq: int
    passes: int
    pieces: Mapping[int, Piece]  # by worker: a rank in one of the passes
    forward: tuple[Key, str] | None  # of a gradient: the slot that it is the gradient of
    inputs: tuple[str, ...]  # slots that the call is given
    made: tuple[Key, str] | None = None  # call and slot of the first rank that made it
    placed: bool = False  # whether it says by itself along which axes it is cut, so that along others it is not

    def ranks(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of workers."""
        return tuple(dict.fromkeys(worker // self.passes for worker in workers))

    @property
    def backward(self) -> bool:
        """Whether it is a gradient in the backward pass."""
        return self.key[0] == "backward"

    @property
    def fixed(self) -> bool:
        """Whether ranks must agree on it that hold all of it: weights, and all that an optimizer reads and writes."""
        return self.key[0] == "optimizer" or is_weight(self.name) or self.name.startswith("buffer.")


def way_along(axis: str, groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], told: Told) -> Way | None:
    """Return how a slot lies along one axis; ``groups`` are ranks that differ along it alone, ``held`` what each of them, or the
    first of those already put together, holds. None: it is not known, and ``told.apart`` says so."""
    varies = any(not held[rank].same(held[group[0]]) for group in groups for rank in group[1:])
    declared = told.declared(slot.key, slot.name, axis)
    if declared is None and axis in told.sequence:
        return _of_sequence(axis, groups, slot, held, told, varies=varies)
    weight, placed = weight_of(slot.key, slot.name, told.updated), tuple(one.digest for one in slot.pieces.values())
    if (declared := _declared(declared, axis, slot, len(held[groups[0][0]].shape), told)) is not None:
        return declared
    whole = told.other.get((slot.key, slot.name))
    stated = stated_of(weight, told.stated, len(held[groups[0][0]].shape)) if axis == told.model and slot.fixed else None
    if stated is not None:
        if stated.kind == "replicated":
            return _odd(axis, groups, slot, held, told) if varies else REPLICATED
        if len(held[groups[0][0]].shape) > stated.dim:
            told.placed.setdefault(placed, {})[axis] = stated
            return stated
    piece, size = held[groups[0][0]], len(groups[0])
    if whole is not None and axis not in told.data and not slot.fixed:
        whole = _of_one_batch(whole, piece, told)
    if axis in told.data and not slot.fixed and not slot.backward and whole is not None and _adds_up(groups, held, whole):
        return _flattened(axis, Way("sharded", 0), slot, piece, told)
    before = told.ways.get(slot.forward, {}).get(axis) if slot.backward and slot.forward is not None else None
    if not varies and not (before is not None and before.kind == "partial" and axis in told.data and piece.numel == 1):
        return _of_equal(axis, groups[0], slot, held, whole, told)
    if (known := told.placed.get(placed)) is not None and axis in known:
        way = known[axis]
        return way if way.kind != "replicated" else _odd(axis, groups, slot, held, told)
    if slot.fixed and whole is not None and (longer := _longer(piece, whole, size, told)) is not None:
        way = _packed([held[rank] for rank in groups[0]], Way("sharded", longer), whole)
        told.placed.setdefault(placed, {})[axis] = way
        if is_weight(slot.name):
            told.cut.setdefault(weight, {})[axis] = way
        return way
    if slot.key[0] == "optimizer" and slot.name in told.flat:
        return Way("sharded", 0)
    if slot.name.endswith(".grad") and axis in told.cut.get(weight, {}):
        return told.cut[weight][axis]
    if slot.fixed:
        return _of_fixed(axis, groups, slot, held, whole, told)
    if before is not None:
        return _of_gradient(axis, before, told, slot, piece)
    if not slot.backward and axis in told.data and piece.numel == 1 and (whole is None or whole.numel == 1):
        return _of_number(axis, slot, told)
    if whole is not None and (longer := _longer(piece, whole, size, told, data=axis in told.data)) is not None:
        return _as_weight(axis, _flattened(axis, Way("sharded", longer), slot, piece, told), slot, piece, told)
    unmeasured = whole is None or not whole.measured
    if unmeasured and (made := _of_product(axis, slot, piece, told) or _through_views(axis, slot, piece, told)) is not None:
        return made
    if whole is None and (alike := _alike(axis, slot, piece, told)) is not None:
        return alike
    if axis in told.data and piece.shape and (whole is None or whole.shape != piece.shape):
        return Way("sharded", 0)
    if whole is not None and whole.shape == piece.shape and len(groups) == 1:
        return _by_numbers(axis, groups, slot, held, whole, told)
    if (found := told.lies.get(placed, {}).get(axis) or _of_pieces(groups, slot, held, told)) is not None:
        return found
    return _unknown(axis, groups, slot, held, told)


def _declared(way: Way | None, axis: str, slot: Slot, dims: int, told: Told) -> Way | None:
    """Return how a slot of so many ``dims`` was declared to lie: by itself (``way``), or of what an optimizer reads and updates by
    its weight. What reads and updates a weight, and holds its bytes, finds it so."""
    weight = weight_of(slot.key, slot.name, told.updated)
    if way is None and slot.key[0] == "optimizer":
        way = told.said.get(weight, {}).get(axis)
        way = way if way is not None and dims > way.dim else None
    if way is not None and slot.name.startswith("param."):
        told.said.setdefault(weight, {})[axis] = way
        told.placed.setdefault(tuple(one.digest for one in slot.pieces.values()), {})[axis] = way
    return way


def _of_sequence(
    axis: str, groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], told: Told, *, varies: bool
) -> Way | None:
    """Return how a slot lies along an axis that cuts sequences: pieces lie as places do; attention has whole keys and values."""
    length, total, order = told.sequence[axis]
    piece, whole = held[groups[0][0]], told.other.get((slot.key, slot.name))
    if slot.fixed:
        return _odd(axis, groups, slot, held, told) if varies else REPLICATED
    if not slot.backward and piece.numel == 1 and (whole is None or whole.numel == 1):
        return _of_number(axis, slot, told) if varies else REPLICATED
    before = told.ways.get(slot.forward, {}).get(axis) if slot.backward and slot.forward is not None else None
    if before is not None:
        return _of_gradient(axis, before, told, slot, piece)
    at = sorted(range(len(piece.shape)), key=lambda n: n == 0)  # the first is the batch, where another fits
    shapes = list(zip(piece.shape, whole.shape, strict=True)) if whole is not None and len(whole.shape) == len(piece.shape) else []
    fits = [n for n, (mine, its) in enumerate(shapes) if mine != its and mine * total == its * length]
    dim = next((n for n in at if n in fits and piece.shape[n] == length), fits[0] if fits else None)
    if dim is None and not varies and piece.shape == (length,) != (total,) and whole is None and _counts(piece):
        told.guessed[slot.key, slot.name] = ()  # places of each piece, before anybody adds where it begins
        dim = 0
    if dim is None and (whole is None or whole.shape != piece.shape) and varies:
        if (found := _exchanged(axis, groups, slot, held, told)) is not None:
            return found
        some = [n for n in at if piece.shape[n] == length]
        if len(some) > 1:  # as many heads as places
            told.guessed[slot.key, slot.name] = ()
        dim = some[0] if some else None
        dim = next((n for n, size in enumerate(piece.shape) if size and not size % length), None) if dim is None else dim
    if dim is None:
        return _unknown(axis, groups, slot, held, told) if varies else REPLICATED
    return replace(order, dim=dim, outer=max(1, piece.shape[dim] // length))


def _exchanged(axis: str, groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], told: Told) -> Way | None:
    """Return how a tensor lies where heads are exchanged for places: what a function makes whole in the dimension in which what it
    is given is cut, is cut in another, as its bytes show; and what holds these bytes, or is made element by element of them."""
    piece = held[groups[0][0]]
    for name in slot.inputs:
        given, way = told.joined.get((slot.key, name)), told.ways.get((slot.key, name), {}).get(axis)
        if given is None or way is None or way.kind != "sharded" or len(given.shape) != len(piece.shape):
            continue
        if piece.shape[way.dim] == given.shape[way.dim] and (found := _of_pieces(groups, slot, held, told)) is not None:
            return found
    same = told.lies.get((*(one.digest for one in slot.pieces.values()), str(piece.shape)), {}).get(axis)
    return same or _alike(axis, slot, piece, told)


def _counts(piece: Piece) -> bool:
    """Tell whether a tensor counts from 0 on, as places in a sequence."""
    if not piece.dtype.startswith("int") or len(piece.shape) != 1 or piece.numel < 2 or piece.load is None:
        return False
    return bool(np.array_equal(piece.load(), np.arange(piece.numel)))


def _adds_up(groups: Sequence[Sequence[int]], held: Mapping[int, Piece], whole: Piece) -> bool:
    """Tell whether ranks hold different numbers of rows that are those of the whole together: tokens of an expert."""
    shapes = [[held[rank].shape for rank in group] for group in groups]
    return all(
        len(set(some)) > 1
        and all(shape[1:] == whole.shape[1:] and len(shape) == len(whole.shape) > 0 for shape in some)
        and sum(shape[0] for shape in some) == whole.shape[0]
        for some in shapes
    )


def _of_one_batch(whole: Piece, piece: Piece, told: Told) -> Piece:
    """Return the whole as long as the part of the batch that ranks have which differ along an axis of the model."""
    batches = math.prod(told.sizes[axis] for axis in told.data)
    if batches == 1 or len(whole.shape) != len(piece.shape) or not piece.shape or piece.shape[0] * batches != whole.shape[0]:
        return whole
    return Piece(whole.dtype, (piece.shape[0], *whole.shape[1:]))


def _of_equal(
    axis: str, group: Sequence[int], slot: Slot, held: Mapping[int, Piece], whole: Piece | None, told: Told
) -> Way:  # fmt: skip
    """Return how a slot lies of which all ranks hold the same. Say where each should have its own: places, or samples."""
    piece = held[group[0]]
    if whole is None or slot.placed or (dim := _longer(piece, whole, len(group), told, data=axis in told.data)) is None:
        return REPLICATED
    way = Way("sharded", dim)
    if _counts(piece) and _counts(whole):
        told.apart.append(Apart("places", slot.key, slot.name, told.step, slot.seq, axis, slot.ranks(group), 0.0))
    elif slot.key[:2] == ("forward", "module") and slot.name.startswith("input."):
        made = put_together([held[rank] for rank in group], way)
        if made is not None and (both := samples_in(made, whole, Batch(dim))) is not None:
            say_repeated(both, axis, slot, told)
    return way


def say_repeated(both: tuple[Sequence[int], Sequence[int]], axis: str, slot: Slot, told: Told) -> None:
    """Say where ranks are given some of the other run's samples again and again, and others not at all; ``both``: what tells the
    samples of this run and of that."""
    if some := repeated(*both):
        odd = slot.ranks(slot.pieces)
        told.apart.append(Apart("samples", slot.key, slot.name, told.step, slot.seq, axis, odd, 0.0, some))


def _longer(piece: Piece, whole: Piece, size: int, told: Told, *, data: bool = False) -> int | None:
    """Return the one dimension that is longer in the whole by the number of ranks; of several the first, along an axis
    of the data."""
    found = _all_longer(piece, whole, size, told.padded)
    if len(found) > 1:
        found = found[:1] if data else found[-1:]
    return found[0] if found else None


def _all_longer(piece: Piece, whole: Piece, size: int, padded: Mapping[int, int]) -> list[int]:
    if len(piece.shape) != len(whole.shape):
        return []
    both = enumerate(zip(piece.shape, whole.shape, strict=True))
    wholes = ((n, mine * size, its) for n, (mine, its) in both if mine != its)
    return [n for n, made, its in wholes if made in (its, its + size - 1) or padded.get(made) == its]


def know_padding(pieces: Sequence[Piece], whole: Piece, told: Told) -> None:
    """Remember how long a weight is that is the other run's without its last rows, or columns."""
    for dim in range(len(whole.shape)):
        made = put_together(pieces, Way("sharded", dim))
        bare = None if made is None else unpadded(made, whole)
        if made is not None and bare is not None and distance(bare, whole) < NEAR:
            told.padded[made.shape[dim]] = whole.shape[dim]


def _packed(pieces: Sequence[Piece], way: Way, whole: Piece) -> Way:
    """Return the way in which pieces of a weight make the whole: one after the other, or, of a weight that packs several (gate and
    up; queries, keys and values), each a piece of all of them."""
    for one in (way, *(replace(way, order="interleaved", parts=parts) for parts in PACKS)):
        made = put_together(pieces, one)
        if made is not None and made.load is not None and whole.load is not None and distance(made, whole) < NEAR:
            return one
    return way


def _as_weight(axis: str, way: Way, slot: Slot, piece: Piece, told: Told) -> Way:
    """Return how the features lie that a packed weight makes: as its rows."""
    for name in slot.inputs:
        its = told.ways.get((slot.key, name), {}).get(axis)
        if its is not None and its.order == "interleaved" and its.dim == 0 and way.dim == len(piece.shape) - 1:
            return replace(way, order=its.order, parts=its.parts)
    return way


def _flattened(axis: str, way: Way, slot: Slot, piece: Piece, told: Told) -> Way:
    """Return how a tensor lies whose first dimension is several of another one's, of which the batch is not the first (places
    before samples), or which stands beside such a tensor in a call."""
    if way.dim or axis not in told.data:
        return way
    its, shape = (told.ways.get(slot.made, {}).get(axis), told.shapes.get(slot.made, ())) if slot.made is not None else (None, ())
    cut = (its is not None and its.kind == "sharded" and its.order == "natural" and its.dim) or len(shape)
    if any((math.prod(shape[:n]), *shape[n:]) == piece.shape for n in range(cut + 1, len(shape) + 1)):
        return replace(way, outer=math.prod(shape[:cut]))
    for name in slot.inputs:
        beside = told.ways.get((slot.key, name), {}).get(axis)
        if beside is not None and beside.outer > 1 and told.shapes[slot.key, name][:1] == piece.shape[:1]:
            return beside
    return way


def _of_product(axis: str, slot: Slot, piece: Piece, told: Told) -> Way | None:
    """Return how what goes into or comes out of a product with a weight lies that is cut: along its rows the result is cut as they
    are; along its columns so are the inputs, and the result is a term of a sum."""
    linear, name = slot.key[3].endswith(".linear"), path(slot.key[2], "weight")
    if not piece.shape or slot.backward or not (linear or "param.weight" in slot.inputs):
        return None
    way = told.said.get(name, {}).get(axis) or told.declared(slot.key, "param.weight", axis)
    way = way or (told.stated.get(name) if axis == told.model else None)
    if way is None or way.kind != "sharded" or (way.dim == 1 and slot.name == "output.0" and not linear):
        return None
    if way.dim == (0 if slot.name == "output.0" else 1 if slot.name == "input.0" else None):
        return replace(way, dim=len(piece.shape) - 1)
    return Way("partial") if way.dim == 1 and slot.name == "output.0" else None


def _through_views(axis: str, slot: Slot, piece: Piece, told: Told) -> Way | None:
    """Return how a tensor lies that views show of one whose features are cut: one of the weights packed in it, or its heads."""
    way, shape = (told.ways.get(slot.made, {}).get(axis), told.shapes.get(slot.made)) if slot.made is not None else (None, None)
    if way is None or not shape or way.kind != "sharded" or way.dim != len(shape) - 1 or way.order in ("zigzag", "strided"):
        return None
    parts = way.parts or (1,)
    sizes, mine, last = {shape[-1] * part // sum(parts) for part in parts}, piece.shape, len(piece.shape) - 1
    if mine[:-1] == shape[:-1] and mine[-1] in sizes:
        return Way("sharded", last)
    if len(mine) != len(shape) + 1:
        return None
    heads = [n for n in range(1, last) if mine[:n] + mine[n + 1 : last] == shape[:-1] and mine[n] * mine[last] in sizes]
    if len(heads) > 1 and "attention" in slot.key[3]:  # as many heads as places: attention has the heads before
        heads = heads[:1]
    return Way("sharded", heads[0]) if len(heads) == 1 else None


def _of_gradient(axis: str, before: Way, told: Told, slot: Slot, piece: Piece) -> Way:
    usual = Way("partial", reduce=told.loss.get(axis, AVERAGE)) if axis in told.data else Way("partial")
    if before.kind == "partial" and slot.forward in told.looked_up:
        return Way("partial")
    if before.kind == "partial":
        return usual if axis in told.data and piece.numel == 1 else REPLICATED
    return usual if before.kind == "replicated" else before


def _of_number(axis: str, slot: Slot, told: Told) -> Way:
    """Return that a single number of each rank is part of a mean, or of a sum."""
    return Way("partial", reduce=told.numbers.get((slot.key, slot.name), told.loss).get(axis, AVERAGE))


def _alike(axis: str, slot: Slot, piece: Piece, told: Told) -> Way | None:
    """Return how an input of the result's shape lies, if it is cut: what is computed element by element is cut alike."""
    if slot.name.startswith(("input.", "param.")):
        return None
    for name in slot.inputs:
        way = told.ways.get((slot.key, name), {}).get(axis)
        if way is not None and way.kind == "sharded" and told.shapes.get((slot.key, name)) == piece.shape:
            return way
    return None


def _of_pieces(groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], told: Told) -> Way | None:
    """Return that a result is cut, if its pieces in the order of the ranks are what the call is given: a whole that is known, or a
    sum of what ranks were given."""
    if slot.name.startswith(("input.", "param.")):
        return None
    for given in (told.joined[at] for name in slot.inputs if (at := (slot.key, name)) in told.joined):
        wholes = _batches(given, len(groups))
        for dim in _all_longer(held[groups[0][0]], wholes[0], len(groups[0]), told.padded):
            way = Way("sharded", dim)
            made = [put_together([held[rank] for rank in group], way) for group in groups]
            known = [one for one in (*made, *wholes) if one is not None and one.load is not None]
            if len(known) == 2 * len(groups) and all(map(_close, known[: len(groups)], wholes)):
                return way
    return None


def _batches(whole: Piece, count: int) -> list[Piece]:
    """Return the parts of a whole that ranks have which differ in their data."""
    if count == 1 or not whole.shape or whole.shape[0] % count:
        return [whole] * count
    each = whole.shape[0] // count
    if whole.load is None:
        return [Piece(whole.dtype, (each, *whole.shape[1:]))] * count
    return [_batch(whole, n * each, (n + 1) * each) for n in range(count)]


def _batch(whole: Piece, begin: int, end: int) -> Piece:
    return Piece(
        whole.dtype, (end - begin, *whole.shape[1:]), load=partial(whole.rows, begin, end),
        part=lambda start, stop: whole.rows(begin + start, min(begin + stop, end)),
    )  # fmt: skip


def _close(made: Piece, whole: Piece) -> bool:
    return distance(made, whole) < CLOSE


def _by_numbers(
    axis: str, groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], whole: Piece, told: Told
) -> Way | None:
    """Tell a partial sum from replicas that drifted, by the other run."""
    pieces = [held[rank] for rank in groups[0]]
    if _apart(pieces) < CLOSE:
        return _odd(axis, groups, slot, held, told)
    added = put_together(pieces, Way("partial"))
    if added is not None and distance(added, whole) < NEAR:
        return Way("partial")
    return _unknown(axis, groups, slot, held, told)


def _odd(axis: str, groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], told: Told) -> Way:
    """Say which ranks are odd; the slot goes on as most of them have it."""
    for group in groups:
        pieces = [held[rank] for rank in group]
        agreeing = [sum(piece.same(other) for other in pieces) for piece in pieces]
        if min(agreeing) == len(pieces):
            continue
        most = max(agreeing)
        odd = [rank for rank, count in zip(group, agreeing, strict=True) if count < most] if 2 * most > len(pieces) else list(group)
        told.apart.append(
            Apart("replicas", slot.key, slot.name, told.step, slot.seq, axis, slot.ranks(odd), _apart(pieces), made=slot.made)
        )
        break
    return REPLICATED


def _of_fixed(
    axis: str, groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], whole: Piece | None, told: Told
) -> Way | None:
    """Say how a weight lies that ranks hold otherwise. A shard that nothing describes, or a piece of one that is padded, is not
    known: no replica of the whole has another shape."""
    if axis not in told.data and (whole is None or whole.shape != held[groups[0][0]].shape):
        return _unknown(axis, groups, slot, held, told)
    return _odd(axis, groups, slot, held, told)


def _unknown(axis: str, groups: Sequence[Sequence[int]], slot: Slot, held: Mapping[int, Piece], told: Told) -> Way | None:
    pieces = [held[rank] for rank in groups[0]]
    given = next((name for name in slot.inputs if told.ways.get((slot.key, name), {}).get(axis, REPLICATED).kind == "partial"), "")
    summed = told.joined.get((slot.key, given))
    # A sum whose pieces ranks keep.
    scattered = summed is not None and bool(_all_longer(pieces[0], summed, len(pieces), told.padded))
    kind = "unreduced" if given and not slot.backward and not scattered else "unknown"
    told.apart.append(Apart(kind, slot.key, slot.name, told.step, slot.seq, axis, slot.ranks(groups[0]), _apart(pieces), given))
    return None


def _apart(pieces: Sequence[Piece]) -> float:
    return max((distance(piece, pieces[0]) for piece in pieces[1:]), default=0.0)


def _norms(piece: Piece, whole: Piece) -> tuple[float, float]:
    """Return the norm of the difference of two pieces, and that of the second, a range of rows at a time."""
    length = piece.shape[0] if piece.shape else 1
    step = max(1, AT_A_TIME * length // max(1, piece.numel))
    squares = np.zeros(2)
    for start in range(0, length, step):
        stop = min(start + step, length)
        mine, its = (
            one.rows(start, stop) if one.shape else one.load() for one in (piece, whole) if one.load is not None
        )  # fmt: skip
        its = its.astype(np.float64).reshape(-1)
        squares += np.square(mine.astype(np.float64).reshape(-1) - its).sum(), np.square(its).sum()
    apart, norm = np.sqrt(squares).tolist()
    return apart, norm


def distance(piece: Piece, whole: Piece) -> float:
    """Estimate the relative distance of two pieces of one shape by their sketches; NaN where they have none."""
    if piece.shape != whole.shape:
        return math.nan
    if piece.load is not None and whole.load is not None:
        apart, norm = _norms(piece, whole)
        return apart / norm if norm else math.inf
    if piece.sketch is None or whole.sketch is None:
        return math.nan
    norm = float(np.linalg.norm(whole.sketch))
    return float(np.linalg.norm(piece.sketch - whole.sketch)) / norm if norm else math.inf
