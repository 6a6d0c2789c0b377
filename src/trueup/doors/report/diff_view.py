"""Two tensors on a terminal: the sentence, the measures, the worst elements, units in the last place, both histograms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from trueup.doors.report.histograms import bar, histograms
from trueup.doors.report.operands import Operand
from trueup.doors.report.tensor_diff import TensorDiff, percent, value
from trueup.foundation.kernels.metrics import Metrics, differences
from trueup.foundation.words.wording import number, one_line, sci, times

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {"close": "bold green", "apart": "bold red", "unknown": "bold yellow"}
MOST_BAR = 40


def render_diff(diff: TensorDiff, console: Console) -> None:
    """Print all that is known of two tensors."""
    for word, side in (("baseline ", diff.baseline), ("candidate", diff.candidate)):
        console.print(Text.assemble((f"{word}  ", "dim"), (side.name, "bold")), soft_wrap=True)
        console.print(Text(f"{'':<11}{_what(side)}", "dim"), soft_wrap=True)
    console.print()
    console.print(Text(one_line(diff.sentence), COLOURS[diff.answer]))
    for note in diff.notes:
        console.print(Text(f"note  {one_line(note)}", "dim"))
    if diff.metrics is not None:
        _measures(diff.metrics, console)
        _worst(diff, console)
        if not diff.metrics.same:
            _units(diff.metrics, console)
        _values(diff, console)
    elif diff.estimate is not None:
        _statistics(diff, console)


def render_summary(diff: TensorDiff, console: Console) -> None:
    """Print the line that precision_tool's ``cp`` ends with; what is not known is a question mark."""
    metrics, close = diff.metrics, diff.closeness
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("NumCnt", "AllClose", "CosSim", "ErrorPer"):
        table.add_column(title, justify="right", no_wrap=True)
    counted = "?" if close is None else f"{close.elements:,}"
    cosine = "?" if metrics is None else f"{metrics.cosine:.6f}"
    share = "?" if close is None else percent(close.outside / close.elements if close.elements else 0.0)
    all_close = {"close": "True", "apart": "False", "unknown": "?"}[diff.answer]
    table.add_row(counted, all_close, cosine, share)
    console.print(table)
    console.print()


def _what(side: Operand) -> str:
    tensor = f"{side.dtype or 'no tensor'} {list(side.shape) if side.shape is not None else ''}".strip()
    return one_line(f"{tensor}, {side.where}" if side.where else tensor)


def _grid(rows: list[tuple[str, str]], console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    for label, text in rows:
        grid.add_row(Text(label, "dim"), Text(one_line(text)))
    console.print()
    console.print(grid)


def _measures(m: Metrics, console: Console) -> None:
    at = "" if m.max_index is None else f" at {list(m.max_index)}"
    rows = [
        ("relative L2", sci(m.relative_l2)),
        ("cosine", f"{m.cosine:.12g}" if math.isfinite(m.cosine) else "none: one side is zero"),
        ("max |d|", f"{sci(m.max_absolute)}{at}"),
        ("mean |d|", sci(m.mean_absolute)),
        ("RMSE", sci(m.rmse)),
        ("relative error", f"max {sci(m.max_relative)}, mean {sci(m.mean_relative)}"),
        ("within", f"{percent(m.thousandth)} below 1/1000, {percent(m.five_thousandths)} below 5/1000"),
        ("equal", f"{m.equal:,} of {m.counted:,}"),
    ]
    if m.sign_flips:
        rows.append(("sign flips", f"{m.sign_flips:,}"))
    for label, sides in (("NaN", m.pair.nan), ("+inf", m.pair.posinf), ("-inf", m.pair.neginf), ("at the maximum", m.pair.mask)):
        if any(sides):
            rows.append((label, f"{sides.both:,} on both sides, {sides.baseline:,} and {sides.candidate:,} on one side only"))
    if m.first_disagreement is not None:
        rows.append(("first there", f"{list(m.first_disagreement)} of {m.disagreeing:,}"))
    _grid(rows, console)


def _worst(diff: TensorDiff, console: Console) -> None:
    assert diff.closeness is not None
    if not diff.closeness.worst:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("worst elements", "baseline", "candidate", "|d|", "of allowed"):
        table.add_column(title, justify="left" if title == "worst elements" else "right", no_wrap=True)
    for each in diff.closeness.worst:
        cells = (str(list(each.index)), value(each.baseline), value(each.candidate), sci(each.absolute), times(each.times))
        table.add_row(*(Text(cell) for cell in cells))
    console.print()
    console.print(table)


def bucket_name(k: int) -> str:
    """Write what the ``k``-th bucket of a histogram of units holds: ``0``, ``1``, ``2 to 3``, ``2^20 to 2^21 - 1``."""
    if k < 2:
        return str(k)
    return f"{2 ** (k - 1):,} to {2**k - 1:,}" if k <= 20 else f"2^{k - 1} to 2^{k} - 1"


def _units(m: Metrics, console: Console) -> None:
    last = max((k for k, count in enumerate(m.ulp) if count), default=-1)
    filled = [(bucket_name(k), count) for k, count in enumerate(m.ulp[: last + 1]) if count]
    if not filled:
        return
    most = max(count for _, count in filled)
    left, right = max(len(name) for name, _ in filled), max(len(f"{count:,}") for _, count in filled)
    width = max(8, min(MOST_BAR, console.width - left - right - 4))
    console.print()
    console.print(Text(f"units in the last place of {m.unit}", "dim"))
    for name, count in filled:
        console.print(Text(f"{name:>{left}}  {bar(count / most, width):<{width}}  {count:>{right},}"), soft_wrap=True)


def _values(diff: TensorDiff, console: Console) -> None:
    sides = [side.values for side in (diff.baseline, diff.candidate)]
    if any(side is None or not side.size for side in sides):
        return
    rows = histograms([side for side in sides if side is not None])
    if not rows:
        return
    most = max(max(counts) for *_, counts in rows)
    edges = [(number(low), number(high), counts) for low, high, counts in rows]
    left, right = (max(len(edge[k]) for edge in edges) for k in (0, 1))
    digits = max(len(f"{most:,}"), 5)
    width = max(5, min(MOST_BAR, (console.width - left - right - 4 - 2 * digits - 8) // 2))
    head = f"{'values':<{left + right + 4}}  {'baseline':<{width + digits + 1}}   candidate"
    console.print()
    console.print(Text(head, "dim"), soft_wrap=True)
    for low, high, counts in edges:
        bars = "   ".join(f"{bar(count / most, width):<{width}} {count:>{digits},}" for count in counts)
        console.print(Text(f"{low:>{left}} to {high:>{right}}  {bars}"), soft_wrap=True)


def _statistics(diff: TensorDiff, console: Console) -> None:
    assert diff.baseline.stats is not None
    assert diff.candidate.stats is not None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("statistics", "baseline", "candidate", "difference", "relative"):
        table.add_column(title, justify="left" if title == "statistics" else "right", no_wrap=True)
    for row in differences(diff.baseline.stats, diff.candidate.stats):
        cells: list[Any] = [row.name, number(row.baseline, 7), number(row.candidate, 7), sci(row.absolute), sci(row.relative)]
        table.add_row(*map(Text, cells))
    for name, label in (("n_nan", "NaN"), ("n_posinf", "+inf"), ("n_neginf", "-inf"), ("n_saturated", "at the maximum")):
        counts = [getattr(side.stats, name) for side in (diff.baseline, diff.candidate)]
        if any(counts):
            table.add_row(label, *(f"{count:,}" for count in counts), "" if counts[0] == counts[1] else "differs", "")
    console.print()
    console.print(table)
