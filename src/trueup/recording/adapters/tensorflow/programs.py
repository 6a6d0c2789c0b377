"""What stands in graphs, and what came of it when they executed.

A call in a graph is known when the graph is built; its values come from taps, whenever the graph executes, on threads of
TensorFlow's. When the outermost function has returned, everything that came is made calls of, in the order in which the graph was
built: the order of arrival differs from run to run.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorflow.python.framework import func_graph

from trueup.foundation.frameworks.tensorflow_names import device_name
from trueup.recording.adapters.tensorflow.host import measure
from trueup.recording.adapters.tensorflow.nodes import Node, number_of
from trueup.recording.adapters.tensorflow.taps import tap
from trueup.recording.adapters.tensorflow.tensors import NamedTensors, slot_of
from trueup.recording.recorder import Statistics

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session

MOST_TENSORS = 32
"""Tensors of a tap: calling Python costs more than to measure a small tensor, and a tap keeps what it waits for in memory."""
MOST_BYTES = 1 << 20
"""Bytes of a tap beyond which it takes no more."""

Arrival = tuple[str, tuple[int, ...], Statistics | None]
"""Dtype, shape and statistics of a value that came."""


def _bytes(tensor: Any) -> int:
    """Return how many bytes a tensor of a graph has; where a size is not known, it counts as 1."""
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else ()
    return int(math.prod(size or 1 for size in sizes) * tensor.dtype.size)


class Program:
    """One graph: the calls that stand in it."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.tapped: set[int] = set()
        """Numbers of the tensors that have a tap."""
        self.devices: dict[int, str] = {}
        self.waiting: list[Any] = []
        """Tensors that the next tap takes."""
        self.bytes = 0
        """How many these are, as far as their shapes are known."""
        self.optimizers: list[Any] = []
        """What steps in it."""


class Programs:
    """The graphs of the twins of all functions."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs: dict[int, Program] = {}
        """By the address of their graph, which they keep."""
        self._count = 0
        self._arrived: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._touched: dict[int, Program] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------------ being built
    def follows(self, graph: Any) -> bool:
        """Tell whether calls in a graph can be followed."""
        state = self._session.threads.state
        return bool(state.tracing) and not state.untapped and isinstance(graph, func_graph.FuncGraph)

    def of(self, graph: Any) -> Program:
        """Return what is known of a graph."""
        found = self._programs.get(id(graph))
        if found is None:
            found = self._programs[id(graph)] = Program(graph)
        return found

    def add(self, node: Node, graph: Any) -> None:
        """Take up a call that stands in a graph."""
        node.index = self._count
        self._count += 1
        self.of(graph).nodes.append(node)

    def tap(self, graph: Any, node: Node, *tensors: NamedTensors) -> None:
        """Have the values of a call's tensors told that are not yet; its slots refer to them by number."""
        program = self.of(graph)
        wanted: list[Any] = []
        for name, tensor in [pair for named in tensors for pair in named]:
            number = number_of(tensor)
            node.slots.append((name, number))
            if number not in program.tapped and tensor.graph is graph:
                program.tapped.add(number)
                program.devices[number] = device_name(tensor.device)
                wanted.append(tensor)
        if not self._session.recorder_wants(node):
            program.tapped.difference_update(map(number_of, wanted))
            return
        program.waiting += wanted
        program.bytes += sum(map(_bytes, wanted))
        if len(program.waiting) >= MOST_TENSORS or program.bytes >= MOST_BYTES:
            self._put(program)

    def finish(self, graph: Any) -> None:
        """Hear that a graph is about to become a function: what waits for a tap gets it."""
        program = self._programs.get(id(graph))
        if program is not None and program.waiting:
            self._put(program)

    def _put(self, program: Program) -> None:
        taken, program.waiting, program.bytes = program.waiting, [], 0
        tap(program.graph, taken, partial(self._deliver, program, [number_of(tensor) for tensor in taken]))

    # -------------------------------------------------------------------------------------------------------- executing
    def _deliver(self, program: Program, numbers: list[int], *values: Any) -> None:
        session = self._session
        if not session.active:
            return
        state = session.threads.state  # of a thread of TensorFlow's
        with session.observing(state, f"a tap in {program.graph.name}"):
            came = [self._measured(np.asarray(value)) for value in values]
            with self._lock:
                self._touched[id(program)] = program
                for number, arrival in zip(numbers, came, strict=True):
                    self._arrived[number].append(arrival)

    def _measured(self, value: Any) -> Arrival:
        session = self._session
        try:
            stats = measure(value, session.options.detail)
        except (TypeError, ValueError) as error:
            session.recorder.note(f"no statistics for {value.dtype.name}: {error}")
            return value.dtype.name, value.shape, None
        if stats.data is not None:
            session.recorder.keep(stats)
        return value.dtype.name, value.shape, stats

    @property
    def waiting(self) -> bool:
        """Whether something came that was not made calls of."""
        return bool(self._touched)

    def executed(self) -> list[Any]:
        """Make calls of what came since the last time; return what stepped in it (see `Program.optimizers`)."""
        with self._lock:
            arrived, self._arrived = self._arrived, defaultdict(list)
            touched, self._touched = list(self._touched.values()), {}
        due: list[tuple[tuple[int, int, int], Node, int, Program]] = []
        stepped: list[Any] = []
        for program in touched:
            # the operations of a graph execute equally often; those of a branch that was not taken, never
            rounds = max((len(arrived[n]) for n in program.tapped if n in arrived), default=0)
            first = program.nodes[0].index or 0
            for k in range(rounds):
                for node in program.nodes:
                    if rounds == 1:
                        due.append(((node.index or 0, 0, 0), node, 0, program))
                    else:
                        due.append(((first, k, node.index or 0), node, k, program))
            stepped += program.optimizers
        for _, node, k, program in sorted(due, key=lambda item: item[0]):
            self._emit(node, k, program, arrived)
        return stepped

    def _emit(self, node: Node, k: int, program: Program, arrived: dict[int, list[Arrival]]) -> None:
        session = self._session
        parent = node.parent if node.parent is None or not node.parent.live else session.enclosing_now()
        session.execute(node, parent, k)
        call = node.call()
        if call is None or not call.recorded:
            return
        if node.value is not None:
            session.recorder.value(call, node.value)
        session.slots.add_unseen(call, node.unseen)
        for name, number in node.slots:
            came = arrived.get(number)
            if came:
                dtype, shape, stats = came[k] if k < len(came) else came[-1]
                slot = slot_of(name, dtype, shape, program.devices.get(number, "cpu"))
                session.slots.add(node, call, slot, number, stats)
