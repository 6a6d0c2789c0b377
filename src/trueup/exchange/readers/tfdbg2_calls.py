"""Events of tfdbg2 as calls in steps: which run of a function a graph's results belong to, what each call read, where steps end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.tfdbg2_events import UNKNOWN, Events, Execution, Made, Source, Trace, place_of
from trueup.foundation.frameworks.tensorflow_names import PASSED_OVER, READ

Run = list[Made]
"""The calls of an eager operation or of a function's run."""


def executed(events: Events, notes: Notes) -> list[tuple[Run, bool, bool]]:
    """Return runs in order, each with whether a model and whether an optimizer runs in it.

    A model is a Keras layer; where none is seen, anything in the forward pass.
    """
    found = _Executed(events)
    runs = list(found.runs())
    if found.making:
        notes.say(f"{found.making:,} operations that give variables their first values were left out")
    models = any(events.stood(call.location).model for run in runs for call in run)
    told = []
    for run in runs:
        steps = any(call.phase == "optimizer" for call in run)
        begins = any(events.stood(call.location).model if models else call.phase == "forward" for call in run)
        told.append((run, begins, steps))
    return told


def in_order(runs: list[tuple[Run, bool, bool]]) -> list[Run]:
    """Put runs into steps: where a model begins to run after an optimizer has stepped, a step begins, as in a capture."""
    steps: list[Run] = [[]]
    stepped = False
    for run, begins, updates in runs:
        if stepped and begins:
            steps.append([])
            stepped = False
        steps[-1] += run
        stepped = stepped or updates
    return [step for step in steps if step]


class _Executed:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._made: dict[int, Source] = {}
        """Eager tensors by their numbers; a constant is made by no operation and is not among them."""
        self.making = 0

    def runs(self) -> Iterator[Run]:
        """Yield the calls of each eager operation, and of each run of a function."""
        traces = sorted(self._events.traces, key=lambda one: one.time)  # threads write them as they come
        at, number = 0, 0
        for execution in self._events.executions:
            self._made.update(execution.outputs)
            if execution.graph:
                until = at
                while until < len(traces) and traces[until].time <= execution.time:
                    until += 1
                yield self._function(traces[at:until], number, self._given(execution))
                at = until
            elif (call := self._eager(execution, number)) is not None:
                yield [call]
            number += 1
        if at < len(traces):  # of a function that had not returned when the process ended
            yield self._function(traces[at:], number, {})

    def _given(self, execution: Execution) -> dict[tuple[bytes, str, int], list[Source]]:
        """Return what a function was given, by its graph's placeholders: they are made in the order of its inputs."""
        places = self._events.placeholders.get(execution.graph, ())
        if len(places) != len(execution.inputs):
            return {}
        return {
            (execution.graph, name, 0): [self._made.get(id_, UNKNOWN)] for name, id_ in zip(places, execution.inputs, strict=True)
        }

    def _eager(self, execution: Execution, number: int) -> Made | None:
        stood = self._events.stood(execution.location)
        if execution.kind in PASSED_OVER:
            return None
        if stood.making:
            self.making += 1
            return None
        made = Made(f"{number}", execution.kind, "", stood.phase or "forward", execution.location)
        given = ((n, self._made.get(id_, UNKNOWN)) for n, id_ in enumerate(execution.inputs))
        made.inputs = [(f"input.{n}", source) for n, source in given if source.holds_numbers]
        made.outputs = [(f"output.{n}", source) for n, (_, source) in enumerate(execution.outputs) if source.holds_numbers]
        return _read(made)

    def _function(self, traces: list[Trace], number: int, given: dict[tuple[bytes, str, int], list[Source]]) -> Run:
        """Return the calls of what ran inside; an operation in the body of a loop is a call each time."""
        seen: Counter[tuple[bytes, str, int]] = Counter()
        gave = dict(given)
        calls: dict[tuple[bytes, str, int], Made] = {}
        for trace in traces:
            key = trace.graph, trace.op, trace.slot
            k = seen[key]
            seen[key] += 1
            gave.setdefault(key, []).append(trace.source)
            made = self._of_graph(trace.graph, trace.op, number, k)
            if made is not None and trace.source.holds_numbers:
                calls.setdefault((trace.graph, trace.op, k), made).outputs.append((f"output.{trace.slot}", trace.source))
        graphs = {trace.graph for trace in traces}
        for (graph, name), operation in self._events.operations.items():  # what gives nothing reads what others gave: updates
            if graph in graphs and (graph, name, 0) not in calls and any((graph, *source) in gave for source in operation.inputs):
                made = self._of_graph(graph, name, number, 0)
                if made is not None:
                    calls[graph, name, 0] = made
        for (graph, name, k), call in calls.items():
            known = self._events.operations.get((graph, name))
            for n, (node, slot) in enumerate(known.inputs if known is not None else ()):
                sources = gave.get((graph, node, slot)) or self._unseen(graph, node)
                if sources and sources[0].holds_numbers:
                    call.inputs.append((f"input.{n}", sources[min(k, len(sources) - 1)]))
        return [_read(call) for call in calls.values()]

    def _unseen(self, graph: bytes, node: str) -> list[Source]:
        """Return what stands for a tensor that a graph was given and that is not known; nothing for a handle, by its name."""
        known = self._events.operations.get((graph, node))
        return [UNKNOWN] if known is not None and known.kind == "Placeholder" and not node.endswith("resource") else []

    def _of_graph(self, graph: bytes, name: str, number: int, k: int) -> Made | None:
        known = self._events.operations.get((graph, name))
        kind = known.kind if known is not None else name.rpartition("/")[2]
        if kind in PASSED_OVER:
            return None
        location = known.location if known is not None else ()
        phase, scope = place_of(name, kind, self._events.stood(location))
        return Made(f"{number}:{graph.hex()}:{name}:{k}", kind, scope, phase, location)


def _read(call: Made) -> Made:
    """Say of an operation that reads a variable that it was given what it gives."""
    if call.kind == READ:
        call.inputs = [(slot.replace("output", "input"), source) for slot, source in call.outputs]
    return call
