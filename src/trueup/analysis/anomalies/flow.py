"""How bad numbers flow through the calls of one step: what is bad, as bits, where it arises, who carries it, who heals it, what it
reaches.

Bad in a slot are NaN, +Inf, -Inf, the dtype's largest number, and `CAST`: the least or largest integer, which a cast makes of an
infinity, if one was cast. An infinity is expected or not by its use, never by a list of names: *a value is healed if each call that
reads it, in forward and in backward, gives clean and finite numbers, or bad ones that are healed themselves.* A softmax heals a
causal mask. An infinity was asked for if it stands among its call's arguments, or came with a tensor that no recorded call made.
That decides only whom an unhealed NaN blames: the call that made the NaN if the infinity was asked for, else the call that computed
the infinity.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import ml_dtypes
import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.foundation.facts.anomaly import CAST, NAN, NEG, POS, SAT
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import is_input, is_output

INF = POS | NEG

INTEGERS = {"int64": 2.0**63, "int32": 2.0**31}  # casting Inf is undefined in C++: x86 gives the least, ARM and GPUs the nearest

SCALED = ("float8", "float6", "float4")
SCALED_SHARE = 0.01
"""Share of elements at the largest number from which a narrow float counts as saturated: formats of 8 bits and fewer are cast with
a scale that puts the largest element there by design (Micikevicius et al. 2022, FP8 Formats for Deep Learning, section 4)."""


def bits_of(stream: Stream) -> Array:
    """Return uint8 ``(slots,)``: what is wrong with each slot, 0 where nothing is or nothing was measured."""
    counts = np.nan_to_num(stream.counts)
    bits = np.zeros(len(stream.slot), np.uint8)
    for column, bit in enumerate((NAN, POS, NEG)):
        bits |= np.where(counts[:, column] > 0, bit, 0).astype(np.uint8)
    saturated = np.nan_to_num(stream.number("n_saturated"))
    scaled = stream.names.table(_is_scaled)[stream.dtype]
    with np.errstate(invalid="ignore", divide="ignore"):
        enough = saturated >= np.where(scaled, SCALED_SHARE * stream.numel, 1)
    bits |= np.where((saturated > 0) & enough, SAT, 0).astype(np.uint8)
    bits |= np.where(_at_the_end(stream), CAST, 0).astype(np.uint8)
    if stream.imported:
        for k, text in enumerate(stream.foreign["foreign_statistics"]):
            bits[k] |= 0 if text is None else _bits_of_text(text)
    return bits


def unmeasured(stream: Stream) -> int:
    """Count floating results with elements but without statistics. Inputs do not count: another call made them, or they are
    memory that the call only writes to, which nobody measures."""
    there = stream.names.table(is_output)[stream.slot] & stream.names.table(_is_floating)[stream.dtype]
    there &= np.nan_to_num(stream.numel) > 0
    told = stream.measured
    if stream.imported:
        told = told | np.array([text is not None for text in stream.foreign["foreign_statistics"]], bool)
    return int(np.count_nonzero(there & ~told))


def _bits_of_text(text: str) -> int:
    """Return the bits of another tool's max and min for a tensor with NaN or Inf; PyTorch gives NaN where one is NaN."""
    try:
        told: Any = json.loads(text)
        top, bottom = float(told["max"]), float(told["min"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return 0
    if np.isnan(top) or np.isnan(bottom):
        return NAN
    return (POS if top == np.inf else NEG if top == -np.inf else 0) | (NEG if bottom == -np.inf else POS if bottom == np.inf else 0)


def _at_the_end(stream: Stream) -> Array:
    """Return which slots of int64 or int32 hold the least or the largest of these."""
    found = np.zeros(len(stream.slot), bool)
    for dtype, end in INTEGERS.items():
        held = stream.dtype == stream.names.number(dtype)
        if held.any():
            found |= held & ((stream.number("min") <= -end) | (stream.number("max") >= end - 1))
    return found


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def limits(dtype: str) -> tuple[float, float, float] | None:
    """Return ``(largest, smallest normal, smallest subnormal)`` of a floating dtype, else None, by ``ml_dtypes.finfo`` (IEEE
    754-2019 for binary16/32/64, OCP 8-bit floating point specification 1.0 for float8)."""
    try:
        found: Any = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    except (TypeError, ValueError):
        return None
    return float(found.max), float(found.smallest_normal), float(found.smallest_subnormal)


def largest(dtype: str) -> float:
    """Return the largest finite number of a dtype; Inf if it is no float."""
    found = limits(dtype)
    return float("inf") if found is None else found[0]


NEAR = 1e-3  # how near to the largest finite number an argument counts as it: what is written for bfloat16 may have been rounded
BOUNDS = tuple(largest(dtype) for dtype in ("float16", "bfloat16", "float32", "float64"))


def asks_for_a_bound(value: str | None) -> bool:
    """Tell whether non-tensor arguments (JSON) hold an infinity, or the largest number of a dtype: somebody asked for it."""
    return any(abs(one) == float("inf") or any(abs(abs(one) / bound - 1) < NEAR for bound in BOUNDS) for one in numbers_of(value))


def numbers_of(value: str | None) -> list[float]:
    """Return the numbers among non-tensor arguments (JSON), at any depth; infinities as such."""
    try:
        pending = [json.loads(value)] if value else []
    except (ValueError, RecursionError):
        return []
    found: list[float] = []
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, str) and one.lower().lstrip("+-") in ("inf", "infinity"):
            found.append(float("inf"))
        elif isinstance(one, (int, float)) and not isinstance(one, bool):
            found.append(_as_float(one))
    return found


def _as_float(one: float) -> float:
    try:
        return float(one)
    except OverflowError:  # an integer of a file
        return float("inf")


def _is_scaled(dtype: str) -> bool:
    return dtype.startswith(SCALED)


@cache
def family(dtype: str) -> str:
    """Return ``float``, ``integer``, or an empty word for bool, complex and the rest."""
    if limits(dtype) is not None:
        return "" if dtype.startswith("complex") else "float"
    try:
        ends(dtype)
    except (TypeError, ValueError, AttributeError):
        return ""
    return "integer"


@cache
def ends(dtype: str) -> tuple[int, int]:
    """Return the least and the greatest integer of a dtype; raises ValueError or TypeError for another dtype."""
    found: Any = ml_dtypes.iinfo(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.iinfo(np.dtype(dtype))
    return int(found.min), int(found.max)


@dataclass(slots=True)
class Source:
    """Where bad numbers come from: a call of this step (``call``), else a tensor from outside that a call reads first."""

    call: int
    slot: int  # index of its first bad slot
    bits: int
    asked: bool  # whether the infinity was asked for
    outside: bool
    of: list[int] = field(default_factory=list)  # sources of infinities that were asked for, of which this call made NaN
    calls: int = 0  # how many calls give numbers that are bad because of it
    healers: list[int] = field(default_factory=list)
    reached: int = 0


def maker(stream: Stream, k: int) -> int:
    """Return the slot in which a call of this step made what a slot shows, `NONE` where none did."""
    call = int(stream.producers[k])
    slots = range(*stream.starts[call : call + 2].tolist()) if call != NONE else ()
    return next((j for j in slots if stream.slot[j] == stream.producer_slot[k]), NONE)


class Flow:
    """The bad values of one rank and step, followed once from the first call to the last and once back."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.bits = bits_of(stream)
        names = stream.names
        self.reads, self.gives = (names.table(kind)[stream.slot] for kind in (is_input, is_output))
        self.gives &= ~(names.table(_is_buffer)[stream.slot] & (self.bits & NAN == 0))  # masks of -Inf that a module holds
        self._starts: list[int] = stream.starts.tolist()
        self._drop_integers()
        # Bytes: ten times faster to index
        self._bad_reads, self._bad_gives = (((self.bits > 0) & kind).tobytes() for kind in (self.reads, self.gives))
        self.sources: list[Source] = []
        self.root: dict[int, int] = {}  # source of each bad slot
        self.asked: dict[int, bool] = {}
        self.calls = self._bad_calls()
        self._inside: dict[int, int] = {}  # call -> source inside it; computed ones go before asked-for ones
        self._outside: dict[tuple[object, ...], int] = {}
        self._alike: dict[tuple[object, ...], int] = {}
        self.first_readers: defaultdict[int, list[int]] = defaultdict(list)  # calls that read a tensor from outside
        self._in_gradients = False  # if gradients are bad, a bad tensor of no known call is one of them
        self._latest = NONE  # source of the last bad gradient, before there is one of the first bad numbers
        for call in self.calls:
            self._forward(call)

    def _drop_integers(self) -> None:
        """Forget the ends of integers that came of no infinity: sentinels, sizes without a limit."""
        for k in np.flatnonzero(self.bits & CAST).tolist():
            if self.reads[k]:
                made = int(self.producer[k])
                came = made >= 0 and self.bits[made]
            else:
                came = any(self.reads[j] and self.bits[j] for j in self.slots(int(self.stream.call[k])))
            if not came:
                self.bits[k] = 0
        self.__dict__.pop("producer", None)

    @cached_property
    def _children(self) -> tuple[Numbers, Numbers]:
        """Return the calls sorted by the seq of the call around them, recorded or not, and those seqs."""
        order = np.argsort(self.stream.parent, kind="stable")
        return order, self.stream.parent[order]

    def forward_of(self, call: int) -> list[int]:
        """Return the forward calls of a backward call; if its own was not recorded, those inside it."""
        stream = self.stream
        seq = int(stream.forward_seq[call])
        if seq < 0 or self.phase(call) != "backward":
            return []
        found = stream.find(seq)
        if found >= 0:
            return [found]
        order, parents = self._children
        inside = order[slice(*np.searchsorted(parents, [seq, seq + 1]))]
        return [c for c in inside.tolist() if self.phase(c) in ("forward", "recompute")]

    def groups(self, call: int) -> tuple[int, ...]:
        """Return the numbers by which backward calls name a forward call."""
        stream = self.stream
        seq, parent = int(stream.seq[call]), int(stream.parent[call])
        return (seq, parent) if parent >= 0 and stream.parents[call] == NONE else (seq,)

    @cached_property
    def producer(self) -> Numbers:
        """Index of the slot that last wrote what each bad slot and its readers show; `NONE` if none of this step did."""
        stream = self.stream
        if stream.imported:
            return self._alike_before()
        found = np.full(len(stream.slot), NONE, np.int64)
        for k in np.flatnonzero(self.reads & (self.bits > 0)).tolist():
            found[k] = maker(stream, k)
        return found

    def _alike_before(self) -> Numbers:
        """Return, where no producer was recorded, the last slot before each bad one in which a call gave the same numbers."""
        found = np.full(len(self.stream.slot), NONE, np.int64)
        given: dict[tuple[object, ...], int] = {}
        for k in np.flatnonzero(self.bits > 0).tolist():
            same = self.fingerprint(k)
            if self.gives[k]:
                given[same] = k
            elif self.reads[k]:
                found[k] = given.get(same, NONE)
        return found

    def _bad_calls(self) -> list[int]:
        """Return the calls that read or give bad numbers, and their backward calls; inner calls before outer ones."""
        stream = self.stream
        touched = np.zeros(len(stream), bool)
        touched[stream.call[self.bits > 0]] = True
        bad = np.flatnonzero(touched)
        groups = np.r_[stream.seq[bad], stream.parent[bad[(stream.parent[bad] >= 0) & (stream.parents[bad] == NONE)]]]
        touched |= (stream.phase == stream.names.number("backward")) & np.isin(stream.forward_seq, groups)
        calls = np.flatnonzero(touched)
        order = np.lexsort((-calls, self._ends[calls]))
        return list(calls[order].tolist())

    @cached_property
    def _ends(self) -> Numbers:
        """Return the last call inside each call, itself where there is none: calls are complete in this order."""
        ends = np.arange(len(self.stream))
        parents = self.stream.parents
        for call in np.flatnonzero(parents != NONE)[::-1].tolist():  # from the last: what is inside is complete first
            parent = parents[call]
            ends[parent] = max(ends[parent], ends[call])
        return ends

    def slots(self, call: int) -> range:
        """Return the slots of a call."""
        return range(self._starts[call], self._starts[call + 1])

    def bad_inputs(self, call: int) -> list[int]:
        """Return the bad slots that a call reads."""
        return [k for k in self.slots(call) if self._bad_reads[k]]

    def bad_outputs(self, call: int) -> list[int]:
        """Return the bad slots that a call gives."""
        return [k for k in self.slots(call) if self._bad_gives[k]]

    def _forward(self, call: int) -> None:
        read = self.bad_inputs(call)
        for k in read:
            self._trace(call, k)
        given = self.bad_outputs(call)
        parent = int(self.stream.parents[call])
        arisen = self._inside.pop(call, NONE)
        if not given:
            for root in {self.root[k] for k in read if k in self.root}:
                self._heals(root, call)
            if arisen != NONE:
                self._tell(parent, arisen)
            return
        saved = [k for forward in self.forward_of(call) for k in self.slots(forward) if self.bits[k]]
        known = [k for k in (*read, *saved) if k in self.root]
        root, asked = self._judge(call, given, known, arisen)
        for k in given:
            self.root[k], self.asked[k] = root, asked
            self._alike[self.fingerprint(k)] = k
        self.sources[root].calls += 1
        if not asked and (self._latest == NONE or self.phase(call) == "backward"):
            self._latest = root
            self._in_gradients |= self.phase(call) == "backward"
        self._tell(parent, root)

    def _tell(self, parent: int, root: int) -> None:
        """Tell a call where bad numbers inside it come from."""
        held = self._inside.get(parent)
        if parent >= 0 and (held is None or (self.sources[held].asked and not self.sources[root].asked)):
            self._inside[parent] = root

    def _judge(self, call: int, given: list[int], known: list[int], arisen: int) -> tuple[int, bool]:
        """Return the source of what a call gives, a new one if need be, and whether it was asked for."""
        bits = int(np.bitwise_or.reduce(self.bits[given]))
        computed = [self.root[k] for k in known if not self.asked[k]]
        if computed:
            return min(computed), False
        if arisen != NONE:  # a call inside this one made it
            inside = self.sources[arisen].asked
            if not inside or (not known and not bits & NAN):
                return arisen, inside
        if known and not bits & NAN:
            return min(self.root[k] for k in known), True
        asked = not known and self._asks(call, bits)
        of = {self.root[k] for k in known} | ({arisen} if arisen != NONE else set())
        self.sources.append(Source(call, given[0], bits, asked, False, sorted(of)))
        return len(self.sources) - 1, asked

    def _asks(self, call: int, bits: int) -> bool:
        """Tell whether an infinity or the largest number was asked for."""
        if bits & NAN:
            return False
        stream = self.stream
        floats = [k for k in self.slots(call) if self.reads[k] and self.is_float(k)]
        if floats and all(stream.numel[k] == 0 for k in floats):
            return True  # the maximum, or the logarithm of the sum, of nothing is -Inf
        return asks_for_a_bound(stream.value(int(stream.arguments[call])))

    def _trace(self, call: int, k: int) -> None:
        """Find out where a bad input comes from."""
        made = int(self.producer[k])
        if made < 0:
            made = self._alike.get(self.fingerprint(k), NONE)  # a view of a tensor that no recorded call made
        if made in self.root:
            self.root[k], self.asked[k] = self.root[made], self.asked[made]
            return
        if made not in self.root:
            made = NONE  # what made it is around others, and looked at after them
        # Autograd adds gradients without a call; a function between two modules is none at level module; another tool lists few.
        lost = self._in_gradients or self.phase(call) == "backward" or has(self.op(call), "loss") or self.stream.imported
        if made < 0 and self._latest != NONE and lost:
            self.root[k], self.asked[k] = self._latest, False
            return
        fingerprint = self.fingerprint(k)
        root = self._outside.get(fingerprint)
        if root is None:
            root = self._outside[fingerprint] = len(self.sources)
            bits = int(self.bits[k])
            self.sources.append(Source(call, k, bits, not bits & NAN, True))
        self.first_readers[root].append(call)
        self.root[k], self.asked[k] = root, self.sources[root].asked

    def fingerprint(self, k: int) -> tuple[object, ...]:
        """Return numbers that two views of one tensor share."""
        stream = self.stream
        if stream.imported and not stream.measured[k]:
            return float(stream.numel[k]), int(stream.dtype[k]), int(self.bits[k]), stream.foreign["foreign_statistics"][k]
        return (float(stream.numel[k]), *stream.counts[k].tolist(), float(f"{stream.l2[k]:.9g}"), int(stream.dtype[k]))

    def _heals(self, root: int, call: int) -> None:
        stream = self.stream
        tells = self.is_float if any(self.is_float(k) for k in self.bad_inputs(call)) else self.is_number
        if any(self.gives[k] and not np.isnan(stream.counts[k]).any() and tells(k) for k in self.slots(call)):
            self.sources[root].healers.append(call)

    def is_float(self, k: int) -> bool:
        """Tell whether a slot holds floating numbers."""
        return "float" in (self.stream.dtype_of(k) or "")

    def is_number(self, k: int) -> bool:
        """Tell whether a slot holds floating numbers or integers."""
        return (self.stream.dtype_of(k) or "bool") != "bool"

    def op(self, call: int) -> str:
        """Return the operator of a call."""
        return self.stream.names.name(int(self.stream.op[call])) or ""

    def phase(self, call: int) -> str:
        """Return the phase of a call."""
        return self.stream.names.name(int(self.stream.phase[call])) or ""


def _is_buffer(slot: str) -> bool:
    return slot.startswith("output.buffer.")
