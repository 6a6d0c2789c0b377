"""Calls that are wrong by themselves, however much their inputs differ: by their arguments, or by a law that they break.

**Arguments.** A scalar that a program reads out of a tensor differs because the tensor does; it is a victim. One that was never
read out of a tensor is a choice of the program: an epsilon, a rate. So a call with other arguments is a culprit of its own where
the same change of arguments mattered at a call with equal inputs, and where it gets other real numbers while, since the training
began, no number that differs was read out of a tensor.

**Laws.** The gradient of a softmax sums to zero, that of an embedding to the sum of the gradient that came in, and an addition
adds. No table says so: the baseline does, by statistics. Of each kind of call (operator, phase, level, output) these are tried::

    sum(output)  =  0,  sum(input),  sum(input) + sum(another),  sum(input) - sum(another)
    mean(output) =  mean(input)    where it has another number of elements
    output       =  a input + b another          for each lane of the sketches, linear operators alone

A law that all calls of the kind keep in the baseline to rounding, and a call of the candidate does not, is broken there, whatever
the errors of its inputs. Laws may hold by chance or by what the inputs are, so all that hold must be broken; and nothing is said
where an input sums to zero itself, or was a constant and is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, spans
from trueup.comparison.measures.thresholds import BIASED, CANCELLED, ENOUGH, PRECISE, SINGLE_DIGITS, SMALL, UNLIKELY
from trueup.comparison.verdict.judged import Judged, Tree
from trueup.foundation.facts.arguments import other_numbers
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import has, having, normalised
from trueup.foundation.facts.slots import SINGLE
from trueup.foundation.facts.why import CARRIED_ON, Reason, Why


def key_of(judged: Judged) -> tuple[str, ...]:
    """Return what tells one change of arguments from another: the operator, and both sides' arguments."""
    call = judged.call.candidate
    first, second = judged.call.arguments or (None, None)
    return call.level, call.phase, normalised(call.op), first or "", second or ""


def are_chosen(judged: Judged, tree: Tree) -> bool:
    """Tell whether a call gets other real numbers that nothing before it in its step can have made."""
    if judged.call.arguments is None or tree.is_foreign:
        return False
    chosen = other_numbers(*judged.call.arguments, SINGLE_DIGITS)
    return chosen and judged.call.candidate.seq < first_read_out(tree)


def first_read_out(tree: Tree) -> float:
    """Return ``seq`` of the first call on the candidate that takes numbers that differ out of a tensor."""
    verdicts, stream = tree.verdicts, tree.streams[1]
    if not np.isin(stream.level, [stream.names.number(level) for level in ("api", "aten")]).any():
        return -np.inf  # what happens between modules was not recorded
    calls = verdicts.errors.calls[1]
    reads, sized = (stream.names.table(names)[stream.op] for names in (having("read-out"), having("sized")))
    alone = np.flatnonzero((reads | sized) & (tree.pairs[1][:-1] < 0))
    other = np.isin(np.arange(len(calls)), list(verdicts.incomparable))
    differing = calls[(reads[calls] & (np.maximum(verdicts.error_in, verdicts.error_out) > 0)) | (sized[calls] & other)]
    return float(min(stream.seq[np.r_[alone, differing]].tolist(), default=np.inf))


MOST_INPUTS = 4
"""Inputs of which laws are tried, the first ones."""
Law = Mapping[int, "float | Array"]
"""The parts that inputs have in the sum of an output, by slot; those in its mean are numbers of elements, by side and call."""


@dataclass(slots=True)
class _Kind:
    """Outputs of calls that do the same: entries of the errors, and those of their inputs by slot (a row each)."""

    pairs: Numbers
    outputs: Numbers
    inputs: dict[int, Numbers]


def denormalised(tree: Tree, criterion: Criterion) -> bool:
    """Tell whether a gradient sums to zero no more whose forward made probabilities, whatever else was found."""
    asked = _keep_their_own(tree)
    return bool(asked.any()) and bool(Laws(tree, criterion, asked).broken(sums_alone=True))


def _keep_their_own(tree: Tree) -> Array:
    """Tell which matched calls are a function's gradient whose law its own forward kept."""
    stream = tree.streams[1]
    own = stream.of_level("api") & stream.during("backward") & stream.names.table(having("normalises"))[stream.op]
    return np.asarray(own[tree.verdicts.errors.calls[1]])


class Laws:
    """The laws of one rank and step; ``calls`` are the matched calls that are asked, all if None."""

    def __init__(self, tree: Tree, criterion: Criterion, calls: Array | None = None) -> None:
        self.verdicts, self.criterion, self.forward, self.pairs = tree.verdicts, criterion, tree.forward, tree.pairs
        self.errors = errors = tree.verdicts.errors
        self.names = tree.streams[0].names
        self.alone = _keep_their_own(tree)
        self.leaves = (tree.leaves | self.alone) & ~tree.streams[1].again[self.errors.calls[1]]
        self._its = its = np.arange(len(errors.pair)) if calls is None else np.flatnonzero(calls[errors.pair])
        """The entries of these calls; of others nothing below is filled in."""
        sides = [(stream, slots[its]) for stream, slots in zip(errors.streams, errors.slots, strict=True)]
        self.norms, self.numels, self.sums = np.zeros((3, 2, len(errors.pair)))
        self.norms[:, its] = [stream.l2[slots] for stream, slots in sides]
        self.numels[:, its] = [stream.numel[slots] for stream, slots in sides]
        self.numel: Array = self.numels[0]
        self.sums[:, its] = np.array([stream.mean[slots] for stream, slots in sides]) * self.numels[:, its]
        whole = [(stream.counts[slots].sum(axis=1) == 0) & (stream.saturated[slots] == 0) for stream, slots in sides]
        self.known = np.zeros(len(errors.pair), bool)
        self.known[its] = (np.minimum(*(roundoffs[its] for roundoffs in errors.roundoffs)) > 0) & whole[0] & whole[1]
        self.known &= np.isfinite(self.sums).all(axis=0) & (self.norms > 0).all(axis=0) & np.isfinite(self.norms).all(axis=0)

    def broken(self, *, sums_alone: bool = False) -> dict[int, Reason]:
        """Return the calls that break a law by themselves, and which, in words."""
        found: dict[int, Reason] = {}
        for kind in self._kinds():
            asked = self._asked(kind)
            if asked.any():
                found |= self._by_sums(kind, asked)
                lanes = () if sums_alone else self._by_lanes(kind, asked)
                found |= {pair: why for pair, why in lanes if pair not in found}
        return found

    def _kinds(self) -> Iterator[_Kind]:
        """Yield the kinds of which some call may be asked."""
        errors, stream, size = self.errors, self.errors.streams[1], len(self.names.names)
        at = np.flatnonzero(errors.outputs & self.known & self.leaves[errors.pair] & (self.numel >= ENOUGH))
        call = errors.calls[1][errors.pair[at]]
        key = ((stream.op[call] * size + stream.level[call]) * size + stream.phase[call]) * size + errors.names[at]
        _, kind = np.unique(key, return_inverse=True)
        order = np.argsort(kind, kind="stable")
        for outputs in np.split(at[order], np.flatnonzero(np.diff(kind[order])) + 1):
            pairs = errors.pair[outputs]
            if self._differ(pairs, outputs).any():
                yield _Kind(pairs, outputs, self._inputs(pairs))

    def _differ(self, pairs: Numbers, outputs: Numbers) -> Array:
        """Tell which calls have errors in and out large enough to be asked about; of some the sums tell what no norm does."""
        alone, error = self.alone[pairs], self.errors.relative[outputs]
        return np.asarray(np.where(alone, error > 0, (self.verdicts.error_in[pairs] > 0) & (error >= SMALL)))

    def _inputs(self, pairs: Numbers) -> dict[int, Numbers]:
        """Return, by slot, the entries of the floating-point inputs that all of some calls have."""
        errors, (begin, end) = self.errors, (np.searchsorted(self.errors.pair, pairs + n) for n in (0, 1))
        its, owner = spans(begin, end - begin), np.repeat(np.arange(len(pairs)), end - begin)
        kept = errors.inputs[its] & self.known[its]
        its, owner, names = its[kept], owner[kept], errors.names[its[kept]]
        held = ((name, its[names == name]) for name in dict.fromkeys(names[owner == 0].tolist()))  # until enough are found
        return dict(islice(((name, entries) for name, entries in held if len(entries) == len(pairs)), MOST_INPUTS))

    def _asked(self, kind: _Kind) -> Array:
        """Tell which calls are asked: those with errors in and out, and whose inputs are no reason for a law to hold no more."""
        excused = self._excused[kind.pairs]
        if self._is_known(kind, "centres") or self.alone[kind.pairs].all():  # by definition, of what sums to one
            forward = np.array([*map(self.forward, kind.pairs.tolist())], np.int64)
            excused = excused & ~(self._sums_alike[forward] & (forward != NONE))
        return self._differ(kind.pairs, kind.outputs) & (self.verdicts.role[kind.pairs] <= CARRIED_ON) & ~excused

    @cached_property
    def _sums_alike(self) -> Array:
        """By call, whether its results sum to the same in both runs, as probabilities do whatever they are made of."""
        its = np.flatnonzero(self.errors.outputs)
        apart = ~(np.abs(np.diff(self.sums[:, its], axis=0)[0]) < SINGLE_DIGITS * np.abs(self.sums[0, its]))
        found = np.zeros(len(self.errors.calls[0]), bool)
        found[self.errors.pair[its]] = True
        found[self.errors.pair[its[apart]]] = False
        return found

    @cached_property
    def _excused(self) -> Array:
        """By call, whether a law may hold because of inputs: one sums to zero, is a constant and another in the candidate, is zero
        in the baseline alone (padding), or made by a call without counterpart: behind a dropout a softmax sums to one no more."""
        errors, its, found = self.errors, self._its, np.zeros(len(self.errors.calls[0]), bool)
        known, numel = self.known[its], self.numel[its]
        sums, norms = np.abs(self.sums[0, its]), np.where(known, self.norms[0, its], 1.0)
        with np.errstate(all="ignore"):
            vanishing = known & (sums <= PRECISE * norms)
            constant = norms - sums / np.sqrt(np.maximum(numel, 1.0)) <= SINGLE_DIGITS * norms
            zeros = [stream.number("n_zero")[slots[its]] for stream, slots in zip(errors.streams, errors.slots, strict=True)]
            makers = [stream.producers[slots[its]] for stream, slots in zip(errors.streams, errors.slots, strict=True)]
            alone = [(made != NONE) & (pairs[made] == NONE) for made, pairs in zip(makers, self.pairs, strict=True)]
        other = (zeros[0] > zeros[1]) | alone[0] | alone[1]
        its = its[errors.inputs[its] & (vanishing | other | ((constant | ~known) & (errors.absolute[its] != 0)))]
        found[errors.pair[its]] = True
        forward = self.pairs[1][errors.streams[1].saved[errors.calls[1]]]
        return np.asarray(found | (np.r_[found, False][forward] & (forward != NONE)))

    def _rounding(self, kind: _Kind) -> Array:
        """Return the residual that rounding explains of each output."""
        own = self.criterion.certain * self.verdicts.own[kind.pairs]
        biased = BIASED * np.minimum(self.errors.unit[kind.outputs], SINGLE) * np.sqrt(self.numel[kind.outputs])
        return np.maximum(own, biased)

    def _by_sums(self, kind: _Kind, asked: Array) -> dict[int, Reason]:
        rounding, broken, told = self._rounding(kind), asked, None
        own = self.criterion.certain * self.verdicts.own[kind.pairs]
        least = np.where(self.alone[kind.pairs], own, np.maximum(rounding, PRECISE))
        for law in self._laws(kind):
            before, after = (self._residual(kind, law, side) for side in (0, 1))
            known = not law and (self.alone[kind.pairs].all() or self._is_known(kind, "centres"))
            by_chance = not known and np.log(np.maximum(before, 1e-16)).sum() > np.log(UNLIKELY)
            if by_chance or (before > np.minimum(rounding, PRECISE)).any():
                continue
            for entries in kind.inputs.values() if not law else ():  # what is centred by another number sums to zero no more
                broken = broken & ~((self.numel[entries] < self.numel[kind.outputs]) & (self.errors.absolute[entries] != 0))
            broken = broken & (after > np.maximum(least, CANCELLED * before.max()))
            told = told or Why.LAW(self._formula(law, kind), len(kind.pairs), float(before.max()))
        return {int(kind.pairs[n]): told for n in np.flatnonzero(broken).tolist()} if told else {}

    def _laws(self, kind: _Kind) -> list[Law]:
        """Return the laws to try: only a sum of zero for what works on each element, which is nearly linear near zero."""
        names = list(kind.inputs)
        resized = any((self.numel[entries] != self.numel[kind.outputs]).any() for entries in kind.inputs.values())
        if not resized and not self._is_linear(kind):
            return [{}]
        pairs: list[Law] = [{one: 1.0, two: sign} for one, two in combinations(names, 2) for sign in (1.0, -1.0)]
        means: list[Law] = [{name: self.numels[:, kind.outputs] / self.numels[:, kind.inputs[name]]} for name in names if resized]
        return [{}, *({name: 1.0} for name in names), *pairs, *means]

    def _is_linear(self, kind: _Kind) -> bool:
        """Tell whether an operator is linear in its tensors; to one alone a number is added, which may be too small to show."""
        alike = [bool((self.numel[entries] == self.numel[kind.outputs]).all()) for entries in kind.inputs.values()]
        return self._is_known(kind, "linear") and (not self._is_known(kind, "adds") or (all(alike) and len(alike) > 1))

    def _is_known(self, kind: _Kind, fact: str) -> bool:
        return has(self.names.names[int(self.errors.streams[1].op[self.errors.calls[1][kind.pairs[0]]])], fact)

    def _residual(self, kind: _Kind, law: Law, side: int) -> Array:
        rest, largest = self.sums[side, kind.outputs].copy(), self.norms[side, kind.outputs]
        for name, part in law.items():
            rest -= (part[side] if isinstance(part, np.ndarray) else part) * self.sums[side, kind.inputs[name]]
            largest = np.maximum(largest, self.norms[side, kind.inputs[name]])
        return np.asarray(np.abs(rest) / largest)

    def _formula(self, law: Law, kind: _Kind) -> str:
        slot = self.names.name(int(self.errors.names[kind.outputs[0]]))
        which = "mean" if any(isinstance(part, np.ndarray) for part in law.values()) else "sum"
        terms = [("- " if np.any(part < 0) else "+ ") + f"{which}({self.names.name(name)})" for name, part in law.items()]
        return f"{which}({slot}) = {' '.join(terms).removeprefix('+ ') or '0'}"

    def _by_lanes(self, kind: _Kind, asked: Array) -> Iterator[tuple[int, Reason]]:
        """Yield the calls whose output is no more the sum of multiples of its inputs that it is in the baseline."""
        errors, rounding = self.errors, self._rounding(kind)
        if not self._is_linear(kind):
            return
        for n in np.flatnonzero(asked).tolist():
            pair, out = int(kind.pairs[n]), int(kind.outputs[n])
            its = [int(entries[n]) for entries in kind.inputs.values()]
            same = [m for m in its if self.numel[m] == self.numel[out]]
            forward = self.forward(pair)  # what it saved may be a factor, too
            others = np.array([*errors.entries(pair), *(errors.entries(forward) if forward >= 0 else ())])
            others = others[errors.inputs[others] & ~np.isin(others, same)]
            others = others[(errors.pair[others] == pair) | (self.numel[others] != self.numel[out])]
            if not same or pair in errors.arguments or (errors.absolute[others] != 0).any():
                continue
            rest = self._apart(out, same)
            if rest is not None and rest[1] > max(float(rounding[n]), PRECISE, CANCELLED * rest[0]) * max(rest[2], 1.0):
                yield pair, Why.MULTIPLES(*rest[:2])

    def _apart(self, out: int, inputs: list[int]) -> tuple[float, float, float] | None:
        """Return how far an output is from the sum of multiples of its inputs that fits the baseline, on both sides; and how many
        times what the baseline leaves open counts in the candidate: beside a large input a small one's multiple hardly shows."""
        columns, results = [], []
        for stream, slots in zip(self.errors.streams, self.errors.slots, strict=True):
            columns.append(np.stack([stream.sketch[int(slots[n])] for n in inputs], axis=1))
            results.append(np.asarray(stream.sketch[int(slots[out])]))
        size = np.linalg.norm(columns[0], axis=0)
        norms = [float(np.linalg.norm(result)) for result in results]
        if not (size > 0).all() or min(norms) == 0 or not all(np.isfinite(each).all() for each in (*columns, *results)):
            return None
        parts, _, _, singular = np.linalg.lstsq(columns[0] / size, results[0], rcond=None)
        if singular[-1] < PRECISE * singular[0]:
            return None
        rest = [float(np.linalg.norm(r - c @ (parts / size))) / n for c, r, n in zip(columns, results, norms, strict=True)]
        grown = norms[0] / float(singular[-1]) * float(np.linalg.norm(np.linalg.norm(columns[1], axis=0) / size)) / norms[1]
        return (rest[0], rest[1], grown) if rest[0] <= SMALL else None
