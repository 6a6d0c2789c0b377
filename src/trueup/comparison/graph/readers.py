"""Who reads a result: in the records, through views and copies of it, and where autograd adds gradients up outside of any call."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.foundation.facts.slots import is_gradient_of_input, is_incoming_gradient, is_input, is_output, roundoff


class Readers:
    """The slots that read the results of one run's calls; slots and calls are indices into its stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        reads = np.flatnonzero(stream.names.table(is_input)[stream.slot])
        order = np.argsort(stream.producers[reads], kind="stable")
        self._slots = reads[order]
        self._makers = stream.producers[self._slots]

    def of(self, k: int) -> list[int]:
        """Return the slots that read a result, in whatever way; an empty list: nothing recorded does."""
        return self.named(k) or list(dict.fromkeys([*self._added.get(k, []), *self._shown(k)])) or self._ends.get(k, [])

    def is_added(self, call: int) -> bool:
        """Tell whether autograd adds a gradient that a call made to others, and a recorded call reads the sum."""
        return any(k in self._added for k in self.stream.slots(call).values())

    def is_unseen(self, k: int) -> bool:
        """Tell whether who reads a result is in no row of this level: a gradient of what no recorded call made goes to the backward
        of whatever did, which may be a backward itself."""
        stream = self.stream
        aten = stream.level[stream.call[k]] == stream.names.number("aten")
        given = self._differentiated(k) if is_gradient_of_input(stream.names.names[stream.slot[k]]) and not aten else None
        return given is not None and bool(stream.producers[given] == NONE)

    def was_there(self, k: int) -> bool:
        """Tell whether the bytes of a result were read before as what no recorded call made: a weight that was moved."""
        stream = self.stream
        if not stream.is_identified[k] or stream.numel[k] <= 1:
            return False
        order, sorted_digests = self._digests
        first = int(order[np.searchsorted(sorted_digests, stream.identity[k], "left")])
        return bool(self._reads[first] and stream.producers[first] == NONE)

    def parts(self, k: int) -> list[int]:
        """Return the gradients that autograd added up to what a slot reads; an empty list: one call made it."""
        stream = self.stream
        if stream.producers[k] != NONE:
            return []
        return (self._sums if is_incoming_gradient(stream.names.names[stream.slot[k]]) else self._parts).get(k, [])

    @property
    def sums(self) -> list[tuple[int, list[int]]]:
        """The slots that read what autograd added up, and the gradients that they are the sum of."""
        return [*self._sums.items(), *self._parts.items()]

    def cancels(self, k: int) -> float:
        """Return how much larger the relative error of a sum that autograd made is than its terms': their norm over its own."""
        terms, whole = self.parts(k), float(self.stream.l2[k])
        return max(1.0, float(np.linalg.norm(self.stream.l2[terms])) / whole) if terms and whole > 0 else 1.0

    def backwards(self, call: int) -> list[int]:
        """Return the backward and recomputed calls of a forward call, and of the dispatcher's operator those of its function."""
        stream = self.stream
        above, aten = int(stream.parents[call]), stream.names.number("aten")
        if stream.level[call] != aten:
            return self._backwards.get(int(stream.seq[call]), [])
        of = self._backwards.get(int(stream.seq[above]), []) if above != NONE else []
        return [n for n in of if stream.level[n] == aten]

    def named(self, k: int) -> list[int]:
        """Return the slots of which a result is said to be the producer."""
        call = int(self.stream.call[k])
        found = self._slots[slice(*np.searchsorted(self._makers, [call, call + 1]).tolist())]
        found = found[(self.stream.producer_slot[found] == self.stream.slot[k]) & (self.stream.call[found] != call)]
        return list(found.tolist())

    def _shown(self, k: int) -> list[int]:
        """Return who reads the same bytes: a view names what wrote its memory, and one tensor is the result of several levels.
        Single numbers are equal by chance, so that of them only what the call was given is the same."""
        stream, found, call = self.stream, list[int](), int(self.stream.call[k])
        if not stream.is_identified[k]:
            return []
        if stream.numel[k] > 1:
            order, sorted_digests = self._digests
            span = [int(np.searchsorted(sorted_digests, stream.identity[k], side)) for side in ("left", "right")]
            same: list[int] = order[slice(*span)].tolist()
        else:
            given = stream.slots_of(call, is_input)
            given = given[(stream.identity[given] == stream.identity[k]) & (stream.producers[given] != NONE)]
            same = [stream.slots(int(stream.producers[n])).get(int(stream.producer_slot[n]), n) for n in given.tolist()]
        for other in (n for n in same if stream.call[n] != call):
            found += self.named(other) if not self._reads[other] else [other] if stream.call[other] > call else []
        own = {call, int(stream.parents[call]), *stream.inside(call).tolist()}  # a view itself reads what it shows
        return [k for k in dict.fromkeys(found) if int(stream.call[k]) not in own]

    @cached_property
    def _reads(self) -> Array:
        return np.asarray(self.stream.names.table(is_input)[self.stream.slot], bool)

    @cached_property
    def _digests(self) -> tuple[Numbers, Array]:
        stream = self.stream
        tensors = np.flatnonzero(stream.is_identified & (stream.numel > 1))
        order = tensors[np.argsort(stream.identity[tensors], kind="stable")]
        return order, stream.identity[order]

    @cached_property
    def _backwards(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for call in np.flatnonzero(self.stream.forward_seq != NONE).tolist():
            found.setdefault(int(self.stream.forward_seq[call]), []).append(call)
        return found

    @cached_property
    def _added(self) -> dict[int, list[int]]:
        """By gradient that a function's backward made and nothing recorded reads: what reads the sum that it is a part of. It
        goes to the backward of the call that made the input; autograd adds those of several readers up between recorded calls, or
        by an operator that may stand inside any of them."""
        stream, names = self.stream, self.stream.names
        waiting: dict[tuple[int, str], list[int]] = {}
        backward = self._reads & (stream.forward_seq[stream.call] != NONE)
        for k in np.flatnonzero(backward & names.table(is_incoming_gradient)[stream.slot]).tolist():
            made = names.names[stream.slot[k]].removeprefix("grad_")
            waiting.setdefault((int(stream.forward_seq[stream.call[k]]), made), []).append(k)
        found: dict[int, list[int]] = {}
        gradients = names.table(is_gradient_of_input)[stream.slot] & (stream.forward_seq[stream.call] != NONE)
        for k in np.flatnonzero(gradients).tolist() if waiting else []:
            read = self._differentiated(k)
            if read is None or self.named(k):
                continue
            forward = stream.call[read]
            direct = int(stream.producer[read]), names.name(int(stream.producer_slot[read])) or ""
            returned = [place for place in self._returned.get(self._tensor(read), []) if place[0] < stream.seq[forward]]
            readers = next((waiting[place] for place in (*reversed(returned), direct) if place in waiting), None)
            if readers is not None:
                found[k] = readers
        return found

    @cached_property
    def _ends(self) -> dict[int, list[int]]:
        """By gradient of a tensor that several functions read: what reads their sum after the backward, which autograd made between
        recorded calls. Sketches are linear, so the sum is known by that of theirs. Tensors of equal bytes are told by scope."""
        stream = self.stream
        waiting: dict[tuple[int, int], list[int]] = {}
        backward = stream.during("backward")
        after = ~backward & (np.cumsum(backward) > 0)  # clipping by hand comes before the optimizer
        unknown = (stream.producers == NONE) & self._reads & after[stream.call] & stream.measured
        for k in np.flatnonzero(unknown).tolist():
            waiting.setdefault((int(stream.step[stream.call[k]]), int(stream.shapes.exact[k])), []).append(k)
        rounds = stream.names.table(roundoff)[stream.dtype]
        found: dict[int, list[int]] = {}
        for scoped in (False, True):
            for (step, shape, *_), its in (self._terms(scoped=scoped) if waiting else {}).items():
                slots = np.array(waiting.get((step, shape), []), np.int64)
                if len(its) < 2 or its[0] in found or not len(slots):
                    continue
                apart = np.linalg.norm(stream.sketch[slots] - stream.sketch[its].sum(axis=0), axis=1)
                rounded = len(its) * rounds[its].max() * np.linalg.norm(stream.sketch[its], axis=1).sum()
                readers = slots[apart <= rounded].tolist()
                found |= dict.fromkeys(its, readers) if readers else {}
        return found

    def cast_at_once(self, k: int) -> list[int]:
        """Return the backward calls whose gradients a gradient holds beside that of its own call. Autocast casts a tensor once for
        all that read it, and what they make of it goes back through the call that cast it."""
        stream, names, read = self.stream, self.stream.names, self._differentiated(k)
        incoming = [stream.dtype_of(n) for n in stream.slots_of(int(stream.call[k]), is_incoming_gradient).tolist()]
        if read is None or not stream.is_identified[read] or all(roundoff(d) <= roundoff(stream.dtype_of(read)) for d in incoming):
            return []
        alike = np.flatnonzero(self._reads & stream.is_identified & (stream.identity == stream.identity[read]))
        found = []
        for n in alike[stream.call[alike] != stream.call[read]].tolist():
            own = names.number(f"grad_{names.names[stream.slot[n]]}")
            found += [call for call in self.backwards(int(stream.call[n])) if own not in stream.slots(call)]
        return found

    def _differentiated(self, k: int) -> int | None:
        """Return the slot of the forward call whose gradient a slot of its backward holds."""
        stream, names = self.stream, self.stream.names
        forward = stream.find(int(stream.forward_seq[stream.call[k]]))
        given = names.number(names.names[stream.slot[k]].removeprefix("grad_"))
        return stream.slots(forward).get(given) if forward != NONE else None

    def _terms(self, *, scoped: bool) -> dict[tuple[int, ...], list[int]]:
        """Return the gradients that functions made of one tensor each; of tensors of one scope each, if that is wanted."""
        stream, names = self.stream, self.stream.names
        found: dict[tuple[int, ...], list[int]] = {}
        gradients = names.table(is_gradient_of_input)[stream.slot] & (stream.forward_seq[stream.call] != NONE) & stream.measured
        for k in np.flatnonzero(gradients & ~stream.of_level("module")[stream.call]).tolist():
            call, read = int(stream.call[k]), self._differentiated(k)
            if read is not None:
                digest, shape = self._tensor(read)
                place = int(stream.step[call]), shape, digest, int(stream.scope[call]) if scoped else NONE
                found.setdefault(place, []).append(k)
        return found

    @cached_property
    def _parts(self) -> dict[int, list[int]]:
        return _by_reader(self._ends)

    @cached_property
    def _returned(self) -> dict[tuple[int, int], list[tuple[int, str]]]:
        """By bytes and shape: the forward calls, and their slots, that returned such a tensor, in order. What wrote its memory
        may have returned another view of it, and a call that returns what it was given has no backward."""
        stream, names = self.stream, self.stream.names
        forward = ~stream.during("backward") & ~stream.of_level("aten")
        found: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for k in np.flatnonzero(forward[stream.call] & names.table(is_output)[stream.slot] & stream.is_identified).tolist():
            found.setdefault(self._tensor(k), []).append((int(stream.seq[stream.call[k]]), names.names[stream.slot[k]]))
        return found

    def _tensor(self, k: int) -> tuple[int, int]:
        return int(self.stream.identity[k]) if self.stream.is_identified[k] else NONE, int(self.stream.shapes.exact[k])

    @cached_property
    def _sums(self) -> dict[int, list[int]]:
        return _by_reader(self._added)


def _by_reader(read_by: dict[int, list[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for part, readers in read_by.items():
        for k in readers:
            found.setdefault(k, []).append(part)
    return found


def mask(calls: Iterable[int], count: int) -> Array:
    """Return a mask of calls; its last entry, for `NONE`, is false."""
    found = np.zeros(count + 1, bool)
    found[list(calls)] = True
    return found


def with_inside(stream: Stream, calls: Iterable[int]) -> Array:
    """Return a mask as `mask` of calls, of the operators inside them, and of the function around one that is no more than it."""
    found = mask(calls, len(stream))
    above = np.r_[stream.parents, NONE]
    single = np.bincount(above[above >= 0], minlength=len(above))[above] == 1
    while not np.array_equal(found, more := found | found[above] | mask(above[found & single], len(stream))):
        found = more
    return found
