"""One rank and step: records in, anomalies out. Pure; the package's docstring shows how to call it.

- *origin*: clean inputs, bad output; the anomaly is ``nan``, ``overflow`` or ``saturated``.
- *carried*: bad because of an earlier origin; counted there, never an anomaly of its own.
- *healed*: all readers give clean numbers. An infinity that was asked for is then a mask or a padding (``expected``); any other
  is an anomaly with ``transient=True``.
- *input*, *parameters*: bad, or a thousand times too large, before the step's first call read it.
- *collective*: clean before a communication and bad after it; `trueup.analysis.anomalies.judging` finds the rank.

What bad numbers reach is followed back from the last call to the first, over `flow`. The place judges a value that no call reads:
a gradient in the backward, weights or state in an optimizer, else "unread". A result that stays inside the function around its
operator is healed if that function's results are clean.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trueup.analysis.anomalies.effects import (
    Memory,
    Sites,
    grown,
    lasting_slots,
    led_to,
    place_of,
    read_slots,
    remember,
    scale_steps,
    slot_of,
    slots_of,
    step_of,
)
from trueup.analysis.anomalies.flow import INF, Flow, Source
from trueup.comparison.graph.streams import NONE, Numbers, Stream
from trueup.foundation.facts.anomaly import NAN, Anomaly, Crossing, Kind, Reached, Severity, StepAnomalies
from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.operators import has, having
from trueup.foundation.store.call_columns import NEEDED
from trueup.foundation.store.schema import RECORDS
from trueup.foundation.words.anomaly_sentence import bad_numbers, sentence

FAR = 20_000  # calls that are looked at behind an overflow, to find weights that grew


class Outside:
    """Tensors that no call of the step made. ``memory``: what the step before left; ``lasting``: the slots that show them."""

    def __init__(self, stream: Stream, memory: Memory, lasting: Numbers) -> None:
        self.stream, self.memory = stream, memory
        self.grown = grown(stream, lasting, memory.lasting)
        self.due: set[tuple[int, int]] = set()  # step and place of anomalies of steps before whose bad numbers this step read

    def follows(self, source: Source) -> bool:
        """Tell whether an anomaly of an earlier step made a tensor from outside bad."""
        stream, memory = self.stream, self.memory
        key = int(stream.producer[source.slot]), int(stream.producer_slot[source.slot])
        found = memory.written.get(key)
        if found is None and memory.pending and self.is_parameter(source.slot):
            found = memory.pending[0]
        if found is None:
            return False
        self.due.add(found)
        return True

    def is_parameter(self, k: int) -> bool:
        """Tell whether a tensor from outside is a weight: by its slot, its optimizer, or a gradient that it gets."""
        stream, call = self.stream, int(self.stream.call[k])
        name = stream.names.name(int(stream.slot[k])) or ""
        if name.startswith("param.") or stream.names.name(int(stream.phase[call])) == "optimizer":
            return True
        before = self.memory.stream
        if stream.producer[k] >= 0 and before is not None:
            made = before.find(int(stream.producer[k]))
            if made >= 0:
                return before.names.name(int(before.phase[made])) == "optimizer"
        return self._gets_a_gradient(call, name)

    def _gets_a_gradient(self, call: int, slot: str) -> bool:
        stream = self.stream
        wanted = stream.names.number("grad_input." + slot.removeprefix("input."))
        for around in (call, *stream.around(call)):
            later = np.flatnonzero((stream.forward_seq == stream.seq[around]) & (stream.phase == stream.names.number("backward")))
            if any(wanted in stream.slots(int(c)) for c in later.tolist()):
                return around == call
        return False

    def grown_behind(self, call: int) -> tuple[int, float] | None:
        """Return the first weight behind a call that grew too much in the step before, and by which factor."""
        if not self.grown:
            return None
        stream = self.stream
        pending, seen = [call], {call}
        while pending and len(seen) < FAR:
            at = pending.pop()
            around = [stream.find(int(stream.forward_seq[at]))]
            for k in range(*stream.starts[at : at + 2].tolist()):
                if k in self.grown and self.is_parameter(k):  # and no batch of larger numbers
                    return k, self.grown[k]
                around.append(int(stream.producers[k]))
            fresh = {c for c in around if c >= 0} - seen
            seen |= fresh
            pending += fresh
        return None


UNSCALING = "_amp_foreach_non_finite_check_and_unscale"

GRADIENTS, LOST, PARAMETERS, UNREAD, RANKS = 1, 2, 4, 8, 16  # what a value reaches, as bits


def reach(flow: Flow) -> None:
    """Fill in what each source reaches (``Source.reached``)."""
    _Reach(flow)


class _Reach:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        stream = flow.stream
        readers: defaultdict[int, list[int]] = defaultdict(list)
        for k in np.flatnonzero((self.flow.bits > 0) & self.flow.reads & (self.flow.producer >= 0)).tolist():
            readers[int(self.flow.producer[k])].append(int(stream.call[k]))
        backward: defaultdict[int, list[int]] = defaultdict(list)
        for call in self.flow.calls:
            if self.flow.phase(call) == "backward" and stream.forward_seq[call] >= 0:
                backward[int(stream.forward_seq[call])].append(call)
        self.reached: dict[int, int] = {}
        self._by_call: dict[int, int] = {}
        for call in reversed(self.flow.calls):
            given = self.flow.bad_outputs(call)
            total = 0
            for k in given:
                found, read = 0, False
                asked = self.flow.root[k] if self.flow.asked[k] else NONE
                for reader in readers.get(k, ()):
                    mark, told = self._of_reader(reader, asked, whole=self.flow.is_float(k))
                    found, read = found | mark, read or told
                for around in (call, *readers.get(k, ())):
                    found |= self._in_backward(around, backward, asked)
                found |= self._around(call, k)
                if not read and not found:
                    found |= self._dangling(call, k)
                self.reached[k] = found
                total |= found
            if given:
                self._by_call[call] = total
        for root, source in enumerate(self.flow.sources):
            source.reached = self._source_reaches(root, source, backward)

    def _of_reader(self, call: int, asked: int, *, whole: bool = True) -> tuple[int, bool]:
        """Return what a value reaches through one reader, and whether that tells anything: floats tell of floats, integers of
        integers. ``asked``: the source of an infinity that was asked for, or `NONE`; other outputs that are bad do not count."""
        if has(self.flow.op(call), "loss"):
            return LOST | GRADIENTS, True
        given = self.flow.bad_outputs(call)
        if not given:
            computes = not has(self.flow.op(call), "shape")
            tells = self.flow.is_float if whole else self.flow.is_number
            return 0, computes and any(self.flow.gives[k] and tells(k) for k in self.flow.slots(call))
        if asked != NONE and not any(self._is_of(self.flow.root[k], asked) for k in given):
            return 0, True
        mark = self._by_call.get(call, 0)
        if self.flow.phase(call) == "collective":
            return mark | RANKS, True
        if mark == UNREAD and (all(self.flow.asked[k] for k in given) or has(self.flow.op(call), "view")):
            return 0, False  # a view tells nothing: what reads the view is said to read the tensor
        return mark, True

    def _is_of(self, root: int, asked: int) -> bool:
        return root == asked or asked in self.flow.sources[root].of

    def _around(self, call: int, k: int) -> int:
        """Return what the same tensor reaches as a result of the call around this one."""
        parent = int(self.flow.stream.parents[call])
        if parent < 0 or parent not in self._by_call:
            return 0
        same = any(self.flow.fingerprint(j) == self.flow.fingerprint(k) for j in self.flow.bad_outputs(parent))
        return self._by_call[parent] if same else 0

    def _dangling(self, call: int, k: int) -> int:
        """Return what a bad value reaches that no recorded call reads."""
        parent = int(self.flow.stream.parents[call])
        if parent >= 0:
            around = [j for j in self.flow.slots(parent) if self.flow.gives[j]]
            if around and not any(self.flow.bits[j] for j in around):
                return 0  # it did not leave the call around it
            if parent in self._by_call:
                bad = [j for j in around if self.flow.bits[j]]
                if self.flow.asked.get(k) and not any(self._is_of(self.flow.root[j], self.flow.root[k]) for j in bad):
                    return UNREAD  # what the call around it gives is bad for another reason
                return self._by_call[parent]
        phase = self.flow.phase(call)
        if phase == "backward":  # what a view shows may be a tensor that the forward saved
            return UNREAD if self.flow.asked.get(k) or has(self.flow.op(call), "view") else GRADIENTS
        if phase == "optimizer":
            return PARAMETERS if self._writes_lasting(call, k) else GRADIENTS
        if phase == "collective":
            return RANKS
        return UNREAD

    def _writes_lasting(self, call: int, k: int) -> bool:
        """Tell whether an optimizer's call wrote weights or state: it read a clean tensor of that shape that no backward made."""
        if UNSCALING in self.flow.op(call):
            return False
        stream = self.flow.stream
        shape = stream.shapes.exact[k]
        for j in self.flow.slots(call):
            if self.flow.reads[j] and not self.flow.bits[j] and stream.shapes.exact[j] == shape and self.flow.is_float(j):
                made = int(stream.producers[j])
                if made < 0 or self.flow.phase(made) not in ("backward", "collective"):
                    return True
        return False

    def _source_reaches(self, root: int, source: Source, backward: dict[int, list[int]]) -> int:
        found = 0
        if not source.outside:
            for k in self.flow.bad_outputs(source.call):
                found |= self.reached.get(k, 0)
            return found
        told = False
        for call in self.flow.first_readers[root]:
            asked = root if source.asked else NONE
            mark, says = self._of_reader(call, asked)
            found, told = found | mark | self._in_backward(call, backward, asked), told or says
        return found if found or told else UNREAD

    def _in_backward(self, call: int, backward: dict[int, list[int]], asked: int) -> int:
        """Return what the backward of a forward call reaches; ``asked`` as in `_of_reader`."""
        found = 0
        for group in self.flow.groups(call):
            for later in backward.get(group, ()):
                if asked == NONE or any(self._is_of(self.flow.root[k], asked) for k in self.flow.bad_outputs(later)):
                    found |= self._by_call.get(later, 0)
        return found


# Columns that are read; a missing one is null
COLUMNS = (*NEEDED, "min", "max", "mean", "n_zero", "n_subnormal", "n_saturated", "payload_key", "payload_view")

MOST = 200  # anomalies of one rank and step that are described; independent origins beyond that are counted

REACHED: tuple[tuple[int, Reached], ...] = (
    (LOST, "loss"), (GRADIENTS, "gradients"), (PARAMETERS, "parameters"), (RANKS, "other ranks"), (UNREAD, "unread"),
)  # fmt: skip


def classify(records: pa.Table, memory: Memory | None = None, *, sites: Sites | None = None) -> StepAnomalies:
    """Return the anomalies of one rank and step in order of execution; `anomalies.effects`, which sees all steps, sets
    ``matters``. ``records`` are sorted by ``seq`` with the columns `COLUMNS`; ``memory``, fresh for the first step, is changed;
    ``sites`` are call stacks, ``{site: (frames, line)}``, for source lines."""
    memory = memory if memory is not None else Memory()
    stream = Stream(lambda columns: _columns(records, columns), memory.names, memory.values)
    return classify_stream(stream, memory, sites or {})


def classify_stream(stream: Stream, memory: Memory, sites: Sites) -> StepAnomalies:
    """Judge a stream; see `classify`."""
    flow = Flow(stream)
    reach(flow)
    step = _Step(stream, flow, memory, sites)
    return step.judge()


def _columns(records: pa.Table, names: Sequence[str]) -> pa.Table:
    there = set(records.column_names)
    columns = {}
    for name in names:
        kind = RECORDS.field(name).type
        columns[name] = records[name] if name in there else pa.nulls(len(records), kind)
    return pa.table(columns)


class _Step:
    def __init__(self, stream: Stream, flow: Flow, memory: Memory, sites: Sites) -> None:
        self.stream, self.flow, self.memory, self.sites = stream, flow, memory, sites
        self.read: Numbers = read_slots(stream)
        self.lasting: Numbers = lasting_slots(stream, self.read)
        self.outside = Outside(stream, memory, self.lasting)
        self.anomalies: list[Anomaly] = []
        self.of_source: dict[int, int] = {}  # source -> its anomaly
        self.expected: Counter[str] = Counter()

    def judge(self) -> StepAnomalies:
        sources = self.flow.sources
        blamed = self._blamed()
        order = sorted(range(len(sources)), key=lambda root: (sources[root].call, sources[root].slot))
        for root in order:
            if root in blamed:
                self._add(root, sources[root])
        found = StepAnomalies(
            self.stream.rank, step_of(self.stream), tuple(self.anomalies), tuple(self.expected.most_common()),
            scale_steps(self.stream), len(self.stream), int(np.count_nonzero(self.stream.measured)),
            self._crossings(), tuple(sorted(self.outside.due)), self._clean_weights(), self._clean_gradients(),
        )  # fmt: skip
        self._remember(found)
        return found

    def _blamed(self) -> set[int]:
        """Return the sources to report: not those that are expected, nor those that another one explains."""
        sources, found = self.flow.sources, set()
        misused = {of for source in sources if source.of and source.reached for of in source.of}
        for root, source in enumerate(sources):
            if source.asked and not source.reached & ~UNREAD:
                self._expect(source)
            elif source.outside and source.reached == UNREAD and has(self.flow.op(source.call), "view"):
                continue  # whoever computes with it will be told
            elif source.asked and root in misused:
                if source.outside and not source.healers:
                    found.add(root)  # no call anywhere makes use of its infinities: they are no mask
            else:
                found.add(root)
        for root in [r for r in found if self.flow.sources[r].of]:
            if set(sources[root].of) & found:
                found.discard(root)
        return found

    def _expect(self, source: Source) -> None:
        stream = self.stream
        name = stream.names.name(int(stream.op[source.call])) or ""
        self.expected[f"tensor from outside, read by {name}" if source.outside else name] += 1

    def _add(self, root: int, source: Source) -> None:
        if source.outside and self.outside.follows(source):
            return
        if len(self.anomalies) >= MOST:
            self.of_source[root] = MOST - 1
            return
        self.of_source[root] = len(self.anomalies)
        self.anomalies.append(self._describe(source))

    def _describe(self, source: Source) -> Anomaly:
        stream, flow, call = self.stream, self.flow, source.call
        if not source.outside and not source.asked and (cause := self.outside.grown_behind(call)) is not None:
            return self._bad_step(source, *cause)
        kind = self._kind(source)
        reached = _reached(source)
        slots = slots_of(stream, call, flow.bits)
        if source.outside:
            first = slot_of(stream, source.slot, source.bits)
            slots = (first, *(one for one in slots if one.slot != first.slot))
        notes = [self._asked_note(of) for of in source.of]
        made = Anomaly(
            kind, place_of(stream, call, self.sites), self._severity(kind, source), "", slots,
            () if source.outside else led_to(stream, call, flow.bits, self.sites),
            reached, not source.reached and kind != "saturated",
            carried=max(0, source.calls - (0 if source.outside else 1)),
            healed_by=tuple(dict.fromkeys(self._call(c) for c in source.healers[:3])) if not source.reached else (),
            notes=tuple(notes),
        )  # fmt: skip
        return _with_sentence(made)

    def _kind(self, source: Source) -> Kind:
        stream = self.stream
        if source.outside:
            return "parameters" if self.outside.is_parameter(source.slot) else "input"
        if stream.names.name(int(stream.phase[source.call])) == "collective":
            return "collective"
        if source.bits & INF:  # Inf and NaN of clean inputs in one call: the overflow came first
            return "overflow"
        return "nan" if source.bits & NAN else "saturated"

    @staticmethod
    def _severity(kind: Kind, source: Source) -> Severity:
        if source.reached & (LOST | GRADIENTS | PARAMETERS | RANKS):
            return "critical"
        if kind == "saturated" or source.reached & UNREAD:
            return "high"
        return "medium"

    def _asked_note(self, root: int) -> str:
        source = self.flow.sources[root]
        name = "a tensor from outside" if source.outside else self._call(source.call)
        return f"the {bad_numbers(source.bits)} that it read were asked for, by {name}"

    def _call(self, call: int) -> str:
        row = self.stream.row(call)
        return f"{row.scope}/{row.op}" if row.scope else row.op

    def _bad_step(self, source: Source, k: int, times: float) -> Anomaly:
        """Describe an optimizer's step that left weights much too large."""
        stream, before = self.stream, self.memory.stream
        weight = slot_of(stream, k, 0)
        made = NONE if before is None or stream.producer[k] < 0 else before.find(int(stream.producer[k]))
        at = place_of(stream, source.call, self.sites)
        if before is not None and made >= 0:
            place = place_of(before, made, self.sites)
            slots = slots_of(before, made, np.zeros(len(before.slot), np.uint8))
        else:
            place, slots = place_of(stream, int(stream.call[k]), self.sites), ()
        reached = _reached(source)
        grown_note = f"{weight.slot} of {self._call(int(stream.call[k]))} is {times:.1e} times what it was in the step before"
        first = f"the first call that overflows: {at.name} ({at.op})"
        return _with_sentence(Anomaly(
            "parameters", place, "critical", "", (*slots, weight), led_to(stream, source.call, self.flow.bits, self.sites),
            tuple(dict.fromkeys((*reached, "parameters"))), carried=source.calls, notes=(grown_note, first),
        ))  # fmt: skip

    def _clean_weights(self) -> bool:
        """Tell whether the step read lasting tensors, and none of them was bad."""
        return len(self.lasting) > 0 and not np.any(self.flow.bits[self.lasting] & (NAN | INF))

    def _clean_gradients(self) -> bool:
        stream = self.stream
        later = np.isin(stream.phase, [stream.names.number(name) for name in ("backward", "collective", "optimizer")])[stream.call]
        recorded = (stream.phase == stream.names.number("backward"))[stream.call] & stream.measured
        loss = stream.names.table(having("loss"))[stream.op][stream.call]
        return bool(recorded.any()) and not np.any(self.flow.bits[later & ~loss])

    def _crossings(self) -> tuple[Crossing, ...]:
        stream, flow = self.stream, self.flow
        found = []
        collective = stream.phase == stream.names.number("collective")
        for call in np.flatnonzero(collective).tolist():
            read, given = flow.bad_inputs(call), flow.bad_outputs(call)
            if read or given:
                row = stream.row(call)
                own = [self.of_source.get(flow.root[k], -1) for k in given if k in flow.root and not read]
                ranks = members(stream.value(int(stream.arguments[call])))
                own_place = max(own, default=-1)
                found.append(Crossing(row.op, row.ordinal, row.level, ranks, row.seq, bool(read), own_place))
        return tuple(found)

    def _remember(self, found: StepAnomalies) -> None:
        stream, flow, memory = self.stream, self.flow, self.memory
        skipped = any(one.skipped for one in found.scale)
        memory.written = {}
        optimizer = stream.phase == stream.names.number("optimizer")
        kept = np.zeros(len(flow.sources), bool)
        kept[[n for n, source in enumerate(flow.sources) if source.reached & UNREAD]] = True
        bad = np.flatnonzero((flow.bits > 0) & flow.gives)
        for k in [k for k in bad.tolist() if optimizer[stream.call[k]] or kept[flow.root[k]]]:
            at = self.of_source.get(flow.root.get(k, NONE))
            follows = next(iter(sorted(self.outside.due)), None)
            of = follows if at is None else (step_of(stream), at)
            if of is not None:
                memory.written[int(stream.seq[stream.call[k]]), int(stream.slot[k])] = of
        harmful = {"loss", "gradients", "parameters", "other ranks"}
        memory.pending = sorted(self.outside.due) + [
            (step_of(stream), n) for n, one in enumerate(found.anomalies) if harmful & set(one.reached) and not skipped
        ]
        memory.lasting = remember(stream, self.read)
        memory.stream = stream


def _reached(source: Source) -> tuple[Reached, ...]:
    """Say what a source reaches; numbers that nobody reads are mentioned only if nothing else is reached."""
    bits = source.reached & ~UNREAD or source.reached
    return tuple(name for bit, name in REACHED if bits & bit)


def members(arguments: str | None) -> str | None:
    """Return which ranks take part in a collective, as they stand among its arguments: ``0-3``."""
    said = decoded(arguments).get("ranks")
    return said if isinstance(said, str) else None


def _with_sentence(made: Anomaly) -> Anomaly:
    return dataclasses.replace(made, sentence=sentence(made))
