"""`tf.custom_gradient`: what a gradient function of the user's gets and makes is a call, and what it executes is inside.

TensorFlow's own functions have such gradients too (`tf.nn.silu`, `tf.recompute_grad`). A tape is given the Python function itself
(`record.record_operation`) and never asks for it by name. Whatever makes the backward of a function's graph asks for the gradient
of an ``IdentityN`` through which arguments and results pass (`custom_gradient._graph_mode_decorator` of TensorFlow 2.21). There
the arguments stand behind the results, and so do their gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from tensorflow.python.eager import record
from tensorflow.python.ops import custom_gradient

from trueup.recording.adapters.tensorflow.nodes import Node, number_of
from trueup.recording.adapters.tensorflow.tensors import holds_numbers
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session

OP = "tf.custom_gradient"


@dataclass(frozen=True)
class Custom:
    """A function with a gradient of its own, as it was called."""

    forward: Node
    """The operation that its results came through."""
    results: int
    """How many it has."""
    shifted: bool
    """Whether arguments and their gradients stand behind the results."""
    inputs: dict[int, str]
    outputs: dict[int, str]
    """Tensors, by their numbers."""


class CustomGradients:
    """Knows the gradient functions that users wrote."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._by_output: dict[int, Custom] = {}

    def forget(self) -> None:
        """Let go of what was executed, at the end of a step."""
        self._by_output = {k: v for k, v in self._by_output.items() if not v.forward.live}

    def replacements(self) -> list[Replacement]:
        """Return what stands around what is put on a tape."""
        return [Replacement(record, "record_operation", self._around_record)]

    def of(self, gradient: Any, made: Any) -> Custom | None:
        """Return what is known of a gradient function that a graph asks for, by the first tensor that came through it."""
        return self._by_output.get(number_of(made)) if made is not None and _is_custom(gradient) else None

    def _around_record(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def record_operation(
            op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Any, forward_function: Any = None
        ) -> Any:
            gradient = backward_function
            session = self._session
            state = session.threads.state
            if session.active and not state.busy and _is_custom(backward_function):
                with session.observing(state, OP):
                    gradient = self._followed(output_tensors, input_tensors, backward_function)
            return original(op_type, output_tensors, input_tensors, gradient, forward_function)

        return record_operation

    def _followed(self, outputs: Sequence[Any], inputs: Sequence[Any], backward: Callable[..., Any]) -> Callable[..., Any]:
        custom = self._seen(outputs, inputs, backward)
        if custom is None:
            return backward

        @wraps(backward)
        def gradient(*out_grads: Any) -> Any:
            return self._session.gradients.differentiated_by_hand(custom, out_grads, lambda: backward(*out_grads))

        return gradient

    def _seen(self, outputs: Sequence[Any], inputs: Sequence[Any], backward: Any) -> Custom | None:
        """Take note of a call; None where the operation that its results came through was not recorded."""
        first = next((tensor for tensor in outputs if holds_numbers(tensor)), None)
        forward = None if first is None else self._session.gradients.maker(first)
        if forward is None:
            return None
        ahead = inspect.getclosurevars(backward).nonlocals.get("flat_result_len", 0)
        results = list(outputs[:ahead] if ahead else outputs)
        custom = Custom(forward, len(results), bool(ahead), _numbered("input", inputs[ahead:]), _numbered("output", results))
        for number in custom.outputs:
            self._by_output[number] = custom
        return custom


def _is_custom(gradient: Any) -> bool:
    return bool(getattr(gradient, "__module__", None) == custom_gradient.__name__)


def _numbered(prefix: str, tensors: Sequence[Any]) -> dict[int, str]:
    return {number_of(tensor): f"{prefix}.{k}" for k, tensor in enumerate(tensors) if holds_numbers(tensor)}
