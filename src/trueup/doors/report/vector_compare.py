"""The table of a vector comparison, ``result_{time}.csv``, as msaccucmp writes it and precision_tool reads it.

A row for each tensor that either run has. NPU (left) is the candidate, the ground truth the baseline. What was not measured is
``NaN``, with its reason in the last column; precision_tool skipped such rows without a word.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from trueup.comparison.result.cosines import Cosines, Dissimilar, Listing, SlotCosine
from trueup.doors.report.saving import replaced, text_cell
from trueup.doors.report.slot_pairs import Aligned, SlotPairs
from trueup.foundation.kernels.metrics import Msaccucmp
from trueup.foundation.model import CallKey, Result, TrueupError
from trueup.foundation.words.wording import call_name, one_line

COLUMNS = (
    "Index", "LeftOp", "RightOp", "TensorIndex", "CosineSimilarity", "MaxAbsoluteError", "AccumulatedRelativeError",
    "RelativeEuclideanDistance", "KullbackLeiblerDivergence", "StandardDeviation", "CompareFailReason",
)  # fmt: skip
ABSENT = "NaN"
READ = ("rank", "seq", "step", "phase", "scope", "op", "ordinal", "slot", "dtype", "digest", "numel",
        "payload_segment", "payload_key", "payload_view")  # fmt: skip
PLACE = ("rank", "payload_segment", "payload_key", "payload_view", "digest")
SIZE_LIMIT = 1 << 30
MOST_ROWS = 4_000_000
INPUTS = ("input", "param", "grad_output")
Row = dict[str, Any]


def write_vector_compare(result: Result, cosines: Cosines, directory: Path) -> Path:
    """Write ``result_{time}.csv`` into a directory, made if need be, and return its path. ``cosines``, of the same comparison,
    stand for tensors that were not kept. Raises TrueupError if it cannot be written, or a capture is gone."""
    target = directory / f"result_{datetime.now():%Y%m%d%H%M%S}.csv"
    pairs = SlotPairs(result)
    with replaced(target, "a file for the table") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        index = 0
        for slots in pairs:
            for row in _rows(slots, pairs, cosines):
                table.writerow([index, *map(_cell, row)])
                index += 1
    return target


def _rows(slots: Aligned, pairs: SlotPairs, cosines: Cosines) -> Iterator[list[Any]]:
    sides = [table.select(list(READ)).to_pylist() for table in (slots.baseline, slots.candidate)]
    last: tuple[int, int, dict[str, SlotCosine]] = (-1, -1, {})
    for before, after in zip(*sides, strict=True):
        left, right = (row if row["seq"] is not None else None for row in (after, before))
        known = left or right
        assert known is not None
        if known["slot"] is None or known["numel"] is None:
            continue  # an argument is no tensor
        side = "input" if known["slot"].startswith(INPUTS) else "output"
        name = f"{_name(known)}:{side}:{known['slot']}"
        head = [_name(left) if left else "*", _name(right) if right else "*", name]
        if left is None or right is None:
            yield [*head, *[ABSENT] * 6, f"only in the {'baseline' if left is None else 'candidate'}"]
            continue
        if left["digest"] is not None and (left["digest"], left["dtype"]) == (right["digest"], right["dtype"]):
            yield [*head, 1.0, 0.0, 0.0, 0.0, 0.0, ABSENT, ""]
            continue
        if left["payload_segment"] is not None and right["payload_segment"] is not None:
            yield [*head, *_measured(pairs, right, left)]
            continue
        if last[:2] != (left["rank"], left["seq"]):
            last = left["rank"], left["seq"], {slot.slot: slot for slot in cosines.of(left["seq"], left["rank"])}
        found = last[2].get(left["slot"])
        told = ABSENT if found is None or math.isnan(found.cosine) else found.cosine
        why = "estimated from sketches; --detail tensor keeps the rest" if found and found.is_estimate else "no elements were kept"
        yield [*head, told, *[ABSENT] * 5, found.reason if found and found.reason else why]


def _measured(pairs: SlotPairs, right: Row, left: Row) -> list[Any]:
    try:
        arrays = [pairs.captures[side].payload(*(row[name] for name in PLACE)).reshape(-1) for side, row in ((0, right), (1, left))]
        if arrays[0].shape != arrays[1].shape:
            return [*[ABSENT] * 6, "the shapes differ"]
        if not arrays[0].size:
            return [*[ABSENT] * 6, "the tensors are empty"]
        found = Msaccucmp.of(arrays[0], arrays[1])
    except (TrueupError, TypeError, ValueError) as error:
        return [*[ABSENT] * 6, one_line(str(error))]
    (mean, spread), (my_mean, my_spread) = found.standard_deviation
    told = f"({my_mean:.3f};{my_spread:.3f}),({mean:.3f};{spread:.3f})"
    numbers = (found.cosine, found.max_absolute, found.accumulated_relative, found.relative_euclidean, found.kullback_leibler)
    return [*numbers, told, "a single element: its cosine is the sign" if arrays[0].size == 1 else ""]


def _name(row: Row) -> str:
    place = ".".join(one_line(str(row[name])) for name in ("phase", "step", "rank", "seq"))
    return f"{call_name(row['scope'] or '', row['op'] or '', row['ordinal'] or 0)}@{place}"


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else ABSENT if math.isnan(value) else f"{value}"
    return text_cell(value) if isinstance(value, str) else value


def read_vector_compare(path: Path, limit: float, count: int) -> Listing:
    """Return such a table's operators with an output cosine at or below ``limit``; raises TrueupError if it is unreadable or
    another."""
    try:
        if path.stat().st_size > SIZE_LIMIT:
            raise TrueupError(f"{path} is not read: expected at most {SIZE_LIMIT:,} bytes, got {path.stat().st_size:,}")
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.DictReader(file)
            lacking = {"CosineSimilarity", "TensorIndex"} - set(rows.fieldnames or ())
            if lacking:
                raise TrueupError(
                    f"{path} is no table of a vector comparison.\n  expected: the columns CosineSimilarity and TensorIndex\n"
                    f"  got:      {one_line(', '.join(rows.fieldnames or ()))}\n  next:     name a result_*.csv"
                )
            return _listing(rows, limit, count)
    except OSError as error:
        raise TrueupError(f"{path} cannot be read: {error.strerror}.\n  next:     name a result_*.csv") from None
    except csv.Error as error:
        raise TrueupError(f"{path} cannot be read: {error}.\n  next:     write it again") from None


def _listing(rows: Iterator[Row], limit: float, count: int) -> Listing:
    ops: dict[tuple[str, str], list[SlotCosine]] = {}
    for number, row in enumerate(rows):
        if number >= MOST_ROWS:
            raise TrueupError(f"the table has more than {MOST_ROWS:,} rows: split it")
        name = row.get("TensorIndex") or ""
        parts = name.rsplit(":", 2)
        slot, is_output = parts[-1], len(parts) == 3 and parts[1] == "output"
        ops.setdefault((row.get("LeftOp") or "", row.get("RightOp") or ""), []).append(_slot(row, slot, is_output=is_output))
    listed: list[Dissimilar] = []
    total = unknown = compared = 0
    why = ""
    for number, ((left, right), slots) in enumerate(ops.items()):
        outputs = [slot for slot in slots if slot.is_output]
        if any(slot.cosine <= limit for slot in outputs):
            total += 1
            if len(listed) < count:
                listed.append(Dissimilar(CallKey(0, 0, "", "", "", "", number), (-1, -1), tuple(slots), (left, right)))
        elif any(math.isnan(slot.cosine) for slot in outputs):
            unknown += 1
            why = why or next((slot.reason for slot in outputs if slot.reason), "the table has no number")
            continue
        compared += bool(outputs)
    return Listing(limit, tuple(listed), total, compared, unknown, why, False)


def _slot(row: Row, slot: str, *, is_output: bool) -> SlotCosine:
    def value(name: str) -> float:
        try:
            return float(row.get(name) or "nan")
        except ValueError:  # ``*``: it was not compared
            return math.nan

    name = f"{'output' if is_output else 'input'}.{slot}" if slot.isdecimal() else slot
    reason = row.get("CompareFailReason") or ""
    return SlotCosine(name, value("CosineSimilarity"), False, is_output, value("MaxAbsoluteError"), reason)
