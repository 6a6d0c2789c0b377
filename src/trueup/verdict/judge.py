"""Is the error of a call explained by rounding and by the errors of its inputs? One rule of the criterion decides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from trueup.verdict.criteria import UNIT_ROUNDOFF, Criterion, Row
from trueup.verdict.measure import Measured, SlotError, is_overwritten
from trueup.verdict.precision import Precision
from trueup.verdict.streams import Stream, is_input, is_output

OPERANDS: dict[str, tuple[str, str]] = {
    "addmm": ("input.1", "input.2"), "baddbmm": ("input.1", "input.2"), "addbmm": ("input.1", "input.2"),
    "addmv": ("input.1", "input.2"),
}  # fmt: skip
"""The factors of a bilinear operator, where they are not its first two tensors."""

CONVOLUTION_BACKWARD: dict[str, tuple[str, str]] = {
    "output.0": ("input.0", "input.2"), "output.1": ("input.0", "input.1"),
}  # fmt: skip
"""Factors per output of ``convolution_backward(grad_output, input, weight)``."""


@dataclass(slots=True)
class Operand:
    """The numbers of a floating-point slot that explanations use, of the baseline."""

    slot: str
    relative: float
    absolute: float
    norm: float
    numel: float
    roundoff: float
    shape: tuple[int, ...]

    @property
    def rms(self) -> float:
        """Root mean square."""
        return self.norm / math.sqrt(self.numel) if self.numel else 0.0


@dataclass(slots=True)
class Judged:
    """A measured call with its verdict: ``expected`` explains ``error_out``, ``own`` is the part that rounding explains."""

    call: Measured
    row: Row
    error_in: float
    error_out: float
    own: float
    expected: float
    worst: str | None
    """The output with the largest excess."""
    incomparable: str = ""
    """Why the outputs could not be compared, in full or in part."""
    unsized: bool = False
    """Whether an output is known to differ and not how much, so that it may be rounding."""
    role: str = "agrees"
    slot_expected: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """``error_out / expected``."""
        return _excess(self.error_out, self.expected)


def judge(
    measured: Iterable[Measured], baseline: Stream, candidate: Stream, criterion: Criterion, precision: Precision
) -> list[Judged]:
    """Judge every measured call. A backward call also sees the errors of its forward call, whose tensors it saved."""
    by_seq: dict[int, Measured] = {}
    inside = _roundoffs_inside(baseline), _roundoffs_inside(candidate)
    judged = []
    for call in measured:
        by_seq[call.candidate.seq] = call
        origin = call.candidate.forward_seq if call.candidate.phase == "backward" else None
        forward = by_seq.get(origin) if origin is not None else None
        lowest = max(inside[0].get(call.baseline.seq, 0.0), inside[1].get(call.candidate.seq, 0.0))
        judged.append(_judge_call(call, forward, baseline, candidate, criterion, precision, lowest))
    return judged


def _roundoffs_inside(stream: Stream) -> dict[int, float]:
    """Return, per call, the unit roundoff of the lowest precision that the calls inside it compute in (autocast)."""
    lowest: dict[int, float] = {}
    for call in sorted(stream.calls, key=lambda c: -c.seq):  # a call is numbered before what runs inside it
        if call.parent is not None:
            own = max((UNIT_ROUNDOFF.get(stream.dtype[k] or "", 0.0) for k in call.slots.values()), default=0.0)
            lowest[call.parent] = max(lowest.get(call.parent, 0.0), lowest.get(call.seq, 0.0), own)
    return lowest


def _judge_call(
    call: Measured,
    forward: Measured | None,
    baseline: Stream,
    candidate: Stream,
    criterion: Criterion,
    precision: Precision,
    lowest: float,
) -> Judged:
    row = criterion.row(call.candidate.op, call.candidate.level, call.candidate.phase)
    errors = [e for e in call.slots.values() if is_input(e.slot) and not is_overwritten(e, call)]
    if forward is not None and call.candidate.level != "aten":
        errors += forward.slots.values()
    measured = [e for e in errors if not math.isnan(e.absolute)]
    inputs = [_operand(e, baseline, candidate) for e in measured if _is_float(baseline.dtype[e.baseline])]
    result = Judged(call, row, max((e.relative for e in measured), default=0.0), 0.0, 0.0, 0.0, None)
    discrete = any(e.absolute != 0 and not _is_float(baseline.dtype[e.baseline]) for e in measured)
    for error in call.slots.values():
        if not is_output(error.slot):
            continue
        if math.isnan(error.absolute):
            result.incomparable = error.reason or "not measured"
            continue
        own, expected = _explain(row, error, inputs, call, baseline, candidate, precision, lowest)
        if discrete or not math.isfinite(result.error_in):
            expected = math.inf  # an index, a mask or a NaN differs: any output is explained
        elif not errors and call.candidate.phase == "collective" and _excess(error.relative, expected) > criterion.suspect:
            expected, result.incomparable = math.inf, "its result differs, and what the other ranks sent is not followed"
        elif len(measured) < len(errors) and _excess(error.relative, expected) > criterion.suspect:
            expected, result.incomparable = math.inf, "its result differs, and not all of its inputs were measured"
        if error.unsized and (row.own != "exact" or result.error_in > 0) and _is_float(baseline.dtype[error.baseline]):
            result.unsized = True
        result.slot_expected[error.slot] = expected
        if result.worst is None or _excess(error.relative, expected) > _excess(result.error_out, result.expected):
            result.worst, result.error_out, result.own, result.expected = error.slot, error.relative, own, expected
    if any(is_output(s) for s in call.one_sided):
        result.incomparable = f"only one side has {', '.join(call.one_sided[:3])}"
    return result


def _excess(error: float, expected: float) -> float:
    if error == 0 or expected == math.inf:
        return 0.0
    return error / expected if expected > 0 else math.inf


def _is_float(dtype: str | None) -> bool:
    return dtype in UNIT_ROUNDOFF


def _operand(error: SlotError, baseline: Stream, candidate: Stream) -> Operand:
    k = error.baseline
    return Operand(
        error.slot, error.relative, error.absolute, error.norm if not math.isnan(error.norm) else 0.0,
        float(baseline.numel[k]), _roundoff(error, baseline, candidate), baseline.shape[k] or (),
    )  # fmt: skip


def _roundoff(error: SlotError, baseline: Stream, candidate: Stream) -> float:
    dtypes = baseline.dtype[error.baseline], candidate.dtype[error.candidate]
    return max(UNIT_ROUNDOFF.get(d or "", 0.0) for d in dtypes)


def _explain(
    row: Row,
    error: SlotError,
    inputs: list[Operand],
    call: Measured,
    baseline: Stream,
    candidate: Stream,
    precision: Precision,
    lowest: float,
) -> tuple[float, float]:
    """Return ``(own, own + carried)``, both relative to the norm of the output."""
    out = _operand(error, baseline, candidate)
    unit = out.roundoff
    if row.random and any(o.roundoff for o in inputs):
        unit = max(unit, max(o.roundoff for o in inputs))
    op = call.candidate.op
    rounded = (precision.convolution if "conv" in op.lower() else precision.matmul) if unit == UNIT_ROUNDOFF["float32"] else 0.0
    if row.own == "composite" and unit and call.candidate.level != "aten" and call.candidate.phase != "optimizer":
        unit = max(unit, lowest, *(o.roundoff for o in inputs))  # what a function computes in shows in what it holds
    if row.matmul and row.own == "composite":
        unit = max(unit, rounded)
        rounded = 0.0
    if out.norm == 0 or not math.isfinite(out.norm):
        return 0.0, _of_nothing(row, unit, error, inputs)
    product = _product(op, out, inputs) if row.own == "bilinear" or row.carry == "bilinear" else None
    own = _own(op, row, unit, rounded, out, inputs, product)
    return own, own + _carried(row, out, inputs, product)


def _of_nothing(row: Row, unit: float, error: SlotError, inputs: list[Operand]) -> float:
    """Explain an output that is exactly zero on the baseline (or has nothing finite): all of it, or nothing.

    Relative errors mean nothing there. What is left where terms cancel is a rounding of the terms, not of the result.
    """
    if any(o.absolute for o in inputs):
        return math.inf
    terms = max((o.norm for o in inputs), default=0.0)
    return math.inf if row.own != "exact" and error.absolute <= row.ulps * unit * terms else 0.0


@dataclass(slots=True)
class _Product:
    """A sum of ``k`` products of two factors; ``scale`` is its norm had nothing cancelled, relative to the norm it has."""

    k: float
    scale: float
    factors: list[Operand]


def _product(op: str, out: Operand, inputs: list[Operand]) -> _Product:
    """Find the two factors of an output and how many of their products are summed into one element of it."""
    by_slot = {o.slot: o for o in inputs}
    name = op.rpartition("::")[2]
    gradient = by_slot.get("grad_output.0")
    if gradient is not None:  # the backward of an api call: the gradient times the other operand, or summed for a bias
        others = [o for o in inputs if o.slot.startswith("input.") and not _same_slot(o.slot, out.slot)]
        other = max(others, key=lambda o: o.numel, default=None)
        if other is None or out.slot in ("grad_input.2", "grad_input.bias"):
            return _summed(gradient, out)
        return _times(gradient, other, math.sqrt(gradient.numel * other.numel / max(out.numel, 1.0)), out)
    if name.startswith("convolution_backward"):
        names = CONVOLUTION_BACKWARD.get(out.slot)
        if names is None:
            return _summed(by_slot.get("input.0", out), out)
    else:
        names = OPERANDS.get(name)
    factors = [by_slot[n] for n in names if n in by_slot] if names else [o for o in inputs if o.slot != "input.bias"][:2]
    if len(factors) < 2:
        return _Product(1.0, 1.0, factors or inputs)
    return _times(factors[0], factors[1], _inner_length(name, out, *factors), out)


def _same_slot(forward: str, gradient: str) -> bool:
    return gradient.removeprefix("grad_") == forward


def _times(a: Operand, b: Operand, k: float, out: Operand) -> _Product:
    # Products of independent elements: k of them add up to sqrt(k) times the product of the root mean squares.
    return _Product(k, max(1.0, math.sqrt(out.numel * k) * a.rms * b.rms / out.norm), [a, b])


def _summed(a: Operand, out: Operand) -> _Product:
    return _Product(max(a.numel / max(out.numel, 1.0), 1.0), max(1.0, a.norm / out.norm), [a])


def _inner_length(name: str, out: Operand, a: Operand, b: Operand) -> float:
    """Return how many products are summed into one element."""
    if name.startswith("convolution_backward"):
        if out.slot == "output.1":  # the weight's gradient: over batch and positions
            channels = a.shape[1] if len(a.shape) > 1 else 1
            return max(a.numel / max(channels, 1), 1.0)
        return max(b.numel / max(b.shape[1] if len(b.shape) > 1 else 1, 1), 1.0)
    if "conv" in name:
        return max(b.numel / max(b.shape[0] if b.shape else 1, 1), 1.0)
    return float(a.shape[-1]) if a.shape else 1.0


def _own(
    op: str, row: Row, unit: float, rounded: float, out: Operand, inputs: list[Operand], product: _Product | None
) -> float:
    units = row.ulps * unit
    if row.own == "additive":
        return units * max(1.0, sum(o.norm for o in inputs if o.numel <= out.numel) / out.norm)
    if row.own == "bilinear" and product is not None:
        return (units * _blocked(product.k) + 2 * rounded) * product.scale
    if row.own in ("reduction", "average"):
        largest = max(inputs, key=lambda o: o.numel, default=None)
        if largest is None or largest.numel <= out.numel:
            return units
        k = largest.numel / max(out.numel, 1.0)
        return units * _blocked(k) * max(1.0, (1 / k if row.own == "average" else 1.0) * largest.norm / out.norm)
    if row.own == "composite":
        return units * (_cancelled(out, inputs) if "backward" in op or "grad" in out.slot else _centred(out, inputs))
    return units


def _blocked(k: float) -> float:
    """Growth of the rounding error of a sum of ``k`` terms that is blocked by a device's width."""
    return 1 + math.sqrt(k) / 16


def _cancelled(out: Operand, inputs: list[Operand]) -> float:
    """Return how much of a gradient that a composite sums over the batch has cancelled, at least 1."""
    gradients = [o for o in inputs if o.slot.startswith("grad_output")] or inputs[:1]
    if not gradients or gradients[0].numel <= out.numel:
        return 1.0
    gradient = gradients[0]
    weight = max([1.0, *(o.rms for o in inputs if o is not gradient and o.numel >= gradient.numel)])
    return max(1.0, weight * gradient.norm / out.norm)


def _centred(out: Operand, inputs: list[Operand]) -> float:
    """Return how much larger than a mean the numbers are that it was taken of, at least 1; a variance does not cancel."""
    if not inputs or out.slot.endswith("var") or inputs[0].numel <= out.numel:
        return 1.0
    return max(1.0, inputs[0].rms / out.rms) if out.rms else 1.0


def _carried(row: Row, out: Operand, inputs: list[Operand], product: _Product | None) -> float:
    if not any(o.absolute for o in inputs):
        return 0.0
    worst = max(o.relative for o in inputs)
    if out.roundoff == 0:  # an index or a mask: it flips where two numbers nearly tie
        return row.factor * (worst + math.sqrt(worst))
    if row.carry == "linear":
        added = sum(o.absolute * math.sqrt(max(1.0, out.numel / max(o.numel, 1.0))) for o in inputs)
        return row.factor * max(worst, added / out.norm)
    if row.carry == "sum":
        added = sum(o.absolute * math.sqrt(math.sqrt(max(1.0, o.numel / max(out.numel, 1.0)))) for o in inputs)
        return row.factor * max(worst, added / out.norm)
    if row.carry == "bilinear" and product is not None:
        others = [o for o in inputs if all(o is not f for f in product.factors)]  # a bias, repeated for every row
        added = sum(o.absolute * math.sqrt(max(1.0, out.numel / max(o.numel, 1.0))) for o in others) / out.norm
        return row.factor * (sum(o.relative for o in product.factors) * product.scale + added)
    if row.carry == "exponential":
        # exp(x + e) = exp(x) (1 + e): what counts is the absolute error, however large a mask makes the norm.
        return row.factor * max(worst, *(o.absolute / math.sqrt(max(o.numel, 1.0)) for o in inputs))
    if row.carry == "smooth":
        return row.factor * worst
    return row.factor * (worst + math.sqrt(worst))
