"""What there is to say beside the verdict, counted part by part: of matched calls other names, other arguments, dtypes, overflows,
the truer side; what was not compared, or not call by call; and why no verdict could be reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Row, Stream, distinct
from trueup.comparison.measures.measure import SKETCH, STATISTICS, Errors
from trueup.comparison.measures.thresholds import ENOUGH
from trueup.comparison.normalise.translated import Translated
from trueup.comparison.result.summary import Frames, no_optimizer, suspect_finding
from trueup.comparison.verdict.compare import Comparison, Said
from trueup.comparison.verdict.evidence import Yardstick, known_differences
from trueup.comparison.verdict.judged import Part, Suspect
from trueup.comparison.verdict.origins import Origins
from trueup.foundation.facts.criteria import Criterion, products_at
from trueup.foundation.facts.slots import SINGLE, UNIT_ROUNDOFF, is_input, is_output
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.frameworks.dialect import defined_otherwise
from trueup.foundation.model import Finding
from trueup.foundation.settings import held_by, list_of
from trueup.foundation.store import Capture
from trueup.foundation.store.declared import framework_of
from trueup.foundation.words.sentence import harmless_argument, hidden_note

RENAMES = 3
"""Scopes of another name that are shown."""


class Remarks:
    """Gathers what there is to say of matched calls, part by part."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._dtypes, self._overflowed = Dtypes(), Overflowed()
        self._renames: dict[str, str] = {}
        self._ignored = self._sketched = 0
        self._behind = 0
        self._first_behind: Row | None = None  # calls whose baseline is further from the truth: how many, and the first
        self._harmless: list[Finding] = []
        self._n_harmless = 0  # calls with other arguments and results that agree within rounding: the first, and how many

    def add(self, part: Part, sites: tuple[Frames, Frames]) -> None:
        """Look at a part."""
        errors = part.verdicts.errors
        self._dtypes.add(errors)
        self._overflowed.add(errors, self._path)
        self._renames |= part.alignment.scopes
        self._ignored += part.alignment.ignored
        self._sketched += 0 if errors.all_same else hidden(errors)
        less_precise = behind(errors, part.yardstick, part.verdicts.criterion)
        self._behind += len(less_precise)
        if self._first_behind is None and len(less_precise):
            self._first_behind = part.streams[1].row(int(part.alignment.candidate[less_precise[0]]))
        self._harmless += [suspect_finding(Suspect(j, "argument", False), *part.streams, sites) for j in part.harmless[:1]]
        self._n_harmless += len(part.harmless)

    @property
    def dtypes(self) -> Reason | None:
        """That the candidate computes in a dtype in which the candidate computes the baseline does not; None where it does not."""
        return self._dtypes.cause

    def always(self) -> list[str]:
        """Return what is said in every verdict."""
        return [*self._dtypes.notes(), *([] if self._overflowed.note is None else [self._overflowed.note])]

    def notes(self) -> list[str]:
        """Return what a report says at its end."""
        found = []
        if self._renames:
            some = ", ".join(f"{c or 'no module'} is {b or 'no module'}" for c, b in list(self._renames.items())[:RENAMES])
            more = f" and {len(self._renames) - RENAMES} more" if len(self._renames) > RENAMES else ""
            found.append(f"scopes have other names in the candidate and were paired by what they execute: {some}{more}")
        if self._ignored:
            found.append(f"{self._ignored:,} calls were not compared, as the map file says")
        if self._harmless:
            found.append(harmless_argument(self._harmless[0], self._n_harmless - 1))
        if (first := self._first_behind) is not None:
            found.append(
                f"in {self._behind:,} calls the baseline is further from the float64 run than the candidate, first in "
                f"{first.op} ({first.key}): it is the less precise of the two there"
            )
        return found

    def blind(self) -> Sequence[str]:
        """Return what statistics may have hidden, where nothing deviates."""
        return hidden_note(self._sketched)


def hidden(errors: Errors) -> int:
    """Count the results that differ and of which statistics alone are known, so that few wrong elements may hide among many."""
    numel = errors.streams[0].numel[errors.slots[0]]
    differ = errors.outputs & (errors.method == SKETCH) & (errors.absolute > 0) & np.isfinite(errors.absolute)
    return int(np.count_nonzero(differ & (numel >= ENOUGH)))


def behind(errors: Errors, yardstick: Yardstick, criterion: Criterion) -> Numbers:
    """Return the matched calls of which the baseline is several times further from the float64 run than the candidate. What may
    differ of a tensor that no recorded call made, no baseline is blamed for."""
    if yardstick.truth is None:
        return np.zeros(0, np.int64)
    baseline, candidate = (truth[slots] for truth, slots in zip(yardstick.truth, errors.slots, strict=True))
    worse = errors.outputs & (baseline > np.maximum(criterion.yardstick * candidate, criterion.input_units * SINGLE))
    return distinct(errors.pair[worse])


PAIRS = 3
"""Pairs of dtypes that are said; a run has few."""


class Dtypes:
    """Counts results, and else what is read, of which the two runs have another dtype: said whatever the verdict."""

    def __init__(self) -> None:
        self._results: Counter[tuple[str, str]] = Counter()
        self._inputs: Counter[tuple[str, str]] = Counter()
        self._products: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}
        self._alone: dict[str, str] = {}  # by dtype of results of the candidate that the baseline has none of: where first
        self._held: set[str] = set()  # dtypes of the baseline's results
        self._total = Counter[int]()  # of results (0) and inputs (1) whose dtype both runs recorded, and of products (2)

    def add(self, errors: Errors) -> None:
        """Count in the matched calls of some steps."""
        (baseline, candidate), (k, j) = errors.streams, errors.slots
        first, second = baseline.dtype[k], candidate.dtype[j]
        known = (first != NONE) & (second != NONE)
        if baseline.dtype is not candidate.dtype and not baseline.mixed:
            self._count_alone(baseline, candidate)
        same = k is j and baseline.dtype is candidate.dtype
        at = _of_products(errors, known)
        self._total[2] += len(at)
        if not same:
            self._count(errors, at[first[at] != second[at]], self._products)
        for n, (kind, counted) in enumerate(((errors.outputs, self._results), (~errors.outputs, self._inputs))):
            self._total[n] += int(np.count_nonzero(known & kind))
            if not same:
                self._count(errors, np.flatnonzero(known & kind & (first != second)), counted)

    def _count_alone(self, baseline: Stream, candidate: Stream) -> None:
        made = [side.names.table(is_output)[side.slot] & (side.dtype != NONE) for side in (baseline, candidate)]
        self._held.update(baseline.names.names[dtype] for dtype in distinct(baseline.dtype[made[0]]).tolist())
        for dtype in distinct(candidate.dtype[made[1]]).tolist():
            name = candidate.names.names[dtype]
            if name in UNIT_ROUNDOFF and name not in self._held | self._alone.keys():
                row = candidate.row(int(candidate.call[np.flatnonzero(made[1] & (candidate.dtype == dtype))[0]]))
                self._alone[name] = f"{row.op} ({row.key})"

    def _count(self, errors: Errors, at: Numbers, counted: Counter[tuple[str, str]]) -> None:
        (baseline, candidate), (k, j) = errors.streams, errors.slots
        at = at[np.argsort(candidate.has_children[candidate.call[j[at]]], kind="stable")]  # what computes, before what is around it
        pairs, firsts, sizes = np.unique(
            np.stack([baseline.dtype[k[at]], candidate.dtype[j[at]]]), axis=1, return_index=True, return_counts=True
        )
        for (b, c), place, size in zip(pairs.T.tolist(), firsts.tolist(), sizes.tolist(), strict=True):
            pair = baseline.names.names[b], candidate.names.names[c]
            counted[pair] += size
            row = candidate.row(int(errors.calls[1][errors.pair[at[place]]]))
            self._first.setdefault(pair, f"{row.op} ({row.key})")

    @property
    def cause(self) -> Reason | None:
        """Return in which dtype the candidate computes most of what the baseline computes in another one; None where it does not.
        Products are counted, and where none differs results."""
        for what, counted, total in (("products", self._products, self._total[2]), ("results", self._results, self._total[0])):
            known = Counter({pair: n for pair, n in counted.items() if all(name in UNIT_ROUNDOFF for name in pair)})
            if known:
                (before, after), count = known.most_common(1)[0]
                return Why.COMPUTES_IN(after, count, total, what, before)
        return None

    def notes(self) -> list[str]:
        """Say how many results differ in dtype, from which to which and where first; of inputs where no result does."""
        what, counted, total = ("results", self._results, self._total[0])
        if not counted:
            what, counted, total = ("inputs", self._inputs, self._total[1])
        found = []
        for (before, after), count in counted.most_common(PAIRS):
            those = f"{count:,} of {total:,} {what} {'is' if count == 1 else 'are'} {after} in the candidate"
            found.append(f"{those} and {before} in the baseline, first in {self._first[before, after]}")
        more = sum(counted.values()) - sum(count for _, count in counted.most_common(PAIRS))
        said = {after for _, after in counted} | self._held
        alone = [
            f"results of the candidate are {name}, none of the baseline is; the first of {where}"
            for name, where in self._alone.items() if name not in said
        ]  # fmt: skip
        return found + ([f"{more:,} more {what} have other dtypes"] if more else []) + alone


def _of_products(errors: Errors, known: Array) -> Numbers:
    """Return an entry of each product, innermost calls alone, whose dtype is that in which it computes: its result's, and of a
    backward not written in operators the incoming gradient's, for the casts of weights are inside the call."""
    stream = errors.streams[1]
    products = np.zeros(len(stream), bool)
    for level in ("module", "api", "aten"):
        products |= stream.of_level(level) & stream.names.table(products_at(level))[stream.op]
    around, at = np.zeros(len(stream) + 1, bool), np.flatnonzero(products)
    while len(at := np.unique(stream.parents[at])):
        around[at] = True
        at = at[at != NONE]
    calls = errors.calls[1][errors.pair]
    given = (stream.during("backward") & ~stream.of_level("aten"))[calls]
    which = np.where(given, stream.names.table(_is_gradient)[errors.names], errors.outputs)
    found = np.flatnonzero(known & which & (products & ~around[:-1])[calls])
    return np.asarray(found[np.unique(errors.pair[found], return_index=True)[1]])


def _is_gradient(slot: str) -> bool:
    return slot.startswith("grad_output.")


KINDS = ("NaN", "Inf", "-Inf")
STEPS = 10_000
"""Calls that are walked back at most: chains end long before, damaged captures may go in circles."""


class Overflowed:
    """Finds the first NaN or Inf that both runs kept: nothing deviates, and both are wrong.

    An infinity that is read and healed is none of it: a mask of -Inf that a softmax takes. So the walk starts from what a training
    keeps (a gradient, a weight, the loss, what the model returns) and goes back along what was read, to the call that read only
    finite numbers. Where that call was asked for infinities (they stand among its arguments) it goes to the call that made NaN.
    """

    def __init__(self) -> None:
        self.note: str | None = None

    def add(self, errors: Errors, path: str) -> None:
        """Look at the matched calls of some steps, until something was found; ``path`` is the candidate's."""
        if self.note is None and errors.streams[1].not_finite.any():
            self.look(errors.streams, errors.slots, errors.outputs & np.isfinite(errors.absolute), path)

    def look(self, streams: tuple[Stream, Stream], slots: tuple[Numbers, Numbers], made: Array, path: str) -> None:
        """Look at matched slots, of which some were ``made`` by their call and compared."""
        (baseline, candidate), (k, j) = streams, slots
        bad = candidate.not_finite
        kept = np.flatnonzero(baseline.not_finite[k] & bad[j] & made & candidate.keeps[candidate.call[j]])
        if len(kept):
            self.note = _note(candidate, _first(candidate, bad, int(j[kept[0]])), path)


def _first(stream: Stream, bad: Array, slot: int) -> int:
    """Return the slot that was bad first, of those from which a bad slot comes."""
    found = _source(stream, bad, slot)
    asked = "inf" in (stream.value(int(stream.arguments[stream.call[found]])) or "").lower()
    nan = stream.counts[:, 0] > 0
    return _source(stream, nan, slot) if asked and nan[slot] else found


def _source(stream: Stream, bad: Array, slot: int) -> int:
    """Walk back from a bad slot, into calls and along what they read."""
    reads, gives = (stream.names.table(kind)[stream.slot] for kind in (is_input, is_output))
    for _ in range(STEPS):
        call = int(stream.call[slot])
        read = [n for n in _of(stream, call) if bad[n] and reads[n]]
        made = [n for inner in stream.inside(call).tolist() for n in _of(stream, inner) if bad[n] and gives[n]]
        if read:
            before = _producer(stream, bad, read[0])
            if before == NONE:
                return read[0]
            slot = before
        elif made:
            slot = made[0]
        else:
            break
    return slot


def _of(stream: Stream, call: int) -> range:
    return range(*stream.starts[call : call + 2].tolist())


def _producer(stream: Stream, bad: Array, slot: int) -> int:
    """Return the bad result that an earlier call gave for what is read, `NONE` where none is known."""
    call = int(stream.producers[slot])
    if not 0 <= call < int(stream.call[slot]):
        return NONE
    named = [n for n in _of(stream, call) if bad[n] and stream.slot[n] == stream.producer_slot[slot]]
    return named[0] if named else NONE


def _note(stream: Stream, slot: int, path: str) -> str:
    row = stream.row(int(stream.call[slot]))
    what = " and ".join(name for name, count in zip(KINDS, stream.counts[slot].tolist(), strict=True) if count > 0)
    name = stream.names.names[int(stream.slot[slot])]
    made = f"made {what} first in" if is_output(name) else f"got {what}, which no recorded call made, first in {name} of"
    return f"both runs {made} {row.op} ({row.key}): `trueup overflow {path}` says why and what it did"


class Uncompared:
    """Counts, part by part, what was not compared, or not call by call."""

    def __init__(self) -> None:
        self._compared = self._by_statistics = self._untold = self._rewritten = 0
        """Matched calls, those compared by another tool's statistics alone, those of which its dump lacks gradients that nobody
        reads, and calls that are written another way on the other side."""
        self._not_compared: Counter[Reason] = Counter()
        self._left_open: dict[Reason, Row] = {}  # why calls were not compared, and the first of them
        self.of_parts: list[Reason] = []  # what there is to know of single parts, whatever the verdict

    def add(self, part: Part) -> None:
        """Look at a part."""
        errors, verdicts = part.verdicts.errors, part.verdicts
        self._compared += len(verdicts)
        self._by_statistics += len(distinct(errors.pair[errors.method == STATISTICS]))
        self._untold += verdicts.untold
        self._rewritten += max(part.rewritten)
        self._not_compared.update(verdicts.incomparable.values())
        for pair, why in verdicts.incomparable.items():
            if why not in self._left_open:
                self._left_open[why] = errors.streams[1].row(int(errors.calls[1][pair]))
        if part.elsewhere is not None:
            self.of_parts.append(part.elsewhere)
        if part.replaced is not None:
            self.of_parts.append(Why.REPLACED(errors.distance(part.replaced).slot, part.reader(part.replaced).key))

    def reasons(self, found: Comparison) -> list[Said]:
        """Return what keeps two runs from being called aligned, and why most calls that were not compared were not."""
        why_not = self._not_compared.most_common(1)
        first = [] if found.outputs else self._without_outputs(found)
        return [*first, *found.keeping, *(Why.NOT_COMPARED(calls, why, self._left_open[why].key) for why, calls in why_not)]

    def _without_outputs(self, found: Comparison) -> list[Reason]:
        if found.overlap.levels == ["module"] and (found.covered or found.uncovered):
            return [Why.NO_MODULE(Why.SHOWS_OPTIMIZER(found.overlap.finer()))]
        return [Why.NO_OUTPUT()] if self._compared else []

    def roughly(self, *, mixed: bool) -> list[Said]:
        """Return what another tool's dump did not tell; between frameworks its statistics are said elsewhere."""
        found = [Why.STATISTICS(self._by_statistics, self._compared)] if self._by_statistics and not mixed else []
        return [*found, *([Why.INNER(self._untold)] if self._untold else [])]

    def rewritten(self) -> list[Reason]:
        """Return how many calls are written another way on the other side."""
        return [Why.REWRITTEN(self._rewritten)] if self._rewritten else []


def unseen(ranks: Iterable[Origins]) -> list[Reason]:
    """Return what was not seen of a training's weights, if there is anything."""
    held = list(ranks)
    seen = [set().union(*(origins.seen[side] for origins in held)) for side in (0, 1)]
    gradients = any(origins.gradients for origins in held)
    phases = seen[0] | seen[1]
    if "optimizer" in phases and any(origins.lacks_optimizer(side) for origins in held for side in (0, 1)):
        return [Why.NO_OPTIMIZER_DUMPED()] if "backward" in phases else []
    return no_optimizer(phases, gradients=gradients)


class Frameworks:
    """Gathers what was compared in other ways than within one framework."""

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._captures = captures
        self._is_translated = any(isinstance(capture, Translated) for capture in captures)
        self._first_shapes: Reason | None = None
        self._lone = self._bounded = self._known = 0

    def add(self, errors: Errors) -> None:
        """Count in one part of a comparison."""
        if not self._is_translated:
            return
        self._lone += errors.lone_weights
        self._bounded += int(np.count_nonzero(errors.method == STATISTICS))
        shapes = [n for n, reason in errors.reasons.items() if reason.why is Why.SHAPES and errors.outputs[n]]
        if shapes and self._first_shapes is None:
            n = min(shapes)
            call = errors.streams[1].row(int(errors.calls[1][errors.pair[n]]))
            self._first_shapes = Why.FIRST_SHAPE(call.key, errors.reasons[n])
        known = known_differences(errors)
        self._known += int(np.count_nonzero((known > 0) & (errors.absolute > 0)))

    def notes(self, mixed: Comparison) -> list[Said]:
        """Return each thing to know; ``mixed`` has what was not compared."""
        if not self._is_translated:
            return []
        first, second = (framework_of(capture) for capture in self._captures)
        unread = min(mixed.unread, default=None)
        found = (
            self._first_shapes,
            None if unread is None else Why.WRITTEN_UNREAD(unread[1], unread[0]),
            Why.PACKED_GRADIENTS(mixed.packed) if mixed.packed else None,
            Why.FRAMEWORKS(first, second) if first != second else None,
            Why.ORDERLESS(self._bounded) if self._bounded else None,
            Why.VARIANCES(self._known) if self._known else None,
            Why.PACKED(self._lone) if self._lone else None,
        )
        return [*(reason for reason in found if reason is not None), *self.defined()]

    def defined(self) -> list[str]:
        """Return what the two frameworks define in other ways in the candidate's optimizers."""
        first, second = (framework_of(capture) for capture in self._captures)
        held = next(iter(self._captures[1].ranks.values()), {})
        classes = [str(one.get("class")) for one in list_of(held_by(held), "optimizers")] if first != second else []
        return defined_otherwise(classes, str(first), str(second))
