"""What one step leaves to the next: the weights and buffers that were read, and bad numbers that were written into them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, Vocabulary, is_input
from trueup.foundation.kernels.sketch import splitmix64

JUMP = 1e3
"""Growth of a weight's root mean square in one step from which the step is called bad. Adam moves a weight by about its learning
rate (Kingma and Ba 2015, section 2.1), SGD by lr times gradient: a thousandfold weight is no step of a training that converges.
Weights that were zero are held against 1 instead."""


@dataclass(slots=True)
class Lasting:
    """Tensors that the forward calls of a step read. All of them: where a model is made inside a capture, its first step makes
    weights."""

    keys: NDArray[np.uint64]
    """Sorted: level, scope, operator, ordinal and slot, as one number."""
    rms: Array
    numel: Array

    def before(self, keys: NDArray[np.uint64], numel: Array) -> Array:
        """Return the root mean square that each of these had, NaN where it was not read or had another size."""
        if not len(self.keys):
            return np.full(len(keys), np.nan)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((self.keys[at] == keys) & (self.numel[at] == numel), self.rms[at], np.nan)


@dataclass(slots=True)
class Memory:
    """Of one rank, from step to step; give it to `classify` with each step in turn."""

    names: Vocabulary = field(default_factory=Vocabulary)
    values: Vocabulary = field(default_factory=Vocabulary)
    lasting: Lasting | None = None
    stream: Stream | None = None
    """The step before."""
    written: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """``(seq, slot)`` of bad values that an optimizer wrote -> step and place of the anomaly they are of."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Step and place of anomalies of the step before whose bad numbers reached gradients or weights."""


def read_slots(stream: Stream) -> Numbers:
    """Return the floating slots that forward calls read."""
    forward = (stream.phase == stream.names.number("forward"))[stream.call]
    floating = stream.names.table(_is_float)[stream.dtype]
    read = stream.names.table(is_input)[stream.slot] & forward & floating & stream.measured
    return np.asarray(np.flatnonzero(read), np.int64)


def lasting_slots(stream: Stream, slots: Numbers) -> Numbers:
    """Return those of some slots that no call of the step made."""
    made = np.where(stream.producer[slots] >= 0, stream.index(stream.producer[slots]), NONE)
    return slots[made < 0]


def keys_of(stream: Stream, slots: Numbers) -> NDArray[np.uint64]:
    """Return a number for the name of each slot, the same in every step."""
    calls = stream.call[slots]
    found = np.zeros(len(slots), np.uint64)
    for column in (stream.level[calls], stream.scope[calls], stream.op[calls], stream.ordinal[calls], stream.slot[slots]):
        found = splitmix64(found ^ column.astype(np.uint64))
    return found


def rms_of(stream: Stream, slots: Numbers) -> Array:
    """Return the root mean square of slots."""
    return np.asarray(stream.l2[slots] / np.sqrt(np.maximum(stream.numel[slots], 1)))


def remember(stream: Stream, slots: Numbers) -> Lasting:
    """Keep what the forward calls of a step read."""
    keys = keys_of(stream, slots)
    order = np.argsort(keys, kind="stable")
    return Lasting(keys[order], rms_of(stream, slots)[order], stream.numel[slots][order])


def grown(stream: Stream, slots: Numbers, before: Lasting | None) -> dict[int, float]:
    """Return how many times larger lasting tensors are than in the step before, of those that grew `JUMP` times."""
    if before is None or not len(slots):
        return {}
    now, was = rms_of(stream, slots), before.before(keys_of(stream, slots), stream.numel[slots])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = now / np.where(was > 0, was, 1.0)
    found = np.flatnonzero(~np.isnan(was) & (ratio >= JUMP))
    return dict(zip(slots[found].tolist(), ratio[found].tolist(), strict=True))


def _is_float(dtype: str) -> bool:
    return "float" in dtype
