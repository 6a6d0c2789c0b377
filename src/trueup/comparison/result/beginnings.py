"""What two runs begin with, as the calls of both show it: initial weights, constants, and batches.

    initial weights of 14 of 31 parameters differ (tokens.weight, places.weight, mix.weight…)
    a constant that model.rotary_emb reads differs from step 0 on
    batches differ from step 0 on
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.comparison.measures.measure import Errors
from trueup.comparison.result.shown import PARAM, makers
from trueup.comparison.verdict.judged import Part
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.slots import SINGLE, is_input
from trueup.foundation.facts.why import Why
from trueup.foundation.frameworks.trees import path
from trueup.foundation.model import Finding
from trueup.foundation.words.setting_sentence import some

OF = "\n"
"""Between a module and the slot in which a call inside reads its weight, where nothing tells what that is called."""
LONGEST_CHAIN = 50
"""Calls that make an initial weight which are looked at."""
ROUNDED = 8 * SINGLE
"""Relative error up to which two devices may draw the same numbers in float32, and nobody would say that weights differ."""


class Beginnings:
    """What the runs begin with: initial weights, and batches."""

    def __init__(self) -> None:
        self._weights: dict[str, bool] = {}  # by parameter: whether its first value differs
        self._copied: list[str] = []  # those that differ and were copied from numbers of the host's
        self.batches: dict[int, int] = {}  # by rank: the first step in which a model is given other inputs
        self._first: dict[int, tuple[int, int]] = {}  # by rank: seqs of each side's first call of a module
        self._resized: set[int] = set()  # ranks whose batches have another shape
        self._given: dict[tuple[int, int, str], str | None] = {}
        """What modules read, where no call of one is recorded: who reads a constant, "" for a weight, None for a batch."""
        self._unmade: dict[tuple[int, int, str], tuple[str, int]] = {}
        """Those of step 0 that no recorded call made, batches or constants: who reads them, and their identity in the candidate."""

    def add(self, part: Part) -> None:
        """Look at the modules of a part; of weights at those of the step in which training began."""
        errors = part.verdicts.errors
        candidate = errors.streams[1]
        if not candidate.of_level("module").any():
            self._add_inside(part)
            return
        calls = errors.calls[1][errors.pair]
        runs = candidate.of_level("module") & candidate.during("forward")
        forward = runs[calls]
        if not forward.any():
            self._add_unpaired(part)
            return
        if part.rank not in self._first:
            at = int(np.flatnonzero(runs[errors.calls[1]])[0])
            seqs = [int(stream.seq[side[at]]) for stream, side in zip(errors.streams, errors.calls, strict=True)]
            self._first[part.rank] = seqs[0], seqs[1]
        if part.step == 0:
            of_weights = np.flatnonzero(forward & candidate.names.table(_is_parameter)[errors.names])
            self._look_at_weights(errors, of_weights, part.verdicts.criterion)
        outermost = forward & (candidate.parents[calls] == NONE) & candidate.names.table(is_input)[errors.names]
        shapes = np.isin(np.arange(len(errors.pair)), [n for n, why in errors.reasons.items() if why.why is Why.SHAPES])
        differ = outermost & (_apart(errors) | shapes) & ~candidate.names.table(_is_parameter)[errors.names]
        if (outermost & shapes).any():
            self._resized.add(part.rank)
        if differ.any():
            self.batches.setdefault(part.rank, int(candidate.step[calls[differ]].min()))

    def _add_inside(self, part: Part) -> None:
        """Look at what calls inside modules read and no module made, where no call of a module itself is recorded: what the
        optimizer reads, too, is a weight, known by the module that reads it; the rest are batches."""
        errors = part.verdicts.errors
        firsts = [int(inside.argmax()) if (inside := _inside(stream)).any() else NONE for stream in part.streams]
        if NONE in firsts:
            return
        seqs = [int(stream.seq[at]) for stream, at in zip(part.streams, firsts, strict=True)]
        self._first.setdefault(part.rank, (seqs[0], seqs[1]))
        candidate, slots = errors.streams[1], errors.slots[1]
        made = candidate.producers[slots]
        read = _inside(candidate)[candidate.call[slots]] & candidate.names.table(is_input)[errors.names] & (made < firsts[1])
        weights, updated, apart = _updated(candidate, slots), _updates(candidate), _apart(errors)
        for n in np.flatnonzero(read & ((made != NONE) | (part.step == 0))).tolist():
            call, slot = int(candidate.call[slots[n]]), candidate.names.names[int(errors.names[n])]
            if part.step == 0 and weights[n]:
                name = f"{candidate.names.names[int(candidate.scope[call])]}{OF}{slot}"
                self._weights[name] = bool(apart[n])
                if apart[n] and made[n] != NONE and _is_copied(candidate, int(made[n]), part.verdicts.criterion):
                    self._copied.append(name)
            key = part.rank, int(candidate.seq[call]), slot
            if apart[n] and weights[n]:
                self._given[key] = ""
            elif apart[n] and updated and made[n] == NONE:
                self._unmade[key] = candidate.names.names[int(candidate.scope[call])], int(candidate.identity[slots[n]])
            elif apart[n] and updated:
                self._given[key] = None
                self.batches.setdefault(part.rank, part.step)
        if part.step and self._unmade:
            self._sort(part.rank, {int(one) for one in candidate.identity[slots[read & (made == NONE)]]})

    def _sort(self, rank: int, again: set[int]) -> None:
        """Tell constants, which a later step reads again, from batches."""
        for key, (reader, identity) in list(self._unmade.items()):
            if key[0] == rank:
                del self._unmade[key]
                self._given[key] = reader if identity in again else None
                if identity not in again:
                    self.batches[rank] = 0

    def _add_unpaired(self, part: Part) -> None:
        """Look at weights by their names where no call of a module has a counterpart: one run calls each more often."""
        reads = [_weights_read(stream) for stream in part.streams]
        if part.step or not all(reads):
            return
        baseline, candidate = part.streams
        firsts = [int(stream.seq[stream.call[min(read.values())]]) for stream, read in zip(part.streams, reads, strict=True)]
        self._first.setdefault(part.rank, (firsts[0], firsts[1]))
        for name in reads[0].keys() & reads[1].keys() - self._weights.keys():
            k, j = reads[0][name], reads[1][name]
            same = baseline.identity[k] == candidate.identity[j] or baseline.numel[k] != candidate.numel[j]
            first, second = (stream.sketch[np.array([at])] for stream, at in ((baseline, k), (candidate, j)))
            apart = not same and float(np.linalg.norm(second - first)) > ROUNDED * float(np.linalg.norm(first))
            self._weights[name] = bool(apart and baseline.dtype_of(k) == candidate.dtype_of(j))

    def _look_at_weights(self, errors: Errors, at: Numbers, criterion: Criterion) -> None:
        candidate, apart = errors.streams[1], _apart(errors)
        for n in at.tolist():
            call, names = int(errors.calls[1][errors.pair[n]]), candidate.names.names
            slot = names[int(errors.names[n])].removeprefix(PARAM)
            name = path(names[int(candidate.scope[call])], slot)
            if name in self._weights:
                continue
            self._weights[name] = bool(apart[n])
            if apart[n] and _is_copied(candidate, int(candidate.producers[errors.slots[1][n]]), criterion):
                self._copied.append(name)

    @property
    def weights(self) -> str:
        """Say which initial weights differ; empty where none does."""
        return self._differ([name for name, apart in self._weights.items() if apart])

    @property
    def unlike(self) -> frozenset[str]:
        """Names of the initial weights that differ."""
        return frozenset(name.partition(OF)[0] for name, apart in self._weights.items() if apart)

    @property
    def copied(self) -> str:
        """Say which initial weights differ that no recorded call drew: loaded, or made by NumPy; empty where none does."""
        return self._differ(self._copied)

    def _differ(self, other: Sequence[str]) -> str:
        named = list(dict.fromkeys(name.partition(OF)[0] for name in other))
        return f"initial weights of {len(other):,} of {len(self._weights):,} parameters differ ({some(named)})" if other else ""

    def said(self, finding: Finding) -> str:
        """Say of a culprit that stands where training begins which initial weights and batches differ."""
        if finding.phase not in ("forward", "data") or (finding.kind == "operator" and finding.phase != "data"):
            return ""
        slot = finding.slots[0].slot if finding.kind == "input" and finding.slots else ""
        given = finding.rank, finding.seq[1], slot
        if given in self._unmade:
            return f"a batch, or a constant that {self._unmade[given][0]} reads, differs from step 0 on"
        if given in self._given:
            return self._of(self._given[given], finding.rank)
        before = self._is_before(finding)
        found = [self.weights] if self.weights and (before or slot.startswith(PARAM)) else []
        since = self.batches.get(finding.rank)
        sized = finding.rank in self._resized and bool(slot) and finding.slots[0].shape[0] != finding.slots[0].shape[1]
        follows = since is not None and since <= finding.step and not finding.scope and finding.kind not in ("argument", "region")
        before = before and finding.kind not in ("region", "argument")  # what recorded calls do says more than what it led to
        if since is not None and (before or sized or follows) and not slot.startswith(PARAM):
            found.append(self._of(None, finding.rank))
        return "; ".join(found)

    def _of(self, reader: str | None, rank: int) -> str:
        """Say of what modules read that it differs."""
        if reader is None:
            return f"batches differ from step {self.batches[rank]} on"
        return f"a constant that {reader} reads differs from step 0 on" if reader else self.weights

    def _is_before(self, finding: Finding) -> bool:
        """Tell whether a call was made before any module ran."""
        first = self._first.get(finding.rank)
        if first is None or finding.scope:
            return False
        return any(NONE < seq < of for seq, of in zip(finding.seq, first, strict=True))


def _inside(stream: Stream) -> Array:
    """Tell which calls of a forward stand in a module."""
    return np.asarray(stream.during("forward") & (stream.scope != NONE) & (stream.scope != stream.names.number("")))


def _updates(stream: Stream) -> bool:
    """Tell whether an optimizer was recorded."""
    return bool(stream.during("optimizer").any())


def _updated(stream: Stream, slots: Numbers) -> Array:
    """Tell which slots hold what an optimizer of the step reads, too: of one maker, or where none is known, of the same bytes."""
    read = np.flatnonzero(stream.during("optimizer")[stream.call])
    made, known = stream.producers, stream.is_identified & (stream.numel > 1)
    by = np.isin(made[slots], made[read][made[read] != NONE])
    same = known[slots] & np.isin(stream.identity[slots], stream.identity[read[known[read]]])
    return np.asarray(by | ((made[slots] == NONE) & same))


def _weights_read(stream: Stream) -> dict[str, int]:
    """Return the slot in which modules read each weight first, by its name."""
    read = stream.names.table(_is_parameter)[stream.slot] & (stream.of_level("module") & stream.during("forward"))[stream.call]
    found: dict[str, int] = {}
    for slot in np.flatnonzero(read).tolist():
        names = stream.names.names
        scope = names[int(stream.scope[stream.call[slot]])]
        found.setdefault(path(scope, names[int(stream.slot[slot])].removeprefix(PARAM)), slot)
    return found


def _is_copied(stream: Stream, call: int, criterion: Criterion) -> bool:
    """Tell whether what a call makes comes from numbers that no recorded call made, and none drew what it was made of."""
    seen, pending = set[int](), [call] if call != NONE else []
    while pending and len(seen) < LONGEST_CHAIN:
        row = stream.row(at := pending.pop())
        seen.add(at)
        if criterion.row(row.op, row.level, row.phase).random:
            return False
        pending += set(makers(stream, at).tolist()) - seen - {NONE}
    return bool(seen) and not pending and any((makers(stream, at) == NONE).any() for at in seen)


def _apart(errors: Errors) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell of which entries the two sides differ by more than rounding; in another dtype they are rounded."""
    (baseline, candidate), (k, j) = errors.streams, errors.slots
    return np.asarray((np.nan_to_num(errors.relative) > ROUNDED) & (baseline.dtype[k] == candidate.dtype[j]))


def _is_parameter(name: str) -> bool:
    return name.startswith(PARAM)
