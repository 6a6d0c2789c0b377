"""Which rows of the legacy table are red and which yellow: the rules of ptdbg_ascend 6.0, each output beside each input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Layout = Literal["tensor", "stats", "digest"]
Cell = str | int | float
Colour = Literal["red", "yellow", ""]
Cells = dict[str, Cell]


@dataclass(frozen=True)
class Line:
    """A row of the table, by column name, with its colour."""

    cells: Cells
    colour: Colour = ""
    is_culprit: bool = False
    is_input: bool = field(default=False, repr=False)


def coloured(call: Sequence[Line], layout: Layout) -> list[Line]:
    """Return the rows of one call with their colours."""
    inputs = [line.cells for line in call if line.is_input]
    return [
        line if layout == "digest" else Line(line.cells, _colour(line, inputs, layout), line.is_culprit, line.is_input)
        for line in call
    ]


def _colour(line: Line, inputs: Sequence[Cells], layout: Layout) -> Colour:
    cells = line.cells
    if any(cells.get(f"NPU {name}") in ("nan", "inf", "-inf") for name in ("max", "min")):
        return "red"
    if abs(_value(cells, "MaxAbsErr" if layout == "tensor" else "Max diff", 0.0)) > 1e10:
        return "red"
    if line.is_input:
        return ""
    worse = (_red, _yellow) if layout == "tensor" else (_red_summary, _yellow_summary)
    if any(worse[0](cells, other) for other in (inputs or [{}])):
        return "red"
    return "yellow" if any(worse[1](cells, other) for other in inputs) else ""


def _red(output: Cells, given: Cells) -> bool:
    name = "One Thousandth Err Ratio"
    return _value(given, name, 0.0) > 0.9 and _value(output, name, 1.0) < 0.6


def _yellow(output: Cells, given: Cells) -> bool:
    share = "One Thousandth Err Ratio"
    grown = _magnitude(output) - _magnitude(given) >= 1
    fell = _value(given, share, 0.0) - _value(output, share, 1.0) > 0.1
    return grown or fell or _value(given, "Cosine", 0.0) - _value(output, "Cosine", 1.0) > 0.1


def _magnitude(cells: Cells) -> float:
    return math.log10(max(1.0, _value(cells, "MaxAbsErr", 0.0)))


def _red_summary(output: Cells, _: Cells) -> bool:
    return _share(output) > 0.5


def _yellow_summary(output: Cells, given: Cells) -> bool:
    return "Max diff" in given and given["Max diff"] != "N/A" and _share(output) > 0.1 and _share(given) < 0.01


def _share(cells: Cells) -> float:
    return abs(_value(cells, "Max diff", 0.0)) / max(0.01, abs(_value(cells, "Bench max", 0.0)))


def _value(cells: Cells, name: str, otherwise: float) -> float:
    value = cells.get(name)
    return value if isinstance(value, float) else otherwise
