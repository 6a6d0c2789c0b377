"""How much error rounding and the errors of the inputs explain: the formulas of a criterion, for all outputs of a step at once.

facts/rounding.toml says what each kind means and where it comes from; here they are array operations over `Outputs` and `Operands`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, distinct, most, spans
from trueup.comparison.measures.thresholds import BIASED, FLIPPED, ROOM
from trueup.foundation.facts import operators
from trueup.foundation.facts.criteria import CARRY, OWN, Criterion
from trueup.foundation.facts.operators import having
from trueup.foundation.facts.slots import SINGLE, is_argument, is_gradient_slot, is_incoming_gradient, is_variance  # fmt: skip
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.store.declared import Precision

SUMMED = 1
"""Kind of an output that is a sum of one operand: a bias's gradient."""


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
    finer: Array  # the same where the candidate's dtype is finer, else 0
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


@dataclass(frozen=True, slots=True)
class Budget:
    """What is explained of outputs, relative to their norms: float64 ``(n,)`` each."""

    own: Array  # what rounding explains
    expected: Array  # the same and what the errors of the inputs explain
    declared: Array  # the part of ``own`` that operands rounded to a declared TF32 or HF32 make
    coherent: Array  # the part of the error, alike in all elements, that rounding explains: rounding has no direction
    unit: Array  # unit roundoff of the coarsest dtype that they are computed in

    @classmethod
    def joined(cls, parts: Sequence[Budget]) -> Budget:
        """Return the budgets of several groups of outputs as one."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def take(self, at: Numbers) -> Budget:
        """Return those of some outputs."""
        return Budget(*(getattr(self, name)[at] for name in self.__slots__))


def unrecorded(criterion: Criterion, roundoff: float) -> tuple[float, float]:
    """Return what rounding explains of tensors made by calls that nobody recorded, and of what their elements share. The
    criterion's last row is for what has no name; ``roundoff`` is of the coarsest dtype they may have gone through."""
    row, arithmetic, coarse = criterion.rows[-1], min(roundoff, SINGLE), roundoff if roundoff > SINGLE else 0.0
    calls = 2.0  # at least, each of which may round a factor that all elements share
    own = row.ulps * arithmetic + math.sqrt(max(row.roundings, calls)) * coarse
    return own, BIASED * arithmetic + math.sqrt(calls) * coarse


class Explanation:
    """Formulas over the outputs of matched calls and the operands that those read, in the order of their slots. ``precision``
    says how float32 products are rounded; ``narrowest`` is the unit roundoff of the coarsest dtype of any result of the step,
    also of those explained elsewhere."""

    def __init__(
        self, outputs: Tensors, inputs: Tensors, calls: Calls, criterion: Criterion, precision: Precision, names: Vocabulary,
        narrowest: float,
    ) -> None:  # fmt: skip
        self.outputs, self.inputs, self.calls, self.names, self.precision = outputs, inputs, calls, names, precision
        self.narrowest = narrowest
        of = outputs.call
        row = calls.row[of]
        table = criterion.rows
        self.own_kind = np.array([OWN.index(r.own) for r in table])[row]
        self.carry_kind = np.array([CARRY.index(r.carry) for r in table])[row]
        self.ulps, self.factor = np.array([r.ulps for r in table])[row], np.array([r.factor for r in table])[row]
        self.random, self.matmul = np.array([r.random for r in table])[row], np.array([r.matmul for r in table])[row]
        self.products = np.array([r.products for r in table])[row]
        self.roundings = np.array([r.roundings for r in table])[row]
        self.stored_sums = np.array([r.stored_sums for r in table])[row]
        self.op = calls.op[of]
        count = len(calls.row)
        starts = np.searchsorted(inputs.call, np.arange(count + 1))
        self.first, self.count = starts[of], np.diff(starts)[of]
        relative = self._relative()
        self.worst = most(relative, inputs.call, count)[of]
        self.saved = most(np.where(self._gradients(), 0.0, relative), inputs.call, count)[of]
        """Largest relative error of what is no incoming gradient: of it masks are made."""
        self.deviating = most((inputs.absolute != 0).astype(float), inputs.call, count)[of] > 0
        self.terms = most(inputs.norm, inputs.call, count)[of]
        self.coarsest = most(inputs.roundoff, inputs.call, count)[of]
        self.coarse = self._coarse()
        self.unit, self.stored, self.rounded = self._units()
        self.attended = np.ones(len(self.op))  # how much of the gradient of an attention has cancelled
        self.centred = np.ones(len(self.op))  # how much larger the numbers under a mean, or a sum over the batch, are than it

    def explain(self) -> Budget:
        """Return what is explained of each output."""
        out = self.outputs
        empty = (out.norm == 0) | ~np.isfinite(out.norm)
        norm = np.where(empty, 1.0, out.norm)
        with np.errstate(all="ignore"):
            product = self._product(norm)
            sharp = self._sharpness()
            # Products of operands rounded to TF32 or HF32 are off by at most the roundoff of both, before cancellation.
            declared = 2 * self.rounded * np.where(self._is("bilinear"), product.scale, self.products * sharp)
            grown = self._grown(norm, product)
            own = self.stored + self.ulps * self.unit * grown + declared
            carried, flipped = self._carried(norm, product, sharp)
            expected = own + carried + flipped + self._rounded_apart(carried)
            # What is exactly zero on the baseline (or has nothing finite) is explained whole or not at all: relative errors mean
            # nothing there, and what is left where terms cancel is a rounding of the terms.
            rounding = ~self._is("exact") & (self.outputs.absolute <= (self.stored + self.ulps * self.unit) * self.terms)
            nothing = np.where(self.deviating | rounding, np.inf, 0.0)
            # A factor that all elements share may be rounded to a 16-bit or 8-bit dtype, once.
            coherent = self._storage_unit() + BIASED * self.unit * grown + declared + carried
        of = ((0.0, own), (nothing, expected), (0.0, declared), (np.inf, coherent))
        own, expected, declared, coherent = (np.where(empty, value, found) for value, found in of)
        return Budget(own, expected, declared, coherent, self.coarse)

    def _relative(self) -> Array:
        """Return the relative errors of the inputs; of a mean beside what it is subtracted from, for it may be next to nothing."""
        inputs, number = self.inputs, self.names.number
        found, ops = inputs.relative.copy(), self.calls.op[inputs.call]
        for op, (mean, other) in self._said(self.calls.op, "centred"):
            its, beside = (np.flatnonzero((ops == op) & (inputs.slot == number(slot))) for slot in (mean, other))
            rms = np.zeros(len(self.calls.op))
            rms[inputs.call[beside]] = inputs.rms[beside]
            apart = inputs.absolute[its] / np.sqrt(np.maximum(inputs.numel[its], 1.0)) / rms[inputs.call[its]]
            found[its] = np.fmin(found[its], apart)
        return found

    def _said(self, ops: Numbers, fact: str) -> list[tuple[int, Any]]:
        """Return the operators of some of which a fact says something, and what."""
        names = self.names
        known = distinct(ops[names.table(having(fact))[ops]]).tolist()
        return [(op, operators.says(names.names[op], fact)) for op in known]

    def _is_known(self, fact: str) -> Array:
        """Tell of which outputs' operators a fact is known."""
        return self.names.table(having(fact))[self.op]

    def _gradients(self) -> Array:
        """Tell which inputs are gradients that a backward gets: of the dispatcher's backward operators the first."""
        inputs, names = self.inputs, self.names
        backward = names.table(having("backward"))[self.calls.op[inputs.call]]
        return np.asarray(names.table(is_incoming_gradient)[inputs.slot] | (backward & (inputs.slot == names.number("input.0"))))

    def _is(self, kind: str, which: Array | None = None) -> Array:
        known = OWN if which is None else CARRY
        return np.asarray((self.own_kind if which is None else which) == known.index(kind))

    def _units(self) -> tuple[Array, Array, Array]:
        """Return the unit roundoff of the arithmetic, the roundings to the dtype of storage, and what TF32 or HF32 round to. A
        kernel of a 16-bit or 8-bit dtype computes in float32 and rounds what it stores."""
        coarse, calls, of = self.coarse, self.calls, self.outputs.call
        convolution = self._is_known("convolution")
        declared = np.where(convolution, self.precision.convolution, self.precision.matmul)
        rounded = np.where(coarse == SINGLE, declared, 0.0)
        # Of what ran inside each call may round; a function whose inside was not recorded is two calls at least.
        inside = np.where(calls.inside[of] > 0, calls.inside[of], self.roundings)
        roundings = np.where(calls.aten[of] & ~self.steps, self.roundings, np.maximum(inside, 2.0))
        # That is a root mean square; of few elements one may be off by a whole unit, which is twice the roundoff.
        units = np.sqrt(roundings + 4 / np.maximum(self.outputs.numel, 1.0))
        stored = np.where((coarse > SINGLE) & ~self._is("exact"), units * coarse, 0.0)
        multiplies = self._is("bilinear") | (self.matmul & self._is("composite"))
        return np.minimum(coarse, SINGLE), stored, np.where(multiplies, rounded, 0.0)

    def _coarse(self) -> Array:
        """Return the unit roundoff of the coarsest dtype that an output is computed in."""
        unit, calls, of = self.outputs.roundoff, self.calls, self.outputs.call
        unit = np.where(self.random, np.maximum(unit, self.coarsest), unit)
        # Of several steps a kernel may round each to the dtype that it reads: where the candidate's is finer, the baseline's alone.
        finer = most(self.inputs.finer, self.inputs.call, len(calls.row))[of]
        self.steps = (unit > 0) & (finer > unit) & self._is("composite")
        unit = np.where(self.steps, finer, unit)
        # What a function computes in shows in what it holds, unless it is one kernel: that rounds what it stores. Of products in it
        # that were not recorded nothing shows: autocast may have run them in the coarsest dtype there is.
        several = (self.roundings > 1) | self.names.table(is_gradient_slot)[self.outputs.slot]
        around = (unit > 0) & several & ~calls.aten[of] & ~calls.optimizer[of]
        hidden = around & self._is("composite") & self.matmul & (calls.inside[of] == 0)
        lowest = np.where(hidden, self.narrowest, calls.lowest[of])
        return np.where(around, np.maximum(np.maximum(unit, lowest), self.coarsest), unit)

    def _rounded_apart(self, carried: Array) -> Array:
        """Return what a cast to a 16-bit or 8-bit dtype makes of numbers that differ by ``carried``, relative to them. A boundary
        of its roundoff v lies between two of them in carried / 2v of all cases, and then they are 2v apart: a root mean square of
        sqrt(2 v carried), and of few elements one."""
        coarse = self._storage_unit()
        apart = FLIPPED * np.sqrt(coarse * (carried + coarse / np.maximum(self.outputs.numel, 1.0)))
        return np.where(self.deviating & self._is("exact"), apart, 0.0)

    def _storage_unit(self) -> Array:
        return np.where(self.coarse > SINGLE, self.coarse, 0.0)

    def _grown(self, norm: Array, product: Product) -> Array:
        """Return how many times a row's units an output may be off, for its terms are larger than it is, at least 1."""
        grown = np.ones(len(norm))
        at = self._is("additive")
        if at.any():
            join = self._join(at)
            fit = self.inputs.numel[join.inputs] <= self.outputs.numel[join.outputs]
            added = join.sum(np.where(fit, self.inputs.norm[join.inputs], 0.0))
            grown[at] = np.maximum(1.0, added / norm)[at]
        at = self._is("accumulate")
        grown[at] = self._accumulated(norm)[at]
        at = self._is("bilinear")
        grown[at] = (blocked(product.k) * product.scale)[at]
        self._reductions(grown, norm)
        at = self._is("composite")
        if at.any():
            grown[at] = self._attended(at, norm)[at]
            gradient = at & (self._is_known("backward") | self.names.table(is_gradient_slot)[self.outputs.slot])
            self.centred = np.where(gradient, self._cancelled(gradient, norm), np.where(at, self._centred(), 1.0))
            grown[at] *= np.maximum(self.centred, self._one_hot(at, norm))[at]
        return grown

    def _attended(self, at: Array, norm: Array) -> Array:
        """Return how much of the gradient of an attention's queries and keys has cancelled, at least 1; its roundings grow alike.
        Of L keys and weights near 1/L a gradient of the logits is P * (dP - D), where dP = dO V^T and its mean D nearly cancel.
        Otherwise the queries' has a root mean square of rms(dO) rms(V) rms(K) / sqrt(L); the keys', with Q for K."""
        number, inner = self.names.number, self._is_known("backward")
        asked = at & self._is_known("attention") & (inner | self.names.table(is_gradient_slot)[self.outputs.slot])
        if not asked.any():
            return np.ones(len(at))
        join = self._join(asked)
        its, shift = self.inputs.slot[join.inputs], inner.astype(np.int64)  # the gradient goes before
        slots = np.array([number(f"input.{n}") for n in range(4)])
        gradient = np.where(inner, join.first(its == slots[0]), join.first(its == number("grad_output.0")))
        query, key, value = (join.first(its == slots[shift + n][join.outputs]) for n in range(3))
        names = [(number(f"output.{n}"), number(f"grad_input.{n}")) for n in range(2)]
        of_query, of_key = (np.isin(self.outputs.slot, both) for both in names)
        other = np.where(of_query, key, query)
        others = self._size(key, 0) * self._size(key, 1) * self._size(key, -1)  # (batch, heads, L, width)
        positions = self._of(self.inputs.numel, key) / np.maximum(others, 1.0)
        whole = self._of(self.inputs.rms, gradient) * self._of(self.inputs.rms, value) * self._of(self.inputs.rms, other)
        scale = whole / np.sqrt(np.maximum(positions, 1.0)) * np.sqrt(np.maximum(self.outputs.numel, 1.0)) / norm
        found = np.where(asked & (of_query | of_key), np.maximum(1.0, scale), 1.0)
        self.stored, self.attended = self.stored * found, found
        return found

    def _accumulated(self, norm: Array) -> Array:
        """Return the terms of ``out = self + x``, relative to the result: x is no larger than the result and self together."""
        first = np.where(self.count > 0, self.first, NONE)
        return 1 + 2 * self._of(self.inputs.norm, first) / norm

    def _sharpness(self) -> Array:
        """Return how large the logits of an attention are, at least 1: times the operands' relative errors, they are its error."""
        attends = self._is_known("attention")
        sharp = np.ones(len(attends))
        if attends.any():
            join, number = self._join(attends), self.names.number
            its = self.inputs.slot[join.inputs]
            first = self._is_known("backward").astype(np.int64)  # the gradient goes before
            slots = np.array([number(f"input.{n}") for n in range(3)])
            query, key = (join.first(its == slots[first + n][join.outputs]) for n in range(2))
            logits = self._of(self.inputs.rms, query) * self._of(self.inputs.rms, key)
            sharp = np.where(attends, np.maximum(1.0, logits), 1.0)
        return sharp

    def _reductions(self, grown: Array, norm: Array) -> None:
        average = self._is("average")
        at = average | self._is("reduction")
        if not at.any():
            return
        join = self._join(at)
        largest = join.first_largest(self.inputs.numel[join.inputs])
        numel, summed = self._of(self.inputs.numel, largest), self._of(self.inputs.norm, largest)
        k = numel / np.maximum(self.outputs.numel, 1.0)
        found = blocked(k) * np.maximum(1.0, np.where(average, 1 / k, 1.0) * summed / norm)
        grown[at] = np.where(numel > self.outputs.numel, found, 1.0)[at]
        self.stored = np.where(self.stored_sums, self.stored * grown, self.stored)

    def _one_hot(self, at: Array, norm: Array) -> Array:
        """Return how much larger the terms of a gradient g - p sum(g) are than it, at least 1: as large as g, which a mean over N
        rows, if that was not recorded, gives each an Nth of. Little is left of them where the probabilities p are near one-hot."""
        backward = self._is_known("backward") | self.names.table(is_gradient_slot)[self.outputs.slot]
        asked = at & backward & self._is_known("one-hot")
        if not asked.any():
            return np.ones(len(at))
        join = self._join(asked)
        gradient = join.first(self._gradients()[join.inputs])
        classes = self.outputs.size(np.arange(len(at)), 1)
        numel, rows = self._of(self.inputs.numel, gradient), self.outputs.numel / np.maximum(classes, 1.0)
        terms = self._of(self.inputs.norm, gradient) / np.sqrt(np.where(numel > 1, 1.0, np.maximum(rows, 1.0)))
        return np.where(asked & (gradient >= 0), np.maximum(1.0, terms / norm), 1.0)

    def _cancelled(self, at: Array, norm: Array) -> Array:
        """Return how much of a gradient that a composite sums over the batch has cancelled, at least 1."""
        join = self._join(at)
        is_gradient = self.names.table(is_incoming_gradient)[self.inputs.slot[join.inputs]]
        gradient = join.first(is_gradient)
        gradient = np.where(gradient >= 0, gradient, np.where(self.count > 0, self.first, NONE))
        numel = self._of(self.inputs.numel, gradient)
        other = (join.inputs != gradient[join.outputs]) & (self.inputs.numel[join.inputs] >= numel[join.outputs])
        weight = join.most(np.where(other, self.inputs.rms[join.inputs], 0.0), 1.0)
        scale = np.maximum(1.0, weight * self._of(self.inputs.norm, gradient) / norm)
        return np.where((gradient >= 0) & (numel > self.outputs.numel), scale, 1.0)

    def _centred(self) -> Array:
        """Return how much larger than a mean the numbers are that it was taken of, at least 1; a variance does not cancel."""
        first = np.where(self.count > 0, self.first, NONE)
        variance = self.names.table(is_variance)[self.outputs.slot]
        taken = (first >= 0) & ~variance & (self._of(self.inputs.numel, first) > self.outputs.numel) & (self.outputs.rms > 0)
        return np.where(taken, np.maximum(1.0, self._of(self.inputs.rms, first) / self.outputs.rms), 1.0)

    def _carried(self, norm: Array, product: Product, sharp: Array) -> tuple[Array, Array]:
        """Return what errors of the inputs make of an output, and what comes on top where elements take another branch."""
        kinds, worst = self.carry_kind, self.worst
        # Of a product (1 + e) (1 + e) - 1: where little is left of a tensor its square is off by far more.
        carried = self.factor * worst * np.where(self._is("attention", kinds), sharp * self.attended, 1 + worst)
        carried = np.maximum(carried, ROOM * worst * self.centred)  # a mean, or a sum, is off by no more than its terms
        # Of few elements with an error near 0 none is expected to flip. In many calls one does.
        branch = FLIPPED * np.sqrt(self.saved + 1 / np.maximum(self.outputs.numel, 1.0))
        flipped = np.where(self._is("branch", kinds), branch, 0.0)
        flipped = np.where(self._is("pole", kinds), FLIPPED * np.sqrt(self.saved), flipped)
        flipped = np.where(self._is("sign", kinds), self.factor * np.sqrt(worst), flipped)
        inverse = self._is("inverse", kinds)
        if inverse.any():
            first = self._of(self.inputs.rms, np.where(self.count > 0, self.first, NONE))
            spread = np.maximum(1.0, first * self.outputs.rms ** np.where(self._is_known("root"), 2, 1))  # 1: all of one size
            carried = np.where(inverse, self.factor * worst * spread, carried)
        plain = inverse | np.isin(kinds, [CARRY.index(kind) for kind in ("smooth", "attention", "branch", "pole", "sign")])
        join = self._join(self.deviating & ~plain)
        if len(join.outputs):
            absolute, numel = self.inputs.absolute[join.inputs], self.inputs.numel[join.inputs]
            wide = self.outputs.numel[join.outputs]
            repeated = absolute * np.sqrt(np.maximum(1.0, wide / np.maximum(numel, 1.0)))
            summed = absolute * np.maximum(1.0, numel / np.maximum(wide, 1.0)) ** 0.25
            linear = self.factor * np.maximum(worst, join.sum(repeated) / norm)
            accumulated = self.factor * worst * (1 + worst) * self._accumulated(norm)
            added = self.factor * np.maximum(worst, join.sum(summed) / norm)
            # exp(x + e) = exp(x) (1 + e): what counts is the absolute error, however large a mask makes the norm.
            spread = self.inputs.absolute / np.sqrt(np.maximum(self.inputs.numel, 1.0))
            apart = join.most(spread[join.inputs], 0.0)
            exponential = self.factor * np.maximum(worst, apart)
            # A factor, as a mask, may take away what is large and keep all of an error that lies evenly.
            (one, of_one), (two, of_two) = ((self._of(self.inputs.rms, n), self._of(spread, n)) for n in (product.one, product.two))
            multiplied = self.factor * np.maximum(worst, np.sqrt(self.outputs.numel) * (of_one * two + one * of_two) / norm)
            others = np.where(product.is_added(join), repeated, 0.0)  # a bias, repeated for every row
            bilinear = self.factor * (product.relative * product.scale + join.sum(others) / norm)
            by_kind = {"linear": linear, "accumulate": accumulated, "sum": added, "exponential": exponential, "bilinear": bilinear}
            for kind, found in {**by_kind, "product": multiplied}.items():
                carried = np.where(self._is(kind, kinds), found, carried)
        discrete = self.outputs.roundoff == 0  # an index or a mask flips where two numbers nearly tie, too
        carried, flipped = np.where(discrete, self.factor * worst, carried), np.where(discrete, branch, flipped)
        return np.where(self.deviating, carried, 0.0), np.where(self.deviating, flipped, 0.0)

    def _product(self, norm: Array) -> Product:
        """Find the two factors of bilinear outputs and how many of their products are summed into one element."""
        at = self._is("bilinear") | self._is("bilinear", self.carry_kind) | self._is("product", self.carry_kind)
        found = Product.nothing(len(at))
        if not at.any():
            return found
        join, out, inputs, slot = self._join(at), self.outputs, self.inputs, self.names.number
        its = inputs.slot[join.inputs]
        gradient = join.first(its == slot("grad_output.0"))
        backward = gradient >= 0
        forward = np.array([*(slot(name.removeprefix("grad_")) for name in self.names.names), NONE])  # what a gradient is one of
        operand = self.names.table(is_argument)[its] & (its != forward[out.slot][join.outputs])
        bias_first = self._is_known("factors")
        operand &= ~np.where(bias_first[join.outputs], its == slot("input.0"), np.isin(its, [slot("input.2"), slot("input.bias")]))
        other = join.first_largest(np.where(operand, inputs.numel[join.inputs], -1.0), operand)
        last = np.isin(out.slot, [slot("grad_input.2"), slot("grad_input.bias")])
        bias = np.where(bias_first, out.slot == slot("grad_input.0"), last)
        first, second, kind = self._forward_factors(join, its)
        summed = at & np.where(backward, (other < 0) | bias, kind == SUMMED)
        one = np.where(backward, gradient, np.where(kind == SUMMED, join.first(its == slot("input.0")), first))
        two = np.where(summed, NONE, np.where(backward, other, second))
        numel = self._of(inputs.numel, one)
        times = at & (one >= 0) & (two >= 0)
        inner = np.sqrt(numel * self._of(inputs.numel, two) / np.maximum(out.numel, 1.0))
        k = self._inner_length(one, two, backward, inner)
        scale = np.sqrt(out.numel * k) * self._of(inputs.rms, one) * self._of(inputs.rms, two) / norm
        k_summed = np.maximum(numel / np.maximum(out.numel, 1.0), 1.0)
        found.k = np.where(times, k, np.where(summed & (one >= 0), k_summed, 1.0))
        found.scale = np.where(times, scale, np.where(summed, self._of(inputs.norm, one) / norm, 1.0))
        found.scale = np.maximum(found.scale, 1.0)
        found.one, found.two = one, two
        found.all = at & (one < 0) & (two < 0)
        found.biased = at & ~backward & ~self._is_known("backward")
        # A k x n matrix stretches an error along its largest singular value: 1 + sqrt(k/n) times what one that is like noise grows
        # by (Marchenko, Pastur), of which a square matrix has two, as the row allows.
        stretch = [(1 + k / np.sqrt(np.maximum(self._of(inputs.numel, by), 1.0))) / 2 for by in (two, one)]
        stretch = [np.where(times, np.maximum(by, 1.0), 1.0) for by in stretch]
        first_error, second_error = self._of(inputs.relative, one) * stretch[0], self._of(inputs.relative, two) * stretch[1]
        relative = first_error + second_error + first_error * second_error
        relative = np.where(summed, relative * k_summed**0.25, relative)  # partly coherent, as in any sum
        found.relative = np.where(found.all, join.sum(inputs.relative[join.inputs]), relative)
        return found

    def _forward_factors(self, join: Join, its: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return the operands that are multiplied where no gradient is among them, and how they are found."""
        out, number = self.outputs, self.names.number
        wanted = np.full((2, len(out.slot)), NONE, np.int64)
        kind = np.zeros(len(out.slot), np.int64)
        kind[self._is_known("factors")] = SUMMED
        for op, factors in self._said(self.op, "factors"):
            for slot, both in factors.items():
                at = (self.op == op) & (out.slot == number(slot))
                wanted[:, at] = np.array([number(one) for one in both])[:, None]
                kind[at] = 0
        given = (wanted[0] >= 0)[join.outputs]
        plain = ~given & (its != number("input.bias"))
        first = join.first((given & (its == wanted[0][join.outputs])) | plain)
        later = np.arange(len(self.inputs.slot))[join.inputs] > first[join.outputs]
        second = join.first((given & (its == wanted[1][join.outputs])) | (plain & later))
        return first, second, kind

    def _inner_length(self, one: Numbers, two: Numbers, gradient: Array, inner: Array) -> Array:
        """Return how many products are summed into one element; ``gradient``: where the first factor is one, of which matrix
        products sum ``inner``."""
        numel, number = self.inputs.numel, self.names.number
        found = np.where(gradient, inner, self._size(one, -1))
        gradient = gradient | self._is_known("backward")
        of_weight = np.isin(self.outputs.slot, [number(slot) for slot in ("output.1", "grad_input.1", "grad_input.weight")])
        for op, layout in self._said(self.op, "convolution"):
            filters = layout["filters"]  # a weight is [out, in, ...] beside [batch, channels, ...], or all the other way round
            inputs, channels = (1, 1) if filters == 0 else (-2, -1)
            positions = self._of(numel, one) / np.maximum(self._size(one, channels), 1.0)  # of the batch, too
            of_input, forward = (self._of(numel, two) / np.maximum(self._size(two, axis), 1.0) for axis in (inputs, filters))
            summed = np.where(gradient, np.where(of_weight, positions, of_input), forward)
            found = np.where(self.op == op, np.maximum(summed, 1.0), found)
        return found

    def _join(self, at: Array) -> Join:
        chosen = np.flatnonzero(at)
        return Join(np.repeat(chosen, self.count[chosen]), spans(self.first[chosen], self.count[chosen]), len(at))

    def _size(self, at: Numbers, dimension: int) -> Array:
        """Return one size of some inputs, 0 for `NONE`."""
        found = np.zeros(len(at))
        there = np.flatnonzero(at >= 0)
        found[there] = self.inputs.size(at[there], dimension)
        return found

    @staticmethod
    def _of(values: Array, at: Numbers) -> Array:
        """Return the values there, 0 for `NONE`."""
        return np.where(at >= 0, values[np.maximum(at, 0)], 0.0) if len(values) else np.zeros(len(at))
