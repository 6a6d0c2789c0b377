"""What each series of a monitor is (the rows of ``kinds.toml``), and the ranks of a run joined: one series of all ranks, and how
far apart the ranks are.

A rank's row of a step stands beside those of the others with the same step. What stands for all of them is a column of
``kinds.toml``: the mean, the largest, or the sum (of tokens). A step that a rank lacks is joined over those that have it, and said.

Two runs with the same weights and batches compute the same at first, up to rounding, and wander apart later: what a rule for whole
runs (`comparing`) has to allow hides a fault of 10 % then. Whether two runs begin alike their first layer says: in the first step
its outputs agree (`SAME`). Two rules look at the first `FIRST` steps, as far as they have everything:

- **behind layers that agree**: the loss, gradients and updates in three of the first five. How far outputs of layers are apart in a
  step, at most, is what rounding does there; a loss may be off by six times that, as many times more as the largest output of the
  last layer is larger than the loss, and so may gradients; one of a layer by so much of the whole gradient, for rounding of large
  terms may be all that there is of a small one.
- **in the middle**: a number of its own in each step (an output, a gradient; no moment, which remembers) whose difference has a
  median of over six robust deviations of the difference. Other dropout masks make no such thing: their differences change sides.

Both leave differences of under 2 % alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.curves.statistics import NORMAL, OF, OWN_NOISE, SUSTAINED
from trueup.foundation import toml
from trueup.foundation.store.series import AT_A_TIME, SeriesReader
from trueup.foundation.words.wording import counted, in_runs

Rule = Literal["spike", "drift", "drift_up", "frozen", "vanishing", "dead", "desync"]
Settled = Literal["", "set", "counted"]

Floats = NDArray[np.float64]


class Kind(toml.Table):
    """A row."""

    name: str
    meaning: str
    msprobe: str = ""
    alerts: tuple[Rule, ...] = ()
    scale: Literal["log", "linear"] = "log"
    moved: float = 3.0
    settled: Settled = ""
    absent: float | None = None
    remembers: int = 0
    share: bool = False
    ranks: Literal["mean", "largest", "sum", "none"] = "mean"


class Kinds(toml.Table):
    """The file."""

    kind: tuple[Kind, ...]


@cache
def kinds() -> dict[str, Kind]:
    """Return the kinds by name, in the order of the file."""
    return {one.name: one for one in toml.checked(toml.packaged("trueup.analysis.monitor", "kinds.toml"), Kinds).kind}


SETTING = "setting"  # the kind of what is set: eps of a module, weight_decay of AdamW
OTHER = Kind("", "a series that this version does not know", scale="linear")


def kind_of(series: str) -> Kind:
    """Return the kind of a series by its name, ``gradient_norm/encoder.0``."""
    return kinds().get(series.partition("/")[0], OTHER)


def spoken(series: str) -> str:
    """Return a series as a sentence names it: ``gradient_norm of encoder.0``."""
    kind, _, scope = series.partition("/")
    if kind == SETTING:
        return scope
    of = "group " if kind == "lr" else ""
    return f"{kind} of {of}{scope}" if scope else kind


@dataclass(frozen=True, slots=True)
class Row:
    """A series over all ranks."""

    series: str
    taken: int  # steps that have it, on any rank
    first: float  # joined over ranks: in its first step, its last, and between
    last: float
    low: float
    high: float
    apart: float  # the largest distance of a rank from the middle of all, beside that middle; 0 of one rank
    odd: int | None  # the rank that is farthest from the middle in most steps, where it is one; None of one or two ranks


class Joined:
    """A monitored run as one rank, for whoever compares it: the steps and columns of `SeriesReader`, of rank 0."""

    def __init__(self, reader: SeriesReader) -> None:
        self.reader, self.capture = reader, reader.capture
        self._ranks = reader.ranks
        every = [reader.steps(rank) for rank in self._ranks]
        self._every = np.unique(np.concatenate(every)) if every else np.zeros(0, np.int64)
        self._places = {rank: np.searchsorted(self._every, steps) for rank, steps in zip(self._ranks, every, strict=True)}
        self.problems = list(reader.problems)
        short = [rank for rank, steps in zip(self._ranks, every, strict=True) if len(steps) < len(self._every)]
        if short:
            lacking = f"ranks {in_runs(short, ', ')} lack some of {counted(len(self._every), 'step')}"
            self.problems.append(f"{lacking}: joined without them")

    @property
    def ranks(self) -> list[int]:
        """One rank, where there is any."""
        return [0] if self._ranks else []

    def steps(self, rank: int) -> NDArray[np.int64]:  # noqa: ARG002 - there is one
        """Return the steps of any rank, ascending."""
        return self._every

    def names(self, rank: int) -> list[str]:  # noqa: ARG002
        """Return the series of any rank that can be joined, in forward order."""
        every = dict.fromkeys(name for one in self._ranks for name in self.reader.names(one))
        return [name for name in every if kind_of(name).ranks != "none"]

    def columns(self, rank: int, names: Sequence[str]) -> dict[str, Floats]:  # noqa: ARG002
        """Return several series, joined; what no rank has taken is NaN."""
        return {name: joined(name, held) for name, held in self.beside(names)}

    def column(self, rank: int, name: str) -> Floats:
        """Return a series, joined."""
        return self.columns(rank, [name])[name]

    def beside(self, names: Sequence[str]) -> Iterator[tuple[str, Floats]]:
        """Yield series as arrays (ranks, steps)."""
        read = {rank: self.reader.columns(rank, list(names)) for rank in self._ranks}
        for name in names:
            held = np.full((len(self._ranks), len(self._every)), np.nan)
            for place, rank in enumerate(self._ranks):
                held[place, self._places[rank]] = read[rank][name]
            yield name, held


@np.errstate(invalid="ignore", over="ignore")
def joined(name: str, held: Floats) -> Floats:
    """Join a series over ranks (the first axis) by the rule of its kind."""
    taken = ~np.isnan(held)
    how, some = kind_of(name).ranks, taken.any(axis=0)
    if how == "largest":
        found = np.fmax.reduce(held, axis=0)
    else:
        found = np.where(taken, held, 0.0).sum(axis=0)
        if how == "mean":
            found = found / np.maximum(taken.sum(axis=0), 1)
    each: Floats = np.where(some, found, np.nan)
    return each


def rows(reader: SeriesReader, wanted: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the series of a run, joined over its ranks, in forward order; those of ``wanted`` alone."""
    held = Joined(reader)
    names = [name for name in held.names(0) if wanted is None or name in wanted]
    for at in range(0, len(names), AT_A_TIME):
        for name, beside in held.beside(names[at : at + AT_A_TIME]):
            one = joined(name, beside)
            there = one[~np.isnan(one)]
            if len(there):
                apart, odd = _apart(beside, reader.ranks)
                first, last, low, high = (float(n) for n in (there[0], there[-1], there.min(), there.max()))
                yield Row(name, len(there), first, last, low, high, apart, odd)


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _apart(beside: Floats, ranks: Sequence[int]) -> tuple[float, int | None]:
    """Return the largest distance of a rank from the median of all, beside that, and the rank that is the farthest most often."""
    whole = beside[:, ~np.isnan(beside).any(axis=0)]
    if len(ranks) < 2 or not whole.size:
        return 0.0, None
    middle = np.median(whole, axis=0)
    off = np.abs(whole - middle)
    share = np.nan_to_num(off / np.abs(middle), nan=0.0, posinf=np.inf)
    farthest = np.bincount(off.argmax(axis=0)[off.max(axis=0) > 0], minlength=len(ranks))
    odd = int(farthest.argmax()) if len(ranks) > 2 and farthest.max() * 2 > max(1, farthest.sum()) else None
    return float(share.max()), None if odd is None else ranks[odd]


FIRST = 20  # steps: a monitor takes everything in each of them
SAME = (1e-3, 2**-7)  # of the first layer's outputs in the first step, relative: of their root mean square, of the largest
LEAST = 0.02  # on the log scale, as everywhere
ROUNDED = 1e-6  # of a gradient: what float32 does to it, whatever agrees before
FEWEST = 8  # steps that a median is told of
BEHIND = ("loss", "gradient_norm", "gradient_norm_before_clip", "local_gradient_norm", "update_ratio")
FRESH = (
    "loss", "gradient_norm", "gradient_norm_before_clip", "local_gradient_norm", "activation_rms", "attention_largest_logit",
    "router_largest_logit", "output_gradient_rms",
)  # fmt: skip
Sides = Sequence[SeriesReader | Joined]


@dataclass(frozen=True)
class Start:
    """The first steps of two runs that begin alike."""

    steps: NDArray[np.int64]
    apart: Floats  # how far a loss may be apart in a step: six times what layers are; NaN where they were not taken
    share: Floats  # of the whole gradient that a layer's may be off by, times the whole gradient
    gradients: dict[str, Floats]  # norms of layers in the baseline

    def leaves(self, name: str, steps: NDArray[np.int64], difference: Floats) -> tuple[int, float] | None:
        """Return the place of the first step in which a series leaves, and how far apart it might be; None: it does not.
        ``difference``: of logarithms, by step."""
        kind, _, scope = name.partition("/")
        here = np.flatnonzero(np.isin(steps, self.steps))
        at = np.searchsorted(self.steps, steps[here])
        told = difference[here]
        limit = np.fmax(LEAST, self.apart[at])
        least = np.full(len(here), LEAST)
        if scope and kind in BEHIND:
            own = self.gradients.get(scope)
            if own is None:
                return None
            least = np.fmax(least, self.share[at] / np.maximum(own[at], 1e-300))
            limit = np.fmax(limit, least)
        if kind in BEHIND:
            known = np.flatnonzero(np.isfinite(self.apart[at]) & np.isfinite(told))[:OF]
            for side in (1, -1):
                beyond = known[side * told[known] > limit[known]]
                if len(beyond) >= SUSTAINED:
                    return int(here[beyond[0]]), float(limit[beyond[0]])
        if kind in FRESH:
            finite = np.isfinite(told) & np.isfinite(self.apart[at])
            if finite.sum() >= FEWEST:
                some = told[finite]
                middle = float(np.median(some))
                noise = max(float(np.median(least[finite])), OWN_NOISE * NORMAL * float(np.median(np.abs(some - middle))))
                beyond = np.flatnonzero(finite & (np.sign(middle) * told > noise))
                if abs(middle) > noise:
                    return int(here[beyond[0]]), noise
        return None


@np.errstate(divide="ignore", invalid="ignore")
def start(sides: Sides, rank: int, names: Sequence[str], steps: NDArray[np.int64]) -> Start | None:
    """Return the first steps of two runs, None where they do not begin alike: with other batches, or not at the same step."""
    begun = [side.steps(rank)[:1] for side in sides]
    if not len(steps) or any(int(one[0]) != int(steps[0]) for one in begun):
        return None
    first = steps[steps < steps[0] + FIRST]
    places = [np.searchsorted(side.steps(rank), first) for side in sides]
    outputs = [name for name in names if name.partition("/")[0] in ("activation_rms", "activation_max")]
    layers = [name for name in names if name.startswith("gradient_norm/")]
    wanted = [*outputs, *layers, *(name for name in ("loss", "gradient_norm") if name in names)]
    held = [
        {name: one[place] for name, one in side.columns(rank, wanted).items()} for side, place in zip(sides, places, strict=True)
    ]
    apart = {name: np.abs(np.log(held[1][name] / held[0][name])) for name in outputs}
    scopes = {name.partition("/")[2]: None for name in outputs}
    scope = next((one for one in scopes if one and not any(other.startswith(f"{one}.") for other in scopes)), None)
    if scope is None or len(outputs) < 4 or "loss" not in names or "gradient_norm" not in names:
        return None
    far = [apart.get(f"{kind}/{scope}", np.full(1, np.inf))[0] for kind in ("activation_rms", "activation_max")]
    if not all(one <= most for one, most in zip(far, SAME, strict=True)):
        return None
    every = np.array([apart[name] for name in outputs])
    there = np.isfinite(held[0][outputs[0]])
    rounding = np.where(there, np.fmax.reduce(np.where(np.isfinite(every), every, 0.0)), np.nan)
    last = held[0][next(name for name in reversed(outputs) if name.startswith("activation_max"))]
    more = 1 + np.nan_to_num(last / held[0]["loss"], nan=0.0, posinf=np.inf)
    share = OWN_NOISE * np.fmax(rounding, ROUNDED) * more * held[0]["gradient_norm"]
    return Start(first, OWN_NOISE * rounding * more, share, {name.partition("/")[2]: held[0][name] for name in layers})
