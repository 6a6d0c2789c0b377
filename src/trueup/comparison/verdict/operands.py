"""What the formulas of a criterion work on: tensors of matched calls, outputs beside inputs, products, and what names tell.

How float32 products are rounded, as the runs declare it: TF32 and HF32 are choices, not faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers
from trueup.comparison.verdict.criteria import TF32


@dataclass(frozen=True, slots=True)
class Precision:
    """How float32 matrix products are computed, as the two runs declare it."""

    matmul: float = 0.0
    convolution: float = 0.0


def precision_of(environments: Iterable[dict[str, str]], devices: Iterable[Iterable[str]]) -> Precision:
    """Read from two runs whether float32 products are rounded to TF32 or HF32 on their devices."""
    matmul = convolution = 0.0
    for environment, names in zip(environments, devices, strict=True):
        kinds = {name.partition(":")[0] for name in names}
        low = environment.get("float32_matmul_precision", "highest") != "highest"
        if "cuda" in kinds and (low or environment.get("cuda.matmul.allow_tf32") == "True"):
            matmul = TF32
        if "cuda" in kinds and environment.get("cudnn.allow_tf32") == "True":
            convolution = TF32
        for kind in kinds - {"cuda", "cpu"}:
            matmul = TF32 if environment.get(f"{kind}.matmul.allow_hf32") == "True" else matmul
            convolution = TF32 if environment.get(f"{kind}.conv.allow_hf32") == "True" else convolution
    return Precision(matmul, convolution)


@dataclass
class Tensors:
    """Floating-point slots of matched calls, of the baseline: an entry each, sorted by call."""

    call: Numbers
    """Which of the matched calls it belongs to."""
    slot: Numbers
    relative: Array
    absolute: Array
    norm: Array
    numel: Array
    roundoff: Array
    """Unit roundoff of the coarser dtype of the two sides; 0 for integers."""
    size: Callable[[Numbers, int], Array]
    """Returns one size of some of them, of the first dimension (0), the second (1) or the last (-1): 1 where there is none."""

    @cached_property
    def rms(self) -> Array:
        """Root mean square."""
        return np.where(self.numel > 0, self.norm / np.sqrt(np.maximum(self.numel, 1.0)), 0.0)


@dataclass(slots=True)
class Calls:
    """What the formulas need to know of matched calls: an entry each."""

    row: Numbers
    """Row of the criterion."""
    op: Numbers
    aten: Array
    """Whether it is one of the dispatcher's operators."""
    optimizer: Array
    lowest: Array
    """Unit roundoff of the lowest precision that the calls inside compute in (autocast)."""
    inside: Array
    """How many calls with nothing inside ran inside it; 0 where none was recorded."""

    def take(self, which: Numbers | range) -> Calls:
        """Return an entry for each of some calls, a call as often as it is named; a range gives views."""
        at = slice(which.start, which.stop) if isinstance(which, range) else which
        return Calls(*(getattr(self, column.name)[at] for column in fields(self)))


@dataclass(slots=True)
class Join:
    """Pairs of an output and a tensor that its call reads, sorted by both."""

    outputs: Numbers
    inputs: Numbers
    count: int
    """How many outputs there are."""

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
    relative: Array
    """Sum of the factors' relative errors."""
    one: Numbers
    two: Numbers
    all: Array
    """Whether the factors are not known, so that all inputs are taken for them."""
    biased: Array
    """Whether what is no factor is added to the product, as a bias is; a gradient's product is of two factors alone."""

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


def most(values: Array, of: Numbers, count: int, least: float = 0.0) -> Array:
    """Return the maximum of the values of each of ``count``, at least ``least``."""
    found = np.full(count, least)
    np.maximum.at(found, of, values)
    return found


def blocked(k: Array) -> Array:
    """Growth of the rounding error of a sum of ``k`` terms that is blocked by a device's width."""
    return 1 + np.sqrt(k) / 16


# What the formulas ask of a name; `Vocabulary.table` asks once per name.
Asked = Callable[[str], bool]


def _holds(part: str) -> Asked:
    return lambda name: part in name


def _begins(*parts: str) -> Asked:
    return lambda name: name.startswith(parts)


is_gradient_slot: Asked = _holds("grad")
"""Whether a slot holds a gradient."""
is_incoming_gradient: Asked = _begins("grad_output")
"""Whether a slot holds the gradient that a backward gets."""
is_result: Asked = _begins("output.")
"""Whether a slot holds a result of a forward."""
is_argument: Asked = _begins("input.")
"""Whether a slot holds an argument of a forward."""


def is_variance(slot: str) -> bool:
    """Tell whether a slot holds a variance."""
    return slot.endswith("var")


def element(slot: str) -> int:
    """Return which element of a list a slot is, NONE where it is none: ``input.1.3``, ``output.self.3`` and ``output.3`` are 3."""
    *head, last = slot.split(".")
    return int(last) if last.isdigit() and (len(head) > 1 or is_result(slot)) else NONE
