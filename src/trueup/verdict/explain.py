"""How much error rounding and the errors of the inputs explain: the formulas of a criterion, for all outputs of a step at once.

criteria.toml says what each kind means and where it comes from; here they are array operations over `Outputs` and `Operands`.
"""

from __future__ import annotations

import numpy as np

from trueup.verdict.criteria import CARRY, FLIPPED, OWN, UNIT_ROUNDOFF, Criterion
from trueup.verdict.names import normalised
from trueup.verdict.operands import (
    Calls,
    Join,
    Product,
    Tensors,
    blocked,
    is_argument,
    is_attention,
    is_backward,
    is_backward_operator,
    is_convolution,
    is_convolution_backward,
    is_gradient_slot,
    is_incoming_gradient,
    is_root,
    is_variance,
    most,
    rounds_as_convolution,
)  # fmt: skip
from trueup.verdict.precision import Precision
from trueup.verdict.streams import NONE, Array, Numbers, Vocabulary, spans

OPERANDS: dict[str, tuple[str, str]] = {
    "addmm": ("input.1", "input.2"), "baddbmm": ("input.1", "input.2"), "addbmm": ("input.1", "input.2"),
    "addmv": ("input.1", "input.2"),
}  # fmt: skip
"""The factors of a bilinear operator, where they are not its first two tensors."""

CONVOLUTION_BACKWARD: dict[str, tuple[str, str]] = {
    "output.0": ("input.0", "input.2"), "output.1": ("input.0", "input.1"),
}  # fmt: skip
"""Factors per output of ``convolution_backward(grad_output, input, weight)``."""


class Explanation:
    """Formulas over the outputs of matched calls and the tensors that those read.

    Args:
        outputs: what is explained.
        inputs: the operands, those of a call in the order of its slots.
        calls: the matched calls.
        criterion: its rows.
        precision: how float32 products are rounded.
        names: of slots and operators.
    """

    def __init__(
        self, outputs: Tensors, inputs: Tensors, calls: Calls, criterion: Criterion, precision: Precision, names: Vocabulary
    ) -> None:
        self.outputs, self.inputs, self.calls, self.names, self.precision = outputs, inputs, calls, names, precision
        of = outputs.call
        row = calls.row[of]
        table = criterion.rows
        self.own_kind = np.array([OWN.index(r.own) for r in table])[row]
        self.carry_kind = np.array([CARRY.index(r.carry) for r in table])[row]
        self.ulps, self.factor = np.array([r.ulps for r in table])[row], np.array([r.factor for r in table])[row]
        self.random, self.matmul = np.array([r.random for r in table])[row], np.array([r.matmul for r in table])[row]
        self.products = np.array([r.products for r in table])[row]
        self.op = calls.op[of]
        count = len(calls.row)
        starts = np.searchsorted(inputs.call, np.arange(count + 1))
        self.first, self.count = starts[of], np.diff(starts)[of]
        self.worst = most(inputs.relative, inputs.call, count)[of]
        self.saved = most(np.where(self._gradients(), 0.0, inputs.relative), inputs.call, count)[of]
        """Largest relative error of what is no incoming gradient: of it masks are made."""
        self.deviating = most((inputs.absolute != 0).astype(float), inputs.call, count)[of] > 0
        self.terms = most(inputs.norm, inputs.call, count)[of]
        self.coarsest = most(inputs.roundoff, inputs.call, count)[of]
        self.unit, self.rounded = self._units()

    def explain(self) -> tuple[Array, Array, Array]:
        """Return ``(own, own + carried, declared)`` of each output, relative to its norm; ``declared`` is HF32's part of own."""
        out = self.outputs
        empty = (out.norm == 0) | ~np.isfinite(out.norm)
        norm = np.where(empty, 1.0, out.norm)
        with np.errstate(all="ignore"):
            product = self._product(norm)
            sharp = self._sharpness()
            declared = self._declared(product, sharp)
            own = self._own(norm, product) + declared
            expected = own + self._carried(norm, product, sharp)
            nothing = self._of_nothing()
        return np.where(empty, 0.0, own), np.where(empty, nothing, expected), np.where(empty, 0.0, declared)

    def _gradients(self) -> Array:
        """Tell which inputs are gradients that a backward gets: of the dispatcher's backward operators the first."""
        inputs, names = self.inputs, self.names
        backward = names.table(is_backward_operator)[self.calls.op[inputs.call]]
        return np.asarray(names.table(is_incoming_gradient)[inputs.slot] | (backward & (inputs.slot == names.number("input.0"))))

    def _is(self, kind: str, which: Array | None = None) -> Array:
        known = OWN if which is None else CARRY
        return np.asarray((self.own_kind if which is None else which) == known.index(kind))

    def _units(self) -> tuple[Array, Array]:
        unit, calls, of = self.outputs.roundoff.copy(), self.calls, self.outputs.call
        unit = np.where(self.random, np.maximum(unit, self.coarsest), unit)
        convolution = self.names.table(rounds_as_convolution)[self.op]
        declared = np.where(convolution, self.precision.convolution, self.precision.matmul)
        rounded = np.where(unit == UNIT_ROUNDOFF["float32"], declared, 0.0)
        composite = self._is("composite")
        around = composite & (unit > 0) & ~calls.aten[of] & ~calls.optimizer[of]
        # What a function computes in shows in what it holds.
        unit = np.where(around, np.maximum(np.maximum(unit, calls.lowest[of]), self.coarsest), unit)
        return unit, np.where(self._is("bilinear") | (self.matmul & composite), rounded, 0.0)

    def _of_nothing(self) -> Array:
        """Explain outputs that are exactly zero on the baseline (or have nothing finite): all of them, or nothing.

        Relative errors mean nothing there. What is left where terms cancel is a rounding of the terms, not of the result.
        """
        rounding = ~self._is("exact") & (self.outputs.absolute <= self.ulps * self.unit * self.terms)
        return np.where(self.deviating | rounding, np.inf, 0.0)

    # ---------------------------------------------------------------- what rounding explains
    def _own(self, norm: Array, product: Product) -> Array:
        units = self.ulps * self.unit
        own = units.copy()
        at = self._is("additive")
        if at.any():
            join = self._join(at)
            fit = self.inputs.numel[join.inputs] <= self.outputs.numel[join.outputs]
            added = join.sum(np.where(fit, self.inputs.norm[join.inputs], 0.0))
            own[at] = (units * np.maximum(1.0, added / norm))[at]
        at = self._is("bilinear")
        own[at] = (units * blocked(product.k) * product.scale)[at]
        self._reductions(own, units, norm)
        at = self._is("composite")
        if at.any():
            backward = self.names.table(is_backward)[self.op] | self.names.table(is_gradient_slot)[self.outputs.slot]
            own[at] = (units * np.where(backward, self._cancelled(at & backward, norm), self._centred()))[at]
        return own

    def _declared(self, product: Product, sharp: Array) -> Array:
        """Return what products of operands rounded to TF32 or HF32 make: at most the roundoff of both, before cancellation."""
        return 2 * self.rounded * np.where(self._is("bilinear"), product.scale, self.products * sharp)

    def _sharpness(self) -> Array:
        """Return how large the logits of an attention are, at least 1: times the operands' relative errors, they are its error."""
        attends = self.names.table(is_attention)[self.op]
        sharp = np.ones(len(attends))
        if attends.any():
            join, number = self._join(attends), self.names.number
            its = self.inputs.slot[join.inputs]
            first = self.names.table(is_backward_operator)[self.op].astype(np.int64)  # the gradient goes before
            slots = np.array([number(f"input.{n}") for n in range(3)])
            query, key = (join.first(its == slots[first + n][join.outputs]) for n in range(2))
            logits = self._of(self.inputs.rms, query) * self._of(self.inputs.rms, key)
            sharp = np.where(attends, np.maximum(1.0, logits), 1.0)
        return sharp

    def _reductions(self, own: Array, units: Array, norm: Array) -> None:
        average = self._is("average")
        at = average | self._is("reduction")
        if not at.any():
            return
        join = self._join(at)
        largest = join.first_largest(self.inputs.numel[join.inputs])
        numel, summed = self._of(self.inputs.numel, largest), self._of(self.inputs.norm, largest)
        k = numel / np.maximum(self.outputs.numel, 1.0)
        grown = units * blocked(k) * np.maximum(1.0, np.where(average, 1 / k, 1.0) * summed / norm)
        own[at] = np.where(numel > self.outputs.numel, grown, units)[at]

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

    # ---------------------------------------------------------------- what the inputs' errors explain
    def _carried(self, norm: Array, product: Product, sharp: Array) -> Array:
        kinds, worst = self.carry_kind, self.worst
        # Of few elements with an error near 0 none is expected to flip. In many calls one does.
        branch = self.factor * worst + FLIPPED * np.sqrt(self.saved + 1 / np.maximum(self.outputs.numel, 1.0))
        pole = self.factor * worst + FLIPPED * np.sqrt(self.saved)
        carried = np.where(self._is("smooth", kinds), self.factor * worst, branch)
        carried = np.where(self._is("pole", kinds), pole, carried)
        carried = np.where(self._is("attention", kinds), self.factor * worst * sharp, carried)
        carried = np.where(self._is("sign", kinds), self.factor * (worst + np.sqrt(worst)), carried)
        inverse = self._is("inverse", kinds)
        if inverse.any():
            carried = np.where(inverse, self.factor * worst * self._of_inverses(), carried)
        plain = inverse | np.isin(kinds, [CARRY.index(kind) for kind in ("smooth", "attention", "branch", "pole", "sign")])
        join = self._join(self.deviating & ~plain)
        if len(join.outputs):
            absolute, numel = self.inputs.absolute[join.inputs], self.inputs.numel[join.inputs]
            wide = self.outputs.numel[join.outputs]
            repeated = absolute * np.sqrt(np.maximum(1.0, wide / np.maximum(numel, 1.0)))
            summed = absolute * np.maximum(1.0, numel / np.maximum(wide, 1.0)) ** 0.25
            linear = self.factor * np.maximum(worst, join.sum(repeated) / norm)
            added = self.factor * np.maximum(worst, join.sum(summed) / norm)
            # exp(x + e) = exp(x) (1 + e): what counts is the absolute error, however large a mask makes the norm.
            apart = join.most(absolute / np.sqrt(np.maximum(numel, 1.0)), 0.0)
            exponential = self.factor * np.maximum(worst, apart)
            others = np.where(product.is_added(join), repeated, 0.0)  # a bias, repeated for every row
            bilinear = self.factor * (product.relative * product.scale + join.sum(others) / norm)
            for kind, found in (("linear", linear), ("sum", added), ("exponential", exponential), ("bilinear", bilinear)):
                carried = np.where(self._is(kind, kinds), found, carried)
        # An index or a mask flips where two numbers nearly tie, too.
        return np.where(self.deviating, np.where(self.outputs.roundoff == 0, branch, carried), 0.0)

    def _of_inverses(self) -> Array:
        """Return the root mean square of 1/x times that of x, at least 1: 1 where all elements are of one size."""
        root = self.names.table(is_root)[self.op]
        first = np.where(self.count > 0, self.first, NONE)
        return np.asarray(np.maximum(1.0, self._of(self.inputs.rms, first) * self.outputs.rms ** np.where(root, 2, 1)))

    # ---------------------------------------------------------------- products
    def _product(self, norm: Array) -> Product:
        """Find the two factors of bilinear outputs and how many of their products are summed into one element."""
        at = self._is("bilinear") | self._is("bilinear", self.carry_kind)
        found = Product.nothing(len(at))
        if not at.any():
            return found
        join, out, inputs, slot = self._join(at), self.outputs, self.inputs, self.names.number
        its = inputs.slot[join.inputs]
        gradient = join.first(its == slot("grad_output.0"))
        backward = gradient >= 0
        operand = self.names.table(is_argument)[its] & (its != self._forward_slots()[out.slot][join.outputs])
        bias_first = self.names.table(_takes_bias_first)[self.op]
        operand &= ~(bias_first[join.outputs] & (its == slot("input.0")))
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
        k = np.where(backward, inner, self._inner_length(one, two))
        scale = np.sqrt(out.numel * k) * self._of(inputs.rms, one) * self._of(inputs.rms, two) / norm
        k_summed = np.maximum(numel / np.maximum(out.numel, 1.0), 1.0)
        found.k = np.where(times, k, np.where(summed & (one >= 0), k_summed, 1.0))
        found.scale = np.where(times, scale, np.where(summed, self._of(inputs.norm, one) / norm, 1.0))
        found.scale = np.maximum(found.scale, 1.0)
        found.one, found.two = one, two
        found.all = at & (one < 0) & (two < 0)
        found.biased = at & ~backward & ~self.names.table(is_convolution_backward)[self.op]
        relative = self._of(inputs.relative, one) + self._of(inputs.relative, two)
        relative = np.where(summed, relative * k_summed**0.25, relative)  # partly coherent, as in any sum
        found.relative = np.where(found.all, join.sum(inputs.relative[join.inputs]), relative)
        return found

    def _forward_slots(self) -> Numbers:
        """Return, by number of a gradient's slot, that of the slot it is the gradient of."""
        plain = [name.removeprefix("grad_") for name in self.names.names]
        return np.array([*map(self.names.number, plain), NONE])

    def _forward_factors(self, join: Join, its: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return the operands that are multiplied where no gradient is among them, and how they are found."""
        out, number = self.outputs, self.names.number
        wanted = np.full((2, len(out.slot)), NONE, np.int64)
        kind = np.zeros(len(out.slot), np.int64)
        for name, factors in OPERANDS.items():
            named = self.names.table(normalised) == name
            wanted[:, named[self.op]] = np.array([number(f) for f in factors])[:, None]
        convolution = self.names.table(is_convolution_backward)[self.op]
        kind[convolution] = SUMMED
        for slot, factors in CONVOLUTION_BACKWARD.items():
            at = convolution & (out.slot == number(slot))
            wanted[:, at] = np.array([number(f) for f in factors])[:, None]
            kind[at] = 0
        given = (wanted[0] >= 0)[join.outputs]
        plain = ~given & (its != number("input.bias"))
        first = join.first((given & (its == wanted[0][join.outputs])) | plain)
        later = np.arange(len(self.inputs.slot))[join.inputs] > first[join.outputs]
        second = join.first((given & (its == wanted[1][join.outputs])) | (plain & later))
        return first, second, kind

    def _inner_length(self, one: Numbers, two: Numbers) -> Array:
        """Return how many products are summed into one element."""
        numel = self.inputs.numel
        found = self._size(one, -1)
        convolution = self.names.table(is_convolution)[self.op]  # forward or backward
        if not convolution.any():
            return found
        backward = self.names.table(is_convolution_backward)[self.op]
        weight = self.outputs.slot == self.names.number("output.1")  # its gradient: over batch and positions
        of_weight = self._of(numel, one) / np.maximum(self._size(one, 1), 1.0)
        of_input = self._of(numel, two) / np.maximum(self._size(two, 1), 1.0)
        forward = self._of(numel, two) / np.maximum(self._size(two, 0), 1.0)
        found = np.where(convolution, np.maximum(forward, 1.0), found)
        return np.where(backward, np.maximum(np.where(weight, of_weight, of_input), 1.0), found)

    # ---------------------------------------------------------------- outputs beside their inputs
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


def _takes_bias_first(op: str) -> bool:
    return normalised(op) in OPERANDS


SUMMED = 1
"""Kind of an output that is a sum of one operand: a bias's gradient."""
