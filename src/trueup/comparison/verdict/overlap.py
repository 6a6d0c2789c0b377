"""What two captures have in common, so that it can be compared: a framework, levels, ranks, steps; and inputs of their own."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.comparison.normalise.dialects import framework_of
from trueup.comparison.verdict.fragments import detail_note, filters
from trueup.comparison.verdict.precision import Precision, precision_of
from trueup.frameworks.tables import FRAMEWORKS
from trueup.model import LEVELS, TrueupError
from trueup.remedy import policy_note, recorded_uses
from trueup.store import Capture

BLIND = "at level module a forced run does not show what functions between modules compute: compare at level api or aten too"


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
        self.notes: list[str] = []
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
        if (said := detail_note(captures)) is not None:
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
            self.notes.append(f"only one capture holds level {', '.join(sorted(missing))}; compared at {', '.join(common)}")
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
                self.notes.append(f"{what} {_numbers(extra)} are only in {self._name(n)} and were not compared")
        return common

    def finer(self) -> str:
        """Say how the gradients of weights and the optimizer come to be compared, where they were not."""
        if all("api" in recorded_levels(capture) for capture in self._captures):
            return "compare at level api too, which both captures hold"
        return "record level api in both runs, with all phases"

    def _precision(self) -> Precision:
        manifests = [next(iter(c.ranks.values()), {}) for c in self._captures]
        for capture in self._captures:
            self.notes += [f"{capture.path.name}: {problem}" for problem in capture.problems]
        if (given := policy_note(*(recorded_uses(c.ranks.values()) for c in self._captures))) is not None:
            self.notes.append(given)
        found = precision_of([m.get("environment", {}) for m in manifests], [m.get("devices", []) for m in manifests])
        if found.matmul or found.convolution:
            what = " and ".join(n for n, on in (("matrix products", found.matmul), ("convolutions", found.convolution)) if on)
            self.notes.append(f"float32 {what} are rounded to TF32 or HF32, as a run declares: that much error is explained")
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
        TrueupError: they are, and one of them has no column in the tables of `trueup.frameworks`.
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


def notes_on(capture: Capture, levels: Sequence[str]) -> tuple[list[str], bool]:
    """Return what to say, and whether agreement at these levels proves nothing.

    Where each module gets the baseline's inputs and gradients, what a function between two modules computes wrongly is replaced
    before anything records it, unless the function itself is recorded.
    """
    lender = lender_of(capture)
    if lender is None:
        return [], False
    notes = [str(note) for manifest in capture.ranks.values() for note in manifest.get("notes") or ()]
    said = [note[:300] for note in notes if "inputs were forced" in note][:2] or [f"inputs were forced: those of {lender}"]
    said[0] += "; each call shows its own error alone"
    recorded = capture.root.get("levels")  # the loss is a call of level api in every capture
    blind = not any(level in recorded for level in {*levels} - {"module"}) if isinstance(recorded, list) else True
    return ([BLIND, *said] if blind else said), blind
