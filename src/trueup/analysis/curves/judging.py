"""A verdict over the curves of a baseline's runs and a candidate's.

One number a run (its mean over a window of steps) is tested; what single steps show stands beside it and decides nothing, but for
what is no matter of chance: curves that are the same number at each step, and a candidate that becomes NaN where no baseline does.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.curves import statistics
from trueup.analysis.curves.run import Run, Series, chosen, plain
from trueup.analysis.curves.statistics import Better, Numbers, Tested, Word
from trueup.analysis.recipes.recipe import load, means_apart, relative
from trueup.foundation import toml
from trueup.foundation.model import TrueupError, UsageError, VerdictWord
from trueup.foundation.words.wording import counted, percent

MARGIN = 0.005  # guide of PaddlePaddle for Ascend; MLPerf and DeepSeek-V3 (0.25 % against BF16) ask for as little
WINDOWS = ((0.0, 0.2), (0.2, 0.9), (0.9, 1.0))  # shares of the steps; a verdict is of the last one
LATER = 0.02  # share of the steps below which it is not worth a line that one side is later
NEAR = 0.02  # how near numbers are that lie beside each other by their order alone
COUNTED = 5  # steps that both sides have, before it is said that they count from different numbers
EPOCHS = 0.02  # by how much epochs of the same step may differ: logs round them to two digits
TINY = 1e-6  # a distance of which it does not matter on which side it is
EARLY = 20  # steps that a guide calls several
HEADS: dict[Word, str] = {
    "equivalent": "EQUIVALENT", "different inside the margin": "DIFFERENT BUT INSIDE THE MARGIN", "different": "DIFFERENT",
    "could not tell": "COULD NOT TELL",
}  # fmt: skip
VERDICTS: dict[Word, VerdictWord] = {
    "equivalent": "aligned", "different inside the margin": "aligned", "different": "deviates", "could not tell": "inconclusive",
}  # fmt: skip


class Rule(toml.Table):
    """A ``[[rule]]`` of guides.toml."""

    name: str
    look: Literal["first", "early", "share", "end"]
    origin: str
    of: str = ""  # the step of recipe paddle that has the number
    limit: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the steps, and what the tests say of each run's mean over it."""

    first: int
    last: int
    tested: Tested
    control: dict[Word, int]
    means: tuple[float, float]  # of all runs of a side


@dataclass(frozen=True, slots=True)
class Ruled:
    """A rule of a guide, applied."""

    name: str
    passes: bool
    value: float  # the relative distance
    limit: float
    origin: str


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a candidate's run parts from the baseline."""

    run: str
    exact: int | None  # first step whose number is another one than in its pair; None: none, or it has no pair
    beyond: int | None  # first step from which it stays beyond the noise band


@dataclass(frozen=True, slots=True)
class Shape:
    """What stands beside the verdict, a number a side or a run."""

    partings: tuple[Parting, ...]
    alarms: float | None  # how often a healthy run would leave the band
    lag: statistics.Lag | None
    spikes: tuple[tuple[int, ...], ...]  # steps, a run each, the baseline's first
    changes: tuple[int, ...]  # steps at which the difference of the mean curves changes its level
    slopes: tuple[float, float]  # of the last third, a thousand steps; relative where the curve is positive


@dataclass(frozen=True)
class Verdict:
    """What `judge` returns."""

    word: Word
    sentence: str  # several lines of plain text
    names: tuple[str, str]  # of the series, on both sides
    margin: float
    runs: tuple[tuple[str, ...], tuple[str, ...]]
    pairing: str
    windows: tuple[Window, ...]
    rules: tuple[Ruled, ...]
    seen: Shape
    notes: tuple[str, ...]
    steps: NDArray[np.int64] = field(repr=False)
    curves: tuple[Numbers, Numbers] = field(repr=False)  # (runs, steps) of both sides
    band: statistics.Band = field(repr=False)
    logarithmic: bool = True

    @property
    def verdict(self) -> VerdictWord:
        """The word of all commands."""
        return VERDICTS[self.word]

    @property
    def exit_code(self) -> int:
        """0 equivalent, or different inside the margin; 1 different; 2 could not tell."""
        return {"aligned": 0, "deviates": 1, "inconclusive": 2}[self.verdict]


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # curves may hold NaN and Inf, which are said
def judge(
    baseline: Sequence[Run], candidate: Sequence[Run], series: str | None = None, *, margin: float = MARGIN,
    paired: bool | None = None, better: Better | None = None, window: tuple[int, int] | None = None, spread: float | None = None,
    shift: int = 0,
) -> Verdict:  # fmt: skip
    """Judge a candidate's runs beside a baseline's.

    Args:
        baseline: the trusted runs: repeats of one training, with other seeds.
        candidate: the runs under suspicion.
        series: which number, by name or glob; ``BASE=CAND`` where the two sides name it differently; else the loss.
        margin: the largest relative difference that does not matter.
        paired: pair the n-th runs of both sides; None: pair by seed where all runs say one and both sides have the same.
        better: ``lower`` or ``higher``: only what is worse counts (non-inferiority).
        window: steps that the verdict is of, both included; else the last tenth.
        spread: the relative standard deviation of a run, known from elsewhere.
        shift: the candidate counts its steps from so many more: its step ``n + shift`` is the baseline's step ``n``.

    Raises:
        TrueupError: a run lacks the series, or no step is in all runs.
    """
    statistics.require()
    _check_margin(margin)
    sides = _chosen(baseline, candidate, (series or "").partition("="), shift)
    told = [(run.name, note) for run in (*baseline, *candidate) for note in run.notes]
    told += _written_again([*baseline, *candidate], [one for _, one in (*sides[0], *sides[1])])
    notes = _joined(told)
    sides = _in_order((baseline, candidate), sides, notes)
    names = _names(sides, notes)
    off = _counted_from(*([one for _, one in side] for side in sides))
    steps = _common(sides, notes, off)
    curves = [np.stack([one.values[np.searchsorted(one.steps, steps)] for _, one in side]) for side in sides]
    pairing, order = _pairs(baseline, candidate, paired)
    kept = [list(range(len(baseline))), order]
    if not order:
        kept = [_distinct(*side, notes) for side in zip((baseline, candidate), curves, strict=True)]
    b, c = (held[places] for held, places in zip(curves, kept, strict=True))
    runs_of = [tuple(runs[place].name for place in places) for runs, places in zip((baseline, candidate), kept, strict=True)]
    pair = bool(order)
    logarithmic = bool((b > 0).all() and (np.isnan(c) | (c > 0)).all() and np.isfinite(b).all())
    count = len(steps)
    places = _places(steps, window)
    drawn = (np.log(b), np.log(np.where(c > 0, c, np.nan))) if logarithmic else (b, c)
    windows = tuple(
        _tested(steps, place, (b, c), margin, logarithmic, pair, better, spread) for place in places
        if np.isfinite(b[:, place]).all() and np.isfinite(c[:, place]).all()
    )  # fmt: skip
    whole = _whole(b, c, steps, pair)
    word, lines = whole if whole is not None else _worded(windows, names, pair, runs_of, margin, better, spread)
    windows = () if whole is not None and word == "equivalent" else windows  # the same number everywhere: nothing to test
    held = statistics.band(drawn[0]) if np.isfinite(b).all() else statistics.Band(drawn[0][0], np.full(count, math.inf), 0)
    found = _shape(steps, drawn, (b, c), held, runs_of[1], pair or (len(b), len(c)) == (1, 1))
    rules = tuple(_ruled(b, c, steps, places[-1]))
    return Verdict(
        word, _sentence(word, [*lines, *_numbering(shift, off), *_beside(found, rules, int(steps[0]))]), names, margin,
        (runs_of[0], runs_of[1]), pairing, windows, rules, found, tuple(dict.fromkeys(notes)), steps, (b, c), held, logarithmic,
    )  # fmt: skip


def _chosen(
    baseline: Sequence[Run], candidate: Sequence[Run], wanted: tuple[str, str, str], shift: int
) -> list[list[tuple[str, Series]]]:
    """Return the named series of each run, by side, the candidate's steps counted as the baseline counts them."""
    first, second = ([chosen(run, name or None) for run in runs] for runs, name in
                     ((baseline, wanted[0]), (candidate, wanted[2] or wanted[0])))  # fmt: skip
    return [first, [(name, Series(one.steps - shift, one.values, one.again)) for name, one in second] if shift else second]


def _places(steps: NDArray[np.int64], window: tuple[int, int] | None) -> list[slice]:
    """Return the windows that are tested; the verdict is of the last."""
    count = len(steps)
    places = [slice(int(at * count), int(to * count)) for at, to in WINDOWS] if count >= 10 else [slice(0, count)]
    return places if window is None else [*places, _asked(steps, window)]


def _sentence(word: Word, lines: Sequence[str]) -> str:
    """Put the word before the first line, and the others below that."""
    head = f"{HEADS[word]}  "
    return "\n".join([head + lines[0], *(" " * len(head) + line for line in lines[1:])])


def _written_again(runs: Sequence[Run], held: Sequence[Series]) -> list[tuple[str, str]]:
    again = "of steps that were written again, after a restart or by several ranks: the last ones count"
    return [(run.name, f"{counted(one.again, 'number')} {again}") for run, one in zip(runs, held, strict=True) if one.again]


def _joined(told: Sequence[tuple[str, str]]) -> list[str]:
    """Say what holds of several runs once: their notes differ in numbers alone."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, note in dict.fromkeys(told):
        alike.setdefault(re.sub(r"\d[\d.,]*", "#", note), []).append((name, note))
    others = [f" and {counted(len(held) - 1, 'more run')}" if len(held) > 1 else "" for held in alike.values()]
    return [f"{held[0][0]}{more}: {held[0][1]}" for held, more in zip(alike.values(), others, strict=True)]


def _in_order(
    runs: Sequence[Sequence[Run]], sides: list[list[tuple[str, Series]]], notes: list[str]
) -> list[list[tuple[str, Series]]]:  # fmt: skip
    """Give numbers whose lines have no step the steps of the other runs, in their order. Raises TrueupError if the n-th lines say
    another epoch: they are not of the same step."""
    every = [list(zip(side, held, strict=True)) for side, held in zip(runs, sides, strict=True)]
    flat = [*every[0], *every[1]]
    counts = [run.name for run, (name, _) in flat if name in run.counted]
    said = ((run.name, _epochs(run, name, held)) for run, (name, held) in flat) if counts else ()
    for (one, before), (other, after) in itertools.pairwise(pair for pair in said if len(pair[1])):
        count = min(len(before), len(after))
        off = np.flatnonzero(np.abs(before[:count] - after[:count]) > EPOCHS + EPOCHS * np.abs(before[:count]))
        if off.size:
            at = int(off[0])
            raise TrueupError(
                f"The lines of the logs have no step, and are not of the same steps.\n  where:    {one}, {other}\n"
                f"  expected: the same epoch in the same line\n  got:      {before[at]:g} and {after[at]:g} in line {at + 1:,}\n"
                "  next:     log as often on both sides, or compare files that have steps, such as trainer_state.json"
            )
    stepped = next((held for run, (name, held) in flat if name not in run.counted), None)
    if stepped is None or not counts:
        return sides
    notes.append(f"{counts[0]}: its lines have no step, and take the steps of the other runs in their order")
    steps = stepped.steps
    return [[(name, held.at(steps) if name in run.counted else held) for run, (name, held) in side] for side in every]


def _epochs(run: Run, name: str, held: Series) -> Numbers:
    """Return the epoch of each number of a series, where the run says it; else nothing."""
    if name in run.counted:
        return np.asarray(run.counted[name], np.float64)
    beside = next((one for key, one in run.series.items() if plain(key) == "epoch"), None)
    if beside is None or not np.isin(held.steps, beside.steps).all():
        return np.zeros(0)
    return beside.values[np.searchsorted(beside.steps, held.steps)]


def _names(sides: Sequence[Sequence[tuple[str, Series]]], notes: list[str]) -> tuple[str, str]:
    names = tuple(side[0][0] for side in sides)
    told = dict.fromkeys(name for side in sides for name, _ in side)
    if len({plain(name) for name in told}) > 1:
        notes.append(f"the series have several names: {', '.join(told)}")
    return names[0], names[1]


@dataclass(frozen=True, slots=True)
class _CountedFrom:
    """That the two sides count their steps from different numbers."""

    first: tuple[int, int]
    apart: tuple[float, float]  # the median relative distance of the numbers of a step as they are numbered, and in order


def _counted_from(baseline: Sequence[Series], candidate: Sequence[Series]) -> _CountedFrom | None:
    """Return by how much the candidate's steps are numbered otherwise: all are so many more, and the numbers are nearer that way
    (at most half as far apart; where no step is in both, within `NEAR`). None: they are not, or nothing tells."""
    b, c = baseline[0], candidate[0]
    if not len(b.steps) or not len(c.steps) or any(one.steps[0] != b.steps[0] for one in baseline):
        return None
    shift, count = int(c.steps[0] - b.steps[0]), min(len(b.steps), len(c.steps))
    every = [(one.steps[:count], own) for side, own in ((baseline, 0), (candidate, shift)) for one in side]
    if not shift or count < COUNTED or any(not np.array_equal(held - own, b.steps[: len(held)]) for held, own in every):
        return None
    mean_b, mean_c = ({int(step): float(value) for step, value in zip(one.steps, one.values, strict=True)} for one in (b, c))
    as_numbered = [relative(value, mean_c[step]) for step, value in mean_b.items() if step in mean_c]
    in_order = [relative(float(one), float(other)) for one, other in zip(b.values[:count], c.values[:count], strict=True)]
    now = float(np.median(as_numbered)) if as_numbered else math.inf
    shifted = float(np.median(in_order))
    most = now / 2 if as_numbered else NEAR
    return _CountedFrom((int(b.steps[0]), int(c.steps[0])), (now, shifted)) if shifted < most else None


def _check_margin(margin: float) -> None:
    if not 0 < margin < 1:
        raise UsageError(
            f"The margin cannot be used.\n  expected: a share between 0 and 1, such as 0.005\n  got:      {margin:g}\n"
            "  next:     correct it"
        )


def _numbering(shift: int, off: _CountedFrom | None) -> list[str]:
    """Say how the steps are numbered, where it was asked for or is not the same."""
    asked = f"steps: number {shift:+,} of the candidate stands for number 0 of the baseline, as asked (--shift {shift})"
    return [*([asked] if shift else []), *([] if off is None else [_off(off)])]


def _off(found: _CountedFrom) -> str:
    """Say it; nothing is shifted before somebody asks for it."""
    (first, other), (now, shifted) = found.first, found.apart
    near = "the same numbers in that order" if shifted == 0 else f"{percent(shifted)} apart in that order"
    by = other - first
    return (
        f"the baseline counts its steps from {first:,}, the candidate from {other:,}: {near}, {percent(now)} apart "
        f"by the step's number, as compared here; --shift {by} lines them up"
    )


def _common(sides: Sequence[Sequence[tuple[str, Series]]], notes: list[str], off: _CountedFrom | None) -> NDArray[np.int64]:
    """Return the steps that all runs have."""
    every = [one.steps for side in sides for _, one in side]
    steps = every[0]
    for one in every[1:]:
        steps = np.intersect1d(steps, one, assume_unique=True)
    if not len(steps):
        begun = (0, 0) if off is None else off.first
        lined = f"; or line up step {begun[0]:,} and step {begun[1]:,}: --shift {begun[1] - begun[0]}" if off is not None else ""
        first, other = next((a, b) for a in every for b in every if not len(np.intersect1d(a, b)) or a is every[-1])
        raise TrueupError(
            "The runs have no step in common.\n  expected: curves over the same steps\n"
            f"  got:      {_span(first)}, and {_span(other)}\n  next:     log every step, or the same ones, on both sides{lined}"
        )
    longest, shortest = max(int(one[-1]) for one in every), min(int(one[-1]) for one in every)
    if shortest < longest:
        until = f"judged up to step {int(steps[-1]):,}"
        notes.append(f"the shortest run ends at step {shortest:,}, the longest at {longest:,}: {until}")
    most = max(len(one) for one in every)
    if len(steps) < most / 2:
        notes.append(f"only {len(steps):,} of {most:,} steps are in all runs")
    return steps


def _span(steps: NDArray[np.int64]) -> str:
    return f"{counted(len(steps), 'step')} from {int(steps[0]):,} to {int(steps[-1]):,}" if len(steps) else "no steps"


def _pairs(baseline: Sequence[Run], candidate: Sequence[Run], paired: bool | None) -> tuple[str, list[int]]:
    """Say how the runs are paired, and return the candidate's in the order of the baseline's; none where they are not."""
    count = len(baseline)
    if paired is False:
        return "not paired", []
    if paired:
        if count != len(candidate):
            raise UsageError(
                f"--paired needs as many runs on both sides.\n  expected: {count} and {count}\n"
                f"  got:      {count} and {len(candidate)}\n  next:     leave out those without a partner"
            )
        return "paired in the order given", list(range(count))
    seeds = [[run.seed for run in side] for side in (baseline, candidate)]
    if None in seeds[0] or set(seeds[0]) != set(seeds[1]) or any(len(set(side)) < len(side) for side in seeds) or count < 2:
        return "not paired", []
    return "paired by seed", [seeds[1].index(seed) for seed in seeds[0]]


def _distinct(runs: Sequence[Run], held: Numbers, notes: list[str]) -> list[int]:
    """Leave out a run that is another one number for number: a deterministic training again is no second sample."""
    kept: list[int] = []
    for place, curve in enumerate(held):
        twin = next((other for other in kept if statistics.parts(held[other], curve) is None), None)
        if twin is None:
            kept.append(place)
        else:
            notes.append(f"{runs[place].name} is {runs[twin].name} number for number and counts once: repeats need other seeds")
    return kept


def _asked(steps: NDArray[np.int64], window: tuple[int, int]) -> slice:
    found = slice(int(np.searchsorted(steps, window[0])), int(np.searchsorted(steps, window[1], side="right")))
    if found.start >= found.stop:
        raise UsageError(
            f"--window holds no step.\n  expected: steps within {_span(steps)}\n"
            f"  got:      {window[0]}:{window[1]}\n  next:     correct it"
        )
    return found


def _tested(
    steps: NDArray[np.int64], place: slice, sides: tuple[Numbers, Numbers], margin: float, logarithmic: bool, pair: bool,
    better: Better | None, spread: float | None,
) -> Window:  # fmt: skip
    values = [_means(side[:, place], logarithmic) for side in sides]
    tested = statistics.equivalence(
        values[0].tolist(), values[1].tolist(), margin, logarithmic=logarithmic, paired=pair, better=better, spread=spread
    )
    checked = statistics.control(values[0].tolist(), margin, logarithmic=logarithmic, better=better)
    inside = steps[place]
    return Window(int(inside[0]), int(inside[-1]), tested, checked, (float(values[0].mean()), float(values[1].mean())))


def _means(held: Numbers, logarithmic: bool) -> Numbers:
    """Return one number a run: its mean over the window."""
    made: Numbers = np.exp(np.log(held).mean(axis=1)) if logarithmic else held.mean(axis=1)
    return made


def _whole(b: Numbers, c: Numbers, steps: NDArray[np.int64], pair: bool) -> tuple[Word, list[str]] | None:
    """Return a verdict that is no matter of chance, if there is one."""
    finite = np.isfinite(b).all()
    if finite and (pair or len(b) == len(c) == 1) and statistics.parts(b.ravel(), c.ravel()) is None:
        where = "of each pair" if len(b) > 1 else "in both runs"
        return "equivalent", [f"the same number at each step {where} ({counted(len(steps), 'step')})"]
    bad = [~np.isfinite(side) for side in (b, c)]
    if bad[1].any() and not bad[0].any():
        place = int(np.flatnonzero(bad[1].any(axis=0))[0])
        some = f"{int(bad[1].any(axis=1).sum())} of the candidate's {counted(len(c), 'run')}"
        return "different", [f"NaN or Inf in {some}, first at step {int(steps[place]):,}, and in no run of the baseline"]
    if bad[0].any():
        place = int(np.flatnonzero(bad[0].any(axis=0))[0])
        return "could not tell", [f"a run of the baseline is NaN or Inf from step {int(steps[place]):,} on"]
    return None


def _worded(
    windows: Sequence[Window], names: tuple[str, str], pair: bool, runs: Sequence[Sequence[str]], margin: float,
    better: Better | None, spread: float | None,
) -> tuple[Word, list[str]]:  # fmt: skip
    """Return the verdict of the last window; another window that surely differs (Holm 1979 over all) overrules that it is well."""
    last = windows[-1]
    word = last.tested.word
    surely = statistics.holm([one.tested.p_same for one in windows])
    earlier = [one for one, sure in zip(windows[:-1], surely, strict=False) if sure and one.tested.word == "different"]
    shown = last
    if VERDICTS[word] == "aligned" and earlier:
        word, shown = "different", earlier[0]
    what, inside = names[0], f"within {percent(margin)}"
    tested = shown.tested
    told = f"{what} of steps {shown.first:,} to {shown.last:,}: {_off_by(tested.difference)}"
    if math.isfinite(tested.low) and math.isfinite(tested.high):
        told += f" (90 % interval {_signed(tested.low)} to {_signed(tested.high)})"
    aligned = VERDICTS[word] == "aligned"
    inside = f", {'' if aligned else 'not '}{inside}"
    if better is not None:
        inside = f"; {better} is better: {'not worse by ' + percent(margin) if aligned else 'worse' + inside}"
    lines = [told + ("" if word == "could not tell" else inside)]
    if shown is not last:
        end = f"at the end (steps {last.first:,} to {last.last:,})"
        lines.append(f"{end} the two are {last.tested.word}: {_off_by(last.tested.difference)}")
    sizes = f"{counted(len(runs[0]), 'run')} against {counted(len(runs[1]), 'run')}"
    lines.append(f"{sizes}{', paired' if pair else ''}; each run is one sample: its mean over these steps")
    if word == "could not tell":
        lines.append(_open(tested, pair, spread))
    if last.control:
        total = sum(last.control.values())
        parts = ", ".join(f"{count} {name}" for name, count in sorted(last.control.items(), key=lambda one: -one[1]))
        wrong = last.control.get("different", 0) > total / 5
        lines.append(
            f"control: halves of the baseline against each other, {counted(total, 'split')}: {parts}"
            + ("; the baseline differs from itself, so its runs are not repeats of one training" if wrong else "")
        )
    elif not math.isnan(tested.spread):
        lines.append("no control: it takes 4 runs of the baseline, whose halves are tested against each other")
    return word, lines


def _open(tested: Tested, pair: bool, spread: float | None) -> str:
    """Say why nothing can be told, and how many repeats would do."""
    if math.isnan(tested.spread):
        return "one run a side says nothing of chance: record 3 a side with other seeds, or give a run's known deviation (--spread)"
    repeats = "more than 1,000 repeats" if tested.needed is None else f"{counted(tested.needed, 'repeat')} a side"
    of = "a pair's difference" if pair else "a run"
    known = ", as given" if spread is not None else ""
    sure = "; they do differ, but by how much is uncertain" if tested.p_same <= statistics.ALPHA else ""
    deviates = f"{of} deviates by {percent(tested.spread)}{known}"
    power = f"were they equal, these repeats would show it in {_cases(tested.power)} ({deviates})"
    return f"{power}; {repeats} would in {_cases(statistics.WANTED)}{sure}"


def _cases(share: float) -> str:
    return f"{percent(share)} of cases"


def _signed(share: float) -> str:
    """Write an end of an interval."""
    return f"{'−' if share < 0 else '+'}{percent(abs(share))}" if abs(share) >= TINY else "0 %"


def _off_by(share: float) -> str:
    """Say how far the candidate is off: ``0.22 % higher``."""
    return f"{percent(abs(share))} {'off' if abs(share) < TINY else 'lower' if share < 0 else 'higher'}"


def _shape(
    steps: NDArray[np.int64], drawn: tuple[Numbers, Numbers], sides: tuple[Numbers, Numbers], held: statistics.Band,
    runs: Sequence[str], pair: bool,
) -> Shape:  # fmt: skip
    partings = []
    for place, name in enumerate(runs):
        exact = statistics.parts(sides[0][place], sides[1][place]) if pair else None
        beyond = statistics.leaves(drawn[1][place], held) if len(steps) >= statistics.OF else None
        partings.append(Parting(name, None if exact is None else int(steps[exact]), None if beyond is None else int(steps[beyond])))
    finite = [bool(np.isfinite(side).all()) for side in drawn]
    spikes = tuple(tuple(int(steps[place]) for place in statistics.spikes(curve)) for side in drawn for curve in side)
    means = [side.mean(axis=0) for side in drawn]
    changed = statistics.changes(means[1] - means[0]) if all(finite) else []
    lag = statistics.lag(steps, list(sides[0]), list(sides[1])) if all(finite) else None
    slopes = statistics.slope(steps, means[0]), statistics.slope(steps, means[1])
    return Shape(tuple(partings), held.alarms, lag, spikes, tuple(int(steps[place]) for place in changed), slopes)


@cache
def _rules() -> tuple[Rule, ...]:
    """Return the guides' rules; what recipe paddle has a number for is taken from there."""
    known = {step.name: step for step in load("paddle").steps}
    found = toml.checked(toml.packaged(__package__, "guides.toml")["rule"], tuple[Rule, ...])
    made = []
    for rule in found:
        step = known.get(rule.of)
        limit = rule.limit if step is None else float(step.loss if step.loss is not None else step.limit)
        made.append(Rule(rule.name, rule.look, rule.origin, rule.of, limit, rule.share))
    return tuple(made)


def _ruled(b: Numbers, c: Numbers, steps: NDArray[np.int64], last: slice) -> list[Ruled]:
    before, after = (side.mean(axis=0) for side in (b, c))
    found = []
    for rule in _rules():
        if rule.look == "first":
            value = relative(float(before[0]), float(after[0]))
        elif rule.look == "early":
            value = min(means_apart(list(zip(before[:EARLY].tolist(), after[:EARLY].tolist(), strict=True))))
        else:
            place = last if rule.look == "end" else slice(0, max(1, int(rule.share * len(steps))))
            value = relative(float(before[place].mean()), float(after[place].mean()))
        found.append(Ruled(rule.name, value <= rule.limit, value, rule.limit, rule.origin))
    return found


def _beside(found: Shape, rules: Sequence[Ruled], first: int) -> list[str]:
    """Say what single steps show."""
    lines = []
    exact = sorted(one.exact for one in found.partings if one.exact is not None)
    if exact:
        several = f" (by pair up to step {exact[-1]:,})" if exact[-1] > exact[0] else ""
        same = f"the numbers are the same before step {exact[0]:,}{several}" if exact[0] > first else ""
        lines.append(same or f"the numbers differ from the first step on{several}")
    beyond = sorted(one.beyond for one in found.partings if one.beyond is not None)
    if beyond:
        healthy = "how often a healthy run does is unknown with fewer than 3 baseline runs"
        if found.alarms is not None:
            healthy = f"a healthy run does in about {_cases(found.alarms)}"
        some = f"the candidate leaves the noise band in {len(beyond)} of {counted(len(found.partings), 'run')}"
        lines.append(f"{some}, first at step {beyond[0]:,} (3 of 5 steps outside it); {healthy}")
    lag = found.lag
    if lag is not None and lag.share >= LATER:
        who, other = ("candidate", "baseline") if lag.steps > 0 else ("baseline", "candidate")
        later = f"{counted(abs(lag.steps), 'step')} later ({percent(lag.share)} of the run)"
        lines.append(f"the {who} reaches at step {lag.then:,} what the {other} reached at step {lag.there:,}: {later}")
    failed = [one for one in rules if not one.passes]
    if failed:
        told = (f"{one.name} {percent(one.value)} apart (at most {percent(one.limit)})" for one in failed)
        lines.append(f"guides: {'; '.join(told)}")
    else:
        lines.append(f"guides: all {len(rules)} rules pass")
    return lines


