"""A running capture of PyTorch: the modes, the module calls, the optimizer hooks, and what they all record through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack

from trueup.recording.adapters.torch.buffers import Buffers
from trueup.recording.adapters.torch.collectives import Collectives
from trueup.recording.adapters.torch.compiling import Compiling, FollowingMode
from trueup.recording.adapters.torch.context import Shared, Threads, ThreadState
from trueup.recording.adapters.torch.dispatch import DispatchMode
from trueup.recording.adapters.torch.environment import describe_run, rank_and_world
from trueup.recording.adapters.torch.functions import FunctionMode
from trueup.recording.adapters.torch.invocations import Invocations
from trueup.recording.adapters.torch.modes import put_on, take_off
from trueup.recording.adapters.torch.modules import RUN_MODULE, module_calls
from trueup.recording.adapters.torch.observing import Observing
from trueup.recording.adapters.torch.optimizers import Optimizers
from trueup.recording.adapters.torch.replacing import entrances
from trueup.recording.adapters.torch.scopes import Scopes
from trueup.recording.adapters.torch.slots import Slots
from trueup.recording.adapters.torch.statistics import resolve
from trueup.recording.adapters.torch.updates import Updates
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.failure import Failure
from trueup.recording.recorder.options import in_ranges
from trueup.recording.recorder.replacing import Replacement
from trueup.recording.recorder.session import BaseSession

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.golden_forcing import Forcing
    from trueup.recording.adapters.torch.policies import AppliedPolicy
    from trueup.recording.adapters.torch.shadowing import ShadowMode

TORCH = str(Path(torch.__file__).parent)


class Session(BaseSession):
    """Everything the modes share. One at a time in a process."""

    nothing_ran = "no PyTorch call was executed while the capture was on"

    def __init__(
        self, directory: Path, options: CaptureOptions, root: dict[str, Any], scopes: Scopes | None = None
    ) -> None:
        self.options = options
        self.threads = Threads(Shared())
        self.scopes = scopes or Scopes()
        self.recorder = self.recorder_type(directory, options, self.identify, resolve, internal=(TORCH,))
        self.buffers = Buffers(self.recorder)
        self.invocations = Invocations(self) if options.detail == "tensor" else None
        self.slots = Slots(self)
        self.collectives, self.updates = Collectives(self), Updates(self)
        self.failure = Failure(self.recorder, options.on_error)
        self._root = root
        self.forcing: Forcing | None = None
        if options.inputs_from is not None:
            from trueup.recording.adapters.torch.golden_calls import forcing

            self.forcing = forcing(self, options.inputs_from, options.force)
        self.function_mode = FunctionMode(self)
        self.shadow: ShadowMode | None = None
        if options.shadow is not None:
            from trueup.recording.adapters.torch.shadowing import ShadowMode

            self.shadow = ShadowMode(self)
        self.dispatch_mode = self.shadow or (DispatchMode if options.compile == "off" else FollowingMode)(self)
        self._modes = self._modes_for(options.levels)
        self.optimizers = Optimizers(self)
        self._always = [module_calls(self), *self.optimizers.replacements()]
        if self.forcing is not None:
            self._always[1:1] = self.forcing.replacements()  # around the module calls that are recorded
        self._entrances = entrances(self, functions=bool(self._modes))
        self.compiling = Compiling(self)
        self._thread, self._on, self._paused = 0, False, False
        self.policies: list[AppliedPolicy] = []
        """Policies that were at work while it ran."""
        self.around_model: Callable[[Callable[..., Any], torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Runs a module that begins outside any other, where somebody follows those: ``(run, module, args, kwargs)``."""
        self._kinds = set(options.levels)
        self.skips_optimizer = "optimizer" not in options.phases
        self.passes_optimizer = self.skips_optimizer or "api" not in options.levels
        """Whether an optimizer's functions pass by: no gradient flows through them, so operators need no mark of theirs."""

    def _modes_for(self, levels: tuple[str, ...]) -> list[FunctionMode | DispatchMode]:
        """Return the modes that levels need: modules alone are seen by replacing their call."""
        if tuple(levels) == ("module",):
            return []
        return [self.function_mode, self.dispatch_mode] if "aten" in levels else [self.function_mode]

    @property
    def follows_functions(self) -> bool:
        """Whether functions are seen; where modules are all that is, writes past the version counter go unseen."""
        return bool(self._modes)

    # ---------------------------------------------------------------- life
    def start(self) -> None:
        """Begin to see calls on this thread (and on the backward threads that autograd starts from it)."""
        self._thread = threading.get_ident()
        if (policies := sys.modules.get("trueup.recording.adapters.torch.policies")) is not None:
            self.policies += policies.applied()
        self.recorder.policy = lambda: [use.to_json() for policy in self.policies for use in policy.uses()]
        for replacement in self._always:
            replacement.install()
        self.collectives.install()
        self.compiling.start()
        self.optimizers.watch()
        self.threads.state.observed = True
        self._update_active()

    def take_off(self) -> None:
        """Leave nothing of ours in PyTorch; modes of another thread than this stay, idle."""
        self._switch(on=False)
        if threading.get_ident() == self._thread:
            for mode in self._modes:
                take_off(mode, left=True)
        self.compiling.stop()
        for replacement in reversed(self._always):
            replacement.remove()
        self.collectives.remove()
        self.optimizers.leave()

    def finish(self) -> None:
        """Write what is left, without touching the modes (at the end of an armed process)."""
        self.active, self.over = False, True
        self.optimizers.close()
        with self.observing(self.threads.state, "collectives under way"):
            self.collectives.end()
            if self.shadow is not None:
                self.shadow.finish()
            if self.forcing is not None:
                self.forcing.finish()
        self.recorder.close("complete" if self.failure.text is None else "stopped")

    def steps_by_hand(self) -> None:
        """Let nothing but `step` end steps from now on."""
        self.optimizers.steps.manual = True

    def step(self) -> None:
        """End the present step; from now on only this ends steps."""
        with self.observing(self.threads.state, "the end of a step"):
            if self.optimizers.steps.by_hand():
                self.end_step()

    def enter_model(self, module: torch.nn.Module) -> None:
        """Hear that a module begins to run outside any other: a step may be due."""
        self.compiling.look()
        self.resume_functions()  # in a closure that an optimizer evaluates, or after a step of it that raised
        if self.active != self._on:  # another thread ended the step
            self._switch(on=self.active)
        state = self.threads.state
        with self.observing(state, "the end of a step"):
            self.optimizers.entered(module, state)

    def end_step(self) -> None:
        """Finish the present step."""
        self.optimizers.ended()
        self.collectives.settle()
        if self.shadow is not None:
            self.shadow.end_step()
        self.recorder.end_step()
        if not self._modes:  # writes through `.data` were seen by nobody
            self.buffers.forget()
        self._update_active()
        if self.options.is_over(self.recorder.step):
            raise SystemExit(0)  # all ranks get here at the end of the same step

    def _update_active(self) -> None:
        rank, _ = rank_and_world()
        active = self.failure.text is None and self.recorder.active and in_ranges(rank or 0, self.options.ranks)
        if active and not self.active:
            self.buffers.forget()
        self.active = active
        self._switch(on=active)

    def _switch(self, *, on: bool) -> None:
        """Let PyTorch call us in the steps that are recorded, and in no other: what is not on costs nothing."""
        if threading.get_ident() != self._thread or on == self._on:
            return
        self._on, self._paused = on, False
        for replacement in self._entrances:
            replacement.install() if on else replacement.remove()
        for mode in self._modes:
            put_on(mode) if on else take_off(mode)

    def pause_functions(self) -> None:
        """Let an optimizer's functions pass by unseen, where they would be let through one by one."""
        if (
            self._on and self._modes and self.passes_optimizer and not self.threads.state.modules
            and threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1
        ):  # fmt: skip
            take_off(self.function_mode)
            self._paused = True

    def resume_functions(self) -> None:
        """See functions again."""
        if self._paused and threading.get_ident() == self._thread:
            put_on(self.function_mode)
            self._paused = False

    @property
    def replacements(self) -> list[Replacement]:
        """What stands, or may stand, in place of functions of PyTorch that Dynamo traces into."""
        return [*self._always, *self._entrances]

    # ---------------------------------------------------------------- who this process is
    def rank_and_world(self) -> tuple[int | None, int]:
        """Return this process's rank (None when nothing says so) and the world size."""
        return rank_and_world()

    def describe(self) -> dict[str, Any]:
        """Describe this process for its rank's manifest."""
        return describe_run(list(self.slots.devices))

    @property
    def pending(self) -> bool:
        """Whether an optimizer has stepped in a step that did not end yet."""
        return self.optimizers.pending

    # ---------------------------------------------------------------- what the modes call
    def sees(self) -> bool:
        """Tell whether what executes now is to be recorded; a graph that is being traced or exported is no computation."""
        return self.active and torch._C._get_tracing_state() is None and not torch.compiler._is_compiling_flag

    def site(self, state: ThreadState) -> int | None:
        """Return the number of the present call stack, walked up to the module that is running on this thread."""
        above = state.modules[-1].call.site if state.modules else None
        return self.recorder.sites.here(above, RUN_MODULE)

    def observing(self, state: ThreadState, what: str) -> Observing:
        """Return a block for our own work: nothing in it is a call, and its exceptions end the capture, not the training."""
        return Observing(state, self.failed, what)

    def function_mode_on(self) -> AbstractContextManager[Any]:
        """Return a context in which the function mode is on, if it belongs to this thread and was switched off.

        It belongs to the thread that began the capture and to those of autograd's own, which Python did not start.
        """
        ours = self.threads.state.observed or isinstance(threading.current_thread(), threading._DummyThread)
        belongs = self._modes and ours
        return self.function_mode if belongs and self.function_mode not in _get_current_function_mode_stack() else nullcontext()

    def records(self, level: str) -> bool:
        """Tell whether calls of a level are recorded."""
        return level in self._kinds

    def forces(self, level: str) -> bool:
        """Tell whether calls of a level get a baseline's inputs."""
        return self.forcing is not None and level in self.forcing.levels

    def notice_thread(self, state: ThreadState) -> None:
        """Note that modules run on a thread that is not observed otherwise."""
        if self._modes and not state.observed and torch._C._current_graph_task_id() == -1:
            state.observed = True
            name = threading.current_thread().name
            self.recorder.note(f"thread {name} runs modules; only its module calls are seen, not its api and aten calls")
