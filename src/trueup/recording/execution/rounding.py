"""What rounding alone explains of a call's outputs, whoever computes it: the formulas of the criterion, for one call.

>>> a, b = Operand("input.0", "float32", (64, 512), 181.0, 4.5), Operand("input.1", "float32", (512, 64), 181.0, 4.5)
>>> rounding(Operation("aten::mm"), [a, b], [Operand("output.0", "float32", (64, 64), 1448.0, 90.0)])
{'output.0': 8.6e-07}

The units and formulas are those of ``facts/rounding.toml`` (`verdict.explain`), with inputs that
are equal on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trueup.comparison.graph.streams import Vocabulary
from trueup.comparison.measures.roundoff import SINGLE, UNIT_ROUNDOFF, roundoff
from trueup.comparison.verdict.criteria import Criterion, load
from trueup.comparison.verdict.explain import Explanation
from trueup.comparison.verdict.operands import Calls, Precision, Tensors
from trueup.foundation.facts.operators import has

PLAIN = Precision()


@dataclass(frozen=True, slots=True)
class Operation:
    """What is known of a call by name: it chooses the class and the formula."""

    op: str
    """As recorded: ``aten::mm``, ``torch.nn.functional.linear``."""
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
    dtype: str
    """Of the computation, ``float32``: not of the float64 truth."""
    shape: tuple[int, ...]
    l2: float
    """Of its finite elements, masks left out."""
    largest: float = math.nan
    """Largest magnitude among those."""


@lru_cache(maxsize=1)
def criterion() -> Criterion:
    """Return the table whose units and formulas are used."""
    return load("default")


def rounding(
    operation: Operation, inputs: Sequence[Operand], outputs: Sequence[Operand], precision: Precision = PLAIN
) -> dict[str, float]:
    """Return for each floating-point output the error that rounding explains, relative to its norm (0: none, or nothing known).

    An output that is all zero has the error of its terms instead, an absolute root mean square: relative errors mean nothing.

    Args:
        operation: the call.
        inputs: in the order of its slots.
        outputs: with the norms of the truth.
        precision: what the device declares about float32 products.
    """
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
    """Return how many units of its dtype a 16-bit or 8-bit result may be off a truth, which is not rounded: one, for it is stored.

    And what the criterion grants two results that are both stored (`trueup.comparison.verdict.explain`).
    """
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
        np.array([_unit(o.dtype) for o in kept], np.float64),
        lambda at, dimension: np.array([_size(kept[n].shape, dimension) for n in at.tolist()], np.float64),
    )  # fmt: skip


def _size(shape: tuple[int, ...], which: int) -> float:
    return float(shape[which]) if -len(shape) <= which < len(shape) else 1.0
