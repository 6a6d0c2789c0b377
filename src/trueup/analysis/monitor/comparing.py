"""Two monitored trainings lined up: which series leaves first.

Series pair by rank and name, and their steps by number; of runs on other numbers of ranks, those joined over all ranks. A series
leaves where its difference is beyond six deviations of both of these, and beyond `LEAST`, on one side, in three of five steps:

- **what the runs' own steps scatter by**, as far as the two do not share it. Runs that see the same batches rise and fall
  together: the correlation of their losses' second differences says how much of the scatter is common (`_shared`).
- **how the difference itself wanders**: its increments over 1, 2, 4 ... steps. Two healthy runs on other batches drift apart
  slowly in weights and moments, by far more than a step moves them. What short increments tell is carried on to the age of the
  run by the power at which they grow with the lag: 0 of noise, a half of a random walk, 1 of a drift. In a short run that power
  is badly known and taken larger.

Second moments remember a spike for a thousand steps: on other batches they may be as far apart as the largest excursion of their
layer's gradients so far makes them (`_excursion`). What modules and optimizers are set to (`setting`) has no noise, whatever the
seeds.

Where the runs began with other weights (a norm differs by more than the first updates can have moved it), what differs from the
start is the luck of the draw: a series then has to leave its own start, too (`_other_weights`).

Two runs that begin alike, on the same batches with the same weights, tell more in their first steps (`kinds.start`).

Deviations come from four fifths of the increments (`QUANTILE`), so a change for good is none of them, in blocks that grow with
the step (16, 32 ... 128): trainings move fast at first. What is set (`lr`) has no noise, what is counted that of its changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trueup.analysis.curves.statistics import NORMAL, OF, OWN_NOISE, SUSTAINED, WINDOW
from trueup.analysis.monitor.kinds import SETTING, Joined, Settled, Start, kind_of, spoken, start
from trueup.foundation.facts.why import Why
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.settings import differing as differing_settings
from trueup.foundation.store import Capture
from trueup.foundation.store.series import AT_A_TIME, SeriesReader
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.setup_sentence import subject
from trueup.foundation.words.wording import counted, in_runs, number, percent

FEWEST = 20  # steps of a series that tell its noise
EXACT = 1e-12  # of the largest number: the noise of a constant series
LEAST = 0.02  # on the log scale or of a linear series' size: 2 % is no event, as for alerts
SET = 1e-6  # relative, of what is set: beyond it is no rounding
MOVES = 3  # times as far as a later update moves a norm the first one may have: those of Adam are of one size
QUANTILE, NORMAL_QUANTILE = 0.8, 1.81  # of absolute increments; of normal noise it is so many deviations of a single value
FIRST_BLOCK, LAG = 16, 8  # values of the first block; lags up to an eighth of a block
ELEMENTS = 1000  # of which a share is, at least: a step of more than 1/1000 is no count of one
FEW = 30  # elements that are counted on average up to which their own steps, mostly equal, do not show the noise of counting
EARLY = 130  # steps that tell whether the runs share their batches
TOGETHER = 0.5  # correlation from which they do


@dataclass(frozen=True, slots=True)
class Left:
    """A series of a rank that differs."""

    rank: int
    series: str
    exact: int  # first step whose number is another one
    beyond: int | None  # first step from which it stays beyond the noise
    baseline: float  # the numbers there
    candidate: float
    difference: float  # relative to the baseline, where that is not 0; NaN: one is not finite, or nothing left
    noise: float  # how large it may be and still be noise
    relative: bool = True


@dataclass(frozen=True, slots=True)
class Common:
    """What two runs of a rank have in common."""

    shared: float  # how much of their scatter, 0 to 1
    other_weights: bool  # they began with other ones
    start: Start | None = None  # the first steps, where they begin alike
    excursion: Callable[[str, NDArray[np.int64]], NDArray[np.float64]] | None = None
    """On other batches: how far a layer's gradients went until each of some steps."""


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


def compare_series(
    baseline: str | Path | Capture | SeriesReader, candidate: str | Path | Capture | SeriesReader,
    repeats: Sequence[str | Path | Capture] = (),
) -> Compared:  # fmt: skip
    """Line up what two monitors wrote; how far the baseline is from its ``repeats`` is noise. Raises TrueupError where they have no
    rank or no step in common, or are none."""
    readers = [one if isinstance(one, SeriesReader) else SeriesReader(one) for one in (baseline, candidate)]
    again = [SeriesReader(one) for one in repeats]
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
    apart: list[int] = []  # ranks whose runs do not share their batches
    drawn: dict[str, list[int]] = {}  # layers whose weights differ from the start, and ranks
    unsure = False
    notes = [f"{side.capture.path}: {problem}" for side in sides for problem in side.problems]
    if joins:
        unsure = any(len(reader.ranks) < world for reader, world in zip(readers, over, strict=True))
        notes += _said_of_joining(readers, over)
    _require_repeats(again, None if joins else over[0], steps)
    if again:
        notes.append(f"{counted(len(again), 'repeat')} of the baseline: differences of that size count as noise")
    every = np.unique(np.concatenate(list(steps.values())))
    lacking = list(_lacking(sides, ranks, every))
    notes += [*lacking, *_in_other_dtypes(readers, ranks[0])]
    for rank in ranks:
        there = set(sides[1].names(rank))
        both = [name for name in sides[0].names(rank) if name in there]
        count += len(both)
        shared, other_weights = _shared(sides, rank, both, steps[rank]), _other_weights(sides, rank, both)
        apart += [rank] if shared < TOGETHER else []
        if other_weights is not None:
            drawn.setdefault(other_weights, []).append(rank)
        begun = start(sides, rank, both, steps[rank]) if shared >= TOGETHER and other_weights is None else None
        spiked = partial(_excursion, sides, rank, steps[rank]) if shared < TOGETHER else None
        common = Common(shared, other_weights is not None, begun, spiked)
        for one in _of_rank(sides, rank, both, steps[rank], common, short, again):
            differing += 1
            if one.beyond is not None:
                found.append(one)
    otherwise = list(_set_otherwise(readers, ranks[0], int(every[0])))
    found, differing = otherwise + found, differing + len(otherwise)
    order = {name: place for rank in ranks for place, name in enumerate(sides[0].names(rank))}
    found.sort(key=lambda one: (one.beyond or 0, *_stage(one, order.get(one.series, -1)), one.rank))
    span = int(every[0]), int(every[-1]), len(every)
    notes += _hidden(drawn, apart if differing else [], len(ranks), short)
    unsure = unsure or bool(lacking or short) or any(side.capture.lost for side in sides)
    verdict: VerdictWord = "deviates" if found else "inconclusive" if unsure else "aligned"
    return Compared(verdict, _sentence(verdict, found, differing, count, span), tuple(found), differing, count, span, tuple(notes))


def _require_repeats(repeats: Sequence[SeriesReader], world: int | None, steps: Mapping[int, NDArray[np.int64]]) -> None:
    """Raise TrueupError for a repeat without the baseline's ranks, ``world``, and steps; of None none tells the noise."""
    for repeat in repeats:
        if _world(repeat) != world or not all(np.isin(held, repeat.steps(rank)).all() for rank, held in steps.items()):
            raise TrueupError(
                f"A repeat cannot tell the noise of the baseline.\n  where:    {repeat.capture.path}\n"
                "  expected: the baseline's ranks and steps, and a candidate on as many ranks\n"
                f"  got:      {counted(_world(repeat), 'rank')}, {counted(len(repeat.steps(0)) if repeat.ranks else 0, 'step')}\n"
                "  next:     monitor the baseline again for as long, or leave --repeat out"
            )


def _hidden(drawn: Mapping[str, object], apart: list[int], ranks: int, short: Sequence[str]) -> Iterator[str]:
    """Say what hides small faults: layers ``drawn`` otherwise, ranks ``apart`` with other batches, series with few steps."""
    if drawn:
        yield (
            f"the runs began with other weights (those of {next(iter(drawn))}, for one): what differs from the start is no "
            "evidence then, only what changes later; begin both from one checkpoint to see more"
        )
    if apart:
        of = "" if ranks == len(apart) else f" of ranks {in_runs(apart, ', ')}"
        yield (
            f"the losses{of} do not rise and fall together: the runs saw other batches, so small faults hide in the noise of both; "
            "the same seed and data order on both sides show more"
        )
    if short:
        some = ", ".join(dict.fromkeys(short[:3]))
        yield f"{counted(len(short), 'differing series', 'differing series')} have under {FEWEST} steps, too few: {some}"


def _stage(one: Left, place: int) -> tuple[int, float, float]:
    """Return where a series stands among those that leave in the same step: what is set, what goes forward, the loss, gradients,
    then what they make. Of gradients the one that is off by most, which clipping passes on to all; else the whole, and the latest
    layer: backward it comes first."""
    kind, of, _ = one.series.partition("/")
    if kind_of(kind).settled:
        return 0, 0, place
    if kind.startswith(("activation", "attention", "router", "input")):
        return 1, 0, place
    if kind == "loss":
        return 2, 0, place
    if "gradient" in kind and "momentum" not in kind:
        return 3, -round(abs(one.difference), 2) if math.isfinite(one.difference) else -math.inf, -place if of else -math.inf
    return 4, 0, place


def _lacking(sides: Sequence[SeriesReader | Joined], ranks: Sequence[int], every: NDArray[np.int64]) -> Iterator[str]:
    """Say what one run alone has and was not compared: ranks, series, steps (``every``: those of both)."""
    both_ways = (sides, sides[::-1])
    for side, other in both_ways:
        extra = sorted(set(side.ranks) - set(other.ranks))
        if extra:
            yield f"ranks {in_runs(extra, ', ')} are only in {side.capture.path} and were not compared"
    for rank in ranks:
        for side, other in both_ways:
            there = set(other.names(rank))
            lonely = [name for name in side.names(rank) if name not in there and not _is_nothing(side, rank, name)]
            if lonely:
                some = ", ".join(lonely[:3]) + (f" and {len(lonely) - 3} more" if len(lonely) > 3 else "")
                yield f"rank {rank}: only {side.capture.path} has {counted(len(lonely), 'series', 'series')}: {some}"
    for side in sides:
        more = len(np.unique(np.concatenate([side.steps(rank) for rank in ranks]))) - len(every)
        if more > 0:
            yield f"{counted(more, 'step')} of {side.capture.path} were not compared: the other run lacks them"


def _said_of_joining(readers: Sequence[SeriesReader], over: Sequence[int]) -> Iterator[str]:
    many = f"{over[0]} and {counted(over[1], 'rank')}"
    yield f"{many}: each series is joined over the ranks (mean, largest or sum), digests are left out"
    for reader, world in zip(readers, over, strict=True):
        if len(reader.ranks) < world:
            yield f"{reader.capture.path} holds {len(reader.ranks)} of {counted(world, 'rank')}: they tell nothing of all"


def _is_nothing(side: SeriesReader | Joined, rank: int, name: str) -> bool:
    """Tell whether a series that the other run lacks says only what its absence says: that no bfloat16 saturated, say."""
    absent = kind_of(name).absent
    return absent is not None and bool((np.nan_to_num(side.column(rank, name), nan=absent) == absent).all())


def _world(reader: SeriesReader) -> int:
    """Return how many ranks a run had, whether or not all were monitored."""
    said = [one.get("world_size") for one in reader.capture.ranks.values()]
    return max([len(reader.ranks), *(one for one in said if isinstance(one, int))])


def _of_rank(
    sides: Sequence[SeriesReader | Joined], rank: int, names: list[str], steps: NDArray[np.int64], common: Common,
    short: list[str], again: Sequence[SeriesReader] = (),
) -> Iterator[Left]:  # fmt: skip
    places = [np.searchsorted(side.steps(rank), steps) for side in sides]
    for at in range(0, len(names), AT_A_TIME):
        some = names[at : at + AT_A_TIME]
        held = [side.columns(rank, some) for side in sides]
        repeated = [(np.searchsorted(one.steps(rank), steps), one.columns(rank, some)) for one in again]
        for name in some:
            b, c = (columns[name][place] for columns, place in zip(held, places, strict=True))
            taken = ~(np.isnan(b) | np.isnan(c))
            others = [columns[name][place][taken] for place, columns in repeated]
            one = _apart(rank, name, steps[taken], b[taken], c[taken], common, others)
            if one is not None:
                if one.beyond is None and taken.sum() < FEWEST and not name.startswith("digest/"):
                    short.append(spoken(name))
                yield one


@np.errstate(divide="ignore", invalid="ignore")
def _shared(sides: Sequence[SeriesReader | Joined], rank: int, names: Sequence[str], steps: NDArray[np.int64]) -> float:
    """Return how much of their scatter two runs have in common, 0 to 1: the largest rank correlation of second differences of the
    loss and of the gradient's norm, in the first steps. Second differences leave out that both fall."""
    found = 0.0
    for name in ("loss", "gradient_norm", "gradient_norm_before_clip"):
        if name in names:
            b, c = (side.column(rank, name)[np.searchsorted(side.steps(rank), steps)][:EARLY] for side in sides)
            taken = np.isfinite(b) & np.isfinite(c)
            if taken.sum() >= FEWEST:
                one, other = (np.argsort(np.argsort(np.diff(side[taken], 2))).astype(np.float64) for side in (b, c))
                found = max(found, float(np.nan_to_num(np.corrcoef(one, other)[0, 1])))
    return found


@np.errstate(divide="ignore", invalid="ignore")
def _other_weights(sides: Sequence[SeriesReader | Joined], rank: int, names: Sequence[str]) -> str | None:
    """Return a layer whose weights differ in the first step by more than two first updates can have moved them: by their size, and
    by what the next ones do to the norm, which is far less, for they hardly point where the weights do. None: there is none, or
    the runs do not begin with the same step."""
    first = [side.steps(rank)[:1] for side in sides]
    if not np.array_equal(first[0], first[1]):
        return None
    for name in names:
        kind, _, scope = name.partition("/")
        moved = f"update_ratio/{scope}"
        if kind == "weight_norm" and moved in names:
            weights, updates = ([side.column(rank, one)[0] for side in sides] for one in (name, moved))
            later = sum(_moves(side.column(rank, name)) for side in sides)
            if abs(math.log(max(weights[1], 1e-300) / max(weights[0], 1e-300))) > max(min(sum(updates), MOVES * later), SET):
                return scope
    return None


def _moves(norms: NDArray[np.float64]) -> float:
    """Return how far the logarithm of a norm moves at most between two of the first steps that have it."""
    held = norms[np.isfinite(norms)][: OF + 1]
    return float(np.abs(np.diff(np.log(np.maximum(held, 1e-300)))).max(initial=0.0)) if len(held) > 1 else math.inf


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _apart(
    rank: int, name: str, steps: NDArray[np.int64], b: NDArray[np.float64], c: NDArray[np.float64], common: Common,
    others: Sequence[NDArray[np.float64]] = (),
) -> Left | None:  # fmt: skip
    unequal = np.flatnonzero(b != c)
    if not len(unequal):
        return None
    exact = int(steps[unequal[0]])
    stays = Left(rank, name, exact, None, float(b[unequal[0]]), float(c[unequal[0]]), math.nan, math.nan)
    if name.startswith("digest/"):  # other bits: nothing of a size
        return stays
    kind = kind_of(name)
    logarithmic = kind.scale == "log" and bool((b > 0).all() and (c > 0).all())
    one, other = (np.log(b), np.log(c)) if logarithmic else (b, c)
    difference = other - one
    if common.other_weights and not kind.settled:
        begun = difference[:OF]
        since = difference - np.median(begun[np.isfinite(begun)]) if np.isfinite(begun).any() else difference
        less = np.sign(difference) * np.minimum(np.abs(difference), np.abs(since))
        difference = np.where(np.isfinite(difference) & (since * difference <= 0), 0.0, less)
    if logarithmic and not kind.settled and np.nanmax(np.abs(difference)) < LEAST:
        return stays
    noise = _noise(one, other, kind.settled, logarithmic, common.shared)
    floor = np.zeros(len(steps))
    for repeat in others:
        floor = np.maximum(floor, _repeated(one, np.log(np.where(repeat > 0, repeat, np.nan)) if logarithmic else repeat))
    if kind.share:
        floor = np.maximum(floor, _counting(b, c))
    noise = np.maximum(noise, floor)
    away = np.nan_to_num(difference / noise, nan=0.0, posinf=math.inf, neginf=-math.inf)
    away = np.where(np.isinf(b) & np.isinf(c), 0.0, np.where(np.isinf(c) & ~np.isinf(b), math.inf, away))
    place = _sustained(away)
    if place is not None and kind.remembers and common.excursion is not None:
        far = kind.remembers * common.excursion(name.partition("/")[2], steps)
        noise = np.maximum(noise, far if logarithmic else -np.expm1(-far) * np.maximum(np.abs(one), np.abs(other)))
        away = np.where(np.isfinite(away), np.nan_to_num(difference / noise), away)
        place = _sustained(away)
    early = common.start.leaves(name, steps, difference) if common.start is not None and logarithmic and not kind.settled else None
    if early is not None and (place is None or early[0] < place) and abs(difference[early[0]]) > floor[early[0]]:
        place, noise[early[0]] = early[0], max(early[1], floor[early[0]])
    if place is None:
        return stays
    before, told = float(b[place]), (float(difference[place]), float(noise[place]))
    if logarithmic:
        most = abs(math.expm1(math.copysign(min(told[1], 700.0), told[0])))  # 79 % lower is 368 % higher
        told = math.expm1(min(told[0], 700.0)), most
    elif before:
        told = told[0] / abs(before), told[1] / abs(before)
    return Left(rank, name, exact, int(steps[place]), before, float(c[place]), *told, relative=logarithmic or before != 0)


def _noise(
    one: NDArray[np.float64], other: NDArray[np.float64], settled: Settled, logarithmic: bool, shared: float
) -> NDArray[np.float64]:  # fmt: skip
    """Return how far apart two series may be around each step and still be noise; Inf where there are too few."""
    if len(one) < FEWEST:
        return np.full(len(one), math.inf)
    size = np.fmax(np.where(np.isfinite(one), np.abs(one), 0.0), np.where(np.isfinite(other), np.abs(other), 0.0))
    floor = EXACT * float(size.max(initial=1e-300))
    if settled == "set":
        return np.maximum(SET * size, floor)
    if settled == "counted":
        return np.maximum(floor, OWN_NOISE * math.sqrt(2) * np.maximum(_changes(one), _changes(other)))
    own = OWN_NOISE * math.sqrt(2 * (1 - shared)) * np.maximum(_wander(one, 0.0), _wander(other, 0.0))
    apart = other - one
    moving = OWN_NOISE * _wander(apart, _power(apart) + 1 / math.sqrt(len(apart)))
    least: NDArray[np.float64] = np.maximum(np.maximum(own, moving), np.maximum(LEAST if logarithmic else LEAST * size, floor))
    return least


@np.errstate(divide="ignore", invalid="ignore")
def _excursion(
    sides: Sequence[SeriesReader | Joined], rank: int, every: NDArray[np.int64], layer: str, steps: NDArray[np.int64]
) -> NDArray[np.float64]:  # fmt: skip
    """Return how far, on the log scale, gradients of a layer were at most from the middle of the steps around, in either run until
    each of some of ``every`` step: a gradient of e times its size puts up to e squared times its weight into a mean of squares."""
    found = np.zeros(len(every))
    for side in sides:
        held = side.column(rank, f"gradient_norm/{layer}")[np.searchsorted(side.steps(rank), every)]
        y = np.log(np.where((held > 0) & np.isfinite(held), held, np.nan))
        some = np.flatnonzero(~np.isnan(y))
        if len(some):
            y = np.interp(np.arange(len(y)), some, y[some])
            middle = np.median(sliding_window_view(np.pad(y, FIRST_BLOCK, mode="edge"), 2 * FIRST_BLOCK + 1), axis=1)
            found = np.maximum(found, np.maximum.accumulate(np.abs(y - middle)))
    return np.asarray(found[np.searchsorted(every, steps)])


def _set_otherwise(readers: Sequence[SeriesReader], rank: int, step: int) -> Iterator[Left]:
    """Yield what modules and optimizers of both runs are set to with other numbers. What one run alone says is no evidence: the
    other may do it by hand."""
    first, second = ({name: side.capture.ranks[rank].get(name) for name in ("framework", "settings")} for side in readers)
    if not (first["settings"] and second["settings"]):
        return
    for one in differing_settings(first, second):
        b, c = one.baseline, one.candidate
        if one.group in ("module", "optimizer") and one.severity == "changes" and {type(b), type(c)} <= {int, float}:
            apart = (c - b) / abs(b) if b else c
            yield Left(rank, f"{SETTING}/{subject(one)}", step, step, float(b), float(c), float(apart), 0.0, relative=bool(b))


def _in_other_dtypes(readers: Sequence[SeriesReader], rank: int) -> Iterator[str]:
    """Say which layers of the candidate return another dtype than the baseline's, by pair of dtypes the most first."""
    held = [side.capture.ranks[rank].get("dtypes") or {} for side in readers]
    before, after = ({scope: dtype for dtype, scopes in its.items() for scope in scopes} for its in held)
    both = [scope for scope in before if scope in after]
    pairs = Counter((before[scope], after[scope]) for scope in both if before[scope] != after[scope])
    for pair, count in pairs.most_common():
        first = next(scope for scope in both if (before[scope], after[scope]) == pair)
        said = in_words(Why.COMPUTES_IN(pair[1], count, len(both), "layers", pair[0]))
        yield f"{said}; the first is {first or 'the model'}"


def _repeated(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far a repeat is from the baseline around each step: the most of `FIRST_BLOCK` steps on either side."""
    apart = np.abs(other - one)
    apart = np.where(np.isfinite(apart), apart, 0.0)
    wide = np.pad(apart, FIRST_BLOCK)
    found: NDArray[np.float64] = sliding_window_view(wide, 2 * FIRST_BLOCK + 1).max(axis=1)
    return found


def _wander(values: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Return the deviation around each step that increments tell, of blocks the largest of three neighbours. ``power`` 0: of single
    steps; else of lags up to an eighth of a block, carried on to the step's number by that power."""
    edges = [0]
    while edges[-1] < len(values):
        edges.append(edges[-1] + min(WINDOW, FIRST_BLOCK if len(edges) < 3 else 2 * (edges[-1] - edges[-2])))
    edges[-1] = len(values)
    if len(edges) > 2 and edges[-1] - edges[-2] < FIRST_BLOCK // 2:
        edges.pop(-2)
    sizes = np.diff(edges)
    held, lag = np.zeros(len(sizes)), 1
    while lag == 1 or (power and lag <= WINDOW // LAG):
        moved = np.abs(values[lag:] - values[:-lag])
        told = _quantiles(np.where(np.isfinite(moved), moved, 0.0), edges) / NORMAL_QUANTILE / lag**power
        held = np.where((lag == 1) | (lag <= sizes // LAG), np.maximum(held, told), held)
        lag *= 2
    wide = np.maximum(held, np.maximum(np.r_[held[:1], held[:-1]], np.r_[held[1:], held[-1:]]))
    age: NDArray[np.float64] = np.arange(len(values), dtype=np.float64) + 1
    return np.asarray(np.repeat(wide, sizes) * age**power, np.float64)


def _quantiles(moved: NDArray[np.float64], edges: Sequence[int]) -> NDArray[np.float64]:
    """Return the `QUANTILE` of each block, all whole ones of the largest size at once."""
    found = np.zeros(len(edges) - 1)
    whole = [place for place, (at, to) in enumerate(pairwise(edges)) if to - at == WINDOW and to <= len(moved)]
    if whole:
        many = moved[edges[whole[0]] : edges[whole[-1]] + WINDOW].reshape(-1, WINDOW)
        found[whole[0] : whole[-1] + 1] = np.partition(many, int(QUANTILE * WINDOW), axis=1)[:, int(QUANTILE * WINDOW)]
    for place in set(range(len(found))).difference(whole):
        some = moved[edges[place] : edges[place + 1]]
        found[place] = np.quantile(some, QUANTILE) if len(some) else 0.0
    return found


def _power(values: NDArray[np.float64]) -> float:
    """Return the power of the lag by which increments grow, 0 to 1: 0 of noise, a half of a random walk, 1 of a drift."""
    lags = [2**power for power in range(max(1, (len(values) // 4).bit_length()))]
    middles = []
    for lag in lags:
        at = np.arange(0, len(values) - lag, max(1, lag // 8))  # neighbours tell the same
        moved = np.abs(values[at + lag] - values[at])
        middles.append(float(np.median(moved[np.isfinite(moved)])) if np.isfinite(moved).any() else 0.0)
    if len(lags) < 3 or min(middles) <= 0:
        return 0.5
    return float(np.clip(np.polyfit(np.log(lags), np.log(middles), 1)[0], 0.0, 1.0))


@np.errstate(invalid="ignore")
def _counting(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far apart shares of few elements may be around each step, for counting alone: six deviations of the difference
    of two binomial shares ``p`` of ``n`` elements, ``sqrt(2 p (1 - p) / n)`` (Feller, An Introduction to Probability Theory, vol.
    1, chapter VI). ``p`` is the mean of both runs in `FIRST_BLOCK` steps on either side, with one element more, so that none has
    noise, too (Laplace's rule of succession). Shares are whole multiples of ``1 / n``: the smallest step between those that were
    seen tells it; where that is a step of several elements, the noise is larger. Zero where more than `FEW` are counted."""
    both = np.concatenate([one, other])
    steps = np.diff(np.unique(np.r_[0.0, both[np.isfinite(both)]]))
    each = float(min(steps[steps > EXACT], default=1.0))
    if each > 1 / ELEMENTS:
        return np.zeros(len(one))
    middle = np.where(np.isfinite(one + other), (one + other) / 2, 0.0)
    width = min(2 * FIRST_BLOCK + 1, len(middle))
    wide = np.pad(middle, (width // 2, (width - 1) // 2), mode="edge")
    share = sliding_window_view(wide, width).mean(axis=1) + each
    return np.where(share <= (FEW + 1) * each, OWN_NOISE * np.sqrt(2 * share * (1 - share) * each), 0.0)


def _changes(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the step-to-step noise of what is counted, around each step: of blocks, the largest of three neighbours."""
    changes = np.abs(np.diff(np.where(np.isfinite(values), values, np.nan)))
    size = min(WINDOW, len(changes))
    blocks = [changes[at : at + size] for at in range(0, len(changes) - size + 1, size)]
    held = np.array([NORMAL * np.nanmedian(block) / math.sqrt(2) if np.isfinite(block).any() else math.inf for block in blocks])
    wide = np.maximum(held, np.maximum(np.r_[held[:1], held[:-1]], np.r_[held[1:], held[-1:]]))
    each: NDArray[np.float64] = wide[np.minimum(np.arange(len(values)) // size, len(wide) - 1)]
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


def size(value: float, one: Left) -> str:
    """Write a difference of a series, or how much of it would be noise."""
    return percent(abs(value)) if one.relative else number(abs(value), 2)


def far(one: Left) -> str:
    """Say how far apart the numbers are where a series leaves, and what would be noise there."""
    if not math.isfinite(one.difference):
        return "one is NaN or Inf"
    said, limit = (size(n, one) for n in (one.difference, one.noise))
    settled = kind_of(one.series).settled
    still = settled == "set" or (settled and one.noise < SET)
    known = f"it is {settled} and has no noise" if still else f"up to {limit} is noise there"
    return f"{said} {'lower' if one.difference < 0 else 'higher'}; {known}"


def _do(count: int, verb: str) -> str:
    return f"{count:,} {verb}{'s' if count == 1 else ''}"


def _sentence(verdict: VerdictWord, left: list[Left], differing: int, count: int, span: tuple[int, int, int]) -> str:
    where = f"{counted(count, 'series', 'series')} over {counted(span[2], 'step')} ({span[0]:,} to {span[1]:,})"
    if left:
        first = left[0]
        rank = f", rank {first.rank}" if any(one.rank for one in left) else ""
        loss = next((one for one in left if one.series == "loss"), None)
        both = f"{_do(len(left), 'leave')} and {_do(differing, 'differ')}"
        leaves = "is set otherwise, from step" if first.series.startswith(f"{SETTING}/") else "leaves first, at step"
        return "\n".join((
            f"DEVIATES  {spoken(first.series)} {leaves} {first.beyond:,}{rank}",
            f"          {number(first.baseline, 6)} in the baseline, {number(first.candidate, 6)} in the candidate: {far(first)}",
            f"          it differs from step {first.exact:,} on; of {where} {both}",
            f"          the loss leaves at step {loss.beyond:,}" if loss else "          the loss does not leave",
        ))  # fmt: skip
    head = {"aligned": "ALIGNED", "inconclusive": "COULD NOT TELL"}.get(verdict, "")
    if not differing:
        return f"{head}  the same number at each step in {where}"
    less = _do(differing, f"of {where} differ")
    return f"{head}  no series leaves the noise of its own steps: {less} by less"
