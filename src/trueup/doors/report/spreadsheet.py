"""The table that users of ptdbg and msprobe know: its columns, its verdict per row, its colours, as CSV and as a workbook.

One row per slot, in three layouts, by what both captures kept (ptdbg_ascend 6.0, ``compare_result_*.xlsx``): real data, summary,
md5. NPU is the candidate, Bench the baseline. What was not recorded is ``N/A`` and never passes; calls of either side alone have
rows too (ptdbg leaves the benchmark's out). The columns behind ``NPU_Stack_Info`` are Trueup's.

Rows are written as they are read, some hundred thousand at a time. No cell is a formula or a link: text that begins like a
formula gets an apostrophe, and a workbook stores text as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import CSVWriter

from trueup.doors.report.saving import replaced, text_cell
from trueup.doors.report.slot_pairs import COUNTS, REDUCED, Aligned, SlotPairs, reduced
from trueup.foundation.kernels.metrics import Metrics
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.words.wording import one_line, shorten

Array = np.ndarray[Any, Any]
Layout = Literal["tensor", "stats", "digest"]

OURS = ("Rank", "Step", "Phase", "Level", "Trueup State", "Trueup Role", "Trueup Rel. L2", "Trueup Expected", "Trueup Rule")
INPUTS = ("input", "param", "grad_output")
NAME_WIDTH, STACK_WIDTH = 4000, 4000


@dataclass(frozen=True)
class Lines:
    """Rows of the table. A column is text or numbers; what is null was not recorded."""

    table: pa.Table
    colour: Array
    is_culprit: Array

    def only(self, wanted: pa.Array) -> Lines:
        """Return some of the rows."""
        mask = wanted.to_numpy(zero_copy_only=False)
        return Lines(self.table.filter(wanted), self.colour[mask], self.is_culprit[mask])


Named = Callable[[pa.Table, Array], pa.Array]
"""Names the rows of a side of `Aligned`, those that are there (the array of bool); null: it has no row of its own."""


def layout_of(pairs: SlotPairs) -> Layout:
    """Choose the layout: by the less of what the two captures kept."""
    kept = [str(capture.root.get("detail", "stats")) for capture in pairs.captures]
    return "digest" if "digest" in kept else "stats" if "stats" in kept else "tensor"


def headings(layout: Layout) -> list[str]:
    """Return the titles of all columns."""
    return ["NPU Name", "Bench Name", *TYPES, *VERDICTS[layout], "NPU_Stack_Info", *OURS]


def lines(result: Result, named: tuple[Named, Named] | None = None) -> tuple[Layout, Iterator[Lines]]:
    """Return the layout and the rows, many at a time, made as they are asked for. ``named`` names the slots of baseline and
    candidate; what neither names has no row. Raises TrueupError if a capture is gone."""
    pairs = SlotPairs(result)
    layout = layout_of(pairs)
    return layout, (_lines(slots, layout, pairs, named) for slots in pairs)


def _lines(slots: Aligned, layout: Layout, pairs: SlotPairs, named: tuple[Named, Named] | None) -> Lines:
    sides = ((slots.candidate, slots.in_candidate), (slots.baseline, slots.in_baseline))
    naming = (_names, _names) if named is None else named[::-1]
    names = [name(*side) for name, side in zip(naming, sides, strict=True)]
    columns: dict[str, pa.Array] = dict(zip(("NPU Name", "Bench Name"), (name.fill_null(ABSENT) for name in names), strict=True))
    columns |= dict(zip(TYPES[:2], (_cleaned(table["dtype"]) for table, _ in sides), strict=True))
    columns |= dict(zip(TYPES[2:], (shapes(table) for table, _ in sides), strict=True))
    verdicts = compared(slots, layout, pairs)
    columns |= verdicts | {"NPU_Stack_Info": _mapped(slots.stack, _stack)} | _ours(slots)
    table = pa.table({name: _guarded(columns[name]) for name in headings(layout)})
    role = pc.equal(pc.cast(slots.judged["role"], pa.string()), "culprit").fill_null(False).to_numpy(zero_copy_only=False)
    is_input = pc.match_substring_regex(slots.shared("slot"), f"^({'|'.join(INPUTS)})").to_numpy(zero_copy_only=False)
    numbers = {name: _numbers(column) for name, column in verdicts.items() if pa.types.is_floating(column.type)}
    made = Lines(table, colours(numbers, slots.call, is_input, layout), role)
    return made if named is None else made.only(pc.or_(pc.is_valid(names[0]), pc.is_valid(names[1])))


def _names(table: pa.Table, there: Array) -> pa.Array:
    """Name slots as the legacy tables do: scope and operator, number, direction, slot."""
    parts = (pc.cast(_cleaned(table[name]), pa.string()) for name in ("scope", "op", "phase", "slot"))
    scope, op, phase, slot = (part.fill_null("") for part in parts)
    ordinal = pc.cast(table["ordinal"].combine_chunks(), pa.string()).fill_null("")
    call = pc.binary_join_element_wise(scope, pc.if_else(pc.equal(scope, ""), "", "/"), op, "")
    return pc.if_else(pa.array(there), pc.binary_join_element_wise(call, ordinal, phase, slot, "_"), ABSENT)


def _ours(slots: Aligned) -> dict[str, pa.Array]:
    state, role, rule = (pc.cast(_mapped(slots.judged[name], text_cell), pa.string()) for name in ("state", "role", "rule"))
    ran = np.zeros(int(slots.call[-1]) + 1 if len(slots) else 0, bool)
    ran[slots.call[slots.in_candidate]] = True
    alone = pc.if_else(pa.array(ran[slots.call]), "only in the candidate", "only in the baseline")
    return {
        "Rank": slots.shared("rank"), "Step": slots.shared("step"), "Phase": _cleaned(slots.shared("phase")),
        "Level": _cleaned(slots.shared("level")), "Trueup State": pc.coalesce(state, alone), "Trueup Role": role.fill_null(""),
        "Trueup Rel. L2": slots.judged["error_out"], "Trueup Expected": slots.judged["expected"], "Trueup Rule": rule.fill_null(""),
    }  # fmt: skip


def _mapped(column: Any, change: Callable[[str], str]) -> pa.DictionaryArray:
    """Change each text of a column; what repeats is changed once."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = whole if pa.types.is_dictionary(whole.type) else pc.dictionary_encode(whole)
    changed = pa.array([None if text is None else change(text) for text in encoded.dictionary.to_pylist()], pa.string())
    return pa.DictionaryArray.from_arrays(encoded.indices, changed)


def _cleaned(column: Any) -> pa.DictionaryArray:
    return _mapped(column, _one_line)


@lru_cache(maxsize=1 << 16)  # names, dtypes and rules repeat themselves
def _one_line(text: str) -> str:
    return shorten(one_line(text), NAME_WIDTH)


@lru_cache(maxsize=1 << 12)
def _stack(frames: str) -> str:
    return shorten("\n".join(map(one_line, frames.split("\n"))), STACK_WIDTH)


def _numbers(column: pa.Array) -> Any:
    return np.ma.masked_array(column.to_numpy(zero_copy_only=False), pc.is_null(column).to_numpy(zero_copy_only=False))


def _guarded(column: Any) -> Any:
    """Return a column whose text a spreadsheet takes for text: what would begin a formula gets an apostrophe before it."""
    if pa.types.is_dictionary(column.type):
        return pc.cast(_mapped(column, text_cell), pa.string())
    if not pa.types.is_string(column.type):
        return column
    begins = pc.match_substring_regex(column, r"^[=+\-@\t\r\n]")
    if not pc.any(begins).as_py():
        return column
    return pc.if_else(begins, pc.binary_join_element_wise("'", column, ""), column)


ABSENT = "N/A"
TYPES = ("NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape")
STATISTICS = tuple(f"{side} {name}" for side in ("NPU", "Bench") for name in ("max", "min", "mean", "l2norm"))
MEASURES = ("Cosine", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")
DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
DIGESTS = ("NPU MD5", "BENCH MD5")
REACHED, RESULT, MESSAGE = "Accuracy Reached or Not", "Result", "Err_message"

VERDICTS: dict[Layout, tuple[str, ...]] = {
    "tensor": (*MEASURES, *STATISTICS, REACHED, MESSAGE),
    "stats": (*DIFFERENCES, *STATISTICS, RESULT, MESSAGE),
    "digest": (*DIGESTS, RESULT, MESSAGE),
}
"""Columns behind `TYPES` by layout, in the order of ptdbg_ascend 6.0 (NPU MD5 holds Trueup's xxh3 digest)."""

NO_BENCH, NO_NPU = "No bench data matched.", "No NPU data matched."
SHAPES = "Shape of NPU and bench Tensor do not match. Skipped."
SCALAR = "This is type of scalar data, can not compare."
EMPTY = "This is empty data, can not compare."
NOT_RECORDED = "Not recorded on both sides, can not compare."
POSITIONS = "The position of inf or nan in NPU and bench Tensor do not match."
ZERO = "Cannot compare by Cosine Similarity, All the data is Zero in one dump data."


class _Text:
    """A column of few texts, written here and there."""

    def __init__(self, count: int, text: str = "") -> None:
        self._codes, self._texts = np.zeros(count, np.int32), {text: 0}

    def put(self, where: Any, text: str) -> None:
        self._codes[where] = self._texts.setdefault(text, len(self._texts))

    def column(self) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(self._codes, list(self._texts))


def compared(slots: Aligned, layout: Layout, pairs: SlotPairs) -> dict[str, pa.Array]:
    """Return the columns `VERDICTS` of the layout; a number that is null was not recorded."""
    verdict, message = _Text(len(slots), ABSENT), _Text(len(slots))
    left = _comparable(slots, verdict, message)
    if layout == "digest":
        columns = _digests(slots)
    else:
        values = [_masked(column) for table in (slots.candidate, slots.baseline) for column in _reduced(table)]
        columns = dict(zip(STATISTICS, values, strict=True))
    if layout == "tensor":
        columns |= _measured(slots, pairs, left, verdict, message)
    elif layout == "stats":
        columns |= _differences(slots, left, verdict, message)
    else:
        _told_by_digest(slots, left, verdict, message)
    return columns | {VERDICTS[layout][-2]: verdict.column(), MESSAGE: message.column()}


def shapes(table: pa.Table) -> pa.Array:
    """Write shapes as ``[2, 3]``; null where there is none."""
    column = table["shape"].combine_chunks()
    known = pc.dictionary_encode(pc.binary_join(pc.cast(column, pa.list_(pa.string())), ", "))
    texts = [f"[{text}]" for text in known.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(known.indices, pa.array(texts, pa.string()))


def _comparable(slots: Aligned, verdict: _Text, message: _Text) -> Array:
    """Say of each row why there is nothing to compare; return which rows are left."""
    both = slots.in_baseline & slots.in_candidate
    is_argument = pc.equal(slots.shared("slot"), "arguments").fill_null(False).to_numpy(zero_copy_only=False)
    other_shape = ~_same(*(pc.cast(shapes(table), pa.string()).fill_null("[]") for table in (slots.baseline, slots.candidate)))
    is_empty = pc.equal(slots.candidate["numel"], 0).fill_null(False).to_numpy(zero_copy_only=False)
    message.put(~slots.in_baseline, NO_BENCH)
    message.put(~slots.in_candidate, NO_NPU)
    message.put(both & is_argument, SCALAR)
    message.put(both & ~is_argument & other_shape, SHAPES)
    message.put(both & ~is_argument & ~other_shape & is_empty, EMPTY)
    verdict.put(~both | (~is_argument & other_shape), "Unmatched")
    _other_arguments(slots, both & is_argument, message)
    return np.asarray(both & ~is_argument & ~other_shape & ~is_empty)


def _other_arguments(slots: Aligned, chosen: Array, message: _Text) -> None:
    before, after = (table["value"].combine_chunks() for table in (slots.baseline, slots.candidate))
    same = _same(pc.fill_null(before, ""), pc.fill_null(after, ""))
    for row in np.flatnonzero(chosen & ~same).tolist():
        there, here = (shorten(one_line(str(column[row].as_py())), 120) for column in (before, after))
        message.put(row, f"{SCALAR} They differ: {here} and {there}")


def _same(before: pa.Array, after: pa.Array) -> Array:
    """Tell where both are known and equal."""
    found: Array = pc.equal(before, after).fill_null(False).to_numpy(zero_copy_only=False)
    return found


def _is_equal(slots: Aligned) -> Array:
    """Tell where the bytes are known to be equal."""
    sides = (slots.baseline, slots.candidate)
    dtypes = (pc.cast(table["dtype"].combine_chunks(), pa.string()).fill_null("") for table in sides)
    return np.asarray(_same(*(table["digest"].combine_chunks() for table in sides)) & _same(*dtypes))


def _reduced(table: pa.Table) -> Any:
    """Return max, min, mean and norm of each row, ``(4, n)``, as PyTorch reduces; masked where one was not recorded."""
    numbers = {name: np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64) for name in (*REDUCED, *COUNTS)}
    return np.ma.masked_array(reduced(numbers), mask=[pc.is_null(table[name]).to_numpy() for name in REDUCED])


def _masked(column: Any) -> pa.Array:
    return pa.array(column.data, mask=np.ma.getmaskarray(column), from_pandas=False)


def _digests(slots: Aligned) -> dict[str, pa.Array]:
    found = (table["digest"].combine_chunks().fill_null("") for table in (slots.candidate, slots.baseline))
    return {name: pc.if_else(pc.equal(column, ""), ABSENT, column) for name, column in zip(DIGESTS, found, strict=True)}


def _differences(slots: Aligned, left: Array, verdict: _Text, message: _Text) -> dict[str, pa.Array]:
    sides = [_reduced(table) for table in (slots.candidate, slots.baseline)]
    null = np.any([np.ma.getmaskarray(side) for side in sides], axis=(0, 1))
    after, before = (side.data for side in sides)
    with np.errstate(all="ignore"):
        apart = after - before
        share = np.abs(apart) / (np.maximum(np.abs(after), np.abs(before)) + 1e-10)
    equal = _is_equal(slots)
    known = left & ~null
    message.put(left & null & ~equal, NOT_RECORDED)
    verdict.put(left & null & equal, "")
    verdict.put(known, "")
    verdict.put(known & ((share > 0.5) | np.isinf(apart)).any(axis=0), "Warning")
    verdict.put(known & np.isnan(apart).any(axis=0), "Nan")
    return {name: pa.array(column, mask=~known, from_pandas=False) for name, column in zip(DIFFERENCES, apart, strict=True)}


def _told_by_digest(slots: Aligned, left: Array, verdict: _Text, message: _Text) -> None:
    sides = [pc.is_valid(table["digest"]).to_numpy() for table in (slots.baseline, slots.candidate)]
    known, equal = sides[0] & sides[1], _is_equal(slots)
    message.put(left & ~known, NOT_RECORDED)
    verdict.put(left & known & equal, "Pass")
    verdict.put(left & known & ~equal, "Different")


def _measured(slots: Aligned, pairs: SlotPairs, left: Array, verdict: _Text, message: _Text) -> dict[str, pa.Array]:
    equal = left & _is_equal(slots)
    numbers: Any = np.ma.masked_array(np.zeros((len(MEASURES), len(slots))), mask=True)
    numbers[:, equal] = np.array([1.0, 0.0, 0.0, 1.0, 1.0])[:, None]
    verdict.put(equal, "Yes")
    rows = np.flatnonzero(left & ~equal)
    names = ("rank", "payload_segment", "payload_key", "payload_view", "digest")
    sides = [table.select(list(names)).take(pa.array(rows)).to_pylist() for table in (slots.baseline, slots.candidate)]
    for row, *kept in zip(rows.tolist(), *sides, strict=True):
        word, reason = _row(pairs, kept, numbers[:, row])
        verdict.put(row, word)
        message.put(row, reason)
    return {name: _masked(column) for name, column in zip(MEASURES, numbers, strict=True)}


def _row(pairs: SlotPairs, kept: list[dict[str, Any]], numbers: Any) -> tuple[str, str]:
    """Write the measures of one pair into ``numbers``; return the verdict and why there is none."""
    try:
        found = Metrics.of(_payload(pairs, 0, kept[0]), _payload(pairs, 1, kept[1]))
    except ValueError:
        return "Unmatched", SHAPES
    except (TrueupError, TypeError) as error:
        return ABSENT, one_line(str(error))
    if found.disagreeing:
        return "No", POSITIONS
    numbers[:] = found.cosine, found.max_absolute, found.max_relative, found.thousandth, found.five_thousandths
    if math.isnan(found.cosine):
        return "Nan", ZERO
    numbers[0] = 1.0 if found.cosine > 0.99999 else round(found.cosine, 6)
    return _reached(found.cosine, found.max_absolute), ""


def _payload(pairs: SlotPairs, side: int, place: dict[str, Any]) -> Array:
    if place["payload_segment"] is None:
        raise TrueupError(NOT_RECORDED)
    elements: Array = pairs.captures[side].payload(*place.values()).reshape(-1)
    return elements


def _reached(cosine: float, max_absolute: float) -> str:
    """Return Yes or No by the thresholds of att 2.0 and later."""
    poor = cosine < 0.99 and max_absolute > 0.001
    return "No" if poor or cosine < 0.9 or max_absolute > 1 else "Yes"


PLAIN, YELLOW, RED = 0, 1, 2


def colours(numbers: Mapping[str, Array], call: Array, is_input: Array, layout: Layout) -> Array:
    """Return `PLAIN`, `YELLOW` or `RED` for each row. ``numbers`` are columns of the layout, float64 ``(n,)``, NaN for what is no
    number, and as they are for NaN or infinite ones; ``call`` numbers each row's call, ascending from 0. Layouts of digests have
    no colours."""
    if layout == "digest":
        return np.zeros(len(call), np.int8)
    bad = np.zeros(len(call), bool)
    for name in ("NPU max", "NPU min"):
        bad |= ~np.isfinite(np.asarray(numbers[name])) & ~np.ma.getmaskarray(numbers[name])  # what was not recorded is masked
    largest = "MaxAbsErr" if layout == "tensor" else "Max diff"
    red = bad | (np.abs(_finite(numbers[largest], 0.0)) > 1e10)
    worse = _by_elements if layout == "tensor" else _by_statistics
    more_red, yellow = worse(numbers, call, is_input)
    red = red | (more_red & ~is_input)
    return np.asarray(np.where(red, RED, np.where(yellow & ~is_input, YELLOW, PLAIN)).astype(np.int8))


def _by_elements(numbers: Mapping[str, Array], call: Array, is_input: Array) -> tuple[Array, Array]:
    share, cosine = numbers["One Thousandth Err Ratio"], numbers["Cosine"]
    magnitude = np.log10(np.maximum(1.0, _finite(numbers["MaxAbsErr"], 0.0)))
    best = _largest(_finite(share, 0.0), call, is_input)
    own = _finite(share, 1.0)
    red = (best > 0.9) & (own < 0.6)
    grown = magnitude + _largest(-magnitude, call, is_input) >= 1
    turned = _largest(_finite(cosine, 0.0), call, is_input) - _finite(cosine, 1.0) > 0.1
    return red, grown | (best - own > 0.1) | turned


def _by_statistics(numbers: Mapping[str, Array], call: Array, is_input: Array) -> tuple[Array, Array]:
    share = np.abs(_finite(numbers["Max diff"], 0.0)) / np.maximum(0.01, np.abs(_finite(numbers["Bench max"], 0.0)))
    told = is_input & ~np.ma.getmaskarray(numbers["Max diff"])
    return share > 0.5, (share > 0.1) & (-_largest(-share, call, told) < 0.01)


def _largest(values: Array, call: Array, chosen: Array) -> Array:
    """Return, for each row, the largest value among the chosen rows of its call; -Inf where there is none."""
    found = np.full(int(call[-1]) + 1 if len(call) else 0, -np.inf)
    np.maximum.at(found, call[chosen], values[chosen])
    return found[call]


def _finite(values: Array, otherwise: float) -> Array:
    filled = np.ma.filled(values, np.nan)
    return np.where(np.isfinite(filled), filled, otherwise)


SHEET_ROWS = 1_048_575  # rows of a sheet below its headings; more go to another sheet (Excel's specifications and limits)
CELL = 32_767  # characters of a cell, likewise
COLOURS = {PLAIN: "", RED: "#FF0000", YELLOW: "#FFFF00"}
"""Fills of ptdbg_ascend 6.0."""
WIDTHS = {"NPU Name": 44, "Bench Name": 44, "Err_message": 40, "NPU_Stack_Info": 30}


def write_csv(result: Result, path: str | Path) -> Path:
    """Write a row per slot as CSV, UTF-8, with headings, every cell quoted; return the path. Raises TrueupError if the file
    cannot be written, or a capture is gone."""
    layout, rows = lines(result)
    return write_tables((made.table for made in rows), headings(layout), path)


def write_tables(tables: Iterable[pa.Table], names: Sequence[str], path: str | Path) -> Path:
    """Write the columns of such names of tables, one below the other, as CSV; raises TrueupError if it cannot be written."""
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
    """Write a row per slot as an Excel workbook, rows coloured as the legacy tool does, culprits bold; return the path. Raises
    TrueupError if xlsxwriter is not installed, the file cannot be written, or a capture is gone."""
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
    """Return the library that writes workbooks; raises TrueupError if it is not installed."""
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
