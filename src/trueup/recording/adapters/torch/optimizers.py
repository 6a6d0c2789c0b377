"""Optimizers and loss scaling: when a training step ends, and what `torch.amp.GradScaler` did in it.

A `torch.amp.GradScaler` becomes two api calls of phase optimizer: its scale, the overflows that it found, the step that it
skipped. They are kept whatever the filters say, like the loss. The scale is a tensor on the device and enters as a slot, so
nothing waits for it; the arguments repeat it, and say whether the step was skipped, where the host knows: on the CPU, and where
PyTorch has just waited for the device itself (it does unless the optimizer is fused).

What an optimizer is given, in a run of several processes: the gradient of each parameter after synchronisation. Hooks on
parameters see what this rank computed, before DDP's all-reduce, or never fire (FSDP2 swaps the parameters). The optimizer's own
pre-hook comes after all of it, and after unscaling and clipping.
"""

from __future__ import annotations

import heapq
import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import distributed
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trueup.recording.adapters.torch.buffers import fingerprints
from trueup.recording.adapters.torch.context import SessionCore, ThreadState, depth_of
from trueup.recording.engine import steps
from trueup.recording.engine.checkpointing import drop_stale
from trueup.recording.engine.replacing import Around, Replacement
from trueup.recording.recorder import Call

LOOKED_AT = 4
"""Weights of which a loop without optimizer is asked whether it has changed them: several, for a gradient may be zero."""
STEP = "torch.amp.GradScaler.step"
UPDATE = "torch.amp.GradScaler.update"


def _record_step(session: SessionCore, scaler: Any, optimizer: torch.optim.Optimizer, *, called: bool) -> None:
    """Record a step of a scaler after it was made; ``called`` tells whether it reached the optimizer."""
    call = _begin(session, STEP)
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    found = list(state.get("found_inf_per_device", {}).values())
    slots = [(f"input.found_inf.{k}", tensor) for k, tensor in enumerate(found)]
    session.slots.inputs(call, _scale(scaler, "input") + slots)
    arguments = _arguments(getattr(scaler, "_scale", None), found, optimizer, called)
    session.recorder.value(call, json.dumps(arguments, sort_keys=True))


def _begin(session: SessionCore, op: str) -> Call:
    return session.recorder.begin("api", "optimizer", "", op, site=session.site(session.threads.state))


def _scale(scaler: Any, prefix: str) -> list[tuple[str, torch.Tensor]]:
    scale = getattr(scaler, "_scale", None)
    return [] if scale is None else [(f"{prefix}.scale", scale)]


def _arguments(
    scale: torch.Tensor | None, found: list[torch.Tensor], optimizer: torch.optim.Optimizer, called: bool
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if scale is not None and (scale.device.type == "cpu" or not fused):
        arguments["scale"] = float(scale)
        arguments["skipped"] = any(bool(one) for one in found) if fused else not called
    return arguments


def _record_gradients(session: SessionCore, optimizer: torch.optim.Optimizer) -> None:
    """Record the gradients, synchronised by ranks, that an optimizer applies: slots ``input.<parameter>.grad`` of
    ``torch.optim.adamw.AdamW.step``."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    levels = [level for level in ("module", "api") if session.records(level)]
    if not levels:
        return
    found = _gradients(optimizer, session.scopes.parameters())
    kind, site = type(optimizer), session.site(session.threads.state)
    name, parent = f"{kind.__module__}.{kind.__qualname__}.step", None
    for level in levels:
        call = session.recorder.begin(level, "optimizer", "", name, parent=parent, site=site)
        parent = call.seq
        if call.recorded:
            session.slots.outputs(call, found)  # without producers: DDP copies them out of its buckets unseen


def _gradients(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[tuple[str, torch.Tensor]]:
    """Name each gradient by its parameter: its path in the model, else its place in the optimizer."""
    return [
        (f"input.{names.get(id(parameter)) or f'group{g}.{k}'}.grad", parameter.grad)
        for g, group in enumerate(optimizer.param_groups)
        for k, parameter in enumerate(group["params"])
        if isinstance(parameter, torch.Tensor) and parameter.grad is not None
    ]


class Optimizers(steps.Optimizers):
    """Hears of the steps of all optimizers of ``torch.optim`` by its own hooks, and of those that a GradScaler skips."""

    optimizer, kind = "optimizer of torch.optim", Optimizer

    def __init__(self, session: SessionCore) -> None:
        super().__init__(session)
        self._scaled: Optimizer | None = None  # the optimizer that a GradScaler steps, while it does
        self._stepped = False
        self._norm = 2.0  # which norm of gradients was taken last
        self._versions: list[tuple[torch.Tensor, int]] = []
        """What an optimizer that writes silently holds, with the versions before its step."""
        self._weights: list[tuple[weakref.ref[torch.Tensor], bytes]] = []
        """The smallest of what a backward gave gradients to, as they were then, where no optimizer has stepped."""
        self._held: bool | None = None  # whether a living optimizer holds such weights, though it has not stepped; None: not asked
        self.hooks: list[Any] = []  # handles of the hooks on all optimizers

    # ---------------------------------------------------------------- life
    def replacements(self) -> list[Replacement]:
        """Return the entrances of `GradScaler`, for a step that it skips never reaches the optimizer, and of what clips gradients:
        a script may hold `clip_grad_norm_` by name, but not what that calls."""
        scaler, clip = torch.amp.grad_scaler.GradScaler, torch.nn.utils.clip_grad
        return [
            Around(scaler, "step", self._scaler_step), Around(scaler, "update", self._scaler_update),
            Around(clip, "_get_total_norm", self._measure), Around(clip, "_clip_grads_with_norm_", self._clip),
            Around(torch.nn.utils, "clip_grad_value_", self._clip_values), Around(clip, "clip_grad_value_", self._clip_values),
        ]  # fmt: skip

    def _measure(self, original: Any, tensors: Any, norm_type: float = 2.0, *rest: Any, **kwargs: Any) -> Any:
        self._norm = float(norm_type)
        return original(tensors, norm_type, *rest, **kwargs)

    def _clip(self, original: Any, parameters: Any, max_norm: float, *rest: Any, **kwargs: Any) -> Any:
        self._clips(f"{'' if self._norm == 2 else f'{self._norm:g}-'}norm at", max_norm)
        return original(parameters, max_norm, *rest, **kwargs)

    def _clip_values(self, original: Any, parameters: Any, clip_value: float, *rest: Any, **kwargs: Any) -> Any:
        self._clips("each element at", clip_value)
        return original(parameters, clip_value, *rest, **kwargs)

    def _clips(self, how: str, limit: Any) -> None:
        if self._session.settings is not None and isinstance(limit, (int, float)):  # a tensor on a device would be waited for
            self._session.settings.clips(f"{how} {limit:g}")

    def watch(self) -> None:
        """Begin to hear of optimizer steps; this thread's end the training steps."""
        self._thread = threading.get_ident()
        self.hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def leave(self) -> None:
        for hook in self.hooks:
            hook.remove()

    # ---------------------------------------------------------------- what happens
    def entered(self, module: torch.nn.Module, state: ThreadState) -> None:
        """A module begins to run outside any other. Steps are counted idle or not."""
        if self._session.over:
            return
        state.shared.updating = False
        if state.runs:
            drop_stale(state.runs)
        if next(module.parameters(), None) is not None:  # a loss or a metric is no model
            self.forward(module, inside=_in_step(state), by_hand=bool(self._weights) and self._written_by_hand(state))

    def in_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def counts(self) -> bool:
        """Tell whether this thread's optimizers end steps: that of the capture, and those on which autograd works for it."""
        return threading.get_ident() == self._thread or self.in_backward()

    def parameters(self, optimizers: list[Optimizer]) -> set[int]:
        return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}

    def backward(self, state: ThreadState) -> None:
        """A backward pass has ended: what runs without gradients from here to the next forward is for the optimizer."""
        if threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1:
            state.shared.updating = True
            self._backwards += 1
            if self.unowned:
                with self._session.observing(state, "weights that no optimizer holds"):
                    self._weights = self._smallest()

    def _smallest(self) -> list[tuple[weakref.ref[torch.Tensor], bytes]]:
        """Return the smallest weights that have a gradient, as they are now; none where an optimizer that lives holds any. Their
        numbers tell, for ``weight.data.add_`` leaves no version behind; to look at more would make each step wait for longer."""
        if self._held:
            return []
        weights = {id(one): one for module in self.ran() for one in module.parameters() if _is_plain(one)}
        if self._held is None and weights:  # asked once
            self._held = not weights.keys().isdisjoint(self.parameters(self._session.built.of(Optimizer)))
        smallest = [] if self._held else heapq.nsmallest(LOOKED_AT, weights.values(), key=torch.Tensor.numel)
        return list(zip(map(weakref.ref, smallest), fingerprints(smallest), strict=True))

    def _written_by_hand(self, state: ThreadState) -> bool:
        """Tell whether weights have changed since the last backward that no optimizer holds."""
        before, self._weights = self._weights, []
        if not self.unowned:
            return False
        with self._session.observing(state, "weights that no optimizer holds"):
            living = [one for weight, _ in before if (one := weight()) is not None]
            if len(living) == len(before) and fingerprints(living) == [was for _, was in before]:
                return False
            return self.parameters(self._session.built.of(Optimizer)).isdisjoint(map(id, living))
        return False

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = any(map(callable, (*args[1:2], kwargs.get("closure"))))  # the first is the optimizer
        self.begin(optimizer, sys._getframe(1).f_code, closure=closure)

    def begin(self, optimizer: Optimizer, code: CodeType, *, closure: bool = False) -> None:
        state = self._session.threads.state
        state.closure = closure
        state.stepping, state.stepping_task = code, torch._C._current_graph_task_id()
        session, outermost = self._session, depth_of(state.stepping) == 1
        if outermost:
            self._versions = []
        if session.active and session.follows_functions and (session.skips_optimizer or _writes_silently(optimizer)):
            with session.observing(state, "what an optimizer holds"):
                self._versions += [(tensor, tensor._version) for tensor in _owned(optimizer)]
        if self._scaled is None and outermost:
            self.begun(optimizer)
        if session.sees() and not state.busy and not session.skips_optimizer:
            with session.observing(state, "the gradients"):
                _record_gradients(session, optimizer)
        session.pause_functions()

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.end(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        state = self._session.threads.state
        if state.stepping is not None and depth_of(state.stepping) > 1:  # one optimizer wrapped in another
            return
        self._session.resume_functions()
        state.stepping = None
        self._stepped = True
        if not self._session.follows_functions:
            self._session.buffers.forget()
        if self._versions:
            with self._session.observing(state, "what an optimizer wrote"):
                self._announce()
        if self._scaled is None:
            self.done(optimizer)

    def _announce(self) -> None:
        """Announce writes that nothing else tells: of extensions' kernels, and of all kernels where the phase is left out."""
        before, self._versions = self._versions, []
        for tensor, version in before:
            if self._session.skips_optimizer or tensor._version == version:
                self._session.buffers.written(tensor)

    # ---------------------------------------------------------------- loss scaling
    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        session, state = self._session, self._session.threads.state
        if self._session.over or not scaler.is_enabled() or not isinstance(optimizer, Optimizer) or self._scaled is not None:
            return original(scaler, optimizer, *args, **kwargs)
        self.begun(optimizer)
        self._scaled, self._stepped = optimizer, False
        state.stepping, state.stepping_task = sys._getframe().f_code, -1
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaled = state.stepping = None
        if session.sees():
            with session.observing(state, STEP):
                _record_step(session, scaler, optimizer, called=self._stepped)
        self.done(optimizer)
        return result

    def _scaler_update(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        session, state = self._session, self._session.threads.state
        if not session.sees() or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        call = None
        with session.observing(state, UPDATE):
            call = _begin(session, UPDATE)
            session.slots.inputs(call, _scale(scaler, "input"))
        state.stepping, state.stepping_task = sys._getframe().f_code, -1
        try:
            result = original(scaler, *args, **kwargs)
        finally:
            state.stepping = None
        if call is not None and session.active:
            with session.observing(state, UPDATE):
                session.slots.outputs(call, _scale(scaler, "output"))
        return result


def _is_plain(weight: torch.Tensor) -> bool:
    """Return whether a weight has a gradient, and its numbers are here: no process waits for another's to read them."""
    return weight.grad is not None and weight.device.type != "meta" and not hasattr(weight, "to_local") and weight.numel() > 0


def _in_step(state: ThreadState) -> bool:
    return state.stepping is not None and depth_of(state.stepping) > 0


def _writes_silently(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer may write without a trace: all functions that PyTorch's own call are known."""
    return not type(optimizer).__module__.startswith("torch.optim.")


def _owned(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimizer writes: its parameters and its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = optimizer.state.get(parameter, {})
            for tensor in (parameter, *(held.values() if isinstance(held, dict) else ())):
                if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                    yield tensor
