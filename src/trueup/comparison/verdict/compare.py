"""Two captures, lined up and judged part by part, and what follows for both as a whole: facts, of which others make a `Result`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import Row, Stream
from trueup.comparison.holes import Recorded
from trueup.comparison.limits import losses_apart, summed
from trueup.comparison.measures.measure import measure
from trueup.comparison.normalise import optimizer_steps
from trueup.comparison.normalise.translated import Translated, sides, translated
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.verdict.align import align
from trueup.comparison.verdict.evidence import yardstick_of
from trueup.comparison.verdict.exchange import Exchange
from trueup.comparison.verdict.judge import judge
from trueup.comparison.verdict.judged import LASTING, SIDES, Judged, OwnErrors, Part, Passes, Side, Suspect
from trueup.comparison.verdict.locate import is_quiet, locate, rank_culprits
from trueup.comparison.verdict.origins import Origins
from trueup.foundation.facts.criteria import FRAMEWORKS, Criterion
from trueup.foundation.facts.criteria import load as load_criterion
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import is_weight
from trueup.foundation.facts.why import INCOMPARABLE, UNSIZED, Reason, Why
from trueup.foundation.frameworks.mapping import Mapping
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import Capture
from trueup.foundation.store.call_columns import NEEDED, SHARED, read_payload, twice
from trueup.foundation.store.columns import Overview, Vocabulary
from trueup.foundation.store.declared import Overlap, forced, fragments, keeps_all, lender_of, require_common_names, require_records
from trueup.foundation.store.read_ahead import Ahead, Place, Read, Records, RecordsOfStep, places

LISTED = 200
"""Unmatched calls that are kept; all are counted."""

Said = Reason | str  # a reason, or what another room says in its own words


class Comparison:
    """What two captures have in common, judged part by part (`run`), and the verdict (`verdict`) with its reasons. ``level``
    None: all that both hold; ``repeats``: the baseline's run made again; ``reference``: the training in float64; ``own_errors``:
    whether candidate calls are wrong by themselves. Raises TrueupError if they cannot be compared."""

    def __init__(
        self, captures: tuple[Capture, Capture], level: str | Sequence[str] | None, criterion: Criterion, mapping: Mapping,
        repeats: Sequence[Capture] = (), reference: Capture | None = None, own_errors: OwnErrors | None = None,
    ) -> None:  # fmt: skip
        self.own_errors = own_errors
        self.asked = self.judged = self.cleared = 0  # calls behind a culprit that were asked about, judged, and found right
        self.overlap = Overlap(captures, level)
        self.captures = sides(*captures, mapping, mixed=self.overlap.mixed)
        self._stepped, self._lone_gradients = False, 0  # was an optimizer compared; gradients that were not
        self.forced = any(lender_of(capture) is not None for capture in self.captures)
        if criterion.name == "default" and self.overlap.mixed:
            criterion = load_criterion(FRAMEWORKS)
        self.criterion, self.mapping = criterion, mapping
        self.runs, self.repeats = self._read_by(repeats, reference), len(repeats)  # all captures that are read
        self.overviews = [Overview(capture) for capture in self.runs[: 2 + self.repeats]]
        self.ranks, self.steps = self.overlap.ranks, self.overlap.steps
        self.notes: list[Said] = list(self.overlap.notes)  # what there is to know of the captures and parts, whatever the verdict
        self.uncompared = not self.overlap.is_whole  # whether something of one run was not compared: never aligned then
        alone, lost = all(len(capture.ranks) == 1 for capture in self.captures), any(capture.lost for capture in self.captures)
        self.origins = {rank: Origins(alone, parted=lost) for rank in self.ranks}  # what a capture lost no run lacked
        self.exchange = Exchange(dict.fromkeys(self.ranks), limited=bool(criterion.limits))
        recorded = [(keeps_all(capture.root.get("config")), capture.steps[0] == self.steps[0]) for capture in self.captures]
        self.recorded = [{rank: Recorded(*facts) for rank in self.ranks} for facts in recorded]
        self.names = Vocabulary()
        self.see: Sequence[Callable[[Part], None]] = ()
        self.beside: Callable[[Stream], Any] | None = None
        self.in_full = False
        self.suspects: list[Suspect] = []
        self.unmatched: list[tuple[Side, Row]] = []  # the first calls of either run that nothing accounts for
        self.dead_ends: list[tuple[Side, Row]] = []  # those of them that compute what nobody reads
        self.covered = self.uncovered = 0  # calls of either run that others account for, and that nothing does
        self.incomparable = self.outputs = 0  # matched calls that could not be compared, and those of which an output was
        self.passes: dict[int, Passes] = {}  # how often each side goes backward in steps compared by what accumulates
        self.unexplained: list[Reason] = []
        self.twice: list[Reason] = []
        self.holes: list[tuple[str, Reason]] = []

    @property
    def unread(self) -> set[tuple[int, int]]:
        """Ranks and steps of a capture of two frameworks whose optimizer wrote what no recorded forward reads."""
        return set().union(*(capture.updates.unseen for capture in self.captures if isinstance(capture, Translated)))

    @property
    def packed(self) -> int:
        """How many gradients were not compared, for a framework packs their weights, nor what an optimizer made of them."""
        return 0 if self._stepped else self._lone_gradients

    def _read_by(self, repeats: Sequence[Capture], reference: Capture | None) -> list[Capture]:
        """Return all captures that are read, in one form."""
        others = [*repeats, *([] if reference is None else [reference])]
        for capture in others:
            require_records(capture)
            if require_common_names(self.captures[0], capture):
                raise TrueupError(f"{capture.path} and the baseline are of different frameworks; repeat the baseline in its own")
        return [*self.captures, *translated(others, self.mapping, mixed=self.overlap.mixed)]

    def run(self, *see: Callable[[Part], None], beside: Callable[[Stream], Any] | None = None, in_full: bool = False) -> None:
        """Compare all that the runs have in common. ``see`` gets what was measured and judged of each part, while it is at hand;
        ``beside`` is taken of each stream meanwhile, on another thread (`Part.beside`); ``in_full``: they want `Errors.bytes`."""
        self.see, self.beside, self.in_full = see, beside, in_full or bool(self.criterion.limits)
        found = places(self.runs, self.ranks, self.steps)
        seen: set[tuple[int, int]] = set()
        with Ahead(self.runs, self.overlap.chosen, found, NEEDED, SHARED) as ahead:
            for at, place in enumerate(found):
                self.exchange.close(place.steps[0])
                reads = ahead.reads(at)
                if self.overlap.chosen is None:  # else records of other levels were not read
                    seen.update((place.rank, step) for step in place.steps)
                    for overview, records in zip(self.overviews, reads, strict=False):
                        overview.add(records(Overview.COLUMNS))
                if len(place.steps) > 1 and self._at_once(place, reads, ahead):
                    continue
                for step in place.steps:
                    self._part(Place(place.rank, (step,)), [records.of(step) for records in reads], ahead, len(place.steps) == 1)
        for overview in self.overviews:
            overview.add_the_rest(seen)
        self.exchange.finish()
        self.suspects = [s for answered in (self.exchange.answered,) for s in self.suspects if id(s) not in answered]
        self.unexplained += [Why.BROUGHT(suspect.judged.call.candidate.key, why) for suspect, why in self.exchange.unknown]
        for origins in self.origins.values():
            self._unmatched(left := [(SIDES[side], row) for side in (0, 1) for row in origins.unread(side)])
            self.dead_ends += [(side, row) for side, row in left if row.phase not in LASTING]
        self.see = ()  # who sees the parts knows the comparison

    @cached_property
    def ranked(self) -> list[Suspect]:
        """The suspects in the order in which they are to be looked at; what another rank explains is none."""
        return rank_culprits(self.suspects, self.reached)

    @property
    def certain(self) -> list[Suspect]:
        """The culprits."""
        return [suspect for suspect in self.ranked if suspect.certain]

    @cached_property
    def reached(self) -> dict[int, tuple[int, int]]:
        """By rank, the step and place from which on it computes with what another rank got wrong."""
        found: dict[int, tuple[int, int]] = {}
        for suspect, _ in self.exchange.received:
            place = suspect.step, suspect.place
            found[suspect.rank] = min(place, found.get(suspect.rank, place))
        return found

    @cached_property
    def lent(self) -> tuple[list[Said], bool]:
        """What there is to say of a candidate with the baseline's inputs, and whether its agreement proves nothing."""
        return forced(self.captures[1], self.overlap.levels)

    @cached_property
    def verdict(self) -> VerdictWord:
        """Whatever was not compared, or not seen to arise, keeps two runs from being called aligned."""
        if self.certain:
            return "deviates"
        uncompared = self.uncompared or self.lent[1] or self.unread or self.packed
        is_open = self.uncovered or self.incomparable or uncompared or self.ranked or self.keeping
        return "inconclusive" if is_open or not self.outputs else "aligned"

    @cached_property
    def keeping(self) -> list[Reason]:
        """What keeps two runs without a culprit from being called aligned, beside calls that were not compared."""
        lost = [*(text for capture in self.captures for text in capture.lost), *self.twice]
        one_sided = self.covered + self.uncovered
        found = (
            Why.UNREADABLE(len(lost), lost[0]) if lost else None,
            Why.MISSING(*self.holes[0]) if self.holes else None,
            *fragments(self.captures, SIDES),
            Why.FILTERS(*self.overlap.filters, one_sided) if self.overlap.filters and one_sided else None,
            self._losses_apart(),
            *self.unexplained[:1],
        )
        return [reason for reason in found if reason is not None]

    def _losses_apart(self) -> Reason | None:
        first, second, *repeats = (overview.losses for overview in self.overviews)
        if self.passes:
            counts = [{step: (its.baseline, its.candidate)[side] for step, its in self.passes.items()} for side in (0, 1)]
            first, second = (summed(losses, of) for losses, of in zip((first, second), counts, strict=True))
        return losses_apart(first, second, self.criterion.loss, repeats, self.criterion.yardstick)

    def _at_once(self, place: Place, reads: Sequence[Read], ahead: Ahead) -> bool:
        """Compare several small steps in one go, unless one of them has to be looked at by itself: return whether it was done."""
        streams = self._streams(reads)
        self._look_for_holes(place, streams)
        if not all(stream.is_ordered and len(stream.steps) == len(place.steps) for stream in streams):
            return False
        beside = self._meanwhile(ahead, streams)
        streams = self._normalised(streams)
        part = self._judged(place, streams)
        if not is_quiet(part, self.criterion, self.origins[place.rank]):
            return False
        self._keep(part, beside)
        return True

    def _part(self, place: Place, reads: Sequence[Read], ahead: Ahead, alone: bool) -> None:
        rank, (step,) = place.rank, place.steps
        streams = self._streams(reads)
        if alone:
            self._look_for_holes(place, streams)
        held = [len(stream) > 0 for stream in streams[:2]]
        if not all(held):
            if any(held):
                self.uncompared = True
                self.notes.append(Why.ONE_SIDE_HOLDS(rank, step, str(self.captures[held.index(True)].path)))
            return
        for capture, stream in zip(self.runs[2:], streams[2:], strict=True):
            if not len(stream):
                self.notes.append(Why.RUN_LACKS(str(capture.path), rank, step))
        beside = self._meanwhile(ahead, streams)
        # A run that was killed in a step has the first calls of it: what the other has more is no difference of the two.
        cut_off = any(capture.unfinished and step == capture.steps[-1] for capture in self.captures)
        streams = streams if cut_off else self._normalised(streams)
        part = self._judged(place, streams)
        locate(part, self.criterion, self.origins[rank], first_step=step == self.steps[0], from_start=step == 0,
               forced=self.forced, own_errors=self.own_errors, alike=self.overlap.same_kernels)  # fmt: skip
        if cut_off:  # what lacks calls, or its own results, lacks what the kill cut off
            kept = (s for s in part.suspects if s.kind != "region" and (s.kind != "argument" or s.judged.worst))
            part.suspects = [s for s in kept if all(why.why not in (Why.NO_GRADIENT, Why.NOT_UPDATED) for why in s.because)]
        self._keep(part, beside)

    def _streams(self, reads: Sequence[Read]) -> list[Stream]:
        values, found = Vocabulary(), list[Stream]()
        for read, capture in zip(reads, self.runs, strict=True):
            like = found[0] if found else None
            translated = isinstance(capture, Translated)
            sketches = read.sketches if isinstance(read, (Records, RecordsOfStep)) else None
            how = {"imported": capture.imported, "translated": translated}
            found.append(Stream(read, self.names, values, **how, like=like, sketches=sketches))
        return found

    def _look_for_holes(self, place: Place, streams: Sequence[Stream]) -> None:
        """Find what a capture lacks that is said to be whole; other tools' dumps never are."""
        for capture, stream, recorded in zip(self.captures, streams, self.recorded, strict=False):
            if capture.imported or capture.unfinished or capture.lost or self.overlap.mixed or not len(stream):
                continue
            if self.overlap.chosen is not None:
                stream = Stream(partial(capture.records, rank=place.rank, step=place.steps), self.names, Vocabulary())
            if (hole := recorded[place.rank].hole(stream)) is not None:
                self.holes.append((capture.path.name, hole))

    def _normalised(self, streams: list[Stream]) -> list[Stream]:
        """Return the streams in one form, where the two runs say the same in other words."""
        steps = optimizer_steps.applies(streams, self.runs)
        return optimizer_steps.rewrite(streams, self.runs, steps) if len(steps) else streams

    def _meanwhile(self, ahead: Ahead, streams: Sequence[Stream]) -> list[Future[Any]]:
        return [] if self.beside is None else [ahead.meanwhile(self.beside, stream) for stream in streams[:2]]

    def _judged(self, place: Place, streams: Sequence[Stream]) -> Part:
        baseline, candidate = streams[:2]
        alignment = align(baseline, candidate, self.mapping)
        payloads = [partial(read_payload, capture, place.rank) for capture in self.runs]
        errors = measure(alignment, baseline, candidate, (payloads[0], payloads[1]), in_full=self.in_full)
        yardstick = yardstick_of(streams, payloads, self.repeats, self.mapping)
        verdicts = judge(errors, self.criterion, self.overlap.precision, yardstick, explain=not errors.all_same)
        return Part(place.rank, place.steps[0], verdicts, alignment, yardstick)

    def _keep(self, part: Part, beside: Sequence[Future[Any]]) -> None:
        """Count in a part, and have it seen while its streams are at hand."""
        part.beside = [found.result() for found in beside]
        errors, verdicts = part.verdicts.errors, part.verdicts
        for see in self.see:
            see(part)
        self.suspects += part.suspects
        self.exchange.keep(part)
        self._lone_gradients += errors.lone_gradients
        self._stepped |= bool((errors.streams[1].op[errors.calls[1]] == errors.streams[1].names.number(STEP)).any())
        self.covered += len(part.alignment.only_baseline) + len(part.alignment.only_candidate)
        self._unmatched(part.uncovered)
        self.asked, self.judged, self.cleared = map(sum, zip((self.asked, self.judged, self.cleared), part.own_errors, strict=True))
        self.incomparable += int(np.count_nonzero((verdicts.role == UNSIZED) | (verdicts.role == INCOMPARABLE)))
        self.outputs += int(np.count_nonzero(verdicts.worst >= 0))
        self.twice += [] if self.twice else self._twice(part)
        self._say(part)

    def _say(self, part: Part) -> None:
        """Keep what there is to say of a part as a whole."""
        errors, passes = part.verdicts.errors, part.passes
        if passes is not None:
            self.passes[part.step] = passes
            said = Why.PASSES(part.step, passes.baseline, passes.candidate, passes.sure)
            (self.notes if passes.sure else self.unexplained).append(said)
        if part.narrowed is not None:
            sides = zip(errors.streams, errors.slots, strict=True)
            first, second = (stream.dtype_of(int(slots[part.narrowed])) for stream, slots in sides)
            self.unexplained.append(Why.ROUNDS(part.reader(part.narrowed).key, second, first))
        self.unexplained += [self._unseen(part, *found) for found in part.unexplained[:1]]
        if part.stale is not None:
            error = errors.distance(part.stale[0])
            self.unexplained.append(Why.STALE(error.slot, part.reader(part.stale[0]).key, error.relative, part.stale[1]))

    def _unseen(self, part: Part, judged: Judged, slot: str) -> Reason:
        """Return that a difference came in that no compared call made."""
        call, finer = judged.call.candidate, self.overlap.finer()
        what = slot, call.key, judged.call.slots[slot].relative
        updated = self.origins[part.rank].updated
        if updated is not None and not updated.sure and is_weight(slot):
            return Why.NOISY(*what, Why.SHOWS_OPTIMIZER(finer))
        behind = self.overlap.levels == ["module"] and (call.parent is not None or call.phase == "backward" or has(call.op, "loss"))
        everything = self.steps[0] == 0 and all(recorded[part.rank].whole for recorded in self.recorded)
        return Why.UNSEEN(*what, Why.SHOWS_BETWEEN(finer) if behind else Why.LOOK_BACK() if everything else Why.ALL_PHASES())

    def _twice(self, part: Part) -> list[Reason]:
        first, second = part.streams
        alike = first.call is second.call and first.slot is second.slot  # what is true of one is true of both
        sides = zip(self.captures[: 1 if alike else 2], part.streams, strict=False)
        return [why for capture, stream in sides if (why := twice(capture, stream)) is not None]

    def _unmatched(self, calls: Sequence[tuple[Side, Row]]) -> None:
        self.uncovered += len(calls)
        self.covered -= len(calls)
        self.unmatched += calls[: LISTED - len(self.unmatched)]
