"""Optimizers: what they are given, and when a training step ends."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trueup.recording.adapters.tensorflow.context import ThreadState
from trueup.recording.adapters.tensorflow.scopes import has_weights
from trueup.recording.adapters.tensorflow.tensors import NamedTensors, holds_numbers
from trueup.recording.recorder.replacing import Replacement
from trueup.recording.recorder.steps import Steps

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session

IRREGULAR = (
    "the optimizers do not step in one pattern, so from step {step} on each optimizer's step that a forward follows ends a step; "
    "call step() at the end of an iteration to count iterations"
)
ENDLESS = "no optimizer stepped and step() was never called, so everything is step 0; call step() at the end of an iteration"


class Optimizers:
    """Feeds `Steps` with what happens in the process, and ends the session's steps."""

    def __init__(self, session: Session) -> None:
        self.steps = Steps()
        self._session = session
        self._thread = threading.get_ident()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._backwards = 0

    @property
    def pending(self) -> bool:
        """Whether an optimizer has stepped and the step is not over: what follows still belongs to it."""
        return bool(self.steps.stepped)

    def keras_replacements(self) -> list[Replacement]:
        """Return what stands around every Keras optimizer's step."""
        module = sys.modules["keras.src.optimizers.base_optimizer"]
        return [Replacement(module.BaseOptimizer, "apply", self._around)]

    def replacements(self) -> list[Replacement]:
        """Return what stands around the optimizers of TensorFlow 1."""
        return [Replacement(tf.compat.v1.train.Optimizer, "apply_gradients", self._around)]

    def close(self) -> None:
        """Note what the whole run tells: a loop whose steps nothing ended."""
        if self._backwards > 1 and not (self.steps.manual or self._count or self._session.recorder.step):
            self._session.recorder.note(ENDLESS)

    # ---------------------------------------------------------------------------------------------------- what happens
    def entered(self, layer: Any | None, state: ThreadState) -> None:
        """A layer, or a function (None), begins to run outside any other. Steps are counted idle or not."""
        if self._session.over or threading.get_ident() != self._thread or state.passes:
            return
        if layer is not None and not has_weights(layer):
            return
        if self.steps.forward(inside=bool(state.stepping), others=lambda: False):
            self._session.end_step()
            self.steps.forward(inside=False, others=lambda: False)

    def backward(self) -> None:
        """A backward pass has ended."""
        self._backwards += 1

    def stepped(self, optimizer: Any) -> None:
        """An optimizer stepped in a graph that has executed."""
        self._begun(optimizer)
        self._ended(optimizer)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def apply(optimizer: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            session = self._session
            state = session.threads.state
            if session.over or state.busy:
                return original(optimizer, grads, *args, **kwargs)
            graph = session.graph_here()
            follows = session.active and (graph is None or session.programs.follows(graph))
            outermost = not state.stepping
            if outermost and graph is None:
                self._begun(optimizer)
            elif outermost:
                session.functions.steps(optimizer)
                if follows:
                    session.programs.of(graph).optimizers.append(optimizer)
            if outermost and follows:
                with session.observing(state, "what an optimizer is given"):
                    self._given(optimizer, grads, args, kwargs, state, graph)
                if graph is None:
                    session.updates(optimizer)
            state.stepping += 1
            try:
                result = original(optimizer, grads, *args, **kwargs)
            finally:
                state.stepping -= 1
            if outermost and graph is None:
                self._ended(optimizer)
            return result

        return apply

    # ------------------------------------------------------------------------------------------------------------- inside
    def _given(self, optimizer: Any, grads: Any, args: Any, kwargs: Any, state: ThreadState, graph: Any) -> None:
        """Record the gradients by the names of their variables."""
        session = self._session
        pairs = list(grads) if not hasattr(grads, "dtype") else []
        if not pairs or not isinstance(pairs[0], tuple):
            variables = args[0] if args else kwargs.get("trainable_variables")
            variables = variables if variables is not None else getattr(optimizer, "_trainable_variables", ())
            pairs = list(zip(pairs, variables, strict=False))
        found: NamedTensors = []
        for gradient, variable in pairs:
            name = session.scopes.weight(variable)
            if holds_numbers(gradient):
                found.append((f"input.{name}", gradient))
            elif isinstance(gradient, tf.IndexedSlices):
                found += [(f"input.{name}.values", gradient.values), (f"input.{name}.indices", gradient.indices)]
        op = f"keras.optimizers.{type(optimizer).__name__}.apply"
        node = session.begin("api", "optimizer", "", op, parent=None, forward=None, site=session.site(state, graph), graph=graph)
        session.slots.inputs(node, found)
        if graph is not None:
            session.programs.tap(graph, node, found)

    def _begun(self, optimizer: Any) -> None:
        session = self._session
        with session.observing(session.threads.state, "the begin of an optimizer's step"):
            if threading.get_ident() != self._thread:
                return
            was = self.steps.irregular
            if self.steps.begin(self._number(optimizer)):
                session.end_step()
            if self.steps.irregular and not was and not self.steps.manual:
                session.recorder.note(IRREGULAR.format(step=session.recorder.step + 1))

    def _ended(self, optimizer: Any) -> None:
        session = self._session
        with session.observing(session.threads.state, "the end of an optimizer's step"):
            if threading.get_ident() == self._thread and self.steps.end(self._number(optimizer)):
                session.end_step()

    def _number(self, optimizer: Any) -> int:
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._count
            self._count += 1
        return number
