"""The table that users of ptdbg and msprobe know: its columns, its verdict per row, its colours. One row per slot.

Three layouts, by what both captures kept (ptdbg_ascend 6.0, ``compare_result_*.xlsx``): real data, summary, md5. NPU is the
candidate, Bench the baseline. What was not recorded is ``N/A`` and never passes; calls of either side alone have rows too
(ptdbg leaves those of the benchmark out). The columns behind ``NPU_Stack_Info`` are Trueup's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from trueup.model import Result, TrueupError
from trueup.report.highlight import Cell, Cells, Layout, Line, coloured
from trueup.report.slot_pairs import CallPair, Record, SlotPair, SlotPairs
from trueup.report.wording import clean, one_line, shorten
from trueup.verdict.metrics import Metrics

ABSENT = "N/A"
NUMBERS = ("max", "min", "mean", "l2")
TYPES = ("NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape")
STATISTICS = tuple(f"{side} {name}" for side in ("NPU", "Bench") for name in ("max", "min", "mean", "l2norm"))
MEASURES = ("Cosine", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")
DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
OURS = ("Rank", "Step", "Phase", "Level", "Trueup State", "Trueup Role", "Trueup Rel. L2", "Trueup Expected", "Trueup Rule")

COLUMNS: dict[Layout, tuple[str, ...]] = {
    "tensor": (*TYPES, *MEASURES, *STATISTICS, "Accuracy Reached or Not", "Err_message"),
    "stats": (*TYPES, *DIFFERENCES, *STATISTICS, "Result", "Err_message"),
    "digest": (*TYPES, "NPU MD5", "BENCH MD5", "Result", "Err_message"),
}
"""Columns by layout, in the order of ptdbg_ascend 6.0 (NPU MD5 holds Trueup's xxh3 digest)."""

NO_BENCH, NO_NPU = "No bench data matched.", "No NPU data matched."
SHAPES = "Shape of NPU and bench Tensor do not match. Skipped."
SCALAR = "This is type of scalar data, can not compare."
EMPTY = "This is empty data, can not compare."
NOT_RECORDED = "Not recorded on both sides, can not compare."
POSITIONS = "The position of inf or nan in NPU and bench Tensor do not match."
ZERO = "Cannot compare by Cosine Similarity, All the data is Zero in one dump data."
STACK_WIDTH = 4000


def layout_of(pairs: SlotPairs) -> Layout:
    """Choose the layout: by the less of what the two captures kept."""
    kept = [str(capture.root.get("detail", "stats")) for capture in pairs.captures]
    return "digest" if "digest" in kept else "stats" if "stats" in kept else "tensor"


def headings(layout: Layout) -> list[str]:
    """Return the titles of all columns."""
    return ["NPU Name", "Bench Name", *COLUMNS[layout], "NPU_Stack_Info", *OURS]


def lines(result: Result, *, colours: bool = True) -> tuple[Layout, Iterator[Line]]:
    """Return the layout and the rows, made as they are asked for; without ``colours`` all rows are plain.

    Raises:
        TrueupError: a capture is gone.
    """
    pairs = SlotPairs(result)
    layout = layout_of(pairs)
    made = (_call_lines(call, layout, pairs) for call in pairs)
    return layout, (line for call in made for line in (coloured(call, layout) if colours else call))


def _call_lines(call: CallPair, layout: Layout, pairs: SlotPairs) -> list[Line]:
    made, ours, stack = [], _ours(call), _stack(call.stack)
    for n, slot in enumerate(call.slots):
        there = slot.there
        cells: Cells = {
            "NPU Name": _name(slot.candidate), "Bench Name": _name(slot.baseline),
            **_types(slot), **_compared(slot, layout, pairs),
            "NPU_Stack_Info": stack if n == 0 else "",
            "Rank": there["rank"], "Step": there["step"], "Phase": there["phase"], "Level": there["level"],
            **ours,
        }  # fmt: skip
        role = call.judged["role"] if call.judged else ""
        made.append(Line(cells, is_culprit=role == "culprit", is_input=there["slot"].startswith(("input", "param", "grad_output"))))
    return made


@lru_cache(maxsize=1 << 12)
def _stack(frames: tuple[str, ...]) -> str:
    return shorten("\n".join(map(one_line, frames)), STACK_WIDTH)


def _name(record: Record | None) -> str:
    """Name a slot as the legacy tables do: scope and operator, number, direction, slot."""
    if record is None:
        return ABSENT
    scope = f"{record['scope']}/" if record["scope"] else ""
    return one_line(f"{scope}{record['op']}_{record['ordinal']}_{record['phase']}_{record['slot']}")


def _ours(call: CallPair) -> Cells:
    if call.judged is None:
        lacking: Cells = dict.fromkeys(OURS[4:], "")
        return lacking | {"Trueup State": f"only in the {call.side}"}
    judged = call.judged
    return {
        "Trueup State": judged["state"], "Trueup Role": judged["role"] or "", "Trueup Rel. L2": _number(judged["error_out"]),
        "Trueup Expected": _number(judged["expected"]), "Trueup Rule": judged["rule"] or "",
    }  # fmt: skip


def _types(slot: SlotPair) -> Cells:
    sides = (slot.candidate, slot.baseline)
    dtypes = [ABSENT if side is None or side["dtype"] is None else one_line(side["dtype"]) for side in sides]
    shapes = [ABSENT if side is None or side["shape"] is None else str(side["shape"]) for side in sides]
    return dict(zip(TYPES, (*dtypes, *shapes), strict=True))


def _compared(slot: SlotPair, layout: Layout, pairs: SlotPairs) -> Cells:
    cells: Cells = dict.fromkeys(COLUMNS[layout][len(TYPES) :], ABSENT)
    cells |= _statistics(slot) if layout != "digest" else {}
    verdict = COLUMNS[layout][-2]
    reason = _incomparable(slot)
    if layout == "digest":
        cells |= _digests(slot)
    if reason:
        return cells | {verdict: "Unmatched" if reason in (NO_BENCH, NO_NPU, SHAPES) else ABSENT, "Err_message": reason}
    cells["Err_message"] = ""
    if layout == "tensor":
        return cells | _measured(slot, pairs)
    return cells | (_differences(slot) if layout == "stats" else _same_digest(slot))


def _incomparable(slot: SlotPair) -> str:
    """Say why there is nothing to compare, or nothing."""
    if slot.baseline is None or slot.candidate is None:
        return NO_BENCH if slot.baseline is None else NO_NPU
    if slot.there["slot"] == "arguments":
        same = slot.baseline["value"] == slot.candidate["value"]
        return SCALAR if same else f"{SCALAR} They differ: {_short(slot.candidate['value'])} and {_short(slot.baseline['value'])}"
    if list(slot.baseline["shape"] or ()) != list(slot.candidate["shape"] or ()):
        return SHAPES
    return EMPTY if slot.candidate["numel"] == 0 else ""


def _short(value: Any) -> str:
    return shorten(one_line(str(value)), 120)


def _statistics(slot: SlotPair) -> Cells:
    values = [_number(side[name]) if side else ABSENT for side in (slot.candidate, slot.baseline) for name in NUMBERS]
    return dict(zip(STATISTICS, values, strict=True))


def _digests(slot: SlotPair) -> Cells:
    sides = [side["digest"] if side and side["digest"] else ABSENT for side in (slot.candidate, slot.baseline)]
    return dict(zip(("NPU MD5", "BENCH MD5"), sides, strict=True))


def _is_equal(slot: SlotPair) -> bool:
    """Tell whether the bytes are known to be equal."""
    before, after = slot.baseline or {}, slot.candidate or {}
    return before.get("digest") is not None and all(before[name] == after[name] for name in ("digest", "dtype"))


def _measured(slot: SlotPair, pairs: SlotPairs) -> Cells:
    verdict = COLUMNS["tensor"][-2]
    if _is_equal(slot):
        return dict(zip(MEASURES, (1.0, 0.0, 0.0, 1.0, 1.0), strict=True)) | {verdict: "Yes"}
    tensors = [_payload(pairs, n, side) for n, side in enumerate((slot.baseline, slot.candidate))]
    if isinstance(tensors[0], str) or isinstance(tensors[1], str):
        return {verdict: ABSENT, "Err_message": next(text for text in tensors if isinstance(text, str))}
    try:
        found = Metrics.of(*tensors)
    except ValueError:
        return {verdict: "Unmatched", "Err_message": SHAPES}
    except TypeError as error:
        return {verdict: ABSENT, "Err_message": one_line(str(error))}
    if found.disagreeing:
        return {verdict: "No", "Err_message": POSITIONS}
    values = found.cosine, found.max_absolute, found.max_relative, found.thousandth, found.five_thousandths
    cells: Cells = dict(zip(MEASURES, map(_number, values), strict=True))
    if math.isnan(found.cosine):
        return cells | {verdict: "Nan", "Err_message": ZERO}
    cells["Cosine"] = 1.0 if found.cosine > 0.99999 else round(found.cosine, 6)
    return cells | {verdict: _reached(found.cosine, found.max_absolute)}


def _payload(pairs: SlotPairs, side: int, record: Record | None) -> Any:
    """Return the elements, or why they cannot be had."""
    if record is None or record["payload_segment"] is None:
        return NOT_RECORDED
    try:
        place = record["payload_segment"], record["payload_key"], record["payload_view"]
        return pairs.captures[side].payload(record["rank"], *place).reshape(-1)
    except TrueupError as error:
        return one_line(str(error))


def _reached(cosine: float, max_absolute: float) -> str:
    """Return Yes or No by the thresholds of att 2.0 and later."""
    poor = cosine < 0.99 and max_absolute > 0.001
    return "No" if poor or cosine < 0.9 or max_absolute > 1 else "Yes"


def _differences(slot: SlotPair) -> Cells:
    assert slot.baseline is not None
    assert slot.candidate is not None
    sides = [(slot.candidate[name], slot.baseline[name]) for name in NUMBERS]
    if any(value is None for pair in sides for value in pair):
        return {"Result": "" if _is_equal(slot) else ABSENT, "Err_message": "" if _is_equal(slot) else NOT_RECORDED}
    apart = [after - before for after, before in sides]
    cells: Cells = dict(zip(DIFFERENCES, map(_number, apart), strict=True))
    if any(math.isnan(difference) for difference in apart):
        return cells | {"Result": "Nan"}
    warned = any(abs(d) / (max(abs(a), abs(b)) + 1e-10) > 0.5 for d, (a, b) in zip(apart, sides, strict=True))
    return cells | {"Result": "Warning" if warned else ""}


def _same_digest(slot: SlotPair) -> Cells:
    before, after = slot.baseline or {}, slot.candidate or {}
    if before.get("digest") is None or after.get("digest") is None:
        return {"Result": ABSENT, "Err_message": NOT_RECORDED}
    return {"Result": "Pass" if _is_equal(slot) else "Different"}


def _number(value: float | None) -> Cell:
    """Return a number, or text for what is none: not recorded, NaN, infinite."""
    if value is None:
        return ABSENT
    if math.isfinite(value):
        return float(value)
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def text_cell(value: Cell) -> Cell:
    """Return a cell that a spreadsheet takes for what it is: text that would begin a formula gets an apostrophe before it."""
    return _text_cell(value) if isinstance(value, str) else value


@lru_cache(maxsize=1 << 16)  # names, dtypes, shapes and rules repeat themselves
def _text_cell(value: str) -> str:
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text
