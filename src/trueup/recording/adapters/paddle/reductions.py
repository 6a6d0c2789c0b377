"""What the reducer of ``paddle.DataParallel`` does to gradients, which C++ issues unseen: shown as one collective a backward pass.

    paddle.DataParallel.reduce_gradients    input.<parameter>   the gradient that this rank gives: of the pass, and of those
                                                                before it that ran under ``no_sync``
                                            output.<parameter>  its ``.grad`` when the pass has ended: the mean over the ranks

A hook on a parameter runs before the gradient is added to what is there, and before the reducer's own.
"""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any

import paddle

from trueup.recording.adapters.paddle.tensors import holds
from trueup.recording.recorder import Call
from trueup.recording.recorder.surroundings import ranks_in_words

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

REDUCER = (
    "paddle.DataParallel adds up gradients over the ranks in C++: that is shown as paddle.DataParallel.reduce_gradients, from the "
    "gradients before and after it, not as the all-reduces that it is made of"
)
FUNCTION = "paddle.DataParallel.reduce_gradients"


class Reductions:
    """Follows the gradients of the DataParallel Layers that run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: weakref.WeakSet[paddle.nn.Layer] = weakref.WeakSet()
        self._gathered: set[int] = set()
        """Addresses of Layers that gathered gradients under ``no_sync`` since the last pass that reduced."""
        self._hooks: list[tuple[paddle.Tensor, int]] = []
        self._calls: dict[int, tuple[paddle.nn.Layer, list[Call], dict[str, paddle.Tensor]]] = {}
        """By the address of a Layer: the calls of the pass that runs, and the parameters that got a gradient, by name."""

    def meet(self, layer: paddle.nn.Layer) -> None:
        """Follow a DataParallel Layer that has a reducer, from its first call on."""
        if layer in self._known or getattr(layer, "_reducer", None) is None:
            return
        self._known.add(layer)
        self._session.recorder.note(REDUCER)
        for name, parameter in layer._layers.named_parameters():
            if not parameter.stop_gradient and not getattr(parameter, "no_sync", False):
                hook = self._on_gradient(weakref.ref(layer), name, parameter)
                self._hooks.append((parameter, parameter._register_grad_hook(hook)))

    def remove(self) -> None:
        """Take our hooks off the parameters."""
        hooks, self._hooks = self._hooks, []
        self._known.clear()
        for parameter, number in hooks:
            parameter._remove_grad_hook(number)

    def _on_gradient(self, ref: weakref.ref[paddle.nn.Layer], name: str, parameter: paddle.Tensor) -> Any:
        session = self._session

        def hook(gradient: Any) -> None:
            state, layer = session.threads.state, ref()
            if layer is None or not session.active or state.busy or not holds(gradient):
                return
            if not layer.grad_need_sync:
                self._gathered.add(id(layer))
                return
            with session.observing(state, FUNCTION):
                found = self._calls.get(id(layer))
                if found is None:
                    calls = session.collectives.calls(FUNCTION, state)
                    ranks = list(getattr(layer.group, "ranks", None) or range(paddle.distributed.get_world_size()))
                    said = {"group": str(getattr(layer.group, "id", 0)), "ranks": ranks_in_words(ranks), "reduce_op": "AVG"}
                    for call in calls:
                        session.recorder.value(call, json.dumps(said, sort_keys=True))
                    found = self._calls[id(layer)] = layer, calls, {}
                    session.passes.at_end(self.finish)
                found[2][name] = parameter
                if id(layer) in self._gathered and holds(before := parameter.grad):
                    with paddle.no_grad():
                        gradient = paddle.add(before, gradient)
                for call in found[1]:
                    if call.recorded:
                        session.slots.received(call, [(f"input.{name}", gradient)])

        return session.graph.guarded(hook)

    def finish(self) -> None:
        """Show what became of the gradients, at the end of a pass."""
        session, passes = self._session, list(self._calls.values())
        self._gathered -= self._calls.keys()
        self._calls.clear()
        for _, calls, parameters in passes:
            for call in calls:
                found = [(f"output.{name}", p.grad) for name, p in parameters.items() if p.grad is not None and holds(p.grad)]
                if call.recorded and session.active:
                    session.slots.delivered(call, found)
