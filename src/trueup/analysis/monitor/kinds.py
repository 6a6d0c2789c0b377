"""What each series of a monitor is (the rows of ``kinds.toml``), and the ranks of a run joined: one series of all ranks, and how
far apart the ranks are.

A rank's row of a step stands beside those of the others with the same step. What stands for all of them is a column of
``kinds.toml``: the mean, the largest, or the sum (of tokens). A step that a rank lacks is joined over those that have it, and said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
