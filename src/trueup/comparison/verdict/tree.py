"""Which calls ran inside which, on both sides of one rank and step, and which of them were compared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from trueup.comparison.graph.pairs import Alignment
from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream, is_output, is_weight, numbered
from trueup.comparison.normalise.dialects import MODULE
from trueup.comparison.verdict.judged import Judged, Verdicts
from trueup.comparison.verdict.operands import most

SPREAD = 1000.0
"""A call's error may be this many times the largest error inside it: gradients of several uses add up, and may cancel."""


class Tree:
    """The calls of both sides by their ``parent``; calls are indices into the streams of their side.

    Args:
        verdicts: the matched calls.
        alignment: what is matched, and what is not.
    """

    def __init__(self, verdicts: Verdicts, alignment: Alignment) -> None:
        self.verdicts, self.streams = verdicts, verdicts.errors.streams
        self.unmatched = alignment.only_baseline, alignment.only_candidate
        self.pairs = tuple(
            numbered(calls, len(stream)) for calls, stream in zip(verdicts.errors.calls, self.streams, strict=True)
        )
        """By side: the matched call of each call, `NONE` where it has no counterpart; one more entry, for `NONE`."""

    @cached_property
    def opened(self) -> frozenset[int]:
        """Matched modules of two frameworks that are none of the known layers, and inside which calls were matched.

        Two frameworks make other functions of nearly every module, so such a module is looked into instead of compared as a whole:
        what is inside is matched, or lies between what is matched. That takes its functions, so modules alone are not looked into.
        """
        stream = self.streams[1]
        if stream.neutral is None or not stream.of_level("api").any():
            return frozenset()
        matched = self.verdicts.errors.calls[1]
        above = np.unique(stream.parents[matched])
        modules = [call for call in above[above >= 0].tolist() if stream.neutral[call] == stream.names.number(MODULE)]
        outer = {other for call in modules for other in self.around(call) if stream.neutral[other] == stream.neutral[call]}
        pairs = self.pairs[1][sorted({*modules, *outer})]
        return frozenset(pairs[pairs >= 0].tolist())

    def judged(self, side: int, call: int) -> Judged | None:
        """Return the verdict of a call, None where it has no counterpart."""
        pair = int(self.pairs[side][call])
        return None if pair < 0 else self.verdicts.at(pair)

    def around(self, call: int, side: int = 1) -> list[int]:
        """Return the calls around a call, innermost first."""
        return list(self.streams[side].around(call))

    def inside(self, call: int, side: int = 1) -> Iterator[int]:
        """Yield the calls inside a call, at any depth."""
        pending = [call]
        while pending:
            children = self.streams[side].inside(pending.pop()).tolist()
            pending += children
            yield from children

    def leaves(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Tell of each matched call whether no finer call was recorded inside, on either side."""
        sides = zip(self.streams, self.verdicts.errors.calls, strict=True)
        first, second = (stream.has_children[calls] for stream, calls in sides)
        return ~(first | second)

    def resolved(self, pair: int) -> bool:
        """Tell whether the calls inside a matched call speak for it.

        They do when each of them was matched and compared, and one of them has an error that the call's own may come from. Where
        some could not be compared, weights that differ inside speak: the call was given them, though they are none of its slots.
        """
        verdicts = self.verdicts
        calls = [int(side[pair]) for side in verdicts.errors.calls]
        direct = [self._ran_inside(call, side) for side, call in enumerate(calls)]
        alone = [direct[side][self.pairs[side][direct[side]] < 0] for side in (0, 1)]
        if not len(direct[1]):
            return False
        below = [inner for call in direct[1].tolist() for inner in (call, *self.inside(call))]
        inner = self.pairs[1][below]
        inner = inner[inner >= 0]
        if any(map(len, alone)) and pair not in self.opened and not self._are_judged(pair, alone, inner):
            return False
        if self._is_of_modules:  # what arises between the modules inside one is read there, and no call is seen to make it
            inner = inner[verdicts.error_out[inner] > verdicts.criterion.certain_carried * self._unmade[inner]]
        if verdicts.unsized[inner].any() or any(n in verdicts.incomparable for n in inner.tolist()):
            of, errors = self._weights
            return bool(errors[np.isin(of, inner)].max(initial=0.0) * SPREAD >= verdicts.error_out[pair])
        return bool(verdicts.error_out[inner].max(initial=0.0) * SPREAD >= verdicts.error_out[pair])

    def _are_judged(self, pair: int, alone: list[Numbers], inner: Numbers) -> bool:
        """Tell whether what a module was given differs in weights inside, and calls there without counterpart are judged.

        They are where they are read (`regions.loose_calls`); a function, and a module inside, is compared by what it returns.
        """
        module = self.streams[1].names.number("module")
        inside = any((stream.level[calls] == module).any() for stream, calls in zip(self.streams, alone, strict=True))
        if inside or any(s.imported or s.mixed for s in self.streams):
            return False
        of, errors = self._weights
        return bool(self.streams[1].level[self.verdicts.errors.calls[1][pair]] == module and (errors[np.isin(of, inner)] > 0).any())

    def _ran_inside(self, call: int, side: int) -> Numbers:
        """Return the calls right inside a call: where none names it, those of a forward that began while it ran.

        A function that calls modules (a reentrant checkpoint) is not named by them, for modules know the modules around them alone.
        """
        stream = self.streams[side]
        found = stream.inside(call)
        if len(found) or stream.names.name(int(stream.phase[call])) not in ("forward", "recompute"):
            return found
        own = slice(stream.starts[call], stream.starts[call + 1])
        last = stream.ready[own].max(initial=NONE)
        meanwhile = (stream.began > stream.began[call]) & (stream.began < last) & (stream.step == stream.step[call])
        return np.flatnonzero(meanwhile & (stream.parents == stream.parents[call]))

    @cached_property
    def _is_of_modules(self) -> bool:
        return only_modules(self.streams[1])

    @cached_property
    def _unmade(self) -> Array:
        """Relative error of what each matched call reads and no compared call made, but for weights."""
        errors, stream = self.verdicts.errors, self.streams[1]
        read = errors.inputs & ~stream.names.table(is_weight)[errors.names] & (stream.producers[errors.slots[1]] < 0)
        return most(np.nan_to_num(errors.relative[read]), errors.pair[read], len(self.verdicts))

    @cached_property
    def _weights(self) -> tuple[Numbers, Array]:
        """Matched calls by the weights they were given, and the relative errors of these."""
        errors = self.verdicts.errors
        at = np.flatnonzero(self.streams[0].names.table(is_weight)[errors.names])
        return errors.pair[at], np.nan_to_num(errors.relative[at])

    def covering(self, call: int, side: int) -> list[int]:
        """Return the matched calls around this one that were compared as a whole."""
        pairs = self.pairs[side][self.around(call, side)]
        outputs, entries = self.verdicts.errors.outputs, self.verdicts.errors.entries
        return [n for n in pairs[pairs >= 0].tolist() if n not in self.opened and outputs[entries(n)].any()]

    def operators(self, call: int) -> tuple[str, ...]:
        """Return the dispatcher operators inside a call of the candidate, each once: those that the baseline lacks first."""
        stream = self.streams[1]
        aten = stream.names.number("aten")
        found: dict[str, bool] = {}
        for inner in self.inside(call):
            if stream.level[inner] == aten:
                op = stream.names.names[int(stream.op[inner])]
                found[op] = found.get(op, False) or bool(self.pairs[1][inner] < 0)
        return tuple(sorted(found, key=lambda op: (not found[op], not op.rpartition("::")[2].startswith("_"))))


def only_modules(stream: Stream) -> bool:
    """Tell whether all that computes anything is a module; the loss, which every capture has, is a call that only reads."""
    outputs = stream.call[stream.names.table(is_output)[stream.slot]]
    return bool(stream.of_level("module")[outputs].all())
