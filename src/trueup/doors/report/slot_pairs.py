"""Every slot of every call of both captures, side by side in columns, read again in bounded memory.

A result's table of calls says which calls are counterparts; calls in no pair exist on one side only and come too. Statistics are
as the old tools show them: they reduce all elements, where a record leaves out what is not finite.

The table of a vector comparison, ``result_{time}.csv``, is as msaccucmp writes it and precision_tool reads it: a row for each
tensor that either run has. NPU (left) is the candidate, the ground truth the baseline. What was not measured is ``NaN``, with its
reason in the last column; precision_tool skipped such rows without a word.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.result.cosines import Cosines, Dissimilar, Listing, SlotCosine
from trueup.doors.report.saving import replaced, text_cell
from trueup.foundation.kernels.metrics import Msaccucmp
from trueup.foundation.model import CallKey, Result, TrueupError
from trueup.foundation.store import open_capture
from trueup.foundation.store.columns import distinct
from trueup.foundation.words.wording import call_name, one_line

Array = np.ndarray[Any, Any]
Place = tuple[int, int]

ROWS = 1_000_000
"""Slots of a side that are read at a time: some 200 MB. Small steps are read together, a larger step is read in portions."""
MADE = 30_000  # slots that are handed out at a time: what is made of them stays in the processor's caches
KEYS = ("rank", "step", "seq")
COLUMNS = (
    *KEYS, "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "numel", "min", "max", "mean", "l2",
    "n_nan", "n_posinf", "n_neginf", "digest", "payload_segment", "payload_key", "payload_view", "value", "site",
)  # fmt: skip
JUDGED = ("state", "role", "rule", "error_out", "expected")

VECTOR_COLUMNS = (
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


@dataclass(frozen=True, slots=True)
class Aligned:
    """Slots side by side: row ``i`` of both tables is one slot; a side that lacks it has nulls there."""

    baseline: pa.Table
    candidate: pa.Table
    in_baseline: Array
    in_candidate: Array
    call: Array  # number of the call that the slot belongs to, ascending from 0
    judged: pa.Table  # what the comparison said of that call: `JUDGED`, null where the call exists on one side only
    stack: pa.DictionaryArray  # frames of the call, innermost first, on lines of their own; at its first slot, else empty

    def __len__(self) -> int:
        return len(self.call)

    def shared(self, name: str) -> pa.Array:
        """Return a column that both sides have in common: the candidate's, else the baseline's."""
        there, other = (table[name].combine_chunks() for table in (self.candidate, self.baseline))
        return pc.coalesce(pc.cast(there, _plain(there.type)), pc.cast(other, _plain(other.type)))


class SlotPairs:
    """All calls of a result as the candidate ran them, the baseline's own where they ran; raises TrueupError without captures."""

    def __init__(self, result: Result) -> None:
        self.captures = open_capture(result.baseline.path), open_capture(result.candidate.path)
        compared = pc.unique(result.calls["level"]).to_pylist()
        self._levels = compared or sorted({level for c in self.captures for level in c.levels})
        self._calls = result.matched.select(["rank", "step", "seq_baseline", "seq_candidate", *JUDGED])

    def __iter__(self) -> Iterator[Aligned]:
        order = np.lexsort([self._calls[name].to_numpy() for name in ("rank", "step")])
        calls = self._calls.take(pa.array(order))
        steps, ranks = (calls[name].to_numpy().astype(np.int64) for name in ("step", "rank"))
        for places in self._batches():
            low, high = (_lower(steps, ranks, places[0]), _lower(steps, ranks, (places[-1][0], places[-1][1] + 1)))
            yield from self._batch(places, calls.slice(low, high - low))

    def _batches(self) -> Iterator[list[Place]]:
        """Yield ``(step, rank)``, in order, as many at once as may be read at a time."""
        sizes = [capture.sizes for capture in self.captures]
        places = sorted({(step, rank) for held in sizes for rank, step in held})
        batch: list[Place] = []
        rows = 0
        for step, rank in places:
            size = max(held.get((rank, step), 0) for held in sizes)
            if batch and rows + size > ROWS:
                yield batch
                batch, rows = [], 0
            batch.append((step, rank))
            rows += size
        if batch:
            yield batch

    def _batch(self, places: list[Place], calls: pa.Table) -> Iterator[Aligned]:
        keys = [_Keys(self._read(side, places, KEYS)) for side in (0, 1)]
        calls_keys = [_Keys(calls.rename_columns({f"seq_{name}": "seq"})) for name in ("baseline", "candidate")]
        numbers = _Numbering(places, [*keys, *calls_keys])
        before, after = (distinct(found[found >= 0]) for found in map(numbers.of, keys))
        entries, judged = _in_order(np.stack([numbers.of(found) for found in calls_keys], axis=1), before, after, numbers.width)
        per_call = max(1, max(len(found.seq) for found in keys) // max(1, len(entries)))
        at_once = max(1, ROWS // per_call)
        for start in range(0, len(entries), at_once):
            chunk = slice(start, start + at_once)
            seqs = None if len(entries) <= at_once else [numbers.seqs(entries[chunk, side]) for side in (0, 1)]
            tables = [self._read(side, places, COLUMNS, None if seqs is None else seqs[side]) for side in (0, 1)]
            yield from self._aligned(tables, [numbers.of(_Keys(t)) for t in tables], entries[chunk], calls, judged[chunk])

    def _read(self, side: int, places: list[Place], columns: tuple[str, ...], seqs: Array | None = None) -> pa.Table:
        steps, ranks = ({place[k] for place in places} for k in (0, 1))
        table = self.captures[side].records(list(columns), rank=ranks, step=steps, level=self._levels, seq=seqs)
        return table.combine_chunks()

    def _aligned(
        self, tables: list[pa.Table], keys: list[Array], entries: Array, calls: pa.Table, judged: Array
    ) -> Iterator[Aligned]:
        slots, width = _slot_numbers(tables)
        before, after = (_by_call(keys[side], entries[:, side], slots[side], width) for side in (0, 1))
        call, first, second = _side_by_side(before, after, width)
        begins = np.flatnonzero(np.diff(call, prepend=-1))
        said = calls.select(list(JUDGED))
        start = 0
        while start < len(call):
            following = np.searchsorted(begins, start + MADE)  # no call is torn apart
            stop = int(begins[following]) if following < len(begins) else len(call)
            part = slice(start, stop)
            sides = tables[0].take(_indices(first[part])), tables[1].take(_indices(second[part]))
            numbers = call[part] - call[start]
            told, stacks = said.take(_indices(judged[call[part]])), self._stacks(*sides, numbers)
            yield Aligned(*sides, first[part] >= 0, second[part] >= 0, numbers, told, stacks)
            start = stop

    def _stacks(self, before: pa.Table, after: pa.Table, call: Array) -> pa.DictionaryArray:
        begins = np.flatnonzero(np.diff(call, prepend=-1))
        codes = np.zeros(len(call), np.int32)
        texts = {"": 0}
        rows = zip(*(t[name].take(pa.array(begins)).to_pylist() for t in (after, before) for name in ("rank", "site")), strict=True)
        for at, (rank, site, other_rank, other_site) in zip(begins.tolist(), rows, strict=True):
            capture, found = (self.captures[1], (rank, site)) if rank is not None else (self.captures[0], (other_rank, other_site))
            frames = capture.sites(found[0]).get(found[1], ((), None))[0] if found[1] is not None else ()
            codes[at] = texts.setdefault("\n".join(frames), len(texts))
        return pa.DictionaryArray.from_arrays(codes, list(texts))


class _Keys:
    def __init__(self, table: pa.Table) -> None:
        self.step, self.rank, self.seq = (table[name].to_numpy().astype(np.int64) for name in ("step", "rank", "seq"))


class _Numbering:
    """Numbers for calls of some steps and ranks, ascending in order of step, rank and seq."""

    def __init__(self, places: list[Place], keys: list[_Keys]) -> None:
        self._steps, self._ranks = (distinct(np.array([place[k] for place in places])) for k in (0, 1))
        self._seqs = distinct(np.concatenate([key.seq for key in keys]))
        self.width = len(self._seqs)  # numbers of one step and rank
        known = np.full((len(self._steps), len(self._ranks)), -1, np.int64)
        for n, (step, rank) in enumerate(places):
            known[np.searchsorted(self._steps, step), np.searchsorted(self._ranks, rank)] = n
        self._known = known

    def of(self, keys: _Keys) -> Array:
        """Return ``(n,)``; -1 for what is not of these places."""
        place = self._known[np.searchsorted(self._steps, keys.step), np.searchsorted(self._ranks, keys.rank)]
        return np.where(place < 0, -1, place * self.width + np.searchsorted(self._seqs, keys.seq))

    def seqs(self, numbers: Array) -> Array:
        return np.asarray(self._seqs[distinct(numbers[numbers >= 0] % max(1, self.width))])


def _in_order(pairs: Array, baseline: Array, candidate: Array, width: int) -> tuple[Array, Array]:
    """Return ``(n, 2)``, all calls, -1 where a side lacks one, by the candidate's order; and the row of ``pairs``, or -1. A call
    of the baseline alone stands behind the counterpart of the last matched call before it."""
    only_before, only_after = _without(baseline, pairs[:, 0]), _without(candidate, pairs[:, 1])
    matched = pairs[np.argsort(pairs[:, 0])]
    behind = only_before // max(1, width) * width - 1  # the end of the step and rank before
    if len(matched):
        at = np.searchsorted(matched[:, 0], only_before) - 1
        behind = np.where(at >= 0, np.maximum(behind, matched[np.maximum(at, 0), 1]), behind)
    alone = np.full(len(only_before) + len(only_after), -1)
    entries = np.concatenate([
        pairs,
        np.stack([alone[: len(only_after)], only_after], axis=1),
        np.stack([only_before, alone[: len(only_before)]], axis=1),
    ]).astype(np.int64)  # fmt: skip
    place = np.concatenate([pairs[:, 1], only_after, behind])
    later = np.concatenate([np.zeros(len(pairs) + len(only_after), np.int64), only_before + 1])
    order = np.lexsort((later, place))
    return entries[order], np.concatenate([np.arange(len(pairs)), alone])[order]


def _slot_numbers(tables: list[pa.Table]) -> tuple[list[Array], int]:
    known: dict[str | None, int] = {}
    found = []
    for table in tables:
        column = table["slot"].combine_chunks()
        column = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        names = [*column.dictionary.to_pylist(), None]
        numbers = np.array([known.setdefault(name, len(known)) for name in names])
        found.append(numbers[column.indices.fill_null(len(names) - 1).to_numpy(zero_copy_only=False)])
    return found, max(1, len(known))


def _by_call(keys: Array, calls: Array, slots: Array, width: int) -> tuple[Array, Array]:
    """Return the rows of the calls that are asked for, by call, and ``call * width + slot`` of each; a slot counts once."""
    order = np.argsort(calls)
    at = np.minimum(np.searchsorted(calls[order], keys), len(order) - 1)
    position = order[at]
    row = np.flatnonzero((keys >= 0) & (calls[position] == keys))
    row = row[np.argsort(position[row], kind="stable")]
    number = position[row] * width + slots[row]
    order = np.argsort(number, kind="stable")
    once = np.sort(order[np.diff(number[order], prepend=-1) != 0])
    return row[once], number[once]


def _side_by_side(before: tuple[Array, Array], after: tuple[Array, Array], width: int) -> tuple[Array, Array, Array]:
    """Return the call of each slot and its row on either side, -1 where there is none; the candidate's slots come first."""
    (row_before, slot_before), (row_after, slot_after) = before, after
    order = np.argsort(slot_before)
    at = np.minimum(np.searchsorted(slot_before[order], slot_after), max(0, len(order) - 1))
    other, lacking = np.full(len(slot_after), -1), np.ones(len(slot_before), bool)
    if len(order):
        found = order[at]
        other = np.where(slot_before[found] == slot_after, row_before[found], -1)
        lacking[found[slot_before[found] == slot_after]] = False
    call = np.concatenate([slot_after, slot_before[lacking]]) // width
    first = np.concatenate([other, row_before[lacking]])
    second = np.concatenate([row_after, np.full(lacking.sum(), -1)])
    placed = np.argsort(call, kind="stable")
    return call[placed], first[placed], second[placed]


def _without(numbers: Array, known: Array) -> Array:
    """Return the numbers, ascending, that are not among the known ones."""
    there = np.zeros(len(numbers) + 1, bool)
    at = np.searchsorted(numbers, known)
    there[at[np.append(numbers, -1)[at] == known]] = True
    return np.asarray(numbers[~there[:-1]])


def _indices(at: Array) -> pa.Array:
    return pa.array(at, mask=at < 0)


def _lower(steps: Array, ranks: Array, place: Place) -> int:
    """Return how many of the sorted rows come before a place."""
    step, rank = place
    low, high = np.searchsorted(steps, [step, step + 1])
    return int(low + np.searchsorted(ranks[low:high], rank))


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


REDUCED = ("max", "min", "mean", "l2")
COUNTS = ("n_nan", "n_posinf", "n_neginf")


def reduced(numbers: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return max, min, mean and l2 norm, ``(4,)`` or ``(4, n)`` in the order of `REDUCED`, as PyTorch's reductions give them: one
    NaN makes all of them NaN, Inf stays. ``numbers`` are `REDUCED` (of the finite elements, NaN where there are none) and
    `COUNTS` of records, float64 ``()`` or ``(n,)``."""
    highest, lowest, mean, norm = (np.asarray(numbers[name], np.float64) for name in REDUCED)
    has_nan, above, below = (np.asarray(numbers[name], np.float64) > 0 for name in COUNTS)
    highest = np.where(above, np.inf, np.where(below & ~np.isfinite(highest), -np.inf, highest))
    lowest = np.where(below, -np.inf, np.where(above & ~np.isfinite(lowest), np.inf, lowest))
    mean = np.where(above & below, np.nan, np.where(above, np.inf, np.where(below, -np.inf, mean)))
    norm = np.where(above | below, np.inf, norm)
    return np.where(has_nan, np.nan, np.stack([highest, lowest, mean, norm]))


def write_vector_compare(result: Result, cosines: Cosines, directory: Path) -> Path:
    """Write ``result_{time}.csv`` into a directory, made if need be, and return its path. ``cosines``, of the same comparison,
    stand for tensors that were not kept. Raises TrueupError if it cannot be written, or a capture is gone."""
    target = directory / f"result_{datetime.now():%Y%m%d%H%M%S}.csv"
    pairs = SlotPairs(result)
    with replaced(target, "a file for the table") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(VECTOR_COLUMNS)
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
