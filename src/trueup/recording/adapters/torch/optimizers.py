"""Optimizers and loss scaling: when a training step ends, and what `torch.amp.GradScaler` did in it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trueup.recording.adapters.torch import scaling
from trueup.recording.adapters.torch.context import ThreadState, depth_of
from trueup.recording.adapters.torch.replays import drop_stale
from trueup.recording.recorder.replacing import Replacement
from trueup.recording.recorder.steps import Steps

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

IRREGULAR = (
    "the optimizers do not step in one pattern, so from step {step} on each optimizer's step that a forward follows ends a step; "
    "call step() at the end of an iteration to count iterations"
)
ELSEWHERE = "an optimizer stepped on thread {thread}; only those on the thread that began the capture end steps"
ENDLESS = (
    "no optimizer of torch.optim stepped and step() was never called, so everything is step 0; call step() at the end of an "
    "iteration"
)


class Optimizers:
    """Feeds `Steps` with what happens in the process, and ends the session's steps."""

    def __init__(self, session: Session) -> None:
        self.steps = Steps()
        self._session = session
        self._thread = threading.get_ident()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._ran: dict[int, weakref.ref[torch.nn.Module]] = {}
        """Modules that ran outside any other in the first step."""
        self._scaled: Optimizer | None = None
        """The optimizer that a GradScaler steps, while it does."""
        self._stepped = False
        self._versions: list[tuple[torch.Tensor, int]] = []
        """What an optimizer that writes silently holds, with the versions before its step."""
        self._backwards = 0
        self.hooks: list[Any] = []
        """Handles of the hooks on all optimizers."""

    @property
    def pending(self) -> bool:
        """Whether an optimizer has stepped and the step is not over: what follows still belongs to it."""
        return bool(self.steps.stepped)

    # ---------------------------------------------------------------- life
    def replacements(self) -> list[Replacement]:
        """Return the entrances of `GradScaler`: a step that it skips never reaches the optimizer."""
        scaler = torch.amp.grad_scaler.GradScaler
        return [Replacement(scaler, "step", self._scaler_step), Replacement(scaler, "update", self._scaler_update)]

    def watch(self) -> None:
        """Begin to hear of optimizer steps; this thread's end the training steps."""
        self._thread = threading.get_ident()
        self.hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def leave(self) -> None:
        """Hear no more."""
        for hook in self.hooks:
            hook.remove()

    def close(self) -> None:
        """Note what the whole run tells: a loop whose steps nothing ended."""
        if self._backwards > 1 and not (self.steps.manual or self._count or self._session.recorder.step):
            self._session.recorder.note(ENDLESS)

    # ---------------------------------------------------------------- what happens
    def entered(self, module: torch.nn.Module, state: ThreadState) -> None:
        """A module begins to run outside any other. Steps are counted idle or not."""
        if self._session.over:
            return
        state.shared.updating = False
        if state.runs:
            drop_stale(state.runs)
        if threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1:
            return
        if next(module.parameters(), None) is None:  # a loss or a metric is no model
            return
        if self.steps.pattern is None:
            self._ran.setdefault(id(module), weakref.ref(module))
        if self.steps.forward(inside=_in_step(state), others=self._others):
            self._session.end_step()
            self.steps.forward(inside=False, others=self._others)

    def ended(self) -> None:
        """The session's step has ended."""
        self.steps.ended()
        if self.steps.pattern is not None:
            self._ran.clear()

    def backward(self, state: ThreadState) -> None:
        """A backward pass has ended: what runs without gradients from here to the next forward is for the optimizer."""
        if threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1:
            state.shared.updating = True
            self._backwards += 1

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self.begin(optimizer, sys._getframe(1).f_code)

    def begin(self, optimizer: Optimizer, code: CodeType) -> None:
        """An optimizer begins to step, in a frame that executes ``code``."""
        state = self._session.threads.state
        state.stepping, state.stepping_task = code, torch._C._current_graph_task_id()
        session, outermost = self._session, depth_of(state.stepping) == 1
        if outermost:
            self._versions = []
        if session.active and session.follows_functions and (session.skips_optimizer or _writes_silently(optimizer)):
            with session.observing(state, "what an optimizer holds"):
                self._versions += [(tensor, tensor._version) for tensor in _owned(optimizer)]
        if self._scaled is None and outermost:
            self._begun(optimizer, state)
        if session.sees() and not state.busy and not session.skips_optimizer:
            with session.observing(state, "the gradients"):
                session.updates.gradients(optimizer)
        session.pause_functions()

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.end(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
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
            self._ended(optimizer, state)

    def _announce(self) -> None:
        """Announce writes that nothing else tells: of extensions' kernels, and of all kernels where the phase is left out."""
        before, self._versions = self._versions, []
        for tensor, version in before:
            if self._session.skips_optimizer or tensor._version == version:
                self._session.buffers.written(tensor)

    def _begun(self, optimizer: Optimizer, state: ThreadState) -> None:
        with self._session.observing(state, "the begin of an optimizer's step"):
            if not self._counts():
                self._session.recorder.note(ELSEWHERE.format(thread=threading.current_thread().name))
                return
            was = self.steps.irregular
            if self.steps.begin(self._number(optimizer)):
                self._session.end_step()
            if self.steps.irregular and not was and not self.steps.manual:
                self._session.recorder.note(IRREGULAR.format(step=self._session.recorder.step + 1))

    def _ended(self, optimizer: Optimizer, state: ThreadState) -> None:
        with self._session.observing(state, "the end of an optimizer's step"):
            if self._counts() and self.steps.end(self._number(optimizer)):
                self._session.end_step()

    def _counts(self) -> bool:
        """Tell whether this thread's optimizers end steps: that of the capture, and those on which autograd works for it."""
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    def _number(self, optimizer: Optimizer) -> int:
        """Number optimizers as they come: the address of one that is gone may be another's."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._count
            self._count += 1
        return number

    def _others(self) -> bool:
        """Tell whether an optimizer that has not stepped yet holds parameters of the modules that ran, and those alone."""
        ran = [module for ref in self._ran.values() if (module := ref()) is not None]
        stepped = [optimizer for optimizer, number in self._numbers.items() if number in self.steps.stepped]
        missing = {id(p) for module in ran for p in module.parameters()} - _parameters(stepped)
        if not missing:
            return False
        alive = [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
        return bool(missing & _parameters(alive))

    # ---------------------------------------------------------------- loss scaling
    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.threads.state
            if self._session.over or not scaler.is_enabled() or not isinstance(optimizer, Optimizer) or self._scaled is not None:
                return original(scaler, optimizer, *args, **kwargs)
            self._begun(optimizer, state)
            self._scaled, self._stepped = optimizer, False
            state.stepping, state.stepping_task = sys._getframe().f_code, -1
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaled = state.stepping = None
            if session.sees():
                with session.observing(state, scaling.STEP):
                    scaling.record_step(session, scaler, optimizer, called=self._stepped)
            self._ended(optimizer, state)
            return result

        return step

    def _scaler_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            session, state = self._session, self._session.threads.state
            if not session.sees() or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            call = None
            with session.observing(state, scaling.UPDATE):
                call = scaling.begin_update(session, scaler)
            state.stepping, state.stepping_task = sys._getframe().f_code, -1
            try:
                result = original(scaler, *args, **kwargs)
            finally:
                state.stepping = None
            if call is not None and session.active:
                with session.observing(state, scaling.UPDATE):
                    scaling.end_update(session, call, scaler)
            return result

        return update


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


def _parameters(optimizers: list[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
