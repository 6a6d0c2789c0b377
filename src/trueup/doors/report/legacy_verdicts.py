"""What a row of the legacy table says of two tensors: measures, differences or digests, the old verdict and its reason."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.doors.report.highlight import Layout
from trueup.doors.report.reductions import COUNTS, REDUCED, reduced
from trueup.doors.report.slot_pairs import Aligned, SlotPairs
from trueup.foundation.kernels.metrics import Metrics
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import one_line, shorten

Array = np.ndarray[Any, Any]

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
    columns = _statistics(slots) if layout != "digest" else _digests(slots)
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
    return _with(known, [f"[{text}]" for text in known.dictionary.to_pylist()])


def _with(column: pa.DictionaryArray, dictionary: list[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(column.indices, pa.array(dictionary, pa.string()))


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


def _statistics(slots: Aligned) -> dict[str, pa.Array]:
    values = [_masked(column) for table in (slots.candidate, slots.baseline) for column in _reduced(table)]
    return dict(zip(STATISTICS, values, strict=True))


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
