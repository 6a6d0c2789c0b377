"""The gradients that the optimizer is given, by weight, where its own calls are left out because nobody knows whose they are.

    recorded   where several processes reduce them, under the names of their weights
    flat       pieces of one buffer, or of one a weight: ranks joined, then cut by the sizes of the weights, in the model's order
    updates    of one process, whose calls each update one weight: what they read that is neither the weight nor its state

Adam makes the same of a gradient that is a factor off, so that nothing after it tells.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trueup.comparison.layout.calls import Calls, Key
from trueup.comparison.layout.pieces import Array, Piece
from trueup.comparison.layout.updates import STEPPING, UNNAMED, placed, shapes_of, updates_in
from trueup.foundation.facts.slots import roundoff

FACTOR = 0.02
"""Relative error of a multiple: gradients of bfloat16 are sums of terms that are 0.4 % off."""

OFF = 0.05
"""Relative distance, and relative difference of norms, from which on gradients are no roundings of one another."""

Gradients = Mapping[str, Piece]
Slots = Mapping[tuple[Key, str], Piece]


@dataclass(frozen=True)
class Off:
    """What an optimizer is given, and what it should be: ``ratio`` times as much, NaN where it is no multiple."""

    weights: tuple[str, ...]  # empty: of all of them together the norm is off
    ratio: float
    distance: float


def read_by(calls: Calls, names: Sequence[str] | None) -> dict[str, int]:
    """Return the row of each weight's gradient, of a rank whose optimizer's calls each update one weight."""
    updates = updates_in(calls, len(names or ()))
    whose = None if names is None else placed(calls, updates, names, None)
    if whose is None:
        return {}
    weights = {
        row["digest"] for row in calls.rows
        if row["phase"] == "forward" and row["level"] == "module" and row["slot"].startswith("param.")
    }  # fmt: skip
    written = {
        (whose[call.key][0], calls.rows[at]["digest"]) for call in updates for name, at in call.rows.items()
        if name == "input.0" and call.key[3].endswith("_")
    }  # fmt: skip
    own, first, shapes = {call.seq for call in updates}, min((row["seq"] for row in calls.rows), default=0), shapes_of(calls)
    found: dict[str, int] = {}
    for call in updates:
        weight = whose[call.key][0]
        for name, at in call.rows.items():
            row = calls.rows[at]
            made = row["producer_seq"]  # of an earlier step: state
            state = row["digest"] in weights or (made is not None and (made in own or made < first))
            state = state or (weight, row["digest"]) in written
            if name.startswith("input.") and not state and tuple(row["shape"] or ()) == shapes.get(weight):
                found.setdefault(weight, at)
    return found


def given(slots: Slots, flat: frozenset[str], sizes: Mapping[str, int]) -> dict[str, Piece]:
    """Return the gradients by weight that the joined steps of optimizers read; ``sizes``: the weights', in the model's order.
    Buffers that cannot be cut keep their own names."""
    found: dict[str, Piece] = {}
    buffers: dict[str, Piece] = {}
    for (key, name), piece in slots.items():
        if key[0] == "optimizer" and key[3].startswith(STEPPING) and name.startswith("input.") and name.endswith(".grad"):
            unnamed = name in flat or UNNAMED.fullmatch(name)  # flat buffers, or copies of weights in a wider dtype
            (buffers if unnamed else found).setdefault(name[len("input.") : -len(".grad")], piece)
    return found | _cut(buffers, sizes) if buffers else found


def _cut(buffers: Mapping[str, Piece], sizes: Mapping[str, int]) -> dict[str, Piece]:
    """Return pieces of flat buffers by weight; the buffers themselves where their lengths do not show whose they are."""
    if len(buffers) == len(sizes):
        lengths = [one.numel for one in buffers.values()]
        if all(length >= size for length, size in zip(lengths, sizes.values(), strict=True)):
            return {name: _part(one, 0, size) for (name, size), one in zip(sizes.items(), buffers.values(), strict=True)}
    if len(buffers) == 1 and (whole := next(iter(buffers.values()))).numel >= sum(sizes.values()) > 0:
        ends = np.cumsum(list(sizes.values())).tolist()
        return {name: _part(whole, end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
    return dict(buffers)


def _part(piece: Piece, start: int, end: int) -> Piece:
    load = piece.load
    return Piece(piece.dtype, (end - start,), load=None if load is None else lambda: load().reshape(-1)[start:end], changed=True)


def off(baseline: Gradients, candidate: Gradients, tied: Mapping[str, str]) -> list[Off] | None:
    """Return where gradients are no roundings of the baseline's; None: they cannot be held against each other. ``tied``: weights
    that are another one, of which the stages of a pipeline hold copies, each with a gradient that must be that one's."""
    if not baseline or not candidate:
        return None
    baseline, candidate = _with_copies(baseline, candidate, tied), _with_copies(candidate, baseline, tied)
    both = [name for name in baseline if name in candidate]
    if both and all(side[name].load for side in (baseline, candidate) for name in both):
        each = [(name, *between(baseline[name], candidate[name])) for name in both]
        wrong = [one for one in each if not one[2] <= OFF]
        same = {round(ratio, 1 if ratio > 1 else 3) for _, ratio, _ in wrong}
        if not wrong and baseline.keys() != candidate.keys():
            return None  # nothing says how the others lie
        if len(same) == 1 or not wrong:
            return [Off(tuple(name for name, _, _ in wrong), wrong[0][1], max(one[2] for one in wrong))] if wrong else []
        return [Off((name,), ratio, distance) for name, ratio, distance in wrong]
    norms = [_norm(side) for side in (baseline, candidate)]
    if any(math.isnan(norm) for norm in norms) or not norms[0] > 0:
        return None
    ratio = norms[1] / norms[0]
    return [Off((), ratio, abs(ratio - 1))] if abs(ratio - 1) > OFF else []


def by_pieces(wrong: Sequence[Off], held: Gradients, count: int) -> list[float]:
    """Return by which factors the gradients ``held`` are off in so many equal pieces of a flat buffer, if each is by its own: those
    of weights that lie in one piece are off alike, and a weight that lies in two is no multiple. Nothing of others."""
    ends = dict(zip(held, itertools.accumulate(one.numel for one in held.values()), strict=True))
    total, torn, found = max(ends.values(), default=0), 0, dict[int, float]()
    for one in wrong:
        if len(one.weights) != 1:
            return []
        size = held[one.weights[0]].numel
        middle = ends[one.weights[0]] - size / 2
        off_edge = abs(middle - total * max(1, round(middle * count / total)) / count) / size  # padding moves edges by little
        if not math.isfinite(one.ratio):
            torn += 1
        elif abs(one.ratio - found.setdefault(int(middle * count / total), one.ratio)) > FACTOR * abs(one.ratio):
            return []
        if off_edge > 0.5 if not math.isfinite(one.ratio) else off_edge < 0.25:
            return []
    factors = [found[n] for n in range(count) if n in found]
    return factors if len(factors) == count > torn and max(factors) - min(factors) > FACTOR * max(map(abs, factors)) else []


def _with_copies(mine: Gradients, its: Gradients, tied: Mapping[str, str]) -> Gradients:
    """Return a run's gradients, those of a tied weight also under the other name that the other run has for it."""
    return {**mine, **{name: mine[tied[name]] for name in its.keys() - mine.keys() if tied.get(name) in mine}}


def weights_in(slots: Slots) -> Slots:
    """Return the weights that modules run with in a step."""
    return {at: piece for at, piece in slots.items() if at[0][:2] == ("forward", "module") and at[1].startswith("param.")}


def staying(baseline: Mapping[int, Slots], candidate: Mapping[int, Slots]) -> tuple[tuple[Key, str], int, int] | None:
    """Return the first weight that the candidate has bit by bit as in the step before, and both steps, where the baseline's
    differ by more than a rounding; None: there is none. By how much Adam moves a weight says nothing of its gradient, so
    that a weight that was not updated at all is within what a step may be off."""
    steps = sorted(baseline.keys() & candidate.keys())
    for before, after in itertools.pairwise(steps):
        for at in baseline[before]:
            held = [side[step].get(at) for side in (baseline, candidate) for step in (before, after)]
            first, second, mine, its = (one if one is not None and one.load else None for one in held)
            if not (first and second and mine and its) or between(mine, its)[1] > 0:
                continue
            if 2 * roundoff(first.dtype) < between(first, second)[1] < math.inf:
                return at, before, after
    return None


def between(first: Piece, second: Piece) -> tuple[float, float]:
    """Return which multiple of the first the second is, NaN where it is none; and their relative distance."""
    mine, its = (elements(one.load) for one in (first, second) if one.load is not None)
    return multiple(mine, its)


def elements(load: Callable[[], Array]) -> Array:
    """Return a piece's elements, one after the other, as float64."""
    return np.asarray(load()).astype(np.float64).reshape(-1)


def multiple(first: Array, second: Array) -> tuple[float, float]:
    """Return which multiple of a vector of float64 another is, NaN where it is none; and their relative distance."""
    if first.size != second.size:
        return math.nan, math.inf
    norm = float(np.linalg.norm(first))
    distance = float(np.linalg.norm(second - first))
    if norm == 0 or not math.isfinite(norm + distance):
        return math.nan, 0.0 if distance == 0 else math.inf
    ratio = float(first @ second) / norm**2
    rest = float(np.linalg.norm(second - ratio * first)) / norm
    return (ratio if rest <= FACTOR * abs(ratio) else math.nan), distance / norm


def _norm(side: Gradients) -> float:
    """Return the norm of all gradients of a run together: padding of buffers is zero; NaN where one is not measured."""
    squares = 0.0
    for piece in side.values():
        if piece.load is not None:
            squares += float(np.square(np.asarray(piece.load()).astype(np.float64)).sum())
        elif piece.numbers is not None:
            squares += piece.numbers.l2**2
        else:
            return math.nan
    return math.sqrt(squares)
