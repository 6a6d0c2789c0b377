"""Rows of slots as CSV and as an Excel workbook, in the legacy layout (`trueup.doors.report.legacy`).

Rows are written as they are read, some hundred thousand at a time. No cell is a formula or a link: in a workbook text is written
as text, in both text that begins like a formula gets an apostrophe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import CSVWriter

from trueup.doors.report.highlight import PLAIN, RED, YELLOW
from trueup.doors.report.legacy import headings, lines, text_cell
from trueup.doors.report.legacy_verdicts import ABSENT
from trueup.doors.report.saving import replaced
from trueup.foundation.model import Result, TrueupError

SHEET_ROWS = 1_048_575
"""Rows of a sheet below its headings; more go to another sheet (Excel's specifications and limits)."""
CELL = 32_767
"""Characters of a cell, likewise."""
COLOURS = {PLAIN: "", RED: "#FF0000", YELLOW: "#FFFF00"}
"""Fills of ptdbg_ascend 6.0."""
WIDTHS = {"NPU Name": 44, "Bench Name": 44, "Err_message": 40, "NPU_Stack_Info": 30}


def write_csv(result: Result, path: str | Path) -> Path:
    """Write a row per slot as CSV, UTF-8, with headings, every cell quoted; return the path.

    Raises:
        TrueupError: the file cannot be written, or a capture is gone.
    """
    layout, rows = lines(result)
    return write_tables((made.table for made in rows), headings(layout), path)


def write_tables(tables: Iterable[pa.Table], names: Sequence[str], path: str | Path) -> Path:
    """Write the columns of such names of tables, one below the other, as CSV; return the path.

    Raises:
        TrueupError: the file cannot be written.
    """
    schema = pa.schema([(name, pa.string()) for name in names])
    with replaced(Path(path), "a file for the rows of the comparison") as temporary, CSVWriter(str(temporary), schema) as file:
        for table in tables:
            file.write_table(pa.table([_text(table[name].combine_chunks()) for name in names], schema=schema))
    return Path(path)


def _text(column: Any) -> Any:
    text = pc.cast(column, pa.string())
    if pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py():
        text = pc.if_else(pc.equal(text, "-inf"), text_cell("-inf"), text)  # the one number that looks like a formula
    return pc.fill_null(text, ABSENT) if text.null_count else text


def write_xlsx(result: Result, path: str | Path) -> Path:
    """Write a row per slot as an Excel workbook, rows coloured as the legacy tool does, culprits bold; return the path.

    Raises:
        TrueupError: xlsxwriter is not installed, the file cannot be written, or a capture is gone.
    """
    writer = xlsxwriter()
    layout, rows = lines(result)
    names = headings(layout)
    with replaced(Path(path), "a file for the rows of the comparison") as temporary:
        options = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}
        book = writer.Workbook(str(temporary), options)
        formats = {
            (colour, bold): book.add_format({"bold": bold, **({"bg_color": fill} if fill else {})})
            for colour, fill in COLOURS.items()
            for bold in (False, True)
        }
        sheet: Any = None
        row = SHEET_ROWS
        for made in rows:
            cells = zip(*map(_cells, made.table.columns), strict=True)
            for colour, bold, values in zip(made.colour.tolist(), made.is_culprit.tolist(), cells, strict=True):
                if row >= SHEET_ROWS:
                    sheet, row = _sheet(book, names), 0
                row += 1
                _write_row(sheet, row, values, formats[colour, bold], coloured=colour != PLAIN)
        if sheet is None:
            _sheet(book, names)
        book.close()
    return Path(path)


def xlsxwriter() -> Any:
    """Return the library that writes workbooks.

    Raises:
        TrueupError: it is not installed.
    """
    try:
        import xlsxwriter as found
    except ImportError:
        raise TrueupError(
            'An Excel workbook needs xlsxwriter, which is not installed.\n  next:     pip install "trueup[xlsx]", or use --csv'
        ) from None
    return found


def _sheet(book: Any, names: list[str]) -> Any:
    sheet = book.add_worksheet()
    for column, name in enumerate(names):
        sheet.set_column(column, column, WIDTHS.get(name, 16))
    sheet.freeze_panes(1, 2)
    heading = book.add_format({"bold": True})
    for column, name in enumerate(names):
        sheet.write_string(0, column, name, heading)
    return sheet


def _cells(column: Any) -> list[str | int | float]:
    """Return the cells of a column: numbers, and text for what is none."""
    if pa.types.is_string(column.type):
        limited = pc.if_else(pc.greater(pc.utf8_length(column), CELL), pc.utf8_slice_codeunits(column, 0, CELL), column)
        return [ABSENT if text is None else text for text in limited.to_pylist()]
    values = column.to_pylist()
    if not pa.types.is_floating(column.type):
        return [ABSENT if value is None else value for value in values]
    return [ABSENT if value is None else value if math.isfinite(value) else text_cell(str(value)) for value in values]


def _write_row(sheet: Any, row: int, cells: tuple[str | int | float, ...], form: Any, *, coloured: bool) -> None:
    text, number = sheet.write_string, sheet.write_number
    for column, value in enumerate(cells):
        if isinstance(value, str):
            if value or coloured:
                text(row, column, value, form)
        else:
            number(row, column, value, form)
