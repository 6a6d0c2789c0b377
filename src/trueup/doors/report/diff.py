"""Two tensors compared: the sentence, the measures, the worst elements, units in the last place, both histograms. On a terminal;
as strict JSON, where numbers that it cannot hold are the strings ``NaN``, ``Infinity``, ``-Infinity``; or as a page, which has a
picture of where they are apart, too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.text import Text

from trueup.doors.report.capture_view import Operand, histograms, print_bars, spans
from trueup.doors.report.document import fields, json_plain
from trueup.doors.report.terminal import labelled, plain_table
from trueup.foundation.kernels.metrics import (
    Closeness,
    Element,
    Estimate,
    Metrics,
    Tolerance,
    closeness,
    differences,
    estimate,
    from_sketch,
)
from trueup.foundation.words.wording import counted, number, one_line, sci, times

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

Answer = Literal["close", "apart", "unknown"]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """What is known of two tensors."""

    baseline: Operand
    candidate: Operand
    tolerance: Tolerance
    answer: Answer
    sentence: str
    metrics: Metrics | None = None
    closeness: Closeness | None = None
    estimate: Estimate | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 within tolerance, 1 not, 2 could not tell."""
        return {"close": 0, "apart": 1, "unknown": 2}[self.answer]


def compare_tensors(baseline: Operand, candidate: Operand, tolerance: Tolerance, top: int = 10, threads: int = 1) -> TensorDiff:
    """Compare two tensors by their elements, else by what was kept of them."""
    start = TensorDiff(baseline, candidate, tolerance, "unknown", "")
    if any(side.missing == "is no tensor" for side in (baseline, candidate)):
        which = "neither side is" if baseline.missing == candidate.missing else "one side is not"
        return replace(start, sentence=f"Could not tell: {which} a tensor, so there are no elements to compare.")
    if _sizes(baseline.shape) != _sizes(candidate.shape):
        shapes = f"{list(baseline.shape or ())} and {list(candidate.shape or ())}"
        return replace(start, sentence=f"Could not tell: the shapes differ, {shapes}.")
    held = [_elements(side) for side in (baseline, candidate)]
    notes = tuple(note for _, note in held if note)
    if baseline.shape != candidate.shape:
        notes += (f"the shapes {list(baseline.shape or ())} and {list(candidate.shape or ())} differ by sizes of one only",)
    first, second = held[0][0], held[1][0]
    if first is None or second is None:
        return _from_what_was_kept(replace(start, notes=notes))
    return _from_elements(replace(start, notes=notes), first, second.reshape(first.shape), top, threads)


def _sizes(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(size for size in shape or () if size != 1)


def _elements(side: Operand) -> tuple[NDArray[Any] | None, str]:
    """Return the elements of a side, those that its sketch holds included, and what is to be said about them."""
    if side.values is not None:
        return side.values, ""
    if side.stats is None or side.sketch is None or side.shape is None:
        return None, ""
    values = from_sketch(side.stats, side.sketch, side.shape, (side.dtype or "").startswith("complex"))
    return values, "" if values is None else f"{side.name}: its {counted(values.size, 'element')} were read from its sketch"


def _from_elements(start: TensorDiff, a: NDArray[Any], b: NDArray[Any], top: int, threads: int) -> TensorDiff:
    metrics = Metrics.of(a, b, threads)
    found = closeness(a, b, start.tolerance, top)
    sentence = _sentence(metrics, found, start.tolerance)
    return replace(start, answer="close" if found.close else "apart", sentence=sentence, metrics=metrics, closeness=found)


def _sentence(metrics: Metrics, found: Closeness, tolerance: Tolerance) -> str:
    if metrics.same:
        return f"Equal: {_all(found.elements)} the same on both sides." if found.elements else "Equal: there are no elements."
    worst = found.worst[0]
    seen = f"{place(worst)} it is {value(worst.baseline)} and {value(worst.candidate)}"
    if found.close:
        return f"Close: {_all(found.elements)} within {tolerance}; farthest {seen}{_far(worst)}."
    share = f"{found.outside:,} of {counted(found.elements, 'element')} ({percent(found.outside / found.elements)})"
    return f"Not close: {share} {'is' if found.outside == 1 else 'are'} outside {tolerance}; worst {seen}{_far(worst)}."


def _all(count: int) -> str:
    return "the one element is" if count == 1 else f"all {counted(count, 'element')} are"


def _far(element: Element) -> str:
    far = f", {sci(element.absolute)} apart" if math.isfinite(element.absolute) else ""
    return far + (f", {times(element.times)} what is allowed" if math.isfinite(element.times) else "")


def place(element: Element) -> str:
    """Write where an element is."""
    return f"at {list(element.index)}" if element.index else "alone"


def percent(share: float) -> str:
    """Write a share; only all is written as 100 %, and only none as 0 %."""
    if 0 < share < 1e-4:
        return "less than 0.01 %"
    if 0.9999 < share < 1:
        return "more than 99.99 %"
    return f"{100 * share:.2f} %" if 0 < share < 1 else f"{100 * share:.0f} %"


def value(element: Any) -> str:
    """Write an element with enough digits to distinguish it from every other of its dtype."""
    if isinstance(element, (np.floating, np.complexfloating)) or element.dtype.kind == "V":
        return str(element).replace("nan", "NaN")
    return str(element.item())


def _from_what_was_kept(start: TensorDiff) -> TensorDiff:
    sides = (start.baseline, start.candidate)
    kinds = [side.missing or "its elements were kept" for side in sides]
    why = kinds[0] if kinds[0] == kinds[1] else f"baseline: {kinds[0]}; candidate: {kinds[1]}"
    if sides[0].dtype == sides[1].dtype and sides[0].digest is not None and sides[0].digest == sides[1].digest:
        return replace(start, answer="close", sentence=f"Equal: the digests are the same ({why}).")
    first, second = map(_measured, sides)
    if first.stats is None or second.stats is None:
        return replace(start, sentence=f"Could not tell: the tensors cannot be compared by what was kept ({why}).")
    pair = (first.sketch, second.sketch) if first.sketch is not None and second.sketch is not None else None
    found = estimate(first.stats, second.stats, pair, start.tolerance)
    about = "" if math.isnan(found.relative_l2) else f" Estimated relative L2 {sci(found.relative_l2)}, about ±18 %."
    kept = replace(start, baseline=first, candidate=second, estimate=found)
    if found.apart:
        said = f"Not close: {found.apart}, which {start.tolerance} does not allow ({why}).{about}"
        return replace(kept, answer="apart", sentence=said)
    return replace(kept, sentence=f"Could not tell element by element ({why}).{about}")


def _measured(side: Operand) -> Operand:
    """Return a side with the statistics and the sketch of its elements, where it has none of its own."""
    from trueup.foundation.kernels import summarize
    from trueup.foundation.model import NUMBERS, PACKED, TensorStats

    if side.values is None:
        return side
    out = np.empty(PACKED)
    summarize(side.values, out)
    numbers: dict[str, Any] = {k: int(x) if k.startswith("n_") else x for k, x in zip(NUMBERS, out.tolist(), strict=False)}
    stats = side.stats or TensorStats(numel=side.values.size, **numbers)
    return replace(side, stats=stats, sketch=out[len(NUMBERS) :] if side.sketch is None else side.sketch)


COLOURS = {"close": "bold green", "apart": "bold red", "unknown": "bold yellow"}


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
        console.print()
        console.print(labelled(measure_rows(diff.metrics)))
        _worst(diff, console)
        if not diff.metrics.same:
            _units(diff.metrics, console)
        _values(diff, console)
    elif diff.estimate is not None:
        _statistics(diff, console)


def render_summary(diff: TensorDiff, console: Console) -> None:
    """Print the line that precision_tool's ``cp`` ends with; what is not known is a question mark."""
    metrics, close = diff.metrics, diff.closeness
    table = plain_table(">NumCnt", ">AllClose", ">CosSim", ">ErrorPer")
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


def measure_rows(m: Metrics) -> list[tuple[str, str]]:
    """Write each measure as ``(label, text)``."""
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
    return [(label, one_line(text)) for label, text in rows]


def _worst(diff: TensorDiff, console: Console) -> None:
    assert diff.closeness is not None
    if not diff.closeness.worst:
        return
    table = plain_table("worst elements", ">baseline", ">candidate", ">|d|", ">of allowed")
    for cells in worst_rows(diff.closeness):
        table.add_row(*map(Text, cells))
    console.print()
    console.print(table)


def worst_rows(found: Closeness) -> list[tuple[str, str, str, str, str]]:
    """Write the worst elements as ``(index, baseline, candidate, |d|, how many times what is allowed)``."""
    return [
        (str(list(each.index)), value(each.baseline), value(each.candidate), sci(each.absolute), times(each.times))
        for each in found.worst
    ]


def bucket_name(k: int) -> str:
    """Write what the ``k``-th bucket of a histogram of units holds: ``0``, ``1``, ``2 to 3``, ``2^20 to 2^21 - 1``."""
    if k < 2:
        return str(k)
    return f"{2 ** (k - 1):,} to {2**k - 1:,}" if k <= 20 else f"2^{k - 1} to 2^{k} - 1"


def unit_rows(m: Metrics) -> list[tuple[str, list[int]]]:
    """Count elements by how many units in the last place they are apart."""
    return [(bucket_name(k), [count]) for k, count in enumerate(m.ulp) if count]


def _units(m: Metrics, console: Console) -> None:
    filled = unit_rows(m)
    if filled:
        console.print()
        console.print(Text(f"units in the last place of {m.unit}", "dim"))
        print_bars(filled, console)


def _values(diff: TensorDiff, console: Console) -> None:
    sides = [side.values for side in (diff.baseline, diff.candidate)]
    if any(side is None or not side.size for side in sides):
        return
    rows = spans(histograms([side for side in sides if side is not None]))
    if rows:
        console.print()
        print_bars(rows, console, "values", "baseline", "candidate")


def _statistics(diff: TensorDiff, console: Console) -> None:
    table = plain_table("statistics", ">baseline", ">candidate", ">difference", ">relative")
    for cells in statistic_rows(diff):
        table.add_row(*map(Text, cells))
    console.print()
    console.print(table)


def statistic_rows(diff: TensorDiff) -> list[tuple[str, str, str, str, str]]:
    """Write what was kept of both sides as ``(name, baseline, candidate, difference, relative)``."""
    assert diff.baseline.stats is not None
    assert diff.candidate.stats is not None
    rows = [
        (row.name, number(row.baseline, 7), number(row.candidate, 7), sci(row.absolute), sci(row.relative))
        for row in differences(diff.baseline.stats, diff.candidate.stats)
    ]
    for name, label in (("n_nan", "NaN"), ("n_posinf", "+inf"), ("n_neginf", "-inf"), ("n_saturated", "at the maximum")):
        counts = [getattr(side.stats, name) for side in (diff.baseline, diff.candidate)]
        if any(counts):
            rows.append((label, f"{counts[0]:,}", f"{counts[1]:,}", "" if counts[0] == counts[1] else "differs", ""))
    return rows


FORMAT_VERSION = 1


def document(diff: TensorDiff) -> dict[str, Any]:
    """Return all that is known of two tensors; docs/looking-around.md has the keys."""
    sides = [side.values for side in (diff.baseline, diff.candidate)]
    there = [side for side in sides if side is not None]
    return {
        "schema": "trueup-diff",
        "format_version": FORMAT_VERSION,
        "answer": diff.answer,
        "sentence": diff.sentence,
        "rtol": diff.tolerance.rtol,
        "atol": diff.tolerance.atol,
        "baseline": _side(diff.baseline),
        "candidate": _side(diff.candidate),
        "notes": list(diff.notes),
        "metrics": _metrics(diff.metrics) if diff.metrics is not None else None,
        "closeness": _closeness(diff),
        "estimate": diff.estimate,
        "values": [
            {"from": low, "to": high, "baseline": counts[0], "candidate": counts[1]}
            for low, high, counts in (histograms(there) if diff.metrics is not None and len(there) == 2 else [])
        ],
    }


def _side(side: Operand) -> dict[str, Any]:
    return fields(side, "name where dtype shape digest missing") | {"statistics": json_plain(side.stats)}


def _metrics(metrics: Metrics) -> dict[str, Any]:
    found = fields(metrics, " ".join(field.name for field in dataclasses.fields(metrics) if field.name != "pair"))
    positions = {name: getattr(metrics.pair, name)._asdict() for name in ("nan", "posinf", "neginf", "mask")}
    return found | {"same": metrics.same, "positions": positions}


def _closeness(diff: TensorDiff) -> dict[str, Any] | None:
    if diff.closeness is None:
        return None
    worst = [
        fields(each, "index absolute times") | {"baseline": value(each.baseline), "candidate": value(each.candidate)}
        for each in diff.closeness.worst
    ]
    return {"elements": diff.closeness.elements, "outside": diff.closeness.outside, "worst": worst}


CELLS = 32
"""Rows and columns of the picture of where two tensors are apart, at most."""

CHUNK = 1 << 20
"""Elements that are looked at together."""

TONES = (1e-2, 0.3)
"""Shares of the largest distance from which a cell is darker."""


def grid(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return the largest |b - a| of each of up to 32 by 32 blocks; rows are all dimensions but the last, columns the last. What is
    the same on both sides counts 0, what is finite on one side only as infinitely far."""
    rows, columns = math.prod(a.shape[:-1]), a.shape[-1]
    first, second = (side.reshape(rows, columns) for side in (a, b))
    across = np.linspace(0, columns, min(columns, CELLS) + 1).astype(np.int64)[:-1]
    down = np.linspace(0, rows, min(rows, CELLS) + 1).astype(np.int64)
    found = np.zeros((len(down) - 1, len(across)))
    step = max(1, CHUNK // columns)
    for n, (start, end) in enumerate(itertools.pairwise(down.tolist())):
        for at in range(start, end, step):
            part = slice(at, min(at + step, end))
            found[n] = np.maximum(found[n], np.maximum.reduceat(_apart(first[part], second[part]).max(axis=0), across))
    return found


def _apart(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    wide = np.complex128 if a.dtype.kind == "c" or b.dtype.kind == "c" else np.float64
    first, second = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(second - first)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def picture(diff: TensorDiff) -> dict[str, Any] | None:
    """Lay out where two tensors are apart; None where nothing is, or where there is no matrix to show."""
    a, b = diff.baseline.values, diff.candidate.values
    if a is None or b is None or a.ndim < 2 or a.size < 4 or diff.metrics is None or diff.metrics.same:
        return None
    cells = grid(a, b.reshape(a.shape))
    finite = cells[np.isfinite(cells)]
    top = float(finite.max()) if finite.size and finite.max() > 0 else math.inf
    paths: dict[str, list[str]] = {}
    for y, x in np.argwhere(cells > 0).tolist():
        tone = 3 if math.isinf(cells[y, x]) else 1 + sum(cells[y, x] >= share * top for share in TONES)
        paths.setdefault(f"bad-{tone}", []).append(f"M{x} {y}h1v1h-1z")
    several = " x ".join(f"{size:,}" for size in a.shape[:-1])
    several += f" = {math.prod(a.shape[:-1]):,}" if a.ndim > 2 else ""
    return {
        "rows": cells.shape[0], "columns": cells.shape[1], "paths": {tone: "".join(parts) for tone, parts in sorted(paths.items())},
        "said": f"rows: {several}; columns: {a.shape[-1]:,}", "top": sci(top),
    }  # fmt: skip


PAGE_TONES = {"close": "aligned", "apart": "deviates", "unknown": "inconclusive"}
VERDICTS = ("Not close", "Could not tell", "Close", "Equal")


def diff_page(diff: TensorDiff) -> str:
    """Return the text of a page of two tensors."""
    from trueup.doors.report import charts
    from trueup.doors.report.html import drawn, embedded, ours, page
    from trueup.foundation.model import Histogram
    from trueup.foundation.words.answers import Answers

    word = next((word for word in VERDICTS if diff.sentence.startswith(word)), "")
    named = zip(("baseline", "candidate"), (diff.baseline, diff.candidate), strict=True)
    sides = tuple(f"{side}: {one_line(held.name)}, {_what(held)}" for side, held in named)
    rows = [("place", sides), ("allowed", (str(diff.tolerance),)), ("note", tuple(map(one_line, diff.notes)))]
    said = Answers(word.upper(), one_line(diff.sentence[len(word) :].lstrip(": ")), tuple(row for row in rows if row[1]))
    there = [side.values for side in (diff.baseline, diff.candidate) if side.values is not None and side.values.size]
    counted_in = histograms(there) if diff.metrics is not None and len(there) == 2 else []
    model = None
    if counted_in and charts.available():
        edges = (*(low for low, *_ in counted_in), counted_in[-1][1])
        counts = (tuple(row[2][side] for row in counted_in) for side in (0, 1))
        model = charts.histogram(Histogram("", edges, *counts)) if edges[0] < edges[-1] else None
    return page(
        "diff.html.j2", [ours("page.js"), ours("charts.js")], charts.library() if model else (), said=said,
        tone=PAGE_TONES[diff.answer], baseline=diff.baseline, candidate=diff.candidate, picture=picture(diff),
        measures=measure_rows(diff.metrics) if diff.metrics is not None else [], unit=diff.metrics and diff.metrics.unit,
        units=unit_rows(diff.metrics) if diff.metrics is not None and not diff.metrics.same else [],
        worst=worst_rows(diff.closeness) if diff.closeness is not None else [], values=spans(counted_in),
        statistics=statistic_rows(diff) if diff.estimate is not None else [], model=embedded(drawn(model)) if model else None,
    )  # fmt: skip
