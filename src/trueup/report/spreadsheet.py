"""Rows of slots as CSV and as an Excel workbook, in the legacy layout (`trueup.report.legacy`).

Rows are written as they are read, so a file of millions of rows takes no more memory than one of a thousand. No cell is a
formula or a link: in a workbook text is written as text, in CSV text that begins like a formula gets an apostrophe.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from trueup.model import Result, TrueupError
from trueup.report.legacy import headings, lines, text_cell
from trueup.report.saving import replaced
from trueup.report.wording import shorten

SHEET_ROWS = 1_048_575
"""Rows of a sheet below its headings; more go to another sheet (Excel's specifications and limits)."""
CELL = 32_767
"""Characters of a cell, likewise."""
COLOURS = {"red": "#FF0000", "yellow": "#FFFF00"}
"""Fills of ptdbg_ascend 6.0."""
WIDTHS = {"NPU Name": 44, "Bench Name": 44, "Err_message": 40, "NPU_Stack_Info": 30}


def write_csv(result: Result, path: str | Path) -> Path:
    """Write a row per slot as CSV, UTF-8, with headings; return the path.

    Raises:
        TrueupError: the file cannot be written, or a capture is gone.
    """
    layout, rows = lines(result, colours=False)
    names = headings(layout)
    with (
        replaced(Path(path), "a file for the rows of the comparison") as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        table = csv.writer(file)
        table.writerow(names)
        table.writerows([text_cell(line.cells[name]) for name in names] for line in rows)
    return Path(path)


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
            for colour, fill in ({"": ""} | COLOURS).items()
            for bold in (False, True)
        }
        sheet: Any = None
        for n, line in enumerate(rows):
            row = n % SHEET_ROWS + 1
            if row == 1:
                sheet = _sheet(book, names)
            chosen = formats[line.colour, line.is_culprit]
            for column, name in enumerate(names):
                if line.cells[name] != "" or line.colour:
                    _put(sheet, row, column, line.cells[name], chosen)
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


def _put(sheet: Any, row: int, column: int, value: str | int | float, form: Any) -> None:
    if isinstance(value, str):
        sheet.write_string(row, column, shorten(str(text_cell(value)), CELL), form)
    else:
        sheet.write_number(row, column, value, form)
