"""Optimizers and loss scaling: when a training step ends.

What a `paddle.amp.GradScaler` did, as two api calls of phase optimizer: its scale, what overflowed, what it skipped. Kept
whatever the filters say, like the loss. Paddle itself reads on the host, in each step, whether something overflowed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import paddle
from paddle.optimizer import Optimizer

from trueup.recording.adapters.paddle.context import SessionCore, ThreadState
from trueup.recording.engine import steps
from trueup.recording.engine.replacing import Around, Replacement, kinds_below
from trueup.recording.recorder import Call

STEP = "paddle.amp.GradScaler.step"
UPDATE = "paddle.amp.GradScaler.update"


def scale_of(scaler: Any) -> paddle.Tensor | None:
    """Return the scale that a scaler has now."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, paddle.Tensor) else None


def skipped(scaler: Any) -> bool:
    """Tell whether the step that a scaler has just made was skipped."""
    return bool(getattr(scaler, "_cache_found_inf", None))


def record_step(session: SessionCore, scaler: Any, scale: paddle.Tensor | None, optimizer: Any) -> None:
    """Record a step of a scaler after it was made; ``scale`` is the one that it was made with."""
    call = _begin(session, STEP)
    found = getattr(scaler, "_found_inf", None)
    slots = [] if scale is None else [("input.scale", scale)]
    session.slots.inputs(call, slots + ([("input.found_inf.0", found)] if isinstance(found, paddle.Tensor) else []))
    arguments = {"optimizer": type(optimizer).__name__, "skipped": skipped(scaler)}
    if scale is not None and scale.place.is_cpu_place():
        arguments["scale"] = scale.item()
    session.recorder.value(call, json.dumps(arguments, sort_keys=True))


def record_update(session: SessionCore, before: paddle.Tensor | None, scaler: Any) -> None:
    """Record the scale with which the iteration ran, and that of the next."""
    call = _begin(session, UPDATE)
    session.slots.inputs(call, [] if before is None else [("input.scale", before)])
    after = scale_of(scaler)
    session.slots.outputs(call, [] if after is None else [("output.scale", after)])


def _begin(session: SessionCore, op: str) -> Call:
    return session.recorder.begin("api", "optimizer", "", op, site=session.site(session.threads.state))


class Optimizers(steps.Optimizers):
    """Stands around every optimizer's own step, and around a GradScaler's, which may skip it."""

    optimizer, kind = "optimizer of paddle.optimizer", Optimizer

    def __init__(self, session: SessionCore) -> None:
        super().__init__(session)
        self._scaled = False  # whether a GradScaler steps an optimizer: a step that it skips counts, too
        self._stepped = False  # whether the optimizer's own step was reached

    def replacements(self) -> list[Replacement]:
        scaler = paddle.amp.GradScaler
        scaled = [Around(scaler, name, self._scaled_step) for name in ("step", "minimize")]
        return [*steps_of_optimizers(self._step), *scaled, Around(scaler, "update", self._update)]

    # ---------------------------------------------------------------------------------------------------- what happens
    def entered(self, layer: paddle.nn.Layer, state: ThreadState) -> None:
        if self._session.over:
            return
        state.updating = False
        if next(iter(layer.parameters()), None) is not None:  # a loss or a metric is no model
            self.forward(layer, inside=bool(state.stepping))

    def parameters(self, optimizers: list[Any]) -> set[int]:
        found: set[int] = set()
        for optimizer in optimizers:
            for group in getattr(optimizer, "_param_groups", None) or ():
                found |= {id(p) for p in (group.get("params", ()) if isinstance(group, dict) else (group,))}
        return found

    def done(self, optimizer: Any) -> None:
        """An optimizer has stepped: what it wrote nobody announced."""
        session = self._session
        with session.observing(session.threads.state, "the end of an optimizer's step"):
            session.buffers.passed()
        super().done(optimizer)

    def backward(self, state: ThreadState) -> None:
        """A backward pass has ended: what runs without gradients from here to the next forward is for the optimizer."""
        if threading.get_ident() == self._thread:
            state.updating = True
            self._backwards += 1

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        session, state = self._session, self._session.threads.state
        if session.over or state.busy:
            return original(optimizer, *args, **kwargs)
        outermost = not state.stepping and not self._scaled
        if outermost:
            self.begun(optimizer)
        if outermost or (self._scaled and state.stepping == 1):
            self._stepped = True
            session.updates(optimizer, scaled=self._scaled)
        state.stepping += 1
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            state.stepping -= 1
        if outermost:
            self.done(optimizer)
        return result

    def _scaled_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        session, state = self._session, self._session.threads.state
        if session.over or state.busy or self._scaled or not isinstance(optimizer, Optimizer) or not scaler.is_enable():
            return original(scaler, optimizer, *args, **kwargs)
        self.begun(optimizer)
        scale = scale_of(scaler)
        self._scaled, self._stepped = True, False
        state.stepping += 1
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaled = False
            state.stepping -= 1
        if session.active:
            with session.observing(state, "the step of a GradScaler"):
                record_step(session, scaler, scale, optimizer)
        session.scaled(scaler, scale, stepped=self._stepped)
        self.done(optimizer)
        return result

    def _update(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        session, state = self._session, self._session.threads.state
        before = scale_of(scaler)
        result = original(scaler, *args, **kwargs)
        if session.active and not state.busy and scaler.is_enable():
            with session.observing(state, "the update of a GradScaler"):
                record_update(session, before, scaler)
        return result


def steps_of_optimizers(call: Callable[..., Any]) -> list[Replacement]:
    """Return the replacements that wrap every optimizer's own ``step`` and ``minimize``."""
    names = ("step", "minimize")
    return [Around(kind, name, call) for kind in (Optimizer, *kinds_below(Optimizer)) for name in names if name in vars(kind)]
