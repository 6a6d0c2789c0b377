"""What two captures have in common, so that it can be compared: a framework, levels, ranks, steps; and inputs of their own.

What keeps a capture from being all that its run did, in words: a run that did not end, other filters, slots recorded twice.

Two runs that were asked to record the same and did so to their end are whole, however little that is. Of a fragment nobody knows
what is missing, so no agreement of what is there makes two runs aligned.

What there is to say when the two captures are of different frameworks, or lay tensors out in other ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import NONE, Stream
from trueup.comparison.measures.measure import STATISTICS, Errors
from trueup.comparison.normalise.dialects import framework_of
from trueup.comparison.normalise.translated import Translated
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.verdict.evidence import known_differences
from trueup.comparison.verdict.judged import SIDES
from trueup.comparison.verdict.operands import Precision, precision_of
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.frameworks.tables import FRAMEWORKS
from trueup.foundation.model import LEVELS, PHASES, TrueupError
from trueup.foundation.store import Capture
from trueup.foundation.store.policy_uses import policy_note, recorded_uses

LONGEST = 120
"""Characters of a filter that are shown."""


def fragments(captures: Sequence[Capture]) -> list[Reason]:
    """Return of each capture whose run did not end, or was not recorded to its end, why that is."""
    return [
        Why.FRAGMENT(side, capture.steps[-1] if capture.steps else None, capture.unfinished[0], len(capture.unfinished) - 1 or None)
        for side, capture in zip(SIDES, captures, strict=True) if capture.unfinished
    ]  # fmt: skip


def filters(captures: Sequence[Capture]) -> tuple[tuple[Reason, ...], ...] | None:
    """Return the filters of two captures where they differ, or None.

    Levels, ranks and steps show in what was recorded; `Overlap` compares those.
    """
    first, second = (_filters(capture) for capture in captures)
    if first is None or second is None or first == second:
        return None
    return tuple(tuple(its[name] for name in its if first[name] != second[name]) for its in (first, second))


def details(captures: Sequence[Capture]) -> Reason | None:
    """Return that one run keeps less of each tensor than the other, or None."""
    first, second = (capture.root.get("detail") for capture in captures)
    if first == second or not (isinstance(first, str) and isinstance(second, str)):
        return None
    return Why.DETAILS(first[:LONGEST], second[:LONGEST])


def twice(capture: Capture, stream: Stream) -> Reason | None:
    """Return a slot that a call has twice, which no run records: some part of the records is there twice; or None."""
    if stream.imported or stream.translated or (slot := _repeated(stream)) == NONE:
        return None
    row = stream.row(int(stream.call[slot]))
    return Why.TWICE(capture.path.name, stream.names.name(int(stream.slot[slot])), row.key)


def _repeated(stream: Stream) -> int:
    """Return a slot that begins its call a second time, `NONE` where there is none.

    A later slot may be there twice: of ``mul(x, x)`` both factors have one gradient.
    """
    begins = stream.starts[:-1][stream.call]
    again = (stream.slot == stream.slot[begins]) & (np.arange(len(stream.slot)) > begins)
    return int(np.argmax(again)) if again.any() else NONE


def _filters(capture: Capture) -> dict[str, Reason] | None:
    """Return the filters of a capture, None where it tells none (another tool's, or one made by hand)."""
    config = capture.root.get("config")
    if not isinstance(config, dict) or not all(isinstance(config.get(name), list) for name in ("phases", "include", "exclude")):
        return None
    said = {}
    for name, option in (("phases", "--phase"), ("include", "--include"), ("exclude", "--exclude")):
        values: list[Any] = sorted(map(str, config[name]))
        nothing = not values or (name == "phases" and set(values) >= set(PHASES))
        said[name] = Why.FILTER(option, None if nothing else " ".join(values)[:LONGEST])
    return said


class Mixed:
    """Gathers what was compared in other ways than within one framework.

    Args:
        captures: baseline and candidate.
    """

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._captures = captures
        self._translated = [capture for capture in captures if isinstance(capture, Translated)]
        self._first_shapes: Reason | None = None
        self._stepped = False
        """Whether what optimizers made of weights was compared."""
        self._lone_gradients = self._lone = self._bounded = self._known = 0

    def add(self, errors: Errors) -> None:
        """Count in one part of a comparison."""
        if not self._translated:
            return
        self._lone += errors.lone_weights
        self._lone_gradients += errors.lone_gradients
        stream = errors.streams[1]
        self._stepped |= bool((stream.op[errors.calls[1]] == stream.names.number(STEP)).any())
        self._bounded += int(np.count_nonzero(errors.method == STATISTICS))
        shapes = [n for n, reason in errors.reasons.items() if reason.why is Why.SHAPES and errors.outputs[n]]
        if shapes and self._first_shapes is None:
            n = min(shapes)
            call = errors.streams[1].row(int(errors.calls[1][errors.pair[n]]))
            self._first_shapes = Why.FIRST_SHAPE(call.key, errors.reasons[n])
        known = known_differences(errors)
        self._known += int(np.count_nonzero((known > 0) & (errors.absolute > 0)))

    @property
    def is_blind(self) -> bool:
        """Whether something that both runs did was not compared."""
        return any(capture.updates.unseen for capture in self._translated) or self._are_gradients_blind

    @property
    def _are_gradients_blind(self) -> bool:
        return self._lone_gradients > 0 and not self._stepped

    def notes(self) -> list[Reason]:
        """Return each thing to know."""
        if not self._translated:
            return []
        first, second = (framework_of(capture) for capture in self._captures)
        unread = min(set().union(*(capture.updates.unseen for capture in self._translated)), default=None)
        found = (
            self._first_shapes,
            None if unread is None else Why.WRITTEN_UNREAD(unread[1], unread[0]),
            Why.PACKED_GRADIENTS(self._lone_gradients) if self._are_gradients_blind else None,
            Why.FRAMEWORKS(first, second) if first != second else None,
            Why.ORDERLESS(self._bounded) if self._bounded else None,
            Why.VARIANCES(self._known) if self._known else None,
            Why.PACKED(self._lone) if self._lone else None,
        )
        return [reason for reason in found if reason is not None]


class Overlap:
    """What is compared of two captures, and what there is to say of the rest.

    Args:
        captures: baseline and candidate.
        level: the levels that are wanted; None for all that both hold.

    Raises:
        TrueupError: they have nothing in common.
    """

    def __init__(self, captures: tuple[Capture, Capture], level: str | Sequence[str] | None) -> None:
        self._captures = captures
        for capture in captures:
            require_records(capture)
        self.mixed = require_common_names(*captures)
        """Whether the captures are of different frameworks."""
        self.notes: list[Reason | str] = []
        self.is_whole = True
        """Whether nothing was left out because only one run holds it."""
        self.levels = self._levels(level)
        held = frozenset().union(*map(recorded_levels, captures))
        self.chosen = None if held == set(self.levels) else self.levels
        """Levels to read, None for all."""
        self.ranks = self._common("ranks", [sorted(c.ranks) for c in captures])
        self.steps = self._common("steps", [c.steps for c in captures])
        self.precision = self._precision()
        self.filters = filters(captures)
        """How the filters of the two captures differ, None where they do not."""
        if (said := details(captures)) is not None:
            self.notes.append(said)

    def _levels(self, level: str | Sequence[str] | None) -> list[str]:
        wanted = LEVELS if level is None else (level,) if isinstance(level, str) else tuple(level)
        for name in wanted:
            if name not in LEVELS:
                raise TrueupError(f"level {name!r} is unknown: expected {', '.join(LEVELS)}")
        held = [[name for name in LEVELS if name in recorded_levels(capture)] for capture in self._captures]
        for capture, levels in zip(self._captures, held, strict=True):
            if not levels and capture.lost:
                raise TrueupError(f"{capture.path} holds no readable records: {min(capture.lost)}; record again")
        common = [n for n in wanted if all(n in h for h in held)]
        if not common:
            raise TrueupError(
                f"the captures have no level in common among {', '.join(wanted)}: {self._name(0)} holds "
                f"{', '.join(held[0]) or 'none'}, {self._name(1)} holds {', '.join(held[1]) or 'none'}; "
                "capture both with the same --level"
            )
        missing = {n for n in wanted if n in held[0] or n in held[1]} - set(common)
        if missing:
            self.is_whole = not all(missing & _asked(capture) for capture in self._captures)  # else one lacks what it asked for
            self.notes.append(Why.LEVELS(tuple(sorted(missing)), tuple(common)))
        return common

    def _common(self, what: str, sides: list[list[int]]) -> list[int]:
        common = sorted(set(sides[0]) & set(sides[1]))
        if not common:
            raise TrueupError(
                f"the captures have no {what} in common: {self._name(0)} holds {_numbers(sides[0])}, "
                f"{self._name(1)} holds {_numbers(sides[1])}; capture the same {what} on both sides"
            )
        for n, side in enumerate(sides):
            if extra := sorted(set(side) - set(common)):
                self.is_whole = False
                self.notes.append(Why.ONLY_IN(what, _numbers(extra), self._name(n)))
        return common

    def finer(self) -> Reason:
        """Return how the gradients of weights and the optimizer come to be compared, where they were not."""
        if all("api" in recorded_levels(capture) for capture in self._captures):
            return Why.LEVEL_API()
        return Why.RECORD_API()

    def _precision(self) -> Precision:
        manifests = [next(iter(c.ranks.values()), {}) for c in self._captures]
        for capture in self._captures:
            self.notes += [Why.PROBLEM(capture.path.name, problem) for problem in capture.problems]
        if (given := policy_note(*(recorded_uses(c.ranks.values()) for c in self._captures))) is not None:
            self.notes.append(given)
        found = precision_of([m.get("environment", {}) for m in manifests], [m.get("devices", []) for m in manifests])
        if found.matmul or found.convolution:
            products = (("matrix products", found.matmul), ("convolutions", found.convolution))
            self.notes.append(Why.DECLARED(tuple(name for name, on in products if on)))
        return found

    def _name(self, side: int) -> str:
        return str(self._captures[side].path)


def recorded_levels(capture: Capture) -> frozenset[str]:
    """Return the levels that a capture was asked for and holds: the loss is a row of level api in all of them."""
    asked, held = _asked(capture), capture.levels
    return frozenset(level for level in held if level in asked) or held


def _asked(capture: Capture) -> frozenset[str]:
    """Return the levels that a capture was asked for; those that it holds where nothing says it."""
    asked = capture.root.get("levels")
    return frozenset(map(str, asked)) if isinstance(asked, list) else capture.levels


def require_records(capture: Capture) -> None:
    """Raise TrueupError if a capture holds nothing."""
    if not capture.rows:
        why = (capture.lost or capture.problems or ["nothing was captured"])[0]
        raise TrueupError(f"{capture.path} holds no records: {why}; record again")


def require_common_names(first: Capture, second: Capture) -> bool:
    """Tell whether two captures are of different frameworks.

    Raises:
        TrueupError: they are, and one of them has no column in the tables of `trueup.foundation.frameworks`.
    """
    names = [framework_of(capture) for capture in (first, second)]
    if None in names or names[0] == names[1]:
        return False
    if not all(name in FRAMEWORKS for name in names):
        raise TrueupError(
            f"the captures are of different frameworks: {first.path} of {names[0]}, {second.path} of {names[1]}; "
            f"common names are known of {', '.join(FRAMEWORKS[:-1])} and {FRAMEWORKS[-1]}"
        )
    return True


def _numbers(values: list[int]) -> str:
    """Write sorted numbers in short: ``0-2, 7``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[1]}" for r in runs) or "none"


def lender_of(capture: Capture) -> str | None:
    """Return the capture whose inputs a run was given (``trueup capture --inputs-from``), None for an ordinary run."""
    config = capture.root.get("config")
    found = config.get("inputs_from") if isinstance(config, dict) else None
    return found[:300] if isinstance(found, str) else None


def forced(capture: Capture, levels: Sequence[str]) -> tuple[list[Reason | str], bool]:
    """Return what to say, and whether agreement at these levels proves nothing.

    Where each module gets the baseline's inputs and gradients, what a function between two modules computes wrongly is replaced
    before anything records it, unless the function itself is recorded.
    """
    lender = lender_of(capture)
    if lender is None:
        return [], False
    notes = [str(note) for manifest in capture.ranks.values() for note in manifest.get("notes") or ()]
    noted = [note[:300] for note in notes if "inputs were forced" in note]
    said: list[Reason | str] = [Why.FORCED(noted[0] if noted else Why.LENT(lender)), *noted[1:2]]
    recorded = capture.root.get("levels")  # the loss is a call of level api in every capture
    blind = not any(level in recorded for level in {*levels} - {"module"}) if isinstance(recorded, list) else True
    return ([Why.BLIND(), *said] if blind else said), blind
