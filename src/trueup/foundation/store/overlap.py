"""What two captures have in common, so that it can be compared (a framework, levels, ranks, steps), and inputs of their own.

It also says what keeps a capture from being all of its run. Two that were asked to record the same and did so to their end are
whole, however little that is. Of a fragment (a run that did not end, other filters, slots recorded twice) nobody knows what is
missing, so agreement of the rest does not make two runs aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property

from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import LEVELS, TrueupError
from trueup.foundation.settings import differing
from trueup.foundation.store.declared import (
    Precision,
    asked_levels,
    details,
    filters,
    policy_note,
    precision_of,
    recorded_levels,
    recorded_uses,
    require_common_names,
    require_records,
)
from trueup.foundation.store.reader import Capture
from trueup.foundation.words.wording import in_runs


def _in_short(numbers: list[int]) -> str:
    return in_runs(numbers, ", ") or "none"


class Overlap:
    """What is compared of two captures, and what there is to say of the rest. ``level``: the levels wanted, None for all that
    both hold. Raises TrueupError where they have nothing in common."""

    def __init__(self, captures: tuple[Capture, Capture], level: str | Sequence[str] | None) -> None:
        self._captures = captures
        for capture in captures:
            require_records(capture)
        self.mixed = require_common_names(*captures)  # whether the captures are of different frameworks
        self.notes: list[Reason | str] = []
        self.is_whole = True  # whether nothing was left out because only one run holds it
        self.levels = self._levels(level)
        held = frozenset().union(*map(recorded_levels, captures))
        self.chosen = None if held == set(self.levels) else self.levels  # levels to read, None for all
        self.ranks = self._common("ranks", [sorted(c.ranks) for c in captures])
        self.steps = self._common("steps", [c.steps for c in captures])
        self.precision = self._precision()
        self.filters = filters(captures)  # how the filters of the two captures differ, None where they do not
        if (said := details(captures)) is not None:
            self.notes.append(said)

    @cached_property
    def same_kernels(self) -> bool:
        """Whether nothing that both runs say is a reason for other kernels: libraries, switches, threads, processor."""
        first, second = (next(iter(capture.ranks.values()), {}) for capture in self._captures)
        return not any(one.group in ("switch", "version") and one.severity != "cannot" for one in differing(first, second))

    def of(self, captures: tuple[Capture, Capture]) -> Overlap:
        """Return the same of captures that hold some of the ranks."""
        found = copy(self)
        found._captures = captures
        return found

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
            self.is_whole = not all(missing & asked_levels(capture) for capture in self._captures)  # else one lacks it
            self.notes.append(Why.LEVELS(tuple(sorted(missing)), tuple(common)))
        return common

    def _common(self, what: str, sides: list[list[int]]) -> list[int]:
        common = sorted(set(sides[0]) & set(sides[1]))
        if not common:
            raise TrueupError(
                f"the captures have no {what} in common: {self._name(0)} holds {_in_short(sides[0])}, "
                f"{self._name(1)} holds {_in_short(sides[1])}; capture the same {what} on both sides"
            )
        for n, side in enumerate(sides):
            if extra := sorted(set(side) - set(common)):
                self.is_whole = False
                self.notes.append(Why.ONLY_IN(what, _in_short(extra), self._name(n)))
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
