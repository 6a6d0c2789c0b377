"""The table that users of ptdbg and msprobe know: its columns, its verdict per row, its colours. One row per slot.

Three layouts, by what both captures kept (ptdbg_ascend 6.0, ``compare_result_*.xlsx``): real data, summary, md5. NPU is the
candidate, Bench the baseline. What was not recorded is ``N/A`` and never passes; calls of either side alone have rows too
(ptdbg leaves those of the benchmark out). The columns behind ``NPU_Stack_Info`` are Trueup's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.doors.report.highlight import Layout, colours
from trueup.doors.report.legacy_verdicts import ABSENT, TYPES, VERDICTS, compared, shapes
from trueup.doors.report.slot_pairs import Aligned, SlotPairs
from trueup.foundation.model import Result
from trueup.foundation.words.wording import clean, one_line, shorten

Array = np.ndarray[Any, Any]

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
    """Return the layout and the rows, many at a time, made as they are asked for.

    Args:
        result: of a comparison.
        named: name the slots of baseline and candidate; what neither names has no row.

    Raises:
        TrueupError: a capture is gone.
    """
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


def _encoded(column: Any) -> pa.DictionaryArray:
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole if pa.types.is_dictionary(whole.type) else pc.dictionary_encode(whole)


def _mapped(column: Any, change: Callable[[str], str]) -> pa.DictionaryArray:
    """Change each text of a column; what repeats is changed once."""
    encoded = _encoded(column)
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


@lru_cache(maxsize=1 << 16)
def text_cell(value: str) -> str:
    """Return text as a cell: no control characters, an apostrophe before what would begin a formula."""
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text
