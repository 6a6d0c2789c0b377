"""The page's charts and virtual table, from Bokeh, which carries its own JavaScript.

Bokeh is imported when a page is made. No captured text goes into these models: the charts hold numbers, table and overview get
its rows from the page's own data block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from trueup.doors.report.facts import StepRow
from trueup.foundation.model import Histogram

COMPONENTS = ("bokeh", "bokeh-widgets", "bokeh-tables")
TABLE_HEIGHT, ROW_HEIGHT, CHART_HEIGHT, HISTOGRAM_HEIGHT = 460, 30, 250, 190
SERIES = (
    ("agrees", "agree", "circle", 4), ("incomparable", "not comparable", "triangle", 6),
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


def library() -> list[str]:
    """Return the library's scripts, safe to stand inside a script element."""
    from bokeh.resources import Resources

    scripts = Resources(mode="inline", components=list(COMPONENTS), log_level="error").js_raw
    return [re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE) for script in scripts]


def curves(name: str, rows: Sequence[StepRow]) -> dict[str, Any]:
    """Draw a number of both runs (``loss``, ``gradient norm``) over the steps; returns what ``embed_item`` takes."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool, Range1d, TapTool
    from bokeh.plotting import figure

    nan = float("nan")
    steps = [row.step for row in rows]
    held = ColumnDataSource(
        {
            "step": steps,
            "baseline": [nan if row.baseline is None else row.baseline for row in rows],
            "candidate": [nan if row.candidate is None else row.candidate for row in rows],
        }
    )
    margin = max(0.5, (steps[-1] - steps[0]) * 0.02)
    plot = figure(
        name=name, height=CHART_HEIGHT, sizing_mode="stretch_width", toolbar_location=None, tools="",
        x_range=Range1d(steps[0] - margin, steps[-1] + margin), x_axis_label="step", y_axis_label=name,
    )  # fmt: skip
    marks = len(rows) <= 60
    points = []
    for side, dash, marker in (("baseline", "solid", "circle"), ("candidate", [6, 4], "square")):
        line = plot.line("step", side, source=held, line_width=2, line_dash=dash, legend_label=side, name=side)
        size = 8 if marks else 4
        points.append(plot.scatter("step", side, source=held, size=size, marker=marker, legend_label=side, name=side))
        if side == "baseline":
            told = [("step", "@step"), ("baseline", "@baseline{0.000000}"), ("candidate", "@candidate{0.000000}")]
            plot.add_tools(HoverTool(renderers=[line], tooltips=told, mode="vline"))
    for drawn in points:
        drawn.nonselection_glyph = drawn.selection_glyph = None
    plot.add_tools(TapTool(renderers=points))
    plot.xaxis.ticker.min_interval = 1
    _quieten(plot)
    return dict(json_item(plot))


def histogram(spread: Histogram) -> dict[str, Any]:
    """Draw how the elements of a slot are spread: the baseline filled, the candidate as an outline, counts logarithmic."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool, PrintfTickFormatter
    from bokeh.plotting import figure

    edges, floor = list(spread.edges), 0.5
    held = ColumnDataSource(
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
    plot = figure(
        name="histogram", height=HISTOGRAM_HEIGHT, sizing_mode="stretch_width", toolbar_location=None, tools="",
        y_axis_type="log", y_range=(floor, top), y_axis_label="elements",
    )  # fmt: skip
    plot.yaxis.formatter = PrintfTickFormatter(format="%.0f")
    plot.quad(
        left="left", right="right", bottom=floor, top="baseline", source=held, name="baseline", legend_label="baseline",
        fill_alpha=0.35, line_alpha=0,
    )  # fmt: skip
    outline = plot.quad(
        left="left", right="right", bottom=floor, top="candidate", source=held, name="candidate", legend_label="candidate",
        fill_alpha=0, line_width=1.5,
    )  # fmt: skip
    told = [("from", "@left"), ("to", "@right"), ("baseline", "@before{0,0}"), ("candidate", "@after{0,0}")]
    plot.add_tools(HoverTool(renderers=[outline], tooltips=told))
    _quieten(plot)
    return dict(json_item(plot))


def overview() -> dict[str, Any]:
    """Lay out the errors of all calls in order of execution; the page fills in the points."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool, TapTool
    from bokeh.plotting import figure

    plot = figure(
        name="overview", height=CHART_HEIGHT, sizing_mode="stretch_width", toolbar_location=None, tools="",
        y_axis_type="log", x_axis_label="execution order in the candidate", y_axis_label="rel. L2 of the outputs",
    )  # fmt: skip
    points = []
    for name, label, marker, size in SERIES:
        held = ColumnDataSource({"seq": [], "error": [], "row": [], "call": []}, name=name)
        drawn = plot.scatter("seq", "error", source=held, size=size, marker=marker, name=name, legend_label=label, line_alpha=0)
        drawn.nonselection_glyph = drawn.selection_glyph = None
        points.append(drawn)
    told = [("call", "@call"), ("rel. L2", "@error{0.0e+0}")]
    plot.add_tools(HoverTool(renderers=points, tooltips=told), TapTool(renderers=points))
    plot.xaxis.formatter.use_scientific = False
    _quieten(plot)
    return dict(json_item(plot))


def calls_table(ranks: bool) -> dict[str, Any]:
    """Lay out the table of calls, with a column for the rank if there are several; the page fills in its rows."""
    from bokeh.embed import json_item
    from bokeh.models import (
        ColumnDataSource,
        DataTable,
        InlineStyleSheet,
        ScientificFormatter,
        StringFormatter,
        TableColumn,
    )

    error = ScientificFormatter(precision=1, power_limit_high=0, power_limit_low=0, text_align="right", nan_format="–")
    # The page sends the colour along with the row: a CSS variable, so that it follows the look.
    tinted = StringFormatter(text_color={"field": "tint"})
    shown = [
        ("seq_candidate", "seq", 52, None), ("step", "step", 42, None), ("rank", "rank", 42, None),
        ("phase", "phase", 74, None), ("level", "level", 58, None), ("scope", "scope", 200, None),
        ("call", "call", 250, None), ("error_in", "error in", 72, error), ("error_out", "error out", 76, error),
        ("ratio", "× expected", 92, error), ("state", "state", 84, tinted), ("role", "role", 60, tinted),
    ]  # fmt: skip
    columns = [
        TableColumn(field=field, title=title, width=width, **({"formatter": formatter} if formatter else {}))
        for field, title, width, formatter in shown
        if ranks or field != "rank"
    ]
    source = ColumnDataSource({field: [] for field in (*(name for name, *_ in shown), "tint")})
    css = resources.files("trueup.doors.report").joinpath("template/table.css").read_text(encoding="utf-8")
    table = DataTable(
        name="calls", source=source, columns=columns,
        height=TABLE_HEIGHT, row_height=ROW_HEIGHT, sizing_mode="stretch_width", index_position=None,
        reorderable=False, margin=0, autosize_mode="none", stylesheets=[InlineStyleSheet(css=css)],
    )  # fmt: skip
    return dict(json_item(table))


def _quieten(plot: Any) -> None:
    """Leave colours to the page, which sets them for its light and its dark look."""
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
