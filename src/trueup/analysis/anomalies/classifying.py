"""One rank and step: records in, anomalies out. Pure; see the package's docstring for how to call it.

- *origin*: clean inputs, bad output. Its anomaly has kind ``nan``, ``overflow`` or ``saturated``.
- *carried*: bad because of an origin before; counted there, never an anomaly of its own.
- *healed*: all that read it give clean numbers. Of an infinity that was asked for that is a mask or a padding, ``expected``;
  of any other it is an anomaly with ``transient=True``.
- *input*, *parameters*: bad, or a thousand times too large, before the step's first call read it.
- *collective*: clean before a communication and bad after it; `trueup.analysis.anomalies.across` finds the rank.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trueup.analysis.anomalies import kinds
from trueup.analysis.anomalies.describing import Sites, led_to, place_of, slot_of, slots_of, step_of
from trueup.analysis.anomalies.flow import Flow, Source
from trueup.analysis.anomalies.memory import Memory, lasting_slots, read_slots, remember
from trueup.analysis.anomalies.outside import Outside
from trueup.analysis.anomalies.reaching import GRADIENTS, LOST, PARAMETERS, RANKS, UNREAD, reach
from trueup.analysis.anomalies.scaling import scale_steps
from trueup.comparison.graph.streams import NEEDED, NONE, Numbers, Stream
from trueup.foundation.facts.anomaly import NAN, Anomaly, Crossing, Kind, Reached, Severity, StepAnomalies
from trueup.foundation.facts.operators import has, having
from trueup.foundation.store.schema import RECORDS
from trueup.foundation.words.anomaly_sentence import bad_numbers, sentence

COLUMNS = (*NEEDED, "min", "max", "mean", "n_zero", "n_subnormal", "n_saturated", "payload_key", "payload_view")
"""Columns of the records that are read; one that a table lacks is taken for null."""

MOST = 200
"""Anomalies of one rank and step that are described; independent origins beyond that are counted."""

REACHED: tuple[tuple[int, Reached], ...] = (
    (LOST, "loss"), (GRADIENTS, "gradients"), (PARAMETERS, "parameters"), (RANKS, "other ranks"), (UNREAD, "unread"),
)  # fmt: skip


def classify(records: pa.Table, memory: Memory | None = None, *, sites: Sites | None = None) -> StepAnomalies:
    """Judge the records of one rank and step.

    Args:
        records: rows sorted by ``seq``, with the columns of `COLUMNS` as in docs/format.md.
        memory: what the step before left; a fresh one for the first. It is changed.
        sites: call stacks, ``{site: (frames, line)}``, for the source line; none by default.

    Returns:
        what was found, in the order of execution. Whether it matters (``matters``) is decided by `anomalies.mattering`,
        which sees all steps.
    """
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
        self.of_source: dict[int, int] = {}
        """Source -> its anomaly."""
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
            scale_steps(self.stream), len(self.stream), int(np.count_nonzero(self.stream.measured)), self._bad_loss(),
            self._crossings(), tuple(sorted(self.outside.due)), self._clean_weights(), self._clean_gradients(),
        )  # fmt: skip
        self._remember(found)
        return found

    # ------------------------------------------------------------------ who is blamed
    def _blamed(self) -> set[int]:
        """Return the sources to report: not those that are expected, nor those that another one explains."""
        sources, found = self.flow.sources, set()
        misused = {of for source in sources if source.of and source.reached for of in source.of}
        for root, source in enumerate(sources):
            if source.asked and not source.reached & ~UNREAD:
                self._expect(source)
            elif source.outside and source.reached == UNREAD and self._is_view(source.call):
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

    def _is_view(self, call: int) -> bool:
        return has(self.stream.names.name(int(self.stream.op[call])) or "", "view")

    def _expect(self, source: Source) -> None:
        stream = self.stream
        name = stream.names.name(int(stream.op[source.call])) or ""
        self.expected[f"tensor from outside, read by {name}" if source.outside else name] += 1

    # ------------------------------------------------------------------ what is said of it
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
        if source.bits & kinds.INF:  # Inf and NaN of clean inputs in one call: the overflow came first
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

    # ------------------------------------------------------------------ weights that grew
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

    # ------------------------------------------------------------------ the rest of the step
    def _bad_loss(self) -> bool:
        stream = self.stream
        loss = stream.names.table(having("loss"))[stream.op]
        return bool(np.any(loss[stream.call] & (self.flow.bits > 0)))

    def _clean_weights(self) -> bool:
        """Tell whether the step read lasting tensors, and none of them was bad."""
        return len(self.lasting) > 0 and not np.any(self.flow.bits[self.lasting] & (NAN | kinds.INF))

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
                found.append(Crossing(row.op, row.ordinal, row.level, ranks, row.seq, bool(read), bool(given), own_place))
        return tuple(found)

    def _remember(self, found: StepAnomalies) -> None:
        """Leave to the next step what it needs."""
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
    """Say what a source reaches; that some of it is read by nobody is worth a word only where nothing else is reached."""
    bits = source.reached & ~UNREAD or source.reached
    return tuple(name for bit, name in REACHED if bits & bit)


def members(arguments: str | None) -> str | None:
    """Return which ranks take part in a collective, as they stand among its arguments: ``0-3``."""
    try:
        said = json.loads(arguments or "{}").get("ranks")
    except (ValueError, RecursionError, AttributeError):
        return None
    return said if isinstance(said, str) else None


def _with_sentence(made: Anomaly) -> Anomaly:
    return dataclasses.replace(made, sentence=sentence(made))
