"""`trueup.watch` for PyTorch: rows stay in memory and are looked at before an optimizer steps, and at a step's end."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from trueup.analysis.watch.saving import Rerun
from trueup.analysis.watch.watcher import WatchedSession
from trueup.recording.adapters.torch.modes import put_on, take_off, without
from trueup.recording.adapters.torch.session import Session
from trueup.recording.adapters.torch.tensors import named_tensors
from trueup.recording.adapters.torch.watching_rerun import rerun
from trueup.recording.adapters.torch.watching_tape import Event, Tape, TapeMode, version_of
from trueup.recording.engine.replacing import Around
from trueup.recording.recorder import Call, CaptureOptions
from trueup.recording.recorder.options import WatchOptions


class WatchSession(WatchedSession, Session):
    """A session whose recorder keeps the present step; see `WatchedSession`."""

    def __init__(self, directory: Path, options: CaptureOptions, watch: WatchOptions, root: dict[str, Any]) -> None:
        super().__init__(directory, options, watch, root)
        self.tape = Tape(self.keeper.next_seq, self.slots.devices)
        self._tape_mode = TapeMode(self._follows, self.tape, self._follow)
        self.around_model = self._run_model
        scaler = torch.amp.grad_scaler.GradScaler
        self._always.append(Around(scaler, "step", self._scaler_step))
        self._entrances.append(Around(torch.autograd, "_engine_run_backward", self._run_backward))
        self._stepped = False
        self._hook: Any = None
        self._on_tape = False

    def again(self, calls: Sequence[Call], numbered: Sequence[Call]) -> Rerun:
        return rerun(self, self.tape, calls, numbered)

    # ---------------------------------------------------------------- life
    def start(self) -> None:
        super().start()
        self._hook = register_optimizer_step_pre_hook(self._before_update)  # after the session's own

    def take_off(self) -> None:
        super().take_off()
        if self._hook is not None:
            self._hook.remove()

    def end_step(self) -> None:
        try:
            super().end_step()
        finally:
            self.tape.clear()

    # ---------------------------------------------------------------- when to look
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look while the parameters are those of the step: now, or when the closure that an optimizer was given has run."""
        place = next((k for k, given in enumerate(args[1:], 1) if callable(given)), None)
        closure = kwargs.get("closure") if place is None else args[place]
        if closure is None or threading.get_ident() != self._thread or not self.active:
            self._updates(optimizer)
            return None
        followed = functools.partial(self._run_closure, optimizer, closure)
        if place is None:
            return args, {**kwargs, "closure": followed}
        return (*args[:place], followed, *args[place + 1 :]), kwargs

    def _run_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Run forward and backward inside an optimizer's step (LBFGS, Lightning) as what they are."""
        state = self.threads.state
        stepping, state.stepping = state.stepping, None
        self.resume_functions()
        try:
            result = closure()
        finally:
            state.stepping = stepping
        self._updates(optimizer)
        self.pause_functions()
        return result

    def _updates(self, optimizer: Optimizer) -> None:
        """Look, as the parameters are about to change; in a backward that updates them as it goes there is no time to."""
        self._stepped = True
        if threading.get_ident() != self._thread or self.over:
            return
        if torch._C._current_graph_task_id() == -1:
            self.look_before_update(scaler_skips=_found_inf(optimizer))
        self.tape.updated(optimizer)

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._stepped = False
        result = original(scaler, optimizer, *args, **kwargs)
        if self.active and scaler.is_enabled() and threading.get_ident() == self._thread:
            skipped = not self._stepped or _found_inf(optimizer)
            with self.observing(self.threads.state, "the loss scale"):
                self.watcher.scaled(getattr(scaler, "_scale", None), skipped=skipped)
            if not self._stepped:  # else it was looked at before the optimizer stepped
                self.look_before_update(scaler_skips=True)
        return result

    # ---------------------------------------------------------------- what goes on the tape
    def _follows(self) -> bool:
        """Tell whether what executes now is outside modules, and is not an optimizer's work."""
        state = self.threads.state
        if state.busy or state.modules or not self.sees() or torch._C._current_graph_task_id() != -1:
            return False
        return not (state.shared.updating and not torch.is_grad_enabled())

    def _follow(
        self, name: str, begin: Callable[[], Event], args: Any, kwargs: Any, run: Callable[[], Any], *, always: bool = False
    ) -> Any:
        """Run something between the begin and the end of its event; a function that is given no tensor is none."""
        state = self.threads.state
        event, given, versions = None, [], []
        with self.observing(state, name):
            given = named_tensors("input", args, kwargs)
            event = begin() if given or always else None
            versions = [version_of(tensor) for _, tensor in given]
        result = run()
        if event is not None:
            with self.observing(state, name):
                self.tape.end(event, given, versions, result)
        return result

    def _run_model(self, run: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = functools.partial(run, module, args, kwargs)
        if not self._follows() or threading.get_ident() != self._thread:
            return call()
        with without(self._tape_mode):
            begin = functools.partial(self.tape.module, module, args, kwargs)
            return self._follow(type(module).__name__, begin, args, kwargs, call, always=True)

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        if not self.active or not self._follows():
            return call()
        return self._follow("backward", functools.partial(self.tape.backward, args, kwargs), args, kwargs, call)

    # ---------------------------------------------------------------- the mode on and off
    def _switch(self, *, on: bool) -> None:
        self._turn(on=on)
        super()._switch(on=on)

    def pause_functions(self) -> None:
        super().pause_functions()
        if self._paused or not self._modes:
            self._turn(on=False)

    def resume_functions(self) -> None:
        if self._paused or not self._modes:
            self._turn(on=self._on)
        super().resume_functions()

    def _turn(self, *, on: bool) -> None:
        """Put the tape's mode on or off; it stands above the session's, which is put below: events begin before their calls."""
        if threading.get_ident() == self._thread and hasattr(self, "_tape_mode"):
            put_on(self._tape_mode) if on else take_off(self._tape_mode)


def _found_inf(optimizer: Optimizer) -> bool:
    """Tell whether a fused optimizer is to skip its step itself, by a GradScaler's order."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found)
