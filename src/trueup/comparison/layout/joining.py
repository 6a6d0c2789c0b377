"""One step of all ranks as the records of one process that holds all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.layout.calls import LEVELS, Call, Calls, Key, calls_of, plain
from trueup.comparison.layout.described import part_in
from trueup.comparison.layout.geometry import Geometry
from trueup.comparison.layout.inferring import Apart, Slot, Told, Ways, way_along
from trueup.comparison.layout.pieces import Array, Piece, Statistics, Way, put_together, way_in
from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import NUMBERS, PACKED
from trueup.foundation.store import Capture, table

JOINED = "joined"
"""Name of the segment that bytes put together lie in; no file has it."""


ENOUGH = 64
"""Elements of a mask that are the same on two ranks: by chance that has a probability of 2**-64."""
RARE = 0.02
"""Part of a mask that is kept, or dropped, below which two masks are much alike whatever drew them."""

MISFIT = "misfit"  # kind of `Apart`: pieces of sizes that do not make a whole


@dataclass
class Step:
    """A joined step: its records, its slots as pieces by name, and what ranks did not agree on."""

    records: pa.Table
    slots: dict[tuple[Key, str], Piece]
    apart: list[Apart]
    ways: dict[tuple[Key, str], Ways]
    alone: int  # calls that not all ranks make
    loads: dict[str, Callable[[], Array]] = field(default_factory=dict)  # by payload key
    cut: dict[tuple[Key, str], tuple[Way, list[Piece]]] = field(default_factory=dict)  # weights cut along one axis, rank by rank


def join(
    capture: Capture, geometry: Geometry, step: int, data: frozenset[str], other: Mapping[tuple[Key, str], Piece],
    declared: Callable[[Key, str, str], Way | None], earlier: dict[int, tuple[int, str] | None],
) -> Step:  # fmt: skip
    """Join the ranks of a step. ``data``: axes that cut the data; ``other``: slots of the other run's same step, whole;
    ``earlier``: who made what left-out calls of earlier steps wrote, which this step adds to."""
    return _Joining(
        capture, geometry, Told(step, {axis: geometry.size(axis) for axis in geometry.axes}, data, other, declared)
    ).done(earlier)


class _Joining:
    def __init__(self, capture: Capture, geometry: Geometry, told: Told) -> None:
        self._capture, self._geometry, self._told = capture, geometry, told
        self._ranks = sorted(geometry.coordinates)
        classes = {key[2]: key[3] for key, _ in told.other if key[1] == "module"} or None
        self._calls: dict[int, Calls] = {
            rank: calls_of(capture.records(rank=rank, step=told.step, level=LEVELS), classes) for rank in self._ranks
        }
        self._first = self._calls[self._ranks[0]]
        self._loads: dict[str, Callable[[], Array]] = {}
        self._cut: dict[tuple[Key, str], tuple[Way, list[Piece]]] = {}
        self._reduced: dict[tuple[str | None, ...], tuple[int, str]] = {}
        self._done: dict[Any, tuple[Piece, dict[str, Any]]] = {}

    def done(self, earlier: dict[int, tuple[int, str] | None]) -> Step:
        calls = [call for key, call in self._first.kept.items() if all(key in its.kept for its in self._calls.values())]
        common = {call.key for call in calls}
        alone = sum(key not in common for its in self._calls.values() for key in its.kept)
        self._know_placed(calls)
        self._know_reduced(calls)
        # The gradients that an optimizer is given are recorded where several processes reduce them, and by nobody else.
        silent = {call.key for call in calls if call.key[0] == "optimizer" and call.key[3].startswith("torch.optim.")}
        rows: list[dict[str, Any]] = []
        slots: dict[tuple[Key, str], Piece] = {}
        seqs = {call.seq for call in calls if call.key not in silent}
        for call in calls:
            for name, at in call.rows.items():
                row = dict(self._first.rows[at])
                if name == "arguments" and call.key not in silent:
                    rows.append(row | self._named(call, name, row, seqs, earlier))
                    continue
                if not all(name in self._calls[rank].kept[call.key].rows for rank in self._ranks):
                    continue
                piece, told = self._slot(call, name, row)
                if piece is not None:
                    slots[call.key, name] = piece
                sketch = {"sketch": None if piece is None else piece.sketch}
                if call.key not in silent:
                    rows.append(row | self._named(call, name, row, seqs, earlier) | sketch | told)
        earlier |= {seq: made for (seq, _), made in self._first.made.items()}
        return Step(_records(rows), slots, self._told.apart, self._told.ways, alone, self._loads, self._cut)

    # ---------------------------------------------------------------- names
    def _named(
        self, call: Call, name: str, row: dict[str, Any], seqs: set[int], earlier: dict[int, tuple[int, str] | None]
    ) -> dict[str, Any]:
        phase, level, scope, op, ordinal = call.key
        made = row["producer_seq"], row["producer_slot"]
        for _ in range(64):  # left-out calls in a row
            if made[0] is None or made[0] in seqs:
                break
            if made in self._first.made:
                made = self._first.made[made] or (None, None)
            elif made[0] in self._first.outer or made[0] in self._first.keys:
                made = (None, None)
            elif made[0] in earlier:
                made = earlier[made[0]] or (None, None)
            else:
                break  # of an earlier step
        if made[0] is None and phase == "optimizer":
            made = self._reduced.get(self._digests(call.key, name), made)
        forward = row["forward_seq"] if row["forward_seq"] in seqs or row["forward_seq"] not in self._first.outer else None
        return {
            "rank": 0, "parent": self._first.around(call.parent), "phase": phase, "level": level, "scope": scope, "op": op,
            "ordinal": ordinal, "slot": name, "producer_seq": made[0],
            "producer_slot": None if made[1] is None else plain(made[1]), "forward_seq": forward,
        }  # fmt: skip

    def _know_reduced(self, calls: list[Call]) -> None:
        """Remember which backward call made the gradient that an optimizer reads, under the bytes that it reads: buckets into which
        ranks pack gradients to reduce them hide it."""
        forwards = {call.seq: call for call in calls if call.key[0] == "forward"}
        backwards = {call.forward: call for call in calls if call.key[0] == "backward" and call.key[1] == "api"}
        reads: dict[tuple[int, tuple[str | None, ...]], tuple[int, str]] = {}
        for call in forwards.values():
            if call.key[1] == "api" and call.parent in forwards and call.seq in backwards:
                for name in call.rows:
                    if name.startswith("input."):
                        reads[call.parent, self._digests(call.key, name)] = backwards[call.seq].seq, f"grad_{name}"
        weights = {
            f"{call.key[2]}.{name[6:]}".lstrip("."): (call.seq, self._digests(call.key, name))
            for call in forwards.values() for name in call.rows if name.startswith("param.")
        }  # fmt: skip
        steps = [call for call in calls if call.key[0] == "optimizer" and call.key[1] == "api"]
        given = {name[6:-5]: self._digests(call.key, name) for call in steps for name in call.rows if name.endswith(".grad")}
        # Of a weight with two names two backward calls made the gradient.
        tied = {digests for name, (_, digests) in weights.items() if name not in given}
        for name, digests in given.items():
            if name in weights and weights[name][1] not in tied and (found := reads.get(weights[name])) is not None:
                self._reduced.setdefault(digests, found)
        self._reduced.pop((None,) * len(self._ranks), None)

    # ---------------------------------------------------------------- numbers
    def _slot(self, call: Call, name: str, row: dict[str, Any]) -> tuple[Piece | None, dict[str, Any]]:
        """Return a slot as a whole, and the columns in which its row is not the first rank's."""
        pieces = {rank: self._piece(rank, call.key, name) for rank in self._ranks}
        first = pieces[self._ranks[0]]
        if first is None or any(piece is None for piece in pieces.values()):
            return None, {}
        held = {rank: piece for rank, piece in pieces.items() if piece is not None}
        self._told.shapes[call.key, name] = first.shape
        its = Slot(call.key, name, call.seq, held, self._forward(call, name), tuple(self._inputs(call, name)), self._made(row))
        known = self._recorded(call.key, name)
        ways: Ways = {}
        self._told.ways[call.key, name] = ways
        for axis in self._order(known):
            groups = [group for group in self._geometry.along(axis) if group[0] in held]
            way = known.get(axis)
            if way is None or way.kind == "replicated":
                way = way_along(axis, groups, its, held, self._told)
                if way is None:
                    return None, _nothing()
            ways[axis] = way
            scale = self._scale(axis, way, its)
            whole = {group[0]: put_together([held[rank] for rank in group], way, scale) for group in groups}
            if any(piece is None for piece in whole.values()):
                self._told.apart.append(Apart(MISFIT, call.key, name, self._told.step, call.seq, axis, tuple(groups[0])))
                return None, _nothing()
            held = {rank: piece for rank, piece in whole.items() if piece is not None}
            if way.kind == "sharded" and its.fixed and len(ways) == 1:
                self._cut[call.key, name] = way, [its.pieces[rank] for rank in groups[0]]
        self._look_at_masks(its)
        (piece,) = held.values()
        return (piece, {}) if not piece.changed else self._measured(piece, its, ways)

    def _look_at_masks(self, slot: Slot) -> None:
        """Say where ranks that have different data dropped the same elements: that many do not agree by chance."""
        if slot.key[:2] != ("forward", "api") or "dropout" not in slot.key[3].lower() or not slot.name.startswith("output."):
            return
        for axis in self._told.data:
            for group in self._geometry.along(axis):
                loads = [slot.pieces[rank].load for rank in group]
                masks = [load() == 0 for load in loads if load is not None]
                if len(masks) < 2 or masks[0].size < ENOUGH or not RARE < masks[0].mean() < 1 - RARE:
                    continue
                if all(mask.shape == masks[0].shape and np.array_equal(mask, masks[0]) for mask in masks):
                    told = Apart("masks", slot.key, slot.name, self._told.step, slot.seq, axis, tuple(group), 0.0)
                    self._told.apart.append(told)
                    return

    def _made(self, row: dict[str, Any]) -> tuple[Key, str] | None:
        key = None if row["producer_seq"] is None else self._first.keys.get(row["producer_seq"])
        return None if key is None else (key, row["producer_slot"])

    def _scale(self, axis: str, way: Way, slot: Slot) -> float:
        """Return by what a gradient of a rank's own loss is multiplied: the loss of all ranks is their mean."""
        if slot.backward and axis in self._told.data and way.kind == "sharded" and self._told.loss.get(axis, "avg") == "avg":
            return 1 / self._geometry.size(axis)
        return 1.0

    def _order(self, known: Ways) -> list[str]:
        """Return the axes in the order in which pieces are put together: what a later axis cut again, first."""
        axes = [axis for axis in reversed(self._geometry.axes) if axis not in self._told.data or axis in known]
        axes += [axis for axis in reversed(self._geometry.axes) if axis not in axes]
        return sorted(axes, key=lambda axis: axis not in known or known[axis].order != "strided")

    def _measured(self, piece: Piece, slot: Slot, ways: Ways) -> tuple[Piece, dict[str, Any]]:
        digests = tuple(one.digest for one in slot.pieces.values())
        key = None if None in digests else (digests, tuple(ways.items()), piece.shape, slot.backward)
        if key is not None and key in self._done:
            return self._done[key]
        if piece.load is not None:
            array = np.ascontiguousarray(piece.load())
            packed = np.empty(PACKED)
            summarize(array, packed)
            told = hexadecimal(digest(array))
            numbers = _statistics(packed)
            piece = Piece(piece.dtype, piece.shape, told, numbers, packed[len(NUMBERS) :], piece.load, changed=True)
            place = f"{slot.seq}-{slot.name}"
            self._loads[place] = piece.load  # type: ignore[assignment]
        else:
            place = ""
            piece = self._with_norm(piece, slot)
        row = _columns(piece) | {"payload_segment": JOINED if place else None, "payload_key": place or None, "payload_view": None}
        if key is not None:
            self._done[key] = piece, row
        return piece, row

    def _with_norm(self, piece: Piece, slot: Slot) -> Piece:
        """Take the norm and extremes of a sum of partial sums from the other run, where nobody kept the bytes: they
        scale its distance, which its sketch tells."""
        whole = self._told.other.get((slot.key, slot.name))
        if (
            piece.numbers is None
            or not np.isnan(piece.numbers.l2)
            or whole is None
            or whole.numbers is None
            or whole.shape != piece.shape
        ):
            return piece
        its = whole.numbers
        numbers = Statistics(its.low, its.high, piece.numbers.mean, its.l2, its.counts)
        return Piece(piece.dtype, piece.shape, None, numbers, piece.sketch, None, changed=True)

    # ---------------------------------------------------------------- what was recorded
    def _know_placed(self, calls: list[Call]) -> None:
        """Remember the bytes of which a DTensor says how they lie: what is read out of it lies alike."""
        for call in calls:
            for name in call.rows:
                if (ways := self._recorded(call.key, name)) and all(
                    name in its.kept[call.key].rows for its in self._calls.values()
                ):
                    self._told.placed.setdefault(self._digests(call.key, name), ways)
        self._told.placed.pop((None,) * len(self._ranks), None)

    def _digests(self, key: Key, name: str) -> tuple[str | None, ...]:
        return tuple(its.rows[its.kept[key].rows[name]]["digest"] for its in self._calls.values())

    def _recorded(self, key: Key, name: str) -> Ways:
        """Return the ways along the axes of a DTensor's mesh; nothing for a plain tensor."""
        its = self._first
        part = part_in(its.rows[its.kept[key].rows[name]]["value"])
        mesh = part.get("mesh") if part is not None else None
        if part is None or not isinstance(mesh, dict):
            return {}
        axes = mesh.get("dims") or [axis for axis in self._geometry.axes if axis.startswith("ranks")][: len(part["placements"])]
        ways = dict(zip(axes, map(way_in, part["placements"]), strict=False))
        return {axis: way for axis, way in ways.items() if way is not None and axis in self._geometry.axes}

    def _forward(self, call: Call, name: str) -> tuple[Key, str] | None:
        key = None if call.forward is None else self._first.keys.get(call.forward)
        if key is None or not name.startswith("grad_"):
            return None
        return key, name.removeprefix("grad_")

    @staticmethod
    def _inputs(call: Call, name: str) -> Iterator[str]:
        yield from (other for other in call.rows if other != name and other.startswith(("input.", "param.", "grad_output.")))

    def _piece(self, rank: int, key: Key, name: str) -> Piece | None:
        calls = self._calls[rank]
        at = calls.kept[key].rows[name]
        row = calls.rows[at]
        if row["dtype"] is None or row["shape"] is None:
            return None
        measured = row["n_nan"] is not None
        numbers = (
            Statistics(row["min"], row["max"], row["mean"], row["l2"], tuple(row[n] for n in NUMBERS[4:])) if measured else None
        )
        sketch = calls.sketches[at] if measured and not np.isnan(calls.sketches[at][0]) else None
        shape = tuple(row["shape"])
        load = partial(_bytes, self._capture, rank, row, shape) if row["payload_segment"] is not None else None
        return Piece(row["dtype"], shape, row["digest"], numbers, sketch, load)


def _bytes(capture: Capture, rank: int, row: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    found = capture.payload(rank, row["payload_segment"], row["payload_key"], row["payload_view"], row["digest"])
    return found.reshape(shape)


def _statistics(packed: Array) -> Statistics:
    low, high, mean, l2 = map(float, packed[:4])
    return Statistics(low, high, mean, l2, tuple(int(count) for count in packed[4 : len(NUMBERS)]))


def _columns(piece: Piece) -> dict[str, Any]:
    numbers = piece.numbers
    told: dict[str, Any] = dict.fromkeys(NUMBERS) | {"digest": piece.digest, "sketch": piece.sketch, "value": None, "strides": None}
    if numbers is not None:
        told |= dict(zip(NUMBERS, (numbers.low, numbers.high, numbers.mean, numbers.l2, *numbers.counts), strict=True))
    return told | {"shape": list(piece.shape), "numel": piece.numel}


def _nothing() -> dict[str, Any]:
    """Return the columns of a slot of which nothing is known."""
    place = dict.fromkeys(("payload_segment", "payload_key", "payload_view"))
    return dict.fromkeys(NUMBERS) | {"digest": None, "sketch": None, "value": None} | place


def _records(rows: list[dict[str, Any]]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return table({name: [row.get(name) for row in rows] for name in names})
