"""One step of all ranks as the records of one process that holds all of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.layout.calls import LEVELS, Call, Calls, Key, calls_of, in_passes, plain
from trueup.comparison.layout.described import part_in
from trueup.comparison.layout.gradients import given, read_by
from trueup.comparison.layout.inferring import Apart, Guessed, Slot, Told, Ways, know_padding, say_repeated, way_along
from trueup.comparison.layout.inner import Inner
from trueup.comparison.layout.lookups import Lookup, lookup_in, own_rows
from trueup.comparison.layout.losses import how_of, totals, weights
from trueup.comparison.layout.masks import same_mask
from trueup.comparison.layout.order import Made, Order, made_by
from trueup.comparison.layout.padding import is_padded, unpadded
from trueup.comparison.layout.pieces import AVERAGE, MASKED, SUM, Array, Piece, Statistics, Way, put_together, scaled, way_in
from trueup.comparison.layout.rows import columns_of, nothing_known, piece_of, records_of, statistics_of
from trueup.comparison.layout.samples import Batch, Place, batch_in, reordered, samples_in, samples_of
from trueup.comparison.layout.standing import MICRO, Standing, Updates, renamed
from trueup.comparison.layout.stated import flat_order, stated_in
from trueup.comparison.layout.updates import STEPPING, by_weight, flat_in, order_of, tied_in, updated_in
from trueup.foundation.frameworks.trees import path
from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import NUMBERS, PACKED
from trueup.foundation.store import Capture

JOINED = "joined"
"""Name of the segment that bytes put together lie in; no file has it."""
NO_SLOT: tuple[Key, str] = (("", "", "", "", 0), "")

LEFT_OUT: dict[str, Any] = {}
"""Of a slot that is no part of a whole: rows of a vocabulary that another rank holds, before they are masked and added up."""

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
    updated: dict[Key, str] = field(default_factory=dict)  # by call of an optimizer, the weight that it updates
    gradients: dict[str, Piece] = field(default_factory=dict)  # that optimizers read, by weight, where their calls are left out
    terms: dict[tuple[Key, str], Mapping[int, Piece]] = field(default_factory=dict)  # of gradients that micro-batches add up to
    read: dict[tuple[Key, str], tuple[Key, str]] = field(default_factory=dict)  # by what an optimizer reads, the gradient's maker
    makers: dict[str, tuple[Key, str]] = field(default_factory=dict)  # by weight, the backward that makes its gradient
    guessed: Guessed = field(default_factory=dict)
    batch: dict[tuple[Key, str], Batch] = field(default_factory=dict)  # along what slots are cut by samples
    reordered: bool = False  # whether the samples stood in another order than the other run's


@dataclass
class Earlier:
    """What later steps have to know: who made what left-out calls wrote, by rank, call and slot; how calls are numbered."""

    made: dict[Made, Made | None] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    padded: dict[int, int] = field(default_factory=dict)  # lengths of padded weights, each with that of the other run's


def join(
    capture: Capture, standing: Standing, step: int, other: Step | None,
    declared: Callable[[Key, str, str], Way | None], partial: Collection[str], order: Updates,
    earlier: Earlier,
) -> Step:  # fmt: skip
    """Join the ranks of a step. ``other``: the other run's same step; ``partial``: modules that are no calls;
    ``order``: the numbers of the weights that optimizers update, () as they come, None: what updates them is left out; ``earlier``:
    what is known of earlier steps, to which this step adds."""
    sizes = {axis: standing.workers.size(axis) for axis in standing.workers.axes}
    told = Told(step, sizes, standing.data, {}, declared, sequence=standing.sequence, loss=standing.loss, padded=earlier.padded)
    if other is not None:
        told.other, told.otherwise, told.batched = other.slots, other.guessed, other.batch
    return _Joining(capture, standing, told, partial, order, earlier.numbers).done(earlier.made)


class _Joining:
    """``_calls`` and ``_geometry`` are by worker: a rank in one pass through the model."""

    def __init__(
        self,
        capture: Capture,
        standing: Standing,
        told: Told,
        partial: Collection[str],
        order: Updates,
        numbers: dict[tuple[int, int], int],
    ) -> None:
        self._capture, self._standing, self._geometry, self._told = capture, standing, standing.workers, told
        classes = {key[2]: key[3] for key, _ in told.other if key[:2] == ("forward", "module")} or None
        self._calls: dict[int, Calls] = {}
        self._read: tuple[Calls, dict[str, int]] | None = None
        self._left_out = order is None
        parts = [self._geometry.size(axis) for axis in standing.data]
        shares = {*parts, math.prod(parts)}
        for rank in sorted(standing.ranks.coordinates):
            rows = capture.records(rank=rank, step=told.step, level=LEVELS)
            names = standing.renames.get(rank, ())
            rename = functools.partial(renamed, renames=names) if names else str
            read = calls_of(rows, classes, rename, partial, shares, stepped=order is not None)
            if order is None and len(standing.ranks.coordinates) == 1:
                self._read = read, read_by(read, standing.weights.get(rank))
            if order is None or len(order):
                read = by_weight(read, standing.weights.get(rank), dict(order) if order else None)
            for number, one in enumerate(in_passes(read, standing.passes, bool(standing.stages))):
                self._calls[rank * standing.passes + number] = one
        self._workers = sorted(self._calls)
        self._take_gathered()
        sizes = dict(standing.sizes) | {
            path(key[2], name[6:]): one.numel for (key, name), one in told.other.items() if name.startswith("param.")
        }
        manifest = capture.ranks[min(capture.ranks)]
        self._told.flat = flat_in(self._calls[self._workers[0]], len(standing.ranks.coordinates), manifest, sizes)
        self._updated: dict[Key, str] = {}
        for worker in self._workers[:: standing.passes]:
            self._updated |= updated_in(self._calls[worker], standing.weights.get(worker // standing.passes), order)
        axes = [axis for axis in standing.ranks.axes if axis not in standing.data and axis not in standing.stages]
        if len(axes) == 1:
            told.model, told.updated = axes[0], self._updated
            for rank, held in sorted(capture.ranks.items(), reverse=True):  # stages hold other weights
                names = standing.renames.get(rank, ())
                told.stated |= {renamed(name, renames=names): way for name, way in stated_in(held).items()}
        self._sizes, tied = order_of(manifest, sizes), tied_in(manifest)
        self._tied = {*tied, *tied.values()}
        if (flat := flat_order(capture.ranks)) and set(flat) == set(self._sizes):
            self._sizes = {name: self._sizes[name] for name in flat}
        self._makers, self._alone = made_by(self._calls, standing, {key for key, _ in told.other})
        self._order = Order(self._calls, self._makers, standing.passes, numbers)
        self._loads: dict[str, Callable[[], Array]] = {}
        self._cut: dict[tuple[Key, str], tuple[Way, list[Piece]]] = {}
        self._backwards = {
            (worker, call.forward): call for worker, its in self._calls.items() for key, call in its.kept.items()
            if key[0] == "backward" and call.forward is not None
        }  # fmt: skip
        self._terms: dict[tuple[Key, str], Mapping[int, Piece]] = {}
        self._read_terms: dict[tuple[Key, str], tuple[Key, str]] = {}
        self._reduced: dict[tuple[str | None, ...], Made] = {}
        self._gradient_makers: dict[str, tuple[Key, str]] = {}
        self._done: dict[Any, tuple[Piece, dict[str, Any]]] = {}
        self._lookups: dict[Key, Lookup | None] = {}

    def _take_gathered(self) -> None:
        """Take weights that are let go of between modules (ZeRO 3) from what a module's function is given, where it shows which."""
        for its in self._calls.values():
            inside: dict[int | None, list[int]] = {}
            for key, call in its.kept.items():
                if key[:2] == ("forward", "api"):
                    inside.setdefault(call.parent, []).extend(at for name, at in call.rows.items() if name.startswith("input."))
            for key, call in its.kept.items():
                for name, at in call.rows.items():
                    whole = self._told.other.get((key, name))
                    if name.startswith("param.") and its.rows[at]["numel"] == 0 and whole is not None:
                        fits = [row for row in inside.get(call.seq, ()) if its.rows[row]["shape"] == list(whole.shape)]
                        if len({its.rows[row]["digest"] for row in fits}) == 1:
                            call.rows[name] = fits[0]

    def done(self, earlier: dict[Made, Made | None]) -> Step:
        calls = [(self._makers[key][0], self._calls[self._makers[key][0]].kept[key]) for key in self._order.keys]
        self._know_padded(calls)
        self._know_placed(calls)
        self._know_reduced(calls)
        # The gradients that an optimizer is given are recorded where several processes reduce them, and by nobody else.
        silent = {call.key for _, call in calls if call.key[0] == "optimizer" and call.key[3].startswith(STEPPING)}
        by_call: dict[Key, list[dict[str, Any]]] = {}
        inner = Inner(self._calls, self._makers)
        slots: dict[tuple[Key, str], Piece] = {}
        for first, call in calls:
            makers, rows, before = self._makers[call.key], by_call.setdefault(call.key, []), len(self._told.apart)
            for name in dict.fromkeys(name for worker in makers for name in self._calls[worker].kept[call.key].rows):
                holders = [worker for worker in makers if name in self._calls[worker].kept[call.key].rows]
                if holders != makers and call.key not in silent:
                    continue  # else each rank steps other weights (ZeRO 1)
                row = dict(self._calls[holders[0]].rows[self._calls[holders[0]].kept[call.key].rows[name]])
                if name == "arguments":
                    if call.key not in silent:
                        rows.append(row | self._named(first, call, name, row, silent, earlier))
                    continue
                piece, told = self._slot(first, call, name, row, holders)
                if told is LEFT_OUT:
                    continue
                if piece is not None:
                    slots[call.key, name] = piece
                sketch = {"sketch": None if piece is None else piece.sketch}
                if call.key not in silent:
                    rows.append(row | self._named(first, call, name, row, silent, earlier) | sketch | told)
            if inner.has(call, slots, self._told.apart[before:]):
                inner.leave_out(call, slots)
        for worker in self._workers[:: self._standing.passes]:
            rank = worker // self._standing.passes
            for (seq, slot), made in self._calls[worker].made.items():
                earlier[rank, seq, slot] = None if made is None else (rank, *made)
        gradients = given(slots, self._told.flat, self._sizes) if self._left_out else {}
        if self._read is not None:
            read, held = self._read
            gradients |= {name: piece for name, at in held.items() if (piece := piece_of(self._capture, read, 0, at)) is not None}
        known = self._told
        return Step(
            records_of(inner.without(by_call)), slots, known.apart, known.ways, self._alone, self._loads, self._cut, self._updated,
            gradients, self._terms, self._read_terms, self._gradient_makers, known.guessed, known.batch,
            known.samples is not None and known.samples.moved,
        )  # fmt: skip

    # ---------------------------------------------------------------- names
    def _named(
        self, worker: int, call: Call, name: str, row: dict[str, Any], silent: set[Key],
        earlier: dict[Made, Made | None],
    ) -> dict[str, Any]:  # fmt: skip
        phase, level, scope, op, ordinal = call.key
        rank, its = worker // self._standing.passes, self._calls[worker]
        made: Made | None = None if row["producer_seq"] is None else (rank, row["producer_seq"], row["producer_slot"])
        for _ in range(64):  # left-out calls in a row
            if phase == "optimizer" and made is not None:
                self._know_read(call.key, name, made)
            if made is None or (made[1] in its.keys and its.keys[made[1]] not in silent):
                break
            if made[1:] in its.made:
                passed = its.made[made[1:]]
                made = None if passed is None else (rank, *passed)
            elif made[1] in its.outer or made[1] in its.keys:
                made = None
            elif made in earlier:
                made = earlier[made]
            elif made[1] > min(its.keys, default=made[1]):
                made = None  # an operator, which is not joined: one makes the gradient of a loss
            else:
                break  # of an earlier step
        if made is None and phase == "optimizer" and (made := self._reduced.get(self._digests(call.key, name))) is not None:
            self._know_read(call.key, name, made)
        if made is None:
            made = self._order.sent(worker, call, name)
        forward = row["forward_seq"]
        if forward is not None and (forward in its.outer or its.keys.get(forward) in silent):
            forward = None
        return {
            "rank": 0, "seq": self._order.number(rank, call.seq), "parent": self._order.number(rank, its.around(call.parent)),
            "phase": phase, "level": level, "scope": scope, "op": op, "ordinal": ordinal, "slot": name,
            "producer_seq": None if made is None else self._order.number(made[0], made[1]),
            "producer_slot": None if made is None else plain(made[2]), "forward_seq": self._order.number(rank, forward),
        }  # fmt: skip

    def _know_read(self, key: Key, name: str, made: Made) -> None:
        """Remember the gradient that an optimizer reads, whichever pass made it."""
        for number in range(self._standing.passes):
            maker = self._calls[made[0] * self._standing.passes + number].keys.get(made[1])
            if maker is not None and maker[0] == "backward":
                self._read_terms[key, name] = maker, made[2]

    def _know_reduced(self, calls: list[tuple[int, Call]]) -> None:
        """Remember which backward call made the gradient that an optimizer reads, under the bytes that it reads: buckets into which
        ranks pack gradients to reduce them hide it."""
        forwards = {(worker, call.seq): call for worker, call in calls if call.key[0] == "forward"}
        backwards = {(worker, call.forward): call for worker, call in calls if call.key[0] == "backward" and call.key[1] == "api"}
        reads: dict[tuple[int, int | None, tuple[str | None, ...]], Made] = {}
        for (worker, seq), call in forwards.items():
            if call.key[1] == "api" and (worker, call.parent) in forwards and (worker, seq) in backwards:
                for name in call.rows:
                    if name.startswith("input."):
                        made = worker // self._standing.passes, backwards[worker, seq].seq, f"grad_{name}"
                        reads[worker, call.parent, self._digests(call.key, name)] = made
        weights = {
            f"{call.key[2]}.{name[6:]}".lstrip("."): (worker, call.seq, self._digests(call.key, name))
            for (worker, _), call in forwards.items() for name in call.rows if name.startswith("param.")
        }  # fmt: skip
        steps = [call for _, call in calls if call.key[0] == "optimizer" and call.key[1] == "api"]
        given = {name[6:-5]: self._digests(call.key, name) for call in steps for name in call.rows if name.endswith(".grad")}
        for name, held in weights.items():
            maker = None if name in self._tied else reads.get(held)
            key = None if maker is None else self._calls[held[0]].keys.get(maker[1])
            if maker is not None and key is not None:
                self._gradient_makers[name] = key, maker[2]
        # Of a weight with two names two backward calls made the gradient.
        tied = {held[2] for name, held in weights.items() if name not in given}
        for name, digests in given.items():
            if name in weights and weights[name][2] not in tied and (found := reads.get(weights[name])) is not None:
                self._reduced.setdefault(digests, found)
        for digests in [held for held in self._reduced if not any(held)]:
            del self._reduced[digests]

    # ---------------------------------------------------------------- numbers
    def _slot(
        self, worker: int, call: Call, name: str, row: dict[str, Any], holders: Sequence[int]
    ) -> tuple[Piece | None, dict[str, Any]]:
        """Return a slot as a whole, and the columns in which its row is not the first rank's."""
        pieces = {one: self._piece(one, call.key, name) for one in holders}
        first = pieces[holders[0]]
        if first is None or any(piece is None for piece in pieces.values()):
            return None, {}
        held = {one: piece for one, piece in pieces.items() if piece is not None}
        known = self._recorded(call.key, name)
        placed = bool(known)
        if (looked_up := self._looked_up(call.key, name, held, known)) is None:
            return None, LEFT_OUT
        held, known = looked_up
        its_whole = self._told.other.get((call.key, name))
        if name.startswith("param.") and not first.numel and its_whole is not None and its_whole.numel:
            return None, LEFT_OUT  # let go of, and gathered once the module runs (ZeRO 3)
        measured = [piece for piece in held.values() if piece.measured]
        if measured and len(measured) < len(held):  # what a rank still waits for is not measured
            if any(way.kind != "replicated" for way in known.values()) or set(known) != set(self._geometry.axes):
                return None, nothing_known()
            held = dict.fromkeys(held, measured[0])
        self._told.shapes[call.key, name] = first.shape
        made = self._made(worker, row)
        number = self._order.number(worker // self._standing.passes, call.seq) or 0
        forward, inputs = self._forward(worker, call, name), tuple(self._inputs(call, name))
        its = Slot(call.key, name, number, self._standing.passes, held, forward, inputs, made, placed)
        ways: Ways = {}
        self._told.ways[call.key, name] = ways
        held = self._counting(its, held)
        for axis in self._axes(known):
            groups = [some for group in self._geometry.along(axis) if (some := [one for one in group if one in held])]
            way = known.get(axis)
            if max(map(len, groups)) == 1:  # one stage of a pipeline has it, or one rank that holds an expert
                scale = self._of_one(axis, its)
                if scale != 1:
                    held = {one: scaled(piece, scale) for one, piece in held.items()}
                continue
            if way is None or way.kind == "replicated":
                way = way_along(axis, groups, its, held, self._told)
                if way is None:
                    return None, nothing_known()
            ways[axis] = way
            self._know_way(its, axis, way)
            scale = self._scale(axis, way, its, max(map(len, groups)))
            whole = {group[0]: put_together([held[one] for one in group], way, scale) for group in groups}
            if any(piece is None for piece in whole.values()):
                self._told.apart.append(Apart(MISFIT, call.key, name, self._told.step, number, axis, its.ranks(groups[0])))
                return None, nothing_known()
            held = {one: piece for one, piece in whole.items() if piece is not None}
            if way.kind == "sharded" and its.fixed and len(ways) == 1:
                self._cut[call.key, name] = way, [its.pieces[one] for one in groups[0]]
        self._know_terms(its, ways)
        self._look_at_masks(its)
        (joined,) = held.values()
        self._told.joined[call.key, name] = joined
        if (piece := self._in_order(its, ways, joined)) is None:
            return None, nothing_known()
        return self._measured(piece, its, ways) if piece.changed else self._found(worker, its, piece)

    def _in_order(self, its: Slot, ways: Ways, piece: Piece) -> Piece | None:
        """Return a slot without padding, and with its samples, if it is cut by these, as the other run has them; None where its
        bytes were not kept, or it has not as many rows for each sample."""
        told, at = self._told, (its.key, its.name)
        other = told.other.get(at)
        if other is not None and is_padded(piece.shape, other.shape, told.padded):
            if (bare := unpadded(piece, other)) is None:
                return None
            piece = bare
        data = told.data - told.sequence.keys()
        batch, pieces = batch_in(ways, data), dict[Place, Piece]()
        if batch is None:  # every rank has all samples of the other run's ranks
            batch = told.batched.get(at)
        else:
            told.batch[at] = batch
            axes = [n for n, axis in enumerate(self._geometry.axes) if axis in data]
            pieces = {tuple(self._geometry.coordinates[one][n] for n in axes): held for one, held in its.pieces.items()}
        if batch is None or batch.dim >= len(piece.shape) or its.fixed:  # ranks that have other samples may cut weights, too (FSDP)
            return piece
        given = told.samples is None and not its.backward and its.name.startswith("input.")
        if given and other is not None and (both := samples_in(piece, other, batch)) is not None:
            told.samples = samples_of(*both, {place: one.shape[batch.dim] for place, one in pieces.items()})
            if pieces:
                say_repeated(both, "", its, told)
        if told.samples is None or not told.samples.moved:
            return piece
        made = reordered(pieces, piece, batch, told.samples)
        if made is None:
            told.apart.append(Apart(MISFIT, its.key, its.name, told.step, its.seq, "", its.ranks(its.pieces)))
        return made

    def _found(self, worker: int, its: Slot, piece: Piece) -> tuple[Piece, dict[str, Any]]:
        """Return a whole that a rank has, and where its bytes lie if that is not the first rank."""
        if piece.load is None or worker // self._standing.passes == self._workers[0]:
            return piece, {}
        place = f"{its.seq}-{its.name}"
        self._loads[place] = piece.load
        return piece, {"payload_segment": JOINED, "payload_key": place, "payload_view": None}

    def _know_way(self, its: Slot, axis: str, way: Way) -> None:
        """Remember how bytes lie that no rank has whole, for slots that hold the same."""
        if way.kind != "replicated" and None not in (digests := tuple(one.digest for one in its.pieces.values())):
            for at in (digests, (*digests, str(self._told.shapes[its.key, its.name]))):
                self._told.lies.setdefault(at, {})[axis] = way

    def _counting(self, its: Slot, held: dict[int, Piece]) -> dict[int, Piece]:
        """Settle how a number that ranks make of their own data makes that of one process; return what each contributes to it."""
        first, whole, told = next(iter(held.values())), self._told.other.get((its.key, its.name)), self._told
        if its.backward or its.fixed or first.numel != 1 or not told.data or (whole is not None and whole.numel != 1):
            return held
        counts = weights({worker: self._gradient(worker, its) for worker in held})
        if counts:
            told.numbers[its.key, its.name] = dict.fromkeys(told.data, AVERAGE)
            return {worker: scaled(piece, counts[worker]) for worker, piece in held.items()}
        values = {worker: piece.numbers.mean for worker, piece in held.items() if piece.numbers is not None}
        known = None if whole is None or whole.numbers is None else whole.numbers.mean
        usual = dict.fromkeys(told.data, SUM) if first.dtype.startswith(("int", "uint")) else dict(told.loss)  # what counts adds up
        otherwise = told.otherwise.get((its.key, its.name), ())
        told.numbers[its.key, its.name], sure = how_of(values, self._geometry, told.data, known, usual, otherwise)
        if not sure or (known is None and len(values) > 1):
            told.guessed[its.key, its.name] = totals(values, self._geometry, told.data)
        return held

    def _gradient(self, worker: int, its: Slot) -> float | None:
        """Return a rank's recorded gradient of a number."""
        back = self._backwards.get((worker, self._calls[worker].kept[its.key].seq))
        at = None if back is None else back.rows.get(f"grad_{its.name}")
        found: float | None = None if at is None else self._calls[worker].rows[at]["mean"]
        return found

    def _know_terms(self, its: Slot, ways: Ways) -> None:
        """Remember what each micro-batch adds to a gradient."""
        if its.backward and MICRO in ways and ways[MICRO].kind == "partial":
            self._terms[its.key, its.name] = its.pieces

    def _lookup(self, key: Key) -> Lookup | None:
        """Return how a call looks up rows of a weight that ranks hold parts of: a DTensor says it by itself."""
        if key not in self._lookups:
            worker, said = self._makers[key][0], self._recorded(key, "output.0")
            found = next((Lookup(axis) for axis, way in said.items() if way == MASKED), None)
            its, call = self._calls[worker], self._calls[worker].kept[key]
            around = self._around(worker, call)
            rows = {name: its.rows[at] for name, at in call.rows.items()}
            module = its.kept[around].rows if around is not None and around[:2] == ("forward", "module") else {}
            if not said and key[:2] == ("forward", "api") and "output.0" in rows and "input.0" in module and around in self._makers:
                given = {name: row for name, row in rows.items() if name.startswith("input.") and row["shape"] is not None}
                words, made = its.rows[module["input.0"]]["shape"], rows["output.0"]["shape"]
                if words is not None and made is not None:
                    found = lookup_in(given, made, words, functools.partial(self._placed, key))
            self._lookups[key] = found
        return self._lookups[key]

    def _around(self, worker: int, call: Call) -> Key | None:
        return None if call.parent is None else self._calls[worker].keys.get(call.parent)

    def _placed(self, key: Key, name: str) -> Ways:
        return self._told.placed.get(self._digests(key, name), {})

    def _looked_up(self, key: Key, name: str, held: dict[int, Piece], known: Ways) -> tuple[dict[int, Piece], Ways] | None:
        """Return what ranks looked up of their own rows, or the places of these in the whole, and how that lies; another slot as it
        is. None where it is left out."""
        lookup = self._lookup(key)
        if lookup is None or name not in ("output.0", lookup.words if lookup.local else ""):
            return None if MASKED in known.values() else (held, known)
        words, weights = dict[int, Piece](), dict[int, Piece]()
        said = "input.0" if lookup.local else lookup.words
        for worker in held:
            its = self._calls[worker]
            around = self._around(worker, its.kept[key]) if lookup.local else key
            for pieces, at, slot in ((words, around, said), (weights, key, lookup.weight)):
                piece = self._piece(worker, at, slot) if at is not None and slot in its.kept[at].rows else None
                if piece is not None:
                    pieces[worker] = piece
        if (own := own_rows(held, self._geometry, lookup, words, weights, places=name == lookup.words)) is None:
            return None
        self._told.looked_up.add((key, name))
        return own, known | {lookup.axis: Way("partial")}

    def _look_at_masks(self, slot: Slot) -> None:
        """Say where ranks that have different data dropped the same elements."""
        if slot.key[:2] != ("forward", "api") or "dropout" not in slot.key[3].lower() or not slot.name.startswith("output."):
            return
        rows = {worker: self._calls[worker].kept[slot.key].rows for worker in slot.pieces}
        given = {worker: self._piece(worker, slot.key, "input.0") if "input.0" in held else None for worker, held in rows.items()}
        groups = [(axis, group) for axis in self._told.data - {MICRO} for group in self._geometry.along(axis)]
        for axis, group in groups:
            if same_mask([(slot.pieces[one], given[one]) for one in group if one in rows]):
                ranks = slot.ranks(group)
                self._told.apart.append(Apart("masks", slot.key, slot.name, self._told.step, slot.seq, axis, ranks, 0.0))
                return

    def _made(self, worker: int, row: dict[str, Any]) -> tuple[Key, str] | None:
        key = None if row["producer_seq"] is None else self._calls[worker].keys.get(row["producer_seq"])
        return None if key is None else (key, row["producer_slot"])

    def _scale(self, axis: str, way: Way, slot: Slot, ranks: int) -> float:
        """Return by what a gradient of a rank's own loss is multiplied, which so many ranks along an axis hold: the loss of all is
        their mean."""
        if slot.backward and axis in self._told.data and way.kind == "sharded" and self._averages(axis):
            return 1 / self._geometry.size(axis)
        if slot.backward and way.kind == "partial" and self._told.numbers.get(slot.forward or NO_SLOT, {}).get(axis) == SUM:
            return 1 / self._geometry.size(axis)
        if slot.backward and axis in self._told.data and (way.kind, way.reduce) == ("partial", AVERAGE):
            return ranks / self._geometry.size(axis)  # experts, which some ranks hold
        return 1.0

    def _averages(self, axis: str) -> bool:
        return self._told.loss.get(axis, AVERAGE) == AVERAGE

    def _of_one(self, axis: str, slot: Slot) -> float:
        """Return by what a gradient is multiplied that one rank alone holds, of the data of all (experts)."""
        alone = slot.backward and axis in self._told.data and self._averages(axis)
        return 1 / self._geometry.size(axis) if alone else 1.0

    def _axes(self, known: Ways) -> list[str]:
        """Return the axes in the order in which pieces are put together: what a later axis cut again, first."""
        axes = [axis for axis in reversed(self._geometry.axes) if axis not in self._told.data or axis in known]
        axes += [axis for axis in reversed(self._geometry.axes) if axis not in axes]
        return sorted(axes, key=lambda axis: axis not in known or known[axis].order != "strided")

    def _measured(self, piece: Piece, slot: Slot, ways: Ways) -> tuple[Piece, dict[str, Any]]:
        digests = tuple(one.digest for one in slot.pieces.values())
        moved = piece is not self._told.joined[slot.key, slot.name]
        key = None if None in digests else (digests, tuple(ways.items()), piece.shape, slot.backward, moved)
        if key is not None and key in self._done:
            return self._done[key]
        if piece.load is not None:
            array = np.ascontiguousarray(piece.load())
            packed = np.empty(PACKED)
            summarize(array, packed)
            told = hexadecimal(digest(array))
            numbers = statistics_of(packed)
            piece = Piece(piece.dtype, piece.shape, told, numbers, packed[len(NUMBERS) :], piece.load, changed=True)
            place = f"{slot.seq}-{slot.name}"
            self._loads[place] = piece.load  # type: ignore[assignment]
        else:
            place = ""
            piece = self._with_norm(piece, slot)
        row = columns_of(piece) | {"payload_segment": JOINED if place else None, "payload_key": place or None, "payload_view": None}
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
    def _know_placed(self, calls: list[tuple[int, Call]]) -> None:
        """Remember the bytes of which a DTensor says how they lie: what is read out of it lies alike."""
        for _, call in calls:
            for name in call.rows:
                if (ways := self._recorded(call.key, name)) and any(digests := self._digests(call.key, name)):
                    self._told.placed.setdefault(digests, ways)

    def _know_padded(self, calls: list[tuple[int, Call]]) -> None:
        """Remember which weights are longer than the other run's, before what they make is looked at."""
        for worker, call in calls:
            for name in (name for name in call.rows if name.startswith("param.")):
                whole, piece = self._told.other.get((call.key, name)), self._piece(worker, call.key, name)
                if whole is None or piece is None or whole.shape == piece.shape:
                    continue
                for axis in set(self._geometry.axes) - self._told.data:
                    group = next(some for some in self._geometry.along(axis) if worker in some)
                    pieces = [self._piece(one, call.key, name) for one in group if call.key in self._calls[one].kept]
                    know_padding([one for one in pieces if one is not None], whole, self._told)

    def _digests(self, key: Key, name: str) -> tuple[str | None, ...]:
        held = ((self._calls[worker], self._calls[worker].kept[key].rows.get(name)) for worker in self._makers[key])
        return tuple(its.rows[at]["digest"] for its, at in held if at is not None)

    def _recorded(self, key: Key, name: str) -> Ways:
        """Return the ways along the axes of a DTensor's mesh; nothing for a plain tensor."""
        its = self._calls[self._makers[key][0]]
        at = its.kept[key].rows.get(name)
        part = None if at is None else part_in(its.rows[at]["value"])
        mesh = part.get("mesh") if part is not None else None
        if part is None or not isinstance(mesh, dict):
            return {}
        axes = mesh.get("dims") or [axis for axis in self._geometry.axes if axis.startswith("ranks")][: len(part["placements"])]
        ways = dict(zip(axes, map(way_in, part["placements"]), strict=False))
        return {axis: way for axis, way in ways.items() if way is not None and axis in self._geometry.axes}

    def _forward(self, worker: int, call: Call, name: str) -> tuple[Key, str] | None:
        key = None if call.forward is None else self._calls[worker].keys.get(call.forward)
        if key is None or not name.startswith("grad_"):
            return None
        return key, name.removeprefix("grad_")

    @staticmethod
    def _inputs(call: Call, name: str) -> Iterator[str]:
        yield from (other for other in call.rows if other != name and other.startswith(("input.", "param.", "grad_output.")))

    def _piece(self, worker: int, key: Key, name: str) -> Piece | None:
        calls = self._calls[worker]
        return piece_of(self._capture, calls, worker // self._standing.passes, calls.kept[key].rows[name])
