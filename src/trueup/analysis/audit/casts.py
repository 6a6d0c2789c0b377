"""Casts that destroy numbers: beyond the range, below it, to integers; found in the statistics of one run.

1 dangerous cast (106 looked at): head, forward, step 0, rank 0 (torch.Tensor.half), float32 to float16: 55 of 64 elements
become infinite: the input reaches 7.70e5, the largest float16 is 65504 [net/train.py:11 in forward]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trueup.analysis.audit import reading
from trueup.analysis.audit.cast_danger import Danger, Kind, Numbers, family, is_mask, judge
from trueup.analysis.audit.census import census, difference
from trueup.foundation.facts.anomaly import Place
from trueup.foundation.facts.criteria import is_product
from trueup.foundation.model import Finding
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import clean, counted, short_source

MOST = 1000  # casts that are described
LEVELS = ("api", "aten")  # those whose calls may be casts
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
    target: str  # dtypes
    shape: tuple[int, ...]
    share: float  # of the elements that were lost; NaN: not known
    changed: float  # ‖result − input‖ / ‖input‖, from sketches; NaN: not known
    sentence: str
    times: int = 1  # steps and ranks in which the same call does the same
    implicit: bool = False  # no cast was recorded: a product computes in a narrower dtype than its inputs (autocast)


@dataclass(frozen=True, slots=True)
class Casts:
    """What `dangerous_casts` found."""

    verdict: Literal["clean", "found", "inconclusive"]
    sentence: str
    casts: tuple[Cast, ...]  # dangerous ones first, then in order of execution
    looked: int
    unmeasured: int  # casts without statistics
    masks: int  # casts that make a mask infinite, which is no loss
    unsure: bool = False  # whether casts may be there that were not judged; a run that has none is sure

    @property
    def dangerous(self) -> tuple[Cast, ...]:
        """The casts that nobody wants."""
        return tuple(cast for cast in self.casts if cast.dangerous)


def dangerous_casts(capture: str | Path | Capture, *, step: reading.Steps = None, rank: reading.Steps = None) -> Casts:
    """Find the casts of a run that destroyed numbers, in a capture of detail ``stats`` or ``tensor`` and level ``api`` or
    ``aten``, native or imported. Raises TrueupError if there is no such capture, step or rank."""
    looking = _Looking(open_capture(capture))
    for of, one in reading.parts(looking.capture, step, rank):
        looking.part(of, one)
    return looking.result()


class _Looking:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.places = reading.Places(capture)
        self.found: dict[tuple[Any, ...], Cast] = {}
        self.looked = self.unmeasured = self.masks = 0
        self.implicit = "aten" not in capture.levels  # whether autocast's own casts, which are aten calls, are out of sight
        self.narrowing = False  # whether they are, and there may be any

    def part(self, rank: int, step: int) -> None:
        kinds = reading.kinds(self.capture, rank, step)
        self.narrowing = self.implicit and len(_products(kinds)) > 1
        casting = {(op, dtype) for op, level, dtype in kinds if level in LEVELS and reading.cast_source(op)}
        if not self.narrowing and len(casting) == len({op for op, _ in casting}):
            return  # as a rule: what could cast moves tensors to a device, and their numbers need not be read
        held = reading.calls(self.capture, rank, step, self._wanted, _COLUMNS, levels=LEVELS)
        for one in reading.outermost([one for one in held if reading.cast_source(one.op)]):
            pair = _sides(one)
            if pair is not None and pair[0]["dtype"] != pair[1]["dtype"]:
                self._judge(rank, step, one, pair[0], _numbers(pair[0]), _numbers(pair[1]), implicit=False)
        for one in held:
            if not reading.cast_source(one.op):
                for row, target in _narrowed(one):
                    self._judge(rank, step, one, row, _numbers(row), Numbers(target, math.nan), implicit=True)

    def _wanted(self, op: str, level: str) -> bool:
        return reading.cast_source(op) is not None or (self.narrowing and is_product(op, level))

    def _judge(
        self, rank: int, step: int, one: reading.Found, row: dict[str, Any], before: Numbers, after: Numbers, *, implicit: bool
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
        blind = set(LEVELS).isdisjoint(self.capture.levels)
        unsure = bool(self.unmeasured or blind or self.capture.lost)
        return Casts(verdict, self._sentence(order, bad), tuple(order), self.looked, self.unmeasured, self.masks, unsure)

    def _sentence(self, order: list[Cast], bad: int) -> str:
        if not self.looked:
            if set(LEVELS).isdisjoint(self.capture.levels):
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


def _sides(one: reading.Found) -> tuple[dict[str, Any], dict[str, Any]] | None:
    backward = one.phase == "backward" and one.level != "aten"
    source = "grad_output.0" if backward else reading.cast_source(one.op)
    named = one.slots.get(source or "")
    before = named if named and named["dtype"] else next(iter(one.given), None)
    after = next(iter(one.made), None)
    return None if before is None or after is None else (before, after)


def _narrowed(one: reading.Found) -> Iterator[tuple[dict[str, Any], str]]:
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
        clean(f"{reading.described(place)}, {how}: {danger.what}{code}"), implicit=implicit,
    )  # fmt: skip


def _numbers(row: dict[str, Any]) -> Numbers:
    known = {name: math.nan if row[name] is None else float(row[name]) for name in _STATISTICS}
    numel = math.nan if row["numel"] is None else float(row["numel"])
    return Numbers(row["dtype"], numel, **known, sketch=row["sketch"])


def cast_note(capture: Capture, steps: list[int], ranks: list[int]) -> list[str]:
    """Name the first dangerous cast of a run that no Inf shows; an overflow is found by what it makes."""
    found = [cast for cast in dangerous_casts(capture, step=steps, rank=ranks).dangerous if cast.kind != "overflow"]
    return [f"dangerous cast{_more(found)}: {found[0].sentence}"] if found else []


def notes_beside(captures: tuple[Capture, Capture], culprit: Finding) -> list[str]:
    """Say which dangerous casts of a culprit's step only the candidate has, and where the runs' dtypes differ."""
    baseline, candidate = captures
    rank, step = culprit.rank, culprit.step
    if not all(rank in capture.ranks and step in capture.steps for capture in captures):
        return []
    found = dangerous_casts(candidate, step=step, rank=rank).dangerous
    if found:  # as a rule there is none, and those of the baseline need not be looked for
        seen = {_key(cast) for cast in dangerous_casts(baseline, step=step, rank=rank).dangerous}
        found = tuple(cast for cast in found if _key(cast) not in seen)
    notes = [f"dangerous cast{_more(found)} in the candidate alone: {found[0].sentence}"] if found else []
    there, here = (_products(reading.kinds(capture, rank, step)) for capture in captures)
    if there == here and len(here) == 1:  # as a rule; to count the products takes time
        return notes
    other = difference(census(baseline, step=step, rank=rank), census(candidate, step=step, rank=rank))
    return [*notes, *([other.sentence] if other.differs else [])]


def _key(cast: Cast) -> tuple[str, str, str, int, str]:
    return cast.place.phase, cast.place.scope, cast.place.op, cast.place.ordinal, cast.kind


def _products(kinds: Iterable[tuple[str, str, str]]) -> set[str]:
    """Return the dtypes of all tensors of products."""
    return {dtype for op, level, dtype in kinds if is_product(op, level)}


def _more(found: Sequence[Cast]) -> str:
    return "" if len(found) == 1 else f"s ({len(found):,}; trueup check lists them), the first"
