"""A monitored run as a heat map: step x rank x module, a map a kind of series, each cell the extremes of its steps.

Cells are shared out so that a page stays below `CELLS`, whatever the run's length: a cell then stands for several steps and holds
the smallest and the largest number of them, so that no spike is averaged away.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.monitor.kinds import kind_of, kinds
from trueup.analysis.monitor.session import ALERTS
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import layout
from trueup.foundation.store.series import AT_A_TIME, SeriesReader
from trueup.foundation.words.wording import counted

CELLS = 1_000_000  # of a page
MOST_ALERTS = 1000  # that are read of a rank
LONGEST = 1 << 16  # bytes of an alert's line


@dataclass(frozen=True)
class Map:
    """The cells of one kind of series."""

    kind: str
    meaning: str
    logarithmic: bool
    rows: tuple[tuple[str, int], ...]  # module and rank, in forward order, ranks of a module beside each other
    steps: NDArray[np.int64] = field(repr=False)  # first step of each column
    low: NDArray[np.float32] = field(repr=False)  # (rows, columns); NaN: nothing was taken
    high: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True)
class Trend:
    """What `trend` returns."""

    path: str
    sentence: str
    verdict: VerdictWord
    maps: tuple[Map, ...]
    alerts: tuple[dict[str, Any], ...]  # by step
    ranks: tuple[int, ...]
    steps: tuple[int, int, int]  # first and last, and how many
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 no alert, 1 alerts, 2 could not tell."""
        return {"aligned": 0, "deviates": 1, "inconclusive": 2}[self.verdict]


def trend(path: str | Path, wanted: Sequence[str] = (), cells: int = CELLS) -> Trend:
    """Return the heat maps of a monitored run; ``wanted`` are globs on series (``gradient_norm/*``). Raises TrueupError if it is
    none, or no series is wanted."""
    reader = SeriesReader(path)
    if not reader.ranks:
        why = (reader.problems or ["no step was taken"])[0]
        raise TrueupError(
            f"The run has no series.\n  where:    {reader.capture.path}\n  expected: steps that a monitor wrote\n"
            f"  got:      {why}\n  next:     monitor a training that steps"
        )
    grouped: dict[str, dict[tuple[str, int], str]] = {}
    for rank in reader.ranks:
        for name in reader.names(rank):
            kind, _, scope = name.partition("/")
            if kind != "digest" and (not wanted or any(fnmatch.fnmatchcase(name, one) for one in wanted)):
                grouped.setdefault(kind, {})[scope, rank] = name
    if not grouped:
        raise TrueupError(
            f"No series is wanted.\n  where:    {reader.capture.path}\n  expected: series that --series matches\n"
            f"  got:      {', '.join(wanted)}\n  next:     one of {', '.join(reader.names(reader.ranks[0])[:5])} ..."
        )
    known = [kind for kind in kinds() if kind in grouped] + [kind for kind in grouped if kind not in kinds()]
    total = sum(len(rows) for rows in grouped.values())
    maps = tuple(_map(reader, kind, grouped[kind], max(16, cells // total)) for kind in known)
    alerts, unread = _alerts(reader)
    steps = np.unique(np.concatenate([reader.steps(rank) for rank in reader.ranks]))
    span = int(steps[0]), int(steps[-1]), len(steps)
    options = reader.capture.root.get(layout.MONITOR)
    judged = isinstance(options, dict) and bool(options.get("alerts", True))
    unsure = reader.problems or unread or not judged
    verdict: VerdictWord = "deviates" if alerts else "inconclusive" if unsure else "aligned"
    said = _sentence(verdict, alerts, total, span, judged)
    return Trend(
        str(reader.capture.path), said, verdict, maps, tuple(alerts), tuple(reader.ranks), span, (*reader.problems, *unread)
    )  # fmt: skip


def _sentence(verdict: VerdictWord, alerts: Sequence[dict[str, Any]], count: int, span: tuple[int, int, int], judged: bool) -> str:
    where = f"{counted(count, 'series', 'series')} over {counted(span[2], 'step')} ({span[0]:,} to {span[1]:,})"
    if alerts:
        return f"{counted(len(alerts), 'alert').upper()}  {alerts[0]['said']}"
    if verdict == "aligned":
        return f"NO ALERT  {where}"
    return f"COULD NOT TELL  {where}: " + ("a part of the run cannot be read" if judged else "alerts were off")


def _map(reader: SeriesReader, kind: str, rows: dict[tuple[str, int], str], columns: int) -> Map:
    order = {scope: place for place, scope in enumerate(dict.fromkeys(scope for scope, _ in rows))}
    keys = sorted(rows, key=lambda key: (order[key[0]], key[1]))
    every = np.unique(np.concatenate([reader.steps(rank) for rank in reader.ranks]))
    held = np.full((len(keys), 0), np.nan)
    values: dict[tuple[str, int], NDArray[np.float64]] = {}
    for rank in reader.ranks:
        mine = [key for key in keys if key[1] == rank]
        places = np.searchsorted(every, reader.steps(rank))
        for at in range(0, len(mine), AT_A_TIME):
            some = mine[at : at + AT_A_TIME]
            read = reader.columns(rank, [rows[key] for key in some])
            for key in some:
                line = np.full(len(every), np.nan)
                line[places] = read[rows[key]]
                values[key] = line
    taken = np.zeros(len(every), bool)
    for line in values.values():
        taken |= ~np.isnan(line)
    steps = every[taken]
    edges = np.unique(np.linspace(0, len(steps), min(columns, len(steps)) + 1).astype(np.int64)[:-1])
    low, high = (np.full((len(keys), len(edges)), np.nan, np.float32) for _ in range(2))
    with np.errstate(over="ignore"):
        for place, key in enumerate(keys):
            line = values[key][taken]
            low[place] = np.fmin.reduceat(line, edges) if len(edges) else held[place]
            high[place] = np.fmax.reduceat(line, edges) if len(edges) else held[place]
    finite = low[np.isfinite(low)]
    row = kind_of(kind)
    return Map(kind, row.meaning, row.scale == "log" and bool((finite > 0).any()), tuple(keys), steps[edges], low, high)


def _alerts(reader: SeriesReader) -> tuple[list[dict[str, Any]], list[str]]:
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for rank in reader.ranks:
        file = reader.capture.path / layout.rank_name(rank) / ALERTS
        try:
            layout.real_file(reader.capture.path, file)
            with file.open(encoding="utf-8", errors="replace") as opened:
                for _ in range(MOST_ALERTS):
                    line = opened.readline(LONGEST)
                    if not line:
                        break
                    held = json.loads(line)
                    found.append({
                        "step": int(held["step"]), "rank": rank, "rule": str(held["rule"]), "series": str(held["series"]),
                        "said": str(held["said"]),
                    })  # fmt: skip
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, RecursionError, TrueupError) as error:
            notes.append(f"rank {rank}: {ALERTS} cannot be read to its end: {str(error)[:200]}")
    return sorted(found, key=lambda one: (one["step"], one["rank"])), notes
