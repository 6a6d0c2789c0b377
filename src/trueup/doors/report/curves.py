"""Curves with a verdict on a terminal, as ``curves.json`` and as a page.

EQUIVALENT  loss of steps 901 to 1,000: 0.08 % higher (90 % interval −0.11 % to +0.27 %), within 0.5 %
            5 runs against 5 runs, paired; each run is one sample: its mean over these steps

    steps  baseline  candidate  diff. %   90 % interval  word
    1–200   3.41218    3.41502   +0.083  -0.1 to +0.27  equivalent
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from trueup.analysis.curves.judging import HEADS, TINY, Verdict
from trueup.analysis.curves.statistics import Tested
from trueup.doors.report import charts
from trueup.doors.report.document import fields, headed, json_plain
from trueup.doors.report.html import drawn, embedded, ours, page
from trueup.doors.report.saving import save_json, write_text
from trueup.doors.report.terminal import COLOURS, labelled, listing, print_lines, print_next, print_written
from trueup.foundation.words.wording import clean, counted, number, percent

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.exchange.curves.metrics import Metrics

COLUMNS = (">steps", ">baseline", ">candidate", ">diff. %", ">90 % interval", "word")
POINTS = 2000  # of a curve that a page draws; of more each is the mean of its neighbours
STEPS_SHOWN = 6
NAMED = 12  # series that an export lists


def document(found: Verdict) -> dict[str, Any]:
    """Return it as JSON-ready data: everything but the curves."""
    return headed("trueup-curves", found, "word names margin runs pairing") | fields(found, "windows rules seen notes")


def save(found: Verdict, directory: Path) -> Path:
    """Write ``index.html`` and ``curves.json``; raises TrueupError if it cannot."""
    text = curves_page(found)
    write_text(text, directory / "index.html", "a directory that can be made and written, for index.html and curves.json")
    save_json(document(found), directory / "curves.json")
    return directory


def render(found: Verdict, console: Console) -> None:
    """Print it."""
    head = HEADS[found.word]
    print_lines(console, clean(found.sentence).splitlines(), len(head) + 2, COLOURS[found.verdict])
    listing(console, COLUMNS, window_rows(found), 20)
    told = shape_rows(found)
    if told:
        console.print()
        console.print(labelled((label, Text(clean(text), overflow="fold")) for label, text in told))
    for note in found.notes:
        console.print()
        console.print(labelled([("note", Text(clean(note), overflow="fold"))]))


def window_rows(found: Verdict) -> list[tuple[str, ...]]:
    """Write the windows, a row each."""
    rows: list[tuple[str, ...]] = []
    for one in found.windows:
        tested = one.tested
        interval = f"{_percents(tested.low)} to {_percents(tested.high)}" if math.isfinite(tested.low) else "unknown"
        rows.append((
            f"{one.first:,}–{one.last:,}", number(one.means[0], 6), number(one.means[1], 6), _percents(tested.difference), interval,
            tested.word + _power(tested),
        ))  # fmt: skip
    return rows


def shape_rows(found: Verdict) -> list[tuple[str, str]]:
    """Write spikes, change points, slopes and how the runs were paired."""
    count = len(found.runs[0])
    rows = [("runs", f"{count} and {len(found.runs[1])}, {found.pairing}, {counted(len(found.steps), 'step')}")]
    shape = found.seen
    for side, some in (("baseline", shape.spikes[:count]), ("candidate", shape.spikes[count:])):
        steps = sorted(step for run in some for step in run)
        if steps:
            rows.append(("spikes", f"{side}: {len(steps):,} in {counted(len(some), 'run')}, at step {_listed(steps)}"))
    if shape.changes:
        rows.append(("changes", f"the difference changes its level at step {_listed(shape.changes)}"))
    if all(map(math.isfinite, shape.slopes)):
        unit = "% per 1,000 steps" if found.logarithmic else "per 1,000 steps"
        times = 100 if found.logarithmic else 1
        told = " and ".join(f"{times * slope:+.3g}" for slope in shape.slopes)
        rows.append(("slopes", f"{told} {unit} over the last third, baseline and candidate"))
    return rows


def _power(tested: Tested) -> str:
    """Say of what could not be told how many repeats would tell."""
    if tested.word != "could not tell" or math.isnan(tested.spread):
        return ""
    return f": power {tested.power:.2f}, needs {'over 1,000' if tested.needed is None else tested.needed} a side"


def _percents(share: float) -> str:
    """Write a percentage without its sign of percent, for a column."""
    tiny = abs(share) < TINY
    return "0" if tiny else f"{100 * share:+.3g}" if abs(share) < 1 else f"{100 * share:+,.0f}"


def _listed(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - STEPS_SHOWN} more" if len(steps) > STEPS_SHOWN else ""
    return ", ".join(f"{step:,}" for step in steps[:STEPS_SHOWN]) + more


def curves_page(found: Verdict) -> str:
    """Return the text of a page: the verdict, both curves with the noise band and marks, their difference, the tables."""
    interactive = charts.available()
    blocks = drawing(found) if interactive else {}
    scripts = [ours("page.js"), ours("charts.js")] if interactive else [ours("page.js")]
    lines = clean(found.sentence).splitlines()
    head = HEADS[found.word]
    return page(
        "curves.html.j2", scripts, charts.library() if interactive else (), found=found, tone=found.verdict, head=head,
        first_line=lines[0].removeprefix(head).strip(),
        other_lines=lines[1:], columns=[name.lstrip(">") for name in COLUMNS], windows=window_rows(found), shapes=shape_rows(found),
        percent=percent, blocks={name: embedded(drawn(data)) for name, data in blocks.items()},
    )  # fmt: skip


def drawing(found: Verdict) -> dict[str, Any]:
    """Return what the page's scripts draw: the mean curves with the band, and their difference with its margin."""
    edges = np.linspace(0, len(found.steps), min(POINTS, len(found.steps)) + 1).astype(np.int64)[:-1]

    def thin(values: Any) -> list[float]:
        counts = np.diff([*edges, len(found.steps)])
        return [float(one) for one in np.add.reduceat(np.asarray(values, np.float64), edges) / counts]

    means = [side.mean(axis=0) for side in found.curves]
    low, high = found.band.center - found.band.half, found.band.center + found.band.half
    if found.logarithmic:
        low, high = np.exp(np.minimum(low, 700)), np.exp(np.minimum(high, 700))
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = 100 * (means[1] - means[0]) / np.abs(means[0])
    steps = [int(found.steps[edge]) for edge in edges]
    marks = {
        "left the band": sorted(one.beyond for one in found.seen.partings if one.beyond is not None)[:1],
        "level changes": list(found.seen.changes),
        "spike": sorted({step for run in found.seen.spikes[len(found.runs[0]) :] for step in run}),
    }
    curves = charts.banded(
        found.names[0], steps, {"baseline": thin(means[0]), "candidate": thin(means[1])}, (thin(low), thin(high)), marks,
        logarithmic=found.logarithmic,
    )  # fmt: skip
    margin = [100 * found.margin] * len(steps)
    difference = charts.banded("difference in %", steps, {"candidate": thin(apart)}, ([-one for one in margin], margin), marks)
    return {"curve-model": json_plain(curves), "difference-model": json_plain(difference)}


def metrics_document(found: Metrics, tracker: str, written: Path) -> dict[str, Any]:
    """Return what was written for a tracker: names and sizes of the curves, findings, notes."""
    runs = [
        fields(one, "name verdict sentence facts counts findings")
        | {"curves": [{"name": name, "points": len(series.steps)} for name, series in one.series.items()]}
        for one in found.runs
    ]
    head = {"schema": "trueup-metrics", "schema_version": 1, "exit_code": 0, "tracker": tracker, "path": str(written)}
    return head | {"runs": runs, "notes": list(found.notes)}


def render_metrics(found: Metrics, written: Path, following: str, console: Console) -> None:
    """Say what was written, where, what could not be told, and how to look at it."""
    for one in found.runs:
        points = max((len(series.steps) for series in one.series.values()), default=0)
        names = [*one.series][:NAMED]
        names += [f"{len(one.series) - NAMED:,} more"] if len(one.series) > NAMED else []
        what = [", ".join(names) or "no curve", counted(points, "step"), counted(len(one.findings), "finding")]
        console.print(f"{clean(one.name)}: {'; '.join(what)}", markup=False, soft_wrap=True)
    for note in found.notes:
        print_lines(console, [f"note  {clean(note)}"], 6)
    print_written(written, console, "written")
    print_next(console, "look at it", [following])
