"""The page's pictures: charts and the virtual table from Bokeh, which carries its own JavaScript, and the calls around a culprit.

Bokeh is imported when a page is made. Its models hold numbers and no captured text; table and overview get their rows from the
page's own data block. Of the calls around a culprit (producers left, consumers right, both runs in one picture) only places are
computed here; the template escapes their text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from trueup.doors.report.result_view import StepRow
from trueup.foundation.model import Edge, Evidence, Histogram, Neighbour
from trueup.foundation.words.wording import ELLIPSIS, one_line, sci, shorten

COMPONENTS = ("bokeh", "bokeh-widgets", "bokeh-tables")
TABLE_HEIGHT, ROW_HEIGHT, CHART_HEIGHT, HISTOGRAM_HEIGHT = 460, 30, 250, 190
SERIES = (
    ("agrees", "agree", "circle", 4), ("passes on", "passes on", "circle", 4), ("incomparable", "not comparable", "triangle", 6),
    ("deviates", "deviates", "circle", 4), ("culprit", "culprit", "diamond", 13),
)  # fmt: skip
"""What the overview draws, later ones over earlier ones; calls that are bitwise equal have no place on a logarithmic axis."""


def available() -> bool:
    """Say whether Bokeh can be imported; without it a page has plain tables only."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def library() -> tuple[str, ...]:
    """Return the library's scripts."""
    from bokeh.resources import Resources

    return tuple(Resources(mode="inline", components=list(COMPONENTS), log_level="error").js_raw)


def curves(name: str, rows: Sequence[StepRow]) -> dict[str, Any]:
    """Draw a number of both runs (``loss``, ``gradient norm``) over the steps; returns what ``embed_item`` takes."""
    from bokeh import models

    nan = float("nan")
    steps = [row.step for row in rows]
    held = models.ColumnDataSource(
        {
            "step": steps,
            "baseline": [nan if row.baseline is None else row.baseline for row in rows],
            "candidate": [nan if row.candidate is None else row.candidate for row in rows],
        }
    )
    margin = max(0.5, (steps[-1] - steps[0]) * 0.02)
    plot = _figure(
        name, CHART_HEIGHT, x_range=models.Range1d(steps[0] - margin, steps[-1] + margin), x_axis_label="step", y_axis_label=name,
    )  # fmt: skip
    marks = len(rows) <= 60
    points = []
    for side, dash, marker in (("baseline", "solid", "circle"), ("candidate", [6, 4], "square")):
        line = plot.line("step", side, source=held, line_width=2, line_dash=dash, legend_label=side, name=side)
        size = 8 if marks else 4
        points.append(plot.scatter("step", side, source=held, size=size, marker=marker, legend_label=side, name=side))
        if side == "baseline":
            told = [("step", "@step"), ("baseline", "@baseline{0.000000}"), ("candidate", "@candidate{0.000000}")]
            plot.add_tools(models.HoverTool(renderers=[line], tooltips=told, mode="vline"))
    for drawn in points:
        drawn.nonselection_glyph = drawn.selection_glyph = None
    plot.add_tools(models.TapTool(renderers=points))
    plot.xaxis.ticker.min_interval = 1
    return _item(plot)


def difference(name: str, rows: Sequence[StepRow]) -> dict[str, Any]:
    """Draw how far the candidate is from the baseline at each step that differs, relative to it, on a logarithmic axis: two curves
    that lie on each other look alike at 1e-2 and at 1e-8."""
    from bokeh import models

    apart = [(row.step, abs(row.difference), row.difference) for row in rows if row.difference and math.isfinite(row.difference)]
    steps = [row.step for row in rows]
    margin = max(0.5, (steps[-1] - steps[0]) * 0.02)
    sizes = [size for _, size, _ in apart]
    plot = _figure(
        f"{name} difference", CHART_HEIGHT, x_range=models.Range1d(steps[0] - margin, steps[-1] + margin), x_axis_label="step",
        y_axis_label="|difference| / |baseline|", y_axis_type="log", y_range=models.Range1d(min(sizes) / 3, max(sizes) * 3),
    )  # fmt: skip
    held = models.ColumnDataSource(
        {"step": [step for step, *_ in apart], "apart": sizes, "told": [sci(signed) for *_, signed in apart]}
    )
    named = {"source": held, "name": "candidate", "legend_label": "difference"}
    plot.line("step", "apart", line_width=2, line_dash=[6, 4], **named)
    drawn = plot.scatter("step", "apart", size=8 if len(rows) <= 60 else 4, marker="square", **named)
    drawn.nonselection_glyph = drawn.selection_glyph = None
    told = [("step", "@step"), ("difference", "@told")]
    plot.add_tools(models.HoverTool(renderers=[drawn], tooltips=told), models.TapTool(renderers=[drawn]))
    plot.xaxis.ticker.min_interval = 1
    return _item(plot)


MARKS = {"left the band": "dashed", "level changes": "dotted", "spike": "dotdash"}
MOST_MARKS = 40  # lines of a kind


def banded(
    name: str, steps: Sequence[int], lines: Mapping[str, Sequence[float]], band: tuple[Sequence[float], Sequence[float]],
    marks: Mapping[str, Sequence[int]], *, logarithmic: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Draw lines over the steps with a shaded band below them and upright marks at some steps; numbers that are not finite are
    gaps. Returns what ``embed_item`` takes."""
    from bokeh import models

    span = steps[-1] - steps[0] or 1
    axes: dict[str, Any] = {"x_axis_label": "step", "y_axis_label": name}
    axes["x_range"] = models.Range1d(steps[0] - span * 0.01, steps[-1] + span * 0.01)
    low = min((value for line in lines.values() for value in line if math.isfinite(value)), default=0.0)
    plot = _figure(name, CHART_HEIGHT, y_axis_type="log" if logarithmic and low > 0 else "linear", **axes)
    sides = [(step, down, up) for step, down, up in zip(steps, *band, strict=True) if math.isfinite(down) and math.isfinite(up)]
    if sides:
        around = [(step, up) for step, _, up in sides] + [(step, down) for step, down, _ in reversed(sides)]
        shaded = {"x": [step for step, _ in around], "y": [value for _, value in around]}
        plot.patch("x", "y", source=models.ColumnDataSource(shaded), name="band", fill_alpha=0.16, line_alpha=0)
    nan = float("nan")
    held = {side: [value if math.isfinite(value) else nan for value in line] for side, line in lines.items()}
    source = models.ColumnDataSource({"step": list(steps), **held})
    for side in lines:
        dash = "solid" if side == "baseline" or len(lines) == 1 else [6, 4]
        drawn = plot.line("step", side, source=source, line_width=2, line_dash=dash, legend_label=side, name=side)
    told = [("step", "@step"), *((side, f"@{side}{{0.00000}}") for side in lines)]
    plot.add_tools(models.HoverTool(renderers=[drawn], tooltips=told, mode="vline"))
    for kind, at in marks.items():
        if at:
            upright = models.ColumnDataSource({"x": list(at[:MOST_MARKS])})
            plot.vspan(x="x", source=upright, line_dash=MARKS[kind], line_width=1.5, name=kind, legend_label=kind)
    plot.xaxis.formatter.use_scientific = False
    return _item(plot)


def histogram(spread: Histogram) -> dict[str, Any]:
    """Draw how the elements of a slot are spread: the baseline filled, the candidate as an outline, counts logarithmic."""
    from bokeh import models

    edges, floor = list(spread.edges), 0.5
    held = models.ColumnDataSource(
        {
            "left": edges[:-1],
            "right": edges[1:],
            "baseline": [max(count, floor) for count in spread.baseline],
            "candidate": [max(count, floor) for count in spread.candidate],
            "before": list(spread.baseline),
            "after": list(spread.candidate),
        }
    )
    top = 2 * max(*spread.baseline, *spread.candidate, 1)
    plot = _figure(
        "histogram", HISTOGRAM_HEIGHT, y_axis_type="log", y_range=(floor, top), y_axis_label="elements",
    )  # fmt: skip
    plot.yaxis.formatter = models.PrintfTickFormatter(format="%.0f")
    plot.quad(
        left="left", right="right", bottom=floor, top="baseline", source=held, name="baseline", legend_label="baseline",
        fill_alpha=0.35, line_alpha=0,
    )  # fmt: skip
    outline = plot.quad(
        left="left", right="right", bottom=floor, top="candidate", source=held, name="candidate", legend_label="candidate",
        fill_alpha=0, line_width=1.5,
    )  # fmt: skip
    told = [("from", "@left"), ("to", "@right"), ("baseline", "@before{0,0}"), ("candidate", "@after{0,0}")]
    plot.add_tools(models.HoverTool(renderers=[outline], tooltips=told))
    return _item(plot)


@cache
def overview() -> Mapping[str, Any]:
    """Lay out the errors of all calls in order of execution; the page fills in the points, so it is the same for all pages."""
    from bokeh import models

    plot = _figure(
        "overview", CHART_HEIGHT, y_axis_type="log", x_axis_label="execution order in the candidate",
        y_axis_label="rel. L2 of the outputs",
    )  # fmt: skip
    points = []
    for name, label, marker, size in SERIES:
        held = models.ColumnDataSource({"seq": [], "error": [], "row": [], "call": [], "told": []}, name=name)
        drawn = plot.scatter("seq", "error", source=held, size=size, marker=marker, name=name, legend_label=label, line_alpha=0)
        drawn.nonselection_glyph = drawn.selection_glyph = None
        points.append(drawn)
    told = [("call", "@call"), ("rel. L2", "@told")]
    plot.add_tools(models.HoverTool(renderers=points, tooltips=told), models.TapTool(renderers=points))
    plot.xaxis.formatter.use_scientific = False
    return _item(plot)


@cache
def calls_table(ranks: bool) -> Mapping[str, Any]:
    """Lay out the table of calls, with a column for the rank if there are several; the page fills in its rows."""
    from bokeh import models
    from bokeh.embed import json_item

    error = models.ScientificFormatter(precision=1, power_limit_high=0, power_limit_low=0, text_align="right", nan_format="–")
    # The page sends the colour along with the row: a CSS variable, so that it follows the look.
    tinted = models.StringFormatter(text_color={"field": "tint"})
    shown = [
        ("seq_candidate", "seq", 52, None), ("step", "step", 42, None), ("rank", "rank", 42, None),
        ("phase", "phase", 74, None), ("level", "level", 58, None), ("scope", "scope", 200, None),
        ("call", "call", 250, None), ("error_in", "error in", 72, error), ("error_out", "error out", 76, error),
        ("ratio", "× expected", 92, error), ("state", "state", 84, tinted), ("role", "role", 60, tinted),
    ]  # fmt: skip
    columns = [
        models.TableColumn(field=field, title=title, width=width, **({"formatter": formatter} if formatter else {}))
        for field, title, width, formatter in shown
        if ranks or field != "rank"
    ]
    source = models.ColumnDataSource({field: [] for field in (*(name for name, *_ in shown), "tint")})
    css = resources.files("trueup.doors.report").joinpath("template/table.css").read_text(encoding="utf-8")
    table = models.DataTable(
        name="calls", source=source, columns=columns,
        height=TABLE_HEIGHT, row_height=ROW_HEIGHT, sizing_mode="stretch_width", index_position=None,
        reorderable=False, margin=0, autosize_mode="none", stylesheets=[models.InlineStyleSheet(css=css)],
    )  # fmt: skip
    return dict(json_item(table))


def _figure(name: str, height: int, **axes: Any) -> Any:
    """Return an empty chart as wide as the page."""
    from bokeh.plotting import figure

    return figure(name=name, height=height, sizing_mode="stretch_width", toolbar_location=None, tools="", **axes)


def _item(plot: Any) -> dict[str, Any]:
    """Return a chart as ``embed_item`` takes it; colours are left to the page, which sets them for its light and its dark look."""
    from bokeh.embed import json_item

    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.xgrid.grid_line_color = None
    plot.axis.minor_tick_line_color = None
    plot.axis.axis_label_text_font_style = "normal"
    plot.legend.background_fill_alpha = 0
    plot.legend.border_line_color = None
    plot.legend.spacing = 28
    plot.legend.location = "bottom_left"
    plot.legend.orientation = "horizontal"
    plot.add_layout(plot.legend[0], "above")
    return dict(json_item(plot))


WIDTH, HEIGHT = 196, 66
GAP_X, GAP_Y = 36, 12
MARGIN = 4
NAME, LINE = 22, 27  # characters of the bold and of the other lines that fit into a box


@dataclass(frozen=True)
class Box:
    """A call, drawn."""

    x: int
    y: int
    node: Neighbour
    tone: str
    lines: tuple[str, str, str]
    title: str


@dataclass(frozen=True)
class Line:
    """A tensor, drawn from the right edge of its producer to the left edge of its consumer."""

    path: str
    tone: str
    side: str
    title: str


@dataclass(frozen=True)
class Diagram:
    """A picture of ``width`` by ``height`` pixels."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    headings: tuple[tuple[int, str], ...]


HEADINGS = {-2: "two before", -1: "makes an input", 0: "the call", 1: "reads an output", 2: "two after"}


def diagram(evidence: Evidence, errors: tuple[float, float] | None = None) -> Diagram | None:
    """Lay the neighbourhood out, or return None where the call has none; ``errors`` (in, out) are the call's own, for one that one
    run alone made: the table of calls has none of it."""
    if len(evidence.nodes) < 2:
        return None
    hops = sorted({node.hops for node in evidence.nodes})
    columns = {hop: [k for k, node in enumerate(evidence.nodes) if node.hops == hop] for hop in hops}
    tallest = max(map(len, columns.values()))
    top = 26
    height = top + tallest * (HEIGHT + GAP_Y) - GAP_Y + MARGIN
    places: dict[int, tuple[int, int]] = {}
    for place, hop in enumerate(hops):
        nodes = _untangled(columns[hop], evidence, places)
        free = (tallest - len(nodes)) * (HEIGHT + GAP_Y) // 2
        for row, k in enumerate(nodes):
            places[k] = MARGIN + place * (WIDTH + GAP_X), top + free + row * (HEIGHT + GAP_Y)
    boxes = tuple(_box(places[k], node, errors if node.hops == 0 else None) for k, node in enumerate(evidence.nodes))
    lines = tuple(_line(places, edge, evidence.nodes) for edge in evidence.edges)
    headings = tuple((MARGIN + place * (WIDTH + GAP_X), HEADINGS.get(hop, "")) for place, hop in enumerate(hops))
    return Diagram(2 * MARGIN + len(hops) * (WIDTH + GAP_X) - GAP_X, height, boxes, lines, headings)


def _untangled(nodes: list[int], evidence: Evidence, places: dict[int, tuple[int, int]]) -> list[int]:
    """Order a column by the mean height of what it hangs on in the columns before it, so that lines cross less."""

    def height(k: int) -> float:
        tied = [places[other][1] for e in evidence.edges for mine, other in ((e.source, e.target), (e.target, e.source))
                if mine == k and other in places]  # fmt: skip
        return sum(tied) / len(tied) if tied else math.inf

    return sorted(nodes, key=height)


def _box(place: tuple[int, int], node: Neighbour, own: tuple[float, float] | None) -> Box:
    only = f"only in the {node.side}" if node.side != "both" else ""
    given, made = (node.error_in, node.error_out) if node.state or own is None else own
    errors = f"in {_error(given)}, out {_error(made)}" if node.state or own is not None else only or "not compared"
    where = one_line(node.scope) or "outside any module"
    name = f"{one_line(node.op)}#{node.ordinal}"
    title = f"{where}\n{name}\n{node.phase}, step {node.step}, level {node.level}\n{errors}"
    return Box(*place, node, tone(node), (ending(name, NAME), ending(where, LINE), shorten(errors, LINE)), title)


def ending(text: str, width: int) -> str:
    """Shorten a name from the left, where it can be at a dot: ``torch.nn.functional.cross_entropy#0`` is ``…cross_entropy#0``."""
    if len(text) <= width:
        return text
    whole = text[-width:].partition(".")[2]
    return ELLIPSIS + (whole if len(whole) > width // 2 else text[1 - width :])


def tone(node: Neighbour) -> str:
    """Name the colour of a call: culprit, deviates, incomparable, calm, or one-sided."""
    if node.hops == 0 or node.role == "culprit":
        return "culprit"
    if node.side != "both":
        return "one-sided"
    return node.state if node.state in ("deviates", "incomparable") else "calm"


def _line(places: dict[int, tuple[int, int]], edge: Edge, nodes: tuple[Neighbour, ...]) -> Line:
    x1, y1 = places[edge.source][0] + WIDTH, places[edge.source][1] + HEIGHT // 2
    x2, y2 = places[edge.target][0], places[edge.target][1] + HEIGHT // 2
    bend = max(24, abs(x2 - x1) // 2)
    path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
    slots = " → ".join(map(one_line, edge.slots))
    on = "" if edge.side == "both" else f", only in the {edge.side}"
    said = f"{slots}: rel. L2 {_error(edge.error)}{on}"
    bad = (nodes[edge.source].state == "deviates" or nodes[edge.source].hops == 0) and edge.error != 0
    return Line(path, "deviates" if bad else "calm", edge.side, said)


def _error(value: float) -> str:
    return "?" if math.isnan(value) else sci(value)


def edge_rows(evidence: Evidence) -> list[tuple[str, str, str, str, str]]:
    """Return the lines of the picture as text: ``(from, slot, to, slot, error)``."""
    named = [f"{one_line(node.scope)}/{one_line(node.op)}#{node.ordinal}".lstrip("/") for node in evidence.nodes]
    return [
        (
            named[edge.source], one_line(edge.slots[0]), named[edge.target], one_line(edge.slots[1]),
            _error(edge.error) + ("" if edge.side == "both" else f", only in the {edge.side}"),
        )
        for edge in evidence.edges
    ]  # fmt: skip
