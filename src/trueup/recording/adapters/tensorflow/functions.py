"""Each ``tf.function`` has a twin during a capture: the same Python function, traced anew with taps in its graphs.

The function itself is left alone. So what was traced before the capture began is seen all the same, steps that are not recorded run
the graphs that the user has, and nothing that is saved or exported holds a tap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from tensorflow.python.data.ops import structured_function
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function, polymorphic_function
from tensorflow.python.framework import auto_control_deps, func_graph

from trueup.recording.adapters.tensorflow.context import ThreadState
from trueup.recording.adapters.tensorflow.taps import NAME
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session

XLA = (
    "function {name} is compiled by XLA (jit_compile=True): what goes in and comes out is recorded, the operations inside are not; "
    "jit_compile=False shows them"
)
FUSION = (
    "functions run with taps in their graphs: kernels that TensorFlow's graph optimizer would fuse are not where a value inside is "
    "recorded, and sums of three and more gradients may be added in another order, so results may differ from those of a plain "
    "run in the last bits (docs/tensorflow.md)"
)


class Functions:
    """The twins of the functions that have run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._steps_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        """Outermost functions, and the optimizers that step in them."""

    def replacements(self) -> list[Replacement]:
        """Return what stands around the calls of functions, and around what must get no taps."""
        return [
            Replacement(polymorphic_function.Function, "__call__", self._around_call),
            Replacement(structured_function.StructuredFunctionWrapper, "__init__", self._aside),
            Replacement(auto_control_deps, "op_is_stateful", _unordered),
            Replacement(func_graph, "func_graph_from_py_func", self._around_built),
            Replacement(atomic_function, "from_func_graph", self._around_made),
        ]

    def _around_built(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Each graph of Python code is whole here; what a branch is made of decides next whether it may be left out."""

        @wraps(original)
        def func_graph_from_py_func(*args: Any, **kwargs: Any) -> Any:
            graph = original(*args, **kwargs)
            self._finish(graph)
            return graph

        return func_graph_from_py_func

    def _around_made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Each graph becomes a function here: also the backward of one, which is of no Python code (TensorFlow 2.21)."""

        @wraps(original)
        def from_func_graph(name: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._finish(graph)
            return original(name, graph, *args, **kwargs)

        return from_func_graph

    def _finish(self, graph: Any) -> None:
        session = self._session
        with session.observing(session.threads.state, "the taps of a function"):
            session.programs.finish(graph)

    def _around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
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

        return call

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
            return _untapped(state, original, function, args, kwargs)
        return self._run(state, original, function, args, kwargs)

    def _idle(self, original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function in a step that is not recorded; that an optimizer steps in it was seen when it was traced.

        One that was traced before the capture began is traced once more, without taps.
        """
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
        """Hear that an optimizer's step is put into a graph."""
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
                session.untold(f"tf.function.{getattr(function, '_name', '?')}")

    def _aside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            state = self._session.threads.state
            state.untapped += 1
            try:
                return original(*args, **kwargs)
            finally:
                state.untapped -= 1

        return run


def _untapped(
    state: ThreadState, original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    state.untapped += 1
    try:
        return original(function, *args, **kwargs)
    finally:
        state.untapped -= 1


def _unordered(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Let TensorFlow order nothing by a tap: it would make the graph's operations wait for one another, or for themselves."""

    @wraps(original)
    def op_is_stateful(op: Any) -> bool:
        return NAME not in op.name.rpartition("/")[2] and original(op)

    return op_is_stateful
