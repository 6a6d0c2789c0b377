"""The norm of the gradients of each step, as training logs have it, told from a capture's records.

Four ways, the first that the records allow; of two frameworks the names of parameters alone tell which gradients are the same:

1. *What the optimizer is given*: the gradients that are recorded by name before an optimizer's step, where there are ranks.
2. *What the optimizer reads*: each tensor that a call of phase ``optimizer`` reads and a call of phase ``backward`` of the
   same step made. Clipping and unscaling read it before they write it, so the norm is that before them.
3. *Leaf gradients*: each gradient that an api call's backward returns for an input which no forward call of the step made.
   Uses of one parameter in several calls are not summed before the norm. Needs producers, which no imported capture has.
4. *What parameters held*: of an imported capture, ``.grad`` of each module's parameters after the backward, as some tools dump it.

All are sqrt(sum of l2²), the l2 of each tensor being that of its finite elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.foundation.facts.slots import roundoff
from trueup.foundation.model import RunSummary
from trueup.foundation.words.sentence import PARTIAL

FINEST = ("aten", "api", "module")
LEAVES = ("api",)  # a module's inputs may be made by functions between modules, and an aten call in backward has no forward call

WAYS = {
    "given": "gradients that the optimizer was given, by the names of their parameters",
    "named": "gradients of all parameters that the optimizer updates, as their layers' backward gave them, before clipping",
    "read": "gradients that the optimizer reads and a recorded backward call made, before clipping and unscaling",
    "held": "what the parameters' .grad held after the backward",
    "leaf": "gradients of what no recorded forward call made; several uses of one parameter are not summed first",
}
UNLIKE = (
    "the recorded gradients are not of as many elements in both runs: one that is summed over several uses is recorded at level "
    "aten only"
)
ABSENT = "no gradient of a parameter was recorded with statistics: record levels api or aten, phases backward and optimizer"


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm of one rank and step, and the way it was told, with the level that was read."""

    step: int
    way: str
    norm: float
    elements: float  # how many the gradients have together


def with_norms(runs: Sequence[RunSummary], ranks: Sequence[int], norms: Sequence[Sequence[Norm]]) -> list[RunSummary]:
    """Return the summaries of both runs, of so many ranks, with the norms of their gradients."""
    shared = of_as_many(norms)
    told = [over_steps(found, count) for found, count in zip(shared, ranks, strict=True)]
    told = [((), UNLIKE) if all(norms) and not all(shared) else one for one in told]
    return [
        dataclasses.replace(run, gradient_norms=found, gradient_source=source)
        for run, (found, source) in zip(runs, told, strict=True)
    ]


def of_as_many(norms: Sequence[Sequence[Norm]]) -> tuple[list[Norm], list[Norm]]:
    """Return the norms of both runs of steps in which they are of as many elements, or in which one run has none."""
    counts = defaultdict[int, float](float), defaultdict[int, float](float)  # a damaged capture may count NaN elements
    for count, its in zip(counts, norms, strict=True):
        for one in its:
            count[one.step] += one.elements
    other = {step for step in counts[0].keys() & counts[1].keys() if counts[0][step] != counts[1][step]}
    first, second = ([one for one in its if one.step not in other] for its in norms)
    return first, second


def over_steps(found: Sequence[Norm], ranks: int) -> tuple[tuple[tuple[int, float], ...], str]:
    """Return ``((step, norm), ...)``, the mean over ranks where there are several, and which tensors they are of. Steps where
    another way than the most frequent one was taken are left out: their numbers would not compare."""
    if not found:
        return (), ABSENT
    way = Counter(one.way for one in found).most_common(1)[0][0]
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for one in found:
        if one.way == way:
            steps[one.step].append(one.norm)
    several = "; mean over ranks" if ranks > 1 else ""
    name, _, level = way.partition(" ")
    partial = PARTIAL if name == "read" and level != "aten" else ""
    return tuple((step, sum(norms) / len(norms)) for step, norms in sorted(steps.items())), WAYS[name] + partial + several


def norms_of(stream: Stream) -> list[Norm]:
    """Return the norm of each step of a rank of which the records tell one."""
    slots = _Slots(stream)
    found: dict[int, Norm] = {}
    last = ("held", ("module",), slots.held) if stream.imported else ("leaf", LEAVES, slots.leaf)
    ways = [("given", FINEST, slots.given), ("read", FINEST, slots.read), last]
    for way, levels, chosen in [("named", ("module",), slots.named)] if stream.mixed else ways:
        for level in levels:
            rows = chosen(level)
            told, of = np.unique(stream.step[stream.call[rows]], return_inverse=True)
            sums, elements = (np.bincount(of, each).tolist() for each in (stream.l2[rows] ** 2, stream.numel[rows]))
            for step, total, count in zip(told.tolist(), sums, elements, strict=True):
                found.setdefault(step, Norm(step, f"{way} {level}", math.sqrt(total), count))
            if len(found) == len(stream.steps):
                return list(found.values())
    return list(found.values())


class _Slots:
    """The slots of a rank and step, chosen by the phase and level of their calls and by their names."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.names = stream, stream.names

    def given(self, level: str) -> Numbers:
        return self._known(self._at("optimizer", level, _is_given_gradient))

    def named(self, level: str) -> Numbers:
        """Gradients by name, of steps in which each weight has one: two frameworks share them out to functions in other ways."""
        rows = self._known(self._at("optimizer", level, lambda slot: slot.startswith("gradient.")))
        weights = self._at("optimizer", level, lambda slot: slot.startswith("output."))
        had, wanted = (np.bincount(self.stream.call[at], minlength=len(self.stream)) for at in (rows, weights))
        return np.asarray(rows[(had == wanted)[self.stream.call[rows]]])

    def read(self, level: str) -> Numbers:
        rows = self._known(self._at("optimizer", level, _is_plain_input))
        rows = rows[self._made_in("backward", rows)]
        return rows[_first_of_each(self.stream.producer[rows], self.stream.producer_slot[rows])]

    def held(self, level: str) -> Numbers:
        return self._known(self._at("backward", level, _is_held_gradient))

    def leaf(self, level: str) -> Numbers:
        """Gradients whose forward input, the slot of the same name, is no output of a forward call of the step."""
        stream = self.stream
        leaves = self._at("forward", level, _is_plain_input)
        leaves = leaves[~self._made_in("forward", leaves)]
        gradients = self._known(self._at("backward", level, _is_input_gradient))
        forward = stream.index(stream.forward_seq[stream.call[gradients]])
        bare = self._bare()
        held = np.sort(np.r_[NONE, stream.call[leaves] * len(bare) + bare[stream.slot[leaves]]])
        wanted = np.where(forward != NONE, forward * len(bare) + bare[stream.slot[gradients]], NONE - 1)
        return np.asarray(gradients[held[np.searchsorted(held, wanted, side="right") - 1] == wanted])

    def _bare(self) -> Numbers:
        """Return, by number of a slot's name, a number that an input and its gradient share."""
        known: dict[str, int] = {}
        found = np.full(len(self.names.names), NONE, np.int64)
        for number in np.flatnonzero(np.bincount(self.stream.slot + 1)[1:]).tolist():
            name = self.names.names[number]
            found[number] = known.setdefault(name.removeprefix("grad_").removeprefix("input."), len(known))
        return found

    def _at(self, phase: str, level: str, named: Callable[[str], bool]) -> Numbers:
        stream, number = self.stream, self.names.number
        calls = (stream.phase == number(phase)) & (stream.level == number(level))
        if not calls.any():
            return np.empty(0, np.int64)
        rows = np.flatnonzero(calls[stream.call])
        return rows[self.names.table(named)[stream.slot[rows]]]

    def _known(self, rows: Numbers) -> Numbers:
        rounds = self.names.table(roundoff)[self.stream.dtype[rows]] > 0  # the indices of a sparse gradient do not
        return rows[rounds & ~np.isnan(self.stream.l2[rows])]

    def _made_in(self, phase: str, rows: Numbers) -> Array:
        """Tell of which slots a call of a phase of the same step made what they read."""
        stream, made = self.stream, self.stream.producers[rows]
        same_step = stream.step[made] == stream.step[stream.call[rows]]
        return np.asarray((made != NONE) & same_step & (stream.phase == self.names.number(phase))[made])


def _is_given_gradient(slot: str) -> bool:
    return slot.startswith("input.") and slot.endswith(".grad")


def _is_held_gradient(slot: str) -> bool:
    return slot.startswith("grad_param.")


def _is_plain_input(slot: str) -> bool:
    return slot.startswith("input.")


def _is_input_gradient(slot: str) -> bool:
    return slot.startswith("grad_input.")


def _first_of_each(*keys: Array) -> Numbers:
    """Return the places of the first of each distinct combination of keys."""
    if not len(keys[0]):
        return np.empty(0, dtype=np.int64)
    return np.sort(np.unique(np.stack(keys, axis=1), axis=0, return_index=True)[1])
