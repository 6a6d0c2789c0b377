"""The elements of a tensor as rows of numbers, on a terminal and as text: precision_tool's ``pt``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from trueup.doors.report.saving import replaced
from trueup.foundation.words.wording import number, one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

ROWS, COLUMNS = 16, 8
PIECE = 1 << 16


def render_values(values: NDArray[Any], console: Console, name: str) -> None:
    """Print what a tensor is, and its extremes, as far as it is one of numbers."""
    from trueup.foundation.kernels import summarize
    from trueup.foundation.model import NUMBERS, PACKED

    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text("tensor", "dim"), Text(one_line(f"{values.dtype.name} {list(values.shape)}")))
    packed = np.empty(PACKED)
    try:
        summarize(values, packed)
    except TypeError:  # text, records
        packed[:] = np.nan
    for label, value in zip(NUMBERS, packed.tolist(), strict=False):
        if label in ("min", "max", "mean", "l2") and np.isfinite(value):
            grid.add_row(Text(label, "dim"), Text(number(value, 7)))
        elif label.startswith("n_") and value > 0:
            grid.add_row(Text(label.removeprefix("n_"), "dim"), Text(f"{int(value):,}"))
    console.print(Text(name, "bold"))
    console.print(grid)


def render_rows(values: NDArray[Any], console: Console) -> None:
    """Print the first elements in C order, sixteen rows of eight; on a narrow terminal in more rows of fewer."""
    first = np.asarray(values.flat[: ROWS * COLUMNS]).tolist()
    if not first:
        return
    cells = [_text(value) for value in first]
    width, label = max(map(len, cells)), len(str(len(cells)))
    columns = next((n for n in (COLUMNS, COLUMNS // 2, 2) if label + n * (width + 2) <= console.width), 1)
    console.print()
    for start in range(0, len(cells), columns):
        row = "".join(f"  {cell:>{width}}" for cell in cells[start : start + columns])
        console.print(Text.assemble((f"{start:>{label}}", "dim"), row), soft_wrap=True)
    if values.size > ROWS * COLUMNS:
        console.print(Text(f"and {values.size - ROWS * COLUMNS:,} more elements: -o FILE writes all", "dim"))


def _text(value: Any) -> str:
    return number(value, 5) if isinstance(value, float) else one_line(str(value))


def write_text(values: NDArray[Any], path: Path) -> str:
    """Write a tensor as text, an element a line in C order, and return a sentence that says so.

    Raises:
        TrueupError: the file cannot be written.
    """
    flat = values.reshape(-1)
    with replaced(path, "a file for the elements") as temporary, temporary.open("w", encoding="utf-8") as file:
        for start in range(0, flat.size, PIECE):
            file.writelines(f"{value}\n" for value in np.asarray(flat[start : start + PIECE]).tolist())
    return one_line(f"wrote {path}: {values.dtype.name} {list(values.shape)}, an element a line")
