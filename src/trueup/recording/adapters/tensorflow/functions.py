"""What runs inside ``tf.function``: the calls that stand in graphs, and what came of them when the graphs executed.

Each function has a twin during a capture: the same Python function, traced anew with taps in its graphs. The function itself is
left alone. So what was traced before the capture began is seen all the same, steps that are not recorded run the graphs that the
user has, and nothing that is saved or exported holds a tap.

A tap in a graph: an operation that hands tensors to Python when the graph executes, and changes nothing that others read. The
graph's own operations keep their inputs. A tap is one of the graph's control outputs, so that it is executed, and counts as
stateful, so that it is not pruned where one function is inlined into another; TensorFlow is kept from ordering other operations
by it (`Functions`). What is tapped has one more reader: kernels that would fuse it away do not (docs/tensorflow.md).

A call in a graph is known when the graph is built; its values come from taps, whenever the graph executes, on threads of
TensorFlow's. When the outermost function has returned, everything that came is made calls of, in the order in which the graph was
built: the order of arrival differs from run to run.

`tf.numpy_function` and `tf.py_function`: operations whose kernel is a Python function of the user's. Such an operation is one
call, in graphs and where it executes at once: what goes in and what comes out. What its function executes is no call of its own,
for it is given copies, which nothing recorded made; in a graph it runs on a thread of TensorFlow's besides. Where it executes at
once, `tf.numpy_function` is no operation at all: TensorFlow 2.21 just calls the function (`script_ops.py_func_common`), so the
call is recorded here.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.data.ops import structured_function
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import atomic_function, polymorphic_function
from tensorflow.python.framework import auto_control_deps, func_graph
from tensorflow.python.ops import script_ops

from trueup.foundation.frameworks.dialect import device_name
from trueup.recording.adapters.tensorflow.context import NamedTensors, Node, SessionCore, ThreadState, number_of, slot_of
from trueup.recording.engine.replacing import Around, Replacement
from trueup.recording.recorder import Statistics

PY_FUNC = "PyFunc"
"""What a tap is in a graph, and `tf.numpy_function`."""
NAME = "trueup_tap"


# ----------------------------------------------------------------------------------------------------------------------- taps
def tap(graph: Any, tensors: Sequence[Any], deliver: Callable[..., None]) -> None:
    """Put a tap into a FuncGraph; ``deliver`` gets the tensors' values, arrays valid while it runs, on whatever thread
    executes."""

    def delivers(*values: Any) -> list[Any]:
        deliver(*values)
        return []

    kept = getattr(graph, "_trueup_taps", None)
    if kept is None:
        kept = graph._trueup_taps = []
    kept.append(delivers)  # TensorFlow's registry forgets a function that nobody holds
    token = script_ops._py_funcs.insert(delivers)
    value = attr_value_pb2.AttrValue
    types = value.ListValue(type=[tensor.dtype.base_dtype.as_datatype_enum for tensor in tensors])
    attrs = {"token": value(s=token.encode()), "Tin": value(list=types), "Tout": value(list=value.ListValue(type=[]))}
    with graph.control_dependencies(None):
        made = graph._create_op_internal(PY_FUNC, list(tensors), [], name=NAME, attrs=attrs, compute_device=True)
    graph.control_outputs.append(made)


# ---------------------------------------------------------------------------------------------------------------------- graphs
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
        self.tapped: set[int] = set()  # numbers of the tensors that have a tap
        self.devices: dict[int, str] = {}
        self.waiting: list[Any] = []  # tensors that the next tap takes
        self.bytes = 0  # how many these are, as far as their shapes are known
        self.optimizers: list[Any] = []  # what steps in it


class Programs:
    """The graphs of the twins of all functions."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._programs: dict[int, Program] = {}  # by the address of their graph, which they keep
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
        """Return the record of a graph."""
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
        """Give a tap to those of a call's tensors that have none; its slots refer to tensors by number."""
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
        """Called when a graph is about to become a function: tensors that wait for a tap get it."""
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
            came = [(a.dtype.name, a.shape, session.slots.measured(a)) for a in map(np.asarray, values)]
            with self._lock:
                self._touched[id(program)] = program
                for number, arrival in zip(numbers, came, strict=True):
                    self._arrived[number].append(arrival)

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


# ----------------------------------------------------------------------------------- Python functions that stand for operations
class PythonFunctions:
    """Hears of Python functions that stand for operations."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session

    def replacements(self) -> list[Replacement]:
        """Return the replacements that wrap functions called directly, and functions that operations call."""
        return [
            Around(script_ops, "py_func_common", self._called_at_once),
            Around(script_ops.FuncRegistry, "__call__", self._unseen),
        ]

    def _called_at_once(self, original: Callable[..., Any], func: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        state = session.threads.state
        if not tf.executing_eagerly() or state.busy or not session.active or not state.known:
            return original(func, inp, *args, **kwargs)
        given: list[Any] = []
        with session.observing(state, PY_FUNC), record.stop_recording():
            given = [_tensor(one) for one in inp] if isinstance(inp, (list, tuple)) else [_tensor(inp)]
        result = self._unseen(original, func, inp, *args, **kwargs)
        session.operations.heard(PY_FUNC, given, (), result if isinstance(result, list) else [result])
        return result

    def _unseen(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of which nothing is recorded."""
        state = self._session.threads.state
        before, state.busy = state.busy, True
        try:
            return run(*args, **kwargs)
        finally:
            state.busy = before


def _tensor(value: Any) -> Any:
    """Return an argument as a tensor, None where it holds no numbers."""
    if isinstance(value, (tf.Tensor, tf.Variable, bool, int, float)):
        return tf.convert_to_tensor(value)
    array = value if isinstance(value, (np.ndarray, np.generic)) else None
    return None if array is None or array.dtype.kind not in "biufc" else tf.convert_to_tensor(array)


# ----------------------------------------------------------------------------------------------------------------------- twins
XLA = (
    "function {name} is compiled by XLA (jit_compile=True): what goes in and comes out is recorded, the operations inside are not; "
    "jit_compile=False shows them"
)
FUSION = (
    "functions run with taps in their graphs: kernels that TensorFlow's graph optimizer would fuse are not where a value inside is "
    "recorded, and sums of three and more gradients may be added in a different order, so results may differ from those of a plain "
    "run in the last bits (docs/tensorflow.md)"
)


class Functions:
    """The twins of the functions that have run."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._steps_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        """Outermost functions, and the optimizers that step in them."""

    def replacements(self) -> list[Replacement]:
        """Return the replacements that wrap calls of functions, and graphs that must get no taps."""
        return [
            Around(polymorphic_function.Function, "__call__", self._called),
            Around(structured_function.StructuredFunctionWrapper, "__init__", self._untapped),
            Around(auto_control_deps, "op_is_stateful", unordered),
            Around(func_graph, "func_graph_from_py_func", self._built),
            Around(atomic_function, "from_func_graph", self._made),
        ]

    def _built(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Each graph of Python code is whole here; what a branch is made of decides next whether it may be left out."""
        graph = original(*args, **kwargs)
        self._finish(graph)
        return graph

    def _made(self, original: Callable[..., Any], name: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        """Each graph becomes a function here: also the backward of one, which is of no Python code (TensorFlow 2.21)."""
        self._finish(graph)
        return original(name, graph, *args, **kwargs)

    def _finish(self, graph: Any) -> None:
        session = self._session
        with session.observing(session.threads.state, "the taps of a function"):
            session.programs.finish(graph)

    def _called(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        state = session.threads.state
        if state.busy or not session.counts or not state.known or function._run_functions_eagerly or state.untapped:
            return original(function, *args, **kwargs)
        outermost = not state.functions and context.executing_eagerly()
        if not outermost and not state.functions:
            return original(function, *args, **kwargs)
        if outermost and not state.modules:
            session.enter_model(None, state)
        state.functions.append(function)
        try:
            return self._call(state, original, function, args, kwargs, outermost=outermost)
        finally:
            state.functions.pop()

    def _call(
        self, state: ThreadState, original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *,
        outermost: bool,
    ) -> Any:  # fmt: skip
        session = self._session
        if not session.active:
            return self._idle(original, function, args, kwargs) if outermost else original(function, *args, **kwargs)
        if not outermost and not state.tracing:
            return original(function, *args, **kwargs)
        if function._jit_compile:
            session.recorder.note(XLA.format(name=getattr(function, "_name", "?")))
            return self._untapped(original, function, *args, **kwargs)
        return self._run(state, original, function, args, kwargs)

    def _idle(self, original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function in a step that is not recorded; that an optimizer steps in it was seen when it was traced. One that was
        traced before the capture began is traced once more, without taps."""
        known = self._steps_in.get(function)
        if known is None:
            known = self._steps_in[function] = []
            traced = function.experimental_get_tracing_count() > 0
            result = original(function._clone(None) if traced else function, *args, **kwargs)
        else:
            result = original(function, *args, **kwargs)
        for optimizer in list(known):
            self._session.optimizers.stepped(optimizer)
        return result

    def steps(self, optimizer: Any) -> None:
        """Called when an optimizer's step is put into a graph."""
        functions = self._session.threads.state.functions
        if functions:
            found = self._steps_in.setdefault(functions[0], [])
            if not any(optimizer is known for known in found):
                found.append(optimizer)

    def _run(
        self, state: ThreadState, original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        session = self._session
        twin = self._twins.get(function)
        if twin is None:
            twin = self._twins[function] = function._clone(None)
            session.recorder.note(FUSION)
        state.tracing += 1
        try:
            return original(twin, *args, **kwargs)
        finally:
            state.tracing -= 1
            if not state.tracing and not session.flush() and session.records_all:
                session.unseen_inside(f"tf.function.{getattr(function, '_name', '?')}")

    def _untapped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what must get no taps."""
        state = self._session.threads.state
        state.untapped += 1
        try:
            return original(*args, **kwargs)
        finally:
            state.untapped -= 1


def unordered(original: Callable[[Any], bool], op: Any) -> bool:
    """Keep TensorFlow from ordering operations by a tap: they would wait for one another, or for themselves."""
    return NAME not in op.name.rpartition("/")[2] and original(op)
