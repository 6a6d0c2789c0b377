"""A run's numbers by step, and which of them is meant: frameworks name a training's loss in a dozen ways."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.triage.running import losses_of
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture
from trueup.foundation.store.layout import MONITOR
from trueup.foundation.store.series import SeriesReader

LOSSES = (
    "loss", "train_loss", "training_loss", "loss_train", "lm_loss", "loss_metrics_global_avg_loss", "train_loss_step", "total_loss",
    "loss_total", "train_total_loss", "train_lm_loss", "lm_loss_training", "celoss", "reduced_train_loss", "train_ce_loss",
    "train_crossentropyloss", "training_loss_epoch", "xent",
)  # fmt: skip
"""Names of a training's loss, as `plain` writes them, the likeliest first."""
TIMES = ("wall_time", "time", "timestamp", "relative_time", "epoch")  # that stand beside the one number of a table
SEED = re.compile(r"(?:^|[^a-zA-Z])(?:seed|sd)[-_=]?(\d{1,10})(?![\d.]*\d)|(?:^|[-_/.])s(\d{1,6})(?=[-_/.]|$)", re.IGNORECASE)
MOST_SERIES = 2000  # of layers that a monitor's run gives
NAMED = 12  # series that a message lists


@dataclass(frozen=True, slots=True)
class Series:
    """One number of one run, by step, steps ascending."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    again: int = 0  # steps that were written several times, as after a restart; the last one counts

    @classmethod
    def of(cls, pairs: Mapping[int, float] | Iterable[tuple[int, float]]) -> Series:
        """Make one of ``(step, value)`` in any order."""
        listed = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
        held = dict(listed)
        steps = np.array(sorted(held), np.int64)
        return cls(steps, np.array([held[int(step)] for step in steps], np.float64), len(listed) - len(held))

    def at(self, steps: NDArray[np.int64]) -> Series:
        """Return the numbers at other steps, in their order, as many as both have."""
        return Series(steps[: len(self.steps)], self.values[: len(steps)], self.again)


@dataclass(frozen=True)
class Run:
    """One training."""

    name: str
    series: Mapping[str, Series]
    notes: Sequence[str] = ()  # what could not be read
    seeds: Mapping[str, int] = field(default_factory=dict)  # as recorded
    counted: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of series without steps, whose lines are counted: epochs

    @cached_property
    def seed(self) -> int | None:
        """The seed: as recorded, else as the name of its file or folder says (``seed3``, ``run-s3.csv``); None if neither."""
        if len(set(self.seeds.values())) == 1:
            return next(iter(self.seeds.values()))
        found = [int(one or other) for one, other in SEED.findall(self.name)]
        return found[-1] if found else None


def plain(name: str) -> str:
    """Return a name in small letters with ``_`` for all else: ``Train/Loss`` is ``train_loss``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def chosen(run: Run, wanted: str | None) -> tuple[str, Series]:
    """Return the series that is meant: by name or glob, else the loss, else the only one. Raises TrueupError if none is, or several
    are."""
    if wanted is None:
        by_plain = {plain(name): name for name in reversed(list(run.series))}
        name = next((by_plain[known] for known in LOSSES if known in by_plain), None)
        losses = [name for name in run.series if "loss" in plain(name).split("_")]
        others = [name for name in run.series if plain(name) not in TIMES]
        name = name or (losses[0] if len(losses) == 1 else others[0] if len(others) == 1 else None)
        if name is not None:
            return name, run.series[name]
        raise _no_series(run, "a loss, by one of its usual names", "name the series: --series NAME")
    found = [name for name in run.series if name == wanted] or [name for name in run.series if plain(name) == plain(wanted)]
    found = found or [name for name in run.series if fnmatch.fnmatchcase(name, wanted)]
    if len(found) == 1:
        return found[0], run.series[found[0]]
    raise _no_series(run, f"one series {wanted}", "correct --series" if not found else "name one of them whole: --series NAME")


def _no_series(run: Run, expected: str, following: str) -> TrueupError:
    names = sorted(run.series)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    got = ", ".join(names[:NAMED]) + more or "none"
    return TrueupError(
        f"The curve is not in the run.\n  where:    {run.name}\n  expected: {expected}\n  got:      {got}\n  next:     {following}"
    )


def of_capture(capture: Capture) -> Run:
    """Return the losses of a capture by step, or the series of a monitor's first rank; raises TrueupError if it holds none."""
    if MONITOR in capture.root:
        return _monitored(capture)
    losses = losses_of(capture)
    if not losses:
        raise TrueupError(
            f"The capture has no curve.\n  where:    {capture.path}\n"
            "  expected: losses: what backward() was called on, with statistics\n"
            "  got:      none\n  next:     record several steps at detail stats: trueup capture --steps 0:100"
        )
    held = capture.root.get("seeds") or next((one.get("seeds") for one in capture.ranks.values()), None)
    told = held.items() if isinstance(held, Mapping) else ()
    seeds = {str(name): value for name, value in told if isinstance(value, int)}
    return Run(str(capture.path), {"loss": Series.of(losses)}, tuple(capture.problems), seeds)


def _monitored(capture: Capture) -> Run:
    reader = SeriesReader(capture)
    if not reader.ranks:
        raise TrueupError(
            f"The run has no series.\n  where:    {capture.path}\n  expected: steps that a monitor wrote\n  got:      none\n"
            "  next:     monitor a training that steps"
        )
    rank, names = reader.ranks[0], reader.names(reader.ranks[0])
    held = reader.columns(rank, [name for name in names if "/" not in name] + [name for name in names if "/" in name][:MOST_SERIES])
    taken = {name: ~np.isnan(values) for name, values in held.items()}
    steps = reader.steps(rank)
    series = {name: Series(steps[there], held[name][there]) for name, there in taken.items()}
    return Run(str(capture.path), series, tuple(reader.problems))
