"""`tf.numpy_function` and `tf.py_function`: operations whose kernel is a Python function of the user's.

Such an operation is one call, in graphs and where it executes at once: what goes in and what comes out. What its function executes
is no call of its own, for it is given copies, which nothing recorded made; in a graph it runs on a thread of TensorFlow's besides.
Where it executes at once, `tf.numpy_function` is no operation at all: TensorFlow 2.21 just calls the function
(`script_ops.py_func_common`), so the call is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import script_ops

from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session

KIND = "PyFunc"
"""What `tf.numpy_function` is in a graph."""


class PythonFunctions:
    """Hears of Python functions that stand for operations."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def replacements(self) -> list[Replacement]:
        """Return what stands around a function that is called at once, and around those that operations call."""
        return [
            Replacement(script_ops, "py_func_common", self._around_call),
            Replacement(script_ops.FuncRegistry, "__call__", self._around_kernel),
        ]

    def _around_kernel(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._aside(original, *args, **kwargs)

        return call

    def _around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def py_func_common(func: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
            session = self._session
            state = session.threads.state
            if not tf.executing_eagerly() or state.busy or not session.active or not state.known:
                return original(func, inp, *args, **kwargs)
            given: list[Any] = []
            with session.observing(state, KIND), record.stop_recording():
                given = [_tensor(one) for one in inp] if isinstance(inp, (list, tuple)) else [_tensor(inp)]
            result = self._aside(original, func, inp, *args, **kwargs)
            session.operations.heard(KIND, given, (), result if isinstance(result, list) else [result])
            return result

        return py_func_common

    def _aside(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
