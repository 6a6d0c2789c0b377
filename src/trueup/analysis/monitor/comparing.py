"""Two monitored trainings lined up: which series leaves first.

Series pair by rank and name, and their steps by number; of runs on other numbers of ranks, those joined over all ranks. A series
leaves where its difference is beyond six times the step-to-step noise of both runs, on one side, in three of five steps (the rule
of `trueup.analysis.curves.shape`, over all series at once: the noise is the MAD of a series' own steps, differences of neighbours,
block by block). Before that it may differ in its last bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trueup.analysis.curves.shape import NORMAL, OF, OWN_NOISE, SUSTAINED, WINDOW
from trueup.analysis.monitor.joining import Joined
from trueup.analysis.monitor.kinds import kind_of, spoken
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import Capture
from trueup.foundation.store.series import AT_A_TIME, SeriesReader
from trueup.foundation.words.wording import counted, in_runs, number

FEWEST = 20  # steps of a series that tell its noise
LISTED = 12  # series that a sentence or a table names
CONSTANT = 1e6  # times the noise beyond which that is the noise of nothing
EXACT = 1e-12  # of the largest number: the noise of a constant series


@dataclass(frozen=True, slots=True)
class Left:
    """A series of a rank that differs."""

    rank: int
    series: str
    exact: int  # first step whose number is another one
    beyond: int | None  # first step from which it stays beyond the noise
    baseline: float  # the numbers there
    candidate: float
    times: float  # the difference in units of the noise, there


@dataclass(frozen=True)
class Compared:
    """What `compare_series` returns."""

    verdict: VerdictWord
    sentence: str  # several lines of plain text
    left: tuple[Left, ...]  # those that leave, the first one first
    differing: int  # series that differ at all, those included
    series: int  # that were compared, over all ranks
    steps: tuple[int, int, int]  # first and last step, and how many
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 aligned, 1 deviates, 2 could not tell."""
        return {"aligned": 0, "deviates": 1, "inconclusive": 2}[self.verdict]


def compare_series(baseline: str | Path | Capture | SeriesReader, candidate: str | Path | Capture | SeriesReader) -> Compared:
    """Line up what two monitors wrote. Raises TrueupError where they have no rank or no step in common, or are none."""
    readers = [one if isinstance(one, SeriesReader) else SeriesReader(one) for one in (baseline, candidate)]
    over = [_world(one) for one in readers]
    joins = over[0] != over[1] and all(one.ranks for one in readers)  # other ranks are other shares of a batch
    sides: list[SeriesReader | Joined] = [Joined(one) for one in readers] if joins else [*readers]
    ranks = sorted(set(sides[0].ranks) & set(sides[1].ranks))
    steps = {rank: np.intersect1d(sides[0].steps(rank), sides[1].steps(rank)) for rank in ranks}
    if not any(len(held) for held in steps.values()):
        told = "; ".join(f"{side.capture.path}: ranks {in_runs(side.ranks, ', ') or 'none'}" for side in sides)
        raise TrueupError(
            f"The runs have no step in common.\n  expected: steps that both monitors wrote\n  got:      {told}\n"
            "  next:     monitor the same steps of both"
        )
    found: list[Left] = []
    differing = count = 0
    short: list[str] = []
    unsure = False
    notes = [f"{side.capture.path}: {problem}" for side in sides for problem in side.problems]
    if joins:
        unsure = any(len(reader.ranks) < world for reader, world in zip(readers, over, strict=True))
        notes += _said_of_joining(readers, over)
    for side, other in ((0, 1), (1, 0)):
        extra = sorted(set(sides[side].ranks) - set(sides[other].ranks))
        if extra:
            unsure = True
            notes.append(f"ranks {in_runs(extra, ', ')} are only in {sides[side].capture.path} and were not compared")
    for rank in ranks:
        names = [sides[0].names(rank), sides[1].names(rank)]
        there = [set(some) for some in names]
        for side, other in ((0, 1), (1, 0)):
            lonely = [name for name in names[side] if name not in there[other]]
            if lonely:
                unsure = True
                some = ", ".join(lonely[:3]) + (f" and {len(lonely) - 3} more" if len(lonely) > 3 else "")
                notes.append(f"rank {rank}: only {sides[side].capture.path} has {counted(len(lonely), 'series', 'series')}: {some}")
        both = [name for name in names[0] if name in there[1]]
        count += len(both)
        for one in _of_rank(sides, rank, both, steps[rank], short):
            differing += 1
            if one.beyond is not None:
                found.append(one)
    order = {name: place for rank in ranks for place, name in enumerate(sides[0].names(rank))}
    found.sort(key=lambda one: (one.beyond or 0, order[one.series], one.rank))
    every = np.unique(np.concatenate(list(steps.values())))
    span = int(every[0]), int(every[-1]), len(every)
    for one_side in sides:
        own = np.unique(np.concatenate([one_side.steps(rank) for rank in ranks]))
        if len(own) > len(every):
            unsure, lacking = True, counted(len(own) - len(every), "step")
            notes.append(f"{lacking} of {one_side.capture.path} were not compared: the other run lacks them")
    if short:
        some = ", ".join(dict.fromkeys(short[:3]))
        notes.append(f"{counted(len(short), 'differing series', 'differing series')} have under {FEWEST} steps, too few: {some}")
    unsure = unsure or bool(short) or any(side.capture.lost for side in sides)
    verdict: VerdictWord = "deviates" if found else "inconclusive" if unsure else "aligned"
    return Compared(verdict, _sentence(verdict, found, differing, count, span), tuple(found), differing, count, span, tuple(notes))


def _said_of_joining(readers: Sequence[SeriesReader], over: Sequence[int]) -> Iterator[str]:
    many = f"{over[0]} and {counted(over[1], 'rank')}"
    yield f"{many}: each series is joined over the ranks (mean, largest or sum), digests are left out"
    for reader, world in zip(readers, over, strict=True):
        if len(reader.ranks) < world:
            yield f"{reader.capture.path} holds {len(reader.ranks)} of {counted(world, 'rank')}: they tell nothing of all"


def _world(reader: SeriesReader) -> int:
    """Return how many ranks a run had, whether or not all were monitored."""
    said = [one.get("world_size") for one in reader.capture.ranks.values()]
    return max([len(reader.ranks), *(one for one in said if isinstance(one, int))])


def _of_rank(
    sides: Sequence[SeriesReader | Joined], rank: int, names: list[str], steps: NDArray[np.int64], short: list[str]
) -> Iterator[Left]:  # fmt: skip
    places = [np.searchsorted(side.steps(rank), steps) for side in sides]
    for at in range(0, len(names), AT_A_TIME):
        some = names[at : at + AT_A_TIME]
        held = [side.columns(rank, some) for side in sides]
        for name in some:
            b, c = (columns[name][place] for columns, place in zip(held, places, strict=True))
            taken = ~(np.isnan(b) | np.isnan(c))
            one = _apart(rank, name, steps[taken], b[taken], c[taken])
            if one is not None:
                if one.beyond is None and taken.sum() < FEWEST and not name.startswith("digest/"):
                    short.append(spoken(name))
                yield one


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _apart(rank: int, name: str, steps: NDArray[np.int64], b: NDArray[np.float64], c: NDArray[np.float64]) -> Left | None:
    unequal = np.flatnonzero(b != c)
    if not len(unequal):
        return None
    exact = int(steps[unequal[0]])
    if name.startswith("digest/"):  # other bits: nothing of a size
        return Left(rank, name, exact, None, float(b[unequal[0]]), float(c[unequal[0]]), math.nan)
    kind = kind_of(name)
    logarithmic = kind.scale == "log" and bool((b > 0).all() and (c > 0).all())
    one, other = (np.log(b), np.log(c)) if logarithmic else (b, c)
    noise = np.maximum(_noise(one, kind.settled), _noise(other, kind.settled)) * OWN_NOISE * math.sqrt(2)
    away = np.nan_to_num((other - one) / noise, nan=0.0, posinf=math.inf, neginf=-math.inf)
    away = np.where(np.isinf(b) & np.isinf(c), 0.0, np.where(np.isinf(c) & ~np.isinf(b), math.inf, away))
    place = _sustained(away)
    if place is None:
        return Left(rank, name, exact, None, float(b[unequal[0]]), float(c[unequal[0]]), 0.0)
    return Left(rank, name, exact, int(steps[place]), float(b[place]), float(c[place]), float(abs(away[place]) * OWN_NOISE))


def _noise(values: NDArray[np.float64], settled: bool) -> NDArray[np.float64]:
    """Return the step-to-step noise around each step: of blocks, the largest of three neighbours; Inf where there are too few. What
    is measured and stands still in most steps, as a ratio that is 1 where nothing was clipped, has the noise of the others."""
    if len(values) < FEWEST:
        return np.full(len(values), math.inf)
    finite = np.where(np.isfinite(values), values, np.nan)
    changes = np.abs(np.diff(finite))
    size = min(WINDOW, len(changes))
    blocks = [changes[at : at + size] for at in range(0, len(changes) - size + 1, size)]
    if not settled:
        blocks = [np.where(block > 0, block, np.nan) if (block > 0).any() else block for block in blocks]
    held = np.array([NORMAL * np.nanmedian(block) / math.sqrt(2) if np.isfinite(block).any() else math.inf for block in blocks])
    wide = np.maximum(held, np.maximum(np.r_[held[:1], held[:-1]], np.r_[held[1:], held[-1:]]))
    floor = EXACT * float(np.nanmax(np.abs(finite), initial=1e-300))
    each: NDArray[np.float64] = np.maximum(wide[np.minimum(np.arange(len(values)) // size, len(wide) - 1)], floor)
    return each


def _sustained(away: NDArray[np.float64]) -> int | None:
    """Return the first place from which three of five are beyond the noise on one side."""
    size, found = min(OF, len(away)), []
    for side in (away > 1, away < -1):
        many = sliding_window_view(side, size).sum(axis=1) >= min(SUSTAINED, size)
        if many.any():
            first = int(np.argmax(many))
            found.append(first + int(np.argmax(side[first:])))
    return min(found, default=None)


def _sentence(verdict: VerdictWord, left: list[Left], differing: int, count: int, span: tuple[int, int, int]) -> str:
    where = f"{counted(count, 'series', 'series')} over {counted(span[2], 'step')} ({span[0]:,} to {span[1]:,})"
    if left:
        first = left[0]
        rank = f", rank {first.rank}" if any(one.rank for one in left) else ""
        lines = [
            f"DEVIATES  first series to leave: {spoken(first.series)}, step {first.beyond:,}{rank}",
            f"          {number(first.baseline, 6)} in the baseline, {number(first.candidate, 6)} in the candidate, "
            + (f"{first.times:,.0f} times the step-to-step noise" if first.times < CONSTANT else "where it hardly moves")
            if math.isfinite(first.times) else
            f"          {number(first.baseline, 6)} in the baseline, NaN or Inf in the candidate",
            f"          its first other bit: step {first.exact:,}; {len(left):,} of {where} leave, {differing:,} differ",
        ]  # fmt: skip
        loss = next((one for one in left if one.series == "loss"), None)
        lines.append(f"          the loss leaves at step {loss.beyond:,}" if loss else "          the loss does not leave")
        return "\n".join(lines)
    head = {"aligned": "ALIGNED", "inconclusive": "COULD NOT TELL"}.get(verdict, "")
    if not differing:
        return f"{head}  the same number at each step in {where}"
    return f"{head}  no series leaves the noise of its own steps: {differing:,} of {where} differ by less"
