"""The places from which Python reaches Paddle's kernels, and what stands there during a capture.

Nearly every function of Paddle looks an operator up in ``paddle._C_ops`` (some in ``paddle._legacy_C_ops``) when it is called, or
holds it under a name of its own since it was imported; both are replaced, by identity, in all modules that are loaded. The
operators of `paddle.Tensor` (``+``, ``@``, ``[]``) and a few of its methods go straight to C++ and are replaced in the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paddle
from paddle import _C_ops, _legacy_C_ops
from paddle.base import framework

from trueup.recording.adapters.paddle.calls import Function, execute
from trueup.recording.adapters.paddle.replacing import Sweep
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

MODULES = (("paddle._C_ops", _C_ops), ("paddle._legacy_C_ops", _legacy_C_ops))

OPERATORS = """
    add radd sub rsub mul rmul div truediv rdiv rtruediv floordiv rfloordiv pow rpow mod rmod matmul rmatmul
    gt ge lt le eq ne getitem setitem
""".split()
"""Special methods of `paddle.Tensor` that are C++, or go to C++ past the operators (Paddle 3.3.1)."""

METHODS = ("clone", "contiguous", "copy_", "_copy_to")
"""Methods of `paddle.Tensor` that compute in C++."""

SILENT = ("set_value", "get_tensor", "_share_buffer_to", "_clear_dataptr", "_clear", "__dlpack__", "_unsafe_share_buffer_to")
"""Methods after which a tensor's memory may hold something else, or be written by somebody unseen."""


class Entrances:
    """Everything through which operators are reached."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sweep = Sweep(())
        tensor = paddle.Tensor
        special = [f"__{name}__" for name in OPERATORS if hasattr(tensor, f"__{name}__")]
        self._class = [
            *(Replacement(tensor, name, _maker(session, f"paddle.Tensor.{name}")) for name in special),
            *(Replacement(tensor, name, _maker(session, f"paddle.Tensor.{name}")) for name in METHODS if hasattr(tensor, name)),
            *(Replacement(tensor, name, _forgetting(session)) for name in SILENT if hasattr(tensor, name)),
            Replacement(paddle.autograd.PyLayer, "apply", _py_layer(session)),
        ]

    def install(self) -> None:
        """Stand in the way of every operator."""
        session = self._session
        self._sweep = Sweep(operators(lambda op, function: _recorded(session, op, function)))
        self._sweep.install()
        for replacement in self._class:
            replacement.install()

    def remove(self) -> None:
        """Leave no trace."""
        for replacement in reversed(self._class):
            replacement.remove()
        self._sweep.remove()


def operators(make: Callable[[str, Function], Function | None]) -> list[tuple[Function, Function]]:
    """Return each operator that stands in its place at present, with what ``make`` gives for its name; None leaves it alone."""
    found: dict[int, tuple[Function, Function]] = {}
    for path, module in MODULES:
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith("_") or not callable(function) or id(function) in found:
                continue
            new = make(f"{path}.{name}", function)
            if new is not None:
                found[id(function)] = function, new
    return list(found.values())


def _maker(session: Session, op: str) -> Callable[[Function], Function]:
    return lambda original: _recorded(session, op, original)


def _recorded(session: Session, op: str, function: Function) -> Function:
    """Return a function that records what it executes, where that is for the capture to see."""
    threads, is_dynamic = session.threads, framework.in_dygraph_mode

    def call(*args: Any, **kwargs: Any) -> Any:
        if not session.active:
            return function(*args, **kwargs)
        state = threads.state
        if state.busy or not state.known or not is_dynamic():
            return function(*args, **kwargs)
        if state.contexts:
            outer = state.contexts[-1]
            if outer.opaque and outer.depth == len(state.passes):
                return function(*args, **kwargs)
        return execute(session, state, op, function, args, kwargs)

    return named_as(call, function)


def named_as(call: Function, function: Function) -> Function:
    """Let what stands in a function's place bear its name."""
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        try:
            setattr(call, name, getattr(function, name))
        except (AttributeError, TypeError):  # a builtin may have none
            continue
    return call


def _forgetting(session: Session) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        def call(tensor: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            state = session.threads.state
            if session.active and not state.busy:
                with session.observing(state, "memory handed out"):
                    for one in (tensor, *args):
                        if isinstance(one, paddle.Tensor):
                            session.buffers.written(one)
            return result

        return call

    return make


def _py_layer(session: Session) -> Callable[[Function], Any]:
    """Return what makes ``PyLayer.apply`` a call around the operators that it runs."""

    def make(_: Function) -> Any:
        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            original = super(paddle.autograd.PyLayer, kind).apply
            state = session.threads.state
            if not session.active or state.busy or kind.__module__.startswith("paddle.distributed.fleet.recompute"):
                return original(*args, **kwargs)
            return execute(session, state, f"{kind.__name__}.apply", original, args, kwargs, opaque=False)

        return classmethod(apply)

    return make
