"""Casts that destroy numbers: beyond the range, below it, to integers; found in the statistics of one run.

    1 dangerous cast (106 looked at): head, forward, step 0, rank 0 (torch.Tensor.half), float32 to float16: 55 of 64 elements
    become infinite: the input reaches 7.70e5, the largest float16 is 65504 [net/train.py:11 in forward]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trueup.analysis.audit.danger import Danger, Kind, Numbers, family, is_mask, judge
from trueup.analysis.audit.operators import cast_source, is_product
from trueup.analysis.audit.reading import Found, Places, Steps, calls, described, dtypes, opened, outermost, parts
from trueup.foundation.facts.anomaly import Place
from trueup.foundation.store import Capture
from trueup.foundation.words.wording import clean, counted, short_source

MOST = 1000
"""Casts that are described."""
_STATISTICS = ("min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_zero", "n_saturated")
_COLUMNS = (*_STATISTICS, "numel", "shape", "sketch")


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast that lost more than rounding does."""

    place: Place
    kind: Kind
    """``overflow``: elements become infinite. ``not finite``, ``range``, ``vanishes``, ``fraction``: to an integer; NaN and Inf,
    beyond its range, all become 0, fractions are cut off. ``flushed``: small numbers become zero. ``rounded``: large integers."""
    dangerous: bool
    source: str
    target: str
    """Dtypes."""
    shape: tuple[int, ...]
    share: float
    """Of the elements that were lost; NaN: not known."""
    changed: float
    """‖result − input‖ / ‖input‖, from sketches; NaN: not known."""
    sentence: str
    times: int = 1
    """In how many steps and ranks the same call does the same."""
    implicit: bool = False
    """Whether no cast was recorded: a product computes in a narrower dtype than it was given (autocast)."""


@dataclass(frozen=True, slots=True)
class Casts:
    """What `dangerous_casts` found."""

    verdict: Literal["clean", "found", "inconclusive"]
    sentence: str
    casts: tuple[Cast, ...]
    """Dangerous ones first, then in order of execution."""
    looked: int
    unmeasured: int
    """Casts without statistics."""
    masks: int
    """Casts that make a mask infinite, which is no loss."""
    unsure: bool = False
    """Whether casts may be there that were not judged; a run that has none is sure."""

    @property
    def dangerous(self) -> tuple[Cast, ...]:
        """Those that nobody wants."""
        return tuple(cast for cast in self.casts if cast.dangerous)


def dangerous_casts(capture: str | Path | Capture, *, step: Steps = None, rank: Steps = None) -> Casts:
    """Find the casts of a run that destroyed numbers.

    Args:
        capture: of detail ``stats`` or ``tensor`` and of level ``api`` or ``aten``; native or imported, of any framework.
        step: steps to look at; all by default.
        rank: likewise.

    Raises:
        TrueupError: there is no such capture, step or rank.
    """
    looking = _Looking(opened(capture))
    for of, one in parts(looking.capture, step, rank):
        looking.part(of, one)
    return looking.result()


class _Looking:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.places = Places(capture)
        self.found: dict[tuple[Any, ...], Cast] = {}
        self.looked = self.unmeasured = self.masks = 0
        self.implicit = "aten" not in capture.levels
        """Whether autocast's own casts, which are aten calls, are out of sight."""
        self.narrowing = False
        """Whether they are, and there may be any."""

    def part(self, rank: int, step: int) -> None:
        self.narrowing = self.implicit and len(dtypes(self.capture, rank, step, is_product)) > 1
        held = calls(self.capture, rank, step, self._wanted, _COLUMNS, levels=("api", "aten"))
        for one in outermost([one for one in held if cast_source(one.op)]):
            pair = _sides(one)
            if pair is not None and pair[0]["dtype"] != pair[1]["dtype"]:
                self._judge(rank, step, one, pair[0], _numbers(pair[0]), _numbers(pair[1]), implicit=False)
        for one in held:
            if not cast_source(one.op):
                for row, target in _narrowed(one):
                    self._judge(rank, step, one, row, _numbers(row), Numbers(target, math.nan), implicit=True)

    def _wanted(self, op: str, level: str) -> bool:
        return cast_source(op) is not None or (self.narrowing and is_product(op, level))

    def _judge(
        self, rank: int, step: int, one: Found, row: dict[str, Any], before: Numbers, after: Numbers, *, implicit: bool
    ) -> None:
        if not (family(before.dtype) and family(after.dtype)):
            return
        self.looked += 1
        self.unmeasured += not before.measured
        if is_mask(before, after):
            self.masks += 1
            return
        danger = judge(before, after)
        if danger is None:
            return
        key = (one.phase, one.level, one.scope, one.op, one.ordinal, danger.kind)
        if key in self.found:
            self.found[key] = dataclasses.replace(self.found[key], times=self.found[key].times + 1)
        elif len(self.found) < MOST:
            place = self.places.of(rank, step, one.seq)
            sizes = tuple(row["shape"] or ())
            self.found[key] = _cast(place, danger, before.dtype, after.dtype, sizes, implicit=implicit)

    def result(self) -> Casts:
        order = sorted(self.found.values(), key=lambda c: (not c.dangerous, c.place.step, c.place.rank, c.place.seq))
        bad = sum(cast.dangerous for cast in order)
        verdict: Literal["clean", "found", "inconclusive"]
        verdict = "found" if bad else "inconclusive" if self.unmeasured or not self.looked or self.capture.lost else "clean"
        blind = {"api", "aten"}.isdisjoint(self.capture.levels)
        unsure = bool(self.unmeasured or blind or self.capture.lost)
        return Casts(verdict, self._sentence(order, bad), tuple(order), self.looked, self.unmeasured, self.masks, unsure)

    def _sentence(self, order: list[Cast], bad: int) -> str:
        if not self.looked:
            if {"api", "aten"}.isdisjoint(self.capture.levels):
                return "could not tell of casts: the capture holds modules alone; record level api or aten"
            return "could not tell of casts: none was recorded"
        if bad:
            which = "" if bad == 1 else "the first: "
            return f"{counted(bad, 'dangerous cast')} ({self.looked:,} looked at): {which}{order[0].sentence}"
        if self.unmeasured:
            return f"could not tell of {self.unmeasured:,} of {counted(self.looked, 'cast')}, which have no statistics"
        lost = f"; {counted(len(order), 'call')} cut or flush numbers as such casts do" if order else ""
        masks = f"; {self.masks:,} make a mask infinite" if self.masks else ""
        return f"no cast is dangerous: {self.looked:,} looked at{lost}{masks}"


def _sides(one: Found) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the rows of what was cast and of the result."""
    backward = one.phase == "backward" and one.level != "aten"
    source = "grad_output.0" if backward else cast_source(one.op)
    named = one.slots.get(source or "")
    before = named if named and named["dtype"] else next(iter(one.given), None)
    after = next(iter(one.made), None)
    return None if before is None or after is None else (before, after)


def _narrowed(one: Found) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the inputs of a forward product that are wider than its result, and the dtype in which it computes."""
    made = next((row["dtype"] for row in one.made), None)
    if made is None or family(made) != "float" or one.phase not in ("forward", "recompute"):
        return
    for row in one.given:
        if family(row["dtype"]) == "float" and row["dtype"] != made:
            yield row, made


def _cast(place: Place, danger: Danger, source: str, target: str, shape: tuple[int, ...], *, implicit: bool) -> Cast:
    how = f"computes {target} of {source}" if implicit else f"{source} to {target}"
    code = f" [{short_source(place.source)}]" if place.source else ""
    return Cast(
        place, danger.kind, danger.dangerous, source, target, shape, danger.share, danger.changed,
        clean(f"{described(place)}, {how}: {danger.what}{code}"), implicit=implicit,
    )  # fmt: skip


def _numbers(row: dict[str, Any]) -> Numbers:
    known = {name: math.nan if row[name] is None else float(row[name]) for name in _STATISTICS}
    numel = math.nan if row["numel"] is None else float(row["numel"])
    return Numbers(row["dtype"], numel, **known, sketch=row["sketch"])
