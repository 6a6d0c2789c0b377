"""Whether a call computed well what it was given: its error against a float64 truth of the same inputs, beside the baseline's.

>>> truth = np.array([1.0, 2.0, 3.0])
>>> target, baseline = (Distance.of(truth, truth + e) for e in (1e-3, 1e-8))
>>> found = judge(Operation("aten::tanh"), "float32", target, baseline, rounding=2e-6)
>>> found.verdict, round(found.ratio), found.sentence
('wrong', 100000, 'its error is 4.6e-04 of the result, 100,000 times the baseline's; rounding explains 2.0e-06')

Nothing here reads a tensor but `Distance.of`, of NumPy arrays; a device fills a `Distance` with its own sums. Factors and
their origins are in ``facts/rounding.toml``, by class of operator.

What rounding alone explains of a call's outputs, whoever computes it, by the criterion (`verdict.budget`), inputs being equal:

>>> a, b = Operand("input.0", "float32", (64, 512), 181.0, 4.5), Operand("input.1", "float32", (512, 64), 181.0, 4.5)
>>> rounding(Operation("aten::mm"), [a, b], [Operand("output.0", "float32", (64, 64), 1448.0, 90.0)])
{'output.0': 8.6e-07}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.comparison.verdict.budget import Calls, Explanation, Tensors
from trueup.foundation.facts import operators
from trueup.foundation.facts.criteria import Criterion, load
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import SINGLE, UNIT_ROUNDOFF, roundoff
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.store.declared import Precision

PLAIN = Precision()


@dataclass(frozen=True, slots=True)
class Operation:
    """What is known of a call by name: it chooses the class and the formula."""

    op: str  # as recorded: ``aten::mm``, ``torch.nn.functional.linear``
    level: str = "aten"
    phase: str = "forward"

    @property
    def backward(self) -> bool:
        """Whether it computes gradients."""
        return self.phase == "backward" or has(self.op, "backward")


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a call, by its numbers: of the baseline, or of the truth."""

    slot: str
    dtype: str  # of the computation, ``float32``: not of the float64 truth
    shape: tuple[int, ...]
    l2: float  # of its finite elements, masks left out
    largest: float = math.nan  # largest magnitude among those


@lru_cache(maxsize=1)
def criterion() -> Criterion:
    """Return the table whose units and formulas are used."""
    return load("default")


def rounding(
    operation: Operation, inputs: Sequence[Operand], outputs: Sequence[Operand], precision: Precision = PLAIN
) -> dict[str, float]:
    """Return for each floating-point output the error that rounding explains, relative to its norm (0: none, or nothing known);
    one that is all zero has the absolute root mean square of its terms' errors instead. ``inputs`` are in the order of the slots,
    ``outputs`` have the norms of the truth, ``precision`` is what the device declares about float32 products."""
    names, table = Vocabulary(), criterion()
    row = table.row(operation.op, operation.level, operation.phase)
    kept = [o for o in outputs if roundoff(o.dtype) > 0]
    if not kept:
        return {o.slot: 0.0 for o in outputs}
    calls = Calls(
        np.array([table.rows.index(row)]), np.array([names.number(operation.op)]), np.array([operation.level == "aten"]),
        np.array([operation.phase == "optimizer"]), np.zeros(1), np.zeros(1),
    )  # fmt: skip
    narrowest = max(_unit(o.dtype) for o in kept)
    own = Explanation(_tensors(kept, names), _tensors(inputs, names), calls, table, precision, names, narrowest).explain().own
    terms = max((o.l2 / math.sqrt(max(math.prod(o.shape), 1)) for o in inputs if math.isfinite(o.l2)), default=0.0)
    found = {o.slot: 0.0 for o in outputs}
    for output, relative in zip(kept, own.tolist(), strict=True):
        unit = _unit(output.dtype)
        if not output.l2 > 0:
            relative = row.ulps * unit * terms
        coarse = UNIT_ROUNDOFF[output.dtype]
        found[output.slot] = relative + (storing(operation) * coarse if coarse > SINGLE else 0.0)
    return found


@lru_cache(maxsize=4096)
def storing(operation: Operation) -> float:
    """Return how many units of its dtype a 16-bit or 8-bit result may be off a truth, which is not rounded: one, for it is
    stored. And what the criterion grants two results that are both stored (`trueup.comparison.verdict.budget`)."""
    row = criterion().row(operation.op, operation.level, operation.phase)
    roundings = row.roundings if operation.level == "aten" else max(row.roundings, 2.0)
    return 1.0 + (0.0 if row.own == "exact" else math.sqrt(roundings))


def _unit(dtype: str) -> float:
    """Return the unit roundoff of the arithmetic: kernels of narrow dtypes compute in float32."""
    return min(roundoff(dtype), SINGLE)


def _tensors(operands: Sequence[Operand], names: Vocabulary) -> Tensors:
    kept = [o for o in operands if roundoff(o.dtype) > 0] if operands else []
    zero = np.zeros(len(kept))
    return Tensors(
        np.zeros(len(kept), np.int64), np.array([names.number(o.slot) for o in kept], np.int64), zero, zero,
        np.array([o.l2 for o in kept], np.float64), np.array([math.prod(o.shape) for o in kept], np.float64),
        np.array([_unit(o.dtype) for o in kept], np.float64), zero,
        lambda at, dimension: np.array([_size(kept[n].shape, dimension) for n in at.tolist()], np.float64),
    )  # fmt: skip


def _size(shape: tuple[int, ...], which: int) -> float:
    return float(shape[which]) if -len(shape) <= which < len(shape) else 1.0


Word = Literal["accurate", "suspicious", "wrong", "ill-conditioned", "could not tell"]

WORDS: tuple[Word, ...] = ("wrong", "suspicious", "ill-conditioned", "could not tell", "accurate")
"""From worst to best."""

BLOCK = 1 << 15
"""Elements that are measured at a time: four arrays of float64 of that size fit into a second-level cache of 1 MB."""
NEAR = 1 - 2.0**-7
"""From this share of a dtype's largest number on an element is a mask or has overflowed: its place is compared, not its value."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a result is from the truth; sums over elements that are finite on both sides and no mask. Complex counts twice."""

    counted: int
    """Elements that count."""
    differing: int
    """Of those, how many are not the same number."""
    rms: float
    """Root mean square of the differences."""
    largest: float
    """Largest difference."""
    truth_rms: float
    truth_largest: float
    disagreeing: int
    """Elements where one side has a NaN, an Inf or a mask and the other has not the same."""
    saturated: int = 0
    """Elements that hold the dtype's largest number where the truth is beyond it: no Inf, which a device may be set to."""

    @property
    def relative(self) -> float:
        """``rms / truth_rms``: 0 where nothing differs, Inf where only the truth is zero."""
        if self.rms == 0:
            return 0.0
        return self.rms / self.truth_rms if self.truth_rms > 0 else math.inf

    @staticmethod
    def of(truth: NDArray[Any], result: NDArray[Any]) -> Distance:
        """Measure a result of any dtype against a truth (float64, complex128, integers); raise `ValueError` where the shapes
        differ."""
        if truth.shape != result.shape:
            raise ValueError(f"expected two equal shapes, got {truth.shape} and {result.shape}")
        limit = _largest(result.dtype)
        if limit is None:
            return _of_integers(truth, result)
        plain = _in_blocks(truth, result, NEAR * limit) if math.isfinite(limit) else None
        if plain is not None:
            return plain
        a, b = _reals(truth), _reals(result)
        kinds_a, kinds_b = _kinds(a, limit), _kinds(b, limit)
        saturated = (np.abs(a) > limit) & (kinds_a == kinds_b) & np.isfinite(b)
        kept = (kinds_a == 0) & (kinds_b == 0)
        disagreeing = int(np.count_nonzero(kinds_a != kinds_b))
        return _of_reals(a[kept], b[kept], disagreeing, int(np.count_nonzero(saturated)))


def _largest(dtype: np.dtype[Any]) -> float | None:
    if dtype.kind in "fc":
        return float(np.finfo(dtype).max)
    if dtype.kind in "biuM":
        return None
    return float(ml_dtypes.finfo(dtype).max)


def _reals(values: NDArray[Any]) -> NDArray[np.float64]:
    if values.dtype.kind == "c":
        return np.ascontiguousarray(values, np.complex128).reshape(-1).view(np.float64)
    return np.ascontiguousarray(values).reshape(-1).astype(np.float64, copy=False)


def _kinds(values: NDArray[np.float64], limit: float) -> NDArray[np.int8]:
    """Return 0 for plain numbers, 1 for NaN, 2 and 3 for what is as large as a number can be, with its sign."""
    found = np.zeros(values.shape, np.int8)
    found[np.isnan(values)] = 1
    found[values >= NEAR * limit] = 2
    found[values <= -NEAR * limit] = 3
    return found


def _in_blocks(truth: NDArray[Any], result: NDArray[Any], limit: float) -> Distance | None:
    """Measure numbers of ordinary size, a piece at a time that fits into the caches; None where one of them is not."""
    a, b = _flat(truth), _flat(result)
    buffer = np.empty(min(BLOCK, a.size))
    differing, apart, square, largest, scale = 0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, a.size, BLOCK):
        x, y = (v[start : start + BLOCK].astype(np.float64, copy=False) for v in (a, b))
        size, other = max(x.max(), -x.min()), max(y.max(), -y.min())
        if not (size < limit and other < limit):  # NaN, too
            return None
        d = np.subtract(y, x, out=buffer[: x.size])
        differing += int(np.count_nonzero(d))
        apart, square = apart + float(np.dot(d, d)), square + float(np.dot(x, x))
        largest, scale = max(largest, float(d.max()), -float(d.min())), max(scale, float(size))
    if any(0 < size <= 1e-140 or size >= 1e140 for size in (largest, scale)):  # their squares leave float64
        return None
    count = max(a.size, 1)
    return Distance(a.size, differing, math.sqrt(apart / count), largest, math.sqrt(square / count), scale, 0)


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    """Return the real numbers of an array in a row, in their own dtype."""
    row = np.ascontiguousarray(values).reshape(-1)
    return row.view(row.real.dtype) if values.dtype.kind == "c" else row


def _of_reals(a: NDArray[np.float64], b: NDArray[np.float64], disagreeing: int, saturated: int) -> Distance:
    count = a.size
    if not count:
        return Distance(0, 0, 0.0, 0.0, 0.0, 0.0, disagreeing, saturated)
    apart = np.abs(b - a)
    largest, scale = float(apart.max()), float(np.abs(a).max())
    return Distance(
        count, int(np.count_nonzero(apart)), _rms(apart, largest), largest, _rms(a, scale), scale, disagreeing, saturated
    )  # fmt: skip


def _rms(values: NDArray[np.float64], largest: float) -> float:
    """Return the root mean square, scaled where squares would leave float64."""
    if largest == 0:
        return 0.0
    if 1e-140 < largest < 1e140:
        return math.sqrt(float(np.dot(values, values)) / values.size)
    scaled = values / largest
    return largest * math.sqrt(float(np.dot(scaled, scaled)) / values.size)


def _of_integers(truth: NDArray[Any], result: NDArray[Any]) -> Distance:
    a, b = truth.reshape(-1), result.reshape(-1)
    if a.dtype.kind in "fc":  # a truth in float64 of what is an integer
        a = np.where(np.isfinite(a), a, 0).astype(np.int64) if a.dtype.kind == "f" else a
    unequal = a != b
    apart = np.abs(b[unequal].astype(np.float64) - a[unequal].astype(np.float64))
    largest = float(apart.max()) if apart.size else 0.0
    scale = float(np.abs(a.astype(np.float64)).max()) if a.size else 0.0
    rms = math.sqrt(float(np.dot(apart, apart)) / max(a.size, 1))
    return Distance(a.size, int(apart.size), rms, largest, _rms(a.astype(np.float64), scale), scale, 0)


@dataclass(frozen=True, slots=True)
class Class:
    """How much worse than the baseline operators of a kind may compute (``facts/rounding.toml``)."""

    name: str
    factor: float
    backward: float
    origin: str
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The table."""

    certain: float
    perturbed: float
    classes: dict[str, Class]  # by the name of a row of the criterion

    def of(self, operation: Operation) -> Class:
        """Return the class of an operator: that of its row in the criterion."""
        return self.classes[criterion().row(operation.op, operation.level, operation.phase).name]


@lru_cache(maxsize=1)
def thresholds() -> Thresholds:
    """Return the table, read once."""
    rounding = operators.rounding()
    replay = rounding["replay"]
    classes = {name: Class(name, **its) for name, its in replay["class"].items()}
    return Thresholds(replay["certain"], replay["perturbed"], {row["name"]: classes[row["replay"]] for row in rounding["row"]})


@dataclass(frozen=True, slots=True)
class LocalError:
    """What is said of one output."""

    verdict: Word
    ratio: float  # error over the baseline's own; Inf where that is zero, NaN without a baseline
    excess: float  # error over what is explained: above 1 suspicious. Its larger one of root mean square and largest element.
    error: float  # relative root mean square error of the target
    baseline: float  # of the baseline; NaN without one
    explained: float  # relative to the truth, as `error` is
    rule: str  # class of the operator, and what decided
    origin: str  # where its threshold comes from
    sentence: str


def judge(
    operation: Operation, dtype: str, target: Distance, baseline: Distance | None = None, *, rounding: float = 0.0,
    perturbed: Distance | None = None, identical: bool = False,
) -> LocalError:  # fmt: skip
    """Judge one output (of ``dtype``) of a call that was given the truth's inputs: ``target`` and ``baseline`` are the distances
    of both from the truth (None: no baseline), ``identical`` says they are bitwise the same. ``rounding`` is the relative error
    that rounding explains (absolute where the truth is all zero), ``perturbed`` the distance of the truth of inputs moved by one
    unit in their last place, None if not known."""
    kind = thresholds().of(operation)
    factor = kind.backward if operation.backward else kind.factor
    own = math.nan if baseline is None else baseline.relative
    ratio = math.nan if baseline is None else _over(target.rms, baseline.rms)

    def found(verdict: Word, rule: str, sentence: str, excess: float = 0.0, explained: float = 0.0) -> LocalError:
        return LocalError(verdict, ratio, excess, target.relative, own, explained, f"{kind.name}: {rule}", kind.origin, sentence)

    if identical:
        return found("accurate", "equal", "bitwise the baseline's result")
    if target.disagreeing > (0 if baseline is None else baseline.disagreeing):
        beside = "" if baseline is None else f", where the baseline has {baseline.disagreeing}"
        text = f"{target.disagreeing} elements have NaN, Inf or an extreme number at a different place than the truth{beside}"
        return found("wrong", "not finite", text, math.inf)
    if dtype.startswith(("int", "uint", "bool")):
        return _of_indices(kind, target, baseline, found)
    if target.saturated and (baseline is None or not baseline.saturated):
        text = f"{target.saturated} elements hold the largest {dtype} where the truth is beyond it: the device saturates"
        return found("suspicious", "saturation", text, 1.0)
    return _of_numbers(kind, factor, rounding, target, baseline, perturbed, found)


def _of_indices(kind: Class, target: Distance, baseline: Distance | None, found: Any) -> LocalError:
    share = target.differing / max(target.counted, 1)
    if not target.differing:
        return found("accurate", "integers", "every element is the truth's")  # type: ignore[no-any-return]
    if baseline is None:
        word: Word = "suspicious" if kind.exact else "could not tell"
        why = "ties may be broken differently" if kind.exact else "what is rounded before may decide them"
        text = f"{share:.2%} of the elements are not the truth's; {why}, and there is no baseline"
        return found(word, "integers", text, share)  # type: ignore[no-any-return]
    allowed = max(kind.factor * baseline.differing, 0.0)
    excess = target.differing / allowed if allowed else math.inf
    text = f"{target.differing} elements are not the truth's, {baseline.differing} of the baseline's"
    return found("accurate" if excess <= 1 else "wrong", "integers", text, excess)  # type: ignore[no-any-return]


def _of_numbers(
    kind: Class, factor: float, rounding: float, target: Distance, baseline: Distance | None, perturbed: Distance | None, found: Any
) -> LocalError:  # fmt: skip
    table = thresholds()
    if kind.exact and baseline is not None and baseline.rms == 0 and target.rms > 0 and target.truth_rms > 0:
        rounding = min(rounding, target.relative / table.certain / 2)  # the baseline shows that nothing is rounded here
    scale = target.truth_rms or 1.0  # of zeros: `rounding` is absolute
    explained = max(factor * (baseline.rms if baseline else 0.0), rounding * scale)
    widest = max(target.truth_largest, 4 * target.truth_rms) or 1.0
    explained_largest = max(factor * (baseline.largest if baseline else 0.0), rounding * widest)
    one = _over(target.largest, explained_largest)
    excess = max(_over(target.rms, explained), one)
    word: Word = "accurate" if excess <= 1 else "suspicious" if excess <= table.certain else "wrong"
    by_rounding = baseline is None or explained > factor * baseline.rms
    rule = f"rounding of {rounding:.1e}" if by_rounding else f"{factor:g} times the baseline's error"
    size = f"{target.relative:.1e} of the result" if target.truth_rms else f"{target.rms:.1e} where the truth is zero"
    if word != "accurate" and perturbed is not None and excess <= table.perturbed * _moved(perturbed, explained, explained_largest):
        text = f"its error is {size}, and one unit in the last place of the inputs moves the result by {perturbed.relative:.1e}"
        return found("ill-conditioned", "perturbed inputs", text, excess, explained / scale)  # type: ignore[no-any-return]
    words = _words(size, target, baseline, rounding)
    if one > 1 >= _over(target.rms, explained):
        words = f"its error is {size}, and {target.largest:.1e} in one element; there rounding explains {explained_largest:.1e}"
    return found(word, rule, words, excess, explained / scale)  # type: ignore[no-any-return]


def _words(size: str, target: Distance, baseline: Distance | None, rounding: float) -> str:
    if baseline is None:
        return f"its error is {size}; rounding explains {rounding:.1e}"
    times = _over(target.rms, baseline.rms)
    number = f"{times:.3g}" if times < 1000 else f"{times:,.0f}"
    beside = "the baseline has none" if math.isinf(times) else f"{number} times the baseline's"
    return f"its error is {size}, {beside}; rounding explains {rounding:.1e}"


def _moved(perturbed: Distance, explained: float, explained_largest: float) -> float:
    return max(_over(perturbed.rms, explained), _over(perturbed.largest, explained_largest))


def _over(error: float, explained: float) -> float:
    return error / explained if explained > 0 else math.inf if error > 0 else 0.0
